"""Elementwise operators: shape rules of arithmetic, comparisons, activations and conversions.

``elementwise_expressions`` says what each computes, ``elementwise_cpu`` how the CPU device runs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX, Array, Shape, TensorType, ValueType, numpy_dtype
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    choice,
    require,
    require_axis,
    require_broadcast,
    require_broadcast_together,
    require_dtype,
    require_same_dtype,
    require_shape,
    require_single,
)
from subgraph.ops.shared.strides import broadcast_shapes

from . import reference

Types = Sequence[ValueType | None]
Values = Sequence[Array | None]

VARIADIC = ("Max", "Mean", "Min", "Sum")


def unary_operands(node: Node, x: Tensor) -> None:
    """Take every tensor: each element of the result follows from the element at its place."""


def gelu_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the approximation is one of the standard (ONNX, 20)."""
    choice(node, "approximate", "none", "none", "tanh")


def identity_operands(node: Node, x: ValueType | Tensor) -> None:
    """Take every value."""


def cast_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the rounding to float8e8m0 is one of the standard (ONNX, 1 to 28)."""
    choice(node, "round_mode", "up", "up", "down", "nearest")


def cast_like_operands(node: Node, x: Tensor, like: Tensor) -> None:
    """As `cast_operands`; of the second operand only its dtype matters."""
    cast_operands(node, x)


def clip_operands(
    node: Node, x: Tensor, least: Tensor | None = None, most: Tensor | None = None
) -> None:
    """Raise ShapeError unless both bounds are numbers of the input's dtype (ONNX, 1 to 13)."""
    require_single("min", least, x.dtype)
    require_single("max", most, x.dtype)


