"""Arguments of the pooling kernels."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments
from subgraph.ops.movement.window_arguments import WindowArguments


class PoolOperands(KernelArguments):
    """The first arguments of all kernels that pool windows of floats.

    Attributes:
        x: First element of the images.
        y: First element of the results.
        count_include_pad: 1 if averages count the pixels of the padding, 0 if only those of the
            image.
    """

    x: Address
    y: Address
    count_include_pad: int


class PoolSizes(WindowArguments):
    """Sizes of images and windows, with the padding that averages may count.

    Attributes:
        after_depth: Pixels of padding after the image along the depth.
        after_height: Along the height.
        after_width: Along the width.
    """

    after_depth: int
    after_height: int
    after_width: int


class PoolBlocks(PoolOperands):
    """Operands of `window`, whose channels are in blocks.

    Attributes:
        blocks: Blocks of channels of an image.
    """

    blocks: int


class PoolWindowArguments(PoolBlocks, PoolSizes):
    """Arguments of `window`; a work unit is a block of output rows of one block of channels.

    There are images * blocks * output depth * row blocks units.

    Attributes:
        rows: Output rows of a unit.
        x_image: Bytes from an image to the next one in x.
        y_image: Bytes from an image to the next one in y.
    """

    rows: int
    x_image: int
    y_image: int


class PoolLines(PoolOperands):
    """Operands of `rows`, with its scratch.

    A worker's scratch has ``lines`` lines, each of ``stride * (columns + lanes)`` elements and
    those of a window beyond its first; then, for averages, the number of columns that each window
    counts and the factor of its sum.

    Attributes:
        scratch: Scratch of the first worker.
        scratch_step: Bytes from a worker's scratch to the next one's.
        columns: Output columns computed at a time.
        blocks: Channels of an image.
        lines: Lines computed at a time.
    """

    scratch: Address
    scratch_step: int
    columns: int
    blocks: int
    lines: int


class PoolRowsArguments(PoolLines, PoolSizes):
    """Arguments of `rows`; units are those of `window` for blocks of one channel.

    Attributes:
        rows: Output rows of a unit.
        x_image: Bytes from an image to the next one in x.
        y_image: Bytes from an image to the next one in y.
    """

    rows: int
    x_image: int
    y_image: int


class PoolInt8Operands(KernelArguments):
    """Operands of MaxPool over bytes.

    Attributes:
        x: First byte of the images.
        y: First byte of the results.
    """

    x: Address
    y: Address


class PoolInt8Arguments(PoolInt8Operands, WindowArguments):
    """Arguments of MaxPool over bytes; a work unit is an output row of a plane.

    A plane is a channel of an image, or a block of channels. The scratch of a worker holds the
    pixels that the windows of a row span along the width, including those outside the image.

    Attributes:
        scratch: Scratch of the first worker.
        scratch_step: Bytes from a worker's scratch to the next one's.
        scratch_size: Bytes of a worker's scratch that are used, whole vectors.
    """

    scratch: Address
    scratch_step: int
    scratch_size: int


class PoolIndicesOperands(KernelArguments):
    """Operands of `max_pool_indices`.

    Attributes:
        x: First element of the images, [images * channels, depth, height, width].
        y: First element of the maxima.
        indices: Where the indices of the maxima in the flat input are written, int64; 0: nowhere.
    """

    x: Address
    y: Address
    indices: Address


class PoolIndicesArguments(PoolIndicesOperands, WindowArguments):
    """Arguments of `max_pool_indices`; a work unit is a channel of an image.

    Attributes:
        index_depth: Difference of the indices of neighbours along the depth.
        index_height: Along the height.
        index_width: Along the width.
    """

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
