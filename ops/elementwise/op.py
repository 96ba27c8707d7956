"""Elementwise operators: requirements and output types of arithmetic, comparisons and conversions.

``expressions.py`` says what each operator computes; ``cpu.py`` and ``opencl.py`` run that on a
device. For the REFERENCE device ``reference.py`` replaces onnx.reference where that is inexact.
"""

from __future__ import annotations

from collections.abc import Sequence

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX, Array, Shape, TensorType, ValueType
from subgraph.operators.batch_axes import elementwise, first_input
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    any_tensor,
    require,
    require_axis,
    require_broadcast,
    require_broadcast_together,
    require_choice,
    require_dtype,
    require_same_dtype,
    require_shape,
    require_single,
)
from subgraph.operators.schema import INTERNAL_DOMAIN, is_before
from subgraph.ops.shared.half_precision import in_float32
from subgraph.ops.shared.strides import broadcast_shapes

from . import reference

Types = Sequence[ValueType | None]
Values = Sequence[Array | None]

VARIADIC = ("Max", "Mean", "Min", "Sum")


def gelu_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless ``approximate`` is "none" or "tanh" (ONNX Gelu, opset 20)."""
    require_choice(node, "approximate", "none", "none", "tanh")


def cast_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless ``round_mode`` is one of the standard (ONNX Cast, opsets 1 to 28)."""
    require_choice(node, "round_mode", "up", "up", "down", "nearest")


def cast_like_operands(node: Node, x: Tensor, like: Tensor) -> None:
    """Raise ShapeError unless ``round_mode`` is a mode of the standard (ONNX CastLike, opset 15).

    Args:
        node: The CastLike node.
        x: The tensor to convert.
        like: A tensor of the target dtype; its shape and elements do not matter.
    """
    cast_operands(node, x)


def clip_operands(
    node: Node, x: Tensor, least: Tensor | None = None, most: Tensor | None = None
) -> None:
    """Raise ShapeError unless both bounds are scalars of the input's dtype (Clip, opsets 1 to 13).

    Args:
        node: The Clip node.
        x: The tensor to clip.
        least: Lower bound; None: unbounded. Before opset 11 the bounds are attributes.
        most: Upper bound; None: unbounded.
    """
    require_single("min", least, x.dtype)
    require_single("max", most, x.dtype)


def binary_operands(node: Node, a: Tensor, b: Tensor) -> None:
    """Raise ShapeError unless the operands broadcast and have one dtype (Pow: any two).

    Args:
        node: A node of arithmetic, comparison or logic. Before opset 7 the second operand
            broadcasts to the first, and only if attribute ``broadcast`` is set; ``axis`` is then
            the dimension of the first with which the second's dimensions begin.
        a: The first operand.
        b: The second operand.
    """
    if node.op_type != "Pow":
        require_same_dtype(a, b)
    if node.op_type == "BitShift":
        require_choice(node, "direction", "", "LEFT", "RIGHT")
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
    """Raise ShapeError unless the slope broadcasts to the input (ONNX PRelu, opsets 1 to 16).

    Args:
        node: The PRelu node.
        x: The tensor.
        slope: Factor of negative elements. Before opset 7 one of rank 1 has a number per channel.
    """
    require_same_dtype(x, slope)
    if is_legacy_broadcast(node) and slope.rank == 1 and x.rank > 2:
        per_channel = Tensor(slope.dtype, (*slope.shape, *(1,) * (x.rank - 2)))
        require_broadcast("slope", per_channel, x.shape, "that of the input, a number a channel")
    else:
        require_broadcast("slope", slope, x.shape, "that of the input")


def variadic_operands(node: Node, first: Tensor, *others: Tensor) -> None:
    """Raise ShapeError unless the operands broadcast; before opset 8 they must have one shape."""
    require_same_dtype(first, *others)
    if is_before(node, 8):
        for k, other in enumerate(others, 1):
            require_shape(f"input {k}", other, first.shape, "that of the first input")
    else:
        require_broadcast_together(first, *others)


def swiglu_operands(node: Node, a: Tensor, b: Tensor) -> None:
    """Raise ShapeError unless both operands have one shape: nothing broadcasts (opset 28).

    Args:
        node: The SwiGLU node.
        a: The gate, to which the activation is applied.
        b: Its factor.
    """
    require_same_dtype(a, b)
    require_shape("B", b, a.shape, "the shape of A")


