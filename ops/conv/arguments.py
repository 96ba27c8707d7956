"""Arguments of the convolution kernels."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments
from subgraph.ops.movement.window_arguments import WindowArguments

# Vectors of outputs that fit in the L1 cache until `windows` applies their activation (estimate).
WINDOW_OUTPUTS = 256


class ConvArguments(WindowArguments):
    """Operands of a convolution kernel, its sizes, and the kernels that compute a tile of outputs.

    Attributes:
        x: First element of the images.
        weights: First element of the packed weights.
        y: First element of the output images.
        bias: First element of the bias, padded to whole blocks where y has blocks; 0: none.
        residual: First element of an array shaped as y that is added to the sums; 0: none.
        x_image: Bytes between images of x.
        y_image: Bytes between images of y.
        residual_image: Bytes between images of the residual.
        tile: Kernel of a tile: a register tile, a strip or a row of windows.
        activation: Kernel of the activation, applied to finished outputs; 0: none.
        flags: ``F_*`` flags of the tile (``subgraph.engine.codegen.tiling``).
        low: Lower bound of the outputs, if the flags ask for it; or a parameter of ``activation``.
        high: Upper bound of the outputs, if the flags ask for it; or a parameter of ``activation``.
    """

    x: Address
    weights: Address
    y: Address
    bias: Address
    residual: Address
    x_image: int
    y_image: int
    residual_image: int
    tile: Address
    activation: Address
    flags: int
    low: float
    high: float


class StridedOutputArguments(ConvArguments):
    """Arguments of kernels whose outputs may be apart in y: phases of a transposed one.

    y and the residual have the same strides.

    Attributes:
        rows: Output rows of a unit.
        scratch: Scratch of the first worker; 0: x is read in place (no pads, whole blocks).
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        y_column: Pixels of y from an output to the next one along the width.
        y_row: Along the height.
        y_plane: Along the depth.
        y_block: Pixels of y between blocks of output channels.
        y_offset: Bytes from the start of an image of y to its first output.
    """

    rows: int
    scratch: Address
    scratch_bytes: int
    y_column: int
    y_row: int
    y_plane: int
    y_block: int
    y_offset: int


class DirectArguments(StridedOutputArguments):
    """Arguments of `direct`; a work unit is a block of output pixels and of panels.

    There are images * groups * output depth * row blocks * column blocks * panel blocks units.

    The sums run over segments of the input blocks. A segment is so short that the weights of a
    panel stay in the L1 cache while all pixels of a unit are computed; each later segment adds to
    the partial sums in y.

    Bands are three int64 for each panel: the first input block that it reads, the number of
    blocks, and the offset of its weights in bytes. Groups that are not whole blocks of channels run
    as one convolution over bands.

    With scratch, the part of x that a unit reads for a segment is copied there together with its
    padding. A worker needs for each block
    ``reach(depth) * reach(height) * reach(width)`` pixels, where
    ``reach = (outputs - 1) * stride + (kernel - 1) * dilation + 1`` over the outputs of a unit (one
    along the depth); if ``gathered``, the outputs of a unit times the taps. Blocked input with a
    dilation along the width needs a kernel of depth 1.

    Attributes:
        groups: Groups of channels.
        input_blocks: Input blocks of one group (channels when plain).
        output_blocks: Output blocks of one group.
        columns: Output columns of a unit.
        panels: Panels of a unit.
        over_pixels: Whether units run over pixels first (1) or over panels first (0).
        bands: The first band; 0: none.
        rest: Channels of the last input block that exist (0: all). With more than one tap that
            block is a segment of its own, and the kernel must have depth 1.
        segment: Input blocks of a segment.
        gathered: 1 if the scratch holds for each tap the pixels that it reads, 0 if it holds a box
            of pixels.
        strip: The strip (``subgraph.engine.codegen.strip``) that computes a row of outputs instead
            of tiles; 0: none. A kernel deeper than 1 needs a box and no dilation along the depth.
        joined: Most units of the same pixels that may run as one.
    """

    groups: int
    input_blocks: int
    output_blocks: int
    columns: int
    panels: int
    over_pixels: int
    bands: Address
    rest: int
    segment: int
    gathered: int
    strip: Address
    joined: int


class GenericArguments(ConvArguments):
    """Arguments of `generic`; a work unit is a run of output pixels of a group of an image.

    There are images * groups * ceil(output pixels / pixels of a unit) units. K runs over (channel,
    taps along depth, height, width); weights are [group][output channel][K]. A worker's scratch
    holds K rows of the pixels of a unit.

    Attributes:
        groups: Groups of channels.
        inputs: Input channels of one group.
        outputs: Output channels of one group.
        masked_tile: The contraction tile whose last vector is masked.
        pixels: Output pixels of a unit, whole vectors.
        scratch: Scratch of the first worker; 0: x is read in place.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
    """

    groups: int
    inputs: int
    outputs: int
    masked_tile: Address
    pixels: int
    scratch: Address
    scratch_bytes: int


class GatherArguments(WindowArguments):
    """Arguments of `gather`; a work unit is an input block of a slice of an image's output.

    Attributes:
        x: First element of the images, in blocks.
        y: First element of the result.
        blocks: Input blocks of an image.
        x_image: Bytes between images of x.
    """

    x: Address
    y: Address
    blocks: int
    x_image: int


class RepeatArguments(KernelArguments):
    """Arguments of `repeat`; a work unit is a block of channels of y that the kernel writes.

    Attributes:
        x: Images in blocks of channels.
        y: Images with each channel several times, in blocks of channels.
        x_blocks: Blocks of an image of x.
        y_blocks: Blocks of an image of y.
        pixels: Pixels of an image.
    """

    x: Address
    y: Address
    x_blocks: int
    y_blocks: int
    pixels: int


class DepthwiseArguments(StridedOutputArguments):
    """Arguments of `depthwise`; a work unit is a block of output rows of one block of channels.

    There are images * blocks * output depth * row blocks units. Weights are [block][taps along
    depth, height, width][lane]. A worker's scratch holds
    ``reach(depth) * reach(height) * reach(width)`` blocks (see `DirectArguments`).

    Attributes:
        blocks: Blocks of channels of an image.
    """

    blocks: int


class WindowRowsArguments(ConvArguments):
    """Arguments of `windows`; a work unit is a block of output rows of blocks of channels.

    The tile is a row of windows (``subgraph.engine.codegen.strip``). Images and kernels have depth
    1; there is no dilation along the width, and at most half a window lies outside the image there.
    Weights are [block][row of taps][channel of a group][column][lane].

    Attributes:
        group_channels: Channels of a group, as many in x as in y; it divides the lanes.
        blocks: Blocks of channels of an image.
        together: Blocks of a unit: 2 if x or y is of bfloat16, else 1.
        rows: Output rows of a unit.
        x_rounded: Whether x is of bfloat16, in blocks of twice as many channels.
        y_rounded: Whether y is.
        scratch: Memory of the first worker for results of float32 that are rounded behind their
            activation; 0: the tile writes to y.
        scratch_bytes: Bytes between the areas of workers.
    """

    group_channels: int
    blocks: int
    together: int
    rows: int
    x_rounded: int
    y_rounded: int
    scratch: Address
    scratch_bytes: int


class LaneSumArguments(ConvArguments):
    """Arguments of `lane_sums`; a work unit is a block of output rows, or a part of one row.

    The tile is a row of windows (``subgraph.engine.codegen.strip``). Each lane of its sums is that
    of some input channels. Weights are [output][plane of taps][block][row of taps][column][lane],
    the bias is [output][lane], in the first lane. y and the residual are plain.

    Attributes:
        outputs: Output channels.
        blocks: Blocks of input channels of an image.
        rows: Output rows of a unit.
        columns: Outputs of a row of a unit; fewer than those of an image only if ``rows`` is 1.
        x_rounded: Whether x is of bfloat16, in blocks of twice as many channels.
        scratch: Memory of the first worker for the sums of `WINDOW_OUTPUTS` outputs and of as many
            more as a vector has lanes.
        scratch_bytes: Bytes between the areas of workers.
    """

    outputs: int
    blocks: int
    rows: int
    columns: int
    x_rounded: int
    scratch: Address
    scratch_bytes: int


class WinogradArguments(ConvArguments):
    """Arguments of `winograd`; a work unit is a block of tiles and of output panels.

    Weights are [point][panel][input block][values of the point][lane][columns].

    There are ceil(images * tiles of an image / tiles of a unit) * panel blocks units, panels
    innermost; consecutive units of the same tiles transform their input once. The stages (few-row
    tiles only) have as units: input blocks of the sums; points * blocks of panels, panels
    innermost; output blocks.

    A tile has n x n inputs and as many transformed values (n = m + taps - 1, or 5 with stride 2) at
    ``n n`` points, or 9 with stride 2. A worker's scratch, aligned to 64 bytes, holds ``2 n n``
    vectors; then for each of ``tiles | 1`` tiles ``n n (input blocks + 1)`` vectors of values; then
    for each ``points (panels of a unit * nv + 1)`` vectors of sums. If ``in_place``, there are only
    the sums of one point, before the values.

    Attributes:
        images: Number of images.
        input_blocks: Input blocks of the sums: those of an image, times the depth of the kernel.
        output_blocks: Output blocks that are computed.
        tiles: Tiles of a unit.
        in_place: 1 if sums overwrite the values of earlier points, which halves the memory that
            must stay in the cache; needs at most as many output blocks as input blocks, and all
            panels in one unit. Else 0.
        panels: Panels of a unit.
        scratch: Scratch of the first worker.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        stage: 0: units do everything. Otherwise there is a single block of tiles with all panels,
            and units transform the input (1), multiply (2) or transform the sums (3).
        shared: Values and sums that the stages share; 0: none.
        stage_panels: Panels of a unit that multiplies.
        rest: Channels of the last input block that exist (stride 1; 0: all).
        segment: Input blocks of a segment of the sums (strips).
    """

    images: int
    input_blocks: int
    output_blocks: int
    tiles: int
    in_place: int
    panels: int
    scratch: Address
    scratch_bytes: int
    stage: int
    shared: Address
    stage_panels: int
    rest: int
    segment: int
