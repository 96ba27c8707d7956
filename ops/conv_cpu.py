"""Convolutions on the CPU device: which kernel, which blocks, which packed weights.

The cost of a kernel is estimated in cycles of one core from multiplications and from weights that
come from memory; the cheapest that may run is taken. Operands that do not have the layout of a
kernel are turned into scratch memory first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from functools import partial

import attrs
import numpy as np

from subgraph.engine.host import caches
from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import (
    Layout,
    Lowering,
    Operand,
    Scratch,
    Unsupported,
    Weight,
    Word,
    lowering,
)
from subgraph.graph import Node

from .conv_depthwise import emit_depthwise, has_windows
from .conv_direct import DirectOutput, emit_direct, summed_channels
from .conv_geometry import (
    Geometry,
    band_table,
    band_weights,
    bands,
    blocked_vector,
    conv_geometry,
    depthwise_weights,
    direct_weights,
    merge,
    merged,
    strided_winograd_weights,
    winograd_weights,
)
from .conv_phases import OUTPUTS, emit_phases, phase_weights, phases_of
from .conv_winograd import emit_winograd, fleeting_outputs, winograd_sizes, winograd_values
from .copying_cpu import emit_copy
from .elementwise_cpu import temporary
from .layout_turns import blocked, blocked_target, plain, plain_target, settle
from .packing import LINE, packed_size, taps_variant
from .tile_planning import (
    FLOATS,
    Activation,
    Array,
    Tiles,
    activation,
    direct_tiles,
    grain,
    round_up,
    tiles,
    weight_tiles,
)
from .tuning import fastest

# Bytes of weights that arrive while a core multiplies one vector, with tall tiles and with low, of
# vectors of up to 32 bytes.
_MEMORY, _MEMORY_LOW = 8.0, 3.0
_COLOURS = 3  # channels of an image: worth a kernel of their own whatever the lanes
_WASTE = 8  # zeros multiplied: more than that, and the plain kernel is faster
_TRANSFORM = 7  # cycles for each vector that Winograd's transforms read or write
_MADE = 5  # cycles for each vector of weights that is transformed in a run
_APART = 64  # bytes between points of such weights: else they meet in the same lines of a cache
_SORTED = 2  # cycles for each element that is put to its phase
_SMALLER = 1.08  # what an estimate may rise to for weights of a fraction of the size
_BETTER = 0.95  # what an estimate must come down to
_TURNS = 12  # taps that repeating channels, and turning them into blocks, is worth
_BOTH: tuple[Layout, ...] = ("plain", "blocked")


@attrs.define
class Job:
    """A convolution to be lowered: ``act(conv(x, w) + bias + residual)``.

    ``g`` leaves out the ``taps`` of ``whole`` that read nothing but padding. Direct convolutions
    run on the tiles ``of``, as Winograd's do, plain ones on ``high``.
    """

    low: Lowering
    whole: Geometry
    g: Geometry
    taps: tuple[slice, slice, slice]
    of: Tiles
    high: Tiles
    x: Operand
    w: Operand
    bias: Operand | None
    residual: Operand | None
    y: Operand
    act: Activation

    @property
    def channels_in(self) -> int:
        """All input channels."""
        return self.g.groups * self.g.inputs

    @property
    def channels_out(self) -> int:
        """All output channels."""
        return self.g.groups * self.g.outputs

    @property
    def constant(self) -> bool:
        """Whether weights and bias follow from weights of the model alone."""
        return self.w.constant and (self.bias is None or self.bias.constant)

    def weight(self, recipe: str, make: Callable[[Array], Array]) -> Weight:
        """Return the weights as ``make`` packs them, of the taps that read something."""
        kernel, taps = self.whole.kernel, self.taps
        if self.g.kernel == kernel:
            return self.low.weight(recipe, make, self.w)

        def cut(weight: Array) -> Array:
            return make(weight.reshape(*weight.shape[:2], *kernel)[(..., *taps)])

        return self.low.weight(f"{recipe} taps {self.taps_text} of {kernel}", cut, self.w)

    @property
    def taps_text(self) -> str:
        """What tells the taps that read something."""
        return " ".join(f"{t.start}:{t.stop}" for t in self.taps)


@lowering("Conv", dtypes=FLOATS, layouts=_BOTH)
def conv(node: Node, low: Lowering) -> None:
    """Lower Conv."""
    lower_conv(_job(node, low))


@lowering("FusedConv", domain="subgraph.cpu", dtypes=FLOATS, layouts=_BOTH)
def fused_conv(node: Node, low: Lowering) -> None:
    """Lower a convolution with a residual and an activation."""
    lower_conv(_job(node, low))


def _job(node: Node, low: Lowering) -> Job:
    x, w, y = low.given(0), low.given(1), low.output()
    lanes = low.block_lanes(x.dtype)
    of, high = direct_tiles(x.dtype, lanes), tiles(x.dtype, lanes)
    whole = conv_geometry(node, x, w, y)
    g, taps = whole.trimmed()
    act = activation(node, of)
    return Job(low, whole, g, taps, of, high, x, w, low.optional(2), low.optional(3), y, act)


def lower_conv(job: Job) -> None:
    """Emit the steps of a convolution.

    Raises:
        Unsupported: No kernel can do it.
    """
    if job.y.size:
        emit(job, choose(job))


def emit(job: Job, algorithm: str) -> None:
    """Emit the steps of an algorithm that `choose` names."""
    if algorithm == "generic":
        _generic(job)
    elif algorithm == "depthwise":
        _depthwise(job)
    elif algorithm == "repeated":
        _repeated(job)
    elif algorithm == "bands":
        _banded(job)
    elif algorithm == "phases":
        _phased(job)
    elif algorithm.startswith(("winograd", "strided")):
        _winograd(job, int(algorithm[-1]), job.g.strides[1])
    elif algorithm.startswith("fleeting"):
        _fleeting(job, int(algorithm[-1]))
    else:
        _direct(job, plain=algorithm == "first")


def _trial(job: Job, algorithm: str, low: Lowering) -> None:
    emit(attrs.evolve(job, low=low), algorithm)


def choose(job: Job) -> str:
    """Return the name of the algorithm: generic, bands, first, phases, direct, winograd2, ..."""
    g, of = job.g, job.of
    if not job.constant:
        return _computed(job)
    if g.groups == job.channels_out and g.inputs == g.outputs == 1 and g.groups > 1:
        return "depthwise"
    if 1 < g.inputs == g.outputs < of.lanes and of.lanes % g.inputs == 0 and has_windows(of, g):
        return "depthwise"
    if job.x.layout == "plain" and g.groups == 1 and g.inputs <= max(of.lanes // 4, _COLOURS):
        return _first(job)
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
    return _square(job)


_PAYS = 16  # pixels from which it pays to pack weights in every run


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


def _packed(job: Job) -> Word:
    """Emit the step that packs computed weights as `direct_weights` does; return its target."""
    low, of, g = job.low, job.of, job.g
    columns, depth = job.channels_out, round_up(g.inputs, of.lanes)
    size = packed_size(columns, depth * g.taps, of)
    target = low.scratch(size * of.item)
    block = of.lanes if g.taps > 1 else LINE
    tap = of.item
    words: list[Word] = [job.w, target, columns, round_up(columns, of.lanes), of.width]
    words += [g.inputs, depth, block, g.taps, g.inputs * g.taps * tap, g.taps * tap, tap]
    units = -(-columns // of.width)
    low.emit(
        Kernel("packing_kernels", "pack", item=of.item, lanes=of.lanes),
        words,
        units,
        grain=grain(units, 4 * size),
        bytes=2 * size * of.item,
    )
    return target


def _first(job: Job) -> str:
    """Choose between reading an image as it is and Winograd's algorithm over its phases."""
    g, of, found = job.g, job.of, phases_of(job.g)
    if found is None or not job.low.options.get("WINOGRAD", True) or of.lanes == 1:
        return "first"
    if job.low.options.get("TUNE"):
        trials = {name: partial(_trial, job, name) for name in ("first", "phases")}
        return fastest(job.low, f"conv {of.dtype} x{of.lanes} {g} plain to {job.y.layout}", trials)
    blocks_out = -(-g.outputs // of.lanes)
    m = OUTPUTS[found.g.kernel[1]]
    cost = winograd_values(found.g, m) * found.g.inputs * blocks_out
    cost += _transforms(of, found.g, m)
    cost += _SORTED * g.images * math.prod(found.g.source) * found.g.inputs
    read_as_it_is = g.images * g.pixels * g.taps * g.inputs * blocks_out
    return "phases" if cost < _BETTER * read_as_it_is else "first"


# Bytes by which weights may grow: those of volumes at all, others where what takes no more costs
# more than `_SMALLER` says. Such weights would be most of the memory of many networks.
_MORE_WEIGHTS = 4_000_000


def _square(job: Job) -> str:
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
        trials = {name: partial(_trial, job, name) for name in ("direct", *forms)}
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
            made = 0 if _fleeting_key(job, m) in job.low.kept else _MADE * values * products
            again = -(-g.outputs // fleeting_outputs(of, g, m)) - 1
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


def _bias(job: Job) -> Word:
    if job.bias is None:
        return 0
    if not job.bias.constant:
        return job.bias  # whole blocks, as it is
    return job.low.weight(f"conv bias of {job.of.lanes}", blocked_vector(job.of), job.bias)


def _direct_weight(job: Job, of: Tiles, together: int, *, plain: bool) -> Weight:
    recipe = (
        f"conv direct {of.nv}x{of.lanes} groups {job.g.groups}/{together} "
        f"{'plain' if plain else 'blocked'} {of.weights}"
    )
    return job.weight(recipe, direct_weights(job.g, of, together, plain))


def _direct(job: Job, *, plain: bool) -> None:
    low, of = job.low, weight_tiles(job.of, job.low, job.w)
    together = merged(job.g, of.lanes)
    constant = job.w.constant
    weight = _direct_weight(job, of, together, plain=plain) if constant else _packed(job)
    g = merge(job.g, together)
    x = job.x if plain else blocked(low, of, job.x)
    residual = 0 if job.residual is None else blocked(low, of, job.residual)
    y = blocked_target(low, of, job.y)
    out = DirectOutput(y, residual, (1, 1, 1), 0)
    emit_direct(
        low, of, g.folded(), x, weight, _bias(job), out, job.act, plain=plain,
        flops=job.g.flops,
    )  # fmt: skip
    settle(low, of, job.y, y, keeps_zero=job.act.keeps_zero)


def _banded(job: Job) -> None:
    """Run a grouped convolution as one group whose panels read only the blocks they need."""
    low, of = job.low, job.of
    table = low.weight("conv bands", as_given, band_table(job.g, of))
    recipe = f"conv bands {of.nv}x{of.lanes} groups {job.g.groups}"
    weight = job.weight(recipe, band_weights(job.g, of))
    g = attrs.evolve(job.g, groups=1, inputs=job.channels_in, outputs=job.channels_out)
    x = blocked(low, of, job.x)
    residual = 0 if job.residual is None else blocked(low, of, job.residual)
    y = blocked_target(low, of, job.y)
    out = DirectOutput(y, residual, (1, 1, 1), 0)
    bias = _bias(job)
    emit_direct(
        low, of, g.folded(), x, weight, bias, out, job.act, plain=False, table=table,
        flops=job.g.flops,
    )  # fmt: skip
    settle(low, of, job.y, y, keeps_zero=job.act.keeps_zero)


def as_given(array: Array) -> Array:
    """Return the array: the recipe of a constant."""
    return array


def _depthwise(job: Job) -> None:
    low, of, g = job.low, job.of, job.g
    weight = job.weight(f"conv depthwise {of.lanes}", depthwise_weights(of))
    x = blocked(low, of, job.x)
    residual = 0 if job.residual is None else blocked(low, of, job.residual)
    y = blocked_target(low, of, job.y)
    out = DirectOutput(y, residual, (1, 1, 1), 0)
    emit_depthwise(low, of, g, x, weight, _bias(job), out, job.act)
    settle(low, of, job.y, y, keeps_zero=job.act.keeps_zero)


def _repeated(job: Job) -> None:
    """Emit several outputs of each channel: a depthwise convolution of channels repeated so."""
    low, of, g, x = job.low, job.of, job.g, job.x
    pixels, times = math.prod(x.shape[2:]), g.outputs
    images, channels, *places = x.shape
    wide = temporary(low, x.dtype, (images, channels * times, *places))
    sizes, steps = (images * channels, times, pixels), (times * pixels, pixels, 1)
    emit_copy(low, plain(low, of, x), wide, sizes, (pixels, 0, 1), steps, item=of.item)
    g = attrs.evolve(g, groups=channels * times, outputs=1)
    _depthwise(attrs.evolve(job, g=g, x=wide))


def _winograd(job: Job, m: int, stride: int) -> None:
    low, of, g = job.low, job.of, job.g
    if stride == 1:
        weight = job.weight(f"conv winograd{m} {of.nv}x{of.lanes}", winograd_weights(of, m))
    else:
        recipe = f"conv strided winograd{m} {of.nv}x{of.lanes}"
        weight = job.weight(recipe, strided_winograd_weights(of))
    _by_winograd(job, g, blocked(low, of, job.x), weight, m)


def _fleeting(job: Job, m: int) -> None:
    """Run Winograd's algorithm with weights that are transformed in each run, a part at a time."""
    low, of, g = job.low, job.of, job.g
    x = blocked(low, of, job.x)
    residual = 0 if job.residual is None else blocked(low, of, job.residual)
    y = blocked_target(low, of, job.y)
    bias = _bias(job)
    part = fleeting_outputs(of, g, m)
    for first in range(0, g.outputs, part):
        few = attrs.evolve(g, outputs=min(part, g.outputs - first))
        weight = _values(job, few, first, m)
        emit_winograd(
            low, of, few, x, weight, bias, residual, y, job.act, m,
            apart=_APART, before=first // of.lanes, total_out=g.outputs,
        )  # fmt: skip
    settle(low, of, job.y, y, keeps_zero=job.act.keeps_zero)


def _values(job: Job, g: Geometry, first: int, m: int) -> Scratch:
    """Return where the transformed weights are of the outputs of ``g``, from ``first`` on."""
    low, of, taps = job.low, job.of, g.kernel[1]
    kept = _fleeting_key(job, m) if g.outputs == job.g.outputs else None
    if kept in low.kept:
        return low.kept[kept]
    blocks = -(-g.inputs // of.lanes)
    outputs = round_up(g.outputs, of.lanes)
    values, _ = winograd_sizes(m, taps, 1)
    size = packed_size(outputs, blocks * of.lanes, of) * of.item
    weight = low.scratch(values * (size + _APART))
    if kept is not None:
        low.kept[kept] = weight
    panels = _direct_weight(job, of, 1, plain=False)
    words: list[Word] = [panels, weight, outputs, of.width, blocks, size + _APART]
    units = -(-g.outputs // of.width) * blocks
    low.emit(
        Kernel(
            "packing_kernels", "winograd_of_panels", dtype=of.dtype, lanes=of.lanes, m=m,
            **taps_variant(taps),
        ),
        [*words, first // of.width],
        units,
        grain=grain(units, _MADE * values * size),
        bytes=(values + taps**2) * size,
    )  # fmt: skip
    return weight


def _fleeting_key(job: Job, m: int) -> Hashable:
    """Return what tells the transformed weights of all outputs, None for a weight that is known."""
    origin = job.w.origin
    return None if isinstance(origin, np.ndarray) else (origin, job.taps_text, m)


def _phased(job: Job) -> None:
    low, of = job.low, job.of
    phases = phases_of(job.g)
    assert phases is not None, "chosen"
    m = OUTPUTS[phases.g.kernel[1]]
    recipe = f"conv phases {phases.step} {phases.shift} {of.nv}x{of.lanes}"
    weight = job.weight(recipe, phase_weights(of, phases))
    x = emit_phases(low, of, job.g, phases, plain(low, of, job.x))
    _by_winograd(job, phases.g, x, weight, m)


def _by_winograd(job: Job, g: Geometry, x: Word, weight: Word, m: int) -> None:
    """Emit Winograd's convolution of blocks that lie at ``x``, and what surrounds it."""
    low, of = job.low, job.of
    residual = 0 if job.residual is None else blocked(low, of, job.residual)
    y = blocked_target(low, of, job.y)
    emit_winograd(low, of, g, x, weight, _bias(job), residual, y, job.act, m)
    settle(low, of, job.y, y, keeps_zero=job.act.keeps_zero)


def _generic(job: Job) -> None:
    low, of, g = job.low, job.high, job.whole
    x = plain(low, of, job.x)
    residual = 0 if job.residual is None else plain(low, of, job.residual)
    y = plain_target(low, of, job.y)
    depth = g.inputs * g.taps
    line = g.flat()
    in_place, g = line is not g, line
    part = max(of.width, min(8 * of.width, round_up(g.pixels, of.lanes)))
    while part > of.width and part * depth * of.item > caches().l2 // 2:
        part = max(of.width, round_up(part // 2, of.lanes))
    scratch: Word = 0
    scratch_bytes = 0
    if not in_place:
        scratch_bytes = round_up(depth * part * of.item, 64)
        scratch = low.scratch(scratch_bytes, per_worker=True)
    image_in = g.groups * g.inputs * math.prod(g.source) * of.item
    image_out = g.groups * g.outputs * g.pixels * of.item
    bias: Word = 0 if job.bias is None else job.bias
    words: list[Word] = [x, job.w, y, bias, residual, g.groups, g.inputs, g.outputs]
    words += g.words()
    words += [of.contraction(), job.act.post, job.act.flags, job.act.low, job.act.high]
    words += [of.contraction(masked=True), part, 0]
    words += [scratch, scratch_bytes, 0, image_in, image_out, image_out]
    units = g.images * g.groups * -(-g.pixels // part)
    low.emit(
        Kernel("conv_kernels", "generic", **of.variant),
        words,
        units,
        grain=grain(units, g.flops),
        flops=g.flops,
        bytes=g.images * (image_in + image_out),
    )
    settle(low, of, job.y, y, keeps_zero=job.act.keeps_zero)
