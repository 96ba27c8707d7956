"""Arguments of the kernels of integer products and quantized convolutions.

A quad is four adjacent bytes of K, a step of the dot-product instruction; a double step is eight.
"""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments
from subgraph.ops.movement.window_arguments import WindowArguments


class PanelsArguments(KernelArguments):
    """Arguments of `panels`; a work unit is a panel of a matrix.

    Attributes:
        x: Matrices of bytes, ``[matrix][depth][row_size]``.
        y: Their panels of signed bytes, ``[matrix][panel][depth / 4][columns of the panel][4]``.
        sums: Sums of the columns of y, int32, ``[matrix][columns]``.
        excess: Zero points of the columns less that of int8 weights, int32, ``[matrix][columns]``.
        depth: Rows of a matrix.
        row_size: Columns of a matrix.
        columns: Columns of the panels of a matrix: `row_size` rounded up to 16.
        quads: Fours of rows of y; those after `depth` are zero.
        zeros: Zero points, bytes.
        zero_step: Bytes between the zero points of columns; 0: there is one for all.
    """

    x: Address
    y: Address
    sums: Address
    excess: Address
    depth: int
    row_size: int
    columns: int
    quads: int
    zeros: Address
    zero_step: int


class _QuantizedArguments(WindowArguments):
    """Arguments of the quantized convolutions and products.

    Attributes:
        x: The input, bytes.
        weights: The packed weights.
        y: The result.
        bias: First value of the sums, int32, one for each column.
        scale: Factor of the sums, float32, one for each column.
        shift: Added to scaled sums, float32, one for each column; 0: nothing.
        blocks: Blocks of input channels of a group, of `depthwise` those of an image.
        low: Lower bound of the result less its zero point.
        high: Upper bound of the result less its zero point.
        y_zero: Zero point of the result.
        x_zero: Zero point of the input, one byte.
        unit_rows: Output rows of a unit.
        scratch: The area of the first worker.
        scratch_bytes: Bytes between the areas of workers.
    """

    x: Address
    weights: Address
    y: Address
    bias: Address
    scale: Address
    shift: Address
    blocks: int
    low: float
    high: float
    y_zero: int
    x_zero: Address
    unit_rows: int
    scratch: Address
    scratch_bytes: int


class QuantizedProductArguments(_QuantizedArguments):
    """Arguments of the quantized `product`; a work unit is a block of the output.

    Units run over blocks of panels innermost, then blocks of columns, of rows, planes of the depth,
    groups, images. A patch is the input of a unit, copied to scratch memory (`patches`); without
    scratch memory the input is read in place (unsigned bytes, blocks or rows of whole double steps,
    one tap, stride 1, no padding).

    Attributes:
        groups: Groups of channels.
        tile: The integer tile.
        unit_columns: Output columns of a unit.
        unit_panels: Panels of a unit.
        columns: Outputs of a group, rounded up to 16.
        x_image: Bytes between images of x.
        y_image: Bytes between images of y.
        y_group: Bytes between groups of an image of y.
        inner: Double steps of the inner loop.
        last_inner: Double steps of the inner loop in the last input block.
        y_pixel: Bytes between pixels of y.
        y_block: Bytes between blocks of 16 outputs.
        stored: Outputs of a group that are stored; fewer than `columns` only for rows.
        channels: Channels of an image, or elements of a row.
        pixel: Bytes of a pixel in the patch.
        x_blocks: Blocks of 16 channels of a group of x.
        width_merged: 1 if the inner loop runs over the width of the kernel too, else 0.
        weight_sums: Sums of the weights of each column, int32, from which the kernel computes the
            share of the zero point of x; 0: the bias includes it, or there is none.
        excess: Zero points of the columns of weights less the one that packing subtracts, int32;
            0: all are 0. Only for rows.
        row_sums_at: Bytes of scratch before the sums of rows less their zero point, for `excess`.
        weights_image: Bytes between the weights of images, each of which has its own
            `weight_sums` and `excess`; 0: all have the same.
        quads_tile: Guarded: the tile of quads, for panels with more than ``most_faults`` faults.
        bounds: Guarded: ``[group][panel][tap][input block][pair of channels]``, rows padded to 16
            bytes; see `saturation_kernels`.
        largest_at: Guarded: bytes of scratch before the largest bytes of a patch.
        faults_at: Guarded: bytes of scratch before the list of faults.
        most_faults: Guarded: faults that are corrected in a panel.
        residual: Bytes that are added to the result, in its layout; 0: none. The fields from here
            on are those of `IntegerTileBlock`.
    """

    groups: int
    tile: Address
    unit_columns: int
    unit_panels: int
    columns: int
    x_image: int
    y_image: int
    y_group: int
    inner: int
    last_inner: int
    y_pixel: int
    y_block: int
    stored: int
    channels: int
    pixel: int
    x_blocks: int
    width_merged: int
    weight_sums: Address
    excess: Address
    row_sums_at: int
    weights_image: int
    quads_tile: Address
    bounds: Address
    largest_at: int
    faults_at: int
    most_faults: int
    residual: Address
    residual_scales: Address
    residual_zero: int
    sum_low: float
    sum_high: float
    sum_zero: int


class QuantizedDepthwiseArguments(_QuantizedArguments):
    """Arguments of the quantized `depthwise`; a work unit is rows of a block of channels.

    A step is a pair of taps, whose weights are int16, or a quad, whose weights are int8: weights
    are ``[block][step][16][taps of a step]``; bias, scale and shift have 16 elements for each
    block. Units run over blocks of rows innermost, then blocks of channels, then images. The area
    of a worker has a 64-bit offset for each tap of pairs, or for each quad, then a patch.

    Attributes:
        steps: Pairs or quads of taps.
    """

    steps: int
