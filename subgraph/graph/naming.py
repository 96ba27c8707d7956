"""Names in a graph: nodes and values without a name get a free one; no two may share a name.

`subgraph.graph.graph` uses these functions for its nodes and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from subgraph.errors import ModelError


class NamedNode(Protocol):
    """The part of a node that naming reads."""

    name: str
    op_type: str


class NamedValue(Protocol):
    """The part of a value that naming reads; ``producer`` is a node or None."""

    name: str
    producer: Any
    parameter: Any


def name_all(nodes: Sequence[NamedNode], values: Mapping[Any, None], graph: str) -> None:
    """Give each node and value without a name a free one.

    Args:
        nodes: The graph's nodes.
        values: Its values, as keys in order.
        graph: Its name, for messages.

    Raises:
        ModelError: Two nodes share a name, or two values that are not the same parameter.
    """
    node_names = {node.name for node in nodes if node.name}
    # As many different names as nodes mean that every node has one of its own, as in most models.
    if len(node_names) < len(nodes):
        _name_nodes(nodes, node_names, graph)
    names = {value.name for value in values if value.name}
    if len(names) < len(values):
        _name_values(list(values), names, graph)


def _name_nodes(nodes: Sequence[NamedNode], names: set[str], graph: str) -> None:
    """Give each nameless node a name after its operator.

    Raises:
        ModelError: Two nodes share a name.
    """
    seen: set[str] = set()
    count: dict[str, int] = {}
    for node in nodes:
        if not node.name:
            node.name = fresh_name(node.op_type, names, count)
        elif node.name in seen:
            raise ModelError(
                f"graph {graph!r} has two nodes named {node.name!r}; node names must differ"
            )
        seen.add(node.name)


def _name_values(values: Sequence[NamedValue], names: set[str], graph: str) -> None:
    """Give each nameless value a name after its producer.

    Raises:
        ModelError: Two values share a name, and are not the same parameter.
    """
    nameless = [value for value in values if not value.name]
    check_value_names((value for value in values if value.name), graph)
    count: dict[str, int] = {}
    positions: dict[Any, int] = {}
    for value in nameless:
        node = value.producer
        if node is None:
            base = "value"
        elif len(node.outputs) == 1:
            base = node.name
        else:
            base = f"{node.name}.{_position(node, value, positions)}"
        if base in names:
            base = fresh_name(base, names, count)
        names.add(base)
        value.name = base


def check_value_names(values: Iterable[NamedValue], graph: str) -> None:
    """Check that values that share a name also share a parameter.

    Bodies and passes make several values over one Parameter, all under its name. The name then
    still means one array.

    Raises:
        ModelError: Two values share a name, and are not the same parameter.
    """
    owners: dict[str, NamedValue] = {}
    for value in values:
        other = owners.setdefault(value.name, value)
        if other is not value and (
            value.parameter is None or other.parameter is not value.parameter
        ):
            raise ModelError(
                f"graph {graph!r} has two values named {value.name!r}; value names must differ"
            )


def _position(node: Any, value: NamedValue, positions: dict[Any, int]) -> int:
    """Return the position of a value among a node's outputs; ``positions`` caches them."""
    if value not in positions:
        positions.update((output, k) for k, output in enumerate(node.outputs))
    return positions[value]


def fresh_name(base: str, names: set[str], count: dict[str, int]) -> str:
    """Return ``base`` with the next number that makes a free name, and add it to ``names``.

    Args:
        base: The beginning of the name.
        names: Names in use.
        count: The next number to try for each ``base``, so that many equal names take linear time.
    """
    number = count.get(base, 0)
    while (name := f"{base}_{number}") in names:
        number += 1
    count[base] = number + 1
    names.add(name)
    return name


class Names:
    """Names in one scope, made unique by a number.

    Attributes:
        taken: The names in use.
    """

    def __init__(self, taken: Iterable[str] = ()) -> None:
        """Begin with the names that are in use."""
        self.taken = set(taken)
        self._count: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """Reserve and return ``name``, with a number from 1 on appended if it is taken."""
        if name in self.taken:
            self._count.setdefault(name, 1)
            return fresh_name(name, self.taken, self._count)
        self.taken.add(name)
        return name
