"""Kernels of convolutions over matrix tiles: the lines of the input, and the products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.bfloat16 import bfloat16_pairs, store_bfloat16
from subgraph.engine.codegen.matrix_registers import (
    LANES,
    REGISTER_BYTES,
    ROW_BYTES,
    ROWS,
    configure_tiles,
    release_tiles,
)
from subgraph.engine.codegen.simd import call_kernel, memset, shuffle, vec
from subgraph.engine.codegen.tiling import MATRIX_TILE, TileBlock
from subgraph.ops.movement.window_arguments import taps_inside

from .arguments import ImageLineArguments, LineArguments, MatrixConvArguments

_tile_block = stack_block(TileBlock)
inside = register_jitable(taps_inside)
_PIXEL = ROW_BYTES  # bytes of a pixel: of 16 channels of float32, or 32 of bfloat16
_HALF = ROW_BYTES // 2  # bytes of 16 channels of bfloat16
_SCRATCH_ROW = MATRIX_TILE[1] * LANES * 4  # bytes of a row of a tile of float32


class Panels(NamedTuple):
    """Outputs of a tile, and panels of weights.

    Attributes:
        image: Number of the image.
        group: Number of the group.
        plane: Plane of the outputs.
        first: First panel.
        last: End of the panels.
        pixel: First output.
        pixels: Outputs.
        rows: Rows of the tile: the outputs, and the gaps between the rows of an image.
        tap: First row of taps that reads the image.
    """

    image: int
    group: int
    plane: int
    first: int
    last: int
    pixel: int
    pixels: int
    rows: int
    tap: int


def lines(*, rounded: bool) -> Callable[..., None]:
    """Return the kernel of `LineArguments`, which copies the lines that windows read.

    Args:
        rounded: The image is rounded to bfloat16 already, in blocks of 32 channels.
    """
    arguments = view_of(LineArguments)
    v = vec("float32", LANES)
    load, store, zero = v.load, v.store, v.zero
    blocks_of_line = 1 if rounded else 2

    @register_jitable
    def place(y: int, register: int, pixel: int) -> int:
        """Return the address of a pixel, of which each 16 are ``register`` bytes apart."""
        return y + pixel // ROWS * register + pixel % ROWS * ROW_BYTES

    @register_jitable
    def clear(y: int, register: int, first: int, last: int) -> None:
        for pixel in range(first, last):
            to = place(y, register, pixel)
            store_bfloat16(to, zero())
            store_bfloat16(to + _HALF, zero())

    @register_jitable
    def copy(x: int, second: int, step: int, y: int, register: int, first: int, last: int) -> None:
        """Copy pixels of two blocks, ``second`` bytes apart; 0: the second has only zeros."""
        for pixel in range(first, last):
            at, to = x + (pixel - first) * step, place(y, register, pixel)
            if rounded:
                store(to, load(at))
                continue
            store_bfloat16(to, load(at))
            store_bfloat16(to + _HALF, load(at + second) if second != 0 else zero())

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        line_blocks = (a.blocks + blocks_of_line - 1) // blocks_of_line
        width, columns, step = a.width, a.columns, a.column_step
        area = a.depth * a.height * width * _PIXEL
        for unit in range(begin, end):
            line, block = unit % a.lines, unit // a.lines % line_blocks
            group = unit // (a.lines * line_blocks)
            row, rest = line % a.rows, line // a.rows
            plane, tap = rest % a.planes, rest // a.planes
            d = a.first_plane + plane * a.plane_step
            d += tap // (a.taps_height * a.taps_width) * a.tap_planes
            h = a.first_row + row * a.row_step + tap // a.taps_width % a.taps_height * a.tap_rows
            w = a.first_column + tap % a.taps_width * a.tap_columns
            y = a.y + group * a.y_group + block * a.y_block + plane * a.y_plane + tap * a.y_tap
            pixel = row * columns
            if a.y_plane == 0:
                pixel += plane * a.rows * columns
            if d < 0 or d >= a.depth or h < 0 or h >= a.height:
                clear(y, a.y_register, pixel, pixel + columns)
                continue
            # The first pixel at column 0 or behind, and the first one behind the image.
            left = min(max((step - 1 - w) // step, 0), columns)
            right = max(min((width - w + step - 1) // step, columns), left)
            x = a.x + (group * a.blocks + blocks_of_line * block) * area
            x += ((d * a.height + h) * width + w + left * step) * _PIXEL
            second = area if blocks_of_line * block + 1 < a.blocks else 0
            register = a.y_register
            clear(y, register, pixel, pixel + left)
            copy(x, second, step * _PIXEL, y, register, pixel + left, pixel + right)
            clear(y, register, pixel + right, pixel + columns)

    return kernel


def image_lines() -> Callable[..., None]:
    """Return the kernel of `ImageLineArguments`, which copies a plain image of few channels."""
    arguments = view_of(ImageLineArguments)
    v, words = vec("float32", LANES), vec("int32", LANES)
    load_n, zero, store = v.load_n, v.zero, words.store
    lower, upper = range(LANES // 2), range(LANES // 2, LANES)
    first_half, second_half = (
        shuffle("int32", LANES, [k for i in half for k in (i, LANES + i)])
        for half in (lower, upper)
    )

    @register_jitable
    def pairs(x: int, plane: int, channel: int, channels: int, count: int) -> Any:
        """Return the elements of two channels of some pixels, in pairs."""
        at = x + channel * plane
        other = load_n(at + plane, count) if channel + 1 < channels else zero()
        return bfloat16_pairs(load_n(at, count), other)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        pixel = a.elements * 2
        plane = a.height * a.width * 4
        for unit in range(begin, end):
            row, image = unit % a.rows + a.first_row, unit // a.rows
            to = a.y + unit * a.columns * pixel
            memset(to, 0, a.columns * pixel)
            if row < 0 or row >= a.height:
                continue
            x = a.x + image * a.channels * plane + row * a.width * 4
            # Whole vectors are written: columns has room for one behind the last window.
            for column in range(max(0, a.first_column), a.last_column, LANES):
                at, count = x + column * 4, a.width - column
                target = to + (column - a.first_column) * pixel
                two = pairs(at, plane, 0, a.channels, count)
                if a.elements == 2:
                    store(target, two)
                    continue
                rest = pairs(at, plane, 2, a.channels, count)
                store(target, first_half(two, rest))
                store(target + ROW_BYTES, second_half(two, rest))

    return kernel


@register_jitable(forceinline=True)
def _set_tile(a: MatrixConvArguments, t: TileBlock, scratch: int) -> None:
    """Set the arguments that all tiles share.

    Args:
        a: The kernel's arguments.
        t: The tile's arguments.
        scratch: The worker's scratch, to which tiles of float32 are written; 0: they are written to
            the output.
    """
    t.outer_count = a.blocks
    t.outer_a = a.x_block
    t.middle_count = a.taps_height
    t.middle_a = a.x_tap_row
    t.inner_count = a.taps_width
    t.inner_a = a.x_tap
    t.steps = 1
    t.depth = a.depth
    t.last_depth = a.last_depth
    t.a_row = a.x_column
    t.a_register = a.x_register
    t.run_rows = a.columns if a.gap >= 0 else 0
    t.gap_rows = max(a.gap, 0)
    t.a_gap = a.x_row - a.columns * a.x_column
    t.pace = a.ahead_lines * 2 * ROW_BYTES
    t.b_vector = REGISTER_BYTES
    t.c_row = _PIXEL if scratch == 0 else _SCRATCH_ROW
    t.c_vector = a.y_block if scratch == 0 else LANES * 4
    t.residual_row = _PIXEL
    t.residual_vector = a.residual_block
    t.start_vector = _PIXEL
    t.flags = a.flags
    t.low = a.low
    t.high = a.high


@register_jitable
def _set_panel(a: MatrixConvArguments, t: TileBlock, vectors: int) -> None:
    """Set the strides of the weights of a panel of one or two vectors."""
    t.inner_b = vectors * REGISTER_BYTES
    t.middle_b = a.taps_width * t.inner_b
    t.outer_b = a.taps_height * t.middle_b


@register_jitable
def _is_alone(a: MatrixConvArguments, vectors: int) -> bool:
    """Return whether a panel has 16 of the 32 channels of a block, and no other one the rest.

    Args:
        a: The kernel's arguments.
        vectors: Blocks of 16 channels of the panel.
    """
    return a.y_rounded != 0 and vectors == 1 and a.groups == 1


def convolve() -> Callable[..., None]:
    """Return the kernel of `MatrixConvArguments`, which multiplies lines and weights."""
    arguments = view_of(MatrixConvArguments)
    most, vectors_of_panel = MATRIX_TILE
    v = vec("float32", LANES)
    load, store = v.load, v.store

    @register_jitable
    def store_outputs(
        a: MatrixConvArguments, scratch: int, y: int, first: int, pixels: int, vectors: int
    ) -> None:
        """Store the outputs of a tile to an image, of which the first one is number ``first``."""
        alone = _is_alone(a, vectors)
        row, column = first // a.y_columns, first % a.y_columns
        for pixel in range(pixels):
            to = y + row * a.y_row + column * a.y_column
            for j in range(vectors):
                values = load(scratch + pixel * _SCRATCH_ROW + j * LANES * 4)
                if a.y_rounded:
                    store_bfloat16(to + j * LANES * 2, values)
                else:
                    store(to + j * a.y_block, values)
            if alone:
                memset(to + _HALF, 0, _HALF)
            column += 1
            if column == a.y_columns:
                row, column = row + 1, 0

    @register_jitable
    def run_panels(a: MatrixConvArguments, t: TileBlock, where: Panels, worker: int) -> None:
        """Run the tiles of some outputs for all panels of a unit.

        Args:
            a: The kernel's arguments.
            t: The tile's arguments.
            where: The outputs and the panels.
            worker: Number of the worker.
        """
        scratch = a.scratch + worker * a.scratch_bytes
        steps = a.blocks * a.taps_height * a.taps_width
        for panel in range(where.first, where.last):
            block = panel * vectors_of_panel
            vectors = min(vectors_of_panel, a.output_blocks - block)
            _set_panel(a, t, vectors)
            channels = where.group * a.output_blocks + block
            t.b = a.weights + channels * steps * REGISTER_BYTES + where.tap * t.middle_b
            t.start = a.bias + channels * _PIXEL if a.bias != 0 else 0
            block += where.group * a.output_blocks
            y = a.y + where.image * a.y_image + block * a.y_block
            y += a.y_offset + where.plane * a.y_plane
            if a.y_rounded and block % 2 == 1:
                # The second half of the pixels of the block of 32 channels before.
                y += _HALF - a.y_block
            t.c = y + where.pixel * _PIXEL if scratch == 0 else scratch
            if a.residual != 0:
                t.residual = a.residual + where.image * a.residual_image + block * a.residual_block
                t.residual += where.pixel * _PIXEL + where.plane * a.residual_plane
            call_kernel(a.tile, t, where.rows, vectors, 0)
            t.ahead += steps * a.ahead_lines * ROW_BYTES
            target = y + where.pixel * _PIXEL
            if a.activation != 0:
                t.rounded = target
                call_kernel(a.activation, t, where.pixels, vectors, 0)
            if scratch != 0 and not a.activation_stores:
                store_outputs(a, scratch, y, where.pixel, where.pixels, vectors)
            elif _is_alone(a, vectors):
                for pixel in range(where.pixels):
                    memset(target + pixel * _PIXEL + _HALF, 0, _HALF)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        _set_tile(a, t, a.scratch + worker * a.scratch_bytes)
        panels = (a.output_blocks + vectors_of_panel - 1) // vectors_of_panel
        row_units = (a.rows + a.unit_rows - 1) // a.unit_rows
        panel_units = (panels + a.unit_panels - 1) // a.unit_panels
        weights_of_block = a.blocks * a.taps_height * a.taps_width * REGISTER_BYTES
        gap = max(a.gap, 0)
        pitch = a.columns + gap
        configure_tiles(a.depth)
        for unit in range(begin, end):
            row = unit % row_units * a.unit_rows
            # Rows of sums: those of outputs, and the gaps between the rows of an image.
            at, last = row * pitch, min(row + a.unit_rows, a.rows) * pitch - gap
            if gap == 0:
                last = min(last, a.outputs)
            first_panel = unit // row_units % panel_units * a.unit_panels
            last_panel = min(first_panel + a.unit_panels, panels)
            plane = unit // (row_units * panel_units) % a.planes
            number = unit // (row_units * panel_units * a.planes)
            image, group = number // a.groups, number % a.groups
            # The tiles of a unit together prefetch the weights of the next one.
            next_block = group * a.output_blocks + last_panel * vectors_of_panel
            t.ahead = a.weights + next_block * weights_of_block
            while at < last:
                row, column = at // pitch, at % pitch
                rows = min(most, last - at)
                if a.gap < 0:
                    rows = min(rows, a.columns - column)
                line, half = number // a.groups_of_line, number % a.groups_of_line
                t.a = a.x + line * a.x_group + half * _HALF + plane * a.x_plane
                t.a += row * a.x_row + column * a.x_column
                t.first_run = a.columns - column
                pixel = row * a.columns + column
                at += rows
                pixels = at // pitch * a.columns + min(at % pitch, a.columns) - pixel
                if at % pitch >= a.columns:
                    at += pitch - at % pitch
                # Rows of taps that read only padding, for all outputs of the tile, are left out.
                tap = 0
                if a.taps_height > 1:
                    top = pixel // a.y_columns * a.row_step + a.first_row
                    bottom = (pixel + pixels - 1) // a.y_columns * a.row_step + a.first_row
                    tap, count = inside(top, bottom, a.taps_height, a.tap_rows, a.height)
                    t.middle_count = count
                    t.a += tap * a.x_tap_row
                # All panels of some pixels: their part of x is in the L1 cache meanwhile.
                where = Panels(
                    image, group, plane, first_panel, last_panel, pixel, pixels, rows, tap
                )
                run_panels(a, t, where, worker)
        release_tiles()

    return kernel
