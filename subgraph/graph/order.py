"""The topological order of a graph's nodes, and the nodes that use each value.

The functions take objects with the attributes of `OrderedNode`; `subgraph.graph.graph` passes its
nodes. None is recursive, so deep graphs do not exhaust the stack. `visit` sorts whatever needs each
other, as the nodes of a file.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from subgraph.errors import ModelError


class OrderedNode(Protocol):
    """The part of a node that decides its order; values have a ``producer`` and a ``name``."""

    name: str
    op_type: str
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]
    captures: tuple[Any, ...]

    @property
    def sources(self) -> Iterator[Any]:
        """The values that the node depends on."""
        ...

    def __hash__(self) -> int: ...


class UsedValue(Protocol):
    """The part of a value that lists the nodes that use it."""

    uses: list[Any]

    def __hash__(self) -> int: ...


N = TypeVar("N", bound=OrderedNode)
_K = TypeVar("_K", bound=Hashable)
V = TypeVar("V")


def producers(values: Iterable[Any]) -> list[Any]:
    """Return the nodes that produce ``values``."""
    return [value.producer for value in values if value.producer is not None]


def list_uses(
    sources: Sequence[Any], nodes: Iterable[OrderedNode], outputs: Iterable[Any]
) -> tuple[dict[Any, None], list[Any]]:
    """Set the ``uses`` of every value of a graph.

    Args:
        sources: The graph's inputs and captures.
        nodes: The graph's nodes, in topological order.
        outputs: The graph's outputs.

    Returns:
        All values as keys: the sources, then for each node its inputs, captures and outputs; and
        the values that no node makes: sources, parameters, and those without any source.
    """
    value: UsedValue
    found: dict[Any, None] = dict.fromkeys(sources)
    not_made: list[Any] = list(found)
    for value in found:
        value.uses = []
    for node in nodes:
        for used in node.inputs:
            if used in found:
                used.uses.append(node)
            elif used is not None:
                found[used] = None
                used.uses = [node]
                not_made.append(used)
        for value in node.captures:
            if value not in found:
                found[value] = None
                value.uses = []
                not_made.append(value)
            value.uses.append(node)
        for value in node.outputs:
            if value not in found:
                found[value] = None
                value.uses = []
    for value in outputs:
        if value not in found:
            found[value] = None
            value.uses = []
            not_made.append(value)
    return found, not_made


def check_sources(listed: Sequence[Any], not_made: Iterable[Any], graph: str) -> None:
    """Check that a graph lists each input once, and has a source for each value.

    Args:
        listed: The graph's inputs and captures.
        not_made: The values that no node makes.
        graph: Its name, for messages.

    Raises:
        ModelError: An input is listed twice, or a value is neither listed nor a parameter.
    """
    known: set[Any] = set()
    for value in listed:
        if value in known:
            raise ModelError(f"graph {graph!r} lists input {value.name!r} twice")
        known.add(value)
    for value in not_made:
        if value.producer is None and value.parameter is None and value not in known:
            user = f"node {value.uses[0].name!r}" if value.uses else "its output"
            raise ModelError(
                f"graph {graph!r}: {user} needs value {value.name!r}, which is no input, "
                "parameter or node output of the graph; list it among the graph's inputs (a "
                "body takes it with sg.capture)"
            )


def topological(roots: Iterable[N]) -> list[N]:
    """Return ``roots`` and the nodes that they need, each after its producers.

    Roots keep their order as far as it is topological.

    Raises:
        ModelError: the nodes form a cycle.
    """
    done: dict[N, bool] = {}
    order: list[N] = []
    for root in roots:
        if root in done:
            continue
        if not root.captures:
            for value in root.inputs:
                if value is not None and value.producer is not None and value.producer not in done:
                    break
            else:  # all producers are done, as for most nodes of most graphs
                done[root] = True
                order.append(root)
                continue
        visit(root, _needed, done, order)
    return order


def _needed(node: OrderedNode) -> Iterator[Any]:
    return (value.producer for value in node.sources if value.producer is not None)


def visit(
    root: _K,
    needed: Callable[[_K], Iterator[_K]],
    done: dict[_K, bool],
    order: list[_K],
    node_of: Callable[[_K], Any] = lambda key: key,
) -> None:
    """Append a node to ``order`` behind those that it needs and that are not in it yet.

    Args:
        root: The node, or a key that stands for it.
        needed: Returns the nodes that a node needs; called once for each.
        done: The nodes of ``order``, True for each.
        order: Nodes in topological order.
        node_of: Returns the node of a key, for the message.

    Raises:
        ModelError: the nodes form a cycle; the message names them.
    """
    done[root] = False  # on the stack
    # An explicit stack: the depth of a network is that of its longest path, far beyond Python's
    # limit on recursion.
    stack = [(root, needed(root))]
    while stack:
        node, others = stack[-1]
        for other in others:
            state = done.get(other)
            if state is None:
                done[other] = False
                stack.append((other, needed(other)))
                break
            if not state:
                path = [key for key, _ in stack]
                _raise_cycle([node_of(key) for key in path[path.index(other) :]])
        else:
            stack.pop()
            done[node] = True
            order.append(node)


def _raise_cycle(path: Sequence[Any]) -> None:
    names = [repr(node.name or node.op_type) for node in reversed(path)]
    shown = " -> ".join([*names[:8], *(["..."] if len(names) > 8 else [])])
    raise ModelError(
        f"the graph has a cycle: {shown} -> {names[0]}; a node cannot depend on its own result"
    )


def without_dead(nodes: Sequence[N], suspects: Iterable[N], outputs: Iterable[Any]) -> list[N]:
    """Return ``nodes`` without unused suspects and without the nodes that only these used.

    Args:
        nodes: A graph's nodes, in topological order.
        suspects: Nodes that may have become unused.
        outputs: The graph's outputs, which count as used.
    """
    uses: dict[Any, int] = {}
    for node in nodes:
        for value in node.sources:
            uses[value] = uses.get(value, 0) + 1
    for value in outputs:
        uses[value] = uses.get(value, 0) + 1
    members = set(nodes)
    dead: set[N] = set()
    # A pass may list nodes that it has removed already, or a node twice.
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


def drop_unused_captures(node: Any) -> bool:
    """Drop the captures that the bodies of ``node`` do not use; return whether any was dropped."""
    outer = iter(node.captures)
    used: list[Any] = []
    for body in node.bodies:
        # ``node.captures`` lists the captures of all bodies one after the other. ``zip`` asks the
        # body's list first, so that it takes no value of the next body from the iterator.
        inside = {v for v in body.captures if v.uses or v in body.outputs}
        used += [value for v, value in zip(body.captures, outer, strict=False) if v in inside]
        body.captures = tuple(v for v in body.captures if v in inside)
    dropped = len(used) < len(node.captures)
    node.captures = tuple(used)
    return dropped


class Replacements:
    """Replacements of values, which may form chains: a by b, b by c."""

    def __init__(self, replacements: Mapping[V, V]) -> None:
        """Copy ``replacements``, the new values by the replaced ones."""
        self._map: dict[Any, Any] = dict(replacements)

    def __call__(self, value: V) -> V:
        """Return the end of the chain of a value's replacements: itself if it has none.

        Raises:
            ModelError: the chain is a circle.
        """
        path: list[Any] = []
        last: Any = value
        while (following := self._map.get(last)) is not None and following is not last:
            path.append(last)
            # A chain without a circle visits no replacement twice.
            if len(path) > len(self._map):
                raise ModelError(f"replacements of value {last.name!r} run in a circle")
            last = following
        # Each value on the path now leads to the end directly, so that long chains take linear
        # time.
        for passed in path:
            self._map[passed] = last
        found: V = last
        return found
