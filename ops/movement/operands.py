"""Requirements of the operands of operators that move elements or generate them.

Each function raises ShapeError unless its operands fit each other and the node's attributes.
`Tensor.known` is an operand's content, if the caller knows it; only then is it checked.
"""

from __future__ import annotations

import math

from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX, numpy_dtype
from subgraph.operators.requirements import (
    Tensor,
    int_list,
    is_known,
    require,
    require_axes,
    require_axis,
    require_broadcast_together,
    require_choice,
    require_dtype,
    require_rank,
    require_same_dtype,
    require_shape,
    require_single,
    require_within,
)
from subgraph.operators.schema import is_before


def constant_operands(node: Node) -> None:
    """Constant has no operands; its attribute is the value."""


def dropout_operands(
    node: Node, x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None
) -> None:
    """Raise ShapeError unless ratio and training mode are scalars (ONNX Dropout, opsets 1 to 22).

    Args:
        node: The Dropout node.
        x: The tensor, of any shape.
        ratio: Probability that an element is zeroed in training; None: 0.5.
        training: Whether elements are zeroed at all (bool); None: no.
    """
    require_single("ratio", ratio)
    require_single("training_mode", training, "bool")


def bit_cast_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless elements of the new dtype have as many bits (ONNX BitCast, 26)."""
    to = DTYPE_OF_ONNX.get(node.attrs.get("to", 0), "")
    require(bool(to) and "string" not in (to, x.dtype), "to is {}", node.attrs.get("to"))
    sizes = [numpy_dtype(dtype).itemsize for dtype in (x.dtype, to)]
    require(sizes[0] == sizes[1], "{} and {} differ in size", x.dtype, to)


def reshape_operands(node: Node, x: Tensor, shape: Tensor | None = None) -> None:
    """Require that the new shape has as many elements as the input (ONNX Reshape, 1 to 25).

    Args:
        node: The node; opset 1 has ``shape`` as an attribute.
        x: The input.
        shape: The new shape, 1-D int64; None in opset 1.
    """
    if shape is not None:
        require_rank("shape", shape, 1)
        if is_known(shape.shape[0]) and shape.shape[0] == 0:
            require(x.size == 1, "{} elements do not make a scalar", x.size)
    dims = int_list(node, "shape", shape)
    if dims is None:
        return
    require(all(dim >= -1 for dim in dims), "shape {} has a negative dimension", dims)
    left_open = sum(dim == -1 for dim in dims)
    require(left_open <= 1, "shape {} has more than one -1", dims)
    if not node.attrs.get("allowzero", 0):
        for d, dim in enumerate(dims):
            require(
                dim != 0 or d < x.rank, "shape {} copies dimension {} of rank {}", dims, d, x.rank
            )
        dims = [x.shape[d] if dim == 0 else dim for d, dim in enumerate(dims)]
    wanted = Tensor(x.dtype, tuple(dim for dim in dims if dim != -1)).size
    fits = wanted >= 1 and x.size % wanted == 0 if left_open else wanted == x.size
    require(fits, "{} elements do not fill shape {}", x.size, dims)


def expand_operands(node: Node, x: Tensor, shape: Tensor) -> None:
    """Require that the input and the shape broadcast together (ONNX Expand, 8 to 13).

    Args:
        node: The node.
        x: The input.
        shape: The shape, 1-D int64.
    """
    require_rank("shape", shape, 1)
    dims = int_list(node, "shape", shape)
    if dims is not None:
        require(all(dim >= 0 for dim in dims), "shape {} has a negative dimension", dims)
        require_broadcast_together(x, Tensor(x.dtype, tuple(dims)))


def transpose_operands(node: Node, x: Tensor) -> None:
    """Require that ``perm`` is a permutation of the axes (ONNX Transpose, 1 to 25)."""
    order = node.attrs.get("perm")
    if order is not None:
        require(
            sorted(order) == list(range(x.rank)), "perm {} is no order of {} axes", order, x.rank
        )


def growing_operands(node: Node, x: Tensor, buffer: Tensor) -> None:
    """Raise ShapeError unless a buffer has room for an array along its second last axis.

    Args:
        node: The Growing, whose output is ``x``, as the first positions of the buffer. Attribute
            ``overwrites``: whether nodes of this graph alone read these positions.
        x: The array, of rank 2 or more.
        buffer: The buffer, of the same dtype.
    """
    require(x.rank >= 2, "{} has no axis of positions", x)
    require_dtype("the buffer", buffer, x.dtype)
    wanted = (*x.shape[:-2], buffer.shape[-2], x.shape[-1])
    require_shape("the buffer", buffer, wanted, "as the array, with room for more positions")
    require(buffer.shape[-2] >= x.shape[-2], "{} has no room for {}", buffer, x)


def concat_operands(node: Node, first: Tensor, *others: Tensor) -> None:
    """Require that the inputs agree except for the size of the axis (ONNX Concat, 1 to 13)."""
    require(first.rank >= 1, "input 0 is a scalar, which has no axis")
    axis = require_axis(node, first.rank, 1)
    require_same_dtype(first, *others)
    for k, other in enumerate(others, 1):
        shape = first.shape
        if other.rank == first.rank:
            shape = (*shape[:axis], other.shape[axis], *shape[axis + 1 :])
        require_shape(f"input {k}", other, shape, "that of input 0 in all but the axis")


def flatten_operands(node: Node, x: Tensor) -> None:
    """Require that the axis exists or is the rank (ONNX Flatten, 1 to 25)."""
    axis = node.attrs.get("axis", 1)
    least = 0 if is_before(node, 11) else -x.rank  # since opset 11 it may count from the end
    require(least <= axis <= x.rank, "axis is {}, outside [{}, {}]", axis, least, x.rank)


def squeeze_operands(node: Node, x: Tensor, axes: Tensor | None = None) -> None:
    """Require that the axes exist and have size 1 (ONNX Squeeze, 1 to 25).

    Args:
        node: The node; before opset 13 ``axes`` is an attribute.
        x: The input.
        axes: The axes, 1-D int64; None: all of size 1.
    """
    found = int_list(node, "axes", axes) or []
    require(x.rank >= 1 or not found, "axes are {}, but a scalar has none", found)
    for axis in require_axes(x.rank, found):
        require(x.shape[axis] == 1, "axis {} has {} elements, not 1", axis, x.shape[axis])


def unsqueeze_operands(node: Node, x: Tensor, axes: Tensor | None = None) -> None:
    """Require that the axes are different ones of the result (ONNX Unsqueeze, 1 to 25).

    Args:
        node: The node; before opset 13 ``axes`` is an attribute.
        x: The input.
        axes: The axes, 1-D int64; None if they are an attribute.
    """
    found = int_list(node, "axes", axes)
    if found is not None:
        require_axes(x.rank + len(found), found)


def slice_operands(
    node: Node,
    x: Tensor,
    starts: Tensor | None = None,
    ends: Tensor | None = None,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> None:
    """Require a start, an end and a step for each axis (ONNX Slice, 1 to 13).

    Args:
        node: The node; before opset 10 the operands are attributes.
        x: The input.
        starts: First index along each axis, 1-D.
        ends: Index after the last one along each axis, 1-D.
        axes: The axes, 1-D; None: the first ones.
        steps: Steps along each axis, 1-D, not 0; None: 1.
    """
    operands = {"starts": starts, "ends": ends, "axes": axes, "steps": steps}
    found = {name: int_list(node, name, operand) for name, operand in operands.items()}
    count = len(found["starts"] or ()) if starts is None else starts.size
    for name, operand in operands.items():
        if operand is not None:
            require_shape(name, operand, (count,), "a number for each start")
        elif name == "ends" or name in node.attrs:
            numbers = found[name] or []
            require(count == len(numbers), "{} starts, but {} {}", count, len(numbers), name)
    require(count <= x.rank, "{} starts for {} axes", count, x.rank)
    require_axes(x.rank, found["axes"] or [])
    require(all(step != 0 for step in found["steps"] or ()), "a step is 0")


def split_operands(node: Node, x: Tensor, split: Tensor | None = None) -> None:
    """Require that the parts, one for each output, add up to the axis (ONNX Split, 1 to 18).

    Args:
        node: The node; before opset 13 ``split`` is an attribute.
        x: The input.
        split: Sizes of the parts, 1-D int64; None: equal parts, or the attribute's.
    """
    require(x.rank >= 1, "a scalar has no axis to split")
    size, count = x.shape[require_axis(node, x.rank)], len(node.outputs)
    if split is not None:
        require_shape("split", split, (count,), "a size for each output")
    parts = int_list(node, "split", split)
    if parts:
        require(len(parts) == count, "{} parts for {} outputs", len(parts), count)
        require(all(part >= 0 for part in parts), "split {} has a negative size", parts)
        require(sum(parts) == size, "split {} does not fill an axis of size {}", parts, size)
    elif split is None:
        stated = node.attrs.get("num_outputs", count)
        require(stated == count, "num_outputs is {} for {} outputs", stated, count)
        equal = "num_outputs" not in node.attrs  # with it, the last part may be smaller
        require(not equal or size % count == 0, "an axis of {} does not split into {}", size, count)


def tile_operands(node: Node, x: Tensor, repeats: Tensor, axis: Tensor | None = None) -> None:
    """Require a number of repeats for each dimension (ONNX Tile, 1 to 13).

    Args:
        node: The node.
        x: The input.
        repeats: Repeats of each dimension, 1-D int64; in opset 1 one number.
        axis: The only axis that is repeated, one number; opset 1 only.
    """
    if axis is not None or node.version == 1:
        require_single("tiles", repeats)
        require_single("axis", axis)
        require(x.rank >= 1, "a scalar has no axis")
        require_axes(x.rank, known_elements(axis))
    else:
        require_shape("repeats", repeats, (x.rank,), "one for each dimension")
    require(all(n >= 0 for n in known_elements(repeats)), "a number of repeats is negative")


def known_elements(operand: Tensor | None) -> list[int]:
    """Return the elements, [] if they are unknown; symbolic integers stay symbolic."""
    if operand is None or operand.known is None:
        return []
    elements: list[int] = operand.known.reshape(-1).tolist()
    return elements


_PAD_MODES = ("constant", "edge", "reflect", "wrap")


def pad_operands(
    node: Node,
    x: Tensor,
    pads: Tensor | None = None,
    value: Tensor | None = None,
    axes: Tensor | None = None,
) -> None:
    """Require two pads for each axis, which leave elements to repeat (ONNX Pad, 1 to 25).

    Args:
        node: The node; before opset 11 pads and value are attributes.
        x: The input.
        pads: Elements before each axis, then those after each, 1-D int64; negative: cut off.
        value: The element of constant padding, one number of x's dtype; None: 0.
        axes: The padded axes, 1-D; None: all.
    """
    mode = require_choice(node, "mode", "constant", *_PAD_MODES)
    require_single("constant_value", value, x.dtype)
    padded = int_list(node, "axes", axes)
    count = x.rank
    if axes is not None:
        count = axes.size
        require_axes(x.rank, padded or [])
    if pads is not None:
        rank_two = node.domain != "" and pads.rank == 2 and pads.shape[0] == 1
        require(pads.rank == 1 or rank_two, "pads has shape {}, a list is needed", pads.shape)
        require(pads.size == 2 * count, "{} pads for {} axes", pads.size, count)
        amounts = int_list(node, "pads", Tensor(pads.dtype, (pads.size,), pads.known))
    else:
        amounts = int_list(node, "paddings" if "paddings" in node.attrs else "pads", None) or []
        require(len(amounts) == 2 * count, "{} pads for {} axes", len(amounts), count)
    if amounts is None or padded is None:
        return
    sizes = [x.shape[axis] for axis in require_axes(x.rank, padded)] if padded else x.shape
    for size, before, after in zip(sizes, amounts, amounts[count:], strict=False):
        require(
            size + before + after >= 0, "pads {} and {} cut off more than {}", before, after, size
        )
        if mode != "constant":
            left = size + (before if before < 0 else 0) + (after if after < 0 else 0)
            none = left == 0 and before <= 0 and after <= 0
            require(
                left > 0 or none,
                "pads {} and {} leave nothing of {} to repeat",
                before,
                after,
                size,
            )


def center_crop_pad_operands(node: Node, x: Tensor, shape: Tensor) -> None:
    """Raise ShapeError unless each axis has a size (ONNX CenterCropPad, opset 18).

    Args:
        node: The node; without ``axes`` all axes are meant.
        x: The tensor.
        shape: The new size of each axis.
    """
    axes = node.attrs.get("axes")
    count = x.rank if axes is None else len(require_axes(x.rank, axes))
    require_shape("shape", shape, (count,), "a size for each axis")
    dims = int_list(node, "shape", shape) or []
    require(all(dim >= 0 for dim in dims), "shape {} has a negative dimension", dims)


def trilu_operands(node: Node, x: Tensor, k: Tensor | None = None) -> None:
    """Require matrices, and one number ``k`` (ONNX Trilu, 14).

    Args:
        node: The node.
        x: The matrices, ``[..., rows, columns]``.
        k: The diagonal, int64 or int32; None: 0, the main one.
    """
    require(x.rank >= 2, "the input has shape {}; it must hold matrices", list(x.shape))
    require_single("k", k, "int64", "int32")


def reverse_sequence_operands(node: Node, x: Tensor, lengths: Tensor) -> None:
    """Require a length for each entry of the batch (ONNX ReverseSequence, 10).

    Args:
        node: The node; ``batch_axis`` and ``time_axis`` are 0 and 1 or 1 and 0.
        x: The sequences, at least 2-D.
        lengths: Elements of each sequence that are reversed, 1-D int64.
    """
    require(x.rank >= 2, "the input has shape {}; it needs two axes", list(x.shape))
    batch, time = (int(node.attrs.get(f"{n}_axis", k)) for n, k in (("batch", 1), ("time", 0)))
    require(
        sorted((batch, time)) == [0, 1],
        "batch_axis {} and time_axis {}; one is 0, one 1",
        batch,
        time,
    )
    require_dtype("sequence_lens", lengths, "int64")
    require_shape("sequence_lens", lengths, (x.shape[batch],), "one for each entry of the batch")
    require_within("sequence_lens", lengths, 0, x.shape[time])


def constant_of_shape_operands(node: Node, shape: Tensor) -> None:
    """Require a shape, and a value of one element (ONNX ConstantOfShape, 9 to 25)."""
    require_rank("input", shape, 1)
    dims = int_list(node, "input", shape) or []
    require(all(dim >= 0 for dim in dims), "shape {} has a negative dimension", dims)
    value = node.attrs.get("value")
    require(value is None or value.size == 1, "value must hold one element")


def range_operands(node: Node, start: Tensor, limit: Tensor, delta: Tensor) -> None:
    """Require three finite numbers of one dtype (ONNX Range, 11 to 27).

    Args:
        node: The node.
        start: The first number.
        limit: The numbers end before it.
        delta: The difference of neighbours, not 0.
    """
    require_same_dtype(start, limit, delta)
    for name, operand in (("start", start), ("limit", limit), ("delta", delta)):
        require_single(name, operand)
        if operand.known is not None and operand.known.dtype.kind == "f":
            number = float(operand.known.reshape(-1)[0])
            require(math.isfinite(number), "{} is {}; such a Range has no length", name, number)
    require(all(n != 0 for n in known_elements(delta)), "delta is 0; such a Range has no end")


def eye_like_operands(node: Node, x: Tensor) -> None:
    """Require a matrix (ONNX EyeLike, 9 to 22)."""
    require_rank("input", x, 2)
