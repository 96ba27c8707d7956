"""Winograd convolution in the blocked layout: 3 x 3 kernels with stride 1 or 2, 4 x 4, 5 x 5.

Input tiles are transformed, multiplied point by point with the transformed weights (a batch of
GEMMs over contraction tiles) and transformed back. A block of tiles is processed at a time, so that
everything but the weights stays in the L2 cache.

Stride 1, F(m x m, 3 x 3): ``m * m`` outputs are computed from ``(m + 2)^2`` inputs with as many
multiplications: 2.25 times fewer for m = 2, 4 times fewer for m = 4. Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks" (2015). F(4) evaluates at ``0, 2/3, -2/3, 3/2, -3/2,
infinity``: of the points tried, those with the smallest error in float32 (about 3e-6 of the largest
output over 256 channels; 1e-5 at the usual 0, 1, -1, 2, -2). F(3 x 3, 4 x 4) and F(2 x 2, 5 x 5)
use the same points and the same transform of inputs.

Stride 2: along an axis the even inputs are multiplied by the first and the last weight, F(2, 2) at
``0, 1, infinity``, and the odd inputs by the middle weight, at ``0, 1``; an output is the sum of
both. So ``2 * 2`` outputs take 25 multiplications instead of 36. Each value of a point is a further
channel of its GEMM: 4 times as many channels if both coordinates are finite, 2 if one is.

Short tiles: if a side of the image is no multiple of m, its last tiles have one output less instead
of overlapping others, and all full tiles come before them. Only the last output of a tile needs the
point at infinity, so a short tile has no values there: 14 outputs are 4 + 4 + 3 + 3 from 22
products instead of 24.

Volumes, with any kernel along D: the planes that an output reads are further input channels.

Dilations, with stride 1: the outputs of every d-th row and column (a phase) read inputs of every
d-th row and column alone, so that they are the outputs of a convolution without dilation over a
smaller image. The tiles of a phase are those of a plane of their own, whose pixels are d apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel, vec
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import F_HI, F_LO, TileBlock

from .arguments import WinogradArguments
from .winograd_tile_kernels import (
    Epilogue,
    Grid,
    OutputTile,
    Place,
    TileAddresses,
    TileForm,
    next_addresses,
    next_place,
    phase_of,
    place_of,
    spacing_of,
    tile_prefetcher,
    tile_transform,
    tile_writer,
)

_tile_block = stack_block(TileBlock)


class ValueLayout(NamedTuple):
    """Compiled functions that say where tiles are in the image, and their values in scratch.

    Attributes:
        tile_capacity: ``f(a)``: tiles for which a unit has memory.
        values_of: ``f(point)``: values of a tile at a point, for each input channel.
        first_of: ``f(point)``: values of a tile at all points before.
        values_offset: ``f(a, point)``: bytes before the values of a point.
        tile_grid: ``f(a)``: the `Grid` of the arguments.
        start_of: ``f(tile, full)``: first output of a tile along an axis.
    """

    tile_capacity: Any
    values_of: Any
    first_of: Any
    values_offset: Any
    tile_grid: Any
    start_of: Any


def winograd(
    *,
    dtype: str,
    lanes: int,
    mr: int,
    nv: int,
    m: int,
    stride: int = 1,
    taps: int = 3,
    dilated: bool = False,
) -> Callable[..., None]:
    """Return the kernel of `WinogradArguments`.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        mr: Most rows of a contraction tile.
        nv: Blocks of output channels of a panel.
        m: Output pixels of a tile along each side: 2 or 4 with 3 taps, 3 with 4 taps, 2 with 5.
        stride: 1, or 2 with m = 2, 3 taps and few-row tiles.
        taps: Weights along each side.
        dilated: Whether there is a dilation along the height or the width (stride 1).
    """
    arguments = view_of(WinogradArguments)
    form = TileForm(dtype, lanes, mr, nv, m, stride, taps, dilated)
    low, points = form.few_rows, form.side**2
    layout, spacing = _value_layout(form), spacing_of(form)
    tile_grid, set_tiles = layout.tile_grid, _tile_setter(form)
    divide = _scratch_divider(form, layout)
    transform_input = _input_transform(form, layout)
    transform_output = _output_transform(form, layout)
    multiply = _multiplier(form, layout)
    run_stage = _stage_runner(form, layout, transform_input, multiply, transform_output)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, finished = _tile_block(), _tile_block()
        set_tiles(a, t, finished)
        scratch = a.scratch + worker * a.scratch_bytes
        if low and a.stage != 0:
            run_stage(a, t, finished, begin, end, scratch)
            return
        # Panels are innermost, so that consecutive units have the same tiles, whose input is then
        # transformed once for all of them.
        panels = (a.output_blocks + nv - 1) // nv
        panel_blocks = (panels + a.panels - 1) // a.panels
        grid = tile_grid(a)
        down, across = spacing(a)
        total = a.images * a.output_depth * down * across * grid.across * grid.down
        values, c = divide(a, scratch)
        transformed = -1
        for unit in range(begin, end):
            block, panel = unit // panel_blocks, unit % panel_blocks * a.panels
            first = block * a.tiles
            count = min(a.tiles, total - first)
            if block != transformed:
                transform_input(a, first, count, 0, a.input_blocks, scratch, values)
                transformed = block
            last_panel = min(panels, panel + a.panels)
            # Points are the outer loop, so that the values of a point serve all panels while they
            # are in a near cache, and a point is finished before sums may overwrite its values
            # (``in_place``).
            for point in range(points):
                multiply(a, t, point, panel, last_panel, panel, first, count, values, c)
            last_block = min(a.output_blocks, last_panel * nv)
            transform_output(a, finished, first, count, panel * nv, last_block, scratch, c)

    return kernel


def _tile_setter(form: TileForm) -> Any:
    """Return ``f(a, t, finished)``, which sets the fields that are always the same.

    ``t`` is the block of the contraction tiles, ``finished`` that of the activation.
    """
    item, pixel, spacing = form.item, form.pixel, spacing_of(form)

    @register_jitable
    def set_tiles(a: WinogradArguments, t: TileBlock, finished: TileBlock) -> None:
        # A product at a point has no taps, so that the loops over them run once; strips run the
        # inner one over input blocks. Sums start from 0, as the block is zeroed: the bias is added
        # to the outputs, after the transform.
        t.outer_count = 1
        t.middle_count = 1
        t.inner_count = 1
        t.a_step = item
        t.b_vector = pixel
        finished.c_row = spacing(a)[1] * pixel
        finished.c_vector = pixel
        finished.low = a.low
        finished.high = a.high

    return set_tiles


def _scratch_divider(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, scratch)``: the addresses of the values and of the sums in scratch."""
    n, nv, pixel, tile_capacity = form.n, form.nv, form.pixel, layout.tile_capacity

    @register_jitable
    def divide(a: WinogradArguments, scratch: int) -> tuple[int, int]:
        values = scratch + 2 * n * n * pixel
        # The sums of point p begin p * (their size) after the first ones, which lie before the
        # values, and a point has at least as many vectors of values as of sums. The sums of point p
        # therefore end where its own values begin or earlier, and overwrite those of finished
        # points alone.
        if a.in_place:
            return values + (a.panels * nv + 1) * tile_capacity(a) * pixel, values
        return values, values + n * n * tile_capacity(a) * (a.input_blocks + 1) * pixel

    return divide


