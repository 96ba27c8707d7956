"""Copies of nodes over copies of their values: of these a clone, a cut and a replacement are made.

Large graphs are copied here node by node, so the one loop calls as little as it can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from subgraph.graph.graph import Graph, Node, Value


def copy_value(value: Value, values: dict[Value, Value]) -> Value:
    """Return the copy of ``value`` that ``values`` has; make one without producer if none."""
    copy = values.get(value)
    if copy is None:
        copy = values[value] = Value(value.name, value.type, parameter=value.parameter)
    return copy


def copy_node(node: Node, values: dict[Value, Value]) -> Node:
    """Return a copy of ``node`` over the copies of its values; fills ``values``."""
    return copy_nodes((node,), values)[0]


def copy_nodes(
    nodes: Iterable[Node],
    values: dict[Value, Value],
    source: Callable[[Value], Value] | None = None,
    owner: Graph | None = None,
) -> list[Node]:
    """Return copies of ``nodes`` over the copies of their values.

    Args:
        nodes: The nodes; what one of them takes from another comes from its copy if it stands
            after it, or if its copy was in ``values`` before.
        values: The copy of each value; those of outputs are added.
        source: Called with a value that has no copy yet; returns one and adds it to ``values``.
            None: makes a value without producer.
        owner: The graph that is going to have all the copies, in this order: they are listed as
            its own, and as uses of what they take. None: they are in no graph yet.
    """
    known = values.get
    source = source or partial(copy_value, values=values)
    new_node, new_value = Node.__new__, Value.__new__
    copies: list[Node] = []
    for node in nodes:
        copy = new_node(Node)
        copies.append(copy)
        copy.name = node.name
        copy.op_type = node.op_type
        copy.domain = node.domain
        copy.version = node.version
        copy.subgraph = node.subgraph
        copy.op = node.op
        copy.fallback = None  # each compiled model has its own
        copy.graph = owner
        copy.metadata = dict(node.metadata) if node.metadata else None
        inputs: list[Value | None] = []
        for value in node.inputs:
            if value is not None:
                value = known(value) or source(value)
                if owner is not None:
                    value.uses.append(copy)
            inputs.append(value)
        copy.inputs = tuple(inputs)
        copy.captures = node.captures
        if node.captures:
            copy.captures = tuple([known(v) or source(v) for v in node.captures])
            if owner is not None:
                for value in copy.captures:
                    value.uses.append(copy)
        outputs: list[Value] = []
        for value in node.outputs:
            made = known(value)
            if made is None:
                made = values[value] = new_value(Value)
                made.name = value.name
                made.type = value.type
                made.parameter = None
                made.uses = []
            made.producer = copy
            outputs.append(made)
        copy.outputs = tuple(outputs)
        attrs = copy.attrs = {}
        if node.attrs:
            for key, held in node.attrs.items():
                attrs[key] = held.clone() if isinstance(held, Graph) else held
    return copies
