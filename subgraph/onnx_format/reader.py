"""Conversion of an ONNX ModelProto to a Graph: the second step of ``sg.load``.

The first step, `subgraph.onnx_format.wire`, maps the file and removes the weights from the message.
This step resolves names to values and bodies to nested graphs, and inlines functions. An outer
value that a body uses becomes a capture of every graph between (`subgraph.onnx_format.scope`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from subgraph.errors import ModelError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.lazy import LazyGraph
from subgraph.graph.limits import check_nodes, check_time
from subgraph.graph.naming import Names
from subgraph.graph.parameters import Parameter, Unchecked
from subgraph.graph.types import Array, TensorType, ValueType, dtype_of
from subgraph.onnx_format.checks import check_node, read_opsets, refuse_unknown, text_of, version_of
from subgraph.onnx_format.extra_fields import store_extra_fields
from subgraph.onnx_format.metadata import (
    GRAPH_NAME,
    HIDDEN_INPUTS,
    OP_DOMAIN,
    OP_TYPE,
    OP_VERSION,
    PARTITION_RECORD,
    SUBGRAPH_NODE,
    metadata_of,
    number_in,
)
from subgraph.onnx_format.order import sort_nodes, used
from subgraph.onnx_format.scope import Binding, Level, Scope
from subgraph.onnx_format.tensors import TensorReader
from subgraph.operators.messages import (
    IR_VERSION,
    AttributeProto,
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
)
from subgraph.operators.protobuf import attr_from_proto, type_from_proto
from subgraph.operators.schema import canonical_domain, find_schema
from subgraph.operators.subgraph_op import DOMAIN, DefaultSubgraphOp

Functions = Literal["inline", "keep"]

_log = logging.getLogger("subgraph")
# Calls of functions inside each other; an estimate, of which exporters use a few. Each takes
# several frames of Python's stack while it is read.
_MAX_CALL_DEPTH = 64
_Key = tuple[str, str, str]


class GraphReader:
    """Converts one ModelProto to a Graph."""

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
            functions: "inline" or "keep": see ``sg.load``.
            parameters: Parameters by name to use instead of the tensors of the message.
            lazy: Whether the nodes of a region are read when they are first accessed.
        """
        self._model = model
        self._tensors = tensors
        self._parameters = parameters
        self._lazy = lazy
        self._keep = functions == "keep"
        self._parameter_names = Names()
        self._functions: dict[_Key, FunctionProto] = {}
        for function in model.functions:
            key = (canonical_domain(function.domain), function.name, function.overload)
            if key in self._functions:
                raise ModelError(f"function {_function_name(key)} is defined twice")
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
            # Operator sets exist since IR version 3; an older file means the first one.
            opsets = {"": 1}
        if not opsets:
            raise ModelError("the model imports no operator set; opset_import is missing")
        scope = Scope(Level(model.graph.name), opsets)
        inputs, outputs = self._graph(model.graph, scope, old=model.ir_version < 4)
        graph = Graph(
            inputs,
            outputs,
            text_of(model.graph.name) or "graph",
            nodes=scope.level.nodes,
            opsets=opsets,
            metadata=metadata_of(model.metadata_props),
            doc=text_of(model.doc_string or model.graph.doc_string),
        )
        graph.attrs["onnx"] = _origin(model)
        graph.attrs.update(_record(metadata_of(model.graph.metadata_props)))
        store_extra_fields(graph, model.graph, scope.level.docs, scope.level.weights, model)
        return graph

    def _check_calls(self) -> None:
        """Refuse recursive functions, and functions that give too many nodes when inlined."""
        sizes: dict[_Key, int] = {}

        def size(key: _Key, active: tuple[_Key, ...] = ()) -> int:
            """Return how many nodes a call of a function gives; ``active`` call it."""
            if key not in sizes:
                if key in active:
                    chain = " -> ".join(map(_function_name, (*active[-8:], key)))
                    raise ModelError(f"functions call themselves: {chain}")
                if len(active) >= _MAX_CALL_DEPTH:
                    raise ModelError(f"functions call each other more than {len(active)} deep")
                called = self._called(self._functions[key].node)
                inside = (*active, key)
                sizes[key] = sum(size(c, inside) if c in self._functions else 1 for c in called)
            return sizes[key]

        for key in self._functions:
            size(key)
        # n functions, each of which calls the next one twice, would give 2**n nodes.
        check_nodes(
            sum(sizes.get(key, 0) for key in self._called(self._model.graph.node)),
            "inlining the functions of the model",
        )

    def _called(self, protos: Iterable[NodeProto]) -> Iterator[_Key]:
        """Yield the operators of nodes and of those in their bodies; none without functions."""
        if not self._functions:
            return
        for proto in protos:
            yield canonical_domain(proto.domain), proto.op_type, proto.overload
            for attribute in proto.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    yield from self._called(attribute.g.node)

    def _graph(
        self, proto: GraphProto, scope: Scope, *, old: bool = False
    ) -> tuple[list[Value], list[Value]]:
        """Fill the scope's level with the nodes of ``proto``; return inputs and outputs."""
        types: dict[str, ValueType] = {}
        # Later entries win: for an input the type at the graph's interface counts, whatever
        # ``value_info`` says of it.
        for info in (*proto.value_info, *proto.output, *proto.input):
            type_ = type_from_proto(info.type) if info.HasField("type") else None
            if type_ is not None:
                types[info.name] = type_
        scope.types = types
        # All names of the file are reserved before any is generated, for a capture or an inlined
        # function, so that no later value of the file finds its name taken.
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

    def _output(self, name: str, scope: Scope) -> Value:
        value = scope.find(name)[1]
        if value is None:
            raise ModelError(f"graph {scope.level.name!r}: nothing makes its output {name!r}")
        return value

    def _initializers(self, proto: GraphProto, scope: Scope) -> dict[str, Value]:
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
            # Two bodies may have initializers of one name. A user changes parameters by name, so
            # that the names are unique in the whole model.
            return Parameter.adopt(self._parameter_names.fresh(name), array)
        found = self._parameters[name]
        shown = array.array if isinstance(array, Unchecked) else array
        if found.type != TensorType(dtype_of(shown), shown.shape):
            raise ModelError(f"parameter {name!r} is {found.type}, the file has another type")
        return found

    def _nodes(self, protos: Sequence[NodeProto], scope: Scope) -> None:
        """Convert nodes in the file's order; from the first that is too early, sorted."""
        done = 0
        # ONNX requires a topological order. A file that has it keeps it, so that a loaded graph is
        # easily compared with its file. Not every exporter does, so others are sorted.
        for proto in protos:
            if not all(not name or scope.find(name)[0] for name in used(proto)):
                break
            self._node(proto, scope)
            done += 1
        for proto in sort_nodes(protos[done:], scope.values):
            self._node(proto, scope)

    def _node(self, proto: NodeProto, scope: Scope) -> None:
        check_time(f"reading node {proto.name!r} ({proto.op_type})")
        domain = canonical_domain(text_of(proto.domain))
        function = self._functions.get((domain, proto.op_type, proto.overload))
        if function is None:
            self._operator_node(proto, domain, scope)
            return
        metadata = metadata_of(function.metadata_props)
        # A function with this mark was a subgraph node when the file was saved, and becomes one
        # again.
        if self._keep or SUBGRAPH_NODE in metadata:
            self._subgraph_node(proto, function, metadata, scope)
        else:
            self._inline(proto, function, scope)

    def _operator_node(self, proto: NodeProto, domain: str, scope: Scope) -> None:
        version = version_of(domain, scope.opsets, proto)
        schema = find_schema(text_of(proto.op_type), domain, version)
        if schema is None or schema.deprecated:
            refuse_unknown(proto, domain, version, schema)
        attributes = self._attributes(proto, scope)
        if schema is not None:
            check_node(proto, schema, attributes)
        bodies = [value[1] for value in attributes.values() if isinstance(value, _Body)]
        node = Node(
            proto.op_type,
            [self._input(name, proto, scope) for name in proto.input],
            outputs=[self._output_value(name, proto, scope) for name in proto.output],
            name=scope.level.node_name(_prefixed(scope, text_of(proto.name))),
            domain=domain,
            version=version,
            attrs={k: v[0] if isinstance(v, _Body) else v for k, v in attributes.items()},
            captures=[outer for captures in bodies for outer in captures],
            metadata=metadata_of(proto.metadata_props),
        )
        scope.level.nodes.append(node)
        if proto.doc_string:
            scope.level.docs.append((node, text_of(proto.doc_string)))

    def _input(self, name: str, proto: NodeProto, scope: Scope) -> Value | None:
        if not name:
            return None
        known, value = scope.find(name)
        if not known:
            raise ModelError(
                f"node {proto.name!r} ({proto.op_type}) uses value {name!r}, which no input, "
                "initializer or node of the graph gives"
            )
        return value

    def _output_value(self, name: str, proto: NodeProto, scope: Scope) -> Value:
        if not name:
            return Value()
        shown = scope.renamed.get(name)
        if shown is None:
            shown = scope.level.value_name(f"{scope.prefix}/{name}") if scope.prefix else name
        value = Value(shown, scope.types.get(name))
        scope.define(name, value, f"node {proto.name!r} ({proto.op_type})")
        return value

    def _has_value(self, proto: AttributeProto, scope: Scope) -> bool:
        """Return whether an attribute has a value, perhaps by reference to one of the call."""
        # ONNX: an attribute that refers to one that the call does not give is absent from the node.
        return not proto.ref_attr_name or proto.ref_attr_name in scope.bindings

    def _attributes(self, proto: NodeProto, scope: Scope) -> dict[str, Any]:
        return {
            text_of(a.name): self._attribute(a, scope)
            for a in proto.attribute
            if self._has_value(a, scope)
        }

    def _attribute(self, proto: AttributeProto, scope: Scope) -> Any:
        name, around = proto.name, scope
        # A function may pass its own attribute on to a function that it calls, in several steps.
        while proto.ref_attr_name:
            binding = around.bindings.get(proto.ref_attr_name)
            if binding is None:
                raise ModelError(f"attribute {name!r} refers to {proto.ref_attr_name!r}: not given")
            proto, around = binding.proto, binding.scope
        match proto.type:
            case AttributeProto.GRAPH:
                # The names in the body belong to the graph of the caller, whose values are not
                # visible in a graph inside.
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

    def _body(self, proto: GraphProto, scope: Scope) -> _Body:
        level = Level(proto.name)
        inner = Scope(level, scope.opsets, scope, bindings=scope.bindings)
        inputs, outputs = self._graph(proto, inner)
        metadata = metadata_of(proto.metadata_props)
        graph = Graph(
            inputs,
            outputs,
            text_of(proto.name) or "body",
            nodes=level.nodes,
            captures=[value for value, _ in level.captures],
            attrs=_record(metadata),
            metadata={key: text for key, text in metadata.items() if key != PARTITION_RECORD},
            doc=text_of(proto.doc_string),
        )
        store_extra_fields(graph, proto, level.docs, level.weights)
        return _Body((graph, tuple(outer for _, outer in level.captures)))

    def _function_scope(
        self, proto: NodeProto, function: FunctionProto, level: Level, scope: Scope
    ) -> Scope:
        # The function's defaults come first, and attributes of the call replace them.
        bindings = {a.name: Binding(a, scope) for a in function.attribute_proto}
        for attribute in proto.attribute:
            if self._has_value(attribute, scope):
                bindings[attribute.name] = Binding(attribute, scope)
        types = ((v.name, type_from_proto(v.type)) for v in function.value_info)
        return Scope(
            level,
            # ONNX: the nodes of a function follow its own imports. Those of the caller fill in
            # domains that careless exporters leave out. The scope has no parent, since a function
            # sees no outer names.
            {**scope.opsets, **read_opsets(function.opset_import)},
            types={name: type_ for name, type_ in types if type_ is not None},
            bindings=bindings,
        )

    def _inline(self, proto: NodeProto, function: FunctionProto, scope: Scope) -> None:
        """Add the nodes of a function instead of a node that calls it."""
        level = scope.level
        inner = self._function_scope(proto, function, level, scope)
        count = len(level.nodes)
        inner.prefix = _prefixed(scope, proto.name) or f"{proto.op_type}_{count}"
        for name, actual in _pairs(function.input, proto.input, proto):
            inner.values[name] = self._input(actual, proto, scope)
        results = [(o, a) for o, a in _pairs(function.output, proto.output, proto) if a]
        # The results are named before the body is read: its nodes then give them the caller's names
        # at once, and no Identity is needed.
        outer = {actual: self._output_value(actual, proto, scope).name for _, actual in results}
        direct = {name: outer[actual] for name, actual in results if name not in inner.values}
        inner.renamed = direct
        self._nodes(function.node, inner)
        for name, actual in results:
            value = self._output(name, inner)
            outer_value = scope.values[actual]
            assert outer_value is not None, "set just above"
            # The names differ if the function hands on an input, or gives one result twice. A value
            # has one name only, so that the second is an Identity.
            if value.name == outer_value.name:
                value.type = value.type or outer_value.type
                scope.values[actual] = value
            else:
                level.nodes.append(Node("Identity", [value], outputs=[outer_value], version=1))

    def _subgraph_node(
        self, proto: NodeProto, function: FunctionProto, metadata: Mapping[str, str], scope: Scope
    ) -> None:
        """Add a subgraph node for a node that calls a function.

        Args:
            proto: The node.
            function: The function, which becomes the inner graph.
            metadata: Metadata of the function.
            scope: Scope of the node.
        """
        inner = self._function_scope(proto, function, Level(function.name), scope)
        hidden = number_in(metadata, HIDDEN_INPUTS, 0)
        inputs = self._bind_inputs(proto, function, inner, scope, hidden)
        outputs = _pairs(function.output, proto.output, proto)
        # Lazy reading needs the types of all outputs, since nothing infers them then.
        typed = all(scope.types.get(actual) is not None for _, actual in outputs)
        lazy = self._lazy and typed and not hidden and not _has_bodies(function)
        graph = self._inner_graph(function, metadata, inner, [value for value, _ in inputs], lazy)
        function_version = scope.opsets.get(canonical_domain(proto.domain), 1)
        node = Node(
            metadata.get(OP_TYPE, proto.op_type),
            [outer for _, outer in inputs],
            outputs=[self._output_value(actual, proto, scope) for _, actual in outputs],
            name=scope.level.node_name(_prefixed(scope, text_of(proto.name))),
            domain=metadata.get(OP_DOMAIN, canonical_domain(proto.domain)),
            version=number_in(metadata, OP_VERSION, function_version),
            attrs=self._attributes(proto, scope),
            metadata=metadata_of(proto.metadata_props),
            subgraph=graph,
            op=DefaultSubgraphOp(graph),
        )
        for k, (value, (_, actual)) in enumerate(zip(node.outputs, outputs, strict=True)):
            if not lazy:
                result = graph.outputs[k]
                value.type = value.type or result.type
                result.type = result.type or value.type
            if not actual:
                value.name = ""
        scope.level.nodes.append(node)

    def _bind_inputs(
        self, proto: NodeProto, function: FunctionProto, inner: Scope, scope: Scope, hidden: int
    ) -> list[tuple[Value, Value]]:
        """Define the inputs of a function that becomes an inner graph.

        Args:
            proto: The node that calls the function.
            function: The function.
            inner: Scope of the function.
            scope: Scope of the node.
            hidden: Number of inputs at the end that are no inputs of the node if they are weights.

        Returns:
            For each input of the node the value inside and the value outside.
        """
        inputs: list[tuple[Value, Value]] = []
        first_hidden = len(function.input) - hidden
        for position, (name, actual) in enumerate(_pairs(function.input, proto.input, proto)):
            outer = self._input(actual, proto, scope)
            if outer is None:
                inner.values[name] = None
                continue
            value = Value(name, outer.type, parameter=outer.parameter)
            inner.level.value_names.taken.add(name)
            inner.define(name, value, "the function's inputs")
            if position < first_hidden or outer.parameter is None:
                inputs.append((value, outer))
        return inputs

    def _inner_graph(
        self,
        function: FunctionProto,
        metadata: Mapping[str, str],
        inner: Scope,
        inputs: list[Value],
        lazy: bool,
    ) -> Graph:
        """Return the graph of a function, which is read at the first access if ``lazy``."""
        name = metadata.get(GRAPH_NAME, function.name)
        opsets = {d: v for d, v in read_opsets(function.opset_import).items() if d != DOMAIN}
        doc = text_of(function.doc_string)

        def read() -> Graph:
            self._nodes(function.node, inner)
            outputs = [self._output(output, inner) for output in function.output]
            nodes, attrs = inner.level.nodes, _record(metadata)
            return Graph(inputs, outputs, name, nodes=nodes, attrs=attrs, opsets=opsets, doc=doc)

        return LazyGraph(name, inputs, opsets, doc, read) if lazy else read()


