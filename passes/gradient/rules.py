"""Derivative rules of operators for the pass "ExpandGradient": vector-Jacobian products.

A rule builds nodes for the derivatives with respect to a node's inputs, and returns these in order,
None for inputs without one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import ONNX_DTYPE, TensorType
from subgraph.operators.builder import operator
from subgraph.operators.reference import attributes
from subgraph.operators.schema import is_before
from subgraph.ops.elementwise.op import aligns_axes

OptionalValue = Value | None


@attrs.frozen
class Vjp:
    """A vector-Jacobian product to build: a node, and the derivative of the target by its outputs.

    Attributes:
        node: The node.
        grads: The derivative of the target with respect to each output, None where the target does
            not depend on it.
    """

    node: Node
    grads: Sequence[OptionalValue]

    @property
    def output(self) -> Value:
        """The first output."""
        return self.node.outputs[0]

    @property
    def grad(self) -> Value:
        """The derivative with respect to the first output."""
        return _present(self.grads[0])

    def input(self, position: int) -> Value:
        """Return an input, which is not omitted."""
        return _present(self.node.inputs[position])


Rule = Callable[[Vjp], Sequence[OptionalValue]]


def op(op_type: str, *inputs: Any, **attrs: Any) -> Value:
    """Return the result of a new node."""
    value: Value = operator(op_type)(*inputs, **attrs)
    return value


def zeros_like(value: Value) -> Value:
    """Return zeros of the shape and dtype of a value, whatever its elements (inf - inf is NaN)."""
    return op("Expand", _number(0, value), op("Shape", value))


def ones_like(value: Value) -> Value:
    """Return ones of the shape and dtype of a value."""
    one = op("CastLike", np.array(1.0, np.float32), value)
    return op("Expand", one, op("Shape", value))


def sum_to(grad: Value, like: Value) -> Value:
    """Return a derivative summed over the axes along which ``like`` was broadcast.

    Args:
        grad: The derivative with respect to the broadcast value.
        like: The value before the broadcast; the sum has its shape.
    """
    if isinstance(like.type, TensorType) and like.type.is_static and grad.type == like.type:
        return grad
    shape, wanted = op("Shape", grad), op("Shape", like)
    # The shapes may be known at run time only, so that the axes are computed by nodes: broadcasting
    # aligns shapes at the end.
    missing = op("Unsqueeze", op("Sub", op("Size", shape), op("Size", wanted)), [0])
    ones = op("ConstantOfShape", missing, value=np.array([1], np.int64))
    full = op("Concat", ones, wanted, axis=0)
    repeated = op("NonZero", op("Not", op("Equal", full, shape)))
    axes = op("Reshape", repeated, [-1])
    # Without broadcast axes the sum must be the derivative itself; by default, empty axes reduce
    # all.
    total = op("ReduceSum", grad, axes, keepdims=1, noop_with_empty_axes=1)
    return op("Reshape", total, wanted)


def _number(value: float, like: Value) -> Value:
    """Return a scalar constant of the dtype of ``like``."""
    return op("CastLike", np.array(value, np.float64), like)


def _present(value: OptionalValue) -> Value:
    assert value is not None
    return value


def _unary(derivative: Callable[[Value, Value], Value]) -> Rule:
    """Return the rule of an elementwise function from dy/dx as a function of x and y."""

    def rule(of: Vjp) -> Sequence[OptionalValue]:
        return [op("Mul", of.grad, derivative(of.input(0), of.output))]

    return rule


def _binary(derivatives: Callable[[Value, Value, Value, Value], tuple[Value, Value]]) -> Rule:
    """Return the rule of a broadcasting operator from (a, b, y, dy) to both derivatives."""

    def rule(of: Vjp) -> Sequence[OptionalValue]:
        if aligns_axes(of.node):
            raise UnsupportedOpError(
                f"the derivative of {of.node.op_type} before opset 7 is not defined with the "
                f"attribute axis, which node {of.node.name!r} has"
            )
        a, b = of.input(0), of.input(1)
        da, db = derivatives(a, b, of.output, of.grad)
        return [sum_to(da, a), sum_to(db, b)]

    return rule


def _div(a: Value, b: Value, y: Value, dy: Value) -> tuple[Value, Value]:
    return op("Div", dy, b), op("Neg", op("Div", op("Mul", dy, y), b))


def _pow(a: Value, b: Value, y: Value, dy: Value) -> tuple[Value, Value]:
    lower = op("Pow", a, op("Sub", b, _number(1, b)))
    slope = op("Mul", op("CastLike", b, a), lower)
    # The power 0 is constant; at a = 0 the formula would give 0 times infinity.
    da = op("Mul", dy, op("Where", op("Equal", b, _number(0, b)), _number(0, a), slope))
    # The derivative with respect to b is 0 where a is not positive: log(1) replaces log(a).
    positive = op("Greater", a, _number(0, a))
    safe = op("Where", positive, a, _number(1, a))
    db = op("CastLike", op("Mul", dy, op("Mul", y, op("Log", safe))), b)
    return da, db


def _positive(x: Value) -> Value:
    return op("CastLike", op("Greater", x, _number(0, x)), x)


def _leaky(of: Vjp) -> Sequence[OptionalValue]:
    x, dy = of.input(0), of.grad
    alpha = _number(float(attributes(of.node)["alpha"]), x)
    slope = op("Where", op("Less", x, _number(0, x)), alpha, _number(1, x))
    return [op("Mul", dy, slope)]


def _minmax(of: Vjp) -> Sequence[OptionalValue]:
    dy, rest = of.grad, None
    found: list[OptionalValue] = []
    for value in map(
        _present, of.node.inputs
    ):  # of equal inputs only the first gets the derivative
        mine = op("Equal", value, of.output)
        if rest is not None:
            mine = op("And", mine, rest)
        rest = op("Not", mine) if rest is None else op("And", rest, op("Not", mine))
        found.append(sum_to(op("Mul", dy, op("CastLike", mine, dy)), value))
    return found


def _sum(of: Vjp) -> Sequence[OptionalValue]:
    dy = of.grad
    if of.node.op_type == "Mean":
        dy = op("Div", dy, _number(len(of.node.inputs), dy))
    return [sum_to(dy, _present(value)) for value in of.node.inputs]


def _swap(value: Value) -> Value:
    """Return a value with its last two axes exchanged.

    Raises:
        UnsupportedOpError: its rank is unknown.
    """
    rank = value.type.rank if isinstance(value.type, TensorType) else None
    if rank is None:
        raise UnsupportedOpError("the derivative of MatMul needs the ranks of its inputs")
    perm = list(range(rank))
    perm[-2:] = [rank - 1, rank - 2]
    return op("Transpose", value, perm=perm)


def _matmul(of: Vjp) -> Sequence[OptionalValue]:
    a, b, dy = of.input(0), of.input(1), of.grad
    ranks = [v.type.rank if isinstance(v.type, TensorType) else None for v in (a, b)]
    if 1 in ranks:
        # A vector becomes a matrix of one row (left) or column (right); the axis is removed below.
        wide_a = op("Unsqueeze", a, [0]) if ranks[0] == 1 else a
        wide_b = op("Unsqueeze", b, [1]) if ranks[1] == 1 else b
        axes = [k for k, rank in zip((-2, -1), ranks, strict=True) if rank == 1]
        wide = op("Unsqueeze", dy, axes)
    else:
        wide_a, wide_b, wide = a, b, dy
    da = op("MatMul", wide, _swap(wide_b))
    db = op("MatMul", _swap(wide_a), wide)
    if ranks[0] == 1:
        da = op("Squeeze", sum_to(da, wide_a), [0])
    if ranks[1] == 1:
        db = op("Squeeze", sum_to(db, wide_b), [1])
    return [sum_to(da, a), sum_to(db, b)]


def _gemm(of: Vjp) -> Sequence[OptionalValue]:
    options = attributes(of.node)
    a, b, dy = of.input(0), of.input(1), of.grad
    left, right = int(options["transA"]), int(options["transB"])
    scaled = op("Mul", dy, _number(float(options["alpha"]), dy))
    # dA is dC B^T for C = A B. If A is transposed, the derivative of its stored form is the
    # transpose of that, which is a product with exchanged operands.
    if left:
        da = op("Gemm", b, scaled, transA=right, transB=1)
    else:
        da = op("Gemm", scaled, b, transB=1 - right)
    if right:
        db = op("Gemm", scaled, a, transA=1, transB=left)
    else:
        db = op("Gemm", a, scaled, transA=1 - left)
    if len(of.node.inputs) < 3 or of.node.inputs[2] is None:
        return [da, db]
    return [da, db, sum_to(op("Mul", dy, _number(float(options["beta"]), dy)), of.node.inputs[2])]


def _reshaped(of: Vjp) -> Sequence[OptionalValue]:
    return [op("Reshape", of.grad, op("Shape", of.input(0)), allowzero=1)]


def _expand(of: Vjp) -> Sequence[OptionalValue]:
    return [sum_to(of.grad, of.input(0))]


def _transpose(of: Vjp) -> Sequence[OptionalValue]:
    perm = of.node.attrs.get("perm")
    if perm is None:
        return [op("Transpose", of.grad)]
    return [op("Transpose", of.grad, perm=[int(k) for k in np.argsort(perm)])]


def _reduce(of: Vjp) -> Sequence[OptionalValue]:
    x, dy, y = of.input(0), of.grad, of.output
    axes: Any = of.node.inputs[1] if len(of.node.inputs) > 1 else of.node.attrs.get("axes")
    options = attributes(of.node)
    noop = int(options.get("noop_with_empty_axes", 0))
    if axes is None and noop:
        return [dy]
    if not options["keepdims"]:
        if axes is None:
            dy = op("Reshape", dy, op("ConstantOfShape", op("Shape", op("Shape", x)), value=_ONE))
        elif isinstance(axes, Value) and _may_be_empty(axes):
            # Empty axes mean all or none, so that only a reduction with all axes tells the shape.
            whole = op("ReduceSum", x, axes, keepdims=1, noop_with_empty_axes=noop)
            dy = op("Reshape", dy, op("Shape", whole))
        else:
            dy = op("Unsqueeze", dy, axes if isinstance(axes, Value) else list(axes))
    if of.node.op_type == "ReduceMean":
        count = op("Div", op("Size", x), op("Size", y))
        dy = op("Div", dy, op("CastLike", count, dy))
    return [op("Expand", dy, op("Shape", x))]


def _may_be_empty(axes: Value) -> bool:
    shape = axes.type.shape if isinstance(axes.type, TensorType) else None
    return not shape or not isinstance(shape[0], int) or shape[0] == 0


_ONE = np.array([1], np.int64)


def _concat(of: Vjp) -> Sequence[OptionalValue]:
    axis = int(of.node.attrs.get("axis", 1))
    lengths = [op("Gather", op("Shape", _present(v)), [axis], axis=0) for v in of.node.inputs]
    if len(lengths) == 1:
        return [of.grads[0]]
    parts: Sequence[Value] = operator("Split")(
        of.grad, op("Concat", *lengths, axis=0), axis=axis, outputs=len(lengths)
    )
    return parts


def _split(of: Vjp) -> Sequence[OptionalValue]:
    # Outputs that the target does not depend on have no derivative, but Concat needs their place.
    filled = [
        zeros_like(y) if g is None else g for y, g in zip(of.node.outputs, of.grads, strict=True)
    ]
    return [op("Concat", *filled, axis=int(of.node.attrs.get("axis", 0)))]


def _softmax(of: Vjp) -> Sequence[OptionalValue]:
    # Softmax then normalized over all axes from its own on.
    if is_before(of.node, 13):
        raise UnsupportedOpError(
            f"the derivative of {of.node.op_type} before opset 13 is not defined"
        )
    y, dy, axis = of.output, of.grad, int(attributes(of.node)["axis"])
    if of.node.op_type == "LogSoftmax":
        total = op("ReduceSum", dy, [axis])
        return [op("Sub", dy, op("Mul", op("Exp", y), total))]
    total = op("ReduceSum", op("Mul", dy, y), [axis])
    return [op("Mul", y, op("Sub", dy, total))]


def _where(of: Vjp) -> Sequence[OptionalValue]:
    condition, a, b = map(_present, of.node.inputs)
    dy = of.grad
    zeros = zeros_like(dy)
    da = op("Where", condition, dy, zeros)
    return [None, sum_to(da, a), sum_to(op("Where", condition, zeros, dy), b)]


def _gather(of: Vjp) -> Sequence[OptionalValue]:
    x, indices, dy = of.input(0), of.input(1), of.grad
    if int(of.node.attrs.get("axis", 0)) != 0:
        raise UnsupportedOpError("the derivative of Gather is defined along axis 0 only")
    rows = op("Cast", op("Unsqueeze", indices, [-1]), to=ONNX_DTYPE["int64"])
    # An index may appear several times; its rows' derivatives are added.
    return [op("ScatterND", zeros_like(x), rows, dy, reduction="add"), None]


def _cast(of: Vjp) -> Sequence[OptionalValue]:
    """Return the derivative in the input's dtype; none of a result that is no float."""
    result = of.output.type
    if isinstance(result, TensorType) and result.dtype not in FLOATS:
        return [None]
    return [op("CastLike", of.grad, of.input(0))]


