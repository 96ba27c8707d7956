"""Losses for the REFERENCE device, where onnx.reference miscounts them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.reference import expand, standard


def loss(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute a loss by its function body; onnx.reference counts ignored labels in the mean."""
    count = len(inputs)
    while count and inputs[count - 1] is None:
        count -= 1
    body = expand(node, inputs[:count])
    return standard(node, inputs) if body is None else body(inputs[:count])
