"""Reductions: requirements, types, and the reference where onnx.reference differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, Dim, TensorType, ValueType
from subgraph.operators.batch_axes import BatchCall, except_axes
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard
from subgraph.operators.requirements import (
    Tensor,
    int_list,
    require,
    require_axes,
    require_axis,
    require_single,
)
from subgraph.ops.elementwise.op import Types, Values, first_type, tensor
from subgraph.ops.movement.types import input_or_attribute
from subgraph.ops.shared.half_precision import in_float32, is_half
from subgraph.ops.shared.strides import normal_axis


def reduction_operands(node: Node, x: Tensor, axes: Tensor | None = None) -> None:
    """Raise ShapeError unless each axis exists, and is named once (ONNX, 1 to 20).

    Args:
        node: A Reduce operator; old versions have the axes as an attribute.
        x: The input.
        axes: The axes, int64; None or empty: all (none with ``noop_with_empty_axes``).
    """
    require_axes(x.rank, int_list(node, "axes", axes) or [])


def argminmax_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axis exists and has elements (ONNX, 1 to 13)."""
    axis = require_axis(node, x.rank)
    require(x.rank == 0 or x.shape[axis] >= 1, "axis {} has no elements", axis)


def cumulative_operands(node: Node, x: Tensor, axis: Tensor) -> None:
    """Raise ShapeError unless the axis is one number and exists (ONNX, 11 to 26).

    Args:
        node: A CumSum or CumProd.
        x: The input.
        axis: The axis, a scalar or of shape [1].
    """
    require_single("axis", axis, "int64", "int32")
    require_axes(max(x.rank, 1), int_list(node, "axis", axis) or [])


def reduction_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type without the reduced axes, or with size 1 for them.

    Args:
        node: A Reduce operator; ``keepdims``, axes in old versions.
        types: Of the input.
        values: The axes as second one, if they are an input and known.
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    axes = input_or_attribute(node, values, 1, "axes")
    keep = bool(node.attrs.get("keepdims", 1))
    if axes is None:
        return [TensorType(x.dtype, [None] * len(x.shape) if keep else None)]
    rank = len(x.shape)
    if not axes and not node.attrs.get("noop_with_empty_axes", 0):
        axes = list(range(rank))
    reduced = {normal_axis(axis, rank) for axis in axes}
    return [TensorType(x.dtype, _without(x.shape, reduced, keep))]


def _without(shape: Sequence[Dim], axes: set[int], keep: bool) -> list[Dim]:
    """Return a shape without some axes, or (``keep``) with size 1 for them."""
    return [1 if d in axes else n for d, n in enumerate(shape) if keep or d not in axes]


def argminmax_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return int64 of the shape without the axis, or with size 1 for it.

    Args:
        node: An ArgMax or ArgMin; ``axis``, ``keepdims``.
        types: Of the input.
        values: Not used.
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [TensorType("int64")]
    axis = normal_axis(int(node.attrs.get("axis", 0)), len(x.shape))
    keep = bool(node.attrs.get("keepdims", 1))
    return [TensorType("int64", _without(x.shape, {axis}, keep))]


