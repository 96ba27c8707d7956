"""Conv and ConvTranspose for the reference.

onnx.reference multiplies NaN and Inf between the taps of a dilated filter by 0, sums half precision
in half precision, and takes a step of Python for each position. Its ConvTranspose splits the
weights of groups along the wrong axis, ignores the padding that ``output_shape`` implies, and fails
for a batch of 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import variant
from subgraph.operators.requirements import decoded
from subgraph.ops.pool.reference import placed_windows

_SHAPING = ("auto_pad", "output_padding", "output_shape", "pads")
# An empty one counts as left out.
_LISTS = ("dilations", "kernel_shape", "output_padding", "output_shape", "pads", "strides")


def conv(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the convolution, of any rank."""
    node = without_empty_lists(node)
    x, weight = inputs[:2]
    rank = x.ndim - 2
    windows = placed_windows(node, x, weight.shape[2:]).over(x, 0)
    groups = int(node.attrs.get("group", 1))
    axes = [1, *range(2 + rank, 2 + 2 * rank)], [1, *range(2, 2 + rank)]
    parts = zip(np.split(windows, groups, 1), np.split(weight, groups), strict=True)
    found = [np.moveaxis(np.tensordot(part, each, axes), -1, 1) for part, each in parts]
    result = np.concatenate(found, axis=1)
    if len(inputs) > 2 and inputs[2] is not None:
        result = result + inputs[2].reshape(-1, *[1] * rank)
    return [result]


def without_empty_lists(node: Node) -> Node:
    """Return a convolution whose strides, pads and the like are left out where they are empty."""
    empty = [name for name in _LISTS if name in node.attrs and not node.attrs[name]]
    return variant(node, drop=empty) if empty else node


def conv_transpose(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the transposed convolution of ConvTranspose, of any rank."""
    node = without_empty_lists(node)
    wanted, auto = node.attrs.get("output_shape"), decoded(node.attrs.get("auto_pad", "NOTSET"))
    if wanted is None and not auto.startswith("SAME"):
        return [_grouped(node, inputs)]
    x, weight = inputs[:2]
    rank = x.ndim - 2
    whole = _grouped(variant(node, drop=_SHAPING), [x, weight])
    extra = _numbers(node, "output_padding", [0] * rank)
    if wanted is None:  # no pad is negative, as onnx's shape inference and ONNX Runtime have it
        strides = _numbers(node, "strides", [1] * rank)
        rooms = zip(x.shape[2:], strides, whole.shape[2:], extra, strict=True)
        size = [min(places * stride, full + more) for places, stride, full, more in rooms]
    else:
        size = [int(n) for n in wanted][-rank:]
    upper = auto == "SAME_UPPER"
    result = np.zeros((*whole.shape[:2], *size), whole.dtype)
    take, put = [slice(None)] * 2, [slice(None)] * 2
    for full, more, n in zip(whole.shape[2:], extra, size, strict=True):
        total = full + more - n
        before = total // 2 if upper else total - total // 2
        first, last = max(before, 0), min(before + n, full)
        take.append(slice(first, max(first, last)))
        put.append(slice(first - before, max(first, last) - before))
    result[tuple(put)] = whole[tuple(take)]
    if len(inputs) > 2 and inputs[2] is not None:
        result += inputs[2].reshape(-1, *[1] * rank)
    return [result]


def _grouped(node: Node, inputs: Sequence[Any]) -> Array:
    """Return the transposed convolution with explicit pads; all groups at once.

    The products of one tap with all positions, or of one position with all taps, are added to a
    strided part of the result: whichever takes fewer steps. Sums of float16 and bfloat16 are
    float32.
    """
    x, weight = inputs[:2]
    rank: int = x.ndim - 2
    groups = int(node.attrs.get("group", 1))
    strides, dilations = (_numbers(node, name, [1] * rank) for name in ("strides", "dilations"))
    more = _numbers(node, "output_padding", [0] * rank)
    pads = _numbers(node, "pads", [0] * 2 * rank)
    places: tuple[int, ...] = x.shape[2:]
    taps: tuple[int, ...] = weight.shape[2:]
    dtype = x.dtype if x.dtype.itemsize >= 4 else np.dtype(np.float32)
    images, each, made = x.shape[0], x.shape[1] // groups, weight.shape[1]
    data = x.astype(dtype).reshape(images, groups, each, math.prod(places))
    filters = weight.astype(dtype).reshape(groups, each, made, math.prod(taps))
    reach = [(k - 1) * d + 1 for k, d in zip(taps, dilations, strict=True)]
    spans = [(n - 1) * s + 1 for n, s in zip(places, strides, strict=True)]
    size = [a + b - 1 + extra for a, b, extra in zip(spans, reach, more, strict=True)]
    whole = np.zeros((images, groups, made, *size), dtype)
    all_channels = (slice(None),) * 3
    by_tap = math.prod(taps) <= math.prod(places)
    outer, inner = (taps, places) if by_tap else (places, taps)
    jumps, steps, lengths = (dilations, strides, spans) if by_tap else (strides, dilations, reach)
    for number, where in enumerate(np.ndindex(*outer)):
        if by_tap:
            part = filters[..., number].transpose(0, 2, 1) @ data
        else:
            one = data[..., number].transpose(1, 0, 2) @ filters.reshape(
                groups, each, made * math.prod(taps)
            )
            part = one.transpose(1, 0, 2)
        target: tuple[slice, ...] = tuple(
            slice(k * jump, k * jump + length, step)
            for k, jump, length, step in zip(where, jumps, lengths, steps, strict=True)
        )
        whole[all_channels + target] += part.reshape(images, groups, made, *inner)
    crop: tuple[slice, ...] = tuple(slice(pads[k], n - pads[rank + k]) for k, n in enumerate(size))
    result = whole[all_channels + crop]
    result = result.reshape(images, groups * made, *result.shape[3:])
    if len(inputs) > 2 and inputs[2] is not None:
        result = result + inputs[2].astype(dtype).reshape(-1, *[1] * rank)
    return result.astype(x.dtype)


def _numbers(node: Node, name: str, default: list[int]) -> list[int]:
    return [int(number) for number in node.attrs.get(name) or default]


def add_conv_weights(node: Node, inputs: Sequence[Any]) -> list[Array]:
    """Return the weight of a convolution whose result is the sum of those of two weights."""
    weight, small = inputs[0].copy(), inputs[1] if len(inputs) > 1 else None
    offset = node.attrs["offset"]
    if small is not None and small.ndim > 1:
        sizes = small.shape[2:]
        place = tuple(slice(at, at + n) for at, n in zip(offset, sizes, strict=True))
        weight[(slice(None), slice(None), *place)] += small
        return [weight]
    # Channel c of the result reads channel c of the input, the (c mod inputs)-th of its group.
    channels = np.arange(len(weight))
    factor = 1 if small is None else small
    weight[(channels, channels % max(weight.shape[1], 1), *offset)] += factor
    return [weight]
