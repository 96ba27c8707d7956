"""Reductions: along contiguous elements (`rows`), across them (`columns`), ArgMax, CumSum.

Sums are made of several partial sums, in an order that depends on sizes alone, not on threads.
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

from .arguments import ArgMinMaxArguments, CumulativeArguments, ReductionArguments

Function = Callable[..., Any]

# Iterations over outer dimensions whose results are combined at a time. Sums of such sums lose
# fewer digits than one long sum: the error for 2^20 positive numbers was 9e-7 instead of 9e-4.
_PART = 512


def identity_of(dtype: str, op: str) -> float:
    """Return the identity of an operation: its result for no elements."""
    if op not in ("max", "min"):
        return 1 if op == "prod" else 0
    if dtype.startswith("float"):
        return float("-inf") if op == "max" else float("inf")
    info = np.iinfo(dtype)
    return int(info.min if op == "max" else info.max)


def _combiner(v: Any, op: str) -> Function:
    """Return ``f(total, x)``, which combines vectors of results."""

    @register_jitable
    def add(total: Any, x: Any) -> Any:
        return total + x

    @register_jitable
    def multiply(total: Any, x: Any) -> Any:
        return total * x

    combiners: dict[str, Function] = {"max": v.maximum, "min": v.minimum, "prod": multiply}
    return combiners.get(op, add)


def _transform(v: Any, op: str) -> Function:
    """Return ``f(x, shift)``, applied to elements before they are combined."""
    absolute, is_absolute, is_squared = v.abs, op == "l1", op in ("l2", "sumsq")
    is_shifted = op == "sumexp"
    exp: Any = vmath.function("exp", v.dtype, v.lanes) if is_shifted else None

    @register_jitable
    def transform(x: Any, shift: Any) -> Any:
        if is_absolute:
            return absolute(x)
        if is_squared:
            return x * x
        if is_shifted:
            return exp(x - shift)
        return x

    return transform


def _finish(v: Any, op: str) -> Function:
    """Return ``f(x, shift, number)``, applied to results; ``number``: elements reduced to one."""
    is_mean, is_root, is_shifted = op == "mean", op == "l2", op == "sumexp"
    is_logarithm, splat = is_shifted or op == "logsum", v.splat
    root: Any = v.sqrt if is_root else None
    log: Any = vmath.function("log", v.dtype, v.lanes) if is_logarithm else None

    @register_jitable
    def finish(x: Any, shift: Any, number: float) -> Any:
        if is_mean:
            return x / splat(number)
        if is_root:
            return root(x)
        if is_logarithm:
            return log(x) + shift if is_shifted else log(x)
        return x

    return finish


@register_jitable
def _offset(dims: int, count: int, rest: int) -> int:
    """Return `outer_offset` in x, without a division if there is only one dimension."""
    if count == 1:
        stride: int = ld_i64(dims + 8)
        return rest * stride
    return outer_offset(dims, count, rest, 0)


def _minmax_row(v: Any, op: str) -> Function:
    """Return ``f(x, size)``: the maxima (minima) of the lanes of a row of real numbers."""
    load, load_m, select, mask_n, splat = v.load, v.load_m, v.select, v.mask_n, v.splat
    better_of = v.max if op == "max" else v.min
    unordered, isnan = v.unordered, v.isnan
    start, item = identity_of(v.dtype, op), v.itemsize
    step = v.lanes * item

    @register_jitable
    def minmax_row(x: int, size: int) -> Any:
        """Return the maxima (minima) of the lanes of a row.

        NaN is searched separately, two vectors at a time: faster than a maximum that keeps NaN.
        """
        # Four independent maxima hide the latency. They need not keep NaN, since the result is NaN
        # anyway once ``nan`` is.
        a, b, c, d, nan = splat(start), splat(start), splat(start), splat(start), splat(0)
        stop = x + size * item
        while x + 4 * step <= stop:
            e, f, g, h = load(x), load(x + step), load(x + 2 * step), load(x + 3 * step)
            a, b, c, d = better_of(a, e), better_of(b, f), better_of(c, g), better_of(d, h)
            nan = select(unordered(e, f), splat(np.nan), nan)
            nan = select(unordered(g, h), splat(np.nan), nan)
            x += 4 * step
        a, c = better_of(a, b), better_of(c, d)
        while x + step <= stop:
            e = load(x)
            a = better_of(a, e)
            nan = select(isnan(e), e, nan)
            x += step
        if x < stop:
            mask = mask_n((stop - x) // item)
            # Lanes after the end are loaded as 0, which may exceed all elements.
            e = select(mask, load_m(x, mask), splat(start))
            c = better_of(c, e)
            nan = select(isnan(e), e, nan)
        return select(isnan(nan), nan, better_of(a, c))

    return minmax_row


def _row_reducer(v: Any, op: str) -> Function:
    """Return ``f(reduction, base, shift)``: partial results of the row at address ``base``."""
    load, load_m, select, mask_n, splat = v.load, v.load_m, v.select, v.mask_n, v.splat
    combine, transform, lanes, item = _combiner(v, op), _transform(v, op), v.lanes, v.itemsize
    start, step = identity_of(v.dtype, op), lanes * item
    is_minmax = v.dtype.startswith("float") and op in ("max", "min")
    minmax_row: Any = _minmax_row(v, op) if is_minmax else None

    @register_jitable
    def one_row(reduction: ReductionArguments, base: int, shift: Any) -> Any:
        """Return partial results of a row, one for each lane."""
        size, kept = reduction.size, reduction.kept
        others, iterations = reduction.reduced, reduction.iterations
        if is_minmax and iterations == 1:
            return minmax_row(base, size)
        result = splat(start)
        for part in range(0, iterations, _PART):
            # Four independent partial results hide the latency of an operation; they are shared by
            # the iterations of a part.
            a, b, c, d = splat(start), splat(start), splat(start), splat(start)
            for iteration in range(part, min(part + _PART, iterations)):
                x = base + _offset(reduction.dims + 24 * kept, others, iteration)
                stop = x + size * item
                while x + 4 * step <= stop:
                    a = combine(a, transform(load(x), shift))
                    b = combine(b, transform(load(x + step), shift))
                    c = combine(c, transform(load(x + 2 * step), shift))
                    d = combine(d, transform(load(x + 3 * step), shift))
                    x += 4 * step
                while x + step <= stop:
                    a = combine(a, transform(load(x), shift))
                    x += step
                if x < stop:
                    mask = mask_n((stop - x) // item)
                    # Selected after the transform: that of a lane after the end, which is loaded as
                    # 0, may differ from the identity (``exp(0 - shift)``).
                    b = combine(b, select(mask, transform(load_m(x, mask), shift), splat(start)))
            # In short rows ``c`` and ``d`` still hold the identity.
            if iterations == 1 and size < 4 * lanes:
                return combine(a, b)
            result = combine(result, combine(combine(a, b), combine(c, d)))
        return result

    return one_row


def rows(*, dtype: str, lanes: int, op: str) -> Function:
    """Return the kernel of `ReductionArguments` that reduces contiguous elements.

    Dimensions outside them are kept or reduced.

    Args:
        dtype: Dtype of the elements.
        lanes: Elements of a vector.
        op: One of ``sum mean prod max min l1 l2 sumsq logsum sumexp``. "sumexp" is
            ``log(sum(exp(x - shift))) + shift``.
    """
    arguments = view_of(ReductionArguments)
    v = vec(dtype, lanes)
    load_m, load_n, select, mask_n, bcast = v.load_m, v.load_n, v.select, v.mask_n, v.bcast
    store, store_n, splat = v.store, v.store_n, v.splat
    transform, finish, one_row = _transform(v, op), _finish(v, op), _row_reducer(v, op)
    totals = {"max": v.row_max, "min": v.row_min, "prod": v.row_prod}.get(op, v.row_sum)
    start, item = identity_of(dtype, op), v.itemsize
    step = lanes * item
    needs_shift = op == "sumexp"
    row_results = stack_words(lanes * max(1, step // 8))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        reduction = arguments(args)
        kept, number, rows = reduction.kept, float(reduction.count), row_results()
        size, short = reduction.size, reduction.iterations == 1 and reduction.size <= lanes
        mask = mask_n(size)
        # As many rows as a vector has lanes are reduced together at the end, one for each lane,
        # instead of each by horizontal operations.
        for first in range(begin, end, lanes):
            count = min(lanes, end - first)
            shift = splat(0)
            for i in range(count):
                base = reduction.x + _offset(reduction.dims, kept, first + i)
                if needs_shift:
                    shift = bcast(reduction.shifts + (first + i) * item)
                if short:
                    row = select(mask, transform(load_m(base, mask), shift), splat(start))
                else:
                    row = one_row(reduction, base, shift)
                store(rows + i * step, row)
            # The last group may have fewer rows. The others are initialized, as the reduction reads
            # them; their lanes are not stored.
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
        dtype: Dtype of the elements.
        lanes: Elements of a vector.
        op: As of `rows`.
    """
    arguments = view_of(ReductionArguments)
    v = vec(dtype, lanes)
    load, load_m, store, store_m = v.load, v.load_m, v.store, v.store_m
    mask_n, splat = v.mask_n, v.splat
    combine, transform, finish = _combiner(v, op), _transform(v, op), _finish(v, op)
    start, item = identity_of(dtype, op), v.itemsize
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
            # Four vectors of columns are four independent sums for each address that is computed.
            if left >= 4 * lanes:
                a, b, c, d = splat(start), splat(start), splat(start), splat(start)
                s, t, u, w = splat(0), splat(0), splat(0), splat(0)
                if needs_shift:
                    s, t = load(shifts), load(shifts + step)
                    u, w = load(shifts + 2 * step), load(shifts + 3 * step)
                for part in range(0, iterations, _PART):
                    e, f, g, h = splat(start), splat(start), splat(start), splat(start)
                    for iteration in range(part, min(part + _PART, iterations)):
                        x = base + _offset(reduction.dims + 24 * kept, others, iteration)
                        e = combine(e, transform(load(x), s))
                        f = combine(f, transform(load(x + step), t))
                        g = combine(g, transform(load(x + 2 * step), u))
                        h = combine(h, transform(load(x + 3 * step), w))
                    a, b, c, d = combine(a, e), combine(b, f), combine(c, g), combine(d, h)
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
                for part in range(0, iterations, _PART):
                    e = splat(start)
                    for iteration in range(part, min(part + _PART, iterations)):
                        x = base + _offset(reduction.dims + 24 * kept, others, iteration)
                        e = combine(e, transform(load_m(x, mask), s))
                    a = combine(a, e)
                store_m(y, mask, finish(a, s, number))
                base += step
                y += step
                shifts += step
                left -= lanes

    return kernel


