"""Quantization: requirements, types, and the reference where onnx.reference differs."""

from __future__ import annotations

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
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard, variant
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_axis,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.ops.conv.op import (
    conv_integer_operands,
    convolution_integer,
    qlinear_conv_operands,
    qlinear_convolution,
)
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.matmul.op import (
    matmul_integer,
    matmul_integer_operands,
    qlinear_matmul,
    qlinear_matmul_operands,
)

from . import integer_reference


def quantize_operands(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
    """Raise ShapeError unless scales are one, one along an axis, or one for each block.

    Args:
        node: A QuantizeLinear or DequantizeLinear (ONNX, 10 to 25).
        x: The input.
        scale: A scalar; a vector along ``axis``; or, with ``block_size``, of x's shape with as many
            elements along the axis as there are blocks.
        zero: The zero point, of the scale's shape and of the quantized dtype.
    """
    stated = node.attrs.get("output_dtype", 0)
    require(not stated or stated in DTYPE_OF_ONNX, "output_dtype {} is no dtype of ONNX", stated)
    if node.op_type == "DequantizeLinear":
        require_dtype("the zero point", zero, x.dtype)
    elif stated:
        require_dtype("the zero point", zero, DTYPE_OF_ONNX[stated])
    block = node.attrs.get("block_size", 0)
    require(isinstance(block, int) and block >= 0, "block_size is {}", block)
    for name, operand in (("the scale", scale), ("the zero point", zero)):
        if operand is not None:
            _require_granularity(node, name, operand, x, block)
    if zero is not None and zero.rank and scale.rank:
        require_shape("the zero point", zero, scale.shape, "one for each scale")


def _require_granularity(node: Node, name: str, operand: Tensor, x: Tensor, block: int) -> None:
    """Require one number for all of ``x``, one for each index of an axis, or one for each block."""
    if operand.rank == 0:
        return
    if operand.rank == 1 and not (block and x.rank == 1):
        # An axis is needed only where there is more than one number.
        axis = node.attrs.get("axis", 1)
        inside = isinstance(axis, int) and -x.rank <= axis < x.rank
        count: int = x.shape[axis] if inside else 1
        require(
            operand.shape[0] == 1 or operand.shape[0] == count,
            "{} has {} elements; {} has one, or one for each of the {} along axis {}",
            name,
            operand.shape[0],
            x,
            count,
            axis,
        )
        return
    require(block > 0, "{} has shape {}, but there is no block_size", name, operand.shape)
    require_rank(name, operand, x.rank)
    axis = require_axis(node, x.rank, default=1)
    blocks = -(-x.shape[axis] // block)
    wanted = (*x.shape[:axis], blocks, *x.shape[axis + 1 :])
    require_shape(name, operand, wanted, f"one for each block of {block} along axis {axis}")


def dynamic_quantize_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the operand is float32; every shape fits (ONNX, 11)."""
    require_dtype("x", x, "float32")


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


# The operators of this family, each in all its versions.
declare(
    "ConvInteger",
    requires=conv_integer_operands,
    infer=convolution_integer,
    compute=integer_reference.conv_integer,
)
declare("DequantizeLinear", requires=quantize_operands, infer=elementwise_types, compute=dequantize)
declare("DynamicQuantizeLinear", requires=dynamic_quantize_operands, infer=dynamic_quantize_types)
declare(
    "MatMulInteger",
    requires=matmul_integer_operands,
    infer=matmul_integer,
    compute=integer_reference.matmul_integer,
)
declare(
    "QLinearConv",
    requires=qlinear_conv_operands,
    infer=qlinear_convolution,
    compute=integer_reference.qlinear_conv,
)
declare(
    "QLinearMatMul",
    requires=qlinear_matmul_operands,
    infer=qlinear_matmul,
    compute=integer_reference.qlinear_matmul,
)
declare("QuantizeLinear", requires=quantize_operands, infer=elementwise_types, compute=quantize)
