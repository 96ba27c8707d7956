"""Operators that unfold or fold windows and blocks: requirements, shape inference, reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.graph.graph import Node
from subgraph.graph.types import (
    Array,
    Dim,
    TensorType,
    ValueType,
)
from subgraph.operators.batch_axes import along
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard
from subgraph.operators.requirements import (
    Tensor,
    is_known,
    known_numbers,
    require,
    require_choice,
    require_dtype,
    require_numbers,
    require_rank,
    require_shape,
    require_whole_number,
)
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.pool.windows import (
    MAX_EXTENT,
    convolution,
    require_filters,
    require_image,
    windows_of,
)
from subgraph.ops.shared.half_precision import in_float32
from subgraph.ops.shared.strides import product


def deform_conv_operands(
    node: Node,
    x: Tensor,
    w: Tensor,
    offset: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
) -> None:
    """Require offsets for each tap of each window (ONNX DeformConv, 19 to 22).

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``.
        w: Filters, ``[M, C / group, *kernel]``.
        offset: ``[N, offset_group * taps * dimensions, *windows]``.
        bias: ``[M]``, or None.
        mask: Factors of samples, ``[N, offset_group * taps, *windows]``, or None.

    Raises:
        ShapeError: They do not fit.
    """
    require_dtype("X", x, *FLOATS)
    for name, operand in (("W", w), ("offset", offset), ("B", bias), ("mask", mask)):
        require_dtype(name, operand, x.dtype)
    require_filters(node, x, w, bias)
    offsets = require_whole_number(node, "offset_group", 1, least=1)
    channels, count = x.shape[1], x.rank - 2
    require(
        channels % offsets == 0,
        "{} channels do not divide into {} offset groups",
        channels,
        offsets,
    )
    windows = windows_of(node, count)
    taps, counts = offsets, list[int]()
    for k, (size, each) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        taps = taps * each
        room = size + sum(windows.pads[k]) - (each - 1) * windows.dilations[k] - 1
        counts.append(room // windows.strides[k] + 1)
    why = "for each tap of each window of each offset group"
    require_shape("offset", offset, (x.shape[0], taps * count, *counts), f"{count} {why}")
    require_shape("mask", mask, (x.shape[0], taps, *counts), f"one {why}")


def col_to_im_operands(node: Node, x: Tensor, image: Tensor, block: Tensor) -> None:
    """Require that the columns are the blocks of an image (ONNX Col2Im, 18).

    Args:
        node: The node.
        x: Columns, ``[N, C * taps, windows]``.
        image: Sizes of an image, 1-D int64.
        block: Taps of a window, 1-D int64.

    Raises:
        ShapeError: They do not fit.
    """
    require_rank("input", x, 3)
    for name, operand in (("image_shape", image), ("block_shape", block)):
        require_dtype(name, operand, "int64")
        require_rank(name, operand, 1)
    count = image.shape[0]
    require_shape("block_shape", block, (count,), "as many as image_shape has")
    if not is_known(count):
        return
    windows = windows_of(node, count)
    sizes, taps = known_numbers(image), known_numbers(block)
    if sizes is None or taps is None:
        return
    counts: list[int] = []
    for k, (size, each) in enumerate(zip(sizes, taps, strict=True)):
        require(size >= 1 and each >= 1, "blocks of {} in an image of {}", taps, sizes)
        room = size + sum(windows.pads[k]) - (each - 1) * windows.dilations[k] - 1
        require(room >= 0, "blocks of {} do not fit into an image of {}", taps, sizes)
        counts.append(room // windows.strides[k] + 1)
    total, held = math.prod(counts), math.prod(taps)
    require(
        x.shape[1] >= held and x.shape[1] % held == 0,
        "{} rows of columns; blocks of {} have {} elements a channel",
        x.shape[1],
        taps,
        held,
    )
    require(x.shape[2] == total, "{} columns; the image has {} blocks", x.shape[2], total)


def max_unpool_operands(
    node: Node, x: Tensor, indices: Tensor, output_shape: Tensor | None = None
) -> None:
    """Require an index into the output for each element (ONNX MaxUnpool, 9 to 22).

    Args:
        node: The node.
        x: Maxima, ``[N, C, *windows]``.
        indices: Index of each maximum in the flat output, int64, shaped as x.
        output_shape: Sizes of the output, 1-D int64, at least those that windows imply; None:
            those.

    Raises:
        ShapeError: They do not fit.
    """
    require_dtype("X", x, *FLOATS)
    require_dtype("I", indices, "int64")
    require_image(x)
    require_shape("I", indices, x.shape, "one for each element of the input")
    count = x.rank - 2
    require(bool(node.attrs.get("kernel_shape")), "kernel_shape is missing")
    kernel = require_numbers(node, "kernel_shape", count, 1, 1, MAX_EXTENT)
    windows = windows_of(node, count)
    image: list[int] = [
        (size - 1) * windows.strides[k] - sum(windows.pads[k]) + kernel[k]
        for k, size in enumerate(x.shape[2:])
    ]
    total = x.shape[0] * x.shape[1]
    for size in image:
        require(size >= 0, "windows of {} make an image of {}", kernel, image)
        total = total * size
    _require_output_shape(output_shape, (*x.shape[:2], *image))
    known = indices.known
    if known is not None and known.size and not known.dtype.hasobject:
        least, most = known.min(), known.max()
        fits = least >= 0 and most < total
        require(fits, "indices from {} to {} into {} elements", least, most, total)


def _require_output_shape(output_shape: Tensor | None, least: Sequence[int]) -> None:
    if output_shape is None:
        return
    require_dtype("output_shape", output_shape, "int64")
    require_shape("output_shape", output_shape, (len(least),), "a size for each dimension")
    sizes = known_numbers(output_shape)
    if sizes is None:
        return
    fits = all(a == b for a, b in zip(sizes[:2], least[:2], strict=True))
    fits = fits and all(a >= b for a, b in zip(sizes[2:], least[2:], strict=True))
    require(fits, "output_shape is {}; windows make {}", sizes, list(least))


def blocks_of_pixels_operands(node: Node, x: Tensor) -> None:
    """Require that channels, or rows and columns, divide into blocks (ONNX, 1 to 13).

    For DepthToSpace and SpaceToDepth.
    """
    require_rank("input", x, 4)
    size = require_whole_number(node, "blocksize", least=1, most=MAX_EXTENT)
    require_choice(node, "mode", "DCR", "DCR", "CRD")
    deep = node.op_type == "DepthToSpace"
    parts, split = (size * size, x.shape[1:2]) if deep else (size, x.shape[2:])
    for dim in split:
        require(dim % parts == 0, "dimension {} of {} is no multiple of {}", dim, x, parts)


def blocks_of_pixels(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of DepthToSpace and SpaceToDepth: blocks of pixels from or to channels.

    Args:
        node: The node, with ``blocksize``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype, (None,) * 4)]
    size = int(node.attrs["blocksize"])
    batch, channels, *space = x.shape
    if node.op_type == "SpaceToDepth":
        deep = product((channels, size * size))
        return [TensorType(x.dtype, [batch, deep, *(_divided(dim, size) for dim in space)])]
    wide = [product((dim, size)) for dim in space]
    return [TensorType(x.dtype, [batch, _divided(channels, size * size), *wide])]


def _divided(dim: Dim, parts: int) -> Dim:
    if not isinstance(dim, int):
        return dim if parts == 1 else None
    return dim // parts


def col2im(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the images of Col2Im; onnx.reference fails for a batch without images."""
    x: Array = inputs[0]
    if x.shape[0]:
        return standard(node, inputs)
    one = np.zeros((1, *x.shape[1:]), x.dtype)
    return [standard(node, [one, *inputs[1:]])[0][:0]]


