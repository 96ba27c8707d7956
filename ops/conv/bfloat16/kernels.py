"""Kernels of convolutions over matrix tiles: the lines of the input, and the products."""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.matrix_tile import (
    LANES,
    REGISTER_BYTES,
    ROW_BYTES,
    ROWS,
    configure_tiles,
    release_tiles,
    store_bfloat16,
)
from subgraph.engine.codegen.simd import call_kernel, vec
from subgraph.engine.codegen.tiling import MATRIX_TILE, TileBlock

from .arguments import ImageConvArguments, LineArguments, MatrixConvArguments

_tile_block = stack_block(TileBlock)
_PIXEL = ROW_BYTES  # bytes of a pixel: of 16 channels of float32, or 32 of bfloat16
_SCRATCH_ROW = MATRIX_TILE[1] * LANES * 4  # bytes of a row of a tile of float32


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
            store_bfloat16(to + ROW_BYTES // 2, zero())

    @register_jitable
    def copy(x: int, second: int, step: int, y: int, register: int, first: int, last: int) -> None:
        """Copy pixels of two blocks, ``second`` bytes apart; 0: the second has only zeros."""
        for pixel in range(first, last):
            at, to = x + (pixel - first) * step, place(y, register, pixel)
            if rounded:
                store(to, load(at))
                continue
            store_bfloat16(to, load(at))
            store_bfloat16(to + ROW_BYTES // 2, load(at + second) if second != 0 else zero())

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
            y = a.y + group * a.y_group + block * a.y_block + tap * a.y_tap
            pixel = (plane * a.rows + row) * columns
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


def _patch_maker() -> Callable[..., None]:
    """Return the function that rounds the windows of a row of outputs to registers.

    Its arguments are an `ImageConvArguments`, numbers of image and row, and the worker's scratch.
    """
    v, window = vec("float32", LANES), vec("int16", LANES)
    load_n, load_line, store_line = v.load_n, v.load, v.store
    load, store, zero = window.load, window.store, window.zero

    @register_jitable
    def clear(to: int, count: int) -> None:
        """Clear elements; the vector of the last ones may reach beyond."""
        for i in range(0, count, LANES):
            store(to + i * 2, zero())

    @register_jitable
    def load_rows(a: ImageConvArguments, image: int, row: int, to: int) -> None:
        """Round the rows that a row of outputs reads, with their padding, for each channel."""
        width, columns = a.width, a.line_columns
        for run in range(a.channels * a.taps_of_column):
            channel, tap = run // a.taps_of_column, run % a.taps_of_column
            h = row * a.row_step - a.pad_height + tap * a.tap_rows
            clear(to, columns)
            if h >= 0 and h < a.height:
                source = a.x + ((image * a.channels + channel) * a.height + h) * width * 4
                # Columns in front of the image or behind the last window are left out.
                first = max(0, -a.pad_width)
                last = min(width, columns - LANES - a.pad_width)
                for i in range(first, last, LANES):
                    values = load_n(source + i * 4, last - i)
                    store_bfloat16(to + (a.pad_width + i) * 2, values)
            to += columns * 2

    @register_jitable
    def make_patches(a: ImageConvArguments, image: int, row: int, target: int) -> None:
        runs, taps, steps = a.channels * a.taps_of_column, a.taps_of_row, a.blocks
        patches = target + a.x_register * ((a.columns + ROWS - 1) // ROWS)
        size = (steps + 1) * ROW_BYTES
        lines = patches + ROWS * size
        load_rows(a, image, row, lines)
        # Windows are read back in whole lines, which must wait for the stores of their parts: some
        # are written before the first one is read.
        clear(patches, ROWS * size // 2)
        for first in range(0, a.columns, ROWS):
            count = min(ROWS, a.columns - first)
            for i in range(count):
                source = lines + (first + i) * a.column_step * 2
                # A vector holds a run of taps, and elements that the next one overwrites.
                to = patches + i * size
                for _ in range(runs):
                    store(to, load(source))
                    source += a.line_columns * 2
                    to += taps * 2
                store(to, zero())
            for i in range(count):
                source, to = patches + i * size, target + i * ROW_BYTES
                for step in range(steps):
                    store_line(to + step * REGISTER_BYTES, load_line(source + step * ROW_BYTES))
            target += a.x_register

    return make_patches


@register_jitable(forceinline=True)
def _set_tile(a: MatrixConvArguments, t: TileBlock, in_pairs: bool, scratch: int) -> None:
    """Set the arguments that all tiles share.

    Args:
        a: The kernel's arguments.
        t: The tile's arguments.
        in_pairs: Whether a tile is two rows of an image, with a register of each.
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
    t.a_row = a.x_column
    t.a_register = a.x_row if in_pairs else a.x_register
    t.register_rows = a.columns if in_pairs else 0
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


def convolve(*, image: bool) -> Callable[..., None]:
    """Return the kernel of `MatrixConvArguments`, which multiplies lines and weights.

    Args:
        image: Its arguments are `ImageConvArguments`: x is a plain image of few channels, and the
            lines of a row of outputs are made just before it, so that they stay in the cache.
    """
    # The fields of ImageConvArguments begin with those of MatrixConvArguments.
    arguments, image_arguments = view_of(MatrixConvArguments), view_of(ImageConvArguments)
    make_patches = _patch_maker()
    most, vectors_of_panel = MATRIX_TILE
    v = vec("float32", LANES)
    load, store = v.load, v.store

    @register_jitable
    def store_outputs(
        a: MatrixConvArguments, scratch: int, y: int, first: int, pixels: int, vectors: int
    ) -> None:
        """Store the outputs of a tile to an image, of which the first one is number ``first``."""
        row, column = first // a.y_columns, first % a.y_columns
        for pixel in range(pixels):
            to = y + row * a.y_row + column * a.y_column
            for j in range(vectors):
                values = load(scratch + pixel * _SCRATCH_ROW + j * LANES * 4)
                if a.y_rounded:
                    store_bfloat16(to + j * LANES * 2, values)
                else:
                    store(to + j * a.y_block, values)
            column += 1
            if column == a.y_columns:
                row, column = row + 1, 0

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        # Two short rows of an image are a tile: with a register of each, no product waits for the
        # previous one of the same sums.
        in_pairs = a.columns <= ROWS and 2 * a.columns > ROWS and a.rows * a.columns == a.outputs
        in_pairs = in_pairs and not image
        height = 2 if in_pairs else 1
        scratch = a.scratch + worker * a.scratch_bytes
        _set_tile(a, t, in_pairs, scratch)
        panels = (a.output_blocks + vectors_of_panel - 1) // vectors_of_panel
        row_units = (a.rows + a.unit_rows - 1) // a.unit_rows
        panel_units = (panels + a.unit_panels - 1) // a.unit_panels
        weights_of_block = a.blocks * a.taps_height * a.taps_width * REGISTER_BYTES
        configure_tiles()
        for unit in range(begin, end):
            first_row = unit % row_units * a.unit_rows
            last_row = min(first_row + a.unit_rows, a.rows)
            first_panel = unit // row_units % panel_units * a.unit_panels
            number = unit // (row_units * panel_units)
            last_panel = min(first_panel + a.unit_panels, panels)
            for row in range(first_row, last_row, height):
                x = a.x + number * a.x_group + row * a.x_row
                if image:
                    of_image = image_arguments(args)
                    x = of_image.patches + worker * of_image.patches_bytes
                    make_patches(of_image, number, row, x)
                columns = min(height, last_row - row) * a.columns
                columns = min(columns, a.outputs - row * a.columns)
                for column in range(0, columns, most):
                    pixels = min(most, columns - column)
                    t.a = x + column // ROWS * a.x_register
                    # All panels of some pixels: their part of x is in the L1 cache meanwhile.
                    for panel in range(first_panel, last_panel):
                        block = panel * vectors_of_panel
                        vectors = min(vectors_of_panel, a.output_blocks - block)
                        _set_panel(a, t, vectors)
                        channels = number % a.groups * a.output_blocks + block
                        t.b = a.weights + channels * weights_of_block
                        t.start = a.bias + channels * _PIXEL if a.bias != 0 else 0
                        pixel = row * a.columns + column
                        block += number * a.output_blocks
                        y = a.y + block * a.y_block + a.y_offset
                        t.c = y + pixel * _PIXEL if scratch == 0 else scratch
                        if a.residual != 0:
                            t.residual = a.residual + block * a.residual_block + pixel * _PIXEL
                        call_kernel(a.tile, t, pixels, vectors, 0)
                        if a.activation != 0:
                            call_kernel(a.activation, t, pixels, vectors, 0)
                        if scratch != 0:
                            store_outputs(a, scratch, y, pixel, pixels, vectors)
        release_tiles()

    return kernel
