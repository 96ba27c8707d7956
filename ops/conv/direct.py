"""Direct convolution on the CPU device: the tiling of its loops, and the step that runs it."""

from __future__ import annotations

import math

import attrs

from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Argument
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.symbolic import larger, plain, recorded, smaller
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.movement.packed_conv import PackedConv
from subgraph.ops.shared.tile_planning import (
    Tiles,
    even_part,
    grain,
    halved,
    round_up,
    shared,
    units_wanted,
)
from subgraph.system.host import caches

from .arguments import DirectArguments, GatherArguments

# Estimates, where no hardware figure is named.
_GATHER_CYCLES = 6.0  # cycles to copy a vector of channels
_JOINED_UNITS = 4  # factor of the units per thread if a thread can join neighbouring ones again
_LATENCY_ROWS = 4  # rows of a tile below which the latency of fused multiply-add bounds its speed
# Cost of a segment of few channels, in steps of the sums: fixed, and added for each of its steps.
_SEGMENT_STEPS, _SHORT_STEP = 8, 0.2


@attrs.define
class DirectTiling:
    """The tiling of a direct convolution's loops into units.

    Attributes:
        of: The contraction tiles.
        g: Sizes of the convolution.
        plain: The input is in the plain layout.
        gathered: Units copy for each tap the pixels that it reads, instead of the box around them.
        blocks_in: Input blocks of a group.
        panels: Output panels of a group.
        segment: Input blocks of a segment of the sums.
        rows: Output rows of a unit.
        columns: Output columns of a unit.
        unit_panels: Panels of a unit.
        joined_panels: Most panels that a thread may run as one unit.
        rest: Channels of the last input block that exist, if the kernel leaves out the others; 0:
            it multiplies all lanes.
    """

    of: Tiles
    g: Geometry
    plain: bool
    gathered: bool
    blocks_in: int
    panels: int
    segment: int
    rows: int
    columns: int
    unit_panels: int
    joined_panels: int
    rest: int

    @property
    def copies_input(self) -> bool:
        """Whether units copy their input to scratch memory."""
        return self.plain or self.gathered or self.g.padded

    @property
    def dilated_rows(self) -> bool:
        """Whether the kernel's rows are dilated, so that copied boxes have unused rows."""
        return self.copies_input and not self.gathered and self.g.dilations[1] > 1

    @property
    def pixel(self) -> int:
        """Bytes of a pixel of an input block."""
        return self.of.item * (1 if self.plain else self.of.lanes)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of a group."""
        outputs = round_up(self.g.outputs, self.of.lanes)
        return self.blocks_in * self.g.taps * self.pixel * outputs

    @property
    def joined(self) -> int:
        """Most units of the same pixels that a thread may run as one."""
        if self.joined_panels >= self.panels:
            return -(-self.panels // self.unit_panels)
        return max(1, self.joined_panels // self.unit_panels)

    def reads(self) -> int:
        """Return the bytes of the input that a segment of a unit reads."""
        g = self.g
        if self.gathered:
            pixels = self.rows * self.columns * g.taps
        else:
            pixels = g.reach(0, 1) * g.reach(1, self.rows) * g.reach(2, self.columns)
        return self.segment * pixels * self.pixel

    def boxes(self) -> int:
        """Return the number of boxes of output pixels, over all images and groups."""
        g = self.g
        boxes = -(-g.target[1] // self.rows) * -(-g.target[2] // self.columns)
        return g.images * g.groups * g.target[0] * boxes

    def units(self) -> int:
        """Return the number of units."""
        return self.boxes() * -(-self.panels // self.unit_panels)


def direct_tiling(of: Tiles, g: Geometry, plain: bool, banded: bool, threads: int) -> DirectTiling:
    """Return the tiling of a direct convolution; results do not depend on the number of threads.

    Args:
        of: The contraction tiles.
        g: Sizes of the convolution.
        plain: The input is in the plain layout.
        banded: Each panel reads a band of the input blocks (`band_table`).
        threads: Threads that share the units.
    """
    blocks_in = g.inputs if plain else -(-g.inputs // of.lanes)
    panels = -(-g.outputs // of.width)
    gathered = of.few_rows and not plain and _gathers(g, of)
    target = g.target
    # Plain channels are not in blocks. A partial block is a segment of its own, and each band ends
    # at another block.
    rest = 0 if plain or (banded and g.taps > 1) else _partial_channels(of, g)
    tiling = DirectTiling(
        of, g, plain, gathered, blocks_in, panels, blocks_in, *target[1:], panels, panels, rest
    )
    if of.few_rows:
        _tile_few_rows(tiling, banded)
    else:
        _tile_many_rows(tiling)
    tiling.joined_panels = tiling.unit_panels
    if threads > 1:
        _divide_for_threads(tiling, threads)
    return tiling


def _partial_channels(of: Tiles, g: Geometry) -> int:
    """Return the channels of a partial last input block if skipping its padding is faster, or 0."""
    rest = g.inputs % of.lanes
    if g.taps == 1:
        return rest
    # The block's sums are a segment of short rounds, for which all tiles are called once more.
    # Both sides are in steps of the sums: steps that multiply zeros, and what the segment costs.
    saved = g.taps * (of.lanes - rest)
    return rest if g.kernel[0] == 1 and saved > _SEGMENT_STEPS + _SHORT_STEP * g.taps * rest else 0


def summed_channels(of: Tiles, g: Geometry) -> int:
    """Return how many input channels of a group a direct convolution of blocks multiplies."""
    return g.inputs if _partial_channels(of, g) else round_up(g.inputs, of.lanes)


def _divide_for_threads(tiling: DirectTiling, threads: int) -> None:
    """Divide the work further, so that threads of unequal speed finish at the same time."""
    of, enough = tiling.of, units_wanted(threads)
    if of.few_rows and tiling.columns < tiling.g.target[2]:
        others = tiling.boxes() // -(-tiling.g.target[2] // tiling.columns)
        tiling.columns = even_part(tiling.g.target[2], tiling.columns, others, threads)
    # A thread that takes several units of the same pixels runs them as one.
    fine = (_JOINED_UNITS if of.few_rows else 1) * enough
    tiling.unit_panels = shared(tiling.unit_panels, tiling.panels, tiling.boxes(), fine, 1, 1)
    rows, columns = tiling.g.target[1:]
    tiling.rows = shared(tiling.rows, rows, tiling.units() // -(-rows // tiling.rows), enough, 1, 1)
    tiling.columns = shared(
        tiling.columns,
        columns,
        tiling.units() // -(-columns // tiling.columns),
        enough,
        of.mr,
        of.mr,
    )


def _gathers(g: Geometry, of: Tiles) -> bool:
    """Return whether copying the pixels of each tap, for tiles across rows, takes fewer cycles."""
    if g.taps == 1:
        # Without stride the pixels of one tap are adjacent, and a copy would change nothing.
        return g.strides != (1, 1, 1)
    # A copied vector of channels serves ``lanes`` steps in each panel.
    steps = -(-g.outputs // of.width) * of.lanes
    row, image = g.target[2], g.target[1] * g.target[2]
    by_rows = tile_cycles(row, of) * g.target[1]
    # Both ways add the same sums, so a symbolic plan keeps the choice that suits its first sizes.
    return plain(by_rows) > plain(tile_cycles(image, of) + image * _GATHER_CYCLES / steps)


def tile_cycles(pixels: int, of: Tiles) -> float:
    """Return the cycles that few-row tiles take for one step of the sums of ``pixels`` pixels.

    Tiles have two heights (``subgraph.engine.codegen.tiling.tile_rows``), and are counted by a
    formula instead of a loop, so that symbolic sizes can be traced.
    """
    tiles = larger(-(-pixels // of.mr), 1)
    rows = pixels // tiles
    taller = pixels - tiles * rows
    waiting = (
        larger(rows, _LATENCY_ROWS) * (tiles - taller) + larger(rows + 1, _LATENCY_ROWS) * taller
    )
    # A tile adds half a cycle per step for its loads of weights (estimate).
    return waiting + 0.5 * tiles


def _strip(tiling: DirectTiling, ahead: bool) -> Argument:
    """Return the strip that computes rows of outputs, or 0 if no strip fits the sizes."""
    of, g = tiling.of, tiling.g
    if not of.few_rows or of.lanes == 1 or of.weights:
        return 0
    pixel = 1 if tiling.plain else of.lanes
    if tiling.gathered or g.taps == 1:
        return of.strip(pixel if tiling.gathered else g.strides[2] * pixel, pixel, ahead)
    # Each variant is compiled separately: only the sizes that networks use have one.
    usual = g.kernel[2] in ((3, 5, 7, 11) if tiling.plain else (1, 3)) and g.strides[2] in (1, 2, 4)
    boxed = g.kernel[0] == 1 or (tiling.copies_input and g.dilations[0] == 1)
    if not boxed or g.dilations[2] > 1 or not usual:
        return 0
    return of.strip(g.strides[2] * pixel, g.kernel[2] * pixel, ahead)


def _fit(tiling: DirectTiling, most: int) -> None:
    """Halve units until they read at most ``most`` bytes, or halving saves too little."""
    if not tiling.dilated_rows:
        # Only rows are halved here, as whole rows keep tiles full.
        tiling.rows = _halved(tiling, 1, tiling.rows, 1, most)
        return
    g, mr = tiling.g, tiling.of.mr
    each = tiling.reads() // (g.reach(1, tiling.rows) * g.reach(2, tiling.columns))
    sizes = (tiling.rows, tiling.columns, mr, most // each)
    reach = (g.strides[1], g.reach(1, 1), g.strides[2], g.reach(2, 1))
    tiling.rows, tiling.columns = _dilated_unit(1, *sizes, *reach), _dilated_unit(2, *sizes, *reach)


@recorded
def _dilated_unit(
    axis: int, rows: int, columns: int, mr: int, most: int, down: int, high: int, on: int, wide: int
) -> int:
    """Return the rows (axis 1) or columns (axis 2) of a unit if the kernel's rows are dilated.

    Args:
        axis: 1 for the rows, 2 for the columns.
        rows: Output rows of a unit at first.
        columns: Output columns of a unit at first.
        mr: Columns are rounded up to a multiple of it.
        most: Most input pixels that a unit may read.
        down: Input rows from an output to the next one.
        high: Input rows that one output spans.
        on: Input columns from an output to the next one.
        wide: Input columns that one output spans.
    """

    def reads(rows: int, columns: int) -> int:
        return ((rows - 1) * down + high) * ((columns - 1) * on + wide)

    # Rows that dilation leaves out are copied, too, so that fewer output rows may hardly read less.
    # Columns are halved if that reads a fifth less than halving the rows, and nothing if fewer rows
    # save less than a quarter (estimates).
    while rows > 1 and reads(rows, columns) > most:
        fewer, narrower = -(-rows // 2), round_up(-(-columns // 2), mr)
        if 5 * reads(rows, narrower) < 4 * reads(fewer, columns):
            columns = narrower
        elif 4 * reads(fewer, 1) > 3 * reads(rows, 1):
            break
        else:
            rows = fewer
    return rows if axis == 1 else columns


def _halved(tiling: DirectTiling, axis: int, count: int, least: int, most: int) -> int:
    """Return ``count`` rows (axis 1) or columns (2), halved until units read ``most`` bytes."""
    step = 1 if tiling.gathered else tiling.g.strides[axis]
    rest = 0 if tiling.gathered else tiling.g.reach(axis, 1) - step
    multiple = 1 if axis == 1 else tiling.of.mr
    each = tiling.reads() // (step * count + rest)
    return halved(count, least, multiple, each, step, rest, most)


def _tile_few_rows(tiling: DirectTiling, banded: bool) -> None:
    """Choose segments, rows, columns and panels for few-row tiles.

    A few-row tile uses a loaded weight for few products, so weights must come from a near cache.
    """
    of, l2 = tiling.of, caches().l2
    if not banded and tiling.g.pixels > of.mr:
        steps = tiling.g.taps * (1 if tiling.plain else of.lanes)
        # With six rows a weight must come from the L1 cache; with eight, L2 is fast enough.
        near = caches().l1 // 2 if of.mr <= 6 else 2 * caches().l1
        most = max(1, near // (of.width * of.item * steps))
        # Equal segments: a short last one would have the overhead of a whole one.
        tiling.segment = -(-tiling.blocks_in // -(-tiling.blocks_in // most))
    # A third of the L2 cache is for the input and a third for partial sums; the rest is for weights
    # (estimate).
    _fit(tiling, l2 // 3)
    tiling.columns = _halved(tiling, 2, tiling.columns, 8 * of.mr, l2 // 3)
    # With several segments, the partial sums of all panels of a unit are read again in each.
    if tiling.segment < tiling.blocks_in or (tiling.rest and tiling.g.taps > 1):
        fits = l2 // 3 // (tiling.rows * tiling.columns * of.width * of.item)
        tiling.unit_panels = smaller(tiling.panels, larger(1, fits))


def _tile_many_rows(tiling: DirectTiling) -> None:
    """Choose rows, columns and panels for many-row tiles, whose weights stream from L2."""
    of, g, l2 = tiling.of, tiling.g, caches().l2
    if tiling.copies_input:
        _fit(tiling, l2 // 4)
    # The input of a unit is read again for each panel, so that a unit has at most 16 tiles of
    # pixels (estimate).
    if tiling.columns > 16 * of.mr:
        tiling.columns = 8 * of.mr
    elif not tiling.dilated_rows and tiling.rows > 1 and tiling.columns * tiling.rows > 16 * of.mr:
        tiling.rows = max(1, min(tiling.rows, 16 * of.mr // tiling.columns))
    weights = tiling.blocks_in * (1 if tiling.plain else of.lanes)
    # If the weights of all panels do not stay in L2, four panels at a time are used for all pixels
    # (estimate).
    if weights * g.taps * -(-g.outputs // of.lanes) * of.lanes * of.item > l2 // 2:
        tiling.unit_panels = min(tiling.panels, 4)


def _gather_first(low: Lowering, of: Tiles, g: Geometry, x: Argument) -> tuple[Argument, Geometry]:
    """Emit the step that copies the input by taps once for all threads that share the pixels.

    Returns:
        Its result, and the sizes of the one-tap convolution that reads it.
    """
    blocks = -(-g.inputs // of.lanes)
    pixel = of.lanes * of.item
    written = blocks * g.taps * g.pixels * pixel
    image = blocks * math.prod(g.source) * pixel
    target = low.scratch(g.images * written)
    arguments = GatherArguments(x=x, y=target, blocks=blocks, x_image=image, **g.arguments())
    low.emit(
        Kernel("subgraph.ops.conv.copy_kernels", "gather", dtype=of.dtype, lanes=of.lanes),
        arguments,
        g.images * blocks,
        grain=grain(g.images * blocks, g.images * written),
        bytes=2 * g.images * written,
    )
    # With several taps each pair of block and tap is an input block of whole lanes. Only with one
    # tap the number of existing channels stays known, so that the others can be left out.
    inputs = g.inputs if g.taps == 1 else blocks * of.lanes * g.taps
    line = (1, 1, g.pixels)
    one = (1, 1, 1)
    return target, Geometry(g.images, 1, inputs, g.outputs, line, line, one, one, one, (0, 0, 0))


def emit_direct(
    low: Lowering, conv: PackedConv, *, plain: bool, table: Argument = 0, flops: int = 0
) -> None:
    """Emit the kernel `direct`.

    Args:
        low: Collects the plan's steps and scratch memory.
        conv: The convolution, its groups merged to whole blocks of channels, its weights packed by
            `direct_weights` or `band_weights`.
        plain: The input is in the plain layout.
        table: Bands of the panels (`band_table`); 0: every panel reads all input blocks.
        flops: Operations to report, without those on zeros in the weights; 0: those of the sizes.
    """
    of, g, x, out = conv.of, conv.g, conv.x, conv.out
    tiling = direct_tiling(of, g, plain, table != 0, low.threads)
    # With fewer boxes of pixels than threads, several threads work on the panels of one box, and
    # each would copy the same pixels.
    may_share = low.threads > 1 and tiling.gathered and table == 0 and out.whole
    if may_share and g.groups == g.target[0] == 1 and tiling.boxes() <= low.threads:
        x, g = _gather_first(low, of, g, x)
        tiling = direct_tiling(of, g, plain, False, low.threads)
    pixel, blocks_out = of.lanes * of.item, -(-g.outputs // of.lanes)
    image_in = g.groups * tiling.blocks_in * math.prod(g.source) * tiling.pixel
    image_out = g.groups * blocks_out * math.prod(out.sizes or g.target) * pixel
    # Weights from memory that serve few pixels are prefetched.
    ahead = tiling.weight_bytes > caches().l2 and g.pixels <= 64 * of.mr
    # With few-row tiles a thread runs all panels of its pixels, which are in its own cache.
    over_pixels = not tiling.copies_input and not (of.few_rows and low.threads > 1)
    arguments = DirectArguments(
        x=x,
        weights=conv.weight,
        y=out.y,
        bias=conv.bias,
        residual=out.residual,
        groups=g.groups,
        input_blocks=tiling.blocks_in,
        output_blocks=blocks_out,
        **g.arguments(),
        tile=of.contraction(ahead=ahead),
        **conv.act.arguments(),
        rows=tiling.rows,
        columns=tiling.columns,
        panels=tiling.unit_panels,
        **low.worker_scratch(tiling.reads() if tiling.copies_input else None),
        over_pixels=int(over_pixels),
        x_image=image_in,
        y_image=image_out,
        residual_image=image_out,
        **out.strides(g.target, pixel),
        bands=table,
        rest=tiling.rest,
        segment=tiling.segment,
        gathered=int(tiling.gathered),
        # A strip stores adjacent pixels.
        strip=0 if out.steps[2] != 1 else _strip(tiling, ahead),
        joined=tiling.joined,
    )
    count = tiling.units()
    flops = flops or g.flops
    low.emit(
        Kernel("subgraph.ops.conv.kernels", "direct", plain=plain, **of.variant),
        arguments,
        count,
        grain=grain(count, flops),
        flops=flops,
        bytes=image_in * g.images + tiling.weight_bytes * g.groups + image_out * g.images,
    )
