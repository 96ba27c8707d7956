"""The pass "ShareConcats": a Concat that begins with the inputs of another one reads its result.

Each layer of a dense block (DenseNet, the residual dense blocks of super-resolution) concatenates
the results of all layers before it. If each of these Concats reads the result of the one before,
they all are the beginning of the last one's result, and the planner writes each value there once.
"""

from __future__ import annotations

from collections import defaultdict

from subgraph.graph.graph import Graph, Node, Value
from subgraph.passes.patterns import fusion_pass, is_op, part_of


@fusion_pass("ShareConcats", "transformer", "Concat")
def share_concats(graph: Graph) -> Graph:
    """Return ``graph``, or a copy in which Concats read those of their first inputs."""
    if not any(_beginnings(level) for level in graph.levels()):
        return graph
    graph = graph.clone()
    for level in graph.levels():
        made: dict[Value, Value] = {}
        for node, shorter in _beginnings(level).items():
            whole, rest = shorter.outputs[0], node.inputs[len(shorter.inputs) :]
            first = made.get(whole, whole)
            new = part_of(node, "Concat", first, *rest, version=node.version, **node.attrs)
            made[node.outputs[0]] = new
        level.rewire(made)
    return graph


def _beginnings(graph: Graph) -> dict[Node, Node]:
    """Return for each Concat the longest one before it whose inputs are its first inputs."""
    found: dict[Node, Node] = {}
    # By axis and first two inputs. Concats of equal inputs are one node by now.
    known: defaultdict[object, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if not is_op(node, "Concat") or len(node.inputs) < 2:
            continue
        before = known[node.attrs.get("axis"), node.inputs[:2]]
        begins = [
            each
            for each in before
            if len(each.inputs) < len(node.inputs)
            and each.inputs == node.inputs[: len(each.inputs)]
        ]
        if begins:
            found[node] = max(begins, key=lambda each: len(each.inputs))
        before.append(node)
    return found
