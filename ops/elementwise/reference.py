"""Elementwise operators for the REFERENCE device, where onnx.reference is inexact or fails.

Each function takes a node and the contents of its inputs, and returns those of its outputs.
"""

from __future__ import annotations

import functools
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
    dtype_of,
    numpy_dtype,
)
from subgraph.operators.reference import standard, variant
from subgraph.operators.requirements import decoded
from subgraph.operators.schema import is_before

_erf = np.frompyfunc(math.erf, 1, 1)


def erf(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the error function of each element, computed in float64 and rounded once."""
    x: Array = inputs[0]
    wide: Array = np.asarray(_erf(x.astype(np.float64)), object)
    return [wide.astype(np.float64).astype(x.dtype)]


def binary(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the result of a binary operator; before opset 7 ``axis`` aligns the second operand."""
    if not is_before(node, 7):
        return _binary(node, inputs)
    first, second = inputs
    if node.attrs.get("broadcast"):
        second = _aligned(first, second, node.attrs.get("axis"))
    elif first.shape != second.shape:
        raise ShapeError(
            f"shapes {first.shape} and {second.shape} differ and attribute broadcast is 0"
        )
    return _binary(variant(node, version=7, drop=tuple(node.attrs)), [first, second])


def _binary(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    if node.op_type == "Pow" and all(each.dtype.kind == "i" for each in inputs):
        return [_integer_power(*inputs)]
    found = elementwise(node, inputs)
    if node.op_type != "Pow":
        return found
    # For a scalar exponent 0.5 NumPy computes sqrt, which differs from C's pow at -0 and -inf.
    base, exponent = inputs
    special = (exponent == 0.5) & ((base == 0) | (base == -math.inf))
    return [np.where(special, np.abs(base), found[0])]


def bit_shift(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return shifted integers; onnx.reference loops over elements in Python."""
    is_left = decoded(node.attrs["direction"]) == "LEFT"
    return [np.left_shift(*inputs) if is_left else np.right_shift(*inputs)]


# Functions of NumPy, and the kinds of dtypes for which their results are those of the operators.
# Others, and dtypes that NumPy lacks, are left to onnx.reference.
_NUMPY: dict[str, tuple[np.ufunc, str]] = {
    "Add": (np.add, "fi"),
    "And": (np.logical_and, "b"),
    "Ceil": (np.ceil, "f"),
    "Div": (np.divide, "f"),
    "Equal": (np.equal, "fib"),
    "Floor": (np.floor, "f"),
    "GreaterOrEqual": (np.greater_equal, "fi"),
    "Less": (np.less, "fi"),
    "LessOrEqual": (np.less_equal, "fi"),
    "Max": (np.maximum, "fi"),
    "Min": (np.minimum, "fi"),
    "Mul": (np.multiply, "fi"),
    "Neg": (np.negative, "fi"),
    "Not": (np.logical_not, "b"),
    "Reciprocal": (np.reciprocal, "f"),
    "Sqrt": (np.sqrt, "f"),
    "Sub": (np.subtract, "fi"),
    "Sum": (np.add, "fi"),
}


def elementwise(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return NumPy's result where that is the operator's, else that of onnx.reference."""
    function, kinds = _NUMPY.get(node.op_type, (None, ""))
    x: Array = inputs[0]
    if node.op_type == "Div" and x.dtype.kind == "i":
        y: Array = inputs[1]
        # ONNX rounds integer quotients towards zero, NumPy down. They agree for positive numbers.
        if (not x.size or x.min() >= 0) and (not y.size or y.min() > 0):
            return [x // y]
    if function is None or x.dtype.kind not in kinds:
        return standard(node, inputs)
    return [function(x) if function.nin == 1 else functools.reduce(function, inputs)]


def where(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return elements of the second input where the first is true, else those of the third."""
    return [np.where(*inputs)]


def _integer_power(base: Array, exponent: Array) -> Array:
    """Return integer powers; negative exponents, which NumPy refuses, truncate to 0, 1 or -1."""
    sign = np.where(exponent & 1, -1, 1)
    below = np.where(base == 1, 1, np.where(base == -1, sign, 0))
    powers: Array = np.power(base, np.maximum(exponent, 0))
    return np.where(exponent < 0, below, powers).astype(base.dtype)


def _aligned(first: Array, second: Array, axis: int | None) -> Array:
    """Append dimensions of size 1 to ``second``, so that it begins at ``axis`` of ``first``."""
    if axis is None:
        return second
    start = axis + first.ndim if axis < 0 else axis
    behind = first.ndim - start - second.ndim
    if behind < 0:
        raise ShapeError(f"axis {axis}: {second.shape} does not fit into {first.shape}")
    return second.reshape(second.shape + (1,) * behind)


def prelu(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the leaky ReLU; before opset 7 a slope of rank 1 has a number per channel."""
    x: Array = inputs[0]
    slope: Array = inputs[1]
    if is_before(node, 7) and slope.size > 1 and slope.ndim == 1 and x.ndim > 2:
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    result: Array = np.where(x < x.dtype.type(0), x * slope, x)
    return [result.astype(x.dtype)]


def cast(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input in another dtype; opset 1 names it ("FLOAT"), later opsets number it."""
    to = node.attrs.get("to")
    if isinstance(to, str):
        from onnx import TensorProto

        return standard(variant(node, version=6, to=int(TensorProto.DataType.Value(to))), inputs)
    plain = _plain_cast(inputs[0], numpy_dtype(DTYPE_OF_ONNX[int(to or 0)]))
    return standard(node, inputs) if plain is None else [plain]


def _plain_cast(x: Array, target: np.dtype[Any]) -> Array | None:
    """Return a cast of numbers to numbers in range; None for others."""
    if x.dtype.kind not in "biuf" or target.kind not in "iuf":
        return None
    if target.isbuiltin != 1 or x.dtype.isbuiltin != 1:
        return None  # ml_dtypes, such as float8, saturate
    if target.kind in "iu" and x.size and not np.can_cast(x.dtype, target, "safe"):
        # The reference converts numbers out of range; NaN fails both comparisons.
        bounds = np.iinfo(target)
        if not (x.min() >= bounds.min and x.max() < bounds.max):
            return None
    return x.astype(target)


def clip(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the clipped input; opset 1 is opset 6 with one attribute more, ``consumed_inputs``."""
    if node.version == 1:
        node = variant(node, version=6, drop=("consumed_inputs",))
    bounds = [None if bound is None else bound.reshape(()) for bound in inputs[1:]]
    return standard(node, [inputs[0], *bounds])


def cast_like(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the first input in the dtype of the second."""
    to = ONNX_DTYPE[dtype_of(inputs[1])]
    cast = Node(
        "Cast",
        node.inputs[:1],
        outputs=1,
        name=node.name,
        version=node.version,
        attrs=node.attrs | {"to": to},
    )
    return standard(cast, inputs[:1])


def mean(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return the mean with broadcasting; onnx.reference adds in place, which cannot broadcast."""
    total = inputs[0]
    for other in inputs[1:]:
        total = total + other
    return [np.asarray(total / len(inputs)).astype(inputs[0].dtype)]


def softsign(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return x / (1 + |x|); onnx.reference fails for rank 0."""
    x = inputs[0]
    return [np.asarray(x / (1 + np.abs(x))).astype(x.dtype)]
