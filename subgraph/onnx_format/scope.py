"""Scopes of the ONNX reader: the values and names of one graph, body or function."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from subgraph.errors import ModelError
from subgraph.graph.graph import Node, Value
from subgraph.graph.naming import Names
from subgraph.graph.types import ValueType
from subgraph.onnx_format.checks import text_of
from subgraph.operators.messages import AttributeProto


class Level:
    """One Graph under construction.

    Attributes:
        name: Name of the graph in the file.
        nodes: The nodes read so far.
        node_names: Names of nodes in use.
        value_names: Names of values in use.
        captures: Pairs of a value of this graph and the outer value that it captures.
        docs: Nodes that have a description, with it.
        weights: Values of the initializers.
    """

    def __init__(self, name: str) -> None:
        """Begin a graph without nodes."""
        self.name = name
        self.nodes: list[Node] = []
        self.node_names = Names()
        self.value_names = Names()
        self.captures: list[tuple[Value, Value]] = []
        self.docs: list[tuple[Node, str]] = []
        self.weights: list[Value] = []

    def node_name(self, name: str) -> str:
        """Reserve and return a unique name for a node; "" for a node without one."""
        return self.node_names.fresh(name) if name else ""

    def value_name(self, name: str) -> str:
        """Reserve and return a unique name for a value."""
        return self.value_names.fresh(name)


@attrs.frozen(eq=False)
class Binding:
    """An attribute that a function call binds.

    Attributes:
        proto: The attribute.
        scope: The scope in which names in the attribute are resolved.
    """

    proto: AttributeProto
    scope: Scope


@attrs.define(eq=False)
class Scope:
    """The values by name in one graph or function; a body also sees the names of the outer scope.

    Attributes:
        level: The graph under construction; an inlined function adds to that of its caller.
        opsets: Versions of the operator sets by domain.
        parent: The scope around a body; None for graphs and functions.
        types: Stated types of values by name.
        prefix: For an inlined function: prefix of the names of its nodes and values.
        renamed: For an inlined function: the caller's names of its outputs.
        bindings: For a function: the attributes of the call, by name.
        values: The values by name; None for an omitted input of a function.
    """

    level: Level
    opsets: Mapping[str, int]
    parent: Scope | None = None
    types: Mapping[str, ValueType] = attrs.field(factory=dict[str, ValueType])
    prefix: str = ""
    renamed: Mapping[str, str] = attrs.field(factory=dict[str, str])
    bindings: Mapping[str, Binding] = attrs.field(factory=dict[str, Binding])
    values: dict[str, Value | None] = attrs.field(factory=dict[str, "Value | None"])

    def find(self, name: str) -> tuple[bool, Value | None]:
        """Return whether ``name`` is known here, and its value (None: an omitted input).

        An outer value becomes a capture of this graph; an outer parameter becomes a value of this
        graph with the same Parameter.
        """
        if name in self.values:
            return True, self.values[name]
        if self.parent is None:
            return False, None
        known, outer = self.parent.find(name)
        if outer is not None:
            inner = Value(self.level.value_name(name), outer.type, parameter=outer.parameter)
            # A Parameter is shared by graphs and needs no capture.
            if outer.parameter is None:
                self.level.captures.append((inner, outer))
            # The body finds the value under this name from now on, so that each outer value is
            # captured once.
            self.values[name] = inner
            return True, inner
        return known, None

    def define(self, name: str, value: Value, what: str) -> None:
        """Define the value of a name in this scope.

        Args:
            name: The name in the file.
            value: The value that it stands for.
            what: Source of the value, for the error message.

        Raises:
            ModelError: the name is defined already.
        """
        if text_of(name) in self.values:
            raise ModelError(
                f"graph {self.level.name!r}: value {name!r} is made twice, the second time by "
                f"{what}; a name has one source"
            )
        self.values[name] = value
