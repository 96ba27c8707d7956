"""Convolutions on the CPU device: the steps and the packed weights of each algorithm.

Operands that do not have a kernel's layout are converted to scratch memory first.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager

import attrs

from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_ROWS
from subgraph.engine.planner.constants import contiguous_array
from subgraph.engine.planner.lowering import Lowering, lowering
from subgraph.engine.planner.operands import Argument, Layout, Weight
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.movement.geometry import (
    Geometry,
    band_table,
    band_weights,
    blocked_vector,
    depthwise_weights,
    direct_weights,
    first_lane,
    lane_sum_weights,
    merge,
    merged,
    strided_winograd_weights,
    winograd_weights,
)
from subgraph.ops.movement.layout_conversion import (
    blocked,
    blocked_target,
    convert_output,
    plain,
    plain_target,
    widened,
)
from subgraph.ops.movement.packed_conv import ConvOutput, PackedConv
from subgraph.ops.movement.packing import pack_call, packed_size
from subgraph.ops.shared.tile_planning import (
    FLOATS,
    Tiles,
    grain,
    product_tiles,
    round_up,
    weight_tiles,
)
from subgraph.system.host import caches

from .arguments import GenericArguments
from .bfloat16.cpu import emit_matrix_convolution, gathers, groups_of_line, volume_weights
from .bfloat16.image import image_weights
from .choice import Algorithm, Method, choose, stores_bfloat16
from .depthwise import emit_depthwise, emit_lane_sums, has_windows, repeat_channels
from .direct import emit_direct
from .job import Job, read_job
from .polyphase import OUTPUTS, emit_phases, phase_weights, phases_of
from .winograd import emit_winograd

_LAYOUTS: tuple[Layout, ...] = ("plain", "blocked", "bfloat16")


@lowering("Conv", dtypes=FLOATS, layouts=_LAYOUTS)
@lowering("FusedConv", domain=INTERNAL_DOMAIN, dtypes=FLOATS, layouts=_LAYOUTS)
def conv(node: Node, low: Lowering) -> None:
    """Lower Conv, and its fused form with a residual and an activation."""
    job = read_job(node, low)
    if job.y.size:
        algorithm = choose(job)
        _widen_operands(job, algorithm)
        emit(job, algorithm)


def _widen_operands(job: Job, algorithm: Algorithm) -> None:
    """Convert the operands in the layout "bfloat16" that the algorithm does not take so."""
    g, lanes = job.g, job.of.lanes
    matrix = algorithm.method in (Method.MATRIX, Method.MATRIX_IMAGE)
    # Blocks of 32 channels must not cross groups, unless two groups are one.
    whole = g.groups == 1 or g.inputs % MATRIX_DEPTH == 0 or groups_of_line(g) == 2
    # Windows read each block of 16 channels alone.
    by_windows = algorithm.method is Method.DEPTHWISE and g.inputs >= g.outputs
    by_windows = by_windows and has_windows(job.of, g)
    if not ((matrix and whole) or by_windows or algorithm.method is Method.LANE_SUMS):
        job.x = widened(job.low, job.x)
    reads_pairs = g.groups == 1 or round_up(g.outputs, lanes) % MATRIX_DEPTH == 0
    if job.residual and not (matrix and reads_pairs):
        job.residual = widened(job.low, job.residual)


def emit(job: Job, algorithm: Algorithm) -> None:
    """Emit the steps of a convolution with the algorithm ``algorithm``."""
    match algorithm.method:
        case Method.MATRIX | Method.MATRIX_IMAGE:
            _matrix(job, plain=algorithm.method is Method.MATRIX_IMAGE)
        case Method.GENERIC:
            _generic(job)
        case Method.DEPTHWISE:
            _depthwise(job)
        case Method.LANE_SUMS:
            _lane_sums(job)
        case Method.BANDS:
            _banded(job)
        case Method.POLYPHASE:
            _polyphase(job)
        case Method.WINOGRAD | Method.STRIDED_WINOGRAD:
            _winograd(job, algorithm.tile, job.g.strides[1])
        case Method.DIRECT | Method.IMAGE:
            _direct(job, plain=algorithm.method is Method.IMAGE)


def _packed(job: Job) -> Argument:
    """Emit the step that packs weights computed at run time, and return its target.

    The packed form is that of `direct_weights`.
    """
    low, of, g = job.low, job.of, job.g
    columns, depth = job.channels_out, round_up(g.inputs, of.lanes)
    size = packed_size(columns, depth * g.taps, of)
    target = low.scratch(size * of.item)
    strides = g.inputs * g.taps * of.item, g.taps * of.item, of.item
    shape = columns, g.inputs, g.taps
    kernel, arguments, units = pack_call(job.w, target, shape, strides, depth, of)
    low.emit(kernel, arguments, units, grain=grain(units, 4 * size), bytes=2 * size * of.item)
    return target


def _bias(job: Job) -> Argument:
    if job.bias is None:
        return 0
    if not job.bias.constant:
        return job.bias  # `choose` made sure that it has whole blocks
    return job.low.weight(f"conv bias of {job.of.lanes}", blocked_vector(job.of), job.bias)


def _direct_weight(job: Job, of: Tiles, together: int, *, plain: bool) -> Weight:
    # Everything on which the packed form depends is in the name, which is the key of the weight
    # cache.
    recipe = (
        f"conv direct {of.nv}x{of.lanes} groups {job.g.groups}/{together} "
        f"{'plain' if plain else 'blocked'} {of.packed_as}"
    )
    return job.weight(recipe, direct_weights(job.g, of, together, plain))


@contextmanager
def _packed_conv(
    job: Job, of: Tiles, g: Geometry, x: Argument, weight: Argument
) -> Generator[PackedConv]:
    """Yield the operands of a step with a blocked output; then convert the output."""
    low = job.low
    residual = 0 if job.residual is None else blocked(low, of.lanes, job.residual)
    y = blocked_target(low, of.lanes, job.y)
    yield PackedConv(of, g, x, weight, _bias(job), ConvOutput(y, residual), job.act)
    convert_output(low, job.y, y, keeps_zero=job.act.keeps_zero)


def _direct(job: Job, *, plain: bool) -> None:
    low, of = job.low, weight_tiles(job.of, job.low, job.w)
    together = merged(job.g, of.lanes)
    constant = job.w.constant
    weight = _direct_weight(job, of, together, plain=plain) if constant else _packed(job)
    g = merge(job.g, together).folded()
    x = job.x if plain else blocked(low, of.lanes, job.x)
    with _packed_conv(job, of, g, x, weight) as packed:
        # The operations that are reported are those of the convolution, without the zeros between
        # merged groups.
        emit_direct(low, packed, plain=plain, flops=job.g.flops)


def _matrix(job: Job, *, plain: bool) -> None:
    low, of = job.low, product_tiles(job.of, job.low, job.w)
    together = merged(job.g, of.lanes)
    g = job.g if plain else merge(job.g, together).folded()
    x = job.x if plain else blocked(low, of.lanes, job.x)
    if plain:
        weight = job.weight(f"conv image {of.nv}x{of.lanes}", image_weights(g, of))
    elif g.kernel[0] == 1 or gathers(of, g):
        weight = _direct_weight(job, of, together, plain=False)
    else:
        recipe = f"conv volume {of.nv}x{of.lanes} groups {g.groups} {of.packed_as}"
        weight = job.weight(recipe, volume_weights(of, g))
    # Two groups of 16 outputs are a block of 32 channels.
    pairs = 2 if g.outputs == MATRIX_ROWS and g.groups % 2 == 0 else 1
    if stores_bfloat16(low, job.y, g.outputs * pairs):
        job.y.store_as("bfloat16")
    with _packed_conv(job, of, g, x, weight) as packed:
        emit_matrix_convolution(low, packed, plain=plain, flops=job.g.flops)


def _banded(job: Job) -> None:
    """Run a grouped convolution as one group; each panel reads only the input blocks it needs."""
    low, of = job.low, job.of
    table = low.weight("conv bands", contiguous_array, band_table(job.g, of))
    recipe = f"conv bands {of.nv}x{of.lanes} groups {job.g.groups}"
    weight = job.weight(recipe, band_weights(job.g, of))
    g = attrs.evolve(job.g, groups=1, inputs=job.channels_in, outputs=job.channels_out)
    with _packed_conv(job, of, g.folded(), blocked(low, of.lanes, job.x), weight) as packed:
        emit_direct(low, packed, plain=False, table=table, flops=job.g.flops)


def _depthwise(job: Job) -> None:
    low, of, g = job.low, job.of, job.g
    weight = job.weight(f"conv depthwise {of.lanes}", depthwise_weights(of))
    x: Argument = blocked(low, of.lanes, job.x)
    if g.inputs == 1 < g.outputs:
        x = repeat_channels(low, of, g, x)
        g = attrs.evolve(g, groups=job.channels_out, outputs=1)
    # `windows` can round its results beside no residual.
    exact = job.residual is not None or not has_windows(of, g)
    rounds = of.lanes == MATRIX_ROWS and product_tiles(of, low, job.w).operands and not exact
    if rounds and stores_bfloat16(low, job.y, job.channels_out):
        job.y.store_as("bfloat16")
    with _packed_conv(job, of, g, x, weight) as packed:
        emit_depthwise(low, packed)


def _lane_sums(job: Job) -> None:
    low, of, g = job.low, job.of, job.g.flat()
    if job.y.layout != "plain":
        job.y.store_as("plain")
    weight = job.weight(f"conv lane sums {of.lanes}", lane_sum_weights(of, job.g))
    bias = (
        0
        if job.bias is None
        else low.weight(f"conv bias, first of {of.lanes}", first_lane(of), job.bias)
    )
    x = blocked(low, of.lanes, job.x)
    out = ConvOutput(job.y, job.residual or 0)
    emit_lane_sums(low, PackedConv(of, g, x, weight, bias, out, job.act))


def _winograd(job: Job, m: int, stride: int) -> None:
    low, of, g = job.low, job.of, job.g
    if stride == 1:
        weight = job.weight(f"conv winograd{m} {of.nv}x{of.lanes}", winograd_weights(of, m))
    else:
        recipe = f"conv strided winograd{m} {of.nv}x{of.lanes}"
        weight = job.weight(recipe, strided_winograd_weights(of))
    with _packed_conv(job, of, g, blocked(low, of.lanes, job.x), weight) as packed:
        emit_winograd(low, packed, m)


def _polyphase(job: Job) -> None:
    low, of = job.low, job.of
    phases = phases_of(job.g)
    assert phases is not None, "chosen"
    m = OUTPUTS[phases.g.kernel[1]]
    recipe = f"conv phases {phases.step} {phases.shift} {of.nv}x{of.lanes}"
    weight = job.weight(recipe, phase_weights(of, phases))
    x = emit_phases(low, of, job.g, phases, plain(low, job.x))
    with _packed_conv(job, of, phases.g, x, weight) as packed:
        emit_winograd(low, packed, m)


def _generic(job: Job) -> None:
    low, of, g = job.low, job.high, job.whole
    x = plain(low, job.x)
    residual = 0 if job.residual is None else plain(low, job.residual)
    y = plain_target(low, job.y)
    depth = g.inputs * g.taps
    # A 1x1 convolution of whole images reads the input as the matrix [channel][pixel] in place.
    line = g.flat()
    in_place, g = line is not g, line
    # Eight panels share the overhead of a unit, as long as the copied windows fill at most half of
    # the L2 cache; the rest is for weights and outputs (estimates).
    part = max(of.width, min(8 * of.width, round_up(g.pixels, of.lanes)))
    while part > of.width and part * depth * of.item > caches().l2 // 2:
        part = max(of.width, round_up(part // 2, of.lanes))
    image_in = g.groups * g.inputs * math.prod(g.source) * of.item
    image_out = g.groups * g.outputs * g.pixels * of.item
    arguments = GenericArguments(
        x=x,
        weights=job.w,
        y=y,
        bias=job.bias or 0,
        residual=residual,
        groups=g.groups,
        inputs=g.inputs,
        outputs=g.outputs,
        **g.arguments(),
        tile=of.contraction(),
        **job.act.arguments(),
        masked_tile=of.contraction(masked=True),
        pixels=part,
        **low.worker_scratch(None if in_place else depth * part * of.item),
        x_image=image_in,
        y_image=image_out,
        residual_image=image_out,
    )
    units = g.images * g.groups * -(-g.pixels // part)
    low.emit(
        Kernel("subgraph.ops.conv.generic_kernels", "generic", **of.variant),
        arguments,
        units,
        grain=grain(units, g.flops),
        flops=g.flops,
        bytes=g.images * (image_in + image_out),
    )
    convert_output(low, job.y, y, keeps_zero=job.act.keeps_zero)
