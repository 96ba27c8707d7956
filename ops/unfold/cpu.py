"""Operators that unfold or fold windows and blocks of pixels, on the CPU device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.requirements import decoded
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.movement.copies_cpu import emit_copy, emit_fill
from subgraph.ops.movement.cpu import element_bytes, known
from subgraph.ops.movement.geometry import Geometry, conv_geometry, ints, triple
from subgraph.ops.movement.types import whole_numbers
from subgraph.ops.shared.delegation import delegate, viewed
from subgraph.ops.shared.strides import contiguous

from .arguments import ColumnsToImageArguments, DeformColumnsArguments

_FLOATS = ("float32", "float64")
_MIN_PIXELS_PER_THREAD = 2048  # least pixels of a thread (estimate)


@lowering("DeformConv", dtypes=_FLOATS)
def deform_conv(node: Node, low: Lowering) -> None:
    """Lower 2-D DeformConv: columns of samples, and a matrix product for each group."""
    x, weight, offset, y = low.input(0), low.input(1), low.input(2), low.output()
    bias, mask = low.optional(3), low.optional(4)
    if x.rank != 4:
        raise Unsupported(f"DeformConv of {x.rank - 2} dimensions")
    if y.size == 0 or x.size == 0:
        raise Unsupported("DeformConv of an empty image")
    if math.prod(x.shape[2:]) >= 1 << 31:
        raise Unsupported("DeformConv of an image whose pixels 32 bits do not count")
    g, channels = conv_geometry(node, x, weight, y), x.shape[1]
    offsets = int(node.attrs.get("offset_group", 1))
    # The kernel writes (channel, tap), which is the order of the weights' columns in a group.
    columns = temporary(low, x.dtype, (g.images, g.groups, g.inputs * g.taps, g.pixels))
    arguments = DeformColumnsArguments(
        x=x,
        offsets=offset,
        mask=mask or 0,
        columns=columns,
        channels=channels,
        groups=offsets,
        **g.arguments(),
    )
    name, masked = "deform_columns", mask is not None
    lanes = low.lanes(x.dtype)
    kernel = Kernel("subgraph.ops.unfold.kernels", name, dtype=x.dtype, lanes=lanes, masked=masked)
    grain = max(1, _MIN_PIXELS_PER_THREAD // max(g.pixels * channels // offsets, 1))
    units = g.images * offsets * g.taps
    low.emit(kernel, arguments, units, grain=grain, bytes=5 * columns.nbytes)
    left = viewed(low, weight, (g.groups, g.outputs, g.inputs * g.taps))
    shape = (g.images, g.groups, g.outputs, g.pixels)
    if bias is None:
        delegate(low, "MatMul", [left, columns], viewed(low, y, shape))
        return
    product = temporary(low, x.dtype, shape)
    delegate(low, "MatMul", [left, columns], product)
    added = viewed(low, bias, (g.groups, g.outputs, 1))
    delegate(low, "Add", [product, added], viewed(low, y, shape))


@lowering("Col2Im", dtypes=_FLOATS)
def col_to_im(node: Node, low: Lowering) -> None:
    """Lower Col2Im of up to three dimensions."""
    x, y = low.input(0), low.output()
    image, block = (whole_numbers(known(low, k)) for k in (1, 2))
    rank = len(image)
    strides, dilations = (ints(node, name, rank, 1) for name in ("strides", "dilations"))
    pads = ints(node, "pads", 2 * rank, 0)
    windows = [
        (image[d] + pads[d] + pads[rank + d] - dilations[d] * (block[d] - 1) - 1) // strides[d] + 1
        for d in range(rank)
    ]
    if y.size == 0:
        return
    images, channels = y.shape[:2]
    source, target, kernel = (triple(each, 1) for each in (windows, image, block))
    steps = triple(strides, 1), triple(dilations, 1)
    before = triple(pads[:rank], 0)
    g = Geometry(images, 1, channels, channels, source, target, kernel, *steps, before)
    emit_column_sums(low, x, y, g)


def emit_column_sums(
    low: Lowering, columns: Operand, y: Operand, g: Geometry, bias: Operand | None = None
) -> None:
    """Emit the step that sums columns of windows to images (Col2Im).

    Args:
        low: Collects the plan's steps.
        columns: Contributions of the taps of all windows, [images, channels, taps, windows].
        y: The images, [images, channels, *image].
        g: Sizes, as those of a transposed convolution: from windows to images.
        bias: One number for each channel; None: none.
    """
    arguments = ColumnsToImageArguments(
        columns=columns,
        y=y,
        image=g.target,
        kernel=g.kernel,
        windows=g.source,
        stride=g.strides,
        pad=g.pads,
        dilation=g.dilations,
        bias=bias or 0,
        channels=y.shape[1],
    )
    lanes, stride = low.lanes(y.dtype), g.strides[2] if g.strides[2] <= 2 else 0
    kernel = Kernel(
        "subgraph.ops.unfold.kernels", "columns_to_image", dtype=y.dtype, lanes=lanes, stride=stride
    )
    grain = max(1, _MIN_PIXELS_PER_THREAD // g.pixels)
    nbytes = columns.nbytes + y.nbytes
    low.emit(kernel, arguments, y.size // g.pixels, grain=grain, bytes=nbytes)


@lowering("MaxUnpool", dtypes=_FLOATS)
def unpool(node: Node, low: Lowering) -> None:
    """Lower MaxUnpool: elements are scattered over zeros, then padded to ``output_shape``."""
    x, indices, y = low.input(0), low.input(1), low.output()
    rank = x.rank - 2
    kernel, strides = ints(node, "kernel_shape", rank, 1), ints(node, "strides", rank, 1)
    pads = ints(node, "pads", 2 * rank, 0)
    image = [
        (x.shape[2 + d] - 1) * strides[d] - pads[d] - pads[rank + d] + kernel[d]
        for d in range(rank)
    ]
    shape = (*x.shape[:2], *image)
    if y.size == 0:
        return
    zero = np.zeros(1, x.dtype)
    zeros = temporary(low, x.dtype, (math.prod(shape),))
    emit_fill(low, zeros, zeros.size, zero)
    emit_range_check(low, indices, "I", 0, zeros.size - 1)
    spread = y if y.shape == shape else temporary(low, x.dtype, shape)
    flat = [zeros, viewed(low, indices, (x.size,)), viewed(low, x, (x.size,))]
    delegate(low, "ScatterElements", flat, viewed(low, spread, zeros.shape), axis=0)
    if spread is not y:
        emit_fill(low, y, y.size, zero)
        emit_copy(low, spread, y, shape, contiguous(shape), contiguous(y.shape), item=x.itemsize)


@lowering("DepthToSpace", layouts=("plain", "blocked"))
def depth_to_space(node: Node, low: Lowering) -> None:
    """Lower DepthToSpace, which moves channels into blocks of pixels."""
    x, y = low.input(0), low.output()
    n, c, h, w = x.shape
    b = int(node.attrs["blocksize"])
    rest = c // (b * b)
    by_place = decoded(node.attrs.get("mode", "DCR")) == "DCR"
    if "blocked" in (x.layout, y.layout):
        if x.layout != y.layout or not by_place or rest % x.lanes:
            raise Unsupported("DepthToSpace that divides blocks of channels")
        # The loop over the columns of the source is the inner one, as it is longer than the block.
        blocks = rest // x.lanes
        read = contiguous((n, b, b, blocks, h, w, x.lanes))
        write = contiguous((n, blocks, h, b, w, b, x.lanes))
        shape = (n, blocks, h, b, b, w, x.lanes)
        origin = [read[d] for d in (0, 3, 4, 1, 2, 5, 6)]
        goal = [write[d] for d in (0, 1, 2, 3, 5, 4, 6)]
        emit_copy(low, x, y, shape, origin, goal, item=element_bytes(x))
    elif by_place:
        # DCR: the channel index is (row in the block, column in the block, channel of the result).
        _permute(low, (n, b, b, rest, h, w), (0, 3, 4, 1, 5, 2))
    else:
        # CRD: the channel of the result comes first in the channel index.
        _permute(low, (n, rest, b, b, h, w), (0, 1, 4, 2, 5, 3))


@lowering("SpaceToDepth")
def space_to_depth(node: Node, low: Lowering) -> None:
    """Lower SpaceToDepth, which moves blocks of pixels into channels."""
    n, c, h, w = low.input(0).shape
    b = int(node.attrs["blocksize"])
    by_channel = decoded(node.attrs.get("mode", "DCR")) == "CRD"
    order = (0, 1, 3, 5, 2, 4) if by_channel else (0, 3, 5, 1, 2, 4)
    _permute(low, (n, c, h // b, b, w // b, b), order)


def _permute(low: Lowering, dims: Sequence[int], order: Sequence[int]) -> None:
    """Emit output 0 as input 0, read with the shape ``dims`` and permuted to ``order``."""
    x, y = low.input(0), low.output()
    steps = contiguous(dims)
    shape = [dims[d] for d in order]
    strides = [steps[d] for d in order]
    emit_copy(low, x, y, shape, strides, contiguous(shape), item=element_bytes(x))
