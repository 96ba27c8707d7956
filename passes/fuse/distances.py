"""The pattern of distances between all pairs of rows: squares of differences, summed.

Nearest neighbours and kernels of Gaussian processes are exported so. The differences of all pairs
are many times the operands; the fused node keeps them in registers.
"""

from __future__ import annotations

from subgraph.graph.graph import Node, Value
from subgraph.passes.patterns import Context, Match, dtype_of, pattern, shape_of


@pattern("transformer", "Sub")
def distances(context: Context, node: Node) -> Match | None:
    """Match ``sum((x - y)**2)`` along the last axis, of all pairs of rows."""
    x, y = node.inputs
    square = _square(context, node.outputs[0])
    total = None if square is None else context.sole_user(square.outputs[0], "ReduceSum")
    if square is None or total is None or total.attrs.get("keepdims", 1):
        return None
    rank = len(shape_of(node.outputs[0]) or ())
    if rank < 3 or _axes(context, total) not in ([-1], [rank - 1]):
        return None
    if not _are_pairs(x, y):
        x, y = y, x
    if not _are_pairs(x, y) or dtype_of(x) != dtype_of(y):
        return None
    nodes = (node, square, total)
    return Match(nodes, "FusedDistances", (x, y), arity=2)


def _square(context: Context, value: Value) -> Node | None:
    """Return the node that squares a value which nothing else uses."""
    users = set(value.uses)
    user = users.pop() if len(users) == 1 and value not in context.outputs else None
    if user is None or user.inputs[0] is not value:
        return None
    if user.op_type == "Mul" and user.inputs == (value, value) and not user.domain:
        return user
    return user if user.op_type == "Pow" and context.scalar(user.inputs[1]) == 2.0 else None


def _axes(context: Context, total: Node) -> list[int]:
    """Return the axes of a ReduceSum, if they are known."""
    if len(total.inputs) > 1:
        axes = context.array(total.inputs[1])
        return [] if axes is None else [int(axis) for axis in axes.reshape(-1)]
    return [int(axis) for axis in total.attrs.get("axes") or ()]


def _are_pairs(x: Value | None, y: Value | None) -> bool:
    """Return whether the shapes are ``[..., N, 1, K]`` and ``[..., 1, M, K]`` of the same rank."""
    rows, others = shape_of(x), shape_of(y)
    if rows is None or others is None or len(rows) != len(others) or len(rows) < 3:
        return False
    return rows[-2] == 1 and others[-3] == 1 and rows[-1] == others[-1] and rows[-1] is not None
