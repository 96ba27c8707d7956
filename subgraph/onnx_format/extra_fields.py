"""Fields of ONNX files that have no counterpart in a Graph, preserved from `load` to `save`.

These are descriptions of nodes and values, unused initializers, training graphs and annotations.
They are stored by the name of their node or value in the attributes of the graph, and not written
if a pass has replaced the node or value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.onnx_format.checks import text_of
from subgraph.onnx_format.metadata import add_metadata, metadata_of
from subgraph.operators.messages import GraphProto, ModelProto

KEY = "onnx_extra_fields"
_Notes = tuple[str, dict[str, str]]  # a description, and metadata


@attrs.frozen(eq=False)
class ExtraFields:
    """Fields of one graph or body.

    Attributes:
        unused: Initializers that nothing in the graph uses.
        nodes: Descriptions of nodes by name.
        values: Description and metadata of values by name.
        graph: Serialized messages of the GraphProto by field name.
        model: Serialized messages of the ModelProto by field name.
        doc: Description of the GraphProto if the model or the graph has one, else None.
    """

    unused: tuple[Parameter, ...] = ()
    nodes: Mapping[str, str] = attrs.field(factory=dict[str, str])
    values: Mapping[str, _Notes] = attrs.field(factory=dict[str, _Notes])
    graph: Mapping[str, Sequence[bytes]] = attrs.field(factory=dict[str, Sequence[bytes]])
    model: Mapping[str, Sequence[bytes]] = attrs.field(factory=dict[str, Sequence[bytes]])
    doc: str | None = None


_EMPTY = ExtraFields()
_GRAPH_FIELDS = ("quantization_annotation",)
_MODEL_FIELDS = ("training_info", "configuration")


def extra_fields_of(graph: Graph) -> ExtraFields:
    """Return the preserved fields of a graph; empty ones if it was not loaded from ONNX."""
    found: Any = graph.attrs.get(KEY)
    return found if isinstance(found, ExtraFields) else _EMPTY


def store_extra_fields(
    graph: Graph,
    proto: GraphProto,
    nodes: Iterable[tuple[Node, str]],
    weights: Iterable[Value],
    model: ModelProto | None = None,
) -> None:
    """Store the fields of a message that the graph made from it does not represent.

    Args:
        graph: The complete graph; its attributes are changed.
        proto: The message of the graph.
        nodes: Nodes that have a description, with it.
        weights: Values of the initializers.
        model: The message of the model, if ``graph`` is its main graph.
    """
    ends = {*graph.inputs, *graph.outputs}
    unused = tuple(v.parameter for v in weights if v.parameter and not v.uses and v not in ends)
    infos = (*proto.value_info, *proto.input, *proto.output)
    values = {
        info.name: (text_of(info.doc_string), metadata_of(info.metadata_props))
        for info in infos
        if info.doc_string or info.metadata_props
    }
    docs = {node.name: doc for node, doc in nodes}
    inside = _messages(proto, _GRAPH_FIELDS)
    around = {} if model is None else _messages(model, _MODEL_FIELDS)
    doc = None
    if model is not None and (proto.doc_string or model.doc_string):
        doc = text_of(proto.doc_string)
    if unused or docs or values or inside or around or doc is not None:
        graph.attrs[KEY] = ExtraFields(unused, docs, values, inside, around, doc)


def _messages(proto: Any, fields: Sequence[str]) -> dict[str, list[bytes]]:
    found = {name: [m.SerializeToString() for m in getattr(proto, name)] for name in fields}
    return {name: messages for name, messages in found.items() if messages}


def write_extra_fields(extra: ExtraFields, proto: GraphProto) -> None:
    """Add preserved fields to the message of a graph, after its values were written."""
    if extra.values:
        for info in (*proto.value_info, *proto.input, *proto.output):
            doc, metadata = extra.values.get(info.name, ("", {}))
            info.doc_string = doc
            add_metadata(info, metadata)
    _restore(proto, extra.graph)


def write_extra_model_fields(extra: ExtraFields, graph: Graph, proto: ModelProto) -> None:
    """Add preserved fields to the message of a model.

    Args:
        extra: The preserved fields.
        graph: The main graph, whose description belongs to the model or to its GraphProto.
        proto: The message, with its graph written.
    """
    _restore(proto, extra.model)
    if extra.doc is None:
        return
    proto.graph.doc_string = extra.doc
    if graph.doc == extra.doc:
        proto.doc_string = ""


def _restore(proto: Any, fields: Mapping[str, Sequence[bytes]]) -> None:
    for name, messages in fields.items():
        for content in messages:
            getattr(proto, name).add().ParseFromString(content)
