"""Derivative rules of convolutions and pools, added to those of `rules` in `RULES`.

Shapes must be static, since pads are attributes. The derivative of a convolution with respect to
its input is a transposed convolution; the derivative with respect to its weight is a convolution of
the input by the result's derivative, with channels and batch exchanged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import UnsupportedOpError
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array, TensorType
from subgraph.operators.reference import attributes
from subgraph.ops.movement.geometry import ints, pads_before

from .rules import RULES as SIMPLE
from .rules import OptionalValue, Rule, Vjp, op


@attrs.frozen
class _Window:
    """Sizes of a window over an image, one number for each spatial axis.

    Attributes:
        kernel: Elements of the window.
        strides: Distances of neighbouring windows.
        dilations: Distances of neighbouring elements of a window.
        starts: Pads before the image.
        ends: Pads after the image; negative for elements that no window reaches.
    """

    kernel: list[int]
    strides: list[int]
    dilations: list[int]
    starts: list[int]
    ends: list[int]

    @property
    def options(self) -> dict[str, Any]:
        """Attributes of the transposed convolution that spreads windows over the image."""
        return {
            "strides": self.strides,
            "dilations": self.dilations,
            "pads": [*self.starts, *(max(end, 0) for end in self.ends)],
            "output_padding": [max(-end, 0) for end in self.ends],
        }


def _static(value: Value, name: str) -> tuple[int, ...]:
    """Return the shape of a value.

    Raises:
        UnsupportedOpError: a dimension is unknown; the message says ``name``, the operator.
    """
    if not isinstance(value.type, TensorType) or not value.type.is_static:
        raise UnsupportedOpError(f"the derivative of {name} needs static shapes")
    return value.type.sizes


def _window(node: Node, kernel: Sequence[int], x: Value, y: Value) -> _Window:
    """Return the window of a node.

    Automatic pads, and those that ceil_mode adds, follow from the sizes of input and output.

    Args:
        node: A Conv or a pool.
        kernel: Elements of the window along each spatial axis.
        x: The node's input.
        y: The node's output.
    """
    sizes, made = (_static(v, node.op_type)[2:] for v in (x, y))
    strides, dilations = (ints(node, name, len(sizes), 1) for name in ("strides", "dilations"))
    # Elements from the start of the first window to the end of the last one.
    reach = [
        (o - 1) * s + (k - 1) * d + 1
        for o, s, k, d in zip(made, strides, kernel, dilations, strict=True)
    ]
    starts = pads_before(node, sizes, made, kernel)
    ends = [r - n - b for r, n, b in zip(reach, sizes, starts, strict=True)]
    return _Window(list(kernel), strides, dilations, starts, ends)


def _conv(of: Vjp) -> Sequence[OptionalValue]:
    x, w, dy = of.input(0), of.input(1), of.grad
    sizes, weight = _static(x, "Conv"), _static(w, "Conv")
    groups, rank = int(attributes(of.node)["group"] or 1), len(sizes) - 2
    window = _window(of.node, weight[2:], x, of.output)
    dx = op("ConvTranspose", dy, w, group=groups, **window.options)
    # Negative pads cut the elements that no window reaches; with them the convolution below would
    # have a larger result than the weight.
    wide = op("Pad", x, [0, 0, *window.starts, 0, 0, *window.ends])
    space = _static(wide, "Conv")[2:]
    each = sizes[1] // groups
    spatial = list(range(2, rank + 2))
    # [N, G * C, ...] to [C, G * N, ...]: each group convolves its own channels, over the batch.
    split = op("Reshape", wide, [sizes[0], groups, each, *space])
    swapped = op("Transpose", split, perm=[2, 1, 0, *(d + 1 for d in spatial)])
    rows = op("Reshape", swapped, [each, groups * sizes[0], *space])
    columns = op("Transpose", dy, perm=[1, 0, *spatial])
    # An element of the weight moves over the image in steps of the dilation, and meets the outputs
    # in distances of the stride: the two change places.
    steps = {"strides": window.dilations, "dilations": window.strides}
    found = op("Conv", rows, columns, group=groups, **steps)
    # The batch of the convolution was the weight's second axis.
    dw = op("Transpose", found, perm=[1, 0, *spatial])
    if len(of.node.inputs) < 3 or of.node.inputs[2] is None:
        return [dx, dw]
    return [dx, dw, op("ReduceSum", dy, [0, *spatial], keepdims=0)]


def _average_pool(of: Vjp) -> Sequence[OptionalValue]:
    """Spread the derivative of each window evenly over the elements that the average counts."""
    x, dy = of.input(0), of.grad
    options, sizes = attributes(of.node), _static(x, "AveragePool")
    window = _window(of.node, options["kernel_shape"], x, of.output)
    counts = _counts(window, sizes[2:], _static(of.output, "AveragePool")[2:], options)
    share = op("Div", dy, op("CastLike", counts, dy))
    ones = np.ones((sizes[1], 1, *window.kernel), np.float32)
    spread = op("CastLike", ones, dy)
    return [op("ConvTranspose", share, spread, group=sizes[1], **window.options)]


def _counts(
    window: _Window, sizes: Sequence[int], made: Sequence[int], options: Mapping[str, Any]
) -> Array:
    """Return the number of elements that each average divides by, of the output's spatial shape.

    Args:
        window: The window.
        sizes: Spatial sizes of the input.
        made: Spatial sizes of the output.
        options: The node's attributes with the standard's defaults.
    """
    include = bool(options.get("count_include_pad"))
    rank = len(sizes)
    pads = list(options.get("pads") or [0] * 2 * rank)
    total = np.ones((1,) * rank)
    for axis, (size, count) in enumerate(zip(sizes, made, strict=True)):
        starts = np.arange(count) * window.strides[axis] - window.starts[axis]
        taps = starts[:, None] + np.arange(window.kernel[axis]) * window.dilations[axis]
        # Pads that ceil_mode adds are not counted, even with count_include_pad.
        last = size + (max(pads[axis + rank], 0) if include else 0)
        first = -window.starts[axis] if include else 0
        counted = ((taps >= first) & (taps < last)).sum(1)
        total = total * counted.reshape([-1 if d == axis else 1 for d in range(rank)])
    # A window that lies in the pads only counts no element; its derivative reaches none, and 1
    # avoids a division by 0.
    return np.maximum(total, 1).astype(np.float32)


def _max_pool(of: Vjp) -> Sequence[OptionalValue]:
    """Add the derivative of each window to that of its largest element."""
    x, dy = of.input(0), of.grad
    # Column-major indices would not be those of the row-major array that the derivatives are added
    # to.
    options = {k: v for k, v in of.node.attrs.items() if k != "storage_order"}
    # The second output, the indices, exists since opset 8; a new node computes it, as the given one
    # may have only one output.
    pooled = Node("MaxPool", [x], outputs=2, version=max(of.node.version, 12), attrs=options)
    for made in pooled.outputs:
        made.type = of.output.type
    indices = pooled.outputs[1]
    indices.type = TensorType("int64", _static(of.output, "MaxPool"))
    size = math.prod(_static(x, "MaxPool"))
    # The index of a window in the padding alone is -1, of an element behind those of x.
    flat = op("CastLike", np.zeros(size + 1, np.float32), dy)
    rows = op("Reshape", indices, [-1, 1])
    spread = op("ScatterND", flat, rows, op("Reshape", dy, [-1]), reduction="add")
    return [op("Reshape", op("Slice", spread, [0], [size]), op("Shape", x), allowzero=1)]


RULES: Mapping[str, Rule] = {
    **SIMPLE,
    "AveragePool": _average_pool,
    "Conv": _conv,
    "MaxPool": _max_pool,
}
