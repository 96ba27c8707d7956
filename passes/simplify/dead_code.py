"""The pass "DeadCodeElimination": nodes on which no output depends are removed, in bodies too."""

from __future__ import annotations

from subgraph.graph.graph import Graph
from subgraph.transform.pass_manager import register_pass


@register_pass("DeadCodeElimination")
def dead_code_elimination(graph: Graph) -> Graph:
    """Return a copy without the nodes and captures that no output needs; inputs stay."""
    graph = graph.clone()
    # Bodies first: values that they no longer capture may be dead in the graph around them.
    for level in reversed(graph.levels()):
        level.remove_unused()
    return graph