def _stage_runner(
    form: TileForm, layout: ValueLayout, transform_input: Any, multiply: Any, transform_output: Any
) -> Any:
    """Return ``f(a, t, finished, begin, end, scratch)``, which runs units of one stage."""
    n, nv, pixel, tile_capacity = form.n, form.nv, form.pixel, layout.tile_capacity

    @register_jitable
    def run_stage(
        a: WinogradArguments, t: TileBlock, finished: TileBlock, begin: int, end: int, scratch: int
    ) -> None:
        """Run units of one stage of a single block of tiles."""
        stage, count, out_blocks = a.stage, a.tiles, a.output_blocks
        apart = tile_capacity(a) * pixel
        values = a.shared
        c = values + n * n * (a.input_blocks + 1) * apart
        if stage == 1:
            transform_input(a, 0, count, begin, end, scratch, values)
        elif stage == 2:
            pb, panels = a.stage_panels, a.panels
            # Units of one point that follow each other run as one, which computes their addresses
            # once.
            panel_blocks = (panels + pb - 1) // pb
            unit = begin
            while unit < end:
                point, first = unit // panel_blocks, unit % panel_blocks
                together = min(end - unit, panel_blocks - first)
                last = min(panels, (first + together) * pb)
                at = c + first * pb * nv * apart
                multiply(a, t, point, first * pb, last, 0, 0, count, values, at)
                unit += together
        else:
            at = c + begin * apart
            transform_output(a, finished, 0, count, begin, min(end, out_blocks), scratch, at)

    return run_stage