def _dropout(of: Vjp) -> Sequence[OptionalValue]:
    """Return the derivative of Dropout: in training the mask divided by ``1 - ratio``.

    Raises:
        UnsupportedOpError: The node may train and has no output for its mask.
    """
    inputs = (*of.node.inputs, None, None)
    ratio, training = inputs[1:3]
    if training is None:
        return [of.grads[0]]
    if len(of.node.outputs) < 2:
        raise UnsupportedOpError(
            f"the derivative of Dropout {of.node.name!r} in training needs its mask; give the node "
            "a second output"
        )
    x, dy = of.input(0), of.grad
    share = _number(0.5, x) if ratio is None else op("CastLike", ratio, x)
    scale = op("Where", training, op("Reciprocal", _one_minus(share)), _number(1, x))
    return [op("Mul", op("Mul", dy, op("CastLike", of.node.outputs[1], dy)), scale)]


def _pass_on(of: Vjp) -> Sequence[OptionalValue]:
    return [of.grads[0]]


def _global_pool(of: Vjp) -> Sequence[OptionalValue]:
    x, y, dy = of.input(0), of.output, of.grad
    count = op("CastLike", op("Div", op("Size", x), op("Size", y)), dy)
    return [op("Expand", op("Div", dy, count), op("Shape", x))]


