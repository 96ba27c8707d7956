"""Operators of ONNX Runtime that the standard has now, or has in another form."""

from __future__ import annotations

from typing import Any

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_rank,
    require_shape,
    require_single,
    require_whole_number,
)
from subgraph.ops.movement.operands import pad_operands, trilu_operands


@function("Trilu", "X, k? -> Y", requires=trilu_operands, upper=1)
def trilu(call: Call) -> Results:
    """Keep one triangle of each matrix."""
    return call.as_standard()


def unique_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input is a vector."""
    require_rank("x", x, 1)


@function("Unique", "x -> y, idx, counts", requires=unique_operands)
def unique(call: Call) -> Results:
    """Return each element once, the index of each input's element among them, and its count."""
    # The standard's second output, the indices of first occurrences, does not exist in ONNX
    # Runtime's operator.
    found = call.Unique(call.inputs[0], sorted=0, outputs=4)
    return [found[0], found[2], found[3]]


@function("GatherND", "data, indices -> output")
def gather_nd(call: Call) -> Results:
    """Gather as the standard does."""
    data, indices = call.inputs
    # ONNX Runtime also takes int32 indices, the standard only int64.
    return [call.GatherND(data, call.cast(indices, "int64"))]


@function("Range", "start, limit, delta? -> Y")
def range_of(call: Call) -> Results:
    """Return start, start + delta, ...; delta is 1 by default."""
    start, limit, delta = call.inputs

    # ONNX Runtime takes tensors of one element here, the standard scalars.
    def scalar(value: Value | None) -> Any:
        if value is None:
            return call.constant(1, call.dtype(start))
        return call.Reshape(value, [])

    return [call.Range(scalar(start), scalar(limit), scalar(delta))]


@function("Pad", "data, pads, value? -> output", requires=pad_operands, mode="constant")
def pad(call: Call) -> Results:
    """Pad as the standard does; pads may be a matrix of one row, the value of one element."""
    data, pads, value = call.inputs
    flat = call.Reshape(pads, [-1])
    if value is not None:
        value = call.Reshape(value, [])
    return [call.Pad(data, flat, value, mode=call.attribute("mode"))]


def expanded_operands(node: Node, x: Tensor, axis: Tensor) -> None:
    """Raise ShapeError unless the axis is one number.

    Args:
        node: The ExpandDims.
        x: Any tensor.
        axis: Where the dimension is inserted, int32.
    """
    require_single("axis", axis, "int32")


@function("ExpandDims", "X, axis -> Y", requires=expanded_operands)
def expand_dims(call: Call) -> Results:
    """Insert a dimension of size 1."""
    x, axis = call.inputs
    flat = call.Reshape(call.cast(axis, "int64"), [-1])
    return [call.Unsqueeze(x, flat)]


@function("MatMulInteger16", "A, B -> Y")
def matmul_integer16(call: Call) -> Results:
    """Product of integers of 16 bits; sums have 32 bits."""
    dtype = "uint32" if call.dtype(call.inputs[0]) == "uint16" else "int32"
    return [call.MatMul(*(call.cast(x, dtype) for x in call.inputs))]


def distance_operands(node: Node, a: Tensor, b: Tensor) -> None:
    """Raise ShapeError unless the rows of both matrices have the same length.

    Args:
        node: The CDist.
        a: A matrix.
        b: A matrix.
    """
    require_rank("A", a, 2)
    require_shape("B", b, (b.shape[0], a.shape[1]), "rows as long as those of A")


@function("CDist", "A, B -> C", requires=distance_operands, metric="sqeuclidean")
def cdist(call: Call) -> Results:
    """Return the (squared) Euclidean distance of each row of A from each row of B."""
    a, b = call.inputs
    metric = call.attribute("metric")
    if metric not in ("euclidean", "sqeuclidean"):
        raise call.unsupported(f"metric={metric!r}")
    left, right = (call.Unsqueeze(x, [axis]) for x, axis in ((a, 1), (b, 0)))
    difference = call.Sub(left, right)
    squares = call.ReduceSum(call.Mul(difference, difference), [2], keepdims=0)
    return [squares if metric == "sqeuclidean" else call.Sqrt(squares)]


_MODES = {"bilinear": "linear", "nearest": "nearest", "bicubic": "cubic"}


@function("GridSample", "X, Grid -> Y", align_corners=0, mode="bilinear", padding_mode="zeros")
def grid_sample(call: Call) -> Results:
    """Sample as the standard does, which has other names for the modes."""
    mode = call.attribute("mode")
    if mode not in _MODES:
        raise call.unsupported(f"mode={mode!r}")
    options = call.attributes("align_corners", "padding_mode")
    return [call.GridSample(*call.inputs, mode=_MODES[mode], **options)]


def unfold_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the slices of a dimension fit into it."""
    axis = require_whole_number(node, "dim", -1)
    require(-x.rank <= axis < x.rank, "dim is {}, the input has {} dimensions", axis, x.rank)
    size = require_whole_number(node, "size", 1, least=1)
    require_whole_number(node, "step", 1, least=1, most=1 << 40)
    require(size <= x.shape[axis], "size is {}, the dimension {}", size, x.shape[axis])


@function("UnfoldTensor", "input -> output", requires=unfold_operands, dim=-1, size="int!", step=1)
def unfold_tensor(call: Call) -> Results:
    """Return all slices of a dimension, ``step`` apart, as a dimension more at the end."""
    (x,) = call.inputs
    rank = call.rank(x)
    axis, size = call.attribute("dim") % rank, call.attribute("size")
    starts = range(0, call.size(x, axis) - size + 1, call.attribute("step"))
    places = [[start + k for k in range(size)] for start in starts]
    slices = call.Gather(x, call.constant(places, "int64"), axis=axis)
    last = *range(axis + 1), *range(axis + 2, rank + 1), axis + 1
    return [call.Transpose(slices, perm=last)]
