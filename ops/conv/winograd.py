"""Winograd convolution on the CPU device: how its work is cut, and the steps that do it."""

from __future__ import annotations

import math

from subgraph.engine.codegen.tiling import LOW_ROWS
from subgraph.engine.planner.lowering import Argument, Lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger, recorded, smaller
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.movement.packing import taps_variant
from subgraph.ops.shared.tile_planning import Activation, Tiles, grain, round_up, shared
from subgraph.system.host import caches

from .arguments import WinogradArguments

_PANEL_BLOCKS = 2  # into which the products of a point are cut where threads share them
# Bytes of weights transformed on the fly at a time; they stay in the last-level cache.
_ON_THE_FLY_BYTES = 1 << 24
_TRANSFORM = 16  # multiplications' worth of time for each byte that a transform writes


def emit_winograd(
    low: Lowering,
    of: Tiles,
    g: Geometry,
    x: Argument,
    weight: Argument,
    bias: Argument,
    residual: Argument,
    y: Argument,
    act: Activation,
    m: int,
    apart: int = 0,
    before: int = 0,
    total_out: int = 0,
) -> None:
    """Emit ``winograd_kernels.winograd`` with tiles of ``m`` x ``m`` outputs.

    The weights of points lie ``apart`` bytes from one another. The outputs of ``g`` may be some of
    ``total_out``, so many blocks ``before`` them.

    Several threads with a single block of tiles share its transforms, each a step of its own; else
    every unit transforms what it multiplies.
    """
    stride = g.strides[1]
    pixel = of.lanes * of.item
    values, points = winograd_sizes(m, g.kernel[1], stride)
    blocks_out = -(-g.outputs // of.lanes)
    image_in = -(-g.inputs // of.lanes) * math.prod(g.source) * pixel
    image_out = blocks_out * g.pixels * pixel
    images_apart = -(-max(total_out, g.outputs) // of.lanes) * g.pixels * pixel
    # The slices of a volume that an output reads count as so many more channels.
    blocks_in = g.kernel[0] * -(-g.inputs // of.lanes)
    panels = -(-blocks_out // of.nv)
    total = g.images * g.target[0] * math.prod(-(-o // m) for o in g.target[1:])
    count, part, together = cut(of, total, blocks_in, panels, low.threads)
    multiplied = -(-panels // _PANEL_BLOCKS)  # panels of a unit
    products = points * -(-panels // multiplied)
    staged = of.low and low.threads > 1 and count == total and grain(products, g.flops) > 0
    if staged:
        part = panels
    # Sums may take the place of values that are done with.
    over = of.low and not staged and part == panels and part * of.nv <= blocks_in
    room = values * (blocks_in + 1) + (1 if over else points) * (part * of.nv + 1)
    room *= (count | 1) * pixel
    own = 2 * values * pixel + (0 if staged else room)
    scratch = low.scratch(own, per_worker=True)
    tile = of.strip(of.lanes, of.lanes, ahead=True) if of.low else of.contraction()
    rest = g.inputs % of.lanes if stride == g.kernel[0] == 1 else 0
    # So many steps of the sums that the weights of a panel stay in the first cache.
    most = max(1, caches().l1 // 2 // (of.width * of.item * of.lanes))
    shared_room = low.scratch(room) if staged else 0

    def arguments(stage: int) -> WinogradArguments:
        return WinogradArguments(
            x=x,
            weights=weight,
            y=y,
            bias=bias,
            residual=residual,
            images=g.images,
            input_blocks=blocks_in,
            output_blocks=blocks_out,
            **g.arguments(),
            tile=tile,
            post=act.post,
            flags=act.flags,
            low=act.low,
            high=act.high,
            tiles=count,
            over=int(over),
            panels=part,
            scratch=scratch,
            scratch_bytes=scratch.nbytes,
            stage=stage,
            x_image=image_in,
            y_image=images_apart,
            residual_image=images_apart,
            shared=shared_room,
            stage_panels=multiplied,
            rest=rest,
            weights_apart=apart,
            blocks_before=before,
            segment=most,
        )

    variant = {"stride": stride} if stride > 1 else taps_variant(g.kernel[1])
    kernel = Kernel("subgraph.ops.conv.winograd_kernels", "winograd", m=m, **variant, **of.variant)
    moved_in, moved_out = g.images * image_in, g.images * image_out
    moved = values * panels * blocks_in * pixel * of.width  # weights
    flops = 2 * winograd_values(g, m) * g.kernel[0] * g.inputs * g.outputs
    if not staged:
        units = -(-total // count) * -(-panels // part)
        least = larger(grain(units, g.flops), together) if low.threads > 1 else 0
        moved += moved_in + moved_out
        low.emit(kernel, arguments(0), units, grain=least, flops=flops, bytes=moved)
        return
    value_bytes, sum_bytes = (total * pixel * n for n in (values * blocks_in, points * blocks_out))
    stages = (
        (blocks_in, _TRANSFORM * value_bytes, 0, moved_in + value_bytes),
        (products, g.flops, flops, moved + value_bytes + sum_bytes),
        (blocks_out, _TRANSFORM * sum_bytes, 0, moved_out + sum_bytes),
    )
    for stage, (units, work, counted, bytes_moved) in enumerate(stages, 1):
        least = grain(units, work)
        low.emit(kernel, arguments(stage), units, grain=least, flops=counted, bytes=bytes_moved)


def on_the_fly_outputs(of: Tiles, g: Geometry, m: int) -> int:
    """Return of how many outputs weights are held at once that are made in each run."""
    values, _ = winograd_sizes(m, g.kernel[1], g.strides[1])
    panel = values * round_up(g.inputs, of.lanes) * of.width * of.item
    panels = -(-g.outputs // of.width)
    parts = -(-panels * panel // _ON_THE_FLY_BYTES)
    return min(g.outputs, -(-panels // min(parts, panels)) * of.width)


def cut(of: Tiles, total: int, blocks_in: int, panels: int, threads: int) -> tuple[int, int, int]:
    """Return the tiles and the panels of a unit, and the units that a thread takes together."""
    sizes = (total, blocks_in * of.lanes, panels, threads)
    return _cut(0, of.mr, *sizes), _cut(1, of.mr, *sizes), _cut(2, of.mr, *sizes)


@recorded
def _cut(which: int, mr: int, total: int, channels: int, panels: int, threads: int) -> int:
    """Return one of the three numbers of `cut`."""
    low = mr <= LOW_ROWS
    if low:
        # Low tiles: several must share a panel of weights that comes from far.
        part, most = panels, 4 * mr
    else:
        part = min(panels, 8 if total <= mr + 2 else 4)
        most = mr if channels > 128 else -(-mr // 2)
    # Few tiles: all at once, so that the weights are read once; else what the caches like.
    blocks = 1 if total <= mr + 2 else -(-total // most)
    if low and blocks >= threads:
        # As many for each thread, a few tiles more rather than many less.
        fewer = blocks // threads * threads
        blocks = fewer if -(-total // fewer) <= 5 * mr else fewer + threads
    count = -(-total // blocks)
    blocks = -(-total // count)
    # Units of one block of tiles share its transform: a thread takes them together if it can.
    whole = blocks >= 2 * threads or (low and blocks % threads == 0)
    wanted = 1 if whole else 2 * threads
    part = shared(part, panels, blocks, wanted, 1, 1)
    panel_blocks = -(-panels // part)
    return (count, part, panel_blocks if whole else -(-panel_blocks // threads))[which]


def winograd_sizes(m: int, taps: int, stride: int) -> tuple[int, int]:
    """Return the values that a tile of Winograd's has for a channel, and the points they are at."""
    if stride == 1:
        return (m + taps - 1) ** 2, (m + taps - 1) ** 2
    return (2 * m + 1) ** 2, (m + 1) ** 2


def winograd_values(g: Geometry, m: int) -> int:
    """Return how many values of all tiles there are for a channel; short tiles have fewer."""
    full = m + g.kernel[1] - 1 if g.strides[1] == 1 else 2 * m + 1
    found = g.images * g.target[0]
    for outputs in g.target[1:]:
        tiles = -(-outputs // m)
        found *= full * tiles - smaller(tiles, tiles * m - outputs)
    return found
