"""Direct convolution over matrix tiles on the CPU device: the two steps and their tiling."""

from __future__ import annotations

import math
from typing import Any

import attrs

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.codegen.tiling import (
    F_BFLOAT16_C,
    F_BFLOAT16_RESIDUAL,
    MATRIX_DEPTH,
    MATRIX_ROW_BYTES,
    MATRIX_ROWS,
    MATRIX_TILE,
)
from subgraph.engine.planner.lowering import Argument, Lowering, Operand, Scratch
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger, smaller
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.movement.packed_conv import PackedConv
from subgraph.ops.shared.tile_planning import Tiles, grain, shared
from subgraph.system.host import caches

from .arguments import ImageConvArguments, LineArguments, MatrixConvArguments

_ROWS = MATRIX_TILE[0]
_LINE = MATRIX_ROW_BYTES  # bytes of a block's channels of a pixel
_REGISTER = MATRIX_ROWS * _LINE  # bytes of a register
_COPY_CYCLES = 4  # cycles in which a pixel of a block is copied (estimate)
# Cycles of the products of one register of A with those of a panel (hardware figure).
_PRODUCT_CYCLES = 2 * MATRIX_ROWS
_UNITS_PER_THREAD = 4  # work units for each of several threads, which balance their ends (estimate)


@attrs.frozen
class _Input:
    """The input of a convolution in bfloat16: registers of pixels, or rows of an image.

    Attributes:
        lines: Its memory.
        blocks: Blocks of 32 elements that each tap multiplies.
        taps: Rows of taps, and taps of a row.
        rows: Rows of outputs, or runs of them that are computed at a time.
        columns: Outputs of a row.
        strides: The fields ``x_*`` of `MatrixConvArguments`.
    """

    lines: Argument
    blocks: int
    taps: tuple[int, int]
    rows: int
    columns: int
    strides: dict[str, int]


