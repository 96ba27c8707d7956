"""Strategy: a region in two parts, because a shape follows from values that the region computes.

Each part is a region of its own. The second one is planned when the first one has run.
"""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.region.strategy import Request, Strategy
from subgraph.graph.graph import Graph, Node
from subgraph.operators.operator import operator_key, operator_of
from subgraph.operators.subgraph_op import SubgraphOp, subgraph_node
from subgraph.partition.replace import Cut, Cutter, replace_regions
from subgraph.runtime.executor_plan import Plan
from subgraph.runtime.fast_ops import fast_op

SplitRegion = Plan  # a plan of the default executor, which runs the parts


class SplitPlan(Strategy):
    """Splits a graph that cannot be planned as a whole.

    It is the first strategy, so that a graph that was split is not planned as a whole again.
    """

    name = "split plan"

    def __init__(self, make_op: Callable[[Graph], SubgraphOp]) -> None:
        """Begin without a split graph; ``make_op`` returns the op for a part of the graph."""
        self._make_op = make_op
        self._split: tuple[Graph, SplitRegion] | None = None

    def resolve(self, request: Request) -> SplitRegion | None:
        """Return the split graph; None while it is planned as a whole."""
        if self._split is None and request.obstacle is None:
            return None
        graph = request.graph
        # After the graph is fused again it may be possible to plan it as a whole, so it is split
        # only if an obstacle appears again.
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
        """Return the split graph; None if the present graph is planned as a whole."""
        if self._split is None or self._split[0] is not graph_of():
            return None
        return self._split[1]

    def forget(self) -> None:
        """Drop the split graph."""
        self._split = None


def cut_at(graph: Graph, node: Node, make_op: Callable[[Graph], SubgraphOp]) -> Graph:
    """Return the graph as two regions: the nodes before ``node``, and the nodes that depend on it.

    These nodes become part of neither region, so that the default executor runs them by the
    reference:

    - a node whose inputs are graph inputs or weights: its output's shape remains unknown even if
      their values are known;
    - a node that only selects a part of its input (`fast_op`), with all nodes of its operator that
      do not depend on each other. The regions after them then depend on the shape of an input, no
      longer on a value. A detection network has such a node for every class and is cut there once;
    - a node that only makes a size of a value (`Operator.light`), for the same reason;
    - an If, each of whose branches becomes a region.

    Args:
        graph: The graph; it stays as it is.
        node: The node whose output's shape follows from computed values.
        make_op: Returns the op for the inner graph of a region.
    """
    alone: set[Node] = set()
    if node.bodies:
        alone = {node}
    elif fast_op(node) is not None:
        alone = _first_like(graph, node)
    elif operator_of(node).light or not any(value.producer is not None for value in node.sources):
        alone = {node}
    # Without a node that runs alone, the node itself becomes the first one of the second region.
    after = _following(graph, alone or {node}) - alone
    before = [each for each in graph.nodes if each not in after and each not in alone]
    cutter = Cutter(graph)
    cuts: list[Cut] = []
    for number, members in enumerate((before, [each for each in graph.nodes if each in after])):
        piece = cutter.cut_out(members, f"{graph.name}_{number}") if members else None
        if piece is not None:
            region = subgraph_node(piece.inner, make_op(piece.inner), inputs=piece.inputs)
            cuts.append(Cut(members, piece, region))
    made, copies = replace_regions(graph, cuts)
    if node.bodies:
        _cut_bodies(copies[node], make_op)
    return made


def _cut_bodies(node: Node, make_op: Callable[[Graph], SubgraphOp]) -> None:
    """Replace the nodes of each body of a copied node by one region."""
    for key, body in node.attrs.items():
        if isinstance(body, Graph) and body.nodes:
            piece = Cutter(body).cut_out(body.nodes, f"{node.name}_{key}")
            if piece is not None:
                made = subgraph_node(piece.inner, make_op(piece.inner), inputs=piece.inputs)
                node.attrs[key] = replace_regions(body, [Cut(body.nodes, piece, made)])[0]


def _first_like(graph: Graph, node: Node) -> set[Node]:
    """Return the nodes of the same operator as ``node`` that do not depend on one another."""
    found: set[Node] = set()
    waiting: set[Node] = set()
    key = operator_key(node.op_type, node.domain)
    for each in graph.nodes:
        if any(v.producer in waiting or v.producer in found for v in each.sources):
            # A node behind one that was found has to stay in the second region, also if it has the
            # same operator.
            waiting.add(each)
        elif operator_key(each.op_type, each.domain) == key:
            found.add(each)
    return found


def _following(graph: Graph, nodes: set[Node]) -> set[Node]:
    """Return these nodes and all nodes that depend on them."""
    found = set(nodes)
    for each in graph.nodes:
        if any(value.producer in found for value in each.sources):
            found.add(each)
    return found
