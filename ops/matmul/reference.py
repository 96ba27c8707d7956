"""Gemm for the reference: the forms before opset 7."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.reference import standard, variant
from subgraph.operators.schema import is_before


def gemm(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return alpha A B + beta C; before opset 7, too, C broadcasts without ``broadcast``."""
    if is_before(node, 7):
        return standard(variant(node, version=7, drop=("broadcast",)), inputs)
    return standard(node, inputs)
