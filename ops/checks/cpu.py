"""Checks on the CPU device: a step that checks values before kernels use them, and Required."""

from __future__ import annotations

from subgraph.engine.planner.lowering import Lowering, Unsupported, ValueNeeded, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN

from .arguments import InRangeArguments
from .op import LOSSES, REQUIRED_OF, WINDOWS


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
    kernel = Kernel("subgraph.ops.checks.kernels", "in_range", dtype=values.dtype)
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


@lowering("Required", domain=INTERNAL_DOMAIN, layouts=("plain", "strided"))
def required(node: Node, low: Lowering) -> None:
    """Lower Required to an alias of its first input; a loss's labels must be classes."""
    x, operator = low.input(0), node.attrs.get(REQUIRED_OF)
    if operator in WINDOWS and x.known is None:
        raise ValueNeeded(0)  # the requirement is one of the size's content
    if x.layout != "plain":
        raise Unsupported("Required of a view")  # only the first operand is read
    if operator in LOSSES:
        ignored = node.attrs.get("ignore_index")
        emit_range_check(low, low.input(1), "labels", 0, x.shape[1] - 1, ignored=ignored)
    low.alias(low.output(), x)
