"""Tiles of Winograd's convolution: where they are, and their transforms along one or both axes.

`winograd_kernels` has the algorithm and its source.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import attrs
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.simd import call_kernel, prefetch, vec
from subgraph.engine.codegen.tiling import FEW_ROWS, TileBlock

from .arguments import WinogradArguments

_A, _B = 2.0 / 3.0, 1.5  # F(4) evaluates at 0, A, -A, B, -B and infinity


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
        dilated: Whether taps are apart. A tile's pixels then are those of a phase, which are
            ``dilation`` pixels apart along each axis.
    """

    dtype: str
    lanes: int
    mr: int
    nv: int
    m: int
    stride: int
    taps: int
    dilated: bool

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
        # With stride 2, two outputs of three taps read 5 pixels.
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


class Grid(NamedTuple):
    """The tiles of a plane of outputs; the full ones come before the short ones.

    Attributes:
        down: Tiles along the height.
        across: Tiles along the width.
        full_down: Full tiles along the height.
        full_across: Full tiles along the width.
    """

    down: int
    across: int
    full_down: int
    full_across: int


class Place(NamedTuple):
    """Where a tile is.

    Attributes:
        plane: Index of its plane among those of the phases of the outputs of all images.
        row: Index of the tile along the height.
        column: Index of the tile along the width.
    """

    plane: int
    row: int
    column: int


class TileAddresses(NamedTuple):
    """Addresses of the values (or sums) of a tile at the first point of each kind.

    Short tiles have no values at infinity, so values of neighbouring tiles are apart by point.

    Attributes:
        finite: Points with two finite coordinates.
        below: Points in the row of infinity.
        right: Points in the column of infinity.
        corner: The point at infinity along both axes.
    """

    finite: int
    below: int
    right: int
    corner: int


class OutputTile(NamedTuple):
    """The outputs of a tile that lie inside the image.

    Attributes:
        y: Address of the first output.
        residual: Address of its residual; 0: none.
        rows: Number of rows.
        columns: Number of columns.
    """

    y: int
    residual: int
    rows: int
    columns: int


class Epilogue(NamedTuple):
    """Vectors that finish a block of output channels.

    Attributes:
        bias: The bias.
        low: Lower bounds of the outputs.
        high: Upper bounds of the outputs.
    """

    bias: Any
    low: Any
    high: Any


def spacing_of(form: TileForm) -> Any:
    """Return ``f(a)``: rows and columns of the image from a pixel of a tile to the next one."""
    dilated = form.dilated

    @register_jitable
    def spacing(a: WinogradArguments) -> tuple[int, int]:
        return (a.dilation_height, a.dilation_width) if dilated else (1, 1)

    return spacing


def phase_of(form: TileForm) -> Any:
    """Return ``f(a, plane)``: the plane of outputs of a plane of tiles, and where its phase begins.

    Phases are the innermost part of the index of a plane of tiles. Without dilation there is one.
    """
    dilated = form.dilated

    @register_jitable
    def phase(a: WinogradArguments, plane: int) -> tuple[int, int, int]:
        if not dilated:
            return plane, 0, 0
        down, across = a.dilation_height, a.dilation_width
        return plane // (down * across), plane // across % down, plane % across

    return phase


