"""Quantization: requirements, types, and the reference where onnx.reference differs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import (
    DTYPE_OF_ONNX,
    ONNX_DTYPE,
    Array,
    TensorType,
    ValueType,
    dtype_of,
    numpy_dtype,
)
from subgraph.operators.batch_axes import BatchCall, along, except_axes, matrix_product
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard, variant
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.matmul.op import product_type
from subgraph.ops.pool.windows import filtered_type

from . import integer_reference, operands


def elementwise_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the input's shape, with the dtype of the zero point, the scale or ``output_dtype``.

    Args:
        node: A QuantizeLinear or DequantizeLinear.
        types: Of the input, the scale and the zero point.
        values: Not used.

    Raises:
        ShapeError: ``output_dtype`` is no dtype of ONNX.
    """
    x, scale = tensor(types[0]), tensor(types[1])
    zero = tensor(types[2]) if len(types) > 2 else None
    stated = int(node.attrs.get("output_dtype", 0))
    if stated:
        dtype = DTYPE_OF_ONNX.get(stated)
        if dtype is None:
            raise ShapeError(f"output_dtype {stated} is no dtype of ONNX")
    elif node.op_type == "QuantizeLinear":
        dtype = "uint8" if zero is None else zero.dtype
        if zero is None and len(types) > 2 and types[2] is not None:
            dtype = None
    else:
        dtype = None if scale is None else scale.dtype
    return [None if not dtype else TensorType(dtype, None if x is None else x.shape)]


def dynamic_quantize_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of uint8 elements, their scale and their zero point.

    Args:
        node: Not used.
        types: Of the input.
        values: Not used.
    """
    x = tensor(types[0])
    quantized = TensorType("uint8", None if x is None else x.shape)
    return [quantized, TensorType("float32", ()), TensorType("uint8", ())]


def convolution_integer(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of ConvInteger: the shape of Conv, int32.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    return [filtered_type(node, "int32", types[0], types[1])]


def qlinear_convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of QLinearConv: the shape of Conv, the dtype of the result's zero point.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    zero = tensor(types[7])
    return [None if zero is None else filtered_type(node, zero.dtype, types[0], types[3])]


def matmul_integer(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of MatMulInteger: the shape of MatMul, int32.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    return [product_type("int32", types[0], types[1])]


def qlinear_matmul(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of QLinearMatMul: the shape of MatMul, the dtype of the result's zero point.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    zero = tensor(types[7])
    return [None if zero is None else product_type(zero.dtype, types[0], types[3])]


def dequantize(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Dequantize by the rules of opset 19, which include 10 and 13; onnx.reference begins there."""
    return standard(variant(node, version=max(node.version, 19) if node.version else 0), inputs)


_OUT_OF_RANGE = 2.0**20  # above all quantized integers, within int32


def quantize(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Quantize to integers, saturating; other dtypes go to onnx.reference.

    onnx.reference converts to int32 before it saturates, so that +inf becomes the least integer.
    """
    x, scale, *zero = inputs
    target = dtype_of(zero[0]) if zero and zero[0] is not None else "uint8"
    target = DTYPE_OF_ONNX[int(node.attrs.get("output_dtype", 0)) or ONNX_DTYPE[target]]
    if "int" not in target:
        return standard(node, inputs)
    precision = numpy_dtype(DTYPE_OF_ONNX[int(node.attrs.get("precision", 0)) or 1])
    if node.attrs.get("precision", 0):
        x, scale = x.astype(precision), scale.astype(precision)
    axis, block = int(node.attrs.get("axis", 1)), int(node.attrs.get("block_size", 0))
    quotient: Array = x / _broadcast_scale(scale, x.shape, axis, block)
    wide = quotient.astype(np.result_type(quotient, np.float32))
    cut = np.clip(wide, -_OUT_OF_RANGE, _OUT_OF_RANGE)
    return standard(variant(node, drop=("precision",)), [cut, np.ones((), np.float32), *zero])


def _broadcast_scale(scale: Array, shape: Sequence[int], axis: int, block: int) -> Array:
    """Return scales shaped to broadcast to the tensor that they scale, of shape ``shape``."""
    if scale.size == 1:
        return scale.reshape(())
    if scale.ndim == 1 and not (block and len(shape) == 1):
        return scale.reshape(-1, *(1,) * (len(shape) - 1 - axis % len(shape)))
    return np.repeat(scale, block, axis).take(range(shape[axis]), axis)


def _scaled_axis(call: BatchCall) -> list[int]:
    """Return the axis that has a scale for each of its elements or blocks; [] if there is one."""
    return [int(call.node.attrs.get("axis", 1))] if math.prod(call.shapes[1]) != 1 else []


_of_scales = except_axes(_scaled_axis)


# The operators of this family, each in all its versions.
declare(
    "ConvInteger",
    requires=operands.conv_integer_operands,
    infer=convolution_integer,
    compute=integer_reference.conv_integer,
    grows=True,
    batch=along(0),
)
declare(
    "DequantizeLinear",
    requires=operands.quantize_operands,
    infer=elementwise_types,
    compute=dequantize,
    batch=_of_scales,
)
declare(
    "DynamicQuantizeLinear",
    requires=operands.dynamic_quantize_operands,
    infer=dynamic_quantize_types,
)
declare(
    "MatMulInteger",
    requires=operands.matmul_integer_operands,
    infer=matmul_integer,
    compute=integer_reference.matmul_integer,
    batch=matrix_product(0, 1),
)
declare(
    "QLinearConv",
    requires=operands.qlinear_conv_operands,
    infer=qlinear_convolution,
    compute=integer_reference.qlinear_conv,
    grows=True,
    batch=along(0),
)
declare(
    "QLinearMatMul",
    requires=operands.qlinear_matmul_operands,
    infer=qlinear_matmul,
    compute=integer_reference.qlinear_matmul,
    batch=matrix_product(0, 3),
)
declare(
    "QuantizeLinear",
    requires=operands.quantize_operands,
    infer=elementwise_types,
    compute=quantize,
    batch=_of_scales,
)
declare("FusedQLinearConv", domain=INTERNAL_DOMAIN, requires=operands.fused_qlinear_conv_operands)
declare(
    "FusedQLinearMatMul", domain=INTERNAL_DOMAIN, requires=operands.fused_qlinear_matmul_operands
)
