"""Reductions: along contiguous elements (`rows`), across them (`columns`), indices of extremes.

Sums run over several partial sums in an order that sizes alone decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import convert, ld_i64, st_i64, vec
from subgraph.engine.codegen.tile import stack_words
from subgraph.ops.movement.kernels import outer_offset

from .arguments import CumulativeArguments, ExtremeArguments, ReductionArguments

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
def _offset(dims: int, count: int, rest: int) -> int:
    """Return `outer_offset` in x without a division where there is one dimension."""
    if count == 1:
        stride: int = ld_i64(dims + 8)
        return rest * stride
    return outer_offset(dims, count, rest, 0)


def rows(*, dtype: str, lanes: int, op: str) -> Function:
    """Return the kernel of `ReductionArguments` that reduces contiguous elements.

    Dimensions outside them are kept or reduced.

    Args:
        dtype: What is reduced.
        lanes: Elements of a vector.
        op: ``sum mean prod max min l1 l2 sumsq logsum sumexp``; "sumexp" needs shifts.
    """
    arguments = view_of(ReductionArguments)
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
    def one_row(reduction: ReductionArguments, base: int, shift: Any) -> Any:
        """Return partial results of a row, one for each lane."""
        size, kept = reduction.size, reduction.kept
        others, iterations = reduction.reduced, reduction.iterations
        if extremes and iterations == 1:
            return extreme_row(base, size)
        a, b, c, d = splat(start), splat(start), splat(start), splat(start)
        for iteration in range(iterations):
            x = base + _offset(reduction.dims + 24 * kept, others, iteration)
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
        if iterations == 1 and size < 4 * lanes:
            return combine(a, b)
        return combine(combine(a, b), combine(c, d))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        reduction = arguments(args)
        kept, number, rows = reduction.kept, float(reduction.count), held()
        size, short = reduction.size, reduction.iterations == 1 and reduction.size <= lanes
        mask = mask_n(size)
        for first in range(begin, end, lanes):
            count = min(lanes, end - first)
            shift = splat(0)
            for i in range(count):
                base = reduction.x + _offset(reduction.dims, kept, first + i)
                if needs_shift:
                    shift = bcast(reduction.shifts + (first + i) * item)
                if short:
                    row = select(mask, change(load_m(base, mask), shift), splat(start))
                else:
                    row = one_row(reduction, base, shift)
                store(rows + i * step, row)
            for i in range(count, lanes):
                store(rows + i * step, splat(start))
            if needs_shift:
                shift = load_n(reduction.shifts + first * item, count)
            store_n(reduction.y + first * item, count, finish(totals(rows), shift, number))

    return kernel


def columns(*, dtype: str, lanes: int, op: str) -> Function:
    """Return the kernel of `ReductionArguments` that keeps contiguous elements.

    Dimensions outside them are kept or reduced.

    Args:
        dtype: What is reduced.
        lanes: Elements of a vector.
        op: As of `rows`.
    """
    arguments = view_of(ReductionArguments)
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
        reduction = arguments(args)
        size, kept = reduction.size, reduction.kept
        others, iterations = reduction.reduced, reduction.iterations
        number = float(reduction.count)
        tiles = (size + 4 * lanes - 1) // (4 * lanes)
        for unit in range(begin, end):
            first = unit % tiles * 4 * lanes
            base = reduction.x + outer_offset(reduction.dims, kept, unit // tiles, 0) + first * item
            y = (unit // tiles * size + first) * item
            shifts = reduction.shifts + y
            y += reduction.y
            left = size - first
            if left >= 4 * lanes:
                a, b, c, d = splat(start), splat(start), splat(start), splat(start)
                s, t, u, w = splat(0), splat(0), splat(0), splat(0)
                if needs_shift:
                    s, t = load(shifts), load(shifts + step)
                    u, w = load(shifts + 2 * step), load(shifts + 3 * step)
                for iteration in range(iterations):
                    x = base + _offset(reduction.dims + 24 * kept, others, iteration)
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
                for iteration in range(iterations):
                    x = base + _offset(reduction.dims + 24 * kept, others, iteration)
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
    """Return the kernel of `ExtremeArguments`: ArgMax and ArgMin with elements inside the axis.

    NaN counts as the most extreme.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        largest: Search the largest element, else the smallest.
        last: Of equal elements take the last one, else the first.
    """
    arguments = view_of(ExtremeArguments)
    v, indices = vec(dtype, lanes), vec("int32", lanes)
    load_m, select, mask_n = v.load_m, v.select, v.mask_n
    splat, choose, widened = indices.splat, indices.select, convert("int32", "int64", lanes)
    wide = vec("int64", lanes)
    store, store_m = wide.store, wide.store_m
    wins = _winner(v, largest, last)
    item = v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size, inner = a.size, a.inner
        tiles = (inner + lanes - 1) // lanes
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * lanes
            mask = mask_n(inner - first)
            x = a.x + (outer * size * inner + first) * item
            best, index = load_m(x, mask), splat(0)
            for j in range(1, size):
                x += inner * item
                value = load_m(x, mask)
                better = wins(value, best)
                best = select(better, value, best)
                index = choose(better, splat(j), index)
            y = a.y + (outer * inner + first) * 8
            if first + lanes <= inner:
                store(y, widened(index))
            else:
                store_m(y, mask, widened(index))

    return kernel


def extreme_along(*, dtype: str, lanes: int, largest: bool, last: bool) -> Function:
    """Return the kernel of `ExtremeArguments`: ArgMax and ArgMin along contiguous elements.

    Each lane keeps its best element and the index of that; among the lanes that hold the best of
    all, the first or the last index is taken.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        largest: Search the largest element, else the smallest.
        last: Of equal elements take the last one, else the first.
    """
    arguments = view_of(ExtremeArguments)
    v, indices = vec(dtype, lanes), vec("int32", lanes)
    load, load_m, bcast, select, mask_n = v.load, v.load_m, v.bcast, v.select, v.mask_n
    splat_best, fold = v.splat, v.hmax if largest else v.hmin
    splat, choose, steps = indices.splat, indices.select, indices.iota
    fold_indices = indices.hmax if last else indices.hmin
    wins, beats = _winner(v, largest, last), _winner(v, largest, last=False)
    nowhere, item = -1 if last else 2**31 - 1, v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size = a.size
        whole = size // lanes * lanes
        for unit in range(begin, end):
            x = a.x + unit * size * item
            best, index = bcast(x), splat(0)
            for i in range(0, whole, lanes):
                value = load(x + i * item)
                better = wins(value, best)
                best = select(better, value, best)
                index = choose(better, splat(i) + steps(), index)
            if whole < size:
                inside = mask_n(size - whole)
                value = load_m(x + whole * item, inside)
                better = wins(value, best) & inside
                best = select(better, value, best)
                index = choose(better, splat(whole) + steps(), index)
            behind = beats(splat_best(fold(best)), best)
            st_i64(a.y + unit * 8, fold_indices(choose(behind, splat(nowhere), index)))

    return kernel


def cumulative(*, dtype: str, lanes: int, op: str) -> Function:
    """Return the kernel of `CumulativeArguments`: CumSum and CumProd along an axis.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        op: ``"sum"`` or ``"prod"``.
    """
    arguments = view_of(CumulativeArguments)
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
        a = arguments(args)
        size, inner, reverse = a.size, a.inner, a.reverse != 0
        tiles = (inner + 4 * lanes - 1) // (4 * lanes)
        step, exclusive = inner * item, a.exclusive != 0
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * 4 * lanes
            at = (outer * size * inner + first) * item
            if reverse:
                at += (size - 1) * step
            by = -step if reverse else step
            x, y = a.x + at, a.y + at
            if inner - first >= 4 * lanes:
                whole_tile(x, y, size, by, exclusive)
                continue
            for j in range(first, inner, lanes):
                part(x, y, size, by, exclusive, inner - j)
                x += wide
                y += wide

    return kernel
