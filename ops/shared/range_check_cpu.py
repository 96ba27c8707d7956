"""The check of values that kernels take as indices or counts, as a step before these kernels."""

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
    """Emit the step that reports values out of range, for kernels that clamp them.

    Args:
        low: Where the step goes.
        values: Values that are computed at run time; what a plan knows is checked before.
        name: The operand's name in the standard.
        least: The least value that is allowed.
        most: The greatest value that is allowed.
        step: Elements from one value to the next, where other numbers stand between them.
        ignored: A value that is allowed besides; None for none.

    Raises:
        Unsupported: no kernel reads values of this dtype.
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
