"""Convolutions and pooling on OPENCL.

A convolution is a matrix product of the weights with the input pixels of all taps (im2col). A CPU
packs these pixels into panels; a GPU reads them through local memory. Groups of few channels are
summed directly.
"""

from __future__ import annotations

import math

import attrs

from subgraph.dtypes import HALF_FLOATS
from subgraph.engine.planner.lowering import Argument, Operand, Unsupported
from subgraph.graph.graph import Node
from subgraph.opencl.lowering import ClLowering, cl_lowering
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.matmul.opencl import (
    Arguments,
    Product,
    as_float32,
    cast_output,
    float32_output,
    launch_panels,
    launch_tiles,
    panel_width,
    program,
)
from subgraph.ops.matmul.products import Matrix
from subgraph.ops.movement.geometry import Geometry, conv_geometry
from subgraph.ops.pool.cpu import pool_geometry, pool_kind, trailing_pads
from subgraph.ops.shared.opencl_code import FLOATS, activation, line, number, register, require

from .transpose_cpu import transposed_geometry

_KINDS = {"max": 0, "average": 1, "l1": 2, "l2": 3}
_POOLS = {"MaxPool": "max", "AveragePool": "average", "LpPool": "l"}
_GLOBAL = {"GlobalMaxPool": "max", "GlobalAveragePool": "average", "GlobalLpPool": "l"}
_LOWEST = {"int8": "-128", "uint8": "0"}  # dtype: its lowest value
_MIN_PRODUCT_DEPTH = 16  # weights of an output channel; fewer are not worth packing (estimate)
_LINE_PIXELS = 16  # output pixels of a row that one work-item of a CPU computes at a time
_MAX_EXTENT = 1 << 30  # bound of elements along a dimension, so that the sum of two fits in 32 bits
_MAX_PANEL_ELEMENTS = 1 << 29  # 2 GiB of float32 (estimate)


@cl_lowering("Conv")
def conv(node: Node, low: ClLowering) -> None:
    """Lower Conv."""
    lower_conv(node, low)


@cl_lowering("FusedConv", domain=INTERNAL_DOMAIN)
def fused_conv(node: Node, low: ClLowering) -> None:
    """Lower a convolution with a residual and an activation."""
    lower_conv(node, low)


def _floats(low: ClLowering, operand: Operand) -> None:
    require(low, operand.dtype)
    if operand.dtype not in (*FLOATS, *HALF_FLOATS):
        raise Unsupported(f"{low.node.op_type} of {operand.dtype}")


def lower_conv(node: Node, low: ClLowering) -> None:
    """Lower Conv or its fused form.

    Raises:
        Unsupported: A dtype, or sizes, that the kernels cannot handle.
    """
    out = low.output()
    _floats(low, out)
    if not out.size:
        return
    x, w, bias, residual = (as_float32(low, low.optional(k)) for k in range(4))
    assert x is not None
    assert w is not None
    g = conv_geometry(node, x, w, out)
    result = float32_output(low, out)
    convolve(low, Convolution(g, x, w, result, bias, residual))
    cast_output(low, result, out)


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
    if g.inputs * g.taps < _MIN_PRODUCT_DEPTH or (g.groups > 1 and g.outputs < 4):
        _direct(low, job)
    else:
        _product(low, job)


def sizes_of(g: Geometry) -> list[int]:
    """Return the kernel arguments SIZES.

    Raises:
        Unsupported: Positions of windows may exceed the kernels' 32-bit integers.
    """
    for k in range(3):
        first, last = g.pads[k], g.reach(k, g.target[k] + _LINE_PIXELS) + g.source[k]
        if not -_MAX_EXTENT < first < _MAX_EXTENT or last >= _MAX_EXTENT:
            raise Unsupported(f"windows over {last} elements, pads of {first}")
    return _listed(g)


def _listed(g: Geometry) -> list[int]:
    sizes = (g.source, g.target, g.kernel, g.strides, g.dilations, g.pads)
    return [value for triple_ in sizes for value in triple_]


def _direct(low: ClLowering, job: Convolution) -> None:
    g, x, y = job.g, job.x, job.y
    (name, text), p, q = activation(low.node)
    flags = {"BIAS": int(job.bias is not None), "RESIDUAL": int(job.residual is not None)}
    rows = not low.traits.is_gpu
    source = _program(y.dtype, CONVOLUTION=1, LINE=_LINE_PIXELS, **{name: text}, **flags)
    words: Arguments = [y.size, x, job.w, y, job.bias or y, job.residual or y]
    words += [number(y.dtype, p), number(y.dtype, q), g.groups, g.inputs, g.outputs]
    words += sizes_of(g)
    if rows:
        channels = g.images * g.groups * g.outputs
        size = (g.target[0] * g.target[1], channels, 1)
        low.launch(source, "rows", words, size, (1, 1, 1), flops=g.flops, bytes=x.nbytes + y.nbytes)
    else:
        moved = x.nbytes + y.nbytes
        low.launch(source, "direct", words, *line(low, y.size), flops=g.flops, bytes=moved)


