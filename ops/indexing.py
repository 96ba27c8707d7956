"""Indexing: shape rules, and corrections of the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import reference, shape_rule
from subgraph.types import TensorType, ValueType

from .elementwise import Array, Types, Values, tensor
from .strides import normal_axis


@shape_rule("Gather")
def gather(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Put the shape of the indices in the place of the axis."""
    x, indices = tensor(types[0]), tensor(types[1])
    if x is None or x.shape is None or indices is None or indices.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    axis = normal_axis(int(node.attrs.get("axis", 0)), len(x.shape))
    return [TensorType(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))]


@shape_rule("GatherElements")
def as_many_as_indices(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give as many elements as there are indices."""
    x, indices = tensor(types[0]), tensor(types[1])
    if x is None:
        return [None]
    if indices is None or indices.shape is None:
        return [TensorType(x.dtype)]
    if x.rank is not None and x.rank != indices.rank:
        raise ShapeError(f"indices of rank {indices.rank} for a tensor of rank {x.rank}")
    return [TensorType(x.dtype, indices.shape)]


@shape_rule("Scatter", "ScatterElements", "ScatterND", "Trilu", "ReverseSequence")
def like_the_first(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input."""
    x = tensor(types[0])
    if node.op_type == "Trilu" and x is not None and x.rank is not None and x.rank < 2:
        raise ShapeError(f"a triangle of rank {x.rank}; it takes two dimensions or more")
    return [x]


@shape_rule("GatherND")
def gather_nd(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Put the shape of the indices, their last dimension left out, before that of a slice."""
    x, indices = tensor(types[0]), tensor(types[1])
    if x is None or x.shape is None or indices is None or indices.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    depth = indices.shape[-1] if indices.shape else 0
    first = int(node.attrs.get("batch_dims", 0))
    if not isinstance(depth, int):
        return [TensorType(x.dtype)]
    if not indices.shape or first + depth > len(x.shape):
        raise ShapeError(f"index tuples of {depth} into a tensor of rank {len(x.shape)}")
    return [TensorType(x.dtype, (*indices.shape[:-1], *x.shape[first + depth :]))]


@reference("GatherElements")
def gather_elements(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Take elements where the indices' shape is smaller too; onnx.reference needs it equal."""
    x: Array = inputs[0]
    indices: Array = inputs[1]
    axis = normal_axis(int(node.attrs.get("axis", 0)), x.ndim)
    inside = tuple(
        slice(None) if d == axis else slice(0, size) for d, size in enumerate(indices.shape)
    )
    return [np.take_along_axis(x[inside], indices.astype(np.int64), axis)]


@reference("OneHot")
def one_hot(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Mark indices; onnx.reference takes no depth of rank 1 and no values of bool."""
    indices: Array = np.asarray(inputs[0]).astype(np.int64)
    depth = int(np.asarray(inputs[1]).reshape(-1)[0])
    values: Array = inputs[2]
    axis = normal_axis(int(node.attrs.get("axis", -1)), indices.ndim + 1)
    wrapped = np.where(indices < 0, indices + depth, indices)
    shape = [1] * (indices.ndim + 1)
    shape[axis] = depth
    marks = np.expand_dims(wrapped, axis) == np.arange(depth).reshape(shape)
    result: Array = np.full(marks.shape, values[0], values.dtype)
    result[marks] = values[1]
    return [result]
