"""Direct convolution over matrix tiles on the CPU device: the two steps and their tiling."""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import (
    F_BFLOAT16_C,
    F_BFLOAT16_RESIDUAL,
    MATRIX_DEPTH,
    MATRIX_ROW_BYTES,
    MATRIX_ROWS,
    MATRIX_TILE,
)
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Argument, Operand, Scratch
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger, smaller
from subgraph.graph.types import Array
from subgraph.ops.movement.geometry import Geometry, direct_weights
from subgraph.ops.movement.packed_conv import PackedConv, is_rounded
from subgraph.ops.shared.tile_planning import Tiles, grain, round_up, shared, units_wanted
from subgraph.system.host import caches, has_bfloat16_tiles

from .arguments import LineArguments, MatrixConvArguments
from .image import MatrixInput, emit_image_lines

_ROWS = MATRIX_TILE[0]
_LINE = MATRIX_ROW_BYTES  # bytes of a block's channels of a pixel
_REGISTER = MATRIX_ROWS * _LINE  # bytes of a register
_COPY_CYCLES = 4  # cycles in which a pixel of a block is copied (estimate)
# Cycles of the products of one register of A with those of a panel (hardware figure).
_PRODUCT_CYCLES = 2 * MATRIX_ROWS
# Tiles of a panel up to which they prefetch the weights of the next one; more of them hide the time
# in which weights arrive from memory (measured: convolutions of 7 x 7 and 14 x 14 pixels).
_MAX_PREFETCHING_TILES = 16


