"""MatMulInteger and ConvInteger, for the reference.

onnx.reference cannot take a zero point for each row of A, nor one for each filter that is no image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph import Node
from subgraph.op import reference
from subgraph.reference import standard


@reference("MatMulInteger")
def matmul_integer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return ``(A - a_zero_point) @ (B - b_zero_point)`` in 32-bit integers."""
    left, right = (array.astype(np.int32) for array in inputs[:2])
    za, zb = [*inputs[2:], None, None][:2]
    if za is not None:
        left -= za.astype(np.int32)[:, None] if za.ndim == 1 else za.astype(np.int32)
    if zb is not None:
        right -= zb.astype(np.int32)
    return [np.matmul(left, right)]


@reference("ConvInteger")
def conv_integer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Take zero points of filters off before, where these have other than two axes."""
    x, weight = inputs[:2]
    zero, own = [*inputs[2:], None, None][:2]
    if own is None or not own.ndim or weight.ndim == 4:
        return standard(node, inputs)
    shifted = weight.astype(np.int32) - own.astype(np.int32).reshape(-1, *(1,) * (weight.ndim - 1))
    return standard(node, [x, shifted, zero])
