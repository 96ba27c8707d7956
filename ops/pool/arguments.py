"""Arguments of the pooling kernels."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments
from subgraph.ops.movement.window_arguments import WindowArguments


class PoolWindowArguments(WindowArguments):
    """Arguments of `window`; a work unit is a block of output rows of one block of channels.

    There are images * blocks * output depth * row blocks units.

    Attributes:
        x: First element of the images.
        y: First element of the results.
        count_include_pad: 1 if averages count the pixels of the padding, 0 if only those of the
            image.
        after_depth: Pixels of padding after the image along the depth.
        after_height: Along the height.
        after_width: Along the width.
        blocks: Blocks of channels of an image.
        rows: Output rows of a unit.
        x_image: Bytes from an image to the next one in x.
        y_image: Bytes from an image to the next one in y.
    """

    x: Address
    y: Address
    count_include_pad: int
    after_depth: int
    after_height: int
    after_width: int
    blocks: int
    rows: int
    x_image: int
    y_image: int


class PoolRowsArguments(PoolWindowArguments):
    """Arguments of `rows`; units are those of `window` for blocks of one channel.

    A worker's scratch has ``lines`` lines, each of ``stride * (columns + lanes)`` elements and
    those of a window beyond its first; then, for averages, the number of columns that each window
    counts and the factor of its sum.

    Attributes:
        scratch: Scratch of the first worker.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        columns: Output columns computed at a time.
        lines: Lines computed at a time.
    """

    scratch: Address
    scratch_bytes: int
    columns: int
    lines: int


class PoolBytesArguments(WindowArguments):
    """Arguments of MaxPool over bytes; a work unit is an output row of a block of channels.

    The scratch of a worker holds the pixels that the windows of a row span along the width,
    including those outside the image.

    Attributes:
        x: First byte of the images.
        y: First byte of the results.
        scratch: Scratch of the first worker.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        scratch_size: Bytes of a worker's scratch that are used, whole pixels.
    """

    x: Address
    y: Address
    scratch: Address
    scratch_bytes: int
    scratch_size: int


class PoolIndicesArguments(WindowArguments):
    """Arguments of `max_pool_indices`; a work unit is a channel of an image.

    Attributes:
        x: First element of the images, [images * channels, depth, height, width].
        y: First element of the maxima.
        indices: Where the indices of the maxima in the flat input are written, int64.
        index_depth: Difference of the indices of neighbours along the depth.
        index_height: Along the height.
        index_width: Along the width.
    """

    x: Address
    y: Address
    indices: Address
    index_depth: int
    index_height: int
    index_width: int


class GlobalPoolArguments(KernelArguments):
    """Arguments of `global_pool`; a work unit is one block of channels (one channel when plain).

    Attributes:
        x: First element of the images.
        y: First element of the results, one pixel for each image.
        pixels: Pixels of an image.
        blocks: Blocks of channels (channels when plain) of an image.
        x_image: Bytes from an image to the next one in x.
        y_image: Bytes from an image to the next one in y.
    """

    x: Address
    y: Address
    pixels: int
    blocks: int
    x_image: int
    y_image: int
