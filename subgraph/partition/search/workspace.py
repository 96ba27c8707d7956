"""A graph as arrays of integers, in which the partition searches; built once for each graph.

Node k is ``graph.nodes[k]``, so numbers are a topological order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node
from subgraph.partition.search.search import Edges


@attrs.define(slots=True)
class Workspace:
    """The nodes of a graph and the edges between them.

    Attributes:
        nodes: The node of each number; replaced by its copy when a property has cut the graph.
        edges: Distinct producers of each node in input order (captures last), and consumers.
        free: 1 for each node that may join a region: it is in none, and is not excluded.
        forced: 1 for each node that joins regions although no selector is asked.
        names: Name of each node.
    """

    nodes: list[Node]
    edges: Edges
    free: bytearray
    forced: bytearray
    names: list[str]

    @classmethod
    def of(cls, graph: Graph) -> Workspace:
        """Number the nodes of ``graph``; nodes that hold a subgraph are not free."""
        nodes = list(graph.nodes)
        free = bytearray([node.subgraph is None for node in nodes])
        names = [node.name for node in nodes]
        return cls(nodes, _edges(nodes), free, bytearray(len(nodes)), names)


def _edges(nodes: Sequence[Node]) -> Edges:
    """Return the edges between nodes."""
    count = len(nodes)
    numbers = dict(zip(nodes, range(count), strict=True))
    number_of = cast("Callable[[Node | None], int | None]", numbers.get)
    users: list[int] = []
    producers: list[int] = []
    for user, node in enumerate(nodes):
        for value in node.inputs + node.captures:
            if value is not None:
                producer = number_of(value.producer)
                if producer is not None:
                    users.append(user)
                    producers.append(producer)
    pairs = np.array(users, np.int64) * count + np.array(producers, np.int64)
    ordered = np.sort(pairs)
    if (ordered[1:] == ordered[:-1]).any():  # rare, and finding the first of each takes longer
        _, first = np.unique(pairs, return_index=True)
        pairs = pairs[np.sort(first)]
    ends = np.cumsum(np.bincount(pairs // count, minlength=count))
    return Edges.of(ends.astype(np.int32), (pairs % count).astype(np.int32))
