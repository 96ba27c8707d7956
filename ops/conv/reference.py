"""Conv and ConvTranspose for the reference, in the cases where onnx.reference is wrong or fails.

onnx.reference multiplies NaN and Inf between the taps of a dilated filter by 0. In ConvTranspose
it splits the weights of groups along the wrong axis, ignores the padding that ``output_shape``
implies, and fails for a batch of 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import standard, variant
from subgraph.operators.requirements import decoded

_SHAPING = ("auto_pad", "output_padding", "output_shape", "pads")
# An empty one counts as left out.
_LISTS = ("dilations", "kernel_shape", "output_padding", "output_shape", "pads", "strides")


def conv(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the convolution; pixels between the taps of a dilated filter have no effect."""
    node = without_empty_lists(node)
    x, weight = inputs[:2]
    dilations = [int(d) for d in node.attrs.get("dilations") or [1] * (x.ndim - 2)]
    if max(dilations, default=1) == 1 or np.isfinite(x).all():
        return standard(node, inputs)
    rank, kernel = x.ndim - 2, weight.shape[2:]
    strides = [int(s) for s in node.attrs.get("strides") or [1] * rank]
    reach = [(k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True)]
    padded = np.pad(x, [(0, 0), (0, 0), *_conv_pads(node, x.shape[2:], strides, reach)])
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, tuple(range(2, 2 + rank)))
    steps = [slice(None, None, s) for s in (*strides, *dilations)]
    windows = windows[(slice(None), slice(None), *steps)]
    groups = int(node.attrs.get("group", 1))
    axes = [1, *range(2 + rank, 2 + 2 * rank)], [1, *range(2, 2 + rank)]
    parts = zip(np.split(windows, groups, 1), np.split(weight, groups), strict=True)
    found = [np.moveaxis(np.tensordot(part, each, axes), -1, 1) for part, each in parts]
    result = np.concatenate(found, axis=1).astype(x.dtype)
    if len(inputs) > 2 and inputs[2] is not None:
        result = result + inputs[2].reshape(-1, *[1] * rank)
    return [result]


def _conv_pads(
    node: Node, sizes: Sequence[int], strides: Sequence[int], reach: Sequence[int]
) -> list[tuple[int, int]]:
    """Return the pads of Conv before and after each axis."""
    rank = len(sizes)
    how = decoded(node.attrs.get("auto_pad", "NOTSET"))
    if how == "VALID":
        return [(0, 0)] * rank
    if how == "NOTSET":
        pads = [int(p) for p in node.attrs.get("pads") or [0] * (2 * rank)]
        return list(zip(pads[:rank], pads[rank:], strict=True))
    found: list[tuple[int, int]] = []
    for size, stride, length in zip(sizes, strides, reach, strict=True):
        total = max((-(-size // stride) - 1) * stride + length - size, 0)
        less, more = total // 2, total - total // 2
        found.append((less, more) if how == "SAME_UPPER" else (more, less))
    return found


def without_empty_lists(node: Node) -> Node:
    """Return a convolution whose strides, pads and the like are left out where they are empty."""
    empty = [name for name in _LISTS if name in node.attrs and not node.attrs[name]]
    return variant(node, drop=empty) if empty else node


def conv_transpose(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the transposed convolution, computed one group at a time."""
    node = without_empty_lists(node)
    if inputs[0].shape[0] == 0:
        one = np.zeros((1, *inputs[0].shape[1:]), inputs[0].dtype)
        return [conv_transpose(node, [one, *inputs[1:]])[0][:0]]
    if inputs[1].shape[1] == 0:  # no output channels
        filters = np.zeros((inputs[1].shape[0], 1, *inputs[1].shape[2:]), inputs[1].dtype)
        return [conv_transpose(node, [inputs[0], filters])[0][:, :0]]
    wanted, auto = node.attrs.get("output_shape"), decoded(node.attrs.get("auto_pad", "NOTSET"))
    if wanted is None and not auto.startswith("SAME"):
        return [_grouped(node, inputs)]
    x, weight = inputs[:2]
    rank = x.ndim - 2
    whole = _grouped(variant(node, drop=_SHAPING), [x, weight])
    extra = [int(n) for n in node.attrs.get("output_padding") or [0] * rank]
    if wanted is None:  # no pad is negative, as onnx's shape inference and ONNX Runtime have it
        strides = [int(n) for n in node.attrs.get("strides") or [1] * rank]
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
    groups = int(node.attrs.get("group", 1))
    if groups == 1:
        only: Array = standard(node, inputs)[0]
        return only
    x, weight = inputs[:2]
    bias = inputs[2] if len(inputs) > 2 else None
    single = variant(node, group=1)
    each, made = x.shape[1] // groups, weight.shape[1]
    parts: list[Any] = []
    for g in range(groups):
        operands = [x[:, g * each : (g + 1) * each], weight[g * each : (g + 1) * each]]
        operands.append(None if bias is None else bias[g * made : (g + 1) * made])
        parts.append(standard(single, operands[: len(inputs)])[0])
    return np.concatenate(parts, axis=1)
