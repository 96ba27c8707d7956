"""The schedule of a plan: its nodes in topological order, with nodes that share a weight adjacent.

The head of a detection network applies the same weights to feature maps of several sizes. Adjacent
convolutions find the weight in the processor's caches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from subgraph.graph.graph import Node
from subgraph.graph.order import producers
from subgraph.graph.parameters import Parameter

# Smaller weights stay in the second-level cache in any order (hardware figure: 1 MiB).
_MIN_SHARED_WEIGHT_BYTES = 1 << 20


def scheduled(nodes: Sequence[Node]) -> Sequence[Node]:
    """Return nodes in topological order, with convolutions that share a large weight adjacent.

    A group is dropped if it cannot be adjacent because one member depends on another.
    """
    groups = _groups(nodes)
    while groups:
        of = {node: members for members in groups for node in members}
        order: list[Node] = []
        stuck = _visit(nodes, of, order)
        if stuck is None:
            return order
        groups.remove(stuck)
    return nodes


def _groups(nodes: Iterable[Node]) -> list[tuple[Node, ...]]:
    """Return the convolutions that share a large weight."""
    users: dict[Parameter, list[Node]] = {}
    for node in nodes:
        if node.op_type not in ("Conv", "FusedConv") or node.inputs[1] is None:
            continue
        weight = node.inputs[1].parameter
        if weight is not None and weight.nbytes >= _MIN_SHARED_WEIGHT_BYTES:
            users.setdefault(weight, []).append(node)
    return [tuple(members) for members in users.values() if len(members) > 1]


def _visit(
    nodes: Iterable[Node], of: Mapping[Node, tuple[Node, ...]], order: list[Node]
) -> tuple[Node, ...] | None:
    """Append nodes to an order, each with its group and after all nodes that the group reads.

    Args:
        nodes: The nodes.
        of: The group of each node that has one.
        order: The order; it is appended to.

    Returns:
        A group that depends on itself, or None if all nodes are in the order.
    """
    there = set(nodes)
    done: dict[tuple[Node, ...], bool] = {}  # False: on the stack
    stack: list[tuple[tuple[Node, ...], Iterator[Node]]] = []

    def enter(node: Node) -> bool:
        members = of.get(node, (node,))
        if members not in done:
            done[members] = False
            needed = [p for each in members for p in producers(each.sources) if p in there]
            stack.append((members, iter(needed)))
            return True
        return done[members]

    for root in nodes:
        enter(root)
        while stack:
            members, needs = stack[-1]
            need = next(needs, None)
            if need is None:
                stack.pop()
                done[members] = True
                order.extend(members)
            elif not enter(need):
                return next(each for each, _ in reversed(stack) if len(each) > 1)
    return None
