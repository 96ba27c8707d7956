"""Convolutions on OPENCL.

A convolution is a matrix product of the weights with the input pixels of all taps (im2col). A CPU
packs these pixels into panels; a GPU reads them through local memory. Groups of few channels are
summed directly.
"""

from __future__ import annotations

import math

import attrs

from subgraph.dtypes import FLOATS, compute_dtype
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Argument, Operand
from subgraph.graph.graph import Node
from subgraph.opencl.lowering import ClLowering, cl_lowering
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary, widened
from subgraph.ops.matmul.opencl import (
    Arguments,
    Product,
    cast_optional,
    launch_panels,
    launch_tiles,
    panel_width,
    product_program,
)
from subgraph.ops.matmul.products import Matrix
from subgraph.ops.movement.geometry import Geometry, conv_geometry
from subgraph.ops.movement.window_opencl import LINE_PIXELS, require_positions, window_sizes
from subgraph.ops.shared.opencl_code import activation, line, number, program, register, require

from .transpose_cpu import transposed_geometry

_MIN_PRODUCT_DEPTH = 16  # weights of an output channel; fewer are summed directly (estimate)
_MAX_PANEL_ELEMENTS = 1 << 29  # 2 GiB of float32 (estimate)


@cl_lowering("Conv", dtypes=FLOATS)
@cl_lowering("FusedConv", domain=INTERNAL_DOMAIN, dtypes=FLOATS)
def conv(node: Node, low: ClLowering) -> None:
    """Lower Conv, and its fused form with a residual and an activation."""
    out = low.output()
    dtype = compute_dtype(out.dtype)
    require(low, dtype)
    if not out.size:
        return
    x, y = widened(low, low.input(0), out, dtype)
    w = cast_to(low, low.input(1), dtype)
    bias, residual = (cast_optional(low, k, dtype) for k in (2, 3))
    convolve(low, Convolution(conv_geometry(node, x, w, out), x, w, y, bias, residual))
    emit_cast(low, y, out)


@attrs.frozen
class Convolution:
    """A convolution between operands of one dtype.

    Attributes:
        g: Its sizes.
        x: The input, ``[N, C, *spatial]``.
        w: The weights, ``[M, C / groups, *kernel]``.
        y: The result, ``[N, M, *spatial]``.
        bias: One number for each output channel; None: none.
        residual: An array shaped as y that is added; None: none.
    """

    g: Geometry
    x: Operand
    w: Operand
    y: Operand
    bias: Operand | None = None
    residual: Operand | None = None


def convolve(low: ClLowering, job: Convolution) -> None:
    """Launch a convolution: directly for few weights or channels, else as a matrix product."""
    g = job.g
    # A product computes tiles of several output channels at a time, of which a group of fewer than
    # four leaves most empty (estimate).
    if g.inputs * g.taps < _MIN_PRODUCT_DEPTH or (g.groups > 1 and g.outputs < 4):
        _direct(low, job)
    else:
        _product(low, job)


def _direct(low: ClLowering, job: Convolution) -> None:
    g, x, y = job.g, job.x, job.y
    (name, text), p, q = activation(low.node)
    flags = {"BIAS": int(job.bias is not None), "RESIDUAL": int(job.residual is not None)}
    rows = not low.traits.is_gpu
    source = program("conv/kernels", T=register(y.dtype), LINE=LINE_PIXELS, **{name: text}, **flags)
    # A kernel's pointer needs some buffer: an operand that is missing is not read, so that y stands
    # for it.
    words: Arguments = [y.size, x, job.w, y, job.bias or y, job.residual or y]
    words += [number(y.dtype, p), number(y.dtype, q), g.groups, g.inputs, g.outputs]
    words += window_sizes(g)
    # On a CPU a work-item computes a run of pixels of one row, which vectors need; on a GPU one
    # element each, since neighbouring work-items then read neighbouring pixels.
    if rows:
        channels = g.images * g.groups * g.outputs
        size = (g.target[0] * g.target[1], channels, 1)
        low.launch(source, "rows", words, size, (1, 1, 1), flops=g.flops, bytes=x.nbytes + y.nbytes)
    else:
        moved = x.nbytes + y.nbytes
        low.launch(source, "direct", words, *line(low, y.size), flops=g.flops, bytes=moved)


