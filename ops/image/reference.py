"""Resize of opset 10, Upsample, GridSample and Pad, for the reference.

onnx.reference takes Resize-10's scales for a region of interest, has only whole factors of nearest
for Upsample, knows the modes of GridSample by their names of opset 20 only, and refuses the
negative pads by which Pad crops, and negative axes of Resize or a region that means nothing. It
takes sizes in double precision, where 0.7 times 10 is below 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.operator import reference
from subgraph.operators.reference import attributes, standard, variant


@reference("Resize")
def resize(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input at another size; opset 10 samples at position / scale."""
    if node.version == 10:
        return _asymmetric(node, inputs[0], inputs[1])
    given: list[Any] = [
        None if v is None or (k and v.size == 0) else v for k, v in enumerate(inputs)
    ]
    given += [None] * (4 - len(given))
    if attributes(node)["coordinate_transformation_mode"] != "tf_crop_and_resize":
        given[1] = None
    rank = inputs[0].ndim
    axes = [int(axis) % rank for axis in node.attrs.get("axes") or range(rank)]
    if given[2] is not None:
        given[2] = _exact(given[2], [inputs[0].shape[axis] for axis in axes])
    return _resized(variant(node, axes=axes) if "axes" in node.attrs else node, given, axes)


def _resized(node: Node, inputs: Sequence[Any], axes: Sequence[int]) -> Sequence[Any]:
    """Resize; an input without elements stays one, which onnx.reference does not know.

    What has one element in place of none is resized and none of it is taken.
    """
    x: Array = inputs[0]
    if x.size:
        return standard(node, inputs)
    given: list[Any] = [v if v is None else v.copy() for v in inputs]
    for k, axis in enumerate(axes):
        if x.shape[axis]:
            continue
        if given[2] is None:
            raise ShapeError(f"axis {axis} has no elements to make {given[3][k]} of")
        given[2][k] = 1
    given[0] = np.zeros([max(size, 1) for size in x.shape], x.dtype)
    none = tuple(slice(0 if size == 0 else None) for size in x.shape)
    return [standard(node, given)[0][none]]


def _exact(scales: Array, sizes: Sequence[int]) -> Array:
    """Return scales in double precision whose products with sizes are whole where floats' are."""
    if len(scales) != len(sizes):
        return scales
    before = np.array(sizes, np.float64)
    after = np.floor(before.astype(np.float32) * scales.astype(np.float32)).astype(np.float64)
    missed = np.floor(before * scales) != after
    return np.where(missed, np.nextafter(after / np.maximum(before, 1), np.inf), scales)


@reference("GridSample")
def grid_sample(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return samples of an image at the grid's places; opset 16 has longer names of the modes."""
    names = {"bilinear": "linear", "bicubic": "cubic"}
    mode = str(attributes(node)["mode"])
    x, grid = inputs
    shape = (*x.shape[:2], *grid.shape[1:-1])
    if 0 in shape:  # of which onnx.reference returns no list
        return [np.zeros(shape, x.dtype)]
    return standard(variant(node, version=22, mode=names.get(mode, mode)), inputs)


@reference("Col2Im")
def col2im(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return images of sums of windows; onnx.reference knows no batch without images."""
    x: Array = inputs[0]
    if x.shape[0]:
        return standard(node, inputs)
    one = np.zeros((1, *x.shape[1:]), x.dtype)
    return [standard(node, [one, *inputs[1:]])[0][:0]]


@reference("Upsample")
def upsample(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input at a larger size: Resize of opset 10 under its former name."""
    if node.version >= 9:
        return _asymmetric(node, inputs[0], inputs[1])
    if "scales" in node.attrs:
        scales = node.attrs["scales"]
    else:
        scales = (1.0, 1.0, node.attrs["height_scale"], node.attrs["width_scale"])
    return _asymmetric(node, inputs[0], np.array(scales, np.float32))


def _asymmetric(node: Node, x: Array, scales: Array) -> Sequence[Any]:
    if str(node.attrs.get("mode", "nearest")) == "nearest":
        return [_nearest(x, scales)]
    options = {"mode": "linear", "coordinate_transformation_mode": "asymmetric"}
    newer = Node("Resize", node.inputs[:1], outputs=1, name=node.name, version=13, attrs=options)
    given = [x, None, _exact(scales.astype(np.float32), x.shape), None]
    return _resized(newer, given, range(x.ndim))


def _nearest(x: Array, scales: Array) -> Array:
    """Take the element at or before position / scale, where an axis shrinks the one at or after."""
    if len(scales) != x.ndim:
        raise ShapeError(f"{len(scales)} scales do not fit {x.ndim} dimensions")
    for axis, scale in enumerate(scales.astype(np.float32)):
        size = x.shape[axis]
        at = np.arange(int(size * scale), dtype=np.float32) / scale
        place = np.ceil(at) if scale < 1 else np.floor(at)
        x = np.take(x, np.clip(place, 0, size - 1).astype(np.int64), axis)
    return x


@reference("Pad")
def pad(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input with values before and after each axis; negative pads take some away."""
    x, pads, value, axes = _pad_arguments(node, inputs)
    mode = str(attributes(node).get("mode") or "constant")
    if len(pads) != 2 * len(axes):
        raise ShapeError(f"{len(pads)} pads do not fit {len(axes)} axes")
    before, after = [0] * x.ndim, [0] * x.ndim
    for k, axis in enumerate(axes):
        if not -x.ndim <= axis < x.ndim:
            raise ShapeError(f"axis {axis} is out of range for {x.ndim} dimensions")
        before[axis], after[axis] = int(pads[k]), int(pads[k + len(axes)])
    if mode == "constant":
        return [_constant(x, before, after, x.dtype.type(0) if value is None else value)]
    crop = [
        slice(max(-b, 0), size - max(-a, 0))
        for b, a, size in zip(before, after, x.shape, strict=True)
    ]
    x = x[tuple(crop)]
    widths = [(max(b, 0), max(a, 0)) for b, a in zip(before, after, strict=True)]
    if mode not in ("reflect", "edge", "wrap"):
        raise ShapeError(f"mode {mode!r} is not constant, reflect, edge or wrap")
    pad: Any = np.pad
    return [pad(x, widths, mode=mode)]


def _constant(x: Array, before: Sequence[int], after: Sequence[int], fill: Any) -> Array:
    """Return ``fill`` around the elements; what negative pads cut off may be more than there is."""
    ends = list(zip(before, after, x.shape, strict=True))
    shape = [size + b + a for b, a, size in ends]
    if any(size < 0 for size in shape):
        raise ShapeError(f"pads {list(before)} and {list(after)} cut more than {list(x.shape)} off")
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
    if node.version and node.version < 11:
        pads = node.attrs.get("pads") or node.attrs.get("paddings") or ()
        return x, pads, node.attrs.get("value", 0.0), every
    value = inputs[2] if len(inputs) > 2 else None
    if value is not None:
        value = np.asarray(value).reshape(-1)[0]
    axes = every
    if len(inputs) > 3 and inputs[3] is not None:
        axes = tuple(int(axis) for axis in inputs[3])
    return x, inputs[1].reshape(-1).tolist(), value, axes