def _replaces_best(v: Any, largest: bool, last: bool) -> Function:
    """Return ``f(x, best)``: the lanes in which x replaces the best so far; NaN exceeds all."""
    real = v.dtype.startswith("float")
    isnan: Any = v.isnan if real else None

    @register_jitable
    def exceeds(x: Any, best: Any) -> Any:
        if largest:
            return x >= best if last else x > best
        return x <= best if last else x < best

    @register_jitable
    def does_not_exceed(x: Any, best: Any) -> Any:
        """Return the lanes in which x does not replace ``best``; False where either is NaN."""
        if largest:
            return x < best if last else x <= best
        return x > best if last else x >= best

    @register_jitable
    def exceeds_or_nan(x: Any, best: Any) -> Any:
        # Comparisons with NaN are false: of a NaN in x the negation is true, so that it replaces
        # numbers. Among several NaN the last or the first one stays.
        if last:
            return isnan(x) | ~(does_not_exceed(x, best) | isnan(best))
        return ~(does_not_exceed(x, best) | isnan(best))

    return exceeds_or_nan if real else exceeds


def argminmax_columns(*, dtype: str, lanes: int, largest: bool, last: bool) -> Function:
    """Return the kernel of `ArgMinMaxArguments`: ArgMax and ArgMin with elements inside the axis.

    NaN counts as the largest (smallest).

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        largest: Search the largest element, else the smallest.
        last: Of equal elements take the last one, else the first.
    """
    arguments = view_of(ArgMinMaxArguments)
    v, indices = vec(dtype, lanes), vec("int32", lanes)
    load_m, select, mask_n = v.load_m, v.select, v.mask_n
    splat, choose, widened = indices.splat, indices.select, convert("int32", "int64", lanes)
    wide = vec("int64", lanes)
    store, store_m = wide.store, wide.store_m
    replaces = _replaces_best(v, largest, last)
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
                better = replaces(value, best)
                best = select(better, value, best)
                index = choose(better, splat(j), index)
            y = a.y + (outer * inner + first) * 8
            if first + lanes <= inner:
                store(y, widened(index))
            else:
                store_m(y, mask, widened(index))

    return kernel


