"""Which region of the user's partition a node of a compiled graph belongs to, for profiles."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from subgraph.graph.graph import Node
from subgraph.operators.subgraph_op import AFFINITY, DOMAIN, OP_TYPE, REGION, ProfileEntry


def region_of(node: Node) -> str:
    """Return the name of the region of a user's partition that a node of a compiled graph is in.

    Returns:
        The name, names separated by commas for a fused node of several regions, "" for none.
    """
    metadata = node.metadata or {}
    if REGION in metadata:
        return metadata[REGION]
    if node.subgraph is None or AFFINITY in metadata:
        return ""
    if node.domain == DOMAIN and node.op_type == OP_TYPE:
        return node.name
    names = (region_of(inner) for inner in node.subgraph.nodes)
    return ",".join(dict.fromkeys(name for name in names if name))


def note_region(entries: Sequence[ProfileEntry], node: Node) -> list[ProfileEntry]:
    """Return profile entries with ``node``'s region filled in where an entry names no region."""
    region = region_of(node)
    return [attrs.evolve(entry, region=entry.region or region) for entry in entries]