def where_operands(node: Node, condition: Tensor, x: Tensor, y: Tensor) -> None:
    """Raise ShapeError unless the condition is bool and all broadcast (ONNX Where, opsets 9 to 16).

    Args:
        node: The Where node.
        condition: Where the result is taken from ``x``.
        x: Elements where the condition is true.
        y: Elements where it is false, of the same dtype.
    """
    require_dtype("condition", condition, "bool")
    require_same_dtype(x, y)
    require_broadcast_together(condition, x, y)


def first_type(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of the first input, of any kind.

    Args:
        node: Any node; not read.
        types: Types of the inputs, None while unknown.
        values: Contents of constant inputs; not read.
    """
    return [types[0]]


def tensor(kind: ValueType | None) -> TensorType | None:
    """Return ``kind`` as a tensor type, None if it is unknown.

    Raises:
        ShapeError: It is the type of a sequence, optional or map.
    """
    if kind is None or isinstance(kind, TensorType):
        return kind
    raise ShapeError(f"a tensor is needed, got {kind}")


def shape_of(kind: ValueType | None) -> Shape | None:
    """Return the shape of a tensor type, None while unknown."""
    known = tensor(kind)
    return None if known is None else known.shape


def same_dtype(types: Types) -> str | None:
    """Return the dtype that all known types share, None if none is known.

    Raises:
        ShapeError: Two differ.
    """
    found = {known.dtype for kind in types if (known := tensor(kind)) is not None}
    if len(found) > 1:
        raise ShapeError(f"the inputs must have one dtype, got {' and '.join(sorted(found))}")
    return found.pop() if found else None


def _broadcast(node: Node, types: Types) -> Shape | None:
    """Return the broadcast shape of the inputs, None while it is unknown."""
    shapes = [shape_of(kind) for kind in types]
    if is_legacy_broadcast(node) and shapes:
        return shapes[0]
    return broadcast_shapes(shapes)


def is_legacy_broadcast(node: Node) -> bool:
    """Return whether only the second operand broadcasts, as in binary operators before opset 7."""
    return is_before(node, 7) and node.domain == "" and node.op_type not in VARIADIC


def aligns_axes(node: Node) -> bool:
    """Return whether operands broadcast along an axis that NumPy's rules do not give them.

    Before opset 7 the attribute ``axis`` aligns the second operand, and slopes of PRelu belong to
    axis 1.
    """
    if not is_legacy_broadcast(node):
        return False
    return node.op_type == "PRelu" or {"axis", "broadcast"} <= node.attrs.keys()


def broadcasting(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the broadcast shape in the dtype of the inputs (Pow: in that of the base).

    Args:
        node: A node of arithmetic or logic.
        types: Types of the operands, None while unknown.
        values: Contents of constant inputs; not read.
    """
    dtype = same_dtype(types[:1] if node.op_type == "Pow" else types)
    return [None if dtype is None else TensorType(dtype, _broadcast(node, types))]


def comparison(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the broadcast shape as bool.

    Args:
        node: A comparison.
        types: Types of the operands, None while unknown.
        values: Contents of constant inputs; not read.
    """
    same_dtype(types)
    return [TensorType("bool", _broadcast(node, types))]


def test(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the shape of the input as bool.

    Args:
        node: An IsInf or IsNaN node.
        types: Type of the input, None while unknown.
        values: Contents of constant inputs; not read.
    """
    return [TensorType("bool", shape_of(types[0]))]


def where(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the broadcast shape of all three inputs, in the dtype of the second and third.

    Args:
        node: The Where node.
        types: Types of condition and both alternatives, None while unknown.
        values: Contents of constant inputs; not read.
    """
    dtype = same_dtype(types[1:])
    shape = broadcast_shapes([shape_of(kind) for kind in types])
    return [None if dtype is None else TensorType(dtype, shape)]


def cast(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the input's shape in the dtype that attribute ``to`` names.

    Args:
        node: The Cast node; in opset 1 ``to`` is a name ("FLOAT"), later a number of
            TensorProto.DataType.
        types: Type of the input, None while unknown.
        values: Contents of constant inputs; not read.
    """
    to = node.attrs["to"]
    dtype = str(to).lower() if isinstance(to, str) else DTYPE_OF_ONNX.get(int(to))
    if dtype is None:
        raise ShapeError(f"to is {to}, which is no element type of ONNX")
    return [TensorType(dtype, shape_of(types[0]))]


def cast_like(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the first input's shape in the dtype of the second.

    Args:
        node: The CastLike node.
        types: Types of both inputs, None while unknown.
        values: Contents of constant inputs; not read.
    """
    like = tensor(types[1])
    return [None if like is None else TensorType(like.dtype, shape_of(types[0]))]


def gives_floats(node: Node) -> bool:
    """Return whether the results are floats; integers may be divided by zero."""
    types = (value.type for value in node.outputs)
    return all(isinstance(kind, TensorType) and "float" in kind.dtype for kind in types)


# The operators of this family, each in all its versions.
declare(
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitwiseNot", "Celu", "Cos"),
    *("Cosh", "Elu", "Exp", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish", "Relu"),
    *("Round", "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Swish", "Tan"),
    *("Tanh", "ThresholdedRelu"),
    requires=any_tensor,
    infer=first_type,
    speculatable=True,
    batch=elementwise,
)
declare(
    *("Ceil", "Floor", "Neg", "Not", "Reciprocal", "Sqrt"),
    requires=any_tensor,
    infer=first_type,
    compute=reference.elementwise,
    speculatable=True,
    batch=elementwise,
)
declare(
    *("Add", "And", "Mul", "Or", "Sub", "Xor"),
    requires=binary_operands,
    infer=broadcasting,
    compute=reference.binary,
    speculatable=True,
    batch=elementwise,
)
declare(
    *("Div", "Pow"),
    requires=binary_operands,
    infer=broadcasting,
    compute=reference.binary,
    speculatable=gives_floats,
    batch=elementwise,
)
declare(
    "BitShift",
    requires=binary_operands,
    infer=broadcasting,
    compute=reference.bit_shift,
    batch=elementwise,
)
declare(
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "Mod"),
    requires=binary_operands,
    infer=broadcasting,
    batch=elementwise,
)
declare(
    "Cast",
    requires=cast_operands,
    infer=cast,
    compute=reference.cast,
    speculatable=True,
    batch=elementwise,
)
declare(
    "CastLike",
    requires=cast_like_operands,
    infer=cast_like,
    compute=reference.cast_like,
    dtype_at=1,
    batch=first_input,
)
declare("Clip", requires=clip_operands, infer=first_type, compute=reference.clip, batch=elementwise)
declare(
    *("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"),
    requires=binary_operands,
    infer=comparison,
    compute=reference.binary,
    speculatable=True,
    batch=elementwise,
)
declare(
    "Erf",
    requires=any_tensor,
    infer=first_type,
    compute=reference.erf,
    speculatable=True,
    batch=elementwise,
)
declare("Gelu", requires=gelu_operands, infer=first_type, batch=elementwise)
declare("IsInf", "IsNaN", requires=any_tensor, infer=test, batch=elementwise)
declare(
    *("Max", "Min"),
    requires=variadic_operands,
    infer=broadcasting,
    compute=reference.elementwise,
    speculatable=True,
    batch=elementwise,
)
declare(
    "Sum",
    requires=variadic_operands,
    infer=broadcasting,
    compute=in_float32(reference.elementwise),
    speculatable=True,
    batch=elementwise,
)
declare(
    "Mean",
    requires=variadic_operands,
    infer=broadcasting,
    compute=in_float32(reference.mean),
    batch=elementwise,
)
declare(
    "PRelu", requires=prelu_operands, infer=broadcasting, compute=reference.prelu, batch=elementwise
)
declare(
    "Softsign", requires=any_tensor, infer=first_type, compute=reference.softsign, batch=elementwise
)
declare("SwiGLU", requires=swiglu_operands, by_body=True, batch=elementwise)
declare(
    "Where",
    requires=where_operands,
    infer=where,
    compute=reference.where,
    speculatable=True,
    batch=elementwise,
)
# The elementwise operators of its inner graph, in one loop.
declare("FusedElementwise", domain=INTERNAL_DOMAIN)
