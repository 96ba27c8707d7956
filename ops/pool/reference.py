"""Pooling for the reference.

onnx.reference has no GlobalLpPool, LpPool-1 and MaxRoiPool; its GlobalMaxPool reduces the wrong
axes unless there are two spatial ones; its MaxPool, AveragePool and LpPool are slow, and fail or
are wrong with automatic padding of one or three axes and with strides larger than the window.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import attrs
import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes

from .windows import window_counts, windows_of


def global_pool(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return maxima, means or p-norms over all spatial axes; opset 1 states p as a float."""
    x: Array = inputs[0]
    axes = tuple(range(2, x.ndim))
    if node.op_type == "GlobalMaxPool":
        return [x.max(axis=axes, keepdims=True)]
    if node.op_type == "GlobalAveragePool":
        return [x.mean(axis=axes, keepdims=True)]
    power = float(attributes(node)["p"])
    total = (np.abs(x) ** power).sum(axis=axes, keepdims=True)
    return [np.asarray(total ** (1 / power)).astype(x.dtype)]


@attrs.frozen
class PlacedWindows:
    """The windows of a pooling operator or convolution over an input, for each spatial axis.

    Attributes:
        kernel: Taps of a window.
        strides: Elements from a window to the next one.
        dilations: Elements from a tap to the next one.
        before: Padding before the input.
        after: Padding after the input.
        counts: Number of windows.
        sizes: Elements of the input.
    """

    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    def over(self, x: Array, fill: Any) -> Array:
        """Return a view of shape (N, C, *windows, *kernel) of the input with ``fill`` around it."""
        widths = [(0, 0), (0, 0)]
        for k, size in enumerate(self.sizes):
            reach = (self.counts[k] - 1) * self.strides[k] + self._span(k)
            widths.append((self.before[k], max(reach - size - self.before[k], 0)))
        padded = np.pad(x, widths, constant_values=fill)
        steps = padded.strides
        inner = [step * d for step, d in zip(steps[2:], self.dilations, strict=True)]
        outer = [step * s for step, s in zip(steps[2:], self.strides, strict=True)]
        return np.lib.stride_tricks.as_strided(
            padded,
            (*x.shape[:2], *self.counts, *self.kernel),
            (*steps[:2], *outer, *inner),
            writeable=False,
        )

    def _span(self, axis: int) -> int:
        return (self.kernel[axis] - 1) * self.dilations[axis] + 1

    @property
    def inside(self) -> tuple[int, ...]:
        """The axes of `over` along which the taps of a window lie."""
        rank = len(self.sizes)
        return tuple(range(2 + rank, 2 + 2 * rank))

    def covered(self, with_pads: bool) -> Array:
        """Return the number of elements of each window, with or without those of the padding."""
        total: Array = np.ones((), np.float64)
        for k, size in enumerate(self.sizes):
            starts = np.arange(self.counts[k]) * self.strides[k] - self.before[k]
            positions = starts[:, None] + np.arange(self.kernel[k]) * self.dilations[k]
            low, high = (-self.before[k], size + self.after[k]) if with_pads else (0, size)
            line = ((positions >= low) & (positions < high)).sum(axis=1)
            total = total[..., None] * line
        return total


def placed_windows(node: Node, x: Array, kernel: Sequence[int]) -> PlacedWindows:
    """Return the windows over an input.

    Args:
        node: A convolution or pooling, with the attributes of windows.
        x: The input, ``[N, C, *spatial]``.
        kernel: Taps of a window along each axis.
    """
    sizes = x.shape[2:]
    stated = windows_of(node, len(sizes))
    counts = tuple(n for n in window_counts(node, x.shape, kernel) if isinstance(n, int))
    pads = list(stated.pads)
    if stated.auto.startswith("SAME"):
        for k, size in enumerate(sizes):
            reach = (kernel[k] - 1) * stated.dilations[k] + 1
            total = max((counts[k] - 1) * stated.strides[k] + reach - size, 0)
            first = total // 2 if stated.auto == "SAME_UPPER" else total - total // 2
            pads[k] = first, total - first
    before, after = zip(*pads, strict=True)
    # With ceil_mode windows may be far longer than the padded input: taps behind it are left out.
    taken = tuple(
        min(taps, -(-(size + sum(pad)) // dilation))
        for taps, size, pad, dilation in zip(kernel, sizes, pads, stated.dilations, strict=True)
    )
    return PlacedWindows(taken, stated.strides, stated.dilations, before, after, counts, sizes)


def pool(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return means or p-norms over windows; opset 1 states p as a float.

    With ``count_include_pad`` padding counts as zeros.
    """
    x: Array = inputs[0]
    windows = placed_windows(node, x, node.attrs["kernel_shape"])
    if node.op_type == "AveragePool":
        total: Array = windows.over(x, 0).sum(axis=windows.inside, dtype=np.float64)
        result = total / windows.covered(bool(attributes(node).get("count_include_pad")))
    else:
        power = float(attributes(node)["p"])
        powers: Array = np.abs(x.astype(np.float64)) ** power
        result = windows.over(powers, 0).sum(axis=windows.inside) ** (1 / power)
    return [result.astype(x.dtype)]


def max_pool(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the maximum over windows, and its index in the flattened input.

    The index is that of the first maximum, and NaN is a maximum; of a window without elements of
    the input it is -1.
    """
    x: Array = inputs[0]
    windows = placed_windows(node, x, node.attrs["kernel_shape"])
    lowest = -np.inf if x.dtype.kind not in "iub" else np.iinfo(x.dtype).min
    view = windows.over(x, lowest)
    maxima: Array = view.max(axis=windows.inside)
    if len(node.outputs) < 2:
        return [maxima]
    sizes = windows.sizes
    order: Literal["C", "F"] = "F" if node.attrs.get("storage_order") else "C"
    pixels = np.arange(math.prod(sizes)).reshape(sizes, order=order)
    planes = np.arange(math.prod(x.shape[:2])).reshape(*x.shape[:2], *(1 for _ in sizes))
    indices = windows.over(planes * pixels.size + pixels, -1)
    largest = (view == np.expand_dims(maxima, windows.inside)) | (view != view)
    flat = (*maxima.shape, math.prod(windows.kernel))
    first = (largest & (indices >= 0)).reshape(flat).argmax(axis=-1, keepdims=True)
    return [maxima, np.take_along_axis(indices.reshape(flat), first, -1)[..., 0]]
