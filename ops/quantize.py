"""Quantization: shape rules, and a correction of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import reference, shape_rule
from subgraph.reference import standard, variant
from subgraph.types import DTYPE_OF_ONNX, TensorType, ValueType

from .elementwise import Types, Values, tensor


@shape_rule("QuantizeLinear", "DequantizeLinear")
def one_by_one(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Keep the shape; the zero point, the scale or an attribute says the dtype."""
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


@shape_rule("DynamicQuantizeLinear")
def with_its_scale(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Keep the shape, as uint8; the scale and the zero point are scalars."""
    x = tensor(types[0])
    whole = TensorType("uint8", None if x is None else x.shape)
    return [whole, TensorType("float32", ()), TensorType("uint8", ())]


@reference("DequantizeLinear")
def dequantize(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute opsets 10 and 13 as 19, of which they are a part; onnx.reference begins there."""
    return standard(variant(node, version=max(node.version, 19) if node.version else 0), inputs)
