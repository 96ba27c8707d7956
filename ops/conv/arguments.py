"""Arguments of the convolution kernels."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments
from subgraph.ops.movement.window_arguments import WindowArguments


class ConvOperands(KernelArguments):
    """With what the arguments of convolutions begin.

    Attributes:
        x: First element of the images.
        weights: First element of the packed weights.
        y: First element of the output images.
        bias: First element of the bias, padded to whole blocks where y has blocks; 0: none.
        residual: First element of what is added, shaped as y; 0: none.
    """

    x: Address
    weights: Address
    y: Address
    bias: Address
    residual: Address


class ConvTile(WindowArguments):
    """Sizes of images and windows, with what computes the outputs.

    Attributes:
        tile: The tile: a register tile of sums, a strip or a row of windows.
        post: The kernel applied to finished outputs; 0: none.
        flags: ``F_*`` flags of the tile.
        low: Lower bound of the outputs, if the flags ask for it; or a parameter of ``post``.
        high: Upper bound of the outputs, if the flags ask for it; or a parameter of ``post``.
    """

    tile: Address
    post: Address
    flags: int
    low: float
    high: float


class DirectOperands(ConvOperands):
    """Operands of `direct`.

    Attributes:
        groups: Groups of channels.
        input_blocks: Input blocks of one group (channels when plain).
        output_blocks: Output blocks of one group.
    """

    groups: int
    input_blocks: int
    output_blocks: int


class DirectArguments(DirectOperands, ConvTile):
    """Arguments of `direct`; a work unit is a block of output pixels and of panels.

    There are images * groups * output depth * row blocks * column blocks * panel blocks units.

    The sums run over segments of the input blocks, so short that the weights of a panel stay in the
    first cache while all pixels of a unit pass; a later segment goes on from what y holds.

    Bands are three numbers for each panel: the first of the input blocks that it reads, their
    number, and where its weights begin, in bytes. That is how groups that are no whole blocks run,
    as one.

    y and the residual share their strides; those of whole images unless only some of the pixels are
    written (transposed convolution). With scratch, the part of x that a unit reads for a segment is
    copied there with its padding. A worker needs as many pixels for each block as
    ``reach(depth) * reach(height) * reach(width)``, where
    ``reach = (outputs - 1) * stride + (kernel - 1) * dilation + 1`` over the outputs of a unit (one
    along the depth), or as the outputs of a unit times the taps. Blocked input with a dilation
    along the width needs a kernel of depth 1.

    Attributes:
        rows: Output rows of a unit.
        columns: Output columns of a unit.
        panels: Panels of a unit.
        scratch: Scratch of the first worker; 0: x is read in place (no pads, whole blocks).
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        over_pixels: Whether units run over pixels first (1) or over panels first (0).
        x_image: Bytes between images of x.
        y_image: Bytes between images of y.
        residual_image: Bytes between images of the residual.
        y_column: Pixels of y from an output to the next one along the width.
        y_row: Along the height.
        y_plane: Along the depth.
        y_block: Pixels of y between blocks of output channels.
        y_offset: Bytes from the start of an image of y to its first output.
        bands: The first band; 0: none.
        rest: Channels of the last input block that count (0: all). That block is a segment of its
            own with more than one tap, which takes a kernel of depth 1.
        segment: Input blocks of a segment.
        gathered: Whether the scratch holds for each tap the pixels that it reads (1) or a box of
            pixels (0).
        strip: The strip (``subgraph.engine.codegen.strip``) that runs a row of outputs in place of
            tiles; 0: none. With a kernel of some depth only from a box, without dilation along it.
        joined: Units over panels that may run as one.
    """

    rows: int
    columns: int
    panels: int
    scratch: Address
    scratch_bytes: int
    over_pixels: int
    x_image: int
    y_image: int
    residual_image: int
    y_column: int
    y_row: int
    y_plane: int
    y_block: int
    y_offset: int
    bands: Address
    rest: int
    segment: int
    gathered: int
    strip: Address
    joined: int


class GenericOperands(ConvOperands):
    """Operands of `generic`; weights are [group][output channel][K].

    Attributes:
        groups: Groups of channels.
        inputs: Input channels of one group.
        outputs: Output channels of one group.
    """

    groups: int
    inputs: int
    outputs: int


class GenericArguments(GenericOperands, ConvTile):
    """Arguments of `generic`; a work unit is a run of output pixels of a group of an image.

    There are images * groups * ceil(output pixels / pixels of a unit) units. K runs over (channel,
    taps along depth, height, width). A worker's scratch holds K rows of the pixels of a unit.

    Attributes:
        masked_tile: The contraction tile whose last vector is masked.
        pixels: Output pixels of a unit, whole vectors.
        scratch: Scratch of the first worker; 0: x is read in place.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        x_image: Bytes between images of x.
        y_image: Bytes between images of y.
        residual_image: Bytes between images of the residual.
    """

    masked_tile: Address
    pixels: int
    scratch: Address
    scratch_bytes: int
    x_image: int
    y_image: int
    residual_image: int


class GatherOperands(KernelArguments):
    """Operands of `gather`.

    Attributes:
        x: First element of the images, in blocks.
        y: First element of what is written.
        blocks: Input blocks of an image.
    """

    x: Address
    y: Address
    blocks: int


class GatherArguments(GatherOperands, WindowArguments):
    """Arguments of `gather`; a work unit is an input block of a slice of an image's output.

    Attributes:
        x_image: Bytes between images of x.
    """

    x_image: int


class DepthwiseOperands(ConvOperands):
    """Operands of `depthwise`; weights are [block][taps along depth, height, width][lane].

    Attributes:
        blocks: Blocks of channels of an image.
    """

    blocks: int


class DepthwiseArguments(DepthwiseOperands, ConvTile):
    """Arguments of `depthwise`; a work unit is a block of output rows of one block of channels.

    There are images * blocks * output depth * row blocks units. A worker's scratch holds
    ``reach(depth) * reach(height) * reach(width)`` blocks (see `DirectArguments`).

    Attributes:
        rows: Output rows of a unit.
        scratch: Scratch of the first worker; 0: x is read in place (no pads).
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        x_image: Bytes between images of x.
        y_image: Bytes between images of y.
        residual_image: Bytes between images of the residual.
        y_column: Pixels of y from an output to the next one along the width.
        y_row: Along the height.
        y_plane: Along the depth.
        y_block: Pixels of y between blocks of channels.
        y_offset: Bytes from the start of an image of y to its first output.
    """

    rows: int
    scratch: Address
    scratch_bytes: int
    x_image: int
    y_image: int
    residual_image: int
    y_column: int
    y_row: int
    y_plane: int
    y_block: int
    y_offset: int


class WindowRowsOperands(ConvOperands):
    """Operands of `windows`; weights are [block][row of taps][channel of a group][column][lane].

    Attributes:
        group_channels: Channels of a group, as many in x as in y; it divides the lanes.
        blocks: Blocks of channels of an image.
    """

    group_channels: int
    blocks: int


class WindowRowsArguments(WindowRowsOperands, ConvTile):
    """Arguments of `windows`; a work unit is a block of output rows of one block of channels.

    The tile is a row of windows (``subgraph.engine.codegen.strip``). Images and kernels have depth
    1; there is no dilation along the width, and at most half a window lies outside the image there.

    Attributes:
        rows: Output rows of a unit.
        x_image: Bytes between images of x.
        y_image: Bytes between images of y.
        residual_image: Bytes between images of the residual.
    """

    rows: int
    x_image: int
    y_image: int
    residual_image: int


class WinogradOperands(ConvOperands):
    """Operands of `winograd`.

    Weights are [point][panel][input block][values of the point][lane][columns].

    Attributes:
        images: Number of images.
        input_blocks: Input blocks of the sums: those of an image, times the depth of the kernel.
        output_blocks: Output blocks that are computed.
    """

    images: int
    input_blocks: int
    output_blocks: int


class WinogradArguments(WinogradOperands, ConvTile):
    """Arguments of `winograd`; a work unit is a block of tiles and of output panels.

    There are ceil(images * tiles of an image / tiles of a unit) * panel blocks units, panels
    innermost; units of one block of tiles that run in one call transform it once. Of the stages
    (low tiles): input blocks of the sums; points * blocks of panels, panels innermost; output
    blocks.

    A tile has n x n inputs and as many values (n = m + taps - 1, or 5 with stride 2) at ``n n``, or
    9, points. A worker's scratch, aligned to 64 bytes, holds ``2 n n`` vectors, then for each of
    ``tiles | 1`` tiles ``n n (input blocks + 1)`` vectors, then ``points (panels of a unit * nv +
    1)``; if ``over``, only one point of the latter, before the values.

    Attributes:
        tiles: Tiles of a unit.
        over: Whether sums lie where the values of earlier points were (0 or 1), so that half as
            much must stay in the cache: no more blocks out than in, all panels in one unit.
        panels: Panels of a unit.
        scratch: Scratch of the first worker.
        scratch_bytes: Bytes from a worker's scratch to the next one's.
        stage: What units do: all (0), or one stage of a single block of tiles, of which all panels
            are one unit's: transform the input (1), multiply (2), transform the sums (3).
        x_image: Bytes between images of x.
        y_image: Bytes between images of y.
        residual_image: Bytes between images of the residual.
        shared: Values and sums that the stages share; 0: none.
        stage_panels: Panels of a unit that multiplies.
        rest: Channels of the last input block that count (stride 1; 0: all).
        weights_apart: Bytes between the weights of points, beyond the weights (stride 1).
        blocks_before: Output blocks of y, of the residual and of the bias that come before those
            computed.
        segment: Steps of a segment of the sums (strips), in blocks.
    """

    tiles: int
    over: int
    panels: int
    scratch: Address
    scratch_bytes: int
    stage: int
    x_image: int
    y_image: int
    residual_image: int
    shared: Address
    stage_panels: int
    rest: int
    weights_apart: int
    blocks_before: int
    segment: int
