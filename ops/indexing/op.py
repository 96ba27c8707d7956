"""Indexing: requirements, output types, and reference semantics where onnx.reference errs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchAxis, BatchCall, along
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard
from subgraph.operators.requirements import (
    Tensor,
    is_known,
    require,
    require_axis,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
    require_single,
    require_within,
)
from subgraph.operators.schema import is_before
from subgraph.ops.elementwise.op import Types, Values, first_type, tensor
from subgraph.ops.movement.operands import known_elements
from subgraph.ops.shared.half_precision import in_float32
from subgraph.ops.shared.strides import normal_axis

_INDICES = ("int32", "int64")
_REDUCTIONS = ("none", "add", "mul", "max", "min")


def gather_operands(node: Node, x: Tensor, indices: Tensor) -> None:
    """Raise ShapeError unless indices are integers and the axis exists (Gather, opsets 1 to 13).

    Args:
        node: The Gather node.
        x: The data.
        indices: Indices along the axis, of any shape; negative ones count from the end.
    """
    require_dtype("indices", indices, *_INDICES)
    require(x.rank >= 1, "the data is a scalar")
    axis = require_axis(node, x.rank)
    require_index_range(indices, x.shape[axis], f"along axis {axis}")


def gather_elements_operands(node: Node, x: Tensor, indices: Tensor) -> None:
    """Raise ShapeError unless the indices fit into the data (GatherElements, opsets 11 to 13).

    Args:
        node: The GatherElements node.
        x: The data.
        indices: Indices along the axis; no larger than the data in any other dimension.
    """
    require_dtype("indices", indices, *_INDICES)
    _require_inside(node, x, indices)


def scatter_elements_operands(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> None:
    """Raise ShapeError unless the indices fit into the data and have an update each (9 to 18).

    Args:
        node: A Scatter or ScatterElements node.
        x: The data.
        indices: Indices along the axis; no larger than the data in any other dimension.
        updates: An element for each index.
    """
    require_dtype("indices", indices, *_INDICES)
    require_dtype("updates", updates, x.dtype)
    require_shape("updates", updates, indices.shape, "one for each index")
    require_choice(node, "reduction", "none", *_REDUCTIONS)
    _require_inside(node, x, indices)


def _require_inside(node: Node, x: Tensor, indices: Tensor) -> None:
    """Require that indices fit into the data in all dimensions but the axis, and are in range."""
    require(x.rank >= 1, "the data is a scalar")
    axis = require_axis(node, x.rank)
    require(indices.rank == x.rank, "indices have rank {}, the data {}", indices.rank, x.rank)
    for d, (count, size) in enumerate(zip(indices.shape, x.shape, strict=True)):
        require(
            d == axis or count <= size,
            "indices have shape {}, which is larger than the data {} in dimension {}",
            list(indices.shape),
            list(x.shape),
            d,
        )
    require_index_range(indices, x.shape[axis], f"along axis {axis}")


def require_index_range(indices: Tensor, size: int, where: str) -> None:
    """Require that constant indices lie in [-size, size).

    Indices that are computed at run time are checked by the kernels.

    Args:
        indices: The indices.
        size: Elements of the dimension that they index.
        where: Names that dimension in the error.

    Raises:
        ShapeError: An index lies outside, or there are indices into a dimension of size 0.
    """
    require(size >= 1 or indices.size <= 0, "{} indices into no elements {}", indices.size, where)
    require_within("indices", indices, -size, size - 1)


def gather_nd_operands(node: Node, x: Tensor, indices: Tensor) -> None:
    """Raise ShapeError unless index tuples fit the data and its batches (opsets 11 to 13).

    Args:
        node: The GatherND node.
        x: The data.
        indices: Index tuples along the last dimension, behind the batch dimensions.
    """
    require_dtype("indices", indices, "int64")
    batches = _index_tuples(node, x, indices)
    require(
        all(a == b for a, b in zip(x.shape[:batches], indices.shape[:batches], strict=True)),
        "batch dimensions of the data {} and the indices {} differ",
        list(x.shape[:batches]),
        list(indices.shape[:batches]),
    )


def scatter_nd_operands(node: Node, x: Tensor, indices: Tensor, updates: Tensor) -> None:
    """Raise ShapeError unless each index tuple has a slice of the data (opsets 11 to 18).

    Args:
        node: The ScatterND node.
        x: The data.
        indices: Index tuples along the last dimension.
        updates: A slice of the data for each tuple.
    """
    require_dtype("indices", indices, "int64")
    require_dtype("updates", updates, x.dtype)
    require_choice(node, "reduction", "none", *_REDUCTIONS)
    _index_tuples(node, x, indices)
    depth = indices.shape[-1]
    if is_known(depth):
        shape = (*indices.shape[:-1], *x.shape[depth:])
        require_shape("updates", updates, shape, "a slice of the data for each index tuple")


def _index_tuples(node: Node, x: Tensor, indices: Tensor) -> int:
    """Return the number of batch dimensions, having checked the index tuples against the data."""
    require(x.rank >= 1 and indices.rank >= 1, "data or indices are a scalar")
    batches = node.attrs.get("batch_dims", 0)
    require(
        isinstance(batches, int) and 0 <= batches < min(x.rank, indices.rank),
        "batch_dims is {}, outside [0, {})",
        batches,
        min(x.rank, indices.rank),
    )
    depth = indices.shape[-1]
    require(
        depth >= 1 and depth <= x.rank - batches,
        "index tuples of {} into {} dimensions",
        depth,
        x.rank - batches,
    )
    for d in range(depth if is_known(depth) else 0):
        known = None if indices.known is None else indices.known[..., d]
        column = Tensor(indices.dtype, indices.shape[:-1], known)
        require_index_range(column, x.shape[batches + d], f"in place {d} of a tuple")
    return int(batches)


def one_hot_operands(node: Node, indices: Tensor, depth: Tensor, values: Tensor) -> None:
    """Require one depth and two values (ONNX OneHot, 9 to 11).

    Args:
        node: The node; ``axis`` is one of the result.
        indices: The indices that are on.
        depth: Size of the new axis, one number, not negative.
        values: The elements off and on, 1-D.
    """
    require_single("depth", depth)
    require(all(n >= 0 for n in known_elements(depth)), "depth is negative")
    require_shape("values", values, (2,), "the elements off and on the index")
    require_axis(node, indices.rank + 1, -1)


def tensor_scatter_operands(
    node: Node, cache: Tensor, update: Tensor, first: Tensor | None = None
) -> None:
    """Raise ShapeError unless the update fits into the cache for each sample (ONNX, 24).

    Args:
        node: The TensorScatter node; ``axis`` is that of the positions (default -2), not the first.
        cache: The cache, its first dimension the samples.
        update: As the cache, with at most as many positions.
        first: Position of the update's first entry for each sample [samples], int64; None: 0.
    """
    require(cache.rank >= 2, "past_cache has shape {}; it needs rank 2 or more", list(cache.shape))
    require_dtype("update", update, cache.dtype)
    axis = require_axis(node, cache.rank, default=-2)
    require(axis != 0, "axis is 0, the dimension of the samples")
    mode = require_choice(node, "mode", "linear", "linear", "circular")
    require_rank("update", update, cache.rank)
    count, capacity = update.shape[axis], cache.shape[axis]
    shape = (*cache.shape[:axis], count, *cache.shape[axis + 1 :])
    require_shape("update", update, shape, "that of the cache except along the axis")
    require(capacity >= count, "an update of {} positions, a cache of {}", count, capacity)
    require_dtype("write_indices", first, "int64")
    require_shape("write_indices", first, (cache.shape[0],), "one for each sample")
    if mode == "linear" and is_known(capacity) and is_known(count):
        require_within("write_indices", first, 0, capacity - count)


def gather(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the shape of the data with the axis replaced by the shape of the indices.

    Args:
        node: The Gather node.
        types: Types of data and indices, None while unknown.
        values: Contents of constant inputs; not read.
    """
    x, indices = tensor(types[0]), tensor(types[1])
    if x is None or x.shape is None or indices is None or indices.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    axis = normal_axis(int(node.attrs.get("axis", 0)), len(x.shape))
    return [TensorType(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]))]


