"""The pass "IdentityElimination": nodes whose result is their input are removed, in bodies too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import DTYPE_OF_ONNX, TensorType
from subgraph.operators.inference import infer_types
from subgraph.operators.shape_values import sizes_follow_from_shapes
from subgraph.ops.movement.op import may_train
from subgraph.transform.pass_manager import register_pass


@register_pass("IdentityElimination")
def identity_elimination(graph: Graph) -> Graph:
    """Return a copy without nodes that change nothing.

    These are Identity; Dropout at inference; Cast to the input's dtype; Reshape, Flatten and Expand
    to the input's shape; Transpose that keeps the order of axes; Concat, Sum, Mean, Max and Min of
    one input; Pad with pads of 0. A node between a graph input or parameter and a graph output
    stays, since the two have different names.
    """
    graph = graph.clone()
    for level in graph.levels():
        level.rewire(_replacements(level))
    return graph


def _replacements(graph: Graph) -> dict[Value, Value]:
    outputs = set(graph.outputs)
    found: dict[Value, Value] = {}
    for node in graph.nodes:
        if node.domain or not node.outputs or not _changes_nothing(node):
            continue
        made, source = node.outputs[0], node.inputs[0]
        if source is None:
            continue
        # The source may be the output of a node that goes as well.
        source = found.get(source, source)
        if made in outputs:
            # The source takes the name of the graph output. An input has a name of its own, and a
            # value can have the name of one output only.
            if source.producer is None or source in outputs:
                continue
            outputs.add(source)
        found[made] = source
    return found


def _changes_nothing(node: Node) -> bool:
    rule = _RULES.get(node.op_type)
    graph = node.graph
    more = node.outputs[1:]
    if rule is None or not node.inputs or any(value.uses for value in more):
        return False
    if graph is not None and any(map(graph.is_output, more)):
        return False
    return rule(node) and _is_valid(node)


def _is_valid(node: Node) -> bool:
    """Return whether the types of the inputs fit the operator and its attributes, as far as known.

    An invalid node stays in the graph, so that its error is reported.
    """
    try:
        infer_types(node, [None if value is None else value.type for value in node.inputs])
    except ShapeError:
        return False
    return True


def _always(node: Node) -> bool:
    return True


def _single(node: Node) -> bool:
    return len(node.inputs) == 1


def _concat(node: Node) -> bool:
    # The operator refuses scalars, so that an input of unknown rank has to reach it.
    return len(node.inputs) == 1 and _rank(node) is not None


def _dropout(node: Node) -> bool:
    return not may_train(node)


def _cast(node: Node) -> bool:
    source = node.inputs[0]
    to = node.attrs.get("to")
    if source is None or not isinstance(source.type, TensorType) or not isinstance(to, int):
        return False
    return DTYPE_OF_ONNX.get(to) == source.type.dtype


def _same_shape(node: Node) -> bool:
    source, made = node.inputs[0], node.outputs[0]
    if source is None or not isinstance(source.type, TensorType) or source.type != made.type:
        return False
    if source.type.shape is None or None in source.type.shape:
        return False
    # That the sizes are the same may follow from the node being valid, which a run has to check.
    return sizes_follow_from_shapes(node)


def _rank(node: Node) -> int | None:
    """Return the rank of the first input; without it, operators that need a certain one stay."""
    source = node.inputs[0]
    return source.type.rank if source is not None and isinstance(source.type, TensorType) else None


def _transpose(node: Node) -> bool:
    rank, perm = _rank(node), node.attrs.get("perm")
    if perm is not None:
        return rank is not None and list(perm) == list(range(rank))
    # Without ``perm`` the axes are reversed.
    return rank is not None and rank < 2


def _pad(node: Node) -> bool:
    pads = node.attrs.get("pads", node.attrs.get("paddings"))
    if pads is None and len(node.inputs) > 1 and node.inputs[1] is not None:
        producer = node.inputs[1].producer
        if producer is not None and producer.op_type == "Constant":
            pads = producer.attrs.get("value")
    return _rank(node) is not None and pads is not None and not np.asarray(pads).any()


_RULES: dict[str, Callable[[Node], bool]] = {
    "Identity": _always,
    "Dropout": _dropout,
    "Cast": _cast,
    "Reshape": _same_shape,
    "Flatten": _same_shape,
    "Expand": _same_shape,
    "Transpose": _transpose,
    "Concat": _concat,
    "Sum": _single,
    "Mean": _single,
    "Max": _single,
    "Min": _single,
    "Pad": _pad,
}
