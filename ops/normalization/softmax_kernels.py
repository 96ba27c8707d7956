"""Kernels of Softmax and LogSoftmax, along contiguous rows or across columns."""

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
# Bytes of short rows that are computed together; with their results they fill half of a 32 KiB L1
# cache (hardware figure).
_MAX_GROUP_BYTES = 8192
_vector_scratch = stack_words(256)  # 64-bit words: at least a vector for each of its lanes
_row_scratch = stack_words(8)  # one vector


def _rounding(dtype: str, half_precision: str, lanes: int) -> Function:
    """Return ``f(x)``, which rounds a vector to half precision; the identity for ``""``."""
    if half_precision:
        rounded: Function = rounded_as(dtype, half_precision, lanes)
        return rounded

    @register_jitable
    def same(x: Any) -> Any:
        return x

    return same


def _last_step(v: Any, log: bool, half_precision: str) -> tuple[Function, Function]:
    """Return two functions that make the softmax, or its logarithm, of vectors.

    ``scale_of(total, top)`` returns what ``finish(value, top, scale)`` needs for all elements over
    which ``total`` is the sum of exponentials. ``value`` is an exponential or, of the logarithm, an
    element, and ``top`` the largest element.
    """
    logarithm, splat = vmath.function("log", v.dtype, v.lanes), v.splat
    rounded = _rounding(v.dtype, half_precision, v.lanes)

    half = bool(half_precision)

    @register_jitable
    def scale_of(total: Any, top: Any) -> Any:
        total = rounded(total)
        if log:
            return rounded(logarithm(total)) if half else top + logarithm(total)
        return total if half else splat(1.0) / total

    @register_jitable
    def finish(value: Any, top: Any, scale: Any) -> Any:
        if log:
            return rounded(value - top) - scale if half else value - scale
        # Of half precision each element is divided, as the reference does: the product with a
        # rounded reciprocal may round differently.
        return value / scale if half else value * scale

    return scale_of, finish


def rows(*, dtype: str, lanes: int, log: bool, half_precision: str) -> Function:
    """Return the kernel of `SoftmaxArguments` over contiguous rows.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        log: Compute the logarithm of the result (LogSoftmax).
        half_precision: "float16" or "bfloat16": round every step to it, as the reference does.
    """
    arguments = view_of(SoftmaxArguments)
    v = vec(dtype, lanes)
    parts = (*_tail_functions(v)[:2], _row_maximum(v), _exponentials(v, log, half_precision))
    one_row, short_rows = _one_row(v, parts, log, half_precision), _short_rows(v, parts)
    half = bool(half_precision)
    item = item_bytes(dtype)
    step = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size = a.size
        rest = size % lanes
        row = size * item
        whole = row - rest * item
        unit = begin
        # In longer rows the reductions take a small part of the time, and a group of them would
        # leave the L1 cache between its passes.
        if not log and not half and step <= row <= _MAX_GROUP_BYTES // lanes:
            while unit + lanes <= end:
                short_rows(a.x + unit * row, a.y + unit * row, row, whole, rest)
                unit += lanes
        while unit < end:
            one_row(a.x + unit * row, a.y + unit * row, whole, rest)
            unit += 1

    return kernel


def _tail_functions(v: Any) -> tuple[Function, Function, Function]:
    """Return functions that load, store and mask the last vector of a row.

    ``whole`` are the bytes of the whole vectors of a row, ``rest`` the elements after them. Where
    there are whole vectors, the last one overlaps them: masked loads and stores take longer.
    """
    load, store, load_m, store_n = v.load, v.store, v.load_m, v.store_n
    mask_n, select, lanes, item = v.mask_n, v.select, v.lanes, v.itemsize
    step = lanes * item

    @register_jitable
    def tail_of(x: int, whole: int, rest: int) -> Any:
        """Return the last vector of a row; of a short row, lanes after its end are undefined."""
        if whole > 0:
            return load(x + whole + rest * item - step)
        return load_m(x, mask_n(rest))

    @register_jitable
    def store_tail(y: int, whole: int, rest: int, value: Any) -> None:
        if whole > 0:
            store(y + whole + rest * item - step, value)
        else:
            store_n(y, rest, value)

    @register_jitable
    def masked_tail(value: Any, other: Any, whole: int, rest: int) -> Any:
        """Return a last vector with ``other`` in lanes that overlap or lie after the row."""
        if whole > 0:
            return select(mask_n(lanes - rest), other, value)
        return select(mask_n(rest), value, other)

    return tail_of, store_tail, masked_tail


