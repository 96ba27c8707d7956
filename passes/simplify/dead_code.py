"""The pass "DeadCodeElimination": nodes on which no output depends go, in bodies too."""

from __future__ import annotations

from subgraph.graph.graph import Graph
from subgraph.transform.pass_manager import register_pass


@register_pass("DeadCodeElimination")
def dead_code_elimination(graph: Graph) -> Graph:
    """Return a copy without the nodes and captures that no output needs; inputs stay."""
    graph = graph.clone()
    # A body first: what it no longer captures may be dead around it.
    for level in reversed(graph.levels()):
        level.remove_unused()
    return graph
