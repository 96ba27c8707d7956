"""Operators that move elements, for the reference: cases where onnx.reference is wrong or fails.

Operators of opset 1 have attributes that are inputs in later versions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import (
    Array,
    numpy_dtype,
)
from subgraph.operators.reference import attributes, standard
from subgraph.operators.schema import is_before
from subgraph.operators.shape_values import slice_of


def reshape(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input in another shape; opset 1 has the shape as an attribute."""
    x: Array = inputs[0]
    dims = _numbers(node, inputs, 1, "shape") or ()
    if not node.attrs.get("allowzero", 0):
        dims = tuple(x.shape[d] if dim == 0 else dim for d, dim in enumerate(dims))
    return [x.reshape(dims)]


def growing(_node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the array, of which a buffer has a copy with room behind it."""
    return [inputs[0]]


def _numbers(node: Node, inputs: Sequence[Any], position: int, name: str) -> tuple[int, ...] | None:
    """Return integers that are an attribute in old versions, now an input; None: absent."""
    if name in node.attrs:
        return tuple(int(v) for v in node.attrs[name])
    given = inputs[position] if position < len(inputs) else None
    return None if given is None else tuple(given.reshape(-1).tolist())


def split(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the parts along an axis; opset 1 may have their lengths as its second input."""
    axis = int(node.attrs.get("axis", 0))
    x = inputs[0]
    lengths = inputs[1] if len(inputs) > 1 else None
    if lengths is None and "split" in node.attrs:
        lengths = np.array(node.attrs["split"])
    if lengths is None:
        count = int(node.attrs.get("num_outputs", len(node.outputs)))
        chunk = -(-x.shape[axis] // count)
        lengths = np.minimum(chunk, np.maximum(x.shape[axis] - chunk * np.arange(count), 0))
    return np.split(x, np.cumsum(lengths)[:-1], axis=axis)


def tile(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input repeated; opset 1 repeats it along one axis."""
    x, repeats = inputs[:2]
    if node.version == 1:
        axis = int(inputs[2].reshape(()))
        counts = np.ones(x.ndim, np.int64)
        counts[axis] = int(repeats.reshape(()))
        repeats = counts
    return [np.tile(x, repeats)]


def concat(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs joined; opset 1 has a default axis, 1."""
    axis = int(node.attrs.get("axis", 1))
    return [np.concatenate(list(inputs), axis=axis)]


# Attributes of Constant besides ``value``, and the dtypes of their values.
CONSTANT_FORMS = {
    "value_float": "float32",
    "value_floats": "float32",
    "value_int": "int64",
    "value_ints": "int64",
    "value_string": "string",
    "value_strings": "string",
}


def constant(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the constant; a sparse one is made dense, as Constant's output type says."""
    from subgraph.operators.protobuf import SparseTensor

    sparse = node.attrs.get("sparse_value")
    if isinstance(sparse, SparseTensor):
        return [_dense(sparse.values, sparse.indices, sparse.shape)]
    for name, dtype in CONSTANT_FORMS.items():
        if name in node.attrs:
            return [np.array(node.attrs[name], numpy_dtype(dtype))]
    # The caller may write to a result; the attribute belongs to the graph.
    return [np.array(node.attrs["value"])]


def _dense(values: Array, indices: Array, shape: tuple[int, ...]) -> Array:
    dense = np.zeros(shape, values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return dense


def flatten(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return a matrix: the axes before ``axis``, and the others; the tensor may be empty."""
    x: Array = inputs[0]
    axis = int(node.attrs.get("axis", 1))
    axis += x.ndim if axis < 0 else 0
    return [x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))]


def shape(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the sizes from ``start`` to ``end``, which count from the end if negative.

    Both are clamped to the rank, as in Python's slices.
    """
    sizes = np.shape(inputs[0])[node.attrs.get("start", 0) : node.attrs.get("end")]
    return [np.array(sizes, np.int64)]


def unsqueeze(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Insert axes of one element; before opset 13 onnx.reference takes sorted axes only."""
    return [np.expand_dims(inputs[0], _numbers(node, inputs, 1, "axes") or ())]


def squeeze(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Remove axes of one element: those that are stated, or all."""
    return [np.squeeze(inputs[0], _numbers(node, inputs, 1, "axes"))]


def transpose(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input with its axes in another order."""
    return [np.transpose(inputs[0], node.attrs.get("perm"))]


def expand(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input, broadcast together with a shape."""
    shape = np.broadcast_shapes(inputs[0].shape, tuple(inputs[1].tolist()))
    return [np.array(np.broadcast_to(inputs[0], shape))]


def size(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the number of elements."""
    return [np.array(inputs[0].size, np.int64)]


def constant_of_shape(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return an array of one value, 0.0 by default."""
    value = np.asarray(node.attrs.get("value", np.float32(0)))
    return [np.full(inputs[0].tolist(), value.reshape(-1)[0], value.dtype)]


def range_(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the numbers from a first one on to before a limit."""
    if inputs[0].dtype.kind != "i":
        return standard(node, inputs)
    return [np.arange(*(int(each.item()) for each in inputs)).astype(inputs[0].dtype)]


def trilu(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the upper or lower triangle; the diagonal is clamped, since NumPy's has 32 bits."""
    x, k = inputs[0], 0 if len(inputs) < 2 or inputs[1] is None else int(inputs[1].reshape(()))
    most = sum(x.shape[-2:])
    keep = np.triu if node.attrs.get("upper", 1) else np.tril
    return [keep(x, min(max(k, -most), most))]


def pad(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input with values before and after each axis; negative pads take some away."""
    x, pads, value, axes = _pad_arguments(node, inputs)
    mode = str(attributes(node).get("mode") or "constant")
    before, after = [0] * x.ndim, [0] * x.ndim
    for k, axis in enumerate(axes):
        before[axis], after[axis] = int(pads[k]), int(pads[k + len(axes)])
    if mode == "constant":
        return [_pad_constant(x, before, after, x.dtype.type(0) if value is None else value)]
    crop = [
        slice(max(-b, 0), size - max(-a, 0))
        for b, a, size in zip(before, after, x.shape, strict=True)
    ]
    x = x[tuple(crop)]
    widths = [(max(b, 0), max(a, 0)) for b, a in zip(before, after, strict=True)]
    pad: Any = np.pad
    return [pad(x, widths, mode=mode)]


def _pad_constant(x: Array, before: Sequence[int], after: Sequence[int], fill: Any) -> Array:
    """Return the elements with ``fill`` around them; negative pads may cut off all elements."""
    ends = list(zip(before, after, x.shape, strict=True))
    shape = [size + b + a for b, a, size in ends]
    result: Array = np.full(shape, fill, x.dtype)
    inside = tuple(slice(max(b, 0), max(b + size + min(a, 0), 0)) for b, a, size in ends)
    taken = tuple(slice(max(-b, 0), max(size - max(-a, 0), 0)) for b, a, size in ends)
    if all(size > 0 for size in x[taken].shape):
        result[inside] = x[taken]
    return result


def _pad_arguments(
    node: Node, inputs: Sequence[Any]
) -> tuple[Array, Sequence[int], Any, Sequence[int]]:
    x: Array = inputs[0]
    every = tuple(range(x.ndim))
    if is_before(node, 11):
        pads = node.attrs.get("pads") or node.attrs.get("paddings") or ()
        return x, pads, node.attrs.get("value", 0.0), every
    value = inputs[2] if len(inputs) > 2 else None
    if value is not None:
        value = np.asarray(value).reshape(-1)[0]
    axes = every
    if len(inputs) > 3 and inputs[3] is not None:
        axes = tuple(int(axis) for axis in inputs[3])
    return x, inputs[1].reshape(-1).tolist(), value, axes


def sliced(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return a slice; onnx.reference is wrong for negative steps from before the first element."""
    names = ("starts", "ends", "axes", "steps")
    starts, ends, axes, steps = (_numbers(node, inputs, k, n) for k, n in enumerate(names, 1))
    x: Array = inputs[0]
    place = [slice(None)] * x.ndim
    for k, (start, end) in enumerate(zip(starts or (), ends or (), strict=True)):
        axis = k if axes is None else axes[k]
        place[axis] = slice_of(x.shape[axis], start, end, 1 if steps is None else steps[k])
    return [x[tuple(place)].copy()]


def dropout(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input and a mask that is true where an element was not zeroed.

    Elements are zeroed only in training: if ``training_mode`` is true from opset 12 on, and unless
    ``is_test`` is set before opset 7. The mask is bool from opset 10 on; before it has the input's
    dtype.
    """
    x: Array = inputs[0]
    if not is_before(node, 12):
        return _dropout_since_12(node, inputs)
    mask: Array = np.ones(x.shape, np.bool_)
    if is_before(node, 7) and not node.attrs.get("is_test"):
        ratio = float(node.attrs.get("ratio", 0.5))
        shape: tuple[int, ...] = x.shape
        mask = np.greater_equal(np.random.default_rng().random(shape), ratio)
        x = (x * mask / max(1 - ratio, 1e-30)).astype(x.dtype)
    return [x, mask.astype(x.dtype) if is_before(node, 10) else mask]


def _dropout_since_12(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    x: Array = inputs[0]
    ratio = 0.5 if len(inputs) < 2 or inputs[1] is None else float(inputs[1].item())
    training = len(inputs) > 2 and inputs[2] is not None and bool(inputs[2])
    filled = [x, np.array(ratio), np.array(training)]
    results = standard(node, filled)
    return [np.asarray(results[0]).astype(x.dtype), *results[1:]]
