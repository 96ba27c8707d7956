"""Operands of quantized convolutions and products: reading, choice of a tile, requantization.

The fused forms (``passes/fuse/quantized.py`` makes them of QDQ models)::

    FusedQLinearConv(X, x_scale, x_zero, W, w_scale, w_zero, y_scale, y_zero, B, b_scale,
                     R, r_scale, r_zero, own_scale, sum_scale, sum_zero)
    FusedQLinearMatMul(A, a_scale, a_zero, B, b_scale, b_zero, y_scale, y_zero, C, c_scale)

A bias of int32 without a scale has the scale of the sums and is added to them exactly; with a
scale, or as float32, it is added to the scaled sum. Attributes ``low`` and ``high`` are bounds of
the quantized result (an activation); ``transB``. Without ``y_scale`` the result is float32.

With a residual R, bytes of the shape of the result, the quantized result is dequantized with
``own_scale``, added to R, and quantized again; attributes ``sum_low`` and ``sum_high``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Argument, Operand, Weight
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.system import host

from .qlinear_packing import PatchSource, Tile, column_vector, integer_tile

BYTES = ("uint8", "int8")
# Products of a sum from which on tiles that check for saturation take less time than those of pairs
# (measured on an AMD Zen 3: up to 0.82 of the time without saturation, 1.2 with much of it).
_MIN_CHECKED_DEPTH = 256


@attrs.define
class QuantizedOperands:
    """The operands of a quantized convolution or product ``Y = X * W``.

    Without scales the result is the sums themselves, in int32.

    Attributes:
        low: The lowering of the node.
        x: The input, bytes.
        w: The weights, or the right side, bytes.
        y: The output.
        x_zero: Zero point of the input; None: 0.
        w_zero: That of the weights, or one for each output; None: 0.
        x_scale: Scale of the input.
        w_scale: That of the weights, or one for each output.
        y_scale: Scale of the result; None: the result is float32 or int32.
        bias: One number for each output.
        bias_scale: Scale of a quantized bias; None: that of the sums.
        bounds: Bounds of the result less its zero point, and the zero point.
        residual: What is added to the result and quantized with it again.
    """

    low: Lowering
    x: Operand
    w: Operand
    y: Operand
    x_zero: Operand | None
    w_zero: Operand | None
    x_scale: Operand | None = None
    w_scale: Operand | None = None
    y_scale: Operand | None = None
    bias: Operand | None = None
    bias_scale: Operand | None = None
    bounds: tuple[float, float, int] = (-math.inf, math.inf, 0)
    residual: Residual | None = None


@attrs.frozen
class Residual:
    """Bytes that are added to a quantized result.

    Attributes:
        bytes: The bytes, in the shape of the result.
        zero: Their zero point.
        scales: Scales of the result, of the bytes and of the sum, with the inverse of the latter
            and its rest; see `IntegerTileBlock.residual_scales`.
        bounds: As `QuantizedOperands.bounds`, of the sum.
    """

    bytes: Operand
    zero: int
    scales: Argument
    bounds: tuple[float, float, int]


@attrs.frozen
class Weights:
    """The weights of a quantized product as the kernel reads them.

    Attributes:
        packed: The panels.
        bounds: Guarded: for each pair of weights the largest byte of the input whose products
            cannot saturate (`qlinear_packing.guards`); else 0.
        excess: Zero point of each column less the one that packing subtracts; 0: all are 0.
    """

    packed: Argument
    bounds: Argument
    excess: Argument


@attrs.frozen
class Requantization:
    """How the sums of a quantized product become its result, for each column.

    Attributes:
        bias: First value of a sum, int32.
        scale: Factor of a sum, float32; 0: the result is int32.
        shift: Added to the scaled sum, float32; 0: nothing.
        weight_sums: Sums of weights, int32. The kernel subtracts them times the zero point of the
            input; 0: the bias includes that, or there is no zero point.
    """

    bias: Argument
    scale: Argument
    shift: Argument
    weight_sums: Argument


def read_operands(node: Node, low: Lowering) -> QuantizedOperands:
    """Return the operands of a node.

    Raises:
        Unsupported: Scales are no weights, or zero points are not known.
    """
    x, x_scale, w, w_scale = (low.input(k) for k in (0, 1, 3, 4))
    x_zero, w_zero, y_scale, y_zero, bias, bias_scale = map(low.optional, (2, 5, 6, 7, 8, 9))
    constants = [o for o in (w, x_scale, w_scale, y_scale, bias, bias_scale) if o is not None]
    if any(not operand.constant for operand in constants):
        raise Unsupported("weights or scales that are computed at run time")
    scales = [o for o in (x_scale, w_scale, y_scale, bias_scale) if o is not None]
    if any(scale.dtype != "float32" for scale in scales):
        raise Unsupported("scales that are not float32")
    if any(operand is not None and operand.size != 1 for operand in (x_scale, x_zero, y_scale)):
        raise Unsupported("scales or zero points for each row")
    if w.dtype not in BYTES:
        raise Unsupported(f"an integer product of {x.dtype} and {w.dtype}")
    y = low.output()
    bounds = _bounds(node, y, y_zero)
    return QuantizedOperands(
        low, x, w, y, x_zero, w_zero, x_scale, w_scale, y_scale, bias, bias_scale, bounds,
        _residual(node, low, y),
    )  # fmt: skip


def _residual(node: Node, low: Lowering, y: Operand) -> Residual | None:
    """Return what is added to the result of a node; None without it.

    Raises:
        Unsupported: It has another shape or dtype than the result, or scales are no weights.
    """
    added, scale, zero, own_scale, sum_scale, sum_zero = map(low.optional, range(10, 16))
    if added is None:
        return None
    if added.shape != y.shape or added.dtype != y.dtype:
        raise Unsupported("a residual of another shape or dtype")
    scales = [o for o in (own_scale, scale, sum_scale) if o is not None and o.constant]
    if len(scales) < 3 or any(o.dtype != "float32" or o.size != 1 for o in scales):
        raise Unsupported("scales of a sum that are computed at run time")
    zeros = known_zero(zero)
    if zeros.size != 1:
        raise Unsupported("zero points for each row")
    packed = low.weight("scales of a sum", _sum_scales, *scales)
    return Residual(added, int(zeros[0]), packed, _bounds(node, y, sum_zero, "sum_"))


def _sum_scales(own: Array, residual: Array, total: Array) -> Array:
    """Return the scales of a residual and its sum; see `IntegerTileBlock.residual_scales`."""
    one, total = np.float32(1), total.reshape(-1)[0]
    inverse = one / total
    # In float64 the product and the difference are exact, so that the rest is rounded once, as by a
    # fused multiply-add.
    rest = np.float32(1 - np.float64(inverse) * np.float64(total)) * inverse
    return np.array([own.reshape(-1)[0], residual.reshape(-1)[0], total, inverse, rest])


def integer_operands(low: Lowering) -> QuantizedOperands:
    """Return the operands of a MatMulInteger or ConvInteger, whose result is the sums."""
    x, w, y = low.input(0), low.input(1), low.output()
    return QuantizedOperands(low, x, w, y, low.optional(2), low.optional(3))


def known_zero(operand: Operand | None) -> Array:
    """Return zero points, flat; 0 for an omitted operand.

    Raises:
        Unsupported: They are not known when the plan is made.
    """
    if operand is None:
        return np.zeros(1, np.int64)
    if operand.known is None:
        raise Unsupported("a zero point that is computed at run time")
    return operand.known.astype(np.int64).reshape(-1)


def _bounds(
    node: Node, y: Operand, y_zero: Operand | None, prefix: str = ""
) -> tuple[float, float, int]:
    """Return the bounds of a result less its zero point, and the zero point.

    Args:
        node: The node.
        y: The result, or one of its dtype.
        y_zero: The zero point.
        prefix: What the names of the attributes with the bounds begin with.
    """
    if y.dtype not in BYTES:
        return -math.inf, math.inf, 0
    zero = known_zero(y_zero)
    if zero.size != 1:
        raise Unsupported("zero points for each row")
    info = np.iinfo(y.dtype)
    # An activation's bound may lie outside the range of the dtype.
    ends = (node.attrs.get(f"{prefix}low", info.min), node.attrs.get(f"{prefix}high", info.max))
    least, most = (min(max(int(end), int(info.min)), int(info.max)) for end in ends)
    return float(least - zero[0]), float(most - zero[0]), int(zero[0])


def signed_zero_point(w: Operand) -> int:
    """Return the zero point for which weights less it are int8: 0 of int8, 128 of uint8."""
    return 0 if w.dtype == "int8" else 128


def fits_int8(w: Operand, w_zero: Operand | None) -> bool:
    """Return whether weights less their zero points are int8, all having `signed_zero_point`."""
    if w_zero is None:
        return w.dtype == "int8"
    return w_zero.known is not None and bool(np.all(w_zero.known == signed_zero_point(w)))


def choose_tile(
    q: QuantizedOperands, depth: int, *, source: PatchSource, dilated: bool = False
) -> Tile:
    """Return the tile: of bytes if the machine multiplies bytes and weights fit, else of pairs.

    Args:
        q: The operands.
        depth: Products of a sum.
        source: Source of the patches.
        dilated: Whether the taps of a kernel row are apart. For an image each of them would be a
            step of a matrix tile, which has 64 bytes.
    """
    forced = q.low.options.get("INTEGER_FLAVOUR")
    fits = fits_int8(q.w, q.w_zero)
    matrix = host.has_int8_tiles() and forced in (None, "matrix")
    matrix = matrix and not (source == "image" and dilated)
    if matrix and (fits or source == "rows"):
        return integer_tile("matrix", "int8")
    quads = host.has_vnni() if forced is None else forced == "quads"
    checked = host.prefers_pmaddubsw() and depth >= _MIN_CHECKED_DEPTH
    checked = checked if forced is None else forced == "checked"
    # The pixels of an image are large bytes in few channels: most steps would need corrections.
    checked = checked and source != "image"
    # The excess of other zero points is corrected by sums of rows, which windows do not have.
    if (quads or checked) and (fits or source == "rows"):
        return integer_tile("quads" if quads else "checked", "int8")
    return integer_tile("pairs", "int8" if fits else "int16")


def zero_point_sources(zero: Operand | None) -> list[Operand]:
    """Return the sources of a weight that depends on a zero point, if there is one."""
    return [] if zero is None else [zero]


def requantization_of(
    q: QuantizedOperands,
    tile: Tile,
    groups: int,
    outputs: int,
    sums: Callable[[Array], Array],
    transposed: bool = False,
) -> Requantization:
    """Return how the sums of a product become its result.

    Tiles of bytes multiply the input with its zero point; so the sums of weights, times the zero
    point, are subtracted here (if it is known) or by the kernel.

    Args:
        q: The product.
        tile: Its tile.
        groups: Groups.
        outputs: Outputs of a group.
        sums: ``weights -> sums`` of the weights of each output.
        transposed: The outputs of a matrix of weights are its rows.
    """
    low = q.low
    spread = column_vector(groups, outputs, "int32")
    # A bias with the scale of the sums is their first value, which needs no rounding.
    exact = q.bias is not None and q.bias.dtype == "int32" and q.bias_scale is None
    sources: list[Operand] = [q.bias] if exact and q.bias is not None else []
    name = f"integer bias {groups}x{outputs}"
    offset = signed_zero_point(q.w)
    summed = f"of weights less {offset} {q.w.shape} {int(transposed)}"

    def of_weights(weight: Array) -> Array:
        return sums(weight.astype(np.int64) - offset)

    # The sum of (x - z) * w is the sum of x * w less z times the sum of w, which is known before.
    weight_sums: Argument = 0
    if tile.flavour != "pairs" and (q.x_zero is None or q.x_zero.known is not None):
        # Patches have signed bytes plus 128 (`patches`).
        shifted = int(known_zero(q.x_zero)[0]) + (128 if q.x.dtype == "int8" else 0)
        name += f" less {shifted} {summed}"

        def with_sums(weight: Array, *start: Array) -> Array:
            part = -shifted * of_weights(weight)
            return spread(part + (start[0].reshape(-1) if start else 0))

        bias = low.weight(name, with_sums, q.w, *sources)
    elif sources:
        bias = low.weight(name, spread, *sources)
    else:
        bias = low.weight(name, spread, np.zeros(1, np.int32))
    if tile.flavour != "pairs" and q.x_zero is not None and q.x_zero.known is None:
        recipe = f"integer sums {groups}x{outputs} {summed}"

        def spread_sums(weight: Array) -> Array:
            return spread(of_weights(weight))

        weight_sums = low.weight(recipe, spread_sums, q.w)
    if q.x_scale is None or q.w_scale is None:
        return Requantization(bias, 0, 0, weight_sums)
    scale = _scale(q, q.x_scale, q.w_scale, groups, outputs)
    return Requantization(bias, scale, _shift(q, groups, outputs, exact), weight_sums)


def _scale(
    q: QuantizedOperands, x_scale: Operand, w_scale: Operand, groups: int, outputs: int
) -> Weight:
    """Return input scale * weight scale / output scale for each column."""
    spread = column_vector(groups, outputs, "float32")

    def make(left: Array, right: Array, *out: Array) -> Array:
        # In the order of operations of ONNX Runtime, so that results are rounded alike.
        scale = left.reshape(-1)[:1] * right.reshape(-1)
        return spread(scale / out[0].reshape(-1) if out else scale)

    out = [] if q.y_scale is None or q.y.dtype == "float32" else [q.y_scale]
    return q.low.weight(f"integer scale {groups}x{outputs}", make, x_scale, w_scale, *out)


def _shift(q: QuantizedOperands, groups: int, outputs: int, exact: bool) -> Argument:
    """Return the bias of scaled sums, in units of the result; 0 if the sums have it (``exact``)."""
    if q.bias is None or exact:
        return 0
    scaled, rounded = q.bias_scale is not None, q.y.dtype != "float32"
    spread = column_vector(groups, outputs, "float32")
    sources = [o for o in (q.bias, q.bias_scale, q.y_scale if rounded else None) if o is not None]

    def make(bias: Array, *scales: Array) -> Array:
        value: Array = bias.astype(np.float32).reshape(-1)
        left = list(scales)
        if scaled:
            value = value * left.pop(0).reshape(-1)
        if rounded:
            value = value / left.pop(0).reshape(-1)
        return spread(value)

    return q.low.weight(f"integer shift {groups}x{outputs} {scaled} {rounded}", make, *sources)


def zero_point_argument(low: Lowering, zero: Operand | None, dtype: str) -> Argument:
    """Return zero points as an argument of a kernel.

    Args:
        low: The lowering.
        zero: The zero points; None: one that is 0.
        dtype: The dtype of that one.
    """
    if zero is None:
        return low.weight("integer constant", flat_array, np.zeros(1, dtype))
    return low.weight("zero point", flat_array, zero) if zero.constant else zero


def flat_array(array: Array) -> Array:
    """Return an array flat and contiguous."""
    return np.ascontiguousarray(array).reshape(-1)
