"""The pass "ReshapeFirst": a Reshape of transposed matrices moves before the Transpose.

PyTorch's multi-head attention transposes its keys and then merges batch axes. With the two nodes
exchanged the Transpose is next to the matrix product, where the pattern of attention expects it.
"""

from __future__ import annotations

from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.shape_values import sizes_follow_from_shapes
from subgraph.passes.patterns import (
    Context,
    is_op,
    order_of_axes,
    produced_by,
    reshaped,
    shape_of,
)
from subgraph.transform.pass_manager import register_pass


@register_pass("ReshapeFirst", operators=("Transpose",))
def reshape_first(graph: Graph) -> Graph:
    """Return a copy in which Reshapes that keep matrices stand before their Transpose."""
    graph = graph.clone()
    replaced: dict[Value, Value] = {}
    context = Context(graph)
    for node in graph.nodes:
        transpose = produced_by(node.inputs[0], "Transpose") if is_op(node, "Reshape") else None
        # With another user the old Transpose would stay, and data would be moved twice.
        if transpose is None or context.sole_user(transpose.outputs[0]) is None:
            continue
        made = _exchanged(transpose, node)
        if made is not None:
            replaced[node.outputs[0]] = made
    graph.rewire(replaced)
    return graph


def _exchanged(transpose: Node, reshape: Node) -> Value | None:
    """Return the Transpose of the reshaped matrices; None if the Reshape changes matrices."""
    matrices, result = transpose.inputs[0], reshape.outputs[0]
    before, after = shape_of(transpose.outputs[0]) or (), shape_of(result) or ()
    sizes = [dim for dim in after if isinstance(dim, int)]
    rank = len(after)
    # Only if the Reshape keeps the last two axes whole may it run before they are exchanged.
    if matrices is None or rank < 2 or None in after or before[-2:] != after[-2:]:
        return None
    if order_of_axes(transpose) != _transposed(len(before)):
        return None
    perm = _transposed(rank)
    shape = tuple(after[axis] for axis in perm)
    if len(sizes) == rank:
        source = reshaped(matrices, shape)
    elif len(sizes) == rank - 1 and 0 not in sizes and sizes_follow_from_shapes(reshape):
        source = reshaped(matrices, shape, unknown=-1)
    else:
        return None
    made = Node("Transpose", [source], version=13, attrs={"perm": perm}, name=reshape.name)
    made.metadata = {"origin": (reshape.metadata or {}).get("origin") or reshape.name}
    if source.producer is not None and source is not matrices:
        source.producer.metadata = made.metadata
    reshape.name += ".transposed"
    made.outputs[0].type = result.type
    return made.outputs[0]


def _transposed(rank: int) -> tuple[int, ...]:
    """Return the order of axes that transposes the last two of ``rank`` axes."""
    return (*range(rank - 2), rank - 1, rank - 2)