def _value_layout(form: TileForm) -> ValueLayout:
    """Return the functions that locate tiles and their values."""
    m, pixel, strided, low = form.m, form.pixel, form.strided, form.few_rows
    spacing = spacing_of(form)

    @register_jitable
    def tile_capacity(a: WinogradArguments) -> int:
        """Return the tile capacity of a unit; odd, so that points use different cache sets."""
        return a.tiles | 1 if low else a.tiles

    @register_jitable
    def values_of(point: int) -> int:
        """Return the number of values of a tile at a point, for each input channel."""
        if not strided:
            return 1
        # An axis has the even and the odd inputs at a finite point, the even ones alone at
        # infinity.
        return (1 if point // 3 == 2 else 2) * (1 if point % 3 == 2 else 2)

    @register_jitable
    def first_of(point: int) -> int:
        """Return the number of values at all points before this one."""
        if not strided:
            return point
        # The points of the first two rows have 4 + 4 + 2 values, those of the last row 2 + 2 + 1.
        i, j = point // 3, point % 3
        return 10 * i + (2 * j if i == 2 else 4 * j)

    @register_jitable
    def tile_grid(a: WinogradArguments) -> Grid:
        """Return the `Grid` of the arguments, of the first and so largest phase."""
        rows, columns = a.output_height, a.output_width
        apart_down, apart_across = spacing(a)
        rows = (rows + apart_down - 1) // apart_down
        columns = (columns + apart_across - 1) // apart_across
        # If all tiles had m - 1 outputs, ``down * (m - 1)`` rows would be covered; each row beyond
        # these makes one tile full.
        down, across = (rows + m - 1) // m, (columns + m - 1) // m
        full_down = max(0, rows - down * (m - 1))
        return Grid(down, across, full_down, max(0, columns - across * (m - 1)))

    @register_jitable
    def start_of(tile: int, full: int) -> int:
        """Return the first output of a tile along an axis whose first ``full`` tiles are full."""
        return tile * m - max(0, tile - full)

    @register_jitable
    def values_offset(a: WinogradArguments, point: int) -> int:
        """Return the offset of the values of a point, in bytes."""
        # A point has one vector per tile more than its values need. Without that vector, points of
        # 64 blocks would be a multiple of 4 KiB apart, which is the size of a way of a 32 KiB L1
        # cache: the transforms, which access all points of a tile, would use a single set.
        if not strided:
            return point * (a.input_blocks + 1) * tile_capacity(a) * pixel
        return (first_of(point) * a.input_blocks + point) * tile_capacity(a) * pixel

    return ValueLayout(tile_capacity, values_of, first_of, values_offset, tile_grid, start_of)


def _input_transform(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, first, count, begin, end, scratch, values)``.

    It transforms the input blocks from ``begin`` to before ``end`` of ``count`` tiles from tile
    ``first`` on, and stores their values from address ``values`` on.
    """
    n, pixel, low, stride = form.n, form.pixel, form.few_rows, form.stride
    tile_capacity, values_offset = layout.tile_capacity, layout.values_offset
    tile_grid, start_of = layout.tile_grid, layout.start_of
    transform_tile, prefetch_tile = tile_transform(form, values_offset), tile_prefetcher(n, pixel)
    spacing, phase, dilated = spacing_of(form), phase_of(form), form.dilated

    @register_jitable
    def transform_input(
        a: WinogradArguments,
        first: int,
        count: int,
        begin: int,
        end: int,
        scratch: int,
        values: int,
    ) -> None:
        grid, (down, across) = tile_grid(a), spacing(a)
        # Strips read adjacent pixels of one block, so that few-row tiles want [point][block][tile].
        # A many-row tile reads all channels of a pixel in order: [point][tile][block].
        row = pixel if low else (a.input_blocks + 1) * pixel
        step, apart = values_offset(a, 1), tile_capacity(a) * pixel if low else pixel
        depth, slices = a.image_depth, a.output_depth
        blocks, area = a.input_blocks // a.kernel_depth, a.image_height * a.image_width * pixel
        # Neighbouring tiles read neighbouring pixels and write neighbouring values.
        for block in range(begin, end):
            # An input block of the sums is a block of channels in one plane of the kernel.
            above = block // blocks * a.dilation_depth - a.pad_depth
            at = place_of(grid, first)
            # A short tile's values at infinity are unused: the next full tile overwrites them.
            to = TileAddresses(values, values, values, values)
            for _ in range(count):
                plane, row0, column0 = phase(a, at.plane)
                d = plane % slices * a.stride_depth + above
                x = a.x + plane // slices * a.x_image + (block % blocks * depth + d) * area
                h0 = row0 + start_of(at.row, grid.full_down) * stride * down
                w0 = column0 + start_of(at.column, grid.full_across) * stride * across
                h0 -= a.pad_height
                w0 -= a.pad_width
                if d < 0 or d >= depth:
                    h0 = -n * down  # none of its rows lies inside the image
                target = to
                to = next_addresses(grid, at, to, row)
                at = next_place(grid, at)
                # The tile after this one is prefetched. After the last tile that address may be
                # outside the image, which a prefetch ignores.
                if low and n == 6 and not dilated:
                    h1, w1 = start_of(at.row, grid.full_down), start_of(at.column, grid.full_across)
                    prefetch_tile(a, x, h1 - a.pad_height, w1 - a.pad_width)
                transform_tile(a, x, h0, w0, scratch, target, block, step, apart)

    return transform_input


def _output_transform(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, finished, first, count, block, last_block, scratch, c)``.

    It transforms the sums from address ``c`` on, of the output blocks from ``block`` to before
    ``last_block`` of ``count`` tiles from tile ``first`` on, and stores the outputs.
    """
    nv, pixel, low = form.nv, form.pixel, form.few_rows
    v = vec(form.dtype, form.lanes)
    load, zero, splat = v.load, v.zero, v.splat
    tile_capacity, tile_grid = layout.tile_capacity, layout.tile_grid
    locate_output, write_tile = _output_locator(form, layout), tile_writer(form)

    @register_jitable
    def transform_output(
        a: WinogradArguments,
        finished: TileBlock,
        first: int,
        count: int,
        block: int,
        last_block: int,
        scratch: int,
        c: int,
    ) -> None:
        grid = tile_grid(a)
        # The vector more keeps points in different cache sets, see `values_offset`.
        c_row = (a.panels * nv + 1) * pixel
        point = tile_capacity(a) * c_row
        row, apart = (pixel, tile_capacity(a) * pixel) if low else (c_row, pixel)
        # Outputs without bounds are clamped to infinities: one code without branches serves all.
        least, most = splat(-math.inf), splat(math.inf)
        if a.flags & F_LO:
            least = splat(a.low)
        if a.flags & F_HI:
            most = splat(a.high)
        for b in range(block, last_block):
            bias = zero()
            if a.bias != 0:
                bias = load(a.bias + b * pixel)
            epilogue = Epilogue(bias, least, most)
            s = c + (b - block) * apart
            at, sums = place_of(grid, first), TileAddresses(s, s, s, s)
            for _ in range(count):
                tile = locate_output(a, grid, at, b)
                write_tile(a, finished, sums, point, scratch, tile, epilogue)
                sums = next_addresses(grid, at, sums, row)
                at = next_place(grid, at)

    return transform_output


def _output_locator(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, grid, at, block)``: the `OutputTile` at a place, of a block of y."""
    m, pixel, start_of = form.m, form.pixel, layout.start_of
    spacing, phase = spacing_of(form), phase_of(form)

    @register_jitable
    def locate_output(a: WinogradArguments, grid: Grid, at: Place, block: int) -> OutputTile:
        height, width, slices = a.output_height, a.output_width, a.output_depth
        down, across = spacing(a)
        plane, row0, column0 = phase(a, at.plane)
        image, slice_ = plane // slices, plane % slices
        row = row0 + start_of(at.row, grid.full_down) * down
        column = column0 + start_of(at.column, grid.full_across) * across
        to = (((block * slices + slice_) * height + row) * width + column) * pixel
        residual = a.residual
        if residual != 0:
            residual += image * a.residual_image + to
        # A side shorter than m - 1 has a single tile, whose last outputs lie outside the image.
        rows = min(m if at.row < grid.full_down else m - 1, (height - row + down - 1) // down)
        columns = m if at.column < grid.full_across else m - 1
        columns = min(columns, (width - column + across - 1) // across)
        return OutputTile(a.y + image * a.y_image + to, residual, rows, columns)

    return locate_output


def _multiplier(form: TileForm, layout: ValueLayout) -> Any:
    """Return the function that multiplies the values at a point by the weights of panels."""
    lanes, nv, pixel, low = form.lanes, form.nv, form.pixel, form.few_rows
    tile_capacity, values_of = layout.tile_capacity, layout.values_of
    values_offset = layout.values_offset
    values_at, weights_at = _value_counter(form, layout), _weights_locator(form, layout)
    run_tiles, run_strips = _tile_runner(form), _strip_runner(form)

    @register_jitable
    def multiply(
        a: WinogradArguments,
        t: TileBlock,
        point: int,
        panel: int,
        last_panel: int,
        next_panel: int,
        first: int,
        tiles: int,
        values: int,
        c: int,
    ) -> None:
        """Multiply the values at a point by the weights of panels.

        ``next_panel`` is the panel with which the next point begins, ``c`` the address of the sums
        of the first panel; the values are those of ``tiles`` tiles from tile ``first`` on.
        """
        # At infinity only full tiles have values, which are adjacent, as `next_addresses` does not
        # advance for the others.
        count = values_at(a, point, first, tiles)
        if count == 0:
            return
        blocks, out_blocks = a.input_blocks, a.output_blocks
        c_row = (a.panels * nv + 1) * pixel
        apart = tile_capacity(a) * pixel if low else pixel
        t.a_row = (blocks + 1) * pixel
        t.c_row = c_row
        t.inner_a = apart
        t.c_vector = apart
        # The channels that complete the last block are padding, whose products are 0.
        t.steps = blocks * lanes - (-a.rest % lanes)
        steps = values_of(point) * blocks
        for p in range(panel, last_panel):
            vectors = min(nv, out_blocks - p * nv)
            t.b = weights_at(a, point, p)
            t.b_step = vectors * pixel
            at = c + point * tile_capacity(a) * c_row + (p - panel) * nv * apart
            if low:
                last = p + 1 == last_panel
                # After the last point this address lies behind the weights, where a prefetch does
                # not fault.
                next_weights = weights_at(a, point + last, next_panel if last else p + 1)
                source = values + values_offset(a, point)
                run_strips(a, t, count, vectors, steps, source, at, next_weights)
            else:
                run_tiles(a, t, count, vectors, values + values_offset(a, point), at)

    return multiply


def _value_counter(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, point, first, count)``: how many tiles have values at a point."""
    side, tile_grid = form.side, layout.tile_grid

    @register_jitable
    def values_at(a: WinogradArguments, point: int, first: int, count: int) -> int:
        """Return how many of ``count`` tiles from tile ``first`` on have values at a point."""
        inf_i, inf_j = point // side == side - 1, point % side == side - 1
        if not (inf_i or inf_j):
            return count
        grid = tile_grid(a)
        columns = grid.full_across if inf_j else grid.across
        rows = grid.full_down if inf_i else grid.down
        if rows == grid.down and columns == grid.across:
            return count
        # The tiles of a unit may begin anywhere in an image and run over several, so that they are
        # counted one by one.
        at, found = place_of(grid, first), 0
        for _ in range(count):
            found += 1 if at.row < rows and at.column < columns else 0
            at = next_place(grid, at)
        return found

    return values_at


def _weights_locator(form: TileForm, layout: ValueLayout) -> Any:
    """Return ``f(a, point, panel)``: the address of the weights of a panel at a point."""
    lanes, nv, pixel = form.lanes, form.nv, form.pixel
    values_of, first_of = layout.values_of, layout.first_of

    @register_jitable
    def weights_at(a: WinogradArguments, point: int, panel: int) -> int:
        before = first_of(point) * a.output_blocks + panel * nv * values_of(point)
        weights: int = a.weights
        weights += before * a.input_blocks * lanes * pixel
        return weights

    return weights_at


def _tile_runner(form: TileForm) -> Any:
    """Return ``f(a, t, count, vectors, values, c)``, which runs the tiles of a panel at a point.

    They multiply the values of ``count`` tiles from address ``values`` on by ``vectors`` blocks of
    output channels, and store the sums at ``c``.
    """
    mr = form.mr

    @register_jitable
    def run_tiles(
        a: WinogradArguments, t: TileBlock, count: int, vectors: int, values: int, c: int
    ) -> None:
        i = 0
        while i < count:
            rows = rows_of(count - i, mr)
            t.a = values + i * t.a_row
            t.c = c + i * t.c_row
            call_kernel(a.tile, t, rows, vectors, 0)
            i += rows

    return run_tiles


def _strip_runner(form: TileForm) -> Any:
    """Return ``f(a, t, count, vectors, steps, values, c, next_weights)``.

    It runs the strips of a panel at a point, one segment of the sums after the other: ``steps``
    input blocks in all. ``next_weights`` is the address of the weights used next, which are
    prefetched; the other arguments are those of `_tile_runner`.
    """
    lanes, mr, pixel = form.lanes, form.mr, form.pixel

    @register_jitable
    def run_strips(
        a: WinogradArguments,
        t: TileBlock,
        count: int,
        vectors: int,
        steps: int,
        values: int,
        c: int,
        next_weights: int,
    ) -> None:
        most = a.segment
        t.inner_b = lanes * vectors * pixel
        # All tiles of the strip read the same weights, as many bytes as come next: each tile
        # prefetches an equal share.
        t.pace = 2 * vectors * pixel // ((count + mr - 1) // mr)
        done = 0
        while done < steps:
            part = min(most, steps - done)
            # Only the last block may be partial; a strip multiplies its channels after the whole
            # blocks.
            rest = a.rest if done + part == steps else 0
            t.inner_count = part - 1 if rest != 0 else part
            t.last_steps = rest
            # From the second segment on this is not 0, so that the strip adds to the sums at ``c``.
            t.start_row = done
            t.a = values + done * t.inner_a
            t.c = c
            t.ahead = t.b + part * t.inner_b if done + part < steps else next_weights
            call_kernel(a.tile, t, count, vectors, 0)
            t.b = t.b + part * t.inner_b
            done += part

    return run_strips
