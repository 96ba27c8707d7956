"""Operators on images for the REFERENCE device, where onnx.reference errs.

onnx.reference takes the scales of Resize-10 for a region of interest; scales by integers only in
Upsample "nearest"; knows the modes of GridSample only by their names of opset 20; lacks
tf_half_pixel_for_nn of Resize; refuses negative axes of Resize and a region of interest that is not
used; computes sizes in double precision, where 0.7 times 10 is below 7; and begins an axis of one
element at -0.5 in "pytorch_half_pixel".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import LimitError, ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import (
    Array,
)
from subgraph.operators.reference import attributes, standard, variant
from subgraph.operators.schema import is_before

from .arguments import MAX_PIXELS, MAX_SAMPLES

MODES = {"bilinear": "linear", "bicubic": "cubic"}  # names in opset 16, and since opset 20
# Bound of coordinates in pixels, as in sampling_kernels.py.
_FAR = 1e9
# Samples of a region. onnx.reference takes about a microsecond for each (an estimate).
_MAX_REGION_SAMPLES = 1 << 24


def resize(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the resized input; opset 10 samples at position / scale."""
    if node.version == 10:
        return _asymmetric(node, inputs[0], inputs[1])
    operands: list[Any] = [
        None if v is None or (k and v.size == 0) else v for k, v in enumerate(inputs)
    ]
    operands += [None] * (4 - len(operands))
    options = attributes(node)
    if options["coordinate_transformation_mode"] != "tf_crop_and_resize":
        operands[1] = None
    if options["mode"] == "nearest":
        node = variant(node, drop=["exclude_outside"])  # one element has no weights
    rank = inputs[0].ndim
    axes = [int(axis) % rank for axis in node.attrs.get("axes") or range(rank)]
    sizes = [inputs[0].shape[axis] for axis in axes]
    if operands[2] is not None:
        operands[2] = _exact(operands[2], sizes)
    node = variant(node, axes=axes) if "axes" in node.attrs else node
    if options["coordinate_transformation_mode"] == "tf_half_pixel_for_nn":
        return _between(node, operands, axes, sizes)
    policy = options.get("keep_aspect_ratio_policy", "stretch")
    if (options["coordinate_transformation_mode"], policy) == ("pytorch_half_pixel", "stretch"):
        return _of_pytorch(node, operands, axes, sizes)
    return _resized(node, operands, axes)


def _between(
    node: Node, inputs: Sequence[Any], axes: Sequence[int], sizes: Sequence[int]
) -> Sequence[Any]:
    """Return the samples at (position + 0.5) / scale, which onnx.reference does not know.

    They are the odd ones of twice as many at position / scale. Axes of scale 1 are not resized.
    """
    operands = list(inputs)
    last = 2 if operands[2] is not None else 3
    ones = 1.0 if last == 2 else np.array(sizes)
    resized = operands[last] != ones
    operands[last] = np.where(resized, 2 * operands[last], operands[last])
    every = _resized(variant(node, coordinate_transformation_mode="asymmetric"), operands, axes)
    odd = [slice(None)] * operands[0].ndim
    for axis, changed in zip(axes, resized, strict=True):
        if changed:
            odd[axis] = slice(1, None, 2)
    return [every[0][tuple(odd)]]


def _of_pytorch(
    node: Node, inputs: Sequence[Any], axes: Sequence[int], sizes: Sequence[int]
) -> Sequence[Any]:
    """Return the result of "pytorch_half_pixel", in which an axis of one element begins at 0.

    onnx.reference begins at -0.5, and only if scale times size is 1 exactly. So axes that become
    one element are resized on their own, by "asymmetric", which begins at 0.
    """
    last = 2 if inputs[2] is not None else 3
    wanted, before = inputs[last], np.array(sizes)
    after = np.floor(wanted * before) if last == 2 else wanted
    alone = (after == 1) & (before > 1)
    if not alone.any():
        return _resized(node, inputs, axes)
    ones = np.ones_like(wanted) if last == 2 else before
    others, own = list(inputs), list(inputs)
    others[last] = np.where(alone, ones, wanted)
    own[0] = _resized(node, others, axes)[0]
    own[last] = np.where(alone, wanted, ones if last == 2 else wanted)
    return _resized(variant(node, coordinate_transformation_mode="asymmetric"), own, axes)


