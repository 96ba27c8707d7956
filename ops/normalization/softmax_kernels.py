"""Softmax, LogSoftmax and Hardmax kernels, along contiguous rows or across them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, rounded_as, vec
from subgraph.engine.codegen.tile import stack_words

from .arguments import SoftmaxArguments

Function = Callable[..., Any]
_NEAR = 8192  # bytes of rows that go together: with as many of results in half the first cache
_parts = stack_words(256)  # as many of the widest vectors as they have lanes
_ends = stack_words(8)


def _rounding(dtype: str, narrow: str, lanes: int) -> Function:
    """Return what rounds a vector to half precision as every step of the reference does."""
    if narrow:
        rounded: Function = rounded_as(dtype, narrow, lanes)
        return rounded

    @register_jitable
    def same(x: Any) -> Any:
        return x

    return same


def rows(*, dtype: str, lanes: int, log: bool, narrow: str) -> Function:
    """Return the kernel of `SoftmaxArguments` over contiguous rows.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        log: Compute the logarithm of the result (LogSoftmax).
        narrow: The half precision to which every step is rounded, "" for none.
    """
    arguments = view_of(SoftmaxArguments)
    v = vec(dtype, lanes)
    parts = (*_tails(v)[:2], _highest(v), _exponentials(v, log, narrow))
    one_row, short_rows = _one_row(v, parts, log, narrow), _short_rows(v, parts)
    half = bool(narrow)
    item = item_bytes(dtype)
    step = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size = a.size
        rest = size % lanes
        row = size * item
        whole = row - rest * item
        unit = begin
        if not log and not half and step <= row <= _NEAR // lanes:
            while unit + lanes <= end:
                short_rows(a.x + unit * row, a.y + unit * row, row, whole, rest)
                unit += lanes
        while unit < end:
            one_row(a.x + unit * row, a.y + unit * row, whole, rest)
            unit += 1

    return kernel


def _tails(v: Any) -> tuple[Function, Function, Function]:
    """Return what loads, stores and masks the last vector of a row.

    ``whole`` are the bytes of the whole vectors of a row, ``rest`` the elements after them.
    """
    load, store, load_m, store_n = v.load, v.store, v.load_m, v.store_n
    mask_n, select, lanes, item = v.mask_n, v.select, v.lanes, v.itemsize
    step = lanes * item

    @register_jitable
    def tail_of(x: int, whole: int, rest: int) -> Any:
        """Return the last vector of a row, that of a short one with anything behind it.

        It begins among what whole vectors cover: a masked one takes more time.
        """
        if whole > 0:
            return load(x + whole + rest * item - step)
        return load_m(x, mask_n(rest))

    @register_jitable
    def keep_tail(y: int, whole: int, rest: int, value: Any) -> None:
        if whole > 0:
            store(y + whole + rest * item - step, value)
        else:
            store_n(y, rest, value)

    @register_jitable
    def counted(value: Any, other: Any, whole: int, rest: int) -> Any:
        """Return a last vector with ``other`` where it is no part of the row, or was counted."""
        if whole > 0:
            return select(mask_n(lanes - rest), other, value)
        return select(mask_n(rest), value, other)

    return tail_of, keep_tail, counted


def _highest(v: Any) -> Function:
    """Return ``f(x, whole, rest)``: a vector whose greatest lane is that of a row.

    A NaN that the greatest misses still comes into the sum.
    """
    load, splat, most, step = v.load, v.splat, v.max, v.lanes * v.itemsize
    least = float("-inf")
    tail_of, _, counted = _tails(v)

    @register_jitable
    def highest(x: int, whole: int, rest: int) -> Any:
        """Return a vector whose greatest lane is the greatest element of a row."""
        a, b = splat(least), splat(least)
        i = 0
        while i + 2 * step <= whole:
            a, b = most(a, load(x + i)), most(b, load(x + i + step))
            i += 2 * step
        if i < whole:
            a = most(a, load(x + i))
        if rest > 0:
            b = most(b, counted(tail_of(x, whole, rest), splat(least), whole, rest))
        return most(a, b)

    return highest


def _exponentials(v: Any, log: bool, narrow: str) -> Function:
    """Return ``f(x, y, whole, rest, top)``: exponentials of a row less ``top``, and their sum."""
    load, store, splat, step = v.load, v.store, v.splat, v.lanes * v.itemsize
    exp = vmath.function("exp_flushed", v.dtype, v.lanes)
    cut = _rounding(v.dtype, narrow, v.lanes)
    tail_of, _, counted = _tails(v)

    @register_jitable
    def exponentials(x: int, y: int, whole: int, rest: int, top: Any) -> tuple[Any, Any]:
        """Store those of whole vectors (not of a logarithm); return the sums and the last ones."""
        total, more = splat(0.0), splat(0.0)
        last = tail_of(x, whole, rest) if rest > 0 else total
        i = 0
        while i + 2 * step <= whole:
            p = cut(exp(cut(load(x + i) - top)))
            q = cut(exp(cut(load(x + i + step) - top)))
            if not log:
                store(y + i, p)
                store(y + i + step, q)
            total, more = total + p, more + q
            i += 2 * step
        if i < whole:
            p = cut(exp(cut(load(x + i) - top)))
            if not log:
                store(y + i, p)
            total = total + p
        if rest > 0:
            last = cut(exp(cut(last - top)))
            more = more + counted(last, splat(0.0), whole, rest)
        return total + more, last

    return exponentials


def _one_row(v: Any, parts: tuple[Function, ...], log: bool, narrow: str) -> Function:
    """Return ``f(x, y, whole, rest)``: the softmax of a row, of the parts that `rows` makes."""
    dtype, lanes, one = v.dtype, v.lanes, vec(v.dtype, 1)
    load, store, splat, bcast, hmax, total_of = v.load, v.store, v.splat, v.splat, v.hmax, v.sum
    splat1, get1, cut1 = one.splat, one.get, _rounding(dtype, narrow, 1)
    log1, cut = vmath.function("log", dtype, 1), _rounding(dtype, narrow, lanes)
    half, step = bool(narrow), lanes * v.itemsize
    tail_of, keep_tail, highest, exponentials = parts

    @register_jitable
    def one_row(x: int, y: int, whole: int, rest: int) -> None:
        top = bcast(hmax(highest(x, whole, rest)))
        given = tail_of(x, whole, rest) if rest > 0 else splat(0.0)
        sums, last = exponentials(x, y, whole, rest, top)
        one_total = total_of(sums)
        if half and log:
            shift = cut(bcast(get1(log1(cut1(splat1(one_total))), 0)))
            for j in range(0, whole, step):
                store(y + j, cut(load(x + j) - top) - shift)
            if rest > 0:
                keep_tail(y, whole, rest, cut(given - top) - shift)
        elif half:
            divisor = cut(bcast(one_total))
            for j in range(0, whole, step):
                store(y + j, load(y + j) / divisor)
            if rest > 0:
                keep_tail(y, whole, rest, last / divisor)
        elif log:
            shift = top + bcast(get1(log1(splat1(one_total)), 0))
            for j in range(0, whole, step):
                store(y + j, load(x + j) - shift)
            if rest > 0:
                keep_tail(y, whole, rest, given - shift)
        else:
            factor = splat(1.0) / bcast(one_total)
            for j in range(0, whole, step):
                store(y + j, load(y + j) * factor)
            if rest > 0:
                keep_tail(y, whole, rest, last * factor)

    return one_row


def _short_rows(v: Any, parts: tuple[Function, ...]) -> Function:
    """Return ``f(x, y, row, whole, rest)``: the softmax of ``lanes`` rows of ``row`` bytes."""
    lanes = v.lanes
    load, store, splat, bcast = v.load, v.store, v.splat, v.splat
    row_max, row_sum, load1, item = v.row_max, v.row_sum, ld(v.dtype), v.itemsize
    step = lanes * item
    tail_of, keep_tail, highest, exponentials = parts

    @register_jitable
    def short_rows(x: int, y: int, row: int, whole: int, rest: int) -> None:
        """Do as many rows as a vector has lanes; the same bits as `one_row`, which waits more."""
        vectors, ends = _parts(), _ends()
        for k in range(lanes):
            store(vectors + k * step, highest(x + k * row, whole, rest))
        store(ends, row_max(vectors))
        for k in range(lanes):
            to = y + k * row
            sums, last = exponentials(x + k * row, to, whole, rest, bcast(load1(ends + k * item)))
            store(vectors + k * step, sums)
            if rest > 0:
                keep_tail(to, whole, rest, last)
        store(ends, splat(1.0) / row_sum(vectors))
        for k in range(lanes):
            to, factor = y + k * row, bcast(load1(ends + k * item))
            last = tail_of(to, whole, rest) if rest > 0 else factor
            for j in range(0, whole, step):
                store(to + j, load(to + j) * factor)
            if rest > 0:
                keep_tail(to, whole, rest, last * factor)

    return short_rows


def columns(*, dtype: str, lanes: int, log: bool, narrow: str) -> Function:
    """Return the kernel of `SoftmaxArguments` along an axis with elements inside it.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        log: Compute the logarithm of the result (LogSoftmax).
        narrow: The half precision to which every step is rounded, "" for none.
    """
    arguments = view_of(SoftmaxArguments)
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, splat, most = v.load_m, v.store_m, v.mask_n, v.splat, v.max
    exp, logarithm = (vmath.function(name, dtype, lanes) for name in ("exp_flushed", "log"))
    cut, half = _rounding(dtype, narrow, lanes), bool(narrow)
    item = v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size, inner = a.size, a.inner
        tiles = (inner + lanes - 1) // lanes
        step = inner * item
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * lanes
            mask = mask_n(inner - first)
            at = (outer * size * inner + first) * item
            x, y = a.x + at, a.y + at
            top, total = load_m(x, mask), splat(0.0)
            for j in range(1, size):
                top = most(top, load_m(x + j * step, mask))
            for j in range(size):
                p = cut(exp(cut(load_m(x + j * step, mask) - top)))
                total = total + p
                if not log:
                    store_m(y + j * step, mask, p)
            if half and log:
                shift = cut(logarithm(cut(total)))
                for j in range(size):
                    below = cut(load_m(x + j * step, mask) - top)
                    store_m(y + j * step, mask, below - shift)
            elif half:
                divisor = cut(total)
                for j in range(size):
                    store_m(y + j * step, mask, load_m(y + j * step, mask) / divisor)
            elif log:
                shift = top + logarithm(total)
                for j in range(size):
                    store_m(y + j * step, mask, load_m(x + j * step, mask) - shift)
            else:
                factor = splat(1.0) / total
                for j in range(size):
                    store_m(y + j * step, mask, load_m(y + j * step, mask) * factor)

    return kernel
