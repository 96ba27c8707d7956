"""Old forms of operators (opsets 1 to 10), for the reference; onnx.reference knows the new ones.

The binary operators of opsets 1 to 6 broadcast only when asked, along a named axis. Others had as
attributes what are inputs today, or another name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, numpy_dtype
from subgraph.operators.operator import reference
from subgraph.operators.reference import standard, variant


@reference("Add", "Sub", "Mul", "Div", "Pow", "And", "Or", "Xor", "Equal", "Greater", "Less")
def binary(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the operator's result; before opset 7 the second operand is laid out by ``axis``."""
    if node.version >= 7 or node.version == 0:
        return _binary(node, inputs)
    first, second = inputs
    if node.attrs.get("broadcast"):
        second = _laid_out(first, second, node.attrs.get("axis"))
    elif first.shape != second.shape:
        raise ShapeError(
            f"shapes {first.shape} and {second.shape} differ and attribute broadcast is 0"
        )
    return _binary(variant(node, version=7, drop=tuple(node.attrs)), [first, second])


def _binary(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    if node.op_type == "Pow" and all(each.dtype.kind == "i" for each in inputs):
        return [_whole_power(*inputs)]
    found = standard(node, inputs)
    if node.op_type != "Pow":
        return found
    # Of one exponent 0.5 NumPy takes the square root, which differs from C's pow below zero.
    base, exponent = inputs
    ends = (exponent == 0.5) & ((base == 0) | (base == -math.inf))
    return [np.where(ends, np.abs(base), found[0])]


def _whole_power(base: Array, exponent: Array) -> Array:
    """Return powers of whole numbers, those to negative ones cut off; NumPy refuses them."""
    sign = np.where(exponent & 1, -1, 1)
    below = np.where(base == 1, 1, np.where(base == -1, sign, 0))
    powers: Array = np.power(base, np.maximum(exponent, 0))
    return np.where(exponent < 0, below, powers).astype(base.dtype)


def _laid_out(first: Array, second: Array, axis: int | None) -> Array:
    """Return ``second`` with ones behind, so that its first dimension is at ``axis``."""
    if axis is None:
        return second
    start = axis + first.ndim if axis < 0 else axis
    behind = first.ndim - start - second.ndim
    if behind < 0:
        raise ShapeError(f"axis {axis}: {second.shape} does not fit into {first.shape}")
    return second.reshape(second.shape + (1,) * behind)


@reference("PRelu")
def prelu(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the leaky ReLU; before opset 7 a slope of one dimension counts channels."""
    x: Array = inputs[0]
    slope: Array = inputs[1]
    if 0 < node.version < 7 and slope.size > 1 and slope.ndim == 1 and x.ndim > 2:
        slope = slope.reshape(-1, *[1] * (x.ndim - 2))
    result: Array = np.where(x < x.dtype.type(0), x * slope, x)
    return [result.astype(x.dtype)]


@reference("Gemm")
def gemm(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return alpha A B + beta C; C always broadcasts, as it does since opset 7."""
    if 0 < node.version < 7:
        return standard(variant(node, version=7, drop=("broadcast",)), inputs)
    return standard(node, inputs)


@reference("Cast")
def cast(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input in another dtype; opset 1 names it ("FLOAT") instead of numbering it."""
    to = node.attrs.get("to")
    if isinstance(to, str):
        from onnx import TensorProto

        return standard(variant(node, version=6, to=int(TensorProto.DataType.Value(to))), inputs)
    return standard(node, inputs)


@reference("Reshape")
def reshape(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input in another shape; opset 1 has the shape as an attribute."""
    if node.version == 1:
        shape = np.array(node.attrs.get("shape", ()), np.int64)
        return standard(variant(node, version=5, drop=tuple(node.attrs)), [inputs[0], shape])
    return standard(node, inputs)


@reference("Split")
def split(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the parts along an axis; opset 1 may have their lengths as its second input.

    onnx.reference does not look whether the lengths fit.
    """
    axis = int(node.attrs.get("axis", 0))
    x = inputs[0]
    lengths = inputs[1] if len(inputs) > 1 else None
    if lengths is None and "split" in node.attrs:
        lengths = np.array(node.attrs["split"])
    if not -x.ndim <= axis < x.ndim:
        raise ShapeError(f"axis {axis} is out of range for {x.ndim} dimensions")
    if lengths is None:
        count = int(node.attrs.get("num_outputs", len(node.outputs)))
        chunk = -(-x.shape[axis] // count)
        lengths = np.minimum(chunk, np.maximum(x.shape[axis] - chunk * np.arange(count), 0))
    if (lengths < 0).any() or int(lengths.sum()) != x.shape[axis]:
        raise ShapeError(f"lengths {lengths.tolist()} do not add up to {x.shape[axis]}")
    return np.split(x, np.cumsum(lengths)[:-1], axis=axis)


@reference("Scatter")
def scatter(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the data with updates put in: ScatterElements under its name of opset 9."""
    return standard(
        Node(
            "ScatterElements",
            node.inputs,
            outputs=1,
            name=node.name,
            version=11,
            attrs=node.attrs,
        ),
        inputs,
    )


@reference("Tile")
def tile(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input repeated; opset 1 repeats it along one axis."""
    x, repeats = inputs[:2]
    if node.version == 1:
        axis = int(inputs[2].reshape(()))
        counts = np.ones(x.ndim, np.int64)
        counts[axis] = int(repeats.reshape(()))
        repeats = counts
    if len(repeats) != x.ndim or (repeats < 0).any():
        raise ShapeError(f"repeats {repeats.tolist()} do not fit {x.ndim} dimensions")
    return [np.tile(x, repeats)]


@reference("Concat")
def concat(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs joined; opset 1 has a default axis, 1."""
    axis = int(node.attrs.get("axis", 1))
    return [np.concatenate(list(inputs), axis=axis)]


@reference("Constant")
def constant(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the constant; a sparse one is made dense, as Constant's output type says."""
    from subgraph.operators.protobuf import SparseTensor

    sparse = node.attrs.get("sparse_value")
    if isinstance(sparse, SparseTensor):
        return [_dense(sparse.values, sparse.indices, sparse.shape)]
    for name, dtype in (("value_int", "int64"), ("value_ints", "int64")):
        if name in node.attrs:
            return [np.array(node.attrs[name], numpy_dtype(dtype))]
    for name, dtype in (("value_float", "float32"), ("value_floats", "float32")):
        if name in node.attrs:
            return [np.array(node.attrs[name], numpy_dtype(dtype))]
    for name in ("value_string", "value_strings"):
        if name in node.attrs:
            return [np.array(node.attrs[name], object)]
    return [np.asarray(node.attrs["value"])]


def _dense(values: Array, indices: Array, shape: tuple[int, ...]) -> Array:
    dense = np.zeros(shape, values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


@reference("Flatten")
def flatten(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return a matrix: the axes before ``axis``, and the rest; of empty tensors, too."""
    x: Array = inputs[0]
    axis = int(node.attrs.get("axis", 1))
    if not -x.ndim <= axis <= x.ndim:
        raise ShapeError(f"axis {axis} is out of range for {x.ndim} dimensions")
    axis += x.ndim if axis < 0 else 0
    return [x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))]


@reference("Clip")
def clip(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return clipped numbers; the first version is the one of opset 6 with a hint for memory."""
    if node.version == 1:
        node = variant(node, version=6, drop=("consumed_inputs",))
    bounds = [None if bound is None else bound.reshape(()) for bound in inputs[1:]]
    return standard(node, [inputs[0], *bounds])
