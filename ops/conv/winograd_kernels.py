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
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import TileBlock

from .arguments import WinogradArguments
from .winograd_tile_kernels import (
    TileForm,
    ValueLayout,
    input_transform,
    output_transform,
    value_layout,
)

_tile_block = stack_block(TileBlock)


def winograd(
    *, dtype: str, lanes: int, mr: int, nv: int, m: int, stride: int = 1, taps: int = 3
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
    """
    arguments = view_of(WinogradArguments)
    form = TileForm(dtype, lanes, mr, nv, m, stride, taps)
    n, side, item, pixel, low = form.n, form.side, form.item, form.pixel, form.few_rows
    layout = value_layout(form)
    tile_capacity = layout.tile_capacity
    transform_input, transform_output = (
        input_transform(form, layout),
        output_transform(form, layout),
    )
    multiply = _multiplier(form, layout)
    run_stage = _stage_runner(form, layout, transform_input, multiply, transform_output)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, finished = _tile_block(), _tile_block()
        tiles, pb = a.tiles, a.panels
        scratch = a.scratch + worker * a.scratch_bytes
        out_blocks = a.output_blocks
        panels = (out_blocks + nv - 1) // nv
        panel_blocks = (panels + pb - 1) // pb
        across, down = (a.output_width + m - 1) // m, (a.output_height + m - 1) // m
        total = a.images * a.output_depth * across * down
        t.outer_count = 1
        t.middle_count = 1
        t.inner_count = 1
        t.a_step = item
        t.b_vector = pixel
        finished.c_row = pixel
        finished.c_vector = pixel
        finished.low = a.low
        finished.high = a.high
        if low and a.stage != 0:
            run_stage(a, t, finished, begin, end, scratch)
            return
        values = scratch + 2 * n * n * pixel
        c = values + n * n * tile_capacity(a) * (a.input_blocks + 1) * pixel
        if a.in_place:
            c = values
            values += (pb * nv + 1) * tile_capacity(a) * pixel
        transformed = -1
        for unit in range(begin, end):
            block, panel = unit // panel_blocks, unit % panel_blocks * pb
            first = block * tiles
            count = min(tiles, total - first)
            if block != transformed:
                transform_input(a, first, count, 0, a.input_blocks, scratch, values)
                transformed = block
            last_panel = min(panels, panel + pb)
            for point in range(side * side):
                multiply(a, t, point, panel, last_panel, panel, first, count, values, c)
            last_block = min(out_blocks, last_panel * nv)
            transform_output(a, finished, first, count, panel * nv, last_block, scratch, c)

    return kernel


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


def _multiplier(form: TileForm, layout: ValueLayout) -> Any:
    """Return the function that multiplies the values at a point by the weights of panels."""
    lanes, mr, nv, m, side = form.lanes, form.mr, form.nv, form.m, form.side
    pixel, low = form.pixel, form.few_rows
    tile_capacity, values_of, first_of = layout.tile_capacity, layout.values_of, layout.first_of
    values_offset, full_tiles = layout.values_offset, layout.full_tiles

    @register_jitable
    def values_at(a: WinogradArguments, point: int, first: int, count: int) -> int:
        """Return how many of ``count`` tiles from tile ``first`` on have values at a point."""
        inf_i, inf_j = point // side == side - 1, point % side == side - 1
        if not (inf_i or inf_j):
            return count
        across, down = (a.output_width + m - 1) // m, (a.output_height + m - 1) // m
        columns = full_tiles(a.output_width) if inf_j else across
        rows = full_tiles(a.output_height) if inf_i else down
        if rows == down and columns == across:
            return count
        i, j = first // across % down, first % across
        found = 0
        for _ in range(count):
            found += 1 if i < rows and j < columns else 0
            j += 1
            if j == across:
                i, j = i + 1, 0
            if i == down:
                i = 0
        return found

    @register_jitable
    def weights_at(a: WinogradArguments, point: int, panel: int) -> int:
        """Return the address of the weights of a panel at a point."""
        before = first_of(point) * a.output_blocks + panel * nv * values_of(point)
        weights: int = a.weights
        weights += before * a.input_blocks * lanes * pixel + point * a.point_padding
        return weights

    @register_jitable
    def run_tiles(
        a: WinogradArguments, t: TileBlock, count: int, vectors: int, values: int, c: int
    ) -> None:
        """Run the contraction tiles of a panel at a point, from values to the sums at ``c``."""
        i = 0
        while i < count:
            rows = rows_of(count - i, mr)
            t.a = values + i * t.a_row
            t.c = c + i * t.c_row
            call_kernel(a.tile, t, rows, vectors, 0)
            i += rows

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
        """Run the strips of a panel at a point, one segment of the sums after the other.

        ``next_weights`` is the address of the weights used next, which are prefetched.
        """
        most = a.segment
        t.inner_b = lanes * vectors * pixel
        t.pace = 2 * vectors * pixel // ((count + mr - 1) // mr)
        done = 0
        while done < steps:
            part = min(most, steps - done)
            rest = a.rest if done + part == steps else 0
            t.inner_count = part - 1 if rest != 0 else part
            t.last_steps = rest
            t.start_row = done
            t.a = values + done * t.inner_a
            t.c = c
            t.ahead = t.b + part * t.inner_b if done + part < steps else next_weights
            call_kernel(a.tile, t, count, vectors, 0)
            t.b = t.b + part * t.inner_b
            done += part

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
        t.steps = blocks * lanes - (-a.rest % lanes)
        steps = values_of(point) * blocks
        for p in range(panel, last_panel):
            vectors = min(nv, out_blocks - p * nv)
            t.b = weights_at(a, point, p)
            t.b_step = vectors * pixel
            at = c + point * tile_capacity(a) * c_row + (p - panel) * nv * apart
            if low:
                last = p + 1 == last_panel
                next_weights = weights_at(a, point + last, next_panel if last else p + 1)
                source = values + values_offset(a, point)
                run_strips(a, t, count, vectors, steps, source, at, next_weights)
            else:
                run_tiles(a, t, count, vectors, values + values_offset(a, point), at)

    return multiply
