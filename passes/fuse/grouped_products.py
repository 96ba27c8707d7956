"""The pattern of a grouped product: every row is multiplied by a matrix that an index chooses.

Mixtures of experts are exported so. The matrices of all rows would be copied, which are many times
the weights; the fused node reads each matrix once for all rows that use it.
"""

from __future__ import annotations

from subgraph.graph.graph import Node, Value
from subgraph.passes.patterns import Context, Match, dtype_of, pattern, produced_by, shape_of


@pattern("transformer", "MatMul")
def grouped_product(context: Context, node: Node) -> Match | None:
    """Match ``W[i] @ x`` for columns x, ``[B, K, 1]``, or ``x @ W[i]`` for rows, ``[B, 1, K]``."""
    for k, value in enumerate(node.inputs):
        gather = produced_by(value, "GatherND", "Gather")
        if gather is None or context.sole_user(gather.outputs[0]) is not node:
            continue
        weights, indices = gather.inputs
        x = node.inputs[1 - k]
        if x is value or not context.is_weight(weights) or not _chooses_first(gather, indices):
            continue
        sizes, own = shape_of(weights), shape_of(x)
        if sizes is None or len(sizes) != 3 or not all(isinstance(n, int) and n for n in sizes):
            continue
        wanted = (sizes[2], 1) if k == 0 else (1, sizes[1])
        if own is None or len(own) != 3 or own[1:] != wanted or dtype_of(x) != dtype_of(weights):
            continue
        # One vector for each index: if sizes are not known, the lowering compares them.
        count = (shape_of(indices) or (None,))[0]
        if isinstance(own[0], int) and isinstance(count, int) and own[0] != count:
            continue
        return Match(
            context.ordered((gather, node)),
            "FusedGroupedMatMul",
            (weights, indices, x),
            attrs={"matrix_first": 1 - k},
            arity=3,
        )
    return None


def _chooses_first(gather: Node, indices: Value | None) -> bool:
    """Return whether a Gather or GatherND takes whole matrices by one index each."""
    shape = shape_of(indices)
    if dtype_of(indices) not in ("int32", "int64") or shape is None:
        return False
    if gather.op_type == "Gather":
        return len(shape) == 1 and not gather.attrs.get("axis", 0)
    return len(shape) == 2 and shape[1] == 1 and not gather.attrs.get("batch_dims", 0)
