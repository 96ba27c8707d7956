"""MatMulInteger, ConvInteger and QLinearConv, for the reference.

onnx.reference cannot take a zero point for each row of A, nor one or a scale for each filter that
is no image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph import Node
from subgraph.op import reference
from subgraph.reference import standard

Array = np.ndarray[Any, Any]


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


@reference("QLinearConv")
def qlinear_conv(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Scale exact sums by filters, where these have other than two axes."""
    x, x_scale, x_zero, weight, scale, own, y_scale, y_zero = inputs[:8]
    if scale.size == 1 or weight.ndim == 4:
        return standard(node, inputs)
    exact = Node("ConvInteger", node.inputs[:2], outputs=1, version=10, attrs=node.attrs)
    (sums,) = conv_integer(exact, [x, weight, x_zero, own])
    each = (-1, *(1,) * (weight.ndim - 2))
    if len(inputs) > 8 and inputs[8] is not None:
        sums = sums + inputs[8].reshape(each)
    result: Array = sums * (x_scale * scale.reshape(each) / y_scale) + y_zero
    limits = np.iinfo(y_zero.dtype)
    return [result.clip(limits.min, limits.max).round().astype(y_zero.dtype)]
