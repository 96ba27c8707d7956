"""The graph: nodes and values in use-def form, with parameters, nested bodies and subgraph nodes.

A `Value` is an edge: a graph input, a parameter, a capture or a node's output. A `Node` applies an
operator. A `Graph` owns its nodes in topological order. Building an expression with
`subgraph.ops` makes nodes and values; ``Graph(inputs, outputs)`` collects them. Objects compare by
identity. Nothing here recurses and every operation is linear, so graphs of a million nodes work.

A body of a control-flow node is a Graph among the node's attributes. What it uses from outside is
explicit: ``body.captures`` are its own values, and ``node.captures`` lists, body after body in
attribute order, the outer value behind each. A body that uses an outer parameter has a value of its
own over the same Parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from subgraph.errors import ModelError, require_type
from subgraph.graph.arguments import as_items, check_no_source, check_node, check_types
from subgraph.graph.naming import name_all
from subgraph.graph.order import (
    Replacements,
    check_sources,
    drop_unused_captures,
    list_uses,
    producers,
    topological,
    without_dead,
)
from subgraph.graph.parameters import Parameter, ParameterTable, collect_parameters
from subgraph.graph.types import ValueType
from subgraph.system.gc_control import paused_gc
from subgraph.system.hooks import Hook
from subgraph.system.registry import nearest

_verify: Hook[[Graph], None] = Hook("verify a graph")
_text: Hook[[Graph], str] = Hook("text of a graph")
_NO_OUTPUTS: tuple[tuple[()], frozenset[Any]] = (), frozenset()  # see Graph.is_output


class Value:
    """An edge of the graph: an output of a node, a graph input, a parameter or a capture.

    Attributes:
        name: Unique among the graph's values; the name of the result, for a graph output.
        type: Dtype and shape, None while unknown.
        producer: The node that computes the value; None for an input, parameter or capture.
        parameter: The weight that the value stands for, or None.
        uses: The using node of every use, in topological order; a node that uses the value twice
            is listed twice. Maintained by the graph.
    """

    __slots__ = ("name", "parameter", "producer", "type", "uses")

    def __init__(
        self,
        name: str = "",
        type: ValueType | None = None,
        *,
        producer: Node | None = None,
        parameter: Parameter | None = None,
    ) -> None:
        """Make a value; "" lets the graph that collects it choose a name."""
        self.name = name
        self.type = type
        self.producer = producer
        self.parameter = parameter
        self.uses: list[Node] = []

    @property
    def consumers(self) -> tuple[Node, ...]:
        """The nodes of the graph that use this value, each once, in topological order."""
        return tuple(dict.fromkeys(self.uses))

    def __repr__(self) -> str:
        return f"<Value {self.name!r} {self.type or '?'}>"


class Capture(Value):
    """A body's stand-in for ``outer``, a value of the graph around; made by `capture`.

    A graph that uses a capture lists it without being asked; the builder of the control-flow
    operator then connects ``outer``.
    """

    __slots__ = ("outer",)

    def __init__(self, outer: Value) -> None:
        """Make a stand-in with the type of ``outer``."""
        super().__init__("", outer.type)
        self.outer = outer


class Node:
    """An operator applied to values.

    Attributes:
        name: Unique among the graph's nodes.
        op_type: The operator's name.
        domain: The operator set that defines the operator; "" for ONNX's own.
        version: The version of the operator set that introduced this form of the operator; 0 while
            unknown.
        inputs: Values in the operator's order; None where an optional input is left out.
        outputs: Values in the operator's order; ONNX's omitted outputs have unused values.
        attrs: Attributes by name: int, float, str, bytes, tuples of these, ndarray, Graph, types.
        captures: Outer values that the bodies among ``attrs`` use (see the module's text).
        metadata: The user's notes by key ("affinity" among them), saved with the model.
        subgraph: The inner graph of a subgraph node, None for every other node. It is never changed
            once the node exists.
        op: The stateful operator of a subgraph node, a `SubgraphOp`; None for every other node.
        fallback: The `Fallback` that runs a property's region when its op fails; set in a compiled
            model.
        graph: The graph that owns the node, None before one does.
    """

    __slots__ = (
        "attrs",
        "captures",
        "domain",
        "fallback",
        "graph",
        "inputs",
        "metadata",
        "name",
        "op",
        "op_type",
        "outputs",
        "subgraph",
        "version",
    )

    def __init__(
        self,
        op_type: str,
        inputs: Iterable[Value | None] = (),
        *,
        outputs: int | Sequence[Value] = 1,
        name: str = "",
        domain: str = "",
        version: int = 0,
        attrs: Mapping[str, Any] | None = None,
        captures: Iterable[Value] = (),
        metadata: Mapping[str, str] | None = None,
        subgraph: Graph | None = None,
        op: Any = None,
    ) -> None:
        """Make a node that no graph owns yet; see the attributes of the class.

        ``outputs`` is their number, or values that have no source yet. An empty ``name`` lets the
        graph that collects the node choose one.

        Raises:
            ModelError: an argument has a wrong type, or an output has a source.
        """
        self.name = name
        self.op_type = op_type
        self.domain = domain
        self.version = version
        check_node(self, attrs, metadata)
        self.inputs: tuple[Value | None, ...] = as_items(inputs, Value, "inputs", self)
        if isinstance(outputs, int):
            self.outputs = tuple(Value(producer=self) for _ in range(outputs))
        else:
            self.outputs = as_items(outputs, Value, "outputs", self)
            for value in self.outputs:
                check_no_source(value, self)
                value.producer = self
        self.attrs: dict[str, Any] = {} if attrs is None else dict(attrs)
        self.captures: tuple[Value, ...] = as_items(captures, Value, "captures", self)
        self.metadata: dict[str, str] | None = dict(metadata) if metadata else None
        if subgraph is not None:
            require_type(subgraph, Graph, ModelError, f"a graph as the inner one of node {name!r}")
        self.subgraph = subgraph
        self.op = op
        self.fallback: Any = None
        self.graph: Graph | None = None

    @property
    def sources(self) -> Iterator[Value]:
        """All values that the node depends on: its present inputs, then its captures."""
        for value in self.inputs:
            if value is not None:
                yield value
        yield from self.captures

    @property
    def bodies(self) -> list[Graph]:
        """Nested graphs among the attributes, in attribute order."""
        return [value for value in self.attrs.values() if isinstance(value, Graph)]

    def predecessors(self) -> list[Node]:
        """Return the producers of the inputs and captures, each once, in input order."""
        return list(dict.fromkeys(v.producer for v in self.sources if v.producer is not None))

    def successors(self) -> list[Node]:
        """Return the consumers of the outputs, each once, output by output."""
        return list(dict.fromkeys(n for v in self.outputs for n in v.consumers))

    def __repr__(self) -> str:
        domain = f"{self.domain}." if self.domain else ""
        return f"<Node {self.name!r} {domain}{self.op_type}>"


class Graph:
    """A computation: inputs, outputs, nodes in topological order.

    Attributes:
        name: The model's or body's name.
        inputs: Input values in order; one with a parameter is optional, its default the parameter.
        outputs: Output values in order; their names are the names of the results.
        captures: For a body: values that stand for outer values (see the module's text).
        attrs: Free attributes, as nnvm's (``"subgraph_property"`` is read by PartitionGraph).
        opsets: Operator set version by domain as the file stated; empty for a graph built here.
        metadata: The model's notes by key, saved with it.
        doc: The model's description, saved with it.
    """

    __slots__ = (
        "_by_name",
        "_nodes",
        "_output_set",
        "_parameters",
        "attrs",
        "captures",
        "doc",
        "inputs",
        "metadata",
        "name",
        "opsets",
        "outputs",
    )

    def __init__(
        self,
        inputs: Iterable[Value] = (),
        outputs: Iterable[Value] = (),
        name: str = "graph",
        *,
        nodes: Iterable[Node] | None = None,
        captures: Iterable[Value] = (),
        attrs: Mapping[str, Any] | None = None,
        opsets: Mapping[str, int] | None = None,
        metadata: Mapping[str, str] | None = None,
        doc: str = "",
    ) -> None:
        """Collect the nodes on which ``outputs`` depend; see the attributes of the class.

        ``nodes`` are collected too, whether or not an output depends on them; their order stays
        as far as it is topological. Nodes that another graph owns are copied. Captures that are
        used but not listed are added.

        Raises:
            ModelError: a cycle, a name used twice, a value without a source, a wrong type.
        """
        check_types(None, name=name, nodes=nodes, attrs=attrs, opsets=opsets, metadata=metadata)
        check_types(None, doc=doc)
        self.name = name
        self.inputs: tuple[Value, ...] = as_items(inputs, Value, "inputs")
        self.outputs: tuple[Value, ...] = as_items(outputs, Value, "outputs")
        self.captures: tuple[Value, ...] = as_items(captures, Value, "captures")
        self.attrs: dict[str, Any] = {} if attrs is None else dict(attrs)
        self.opsets: dict[str, int] = {} if opsets is None else dict(opsets)
        self.metadata: dict[str, str] = {} if metadata is None else dict(metadata)
        self.doc = doc
        self._by_name: dict[str, Node] | None = None
        self._output_set: tuple[tuple[Value, ...], frozenset[Value]] = _NO_OUTPUTS
        listed = as_items(nodes or (), Node, "nodes")
        ordered = topological([*listed, *producers(self.outputs)])
        if any(node.graph is not None for node in ordered):
            values: dict[Value, Value] = {}
            self.inputs = tuple(copy_value(v, values) for v in self.inputs)
            self.captures = tuple(copy_value(v, values) for v in self.captures)
            ordered = copy_nodes(ordered, values)
            self.outputs = tuple(copy_value(v, values) for v in self.outputs)
        for node in ordered:
            node.graph = self
        self._nodes = tuple(ordered)
        self._parameters: dict[str, Parameter] = ParameterTable()
        not_made = self._refresh()
        used = [value for value in not_made if type(value) is Capture]
        if used:
            self.captures = tuple(dict.fromkeys((*self.captures, *used)))
        check_sources(self.inputs + self.captures, not_made, self.name)

    @classmethod
    def bare(cls, name: str, opsets: Mapping[str, int]) -> Graph:
        """Return a graph without nodes, inputs, outputs and parameters, for `fill` or `adopt`."""
        self = cls.__new__(cls)
        self.name = name
        self.doc = ""
        self.captures = ()
        self.attrs = {}
        self.opsets = {**opsets}
        self.metadata = {}
        self._by_name = None
        self._output_set = _NO_OUTPUTS
        return self

    def fill(
        self, nodes: Iterable[Node], inputs: Iterable[Value], outputs: Iterable[Value]
    ) -> None:
        """Take over named nodes from `copy_nodes` with this graph as owner; nothing is checked.

        Args:
            nodes: The nodes in topological order.
            inputs: The graph's inputs.
            outputs: The graph's outputs.
        """
        self._nodes = tuple(nodes)
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._parameters = collect_parameters(self.inputs, self._nodes, self.name)

    def adopt(self, nodes: Iterable[Node]) -> None:
        """Take over named nodes that are in no graph; the graph has its inputs, outputs, captures.

        Their order stays as far as it is topological. Uses, of which the values have none yet, and
        parameters are listed; the names are not checked.

        Raises:
            ModelError: the nodes form a cycle, or two parameters share a name.
        """
        self._nodes = tuple(nodes)
        # Parameters are listed in the order of `list_uses`.
        not_made = [*self.inputs, *self.captures]
        is_ordered = True
        for node in self._nodes:
            for value in node.inputs + node.captures:
                if value is not None:
                    value.uses.append(node)
                    if value.producer is None:
                        not_made.append(value)
                    elif value.producer.graph is not self:  # it comes later
                        is_ordered = False
            node.graph = self
        if is_ordered:
            not_made += self.outputs
            self._parameters = collect_parameters(not_made, self._nodes, self.name)
        else:
            self._nodes = tuple(topological(self._nodes))
            self._refresh()

    @property
    def is_loaded(self) -> bool:
        """Whether the nodes are in memory; those of an imported region may be read later."""
        return True

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in topological order."""
        return self._nodes

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters that nodes, bodies or outputs use, or inputs default to, by name."""
        return self._parameters

    def node(self, name: str) -> Node:
        """Return the node of that name.

        Raises:
            ModelError: there is none; the message lists the nearest names.
        """
        if self._by_name is None:
            self._by_name = {node.name: node for node in self._nodes}
        node = self._by_name.get(name) if isinstance(name, str) else None  # pyright: ignore[reportUnnecessaryIsInstance]
        if node is None:
            near = nearest(str(name), self._by_name)
            raise ModelError(f"graph {self.name!r} has no node {name!r}; {near}")
        return node

    def is_output(self, value: Value) -> bool:
        """Return whether a value is an output of the graph; in constant time on average."""
        outputs, known = self._output_set
        if outputs is not self.outputs:
            known = frozenset(self.outputs)
            self._output_set = self.outputs, known
        return value in known

    def values(self) -> Iterator[Value]:
        """Yield every value once: inputs, captures, then each node's inputs and outputs."""
        found: dict[Value | None, None] = dict.fromkeys(self.inputs + self.captures)
        for node in self._nodes:
            for value in node.inputs + node.captures + node.outputs:
                found[value] = None
        found.update(dict.fromkeys(self.outputs))
        return filter(None, found)

    def clone(self) -> Graph:
        """Return a copy with its own nodes, values and bodies; it shares parameters and ops."""
        return self.clone_with_map()[0]

    def clone_with_map(self) -> tuple[Graph, dict[Value, Value]]:
        """Return a copy, and its value for each of this graph's values."""
        values: dict[Value, Value] = {}
        with paused_gc():
            copy = Graph(name=self.name, attrs=self.attrs, opsets=self.opsets, doc=self.doc)
            copy.metadata = dict(self.metadata)
            copy.inputs = tuple([copy_value(v, values) for v in self.inputs])
            copy.captures = tuple([copy_value(v, values) for v in self.captures])
            # The copy has the same order, names and parameters, so none is computed again.
            copy._nodes = tuple(copy_nodes(self._nodes, values, owner=copy))
            copy.outputs = tuple([copy_value(v, values) for v in self.outputs])
            copy._parameters = ParameterTable(self._parameters)
        return copy, values

    def rewire(self, replacements: Mapping[Value, Value]) -> None:
        """Replace values in all their uses; every edit of a graph goes through this method.

        Nodes that compute the new values join the graph just before their first user; their own
        inputs are not replaced. Nodes that computed nothing but replaced values leave. All other
        nodes keep their order. A replaced graph output keeps its name: the new value takes the
        name, or an Identity node carries it if the new value is an input, parameter or output
        itself. Linear in the size of the graph.

        Args:
            replacements: New values by replaced ones. Chains (a to b, b to c) are followed.

        Raises:
            ModelError: the result has a cycle, or a value without a source.
        """
        for value in (*replacements, *replacements.values()):
            require_type(value, Value, ModelError, "values to replace by values: node.outputs[0]")
        if not replacements:
            return
        resolve = Replacements(replacements)
        before = self._nodes
        for node in before:
            if any(v in replacements for v in node.sources):
                node.inputs = tuple(None if v is None else resolve(v) for v in node.inputs)
                node.captures = tuple(map(resolve, node.captures))
        self._rewire_outputs(resolve)
        ordered = topological([*before, *producers(self.outputs)])
        suspects = [v.producer for v in replacements if v.producer is not None]
        self._adopt_nodes(without_dead(ordered, suspects, self.outputs))

    def _rewire_outputs(self, resolve: Replacements) -> None:
        taken = {*self.inputs, *self.captures}
        outputs: list[Value] = []
        for old in self.outputs:
            new = resolve(old)
            if new is not old:
                if new in taken or new.producer is None:
                    new = Node("Identity", [new], version=1).outputs[0]
                    new.type = old.type
                if not self.is_output(new):
                    new.name, old.name = old.name, ""
            outputs.append(new)
            taken.add(new)
        self.outputs = tuple(outputs)

    def _adopt_nodes(self, nodes: Sequence[Node]) -> None:
        for node in self._nodes:
            node.graph = None
        for node in nodes:
            node.graph = self
        self._nodes = tuple(nodes)
        self._by_name = None
        self._refresh()

    def levels(self, *, regions: bool = False) -> list[Graph]:
        """Return this graph and its bodies at every depth, each after the graph that holds it.

        With ``regions`` the inner graphs of subgraph nodes, too.
        """
        found: list[Graph] = [self]
        for graph in found:
            found.extend(body for node in graph._nodes if node.attrs for body in node.bodies)
            if regions:
                found.extend(n.subgraph for n in graph._nodes if n.subgraph is not None)
        return found

    def remove_unused(self) -> int:
        """Drop the nodes on which no output depends, and return their number.

        Captures that a body lists but does not use are dropped before.
        """
        dropped = sum(drop_unused_captures(node) for node in self._nodes if node.captures)
        wanted = set(topological(producers(self.outputs)))
        nodes = [node for node in self._nodes if node in wanted]
        unused = len(self._nodes) - len(nodes)
        if unused or dropped:
            self._adopt_nodes(nodes)
        return unused

    def _refresh(self) -> list[Value]:
        """List uses and parameters anew, and name nodes and values that have no name.

        Returns:
            The values that no node makes.

        Raises:
            ModelError: two nodes, values or parameters share a name.
        """
        values, not_made = list_uses(self.inputs + self.captures, self._nodes, self.outputs)
        self._parameters = collect_parameters(not_made, self._nodes, self.name)
        name_all(self._nodes, values, self.name)
        return not_made

    def refresh_parameters(self) -> None:
        """List the parameters anew, after attributes of nodes have got other bodies."""
        self._parameters = collect_parameters(self.values(), self._nodes, self.name)

    def verify(self) -> None:
        """Check that the graph is well formed, in linear time.

        Raises:
            ModelError: order, ownership, sources, uses or names are wrong; the message names the
                node and value.
        """
        _verify(self)

    def __str__(self) -> str:
        return _text(self)

    def __repr__(self) -> str:
        return (
            f"<Graph {self.name!r}: {len(self._nodes)} nodes, {len(self.inputs)} inputs, "
            f"{len(self.outputs)} outputs, {len(self._parameters)} parameters>"
        )


def copy_value(value: Value, values: dict[Value, Value]) -> Value:
    """Return the copy of ``value`` in ``values``; if there is none, add one without producer."""
    copy = values.get(value)
    if copy is None:
        copy = values[value] = Value(value.name, value.type, parameter=value.parameter)
    return copy


def copy_nodes(
    nodes: Iterable[Node],
    values: dict[Value, Value],
    owner: Graph | None = None,
) -> list[Node]:
    """Return copies of ``nodes`` over the copies of their values.

    Args:
        nodes: The nodes. A value that one of them takes from another comes from the other's copy
            if the other stands before it, or if ``values`` had the copy from the start.
        values: The copy of each value; more are added, those of values from elsewhere without
            producer.
        owner: The graph that will have all the copies, in this order; uses are listed. None: the
            copies are in no graph yet, and uses are not listed.
    """
    known = cast("Callable[[Value | None], Value | None]", values.get)
    new_node, new_value = Node.__new__, Value.__new__
    copies: list[Node] = []
    for node in nodes:
        copy = new_node(Node)
        copies.append(copy)
        copy.name = node.name
        copy.op_type = node.op_type
        copy.domain = node.domain
        copy.version = node.version
        copy.subgraph = node.subgraph
        copy.op = node.op
        copy.fallback = None  # each compiled model has its own
        copy.graph = owner
        copy.metadata = dict(node.metadata) if node.metadata else None
        inputs: list[Value | None] = []
        for value in node.inputs:
            made = known(value)
            if made is not None:
                if owner is not None:
                    made.uses.append(copy)
            elif value is not None:  # as copy_value, but without calls: most regions are small
                made = values[value] = new_value(Value)
                made.name = value.name
                made.type = value.type
                made.producer = None
                made.parameter = value.parameter
                made.uses = [] if owner is None else [copy]
            inputs.append(made)
        copy.inputs = tuple(inputs)
        copy.captures = node.captures
        if node.captures:
            copy.captures = tuple([copy_value(v, values) for v in node.captures])
            if owner is not None:
                for value in copy.captures:
                    value.uses.append(copy)
        outputs: list[Value] = []
        for value in node.outputs:
            made = known(value)
            if made is None:
                made = values[value] = new_value(Value)
                made.name = value.name
                made.type = value.type
                made.parameter = None
                made.uses = []
            made.producer = copy
            outputs.append(made)
        copy.outputs = tuple(outputs)
        attrs = copy.attrs = {}
        if node.attrs:
            for key, held in node.attrs.items():
                attrs[key] = held.clone() if isinstance(held, Graph) else held
    return copies
