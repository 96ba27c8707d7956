"""A graph as lists of integers: what the partition searches; built once for each graph.

Node k is ``graph.nodes[k]``, so numbers are a topological order.
"""

from __future__ import annotations

from itertools import chain

import attrs
import numpy as np

from subgraph.graph import Graph, Node
from subgraph.partition.search import Links


@attrs.define(slots=True)
class Workspace:
    """The nodes of a graph and the links between them.

    Attributes:
        nodes: The node of each number; replaced by its copy when a property has cut the graph.
        preds: Producers of each node, distinct, in input order (captures last).
        succs: Consumers of each node, distinct, in topological order.
        free: 1 for each node that may join a region: it is in none, and is not excluded.
        forced: 1 for each node that is taken without asking.
        names: Name of each node.
    """

    nodes: list[Node]
    preds: list[list[int]]
    succs: list[list[int]]
    free: bytearray
    forced: bytearray
    names: list[str]

    @property
    def links(self) -> Links:
        """The links as arrays."""
        ends = np.cumsum(np.fromiter(map(len, self.preds), np.int32, len(self.preds)))
        ins = np.fromiter(chain.from_iterable(self.preds), np.int32)
        return Links.of(ends.astype(np.int32), ins)

    @classmethod
    def of(cls, graph: Graph) -> Workspace:
        """Number the nodes of ``graph``; nodes that hold a subgraph are not free."""
        nodes = list(graph.nodes)
        number = {node: k for k, node in enumerate(nodes)}
        succs: list[list[int]] = [[] for _ in nodes]
        preds: list[list[int]] = []
        for k, node in enumerate(nodes):
            mine: list[int] = []
            for value in (*node.inputs, *node.captures) if node.captures else node.inputs:
                if value is None or (producer := value.producer) is None:
                    continue
                source = number[producer]
                outs = succs[source]
                # Every node comes once, so a repeated link is the last one of its list.
                if not outs or outs[-1] != k:
                    outs.append(k)
                    mine.append(source)
            preds.append(mine)
        free = bytearray(node.subgraph is None for node in nodes)
        names = [node.name for node in nodes]
        return cls(nodes, preds, succs, free, bytearray(len(nodes)), names)
