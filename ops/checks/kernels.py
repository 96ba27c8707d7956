"""The kernel that reports values out of range, and the function with which any kernel does."""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import atomic_cas, ld, ld_i64, st_i64

from .arguments import InRangeArguments


@register_jitable
def report_value(slot: int, number: int, value: int, least: int, most: int) -> None:
    """Write a value that is out of range to a run's report slot, unless the slot is in use.

    Args:
        slot: Address of the slot (`subgraph.engine.program.reports`).
        number: Number of the report, at least 1.
        value: The value.
        least: Least allowed value.
        most: Greatest allowed value.
    """
    # Several threads may find bad values; the first one alone writes all fields of the report.
    if atomic_cas(slot, 0, number) == 0:
        st_i64(slot + 8, value)
        st_i64(slot + 16, least)
        st_i64(slot + 24, most)


def in_range(*, dtype: str) -> Callable[..., None]:
    """Return the kernel of `InRangeArguments`, which reports values out of range.

    Args:
        dtype: Dtype of the values: int32, int64, float32 or float64. The fraction of
            floats is cut off before the check, as a cast does; NaN is out of range.
    """
    arguments = view_of(InRangeArguments)
    load, item = ld(dtype), 8 if dtype.endswith("64") else 4

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        least, most = a.least, a.most
        for k in range(a.count):
            value = load(a.values + k * a.step * item)
            # The negated comparison also reports NaN, and the open bounds accept the fractions that
            # a cast cuts off.
            if not (value > least - 1 and value < most + 1) and value != a.also:
                report_value(ld_i64(a.report), ld_i64(a.report + 8), int(value), least, most)

    return kernel
