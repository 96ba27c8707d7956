"""Winograd's transforms of tiles along both axes, and where their values and sums are stored.

`winograd_kernels` has the algorithm and its source, `winograd_axis_kernels` the transforms along
one axis.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import attrs
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.simd import call_kernel, prefetch, vec
from subgraph.engine.codegen.tiling import F_HI, F_LO, FEW_ROWS, TileBlock

from .arguments import WinogradArguments
from .winograd_axis_kernels import backward_along, finisher, forward_along, storer


@attrs.frozen
class TileForm:
    """The variant of a Winograd kernel: arguments of its factory, and what follows from them.

    Attributes:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        mr: Most rows of a contraction tile.
        nv: Blocks of output channels of a panel.
        m: Output pixels of a tile along each side.
        stride: 1 or 2.
        taps: Weights along each side.
    """

    dtype: str
    lanes: int
    mr: int
    nv: int
    m: int
    stride: int
    taps: int

    @property
    def strided(self) -> bool:
        """Whether the convolution has stride 2."""
        return self.stride == 2

    @property
    def few_rows(self) -> bool:
        """Whether sums are computed by strips of few-row tiles."""
        return self.mr <= FEW_ROWS

    @property
    def n(self) -> int:
        """Input pixels of a tile along each side."""
        return 5 if self.strided else self.m + self.taps - 1

    @property
    def side(self) -> int:
        """Points along each axis."""
        return 3 if self.strided else self.n

    @property
    def item(self) -> int:
        """Bytes of an element."""
        return item_bytes(self.dtype)

    @property
    def pixel(self) -> int:
        """Bytes of a pixel of a block of channels."""
        return self.lanes * self.item


class ValueLayout(NamedTuple):
    """Compiled functions that say where tiles are in the image, and their values in scratch.

    Attributes:
        tile_capacity: ``f(arguments)``: tiles for which a unit has memory.
        values_of: ``f(point)``: values of a tile at a point, for each input channel.
        first_of: ``f(point)``: values of a tile at all points before.
        values_offset: ``f(arguments, point)``: bytes before the values of a point.
        full_tiles: ``f(outputs)``: full tiles along an axis.
        start_of: ``f(tile, full)``: first output of a tile along an axis.
    """

    tile_capacity: Any
    values_of: Any
    first_of: Any
    values_offset: Any
    full_tiles: Any
    start_of: Any


def value_layout(form: TileForm) -> ValueLayout:
    """Return the functions that locate tiles and their values."""
    m, pixel, strided, low = form.m, form.pixel, form.strided, form.few_rows

    @register_jitable
    def tile_capacity(a: WinogradArguments) -> int:
        """Return the tile capacity of a unit; odd, so that points use different cache sets."""
        return a.tiles | 1 if low else a.tiles

    @register_jitable
    def values_of(point: int) -> int:
        """Return the number of values of a tile at a point, for each input channel."""
        if not strided:
            return 1
        return (1 if point // 3 == 2 else 2) * (1 if point % 3 == 2 else 2)

    @register_jitable
    def first_of(point: int) -> int:
        """Return the number of values at all points before this one."""
        if not strided:
            return point
        i, j = point // 3, point % 3
        return 10 * i + (2 * j if i == 2 else 4 * j)

    @register_jitable
    def full_tiles(outputs: int) -> int:
        """Return the number of full tiles along an axis; the others are short."""
        return max(0, outputs - (outputs + m - 1) // m * (m - 1))

    @register_jitable
    def start_of(tile: int, full: int) -> int:
        """Return the first output of a tile along an axis whose first ``full`` tiles are full."""
        return tile * m - max(0, tile - full)

    @register_jitable
    def values_offset(a: WinogradArguments, point: int) -> int:
        """Return the offset of the values of a point, in bytes."""
        if not strided:
            return point * (a.input_blocks + 1) * tile_capacity(a) * pixel
        return (first_of(point) * a.input_blocks + point) * tile_capacity(a) * pixel

    return ValueLayout(tile_capacity, values_of, first_of, values_offset, full_tiles, start_of)


def input_transform(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, first, count, begin, end, scratch, values)``.

    It transforms the input blocks from ``begin`` to before ``end`` of ``count`` tiles from tile
    ``first`` on, and stores their values from address ``values`` on.
    """
    m, n, pixel, low, stride = form.m, form.n, form.pixel, form.few_rows, form.stride
    tile_capacity, values_offset = layout.tile_capacity, layout.values_offset
    full_tiles, start_of = layout.full_tiles, layout.start_of
    transform_tile = _tile_transform(form, values_offset)

    @register_jitable
    def prefetch_tile(a: WinogradArguments, x: int, h0: int, w0: int) -> None:
        """Prefetch the inputs of a tile: the transform is bound by loads."""
        row = a.image_width * pixel
        s = x + h0 * row + w0 * pixel
        for _ in range(n):
            for line in range(0, n * pixel, 64):
                prefetch(s + line)
            s += row

    @register_jitable
    def transform_input(
        a: WinogradArguments,
        first: int,
        count: int,
        begin: int,
        end: int,
        scratch: int,
        values: int,
    ) -> None:
        across, down = (a.output_width + m - 1) // m, (a.output_height + m - 1) // m
        columns, lines = full_tiles(a.output_width), full_tiles(a.output_height)
        blocks = a.input_blocks
        area = a.image_height * a.image_width * pixel
        row = pixel if low else (blocks + 1) * pixel
        step, apart = values_offset(a, 1), tile_capacity(a) * pixel if low else pixel
        depth, slices, own = a.image_depth, a.output_depth, blocks // a.kernel_depth
        # Neighbouring tiles read neighbouring pixels and write neighbouring values.
        for b in range(begin, end):
            above = b // own * a.dilation_depth - a.pad_depth
            plane, i, j = first // (across * down), first // across % down, first % across
            # A short tile's values at infinity are unused: the next full tile overwrites them.
            to, low_to, right_to, corner_to = values, values, values, values
            for _ in range(count):
                d = plane % slices * a.stride_depth + above
                image = plane // slices
                x = a.x + image * a.x_image + (b % own * depth + d) * area
                h0 = start_of(i, lines) * stride - a.pad_height
                w0 = start_of(j, columns) * stride - a.pad_width
                if d < 0 or d >= depth:
                    h0 = -n  # no row of it lies inside
                targets = (to, low_to, right_to, corner_to)
                to += row
                low_to += row if i < lines else 0
                right_to += row if j < columns else 0
                corner_to += row if i < lines and j < columns else 0
                j += 1
                if j == across:
                    i, j = i + 1, 0
                if i == down:
                    plane, i = plane + 1, 0
                if low and n == 6:
                    h1, w1 = start_of(i, lines), start_of(j, columns)
                    prefetch_tile(a, x, h1 - a.pad_height, w1 - a.pad_width)
                transform_tile(a, x, h0, w0, scratch, targets, b, step, apart)

    return transform_input


