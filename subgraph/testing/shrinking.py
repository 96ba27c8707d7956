"""Shrinking of a failing graph, node by node, for the error messages of the checks.

Hypothesis shrinks the draws of a strategy. This file shrinks the graph itself, which works for
models, too, and for strategies that shrink badly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.builder import input as graph_input

_MAX_CANDIDATES = 400  # candidates, each of which is partitioned and run: seconds in all (estimate)


def shrink_graph(graph: Graph, fails: Callable[[Graph], bool]) -> Graph:
    """Return a graph no larger than ``graph`` that still fails; greedy, at most 400 candidates.

    Args:
        graph: A graph that fails; it is not changed.
        fails: Whether a candidate fails in the same way.
    """
    tries = 0
    smaller = True
    while smaller:
        smaller = False
        for candidate in _candidates(graph):
            tries += 1
            if tries > _MAX_CANDIDATES:
                return graph
            if _size(candidate) < _size(graph) and fails(candidate):
                graph, smaller = candidate, True
                break
    return graph


def _size(graph: Graph) -> tuple[int, int, int]:
    return len(graph.nodes), len(graph.outputs), len(graph.inputs)


def _candidates(graph: Graph) -> Iterator[Graph]:
    """Yield smaller copies: with one output, then without one node, then without unused inputs.

    A graph input, or an input of the node, replaces its output.
    """
    if len(graph.outputs) > 1:
        for kept in graph.outputs:
            yield _only(graph, kept)
    # From the end: when a late node goes, the nodes that only it used go with it.
    for node in reversed(graph.nodes):
        yield _without(graph, node)
        for value in node.sources:
            if value.parameter is None and value.type == node.outputs[0].type:
                yield _bypassed(graph, node, value)
    yield _tidy(graph.clone())


def _only(graph: Graph, kept: Value) -> Graph:
    copy, values = graph.clone_with_map()
    copy.outputs = (values[kept],)
    copy.remove_unused()
    return _tidy(copy)


def _without(graph: Graph, node: Node) -> Graph:
    """Return a copy in which new graph inputs replace the outputs of ``node``."""
    copy, values = graph.clone_with_map()
    taken = {value.name for value in graph.values()}
    names = (name for k in count() if (name := f"in_{k}") not in taken)
    fresh = {
        values[value]: graph_input(next(names), type=value.type)
        for value in node.outputs
        if isinstance(value.type, TensorType) and value.type.is_static
    }
    copy.inputs = (*copy.inputs, *fresh.values())
    copy.rewire(fresh)
    return _tidy(copy)


def _bypassed(graph: Graph, node: Node, source: Value) -> Graph:
    copy, values = graph.clone_with_map()
    copy.rewire({values[node.outputs[0]]: values[source]})
    copy.remove_unused()
    return _tidy(copy)


def _tidy(graph: Graph) -> Graph:
    """Remove unused graph inputs, and return the graph."""
    graph.inputs = tuple(v for v in graph.inputs if v.uses or v in graph.outputs)
    return graph