def _resized(node: Node, inputs: Sequence[Any], axes: Sequence[int]) -> Sequence[Any]:
    """Resize; an empty input gives an empty result, which onnx.reference does not support.

    An empty dimension is resized as if it had one element, and then cut to none.
    """
    x: Array = inputs[0]
    if x.size:
        options = attributes(node)
        cropped = str(options.get("coordinate_transformation_mode")) == "tf_crop_and_resize"
        if x.dtype.kind not in "iu" or str(options["mode"]) != "nearest" or cropped:
            return standard(node, inputs)
        # onnx.reference computes in float64, which does not hold all integers: resize indices.
        indices: Any = np.arange(x.size, dtype=np.float64)
        found: Array = standard(node, [indices.reshape(x.shape), *inputs[1:]])[0]
        return [x.reshape(-1)[found.astype(np.int64)]]
    operands: list[Any] = [v if v is None else v.copy() for v in inputs]
    for k, axis in enumerate(axes):
        if x.shape[axis]:
            continue
        if operands[2] is None:
            raise ShapeError(f"axis {axis} has no elements to make {operands[3][k]} of")
        operands[2][k] = 1
    operands[0] = np.zeros([max(size, 1) for size in x.shape], x.dtype)
    none = tuple(slice(0 if size == 0 else None) for size in x.shape)
    return [standard(node, operands)[0][none]]


def exact_scale(scale: float, size: int) -> float:
    """Return a scale for which floor(size * scale) in float64 is the size that float32 gives.

    The size of the result is computed in float32, in which 0.7 times 10 is 7 and not below.

    Args:
        scale: The stated scale, a float32 number above 0.
        size: Size of the axis that it scales.
    """
    after = math.floor(float(np.float32(size) * np.float32(scale)))
    if math.floor(size * scale) == after:
        return scale
    return math.nextafter(after / max(size, 1), math.inf)


def _exact(scales: Array, sizes: Sequence[int]) -> Array:
    """Return the scales of axes, each as `exact_scale` returns it."""
    pairs = zip(scales.tolist(), sizes, strict=True)
    return np.array([exact_scale(scale, size) for scale, size in pairs])


