"""The pass "InferTypes": dtype and shape of every value, symbolic, through bodies."""

from __future__ import annotations

import attrs

from subgraph.graph.graph import Graph
from subgraph.operators.type_inference import infer_graph
from subgraph.transform.pass_manager import register_pass


@register_pass("InferTypes")
@attrs.frozen
class InferTypes:
    """Fill in the types of values.

    Attributes:
        strict: Whether types that contradict each other are an error (ShapeError); otherwise what
            the graph states gives way to what is found.
    """

    strict: bool = True

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy of ``graph`` with types."""
        graph = graph.clone()
        infer_graph(graph, strict=self.strict)
        return graph
