"""The pattern of distances between all pairs of rows: squares of differences, summed.

Nearest neighbours and kernels of Gaussian processes are exported so. The differences of all pairs
are many times the operands; the fused node keeps them in registers.
"""

from __future__ import annotations

from subgraph.graph.graph import Node, Value
from subgraph.passes.patterns import Context, Match, dtype_of, pattern, shape_of

from .normalization import is_square


@pattern("transformer", "Sub")
def distances(context: Context, node: Node) -> Match | None:
    """Match ``sum((x - y)**2)`` along the last axis, of all pairs of rows."""
    x, y = node.inputs
    users = node.outputs[0].consumers
    if len(users) != 1 or not is_square(users[0], context, node.outputs[0]):
        return None
    total = context.sole_user(users[0].outputs[0], "ReduceSum")
    if total is None or total.attrs.get("keepdims", 1):
        return None
    rank = len(shape_of(node.outputs[0]) or ())
    if rank < 3 or context.axes(total) not in ([-1], [rank - 1]):
        return None
    if not _are_pairs(x, y):
        x, y = y, x
    if not _are_pairs(x, y) or dtype_of(x) != dtype_of(y):
        return None
    nodes = (node, users[0], total)
    return Match(nodes, "FusedDistances", (x, y), arity=2)


def _are_pairs(x: Value | None, y: Value | None) -> bool:
    """Return whether the shapes are ``[..., N, 1, K]`` and ``[..., 1, M, K]`` of the same rank."""
    rows, others = shape_of(x), shape_of(y)
    if rows is None or others is None or len(rows) != len(others) or len(rows) < 3:
        return False
    return rows[-2] == 1 and others[-3] == 1 and rows[-1] == others[-1] and rows[-1] is not None