def grid_sample(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return samples at the points of the grid; opset 16 has longer names of the modes."""
    mode = str(attributes(node)["mode"])
    x, grid = inputs
    shape = (*x.shape[:2], *grid.shape[1:-1])
    if 0 in shape:  # onnx.reference returns no list for an empty result
        return [np.zeros(shape, x.dtype)]
    return standard(variant(node, version=22, mode=MODES.get(mode, mode)), inputs)


def upsample(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the enlarged input; Upsample is the former name of Resize-10."""
    if not is_before(node, 9):
        return _asymmetric(node, inputs[0], inputs[1])
    if "scales" in node.attrs:
        scales = node.attrs["scales"]
    else:
        scales = (1.0, 1.0, node.attrs["height_scale"], node.attrs["width_scale"])
    return _asymmetric(node, inputs[0], np.array(scales, np.float32))


def _asymmetric(node: Node, x: Array, scales: Array) -> Sequence[Any]:
    """Resize with the "asymmetric" transformation: samples lie at position / scale."""
    if str(node.attrs.get("mode", "nearest")) == "nearest":
        return [_nearest(x, scales)]
    options = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    newer = Node("Resize", node.inputs[:1], outputs=1, name=node.name, version=13, attrs=options)
    operands = [x, None, _exact(scales.astype(np.float32), x.shape), None]
    return _resized(newer, operands, range(x.ndim))


def _nearest(x: Array, scales: Array) -> Array:
    """Take the element at floor(position / scale), along axes that shrink at the ceiling."""
    for axis, scale in enumerate(scales.astype(np.float32)):
        size = x.shape[axis]
        at = np.arange(int(size * scale), dtype=np.float32) / scale
        place = np.ceil(at) if scale < 1 else np.floor(at)
        x = np.take(x, np.clip(place, 0, size - 1).astype(np.int64), axis)
    return x


def affine_grid(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the points to which an affine map takes the output pixels; theta is (N, d, d + 1)."""
    theta: Array = inputs[0]
    sizes = [int(size) for size in inputs[1]][2:]
    points = pixel_coordinates(sizes, bool(attributes(node)["align_corners"]))
    grid: Array = np.einsum("...k,ndk->n...d", points, theta.astype(np.float64))
    return [grid.astype(theta.dtype)]


def pixel_coordinates(sizes: Sequence[int], corners: bool) -> Array:
    """Return x, y, ... and 1 for each output pixel of AffineGrid, ``[*sizes, dimensions + 1]``.

    Args:
        sizes: Pixels along each axis, the last of which is that of x.
        corners: The outermost pixels have the coordinates -1 and 1. A single one has -1.
    """
    lines = [np.linspace(-1, 1, n) if corners else (2 * np.arange(n) + 1) / n - 1 for n in sizes]
    axes = np.meshgrid(*lines, indexing="ij")
    return np.stack([*reversed(axes), np.ones(sizes)], axis=-1)


def max_roi_pool(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the maxima over a grid of bins in each region (image, x1, y1, x2, y2), ends included.

    As in Fast R-CNN (Girshick 2015): coordinates are scaled and rounded, bins overlap where the
    size does not divide, an empty bin gives 0.
    """
    x, rois = inputs
    height, width = (int(size) for size in node.attrs["pooled_shape"])
    scale = float(attributes(node)["spatial_scale"])
    result = np.zeros((rois.shape[0], x.shape[1], height, width), x.dtype)
    for number, roi in enumerate(rois.astype(np.float64)):
        image = int(roi[0])
        # Halves are rounded away from zero. NaN counts as 1, as in the kernels.
        scaled = np.nan_to_num(roi[1:] * scale, nan=1.0)
        ends = np.copysign(np.floor(np.abs(scaled) + 0.5), scaled).clip(-_FAR, _FAR)
        left, top, right, bottom = ends.astype(np.int64)
        rows = _bins(top, bottom, height, x.shape[2])
        columns = _bins(left, right, width, x.shape[3])
        for i, (first, last) in enumerate(rows):
            for j, (begin, end) in enumerate(columns):
                if first < last and begin < end:
                    result[number, :, i, j] = x[image, :, first:last, begin:end].max(axis=(1, 2))
    return [result]


def _bins(first: int, last: int, count: int, size: int) -> list[tuple[int, int]]:
    """Return the begin and end of each bin in pixels, clamped to [0, size]."""
    pixels = max(int(last - first) + 1, 1)
    starts = [first + k * pixels // count for k in range(count)]
    ends = [first - (-(k + 1) * pixels // count) for k in range(count)]
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in zip(starts, ends, strict=True)]


def roi_align(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return RoiAlign; opset 10 means output_half_pixel."""
    _check_samples(node, inputs[1])
    if is_before(node, 16):
        mode = "output_half_pixel"
        return standard(variant(node, version=16, coordinate_transformation_mode=mode), inputs)
    return standard(node, inputs)


def _check_samples(node: Node, rois: Array) -> None:
    """Check the size of regions, and their number of samples if it follows from the size.

    Raises:
        ShapeError: A region is not finite, or a bin has more samples than any device takes.
        LimitError: A region has more samples than this device takes.
    """
    scale = float(node.attrs.get("spatial_scale", 1.0))
    sides = (rois[:, 2:].astype(np.float64) - rois[:, :2]) * scale
    bins = [float(node.attrs.get(f"output_{side}", 1)) for side in ("width", "height")]
    pixels = sides / bins
    if node.attrs.get("sampling_ratio", 0):
        if not np.all(np.abs(pixels) <= MAX_PIXELS):
            raise ShapeError(f"a bin of rois has more than {MAX_PIXELS} pixels, or is NaN")
        return
    if not np.all((pixels >= -MAX_PIXELS) & (pixels <= MAX_SAMPLES)):
        raise ShapeError(
            f"a bin of rois has more than {MAX_SAMPLES} samples along an axis, or is NaN; "
            "set sampling_ratio"
        )
    count = np.maximum(np.ceil(sides / bins), 1).prod(axis=1) * math.prod(bins)
    if not np.all(count <= _MAX_REGION_SAMPLES):
        raise LimitError(
            f"a region has {np.max(count):,.0f} samples, more than {_MAX_REGION_SAMPLES:,}; "
            "set sampling_ratio"
        )
