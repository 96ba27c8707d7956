"""Winograd convolution on the CPU device: the tiling of its loops, and the steps that run it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import attrs

from subgraph.engine.codegen.tiling import FEW_ROWS
from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger, recorded, smaller
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.movement.packed_conv import PackedConv
from subgraph.ops.movement.packing import taps_variant
from subgraph.ops.shared.tile_planning import Tiles, grain, shared
from subgraph.system.host import caches

from .arguments import WinogradArguments

_PANEL_BLOCKS = 2  # units of the products of one point that threads share (estimate)
_PRODUCTS_PER_BYTE = 16  # cost of each byte that a transform writes, in multiplications (estimate)


def emit_winograd(low: Lowering, conv: PackedConv, m: int) -> None:
    """Emit the kernel ``winograd`` with tiles of ``m`` x ``m`` outputs.

    If several threads share a single block of tiles, its transforms and its products are three
    steps; otherwise every unit transforms the tiles that it multiplies.

    Args:
        low: Collects the plan's steps and scratch memory.
        conv: The convolution, its weights packed by `winograd_weights`.
        m: Outputs of a tile along an axis.
    """
    of, g = conv.of, conv.g
    stride = g.strides[1]
    pixel = of.lanes * of.item
    t = _tiling(of, g, m, low.threads)
    image_in = -(-g.inputs // of.lanes) * math.prod(g.source) * pixel
    image_out = -(-g.outputs // of.lanes) * g.pixels * pixel
    # The transforms need room for ``n n`` pixels of a tile and for as many half-transformed ones.
    own = 2 * t.values * pixel + (0 if t.staged else t.vectors(of) * pixel)
    shared_buffer = low.scratch(t.vectors(of) * pixel) if t.staged else 0
    arguments = partial(
        WinogradArguments,
        x=conv.x,
        weights=conv.weight,
        y=conv.out.y,
        bias=conv.bias,
        residual=conv.out.residual,
        images=g.images,
        input_blocks=t.blocks_in,
        output_blocks=t.blocks_out,
        **g.arguments(),
        tile=of.strip(of.lanes, of.lanes, ahead=True) if of.few_rows else of.contraction(),
        **conv.act.arguments(),
        tiles=t.tiles,
        in_place=int(t.in_place),
        panels=t.unit_panels,
        **low.worker_scratch(own),
        x_image=image_in,
        y_image=image_out,
        residual_image=image_out,
        shared=shared_buffer,
        stage_panels=t.stage_panels,
        # With stride 2 or several planes, partial blocks are not only at the end of the sums. Their
        # weights are padded with zeros, so that all lanes can be multiplied.
        rest=g.inputs % of.lanes if stride == g.kernel[0] == 1 else 0,
        # The weights of a panel for one segment of the sums fill half of the L1 cache.
        segment=max(1, caches().l1 // 2 // (of.width * of.item * of.lanes)),
    )
    variant: dict[str, Any] = {"stride": stride} if stride > 1 else taps_variant(g.kernel[1])
    if g.dilations[1:] != (1, 1):
        variant = {**variant, "dilated": True}
    kernel = Kernel("subgraph.ops.conv.winograd_kernels", "winograd", m=m, **variant, **of.variant)
    for stage, step in _stages(of, g, t, m, low.threads).items():
        low.emit(kernel, arguments(stage=stage), **step)


@attrs.frozen
class _Tiling:
    """The tiling of a Winograd convolution's loops into units.

    Attributes:
        values: Transformed values of a tile for each channel.
        points: Points of a tile.
        blocks_in: Input blocks of the sums.
        blocks_out: Output blocks.
        panels: Output panels.
        total: Tiles of all images.
        tiles: Tiles of a unit.
        unit_panels: Panels of a unit.
        together: Units that a thread takes at once.
        stage_panels: Panels of a unit of products, if ``staged``.
        staged: Threads share a single block of tiles: transforms and products are three steps.
        in_place: Sums overwrite the values of points that are finished.
    """

    values: int
    points: int
    blocks_in: int
    blocks_out: int
    panels: int
    total: int
    tiles: int
    unit_panels: int
    together: int
    stage_panels: int
    staged: bool
    in_place: bool

    @property
    def products(self) -> int:
        """Units of the products, if ``staged``."""
        return self.points * -(-self.panels // self.stage_panels)

    def vectors(self, of: Tiles) -> int:
        """Return the vectors of values and sums of a unit; see `WinogradArguments`."""
        sums = (1 if self.in_place else self.points) * (self.unit_panels * of.nv + 1)
        return (self.values * (self.blocks_in + 1) + sums) * (self.tiles | 1)


def _stages(of: Tiles, g: Geometry, t: _Tiling, m: int, threads: int) -> dict[int, dict[str, int]]:
    """Return units, grain, flops and bytes of each step, by the ``stage`` of its arguments.

    Args:
        of: The contraction tiles.
        g: Sizes of the convolution.
        t: Its tiling.
        m: Outputs of a tile along an axis.
        threads: Threads that share the units.
    """
    pixel = of.lanes * of.item
    inputs = g.images * -(-g.inputs // of.lanes) * math.prod(g.source) * pixel
    outputs = g.images * t.blocks_out * g.pixels * pixel
    weights = t.values * t.panels * t.blocks_in * pixel * of.width
    # The operations that are executed, so that a profile does not exceed the peak of the machine.
    flops = 2 * winograd_values(g, m) * g.kernel[0] * g.inputs * g.outputs
    if not t.staged:
        units = -(-t.total // t.tiles) * -(-t.panels // t.unit_panels)
        least = larger(grain(units, g.flops), t.together) if threads > 1 else 0
        moved = weights + inputs + outputs
        return {0: {"units": units, "grain": least, "flops": flops, "bytes": moved}}
    values = t.total * pixel * t.values * t.blocks_in
    sums = t.total * pixel * t.points * t.blocks_out
    # The transforms count no operations, as their additions are no part of the convolution.
    stages = (
        (t.blocks_in, _PRODUCTS_PER_BYTE * values, 0, inputs + values),
        (t.products, g.flops, flops, weights + values + sums),
        (t.blocks_out, _PRODUCTS_PER_BYTE * sums, 0, outputs + sums),
    )
    return {
        stage: {"units": units, "grain": grain(units, work), "flops": counted, "bytes": moved}
        for stage, (units, work, counted, moved) in enumerate(stages, 1)
    }


def _tiling(of: Tiles, g: Geometry, m: int, threads: int) -> _Tiling:
    """Return the tiling of a convolution of sizes ``g`` for ``threads`` threads."""
    values, points = winograd_sizes(m, g.kernel[1], g.strides[1])
    blocks_out = -(-g.outputs // of.lanes)
    # The planes of a volume that an output reads are further input channels.
    blocks_in = g.kernel[0] * -(-g.inputs // of.lanes)
    panels = -(-blocks_out // of.nv)
    total = winograd_planes(g) * math.prod(-(-o // m) for o in winograd_outputs(g))
    tiles, part, together = winograd_tiling(of, total, blocks_in, panels, threads)
    stage_panels = -(-panels // _PANEL_BLOCKS)
    products = points * -(-panels // stage_panels)
    # With a single block of tiles each thread would otherwise transform the whole input. Stages are
    # two steps more, so that the products must be enough for several threads.
    staged = of.few_rows and threads > 1 and tiles == total and grain(products, g.flops) > 0
    if staged:
        part = panels
    # `winograd_kernels._scratch_divider` says why a point may have no more sums than values. A unit
    # has all panels, as the next unit of the same tiles would use their values again.
    in_place = of.few_rows and not staged and part == panels and part * of.nv <= blocks_in
    return _Tiling(
        values, points, blocks_in, blocks_out, panels, total, tiles, part, together, stage_panels,
        staged, in_place,
    )  # fmt: skip


def winograd_tiling(
    of: Tiles, total: int, blocks_in: int, panels: int, threads: int
) -> tuple[int, int, int]:
    """Return the tiling: the tiles of a unit, its panels, and the units a thread takes at once.

    Args:
        of: The contraction tiles.
        total: Tiles of all images.
        blocks_in: Input blocks of the sums.
        panels: Output panels.
        threads: Threads that share the units.
    """
    sizes = (total, blocks_in * of.lanes, panels, threads)
    tiles, unit_panels, units = (_tiling_number(which, of.mr, *sizes) for which in range(3))
    return tiles, unit_panels, units


@recorded
def _tiling_number(
    which: int, mr: int, total: int, channels: int, panels: int, threads: int
) -> int:
    """Return number ``which`` (0 to 2) of `winograd_tiling` for sums over ``channels`` channels."""
    low = mr <= FEW_ROWS
    if low:
        # Several few-row tiles must share a panel of weights, which comes from L2 or memory.
        # Four register tiles are enough for that (estimate).
        part, most = panels, 4 * mr
    else:
        # A many-row tile hides the time of weights from L2. Units are small, so that their values
        # and sums stay in L2 together with the weights (estimates).
        part = min(panels, 8 if total <= mr + 2 else 4)
        most = mr if channels > 128 else -(-mr // 2)
    # Few tiles form one block, so that the weights are read once; else blocks fit in the caches.
    # A block of up to two tiles more than mr runs as two register tiles of about equal height.
    blocks = 1 if total <= mr + 2 else -(-total // most)
    if low and blocks >= threads:
        # Each thread gets as many blocks: larger ones if they stay small enough, else more of them.
        fewer = blocks // threads * threads
        blocks = fewer if -(-total // fewer) <= 5 * mr else fewer + threads
    count = -(-total // blocks)
    blocks = -(-total // count)
    # Units of one block of tiles share its transform, so a thread should take them together.
    whole = blocks >= 2 * threads or (low and blocks % threads == 0)
    wanted = 1 if whole else 2 * threads
    part = shared(part, panels, blocks, wanted, 1, 1)
    panel_blocks = -(-panels // part)
    return (count, part, panel_blocks if whole else -(-panel_blocks // threads))[which]


def winograd_sizes(m: int, taps: int, stride: int) -> tuple[int, int]:
    """Return the transformed values of a tile for each channel, and the number of its points.

    Args:
        m: Outputs of a tile along an axis.
        taps: Weights along an axis.
        stride: 1 or 2; with 2, a point has several values.
    """
    if stride == 1:
        return (m + taps - 1) ** 2, (m + taps - 1) ** 2
    return (2 * m + 1) ** 2, (m + 1) ** 2


def winograd_planes(g: Geometry) -> int:
    """Return the planes of outputs that tiles cover: with dilations, one for each phase."""
    return g.images * g.target[0] * g.dilations[1] * g.dilations[2]


def winograd_outputs(g: Geometry) -> tuple[int, int]:
    """Return the outputs of a plane along the height and the width, in the largest phase."""
    height, width = (-(-o // d) for o, d in zip(g.target[1:], g.dilations[1:], strict=True))
    return height, width


def winograd_values(g: Geometry, m: int) -> int:
    """Return the transformed values of all tiles for each channel; short tiles have fewer."""
    full = m + g.kernel[1] - 1 if g.strides[1] == 1 else 2 * m + 1
    found = winograd_planes(g)
    for outputs in winograd_outputs(g):
        tiles = -(-outputs // m)
        # Each missing output makes one tile short, which then has one value less along the axis. A
        # lone tile that lacks several outputs is computed like one that lacks one.
        found *= full * tiles - smaller(tiles, tiles * m - outputs)
    return found
