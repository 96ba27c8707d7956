"""Reductions: requirements, types, and the reference where onnx.reference differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, Dim, TensorType, ValueType
from subgraph.operators.batch_axes import BatchCall, except_axes
from subgraph.operators.operator import declare
from subgraph.operators.reference import attributes, standard
from subgraph.operators.requirements import (
    Tensor,
    int_list,
    require,
    require_axes,
    require_axis,
    require_single,
)
from subgraph.ops.elementwise.op import Types, Values, first_type, tensor
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


def _axes(node: Node, values: Values) -> list[int] | None:
    """Return the axes of a Reduce operator, [] for omitted ones; None if they are not known."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        found = values[1]
        return None if found is None else [int(axis) for axis in found.reshape(-1)]
    return [int(axis) for axis in node.attrs.get("axes") or ()]


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
    axes = _axes(node, values)
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


# Operators whose sums of integers are taken in float64.
_REAL = ("ReduceL2", "ReduceLogSum", "ReduceMean")


_NUMPY: dict[str, Callable[..., Any]] = {
    "ReduceMax": np.max,
    "ReduceMin": np.min,
    "ReduceProd": np.prod,
}


def reduced(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return the largest or smallest elements, or products; NumPy has no maximum of nothing."""
    x: Array = inputs[0]
    plain = x.ndim and x.size and x.dtype.kind in "fi"
    if not plain or node.attrs.get("noop_with_empty_axes", 0):
        return with_scalars(node, inputs)
    axes = node.attrs.get("axes")
    if len(inputs) > 1 and inputs[1] is not None:
        axes = inputs[1].reshape(-1).tolist()
    keeps = bool(node.attrs.get("keepdims", 1))
    found = _NUMPY[node.op_type](x, axis=tuple(axes) if axes else None, keepdims=keeps)
    return [np.asarray(found).astype(x.dtype)]


def with_scalars(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Reduce a scalar as a vector of one; onnx.reference fails for a scalar with axes."""
    x: Array = inputs[0]
    if x.ndim:
        return list(standard(node, inputs))
    found: Array = standard(node, [x.reshape(1), *inputs[1:]])[0]
    return [np.asarray(found).reshape(())]


def in_dtype_of_input(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return results of the input's dtype; onnx.reference returns NumPy's wider one of integers.

    Of integers it raises for logarithms, which opsets up to 26 allow, and means and norms are wrong
    where the sum exceeds the dtype.
    """
    x: Array = inputs[0]
    if node.op_type in _REAL and x.dtype.kind in "iu":
        inputs = [x.astype(np.float64), *inputs[1:]]
    return [np.asarray(y).astype(x.dtype) for y in with_scalars(node, inputs)]


def cumulative(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Accumulate along an axis; onnx.reference raises for an axis of shape [1] and for rank 0."""
    x, axis = inputs
    found: Array = standard(node, [x.reshape(x.shape or (1,)), axis.reshape(())])[0]
    return [found.reshape(x.shape)]


def log_sum_exp(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Return log(sum(exp(x))); onnx.reference fails for rank 0."""
    x: Array = inputs[0]
    if not x.ndim:  # a scalar counts as one axis of one element
        return [np.asarray(log_sum_exp(node, [x.reshape(1), *inputs[1:]])[0]).reshape(())]
    options = attributes(node)
    stated = inputs[1] if len(inputs) > 1 and inputs[1] is not None else options.get("axes")
    listed = () if stated is None else tuple(int(axis) for axis in np.ravel(stated))
    axes = listed or None
    if axes is None and options.get("noop_with_empty_axes", 0):
        axes = ()
    wide = x.astype(np.float64)
    top = np.max(wide, axis=axes, keepdims=True, initial=-np.inf)
    top = np.where(np.isfinite(top), top, 0.0)
    total = np.log(np.sum(np.exp(wide - top), axis=axes, keepdims=True)) + top
    if not options.get("keepdims", 1):
        total = total.squeeze(axis=axes)
    return [np.asarray(total).astype(x.dtype)]


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
    compute=cumulative,
    batch=except_axes(_cumulative_axis),
)
declare(
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceMean", "ReduceSumSquare"),
    requires=reduction_operands,
    infer=reduction_types,
    compute=in_dtype_of_input,
    speculatable=True,
    batch=_of_reductions,
)
declare(
    "ReduceLogSumExp",
    requires=reduction_operands,
    infer=reduction_types,
    compute=log_sum_exp,
    batch=_of_reductions,
)
declare(
    *("ReduceMax", "ReduceMin", "ReduceProd"),
    requires=reduction_operands,
    infer=reduction_types,
    compute=reduced,
    batch=_of_reductions,
)
declare(
    "ReduceSum",
    requires=reduction_operands,
    infer=reduction_types,
    compute=with_scalars,
    speculatable=True,
    batch=_of_reductions,
)