def _tile_transform(form: TileForm, values_offset: Any) -> Any:
    """Return ``f(a, x, h0, w0, scratch, to, block, step, apart)``, which transforms a tile."""
    n, pixel, strided = form.n, form.pixel, form.strided
    v = vec(form.dtype, form.lanes)
    load, store, zero = v.load, v.store, v.zero
    forward, store_inputs = forward_along(v, n), storer(v, n)

    @register_jitable
    def store_values(
        a: WinogradArguments,
        half: int,
        j: int,
        to: int,
        below: int,
        block: int,
        step: int,
        apart: int,
    ) -> None:
        """Transform column j of the rows' transforms (at address ``half``) and store its values.

        Values in the last row of points (infinity) are stored from ``below`` on, the others from
        ``to`` on; ``step`` is the bytes between points, ``apart`` those between input blocks.
        """
        d = forward(half + j * pixel, n * pixel)
        if not strided:
            at = j * step + block * apart
            store_inputs(d, to + at, n * step, below + at + (n - 1) * n * step)
        else:
            point = j // 2
            values, other = (1 if point == 2 else 2), j % 2
            at = (2 * values * block + other) * apart
            top = to + at + values_offset(a, point)
            store(top, d[0])
            store(top + values * apart, d[1])
            top = to + at + values_offset(a, point + 3)
            store(top, d[2])
            store(top + values * apart, d[3])
            at = (values * block + other) * apart
            store(below + at + values_offset(a, point + 6), d[4])

    @register_jitable
    def transform_tile(
        a: WinogradArguments,
        x: int,
        h0: int,
        w0: int,
        scratch: int,
        to: tuple[int, int, int, int],
        block: int,
        step: int,
        apart: int,
    ) -> None:
        """Transform the tile at row h0 and column w0 of a block of an image (address ``x``).

        ``to`` has four target addresses: for values at finite points, in the row of infinity, in
        the column of infinity, and at both. ``step`` and ``apart`` are those of `store_values`.
        """
        height, width = a.image_height, a.image_width
        patch, half = scratch, scratch + n * n * pixel
        begin, end = max(0, -w0), min(n, width - w0)
        whole = begin == 0 and end == n
        if not whole:
            for j in range(n):
                store(patch + j * pixel, zero())
        for i in range(n):
            row = half + i * n * pixel
            s = x + ((h0 + i) * width + w0) * pixel
            if h0 + i < 0 or h0 + i >= height:
                for j in range(n):
                    store(row + j * pixel, zero())
            elif whole:
                store_inputs(forward(s, pixel), row, pixel, row + (n - 1) * pixel)
            else:
                for j in range(begin, end):
                    store(patch + j * pixel, load(s + j * pixel))
                store_inputs(forward(patch, pixel), row, pixel, row + (n - 1) * pixel)
        for j in range(n - 1):
            store_values(a, half, j, to[0], to[1], block, step, apart)
        store_values(a, half, n - 1, to[2], to[3], block, step, apart)

    return transform_tile


