"""Strassen's product of matrices: seven products of quarters where the definition has eight.

A is cut into top and bottom rows, B into left and right columns, both into the near and the far
half of the depth. Every product is of sums of quarters, and goes into one or two quarters of C
(Strassen, "Gaussian Elimination is not Optimal", 1969); sums of A are made once for many columns,
those of B, a panel at a time, just before they are used.

Quarters share their rounding errors, and what is not finite in one would be in all: rows, and
columns, of very different magnitude, and those with an infinity or NaN, are multiplied by the
definition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.emit import item_bytes
from subgraph.engine.codegen.simd import bits_f64, call_kernel, ld_i64, st_f64, vec
from subgraph.engine.codegen.tile import arg, put, rows_of, stack_words
from subgraph.engine.codegen.tiling import (
    F_HI,
    F_LO,
    F_MINUS,
    T_A,
    T_AHEAD,
    T_AKS,
    T_ARS,
    T_B,
    T_BJS,
    T_BKS,
    T_C,
    T_CJS,
    T_CRS,
    T_FLAGS,
    T_HI,
    T_IJS,
    T_INIT,
    T_IRS,
    T_KEEP,
    T_KIN,
    T_LO,
    T_MIX,
    T_N0,
    T_N1,
    T_N2,
    T_PACE,
    T_RES,
    T_RJS,
    T_RRS,
    T_SIGN,
    T_TAIL,
    T_WORDS,
)

from .arguments import StrassenArguments

_ALIKE = 8.0  # times as large may a row be as the one that it is added to
_LARGEST = 1e15  # of which products are finite; columns: see strassen_cpu
_words = stack_words(T_WORDS)
_where = stack_words(16)
# Words of what a product works on.
_ROW, _HALF, _ROWS, _NEAR, _FAR, _DEPTH, _LAST, _NEXT, _NEXT_NEAR, _NEXT_FAR = range(10)


def product(*, dtype: str, lanes: int, mr: int, nv: int) -> Callable[..., None]:
    """Return the kernel of `StrassenArguments`: ``C = act(init + A @ B + residual)``.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        mr: Rows of a contraction tile.
        nv: Vectors of a row of a contraction tile.
    """
    arguments = view_of(StrassenArguments)
    v = vec(dtype, lanes)
    load, store, splat, select = v.load, v.store, v.splat, v.select
    largest, highest, total_of = v.max, v.hmax, v.sum
    item = item_bytes(dtype)
    width = nv * lanes
    step = width * item
    both = 2 * step  # bytes of a row of the sums of a pair of panels

    @register_jitable
    def clear(sums: int, rows: int) -> None:
        """Let the sums of a pair of panels be zero."""
        for i in range(0, rows * both, lanes * item):
            store(sums + i, splat(0.0))

    @register_jitable
    def finish(call: StrassenArguments, t: int, w: int, sums: int, p: int) -> None:
        """Add the sums of a pair of panels to C; the last pass adds the residual and activates."""
        crs, flags = call.n * item, call.flags
        first, last = arg(w, _NEAR) == 0, arg(w, _LAST) != 0
        init, res = call.init, call.residual if last else 0
        low, high = splat(call.low), splat(call.high)
        rows, pairs = arg(w, _ROWS), call.n // width // 2
        put(t, T_CRS, crs)
        for r in range(0, rows, mr):
            count = min(mr, rows - r)
            for side in range(2):
                column = (p + side * pairs) * step
                start = (arg(w, _ROW) + r) * crs + column
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
                if last and call.post != 0:
                    put(t, T_C, call.c + start)
                    call_kernel(call.post, t, count, nv, 0)
        put(t, T_CRS, both)

    @register_jitable
    def larger(most: Any, x: Any) -> Any:
        return largest(most, largest(x, splat(0.0) - x))

    @register_jitable
    def sums_of_a(call: StrassenArguments, w: int, scratch: int) -> bool:
        """Make the operands of one pass; return whether quarters may share their errors."""
        ars, rows, depth = call.a_row, arg(w, _HALF), arg(w, _DEPTH)
        to, size = call.sum_row, call.sum_bytes
        alike = True
        for r in range(rows):
            top = call.a + (arg(w, _ROW) + r) * ars
            bottom = top + rows * ars
            d = scratch + r * to
            there = rows + r < arg(w, _ROWS)  # of an odd number one row meets zeros
            above, below, wrong = splat(0.0), splat(0.0), splat(0.0)
            for k in range(0, depth, lanes):
                near, far = (arg(w, _NEAR) + k) * item, (arg(w, _FAR) + k) * item
                a, b = load(top + near), load(top + far)
                c = load(bottom + near) if there else splat(0.0)
                e = load(bottom + far) if there else splat(0.0)
                above = larger(larger(above, a), b)
                below = larger(larger(below, c), e)
                wrong = wrong + ((a - a) + (b - b)) + ((c - c) + (e - e))
                at = d + k * item
                store(at, a + e)
                store(at + size, c + e)
                store(at + 2 * size, a)
                store(at + 3 * size, e)
                store(at + 4 * size, a + b)
                store(at + 5 * size, c - a)
                store(at + 6 * size, b - e)
            x = highest(above)
            y = highest(below) if there else x
            most = min(_LARGEST, _ALIKE * min(x, y))
            alike = alike and total_of(wrong) == 0.0 and max(x, y) <= most
        return alike

    @register_jitable
    def multiply(
        call: StrassenArguments, t: int, w: int, a: int, b: int, c: int, other: int, ahead: int
    ) -> None:
        """Add a product to a quarter of C and to another one; the first tile mixes B."""
        rows = arg(w, _HALF)
        ars, depth = call.sum_row, arg(w, _DEPTH)
        put(t, T_ARS, ars)
        put(t, T_B, b)
        pace = 2 * step // max(1, (rows + mr - 1) // mr) if ahead != 0 else 0
        ahead = ahead if ahead != 0 else b
        put(t, T_PACE, pace)
        tile = call.mixed_tile if arg(t, T_MIX) != 0 else call.twice_tile
        i = 0
        while i < rows:
            m = rows_of(rows - i, mr)
            put(t, T_A, a + i * ars)
            put(t, T_C, c + i * both)
            put(t, T_RES, other + i * both if other != 0 else 0)
            put(t, T_AHEAD, ahead)
            ahead += depth // 2 * pace
            call_kernel(tile, t, m, nv, 0)
            if i == 0 and arg(t, T_MIX) != 0:
                tile = call.twice_tile
                put(t, T_B, b + arg(t, T_KEEP))
            i += m

    @register_jitable
    def mix(t: int, b: int, other: int, keep: int, sign: float) -> int:
        """Let B be a sum of two quarters, which is kept for the tiles after the first."""
        put(t, T_MIX, other - b)
        put(t, T_KEEP, keep - b)
        st_f64(t + 8 * T_SIGN, sign)
        return b

    @register_jitable
    def seven(call: StrassenArguments, t: int, w: int, scratch: int, sums: int, p: int) -> None:
        """Run the products of a pair of panels."""
        total, rows = call.k, arg(w, _HALF)
        size = call.sum_bytes
        panels = call.n // width
        target = scratch + 7 * size
        left = call.b + p * total * step
        right = left + panels // 2 * total * step
        near, far = arg(w, _NEAR) * step, arg(w, _FAR) * step
        b11, b12, b21, b22 = left + near, right + near, left + far, right + far
        c11, c12 = sums, sums + step
        c21, c22 = c11 + rows * both, c12 + rows * both
        next_left = call.b + arg(w, _NEXT) * total * step
        next_right = next_left + panels // 2 * total * step
        near, far = arg(w, _NEXT_NEAR) * step, arg(w, _NEXT_FAR) * step
        put(t, T_FLAGS, 0)
        b = mix(t, b11, b22, target, 1.0)
        multiply(call, t, w, scratch, b, c11, c22, next_left + near)
        b = mix(t, b12, b22, target, -1.0)
        multiply(call, t, w, scratch + 2 * size, b, c12, c22, next_left + far)
        b = mix(t, b21, b11, target, -1.0)
        multiply(call, t, w, scratch + 3 * size, b, c11, c21, next_right + near)
        b = mix(t, b11, b12, target, 1.0)
        multiply(call, t, w, scratch + 5 * size, b, c22, 0, next_right + far)
        b = mix(t, b21, b22, target, 1.0)
        multiply(call, t, w, scratch + 6 * size, b, c11, 0, 0)
        put(t, T_MIX, 0)
        put(t, T_FLAGS, F_MINUS)
        multiply(call, t, w, scratch + size, b11, c21, c22, 0)
        multiply(call, t, w, scratch + 4 * size, b22, c12, c11, 0)

    @register_jitable
    def plain(call: StrassenArguments, t: int, w: int, sums: int, p: int) -> None:
        """Run the products of a pair of panels by the definition."""
        total, ars, rows = call.k, call.a_row, arg(w, _ROWS)
        pairs = call.n // width // 2
        put(t, T_ARS, ars)
        put(t, T_PACE, 0)
        put(t, T_FLAGS, 0)
        put(t, T_RES, 0)
        i = 0
        while i < rows:
            m = rows_of(rows - i, mr)
            a = call.a + (arg(w, _ROW) + i) * ars
            for side in range(2):
                c = sums + i * both + side * step
                b = call.b + (p + side * pairs) * total * step
                put(t, T_C, c)
                put(t, T_INIT, c)
                for half in range(2):
                    k = arg(w, _NEAR + half)
                    put(t, T_A, a + k * item)
                    put(t, T_B, b + k * step)
                    put(t, T_AHEAD, b + k * step)
                    call_kernel(call.tile, t, m, nv, 0)
            i += m

    @register_jitable
    def one_pass(
        call: StrassenArguments, t: int, w: int, scratch: int, first: int, end: int
    ) -> None:
        """Add the products of one range of steps of both halves, for pairs of panels."""
        half = arg(w, _HALF)
        near, far, depth = arg(w, _NEAR), arg(w, _FAR), arg(w, _DEPTH)
        sums = scratch + 7 * call.sum_bytes + call.pass_depth * step
        alike = sums_of_a(call, w, scratch)
        put(w, _LAST, 1 if near + depth >= call.k // 2 else 0)
        put(t, T_KIN, depth)
        for p in range(first, end):
            # The tiles of a pair bring the next one closer, or the first one's next steps.
            on = depth if p + 1 == end and arg(w, _LAST) == 0 else 0
            put(w, _NEXT, first if p + 1 == end else p + 1)
            put(w, _NEXT_NEAR, near + on)
            put(w, _NEXT_FAR, far + on)
            clear(sums, 2 * half)
            if alike and ld_i64(call.alike + 8 * p) != 0:
                seven(call, t, w, scratch, sums, p)
            else:
                plain(call, t, w, sums, p)
            finish(call, t, w, sums, p)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        call = arguments(args)
        t, w = _words(), _where()
        m, total = call.m, call.k
        mb, pb, kc = call.block_rows, call.block_pairs, call.pass_depth
        scratch = call.scratch + worker * call.scratch_bytes
        pairs = call.n // width // 2
        pair_blocks = (pairs + pb - 1) // pb
        put(t, T_N0, 1)
        put(t, T_N1, 1)
        put(t, T_N2, 1)
        put(t, T_AKS, item)
        put(t, T_BKS, step)
        put(t, T_BJS, lanes * item)
        put(t, T_CRS, both)
        put(t, T_CJS, lanes * item)
        put(t, T_RRS, both)
        put(t, T_RJS, lanes * item)
        put(t, T_IRS, both)
        put(t, T_IJS, lanes * item)
        put(t, T_LO, bits_f64(call.low))
        put(t, T_HI, bits_f64(call.high))
        put(t, T_TAIL, lanes)
        for unit in range(begin, end):
            row, first = unit // pair_blocks * mb, unit % pair_blocks * pb
            rows = min(mb, m - row)
            put(w, _ROW, row)
            put(w, _ROWS, rows)
            put(w, _HALF, (rows + 1) // 2)
            for k in range(0, total // 2, kc):
                put(w, _NEAR, k)
                put(w, _FAR, total // 2 + k)
                put(w, _DEPTH, min(kc, total // 2 - k))
                one_pass(call, t, w, scratch, first, min(pairs, first + pb))

    return kernel
