"""FusedQMaxPool, MaxPool of quantized values, on the CPU device."""

from __future__ import annotations

from subgraph.engine.planner.lowering import Lowering, lowering
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.pool.cpu import emit_int8_max_pool


@lowering(
    "FusedQMaxPool",
    domain=INTERNAL_DOMAIN,
    dtypes=("uint8", "int8"),
    layouts=("plain", "blocked"),
)
def max_pool(node: Node, low: Lowering) -> None:
    """Lower MaxPool between equal scales."""
    if low.output().size:
        emit_int8_max_pool(node, low)
