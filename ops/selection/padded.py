"""Padded forms of operators whose output size depends on values: buffers of the largest size.

The pass "PadDynamicOutputs" rewrites ``NonZero(x)`` as ``Trim(PaddedNonZero(x))``. The padded form
fills a buffer that is always large enough, and returns as one output more the number of valid
slices; ``Trim(buffer, count)`` cuts a buffer along ``axis``. The padded form is planned like any
other operator, and a plan is only split between the two (`subgraph.engine.region.split_plan`). Its
inputs and attributes are those of the original operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.inference import infer_types
from subgraph.operators.reference import evaluate
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_axis,
    require_dtype,
    require_rank,
    require_shape,
    require_single,
)
from subgraph.ops.elementwise.op import Types, Values, shape_of
from subgraph.ops.shared.strides import normal_axis, product

PREFIX = "Padded"
# The axis along which each output is cut; -1: the attribute ``axis``, None: it is not cut.
TRIMMED: dict[str, tuple[int | None, ...]] = {
    "Compress": (-1,),
    "NonMaxSuppression": (0,),
    "NonZero": (1,),
    "Unique": (-1, 0, None, 0),
}
_COUNT = TensorType("int64", (1,))


def trimmed_axis(node: Node, output: int) -> int | None:
    """Return the axis along which an output of the operator is cut, None if it is not."""
    axis = TRIMMED[node.op_type.removeprefix(PREFIX)][output]
    return int(node.attrs.get("axis") or 0) if axis == -1 else axis


def _dtype(type_: ValueType | None) -> str:
    """Return the dtype of a tensor type, float32 while unknown."""
    return type_.dtype if isinstance(type_, TensorType) else "float32"


def compress_operands(node: Node, x: Tensor, condition: Tensor) -> None:
    """Raise ShapeError unless each condition has a slice (ONNX Compress, opsets 9 to 28).

    Args:
        node: The node; without ``axis`` the slices are single elements.
        x: The data.
        condition: Whether each slice is selected; slices beyond its length are not.
    """
    require_dtype("condition", condition, "bool")
    require_rank("condition", condition, 1)
    whole = node.attrs.get("axis") is None
    require(whole or x.rank > 0, "input is a scalar; it has no axis")
    size = x.size if whole else x.shape[require_axis(node, x.rank)]
    count = condition.shape[0]
    require(count <= size, "{} conditions for {} slices", count, size)


def unique_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axis exists (ONNX Unique, opsets 11 to 28)."""
    if node.attrs.get("axis") is not None:
        require(x.rank >= 1, "a scalar has no axis")
        require_axis(node, x.rank)


def non_max_suppression_operands(
    node: Node,
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | None = None,
    overlap: Tensor | None = None,
    least: Tensor | None = None,
) -> None:
    """Raise ShapeError unless each box and class has a score (NonMaxSuppression, opsets 10 to 11).

    Args:
        node: The node.
        boxes: Four coordinates of each box, [images, boxes, 4].
        scores: Scores, [images, classes, boxes].
        most: Boxes of a class to select at most; None: none.
        overlap: Intersection over union beyond which a box is suppressed; None: 0.
        least: Score that a box must exceed; None: no threshold.
    """
    require_rank("scores", scores, 3)
    shape = (scores.shape[0], scores.shape[2], 4)
    require_shape("boxes", boxes, shape, "four numbers for each image and score")
    require_single("max_output_boxes_per_class", most, "int64")
    require_single("iou_threshold", overlap, "float32")
    require_single("score_threshold", least, "float32")


def trim_operands(node: Node, x: Tensor, count: Tensor) -> None:
    """Raise ShapeError unless the buffer has as many slices as are counted.

    Args:
        node: The Trim node.
        x: The buffer.
        count: Valid slices along ``axis``.
    """
    require(x.rank >= 1, "a scalar has no axis")
    size = x.shape[require_axis(node, x.rank)]
    require_single("count", count, "int64")
    if count.known is not None:
        for many in count.known.reshape(-1).tolist():
            require(0 <= many <= size, "{} slices of {}", many, size)


