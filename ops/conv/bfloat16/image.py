"""Convolutions of plain images of few channels over matrix tiles.

The pixels that a row of taps multiplies are adjacent if the channels of a pixel are: one step of a
matrix tile multiplies them all. The windows of neighbouring outputs overlap, and so do the rows of
a register of A in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_ROWS, MATRIX_TILE
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.ops.movement.geometry import Geometry, direct_weights
from subgraph.ops.shared.tile_planning import Tiles, grain

from .arguments import ImageLineArguments

_MAX_CHANNELS = 4  # elements of a pixel that `image_lines` writes at most


@attrs.frozen
class MatrixInput:
    """The input of a convolution in bfloat16: registers of pixels, or rows of an image.

    Attributes:
        lines: Its memory.
        blocks: Blocks of at most 32 elements that each tap multiplies.
        taps: Rows of taps, and taps of a row.
        rows: Rows of outputs of a plane, or runs of them that are computed at a time.
        columns: Outputs of a row.
        strides: The fields ``x_*`` of `MatrixConvArguments`.
        depth: Elements of a block.
        gap: As in `MatrixConvArguments`.
        planes: As in `MatrixConvArguments`.
    """

    lines: Argument
    blocks: int
    taps: tuple[int, int]
    rows: int
    columns: int
    strides: dict[str, int]
    depth: int = MATRIX_DEPTH
    gap: int = -1
    planes: int = 1


def reads_image_lines(g: Geometry) -> bool:
    """Return whether a convolution of few channels can multiply rows of taps of a plain image."""
    flat = g.source[0] == g.target[0] == g.kernel[0] == 1 and g.pads[0] == 0
    few = g.inputs <= _MAX_CHANNELS and g.kernel[2] <= MATRIX_ROWS
    return flat and few and g.groups == 1 and g.dilations[2] == 1


def _blocks(g: Geometry) -> tuple[int, int, int]:
    """Return the elements of a pixel, the blocks of a row of taps, and the elements of a block."""
    elements = 2 if g.inputs <= 2 else _MAX_CHANNELS
    blocks = -(-g.kernel[2] * elements // MATRIX_DEPTH)  # 1 or 2
    return elements, blocks, g.kernel[2] * elements // blocks


def image_weights(g: Geometry, of: Tiles) -> Callable[[Array], Array]:
    """Return the function that packs weights ``[O, C, *kernel]`` for `emit_image_lines`."""
    elements, blocks, depth = _blocks(g)
    rows, columns = g.kernel[1:]
    lines = attrs.evolve(g, inputs=blocks * MATRIX_DEPTH, kernel=(1, rows, 1))
    pack = direct_weights(lines, of, 1, False)

    def make(weight: Array) -> Array:
        taps = weight.reshape(g.outputs, g.inputs, rows, columns).transpose(0, 2, 3, 1)
        padded = np.pad(taps, ((0, 0), (0, 0), (0, 0), (0, elements - g.inputs)))
        steps = padded.reshape(g.outputs, rows, blocks, depth)
        steps = np.pad(steps, ((0, 0), (0, 0), (0, 0), (0, MATRIX_DEPTH - depth)))
        return pack(steps.reshape(g.outputs, rows, -1).swapaxes(1, 2)[:, :, :, None])

    return make


def emit_image_lines(low: Lowering, g: Geometry, x: Argument) -> MatrixInput:
    """Emit the step that copies the rows of plain images, all channels of a pixel together."""
    elements, blocks, depth = _blocks(g)
    rows, reach = g.reach(1, g.target[1]), g.reach(2, g.target[2])
    columns = reach + MATRIX_ROWS  # whole vectors are written
    row, step = columns * elements * 2, g.strides[2] * elements * 2
    # The tile of the last outputs of a row reads whole registers.
    slack = MATRIX_TILE[0] * step + MATRIX_DEPTH * 2
    target = low.scratch(g.images * rows * row + slack)
    arguments = ImageLineArguments(
        x=x,
        y=target,
        channels=g.inputs,
        height=g.source[1],
        width=g.source[2],
        rows=rows,
        columns=columns,
        elements=elements,
        first_row=-g.pads[1],
        first_column=-g.pads[2],
        last_column=min(g.source[2], reach - g.pads[2]),
    )
    units = g.images * rows
    low.emit(
        Kernel("subgraph.ops.conv.bfloat16.kernels", "image_lines"),
        arguments,
        units,
        grain=grain(units, units * columns * elements),
        bytes=units * row + g.images * g.inputs * g.source[1] * g.source[2] * 4,
    )
    strides = {
        "x_group": rows * row,
        "x_plane": 0,
        "x_block": depth * 2,
        "x_tap_row": g.dilations[1] * row,
        "x_tap": 0,
        "x_row": g.strides[1] * row,
        "x_column": step,
        "x_register": MATRIX_ROWS * step,
    }
    taps = g.kernel[1], 1
    return MatrixInput(target, blocks, taps, g.target[1], g.target[2], strides, depth)
