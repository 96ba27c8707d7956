"""ConvTranspose in groups, for the reference: onnx.reference cuts weights along a wrong axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import reference
from subgraph.reference import standard, variant


@reference("ConvTranspose")
def conv_transpose(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the groups' transposed convolutions side by side."""
    groups = int(node.attrs.get("group", 1))
    if groups == 1:
        return standard(node, inputs)
    x, weight = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    if groups < 1 or x.ndim < 3 or x.shape[1] % groups or weight.shape[0] != x.shape[1]:
        raise ShapeError(f"{groups} groups do not fit inputs {x.shape} and weights {weight.shape}")
    single = variant(node, group=1)
    each, made = x.shape[1] // groups, weight.shape[1]
    parts: list[Any] = []
    for g in range(groups):
        given = [x[:, g * each : (g + 1) * each], weight[g * each : (g + 1) * each]]
        given.append(None if bias is None else bias[g * made : (g + 1) * made])
        parts.append(standard(single, given[: len(inputs)])[0])
    return [np.concatenate(parts, axis=1)]
