"""Strategy: a region in two parts, because a shape follows from values that the region computes.

Each part is a region of its own, planned when the values before it are known.
"""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.region.strategy import Request
from subgraph.graph.graph import Graph, Node
from subgraph.operators.operator import operator_key
from subgraph.operators.subgraph_op import SubgraphOp, subgraph_node
from subgraph.partition.replace import Cut, Cutter, put_in
from subgraph.runtime.executor_plan import Plan
from subgraph.runtime.fast_ops import fast_op, gives_size

SplitRegion = Plan  # of the default executor, over the two parts


class SplitPlan:
    """Splits a graph that cannot be planned as a whole; asked first, for a graph that is split."""

    name = "split plan"
    cacheable = False

    def __init__(self, make_op: Callable[[Graph], SubgraphOp]) -> None:
        """Begin with a graph that is not split; ``make_op`` returns what runs a part of it."""
        self._make_op = make_op
        self._split: tuple[Graph, SplitRegion] | None = None

    def resolve(self, request: Request) -> SplitRegion | None:
        """Return the split graph; None while it is planned as a whole."""
        if self._split is None and request.obstacle is None:
            return None
        graph = request.graph
        if self._split is None or self._split[0] is not graph:
            if request.obstacle is None:
                return None
            self._split = graph, SplitRegion(cut_at(graph, request.obstacle.node, self._make_op))
        return self._split[1]

    @property
    def current(self) -> SplitRegion | None:
        """The split graph, if there is one."""
        return None if self._split is None else self._split[1]

    def of(self, graph_of: Callable[[], Graph]) -> SplitRegion | None:
        """Return the split graph, None if the graph that runs now is planned as a whole."""
        if self._split is None or self._split[0] is not graph_of():
            return None
        return self._split[1]

    def forget(self) -> None:
        """Drop the split graph."""
        self._split = None


def cut_at(graph: Graph, node: Node, make_op: Callable[[Graph], SubgraphOp]) -> Graph:
    """Return the graph as one part before ``node`` and one with it and all that follows from it.

    A node whose inputs are all known and its output's shape still not is left alone: the reference
    runs it. So is one that hands on a part of its input, with all others like it that do not wait
    for one of them: what follows then depends on a shape, as that of an input, and no longer on a
    number. A detector has such nodes for each of its classes, and is cut there once. So is one that
    does little more than to give a size: templates serve what follows. An If is left to the default
    executor, which runs one of its branches, each a region by itself.
    """
    alone: set[Node] = set()
    if node.bodies:
        alone = {node}
    elif fast_op(node) is not None:
        alone = _first_like(graph, node)
    elif gives_size(node) or not any(value.producer is not None for value in node.sources):
        alone = {node}
    after = _following(graph, alone or {node}) - alone
    before = [each for each in graph.nodes if each not in after and each not in alone]
    cutter = Cutter(graph)
    cuts: list[Cut] = []
    for number, members in enumerate((before, [each for each in graph.nodes if each in after])):
        piece = cutter.cut_out(members, f"{graph.name}_{number}") if members else None
        if piece is not None:
            region = subgraph_node(piece.inner, make_op(piece.inner), inputs=piece.inputs)
            cuts.append(Cut(members, piece, region))
    made, copies = put_in(graph, cuts)
    if node.bodies:
        _cut_bodies(copies[node], make_op)
    return made


def _cut_bodies(node: Node, make_op: Callable[[Graph], SubgraphOp]) -> None:
    """Make each body of a node, which is nobody else's, one region."""
    for key, body in node.attrs.items():
        if isinstance(body, Graph) and body.nodes:
            piece = Cutter(body).cut_out(body.nodes, f"{node.name}_{key}")
            if piece is not None:
                made = subgraph_node(piece.inner, make_op(piece.inner), inputs=piece.inputs)
                node.attrs[key] = put_in(body, [Cut(body.nodes, piece, made)])[0]


def _first_like(graph: Graph, node: Node) -> set[Node]:
    """Return the nodes of the same operator that do not follow from another one of them."""
    found: set[Node] = set()
    waiting: set[Node] = set()
    key = operator_key(node.op_type, node.domain)
    for each in graph.nodes:
        if any(v.producer in waiting or v.producer in found for v in each.sources):
            waiting.add(each)
        elif operator_key(each.op_type, each.domain) == key:
            found.add(each)
    return found


def _following(graph: Graph, nodes: set[Node]) -> set[Node]:
    """Return these nodes and all that depend on what they make."""
    found = set(nodes)
    for each in graph.nodes:
        if any(value.producer in found for value in each.sources):
            found.add(each)
    return found
