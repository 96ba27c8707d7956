"""Reductions: along contiguous elements (`rows`), across them (`columns`), places of extremes.

Sums run over several partial sums in an order that sizes alone decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.simd import convert, st_i64, vec
from subgraph.engine.codegen.tile import stack_words
from subgraph.ops.movement.kernels import arg, outer_offset

Function = Callable[..., Any]


def start_of(dtype: str, op: str) -> float:
    """Return what a reduction of nothing gives."""
    if op not in ("max", "min"):
        return 1 if op == "prod" else 0
    if dtype.startswith("float"):
        return float("-inf") if op == "max" else float("inf")
    info = np.iinfo(dtype)
    return int(info.min if op == "max" else info.max)


def _combiner(v: Any, op: str) -> Function:
    largest, smallest = v.maximum, v.minimum

    @register_jitable
    def add(total: Any, x: Any) -> Any:
        return total + x

    @register_jitable
    def multiply(total: Any, x: Any) -> Any:
        return total * x

    @register_jitable
    def take_max(total: Any, x: Any) -> Any:
        return largest(total, x)

    @register_jitable
    def take_min(total: Any, x: Any) -> Any:
        return smallest(total, x)

    return {"max": take_max, "min": take_min, "prod": multiply}.get(op, add)


def _transform(v: Any, op: str) -> Function:
    """Return what is done to an element before it is combined; ``shift`` is for "sumexp"."""
    absolute = v.abs
    exp: Any = vmath.function("exp", v.dtype, v.lanes) if op == "sumexp" else None

    @register_jitable
    def plain(x: Any, shift: Any) -> Any:
        return x

    @register_jitable
    def magnitude(x: Any, shift: Any) -> Any:
        return absolute(x)

    @register_jitable
    def square(x: Any, shift: Any) -> Any:
        return x * x

    @register_jitable
    def shifted(x: Any, shift: Any) -> Any:
        return exp(x - shift)

    named = {"l1": magnitude, "l2": square, "sumsq": square, "sumexp": shifted}
    return named.get(op, plain)


def _finish(v: Any, op: str) -> Function:
    """Return what is done to the result; ``number`` is the factor of "mean"."""
    real = v.dtype.startswith("float")
    root: Any = v.sqrt if real else None
    log: Any = vmath.function("log", v.dtype, v.lanes) if op in ("logsum", "sumexp") else None
    splat = v.splat

    @register_jitable
    def plain(x: Any, shift: Any, number: float) -> Any:
        return x

    @register_jitable
    def mean(x: Any, shift: Any, number: float) -> Any:
        return x / splat(number)

    @register_jitable
    def square_root(x: Any, shift: Any, number: float) -> Any:
        return root(x)

    @register_jitable
    def logarithm(x: Any, shift: Any, number: float) -> Any:
        return log(x)

    @register_jitable
    def shifted(x: Any, shift: Any, number: float) -> Any:
        return log(x) + shift

    named = {"mean": mean, "l2": square_root, "logsum": logarithm, "sumexp": shifted}
    return named.get(op, plain)


@register_jitable
def _offset(args: int, first: int, dimensions: int, rest: int) -> int:
    """Return `outer_offset` without a division where there is one dimension."""
    if dimensions == 1:
        return rest * arg(args, first + 1)
    return outer_offset(args, first, dimensions, rest, 0)


def rows(*, dtype: str, lanes: int, op: str) -> Function:
    """Return the kernel that reduces contiguous elements, and dimensions outside them.

    Args:
        dtype: What is reduced.
        lanes: Elements of a vector.
        op: ``sum mean prod max min l1 l2 sumsq logsum sumexp``; "sumexp" needs shifts.

    Words::

        0 x  1 y  2 shifts (one per element of y; "sumexp" only)  3 contiguous elements
        4 kept dimensions  5 other reduced dimensions  6 product of their sizes
        7 number of elements reduced  8.. (size, bytes in x, 0) of the kept, then of the reduced

    Units: elements of y.
    """
    v = vec(dtype, lanes)
    load, load_m, load_n, select, mask_n = v.load, v.load_m, v.load_n, v.select, v.mask_n
    store, store_n, splat = v.store, v.store_n, v.splat
    combine, change, finish = _combiner(v, op), _transform(v, op), _finish(v, op)
    totals = {"max": v.row_max, "min": v.row_min, "prod": v.row_prod}.get(op, v.row_sum)
    start, item = start_of(dtype, op), v.itemsize
    step = lanes * item
    needs_shift = op == "sumexp"
    bcast, held = v.bcast, stack_words(lanes * max(1, step // 8))
    extremes = dtype.startswith("float") and op in ("max", "min")
    nearer = v.max if op == "max" else v.min
    unordered: Any = v.unordered if extremes else None
    isnan: Any = v.isnan if extremes else None

    @register_jitable
    def extreme_row(x: int, size: int) -> Any:
        """Return the extremes of a row; NaN is looked for apart, two vectors at a time."""
        a, b, c, d, nan = splat(start), splat(start), splat(start), splat(start), splat(0)
        stop = x + size * item
        while x + 4 * step <= stop:
            e, f, g, h = load(x), load(x + step), load(x + 2 * step), load(x + 3 * step)
            a, b, c, d = nearer(a, e), nearer(b, f), nearer(c, g), nearer(d, h)
            nan = select(unordered(e, f), splat(np.nan), nan)
            nan = select(unordered(g, h), splat(np.nan), nan)
            x += 4 * step
        a, c = nearer(a, b), nearer(c, d)
        while x + step <= stop:
            e = load(x)
            a = nearer(a, e)
            nan = select(isnan(e), e, nan)
            x += step
        if x < stop:
            mask = mask_n((stop - x) // item)
            e = select(mask, load_m(x, mask), splat(start))
            c = nearer(c, e)
            nan = select(isnan(e), e, nan)
        return select(isnan(nan), nan, nearer(a, c))

    @register_jitable
    def one_row(args: int, base: int, shift: Any) -> Any:
        """Return partial results of a row, one for each lane."""
        size, kept, others, turns = arg(args, 3), arg(args, 4), arg(args, 5), arg(args, 6)
        if extremes and turns == 1:
            return extreme_row(base, size)
        a, b, c, d = splat(start), splat(start), splat(start), splat(start)
        for turn in range(turns):
            x = base + _offset(args, 8 + 3 * kept, others, turn)
            stop = x + size * item
            while x + 4 * step <= stop:
                a = combine(a, change(load(x), shift))
                b = combine(b, change(load(x + step), shift))
                c = combine(c, change(load(x + 2 * step), shift))
                d = combine(d, change(load(x + 3 * step), shift))
                x += 4 * step
            while x + step <= stop:
                a = combine(a, change(load(x), shift))
                x += step
            if x < stop:
                mask = mask_n((stop - x) // item)
                b = combine(b, select(mask, change(load_m(x, mask), shift), splat(start)))
        if turns == 1 and size < 4 * lanes:
            return combine(a, b)
        return combine(combine(a, b), combine(c, d))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        kept, number, rows = arg(args, 4), float(arg(args, 7)), held()
        size, short = arg(args, 3), arg(args, 6) == 1 and arg(args, 3) <= lanes
        mask = mask_n(size)
        for first in range(begin, end, lanes):
            count = min(lanes, end - first)
            shift = splat(0)
            for i in range(count):
                base = arg(args, 0) + _offset(args, 8, kept, first + i)
                if needs_shift:
                    shift = bcast(arg(args, 2) + (first + i) * item)
                if short:
                    row = select(mask, change(load_m(base, mask), shift), splat(start))
                else:
                    row = one_row(args, base, shift)
                store(rows + i * step, row)
            for i in range(count, lanes):
                store(rows + i * step, splat(start))
            if needs_shift:
                shift = load_n(arg(args, 2) + first * item, count)
            store_n(arg(args, 1) + first * item, count, finish(totals(rows), shift, number))

    return kernel


def columns(*, dtype: str, lanes: int, op: str) -> Function:
    """Return the kernel that reduces dimensions outside contiguous elements that are kept.

    Words as of `rows`, but 3 is the number of contiguous kept elements, 4 the other kept
    dimensions, 5 the reduced dimensions.

    Units: other kept sizes * tiles of ``4 * lanes`` contiguous elements.
    """
    v = vec(dtype, lanes)
    load, load_m, store, store_m, mask_n, splat = (
        v.load,
        v.load_m,
        v.store,
        v.store_m,
        v.mask_n,
        v.splat,
    )
    combine, change, finish = _combiner(v, op), _transform(v, op), _finish(v, op)
    start, item = start_of(dtype, op), v.itemsize
    step = lanes * item
    needs_shift = op == "sumexp"

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size, kept, others, turns = arg(args, 3), arg(args, 4), arg(args, 5), arg(args, 6)
        number = float(arg(args, 7))
        tiles = (size + 4 * lanes - 1) // (4 * lanes)
        for unit in range(begin, end):
            first = unit % tiles * 4 * lanes
            base = arg(args, 0) + outer_offset(args, 8, kept, unit // tiles, 0) + first * item
            y = (unit // tiles * size + first) * item
            shifts = arg(args, 2) + y
            y += arg(args, 1)
            left = size - first
            if left >= 4 * lanes:
                a, b, c, d = splat(start), splat(start), splat(start), splat(start)
                s, t, u, w = splat(0), splat(0), splat(0), splat(0)
                if needs_shift:
                    s, t = load(shifts), load(shifts + step)
                    u, w = load(shifts + 2 * step), load(shifts + 3 * step)
                for turn in range(turns):
                    x = base + _offset(args, 8 + 3 * kept, others, turn)
                    a = combine(a, change(load(x), s))
                    b = combine(b, change(load(x + step), t))
                    c = combine(c, change(load(x + 2 * step), u))
                    d = combine(d, change(load(x + 3 * step), w))
                store(y, finish(a, s, number))
                store(y + step, finish(b, t, number))
                store(y + 2 * step, finish(c, u, number))
                store(y + 3 * step, finish(d, w, number))
                continue
            while left > 0:
                mask = mask_n(left)
                a, s = splat(start), splat(0)
                if needs_shift:
                    s = load_m(shifts, mask)
                for turn in range(turns):
                    x = base + _offset(args, 8 + 3 * kept, others, turn)
                    a = combine(a, change(load_m(x, mask), s))
                store_m(y, mask, finish(a, s, number))
                base += step
                y += step
                shifts += step
                left -= lanes

    return kernel


def _winner(v: Any, largest: bool, last: bool) -> Function:
    """Return whether elements take the place of the best so far; NaN is the most extreme."""
    real = v.dtype.startswith("float")
    isnan: Any = v.isnan if real else None

    @register_jitable
    def beats(x: Any, best: Any) -> Any:
        if largest:
            return x >= best if last else x > best
        return x <= best if last else x < best

    @register_jitable
    def loses(x: Any, best: Any) -> Any:
        """Return False where either is NaN."""
        if largest:
            return x < best if last else x <= best
        return x > best if last else x >= best

    @register_jitable
    def wins_real(x: Any, best: Any) -> Any:
        if last:
            return isnan(x) | ~(loses(x, best) | isnan(best))
        return ~(loses(x, best) | isnan(best))

    return wins_real if real else beats


def extreme(*, dtype: str, lanes: int, largest: bool, last: bool) -> Function:
    """Return the kernel of ArgMax and ArgMin: positions along an axis, int64.

    NaN counts as the most extreme. ``last``: of equals the last one, else the first.

    Words: ``0 x, 1 y, 2 size of the axis, 3 elements inside it``.
    Units: sizes outside the axis * tiles of ``lanes`` elements inside it.
    """
    v, places = vec(dtype, lanes), vec("int32", lanes)
    load_m, select, mask_n = v.load_m, v.select, v.mask_n
    splat, choose, widened = places.splat, places.select, convert("int32", "int64", lanes)
    wide = vec("int64", lanes)
    store, store_m = wide.store, wide.store_m
    wins = _winner(v, largest, last)
    item = v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size, inner = arg(args, 2), arg(args, 3)
        tiles = (inner + lanes - 1) // lanes
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * lanes
            mask = mask_n(inner - first)
            x = arg(args, 0) + (outer * size * inner + first) * item
            best, place = load_m(x, mask), splat(0)
            for j in range(1, size):
                x += inner * item
                value = load_m(x, mask)
                better = wins(value, best)
                best = select(better, value, best)
                place = choose(better, splat(j), place)
            y = arg(args, 1) + (outer * inner + first) * 8
            if first + lanes <= inner:
                store(y, widened(place))
            else:
                store_m(y, mask, widened(place))

    return kernel


def extreme_along(*, dtype: str, lanes: int, largest: bool, last: bool) -> Function:
    """Return the kernel of ArgMax and ArgMin along contiguous elements; see `extreme`.

    Every lane keeps its best and where it was; of the lanes that hold the best of all, the first
    or the last place counts.

    Words: ``0 x, 1 y, 2 size of the axis``. Units: sizes outside the axis.
    """
    v, places = vec(dtype, lanes), vec("int32", lanes)
    load, load_m, bcast, select, mask_n = v.load, v.load_m, v.bcast, v.select, v.mask_n
    splat_best, fold = v.splat, v.hmax if largest else v.hmin
    splat, choose, steps = places.splat, places.select, places.iota
    fold_places = places.hmax if last else places.hmin
    wins, beats = _winner(v, largest, last), _winner(v, largest, last=False)
    nowhere, item = -1 if last else 2**31 - 1, v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size = arg(args, 2)
        whole = size // lanes * lanes
        for unit in range(begin, end):
            x = arg(args, 0) + unit * size * item
            best, place = bcast(x), splat(0)
            for i in range(0, whole, lanes):
                value = load(x + i * item)
                better = wins(value, best)
                best = select(better, value, best)
                place = choose(better, splat(i) + steps(), place)
            if whole < size:
                inside = mask_n(size - whole)
                value = load_m(x + whole * item, inside)
                better = wins(value, best) & inside
                best = select(better, value, best)
                place = choose(better, splat(whole) + steps(), place)
            behind = beats(splat_best(fold(best)), best)
            st_i64(arg(args, 1) + unit * 8, fold_places(choose(behind, splat(nowhere), place)))

    return kernel


def cumulative(*, dtype: str, lanes: int, op: str) -> Function:
    """Return the kernel of CumSum and CumProd along an axis.

    Words: ``0 x, 1 y, 2 size of the axis, 3 elements inside it, 4 reverse, 5 exclusive``.
    Units: sizes outside the axis * tiles of ``4 * lanes`` elements inside it.
    """
    v = vec(dtype, lanes)
    load, store, load_n, store_n, splat = v.load, v.store, v.load_n, v.store_n, v.splat
    combine, item, start = _combiner(v, op), v.itemsize, start_of(dtype, op)
    wide = lanes * item

    @register_jitable
    def whole_tile(x: int, y: int, size: int, by: int, exclusive: bool) -> None:
        a, b, c, d = splat(start), splat(start), splat(start), splat(start)
        for _ in range(size):
            if exclusive:
                store(y, a)
                store(y + wide, b)
                store(y + 2 * wide, c)
                store(y + 3 * wide, d)
            a, b = combine(a, load(x)), combine(b, load(x + wide))
            c, d = combine(c, load(x + 2 * wide)), combine(d, load(x + 3 * wide))
            if not exclusive:
                store(y, a)
                store(y + wide, b)
                store(y + 2 * wide, c)
                store(y + 3 * wide, d)
            x += by
            y += by

    @register_jitable
    def part(x: int, y: int, size: int, by: int, exclusive: bool, count: int) -> None:
        total = splat(start)
        for _ in range(size):
            before = total
            total = combine(total, load(x) if count >= lanes else load_n(x, count))
            store_n(y, count, before if exclusive else total)
            x += by
            y += by

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size, inner, reverse = arg(args, 2), arg(args, 3), arg(args, 4) != 0
        tiles = (inner + 4 * lanes - 1) // (4 * lanes)
        step, exclusive = inner * item, arg(args, 5) != 0
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * 4 * lanes
            at = (outer * size * inner + first) * item
            if reverse:
                at += (size - 1) * step
            by = -step if reverse else step
            x, y = arg(args, 0) + at, arg(args, 1) + at
            if inner - first >= 4 * lanes:
                whole_tile(x, y, size, by, exclusive)
                continue
            for j in range(first, inner, lanes):
                part(x, y, size, by, exclusive, inner - j)
                x += wide
                y += wide

    return kernel