def _erf(x: Value, y: Value) -> Value:
    gaussian = op("Exp", op("Neg", op("Mul", x, x)))
    return op("Mul", gaussian, _number(2 / np.sqrt(np.pi), x))


def _one_minus(x: Value) -> Value:
    return op("Sub", _number(1, x), x)


RULES: Mapping[str, Rule] = {
    "Identity": _pass_on,
    "Dropout": _dropout,
    "Neg": _unary(lambda x, y: _number(-1, x)),
    "Exp": _unary(lambda x, y: y),
    "Log": _unary(lambda x, y: op("Reciprocal", x)),
    "Sqrt": _unary(lambda x, y: op("Div", _number(0.5, x), y)),
    "Reciprocal": _unary(lambda x, y: op("Neg", op("Mul", y, y))),
    "Sin": _unary(lambda x, y: op("Cos", x)),
    "Cos": _unary(lambda x, y: op("Neg", op("Sin", x))),
    "Tanh": _unary(lambda x, y: _one_minus(op("Mul", y, y))),
    "Sigmoid": _unary(lambda x, y: op("Mul", y, _one_minus(y))),
    "Softplus": _unary(lambda x, y: op("Sigmoid", x)),
    "Relu": _unary(lambda x, y: _positive(x)),
    "Abs": _unary(lambda x, y: op("Sign", x)),
    "Erf": _unary(_erf),
    "LeakyRelu": _leaky,
    "Add": _binary(lambda a, b, y, dy: (dy, dy)),
    "Sub": _binary(lambda a, b, y, dy: (dy, op("Neg", dy))),
    "Mul": _binary(lambda a, b, y, dy: (op("Mul", dy, b), op("Mul", dy, a))),
    "Div": _binary(_div),
    "Pow": _binary(_pow),
    "Max": _minmax,
    "Min": _minmax,
    "Sum": _sum,
    "Mean": _sum,
    "MatMul": _matmul,
    "Gemm": _gemm,
    "Reshape": _reshaped,
    "Flatten": _reshaped,
    "Squeeze": _reshaped,
    "Unsqueeze": _reshaped,
    "Expand": _expand,
    "Transpose": _transpose,
    "ReduceSum": _reduce,
    "ReduceMean": _reduce,
    "Concat": _concat,
    "Split": _split,
    "Softmax": _softmax,
    "LogSoftmax": _softmax,
    "Where": _where,
    "Gather": _gather,
    "Cast": _cast,
    "CastLike": _cast,
    "GlobalAveragePool": _global_pool,
}

# Operators whose results are piecewise constant functions of their inputs: their derivative is 0.
CONSTANT = frozenset(
    {
        "ArgMax",
        "ArgMin",
        "Ceil",
        "Constant",
        "ConstantOfShape",
        "Equal",
        "Floor",
        "Greater",
        "GreaterOrEqual",
        "IsInf",
        "IsNaN",
        "Less",
        "LessOrEqual",
        "NonZero",
        "Not",
        "Round",
        "Shape",
        "Sign",
        "Size",
        "And",
        "Or",
        "Xor",
    }
)