def shape_of_indices(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the shape of the indices in the dtype of the data.

    Args:
        node: The GatherElements node; not read.
        types: Types of data and indices, None while unknown.
        values: Contents of constant inputs; not read.
    """
    x, indices = tensor(types[0]), tensor(types[1])
    if x is None:
        return [None]
    if indices is None or indices.shape is None:
        return [TensorType(x.dtype)]
    return [TensorType(x.dtype, indices.shape)]


def gather_nd(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the shape of the indices without its last dimension, followed by the shape of a slice.

    Args:
        node: The GatherND node.
        types: Types of data and indices, None while unknown.
        values: Contents of constant inputs; not read.
    """
    x, indices = tensor(types[0]), tensor(types[1])
    if x is None or x.shape is None or indices is None or indices.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    depth = indices.shape[-1]
    first = int(node.attrs.get("batch_dims", 0))
    if not isinstance(depth, int):
        return [TensorType(x.dtype)]
    return [TensorType(x.dtype, (*indices.shape[:-1], *x.shape[first + depth :]))]


def gather_elements(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Gather elements, also of indices smaller than the data: onnx.reference fails there."""
    x: Array = inputs[0]
    indices: Array = inputs[1]
    axis = normal_axis(int(node.attrs.get("axis", 0)), x.ndim)
    inside = tuple(
        slice(None) if d == axis else slice(0, size) for d, size in enumerate(indices.shape)
    )
    return [np.take_along_axis(x[inside], indices.astype(np.int64), axis)]


def wraps(node: Node) -> bool:
    """Return whether negative indices of a OneHot count from the end: from opset 11 on."""
    return not is_before(node, 11)


def one_hot_type(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the shape of the indices with the depth as a new axis, in the dtype of the values.

    Args:
        node: The OneHot node.
        types: Types of indices, depth and values, None while unknown.
        values: Contents of constant inputs: the depth may be among them.
    """
    indices, depth, marks = tensor(types[0]), values[1], tensor(types[2])
    if marks is None:
        return [None]
    if indices is None or indices.shape is None:
        return [TensorType(marks.dtype)]
    axis = normal_axis(int(node.attrs.get("axis", -1)), len(indices.shape) + 1)
    added = None if depth is None else int(depth.reshape(-1)[0])
    dims = [*indices.shape[:axis], added, *indices.shape[axis:]]
    return [TensorType(marks.dtype, dims)]


def one_hot(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Compute OneHot; onnx.reference takes no depth of rank 1 and no values of bool."""
    indices: Array = np.asarray(inputs[0]).astype(np.int64)
    depth = int(np.asarray(inputs[1]).reshape(-1)[0])
    values: Array = inputs[2]
    axis = normal_axis(int(node.attrs.get("axis", -1)), indices.ndim + 1)
    wrapped = np.where(indices < 0, indices + depth, indices) if wraps(node) else indices
    shape = [1] * (indices.ndim + 1)
    shape[axis] = depth
    marks = np.expand_dims(wrapped, axis) == np.arange(depth).reshape(shape)
    result: Array = np.full(marks.shape, values[0], values.dtype)
    result[marks] = values[1]
    return [result]


def gathered(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute Gather; the indices are in range."""
    data, indices = inputs
    return [np.take(data, indices, axis=int(node.attrs.get("axis", 0)))]


def gathered_nd(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute GatherND."""
    data, index = inputs
    if node.attrs.get("batch_dims", 0):
        return standard(node, inputs)
    return [data[tuple(np.moveaxis(index, -1, 0))]]


def scattered_nd(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute ScatterND."""
    data, index, updates = inputs
    if node.attrs.get("reduction", "none") != "none":
        return in_float32(standard)(node, inputs)
    result: Array = data.copy()
    result[tuple(np.moveaxis(index, -1, 0))] = updates
    return [result]


def scattered_elements(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute ScatterElements, which opset 9 calls Scatter."""
    data, index, updates = inputs
    if node.attrs.get("reduction", "none") != "none":
        return in_float32(standard)(node, inputs)
    index_arrays = list(np.ix_(*(range(size) for size in index.shape)))
    index_arrays[int(node.attrs.get("axis", 0))] = index
    result: Array = data.copy()
    result[tuple(index_arrays)] = updates
    return [result]


def _stated_axis(call: BatchCall, rank: int, default: int = 0) -> int:
    return normal_axis(int(call.node.attrs.get("axis", default)), rank)


def gather_batch(call: BatchCall) -> Sequence[Batch]:
    """The batch is in another axis of the data, or in the indices."""
    data, indices = call.axis_of(0), call.axis_of(1)
    axis = _stated_axis(call, len(call.shapes[0]))
    if indices is not None:
        return [indices.at(axis + indices.axis) if data is None else None]
    if data is None or data.axis == axis:
        return [None]
    added = len(call.shapes[1]) - 1 if data.axis > axis else 0
    return [data.at(data.axis + added)]


def element_batch(call: BatchCall) -> Sequence[Batch]:
    """All inputs have the batch, in the same axis but the one that is indexed."""
    batch = call.axis_of(0)
    if (
        batch is None
        or set(call.inputs) != {batch}
        or batch.axis == _stated_axis(call, len(call.shapes[0]))
    ):
        return [None]
    return [batch]


def _joined(call: BatchCall, depth: int, dims: int) -> Batch:
    """Return the batch of slices of the data at index tuples, or of the tuples.

    Args:
        call: The node; its first inputs are data and index tuples.
        depth: The length of a tuple.
        dims: The number of batch dimensions of both.
    """
    data, indices = call.axis_of(0), call.axis_of(1)
    lead = len(call.shapes[1]) - 1
    if data is not None and data.axis < dims:
        return data if indices == data else None
    if indices is not None:
        return indices if data is None and dims <= indices.axis < lead else None
    if data is None or data.axis < dims + depth:
        return None
    return data.at(lead + data.axis - dims - depth)


def gather_nd_batch(call: BatchCall) -> Sequence[Batch]:
    """The batch is one of the batch dimensions, in the index tuples, or in slices of the data."""
    dims = int(call.node.attrs.get("batch_dims", 0))
    return [_joined(call, call.shapes[1][-1], dims)]


def scatter_nd_batch(call: BatchCall) -> Sequence[Batch]:
    """The batch is in the slices of the data."""
    batch, updates = call.axis_of(0), call.axis_of(2)
    slices = _joined(call, call.shapes[1][-1], 0)
    shared = call.axis_of(1) is None
    return [batch if isinstance(slices, BatchAxis) and shared and slices == updates else None]


def one_hot_batch(call: BatchCall) -> Sequence[Batch]:
    """The batch is in the indices."""
    batch = call.axis_of(0)
    if batch is None or not call.only(0):
        return [None]
    axis = _stated_axis(call, len(call.shapes[0]) + 1, -1)
    return [batch.at(batch.axis + (batch.axis >= axis))]


# The operators of this family, each in all its versions.
declare("Gather", requires=gather_operands, infer=gather, compute=gathered, batch=gather_batch)
declare(
    "GatherElements",
    requires=gather_elements_operands,
    infer=shape_of_indices,
    compute=gather_elements,
    batch=element_batch,
)
declare(
    "GatherND",
    requires=gather_nd_operands,
    infer=gather_nd,
    compute=gathered_nd,
    batch=gather_nd_batch,
)
declare(
    "OneHot",
    requires=one_hot_operands,
    infer=one_hot_type,
    compute=one_hot,
    grows=True,
    sized_by=(1,),
    batch=one_hot_batch,
)
declare(
    *("Scatter", "ScatterElements"),
    requires=scatter_elements_operands,
    infer=first_type,
    compute=scattered_elements,
    batch=element_batch,
)
declare(
    "ScatterND",
    requires=scatter_nd_operands,
    infer=first_type,
    compute=scattered_nd,
    batch=scatter_nd_batch,
)
declare("TensorScatter", requires=tensor_scatter_operands, infer=first_type, batch=along(0))
