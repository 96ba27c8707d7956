"""Conversion of an ONNX ModelProto to a Graph: the second step of ``sg.load``.

The first step, `subgraph.onnx_format.wire`, maps the file and takes the weights out of the message.
This step resolves names to values, bodies to nested graphs, and inlines functions. An outer value
that a body uses becomes a capture on every level between; an outer parameter becomes a value of the
body's own with the same Parameter.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import attrs

from subgraph.errors import ModelError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.lazy import LazyGraph
from subgraph.graph.limits import check_nodes, check_time
from subgraph.graph.naming import fresh_name
from subgraph.graph.parameters import Parameter, Unchecked
from subgraph.graph.types import Array, TensorType, ValueType, dtype_of
from subgraph.onnx_format.checks import check_node, read_opsets, refuse_unknown, text_of, version_of
from subgraph.onnx_format.extra_fields import store_extra_fields
from subgraph.onnx_format.order import sort_nodes, used
from subgraph.onnx_format.tensors import TensorReader
from subgraph.operators.messages import (
    IR_VERSION,
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    StringStringEntryProto,
)
from subgraph.operators.protobuf import attr_from_proto, type_from_proto
from subgraph.operators.schema import canonical_domain, find_schema
from subgraph.operators.subgraph_op import DOMAIN, DefaultSubgraphOp

Functions = Literal["inline", "keep"]
# Metadata of a FunctionProto by which `subgraph.onnx_format.writer` marks a subgraph node.
MARK = "subgraph.node"
HIDDEN = "subgraph.hidden_inputs"
# Metadata of a graph or function: the record of the partition that `explain` reads, as JSON.
RECORD = "subgraph.partition"

_log = logging.getLogger("subgraph")
_MAX_CALL_DEPTH = 64
_Key = tuple[str, str, str]


class _Names:
    """Names of nodes, values or parameters in one scope, made unique by a number."""

    def __init__(self) -> None:
        self.taken: set[str] = set()
        self._count: dict[str, int] = {}

    def fresh(self, name: str) -> str:
        """Reserve and return ``name``, with a number appended if it is already taken."""
        if name in self.taken:
            self._count.setdefault(name, 1)
            return fresh_name(name, self.taken, self._count)
        self.taken.add(name)
        return name


class _Level:
    """One Graph under construction: its nodes and the names that are in use."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[Node] = []
        self.node_names = _Names()
        self.value_names = _Names()
        # Pairs of an inner value and the outer value that it captures.
        self.captures: list[tuple[Value, Value]] = []
        self.docs: list[tuple[Node, str]] = []
        self.weights: list[Value] = []

    def node_name(self, name: str) -> str:
        return self.node_names.fresh(name) if name else ""

    def value_name(self, name: str) -> str:
        return self.value_names.fresh(name)


@attrs.frozen(eq=False)
class _Binding:
    """An attribute of a function call, and the scope in which its names are resolved."""

    proto: AttributeProto
    scope: _Scope


