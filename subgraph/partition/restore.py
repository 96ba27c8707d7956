"""Make the ops of a loaded graph again, by the registered properties that its notes name."""

from __future__ import annotations

from subgraph.graph.graph import Graph
from subgraph.partition.op_note import noted_regions


def restore_ops(graph: Graph) -> None:
    """Make the ops of a loaded graph's regions again, in place; see `saved_regions`."""
    regions = list(noted_regions(graph))
    if regions:  # most files have none, so the code of partitions need not be imported
        from subgraph.partition import saved_regions

        saved_regions.restore_ops(graph, regions)
