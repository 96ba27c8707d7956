"""Output types of views and of operators that move elements.

Dimensions that depend on values that are not known yet (a computed shape) are inferred as unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import MAX_RANK, Array, Dim, Shape, TensorType, ValueType
from subgraph.operators.schema import is_before
from subgraph.operators.shape_values import slice_size
from subgraph.ops.elementwise.op import (
    Types,
    Values,
    same_dtype,
    tensor,
)
from subgraph.ops.shared.strides import broadcast_shapes, normal_axis, product

from . import reference

_MIN_SHARED_ELEMENTS = 4096  # least length of a table that plans of several sizes share


@attrs.frozen
class Repeats:
    """A table in which each index is repeated ``times`` times, whatever the size.

    Attributes:
        size: Number of different indices, from 0 on.
        times: Repetitions of each.
    """

    size: int
    times: int

    @property
    def count(self) -> int:
        """Number of elements of the table."""
        return self.size * self.times

    def table(self) -> Array:
        """Return the table."""
        return np.arange(self.count) // self.times

    def longer(self) -> Array:
        """Return a longer table that begins with this one, so that many sizes share it."""
        length = _MIN_SHARED_ELEMENTS
        while length < self.count:
            length *= 2
        return np.arange(length) // self.times


def input_or_attribute(node: Node, values: Values, index: int, name: str) -> list[int] | None:
    """Return integers that are an attribute in old versions of an operator and now an input.

    Args:
        node: The node.
        values: Known contents of its inputs; None where unknown.
        index: Position of the input.
        name: Name of the attribute.

    Returns:
        The integers; [] if the node has neither, None if the input's content is unknown.
    """
    dims = _dims(node, values, index, name)
    numbers = [dim for dim in dims or () if isinstance(dim, int)]
    return None if dims is None or len(numbers) < len(dims) else numbers


def _dims(node: Node, values: Values, index: int, name: str) -> list[Dim] | None:
    """Return what `input_or_attribute` does where only a part of the elements may be known."""
    if index < len(node.inputs) and node.inputs[index] is not None:
        found = values[index] if index < len(values) else None
        if found is None:
            return None
        return [v if v is None or isinstance(v, str) else _whole(v) for v in found.ravel().tolist()]
    value = node.attrs.get(name)
    return [] if value is None else [int(v) for v in np.asarray(value).reshape(-1)]


def whole_numbers(array: Array) -> list[int]:
    """Return the elements of a small array as Python integers; symbolic integers stay symbolic."""
    return list(map(_whole, array.reshape(-1).tolist()))


def _whole(number: Any) -> int:
    return number if isinstance(number, int) else int(number)


def _unknown(x: TensorType | None, rank: int | None = None) -> list[ValueType | None]:
    if x is None:
        return [None]
    return [TensorType(x.dtype, None if rank is None else [None] * rank)]


def transpose(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Transpose: permuted dimensions.

    Args:
        node: The node; attributes: ``perm``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return _unknown(x)
    rank = len(x.shape)
    order = node.attrs.get("perm")
    order = tuple(reversed(range(rank))) if order is None else tuple(int(axis) for axis in order)
    return [TensorType(x.dtype, [x.shape[axis] for axis in order])]


def concat(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Concat: the sum of sizes along the axis, the others equal.

    Args:
        node: The node; attributes: ``axis``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    dtype = same_dtype(types)
    tensors = [tensor(kind) for kind in types]
    shapes = [x.shape for x in tensors if x is not None and x.shape is not None]
    if dtype is None or len(shapes) < len(tensors) or not shapes:
        return [None if dtype is None else TensorType(dtype)]
    axis = normal_axis(int(node.attrs.get("axis", 1)), len(shapes[0]))
    dims: list[Dim] = []
    for position, column in enumerate(zip(*shapes, strict=True)):
        dims.append(_sum(column) if position == axis else _agreed(column, position))
    return [TensorType(dtype, dims)]


def _sum(dims: Sequence[Dim]) -> Dim:
    numbers = [dim for dim in dims if isinstance(dim, int)]
    if len(numbers) == len(dims):
        return sum(numbers)
    return dims[0] if len(dims) == 1 else None


def _agreed(dims: Sequence[Dim], position: int) -> Dim:
    numbers = [dim for dim in dims if isinstance(dim, int)]
    if any(number != numbers[0] for number in numbers):
        differing = sorted(set(numbers))
        raise ShapeError(f"the inputs differ in dimension {position}: {differing}")
    if numbers:
        return numbers[0]
    names = set(dims)
    return names.pop() if len(names) == 1 else None


def flatten(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Flatten: a matrix of the dimensions before and from the axis.

    Args:
        node: The node; attributes: ``axis``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return _unknown(x, 2)
    axis, rank = int(node.attrs.get("axis", 1)), len(x.shape)
    # The axis of Flatten may equal the rank, which other operators refuse.
    axis = axis + rank if axis < 0 else axis
    return [TensorType(x.dtype, [product(x.shape[:axis]), product(x.shape[axis:])])]


def unsqueeze(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Unsqueeze: dimensions of size 1 inserted.

    Args:
        node: The node; attributes: ``axes`` before opset 13.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    axes = input_or_attribute(node, values, 1, "axes")
    if x is None or x.shape is None or axes is None:
        return _unknown(x)
    rank = len(x.shape) + len(axes)
    inserted = {normal_axis(axis, rank) for axis in axes}
    rest = iter(x.shape)
    return [TensorType(x.dtype, [1 if d in inserted else next(rest) for d in range(rank)])]


def squeeze(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Squeeze: dimensions of size 1 removed.

    Args:
        node: The node; attributes: ``axes`` before opset 13.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    axes = input_or_attribute(node, values, 1, "axes")
    if x is None or x.shape is None or axes is None:
        return _unknown(x)
    shape = x.shape
    # ONNX squeezes every dimension of size 1 only if the input ``axes`` is missing.
    if not axes and len(types) > 1 and types[1] is not None:
        return [x]  # an empty list of axes, not none
    if not axes:
        if any(not isinstance(dim, int) for dim in shape):
            return _unknown(x)
        return [TensorType(x.dtype, [dim for dim in shape if dim != 1])]
    removed = {normal_axis(axis, len(shape)) for axis in axes}
    return [TensorType(x.dtype, [dim for d, dim in enumerate(shape) if d not in removed])]


def reshape(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Reshape: 0 copies a dimension, -1 stands for the remaining elements.

    Args:
        node: The node; attributes: ``allowzero``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    dims = _dims(node, values, 1, "shape")
    if x is None or dims is None:
        return _unknown(x, _length(types, 1))
    if not node.attrs.get("allowzero", 0):
        known = x.shape or ()
        copied = [known[d] if d < len(known) else None for d in range(len(dims))]
        dims = [of if dim == 0 else dim for dim, of in zip(dims, copied, strict=True)]
    if -1 in dims:
        at = dims.index(-1)
        rest = [dim for d, dim in enumerate(dims) if d != at]
        dims[at] = None if x.shape is None else _left(x.shape, rest)
    return [TensorType(x.dtype, dims)]


def _left(shape: Shape, others: list[Dim]) -> Dim:
    """Return the product of a shape divided by other dimensions; None if it is unknown."""
    rest: list[Dim] = []
    # Symbols that both shapes contain cancel; what remains must be numbers or one symbol.
    symbols = [dim for dim in others if not isinstance(dim, int)]
    for dim in shape:
        if isinstance(dim, int):
            rest.append(dim)
        elif dim is None:
            return None
        elif dim in symbols:
            symbols.remove(dim)
        else:
            rest.append(dim)
    if symbols:
        return None
    known = product([dim for dim in others if isinstance(dim, int)])
    numbers = product([dim for dim in rest if isinstance(dim, int)])
    names = [dim for dim in rest if not isinstance(dim, int)]
    if not isinstance(known, int) or not isinstance(numbers, int) or known == 0:
        return None
    if not names:
        return numbers // known if numbers % known == 0 else None
    return names[0] if len(names) == 1 and numbers == known else None


def _length(types: Types, index: int) -> int | None:
    """Return the number of elements of input ``index``, a list; None if it is unknown."""
    kind = tensor(types[index]) if index < len(types) else None
    if kind is None or kind.shape is None or len(kind.shape) != 1:
        return None
    size = kind.shape[0]
    if isinstance(size, int) and size > MAX_RANK:
        raise ShapeError(f"{size} numbers for dimensions; the most are {MAX_RANK}")
    return size if isinstance(size, int) else None


def shape(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Shape: one int64 for each dimension from ``start`` to ``end``.

    Args:
        node: The node; attributes: ``start``, ``end``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [TensorType("int64", [None])]
    picked = x.shape[node.attrs.get("start", 0) : node.attrs.get("end", len(x.shape))]
    return [TensorType("int64", [len(picked)])]


def size(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Size: one int64.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    return [TensorType("int64", [])]


def expand(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Expand: the shape broadcast with the input's.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    target = _dims(node, values, 1, "shape")
    count = _length(types, 1)
    if target is None and count is not None:
        target = [None] * count
    if x is None or target is None:
        return _unknown(x)
    return [TensorType(x.dtype, broadcast_shapes([x.shape, target]))]


def slice_(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Slice: the number of elements of each slice.

    Args:
        node: The node; attributes: before opset 10 all operands.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return _unknown(x)
    parts = [
        input_or_attribute(node, values, k, n)
        for k, n in enumerate(("starts", "ends", "axes", "steps"), 1)
    ]
    starts, ends, axes, steps = parts
    if axes is None:
        return _unknown(x, len(x.shape))
    count = _length(types, 1) if starts is None else len(starts)
    if count is None:
        return _unknown(x, len(x.shape))
    dims = list(x.shape)
    for k, axis in enumerate(axes or range(count)):
        d = normal_axis(axis, len(dims))
        if starts is None or ends is None or steps is None:
            dims[d] = None
        else:
            dims[d] = _taken(dims[d], starts[k], ends[k], steps[k] if steps else 1)
    return [TensorType(x.dtype, dims)]


def _taken(size: Dim, start: int, end: int, step: int) -> Dim:
    if isinstance(size, int):
        return slice_size(size, start, end, step)
    # ONNX recommends the largest integer as the end of a slice to the end of an axis of unknown
    # size.
    return size if start == 0 and step == 1 and end >= 2**31 - 1 else None


def split(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the types of Split: the parts of the axis.

    Args:
        node: The node; attributes: ``axis``, ``num_outputs``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    count = len(node.outputs)
    if x is None or x.shape is None:
        return _unknown(x) * count
    axis = normal_axis(int(node.attrs.get("axis", 0)), len(x.shape))
    sizes = _parts(node, values, x.shape[axis], count)
    return [
        TensorType(x.dtype, [part if d == axis else dim for d, dim in enumerate(x.shape)])
        for part in sizes
    ]


def _parts(node: Node, values: Values, size: Dim, count: int) -> Sequence[Dim]:
    parts = input_or_attribute(node, values, 1, "split")
    if parts is None:
        return [None] * count
    if parts:
        return parts
    if not isinstance(size, int):
        return [None] * count
    if not is_before(node, 18) or "num_outputs" in node.attrs:
        # Since opset 18 all parts but the last are rounded up, and the last one may be smaller.
        part = -(-size // count)
        return [max(0, min(part, size - k * part)) for k in range(count)]
    return [size // count] * count


def constant(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Constant from the attribute's value.

    Args:
        node: The node; attributes: ``value`` and its other forms.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    from subgraph.operators.protobuf import SparseTensor

    value: Array | None = node.attrs.get("value")
    if value is not None:
        array = np.asarray(value)
        return [TensorType(array.dtype, array.shape)]
    sparse = node.attrs.get("sparse_value")
    if isinstance(sparse, SparseTensor):
        return [TensorType(sparse.values.dtype, sparse.shape)]
    for name, dtype in reference.CONSTANT_FORMS.items():
        if name in node.attrs:
            return [TensorType(dtype, [len(node.attrs[name])] if name.endswith("s") else [])]
    return [None]


def constant_of_shape(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of ConstantOfShape: the input's content is the shape.

    Args:
        node: The node; attributes: ``value``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    value = node.attrs.get("value")
    dtype = "float32" if value is None else np.asarray(value).dtype
    dims = _dims(node, values, 0, "shape")
    if dims is None:
        count = _length(types, 0)
        return [TensorType(dtype, None if count is None else [None] * count)]
    return [TensorType(dtype, dims)]


def range_(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Range: the number of steps from start to before limit.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    kinds = [kind for kind in map(tensor, types) if kind is not None]
    if len(kinds) < len(types):
        return [None]
    parts = [None if value is None or value.size != 1 else value.reshape(-1) for value in values]
    if len(parts) < len(types) or any(part is None for part in parts):
        return [TensorType(kinds[0].dtype, [None])]
    start, limit, delta = (part.tolist()[0] for part in parts if part is not None)
    if isinstance(start, int) and isinstance(limit, int) and isinstance(delta, int):
        count = -((start - limit) // delta)
    else:
        count = math.ceil((limit - start) / delta)
    return [TensorType(kinds[0].dtype, [max(count, 0)])]


def tile(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Tile: dimensions times repeats.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    repeats = _dims(node, values, 1, "repeats")
    if x is None or x.shape is None or repeats is None:
        return _unknown(x, None if x is None else x.rank)
    if len(node.inputs) > 2:  # version 1: one axis, and how often
        return [TensorType(x.dtype, [None] * len(x.shape))]
    pairs = zip(x.shape, repeats, strict=True)
    return [TensorType(x.dtype, [product((dim, times)) for dim, times in pairs])]


def pad(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Pad: dimensions plus the pads before and after.

    Args:
        node: The node; attributes: before opset 11 the pads.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs; None where unknown.
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return _unknown(x)
    pads = input_or_attribute(node, values, 1, "paddings" if "paddings" in node.attrs else "pads")
    axes = input_or_attribute(node, values, 3, "axes")
    if pads is None or axes is None:
        return _unknown(x, len(x.shape))
    padded = [normal_axis(axis, len(x.shape)) for axis in axes] or list(range(len(x.shape)))
    dims = list(x.shape)
    for axis, before, after in zip(padded, pads, pads[len(padded) :], strict=False):
        dim = dims[axis]
        if isinstance(dim, int):
            dims[axis] = dim + before + after
        elif before or after:
            dims[axis] = None
    return [TensorType(x.dtype, dims)]


def dropout(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of Dropout's result and mask.

    Args:
        node: The node; from opset 10 on its mask is bool, before it has the input's dtype.
        types: Types of input, ratio and training mode, None while unknown.
        values: Contents of constant inputs; not read.
    """
    x = tensor(types[0])
    if x is None:
        return [None, None]
    return [x, TensorType(x.dtype if is_before(node, 10) else "bool", x.shape)]
