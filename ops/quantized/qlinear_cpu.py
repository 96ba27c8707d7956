"""QLinearConv and its fused form on the CPU device: integer tiles in blocks of channels.

Convolutions that these kernels lack (3-D, groups of channels that do not fill blocks) go to
``integer_cpu``; products of matrices, on the same tiles, are in ``qlinear_products_cpu``.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from subgraph.engine.planner.lowering import Layout, Lowering, Unsupported, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.movement.geometry import Geometry, conv_geometry, dense_groups, merge, merged
from subgraph.ops.shared.tile_planning import grain, round_up
from subgraph.system.host import caches

from . import integer_cpu
from .arguments import QuantizedDepthwiseArguments
from .qlinear_operands import (
    BYTES,
    QuantizedOperands,
    Weights,
    choose_tile,
    flat_array,
    read_operands,
    requantization_of,
    zero_point_argument,
    zero_point_sources,
)
from .qlinear_packing import BLOCK, PatchSource, Tile, guards, integer_tile, packed
from .qlinear_tiles_cpu import Shape, emit_tiles

_BOTH: tuple[Layout, ...] = ("plain", "blocked")
_IMAGE_CHANNELS = 4  # channels of a pixel in the patch of an image, as in `patches.IMAGE`
# Groups that may be merged into one, with weights of 0 between them; estimate: with more, float32
# is as fast.
_MAX_MERGED_GROUPS = 4


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
    """Emit a quantized convolution in blocks of channels.

    Raises:
        Unsupported: There is no kernel for it.
    """
    q = read_operands(node, low)
    if not q.y.size:
        return
    g = conv_geometry(node, q.x, q.w, q.y)
    if q.y.layout != "blocked":
        raise Unsupported("a quantized convolution in the plain layout")
    if g.kernel[0] != 1 or g.source[0] != 1 or g.target[0] != 1:
        raise Unsupported("a quantized convolution in three dimensions")
    if g.groups > 1 and g.inputs == g.outputs == 1:
        _depthwise(q, g)
    else:
        _direct(q, g)


@attrs.frozen
class _Runs:
    """The inner loops of a convolution: each runs over adjacent elements of a patch.

    Attributes:
        g: Sizes of the convolution, its groups merged to whole blocks of channels.
        groups: Groups before they were merged.
        together: How many of them are one group of ``g``.
        width: Channels of a pixel in a patch.
        double: Elements of a double step.
    """

    g: Geometry
    groups: int
    together: int
    width: int
    double: int

    @property
    def blocks(self) -> int:
        """Input blocks of a group."""
        return -(-self.g.inputs // self.width)

    @property
    def width_merged(self) -> bool:
        """Whether a run has all taps of a kernel row, which are adjacent without dilation."""
        return self.g.dilations[2] == 1

    @property
    def elements(self) -> int:
        """Elements of a run."""
        return (self.g.kernel[2] if self.width_merged else 1) * self.width

    @property
    def inner(self) -> int:
        """Double steps of a run."""
        return -(-self.elements // self.double)

    @property
    def last_inner(self) -> int:
        """Double steps of the last run."""
        rest = self.g.inputs - (self.blocks - 1) * self.width
        return -(-rest // self.double) if self.g.taps == 1 else self.inner

    def order(self, weight: Array) -> Array:
        """Return weights [outputs, K] in the order of a patch; `packed` says more."""
        high, wide = self.g.kernel[1:]
        whole = dense_groups(weight, self.groups, self.together)
        outputs = whole.shape[0]
        full = np.zeros((outputs, self.blocks * self.width, high, wide), weight.dtype)
        full[:, : self.g.inputs] = whole.reshape(outputs, self.g.inputs, high, wide)
        split = full.reshape(outputs, self.blocks, self.width, high, wide)
        split = split.transpose(0, 1, 3, 4, 2).reshape(outputs, self.blocks, -1, self.elements)
        padded = np.zeros((*split.shape[:3], self.inner * self.double), weight.dtype)
        padded[..., : self.elements] = split
        unused = (self.inner - self.last_inner) * self.double
        return padded.reshape(outputs, -1)[:, : padded[0].size - unused]


def _direct(q: QuantizedOperands, g: Geometry) -> None:
    """Emit a direct convolution over integer tiles."""
    source: PatchSource = "blocked" if q.x.layout == "blocked" else "image"
    tile = choose_tile(q, source=source)
    together = merged(g, BLOCK)
    if g.groups > 1 and (source == "image" or together > _MAX_MERGED_GROUPS):
        raise Unsupported("groups of channels that are far from whole blocks")
    groups, channels = g.groups, g.groups * g.outputs
    g = merge(g, together)
    if source == "image" and g.inputs > _IMAGE_CHANNELS:
        raise Unsupported("an image of more than four channels")
    width = BLOCK if source == "blocked" else _IMAGE_CHANNELS
    runs = _Runs(g, groups, together, width, 8 // tile.item)
    columns, pixels = round_up(g.outputs, BLOCK), math.prod(g.source)
    shape = Shape(
        source=source,
        blocks=runs.blocks,
        pixel=width * tile.item,
        inner=runs.inner,
        last_inner=runs.last_inner,
        width_merged=runs.width_merged,
        columns=columns,
        stored=columns,
        channels=g.inputs,
        x_image=pixels * (runs.blocks * g.groups * BLOCK if source == "blocked" else g.inputs),
        y_image=g.groups * columns * g.pixels,
        y_pixel=BLOCK,
        y_block=g.pixels * BLOCK,
    )
    requantization = requantization_of(q, tile, 1, channels, _sums_of_filters)
    read = g.flat() if source == "blocked" else g
    emit_tiles(q, tile, read, shape, _weights(q, tile, runs, source), requantization)


def _weights(q: QuantizedOperands, tile: Tile, runs: _Runs, source: PatchSource) -> Weights:
    """Return the packed weights of a direct convolution."""
    recipe = (
        f"integer conv {tile.flavour} {tile.weights} {tile.nv}x{tile.lanes} {source} "
        f"{runs.groups}/{runs.together} {int(runs.width_merged)}"
    )
    sources = [q.w, *zero_point_sources(q.w_zero)]
    g = runs.g
    weight = q.low.weight(recipe, packed(tile, g.groups, runs.order), *sources)
    if tile.flavour != "checked":
        return Weights(weight, 0, 0)
    taps = g.kernel[1] * (1 if runs.width_merged else g.kernel[2])
    make = guards(tile, g.groups, (runs.blocks, taps, runs.inner), runs.order)
    return Weights(weight, q.low.weight(f"bounds of {recipe}", make, *sources), 0)


def _sums_of_filters(values: Array) -> Array:
    """Return the sum of the weights of each output."""
    total: Array = values.reshape(values.shape[0], -1).sum(1)
    return total


def _depthwise(q: QuantizedOperands, g: Geometry) -> None:
    """Emit a convolution of one input and one output channel for each group."""
    low = q.low
    if q.x.layout != "blocked":
        raise Unsupported("a quantized depthwise convolution of few channels")
    blocks = -(-g.groups // BLOCK)
    pairs = -(-g.taps // 2)

    def make(weight: Array, *zeros: Array) -> Array:
        signed = weight.reshape(g.groups, -1).astype(np.int16)
        if zeros:
            signed = signed - zeros[0].astype(np.int16).reshape(-1, 1)
        full = np.zeros((blocks * BLOCK, 2 * pairs), np.int16)
        full[: g.groups, : g.taps] = signed
        split = full.reshape(blocks, BLOCK, pairs, 2)
        # The tile multiplies halves of two 16-byte vectors, see `qlinear_depthwise_kernels`.
        order = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
        return np.ascontiguousarray(split.transpose(0, 2, 1, 3)[:, :, order])

    weight = low.weight("integer depthwise", make, q.w, *zero_point_sources(q.w_zero))
    tile = integer_tile("pairs", "int16")
    sums = requantization_of(q, tile, 1, g.groups, flat_array)
    rows = g.target[1]
    wide = g.reach(2, g.target[2]) * BLOCK * 2
    # The patch of a unit fits into the L1 cache.
    while rows > 1 and g.reach(1, rows) * wide > caches().l1:
        rows = -(-rows // 2)
    scratch_bytes = round_up(16 * pairs, 64) + g.reach(1, rows) * wide + 64
    least, most, zero = q.bounds
    arguments = QuantizedDepthwiseArguments(
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
        x_zero=zero_point_argument(low, q.x_zero, q.x.dtype),
        unit_rows=rows,
        **low.worker_scratch(scratch_bytes),
    )
    units = g.images * blocks * -(-g.target[1] // rows)
    low.emit(
        Kernel(
            "subgraph.ops.quantized.qlinear_depthwise_kernels",
            "depthwise",
            dtype=q.x.dtype,
            output=q.output,
        ),
        arguments,
        units,
        grain=grain(units, 2 * g.flops),
        flops=g.flops,
        bytes=q.x.nbytes + q.y.nbytes,
    )
