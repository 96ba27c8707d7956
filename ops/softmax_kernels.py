"""Softmax, LogSoftmax and Hardmax kernels, along contiguous rows or across them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine import vmath
from subgraph.engine.simd import rounded_as, vec

from .movement_kernels import arg

Function = Callable[..., Any]


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
    """Return the kernel over contiguous rows.

    Words: ``0 x, 1 y, 2 elements of a row``. Units: rows. ``narrow`` names the half precision to
    which every step is rounded, "" for none.
    """
    v = vec(dtype, lanes)
    load, store, load_m, store_n = v.load, v.store, v.load_m, v.store_n
    # A NaN that the greatest misses still comes into the sum.
    mask_n, select, splat, most = v.mask_n, v.select, v.splat, v.max
    hmax, total_of, bcast = v.hmax, v.sum, v.splat
    one = vec(dtype, 1)
    splat1, get1 = one.splat, one.get
    cut1 = _rounding(dtype, narrow, 1)
    exp, log1 = vmath.function("exp_flushed", dtype, lanes), vmath.function("log", dtype, 1)
    cut, half = _rounding(dtype, narrow, lanes), bool(narrow)
    item = v.itemsize
    step = lanes * item
    least = float("-inf")

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size = arg(args, 2)
        whole = size // lanes * step
        rest = size - size // lanes * lanes
        mask = mask_n(rest)
        for unit in range(begin, end):
            x, y = arg(args, 0) + unit * size * item, arg(args, 1) + unit * size * item
            a, b = splat(least), splat(least)
            i = 0
            while i + 2 * step <= whole:
                a, b = most(a, load(x + i)), most(b, load(x + i + step))
                i += 2 * step
            if i < whole:
                a = most(a, load(x + i))
            if rest > 0:
                b = most(b, select(mask, load_m(x + whole, mask), splat(least)))
            top = bcast(hmax(most(a, b)))
            total, more = splat(0.0), splat(0.0)
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
            last = splat(0.0)
            if rest > 0:
                last = select(mask, cut(exp(cut(load_m(x + whole, mask) - top))), last)
                more = more + last
            one_total = total_of(total + more)
            if half and log:
                shift = cut(bcast(get1(log1(cut1(splat1(one_total))), 0)))
                for j in range(0, whole, step):
                    store(y + j, cut(load(x + j) - top) - shift)
                if rest > 0:
                    store_n(y + whole, rest, cut(load_m(x + whole, mask) - top) - shift)
            elif half:
                divisor = cut(bcast(one_total))
                for j in range(0, whole, step):
                    store(y + j, load(y + j) / divisor)
                if rest > 0:
                    store_n(y + whole, rest, last / divisor)
            elif log:
                shift = top + bcast(get1(log1(splat1(one_total)), 0))
                for j in range(0, whole, step):
                    store(y + j, load(x + j) - shift)
                if rest > 0:
                    store_n(y + whole, rest, load_m(x + whole, mask) - shift)
            else:
                factor = splat(1.0) / bcast(one_total)
                for j in range(0, whole, step):
                    store(y + j, load(y + j) * factor)
                if rest > 0:
                    store_n(y + whole, rest, last * factor)

    return kernel


def columns(*, dtype: str, lanes: int, log: bool, narrow: str) -> Function:
    """Return the kernel along an axis with elements inside it.

    Words: ``0 x, 1 y, 2 size of the axis, 3 elements inside it``.
    Units: sizes outside the axis * tiles of ``lanes`` elements inside it.
    """
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, splat, most = v.load_m, v.store_m, v.mask_n, v.splat, v.max
    exp, logarithm = (vmath.function(name, dtype, lanes) for name in ("exp_flushed", "log"))
    cut, half = _rounding(dtype, narrow, lanes), bool(narrow)
    item = v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        size, inner = arg(args, 2), arg(args, 3)
        tiles = (inner + lanes - 1) // lanes
        step = inner * item
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * lanes
            mask = mask_n(inner - first)
            at = (outer * size * inner + first) * item
            x, y = arg(args, 0) + at, arg(args, 1) + at
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
