"""Reference of MatMulInteger, QLinearMatMul, ConvInteger and QLinearConv.

onnx.reference has no zero point or scale for each row of A, and for each filter only in two spatial
dimensions. It adds the zero point of a product before it rounds; the standard adds it afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import standard
from subgraph.ops.conv.reference import without_empty_lists


def matmul_integer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return ``(A - a_zero_point) @ (B - b_zero_point)`` in 32-bit integers."""
    za, zb = [*inputs[2:], None, None][:2]
    return [_exact_product(inputs[0], inputs[1], za, zb)]


def _exact_product(a: Array, b: Array, za: Array | None, zb: Array | None) -> Array:
    left, right = a.astype(np.int32), b.astype(np.int32)
    if za is not None:
        left -= _by_row(za, a).astype(np.int32)
    if zb is not None:
        right -= _by_column(zb).astype(np.int32)
    product: Array = np.matmul(left, right)
    return product


def _by_row(numbers: Array, left: Array) -> Array:
    """Return numbers of the rows of a left side, shaped to broadcast to it; a vector is one row."""
    if numbers.size == 1:
        return numbers.reshape(())
    return numbers[:, None] if numbers.ndim == 1 and left.ndim > 1 else numbers


def _by_column(numbers: Array) -> Array:
    """Return numbers of the columns of a right side, shaped to broadcast to one."""
    return numbers.reshape(()) if numbers.size == 1 else numbers


def qlinear_matmul(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the exact product, scaled and rounded once, with the zero point added to that."""
    a, a_scale, za, b, b_scale, zb, y_scale, zy = inputs
    # A vector is a matrix of one row, or of one column; the result lacks that dimension.
    left, right = np.atleast_2d(a), b if b.ndim > 1 else b[:, None]
    sums = _exact_product(left, right, za, zb)
    scale = _by_row(a_scale, left) * _by_column(b_scale) / _by_row(y_scale, left)
    result: Array = np.rint(sums * scale) + _by_row(zy, left)
    limits = np.iinfo(zy.dtype)
    shape = (*sums.shape[:-2], *sums.shape[-2:-1][: a.ndim > 1], *sums.shape[-1:][: b.ndim > 1])
    return [result.clip(limits.min, limits.max).astype(zy.dtype).reshape(shape)]


def conv_integer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the exact sums; subtract zero points of filters here unless there are two axes."""
    node = without_empty_lists(node)
    x, weight = inputs[:2]
    zero, w_zero = [*inputs[2:], None, None][:2]
    if w_zero is None or not w_zero.ndim or weight.ndim == 4:
        return standard(node, inputs)
    by_filter = w_zero.astype(np.int32).reshape(-1, *(1,) * (weight.ndim - 1))
    return standard(node, [x, weight.astype(np.int32) - by_filter, zero])


def qlinear_conv(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the quantized result; apply scales of filters here unless there are two axes."""
    node = without_empty_lists(node)
    x, x_scale, x_zero, weight, scale, w_zero, y_scale, y_zero = inputs[:8]
    if scale.size == 1 or weight.ndim == 4:
        return standard(node, inputs)
    exact = Node("ConvInteger", node.inputs[:2], outputs=1, version=10, attrs=node.attrs)
    (sums,) = conv_integer(exact, [x, weight, x_zero, w_zero])
    each = (-1, *(1,) * (weight.ndim - 2))
    if len(inputs) > 8 and inputs[8] is not None:
        sums = sums + inputs[8].reshape(each)
    result: Array = sums * (x_scale * scale.reshape(each) / y_scale) + y_zero
    limits = np.iinfo(y_zero.dtype)
    return [result.clip(limits.min, limits.max).round().astype(y_zero.dtype)]
