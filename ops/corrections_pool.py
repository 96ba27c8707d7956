"""GlobalLpPool, LpPool-1 and MaxRoiPool, for the reference: onnx.reference has none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import reference
from subgraph.reference import attributes, standard, variant

Array = np.ndarray[Any, Any]


@reference("GlobalLpPool")
def global_lp_pool(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the p-norm over all spatial axes; opset 1 states p as a float."""
    x: Array = inputs[0]
    power = float(attributes(node)["p"])
    axes = tuple(range(2, x.ndim))
    total = (np.abs(x) ** power).sum(axis=axes, keepdims=True)
    return [np.asarray(total ** (1 / power)).astype(x.dtype)]


@reference("LpPool")
def lp_pool(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the p-norm over windows; opset 1 states p as a float."""
    if node.version == 1:
        newer = variant(node, version=2, p=int(float(node.attrs.get("p", 2.0))))
        return standard(newer, inputs)
    return standard(node, inputs)


@reference("MaxRoiPool")
def max_roi_pool(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the maxima over a grid of bins in each region (image, x1, y1, x2, y2), ends included.

    As in Fast R-CNN (Girshick 2015): coordinates are scaled and rounded, bins overlap where the
    size does not divide, an empty bin gives 0.
    """
    x, rois = inputs
    height, width = (int(size) for size in node.attrs["pooled_shape"])
    scale = float(attributes(node)["spatial_scale"])
    if x.ndim != 4 or rois.ndim != 2 or rois.shape[1] != 5:
        raise ShapeError(f"input {x.shape} and regions {rois.shape} need 4 and 2 x 5 dimensions")
    result = np.zeros((rois.shape[0], x.shape[1], height, width), x.dtype)
    for number, roi in enumerate(rois.astype(np.float64)):
        image = int(roi[0])
        if not 0 <= image < x.shape[0]:
            raise ShapeError(f"region {number} is of image {image}; there are {x.shape[0]}")
        left, top, right, bottom = np.floor(roi[1:] * scale + 0.5).astype(np.int64)
        rows = _bins(top, bottom, height, x.shape[2])
        columns = _bins(left, right, width, x.shape[3])
        for i, (first, last) in enumerate(rows):
            for j, (begin, end) in enumerate(columns):
                if first < last and begin < end:
                    result[number, :, i, j] = x[image, :, first:last, begin:end].max(axis=(1, 2))
    return [result]


def _bins(first: int, last: int, count: int, size: int) -> list[tuple[int, int]]:
    step = max(last - first + 1, 1) / count
    starts = [int(np.floor(k * step)) + first for k in range(count)]
    ends = [int(np.ceil((k + 1) * step)) + first for k in range(count)]
    return [(min(max(a, 0), size), min(max(b, 0), size)) for a, b in zip(starts, ends, strict=True)]