def _has_bodies(function: FunctionProto) -> bool:
    attributes = (attribute for node in function.node for attribute in node.attribute)
    return any(attribute.type == AttributeProto.GRAPH for attribute in attributes)


class _Body(tuple[Graph, tuple[Value, ...]]):
    """A converted attribute that is a body: its graph, and the outer values of its captures."""

    __slots__ = ()


def _record(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the graph attribute with the record of a partition; empty if there is no record."""
    if PARTITION_RECORD not in metadata:
        return {}
    from subgraph.partition.record import KEY
    from subgraph.partition.saved import load_record

    try:
        # The model runs without its record, so a damaged one costs only the answers of `explain`.
        return {KEY: load_record(metadata[PARTITION_RECORD])}
    except ModelError as error:
        _log.warning("%s: sg.explain has no answer for this model", error)
        return {}


def _no_graph(proto: GraphProto) -> Graph:
    raise ModelError(f"graph {proto.name!r} stands where no graph can be")


def _function_name(key: _Key) -> str:
    return ".".join(part for part in key if part)


def _prefixed(scope: Scope, name: str) -> str:
    return f"{scope.prefix}/{name}" if name and scope.prefix else name


def _origin(model: ModelProto) -> dict[str, Any]:
    """Return the fields of a ModelProto that a Graph has no attributes for, without empty ones."""
    fields: dict[str, Any] = {
        "ir_version": model.ir_version,
        "producer_name": text_of(model.producer_name),
        "producer_version": text_of(model.producer_version),
        "domain": text_of(model.domain),
        "model_version": model.model_version,
        "graph_metadata": metadata_of(
            p for p in model.graph.metadata_props if p.key != PARTITION_RECORD
        ),
    }
    return {key: value for key, value in fields.items() if value}


def _pairs(formal: Sequence[str], actual: Sequence[str], proto: NodeProto) -> list[tuple[str, str]]:
    """Return pairs of formal and actual names of a function call; "" for an omitted argument."""
    if len(actual) > len(formal):
        raise ModelError(
            f"node {proto.name!r} calls function {proto.op_type!r} with {len(actual)} inputs or "
            f"outputs; it has {len(formal)}"
        )
    return list(zip(formal, [*actual, *[""] * (len(formal) - len(actual))], strict=True))
