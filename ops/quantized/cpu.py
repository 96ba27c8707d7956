"""QuantizeLinear, DequantizeLinear and DynamicQuantizeLinear on the CPU: elementwise steps."""

from __future__ import annotations

import numpy as np

from subgraph.dtypes import HALF_FLOATS
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX
from subgraph.ops.elementwise.cpu import Source, emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression, Term
from subgraph.ops.reduce.cpu import emit_reduction
from subgraph.ops.shared.strides import normal_axis

_QUANTIZED = ("uint8", "int8", "uint16", "int16")
_REAL = ("float32", *HALF_FLOATS)


def _image(x: Operand) -> Source:
    """Return the input of a conversion as a source.

    Raises:
        Unsupported: Its blocks of channels are padding for the most part.
    """
    if x.layout == "blocked" and 2 * x.shape[1] < x.lanes:
        raise Unsupported(f"blocks of {x.lanes} channels for {x.shape[1]}")
    return source(x)


def _along_axis(low: Lowering, operand: Operand) -> Source:
    """Return a scale or zero point as a source: one number, or one for each index of an axis."""
    node, x = low.node, low.input(0)
    if node.attrs.get("block_size", 0):
        raise Unsupported(f"{node.op_type} with block_size")
    if operand.size == 1:
        return source(operand, ())
    if operand.rank != 1:
        raise Unsupported(f"{node.op_type} with a scale of rank {operand.rank}")
    axis = normal_axis(int(node.attrs.get("axis", 1)), x.rank)
    return source(operand, (operand.size, *(1,) * (x.rank - axis - 1)))


def saturated(e: Expression, scaled: Term, zero: Term | None, dtype: str) -> Term:
    """Return ``clamp(rint(scaled) + zero)`` as an integer dtype.

    Args:
        e: The expression that gets the operations.
        scaled: The value divided by the scale, float32.
        zero: The zero point; None: 0.
        dtype: The integer dtype, whose range is that of the clamp.
    """
    info = np.iinfo(dtype)
    rounded = e("rint", scaled)
    if zero is not None:
        rounded = e("add", rounded, e.cast(zero, scaled.dtype))
    return e.cast(e("max", e("min", rounded, float(info.max)), float(info.min)), dtype)


@lowering("QuantizeLinear", dtypes=(*_REAL, "int32"), layouts=("plain", "blocked"))
def quantize(node: Node, low: Lowering) -> None:
    """Lower QuantizeLinear to 8 and 16 bits."""
    x, scale, zero, y = low.input(0), low.input(1), low.optional(2), low.output()
    precision = DTYPE_OF_ONNX.get(int(node.attrs.get("precision", 0)), "float32")
    if y.dtype not in _QUANTIZED or scale.dtype not in _REAL or precision not in _REAL:
        raise Unsupported(f"QuantizeLinear of {x.dtype} to {y.dtype} in {precision}")
    e = Expression()
    sources = [_image(x), _along_axis(low, scale)]

    def rounded(term: Term) -> Term:
        """Return a number with the rounding of the attribute ``precision``, as float32."""
        return e.cast(e.cast(term, precision), "float32")

    value, factor = rounded(e.input(x.dtype)), rounded(e.input(scale.dtype))
    offset = None
    if zero is not None:
        sources.append(_along_axis(low, zero))
        offset = e.input(zero.dtype)
    scaled = rounded(e("div", value, factor))
    emit_expression(low, e, sources, [(saturated(e, scaled, offset, y.dtype), y)])


@lowering("DequantizeLinear", dtypes=(*_QUANTIZED, "int32"), layouts=("plain", "blocked"))
def dequantize(node: Node, low: Lowering) -> None:
    """Lower DequantizeLinear from 8, 16 and 32 bits."""
    x, scale, zero, y = low.input(0), low.input(1), low.optional(2), low.output()
    if scale.dtype not in _REAL or y.dtype not in _REAL:
        raise Unsupported(f"DequantizeLinear of {x.dtype} to {y.dtype}")
    e = Expression()
    sources = [_image(x), _along_axis(low, scale)]
    value, factor = e.input(x.dtype), e.input(scale.dtype)
    work = "int32" if x.dtype == "int32" else "float32"  # holds every difference exactly
    value = e.cast(value, work)
    if zero is not None:
        sources.append(_along_axis(low, zero))
        value = e("sub", value, e.cast(e.input(zero.dtype), work))
    product = e("mul", e.cast(value, "float32"), e.cast(factor, "float32"))
    emit_expression(low, e, sources, [(e.cast(product, y.dtype), y)])


@lowering("DynamicQuantizeLinear", dtypes=("float32",))
def dynamic(node: Node, low: Lowering) -> None:
    """Lower DynamicQuantizeLinear: the range, then scale and zero point, then the elements."""
    x = low.input(0)
    if x.size == 0:
        raise Unsupported("DynamicQuantizeLinear of an empty tensor")
    y, scale, zero = low.outputs[:3]
    largest, smallest = (_emit_extreme(low, op, x) for op in ("max", "min"))
    e = Expression()
    top, bottom = e("max", e.input("float32"), 0), e("min", e.input("float32"), 0)
    span = e("sub", top, bottom)
    span = e("where", e("eq", span, 0), 1, span, dtype="float32")
    step = e("div", span, 255)
    origin = e("max", e("min", e("div", e("neg", bottom), step), 255), 0)
    point = e.cast(e("rint", origin), "uint8")
    bounds = [source(largest), source(smallest)]
    emit_expression(low, e, bounds, [(step, scale), (point, zero)])
    e = Expression()
    value, factor, offset = e.input("float32"), e.input("float32"), e.input("uint8")
    result = saturated(e, e("div", value, factor), offset, "uint8")
    emit_expression(low, e, [source(x), source(scale, ()), source(zero, ())], [(result, y)])


def _emit_extreme(low: Lowering, op: str, x: Operand) -> Operand:
    """Emit the largest ("max") or smallest ("min") element of ``x``, which is not empty."""
    # Rows are reduced first, since threads can share them.
    rows, found = temporary(low, x.dtype, x.shape[:-1]), temporary(low, x.dtype, ())
    emit_reduction(low, op, x, rows, [x.rank - 1] if x.rank else [])
    emit_reduction(low, op, rows, found, range(rows.rank))
    return found
