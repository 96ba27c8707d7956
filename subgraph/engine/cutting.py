"""Where a region is cut in two because a shape follows from values that it computes itself.

`subgraph.engine.region_op` asks for it when a plan cannot be made; each part is then planned when
the values before it are known.
"""

from __future__ import annotations

from collections.abc import Callable

from subgraph.graph import Graph, Node
from subgraph.partition.replace import Cut, Cutter, put_in
from subgraph.quick_steps import quick_step
from subgraph.subgraph_op import SubgraphOp, subgraph_node


def cut_at(graph: Graph, node: Node, make_op: Callable[[Graph], SubgraphOp]) -> Graph:
    """Return the graph as one part before ``node`` and one with it and all that follows from it.

    A node whose inputs are all known and its output's shape still not is left alone: the reference
    runs it. So is one that hands on a part of its input, with others that the same number cuts:
    what follows then depends on a shape, as that of an input, and no longer on a number.
    """
    alone: set[Node] = set()
    if quick_step(node) is not None:
        count = node.inputs[-1]
        alone = {user for user in count.uses if user.op_type == node.op_type} if count else set()
    elif not any(value.producer is not None for value in node.sources):
        alone = {node}
    after = set(alone or {node})
    for each in graph.nodes:
        if any(value.producer in after for value in each.sources):
            after.add(each)
    after -= alone
    before = [each for each in graph.nodes if each not in after and each not in alone]
    cutter = Cutter(graph)
    cuts: list[Cut] = []
    for number, members in enumerate((before, [each for each in graph.nodes if each in after])):
        piece = cutter.cut_out(members, f"{graph.name}_{number}") if members else None
        if piece is not None:
            made = subgraph_node(piece.inner, make_op(piece.inner))
            cuts.append(Cut(members, piece, made))
    return put_in(graph, cuts)[0]
