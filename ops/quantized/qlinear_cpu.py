"""QLinearConv, its fused form and ConvInteger on the CPU: integer tiles in blocks of channels.

In the plain layout the input is converted before and the result after the product. Products of
matrices, on the same tiles, are in ``qlinear_products_cpu``.
"""

from __future__ import annotations

import math

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import MATRIX_ROW_BYTES
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Layout
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.conv.choice import DIRECT, winograd_costs
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.movement.geometry import Geometry, conv_geometry, dense_groups, merge, merged
from subgraph.ops.movement.layout_conversion import blocked
from subgraph.ops.shared.delegation import viewed
from subgraph.ops.shared.strides import contiguous
from subgraph.ops.shared.tile_planning import direct_tiles, grain, round_up
from subgraph.system import host

from .arguments import QuantizedDepthwiseArguments
from .qlinear_operands import (
    BYTES,
    QuantizedOperands,
    Weights,
    choose_tile,
    fits_int8,
    integer_operands,
    read_operands,
    requantization_of,
    zero_point_argument,
    zero_point_sources,
)
from .qlinear_packing import (
    BLOCK,
    PAIR_CHANNELS,
    QUAD,
    PatchSource,
    Tile,
    centred_weights,
    guards,
    integer_tile,
    packed,
)
from .qlinear_tiles_cpu import Shape, emit_tiles

_BOTH: tuple[Layout, ...] = ("plain", "blocked")
_IMAGE_CHANNELS = 4  # most channels of an image whose patch has no blocks, as in `patches`
# Speed of integer tiles without a dot product of bytes, relative to that of float32 tiles: 1.5 for
# eight convolutions of 3 x 3 and 1 x 1 on an AMD Zen 3, which is nearer to 2 if no sum of 16 bits
# saturates.
_INTEGER_SPEED = 1.5
# Cycles in which a vector of bytes becomes float32, or the reverse (estimate).
_CONVERSION_CYCLES = 2
# Groups that may be merged into one, with weights of 0 between them; estimate: with more, float32
# is as fast.
_MAX_MERGED_GROUPS = 4


@lowering("QLinearConv", dtypes=BYTES, layouts=_BOTH)
@lowering("FusedQLinearConv", domain=INTERNAL_DOMAIN, dtypes=BYTES, layouts=_BOTH)
def qlinear_conv(node: Node, low: Lowering) -> None:
    """Lower QLinearConv, and a convolution between DequantizeLinear and QuantizeLinear.

    The latter is refused, so that its parts run one by one, where that takes less time.
    """
    q = read_operands(node, low)
    if node.op_type == "FusedQLinearConv":
        if low.output().layout != "blocked":
            raise Unsupported("a quantized convolution in the plain layout")
        if _takes_less_time_in_floats(low, conv_geometry(node, q.x, q.w, q.y).trimmed()[0]):
            raise Unsupported("a convolution that takes less time by Winograd's algorithm")
    _convolution(node, q)


def _takes_less_time_in_floats(low: Lowering, g: Geometry) -> bool:
    """Return whether Winograd's algorithm in float32 takes less time than integer tiles.

    Args:
        low: The lowering of the convolution.
        g: Sizes of the convolution, without taps that read only padding.
    """
    if host.has_vnni() or host.has_int8_tiles() or not low.options.get("WINOGRAD", True):
        return False
    of = direct_tiles("float32", low.block_lanes("float32"))
    direct, *others = winograd_costs(of, g, DIRECT).values()
    if not others or g.inputs <= _IMAGE_CHANNELS or of.lanes == 1:
        return False
    # The tiles' weights are bytes, which do not wait for memory, in blocks of 16 channels.
    rows = g.images * g.pixels
    products = rows * g.taps * round_up(g.inputs, BLOCK) * round_up(g.outputs, BLOCK) / of.lanes
    converted = g.images * (math.prod(g.source) * g.inputs + g.pixels * g.outputs) / of.lanes
    in_floats = min(direct, *others) + _CONVERSION_CYCLES * converted
    return in_floats < products / _INTEGER_SPEED


@lowering("ConvInteger", dtypes=BYTES)
def conv_integer(node: Node, low: Lowering) -> None:
    """Lower ConvInteger; DynamicQuantizeLinear computes the zero point of x at run time."""
    _convolution(node, integer_operands(low))


