"""Quantization: a correction of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph import Node
from subgraph.op import reference
from subgraph.reference import standard, variant


@reference("DequantizeLinear")
def dequantize(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute opsets 10 and 13 as 19, of which they are a part; onnx.reference begins there."""
    return standard(variant(node, version=max(node.version, 19) if node.version else 0), inputs)