def dropout_operands(
    node: Node, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> None:
    """Raise ShapeError unless ratio and training mode are single values (ONNX, 1 to 22)."""
    require_single("ratio", ratio)
    require_single("training_mode", training, "bool")


def binary_operands(node: Node, a: Tensor, b: Tensor) -> None:
    """Raise ShapeError unless the operands broadcast and have one dtype (Pow: any)."""
    if node.op_type != "Pow":
        require_same_dtype(a, b)
    if node.op_type == "BitShift":
        choice(node, "direction", "", "LEFT", "RIGHT")
    if not is_legacy_broadcast(node):
        require_broadcast_together(a, b)
        return
    if not node.attrs.get("broadcast"):
        require_shape("B", b, a.shape, "that of A, as the attribute broadcast is 0")
        return
    shape = b.shape
    if node.attrs.get("axis") is not None:
        behind = a.rank - require_axis(node, a.rank) - b.rank
        require(behind >= 0, "B has rank {}, A {} from the axis on", b.rank, behind + b.rank)
        shape = (*shape, *(1,) * behind)
    require_broadcast("B", Tensor(b.dtype, shape), a.shape, "that of A")


def prelu_operands(node: Node, x: Tensor, slope: Tensor) -> None:
    """Raise ShapeError unless the slope broadcasts to the input; before 7 it may be of channels."""
    require_same_dtype(x, slope)
    if is_legacy_broadcast(node) and slope.rank == 1 and x.rank > 2:
        per_channel = Tensor(slope.dtype, (*slope.shape, *(1,) * (x.rank - 2)))
        require_broadcast("slope", per_channel, x.shape, "that of the input, a number a channel")
    else:
        require_broadcast("slope", slope, x.shape, "that of the input")


def variadic_operands(node: Node, first: Tensor, *others: Tensor) -> None:
    """Raise ShapeError unless the operands broadcast; before version 8 they have one shape."""
    require_same_dtype(first, *others)
    if 0 < node.version < 8:
        for k, other in enumerate(others, 1):
            require_shape(f"input {k}", other, first.shape, "that of the first input")
    else:
        require_broadcast_together(first, *others)


def where_operands(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> None:
    """Raise ShapeError unless the condition is bool and all broadcast (ONNX, 9 to 16)."""
    require_dtype("condition", condition, "bool")
    require_same_dtype(x, y)
    require_broadcast_together(condition, x, y)


def bit_cast_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless elements of the new dtype have as many bits (ONNX, 26)."""
    to = DTYPE_OF_ONNX.get(node.attrs.get("to", 0), "")
    require(bool(to) and "string" not in (to, x.dtype), "to is {}", node.attrs.get("to"))
    sizes = [numpy_dtype(dtype).itemsize for dtype in (x.dtype, to)]
    require(sizes[0] == sizes[1], "{} and {} differ in size", x.dtype, to)


def first_type(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input, whatever it is."""
    return [types[0]]


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


def unary(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input."""
    if node.op_type == "Clip" and len(types) > 1:
        same_dtype([kind for kind in types if kind is not None])
    return [tensor(types[0])]


def broadcasting(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Broadcast the shapes, keep the dtype (Pow: of the base)."""
    dtype = same_dtype(types[:1] if node.op_type == "Pow" else types)
    return [None if dtype is None else TensorType(dtype, _broadcast(node, types))]


def comparison(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Broadcast the shapes; the result is bool."""
    same_dtype(types)
    return [TensorType("bool", _broadcast(node, types))]


def test(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the shape of the input in bool."""
    return [TensorType("bool", shape_of(types[0]))]


def dropout(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Keep the type; the mask is bool from opset 10 on, before it has the input's dtype."""
    x = tensor(types[0])
    if x is None:
        return [None, None]
    return [x, TensorType(x.dtype if 0 < node.version < 10 else "bool", x.shape)]


def where(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Broadcast all three shapes; the dtype is that of the second and third input."""
    dtype = same_dtype(types[1:])
    shape = broadcast_shapes([shape_of(kind) for kind in types])
    return [None if dtype is None else TensorType(dtype, shape)]


def cast(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Change the dtype to the attribute ``to``."""
    to = node.attrs["to"]
    dtype = str(to).lower() if isinstance(to, str) else DTYPE_OF_ONNX.get(int(to))
    if dtype is None:
        raise ShapeError(f"to is {to}, which is no element type of ONNX")
    return [TensorType(dtype, shape_of(types[0]))]


def cast_like(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Change the dtype to that of the second input."""
    like = tensor(types[1])
    return [None if like is None else TensorType(like.dtype, shape_of(types[0]))]


# The operators of this family, each in all its versions.
declare(
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Ceil", "Celu"),
    *("Cos", "Cosh", "Elu", "Exp", "Floor", "HardSigmoid", "HardSwish", "LeakyRelu", "Log"),
    *("Mish", "Neg", "Not", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign"),
    *("Sin", "Sinh", "Softplus", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
    requires=unary_operands,
    infer=unary,
)
declare(
    *("Add", "And", "Div", "Mul", "Or", "Pow", "Sub", "Xor"),
    requires=binary_operands,
    infer=broadcasting,
    compute=reference.binary,
)
declare("BitCast", requires=bit_cast_operands)
declare(
    *("BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod"),
    requires=binary_operands,
    infer=broadcasting,
)
declare("Cast", requires=cast_operands, infer=cast, compute=reference.cast)
declare("CastLike", requires=cast_like_operands, infer=cast_like, compute=reference.cast_like)
declare("Clip", requires=clip_operands, infer=unary, compute=reference.clip)
declare("Dropout", requires=dropout_operands, infer=dropout, compute=reference.dropout)
declare(
    "Equal", "Greater", "Less", requires=binary_operands, infer=comparison, compute=reference.binary
)
declare("Erf", requires=unary_operands, infer=unary, compute=reference.erf)
declare("Gelu", requires=gelu_operands, infer=unary)
declare("GreaterOrEqual", "LessOrEqual", requires=binary_operands, infer=comparison)
declare("IsInf", "IsNaN", requires=unary_operands, infer=test)
declare("Max", "Min", "Sum", requires=variadic_operands, infer=broadcasting)
declare("Mean", requires=variadic_operands, infer=broadcasting, compute=reference.mean)
declare("PRelu", requires=prelu_operands, infer=broadcasting, compute=reference.prelu)
declare("Softsign", requires=unary_operands, infer=unary, compute=reference.softsign)
declare("Where", requires=where_operands, infer=where)
