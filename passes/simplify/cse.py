"""The pass "CommonSubexpressionElimination": equal nodes with equal inputs become one."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.operator import is_random
from subgraph.transform.pass_manager import register_pass

# An operator of another domain may have state or effects that are not known here.
_DOMAINS = frozenset({"", "ai.onnx.ml"})


@register_pass("CommonSubexpressionElimination")
def common_subexpression_elimination(graph: Graph) -> Graph:
    """Return a copy in which equal nodes of standard operators are one node.

    Nodes with bodies, subgraph nodes, random nodes and Dropout in training are not changed, nor are
    nodes that the user sent to different devices ("affinity").
    """
    graph = graph.clone()
    for level in graph.levels():
        level.rewire(_replacements(level))
    return graph


def _replacements(graph: Graph) -> dict[Value, Value]:
    first: dict[Any, Node] = {}
    replaced: dict[Value, Value] = {}
    inputs = set(graph.inputs)
    for node in graph.nodes:
        key = _key(node, replaced, inputs)
        if key is None:
            continue
        known = first.setdefault(key, node)
        if known is not node:
            replaced.update(zip(node.outputs, known.outputs, strict=True))
    return replaced


def _key(node: Node, replaced: dict[Value, Value], ends: set[Value]) -> Any:
    """Return a key that is equal for nodes that can be one; None for a node that must stay.

    Args:
        node: The node.
        replaced: New values of outputs of nodes before it.
        ends: The graph's inputs.
    """
    if node.domain not in _DOMAINS or node.subgraph is not None or node.captures or is_random(node):
        return None
    attributes: list[Any] = []
    for name in sorted(node.attrs):
        key = _attribute(node.attrs[name])
        if key is None:
            return None
        attributes.append((name, key))
    inputs = [_source(value, replaced, ends) for value in node.inputs]
    affinity = None if node.metadata is None else node.metadata.get("affinity")
    kind = (node.op_type, node.domain, node.version, len(node.outputs), affinity)
    return (kind, tuple(inputs), tuple(attributes))


def _source(value: Value | None, replaced: dict[Value, Value], ends: set[Value]) -> Any:
    """Return the key of an input of a node; see `_key`."""
    if value is None:
        return None
    # The caller may override a graph input with a default, so it differs from its parameter.
    if value.parameter is not None and value not in ends:
        return value.parameter
    # Inputs that have become one value are equal, so that whole chains merge in one walk.
    return replaced.get(value, value)


def _attribute(value: Any) -> Any:
    """Return a key for an attribute's value; None for a body."""
    held: Any = value
    if isinstance(value, Graph):
        return None
    if isinstance(value, np.ndarray):
        if held.dtype == object:
            return ("strings", held.shape, tuple(held.ravel().tolist()))
        return ("array", str(held.dtype), held.shape, held.tobytes())
    if isinstance(value, (tuple, list)):
        keys = tuple(_attribute(item) for item in held)
        return None if None in keys else (tuple, keys)
    kind: type[Any] = held.__class__
    if attrs.has(kind):  # a sparse tensor, or a type
        return (kind, _attribute(attrs.astuple(held, recurse=False)))
    # Unlike the values, their texts differ for 1, 1.0 and True, and for 0.0 and -0.0.
    return (kind, repr(held))
