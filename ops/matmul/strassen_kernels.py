"""Strassen's matrix product: seven products of quarters where the definition has eight.

A is divided into top and bottom rows, B into left and right columns, and both into the near and the
far half of K. Each product is one of sums of quarters, and is added to one or two quarters of C
(Strassen, "Gaussian Elimination is not Optimal", 1969). Sums of A are computed once for many
columns; those of B, a panel at a time, just before they are used.

The sums mix rounding errors of quarters, and an infinity or NaN in one quarter would spread to
others. Rows and columns of very different magnitude, or with infinities or NaN, are therefore
multiplied by the definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.simd import call_kernel, ld_i64, vec
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import F_HI, F_LO, F_MINUS, TileBlock

from .arguments import StrassenArguments

# Largest ratio of magnitudes of rows that are added (estimate; of columns: `strassen_cpu`).
_MAX_RATIO = 8.0
_MAX_ELEMENT = 1e15  # elements below it have finite products in float32
_tile_block = stack_block(TileBlock)


class Pass(WordBlock):
    """One pass over a block of C.

    Attributes:
        row: First row of the block.
        half: Rows of the block's upper half, rounded up.
        rows: Rows of the block.
        near: First step in the near half of K.
        far: First step in the far half of K.
        depth: Steps in each half.
        last: 1 if no pass follows, else 0.
        next_pair: The pair of panels that is multiplied next, for prefetching.
        next_near: Its first step in the near half.
        next_far: Its first step in the far half.
    """

    row: int
    half: int
    rows: int
    near: int
    far: int
    depth: int
    last: int
    next_pair: int
    next_near: int
    next_far: int


_pass = stack_block(Pass)


def product(*, dtype: str, lanes: int, mr: int, nv: int) -> Callable[..., None]:
    """Return the kernel of `StrassenArguments`: ``C = act(init + A @ B + residual)``.

    Args:
        dtype: Dtype of the elements.
        lanes: Elements of a vector.
        mr: Rows of a contraction tile.
        nv: Vectors of a row of a contraction tile.
    """
    arguments = view_of(StrassenArguments)
    item = item_bytes(dtype)
    width = nv * lanes
    step = width * item
    both = 2 * step  # bytes of a row of the sums of a pair of panels
    one_pass = _pass_runner(dtype, lanes, mr, nv)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        call = arguments(args)
        t, w = _tile_block(), _pass()
        m, total = call.m, call.k
        mb, pb, kc = call.block_rows, call.block_pairs, call.pass_depth
        scratch = call.scratch + worker * call.scratch_bytes
        pairs = call.n // width // 2
        pair_blocks = (pairs + pb - 1) // pb
        t.outer_count = 1
        t.middle_count = 1
        t.inner_count = 1
        t.a_step = item
        t.b_step = step
        t.b_vector = lanes * item
        t.c_row = both
        t.c_vector = lanes * item
        t.residual_row = both
        t.residual_vector = lanes * item
        t.start_row = both
        t.start_vector = lanes * item
        t.low = call.low
        t.high = call.high
        t.tail = lanes
        for unit in range(begin, end):
            row, first = unit // pair_blocks * mb, unit % pair_blocks * pb
            rows = min(mb, m - row)
            w.row = row
            w.rows = rows
            w.half = (rows + 1) // 2
            for k in range(0, total // 2, kc):
                w.near = k
                w.far = total // 2 + k
                w.depth = min(kc, total // 2 - k)
                one_pass(call, t, w, scratch, first, min(pairs, first + pb))

    return kernel


def _pass_runner(dtype: str, lanes: int, mr: int, nv: int) -> Any:
    """Return ``f(call, t, w, scratch, first, end)``, which runs a pass for pairs of panels."""
    item = item_bytes(dtype)
    step = nv * lanes * item
    clear, sums_of_a = _clearer(dtype, lanes, nv), _summer_of_a(dtype, lanes)
    finish = _finisher(dtype, lanes, mr, nv)
    seven_products = _seven_products(mr, nv, nv * lanes, item)
    eight_products = _eight_products(mr, nv, nv * lanes, item)

    @register_jitable
    def one_pass(
        call: StrassenArguments, t: TileBlock, w: Pass, scratch: int, first: int, end: int
    ) -> None:
        """Run a pass for the pairs of panels from ``first`` to before ``end``."""
        half = w.half
        near, far, depth = w.near, w.far, w.depth
        sums = scratch + 7 * call.sum_bytes + call.pass_depth * step
        similar = sums_of_a(call, w, scratch)
        w.last = 1 if near + depth >= call.k // 2 else 0
        t.steps = depth
        for p in range(first, end):
            # The tiles of a pair prefetch the next pair, or the next steps of the first pair.
            on = depth if p + 1 == end and w.last == 0 else 0
            w.next_pair = first if p + 1 == end else p + 1
            w.next_near = near + on
            w.next_far = far + on
            clear(sums, 2 * half)
            if similar and ld_i64(call.similar + 8 * p) != 0:
                seven_products(call, t, w, scratch, sums, p)
            else:
                eight_products(call, t, w, sums, p)
            finish(call, t, w, sums, p)

    return one_pass


def _clearer(dtype: str, lanes: int, nv: int) -> Any:
    """Return ``f(sums, rows)``, which sets the sums of a pair of panels to zero."""
    v = vec(dtype, lanes)
    store, splat, item = v.store, v.splat, v.itemsize
    both = 2 * nv * lanes * item

    @register_jitable
    def clear(sums: int, rows: int) -> None:
        """Set the sums of a pair of panels to zero."""
        for i in range(0, rows * both, lanes * item):
            store(sums + i, splat(0.0))

    return clear


def _finisher(dtype: str, lanes: int, mr: int, nv: int) -> Any:
    """Return ``f(call, t, w, sums, p)``, which adds the sums of a pair of panels to C."""
    v = vec(dtype, lanes)
    load, store, splat, select, item = v.load, v.store, v.splat, v.select, v.itemsize
    width = nv * lanes
    step = width * item
    both = 2 * step

    @register_jitable
    def finish(call: StrassenArguments, t: TileBlock, w: Pass, sums: int, p: int) -> None:
        """Add the sums of a pair of panels to C; the last pass adds residual and activation."""
        crs, flags = call.n * item, call.flags
        first, last = w.near == 0, w.last != 0
        init, res = call.init, call.residual if last else 0
        low, high = splat(call.low), splat(call.high)
        rows, pairs = w.rows, call.n // width // 2
        t.c_row = crs
        for r in range(0, rows, mr):
            count = min(mr, rows - r)
            for side in range(2):
                column = (p + side * pairs) * step
                start = (w.row + r) * crs + column
                for i in range(count):
                    at, x = start + i * crs, sums + (r + i) * both + side * step
                    for j in range(0, step, lanes * item):
                        y = load(x + j)
                        if not first:
                            y = y + load(call.c + at + j)
                        elif init != 0:
                            y = y + load(init + column + j)
                        if res != 0:
                            y = y + load(res + at + j)
                        if last and flags & F_LO:
                            y = select(low > y, low, y)
                        if last and flags & F_HI:
                            y = select(high < y, high, y)
                        store(call.c + at + j, y)
                if last and call.activation != 0:
                    t.c = call.c + start
                    call_kernel(call.activation, t, count, nv, 0)
        t.c_row = both

    return finish


def _summer_of_a(dtype: str, lanes: int) -> Any:
    """Return ``f(call, w, scratch)``, which computes the seven sums of A for a pass."""
    v = vec(dtype, lanes)
    load, store, splat, item = v.load, v.store, v.splat, v.itemsize
    largest, highest, total_of = v.max, v.hmax, v.sum

    @register_jitable
    def larger(most: Any, x: Any) -> Any:
        return largest(most, largest(x, splat(0.0) - x))

    @register_jitable
    def sums_of_a(call: StrassenArguments, w: Pass, scratch: int) -> bool:
        """Compute the seven sums of A for a pass; return whether magnitudes of rows are similar."""
        ars, rows, depth = call.a_row, w.half, w.depth
        to, size = call.sum_row, call.sum_bytes
        similar = True
        for r in range(rows):
            top = call.a + (w.row + r) * ars
            bottom = top + rows * ars
            d = scratch + r * to
            paired = rows + r < w.rows  # the middle of an odd number of rows is paired with zeros
            above, below, not_finite = splat(0.0), splat(0.0), splat(0.0)
            for k in range(0, depth, lanes):
                near, far = (w.near + k) * item, (w.far + k) * item
                a, b = load(top + near), load(top + far)
                c = load(bottom + near) if paired else splat(0.0)
                e = load(bottom + far) if paired else splat(0.0)
                above = larger(larger(above, a), b)
                below = larger(larger(below, c), e)
                not_finite = not_finite + ((a - a) + (b - b)) + ((c - c) + (e - e))
                at = d + k * item
                store(at, a + e)
                store(at + size, c + e)
                store(at + 2 * size, a)
                store(at + 3 * size, e)
                store(at + 4 * size, a + b)
                store(at + 5 * size, c - a)
                store(at + 6 * size, b - e)
            x = highest(above)
            y = highest(below) if paired else x
            most = min(_MAX_ELEMENT, _MAX_RATIO * min(x, y))
            similar = similar and total_of(not_finite) == 0.0 and max(x, y) <= most
        return similar

    return sums_of_a


@register_jitable
def _mix(t: TileBlock, b: int, other: int, copy: int, sign: float) -> int:
    """Set B to ``b + sign * other``, which the first tile stores at ``copy`` for the others."""
    t.addend = other - b
    t.sum_copy = copy - b
    t.sign = sign
    return b


def _pair_product(mr: int, nv: int, both: int) -> Any:
    """Return ``f(call, t, w, a, b, c, other, ahead)``, which runs one of the seven products.

    Args:
        mr: Rows of a contraction tile.
        nv: Vectors of a row of a contraction tile.
        both: Bytes of a row of the sums of a pair of panels.
    """

    @register_jitable
    def multiply(
        call: StrassenArguments,
        t: TileBlock,
        w: Pass,
        a: int,
        b: int,
        c: int,
        other: int,
        ahead: int,
    ) -> None:
        """Add a product to the quarter ``c`` and to the quarter ``other`` (0: none).

        ``a``, ``b`` and ``ahead`` (0: none) are the addresses of A's sum, of B and of the weights
        to prefetch. If B is a sum of quarters, the first tile computes it (`_mix`).
        """
        rows = w.half
        ars, depth = call.sum_row, w.depth
        t.a_row = ars
        t.b = b
        pace = both // max(1, (rows + mr - 1) // mr) if ahead != 0 else 0
        ahead = ahead if ahead != 0 else b
        t.pace = pace
        tile = call.mixed_tile if t.addend != 0 else call.twice_tile
        i = 0
        while i < rows:
            m = rows_of(rows - i, mr)
            t.a = a + i * ars
            t.c = c + i * both
            t.residual = other + i * both if other != 0 else 0
            t.ahead = ahead
            ahead += depth // 2 * pace
            call_kernel(tile, t, m, nv, 0)
            if i == 0 and t.addend != 0:
                tile = call.twice_tile
                t.b = b + t.sum_copy
            i += m

    return multiply


def _seven_products(mr: int, nv: int, width: int, item: int) -> Any:
    """Return ``f(call, t, w, scratch, sums, p)``, which runs Strassen's products of a pair."""
    step = width * item
    both = 2 * step
    multiply = _pair_product(mr, nv, both)

    @register_jitable
    def seven_products(
        call: StrassenArguments, t: TileBlock, w: Pass, scratch: int, sums: int, p: int
    ) -> None:
        """Run the seven products of a pair of panels."""
        total, rows = call.k, w.half
        size = call.sum_bytes
        panels = call.n // width
        target = scratch + 7 * size
        left = call.b + p * total * step
        right = left + panels // 2 * total * step
        near, far = w.near * step, w.far * step
        b11, b12, b21, b22 = left + near, right + near, left + far, right + far
        c11, c12 = sums, sums + step
        c21, c22 = c11 + rows * both, c12 + rows * both
        next_left = call.b + w.next_pair * total * step
        next_right = next_left + panels // 2 * total * step
        near, far = w.next_near * step, w.next_far * step
        t.flags = 0
        b = _mix(t, b11, b22, target, 1.0)
        multiply(call, t, w, scratch, b, c11, c22, next_left + near)
        b = _mix(t, b12, b22, target, -1.0)
        multiply(call, t, w, scratch + 2 * size, b, c12, c22, next_left + far)
        b = _mix(t, b21, b11, target, -1.0)
        multiply(call, t, w, scratch + 3 * size, b, c11, c21, next_right + near)
        b = _mix(t, b11, b12, target, 1.0)
        multiply(call, t, w, scratch + 5 * size, b, c22, 0, next_right + far)
        b = _mix(t, b21, b22, target, 1.0)
        multiply(call, t, w, scratch + 6 * size, b, c11, 0, 0)
        t.addend = 0
        t.flags = F_MINUS
        multiply(call, t, w, scratch + size, b11, c21, c22, 0)
        multiply(call, t, w, scratch + 4 * size, b22, c12, c11, 0)

    return seven_products


def _eight_products(mr: int, nv: int, width: int, item: int) -> Any:
    """Return ``f(call, t, w, sums, p)``, which runs the products of a pair by the definition."""
    step = width * item
    both = 2 * step

    @register_jitable
    def eight_products(call: StrassenArguments, t: TileBlock, w: Pass, sums: int, p: int) -> None:
        """Run the eight products of a pair of panels by the definition."""
        total, ars, rows = call.k, call.a_row, w.rows
        pairs = call.n // width // 2
        t.a_row = ars
        t.pace = 0
        t.flags = 0
        t.residual = 0
        i = 0
        while i < rows:
            m = rows_of(rows - i, mr)
            a = call.a + (w.row + i) * ars
            for side in range(2):
                c = sums + i * both + side * step
                b = call.b + (p + side * pairs) * total * step
                t.c = c
                t.start = c
                for half in range(2):
                    k = w.near if half == 0 else w.far
                    t.a = a + k * item
                    t.b = b + k * step
                    t.ahead = b + k * step
                    call_kernel(call.tile, t, m, nv, 0)
            i += m

    return eight_products