def _row_maximum(v: Any) -> Function:
    """Return ``f(x, whole, rest)``: a vector whose largest lane is the largest element of a row.

    It may miss NaN, which the sum of exponentials has then.
    """
    load, splat, larger, step = v.load, v.splat, v.max, v.lanes * v.itemsize
    least = float("-inf")
    tail_of, _, masked_tail = _tail_functions(v)

    @register_jitable
    def maximum(x: int, whole: int, rest: int) -> Any:
        """Return a vector whose largest lane is the largest element of a row."""
        a, b = splat(least), splat(least)
        i = 0
        while i + 2 * step <= whole:
            a, b = larger(a, load(x + i)), larger(b, load(x + i + step))
            i += 2 * step
        if i < whole:
            a = larger(a, load(x + i))
        if rest > 0:
            b = larger(b, masked_tail(tail_of(x, whole, rest), splat(least), whole, rest))
        return larger(a, b)

    return maximum


def _exponentials(v: Any, log: bool, half_precision: str) -> Function:
    """Return ``f(x, y, whole, rest, top)``: exponentials of a row less ``top``, and their sum."""
    load, store, splat, step = v.load, v.store, v.splat, v.lanes * v.itemsize
    exp = vmath.function("exp_flushed", v.dtype, v.lanes)
    rounded = _rounding(v.dtype, half_precision, v.lanes)
    tail_of, _, masked_tail = _tail_functions(v)

    @register_jitable
    def exponentials(x: int, y: int, whole: int, rest: int, top: Any) -> tuple[Any, Any]:
        """Return sums of exponentials, and those of the last vector.

        Those of whole vectors are stored, unless the logarithm is computed.
        """
        total, more = splat(0.0), splat(0.0)
        # The last vector overlaps the one before, and the result may be written over the input: it
        # has to be loaded before the loop stores exponentials there.
        last = tail_of(x, whole, rest) if rest > 0 else total
        i = 0
        while i + 2 * step <= whole:
            p = rounded(exp(rounded(load(x + i) - top)))
            q = rounded(exp(rounded(load(x + i + step) - top)))
            if not log:
                store(y + i, p)
                store(y + i + step, q)
            total, more = total + p, more + q
            i += 2 * step
        if i < whole:
            p = rounded(exp(rounded(load(x + i) - top)))
            if not log:
                store(y + i, p)
            total = total + p
        if rest > 0:
            last = rounded(exp(rounded(last - top)))
            # The lanes that overlap the last whole vector are in the sum already.
            more = more + masked_tail(last, splat(0.0), whole, rest)
        return total + more, last

    return exponentials


