"""Stored fusions: the fused graph of a region in an exported model, as groups of its own nodes.

An export describes the fused graph by `describe`. An import builds it again by `rebuild`, without
matching patterns. A fusion that changed nodes (folded paddings, scales, constants) has no such
description; the importing process fuses the region itself.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from subgraph.errors import ModelError, SubgraphError
from subgraph.graph.graph import Graph, Node, Value, copy_nodes, copy_value
from subgraph.partition.regions import without_default_regions
from subgraph.partition.replace import Cutter
from subgraph.system.json_values import with_tuples

Described = list[Any]
_JSON_TYPES = (bool, int, float, str, type(None))


def describe(graph: Graph, fused: Graph) -> Described | None:
    """Return a description of a fused graph as plain JSON.

    Args:
        graph: The graph before fusion.
        fused: The fused graph.

    Returns:
        The fused graph's nodes in order: the name of a node that stayed, and a table for a fused
        node. None if `rebuild` would not make exactly the same graph of it.
    """
    from subgraph.text_form.writer import print_graph

    attributes = (v for n in fused.nodes if n.subgraph for v in n.attrs.values())
    if graph.captures or not all(map(_is_plain, attributes)):
        return None
    entries = [
        n.name if n.subgraph is None else _describe_fused(n, n.subgraph) for n in fused.nodes
    ]
    try:
        found = cast("Described", json.loads(json.dumps(entries)))
        # The description is checked by using it: only if it gives the same text is it exported.
        again = rebuild(graph, found)
    except (SubgraphError, KeyError):
        return None
    same = set(again.parameters.values()) == set(fused.parameters.values())
    return found if same and print_graph(again, "none") == print_graph(fused, "none") else None


def _is_plain(value: Any) -> bool:
    """Return whether JSON can represent an attribute, with lists in place of tuples."""
    if isinstance(value, (list, tuple)):
        return all(_is_plain(item) for item in cast("Sequence[Any]", value))
    return isinstance(value, _JSON_TYPES)


def _describe_fused(node: Node, inner: Graph) -> dict[str, Any]:
    return {
        "op": [node.op_type, node.domain, node.version],
        "name": node.name,
        "attrs": dict(node.attrs),
        "metadata": node.metadata,
        # An input that is omitted, or that appears twice, has another name in the inner graph.
        "inputs": [None if value is None else value.name for value in node.inputs],
        "inside": [value.name for value in inner.inputs],
        "graph": inner.name,
        "nodes": [inside.name for inside in inner.nodes],
    }


def rebuild(graph: Graph, entries: Described) -> Graph:
    """Return the fused graph of a region.

    Args:
        graph: The region's graph; it stays as it is.
        entries: The description that `describe` returned for an equal graph.

    Raises:
        SubgraphError: The description does not fit the graph.
        KeyError: It names a node that the graph does not have, or an entry is incomplete.
        TypeError, ValueError: It is not a description.
    """
    graph = without_default_regions(graph)
    inputs = [value for value in graph.inputs if value.parameter is None]
    own = {node.name: node for node in graph.nodes}
    cutter = Cutter(graph, inputs)
    values: dict[Value, Value] = {}
    nodes: list[Node] = []
    for entry in entries:
        if isinstance(entry, str):
            # `pop` finds descriptions that use a node twice.
            nodes += copy_nodes((own.pop(entry),), values)
        else:
            members = [own.pop(name) for name in entry["nodes"]]
            nodes.append(_rebuild_fused(cutter, members, entry, values))
    made = Graph(
        [copy_value(value, values) for value in inputs],
        [copy_value(value, values) for value in graph.outputs],
        graph.name,
        nodes=nodes,
        attrs=graph.attrs,
        opsets=graph.opsets,
        metadata=graph.metadata,
        doc=graph.doc,
    )
    made.verify()
    return made


def _rebuild_fused(
    cutter: Cutter,
    members: Sequence[Node],
    entry: Mapping[str, Any],
    values: dict[Value, Value],
) -> Node:
    """Return a fused node of its members, as `_describe_fused` described it; add its values."""
    piece = cutter.cut_out(members, str(entry["graph"]))
    if piece is None:
        raise ModelError(f"nobody uses fused node {entry['name']!r}")
    inner = piece.inner
    by_name = {v.name: (v, o) for v, o in zip(inner.inputs, piece.inputs, strict=True)}
    inside: list[Value] = []
    outside: list[Value | None] = []
    for name, inner_name in zip(entry["inputs"], entry["inside"], strict=True):
        inside.append(by_name[name][0] if name == inner_name else Value(str(inner_name)))
        outside.append(None if name is None else copy_value(by_name[name][1], values))
    inner.inputs = tuple(inside)
    op_type, domain, version = entry["op"]
    node = Node(
        op_type,
        outside,
        outputs=[Value(value.name, value.type) for value in piece.outputs],
        name=entry["name"],
        domain=domain,
        version=version,
        attrs={key: with_tuples(value) for key, value in entry["attrs"].items()},
        metadata=entry["metadata"],
        subgraph=inner,
    )
    values.update(zip(piece.outputs, node.outputs, strict=True))
    return node