def _log_sum_exp(x: Array, axis: tuple[int, ...] | None, keep: bool) -> Array:
    wide = x.astype(np.float64)
    top = np.max(wide, axis=axis, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    total: Array = np.sum(np.exp(wide - top), axis=axis, keepdims=keep)
    return np.log(total) + top.reshape(np.shape(total))


# Each operator as ``f(x, axes, keep)``; the result may have a wider dtype than x.
_REDUCTIONS: dict[str, Callable[[Any, tuple[int, ...] | None, bool], Any]] = {
    "ReduceL1": lambda x, axes, keep: np.sum(np.abs(x), axes, keepdims=keep),
    "ReduceL2": lambda x, axes, keep: np.sqrt(np.sum(np.square(x), axes, keepdims=keep)),
    "ReduceLogSum": lambda x, axes, keep: np.log(np.sum(x, axes, keepdims=keep)),
    "ReduceLogSumExp": _log_sum_exp,
    "ReduceMax": lambda x, axes, keep: np.max(x, axes, keepdims=keep),
    "ReduceMean": lambda x, axes, keep: np.mean(x, axes, x.dtype, keepdims=keep),
    "ReduceMin": lambda x, axes, keep: np.min(x, axes, keepdims=keep),
    "ReduceProd": lambda x, axes, keep: np.prod(x, axes, keepdims=keep),
    "ReduceSum": lambda x, axes, keep: np.sum(x, axes, keepdims=keep),
    "ReduceSumSquare": lambda x, axes, keep: np.sum(np.square(x), axes, keepdims=keep),
}
# Operators whose sums of integers are taken in float64: they may exceed the dtype.
_REAL = ("ReduceL2", "ReduceLogSum", "ReduceMean")


def reduced(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return the reduction over the node's axes, in the input's dtype; a scalar has axis 0.

    onnx.reference fails for a scalar with axes and for logarithms of integers, which opsets up to
    26 allow, returns wider dtypes of integers, and sums bfloat16 in bfloat16.
    """
    given: Array = inputs[0]
    x = given.reshape(given.shape or (1,))
    listed = inputs[1] if len(inputs) > 1 else node.attrs.get("axes")
    axes = () if listed is None else tuple(int(axis) for axis in np.ravel(listed))
    over = axes if axes or node.attrs.get("noop_with_empty_axes", 0) else None
    keep = bool(node.attrs.get("keepdims", 1))
    if not x.size and node.op_type in ("ReduceMax", "ReduceMin"):  # NumPy has none of nothing
        least, most = number_range(x.dtype)
        shape = np.sum(x, over, keepdims=keep).shape
        return [np.full(shape, least if node.op_type == "ReduceMax" else most, x.dtype)]
    if is_half(x):
        x = x.astype(np.float32)
    elif node.op_type in _REAL and x.dtype.kind in "iu":
        x = x.astype(np.float64)
    found = np.asarray(_REDUCTIONS[node.op_type](x, over, keep)).astype(given.dtype)
    return [found if given.ndim else found.reshape(())]


def number_range(dtype: np.dtype[Any]) -> tuple[float, float]:
    """Return the least and the greatest number of a dtype."""
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    return (0, 1) if dtype.kind == "b" else (-np.inf, np.inf)


def with_scalars(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Search a scalar as a vector of one; onnx.reference fails for a scalar with an axis."""
    x: Array = inputs[0]
    if x.ndim:
        return list(standard(node, inputs))
    found: Array = standard(node, [x.reshape(1), *inputs[1:]])[0]
    return [np.asarray(found).reshape(())]


def cumulative(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Accumulate along an axis; onnx.reference raises for an axis of shape [1] and for rank 0."""
    x, axis = inputs
    found: Array = standard(node, [x.reshape(x.shape or (1,)), axis.reshape(())])[0]
    return [found.reshape(x.shape)]


def _reduced_axes(call: BatchCall) -> list[int] | None:
    """Return the axes along which a Reduce operator computes."""
    axes = call.integers(1, "axes")
    if axes == [] and not call.node.attrs.get("noop_with_empty_axes", 0):
        return list(range(len(call.shapes[0])))
    return axes


def _cumulative_axis(call: BatchCall) -> list[int] | None:
    return call.integers(1, "axis")


def _indexed_axis(call: BatchCall) -> list[int]:
    return [int(call.node.attrs.get("axis", 0))]


_of_reductions = except_axes(_reduced_axes)


# The operators of this family, each in all its versions.
declare(
    "ArgMax",
    "ArgMin",
    requires=argminmax_operands,
    infer=argminmax_types,
    compute=with_scalars,
    batch=except_axes(_indexed_axis),
)
declare(
    "CumProd",
    "CumSum",
    requires=cumulative_operands,
    infer=first_type,
    compute=in_float32(cumulative),
    batch=except_axes(_cumulative_axis),
)
declare(
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceMean", "ReduceSum", "ReduceSumSquare"),
    requires=reduction_operands,
    infer=reduction_types,
    compute=reduced,
    speculatable=True,
    batch=_of_reductions,
)
declare(
    *("ReduceLogSumExp", "ReduceMax", "ReduceMin", "ReduceProd"),
    requires=reduction_operands,
    infer=reduction_types,
    compute=reduced,
    batch=_of_reductions,
)
