"""Which algorithm a convolution on the CPU device runs on.

The cost of a kernel is estimated in cycles of one core from multiplications and from weights that
come from memory; the cheapest that may run is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from subgraph.engine.planner.lowering import Lowering, Operand, Unsupported
from subgraph.ops.movement.geometry import Geometry, bands, merged
from subgraph.ops.shared.tile_planning import Tiles, round_up, weight_tiles
from subgraph.ops.shared.tuning import fastest
from subgraph.system.host import caches

from .depthwise import has_windows
from .direct import summed_channels
from .job import Job
from .polyphase import OUTPUTS, phases_of
from .winograd import on_the_fly_outputs, winograd_sizes, winograd_values

Trial = Callable[[Job, str, Lowering], None]

# Bytes of weights that arrive while a core multiplies one vector, with tall tiles and with low, of
# vectors of up to 32 bytes.
_MEMORY, _MEMORY_LOW = 8.0, 3.0
_COLOURS = 3  # channels of an image: worth a kernel of their own whatever the lanes
_WASTE = 8  # zeros multiplied: more than that, and the plain kernel is faster
_TRANSFORM = 7  # cycles for each vector that Winograd's transforms read or write
MADE = 5  # cycles for each vector of weights that is transformed in a run
_SORTED = 2  # cycles for each element that is put to its phase
_SMALLER = 1.08  # what an estimate may rise to for weights of a fraction of the size
_BETTER = 0.95  # what an estimate must come down to
_TURNS = 12  # taps that repeating channels, and turning them into blocks, is worth
_PAYS = 16  # pixels from which it pays to pack weights in every run
# Bytes by which weights may grow: those of volumes at all, others where what takes no more costs
# more than `_SMALLER` says. Such weights would be most of the memory of many networks.
_MORE_WEIGHTS = 4_000_000


def choose(job: Job, trial: Trial) -> str:
    """Return the name of the algorithm: generic, bands, first, phases, direct, winograd2, ...

    Args:
        job: The convolution.
        trial: Emits the steps of an algorithm into another lowering, to be timed.
    """
    g, of = job.g, job.of
    if not job.constant:
        return _computed(job)
    if g.groups == job.channels_out and g.inputs == g.outputs == 1 and g.groups > 1:
        return "depthwise"
    if 1 < g.inputs == g.outputs < of.lanes and of.lanes % g.inputs == 0 and has_windows(of, g):
        return "depthwise"
    if job.x.layout == "plain" and g.groups == 1 and g.inputs <= max(of.lanes // 4, _COLOURS):
        return _first(job, trial)
    if g.kernel[0] > 1 and g.dilations[2] > 1 and g.kernel[2] > 1:
        return "generic"
    together = merged(g, of.lanes)
    if g.groups > 1:
        # In cycles for one output pixel: groups merged to whole blocks, or panels in bands.
        blocks = round_up(together * g.outputs, of.lanes) // of.lanes
        dense = -(-g.groups // together) * round_up(together * g.inputs, of.lanes) * blocks
        banded = sum(count * of.lanes * of.nv for _, count in bands(g, of))
        channels = round_up(job.channels_out, of.lanes) // of.lanes
        if g.inputs == 1 and min(dense, banded) * g.taps > channels * (g.taps + _TURNS):
            return "repeated"
        if min(dense, banded) > _WASTE * g.groups * g.inputs * g.outputs / of.lanes:
            return "generic"
        return "direct" if dense <= banded else "bands"
    small = round_up(g.inputs, of.lanes) * round_up(g.outputs, of.lanes)
    if small > 3 * g.inputs * g.outputs and job.x.layout == job.y.layout == "plain":
        return "generic"
    return _square(job, trial)


def _computed(job: Job) -> str:
    """Choose for weights or a bias that are computed at run time."""
    g, of = job.g, job.of
    if job.w.layout == "blocked":
        raise Unsupported("weights that are computed at run time, in blocks of channels")
    few = g.inputs < of.lanes or g.outputs < of.lanes
    if few or g.kernel != job.whole.kernel or g.images * g.pixels < _PAYS or of.lanes == 1:
        return "generic"
    if g.kernel[0] > 1 and g.dilations[2] > 1 and g.kernel[2] > 1:
        return "generic"
    if g.groups > 1 and (merged(g, of.lanes) > 1 or g.outputs % of.width):
        return "generic"
    if job.bias is not None and not job.bias.constant and g.outputs % of.lanes:
        return "generic"
    return "direct"


def _first(job: Job, trial: Trial) -> str:
    """Choose between reading an image as it is and Winograd's algorithm over its phases."""
    g, of, found = job.g, job.of, phases_of(job.g)
    if found is None or not job.low.options.get("WINOGRAD", True) or of.lanes == 1:
        return "first"
    if job.low.options.get("TUNE"):
        trials = {name: partial(trial, job, name) for name in ("first", "phases")}
        return fastest(job.low, f"conv {of.dtype} x{of.lanes} {g} plain to {job.y.layout}", trials)
    blocks_out = -(-g.outputs // of.lanes)
    m = OUTPUTS[found.g.kernel[1]]
    cost = winograd_values(found.g, m) * found.g.inputs * blocks_out
    cost += _transforms(of, found.g, m)
    cost += _SORTED * g.images * math.prod(found.g.source) * found.g.inputs
    read_as_it_is = g.images * g.pixels * g.taps * g.inputs * blocks_out
    return "phases" if cost < _BETTER * read_as_it_is else "first"


def _square(job: Job, trial: Trial) -> str:
    """Choose between direct convolution and the sizes of Winograd's."""
    g, of = job.g, job.of
    strided = g.strides[1:] == (2, 2) and of.low
    taps = g.kernel[1]
    square = (
        taps == g.kernel[2]
        and taps in OUTPUTS
        and ((strided and taps == 3) or g.strides[1:] == (1, 1))
        and g.dilations[1:] == (1, 1)
        # Volumes were not measured with tall tiles.
        and (of.low or g.source[0] == g.target[0] == g.kernel[0] == 1)
    )
    if not square or not job.low.options.get("WINOGRAD", True) or of.lanes == 1:
        return "direct"
    forms = {"strided2": 2} if strided else {f"winograd{OUTPUTS[taps]}": OUTPUTS[taps]}
    if taps == 3 and not strided:
        forms["winograd2"] = 2
    if job.low.options.get("TUNE"):
        trials = {name: partial(trial, job, name) for name in ("direct", *forms)}
        layouts = f"{job.x.layout} to {job.y.layout}"
        return fastest(job.low, f"conv {of.dtype} x{of.lanes} {g} {layouts}", trials)
    blocks_in = round_up(g.inputs, of.lanes) // of.lanes
    blocks_out = round_up(g.outputs, of.lanes) // of.lanes
    blocks_in *= g.kernel[0]
    products = blocks_in * of.lanes * blocks_out
    weights = products * of.lanes * of.item
    summed = summed_channels(of, g) * g.kernel[0] * blocks_out
    costs = {"direct": _cost(of, g.images * g.pixels * taps**2 * summed, taps**2 * weights)}
    flat = g.source[0] == g.kernel[0] == 1
    narrow = weight_tiles(of, job.low, job.w).weights
    for name, m in forms.items():
        values, _ = winograd_sizes(m, taps, g.strides[1])
        large = (values - taps**2) * weights > _MORE_WEIGHTS
        if large and g.source[0] > 1:
            continue
        multiplied = winograd_values(g, m) * products
        costs[name] = _transforms(of, g, m) + _cost(of, multiplied, values * weights)
        if large and flat and not strided and not narrow:
            made = 0 if job.made_key(m) in job.low.kept else MADE * values * products
            again = -(-g.outputs // on_the_fly_outputs(of, g, m)) - 1
            costs[f"fleeting{m}"] = costs[name] + made + again * _transforms_in(of, g, m)
    return _shared(job.w, costs)


def _shared(weight: Operand, costs: Mapping[str, float]) -> str:
    """Return the algorithm of least cost whose form of the weight is worth its memory.

    A detector's head runs on maps of all sizes with the same weights: each form of them is held, so
    an earlier convolution's form of this weight is taken where it does.
    """
    best, least = "direct", costs["direct"]
    for name, cost in costs.items():
        if cost < _BETTER * least:
            best, least = name, cost
    fleeting = best.replace("winograd", "fleeting")
    if costs.get(fleeting, math.inf) < _SMALLER * least:
        best = fleeting
    if weight.form is None:
        weight.form = _form(best), least
        return best
    kept, first = weight.form
    alike = {name: cost for name, cost in costs.items() if _form(name) == kept}
    if alike and min(alike.values()) - least <= first:
        return min(alike, key=lambda name: alike[name])
    return best


def _form(algorithm: str) -> str:
    """Return the form of the weights that an algorithm keeps."""
    return "direct" if algorithm.startswith("fleeting") else algorithm


def _transforms(of: Tiles, g: Geometry, m: int) -> int:
    """Return the cycles of Winograd's transforms of all tiles."""
    _, points = winograd_sizes(m, g.kernel[1], g.strides[1])
    sums = _tiles(g, m) * points * -(-g.outputs // of.lanes)
    return _transforms_in(of, g, m) + _TRANSFORM * sums


def _transforms_in(of: Tiles, g: Geometry, m: int) -> int:
    """Return the cycles of Winograd's transforms of what all tiles read."""
    values, _ = winograd_sizes(m, g.kernel[1], g.strides[1])
    return _TRANSFORM * _tiles(g, m) * values * g.kernel[0] * -(-g.inputs // of.lanes)


def _tiles(g: Geometry, m: int) -> int:
    return g.images * g.target[0] * math.prod(-(-o // m) for o in g.target[1:])


def _cost(of: Tiles, multiplications: float, weight_bytes: float) -> float:
    if weight_bytes <= caches().l2:
        return multiplications
    wide = max(1, of.lanes * of.item // 32)  # such vectors take as many times as long
    arrival = weight_bytes / (_MEMORY_LOW * wide if of.low else _MEMORY)
    return max(multiplications, arrival) + 0.2 * arrival
