"""The choice of the algorithm of a convolution on the CPU device.

The cost of an algorithm is estimated in cycles of one core: one for each product of two vectors,
and the time in which the weights arrive from memory. The algorithm of least cost is chosen. All
constants below are estimates unless a comment says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import attrs

from subgraph.engine.planner.lowering import Lowering, Unsupported
from subgraph.engine.planner.operands import Operand
from subgraph.ops.movement.geometry import Geometry, bands, merged
from subgraph.ops.shared.tile_planning import Tiles, product_tiles, round_up
from subgraph.system.host import caches

from .bfloat16.image import reads_image_lines
from .depthwise import has_windows
from .direct import summed_channels
from .job import Job
from .polyphase import OUTPUTS, phases_of
from .winograd import winograd_sizes, winograd_values


class Method(StrEnum):
    """A way to compute a convolution."""

    MATRIX = "matrix"  # direct, over matrix tiles of bfloat16
    MATRIX_IMAGE = "matrix image"  # the same, over a plain image of few channels
    GENERIC = "generic"  # a matrix product over gathered patches; serves every convolution
    DEPTHWISE = "depthwise"
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


MATRIX, MATRIX_IMAGE, GENERIC, DEPTHWISE, BANDS, IMAGE, POLYPHASE, DIRECT = map(
    Algorithm, list(Method)[:8]
)

# Bytes of weights that arrive from memory in the cycle in which a core multiplies one vector of at
# most 32 bytes, with many-row tiles and with few-row tiles.
_BYTES_PER_CYCLE, _BYTES_PER_CYCLE_FEW_ROWS = 8.0, 3.0
# The model of costs was checked as a whole: the time of eleven networks was 0.97 to 1.02 of that
# with kernels that were chosen by measured times (one thread, AVX-512).
_MAX_IMAGE_CHANNELS = 3  # channels of an image: up to here IMAGE is used with vectors of any size
_MAX_PADDED_RATIO = 8  # multiplications with zeros included, to those of a grouped convolution
_TRANSFORM_CYCLES = 7  # cycles for each vector that Winograd's transforms read or write
_PHASE_CYCLES = 2  # cycles for each element that is written to its phase
_BETTER_RATIO = 0.95  # ratio to the cost of a simpler algorithm below which another one replaces it
# Input channels from which on matrix tiles read blocks of 32 instead of rows of a plain image.
_MIN_MATRIX_INPUTS = 5
_MIN_PIXELS = 16  # output pixels: from here on packing the weights in every run is faster
# Bytes by which Winograd's weights of a volume may exceed direct's.
_MAX_EXTRA_WEIGHT_BYTES = 4_000_000


def choose(job: Job) -> Algorithm:
    """Return the algorithm of a convolution.

    Args:
        job: The convolution.

    Raises:
        Unsupported: Weights in blocks of channels are computed at run time.
    """
    g, of = job.g, job.of
    if not job.constant:
        return _choose_for_computed_weights(job)
    if g.groups == job.channels_out and g.inputs == g.outputs == 1 and g.groups > 1:
        return DEPTHWISE
    if has_matrix_tiles(job.low, job.of, job.g, job.w):
        if g.inputs >= _MIN_MATRIX_INPUTS:
            return MATRIX
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
        return GENERIC
    together = merged(g, of.lanes)
    if g.groups > 1:
        # Cycles for one output pixel, with groups merged to whole blocks or with panels in bands.
        blocks = round_up(together * g.outputs, of.lanes) // of.lanes
        dense = -(-g.groups // together) * round_up(together * g.inputs, of.lanes) * blocks
        banded = sum(count * of.lanes * of.nv for _, count in bands(g, of))
        if min(dense, banded) > _MAX_PADDED_RATIO * g.groups * g.inputs * g.outputs / of.lanes:
            return GENERIC
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
    if of.lanes != 16 or not product_tiles(of, low, w).operands:
        return False
    whole = g.inputs % of.lanes == g.outputs % of.lanes == 0
    return g.groups == 1 or whole


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


def _choose_winograd(job: Job) -> Algorithm:
    """Return DIRECT or Winograd's algorithm with the best size of its tile."""
    g, of = job.g, job.of
    strided = g.strides[1:] == (2, 2) and of.few_rows
    taps = g.kernel[1]
    square = (
        taps == g.kernel[2]
        and taps in OUTPUTS
        and ((strided and taps == 3) or g.strides[1:] == (1, 1))
        and g.dilations[1:] == (1, 1)
        # Volumes were not measured with many-row tiles.
        and (of.few_rows or g.source[0] == g.target[0] == g.kernel[0] == 1)
    )
    if not square or not job.low.options.get("WINOGRAD", True) or of.lanes == 1:
        return DIRECT
    if strided:
        candidates = [Algorithm(Method.STRIDED_WINOGRAD, 2)]
    else:
        # With 3 taps, tiles of 2 x 2 have fewer points and so fewer bytes of weights: better where
        # weights come from memory.
        sizes = dict.fromkeys((OUTPUTS[taps], 2) if taps == 3 else (OUTPUTS[taps],))
        candidates = [Algorithm(Method.WINOGRAD, m) for m in sizes]
    blocks_in = round_up(g.inputs, of.lanes) // of.lanes
    blocks_out = round_up(g.outputs, of.lanes) // of.lanes
    blocks_in *= g.kernel[0]
    products = blocks_in * of.lanes * blocks_out
    weights = products * of.lanes * of.item
    summed = summed_channels(of, g) * g.kernel[0] * blocks_out
    costs = {DIRECT: _cost(of, g.images * g.pixels * taps**2 * summed, taps**2 * weights)}
    for candidate in candidates:
        m = candidate.tile
        values, _ = winograd_sizes(m, taps, g.strides[1])
        # Transformed weights take memory: 36 values instead of 9 for each plane of a 3 x 3 kernel
        # if m is 4.
        if g.source[0] > 1 and (values - taps**2) * weights > _MAX_EXTRA_WEIGHT_BYTES:
            continue
        multiplied = winograd_values(g, m) * products
        costs[candidate] = _transforms(of, g, m) + _cost(of, multiplied, values * weights)
    return _prefer_packed(job.w, costs)


def _prefer_packed(weight: Operand, costs: Mapping[Algorithm, float]) -> Algorithm:
    """Return the algorithm of least cost, or one that reads the weight as it is packed already.

    A detector's head applies the same weights to feature maps of several sizes, and each packed
    form of the weights takes memory. An algorithm that reads the form of an earlier convolution is
    therefore preferred as long as its extra cost is at most the cost of that convolution.
    """
    # Costs are in order of complexity: a later algorithm must be clearly better than the best
    # before.
    best, least = DIRECT, costs[DIRECT]
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
    tiles = g.images * g.target[0] * math.prod(-(-o // m) for o in g.target[1:])
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
