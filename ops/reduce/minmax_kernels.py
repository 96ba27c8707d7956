"""Kernel of the largest and the smallest element of an array, in one pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import st_f32, vec

from .arguments import MinMaxArguments


def minmax(*, lanes: int) -> Callable[..., None]:
    """Return the kernel of `MinMaxArguments`.

    Args:
        lanes: Elements of a vector.
    """
    arguments = view_of(MinMaxArguments)
    v = vec("float32", lanes)
    load, load_m, select, mask_n, splat = v.load, v.load_m, v.select, v.mask_n, v.splat
    larger, smaller, unordered, isnan = v.max, v.min, v.unordered, v.isnan
    row_largest, row_smallest = v.hmax, v.hmin
    step, infinite = 4 * lanes, np.inf

    @register_jitable
    def of_run(x: int, size: int) -> Any:
        """Return the largest and smallest of each lane, and NaN in lanes that saw one."""
        # The extremes may drop NaN, which is found separately: they then need one instruction each.
        a, b, c, d = splat(-infinite), splat(-infinite), splat(infinite), splat(infinite)
        nan, stop = splat(0), x + 4 * size
        while x + 4 * step <= stop:
            e, f, g, h = load(x), load(x + step), load(x + 2 * step), load(x + 3 * step)
            a, b = larger(larger(a, e), g), larger(larger(b, f), h)
            c, d = smaller(smaller(c, e), g), smaller(smaller(d, f), h)
            nan = select(unordered(e, f), splat(np.nan), nan)
            nan = select(unordered(g, h), splat(np.nan), nan)
            x += 4 * step
        while x < stop:
            mask = mask_n(min(lanes, (stop - x) // 4))
            e = load_m(x, mask)
            # Lanes after the end are loaded as 0: no NaN, but perhaps larger or smaller than all
            # elements.
            a = larger(a, select(mask, e, splat(-infinite)))
            c = smaller(c, select(mask, e, splat(infinite)))
            nan = select(isnan(e), splat(np.nan), nan)
            x += step
        return larger(a, b), smaller(c, d), nan

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size = a.run
        for unit in range(begin, end):
            first = unit * size
            count = min(size, a.size - first)
            most, least, nan = of_run(a.x + 4 * first, count)
            st_f32(a.largest + 4 * unit, row_largest(select(isnan(nan), nan, most)))
            st_f32(a.smallest + 4 * unit, row_smallest(select(isnan(nan), nan, least)))

    return kernel