def argminmax_rows(*, dtype: str, lanes: int, largest: bool, last: bool) -> Function:
    """Return the kernel of `ArgMinMaxArguments`: ArgMax and ArgMin along contiguous elements.

    Each lane has its best element and its index; of the lanes that have the best of all, the first
    or the last index is the result.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        largest: Search the largest element, else the smallest.
        last: Of equal elements take the last one, else the first.
    """
    arguments = view_of(ArgMinMaxArguments)
    v, indices = vec(dtype, lanes), vec("int32", lanes)
    load, load_m, bcast, select, mask_n = v.load, v.load_m, v.bcast, v.select, v.mask_n
    splat_best, fold = v.splat, v.hmax if largest else v.hmin
    splat, choose, steps = indices.splat, indices.select, indices.iota
    fold_indices = indices.hmax if last else indices.hmin
    replaces, exceeds = _replaces_best(v, largest, last), _replaces_best(v, largest, last=False)
    no_index, item = -1 if last else 2**31 - 1, v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size = a.size
        whole = size // lanes * lanes
        for unit in range(begin, end):
            x = a.x + unit * size * item
            # All lanes begin with element 0 and its index. Minus infinity would not do: in a row of
            # nothing else no element exceeds it, and no lane would get an index.
            best, index = bcast(x), splat(0)
            for i in range(0, whole, lanes):
                value = load(x + i * item)
                better = replaces(value, best)
                best = select(better, value, best)
                index = choose(better, splat(i) + steps(), index)
            if whole < size:
                inside = mask_n(size - whole)
                value = load_m(x + whole * item, inside)
                # Lanes after the end are loaded as 0, which may exceed all elements.
                better = replaces(value, best) & inside
                best = select(better, value, best)
                index = choose(better, splat(whole) + steps(), index)
            # Lanes whose best element is smaller (larger) than that of the row get an index that no
            # lane's index loses to. The maximum (minimum) of lanes keeps NaN, as the lanes do.
            not_best = exceeds(splat_best(fold(best)), best)
            st_i64(a.y + unit * 8, fold_indices(choose(not_best, splat(no_index), index)))

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
    whole_tile, part = _accumulators(v, op)
    item, wide = v.itemsize, lanes * v.itemsize

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


def _accumulators(v: Any, op: str) -> tuple[Function, Function]:
    """Return two functions that accumulate ``size`` rows, ``by`` bytes apart, from x to y.

    ``whole_tile(x, y, size, by, exclusive)`` does so for four vectors of columns, and
    ``part(x, y, size, by, exclusive, count)`` for ``count`` columns, one vector at most.
    """
    load, store, load_n, store_n, splat = v.load, v.store, v.load_n, v.store_n, v.splat
    combine, lanes, start = _combiner(v, op), v.lanes, identity_of(v.dtype, op)
    wide = lanes * v.itemsize

    @register_jitable
    def whole_tile(x: int, y: int, size: int, by: int, exclusive: bool) -> None:
        """Accumulate four vectors of columns, ``by`` bytes between rows."""
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
        """Accumulate ``count`` columns, one vector at most."""
        total = splat(start)
        for _ in range(size):
            before = total
            total = combine(total, load(x) if count >= lanes else load_n(x, count))
            store_n(y, count, before if exclusive else total)
            x += by
            y += by

    return whole_tile, part
