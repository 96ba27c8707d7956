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

import math
from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel, prefetch, vec
from subgraph.engine.codegen.tile import rows_of
from subgraph.engine.codegen.tiling import (
    F_HI,
    F_LO,
    LOW_ROWS,
    TileBlock,
)

from .arguments import WinogradArguments
from .winograd_axis_kernels import backward_along, finisher, forward_along, storer

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
    v = vec(dtype, lanes)
    load, store, zero, splat = v.load, v.store, v.zero, v.splat
    item = item_bytes(dtype)
    pixel = lanes * item
    strided, low = stride == 2, mr <= LOW_ROWS
    n = 5 if strided else m + taps - 1
    side = 3 if strided else n  # points along an axis
    forward, backward = forward_along(v, n), backward_along(v, m, n)
    store_inputs, store_outputs = storer(v, n), storer(v, m)
    finish_column = finisher(v, m)

    @register_jitable
    def tile_capacity(a: WinogradArguments) -> int:
        """Return the tile capacity of a unit; odd, so that points use different cache sets."""
        return a.tiles | 1 if low else a.tiles

    @register_jitable
    def values_of(point: int) -> int:
        """Return the number of values of a tile at a point, for each input channel."""
        if not strided:
            return 1
        return (1 if point // 3 == 2 else 2) * (1 if point % 3 == 2 else 2)

    @register_jitable
    def first_of(point: int) -> int:
        """Return the number of values at all points before this one."""
        if not strided:
            return point
        i, j = point // 3, point % 3
        return 10 * i + (2 * j if i == 2 else 4 * j)

    @register_jitable
    def full_tiles(outputs: int) -> int:
        """Return the number of full tiles along an axis; the others are short."""
        return max(0, outputs - (outputs + m - 1) // m * (m - 1))

    @register_jitable
    def start_of(tile: int, full: int) -> int:
        """Return the first output of a tile along an axis whose first ``full`` tiles are full."""
        return tile * m - max(0, tile - full)

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
    def values_offset(a: WinogradArguments, point: int) -> int:
        """Return the offset of the values of a point, in bytes."""
        if not strided:
            return point * (a.input_blocks + 1) * tile_capacity(a) * pixel
        return (first_of(point) * a.input_blocks + point) * tile_capacity(a) * pixel

    @register_jitable
    def weights_at(a: WinogradArguments, point: int, panel: int) -> int:
        """Return the address of the weights of a panel at a point."""
        before = first_of(point) * a.output_blocks + panel * nv * values_of(point)
        weights: int = a.weights
        return weights + before * a.input_blocks * lanes * pixel + point * a.point_padding

    @register_jitable
    def store_values(
        a: WinogradArguments,
        half: int,
        j: int,
        to: int,
        below: int,
        block: int,
        step: int,
        apart: int,
    ) -> None:
        """Transform column j of the rows' transforms (at address ``half``) and store its values.

        Values in the last row of points (infinity) are stored from ``below`` on, the others from
        ``to`` on; ``step`` is the bytes between points, ``apart`` those between input blocks.
        """
        d = forward(half + j * pixel, n * pixel)
        if not strided:
            at = j * step + block * apart
            store_inputs(d, to + at, n * step, below + at + (n - 1) * n * step)
        else:
            point = j // 2
            values, other = (1 if point == 2 else 2), j % 2
            at = (2 * values * block + other) * apart
            top = to + at + values_offset(a, point)
            store(top, d[0])
            store(top + values * apart, d[1])
            top = to + at + values_offset(a, point + 3)
            store(top, d[2])
            store(top + values * apart, d[3])
            at = (values * block + other) * apart
            store(below + at + values_offset(a, point + 6), d[4])

    @register_jitable
    def transform_tile(
        a: WinogradArguments,
        x: int,
        h0: int,
        w0: int,
        scratch: int,
        to: tuple[int, int, int, int],
        block: int,
        step: int,
        apart: int,
    ) -> None:
        """Transform the tile at row h0 and column w0 of a block of an image (address ``x``).

        ``to`` has four target addresses: for values at finite points, in the row of infinity, in
        the column of infinity, and at both. ``step`` and ``apart`` are those of `store_values`.
        """
        height, width = a.image_height, a.image_width
        patch, half = scratch, scratch + n * n * pixel
        begin, end = max(0, -w0), min(n, width - w0)
        whole = begin == 0 and end == n
        if not whole:
            for j in range(n):
                store(patch + j * pixel, zero())
        for i in range(n):
            row = half + i * n * pixel
            s = x + ((h0 + i) * width + w0) * pixel
            if h0 + i < 0 or h0 + i >= height:
                for j in range(n):
                    store(row + j * pixel, zero())
            elif whole:
                store_inputs(forward(s, pixel), row, pixel, row + (n - 1) * pixel)
            else:
                for j in range(begin, end):
                    store(patch + j * pixel, load(s + j * pixel))
                store_inputs(forward(patch, pixel), row, pixel, row + (n - 1) * pixel)
        for j in range(n - 1):
            store_values(a, half, j, to[0], to[1], block, step, apart)
        store_values(a, half, n - 1, to[2], to[3], block, step, apart)

    @register_jitable
    def prefetch_tile(a: WinogradArguments, x: int, h0: int, w0: int) -> None:
        """Prefetch the inputs of a tile: the transform is bound by loads."""
        row = a.image_width * pixel
        s = x + h0 * row + w0 * pixel
        for _ in range(n):
            for line in range(0, n * pixel, 64):
                prefetch(s + line)
            s += row

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
        across, down = (a.output_width + m - 1) // m, (a.output_height + m - 1) // m
        columns, lines = full_tiles(a.output_width), full_tiles(a.output_height)
        blocks = a.input_blocks
        area = a.image_height * a.image_width * pixel
        row = pixel if low else (blocks + 1) * pixel
        step, apart = values_offset(a, 1), tile_capacity(a) * pixel if low else pixel
        depth, slices, own = a.image_depth, a.output_depth, blocks // a.kernel_depth
        # Neighbouring tiles read neighbouring pixels and write neighbouring values.
        for b in range(begin, end):
            above = b // own * a.dilation_depth - a.pad_depth
            plane, i, j = first // (across * down), first // across % down, first % across
            # A short tile's values at infinity are unused: the next full tile overwrites them.
            to, low_to, right_to, corner_to = values, values, values, values
            for _ in range(count):
                d = plane % slices * a.stride_depth + above
                image = plane // slices
                x = a.x + image * a.x_image + (b % own * depth + d) * area
                h0 = start_of(i, lines) * stride - a.pad_height
                w0 = start_of(j, columns) * stride - a.pad_width
                if d < 0 or d >= depth:
                    h0 = -n  # no row of it lies inside
                targets = (to, low_to, right_to, corner_to)
                to += row
                low_to += row if i < lines else 0
                right_to += row if j < columns else 0
                corner_to += row if i < lines and j < columns else 0
                j += 1
                if j == across:
                    i, j = i + 1, 0
                if i == down:
                    plane, i = plane + 1, 0
                if low and n == 6:
                    h1, w1 = start_of(i, lines), start_of(j, columns)
                    prefetch_tile(a, x, h1 - a.pad_height, w1 - a.pad_width)
                transform_tile(a, x, h0, w0, scratch, targets, b, step, apart)

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

    @register_jitable
    def write_tile(
        a: WinogradArguments,
        finished: TileBlock,
        s: tuple[int, int, int, int],
        point: int,
        scratch: int,
        y: int,
        res: int,
        bias: Any,
        least: Any,
        most: Any,
        row: int,
        rows: int,
        cols: int,
    ) -> None:
        """Transform the sums of a tile back, and store the outputs inside the image.

        ``s`` has the four addresses of its sums, in the order of ``to`` in `transform_tile`;
        ``point`` is the bytes between the sums of points, ``row`` those between rows of y.
        """
        line, end = scratch, (side - 1) * point
        for i in range(side - 1):
            at = i * side * point
            sums = backward(s[0] + at, point, s[2] + at + end)
            store_outputs(sums, line, pixel, line + (m - 1) * pixel)
            line += m * pixel
        at = side * end
        sums = backward(s[1] + at, point, s[3] + at + end)
        store_outputs(sums, line, pixel, line + (m - 1) * pixel)
        for j in range(cols):
            d = backward(scratch + j * pixel, m * pixel, line + j * pixel)
            at = j * pixel
            finish_column(d, bias, least, most, y + at, res + at if res != 0 else 0, row, rows)
        if a.activation != 0:
            for i in range(rows):
                finished.c = y + i * row
                call_kernel(a.activation, finished, cols, 1, 0)

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
        oh_n, ow_n = a.output_height, a.output_width
        columns, lines = full_tiles(ow_n), full_tiles(oh_n)
        across, down = (ow_n + m - 1) // m, (oh_n + m - 1) // m
        slices, point = a.output_depth, tile_capacity(a) * (a.panels * nv + 1) * pixel
        c_row = (a.panels * nv + 1) * pixel
        row, apart = (pixel, tile_capacity(a) * pixel) if low else (c_row, pixel)
        least, most = splat(-math.inf), splat(math.inf)
        if a.flags & F_LO:
            least = splat(a.low)
        if a.flags & F_HI:
            most = splat(a.high)
        for b in range(block, last_block):
            plane, i, j = first // (across * down), first // across % down, first % across
            bias, channel_block = zero(), b + a.first_block
            if a.bias != 0:
                bias = load(a.bias + channel_block * pixel)
            s = c + (b - block) * apart
            low_s, right_s, corner_s = s, s, s
            for _ in range(count):
                image, od = plane // slices, plane % slices
                oh, ow = start_of(i, lines), start_of(j, columns)
                at = (((channel_block * slices + od) * oh_n + oh) * ow_n + ow) * pixel
                y = a.y + image * a.y_image + at
                res = a.residual
                if res != 0:
                    res += image * a.residual_image + at
                rows = min(m if i < lines else m - 1, oh_n - oh)
                cols = min(m if j < columns else m - 1, ow_n - ow)
                sums_of = (s, low_s, right_s, corner_s)
                write_tile(
                    a, finished, sums_of, point, scratch, y, res, bias, least, most, ow_n * pixel,
                    rows, cols,
                )  # fmt: skip
                s += row
                low_s += row if i < lines else 0
                right_s += row if j < columns else 0
                corner_s += row if i < lines and j < columns else 0
                j += 1
                if j == across:
                    i, j = i + 1, 0
                if i == down:
                    plane, i = plane + 1, 0

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