@attrs.define(eq=False)
class _Scope:
    """The values that names stand for in one graph or function; bodies see the outer scope."""

    level: _Level
    opsets: Mapping[str, int]
    parent: _Scope | None = None
    types: Mapping[str, ValueType] = attrs.field(factory=dict[str, ValueType])
    # For functions: prefix of inner names, new names of its outputs, and attributes of the call.
    prefix: str = ""
    renamed: Mapping[str, str] = attrs.field(factory=dict[str, str])
    bindings: Mapping[str, _Binding] = attrs.field(factory=dict[str, _Binding])
    values: dict[str, Value | None] = attrs.field(factory=dict[str, "Value | None"])

    def find(self, name: str) -> tuple[bool, Value | None]:
        """Return whether ``name`` is known here, and its value (None: an omitted input)."""
        if name in self.values:
            return True, self.values[name]
        if self.parent is None:
            return False, None
        known, outer = self.parent.find(name)
        if outer is not None:
            inner = Value(self.level.value_name(name), outer.type, parameter=outer.parameter)
            if outer.parameter is None:
                self.level.captures.append((inner, outer))
            self.values[name] = inner
            return True, inner
        return known, None

    def define(self, name: str, value: Value, what: str) -> None:
        """Define ``name`` in this scope.

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


class GraphReader:
    """Converts one ModelProto."""

    def __init__(
        self,
        model: ModelProto,
        tensors: TensorReader,
        functions: Functions,
        *,
        parameters: Mapping[str, Parameter] | None = None,
        lazy: bool = False,
    ) -> None:
        """Prepare to convert ``model``.

        Args:
            model: The message.
            tensors: Reads the arrays of its tensors.
            functions: See ``sg.load``.
            parameters: Parameters by name, used instead of the tensors of the message.
            lazy: Whether the nodes of a region are read at the first access to them.
        """
        self._model = model
        self._tensors = tensors
        self._parameters = parameters
        self._lazy = lazy
        self._keep = functions == "keep"
        self._parameter_names = _Names()
        self._functions: dict[_Key, FunctionProto] = {}
        for function in model.functions:
            key = (canonical_domain(function.domain), function.name, function.overload)
            if key in self._functions:
                raise ModelError(f"function {_shown(key)} is defined twice")
            self._functions[key] = function
        self._check_calls()

    def read(self) -> Graph:
        """Return the graph.

        Raises:
            ModelError: the model is not well formed.
            UnsupportedOpError: it uses an operator or opset that is not known.
        """
        model = self._model
        if not model.HasField("graph"):
            raise ModelError("the message has no graph; it is not an ONNX model")
        if not 0 < model.ir_version <= IR_VERSION:
            raise ModelError(
                f"IR version {model.ir_version} is not one of 1 to {IR_VERSION}, which the "
                "onnx package here knows; the file is damaged, or upgrade onnx"
            )
        opsets = read_opsets(model.opset_import)
        if not opsets and model.ir_version < 3:
            opsets = {"": 1}
        if not opsets:
            raise ModelError("the model imports no operator set; opset_import is missing")
        scope = _Scope(_Level(model.graph.name), opsets)
        inputs, outputs = self._graph(model.graph, scope, old=model.ir_version < 4)
        graph = Graph(
            inputs,
            outputs,
            text_of(model.graph.name) or "graph",
            nodes=scope.level.nodes,
            opsets=opsets,
            metadata=_noted(model.metadata_props),
            doc=text_of(model.doc_string or model.graph.doc_string),
        )
        graph.attrs["onnx"] = _origin(model)
        graph.attrs.update(_record(_noted(model.graph.metadata_props)))
        store_extra_fields(graph, model.graph, scope.level.docs, scope.level.weights, model)
        return graph

    def _check_calls(self) -> None:
        """Refuse recursive functions, and those that exceed the limit of nodes when inlined."""
        sizes: dict[_Key, int] = {}
        for root in self._functions:
            if root in sizes:
                continue
            active = {root: self._called(self._functions[root].node)}
            while active:
                key, calls = next(reversed(active.items()))
                callee = next((c for c in calls if c in self._functions and c not in sizes), None)
                if callee is None:
                    calls = self._called(self._functions[key].node)
                    sizes[key] = sum(sizes.get(c, 1) for c in calls)
                    del active[key]
                elif callee in active:
                    chain = " -> ".join(_shown(k) for k in [*list(active)[-8:], callee])
                    raise ModelError(f"functions call themselves: {chain}")
                elif len(active) >= _MAX_CALL_DEPTH:
                    raise ModelError(f"functions call each other more than {len(active)} deep")
                else:
                    active[callee] = self._called(self._functions[callee].node)
        # Functions that call each other twice on each of n levels would give 2**n nodes.
        check_nodes(
            sum(sizes.get(key, 0) for key in self._called(self._model.graph.node)),
            "inlining the functions of the model",
        )

    def _called(self, protos: Iterable[NodeProto]) -> Iterator[_Key]:
        """Yield the operator of each node, and of the nodes in bodies."""
        if not self._functions:
            return
        for proto in protos:
            yield canonical_domain(proto.domain), proto.op_type, proto.overload
            for attribute in proto.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    yield from self._called(attribute.g.node)

    def _graph(
        self, proto: GraphProto, scope: _Scope, *, old: bool = False
    ) -> tuple[list[Value], list[Value]]:
        """Fill the scope's level with the nodes of ``proto``; return inputs and outputs."""
        types: dict[str, ValueType] = {}
        for info in (*proto.value_info, *proto.output, *proto.input):
            type_ = type_from_proto(info.type) if info.HasField("type") else None
            if type_ is not None:
                types[info.name] = type_
        scope.types = types
        scope.level.value_names.taken.update(v.name for v in proto.input)
        scope.level.value_names.taken.update(n for node in proto.node for n in node.output if n)
        weights = self._initializers(proto, scope)
        inputs: list[Value] = []
        for info in proto.input:
            weight = weights.get(info.name)
            if weight is not None:
                # Before IR version 4 every initializer had to be listed as an input.
                if not old:
                    inputs.append(weight)
            else:
                value = Value(info.name, types.get(info.name))
                scope.define(info.name, value, "the graph's inputs")
                inputs.append(value)
        if len({value.name for value in inputs}) < len(inputs):
            raise ModelError(f"graph {proto.name!r} lists an input twice")
        self._nodes(proto.node, scope)
        return inputs, [self._output(info.name, scope) for info in proto.output]

    def _output(self, name: str, scope: _Scope) -> Value:
        value = scope.find(name)[1]
        if value is None:
            raise ModelError(f"graph {scope.level.name!r}: nothing makes its output {name!r}")
        return value

    def _initializers(self, proto: GraphProto, scope: _Scope) -> dict[str, Value]:
        weights: dict[str, Value] = {}

        def add(name: str, array: Array | Unchecked) -> None:
            if not name:
                raise ModelError(f"graph {proto.name!r} has an initializer without a name")
            parameter = self._parameter(name, array)
            value = Value(name, parameter.type, parameter=parameter)
            scope.level.weights.append(value)
            scope.define(name, value, "an initializer")
            scope.level.value_names.taken.add(name)
            weights[name] = value

        for tensor in proto.initializer:
            add(tensor.name, self._tensors.weight(tensor))
        for sparse in proto.sparse_initializer:
            dense = self._tensors.dense(sparse.values, sparse.indices, sparse.dims)
            add(sparse.values.name, dense)
        return weights

    def _parameter(self, name: str, array: Array | Unchecked) -> Parameter:
        if self._parameters is None:
            return Parameter.adopt(self._parameter_names.fresh(name), array)
        found = self._parameters[name]
        shown = array.array if isinstance(array, Unchecked) else array
        if found.type != TensorType(dtype_of(shown), shown.shape):
            raise ModelError(f"parameter {name!r} is {found.type}, the file has another type")
        return found

    def _nodes(self, protos: Sequence[NodeProto], scope: _Scope) -> None:
        work: Iterator[NodeProto] = iter(protos)
        for position, proto in enumerate(protos):
            if all(not name or scope.find(name)[0] for name in used(proto)):
                self._node(proto, scope)
                continue
            work = iter(sort_nodes(protos[position:], scope.values))
            break
        else:
            return
        for proto in work:
            self._node(proto, scope)

    def _node(self, proto: NodeProto, scope: _Scope) -> None:
        check_time(f"reading node {proto.name!r} ({proto.op_type})")
        domain = canonical_domain(text_of(proto.domain))
        function = self._functions.get((domain, proto.op_type, proto.overload))
        if function is None:
            self._plain(proto, domain, scope)
            return
        notes = _noted(function.metadata_props)
        if self._keep or MARK in notes:
            self._call(proto, function, notes, scope)
        else:
            self._inline(proto, function, scope)

    def _plain(self, proto: NodeProto, domain: str, scope: _Scope) -> None:
        version = version_of(domain, scope.opsets, proto)
        schema = find_schema(text_of(proto.op_type), domain, version)
        if schema is None or schema.deprecated:
            refuse_unknown(proto, domain, version, schema)
        held = {
            text_of(a.name): self._attribute(a, scope)
            for a in proto.attribute
            if self._given(a, scope)
        }
        if schema is not None:
            check_node(proto, schema, held)
        bodies = [value[1] for value in held.values() if isinstance(value, _Body)]
        node = Node(
            proto.op_type,
            [self._input(name, proto, scope) for name in proto.input],
            outputs=[self._made(name, proto, scope) for name in proto.output],
            name=scope.level.node_name(_prefixed(scope, text_of(proto.name))),
            domain=domain,
            version=version,
            attrs={k: v[0] if isinstance(v, _Body) else v for k, v in held.items()},
            captures=[outer for captures in bodies for outer in captures],
            metadata=_noted(proto.metadata_props),
        )
        scope.level.nodes.append(node)
        if proto.doc_string:
            scope.level.docs.append((node, text_of(proto.doc_string)))

    def _input(self, name: str, proto: NodeProto, scope: _Scope) -> Value | None:
        if not name:
            return None
        known, value = scope.find(name)
        if not known:
            raise ModelError(
                f"node {proto.name!r} ({proto.op_type}) uses value {name!r}, which no input, "
                "initializer or node of the graph gives"
            )
        return value

    def _made(self, name: str, proto: NodeProto, scope: _Scope) -> Value:
        if not name:
            return Value()
        shown = scope.renamed.get(name)
        if shown is None:
            shown = scope.level.value_name(f"{scope.prefix}/{name}") if scope.prefix else name
        value = Value(shown, scope.types.get(name))
        scope.define(name, value, f"node {proto.name!r} ({proto.op_type})")
        return value

    def _given(self, proto: AttributeProto, scope: _Scope) -> bool:
        return not proto.ref_attr_name or proto.ref_attr_name in scope.bindings

    def _attribute(self, proto: AttributeProto, scope: _Scope) -> Any:
        name, around = proto.name, scope
        while proto.ref_attr_name:
            binding = around.bindings.get(proto.ref_attr_name)
            if binding is None:
                raise ModelError(f"attribute {name!r} refers to {proto.ref_attr_name!r}: not given")
            proto, around = binding.proto, binding.scope
        match proto.type:
            case AttributeProto.GRAPH:
                if around.level is not scope.level:
                    raise ModelError(f"attribute {name!r}: a body passed on into a body")
                return self._body(proto.g, around)
            case AttributeProto.TENSOR:
                return self._tensors.array(proto.t)
            case AttributeProto.TENSORS:
                return tuple(self._tensors.array(t) for t in proto.tensors)
            case AttributeProto.GRAPHS:
                raise ModelError(f"attribute {name!r} is a list of graphs, which no operator has")
            case _:
                return attr_from_proto(proto, _no_graph)

    def _body(self, proto: GraphProto, scope: _Scope) -> _Body:
        level = _Level(proto.name)
        inner = _Scope(level, scope.opsets, scope, bindings=scope.bindings)
        inputs, outputs = self._graph(proto, inner)
        notes = _noted(proto.metadata_props)
        graph = Graph(
            inputs,
            outputs,
            text_of(proto.name) or "body",
            nodes=level.nodes,
            captures=[value for value, _ in level.captures],
            attrs=_record(notes),
            metadata={key: note for key, note in notes.items() if key != RECORD},
            doc=text_of(proto.doc_string),
        )
        store_extra_fields(graph, proto, level.docs, level.weights)
        return _Body((graph, tuple(outer for _, outer in level.captures)))

    def _function_scope(
        self, proto: NodeProto, function: FunctionProto, level: _Level, scope: _Scope
    ) -> _Scope:
        bindings = {a.name: _Binding(a, scope) for a in function.attribute_proto}
        for attribute in proto.attribute:
            if self._given(attribute, scope):
                bindings[attribute.name] = _Binding(attribute, scope)
        types = ((v.name, type_from_proto(v.type)) for v in function.value_info)
        return _Scope(
            level,
            {**scope.opsets, **read_opsets(function.opset_import)},
            types={name: type_ for name, type_ in types if type_ is not None},
            bindings=bindings,
        )

    def _inline(self, proto: NodeProto, function: FunctionProto, scope: _Scope) -> None:
        """Put the nodes of a function where it is called."""
        level = scope.level
        inner = self._function_scope(proto, function, level, scope)
        count = len(level.nodes)
        inner.prefix = _prefixed(scope, proto.name) or f"{proto.op_type}_{count}"
        for name, actual in _pairs(function.input, proto.input, proto):
            inner.values[name] = self._input(actual, proto, scope)
        results = [(o, a) for o, a in _pairs(function.output, proto.output, proto) if a]
        outer = {actual: self._made(actual, proto, scope).name for _, actual in results}
        direct = {name: outer[actual] for name, actual in results if name not in inner.values}
        inner.renamed = direct
        self._nodes(function.node, inner)
        for name, actual in results:
            value = self._output(name, inner)
            made = scope.values[actual]
            assert made is not None, "set just above"
            if value.name == made.name:
                value.type = value.type or made.type
                scope.values[actual] = value
            else:
                level.nodes.append(Node("Identity", [value], outputs=[made], version=1))

    def _call(
        self, proto: NodeProto, function: FunctionProto, notes: Mapping[str, str], scope: _Scope
    ) -> None:
        """Make a subgraph node of the call of a function."""
        level = _Level(function.name)
        inner = self._function_scope(proto, function, level, scope)
        hidden = int(notes.get(HIDDEN, "0"))
        pairs = _pairs(function.input, proto.input, proto)
        first_hidden = len(function.input) - hidden
        inputs: list[tuple[Value, Value]] = []
        for position, (name, actual) in enumerate(pairs):
            outer = self._input(actual, proto, scope)
            if outer is None:
                inner.values[name] = None
                continue
            value = Value(name, outer.type, parameter=outer.parameter)
            level.value_names.taken.add(name)
            inner.define(name, value, "the function's inputs")
            if position < first_hidden or outer.parameter is None:
                inputs.append((value, outer))
        given = list(_pairs(function.output, proto.output, proto))
        held = [value for value, _ in inputs]
        name = notes.get("subgraph.graph", function.name)
        opsets = {d: v for d, v in read_opsets(function.opset_import).items() if d != DOMAIN}
        doc = text_of(function.doc_string)

        def read() -> Graph:
            self._nodes(function.node, inner)
            outputs = [self._output(name, inner) for name, _ in given]
            attrs = _record(notes)
            return Graph(
                held, outputs, name, nodes=level.nodes, attrs=attrs, opsets=opsets, doc=doc
            )

        # Lazy reading needs the types of all outputs, since nothing infers them then.
        typed = all(scope.types.get(actual) is not None for _, actual in given)
        later = self._lazy and typed and not hidden and not _has_bodies(function)
        graph = LazyGraph(name, held, opsets, doc, read) if later else read()
        function_version = scope.opsets.get(canonical_domain(proto.domain), 1)
        node = Node(
            notes.get("subgraph.op_type", proto.op_type),
            [value for _, value in inputs],
            outputs=[self._made(actual, proto, scope) for _, actual in given],
            name=scope.level.node_name(_prefixed(scope, text_of(proto.name))),
            domain=notes.get("subgraph.domain", canonical_domain(proto.domain)),
            version=int(notes.get("subgraph.version", function_version)),
            attrs={text_of(a.name): self._attribute(a, scope) for a in proto.attribute},
            metadata=_noted(proto.metadata_props),
            subgraph=graph,
            op=DefaultSubgraphOp(graph),
        )
        for k, (made, (_, actual)) in enumerate(zip(node.outputs, given, strict=True)):
            if not later:
                result = graph.outputs[k]
                made.type = made.type or result.type
                result.type = result.type or made.type
            if not actual:
                made.name = ""
        scope.level.nodes.append(node)


