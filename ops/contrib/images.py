"""ONNX Runtime's operators on images that tf2onnx and PyTorch's exporters have written."""

from __future__ import annotations

from typing import Any

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    known_numbers,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
    require_within,
)


def dynamic_pads_operands(
    node: Node, x: Tensor, w: Tensor, pads: Tensor | None = None, b: Tensor | None = None
) -> None:
    """Raise ShapeError unless there are two pads for each spatial dimension, none negative.

    Args:
        node: The ConvTransposeWithDynamicPads.
        x: [N, C, ...].
        w: Filters; not read.
        pads: What is cut at the begin of each dimension, then at the end of each.
        b: A number for each output channel; not read.
    """
    if pads is None:  # optional by its schema, but ONNX Runtime needs it
        raise ShapeError("the input Pads is missing")
    require_shape("Pads", pads, (2 * (x.rank - 2),), "two for each spatial dimension")
    known = known_numbers(pads)
    require(not known or min(known) >= 0, "Pads are {}; none may be negative", known)
    require_choice(node, "auto_pad", "NOTSET", "NOTSET", "VALID")


@function(
    "ConvTransposeWithDynamicPads",
    "X, W, Pads?, B? -> Y",
    requires=dynamic_pads_operands,
    auto_pad="NOTSET",
    dilations="ints",
    group=1,
    kernel_shape="ints",
    output_padding="ints",
    strides="ints",
)
def conv_transpose_with_dynamic_pads(call: Call) -> Results:
    """ConvTranspose whose pads are an input; they are cut from the whole result."""
    x, w, pads, b = call.inputs
    names = ("dilations", "group", "kernel_shape", "output_padding", "strides")
    whole = call.ConvTranspose(x, w, b, **call.attributes(*names))
    size = call.rank(x) - 2
    begins, ends = (call.Slice(pads, [k], [k + size], [0]) for k in (0, size))
    pads = call.Neg(call.Concat([0, 0], begins, [0, 0], ends, axis=0))
    return [call.Pad(whole, pads, requires="no_padding")]


def crop_and_resize_operands(
    node: Node, x: Tensor, rois: Tensor, batch: Tensor, size: Tensor
) -> None:
    """Raise ShapeError unless each region has an image, and crops have a height and a width.

    Args:
        node: The CropAndResize.
        x: Images, [N, C, H, W].
        rois: [regions, 4]: y1, x1, y2, x2, where 0 is the first pixel and 1 the last one.
        batch: For each region the number of its image.
        size: Height and width of crops.
    """
    require_choice(node, "mode", "bilinear", "bilinear", "nearest")
    require_rank("X", x, 4)
    require_rank("rois", rois, 2)
    require_shape("rois", rois, (rois.shape[0], 4), "four numbers for each region")
    require_dtype("rois", rois, x.dtype)
    require_shape("batch_indices", batch, rois.shape[:1], "one for each region")
    require_within("batch_indices", batch, 0, x.shape[0] - 1)
    require_shape("crop_size", size, (2,), "height and width")
    require_within("crop_size", size, 1, 1 << 30)


@function(
    "CropAndResize",
    "X, rois, batch_indices, crop_size -> Y",
    requires=crop_and_resize_operands,
    extrapolation_value=0.0,
    mode="bilinear",
)
def crop_and_resize(call: Call) -> Results:
    """Sample regions of images at the points of grids whose corners are those of the regions."""
    dtype = call.dtype(call.inputs[0])
    grids = [_grid(call, axis) for axis in (0, 1)]
    (rows, in_rows), (columns, in_columns) = grids
    if call.attribute("mode") == "nearest":
        half = call.constant(0.5, dtype)  # halves are rounded upwards
        found = _pixels(call, *(call.Floor(call.Add(p, half)) for p, _ in grids))
    else:
        tops, lefts = call.Floor(rows), call.Floor(columns)
        bottoms, rights = call.Ceil(rows), call.Ceil(columns)
        down = _along_rows(call, call.Sub(rows, tops))
        right = _along_columns(call, call.Sub(columns, lefts))

        def between(a: Any, b: Any, part: Any) -> Any:
            return call.Add(a, call.Mul(call.Sub(b, a), part))

        upper, lower = (
            between(_pixels(call, y, lefts), _pixels(call, y, rights), right)
            for y in (tops, bottoms)
        )
        found = between(upper, lower, down)
    inside = call.And(_along_rows(call, in_rows), _along_columns(call, in_columns))
    outside = call.constant(call.attribute("extrapolation_value"), dtype)
    return [call.Transpose(call.Where(inside, found, outside), perm=(0, 3, 1, 2))]


def _along_rows(call: Call, x: Any) -> Any:
    """Return [regions, height] as [regions, height, 1, 1]."""
    return call.Unsqueeze(x, [2, 3])


def _along_columns(call: Call, x: Any) -> Any:
    """Return [regions, width] as [regions, 1, width, 1]."""
    return call.Unsqueeze(x, [1, 3])


def _pixels(call: Call, rows: Any, columns: Any) -> Any:
    """Return the pixels of each region's image at rows and columns.

    Args:
        call: The CropAndResize.
        rows: Row for each row of a crop, [regions, height]; whole numbers.
        columns: Column for each column, [regions, width].

    Returns:
        [regions, height, width, channels].
    """
    x, _, batch, _ = call.inputs
    image = call.Reshape(call.cast(batch, "int64"), [-1, 1, 1, 1])
    # GatherND counts negative indices from the end; here they are errors, as those of no image.
    image = call.Where(call.Less(image, [0]), call.Shape(x, end=1), image)
    rows = _along_rows(call, call.cast(rows, "int64"))
    columns = _along_columns(call, call.cast(columns, "int64"))
    shape = call.Shape(call.Add(call.Add(rows, columns), image))
    index = call.Concat(*(call.Expand(k, shape) for k in (image, rows, columns)), axis=3)
    return call.GatherND(call.Transpose(x, perm=(0, 2, 3, 1)), index)


def _grid(call: Call, axis: int) -> tuple[Any, Any]:
    """Return the positions of a grid along an axis of images, and which are in the image.

    Args:
        call: The CropAndResize.
        axis: 0 for the height, 1 for the width.

    Returns:
        [regions, size] each; positions outside of the image are 0.
    """
    x, rois, _, size = call.inputs
    dtype = call.dtype(x)
    begin, end = (call.Slice(rois, [k], [k + 1], [1]) for k in (axis, axis + 2))
    count = call.cast(call.Slice(size, [axis], [axis + 1]), "int64")
    last = call.cast(call.Sub(call.Shape(x, start=2 + axis, end=3 + axis), [1]), dtype)
    steps = call.Range(0, call.Squeeze(count, [0]), 1, requires="not_empty")
    ends = call.Sub(count, [1])
    step = call.Div(call.Mul(call.Sub(end, begin), last), call.cast(call.Max(ends, [1]), dtype))
    spread = call.Add(call.Mul(begin, last), call.Mul(call.cast(steps, dtype), step))
    # The last position is exact, so that rounding does not move it out of the image.
    spread = call.Where(call.Equal(steps, ends), call.Mul(end, last), spread)
    centre = call.Mul(call.Mul(call.Add(begin, end), 0.5), last)
    position = call.Where(call.Equal(count, [1]), centre, spread)
    zero = call.constant(0.0, dtype)
    inside = call.And(call.GreaterOrEqual(position, zero), call.LessOrEqual(position, last))
    return call.Where(inside, position, zero), inside
