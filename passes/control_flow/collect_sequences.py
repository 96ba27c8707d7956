"""The pass "CollectSequences": a sequence that a Loop only appends to becomes its scan output.

A body that inserts one tensor of known shape at the end of a sequence each turn, and a
ConcatFromSequence after the loop, come to a scan output and a view of it. Of no turns the view is
empty, where a sequence of no tensors could not be joined.
"""

from __future__ import annotations

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.type_inference import infer_graph
from subgraph.transform.pass_manager import register_pass

from .unfold_sequences import constant, made_for


@register_pass("CollectSequences")
def collect_sequences(graph: Graph) -> Graph:
    """Return a copy in which loops, those in bodies too, stack what they would collect."""
    graph = graph.clone()
    if not any(_appends(node) for level in graph.levels() for node in level.nodes):
        return graph
    infer_graph(graph, strict=False)
    for level in graph.levels():
        while replaced := _first_replaced(level):
            level.rewire(replaced)
    return graph


def _appends(node: Node) -> bool:
    return (
        not node.domain
        and node.op_type == "Loop"
        and any(
            value.producer is not None and value.producer.op_type == "SequenceInsert"
            for value in node.bodies[0].outputs
        )
    )


def _first_replaced(graph: Graph) -> dict[Value, Value] | None:
    """Return what stands for the values of a loop that need not collect, None if there is none."""
    for node in graph.nodes:
        found = _with_scan(node) if _appends(node) else None
        if found is not None:
            return found
    return None


@attrs.frozen
class Appended:
    """A sequence that a loop appends to.

    Attributes:
        position: Which of the carried values it is.
        item: What the body appends.
        joined: What reads the sequence after the loop.
    """

    position: int
    item: Value
    joined: tuple[Node, ...]


def _with_scan(node: Node) -> dict[Value, Value] | None:
    """Return what stands for the outputs of a Loop, and for what is joined of its first sequence.

    None if it carries no sequence that can be a scan.
    """
    carried = range(len(node.inputs) - 2)
    found = next((each for k in carried if (each := _collected(node, k)) is not None), None)
    if found is None:
        return None
    sequence, type_ = found
    body, at = node.bodies[0], sequence.position
    (row,) = made_for(node, "Identity", [sequence.item])
    row.type = type_
    outputs = [*body.outputs[: 1 + at], *body.outputs[2 + at :], row]
    inputs = [*body.inputs[: 2 + at], *body.inputs[3 + at :]]
    inner = Graph(inputs, outputs, body.name, captures=body.captures, opsets=body.opsets)
    loop = Node(
        "Loop",
        [*node.inputs[: 2 + at], *node.inputs[3 + at :]],
        outputs=len(node.outputs),
        name=node.name,
        version=node.version,
        attrs={**node.attrs, "body": inner},
        captures=node.captures,
        metadata=node.metadata,
    )
    *kept, rows = loop.outputs
    old = [*node.outputs[:at], *node.outputs[at + 1 :]]
    for value, made in zip(old, kept, strict=True):
        made.type = value.type
    rows.type = TensorType(type_.dtype, (None, *(type_.shape or ())))
    replaced = dict(zip(old, kept, strict=True))
    replaced.update((each.outputs[0], _joined(each, rows, type_)) for each in sequence.joined)
    return replaced


def appended(node: Node, position: int) -> Appended | None:
    """Return a value that a Loop carries as a sequence which it only appends to, if it is one.

    It begins with nothing, the body inserts a tensor at its end and does nothing else with it, and
    after the loop it is only joined.
    """
    start, body, made = node.inputs[2 + position], node.bodies[0], node.outputs[position]
    if start is None or start.producer is None or start.producer.op_type != "SequenceEmpty":
        return None
    before, after = body.inputs[2 + position], body.outputs[1 + position]
    insert = after.producer
    if insert is None or insert.op_type != "SequenceInsert" or insert.inputs[0] is not before:
        return None
    item = insert.inputs[1]
    at_the_end = len(insert.inputs) == 2 or insert.inputs[2] is None
    alone = before.consumers == (insert,) and not after.consumers
    once = not body.gives(before) and body.outputs.count(after) == 1
    if item is None or item is before or not (at_the_end and alone and once):
        return None
    if node.graph is None or node.graph.gives(made):
        return None
    if any(each.op_type != "ConcatFromSequence" for each in made.consumers):
        return None
    return Appended(position, item, made.consumers)


def _collected(node: Node, position: int) -> tuple[Appended, TensorType] | None:
    """Return a sequence that can be a scan, and the type of its items."""
    found = appended(node, position)
    type_ = None if found is None else found.item.type
    if found is None or not isinstance(type_, TensorType) or not type_.is_static:
        return None
    return None if type_.dtype == "string" or 0 in (type_.shape or ()) else (found, type_)


def _joined(node: Node, rows: Value, item: TensorType) -> Value:
    """Return what ConcatFromSequence gives, of the items as rows."""
    shape = [dim for dim in item.shape or () if isinstance(dim, int)]
    stacks = bool(node.attrs.get("new_axis", 0))
    rank = len(shape) + stacks
    axis = int(node.attrs["axis"])
    axis += rank if axis < 0 else 0
    order = [*range(1, 1 + axis), 0, *range(1 + axis, 1 + len(shape))]
    turned = rows
    if axis:
        (turned,) = made_for(node, "Transpose", [rows], perm=tuple(order))
    if stacks:
        return turned
    dims = [-1 if k == axis else dim for k, dim in enumerate(shape)]
    wanted = constant(node, np.array(dims, np.int64))
    return made_for(node, "Reshape", [turned, wanted])[0]