def emit_matrix_convolution(low: Lowering, conv: PackedConv, *, plain: bool, flops: int) -> None:
    """Emit a convolution whose operands are rounded to bfloat16.

    Args:
        low: Collects the plan's steps and scratch memory.
        conv: The convolution over matrix tiles, its input in the layout "blocked" or "bfloat16"
            unless ``plain``, its weights registers of pairs of bfloat16, as `direct_weights` packs
            them, or `volume_weights` if windows have a depth and no tap has its own copy of the
            pixels. Channels of several groups are whole blocks. Without a residual, outputs may be
            rows and columns of a larger image.
        plain: The input is in the plain layout; see `reads_image_lines`.
        flops: Operations to report.
    """
    of, g, x, y, residual = conv.of, conv.g, conv.x, conv.out.y, conv.out.residual
    together = 1 if plain else groups_of_line(g)
    lines = attrs.evolve(g, groups=g.groups // together, inputs=g.inputs * together)
    if plain:
        source = emit_image_lines(low, g, x)
    elif is_rounded(x) and g.reads_each_pixel:
        source = _whole_image(x, lines)
    elif gathers(of, g):
        source = _emit_registers(low, of, lines, x)
    else:
        source = _emit_rows(low, of, lines, x)
    output_blocks = -(-g.outputs // of.lanes)
    panels = -(-output_blocks // of.nv)
    unit_rows, unit_panels, ahead_lines = _units(low.threads, of, g, source, panels)
    # Activations read tiles of float32. Outputs that are not adjacent are stored one by one.
    activation_stores = is_rounded(y) and conv.act.kernel != 0 and conv.out.whole
    is_apart = activation_stores or not conv.out.whole
    activation = conv.act.arguments(rounds=activation_stores)
    activation["flags"] |= F_BFLOAT16_C if is_rounded(y) and not is_apart else 0
    activation["flags"] |= F_BFLOAT16_RESIDUAL if is_rounded(residual) else 0
    strides = conv.out.strides(g.target, _LINE)
    y_block, y_image = _block_and_image(strides["y_block"], g.groups * output_blocks, y)
    residual_block, residual_image = _block_and_image(g.pixels, g.groups * output_blocks, residual)
    arguments = MatrixConvArguments(
        x=source.lines,
        weights=conv.weight,
        y=y,
        bias=conv.bias,
        residual=residual,
        groups=g.groups,
        groups_of_line=together,
        planes=source.planes,
        blocks=source.blocks,
        depth=source.depth // together,
        last_depth=0 if plain else round_up(g.inputs % MATRIX_DEPTH, 2),
        output_blocks=output_blocks,
        taps_height=source.taps[0],
        taps_width=source.taps[1],
        height=g.source[1],
        first_row=-g.pads[1],
        row_step=g.strides[1],
        tap_rows=g.dilations[1],
        outputs=g.pixels // source.planes,
        rows=source.rows,
        columns=source.columns,
        gap=source.gap,
        **source.strides,
        y_image=y_image,
        y_block=y_block,
        y_offset=strides["y_offset"],
        y_plane=strides["y_plane"] * _LINE,
        y_row=strides["y_row"] * _LINE,
        y_column=strides["y_column"] * _LINE,
        y_columns=g.target[2],
        y_rounded=int(is_rounded(y)),
        residual_image=residual_image,
        residual_block=residual_block,
        residual_plane=strides["y_plane"] * _LINE,
        tile=of.contraction(runs=source.gap >= 0 and not has_bfloat16_tiles()),
        **activation,
        activation_stores=int(activation_stores),
        unit_rows=unit_rows,
        unit_panels=unit_panels,
        ahead_lines=ahead_lines,
        **low.worker_scratch(MATRIX_TILE[0] * of.width * of.item if is_apart else None),
    )
    units = g.images * g.groups * source.planes
    units *= -(-source.rows // unit_rows) * -(-panels // unit_panels)
    read = (
        x.nbytes
        if isinstance(x, Operand)
        else lines.images * lines.groups * source.strides["x_group"]
    )
    written = g.images * y_image
    low.emit(
        Kernel("subgraph.ops.conv.bfloat16.kernels", "convolve"),
        arguments,
        units,
        grain=grain(units, flops),
        flops=flops,
        bytes=read + written,
    )


def _block_and_image(pixels: int, blocks: int, image: Argument) -> tuple[int, int]:
    """Return the bytes of 16 channels of an image, and those of all its channels.

    Args:
        pixels: Pixels of a channel.
        blocks: Blocks of 16 channels.
        image: The image: of float32, or of bfloat16 in blocks of 32 channels.
    """
    if is_rounded(image):
        return pixels * _LINE // 2, pixels * _LINE * -(-blocks // 2)
    return pixels * _LINE, pixels * _LINE * blocks


def groups_of_line(g: Geometry) -> int:
    """Return how many groups share the 32 channels of a pixel of a line: 2 of 16, else 1."""
    return 2 if 2 * g.inputs == MATRIX_DEPTH and g.groups % 2 == 0 else 1


def gathers(of: Tiles, g: Geometry) -> bool:
    """Return whether each tap has its own copy of the pixels that outputs read.

    Then all outputs of an image are one row, of which the tiles are full; otherwise the rows of
    the image are copied once, with their padding.
    """
    # Blocks of channels and taps along the depth are one loop, so that all steps must be equal.
    if g.taps == 1 or (g.dilations[0] > 1 and g.inputs > MATRIX_DEPTH):
        return True
    panels = -(-g.outputs // of.width)
    in_rows, _ = _registers_of_rows(g)
    in_rows *= g.target[0]
    saved = (in_rows - -(-g.pixels // MATRIX_ROWS)) * g.taps * panels * _PRODUCT_CYCLES
    copied = g.pixels * g.taps - math.prod(g.reach(axis, g.target[axis]) for axis in range(3))
    return saved > copied * _COPY_CYCLES


def volume_weights(of: Tiles, g: Geometry) -> Callable[[Array], Array]:
    """Return the function that packs weights ``[O, I / groups, *kernel]`` of a volume.

    They are registers of pairs in the order [group][panel][tap along the depth][block][tap].
    """
    planes = g.kernel[0]
    inputs = -(-g.inputs // MATRIX_DEPTH) * MATRIX_DEPTH
    flat = attrs.evolve(g, inputs=planes * inputs, kernel=(1, *g.kernel[1:]))
    pack = direct_weights(flat, of, 1, plain=False)

    def make(weight: Array) -> Array:
        padded = np.zeros((len(weight), planes, inputs, *g.kernel[1:]), weight.dtype)
        padded[:, :, : g.inputs] = weight.reshape(len(weight), g.inputs, *g.kernel).swapaxes(1, 2)
        return pack(padded.reshape(len(weight), planes * inputs, *g.kernel[1:]))

    return make


def _registers_of_rows(g: Geometry) -> tuple[int, int]:
    """Return the registers of a plane's rows of outputs, and the gap of tiles between rows.

    The gap is -1 if no tile has outputs of several rows. With stride 1 the windows of a row
    continue in those of the next one: a few outputs between them are computed in vain.
    """
    height, width = g.target[1:]
    if not has_bfloat16_tiles():
        # Dot products of pairs take any rows of A, those of several rows of an image, too.
        return -(-height * width // MATRIX_ROWS), 0
    registers, gap = height * -(-width // MATRIX_ROWS), -1
    if width <= MATRIX_ROWS < 2 * width:
        # Two short rows are a tile: with a register of each, no product waits for the previous one
        # of the same sums.
        gap = MATRIX_ROWS - width
    if g.strides[1:] == (1, 1):
        pitch = g.reach(2, width)
        adjacent = -(-((height - 1) * pitch + width) // MATRIX_ROWS)
        if adjacent < registers:
            return adjacent, pitch - width
    return registers, gap


def round_image(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> Argument:
    """Return an input in the layout "bfloat16", in scratch memory if it is not in it yet.

    Args:
        low: Collects the plan's steps and scratch memory.
        of: The matrix tiles.
        g: Sizes of the convolution, of two dimensions; groups are whole blocks of 32 channels.
        x: The input, in the layout "blocked" or "bfloat16".
    """
    if is_rounded(x):
        return x
    whole = attrs.evolve(g, target=g.source, kernel=(1, 1, 1), strides=(1, 1, 1), pads=(0, 0, 0))
    shape = (g.images, g.groups * g.inputs, *g.source)
    target = Operand("rounded", "float32", shape, "bfloat16", lanes=MATRIX_DEPTH)
    # The rows of an image without padding are in the order of the layout.
    rows = _emit_rows(low, of, whole, x).lines
    assert isinstance(rows, Scratch)
    target.storage = rows.storage
    return target


def _registers(target: Argument, g: Geometry, blocks: int) -> MatrixInput:
    """Return an input of registers, for each 16 outputs all blocks and taps."""
    taps = g.taps
    # Rows of taps that read only padding are left out, if windows and outputs have one plane.
    flat = g.kernel[0] == g.target[0] == 1
    by_row = g.kernel[1:] if flat else (1, taps)
    strides = {
        "x_group": -(-g.pixels // MATRIX_ROWS) * blocks * taps * _REGISTER,
        "x_plane": 0,
        "x_block": taps * _REGISTER,
        "x_tap_row": by_row[1] * _REGISTER,
        "x_tap": _REGISTER,
        "x_row": 2 * blocks * taps * _REGISTER,
        "x_column": _LINE,
        "x_register": blocks * taps * _REGISTER,
    }
    return MatrixInput(target, blocks, by_row, -(-g.pixels // _ROWS), _ROWS, strides)


def _whole_image(x: Argument, g: Geometry) -> MatrixInput:
    """Return the input of a convolution of one tap that reads each pixel of x, where it is."""
    blocks = -(-g.inputs // MATRIX_DEPTH)
    strides = {
        "x_group": blocks * g.pixels * _LINE,
        "x_plane": 0,
        "x_block": g.pixels * _LINE,
        "x_tap_row": 0,
        "x_tap": 0,
        "x_row": _ROWS * _LINE,
        "x_column": _LINE,
        "x_register": _REGISTER,
    }
    return MatrixInput(x, blocks, (1, 1), -(-g.pixels // _ROWS), _ROWS, strides)


def _emit_registers(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> MatrixInput:
    """Emit the step that copies, for each tap, the pixels that outputs read."""
    blocks = -(-g.inputs // MATRIX_DEPTH)
    group = -(-g.pixels // MATRIX_ROWS) * blocks * g.taps * _REGISTER
    target = low.scratch(g.images * g.groups * group)
    found = _registers(target, g, blocks)
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
        y_plane=0,
        y_tap=_REGISTER,
        y_register=found.strides["x_register"],
    )
    _emit_lines(low, g, x, arguments)
    return found


def _emit_rows(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> MatrixInput:
    """Emit the step that copies the rows of an image, with their padding.

    All blocks of a plane lie before those of the next plane, so that a window along the depth reads
    one run of blocks.
    """
    blocks = -(-g.inputs // MATRIX_DEPTH)
    planes, rows, columns = (g.reach(axis, g.target[axis]) for axis in range(3))
    row = columns * _LINE
    block = rows * row
    plane = blocks * block
    group = planes * plane
    # The tile of the last outputs of a row reads whole registers.
    target = low.scratch(g.images * g.groups * group + _ROWS * g.strides[2] * _LINE)
    arguments = LineArguments(
        x=x,
        y=target,
        **_sizes(of, g, x),
        planes=planes,
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
        lines=planes * rows,
        y_group=group,
        y_block=block,
        y_plane=plane,
        y_tap=0,
        y_register=_REGISTER,
    )
    _emit_lines(low, g, x, arguments)
    strides = {
        "x_group": group,
        "x_plane": g.strides[0] * plane,
        "x_block": g.dilations[0] * block,
        "x_tap_row": g.dilations[1] * row,
        "x_tap": g.dilations[2] * _LINE,
        "x_row": g.strides[1] * row,
        "x_column": g.strides[2] * _LINE,
        "x_register": g.strides[2] * _REGISTER,
    }
    _, gap = _registers_of_rows(g)
    if 0 <= gap == MATRIX_ROWS - g.target[2]:
        strides["x_register"] = strides["x_row"]
    return MatrixInput(
        target,
        g.kernel[0] * blocks,
        (g.kernel[1], g.kernel[2]),
        g.target[1],
        g.target[2],
        strides,
        gap=gap,
        planes=g.target[0],
    )


def _sizes(of: Tiles, g: Geometry, x: Argument) -> dict[str, int]:
    """Return the fields of `LineArguments` that describe the images."""
    return {
        "groups": g.groups,
        "blocks": -(-g.inputs // (MATRIX_DEPTH if is_rounded(x) else of.lanes)),
        "depth": g.source[0],
        "height": g.source[1],
        "width": g.source[2],
        "first_plane": -g.pads[0],
        "first_row": -g.pads[1],
        "first_column": -g.pads[2],
    }


def _emit_lines(low: Lowering, g: Geometry, x: Argument, arguments: LineArguments) -> None:
    """Emit the kernel `lines`."""
    rounded = is_rounded(x)
    lines = g.images * g.groups * -(-g.inputs // MATRIX_DEPTH) * arguments.lines
    pixels = lines * arguments.columns
    low.emit(
        Kernel("subgraph.ops.conv.bfloat16.kernels", "lines", rounded=rounded),
        arguments,
        lines,
        grain=grain(lines, pixels * MATRIX_DEPTH),
        bytes=(2 if rounded else 3) * pixels * _LINE,
    )


def _units(
    threads: int, of: Tiles, g: Geometry, source: MatrixInput, panels: int
) -> tuple[int, int, int]:
    """Return the rows and the panels of a unit, and the lines of weights that a step prefetches."""
    rows, images = source.rows, g.images * g.groups * source.planes
    panel = source.blocks * math.prod(source.taps) * of.nv * _REGISTER
    tiles = -(-rows * (source.columns + larger(source.gap, 0)) // _ROWS)
    is_few = tiles <= _MAX_PREFETCHING_TILES
    # The weights of a unit's panels stay in the L2 cache while all its pixels are computed. If
    # these are few, those of the next unit arrive meanwhile.
    unit_panels = smaller(panels, larger(1, caches().l2 // (8 if is_few else 2) // panel))
    ahead = -(-of.nv * MATRIX_ROWS // tiles) if is_few else 0
    wanted = units_wanted(threads)
    unit_rows = shared(rows, rows, images * -(-panels // unit_panels), wanted, 1, 1)
    others = images * -(-rows // unit_rows)
    return unit_rows, shared(unit_panels, panels, others, wanted, 1, 1), ahead