def _product(low: ClLowering, job: Convolution) -> None:
    """Launch a convolution as products of the weights of each group with its pixels."""
    g, x, y = job.g, job.x, job.y
    depth, pixels, planes = g.inputs * g.taps, g.pixels, math.prod(g.source)
    left = Matrix(job.w, (), g.outputs, depth, depth, 1)
    right = Matrix(x, (), depth, pixels, pixels, 1)
    per_image = (g.inputs * planes * g.groups, g.inputs * planes)
    steps: list[tuple[int, ...]] = [
        (0, 0, g.outputs * depth),
        (0, *per_image),
        (0, g.groups * g.outputs * pixels, g.outputs * pixels),
    ]
    product = Product(left, right, y, (1, g.images, g.groups), steps)
    product.residual = job.residual
    if job.bias is not None:
        product.bias, product.bias_steps, product.bias_step = job.bias, (1, 0), g.outputs
    if low.traits.is_gpu:
        # The image itself is the right side of the product.
        if g.taps == 1 and set(g.strides) == {1} and not any(g.pads):
            launch_tiles(low, product, x, [pixels, 1])
            return
        # The sizes of the kernel are constants of the program: each element that is read is located
        # by divisions by these sizes, which constants turn into multiplications.
        depths, heights, widths = g.kernel
        launch_tiles(low, product, x, _window(g), KD=depths, KH=heights, KW=widths)
        return
    width = panel_width(low, y.dtype)
    panels = -(-pixels // width)
    packed = panels * depth * width
    count = g.images * g.groups
    if packed * count > _MAX_PANEL_ELEMENTS:
        raise Unsupported(f"a convolution whose pixels take {packed * count * 4 / 1e9:.1f} GB")
    target = temporary(low, y.dtype, (packed * count,))
    source = product_program(low, y.dtype, PACK=1, **{"ACT(x, p, q)": "x"}, BIAS=0, RESIDUAL=0)
    words: list[Argument] = [x, target, g.inputs, *window_sizes(g), panels]
    moved = x.nbytes + packed * count * 4
    low.launch(source, "pixels", words, (panels, count), (1, 1), bytes=moved)
    launch_panels(low, product, target, [0, g.groups * packed, packed])


def _window(g: Geometry) -> list[int]:
    """Return the sizes from which the GPU's kernel computes the pixels of a row of B."""
    sizes = window_sizes(g)
    return [*sizes[:3], *sizes[4:6], *sizes[9:]]


@cl_lowering("ConvTranspose", dtypes=FLOATS)
def conv_transpose(node: Node, low: ClLowering) -> None:
    """Lower ConvTranspose."""
    out = low.output()
    dtype = compute_dtype(out.dtype)
    require(low, dtype)
    if not out.size:
        return
    x, y = widened(low, low.input(0), out, dtype)
    w, bias = cast_to(low, low.input(1), dtype), cast_optional(low, 2, dtype)
    g = transposed_geometry(node, x, w, out)
    require_positions((g.target[k], g.pads[k], g.reach(k, 1)) for k in range(3))
    (name, text), p, q = activation(node)
    flags = {"BIAS": int(bias is not None), "RESIDUAL": 0}
    source = program("conv/kernels", T=register(y.dtype), **{name: text}, **flags)
    words: Arguments = [y.size, x, w, y, bias or y, number(y.dtype, p), number(y.dtype, q)]
    words += [g.groups, g.inputs, g.outputs, *g.arguments().values()]
    flops = 2 * g.images * g.groups * g.inputs * g.outputs * g.taps * math.prod(g.source)
    low.launch(source, "transposed", words, *line(low, y.size), flops=flops)
    emit_cast(low, y, out)