def _has_bodies(function: FunctionProto) -> bool:
    attributes = (attribute for node in function.node for attribute in node.attribute)
    return any(attribute.type == AttributeProto.GRAPH for attribute in attributes)


class _Body(tuple[Graph, tuple[Value, ...]]):
    """A body and the outer values of its captures, among converted attributes."""

    __slots__ = ()


def _noted(entries: Iterable[StringStringEntryProto]) -> dict[str, str]:
    return {text_of(entry.key): text_of(entry.value) for entry in entries}


def _record(notes: Mapping[str, str]) -> dict[str, Any]:
    """Return the attribute of a graph that holds the record of its partition, if a note has it."""
    if RECORD not in notes:
        return {}
    from subgraph.partition.record import KEY
    from subgraph.partition.saved import load_record

    try:
        return {KEY: load_record(notes[RECORD])}
    except ModelError as error:
        _log.warning("%s: sg.explain has no answer for this model", error)
        return {}


def _no_graph(proto: GraphProto) -> Graph:
    raise ModelError(f"graph {proto.name!r} stands where no graph can be")


def _shown(key: _Key) -> str:
    return ".".join(part for part in key if part)


def _prefixed(scope: _Scope, name: str) -> str:
    return f"{scope.prefix}/{name}" if name and scope.prefix else name


def _origin(model: ModelProto) -> dict[str, Any]:
    notes: dict[str, Any] = {
        "ir_version": model.ir_version,
        "producer_name": text_of(model.producer_name),
        "producer_version": text_of(model.producer_version),
        "domain": text_of(model.domain),
        "model_version": model.model_version,
        "graph_metadata": _noted(p for p in model.graph.metadata_props if p.key != RECORD),
    }
    return {key: value for key, value in notes.items() if value}


def _pairs(formal: Sequence[str], actual: Sequence[str], proto: NodeProto) -> list[tuple[str, str]]:
    """Return pairs of formal and actual names of a function call; "" for an omitted argument."""
    if len(actual) > len(formal):
        raise ModelError(
            f"node {proto.name!r} calls function {proto.op_type!r} with {len(actual)} inputs or "
            f"outputs; it has {len(formal)}"
        )
    return list(zip(formal, [*actual, *[""] * (len(formal) - len(actual))], strict=True))
