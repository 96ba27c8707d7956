"""Convolutions and pools: shape rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph import Node
from subgraph.op import infer_by_onnx, shape_rule
from subgraph.types import Dim, Shape, TensorType, ValueType

from .elementwise import Types, Values, tensor
from .elementwise_expressions import text
from .movement import stated


def _numbers(node: Node, name: str, count: int, default: int) -> list[int]:
    given = node.attrs.get(name)
    if given is None or len(given) == 0:
        return [default] * count
    if len(given) != count:
        raise ShapeError(f"{name} has {len(given)} numbers, {count} are needed")
    return [int(v) for v in given]


def _spatial(node: Node, shape: Shape, kernel: Sequence[Dim]) -> list[Dim]:
    """Return the sizes of what windows give over the dimensions from the third on."""
    count = len(shape) - 2
    if len(kernel) != count:
        raise ShapeError(f"a window of {len(kernel)} dimensions over {count}")
    strides, dilations = (_numbers(node, name, count, 1) for name in ("strides", "dilations"))
    pads = _numbers(node, "pads", 2 * count, 0)
    auto = text(node.attrs.get("auto_pad", "NOTSET"))
    found: list[Dim] = []
    for k, (size, taps) in enumerate(zip(shape[2:], kernel, strict=True)):
        before, after = (pads[k], pads[count + k]) if auto == "NOTSET" else (0, 0)
        if auto.startswith("SAME"):
            same = size if strides[k] == 1 else None
            found.append(-(-size // strides[k]) if isinstance(size, int) else same)
        elif not isinstance(taps, int):
            found.append(None)
        else:
            reach = (taps - 1) * dilations[k] + 1
            ceil = bool(node.attrs.get("ceil_mode", 0))
            found.append(_count(size, reach, strides[k], before, after, ceil))
    return found


def _count(size: Dim, reach: int, stride: int, before: int, after: int, ceil: bool) -> Dim:
    """Return how many windows fit into one dimension."""
    if not isinstance(size, int):
        return size if stride == 1 and before + after == reach - 1 else None
    room = size + before + after - reach
    if room < 0:
        raise ShapeError(
            f"a window of {reach} does not fit into {size} with pads {before}, {after}"
        )
    count = room // stride + 1
    # A last window begins inside the input or before it, never in the pads behind.
    if ceil and room % stride and count * stride < size + before:
        count += 1
    return count


@shape_rule("Conv")
def convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give one channel for each filter, and as many places as filters fit."""
    x = tensor(types[0])
    return [None if x is None else _filtered(node, x.dtype, types[0], types[1])]


@shape_rule("ConvInteger")
def convolution_of_bytes(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """As Conv, of bytes: with sums of 32 bits."""
    return [_filtered(node, "int32", types[0], types[1])]


@shape_rule("QLinearConv")
def qlinear_convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """As Conv; the dtype is that of the result's zero point."""
    zero = tensor(types[7])
    return [None if zero is None else _filtered(node, zero.dtype, types[0], types[3])]


def _filtered(
    node: Node, dtype: str, image: ValueType | None, filters: ValueType | None
) -> TensorType:
    x, w = tensor(image), tensor(filters)
    if x is None or x.shape is None or w is None or w.shape is None:
        return TensorType(dtype)
    if len(x.shape) < 3 or len(w.shape) != len(x.shape):
        raise ShapeError(f"filters of rank {len(w.shape)} for an input of rank {len(x.shape)}")
    groups = int(node.attrs.get("group", 1))
    channels, taken = x.shape[1], w.shape[1]
    if isinstance(channels, int) and isinstance(taken, int) and channels != taken * groups:
        raise ShapeError(
            f"{channels} channels; the filters take {taken} in each of {groups} groups"
        )
    stated = node.attrs.get("kernel_shape")
    kernel = w.shape[2:] if not stated else tuple(int(v) for v in stated)
    return TensorType(dtype, (x.shape[0], w.shape[0], *_spatial(node, x.shape, kernel)))


@shape_rule("ConvTranspose")
def transposed(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give room for the filters of all places; other ways of saying the size are left to onnx."""
    x, w = tensor(types[0]), tensor(types[1])
    auto = text(node.attrs.get("auto_pad", "NOTSET"))
    if x is None or w is None or auto != "NOTSET" or node.attrs.get("output_shape"):
        return infer_by_onnx(node, types, values)
    sizes, taps = list(x.shape or ()), list(w.shape or ())
    known = all(isinstance(dim, int) for dim in (*sizes[1:], *taps))
    if not known or len(sizes) != len(taps) or len(sizes) < 3 or sizes[1] != taps[0]:
        return infer_by_onnx(node, types, values)
    groups = int(node.attrs.get("group", 1))
    count = len(sizes) - 2
    strides, dilations = (_numbers(node, name, count, 1) for name in ("strides", "dilations"))
    pads, more = _numbers(node, "pads", 2 * count, 0), _numbers(node, "output_padding", count, 0)
    places: list[Dim] = [
        strides[k] * (size - 1) + more[k] + (tap - 1) * dilations[k] + 1 - pads[k] - pads[count + k]
        for k, (size, tap) in enumerate(zip(sizes[2:], taps[2:], strict=True))
        if isinstance(size, int) and isinstance(tap, int)
    ]
    channels = taps[1] * groups if isinstance(taps[1], int) else None
    return [TensorType(x.dtype, (sizes[0], channels, *places))]


@shape_rule("AveragePool", "LpPool", "MaxPool")
def pool(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give as many places as windows fit; MaxPool's second output has their indices."""
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    if len(x.shape) < 3:
        raise ShapeError(f"a pool over an input of rank {len(x.shape)}")
    kernel = [int(v) for v in node.attrs["kernel_shape"]]
    shape = (*x.shape[:2], *_spatial(node, x.shape, kernel))
    return [TensorType(x.dtype, shape), TensorType("int64", shape)]


@shape_rule("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool")
def whole(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give one place for each channel."""
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    return [TensorType(x.dtype, (*x.shape[:2], *(1 for _ in x.shape[2:])))]


@shape_rule("Resize", "Upsample")
def resized(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Multiply each dimension by its scale, or give the sizes; onnx knows how axes are left out."""
    x = tensor(types[0])
    scales = values[-1] if len(values) == (2 if node.op_type == "Upsample" else 3) else None
    if scales is None and "scales" in node.attrs:
        scales = np.asarray(node.attrs["scales"])
    plain = {"axes", "keep_aspect_ratio_policy"}.isdisjoint(node.attrs)
    cropped = node.attrs.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    if x is None or x.shape is None or not plain:
        return infer_by_onnx(node, types, values)
    if scales is None and len(types) == 4:
        sizes = stated(node, values, 3, "sizes")
        if sizes is None:
            return [TensorType(x.dtype, [None] * len(x.shape))]
        if len(sizes) == len(x.shape):
            return [TensorType(x.dtype, sizes)]
    if scales is None or cropped or scales.size != len(x.shape):
        return infer_by_onnx(node, types, values)
    pairs = zip(x.shape, scales.reshape(-1).tolist(), strict=True)
    return [TensorType(x.dtype, [_scaled(dim, scale) for dim, scale in pairs])]


def _scaled(dim: Dim, scale: float) -> Dim:
    if not isinstance(dim, int):
        return dim if scale == 1 else None
    if scale == int(scale):
        return dim * int(scale)
    return math.floor(float(np.float32(dim) * np.float32(scale)))
