"""Conversion of a Graph to an ONNX ModelProto: the first step of ``sg.save``.

The message has no initializers for the weights of the graph; `subgraph.onnx_format.file` writes
them. A subgraph node becomes a call of a model-local function of domain "subgraph", whose metadata
lets `subgraph.onnx_format.reader` restore the node; a function loaded with ``functions="keep"``
stays a call under its own name. Parameters that only bodies inside a function use are passed to it
as hidden inputs, because functions cannot hold weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import onnx
from onnx import (
    FunctionProto,
    GraphProto,
    ModelProto,
    NodeProto,
    OperatorSetIdProto,
    TensorProto,
    ValueInfoProto,
)
from onnx.helper import find_min_ir_version_for, make_opsetid

from subgraph._version import __version__
from subgraph.errors import ModelError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter, Snapshot, State
from subgraph.graph.types import ONNX_DTYPE, Array, dtype_of
from subgraph.onnx_format.extra_fields import (
    extra_fields_of,
    write_extra_fields,
    write_extra_model_fields,
)
from subgraph.onnx_format.metadata import (
    GRAPH_NAME,
    HIDDEN_INPUTS,
    OP_DOMAIN,
    OP_TYPE,
    OP_VERSION,
    PARTITION_RECORD,
    SUBGRAPH_NODE,
    add_metadata,
)
from subgraph.onnx_format.opsets import choose_opsets
from subgraph.operators.protobuf import tensor_to_proto, type_to_proto, write_attributes
from subgraph.operators.schema import find_schema
from subgraph.operators.subgraph_op import DOMAIN
from subgraph.partition.op_note import saved_metadata
from subgraph.partition.record import KEY, record_of
from subgraph.partition.saved import dump_record

# First IR version with metadata of nodes and functions, and with types of values in functions.
_IR_METADATA = 10
# First IR version in which initializers need not be listed as inputs.
_IR_FREE_INITIALIZERS = 4


@attrs.define(eq=False)
class _Names:
    """Names of the values of one graph or function in the file.

    Attributes:
        parent: Names of the graph around a body; None for graphs and functions.
        of: Names of values.
        weights: Names of parameters.
        taken: All names of this graph or function.
    """

    parent: _Names | None = None
    of: dict[Value, str] = attrs.field(factory=dict[Value, str])
    weights: dict[Parameter, str] = attrs.field(factory=dict[Parameter, str])
    taken: set[str] = attrs.field(factory=set[str])

    def fresh(self, name: str) -> str:
        """Reserve and return ``name``, with a number if this or an outer scope has it."""
        unique, number = name, 0
        while any(unique in scope.taken for scope in self._scopes()):
            number += 1
            unique = f"{name}_{number}"
        self.taken.add(unique)
        return unique

    def _scopes(self) -> Iterator[_Names]:
        """Yield the names of this graph and of those around it."""
        scope: _Names | None = self
        while scope is not None:
            yield scope
            scope = scope.parent

    def weight(self, parameter: Parameter) -> str | None:
        """Return the name of a parameter in this or an outer scope; None if it has none."""
        found = (scope.weights.get(parameter) for scope in self._scopes())
        return next((name for name in found if name is not None), None)

    def __call__(self, value: Value | None) -> str:
        """Return the name of a value; "" for an omitted input."""
        if value is None:
            return ""
        if value.parameter is not None and value not in self.of:
            name = self.weight(value.parameter)
            assert name is not None, f"parameter {value.parameter.name!r} has no name"
            return name
        return self.of[value]


class GraphWriter:
    """Converts one graph.

    Attributes:
        weights: Name and array of each initializer that the caller must write; set by `model`.
        names: Name of each parameter in the file; set by `model`.
    """

    def __init__(self, graph: Graph, *, states: Mapping[Parameter, State] | None = None) -> None:
        """Prepare to convert ``graph``.

        Args:
            graph: The graph.
            states: States of parameters to write; by default those published last.

        Raises:
            ModelError: no operator set version fits all its nodes.
        """
        self._graph = graph
        self._opsets = choose_opsets(graph)
        graphs = graph.levels(regions=True)
        used = [p for g in graphs for p in g.parameters.values()]
        unused = (p for g in graphs for p in extra_fields_of(g).unused)
        # One snapshot for all weights: a transaction during the save is in the file as a whole or
        # not at all.
        self._states = {**Snapshot([*used, *unused]).states, **(states or {})}
        self._functions: dict[Graph, FunctionProto] = {}
        self._function_names: set[tuple[str, str, str]] = set()
        self._hidden: dict[Graph, list[Parameter]] = {}
        self._home = self._homes()
        self._has_metadata = False
        self.weights: list[tuple[str, Any]] = []
        self.names: dict[Parameter, str] = {}

    def model(self) -> ModelProto:
        """Return the model without the initializers of its graph.

        Raises:
            ModelError: a name or text has code points that UTF-8 has no form for, lone surrogates.
        """
        try:
            return self._model()
        except UnicodeEncodeError as error:
            raise ModelError(
                f"graph {self._graph.name!r} cannot be written as ONNX: {error.object!r} has "
                f"{error.object[error.start]!r} at {error.start}, which is no character; rename it"
            ) from error

    def _model(self) -> ModelProto:
        graph = self._graph
        origin: Mapping[str, Any] = graph.attrs.get("onnx", {})
        proto = ModelProto(
            producer_name=origin.get("producer_name", "") if origin else "subgraph",
            producer_version=origin.get("producer_version", "") if origin else __version__,
            domain=origin.get("domain", ""),
            model_version=origin.get("model_version", 0),
            doc_string=graph.doc,
        )
        names = _Names()
        self._fill(proto.graph, graph, names)
        self.names = dict(names.weights)
        self.weights = [(name, self._states[p].array) for p, name in names.weights.items()]
        add_metadata(proto, graph.metadata)
        add_metadata(proto.graph, {**origin.get("graph_metadata", {}), **self._record(graph)})
        write_extra_model_fields(extra_fields_of(graph), graph, proto)
        # Several inner graphs may share one message, and messages of protobuf have no hash.
        written = {id(function): function for function in self._functions.values()}
        proto.functions.extend(written.values())
        calling = (node for graph in graph.levels(regions=True) for node in graph.nodes)
        proto.opset_import.extend(self._imports(calling))
        stated = min(origin.get("ir_version", 0), onnx.IR_VERSION)
        # A file that stated these operator sets with an older IR version keeps that version.
        as_stated = stated and self._opsets == graph.opsets
        proto.ir_version = max(
            0 if as_stated else find_min_ir_version_for(proto.opset_import, ignore_unknown=True),
            _IR_METADATA if self._functions or self._has_metadata else _IR_FREE_INITIALIZERS,
            stated,
        )
        return proto

    def _homes(self) -> dict[Parameter, Graph]:
        """Return the graph that holds each parameter: a body, if no other graph uses it."""
        homes: dict[Parameter, Graph] = {}
        for graph in self._graph.levels():
            for parameter in self._used(graph):
                if homes.setdefault(parameter, graph) is not graph:
                    # The bodies see the initializers of the graphs around them, so a shared
                    # parameter is written once.
                    homes[parameter] = self._graph
        return homes

    def _used(self, graph: Graph) -> Iterator[Parameter]:
        """Yield the parameters that a graph itself uses, not its bodies."""
        for value in (*graph.inputs, *graph.outputs):
            if value.parameter is not None:
                yield value.parameter
        for node in graph.nodes:
            for value in node.sources:
                if value.parameter is not None:
                    yield value.parameter
            if node.subgraph is not None:
                yield from self._hidden_of(node.subgraph)

    def _hidden_of(self, inner: Graph) -> list[Parameter]:
        """Return the parameters that the function of an inner graph needs besides its inputs."""
        if inner not in self._hidden:
            own = {value.parameter for value in inner.inputs}
            needed = dict.fromkeys(inner.parameters.values())
            for node in (node for graph in inner.levels() for node in graph.nodes):
                if node.subgraph is not None:
                    needed.update(dict.fromkeys(self._hidden_of(node.subgraph)))
            self._hidden[inner] = [p for p in needed if p not in own]
        return self._hidden[inner]

    def _fill(self, proto: GraphProto, graph: Graph, names: _Names) -> None:
        """Write a graph or body; the caller writes the initializers of the outermost graph."""
        proto.name = graph.name or "graph"
        body = names.parent is not None
        if body:
            proto.doc_string = graph.doc
            add_metadata(proto, {**graph.metadata, **self._record(graph)})
        # Inputs and outputs are the interface of the model, so they reserve their names before all
        # others.
        ends = dict.fromkeys((*graph.inputs, *graph.outputs))
        for value in ends:
            if value not in names.of and value.parameter is None:
                names.of[value] = names.fresh(value.name)
        for value in graph.inputs:
            if value.parameter is not None:
                names.of[value] = names.weights[value.parameter] = names.fresh(value.name)
        self._name_nodes(graph, names)
        for parameter in dict.fromkeys(self._used(graph)):
            if self._home.get(parameter) is graph and parameter not in names.weights:
                names.weights[parameter] = names.fresh(parameter.name)
        if not body:
            for parameter, home in self._home.items():
                if home is graph and parameter not in names.weights:
                    names.weights[parameter] = names.fresh(parameter.name)
        extra = extra_fields_of(graph)
        for parameter in extra.unused:
            if parameter not in self._home:
                names.weights[parameter] = names.fresh(parameter.name)
        self._has_metadata |= any(metadata for _, metadata in extra.values.values())
        if body:
            for parameter, name in names.weights.items():
                proto.initializer.append(tensor_to_proto(self._states[parameter].array, name))
        copies = self._copied_outputs(graph, names)  # before bodies inside reserve the names
        self._write_nodes(proto.node, graph, names)
        self._write_types(proto.value_info, graph, names, ends)
        for value in graph.inputs:
            proto.input.append(_info(names(value), value))
        for value, copy in zip(graph.outputs, copies, strict=True):
            if copy:
                proto.node.add(op_type="Identity", input=[names(value)], output=[copy])
            proto.output.append(_info(copy or names(value), value))
        write_extra_fields(extra, proto)

    def _copied_outputs(self, graph: Graph, names: _Names) -> list[str]:
        """Return for each output the name of the copy that it needs; "" if it needs none.

        ONNX requires that the outputs of a body are different values computed by its own nodes.
        """
        seen: set[str] = set()
        outside = set(graph.captures)
        copies: list[str] = []
        for value in graph.outputs:
            name = names(value)
            # A model may list a value twice, or a weight, among its outputs.
            copied = names.parent is not None and (
                name in seen
                or value in outside
                or (value.parameter is not None and value.parameter not in names.weights)
            )
            copies.append(names.fresh(value.name) if copied else "")
            seen.add(name)
        return copies

    def _name_nodes(self, graph: Graph, names: _Names) -> None:
        """Name the outputs of all nodes; "" for unused optional ones with a generated name."""
        outputs = set(graph.outputs)
        for node in graph.nodes:
            schema = None
            for position, value in enumerate(node.outputs):
                if value in names.of:
                    continue
                if not value.uses and value not in outputs and len(node.outputs) > 1:
                    schema = schema or find_schema(node.op_type, node.domain, node.version)
                    auto = f"{node.name}.{position}"
                    optional = schema is not None and position >= schema.min_outputs
                    optional = optional and not node.bodies  # a body has all its outputs
                    if optional and (value.name == auto or value.name.startswith(auto + "_")):
                        names.of[value] = ""
                        continue
                names.of[value] = names.fresh(value.name)

    def _write_types(
        self, infos: Any, graph: Graph, names: _Names, ends: Mapping[Value, None]
    ) -> None:
        for node in graph.nodes:
            for value in node.outputs:
                if value.type is not None and value not in ends and names.of[value]:
                    infos.append(_info(names.of[value], value))

    def _write_nodes(self, protos: Any, graph: Graph, names: _Names) -> None:
        docs = extra_fields_of(graph).nodes
        for node in graph.nodes:
            if node.subgraph is None:
                proto = protos.add(op_type=node.op_type, domain=node.domain)
                proto.input.extend([names(v) for v in node.inputs])
            else:
                called = self._function(node)
                proto = protos.add(op_type=called.name, domain=called.domain)
                if called.overload:
                    proto.overload = called.overload
                proto.input.extend([names(v) for v in node.inputs])
                proto.input.extend(names.weight(p) or "" for p in self._hidden_of(node.subgraph))
            proto.name = node.name
            proto.doc_string = docs.get(node.name, "")
            proto.output.extend([names.of[v] for v in node.outputs])
            if node.attrs:
                self._write_attributes(proto, node, names)
            metadata = saved_metadata(node)
            if metadata:
                self._has_metadata = True
                add_metadata(proto, metadata)

    def _record(self, graph: Graph) -> dict[str, str]:
        """Return the metadata with the record of a graph's partition; empty without a record."""
        record = record_of(graph.attrs.get(KEY))
        if not record.runs:
            return {}
        self._has_metadata = True
        return {PARTITION_RECORD: dump_record(record)}

    def _write_attributes(self, proto: NodeProto, node: Node, names: _Names) -> None:
        # ``node.captures`` has the captures of the bodies in the order in which `write_attributes`
        # converts the bodies.
        captured = iter(node.captures)

        def body(graph: Graph) -> GraphProto:
            inner = _Names(names)
            for value in graph.captures:
                inner.of[value] = names(next(captured))
            message = GraphProto()
            self._fill(message, graph, inner)
            return message

        write_attributes(proto, node, body)

    def _function(self, node: Node) -> FunctionProto:
        """Return the function of a subgraph node, converted at its first use."""
        inner = node.subgraph
        assert inner is not None, "only called for subgraph nodes"
        if inner not in self._functions:
            self._functions[inner] = self._named(node, self._new_function(node, inner))
        return self._functions[inner]

    def _named(self, node: Node, proto: FunctionProto) -> FunctionProto:
        """Name a function; return the earlier one if a loaded function occurs a second time."""
        if _is_loaded_function(node):
            domain, base = node.domain, node.op_type
            for known in self._functions.values():
                if (known.domain, known.name) == (domain, base):
                    # Messages are compared with all fields, so the new one first gets the name of
                    # the other.
                    proto.domain, proto.name, proto.overload = domain, base, known.overload
                    if proto == known:
                        return known
            proto.domain, proto.name, proto.overload = domain, base, ""
        else:
            base = re.sub(r"\W+", "_", node.name or proto.name, flags=re.ASCII) or "subgraph"
            proto.domain, proto.name = DOMAIN, base
        number = 0
        while (proto.domain, proto.name, proto.overload) in self._function_names:
            number += 1
            if proto.domain == DOMAIN:
                proto.name = f"{base}_{number}"
            else:
                proto.overload = str(number)
        self._function_names.add((proto.domain, proto.name, proto.overload))
        return proto

    def _new_function(self, node: Node, inner: Graph) -> FunctionProto:
        proto = FunctionProto(name=inner.name, doc_string=inner.doc)
        names, hidden = _Names(), self._hidden_of(inner)
        for value in inner.inputs:
            names.of[value] = names.fresh(value.name)
            if value.parameter is not None:
                names.weights.setdefault(value.parameter, names.of[value])
        outputs = [value for value in inner.outputs if value.producer is not None]
        for value in dict.fromkeys(outputs):
            names.of[value] = names.fresh(value.name)
        for parameter in hidden:
            names.weights[parameter] = names.fresh(parameter.name)
        self._name_nodes(inner, names)
        proto.input.extend(names.of[value] for value in inner.inputs)
        proto.input.extend(names.weights[parameter] for parameter in hidden)
        proto.attribute.extend(node.attrs)
        self._write_nodes(proto.node, inner, names)
        # The calls of a loaded function may have different types; without types they share one
        # function.
        if not _is_loaded_function(node):
            self._write_types(proto.value_info, inner, names, {})
        for value in inner.outputs:
            name = names(value)
            # The outputs of a function are different names, each made by a node.
            if value.producer is None or name in proto.output:
                copy = names.fresh(value.name)
                proto.node.add(op_type="Identity", input=[name], output=[copy])
                name = copy
            proto.output.append(name)
        proto.opset_import.extend(self._imports(n for g in inner.levels() for n in g.nodes))
        metadata = {
            SUBGRAPH_NODE: "1",
            OP_TYPE: node.op_type,
            OP_DOMAIN: node.domain,
            OP_VERSION: str(node.version),
            GRAPH_NAME: inner.name,
            **self._record(inner),
        }
        if hidden:
            metadata[HIDDEN_INPUTS] = str(len(hidden))
        add_metadata(proto, metadata)
        return proto

    def _imports(self, nodes: Iterable[Node]) -> Iterator[OperatorSetIdProto]:
        """Yield the operator sets of the graph, and of the functions that ``nodes`` call."""
        found = dict(self._opsets)
        for node in nodes:
            if node.subgraph is not None:
                domain = self._functions[node.subgraph].domain
                found.setdefault(domain, 1 if domain == DOMAIN else node.version)
        yield from (make_opsetid(domain, version) for domain, version in found.items())


def _is_loaded_function(node: Node) -> bool:
    """Return whether a subgraph node calls a loaded function, and is not a region."""
    foreign = node.domain not in ("", DOMAIN)
    return foreign and find_schema(node.op_type, node.domain, node.version) is None


def _info(name: str, value: Value) -> ValueInfoProto:
    proto = ValueInfoProto(name=name)
    if value.type is not None:
        proto.type.CopyFrom(type_to_proto(value.type))
    return proto


def add_external(proto: ModelProto, name: str, array: Array, **place: object) -> None:
    """Add an initializer whose elements are in another file to a model.

    Args:
        proto: The model.
        name: Name of the initializer.
        array: The elements.
        **place: Entries of ``external_data``: where the elements are.
    """
    tensor = proto.graph.initializer.add(
        name=name,
        data_type=ONNX_DTYPE[dtype_of(array)],
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    for key, value in place.items():
        tensor.external_data.add(key=key, value=str(value))