def _convolution(node: Node, q: QuantizedOperands) -> None:
    """Emit a quantized convolution, whose kernels work in blocks of channels.

    Raises:
        Unsupported: There is no kernel for it.
    """
    if not q.y.size:
        return
    if q.residual is not None and q.residual.bytes.layout != "blocked":
        q.residual = attrs.evolve(q.residual, bytes=blocked(q.low, BLOCK, q.residual.bytes))
    g = conv_geometry(node, q.x, q.w, q.y)
    flat = g.kernel[0] == g.source[0] == g.target[0] == 1
    if flat and g.groups > 1 and g.inputs == g.outputs == 1 and q.y.layout == "blocked":
        if q.residual is not None:
            raise Unsupported("a residual of a depthwise convolution")
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
        matrix: Whether tiles are matrix tiles, whose runs are padded to whole steps.
    """

    g: Geometry
    groups: int
    together: int
    width: int
    double: int
    matrix: bool

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
        step = MATRIX_ROW_BYTES if self.matrix else self.double
        return round_up(self.elements, step) // self.double

    @property
    def last_inner(self) -> int:
        """Double steps of the last run."""
        # With several taps the channels of the last block that exist are not at the end of a run of
        # taps, so that they cannot be cut off.
        rest = self.g.inputs - (self.blocks - 1) * self.width
        short = self.g.taps == 1 and not self.matrix
        return -(-rest // self.double) if short else self.inner

    def order(self, weight: Array) -> Array:
        """Return weights [outputs, K] in the order of a patch; `packed` says more."""
        high, wide = self.g.kernel[0] * self.g.kernel[1], self.g.kernel[2]
        whole = dense_groups(weight, self.groups, self.together)
        outputs = whole.shape[0]
        full = np.zeros((outputs, self.blocks * self.width, high, wide), weight.dtype)
        full[:, : self.g.inputs] = whole.reshape(outputs, self.g.inputs, high, wide)
        split = full.reshape(outputs, self.blocks, self.width, high, wide)
        split = split.transpose(0, 1, 3, 4, 2).reshape(outputs, self.blocks, -1, self.elements)
        padded = np.zeros((*split.shape[:3], self.inner * self.double), weight.dtype)
        padded[..., : self.elements] = split
        # The last run of each output is shorter; it is at the end of K, as there is one tap then.
        unused = (self.inner - self.last_inner) * self.double
        return padded.reshape(outputs, -1)[:, : padded[0].size - unused]


def _direct(q: QuantizedOperands, g: Geometry) -> None:
    """Emit a direct convolution over integer tiles."""
    low, plain = q.low, q.y.layout == "plain"
    groups, channels = g.groups, g.groups * g.outputs
    together = _groups_of_a_block(g) if plain else merged(g, BLOCK)
    # A block of 16 channels of an image of three would be padding for the most part.
    image = q.x.layout == "plain" and groups == 1 and g.inputs <= _IMAGE_CHANNELS
    source: PatchSource = "image" if image else "blocked"
    if not plain and (together > _MAX_MERGED_GROUPS or (not image and q.x.layout == "plain")):
        raise Unsupported("groups or channels that are far from whole blocks")
    tile = choose_tile(q, g.inputs * g.taps, source=source, dilated=g.dilations[2] != 1)
    g = merge(g, together)
    width = g.inputs if image else MATRIX_ROW_BYTES if tile.matrix else BLOCK
    runs = _Runs(g, groups, together, width, 8 // tile.item, tile.matrix)
    shape = _shape(q, tile, runs, source)
    # In the plain layout each group is padded to whole blocks of columns; in the blocked one merged
    # groups have whole blocks, so that all channels are one sequence.
    parts = (g.groups, g.outputs) if plain else (1, channels)
    requantization = requantization_of(q, tile, *parts, _sums_of_filters)
    weights = _weights(q, tile, runs, source)
    read = g if image else g.flat()
    if not plain:
        emit_tiles(q, tile, read, shape, weights, requantization)
        return
    # Tiles store the channels of a pixel side by side. The transposition to the plain layout is a
    # step of its own.
    sums = temporary(low, q.y.dtype, (g.images, g.pixels, channels))
    x = q.x
    if not image:  # each group of channels has blocks of its own
        by_group = (g.images * g.groups, g.inputs, *g.source)
        x = blocked(low, BLOCK, viewed(low, x, by_group))
    emit_tiles(attrs.evolve(q, x=x, y=sums), tile, read, shape, weights, requantization)
    dims = (g.images, channels, g.pixels)
    strides = (channels * g.pixels, 1, channels)
    emit_copy(low, sums, q.y, dims, strides, contiguous(dims), item=sums.itemsize)


def _groups_of_a_block(g: Geometry) -> int:
    """Return how many groups are merged to one that fits into a block of channels, 1 at least."""
    # A merged group costs as much as a single one while its channels fit into one block.
    most = BLOCK // max(g.inputs, g.outputs)
    return max((n for n in range(1, most + 1) if g.groups % n == 0), default=1)


def _shape(q: QuantizedOperands, tile: Tile, runs: _Runs, source: PatchSource) -> Shape:
    """Return the sizes of a direct convolution.

    A plain result is written with channels last and transposed afterwards.
    """
    g, plain = runs.g, q.y.layout == "plain"
    columns, pixels, item = round_up(g.outputs, BLOCK), math.prod(g.source), q.y.itemsize
    channels = runs.groups * g.outputs // runs.together
    blocks = -(-g.inputs // BLOCK)
    return Shape(
        source=source,
        blocks=runs.blocks,
        pixel=runs.width * tile.item,
        inner=runs.inner,
        last_inner=runs.last_inner,
        width_merged=runs.width_merged,
        columns=columns,
        stored=g.outputs if plain else columns,
        channels=g.inputs,
        x_blocks=blocks,
        x_image=pixels * (blocks * g.groups * BLOCK if source == "blocked" else g.inputs),
        y_image=g.pixels * (channels * item if plain else g.groups * columns),
        y_group=g.outputs * item if plain else g.pixels * columns,
        y_pixel=channels * item if plain else BLOCK,
        y_block=BLOCK * item if plain else g.pixels * BLOCK,
    )


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
    taps = g.kernel[0] * g.kernel[1] * (1 if runs.width_merged else g.kernel[2])
    make = guards(tile, g.groups, (runs.blocks, taps, runs.inner), runs.order)
    return Weights(weight, q.low.weight(f"bounds of {recipe}", make, *sources), 0)


def _sums_of_filters(values: Array) -> Array:
    """Return the sum of the weights of each output."""
    total: Array = values.reshape(values.shape[0], -1).sum(1)
    return total


def _depthwise(q: QuantizedOperands, g: Geometry) -> None:
    """Emit a convolution of one input and one output channel for each group."""
    low = q.low
    # Each block of channels is a unit; an image of few channels would leave most lanes empty.
    if q.x.layout != "blocked":
        raise Unsupported("a quantized depthwise convolution of few channels")
    blocks, quads = -(-g.groups // BLOCK), _multiplies_quads(q, g)
    along, taps = (g.kernel[2], QUAD) if quads else (g.taps, 2)
    steps = g.taps // along * -(-along // taps)
    tile = integer_tile(*(("quads", "int8") if quads else ("pairs", "int16")))

    def make(weight: Array, *zeros: Array) -> Array:
        # A row of taps that is no whole number of steps ends with weights of 0.
        full = np.zeros((blocks * BLOCK, g.taps // along, round_up(along, taps)), tile.weights)
        centred = centred_weights(weight, *zeros).reshape(g.groups, -1, along)
        full[: g.groups, :, :along] = centred
        split = full.reshape(blocks, BLOCK, steps, taps).transpose(0, 2, 1, 3)
        order = [channel for part in PAIR_CHANNELS for channel in part]
        return np.ascontiguousarray(split if quads else split[:, :, order])

    weight = low.weight(
        f"integer depthwise {tile.flavour}", make, q.w, *zero_point_sources(q.w_zero)
    )
    sums = requantization_of(q, tile, 1, g.groups, _sums_of_filters)
    pixel = BLOCK * tile.item
    wide = g.reach(2, g.target[2]) * pixel
    rows = g.outputs_within(1, host.caches().l1, wide)  # whose patch fits into the L1 cache
    offsets = round_up(8 * steps * (1 if quads else 2), 64)
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
        steps=steps,
        low=least,
        high=most,
        y_zero=zero,
        x_zero=zero_point_argument(low, q.x_zero, q.x.dtype),
        unit_rows=rows,
        # A quad may read as many bytes beyond the patch.
        **low.worker_scratch(offsets + g.reach(1, rows) * wide + 64),
    )
    units = g.images * blocks * -(-g.target[1] // rows)
    low.emit(
        Kernel(
            "subgraph.ops.quantized.qlinear_depthwise_kernels",
            "depthwise",
            dtype=q.x.dtype,
            output=q.y.dtype,
            flavour=tile.flavour,
        ),
        arguments,
        units,
        grain=grain(units, 2 * g.flops),
        flops=g.flops,
        bytes=q.x.nbytes + q.y.nbytes,
    )


def _multiplies_quads(q: QuantizedOperands, g: Geometry) -> bool:
    """Return whether a depthwise convolution multiplies four adjacent taps of bytes at once."""
    forced = q.low.options.get("INTEGER_FLAVOUR")
    known = q.x_zero is None or q.x_zero.known is not None
    fits = known and fits_int8(q.w, q.w_zero) and g.dilations[2] == 1
    # Vectors of 256 bits need as many instructions to interleave quads as they save products.
    fast = host.has_vnni() and host.has_512_bit_vectors()
    return fits and (fast if forced is None else forced == "quads")