def output_transform(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, finished, first, count, block, last_block, scratch, c)``.

    It transforms the sums from address ``c`` on, of the output blocks from ``block`` to before
    ``last_block`` of ``count`` tiles from tile ``first`` on, and stores the outputs.
    """
    nv, m, pixel, low = form.nv, form.m, form.pixel, form.few_rows
    v = vec(form.dtype, form.lanes)
    load, zero, splat = v.load, v.zero, v.splat
    tile_capacity, full_tiles, start_of = layout.tile_capacity, layout.full_tiles, layout.start_of
    write_tile = _tile_writer(form)

    @register_jitable
    def transform_output(
        a: WinogradArguments,
        finished: TileBlock,
        first: int,
        count: int,
        block: int,
        last_block: int,
        scratch: int,
        c: int,
    ) -> None:
        oh_n, ow_n = a.output_height, a.output_width
        columns, lines = full_tiles(ow_n), full_tiles(oh_n)
        across, down = (ow_n + m - 1) // m, (oh_n + m - 1) // m
        slices, point = a.output_depth, tile_capacity(a) * (a.panels * nv + 1) * pixel
        c_row = (a.panels * nv + 1) * pixel
        row, apart = (pixel, tile_capacity(a) * pixel) if low else (c_row, pixel)
        least, most = splat(-math.inf), splat(math.inf)
        if a.flags & F_LO:
            least = splat(a.low)
        if a.flags & F_HI:
            most = splat(a.high)
        for b in range(block, last_block):
            plane, i, j = first // (across * down), first // across % down, first % across
            bias, channel_block = zero(), b + a.first_block
            if a.bias != 0:
                bias = load(a.bias + channel_block * pixel)
            s = c + (b - block) * apart
            low_s, right_s, corner_s = s, s, s
            for _ in range(count):
                image, od = plane // slices, plane % slices
                oh, ow = start_of(i, lines), start_of(j, columns)
                at = (((channel_block * slices + od) * oh_n + oh) * ow_n + ow) * pixel
                y = a.y + image * a.y_image + at
                res = a.residual
                if res != 0:
                    res += image * a.residual_image + at
                rows = min(m if i < lines else m - 1, oh_n - oh)
                cols = min(m if j < columns else m - 1, ow_n - ow)
                sums_of = (s, low_s, right_s, corner_s)
                write_tile(
                    a, finished, sums_of, point, scratch, y, res, bias, least, most, ow_n * pixel,
                    rows, cols,
                )  # fmt: skip
                s += row
                low_s += row if i < lines else 0
                right_s += row if j < columns else 0
                corner_s += row if i < lines and j < columns else 0
                j += 1
                if j == across:
                    i, j = i + 1, 0
                if i == down:
                    plane, i = plane + 1, 0

    return transform_output


def _tile_writer(form: TileForm) -> Any:
    """Return the function that transforms the sums of a tile back and stores its outputs."""
    m, side, pixel = form.m, form.side, form.pixel
    v = vec(form.dtype, form.lanes)
    backward, store_outputs = backward_along(v, m, form.n), storer(v, m)
    finish_column = finisher(v, m)

    @register_jitable
    def write_tile(
        a: WinogradArguments,
        finished: TileBlock,
        s: tuple[int, int, int, int],
        point: int,
        scratch: int,
        y: int,
        res: int,
        bias: Any,
        least: Any,
        most: Any,
        row: int,
        rows: int,
        cols: int,
    ) -> None:
        """Transform the sums of a tile back, and store the outputs inside the image.

        ``s`` has the four addresses of its sums, in the order of ``to`` in `transform_tile`;
        ``point`` is the bytes between the sums of points, ``row`` those between rows of y.
        """
        line, end = scratch, (side - 1) * point
        for i in range(side - 1):
            at = i * side * point
            sums = backward(s[0] + at, point, s[2] + at + end)
            store_outputs(sums, line, pixel, line + (m - 1) * pixel)
            line += m * pixel
        at = side * end
        sums = backward(s[1] + at, point, s[3] + at + end)
        store_outputs(sums, line, pixel, line + (m - 1) * pixel)
        for j in range(cols):
            d = backward(scratch + j * pixel, m * pixel, line + j * pixel)
            at = j * pixel
            finish_column(d, bias, least, most, y + at, res + at if res != 0 else 0, row, rows)
        if a.activation != 0:
            for i in range(rows):
                finished.c = y + i * row
                call_kernel(a.activation, finished, cols, 1, 0)

    return write_tile