@register_jitable
def place_of(grid: Grid, tile: int) -> Place:
    """Return where a tile is, whose index is that among all tiles."""
    row = tile // grid.across % grid.down
    return Place(tile // (grid.across * grid.down), row, tile % grid.across)


@register_jitable
def next_place(grid: Grid, at: Place) -> Place:
    """Return where the next tile is."""
    plane, row, column = at.plane, at.row, at.column + 1
    if column == grid.across:
        row, column = row + 1, 0
    if row == grid.down:
        plane, row = plane + 1, 0
    return Place(plane, row, column)


@register_jitable
def next_addresses(grid: Grid, at: Place, of: TileAddresses, row: int) -> TileAddresses:
    """Return the addresses of the values, or sums, of the next tile.

    A tile that is cut off by the border has no values of its own at infinity.

    Args:
        grid: The tiles of an image.
        at: Place of the present tile.
        of: Addresses of the present tile.
        row: Bytes between tiles.
    """
    full_row, full_column = at.row < grid.full_down, at.column < grid.full_across
    return TileAddresses(
        of.finite + row,
        of.below + (row if full_row else 0),
        of.right + (row if full_column else 0),
        of.corner + (row if full_row and full_column else 0),
    )


def forward_along(v: Any, n: int) -> Any:
    """Return ``f(source, step)``, which transforms n pixels along an axis to n vectors of values.

    ``source`` is the address of the first pixel's vector, ``step`` the bytes to the next one.
    """
    load, fma, splat = v.load, v.fma, v.splat

    @register_jitable
    def forward2(s: int, ss: int) -> Any:
        # B^T of Lavin and Gray for F(2, 3) at 0, 1, -1, infinity. Its last row has the opposite
        # sign of the value at infinity, which `backward2` takes into account.
        d0, d1, d2, d3 = load(s), load(s + ss), load(s + 2 * ss), load(s + 3 * ss)
        return d0 - d2, d1 + d2, d2 - d1, d1 - d3

    a, b = _A, _B
    a2, b2 = a * a, b * b

    @register_jitable
    def forward4(s: int, ss: int) -> Any:
        d0, d1, d2 = load(s), load(s + ss), load(s + 2 * ss)
        d3, d4, d5 = load(s + 3 * ss), load(s + 4 * ss), load(s + 5 * ss)
        # The value at a point p has the coefficients of the product of (x - q) over the other
        # points q: at a, of x (x + a) (x^2 - b^2); at 0, of (x^2 - a^2) (x^2 - b^2). Since a * b =
        # 1, the coefficients a^2 * b^2 of d0 and d1 are 1. Values at a and -a share their even and
        # odd parts.
        first = fma(splat(-(a2 + b2)), d2, d0 + d4)
        even_a, odd_a = fma(splat(-b2), d2, d4), fma(splat(-b2), d1, d3)
        even_b, odd_b = fma(splat(-a2), d2, d4), fma(splat(-a2), d1, d3)
        last = fma(splat(-(a2 + b2)), d3, d1 + d5)
        return (
            first,
            fma(splat(a), odd_a, even_a),
            fma(splat(-a), odd_a, even_a),
            fma(splat(b), odd_b, even_b),
            fma(splat(-b), odd_b, even_b),
            last,
        )

    @register_jitable
    def forward_strided(s: int, ss: int) -> Any:
        # Even inputs: F(2, 2) with the first and the last weight. Odd inputs: two products with the
        # middle weight, arranged so that the sums at a point can be added to those of the even
        # inputs.
        d0, d1, d2 = load(s), load(s + ss), load(s + 2 * ss)
        d3, d4 = load(s + 3 * ss), load(s + 4 * ss)
        # Even and odd inputs at point 0 and at point 1, even inputs at infinity.
        return d0 - d2, d1 - d3, d2, d3, d4 - d2

    return {4: forward2, 5: forward_strided, 6: forward4}[n]


def backward_along(v: Any, m: int, n: int) -> Any:
    """Return ``f(source, step, last)``, which transforms products along an axis to m outputs.

    ``source`` is the address of the vector at point 0, ``step`` the bytes to that of the next
    point, ``last`` the address of the vector at infinity, which only the last output needs.

    Args:
        v: The vector operations (``subgraph.engine.codegen.simd.vec``).
        m: Outputs of a tile along the axis.
        n: Inputs of a tile along the axis: 4, 6, or 5 with stride 2.
    """
    load, fma, splat = v.load, v.fma, v.splat

    @register_jitable
    def backward2(s: int, ss: int, last: int) -> Any:
        # Output k is the sum over the points p of p^k times the product at p.
        m0, m1, m2, m3 = load(s), load(s + ss), load(s + 2 * ss), load(last)
        return m0 + m1 + m2, m1 - m2 - m3

    a, b = _A, _B
    a2, b2, a3, b3 = a * a, b * b, a * a * a, b * b * b

    @register_jitable
    def backward4(s: int, ss: int, last: int) -> Any:
        m1, m2 = load(s + ss), load(s + 2 * ss)
        # The powers of a and -a differ in sign alone, so that even outputs need the sum of both
        # products and odd ones the difference. The product at infinity belongs to the highest
        # power.
        sum_a, diff_a = m1 + m2, m1 - m2
        m3, m4 = load(s + 3 * ss), load(s + 4 * ss)
        sum_b, diff_b = m3 + m4, m3 - m4
        cubes = fma(splat(b3), diff_b, load(last))
        return (
            load(s) + sum_a + sum_b,
            fma(splat(a), diff_a, splat(b) * diff_b),
            fma(splat(a2), sum_a, splat(b2) * sum_b),
            fma(splat(a3), diff_a, cubes),
        )

    @register_jitable
    def backward3(s: int, ss: int, last: int) -> Any:
        m1, m2, m3, m4 = load(s + ss), load(s + 2 * ss), load(s + 3 * ss), load(s + 4 * ss)
        sum_a, diff_a, sum_b, diff_b = m1 + m2, m1 - m2, m3 + m4, m3 - m4
        return (
            load(s) + sum_a + sum_b,
            fma(splat(a), diff_a, splat(b) * diff_b),
            fma(splat(a2), sum_a, fma(splat(b2), sum_b, load(last))),
        )

    @register_jitable
    def backward2_of_6(s: int, ss: int, last: int) -> Any:
        m1, m2, m3, m4 = load(s + ss), load(s + 2 * ss), load(s + 3 * ss), load(s + 4 * ss)
        odd = fma(splat(b), m3 - m4, load(last))
        return load(s) + (m1 + m2) + (m3 + m4), fma(splat(a), m1 - m2, odd)

    @register_jitable
    def backward_strided(s: int, ss: int, last: int) -> Any:
        # Even and odd inputs have been added by the GEMM of a point, as channels of one sum.
        m0, m1, m2 = load(s), load(s + ss), load(last)
        return m0 + m1, m1 + m2

    if n == 6:
        return {2: backward2_of_6, 3: backward3, 4: backward4}[m]
    return backward2 if n == 4 else backward_strided


def storer(v: Any, count: int) -> Any:
    """Return ``f(values, target, step, last)``, which stores ``count`` vectors.

    They are stored from address ``target`` on, ``step`` bytes apart, and the last one at ``last``.
    """
    store, several, final = v.store, count > 1, count - 1
    store_others: Any = storer(v, final) if several else None

    @register_jitable
    def store_all(d: Any, to: int, step: int, last: int) -> None:
        if several:
            store_others(d, to, step, to + (final - 1) * step)
        store(last, d[final])

    return store_all


def finisher(v: Any, m: int) -> Any:
    """Return ``f(values, bias, low, high, y, residual, row, rows)``: the end of a tile's column.

    It adds the bias and the residual (address 0: none) to the first ``rows`` of the m values,
    clamps them to ``low`` and ``high`` and stores them from address ``y`` on, ``row`` bytes apart.
    """
    load, store, at_least, at_most = v.load, v.store, v.max, v.min

    @register_jitable
    def finish(value: Any, bias: Any, low: Any, high: Any, y: int, res: int, down: int) -> None:
        # Bounds are the first operands of min and max, which return the second one for NaN: a NaN
        # stays a NaN.
        value = value + bias
        if res != 0:
            value = value + load(res + down)
        store(y + down, at_most(high, at_least(low, value)))

    last, several = m - 1, m > 1
    finish_others: Any = finisher(v, last) if several else None

    @register_jitable
    def finish_column(
        d: Any, bias: Any, low: Any, high: Any, y: int, res: int, row: int, rows: int
    ) -> None:
        if several:
            finish_others(d, bias, low, high, y, res, row, rows)
        if not several or rows > last:  # there is at least one row
            finish(d[last], bias, low, high, y, res, last * row)

    return finish_column


def tile_prefetcher(n: int, pixel: int) -> Any:
    """Return ``f(a, x, h0, w0)``, which prefetches n x n pixels of ``pixel`` bytes each.

    They begin at row ``h0`` and column ``w0`` of a block of an image at address ``x``. The
    transform of inputs is bound by loads.
    """

    @register_jitable
    def prefetch_tile(a: WinogradArguments, x: int, h0: int, w0: int) -> None:
        row = a.image_width * pixel
        s = x + h0 * row + w0 * pixel
        for _ in range(n):
            # The step is a cache line of 64 bytes.
            for line in range(0, n * pixel, 64):
                prefetch(s + line)
            s += row

    return prefetch_tile


def tile_transform(form: TileForm, values_offset: Any) -> Any:
    """Return ``f(a, x, h0, w0, scratch, to, block, step, apart)``, which transforms a tile.

    The tile begins at row ``h0`` and column ``w0``, which may be outside, of a block of an image
    at address ``x``. Its values are stored from the addresses ``to`` (`TileAddresses`) on.
    ``block`` is the index of the block, ``step`` the bytes between points (stride 1), ``apart``
    those between input blocks. ``scratch`` has room for 2 * n * n vectors.

    Args:
        form: The kernel's variant.
        values_offset: That of `winograd_kernels.ValueLayout`.
    """
    n, pixel = form.n, form.pixel
    v = vec(form.dtype, form.lanes)
    load, store, zero = v.load, v.store, v.zero
    forward, store_inputs = forward_along(v, n), storer(v, n)
    store_values, spacing = _value_storer(form, values_offset), spacing_of(form)

    @register_jitable
    def transform_tile(
        a: WinogradArguments,
        x: int,
        h0: int,
        w0: int,
        scratch: int,
        to: TileAddresses,
        block: int,
        step: int,
        apart: int,
    ) -> None:
        height, width = a.image_height, a.image_width
        down, across = spacing(a)
        patch, half = scratch, scratch + n * n * pixel
        # All rows of a tile have the same columns outside the image, so that their zeros are stored
        # once, before the loop over rows.
        begin = max(0, (across - 1 - w0) // across)
        end = min(n, (width - w0 + across - 1) // across)
        whole = begin == 0 and end == n
        if not whole:
            for j in range(n):
                store(patch + j * pixel, zero())
        for i in range(n):
            row = half + i * n * pixel
            h = h0 + i * down
            s = x + (h * width + w0) * pixel
            # The transform of zeros is zeros.
            if h < 0 or h >= height:
                for j in range(n):
                    store(row + j * pixel, zero())
            elif whole:
                store_inputs(forward(s, across * pixel), row, pixel, row + (n - 1) * pixel)
            else:
                for j in range(begin, end):
                    store(patch + j * pixel, load(s + j * across * pixel))
                store_inputs(forward(patch, pixel), row, pixel, row + (n - 1) * pixel)
        for j in range(n - 1):
            store_values(a, half, j, to.finite, to.below, block, step, apart)
        store_values(a, half, n - 1, to.right, to.corner, block, step, apart)

    return transform_tile


def _value_storer(form: TileForm, values_offset: Any) -> Any:
    """Return ``f(a, half, j, to, below, block, step, apart)``: values of a column of points.

    It transforms column j of the rows' transforms (at address ``half``) and stores its values:
    those in the last row of points (infinity) from ``below`` on, the others from ``to`` on. The
    other arguments are those of `tile_transform`.
    """
    n, pixel, strided = form.n, form.pixel, form.strided
    v = vec(form.dtype, form.lanes)
    store = v.store
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
        d = forward(half + j * pixel, n * pixel)
        if not strided:
            at = j * step + block * apart
            store_inputs(d, to + at, n * step, below + at + (n - 1) * n * step)
        else:
            # Column j of the transform is value ``other`` of the points in column ``point``:
            # columns 0 and 1 are even and odd inputs at 0, 2 and 3 those at 1, and 4 is the even
            # inputs at infinity. The rows have the same order. Each point holds the values of a
            # block one after the other.
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

    return store_values


def tile_writer(form: TileForm) -> Any:
    """Return ``f(a, finished, sums, point, scratch, tile, epilogue)``, which writes a tile.

    It transforms the sums at the addresses ``sums`` (`TileAddresses`) back and stores the outputs
    of ``tile`` (`OutputTile`). ``finished`` is the block of arguments of the activation, ``point``
    the bytes between the sums of points; ``scratch`` has room for n * m vectors.
    """
    m, side, pixel, dilated = form.m, form.side, form.pixel, form.dilated
    v = vec(form.dtype, form.lanes)
    backward, store_outputs = backward_along(v, m, form.n), storer(v, m)
    finish_column, spacing = finisher(v, m), spacing_of(form)

    @register_jitable
    def write_tile(
        a: WinogradArguments,
        finished: TileBlock,
        sums: TileAddresses,
        point: int,
        scratch: int,
        tile: OutputTile,
        epilogue: Epilogue,
    ) -> None:
        if dilated and tile.rows <= 0:
            return  # the last tile of a phase that has one row less than the first phase
        # Rows of points first, then columns. A short tile has no sums at infinity and reads those
        # of another tile there. They reach only the last row and column of its m outputs, which are
        # not stored.
        line, end = scratch, (side - 1) * point
        for i in range(side - 1):
            at = i * side * point
            d = backward(sums.finite + at, point, sums.right + at + end)
            store_outputs(d, line, pixel, line + (m - 1) * pixel)
            line += m * pixel
        at = side * end
        d = backward(sums.below + at, point, sums.corner + at + end)
        store_outputs(d, line, pixel, line + (m - 1) * pixel)
        bias, low, high = epilogue.bias, epilogue.low, epilogue.high
        down, across = spacing(a)
        row, residual = down * a.output_width * pixel, tile.residual
        for j in range(tile.columns):
            d = backward(scratch + j * pixel, m * pixel, line + j * pixel)
            at = j * across * pixel
            to, other = tile.y + at, residual + at if residual != 0 else 0
            finish_column(d, bias, low, high, to, other, row, tile.rows)
        # The activation runs while the outputs of the tile are in the L1 cache.
        if a.activation != 0:
            for i in range(tile.rows):
                finished.c = tile.y + i * row
                call_kernel(a.activation, finished, tile.columns, 1, 0)

    return write_tile
