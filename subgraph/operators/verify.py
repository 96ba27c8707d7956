"""Structural check of a graph, run by the pass framework after every pass; linear in its size."""

from __future__ import annotations

from collections.abc import Sequence

from subgraph.errors import ModelError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.bodies import check_bodies


def verify(graph: Graph) -> None:
    """Check order, ownership, sources, uses and names of ``graph`` and the bodies in it.

    Raises:
        ModelError: says which graph, node and value are at fault.
    """
    work = [graph]
    while work:
        current = work.pop()
        _verify_one(current)
        for node in current.nodes:
            if node.attrs:
                work.extend(node.bodies)
            if node.subgraph is not None:
                work.append(node.subgraph)


def _verify_one(graph: Graph) -> None:
    where = f"graph {graph.name!r}"
    known: set[Value] = set()
    for value in (*graph.inputs, *graph.captures):
        if value.producer is not None:
            raise ModelError(f"{where}: input {value.name!r} is also made by {value.producer!r}")
        if value in known:
            raise ModelError(f"{where}: input {value.name!r} is listed twice")
        known.add(value)
    values = list(graph.values())
    _verify_names(graph, values, where)
    uses: dict[Value, int] = {}
    for node in graph.nodes:
        _verify_node(graph, node, known, uses, where)
        known.update(node.outputs)
    for value in graph.outputs:
        if value not in known and value.parameter is None:
            raise ModelError(f"{where}: output {value.name!r} is made by no node of the graph")
    _verify_uses(values, uses, where)


def _verify_names(graph: Graph, values: Sequence[Value], where: str) -> None:
    names: set[str] = set()
    for node in graph.nodes:
        if not node.name or node.name in names:
            raise ModelError(f"{where}: node name {node.name!r} is empty or used twice")
        names.add(node.name)
    owners: dict[str, Value] = {}
    for value in values:
        other = owners.setdefault(value.name, value)
        if other is not value and not (
            value.parameter is not None and other.parameter is value.parameter
        ):
            raise ModelError(f"{where}: two values are named {value.name!r}")


def _verify_node(
    graph: Graph, node: Node, known: set[Value], uses: dict[Value, int], where: str
) -> None:
    if node.graph is not graph:
        raise ModelError(f"{where}: node {node.name!r} belongs to another graph")
    for value in node.sources:
        uses[value] = uses.get(value, 0) + 1
        if value in known:
            continue
        if value.producer is not None:
            raise ModelError(
                f"{where}: node {node.name!r} uses value {value.name!r} before node "
                f"{value.producer.name!r} makes it, or that node is not in the graph"
            )
        if value.parameter is None:
            raise ModelError(
                f"{where}: node {node.name!r} uses value {value.name!r}, which is no input, "
                "parameter or node output of the graph; list it among the graph's inputs"
            )
        known.add(value)
    for value in node.outputs:
        if value.producer is not node or value.parameter is not None:
            raise ModelError(f"{where}: output {value.name!r} of {node.name!r} has another source")
    bodies = node.bodies if node.attrs else []
    if bodies:
        check_bodies(node)
    if len(node.captures) != sum(len(body.captures) for body in bodies):
        raise ModelError(
            f"{where}: node {node.name!r} lists {len(node.captures)} captures, its bodies "
            f"{sum(len(body.captures) for body in bodies)}"
        )
    if node.subgraph is not None:
        inner = node.subgraph
        if len(inner.inputs) != len(node.inputs) or len(inner.outputs) != len(node.outputs):
            raise ModelError(
                f"{where}: subgraph node {node.name!r} has {len(node.inputs)} inputs and "
                f"{len(node.outputs)} outputs, its inner graph {len(inner.inputs)} and "
                f"{len(inner.outputs)}"
            )


def _verify_uses(values: Sequence[Value], uses: dict[Value, int], where: str) -> None:
    for value in values:
        listed = len(value.uses)
        if listed != uses.get(value, 0):
            raise ModelError(
                f"{where}: value {value.name!r} lists {listed} uses and has {uses.get(value, 0)}; "
                "edit graphs through Graph.rewire"
            )
