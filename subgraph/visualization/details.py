"""What the page says of a node or value: rows of a label and a text, and reasons in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import attrs
import numpy as np

from subgraph.devices.query import QueryResult
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.operator import operator_key
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.partition.explanation import Explanation
from subgraph.visualization.scene import cut_off, operators_of, with_type

_MOST_CHARACTERS = 160  # of an attribute; longer ones, such as texts of a tokenizer, are cut off
_MOST_OPERATORS = 12  # of a subgraph
_MOST_ELEMENTS = 8  # of an array


@attrs.frozen(eq=False)
class Details:
    """The facts about one box.

    Attributes:
        title: The name.
        rows: Labels and texts.
        why: Why the node is where it is, one sentence for each reason.
    """

    title: str
    rows: list[tuple[str, str]]
    why: Sequence[str] = ()


@attrs.frozen(eq=False)
class Sources:
    """What is known about the nodes besides the graph.

    Attributes:
        explanations: Why each node is in its subgraph, or in none.
        query: Which device takes each node, or None.
        devices: The devices that run each node of a compiled model.
        entries: The profile's entries of each node, by its name.
        seconds: The time of each node, with those of the nodes inside if it has none of its own.
        total: Sum of all times in seconds.
    """

    explanations: Mapping[Node, Explanation]
    query: QueryResult | None
    devices: Mapping[Node, str]
    entries: Mapping[str, Sequence[ProfileEntry]]
    seconds: Mapping[Node, float]
    total: float

    def owner(self, node: Node) -> str:
        """Return who runs a node, or made its region; "" if that is not known."""
        if node in self.devices:
            return self.devices[node]
        if self.query is not None:
            return self.query.get(node.name, "")
        known = self.explanations.get(node)
        if known is not None and node.subgraph is not None:
            return known.property or ""
        return ""


def node_details(node: Node, sources: Sources) -> Details:
    """Return the facts about a node."""
    rows: list[tuple[str, str]] = []
    inner = node.subgraph
    if inner is None:
        rows.append(("operator", f"{operator_key(node.op_type, node.domain)}@{node.version}"))
    else:
        rows.append(("contains", f"{len(inner.nodes)} nodes"))
        rows.append(("operators", operators_of(inner, _MOST_OPERATORS)))
    if node.op is not None:
        rows.append(("runs by", type(node.op).__name__))
    if owner := sources.owner(node):
        rows.append(("device" if node in sources.devices or sources.query else "property", owner))
    rows += _times(node, sources)
    rows += [(f"input {k}", _shown(value)) for k, value in enumerate(node.inputs)]
    rows += [(f"capture {k}", _shown(value)) for k, value in enumerate(node.captures)]
    rows += [(f"output {k}", _shown(value)) for k, value in enumerate(node.outputs)]
    rows += [(key, _attribute(held)) for key, held in node.attrs.items()]
    rows += [(key, _short(text)) for key, text in (node.metadata or {}).items()]
    why = list(sources.explanations[node].reasons) if node in sources.explanations else []
    if sources.query is not None and node.name in sources.query.reasons:
        why.append(str(sources.query.reasons[node.name]))
    return Details(node.name, rows, why)


def value_details(value: Value, kind: str) -> Details:
    """Return the facts about an input or output of a graph; ``kind`` says which."""
    rows = [(kind, str(value.type or "of unknown type"))]
    if value.producer is not None:
        rows.append(("made by", value.producer.name))
    if value.uses:
        rows.append(("used by", _short(", ".join(node.name for node in value.consumers))))
    return Details(value.name, rows)


def _times(node: Node, sources: Sources) -> Iterable[tuple[str, str]]:
    seconds = sources.seconds[node]
    if not seconds:
        return
    share = f", {seconds / sources.total:.1%} of the run" if sources.total else ""
    yield "time", f"{seconds * 1e3:.4g} ms{share}"
    for entry in sources.entries.get(node.name, ()):
        yield "kernel", f"{_short(entry.kernel)} on {entry.device}"
        if entry.fallback:
            yield "fallback", entry.fallback


def _shown(value: Value | None) -> str:
    if value is None:
        return "(left out)"
    weight = "weight " if value.parameter is not None else ""
    return f"{weight}{with_type(value)}"


def _attribute(held: Any) -> str:
    if isinstance(held, Graph):
        return f"graph of {len(held.nodes)} nodes"
    if isinstance(held, np.ndarray):
        array = cast("Array", held)
        kind = TensorType(dtype_of(array), array.shape)
        more = ", ..." if array.size > _MOST_ELEMENTS else ""
        return f"{kind}: {', '.join(map(str, array.ravel()[:_MOST_ELEMENTS]))}{more}"
    return _short(repr(held))


def _short(text: str) -> str:
    return cut_off(text, _MOST_CHARACTERS)
