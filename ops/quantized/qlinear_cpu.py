"""QLinearConv and its fused form on the CPU device: integer tiles in blocks of channels.

Which source of a strip, which flavour of a step, how weights are held, how large a unit is. What
these kernels do not take (3-D, groups of channels that are no blocks) goes to ``integer_cpu``;
products of matrices, which run on the same tiles, are in ``qlinear_products_cpu``.
The fused forms (``passes/fuse/quantized.py`` makes them of QDQ models)::

    FusedQLinearConv(X, x_scale, x_zero, W, w_scale, w_zero, y_scale, y_zero, B, b_scale)
    FusedQLinearMatMul(A, a_scale, a_zero, B, b_scale, b_zero, y_scale, y_zero, C, c_scale)

A bias of int32 without a scale has the scale of the sums and is added to them exactly; with a
scale, or as float32, it is added to the scaled sum. Attributes ``low`` and ``high`` are bounds of
the quantised result (an activation); ``transB``. Without ``y_scale`` the result is float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from subgraph.engine.planner.lowering import (
    Argument,
    Layout,
    Lowering,
    Operand,
    Unsupported,
    Weight,
    lowering,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.movement.geometry import Geometry, conv_geometry, dense_groups, merge, merged
from subgraph.ops.shared.tile_planning import grain, halved, round_up, shared
from subgraph.system import host
from subgraph.system.host import caches

from . import integer_cpu
from .arguments import QuantisedDepthwiseArguments, QuantisedProductArguments
from .qlinear_packing import (
    BLOCK,
    LINE,
    Flavour,
    StripSource,
    Tile,
    column_vector,
    guards,
    integer_tile,
    packed,
)

BYTES = ("uint8", "int8")
_BOTH: tuple[Layout, ...] = ("plain", "blocked")
_IMAGE = 4
# Groups that may run as one, most of whose weights are then 0: beyond, float32 is as fast.
_TOGETHER = 4


@attrs.define
class Quantised:
    """The operands of a quantised convolution or product, and where its result is cut.

    Without scales the result is the sums themselves, in int32.
    """

    low: Lowering
    x: Operand
    x_scale: Operand | None
    x_zero: Operand | None
    w: Operand
    w_scale: Operand | None
    w_zero: Operand | None
    y_scale: Operand | None
    y_zero: Operand | None
    bias: Operand | None
    bias_scale: Operand | None
    y: Operand
    bounds: tuple[float, float, int]

    @property
    def output(self) -> str:
        """The dtype of the result."""
        return self.y.dtype


@attrs.frozen
class Weights:
    """The weights of a quantised product as the kernel gets them.

    Attributes:
        packed: The panels.
        bounds: Guarded: which bytes of the input may saturate; else 0.
        excess: What each column is too large by; 0: nothing.
    """

    packed: Argument
    bounds: Argument
    excess: Argument


@attrs.frozen
class Sums:
    """What the sums of a quantised product begin with and become, for each column.

    Attributes:
        bias: What they begin with.
        scale: What they are multiplied by; 0 for a result of int32.
        shift: What is added to them then; 0: nothing.
        of_weights: Sums of weights, by which the zero point of the input leaves; 0: not needed.
    """

    bias: Argument
    scale: Argument
    shift: Argument
    of_weights: Argument


def quantised(node: Node, low: Lowering) -> Quantised:
    """Return the operands of a node.

    Raises:
        Unsupported: scales are no weights, or zero points are not known.
    """
    optional = [low.optional(k) for k in range(10)]
    x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias, bias_scale = optional
    if x is None or w is None or x_scale is None or w_scale is None:
        raise Unsupported(f"{node.op_type} without operands")
    given = [o for o in (w, x_scale, w_scale, y_scale, bias, bias_scale) if o is not None]
    if any(not operand.constant for operand in given):
        raise Unsupported("weights or scales that are computed at run time")
    scales = [o for o in (x_scale, w_scale, y_scale, bias_scale) if o is not None]
    if any(scale.dtype != "float32" for scale in scales):
        raise Unsupported("scales that are not float32")
    if any(given is not None and given.size != 1 for given in (x_scale, x_zero, y_scale)):
        raise Unsupported("scales or zero points for each row")
    if x.dtype not in BYTES or w.dtype not in BYTES:
        raise Unsupported(f"an integer product of {x.dtype} and {w.dtype}")
    bounds = _bounds(node, low.output(), y_zero)
    return Quantised(
        low, x, x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias, bias_scale,
        low.output(), bounds,
    )  # fmt: skip


def known_zero(operand: Operand | None) -> Array:
    """Return a zero point, flat.

    Raises:
        Unsupported: it is not known when the plan is made.
    """
    if operand is None:
        return np.zeros(1, np.int64)
    if operand.known is None:
        raise Unsupported("a zero point that is computed at run time")
    return operand.known.astype(np.int64).reshape(-1)


def _bounds(node: Node, y: Operand, y_zero: Operand | None) -> tuple[float, float, int]:
    """Return the bounds of the result less its zero point, and the zero point."""
    if y.dtype not in BYTES:
        return -math.inf, math.inf, 0
    zero = known_zero(y_zero)
    if zero.size != 1:
        raise Unsupported("zero points for each row")
    info = np.iinfo(y.dtype)
    # An activation's bound may lie beyond what the bytes hold.
    ends = (node.attrs.get("low", info.min), node.attrs.get("high", info.max))
    least, most = (min(max(int(end), int(info.min)), int(info.max)) for end in ends)
    return float(least - zero[0]), float(most - zero[0]), int(zero[0])


def usual_zero(w: Operand) -> int:
    """Return the zero point that leaves signed bytes of weights when it is taken off."""
    return 0 if w.dtype == "int8" else 128


def has_usual_zero(w: Operand, w_zero: Operand | None) -> bool:
    """Return whether weights less their zero points are signed bytes."""
    if w_zero is None:
        return w.dtype == "int8"
    return w_zero.known is not None and bool(np.all(w_zero.known == usual_zero(w)))


def choose_tile(q: Quantised, *, source: StripSource) -> Tile:
    """Return the flavour: products of bytes where the machine has them and weights fit."""
    forced = q.low.options.get("INTEGER_FLAVOUR")
    quads = host.has_vnni() if forced is None else forced == "quads"
    # An image has few channels with large bytes: most of its steps would have to be corrected.
    guarded = host.prefers_pmaddubsw() and source != "image" and forced in (None, "guarded")
    fits = has_usual_zero(q.w, q.w_zero)
    # What other zero points are beyond the usual one is taken from sums of rows, not of windows.
    if (quads or guarded) and (fits or source == "rows"):
        return integer_tile("quads" if quads else "guarded", "int8")
    return integer_tile("pairs", "int8" if fits else "int16")


def zero_sources(zero: Operand | None) -> list[Operand]:
    return [] if zero is None else [zero]


def sums_of(
    q: Quantised,
    tile: Tile,
    groups: int,
    outputs: int,
    sums: Callable[[Array], Array],
    turned: bool = False,
) -> Sums:
    """Return what the sums of a product begin with and become.

    Args:
        q: The product.
        tile: Its tile.
        groups: Groups.
        outputs: Outputs of a group.
        sums: Brings weights to the sum of each output's: bytes of A have their zero point in them.
        turned: Whether the outputs of a matrix of weights are its rows.
    """
    low = q.low
    spread = column_vector(groups, outputs, "int32")
    exact = q.bias is not None and q.bias.dtype == "int32" and q.bias_scale is None
    sources: list[Operand] = [q.bias] if exact and q.bias is not None else []
    name = f"integer bias {groups}x{outputs}"
    usual = usual_zero(q.w)
    summed = f"of weights less {usual} {q.w.shape} {int(turned)}"

    def of_weights(weight: Array) -> Array:
        return sums(weight.astype(np.int64) - usual)

    total: Argument = 0
    if tile.flavour != "pairs" and (q.x_zero is None or q.x_zero.known is not None):
        shifted = int(known_zero(q.x_zero)[0]) + (128 if q.x.dtype == "int8" else 0)
        name += f" less {shifted} {summed}"

        def with_sums(weight: Array, *bias: Array) -> Array:
            part = -shifted * of_weights(weight)
            return spread(part + (bias[0].reshape(-1) if bias else 0))

        start = low.weight(name, with_sums, q.w, *sources)
    elif sources:
        start = low.weight(name, spread, *sources)
    else:
        start = low.weight(name, spread, np.zeros(1, np.int32))
    if tile.flavour != "pairs" and q.x_zero is not None and q.x_zero.known is None:
        recipe = f"integer sums {groups}x{outputs} {summed}"

        def spread_sums(weight: Array) -> Array:
            return spread(of_weights(weight))

        total = low.weight(recipe, spread_sums, q.w)
    if q.x_scale is None or q.w_scale is None:
        return Sums(start, 0, 0, total)
    scale = _scale(q, q.x_scale, q.w_scale, groups, outputs)
    return Sums(start, scale, _shift(q, groups, outputs, exact), total)


def _scale(q: Quantised, x_scale: Operand, w_scale: Operand, groups: int, outputs: int) -> Weight:
    """Return input scale * weight scale / output scale for each column."""
    spread = column_vector(groups, outputs, "float32")

    def make(left: Array, right: Array, *out: Array) -> Array:
        scale = left.reshape(-1)[:1] * right.reshape(-1)
        return spread(scale / out[0].reshape(-1) if out else scale)

    out = [] if q.y_scale is None or q.output == "float32" else [q.y_scale]
    return q.low.weight(f"integer scale {groups}x{outputs}", make, x_scale, w_scale, *out)


def _shift(q: Quantised, groups: int, outputs: int, exact: bool) -> Argument:
    """Return what is added to scaled sums: a bias that has another scale than they."""
    if q.bias is None or exact:
        return 0
    scaled, rounded = q.bias_scale is not None, q.output != "float32"
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


def zero_word(low: Lowering, zero: Operand | None, dtype: str) -> Argument:
    """Return where zero points lie; without any, one of a dtype that is 0."""
    if zero is None:
        return low.weight("integer constant", _as_given, np.zeros(1, dtype))
    return low.weight("zero point", _as_given, zero) if zero.constant else zero


def _as_given(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1)


# ---------------------------------------------------------------- convolutions


@lowering("QLinearConv", dtypes=BYTES, layouts=_BOTH)
def qlinear_conv(node: Node, low: Lowering) -> None:
    """Lower QLinearConv."""
    if low.output().layout == "plain":
        integer_cpu.qlinear_conv(node, low)
    else:
        convolution(node, low)


@lowering("FusedQLinearConv", domain=INTERNAL_DOMAIN, dtypes=BYTES, layouts=_BOTH)
def fused_conv(node: Node, low: Lowering) -> None:
    """Lower a convolution between DequantizeLinear and QuantizeLinear."""
    convolution(node, low)


def convolution(node: Node, low: Lowering) -> None:
    """Emit a quantised convolution in blocks of channels."""
    q = quantised(node, low)
    if not q.y.size:
        return
    g = conv_geometry(node, q.x, q.w, q.y)
    if q.y.layout != "blocked":
        raise Unsupported("a quantised convolution in the plain layout")
    if g.kernel[0] != 1 or g.source[0] != 1 or g.target[0] != 1:
        raise Unsupported("a quantised convolution in three dimensions")
    if g.groups > 1 and g.inputs == g.outputs == 1:
        _depthwise(q, g)
    else:
        _direct(q, g)


def _direct(q: Quantised, g: Geometry) -> None:
    source: StripSource = "blocked" if q.x.layout == "blocked" else "image"
    tile = choose_tile(q, source=source)
    together = merged(g, BLOCK)
    if g.groups > 1 and (source == "image" or together > _TOGETHER):
        raise Unsupported("groups of channels that are far from whole blocks")
    apart, channels = g.groups, g.groups * g.outputs
    g = merge(g, together)
    if source == "image" and g.inputs > _IMAGE:
        raise Unsupported("an image of more than four channels")
    width = BLOCK if source == "blocked" else _IMAGE
    blocks = -(-g.inputs // width)
    flat = g.flat() if source == "blocked" else g
    along = g.dilations[2] == 1
    run = (g.kernel[2] if along else 1) * width  # elements of an inner loop
    double = 8 // tile.item
    kin = -(-run // double)
    rest = g.inputs - (blocks - 1) * width
    last = -(-rest // double) if g.taps == 1 else kin

    def runs(weight: Array) -> Array:
        whole = dense_groups(weight, apart, together)
        outputs = whole.shape[0]
        taps = whole.reshape(outputs, g.inputs, g.kernel[1], g.kernel[2])
        full = np.zeros((outputs, blocks * width, g.kernel[1], g.kernel[2]), weight.dtype)
        full[:, : g.inputs] = taps
        split = full.reshape(outputs, blocks, width, g.kernel[1], g.kernel[2])
        split = split.transpose(0, 1, 3, 4, 2).reshape(outputs, blocks, -1, run)
        padded = np.zeros((*split.shape[:3], kin * double), weight.dtype)
        padded[..., :run] = split
        return padded.reshape(outputs, -1)[:, : padded[0].size - (kin - last) * double]

    recipe = (
        f"integer conv {tile.flavour} {tile.weights} {tile.nv}x{tile.lanes} {source} "
        f"{apart}/{together} {int(along)}"
    )
    make = packed(tile, g.groups, runs)
    weight = q.low.weight(recipe, make, q.w, *zero_sources(q.w_zero))

    def sums(values: Array) -> Array:
        total: Array = values.reshape(values.shape[0], -1).sum(1)
        return total

    shape = Shape(
        source, blocks, width * tile.item, kin, last, along,
        round_up(g.outputs, BLOCK), round_up(g.outputs, BLOCK), g.inputs,
        math.prod(g.source) * blocks * g.groups * BLOCK
        if source == "blocked"
        else math.prod(g.source) * g.inputs,
        g.groups * round_up(g.outputs, BLOCK) * g.pixels,
        BLOCK, g.pixels * BLOCK,
    )  # fmt: skip
    bounds: Argument = 0
    if tile.flavour == "guarded":
        taps = g.kernel[1] * (1 if along else g.kernel[2])
        make = guards(tile, g.groups, (blocks, taps, kin), runs)
        bounds = q.low.weight(f"bounds of {recipe}", make, q.w, *zero_sources(q.w_zero))
    found = sums_of(q, tile, 1, channels, sums)
    emit_tiles(q, tile, flat, shape, Weights(weight, bounds, 0), found)


@attrs.frozen
class Shape:
    """The words of ``qlinear_kernels.product`` that follow from the source and the output."""

    source: StripSource
    blocks: int
    pixel: int
    kin: int
    last: int
    along: bool
    columns: int
    stored: int
    channels: int
    image_in: int
    image_out: int
    pixel_out: int
    block_out: int


def _cut_tiles(low: Lowering, tile: Tile, g: Geometry, shape: Shape) -> tuple[int, int, int, int]:
    """Return the rows, columns and panels of a unit, and all panels."""
    high, wide = g.target[1:]
    most, each = caches().l2 // 2, shape.blocks * shape.pixel
    steps, reach = g.strides, (g.reach(1, 1), g.reach(2, 1))
    rest = reach[0] - steps[1], reach[1] - steps[2]
    rows = halved(high, 1, 1, each * g.reach(2, wide), steps[1], rest[0], most)
    columns = halved(wide, tile.mr, tile.mr, each * g.reach(1, rows), steps[2], rest[1], most)
    part = panels = -(-shape.columns // (tile.lanes * tile.nv))
    if low.threads > 1:
        wanted, outer = 4 * low.threads, g.images * g.groups
        rows = shared(rows, high, outer * -(-wide // columns), wanted, 1, 1)
        down = outer * -(-high // rows)
        columns = shared(columns, wide, down, wanted, 2 * tile.mr, tile.mr)
        part = shared(part, panels, down * -(-wide // columns), wanted, 1, 1)
    return rows, columns, part, panels


def emit_tiles(
    q: Quantised, tile: Tile, g: Geometry, shape: Shape, weights: Weights, sums: Sums,
    *, apart: int = 0,
) -> None:  # fmt: skip
    """Emit the product of a geometry.

    Args:
        q: The operands.
        tile: Its tile.
        g: Which pixels a pixel of the result reads.
        shape: How source, weights and result lie.
        weights: The weights.
        sums: What `sums_of` returns.
        apart: Bytes between the weights of images (0: all have the same).
    """
    low = q.low

    rows, columns, part, panels = _cut_tiles(low, tile, g, shape)
    # A tile may read, and multiply by zero, what lies behind the last pixel.
    strip = shape.blocks * g.reach(1, rows) * g.reach(2, columns) * shape.pixel
    reach_at = round_up(strip + 64, 64)
    faults_at = scratch_bytes = reach_at
    faults = 0
    if tile.flavour == "guarded":
        taps = g.kernel[1] * (1 if shape.along else g.kernel[2])
        # A quarter of the steps: beyond, exact ones cost less than corrections.
        faults = shape.blocks * taps * shape.kin // 2
        faults_at = reach_at + round_up(4 * shape.blocks * shape.kin, LINE) + 64
        scratch_bytes = round_up(faults_at + 16 * faults, 64)
    rows_at = scratch_bytes
    if weights.excess != 0:
        scratch_bytes = round_up(rows_at + 4 * columns, 64)
    # Padded rows and sums of rows need a strip of their own.
    as_strip = shape.source == "blocked" or (
        shape.source == "rows" and shape.pixel == shape.channels and weights.excess == 0
    )
    in_place = (
        as_strip
        and q.x.dtype == "uint8"
        and tile.flavour == "quads"
        and g.taps == 1
        and g.source == g.target
        and not g.padded
    )
    scratch: Argument = 0
    if not in_place:
        scratch = low.scratch(scratch_bytes, per_worker=True)
        scratch_bytes = scratch.nbytes
    guarded = tile.flavour == "guarded"
    least, most_value, zero = q.bounds
    arguments = QuantisedProductArguments(
        x=q.x,
        weights=weights.packed,
        y=q.y,
        bias=sums.bias,
        scale=sums.scale,
        shift=sums.shift,
        groups=g.groups,
        blocks=shape.blocks,
        **g.arguments(),
        tile=_tile_kernel(tile.flavour, tile, q),
        low=least,
        high=most_value,
        y_zero=zero,
        x_zero=zero_word(low, q.x_zero, q.x.dtype),
        unit_rows=rows,
        unit_columns=columns,
        unit_panels=part,
        scratch=scratch,
        scratch_bytes=scratch_bytes,
        columns=shape.columns,
        x_image=shape.image_in,
        y_image=shape.image_out,
        inner=shape.kin,
        last_inner=shape.last,
        y_pixel=shape.pixel_out,
        y_block=shape.block_out,
        stored=shape.stored,
        channels=shape.channels,
        pixel=shape.pixel,
        along=int(shape.along),
        weight_sums=sums.of_weights,
        excess=weights.excess,
        row_sums_at=rows_at,
        weights_image=apart,
        quads_tile=_tile_kernel("quads", tile, q) if guarded else 0,
        bounds=weights.bounds,
        largest_at=reach_at,
        faults_at=faults_at,
        most_faults=faults,
    )
    boxes = -(-g.target[1] // rows) * -(-g.target[2] // columns)
    count = g.images * g.groups * boxes * -(-panels // part)
    low.emit(
        Kernel(
            "subgraph.ops.quantized.qlinear_kernels", "product",
            dtype=q.x.dtype, output=q.output, flavour=tile.flavour, weights=tile.weights,
            source=shape.source,
        ),
        arguments,
        count,
        grain=grain(count, g.flops // 2),
        flops=g.flops,
        bytes=q.x.nbytes + q.w.nbytes + q.y.nbytes,
    )  # fmt: skip


def _tile_kernel(flavour: Flavour, tile: Tile, q: Quantised) -> Kernel:
    return Kernel(
        "subgraph.engine.codegen.tile_int", "product_tile",
        flavour=flavour, weights=tile.weights, output=q.output,
    )  # fmt: skip


def _depthwise(q: Quantised, g: Geometry) -> None:
    low = q.low
    if q.x.layout != "blocked":
        raise Unsupported("a quantised depthwise convolution of few channels")
    blocks = -(-g.groups // BLOCK)
    pairs = -(-g.taps // 2)

    def make(weight: Array, *zeros: Array) -> Array:
        signed = weight.reshape(g.groups, -1).astype(np.int16)
        if zeros:
            signed = signed - zeros[0].astype(np.int16).reshape(-1, 1)
        full = np.zeros((blocks * BLOCK, 2 * pairs), np.int16)
        full[: g.groups, : g.taps] = signed
        split = full.reshape(blocks, BLOCK, pairs, 2)
        order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3)[:, :, order])

    weight = low.weight("integer depthwise", make, q.w, *zero_sources(q.w_zero))
    tile = integer_tile("pairs", "int16")
    sums = sums_of(q, tile, 1, g.groups, _as_given)
    rows = g.target[1]
    wide = g.reach(2, g.target[2]) * BLOCK * 2
    while rows > 1 and g.reach(1, rows) * wide > caches().l1:
        rows = -(-rows // 2)
    scratch_bytes = round_up(16 * pairs, 64) + g.reach(1, rows) * wide + 64
    least, most, zero = q.bounds
    scratch = low.scratch(scratch_bytes, per_worker=True)
    arguments = QuantisedDepthwiseArguments(
        x=q.x,
        weights=weight,
        y=q.y,
        bias=sums.bias,
        scale=sums.scale,
        shift=sums.shift,
        blocks=blocks,
        **g.arguments(),
        pairs=pairs,
        low=least,
        high=most,
        y_zero=zero,
        x_zero=zero_word(low, q.x_zero, q.x.dtype),
        unit_rows=rows,
        scratch=scratch,
        scratch_bytes=scratch.nbytes,
    )
    units = g.images * blocks * -(-g.target[1] // rows)
    low.emit(
        Kernel(
            "subgraph.ops.quantized.qlinear_kernels", "depthwise", dtype=q.x.dtype, output=q.output
        ),
        arguments,
        units,
        grain=grain(units, 2 * g.flops),
        flops=g.flops,
        bytes=q.x.nbytes + q.y.nbytes,
    )
