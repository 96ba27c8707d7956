"""Operators that resize and sample images: requirements, and the output type of Resize."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchCall, along
from subgraph.operators.inference import infer_by_onnx
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    is_known,
    known_numbers,
    require,
    require_axes,
    require_choice,
    require_dtype,
    require_numbers,
    require_rank,
    require_shape,
    require_whole_number,
    require_within,
)
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.movement.types import input_or_attribute
from subgraph.ops.pool.windows import MAX_EXTENT

from . import reference

# Samples of a bin of RoiAlign along an axis (estimate). They cost time even on a small
# image, so that a larger attribute would let a small file occupy a device.
_MAX_SAMPLING_RATIO = 1 << 10
_TRANSFORMS = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_crop_and_resize",
    "tf_half_pixel_for_nn",
)
_ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def roi_align_operands(node: Node, x: Tensor, rois: Tensor, images: Tensor) -> None:
    """Raise ShapeError unless regions have four coordinates and an image each (opsets 10 to 22).

    Args:
        node: The RoiAlign node.
        x: Images, [images, channels, height, width].
        rois: Corners x1, y1, x2, y2 of each region, [regions, 4].
        images: Index of each region's image.
    """
    require_dtype("X", x, *FLOATS)
    require_dtype("rois", rois, x.dtype)
    require_dtype("batch_indices", images, "int64")
    require_rank("X", x, 4)
    require_rank("rois", rois, 2)
    require_shape("rois", rois, (rois.shape[0], 4), "x1, y1, x2, y2 of each region")
    require_shape("batch_indices", images, rois.shape[:1], "one for each region")
    for name in ("output_height", "output_width"):
        require_whole_number(node, name, 1, least=1, most=MAX_EXTENT)
    require_whole_number(node, "sampling_ratio", 0, least=0, most=_MAX_SAMPLING_RATIO)
    require_choice(node, "mode", "avg", "avg", "max")
    modes = ("half_pixel", "output_half_pixel")
    require_choice(node, *("coordinate_transformation_mode", "half_pixel"), *modes)
    scale = float(node.attrs.get("spatial_scale", 1.0))
    require(math.isfinite(scale), "spatial_scale is {}", scale)
    height, width = x.shape[2:]
    require(height >= 1 and width >= 1, "X has shape {}: nothing to sample", x.shape)
    require_within("batch_indices", images, 0, x.shape[0] - 1)


def max_roi_pool_operands(node: Node, x: Tensor, rois: Tensor) -> None:
    """Raise ShapeError unless a region is an image index and four coordinates (opsets 1 to 22).

    Args:
        node: The MaxRoiPool node.
        x: Images, [images, channels, height, width].
        rois: Image index and corners x1, y1, x2, y2 of each region, [regions, 5].
    """
    require_dtype("X", x, *FLOATS)
    require_dtype("rois", rois, x.dtype)
    require_rank("X", x, 4)
    require_rank("rois", rois, 2)
    require_shape("rois", rois, (rois.shape[0], 5), "image, x1, y1, x2, y2 of each region")
    if rois.known is not None and rois.known.size:
        images = rois.known[:, 0]
        require(bool(np.isfinite(images).all()), "rois holds an image index that is no number")
        for image in (int(images.min()), int(images.max())):
            require(0 <= image < x.shape[0], "a region of image {} of {}", image, x.shape[0])
    require(bool(node.attrs.get("pooled_shape")), "pooled_shape is missing")
    require_numbers(node, "pooled_shape", 2, 1, 1, MAX_EXTENT)


def grid_sample_operands(node: Node, x: Tensor, grid: Tensor) -> None:
    """Raise ShapeError unless the grid has a point for each output pixel (opsets 16 to 22).

    Args:
        node: The GridSample node.
        x: Images, [images, channels, ...] with at least one spatial dimension.
        grid: Coordinates in [-1, 1], [images, ..., spatial dimensions], x first.
    """
    require_dtype("grid", grid, *FLOATS)
    require(x.rank >= 3, "X has shape {}; it needs rank 3 or more", list(x.shape))
    shapes = list(grid.shape), list(x.shape)
    fits = grid.rank == x.rank and grid.shape[0] == x.shape[0] and grid.shape[-1] == x.rank - 2
    require(fits, "grid has shape {}, which is no place for each dimension of {}", *shapes)
    require(all(size >= 1 for size in x.shape[2:]), "X has shape {}: nothing to sample", shapes[1])
    modes = ("nearest", "linear", "bilinear", "cubic", "bicubic")
    require_choice(node, *("mode", "linear"), *modes)
    require_choice(node, "padding_mode", "zeros", "zeros", "border", "reflection")


def affine_grid_operands(node: Node, theta: Tensor, size: Tensor) -> None:
    """Raise ShapeError unless there is a matrix for each image of the size (ONNX AffineGrid, 20).

    Args:
        node: The AffineGrid node.
        theta: Affine matrices, [images, d, d + 1] for d spatial dimensions.
        size: The shape of the images to sample: images, channels and d sizes.
    """
    require_dtype("theta", theta, *FLOATS)
    require_dtype("size", size, "int64")
    require_rank("theta", theta, 3)
    require_rank("size", size, 1)
    count = size.shape[0]
    fits = count == 4 or count == 5
    require(fits, "size has {} numbers; it needs 4 or 5", count)
    numbers = known_numbers(size)
    images = theta.shape[0] if numbers is None else numbers[0]
    require_shape("theta", theta, (images, count - 2, count - 1), "a matrix for each image")
    for number in numbers or ():
        require(number >= 0, "size is {}", numbers)


def image_decoder_operands(node: Node, stream: Tensor) -> None:
    """Raise ShapeError unless the stream is a row of bytes (ONNX ImageDecoder, opset 20)."""
    require_dtype("encoded_stream", stream, "uint8")
    require_rank("encoded_stream", stream, 1)
    require_choice(node, "pixel_format", "RGB", "RGB", "BGR", "Grayscale")


def upsample_operands(node: Node, x: Tensor, scales: Tensor | None = None) -> None:
    """Raise ShapeError unless there is a scale for each dimension (ONNX Upsample, opsets 1 to 10).

    Args:
        node: The Upsample node; before opset 9 the scales are attributes.
        x: The input.
        scales: A factor of at least 1 for each dimension; None before opset 9.
    """
    require_choice(node, "mode", "nearest", "nearest", "linear", "bilinear")
    if scales is not None:
        _require_scales(scales, x.rank, least=1)
        return
    found = node.attrs.get("scales")
    if found is None:
        require_rank("X", x, 4)
        found = [1.0, 1.0, *(node.attrs.get(f"{side}_scale") for side in ("height", "width"))]
    require(len(found) == x.rank, "scales are {} for {} dimensions", found, x.rank)
    for scale in found:
        _require_scale(scale, least=1)


def resize_operands(
    node: Node,
    x: Tensor,
    first: Tensor | None = None,
    scales: Tensor | None = None,
    sizes: Tensor | None = None,
) -> None:
    """Raise ShapeError unless each axis has a scale, or a size (ONNX Resize, opsets 10 to 19).

    An operand without elements counts as omitted.

    Args:
        node: The Resize node.
        x: The input.
        first: In opset 10 the scales. Later the region of interest, which is read only if the
            transformation is "tf_crop_and_resize".
        scales: A factor for each axis; None if ``sizes`` says how large the output is.
        sizes: The output's size along each axis; None if there are scales.
    """
    require_choice(node, "mode", "nearest", "nearest", "linear", "cubic")
    if node.version == 10:
        if first is None:
            raise ShapeError("scales are missing")
        _require_scales(first, x.rank)
        return
    transform = require_choice(
        node, *("coordinate_transformation_mode", "half_pixel"), *_TRANSFORMS
    )
    interpolates = node.attrs.get("mode", "nearest") not in ("nearest", b"nearest")
    require(interpolates or not node.attrs.get("antialias", 0), "antialias needs linear or cubic")
    require_choice(node, *("nearest_mode", "round_prefer_floor"), *_ROUNDINGS)
    policies = ("stretch", "not_larger", "not_smaller")
    policy = require_choice(node, *("keep_aspect_ratio_policy", "stretch"), *policies)
    # The standard has the mode in opset 11 alone, but exporters also write it later.
    newer = policy != "stretch" or bool(node.attrs.get("antialias", 0))
    why = "{} fits neither antialias nor a keep_aspect_ratio_policy"
    require(transform != "tf_half_pixel_for_nn" or not newer, why, transform)
    axes = node.attrs.get("axes")
    count = len(require_axes(x.rank, axes)) if axes else x.rank
    why = f"one for each of {count} axes"
    if transform == "tf_crop_and_resize":
        if first is None:
            raise ShapeError("roi is missing")
        require_shape("roi", first, (2 * count,), f"two for each of {count} axes")
        if first.known is not None:
            finite = bool(np.isfinite(first.known).all())
            require(finite, "roi holds {}: a corner is a finite number", first.known.tolist())
        value = float(node.attrs.get("extrapolation_value", 0.0))
        require(not math.isinf(value), "extrapolation_value is {}", value)
    if scales is not None and not is_known(scales.size):
        return
    present = [operand for operand in (scales, sizes) if operand is not None and operand.size >= 1]
    require(len(present) == 1, "one of scales and sizes is needed, {} are given", len(present))
    if scales is not None and present[0] is scales:
        _require_scales(scales, count)
        return
    require_dtype("sizes", sizes, "int64")
    require_shape("sizes", sizes, (count,), why)
    for size in known_numbers(sizes) or ():
        require(size >= 1, "a size is {}", size)


def _require_scales(scales: Tensor, count: int, least: float = 0) -> None:
    """Require ``count`` scales, each finite and above 0, and at least ``least``."""
    require_dtype("scales", scales, "float32")
    require_shape("scales", scales, (count,), f"one for each of {count} dimensions")
    if scales.known is not None:
        for scale in scales.known.tolist():
            _require_scale(scale, least)


def _require_scale(scale: object, least: float) -> None:
    """Require a finite scale above 0, and at least ``least``: 1 for Upsample."""
    fits = isinstance(scale, int | float) and 0 < scale < math.inf and scale >= least
    wanted = f"at least {least}" if least else "above 0"
    require(fits, "a scale is {}; it must be finite and {}", scale, wanted)


def resized(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the output type of Resize and Upsample: each dimension times its scale, or the sizes.

    Args:
        node: The node. Those with attributes that onnx's rule handles (axes, aspect ratio,
            cropping) are left to that rule.
        types: Types of the inputs, None while unknown.
        values: Contents of constant inputs: scales or sizes may be among them.
    """
    x = tensor(types[0])
    scales = values[-1] if len(values) == (2 if node.op_type == "Upsample" else 3) else None
    if scales is None and "scales" in node.attrs:
        scales = np.asarray(node.attrs["scales"])
    plain = {"axes", "keep_aspect_ratio_policy"}.isdisjoint(node.attrs)
    cropped = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if x is None or x.shape is None or not plain:
        return infer_by_onnx(node, types, values)
    if scales is None and len(types) == 4:
        sizes = input_or_attribute(node, values, 3, "sizes")
        if sizes is None:
            return [TensorType(x.dtype, [None] * len(x.shape))]
        if len(sizes) == len(x.shape):
            return [TensorType(x.dtype, sizes)]
    if scales is None or cropped or scales.size != len(x.shape):
        return infer_by_onnx(node, types, values)
    pairs = zip(x.shape, scales.reshape(-1).tolist(), strict=True)
    return [TensorType(x.dtype, [_scaled(dim, scale) for dim, scale in pairs])]


