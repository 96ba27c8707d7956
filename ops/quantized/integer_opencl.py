"""Integer products on OPENCL: MatMulInteger, QLinearMatMul, ConvInteger, QLinearConv; conversions.

Zero points are subtracted first; then the kernels of float products run on 32-bit integers.
Quantized results are scaled and rounded in one elementwise step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from subgraph.dtypes import FLOATS
from subgraph.engine.planner.constants import derived_operand
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.opencl.lowering import ClLowering, cl_lowering, cl_shared
from subgraph.ops.conv.opencl import Convolution, convolve
from subgraph.ops.elementwise.cpu import Source, emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.matmul.opencl import Product, emit_product
from subgraph.ops.matmul.products import batched, matrix
from subgraph.ops.movement.geometry import conv_geometry

from .cpu import saturated

_BYTES = ("uint8", "int8")

cl_shared("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")


def _by_row(operand: Operand | None) -> tuple[int, ...]:
    """Return the shape as which a scale or zero point of the left side is read."""
    if operand is None or operand.size == 1:
        return ()
    return (operand.size, 1) if operand.rank == 1 else operand.shape


def _by_column(operand: Operand | None) -> tuple[int, ...]:
    """Return the shape as which a scale or zero point of the right side is read."""
    return () if operand is None or operand.size == 1 else operand.shape


def _by_kernel(operand: Operand | None, rank: int) -> tuple[int, ...]:
    """Return the shape as which a scale or zero point of each output channel is read."""
    return () if operand is None or operand.size == 1 else (operand.size, *(1,) * (rank - 1))


def _centred(
    low: ClLowering, x: Operand, zero: Operand | None, shape: Sequence[int] = ()
) -> Operand:
    """Return ``x`` less its zero point as int32; of a weight, computed once.

    Args:
        low: The lowering.
        x: The operand.
        zero: Its zero point; None: 0.
        shape: Shape in which the zero point broadcasts to ``x``.

    Raises:
        Unsupported: Its elements are not bytes.
    """
    if x.dtype not in _BYTES:
        raise Unsupported(f"an integer product of {x.dtype}")
    if x.constant and (zero is None or zero.constant):
        return _centred_weight(low, x, zero, tuple(shape))
    made = temporary(low, "int32", x.shape)
    e = Expression()
    value = e.cast(e.input(x.dtype), "int32")
    sources = [source(x)]
    if zero is not None:
        sources.append(source(zero, shape))
        value = e("sub", value, e.cast(e.input(zero.dtype), "int32"))
    emit_expression(low, e, sources, [(value, made)])
    return made


def _centred_weight(
    low: ClLowering, x: Operand, zero: Operand | None, shape: tuple[int, ...]
) -> Operand:
    """Return a weight less its zero point as int32, as an operand that is a weight."""

    def make(array: Array, point: Array | None = None) -> Array:
        wide: Array = array.astype("int32")
        return wide if point is None else wide - point.astype("int32").reshape(shape)

    operands = [x] if zero is None else [x, zero]
    weight = low.weight(f"less the zero point of shape {shape}", make, *operands)
    return derived_operand(f"{x.name} centred", "int32", x.shape, weight)


def _multiply(low: ClLowering, a: Operand, b: Operand, out: Operand) -> None:
    left, right = matrix(a), matrix(b, "column")
    left, sizes, steps = batched(left, right)
    emit_product(low, Product(left, right, out, sizes, steps))


def _requantize(
    low: ClLowering, sums: Operand, scales: Sequence[Source], y_scale: Operand, zero: Operand
) -> None:
    """Emit ``saturate(round(sums * left * right / y_scale) + zero)``; ``scales``: left, right."""
    if y_scale.size != 1 or zero.size != 1:
        raise Unsupported(f"{low.node.op_type} with several scales or zero points of its output")
    scales = [*scales, source(y_scale, ())]
    if any(s.dtype not in FLOATS for s in scales):
        raise Unsupported(f"{low.node.op_type} with scales that are no floats")
    e = Expression()
    total = e.cast(e.input("int32"), "float32")
    left, right, out = (e.cast(e.input(s.dtype), "float32") for s in scales)
    offset = e.input(zero.dtype)
    scaled = e("mul", total, e("div", e("mul", left, right), out))
    result = saturated(e, scaled, offset, low.output().dtype)
    emit_expression(low, e, [source(sums), *scales, source(zero, ())], [(result, low.output())])


@cl_lowering("MatMulInteger")
def matmul_integer(node: Node, low: ClLowering) -> None:
    """Lower MatMulInteger."""
    out = low.output()
    if not out.size:
        return
    za, zb = low.optional(2), low.optional(3)
    a = _centred(low, low.input(0), za, _by_row(za))
    b = _centred(low, low.input(1), zb, _by_column(zb))
    _multiply(low, a, b, out)


@cl_lowering("QLinearMatMul")
def qlinear_matmul(node: Node, low: ClLowering) -> None:
    """Lower QLinearMatMul."""
    out = low.output()
    if not out.size:
        return
    sa, za, sb, zb, so, zo = (low.input(k) for k in (1, 2, 4, 5, 6, 7))
    if sa.size > 1 and low.input(3).rank == 1:
        raise Unsupported("scales for each row of a product with a vector")
    a = _centred(low, low.input(0), za, _by_row(za))
    b = _centred(low, low.input(3), zb, _by_column(zb))
    sums = temporary(low, "int32", out.shape)
    _multiply(low, a, b, sums)
    _requantize(low, sums, [source(sa, _by_row(sa)), source(sb, _by_column(sb))], so, zo)


def _convolve(
    low: ClLowering, operands: Sequence[Operand | None], out: Operand, bias: Operand | None = None
) -> None:
    """Emit an int32 convolution; ``operands`` are x, w and their zero points."""
    x, w, zx, zw = operands
    assert x is not None
    assert w is not None
    if zx is not None and zx.size != 1:
        raise Unsupported("a convolution with several zero points of its input")
    values = _centred(low, x, zx)
    kernels = _centred(low, w, zw, _by_kernel(zw, w.rank))
    convolve(low, Convolution(conv_geometry(low.node, x, w, out), values, kernels, out, bias))


@cl_lowering("ConvInteger")
def conv_integer(node: Node, low: ClLowering) -> None:
    """Lower ConvInteger."""
    out = low.output()
    if math.prod(out.shape):
        operands = [low.input(0), low.input(1), low.optional(2), low.optional(3)]
        _convolve(low, operands, out)


@cl_lowering("QLinearConv")
def qlinear_conv(node: Node, low: ClLowering) -> None:
    """Lower QLinearConv."""
    out = low.output()
    if not out.size:
        return
    x, sx, zx, w, sw, zw, so, zo = (low.input(k) for k in range(8))
    sums = temporary(low, "int32", out.shape)
    _convolve(low, [x, w, zx, zw], sums, low.optional(8))
    by_channel = () if sw.size == 1 else (sw.size, *(1,) * (out.rank - 2))
    if sx.size != 1:
        raise Unsupported("QLinearConv with several scales of its input")
    _requantize(low, sums, [source(sx, ()), source(sw, by_channel)], so, zo)