def _one_row(v: Any, parts: tuple[Function, ...], log: bool, half_precision: str) -> Function:
    """Return ``f(x, y, whole, rest)``: the softmax of a row.

    Args:
        v: Operations on vectors.
        parts: Functions that load and store the last vector, `_row_maximum`, `_exponentials`.
        log: Compute the logarithm.
        half_precision: That of `rows`.
    """
    load, store, splat, bcast, hmax, total_of = v.load, v.store, v.splat, v.splat, v.hmax, v.sum
    scale_of, finish = _last_step(v, log, half_precision)
    step = v.lanes * v.itemsize
    tail_of, store_tail, maximum, exponentials = parts

    @register_jitable
    def one_row(x: int, y: int, whole: int, rest: int) -> None:
        # Elements less a finite maximum are at most 0: no exponential overflows, the largest one is
        # 1, and the sum cannot be 0.
        top = bcast(hmax(maximum(x, whole, rest)))
        # Loaded here for the logarithm, which stores over the input before it needs the last
        # vector.
        given = tail_of(x, whole, rest) if rest > 0 else splat(0.0)
        sums, last = exponentials(x, y, whole, rest, top)
        scale = scale_of(bcast(total_of(sums)), top)
        values, end = (x, given) if log else (y, last)
        for j in range(0, whole, step):
            store(y + j, finish(load(values + j), top, scale))
        if rest > 0:
            store_tail(y, whole, rest, finish(end, top, scale))

    return one_row


def _short_rows(v: Any, parts: tuple[Function, ...]) -> Function:
    """Return ``f(x, y, row, whole, rest)``: the softmax of ``lanes`` rows of ``row`` bytes."""
    lanes = v.lanes
    load, store, splat, bcast = v.load, v.store, v.splat, v.splat
    row_max, row_sum, load1, item = v.row_max, v.row_sum, ld(v.dtype), v.itemsize
    step = lanes * item
    tail_of, store_tail, maximum, exponentials = parts

    @register_jitable
    def short_rows(x: int, y: int, row: int, whole: int, rest: int) -> None:
        """Compute as many rows as a vector has lanes, so that their reductions share latency.

        The results have the same bits as those of `one_row`.
        """
        vectors, ends = _vector_scratch(), _row_scratch()
        for k in range(lanes):
            store(vectors + k * step, maximum(x + k * row, whole, rest))
        store(ends, row_max(vectors))
        for k in range(lanes):
            to = y + k * row
            sums, last = exponentials(x + k * row, to, whole, rest, bcast(load1(ends + k * item)))
            store(vectors + k * step, sums)
            if rest > 0:
                store_tail(to, whole, rest, last)
        store(ends, splat(1.0) / row_sum(vectors))
        for k in range(lanes):
            to, factor = y + k * row, bcast(load1(ends + k * item))
            # Loaded before the loop, which would otherwise scale the overlapping elements twice.
            last = tail_of(to, whole, rest) if rest > 0 else factor
            for j in range(0, whole, step):
                store(to + j, load(to + j) * factor)
            if rest > 0:
                store_tail(to, whole, rest, last * factor)

    return short_rows


def columns(*, dtype: str, lanes: int, log: bool, half_precision: str) -> Function:
    """Return the kernel of `SoftmaxArguments` along an axis with elements inside it.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        log: Compute the logarithm of the result (LogSoftmax).
        half_precision: "float16" or "bfloat16": round every step to it, as the reference does.
    """
    arguments = view_of(SoftmaxArguments)
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, splat, larger = v.load_m, v.store_m, v.mask_n, v.splat, v.max
    exp = vmath.function("exp_flushed", dtype, lanes)
    rounded, item = _rounding(dtype, half_precision, lanes), v.itemsize
    scale_of, finish = _last_step(v, log, half_precision)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size, inner = a.size, a.inner
        tiles = (inner + lanes - 1) // lanes
        step = inner * item
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * lanes
            # Lanes after the last column compute on zeros, and are not stored.
            mask = mask_n(inner - first)
            at = (outer * size * inner + first) * item
            x, y = a.x + at, a.y + at
            top, total = load_m(x, mask), splat(0.0)
            for j in range(1, size):
                top = larger(top, load_m(x + j * step, mask))
            for j in range(size):
                p = rounded(exp(rounded(load_m(x + j * step, mask) - top)))
                total = total + p
                if not log:
                    store_m(y + j * step, mask, p)
            scale, values = scale_of(total, top), x if log else y
            for j in range(size):
                store_m(y + j * step, mask, finish(load_m(values + j * step, mask), top, scale))

    return kernel
