"""The pass "InferTypes": dtype and symbolic shape of every value, bodies included."""

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
        strict: Whether a stated type that contradicts the inferred one is a ShapeError; if not, the
            inferred type replaces the stated one.
    """

    strict: bool = True

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy of ``graph`` with types."""
        graph = graph.clone()
        infer_graph(graph, strict=self.strict)
        return graph