def _scaled(dim: Dim, scale: float) -> Dim:
    """Return the dimension of a resized axis, floor(dim * scale) in float32; None if unknown."""
    if not isinstance(dim, int):
        return dim if scale == 1 else None
    if scale == int(scale):
        return dim * int(scale)
    return math.floor(float(np.float32(dim) * np.float32(scale)))


def resize_batch(call: BatchCall) -> Sequence[Batch]:
    """All axes of other sizes than before may be resized."""
    attrs, batch = call.node.attrs, call.axis_of(0)
    cropped = attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    policy = attrs.get("keep_aspect_ratio_policy", "stretch")
    if batch is None or cropped or policy != "stretch" or not call.only(0):
        return [None]
    # A scale of nearly 1 may keep the size and yet interpolate.
    rank = len(call.shapes[0])
    axes = [int(axis) % rank for axis in attrs.get("axes", range(rank))]
    scales = [known for known in call.known[1:3] if known is not None and known.size == len(axes)]
    if batch.axis in axes and any(known[axes.index(batch.axis)] != 1 for known in scales):
        return [None]
    return [batch]


# The operators of this family, each in all its versions.
declare("AffineGrid", requires=affine_grid_operands, compute=reference.affine_grid, grows=True)
declare("GridSample", requires=grid_sample_operands, compute=reference.grid_sample, batch=along(0))
declare("ImageDecoder", requires=image_decoder_operands)
declare("MaxRoiPool", requires=max_roi_pool_operands, compute=reference.max_roi_pool)
declare(
    "Resize",
    requires=resize_operands,
    infer=resized,
    compute=reference.resize,
    grows=True,
    sized_by=(1, 2, 3),
    batch=resize_batch,
)
declare("RoiAlign", requires=roi_align_operands, compute=reference.roi_align)
declare(
    "Upsample",
    requires=upsample_operands,
    infer=resized,
    compute=reference.upsample,
    grows=True,
    sized_by=(1,),
    batch=resize_batch,
)
