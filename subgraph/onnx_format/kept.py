"""What an ONNX file says that a Graph has no place for: kept beside it, and written back.

Descriptions of nodes and values, initializers that nothing uses, training graphs, annotations. It
is bound to names: what became of a node or value that a pass replaced is not written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.onnx_format.checks import text_of
from subgraph.operators.messages import GraphProto, ModelProto

KEY = "onnx_kept"
_Notes = tuple[str, dict[str, str]]


@attrs.frozen(eq=False)
class Kept:
    """What was said of one graph or body.

    Attributes:
        unused: Initializers that nothing in the graph uses.
        nodes: Descriptions of nodes by name.
        values: Description and notes of values by name.
        graph: Serialized messages of the graph by field name.
        model: Serialized messages of the model by field name.
        doc: Description of the graph, where the model has one of its own or neither has.
    """

    unused: tuple[Parameter, ...] = ()
    nodes: Mapping[str, str] = attrs.field(factory=dict[str, str])
    values: Mapping[str, _Notes] = attrs.field(factory=dict[str, _Notes])
    graph: Mapping[str, Sequence[bytes]] = attrs.field(factory=dict[str, Sequence[bytes]])
    model: Mapping[str, Sequence[bytes]] = attrs.field(factory=dict[str, Sequence[bytes]])
    doc: str | None = None


_EMPTY = Kept()
_GRAPH_FIELDS = ("quantization_annotation",)
_MODEL_FIELDS = ("training_info", "configuration")


def kept_of(graph: Graph) -> Kept:
    """Return what is kept beside a graph."""
    found: Any = graph.attrs.get(KEY)
    return found if isinstance(found, Kept) else _EMPTY


def keep(
    graph: Graph,
    proto: GraphProto,
    nodes: Iterable[tuple[Node, str]],
    weights: Iterable[Value],
    model: ModelProto | None = None,
) -> None:
    """Keep beside ``graph`` what its message says besides.

    Args:
        graph: The graph, complete.
        proto: Its message.
        nodes: Nodes with descriptions.
        weights: Values of its initializers.
        model: The model, if it is the model's graph.
    """
    ends = {*graph.inputs, *graph.outputs}
    unused = tuple(v.parameter for v in weights if v.parameter and not v.uses and v not in ends)
    infos = (*proto.value_info, *proto.input, *proto.output)
    values = {
        info.name: (text_of(info.doc_string), _noted(info.metadata_props))
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
        graph.attrs[KEY] = Kept(unused, docs, values, inside, around, doc)


def _noted(entries: Iterable[Any]) -> dict[str, str]:
    return {text_of(entry.key): text_of(entry.value) for entry in entries}


def _messages(proto: Any, fields: Sequence[str]) -> dict[str, list[bytes]]:
    found = {name: [m.SerializeToString() for m in getattr(proto, name, ())] for name in fields}
    return {name: messages for name, messages in found.items() if messages}


def write_back(kept: Kept, proto: GraphProto) -> None:
    """Write what is kept into the message of a graph whose values are written."""
    if kept.values:
        for info in (*proto.value_info, *proto.input, *proto.output):
            doc, notes = kept.values.get(info.name, ("", {}))
            info.doc_string = doc
            for key, text in notes.items():
                info.metadata_props.add(key=key, value=text)
    _restore(proto, kept.graph)


def write_back_model(kept: Kept, graph: Graph, proto: ModelProto) -> None:
    """Write what is kept of the model itself; descriptions go where they were."""
    _restore(proto, kept.model)
    if kept.doc is None:
        return
    proto.graph.doc_string = kept.doc
    if graph.doc == kept.doc:
        proto.doc_string = ""


def _restore(proto: Any, kept: Mapping[str, Sequence[bytes]]) -> None:
    for name, messages in kept.items():
        for content in messages:
            getattr(proto, name).add().ParseFromString(content)
