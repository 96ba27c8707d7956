"""A step that checks values before kernels use them as indices or counts."""

from __future__ import annotations

from subgraph.engine.planner.lowering import Lowering, Operand, Unsupported
from subgraph.engine.toolchain.kernel import Kernel

from .arguments import InRangeArguments


def emit_range_check(
    low: Lowering,
    values: Operand,
    name: str,
    least: int,
    most: int,
    *,
    step: int = 1,
    ignored: int | None = None,
) -> None:
    """Emit the step that reports values out of range; the kernels after it clamp them.

    Args:
        low: Collects the plan's steps and reports.
        values: Values computed at run time; nothing is emitted for values that the plan knows, as
            they were checked before.
        name: The operand's name in the standard.
        least: Least allowed value.
        most: Greatest allowed value.
        step: Elements from one checked value to the next.
        ignored: One more allowed value; None: none.

    Raises:
        Unsupported: No kernel reads values of this dtype.
    """
    if values.known is not None or not values.size:
        return
    if values.dtype not in ("int32", "int64", "float32", "float64"):
        raise Unsupported(f"{name} of {values.dtype}")
    kernel = Kernel("subgraph.ops.shared.range_check_kernels", "in_range", dtype=values.dtype)
    arguments = InRangeArguments(
        values=values,
        count=values.size // step,
        step=step,
        least=least,
        most=most,
        also=least if ignored is None else ignored,
        report=low.report(name),
    )
    low.emit(kernel, arguments, 1, bytes=values.nbytes // step)