def non_zero(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the padded form of NonZero: a column of indices for each element.

    Args:
        node: The node; not read.
        types: Type of the input, None while unknown. A scalar has columns of 0 indices.
        values: Contents of constant inputs; not read.
    """
    shape = shape_of(types[0])
    places = None if shape is None else (len(shape), product(shape))
    return [TensorType("int64", places), _COUNT]


def compress(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the padded form of Compress: a slice for each condition.

    Args:
        node: The node.
        types: Types of data and conditions, None while unknown.
        values: Contents of constant inputs; not read.
    """
    shape, conditions = shape_of(types[0]), shape_of(types[1])
    if shape is None or conditions is None:
        return [TensorType(_dtype(types[0])), _COUNT]
    axis = node.attrs.get("axis")
    dims = [product(shape)] if axis is None else list(shape)
    place = 0 if axis is None else normal_axis(int(axis), len(dims))
    size, most = dims[place], conditions[0]
    dims[place] = min(size, most) if isinstance(size, int) and isinstance(most, int) else None
    return [TensorType(_dtype(types[0]), dims), _COUNT]


def unique(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the padded form of Unique: as many distinct slices as slices.

    Args:
        node: The node.
        types: Type of the input, None while unknown.
        values: Contents of constant inputs; not read.
    """
    shape, axis = shape_of(types[0]), node.attrs.get("axis")
    numbers = TensorType("int64", (None,))
    if shape is None:
        return [TensorType(_dtype(types[0])), numbers, numbers, numbers, _COUNT]
    dims = (product(shape),) if axis is None else shape
    place = 0 if axis is None else normal_axis(int(axis), len(dims))
    numbers = TensorType("int64", (dims[place],))
    return [TensorType(_dtype(types[0]), dims), numbers, numbers, numbers, _COUNT]


def non_max_suppression(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the padded form of NonMaxSuppression: every box of every class.

    Args:
        node: The node; not read.
        types: Types of the inputs, None while unknown.
        values: Contents of constant inputs; a constant ``max_output_boxes_per_class`` lowers the
            size.
    """
    shape = shape_of(types[1])
    if shape is None or len(shape) != 3:
        return [TensorType("int64", (None, 3)), _COUNT]
    # No class can select more boxes than there are.
    most = shape[2]
    wanted = values[2] if len(values) > 2 else None
    if wanted is not None and isinstance(most, int):
        most = max(0, min(most, int(wanted.reshape(-1)[0])))
    return [TensorType("int64", (product((shape[0], shape[1], most)), 3)), _COUNT]


def trim(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the buffer's type with the count as the size of the axis.

    Args:
        node: The Trim node.
        types: Types of buffer and count, None while unknown.
        values: Contents of constant inputs: the count may be among them.
    """
    shape = shape_of(types[0])
    if shape is None:
        return [TensorType(_dtype(types[0]))]
    dims = list(shape)
    axis = normal_axis(int(node.attrs["axis"]), len(dims))
    count = values[1]
    dims[axis] = None if count is None else count.reshape(-1).tolist()[0]
    return [TensorType(_dtype(types[0]), dims)]


def trimmed(node: Node, inputs: Sequence[Any]) -> list[Array]:
    """Cut the buffer."""
    axis = normal_axis(int(node.attrs["axis"]), inputs[0].ndim)
    whole = (slice(None),) * axis
    return [inputs[0][(*whole, slice(int(inputs[1].reshape(-1)[0])))]]


def padded(node: Node, inputs: Sequence[Any]) -> list[Array | None]:
    """Compute the original operator and fill its outputs up with zeros."""
    name = node.op_type.removeprefix(PREFIX)
    plain = Node(name, node.inputs, outputs=len(TRIMMED[name]), version=node.version)
    plain.attrs = dict(node.attrs)
    types = [None if a is None else TensorType(a.dtype.name, a.shape) for a in inputs]
    sizes = infer_types(node, types, inputs)
    results: list[Array | None] = []
    count = 0
    for k, found in enumerate(evaluate(plain, inputs)):
        axis, size = trimmed_axis(node, k), sizes[k]
        assert isinstance(size, TensorType)
        shape = [*size.sizes]
        if axis is None:
            results.append(found)
            continue
        count = found.shape[axis]
        room = np.zeros(shape, found.dtype)
        axis = normal_axis(axis, room.ndim)
        room[(*(slice(None),) * axis, slice(count))] = found
        results.append(room)
    return [*results, np.array([count], np.int64)]
