"""Elementwise operators: shape rules of arithmetic, comparisons, activations and conversions.

``elementwise_expressions`` says what each computes, ``elementwise_cpu`` how the CPU device runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import reference, shape_rule
from subgraph.types import DTYPE_OF_ONNX, Shape, TensorType, ValueType

from .strides import broadcast_shapes

Array = np.ndarray[Any, Any]
Types = Sequence[ValueType | None]
Values = Sequence[Array | None]

UNARY = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BitwiseNot",
    "Ceil",
    "Celu",
    "Cos",
    "Cosh",
    "Elu",
    "Erf",
    "Exp",
    "Floor",
    "Gelu",
    "HardSigmoid",
    "HardSwish",
    "Identity",
    "LeakyRelu",
    "Log",
    "Mish",
    "Neg",
    "Not",
    "Reciprocal",
    "Relu",
    "Round",
    "Selu",
    "Shrink",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Swish",
    "Tan",
    "Tanh",
    "ThresholdedRelu",
]
BINARY = [
    "Add",
    "And",
    "BitShift",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Div",
    "Mod",
    "Mul",
    "Or",
    "Pow",
    "PRelu",
    "Sub",
    "Xor",
]
VARIADIC = ("Max", "Mean", "Min", "Sum")
COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")
# Operators whose results for equal positions depend on the values there only: what may be fused.
ELEMENTWISE = frozenset(
    (
        *UNARY,
        *BINARY,
        *VARIADIC,
        *COMPARISONS,
        "Where",
        "Clip",
        "Cast",
        "CastLike",
        "IsNaN",
        "IsInf",
    )
)


def tensor(kind: ValueType | None) -> TensorType | None:
    """Return a tensor type, None for what is unknown.

    Raises:
        ShapeError: it is the type of something else.
    """
    if kind is None or isinstance(kind, TensorType):
        return kind
    raise ShapeError(f"a tensor is needed, got {kind}")


def shape_of(kind: ValueType | None) -> Shape | None:
    """Return the shape of a tensor type, None while unknown."""
    known = tensor(kind)
    return None if known is None else known.shape


def same_dtype(types: Types) -> str | None:
    """Return the dtype that all known types have.

    Raises:
        ShapeError: two differ.
    """
    found = {known.dtype for kind in types if (known := tensor(kind)) is not None}
    if len(found) > 1:
        raise ShapeError(f"the inputs must have one dtype, got {' and '.join(sorted(found))}")
    return found.pop() if found else None


def _broadcast(node: Node, types: Types) -> Shape | None:
    shapes = [shape_of(kind) for kind in types]
    if is_legacy_broadcast(node) and shapes:
        return shapes[0]
    return broadcast_shapes(shapes)


def is_legacy_broadcast(node: Node) -> bool:
    """Return whether a binary operator broadcasts as before opset 7: the second to the first."""
    return 0 < node.version < 7 and node.domain == "" and node.op_type not in VARIADIC


@shape_rule(*(name for name in UNARY if name != "Identity"), "Clip")
def unary(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input."""
    if node.op_type == "Clip" and len(types) > 1:
        same_dtype([kind for kind in types if kind is not None])
    return [tensor(types[0])]


@shape_rule(*BINARY, *VARIADIC)
def broadcasting(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Broadcast the shapes, keep the dtype (Pow: of the base)."""
    dtype = same_dtype(types[:1] if node.op_type == "Pow" else types)
    return [None if dtype is None else TensorType(dtype, _broadcast(node, types))]


@shape_rule(*COMPARISONS)
def comparison(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Broadcast the shapes; the result is bool."""
    same_dtype(types)
    return [TensorType("bool", _broadcast(node, types))]


@shape_rule("IsNaN", "IsInf")
def test(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the shape of the input in bool."""
    return [TensorType("bool", shape_of(types[0]))]


@shape_rule("Dropout")
def dropout(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Keep the type; the mask is bool from opset 10 on, before it has the input's dtype."""
    x = tensor(types[0])
    if x is None:
        return [None, None]
    return [x, TensorType(x.dtype if 0 < node.version < 10 else "bool", x.shape)]


@shape_rule("Where")
def where(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Broadcast all three shapes; the dtype is that of the second and third input."""
    dtype = same_dtype(types[1:])
    shape = broadcast_shapes([shape_of(kind) for kind in types])
    return [None if dtype is None else TensorType(dtype, shape)]


@shape_rule("Cast")
def cast(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Change the dtype to the attribute ``to``."""
    to = node.attrs["to"]
    dtype = str(to).lower() if isinstance(to, str) else DTYPE_OF_ONNX.get(int(to))
    if dtype is None:
        raise ShapeError(f"to is {to}, which is no element type of ONNX")
    return [TensorType(dtype, shape_of(types[0]))]


@shape_rule("CastLike")
def cast_like(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Change the dtype to that of the second input."""
    like = tensor(types[1])
    return [None if like is None else TensorType(like.dtype, shape_of(types[0]))]


@reference("Mean")
def mean(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Average with broadcasting; onnx.reference adds in place and so cannot broadcast."""
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    return [np.asarray(total / len(inputs)).astype(inputs[0].dtype)]


@reference("Softsign")
def softsign(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Compute x / (1 + |x|); onnx.reference fails for rank 0."""
    x = inputs[0]
    return [np.asarray(x / (1 + np.abs(x))).astype(x.dtype)]
