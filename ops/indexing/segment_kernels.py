"""The kernel of SegmentSum: rows between two offsets, one vector of columns at a time."""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld_i64, vec

from .arguments import SegmentSumArguments


@register_jitable
def _end(at: int, size: int) -> int:
    """Return an end as Slice takes it."""
    return min(max(at + size if at < 0 else at, 0), size)


def segment_sum(*, dtype: str, lanes: int, mean: bool) -> Callable[..., None]:
    """Return the kernel of `SegmentSumArguments`.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        mean: Divide each sum by the number of its rows.
    """
    arguments = view_of(SegmentSumArguments)
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, splat, item = v.load_m, v.store_m, v.mask_n, v.splat, v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size, columns = a.count, a.columns
        step = columns * item
        for bag in range(begin, end):
            offsets = a.offsets + 8 * bag
            one, other = ld_i64(offsets), ld_i64(offsets + 8)
            first, last = _end(one, size), _end(other, size)
            for column in range(0, columns, lanes):
                mask = mask_n(columns - column)
                source = a.rows + column * item
                total = splat(0.0)
                for row in range(first, last):
                    total = total + load_m(source + row * step, mask)
                if mean and one != other:
                    total = total / splat(max(last - first, 0))
                store_m(a.y + bag * step + column * item, mask, total)

    return kernel