def emit_matrix_convolution(low: Lowering, conv: PackedConv, *, plain: bool, flops: int) -> None:
    """Emit a convolution whose operands are rounded to bfloat16.

    Args:
        low: Collects the plan's steps and scratch memory.
        conv: The convolution over matrix tiles, its input in the layout "blocked" or "bfloat16"
            unless ``plain``, its weights registers of pairs of bfloat16, as `direct_weights` packs
            them. Channels of several groups are whole blocks. Without a residual, outputs may be
            rows and columns of a larger image.
        plain: The input is in the plain layout; see `reads_patches`.
        flops: Operations to report.
    """
    of, g, x, y, residual = conv.of, conv.g, conv.x, conv.out.y, conv.out.residual
    if plain:
        source = _patches(g, x)
    elif _is_rounded(x) and g.taps == 1 and g.source == g.target and not any(g.pads):
        source = _whole_image(x, g)
    elif _gathers(of, g):
        source = _emit_registers(low, of, g, x)
    else:
        source = _emit_rows(low, of, g, x)
    output_blocks = -(-g.outputs // of.lanes)
    panels = -(-output_blocks // of.nv)
    unit_rows, unit_panels = _units(low.threads, of, g, source, panels)
    if plain:
        unit_panels = panels  # a unit makes its patches once
    activation = conv.act.arguments()
    # Activations read and write tiles of float32, which are rounded afterwards; outputs that are
    # not adjacent are stored one by one.
    is_apart = (_is_rounded(y) and conv.act.kernel != 0) or not conv.out.whole
    activation["flags"] |= F_BFLOAT16_C if _is_rounded(y) and not is_apart else 0
    activation["flags"] |= F_BFLOAT16_RESIDUAL if _is_rounded(residual) else 0
    strides = conv.out.strides(g.target, _LINE)
    y_block = strides["y_block"] * of.lanes * (2 if _is_rounded(y) else of.item)
    common: dict[str, Any] = dict(
        x=source.lines,
        weights=conv.weight,
        y=y,
        bias=conv.bias,
        residual=residual,
        groups=g.groups,
        blocks=source.blocks,
        output_blocks=output_blocks,
        taps_height=source.taps[0],
        taps_width=source.taps[1],
        outputs=g.pixels,
        rows=source.rows,
        columns=source.columns,
        **source.strides,
        y_block=y_block,
        y_offset=strides["y_offset"],
        y_row=strides["y_row"] * _LINE,
        y_column=strides["y_column"] * _LINE,
        y_columns=g.target[2],
        y_rounded=int(_is_rounded(y)),
        residual_block=g.pixels * of.lanes * (2 if _is_rounded(residual) else of.item),
        tile=of.contraction(),
        **activation,
        unit_rows=unit_rows,
        unit_panels=unit_panels,
        **low.worker_scratch(MATRIX_TILE[0] * of.width * of.item if is_apart else None),
    )
    arguments: KernelArguments
    if plain:
        arguments = ImageConvArguments(**common, **_image(low, g, source.blocks))
    else:
        arguments = MatrixConvArguments(**common)
    units = g.images * g.groups * -(-source.rows // unit_rows) * -(-panels // unit_panels)
    read = x.nbytes if isinstance(x, Operand) else g.images * g.groups * source.strides["x_group"]
    written = g.images * g.groups * output_blocks * y_block
    low.emit(
        Kernel("subgraph.ops.conv.bfloat16.kernels", "convolve", image=plain),
        arguments,
        units,
        grain=grain(units, flops),
        flops=flops,
        bytes=read + written,
    )


def _is_rounded(operand: Argument) -> bool:
    return isinstance(operand, Operand) and operand.layout == "bfloat16"


def reads_patches(g: Geometry) -> bool:
    """Return whether a convolution of few channels can read them as patches of a plain image."""
    flat = g.source[0] == g.target[0] == g.kernel[0] == 1 and g.pads[0] == 0
    return flat and g.groups == 1 and g.dilations[2] == 1 and g.kernel[2] <= MATRIX_ROWS


def _gathers(of: Tiles, g: Geometry) -> bool:
    """Return whether each tap has its own copy of the pixels that outputs read.

    Then all outputs of an image are one row, of which the tiles are full; otherwise the rows of
    the image are copied once, with their padding.
    """
    if g.taps == 1 or not g.source[0] == g.target[0] == g.kernel[0] == 1:
        return True
    panels = -(-g.outputs // of.width)
    in_rows = g.target[1] * -(-g.target[2] // MATRIX_ROWS)
    saved = (in_rows - -(-g.pixels // MATRIX_ROWS)) * g.taps * panels * _PRODUCT_CYCLES
    copied = g.pixels * g.taps - g.reach(1, g.target[1]) * g.reach(2, g.target[2])
    return saved > copied * _COPY_CYCLES


def _patches(g: Geometry, x: Argument) -> _Input:
    """Return the patches that each row of outputs makes of a plain image of few channels."""
    steps = -(-g.inputs * g.taps // MATRIX_DEPTH)
    strides = {
        "x_group": 0,
        "x_block": _REGISTER,
        "x_tap_row": 0,
        "x_tap": 0,
        "x_row": 0,
        "x_column": _LINE,
        "x_register": steps * _REGISTER,
    }
    return _Input(x, steps, (1, 1), g.target[1], g.target[2], strides)


def _image(low: Lowering, g: Geometry, steps: int) -> dict[str, Any]:
    """Return the fields that `ImageConvArguments` has beside those of `MatrixConvArguments`."""
    # Windows are read in whole vectors.
    columns = g.reach(2, g.target[2]) + MATRIX_ROWS
    size = -(-g.target[2] // MATRIX_ROWS) * steps * _REGISTER
    size += MATRIX_ROWS * (steps + 1) * _LINE + g.inputs * g.kernel[1] * columns * 2 + _LINE
    patches = low.scratch(size, per_worker=True)
    return {
        "channels": g.inputs,
        "height": g.source[1],
        "width": g.source[2],
        "taps_of_column": g.kernel[1],
        "taps_of_row": g.kernel[2],
        "tap_rows": g.dilations[1],
        "row_step": g.strides[1],
        "column_step": g.strides[2],
        "pad_height": g.pads[1],
        "pad_width": g.pads[2],
        "patches": patches,
        "patches_bytes": patches.nbytes,
        "line_columns": columns,
    }


def round_image(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> Argument:
    """Return an input in the layout "bfloat16", in scratch memory if it is not in it yet.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The matrix tiles.
        g: Sizes of the convolution, of two dimensions; groups are whole blocks of 32 channels.
        x: The input, in the layout "blocked" or "bfloat16".
    """
    if _is_rounded(x):
        return x
    whole = attrs.evolve(g, target=g.source, kernel=(1, 1, 1), strides=(1, 1, 1), pads=(0, 0, 0))
    shape = (g.images, g.groups * g.inputs, *g.source)
    target = Operand("rounded", "float32", shape, "bfloat16", lanes=MATRIX_DEPTH)
    # The rows of an image without padding are in the order of the layout.
    rows = _emit_rows(low, of, whole, x).lines
    assert isinstance(rows, Scratch)
    target.storage = rows.storage
    return target


def _registers(target: Argument, g: Geometry, taps: int, blocks: int) -> _Input:
    """Return an input of registers, for each 16 outputs all blocks and taps."""
    strides = {
        "x_group": -(-g.pixels // MATRIX_ROWS) * blocks * taps * _REGISTER,
        "x_block": taps * _REGISTER,
        "x_tap_row": 0,
        "x_tap": _REGISTER,
        "x_row": 2 * blocks * taps * _REGISTER,
        "x_column": _LINE,
        "x_register": blocks * taps * _REGISTER,
    }
    return _Input(target, blocks, (1, taps), -(-g.pixels // _ROWS), _ROWS, strides)


def _whole_image(x: Argument, g: Geometry) -> _Input:
    """Return the input of a convolution of one tap that reads each pixel of x, where it is."""
    blocks = -(-g.inputs // MATRIX_DEPTH)
    strides = {
        "x_group": blocks * g.pixels * _LINE,
        "x_block": g.pixels * _LINE,
        "x_tap_row": 0,
        "x_tap": 0,
        "x_row": _ROWS * _LINE,
        "x_column": _LINE,
        "x_register": _REGISTER,
    }
    return _Input(x, blocks, (1, 1), -(-g.pixels // _ROWS), _ROWS, strides)


def _emit_registers(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> _Input:
    """Emit the step that copies, for each tap, the pixels that outputs read."""
    blocks = -(-g.inputs // MATRIX_DEPTH)
    group = -(-g.pixels // MATRIX_ROWS) * blocks * g.taps * _REGISTER
    target = low.scratch(g.images * g.groups * group)
    found = _registers(target, g, g.taps, blocks)
    arguments = LineArguments(
        x=x,
        y=target,
        **_sizes(of, g, x),
        planes=g.target[0],
        rows=g.target[1],
        columns=g.target[2],
        taps_height=g.kernel[1],
        taps_width=g.kernel[2],
        tap_planes=g.dilations[0],
        tap_rows=g.dilations[1],
        tap_columns=g.dilations[2],
        plane_step=g.strides[0],
        row_step=g.strides[1],
        column_step=g.strides[2],
        lines=g.taps * g.target[0] * g.target[1],
        y_group=found.strides["x_group"],
        y_block=found.strides["x_block"],
        y_tap=_REGISTER,
        y_register=found.strides["x_register"],
    )
    _emit_lines(low, g, x, arguments)
    return found


def _emit_rows(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> _Input:
    """Emit the step that copies the rows of an image, with their padding."""
    blocks = -(-g.inputs // MATRIX_DEPTH)
    rows, columns = g.reach(1, g.target[1]), g.reach(2, g.target[2])
    row = columns * _LINE
    group = blocks * rows * row
    # The tile of the last outputs of a row reads whole registers.
    target = low.scratch(g.images * g.groups * group + _ROWS * g.strides[2] * _LINE)
    arguments = LineArguments(
        x=x,
        y=target,
        **_sizes(of, g, x),
        planes=1,
        rows=rows,
        columns=columns,
        taps_height=1,
        taps_width=1,
        tap_planes=0,
        tap_rows=0,
        tap_columns=0,
        plane_step=1,
        row_step=1,
        column_step=1,
        lines=rows,
        y_group=group,
        y_block=rows * row,
        y_tap=0,
        y_register=_REGISTER,
    )
    _emit_lines(low, g, x, arguments)
    strides = {
        "x_group": group,
        "x_block": rows * row,
        "x_tap_row": g.dilations[1] * row,
        "x_tap": g.dilations[2] * _LINE,
        "x_row": g.strides[1] * row,
        "x_column": g.strides[2] * _LINE,
        "x_register": g.strides[2] * _REGISTER,
    }
    return _Input(target, blocks, (g.kernel[1], g.kernel[2]), g.target[1], g.target[2], strides)


def _sizes(of: Tiles, g: Geometry, x: Argument) -> dict[str, int]:
    """Return the fields of `LineArguments` that describe the images."""
    return {
        "groups": g.groups,
        "blocks": -(-g.inputs // (MATRIX_DEPTH if _is_rounded(x) else of.lanes)),
        "depth": g.source[0],
        "height": g.source[1],
        "width": g.source[2],
        "first_plane": -g.pads[0],
        "first_row": -g.pads[1],
        "first_column": -g.pads[2],
    }


def _emit_lines(low: Lowering, g: Geometry, x: Argument, arguments: LineArguments) -> None:
    """Emit the kernel `lines`."""
    rounded = _is_rounded(x)
    lines = g.images * g.groups * -(-g.inputs // MATRIX_DEPTH) * arguments.lines
    pixels = lines * arguments.columns
    low.emit(
        Kernel("subgraph.ops.conv.bfloat16.kernels", "lines", rounded=rounded),
        arguments,
        lines,
        grain=grain(lines, pixels * MATRIX_DEPTH),
        bytes=(2 if rounded else 3) * pixels * _LINE,
    )


def _units(threads: int, of: Tiles, g: Geometry, source: _Input, panels: int) -> tuple[int, int]:
    """Return the rows and the panels of a unit."""
    # The weights of a unit's panels stay in half of the L2 cache while all its pixels are computed.
    panel = source.blocks * math.prod(source.taps) * of.nv * _REGISTER
    unit_panels = smaller(panels, larger(1, caches().l2 // 2 // panel))
    rows, images = source.rows, g.images * g.groups
    if threads == 1:
        return rows, unit_panels
    wanted = _UNITS_PER_THREAD * threads
    unit_rows = shared(rows, rows, images * -(-panels // unit_panels), wanted, 1, 1)
    others = images * -(-rows // unit_rows)
    return unit_rows, shared(unit_panels, panels, others, wanted, 1, 1)