def _program(dtype: str, **defines: str | int) -> ClSource:
    defines["T"] = register(dtype)
    return ClSource("conv/kernels", defines=tuple(sorted(defines.items())))


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
    product = Product(left, right, y, low.node, (1, g.images, g.groups), steps)
    product.residual = job.residual
    if job.bias is not None:
        product.bias, product.bias_steps, product.bias_step = job.bias, (1, 0), g.outputs
    if low.traits.is_gpu:
        if g.taps == 1 and set(g.strides) == {1} and not any(g.pads):
            launch_tiles(low, product, x, [pixels, 1])
            return
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
    source = program(low, y.dtype, PACK=1, **{"ACT(x, p, q)": "x"}, BIAS=0, RESIDUAL=0)
    words: list[Argument] = [x, target, g.inputs, *sizes_of(g), panels]
    moved = x.nbytes + packed * count * 4
    low.launch(source, "pixels", words, (panels, count), (1, 1), bytes=moved)
    launch_panels(low, product, target, [0, g.groups * packed, packed])


def _window(g: Geometry) -> list[int]:
    """Return the sizes from which the GPU's kernel computes the pixels of a row of B."""
    sizes = sizes_of(g)
    return [*sizes[:3], *sizes[4:6], *sizes[9:]]


@cl_lowering("ConvTranspose")
def conv_transpose(node: Node, low: ClLowering) -> None:
    """Lower ConvTranspose."""
    out = low.output()
    _floats(low, out)
    if not out.size:
        return
    x, w, bias = (as_float32(low, low.optional(k)) for k in range(3))
    assert x is not None
    assert w is not None
    g = transposed_geometry(node, x, w, out)
    y = float32_output(low, out)
    (name, text), p, q = activation(node)
    source = _program(
        y.dtype, CONVOLUTION=1, **{name: text}, BIAS=int(bias is not None), RESIDUAL=0
    )
    words: Arguments = [y.size, x, w, y, bias or y, number(y.dtype, p), number(y.dtype, q)]
    words += [g.groups, g.inputs, g.outputs, *_listed(g)]
    flops = 2 * g.images * g.groups * g.inputs * g.outputs * g.taps * math.prod(g.source)
    low.launch(source, "transposed", words, *line(low, y.size), flops=flops)
    cast_output(low, y, out)


@cl_lowering("MaxPool", "AveragePool", "LpPool")
def window(node: Node, low: ClLowering) -> None:
    """Lower MaxPool (of int8 and uint8, too), AveragePool and LpPool."""
    out = low.output()
    if node.op_type != "MaxPool" or out.dtype not in _LOWEST:
        _floats(low, out)
    if not out.size:
        return
    x = as_float32(low, low.input(0))
    assert x is not None
    g = pool_geometry(node, x, out)
    after = [trailing_pads(node, g, axis, x.rank - 2) for axis in range(3)]
    include = int(node.attrs.get("count_include_pad", 0))
    _pool(low, g, x, pool_kind(node, _POOLS[node.op_type]), after, include)


@cl_lowering("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool")
def global_pool(node: Node, low: ClLowering) -> None:
    """Lower global pooling: a window as large as the image."""
    out = low.output()
    _floats(low, out)
    if not out.size:
        return
    x = as_float32(low, low.input(0))
    assert x is not None
    if x.rank < 3:
        raise Unsupported("global pooling of an input without pixels")
    image = (1, 1, math.prod(x.shape[2:]))
    ones = (1, 1, 1)
    channels = x.shape[1]
    g = Geometry(x.shape[0], 1, channels, channels, image, ones, image, ones, ones, (0, 0, 0))
    _pool(low, g, x, pool_kind(node, _GLOBAL[node.op_type]), [0, 0, 0], 0)


def _pool(
    low: ClLowering, g: Geometry, x: Operand, kind: str, after: list[int], include: int
) -> None:
    out = low.output()
    y = float32_output(low, out)
    indices = low.outputs[1:]
    order = 1 + int(low.node.attrs.get("storage_order", 0)) if indices else 0
    lowest = _LOWEST.get(y.dtype, "-INFINITY") if kind == "max" else "0"
    flags: dict[str, str | int] = {"INCLUDE": include, "INDICES": order, "LOWEST": lowest}
    source = _program(y.dtype, POOL=_KINDS[kind], **flags)
    words: list[Argument] = [y.size, x, y, *sizes_of(g), *after, *indices]
    work = y.size * g.taps
    low.launch(source, "window", words, *line(low, y.size), flops=work, bytes=x.nbytes + y.nbytes)
    cast_output(low, y, out)