def deform_conv(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute DeformConv; onnx.reference takes no image of one pixel and loops over windows.

    A sample is interpolated linearly between the pixels around its position along each dimension;
    pixels outside the image are 0, and so is a sample at a position that is not finite.
    """
    x: Array = inputs[0]
    weight: Array = inputs[1]
    offset: Array = inputs[2]
    bias, mask = [*inputs[3:], None, None][:2]
    groups, offsets = (int(node.attrs.get(name, 1)) for name in ("group", "offset_group"))
    count, kernel, counts = x.ndim - 2, weight.shape[2:], offset.shape[2:]
    windows, images, channels = windows_of(node, count), len(x), x.shape[1]
    moved = offset.reshape(images, offsets, *kernel, count, *counts)
    positions: list[Array] = []
    for d in range(count):
        taps = np.arange(kernel[d], dtype=np.float64) * windows.dilations[d] - windows.pads[d][0]
        starts = np.arange(counts[d], dtype=np.float64) * windows.strides[d]
        # Both lie along their own one of the last 2 * count dimensions.
        taps, starts = (
            each.reshape(-1, *[1] * behind)
            for each, behind in ((taps, 2 * count - d - 1), (starts, count - d - 1))
        )
        positions.append(np.take(moved, d, 2 + count) + taps + starts)
    # The last pixel stands for all outside.
    plane = x.reshape(images, offsets, channels // offsets, math.prod(x.shape[2:]))
    plane = np.concatenate([plane, np.zeros_like(x, shape=(*plane.shape[:3], 1))], axis=3)
    flat = (images, offsets, 1, math.prod(kernel) * math.prod(counts))
    columns: Array = np.zeros((), x.dtype)
    for corner in itertools.product((0, 1), repeat=count):
        factor, index, inside = np.ones(flat), np.zeros(flat, np.int64), np.ones(flat, bool)
        for size, side, each in zip(x.shape[2:], corner, positions, strict=True):
            position = each.reshape(flat)
            before = np.floor(position)
            at, fraction = before + side, position - before
            within = (at >= 0) & (at < size)
            factor, inside = factor * (fraction if side else 1 - fraction), inside & within
            index = index * size + np.where(within, at, 0).astype(np.int64)
        pixels = np.take_along_axis(plane, np.where(inside, index, plane.shape[3] - 1), axis=3)
        columns = columns + pixels * np.where(inside, factor, 0).astype(x.dtype)
    if mask is not None:
        columns = columns * mask.reshape(flat)
    columns = columns.reshape(images, groups, math.prod(weight.shape[1:]), math.prod(counts))
    filters = weight.reshape(groups, len(weight) // groups, math.prod(weight.shape[1:]))
    result: Array = (filters @ columns).reshape(images, len(weight), *counts)
    return [result if bias is None else result + bias.reshape(-1, *[1] * count)]


# The operators of this family, each in all its versions.
declare("Col2Im", requires=col_to_im_operands, compute=col2im, grows=True, batch=along(0))
declare(
    "DepthToSpace",
    "SpaceToDepth",
    requires=blocks_of_pixels_operands,
    infer=blocks_of_pixels,
    batch=along(0),
)
declare("MaxUnpool", requires=max_unpool_operands, grows=True)
declare(
    "DeformConv",
    requires=deform_conv_operands,
    infer=convolution,
    compute=in_float32(deform_conv),
    batch=along(0),
)
