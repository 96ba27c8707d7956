"""The ops of a loaded graph, made again by the registered properties that its notes name."""

from __future__ import annotations

from subgraph.graph.graph import Graph
from subgraph.partition.op_note import noted_regions


def restore_ops(graph: Graph) -> None:
    """Let registered properties make the ops of a loaded graph again, in place: `saved_regions`."""
    regions = list(noted_regions(graph))
    if regions:  # most files have none, and need not load the code of partitions
        from subgraph.partition import saved_regions

        saved_regions.restore_ops(graph, regions)
