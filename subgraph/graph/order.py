"""The order of a graph's nodes: each after what it needs, without those that nobody needs.

`subgraph.graph` orders so what it collects; nothing here recurses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from subgraph.errors import ModelError

if TYPE_CHECKING:
    from subgraph.graph.graph import Node, Value


def producers(values: Iterable[Value]) -> list[Node]:
    """Return the nodes that give ``values``."""
    return [value.producer for value in values if value.producer is not None]


def topological(roots: Iterable[Node]) -> list[Node]:
    """Return ``roots`` and all that they need, each after what it needs; otherwise as given."""
    done: dict[Node, bool] = {}  # False: on the stack
    order: list[Node] = []
    for root in roots:
        if root in done:
            continue
        if _is_next(root, done):
            done[root] = True
            order.append(root)
            continue
        done[root] = False
        stack: list[tuple[Node, Iterator[Value]]] = [(root, root.sources)]
        while stack:
            node, sources = stack[-1]
            for value in sources:
                producer = value.producer
                if producer is None:
                    continue
                state = done.get(producer)
                if state is None:
                    done[producer] = False
                    stack.append((producer, producer.sources))
                    break
                if not state:
                    _raise_cycle([entry[0] for entry in stack], producer)
            else:
                stack.pop()
                done[node] = True
                order.append(node)
    return order


def _is_next(node: Node, done: Mapping[Node, bool]) -> bool:
    """Return whether all that ``node`` needs is done: so it is with most nodes of most graphs."""
    if node.captures:
        return False
    for value in node.inputs:
        if value is not None and value.producer is not None and value.producer not in done:
            return False
    return True


def _raise_cycle(path: Sequence[Node], back_to: Node) -> None:
    cycle = list(path[path.index(back_to) :])[::-1]
    shown = " -> ".join(repr(n.name or n.op_type) for n in cycle[:8])
    more = " -> ..." if len(cycle) > 8 else ""
    raise ModelError(
        f"the graph has a cycle: {shown}{more} -> {cycle[0].name or cycle[0].op_type!r}; "
        "a node cannot depend on its own result"
    )


def without_dead(
    nodes: Sequence[Node], suspects: Iterable[Node], outputs: Iterable[Value]
) -> list[Node]:
    """Return ``nodes`` without the suspects that nobody uses and what only they used."""
    uses: dict[Value, int] = {}
    for node in nodes:
        for value in node.sources:
            uses[value] = uses.get(value, 0) + 1
    for value in outputs:
        uses[value] = uses.get(value, 0) + 1
    members = set(nodes)
    dead: set[Node] = set()
    work = [node for node in dict.fromkeys(suspects) if node in members]
    while work:
        node = work.pop()
        if node in dead or any(uses.get(v, 0) for v in node.outputs):
            continue
        dead.add(node)
        for value in node.sources:
            uses[value] -= 1
            if not uses[value] and value.producer is not None:
                work.append(value.producer)
    return [node for node in nodes if node not in dead]
