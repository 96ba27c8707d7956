"""The choice of the algorithm of a convolution on the CPU device, and of the form of its output.

The cost of an algorithm is estimated in cycles of one core: one for each product of two vectors,
and the time in which the weights arrive from memory. The algorithm of least cost is chosen. All
constants below are estimates unless a comment says otherwise.

Outputs that convolutions over matrix tiles read are stored as bfloat16. The readers round these
values anyway, or can store their own results as bfloat16: a convolution then writes half the bytes,
and its readers need no step that rounds their input. OpenVINO stores values between convolutions in
the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from functools import partial
from typing import Any

import attrs

from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_ROWS
from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.expressions import EXPANSIONS
from subgraph.ops.movement.geometry import Geometry, bands, conv_geometry, merged
from subgraph.ops.movement.layout_conversion import is_read_by
from subgraph.ops.shared.tile_planning import (
    Tiles,
    direct_tiles,
    product_tiles,
    round_up,
)
from subgraph.system.host import caches, has_bfloat16_tiles

from .bfloat16.image import reads_image_lines
from .depthwise import adds_lanes, has_windows
from .direct import summed_channels
from .job import Job
from .polyphase import OUTPUTS, phases_of
from .winograd import winograd_outputs, winograd_planes, winograd_sizes, winograd_values


class Method(StrEnum):
    """A way to compute a convolution."""

    MATRIX = "matrix"  # direct, over matrix tiles of bfloat16
    MATRIX_IMAGE = "matrix image"  # the same, over a plain image of few channels
    GENERIC = "generic"  # a matrix product over gathered patches; serves every convolution
    DEPTHWISE = "depthwise"
    LANE_SUMS = "lane sums"  # to a few channels: lane by lane as a depthwise one, then added
    BANDS = "bands"  # groups as one convolution; each panel reads only its blocks of channels
    IMAGE = "first"  # direct, over a plain image of few channels
    POLYPHASE = "phases"  # Winograd's, over the phases of a strided convolution of an image
    DIRECT = "direct"  # over blocks of channels
    WINOGRAD = "winograd"
    STRIDED_WINOGRAD = "strided"  # Winograd's for stride 2


@attrs.frozen
class Algorithm:
    """A method with its parameter.

    Attributes:
        method: The method.
        tile: Outputs along an edge of Winograd's tile; 0 for other methods.
    """

    method: Method
    tile: int = 0

    def __str__(self) -> str:
        return f"{self.method}{self.tile or ''}"


MATRIX, MATRIX_IMAGE, GENERIC, DEPTHWISE, LANE_SUMS, BANDS, IMAGE, POLYPHASE, DIRECT = map(
    Algorithm, list(Method)[:9]
)

# Bytes of weights that arrive from memory in the cycle in which a core multiplies one vector of at
# most 32 bytes, with many-row tiles and with few-row tiles.
_BYTES_PER_CYCLE, _BYTES_PER_CYCLE_FEW_ROWS = 8.0, 3.0
# The model of costs was checked as a whole: the time of eleven networks was 0.97 to 1.02 of that
# with kernels that were chosen by measured times (one thread, AVX-512).
_MAX_IMAGE_CHANNELS = 3  # channels of an image: up to here IMAGE is used with vectors of any size
_MAX_REPEATS = 8  # outputs of a channel up to which DEPTHWISE reads repeated channels
_MAX_PADDED_RATIO = 8  # multiplications with zeros included, to those of a grouped convolution
_TRANSFORM_CYCLES = 7  # cycles for each vector that Winograd's transforms read or write
_PHASE_CYCLES = 2  # cycles for each element that is written to its phase
_BETTER_RATIO = 0.95  # ratio to the cost of a simpler algorithm below which another one replaces it
# Ratio of the estimated cycles of LANE_SUMS to those of another algorithm up to which it takes less
# time (measured, AVX-512): its products read no element of A each, and its outputs are plain.
_LANE_SUMS_RATIO = 1.1
# Vectors that LANE_SUMS loads and stores beside the products of a row of windows, for each block of
# channels, and operations that add the lanes of a pixel.
_TERM_CYCLES, _LANE_CYCLES = 4, 5
# Input channels from which on matrix tiles read blocks of 32 instead of rows of a plain image.
_MIN_MATRIX_INPUTS = 5
_USUAL_EDGE = 56  # pixels along an axis of an image of unknown size
_MIN_PIXELS = 16  # output pixels: from here on packing the weights in every run is faster
# Bytes by which Winograd's weights of a volume may exceed direct's.
_MAX_EXTRA_WEIGHT_BYTES = 4_000_000
_INPUT, _RESIDUAL = 0, 3  # operands of FusedConv that may be bfloat16; Conv has the first of them
_MAX_DEPTH = 3  # nodes between two convolutions that are looked at (estimate)
_POOLS = ("GlobalAveragePool", "GlobalMaxPool", "ReduceMean", "ReduceMax")


def choose(job: Job) -> Algorithm:
    """Return the algorithm of a convolution.

    Args:
        job: The convolution.

    Raises:
        Unsupported: Weights in blocks of channels are computed at run time.
    """
    found = _choose_for_blocks(job)
    return LANE_SUMS if _prefers_lane_sums(job, found) else found


def _prefers_lane_sums(job: Job, other: Algorithm) -> bool:
    """Return whether LANE_SUMS is cheaper than the algorithm for whole blocks of outputs."""
    g, of = job.g, job.of
    if other.method in (Method.IMAGE, Method.POLYPHASE) or g.inputs < of.lanes // 2:
        return False
    # A block of as many outputs has no padding. With few pixels the arrival of weights decides.
    if g.outputs >= of.lanes or g.pixels < of.lanes:
        return False
    plain = job.residual is None or job.residual.layout == "plain"
    if not plain or not job.constant or not adds_lanes(of, g):
        return False
    terms = -(-g.inputs // of.lanes) * g.kernel[0]
    cost = terms * (g.kernel[1] * g.kernel[2] + _TERM_CYCLES) + _LANE_CYCLES
    cost *= g.images * g.pixels * g.outputs
    costs = winograd_costs(of, g, MATRIX if other.method is Method.MATRIX else DIRECT)
    return cost < _LANE_SUMS_RATIO * costs.get(other, next(iter(costs.values())))


def _choose_for_blocks(job: Job) -> Algorithm:
    """Return the algorithm of a convolution, as `choose`, that writes whole blocks of channels."""
    g, of = job.g, job.of
    if not job.constant:
        return _choose_for_computed_weights(job)
    if g.groups > 1 == g.inputs and g.outputs <= _MAX_REPEATS:
        return DEPTHWISE
    if has_matrix_tiles(job.low, job.of, job.g, job.w):
        if g.inputs >= _MIN_MATRIX_INPUTS:
            # Matrix tiles multiply so fast that Winograd's transforms alone would take longer.
            return MATRIX if has_bfloat16_tiles() else _choose_winograd(job, MATRIX)
        if job.x.layout == "plain" and reads_image_lines(g):
            return MATRIX_IMAGE
    # `windows` copies each channel to the lanes of its group, so that groups may not cross blocks.
    if 1 < g.inputs == g.outputs < of.lanes and of.lanes % g.inputs == 0 and has_windows(of, g):
        return DEPTHWISE
    if (
        job.x.layout == "plain"
        and g.groups == 1
        and g.inputs <= max(of.lanes // 4, _MAX_IMAGE_CHANNELS)
    ):
        return _choose_for_image(job)
    # The tiles of `direct` have three loops around the run of steps. Input blocks, planes and rows
    # take them all, so that the taps of a kernel row must be one run.
    if g.kernel[0] > 1 and g.dilations[2] > 1 and g.kernel[2] > 1:
        return _choose_winograd(job, GENERIC)
    together = merged(g, of.lanes)
    if g.groups > 1:
        # Cycles for one output pixel, with groups merged to whole blocks or with panels in bands.
        blocks = round_up(together * g.outputs, of.lanes) // of.lanes
        dense = -(-g.groups // together) * round_up(together * g.inputs, of.lanes) * blocks
        banded = sum(count * of.lanes * of.nv for _, count in bands(g, of))
        if min(dense, banded) > _MAX_PADDED_RATIO * g.groups * g.inputs * g.outputs / of.lanes:
            return GENERIC
        # Weights of a volume are packed for single groups.
        pairs = g.kernel[0] == 1 and _multiplies_bfloat16(job.low, of, job.w)
        if pairs and dense / 2 <= banded:
            return MATRIX
        return DIRECT if dense <= banded else BANDS
    # With so few channels, blocks are mostly padding. Between blocked neighbours they are still
    # better than converting both images (estimate of the ratio).
    small = round_up(g.inputs, of.lanes) * round_up(g.outputs, of.lanes)
    if small > 3 * g.inputs * g.outputs and job.x.layout == job.y.layout == "plain":
        return GENERIC
    return _choose_winograd(job)


def has_matrix_tiles(low: Lowering, of: Tiles, g: Geometry, w: Operand) -> bool:
    """Return whether matrix tiles of bfloat16 are allowed, and can compute all groups.

    Args:
        low: The lowering, with the options of the device.
        of: The contraction tiles of float32.
        g: Sizes of the convolution, transposed or not.
        w: The weights.
    """
    whole = g.inputs % of.lanes == g.outputs % of.lanes == 0
    return (g.groups == 1 or whole) and _multiplies_bfloat16(low, of, w)


def _multiplies_bfloat16(low: Lowering, of: Tiles, w: Operand) -> bool:
    return of.lanes == MATRIX_ROWS and bool(product_tiles(of, low, w).operands)


def _choose_for_computed_weights(job: Job) -> Algorithm:
    """Return the algorithm for weights or a bias that are computed at run time."""
    g, of = job.g, job.of
    if job.w.layout == "blocked":
        raise Unsupported("weights that are computed at run time, in blocks of channels")
    # The kernel `pack` copies all taps to whole panels. Taps that read only padding stay, a panel
    # cannot end with a group, and a bias is not padded to whole blocks.
    few = g.inputs < of.lanes or g.outputs < of.lanes
    if few or g.kernel != job.whole.kernel or g.images * g.pixels < _MIN_PIXELS or of.lanes == 1:
        return GENERIC
    if g.kernel[0] > 1 and g.dilations[2] > 1 and g.kernel[2] > 1:
        return GENERIC
    if g.groups > 1 and (merged(g, of.lanes) > 1 or g.outputs % of.width):
        return GENERIC
    if job.bias is not None and not job.bias.constant and g.outputs % of.lanes:
        return GENERIC
    return DIRECT


def _choose_for_image(job: Job) -> Algorithm:
    """Return IMAGE or POLYPHASE for a plain image of few channels."""
    g, of, found = job.g, job.of, phases_of(job.g)
    if found is None or not job.low.options.get("WINOGRAD", True) or of.lanes == 1:
        return IMAGE
    blocks_out = -(-g.outputs // of.lanes)
    m = OUTPUTS[found.g.kernel[1]]
    # Cycles are counted as in `_cost`, without the weights: those of few input channels stay in the
    # caches.
    cost = winograd_values(found.g, m) * found.g.inputs * blocks_out
    cost += _transforms(of, found.g, m)
    cost += _PHASE_CYCLES * g.images * math.prod(found.g.source) * found.g.inputs
    read_as_it_is = g.images * g.pixels * g.taps * g.inputs * blocks_out
    return POLYPHASE if cost < _BETTER_RATIO * read_as_it_is else IMAGE


def _choose_winograd(job: Job, direct: Algorithm = DIRECT) -> Algorithm:
    """Return ``direct`` or Winograd's algorithm with the best size of its tile.

    Args:
        job: The convolution.
        direct: DIRECT, MATRIX or, for volumes with dilations, GENERIC.
    """
    if not job.low.options.get("WINOGRAD", True):
        return direct
    costs = winograd_costs(job.of, job.g, direct)
    return _prefer_packed(job.w, costs) if len(costs) > 1 else direct


def winograd_costs(of: Tiles, g: Geometry, direct: Algorithm) -> dict[Algorithm, float]:
    """Return the cycles of ``direct``, and of Winograd's algorithms that fit.

    Args:
        of: Tiles of float32.
        g: Sizes of the convolution.
        direct: DIRECT, or MATRIX, of which an instruction multiplies two channels.
    """
    paired = 2 if direct is MATRIX else 1
    strided = g.strides[1:] == (2, 2) and of.few_rows
    dilated = g.dilations[1:] != (1, 1)
    taps = g.kernel[1]
    blocks_in = round_up(g.inputs, of.lanes) // of.lanes * g.kernel[0]
    blocks_out = round_up(g.outputs, of.lanes) // of.lanes
    products = blocks_in * of.lanes * blocks_out
    weights = products * of.lanes * of.item
    square = (
        g.groups == 1
        and taps == g.kernel[2]
        and taps in OUTPUTS
        and ((strided and taps == 3 and not dilated) or g.strides[1:] == (1, 1))
        # Volumes were not measured with many-row tiles.
        and (of.few_rows or g.source[0] == g.target[0] == g.kernel[0] == 1)
    )
    summed = summed_channels(of, g) * g.kernel[0] * blocks_out
    direct_products = g.images * g.pixels * g.kernel[1] * g.kernel[2] * summed / paired
    costs = {direct: _cost(of, direct_products, g.kernel[1] * g.kernel[2] * weights / paired)}
    if not square or of.lanes == 1:
        return costs
    if strided:
        candidates = [Algorithm(Method.STRIDED_WINOGRAD, 2)]
    else:
        # With 3 taps, tiles of 2 x 2 have fewer points and so fewer bytes of weights: better where
        # weights come from memory.
        sizes = dict.fromkeys((OUTPUTS[taps], 2) if taps == 3 else (OUTPUTS[taps],))
        candidates = [Algorithm(Method.WINOGRAD, m) for m in sizes]
    for candidate in candidates:
        m = candidate.tile
        values, _ = winograd_sizes(m, taps, g.strides[1])
        # Transformed weights take memory: 36 values instead of 9 for each plane of a 3 x 3 kernel
        # if m is 4.
        if g.source[0] > 1 and (values - taps**2) * weights > _MAX_EXTRA_WEIGHT_BYTES:
            continue
        multiplied = winograd_values(g, m) * products
        costs[candidate] = _transforms(of, g, m) + _cost(of, multiplied, values * weights)
    return costs


def is_by_winograd(node: Node) -> bool:
    """Return whether a convolution that might multiply bfloat16 will probably be Winograd's.

    The answer is an estimate, from the types of the node's values.
    """
    g = None if has_bfloat16_tiles() else _geometry(node)
    if g is None:
        return False
    costs = winograd_costs(direct_tiles("float32"), g, MATRIX)
    return min(costs.values()) < _BETTER_RATIO * costs[MATRIX]


def _is_by_windows(node: Node) -> bool:
    """Return whether a convolution is a depthwise one whose kernel is probably `windows`."""
    g = _geometry(node)
    single = g is not None and g.groups > 1 == g.inputs == g.outputs
    return g is not None and single and has_windows(direct_tiles("float32"), g)


def _geometry(node: Node) -> Geometry | None:
    """Return the sizes of a convolution, as far as its types state them; None: an unknown rank.

    Images of unknown sizes have `_USUAL_EDGE` pixels along an axis.
    """
    x, w, y = (_shaped(value) for value in (*node.inputs[:2], node.outputs[0]))
    if x is None or w is None or y is None:
        return None
    try:
        return conv_geometry(node, x, w, y).trimmed()[0]
    except Unsupported:
        return None


def _shaped(value: Value | None) -> Operand | None:
    """Return an operand with the shape of a value; None if its rank is unknown."""
    shape = value.type.shape if value is not None and isinstance(value.type, TensorType) else None
    if value is None or shape is None:
        return None
    sizes = [
        d if isinstance(d, int) else 1 if axis < 2 else _USUAL_EDGE for axis, d in enumerate(shape)
    ]
    return Operand(value.name, "float32", tuple(sizes), "plain")


def _prefer_packed(weight: Operand, costs: Mapping[Algorithm, float]) -> Algorithm:
    """Return the algorithm of least cost, or one that reads the weight as it is packed already.

    A detector's head applies the same weights to feature maps of several sizes, and each packed
    form of the weights takes memory. An algorithm that reads the form of an earlier convolution is
    therefore preferred as long as its extra cost is at most the cost of that convolution.
    """
    # Costs are in order of complexity: a later algorithm must be clearly better than the best
    # before.
    best, least = next(iter(costs.items()))
    for algorithm, cost in costs.items():
        if cost < _BETTER_RATIO * least:
            best, least = algorithm, cost
    if weight.form is None:
        weight.form = best, least
        return best
    packed_for, first = weight.form
    return packed_for if costs.get(packed_for, math.inf) - least <= first else best


def _transforms(of: Tiles, g: Geometry, m: int) -> int:
    """Return the cycles of Winograd's transforms of all tiles."""
    values, points = winograd_sizes(m, g.kernel[1], g.strides[1])
    tiles = winograd_planes(g) * math.prod(-(-o // m) for o in winograd_outputs(g))
    read = values * g.kernel[0] * -(-g.inputs // of.lanes)
    return _TRANSFORM_CYCLES * tiles * (read + points * -(-g.outputs // of.lanes))


def _cost(of: Tiles, multiplications: float, weight_bytes: float) -> float:
    """Return the cycles of multiplications of vectors whose weights come from memory or L2."""
    if weight_bytes <= caches().l2:
        return multiplications
    wide = max(1, of.lanes * of.item // 32)  # a vector of 64 bytes takes as long as two of 32
    arrival = weight_bytes / (_BYTES_PER_CYCLE_FEW_ROWS * wide if of.few_rows else _BYTES_PER_CYCLE)
    # A fifth of the arrival is not hidden behind multiplications (estimate).
    return max(multiplications, arrival) + 0.2 * arrival


def is_read_as_bfloat16(node: Node, options: Mapping[str, Any], depth: int = 0) -> bool:
    """Return whether all readers of a node's only output take values of bfloat16.

    The answer is an estimate: the plan converts the value for a reader that needs float32.

    Args:
        node: The node.
        options: The options of the plan, as `Lowering.options`.
        depth: Number of nodes between the convolution and this node.
    """
    if depth > _MAX_DEPTH or len(node.outputs) != 1:
        return False
    return is_read_by(node, partial(_takes_bfloat16, options=options, depth=depth))


def stores_bfloat16(low: Lowering, y: Operand, outputs: int) -> bool:
    """Return whether a convolution over matrix tiles stores its output as bfloat16.

    Args:
        low: The lowering of the convolution, transposed or not.
        y: Its output.
        outputs: Channels of a group of y.
    """
    # No two groups write to a block of 32 channels.
    whole = outputs == y.shape[1] or outputs % MATRIX_DEPTH == 0
    return y.layout == "blocked" and whole and is_read_as_bfloat16(low.node, low.options)


def _takes_bfloat16(user: Node, value: Value, options: Mapping[str, Any], depth: int) -> bool:
    """Return whether a node reads a value as bfloat16."""
    if user.op_type in ("Conv", "FusedConv") and user.domain in ("", INTERNAL_DOMAIN):
        positions = {k for k, v in enumerate(user.inputs) if v is value}
        if positions == {_INPUT} and _is_by_windows(user):
            return True
        if not positions <= {_INPUT, _RESIDUAL} or not _multiplies_matrices(user):
            return False
        return not (options.get("WINOGRAD", True) and is_by_winograd(user))
    if user.op_type == "ConvTranspose" and user.domain == "":
        only_input = all(v is not value for v in user.inputs[1:])
        return only_input and _size(user.inputs[1], 1) >= MATRIX_ROWS and _multiplies_matrices(user)
    if user.op_type in ("MaxPool", "AveragePool") and user.domain == "":
        return is_read_as_bfloat16(user, options, depth + 1)
    if user.op_type == "Concat" and user.domain == "":
        fits = user.attrs.get("axis") == 1 and all(map(_fills_blocks, user.inputs))
        return fits and is_read_as_bfloat16(user, options, depth + 1)
    if user.op_type in _POOLS and user.domain == "":
        return _pools_images(user, value)
    if _has_one_image(user):
        return is_read_as_bfloat16(user, options, depth + 1)
    return False


def _pools_images(user: Node, value: Value) -> bool:
    """Return whether the output of a reduction of images has one pixel for each."""
    x, y = _shape(value), _shape(user.outputs[0])
    return len(x) > 2 and y[:2] == x[:2] and all(size == 1 for size in y[2:])


def _has_one_image(node: Node) -> bool:
    """Return whether an elementwise node reads one image, and writes one.

    Its other inputs are a number, or one for each channel. These are constant, results of a
    convolution, which can be of bfloat16 as well, or in whole blocks.
    """
    if node.op_type != "FusedElementwise" and (node.domain or node.op_type not in EXPANSIONS):
        return False
    shape, images = _shape(node.outputs[0]), set[Value]()
    for value in filter(None, node.inputs):
        sizes = _shape(value)
        sizes = (1,) * (len(shape) - len(sizes)) + sizes
        if sizes == shape:
            images.add(value)
        elif any(size != 1 for size in sizes):
            if sizes[1:] != (shape[1], *[1] * (len(shape) - 2)):
                return False
            if shape[1] % MATRIX_DEPTH and value.parameter is None and not _is_convolved(value):
                return False
    return len(images) == len(node.outputs) == 1 and len(shape) > 2


def _is_convolved(value: Value) -> bool:
    """Return whether a value is the result of a convolution."""
    producer = value.producer
    return producer is not None and producer.op_type in ("Conv", "FusedConv", "ConvTranspose")


def _shape(value: Value) -> tuple[Any, ...]:
    """Return the shape of a value of float32, also of symbols; () if it is unknown."""
    type_ = value.type
    known = isinstance(type_, TensorType) and type_.dtype == "float32"
    return type_.shape or () if known and isinstance(type_, TensorType) else ()


def _fills_blocks(value: Value | None) -> bool:
    """Return whether an input of a Concat is the result of a convolution, in whole blocks."""
    return value is not None and _is_convolved(value) and _size(value, 1) % MATRIX_DEPTH == 0


def _multiplies_matrices(convolution: Node) -> bool:
    """Return whether a convolution multiplies matrix tiles of whole blocks of channels.

    Two groups of 16 channels are a block, except for a transposed convolution.
    """
    groups, filters = int(convolution.attrs.get("group", 1)), convolution.inputs[1]
    # Filters are [M, C / groups, ...], those of a transposed convolution [C, M / groups, ...].
    channels, of_group = _size(filters, 0), _size(filters, 1)
    whole = channels % (groups * MATRIX_DEPTH) == 0 and of_group % MATRIX_DEPTH == 0
    paired = groups % 2 == 0 and of_group == MATRIX_ROWS and channels % (groups * of_group) == 0
    return groups == 1 or whole or (paired and convolution.op_type != "ConvTranspose")


def _size(value: Value | None, axis: int) -> int:
    """Return a dimension of a value; 1 if it is unknown."""
    type_ = None if value is None else value.type
    shape = type_.shape if isinstance(type_, TensorType) else None
    size = shape[axis] if shape is not None and len(shape) > axis else None
    return size if isinstance(size, int) else 1
