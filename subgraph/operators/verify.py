"""Structural check of a graph, run by the pass framework after every pass; linear in its size.

The loop over the nodes only decides whether the graph is well formed; the functions below it
compose the error message.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from subgraph.errors import ModelError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.naming import check_value_names
from subgraph.operators.bodies import check_bodies


def verify(graph: Graph) -> None:
    """Check order, ownership, sources, uses and names of ``graph`` and of all graphs inside it.

    Raises:
        ModelError: the graph is not well formed; the message names the graph, node and value.
    """
    work = [graph]
    # Graphs come in the order in which they were made, which is mostly that of their memory.
    for current in work:
        nodes = current.nodes
        # The listed uses of each value are counted down to 0, so that one walk checks order,
        # sources and uses.
        uses = _sources_from_outside(current)
        for node in nodes:
            if node.graph is not current:
                raise _fault(current, f"node {node.name!r} belongs to another graph")
            for value in node.inputs:
                if value in uses:
                    uses[value] -= 1
                elif value is not None:
                    _count_weight(current, node, value, uses)
            if node.attrs or node.captures:
                _verify_bodies(current, node, uses, work)
            inner = node.subgraph
            if inner is not None:
                if len(inner.inputs) != len(node.inputs) or len(inner.outputs) != len(node.outputs):
                    raise _misfit(current, node, inner)
                work.append(inner)
            for value in node.outputs:
                if value.producer is not node or value.parameter is not None:
                    what = f"output {value.name!r} of {node.name!r} has another source"
                    raise _fault(current, what)
                uses[value] = len(value.uses)
        for value in current.outputs:
            if value not in uses:
                if value.parameter is None:
                    raise _fault(current, f"output {value.name!r} is made by no node of the graph")
                uses[value] = len(value.uses)
        if any(uses.values()):
            raise _misused(current, uses)
        names = {node.name for node in nodes}
        if len(names) < len(nodes) or "" in names:
            raise _misnamed(current)
        if len({value.name for value in uses}) < len(uses):
            check_value_names(uses, current.name)


def _fault(graph: Graph, what: str) -> ModelError:
    return ModelError(f"graph {graph.name!r}: {what}")


def _sources_from_outside(graph: Graph) -> dict[Value, int]:
    """Return the inputs and captures of ``graph``, each with the number of uses that it lists."""
    listed = graph.inputs + graph.captures
    uses: dict[Value, int] = {}
    for value in listed:
        if value.producer is not None:
            raise _fault(graph, f"input {value.name!r} is also made by {value.producer!r}")
        uses[value] = len(value.uses)
    if len(uses) < len(listed):
        twice = next(value for value, count in Counter(listed).items() if count > 1)
        raise _fault(graph, f"input {twice.name!r} is listed twice")
    return uses


def _count_weight(graph: Graph, node: Node, value: Value, uses: dict[Value, int]) -> None:
    """Count the first use of a value without producer or declaration, which must be a weight."""
    if value.producer is not None:
        raise _fault(
            graph,
            f"node {node.name!r} uses value {value.name!r} before node {value.producer.name!r} "
            "makes it, or that node is not in the graph",
        )
    if value.parameter is None:
        raise _fault(
            graph,
            f"node {node.name!r} uses value {value.name!r}, which is no input, parameter or node "
            "output of the graph; list it among the graph's inputs",
        )
    uses[value] = len(value.uses) - 1


def _verify_bodies(graph: Graph, node: Node, uses: dict[Value, int], work: list[Graph]) -> None:
    """Check a node against its bodies, and add these to ``work``."""
    for value in node.captures:
        if value in uses:
            uses[value] -= 1
        else:
            _count_weight(graph, node, value, uses)
    bodies = node.bodies
    if bodies:
        check_bodies(node)
        work.extend(bodies)
    # Executors split the node's captures by these numbers, so that one too many would shift all
    # later ones.
    wanted = sum(len(body.captures) for body in bodies)
    if len(node.captures) != wanted:
        raise _fault(
            graph,
            f"node {node.name!r} lists {len(node.captures)} captures, its bodies {wanted}",
        )


def _misfit(graph: Graph, node: Node, inner: Graph) -> ModelError:
    return _fault(
        graph,
        f"subgraph node {node.name!r} has {len(node.inputs)} inputs and {len(node.outputs)} "
        f"outputs, its inner graph {len(inner.inputs)} and {len(inner.outputs)}",
    )


def _misused(graph: Graph, uses: Mapping[Value, int]) -> ModelError:
    value, excess = next((value, count) for value, count in uses.items() if count)
    listed = len(value.uses)
    what = f"value {value.name!r} lists {listed} uses and has {listed - excess}"
    return _fault(graph, f"{what}; edit graphs through Graph.rewire")


def _misnamed(graph: Graph) -> ModelError:
    names = Counter(node.name for node in graph.nodes)
    name = next(name for name, count in names.items() if count > 1 or not name)
    return _fault(graph, f"node name {name!r} is empty or used twice")
