"""Winograd convolution in the blocked layout: 3 x 3 kernels with stride 1 or 2, 4 x 4, 5 x 5.

Input tiles are transformed, multiplied point by point with the transformed weights (a batch of
GEMMs over contraction tiles) and transformed back, a block of tiles at a time so that everything
but the weights stays in the second cache level.

Stride 1, F(m x m, 3 x 3): ``m * m`` outputs are computed from ``(m + 2)^2`` inputs with as many
multiplications: 2.25 times fewer for m = 2, 4 times fewer for m = 4. Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks" (2015). F(4) evaluates at ``0, 2/3, -2/3, 3/2, -3/2,
infinity``: of the points tried, those with the smallest error in float32 (about 3e-6 of the largest
output over 256 channels; 1e-5 at the usual 0, 1, -1, 2, -2). F(3 x 3, 4 x 4) and F(2 x 2, 5 x 5)
evaluate there, too: their inputs are transformed alike.

Stride 2: along an axis even inputs meet the first and the last weight, F(2, 2) at ``0, 1,
infinity``, and odd ones the weight between, at ``0, 1``: an output of the sum of both. So
``2 * 2`` outputs take 25 multiplications in place of 36. The values of a point are so many more
channels of its GEMM: 4 times as many where both coordinates are finite, 2 where one is.

Where a side of the image is no multiple of m, its last tiles overlap nothing: they have one output
less, short ones, all the full ones before them. The last output alone needs the point at infinity,
so a short tile has no values there: 14 outputs are 4 + 4 + 3 + 3 from 22 products in place of 24.

Volumes, with any kernel along D: so are the values of the slices that an output reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.emit import item_bytes
from subgraph.engine.codegen.simd import call_kernel, ld_f64, prefetch, vec
from subgraph.engine.codegen.tile import arg, put, rows_of, stack_words
from subgraph.engine.codegen.tiling import (
    F_HI,
    F_LO,
    LOW_ROWS,
    T_A,
    T_AHEAD,
    T_AKS,
    T_ARS,
    T_B,
    T_BJS,
    T_BKS,
    T_C,
    T_CJS,
    T_CRS,
    T_HI,
    T_IRS,
    T_KIN,
    T_KLAST,
    T_LO,
    T_N0,
    T_N1,
    T_N2,
    T_PACE,
    T_SA2,
    T_SB2,
    T_WORDS,
)

from .winograd_axis_kernels import backward_along, finisher, forward_along, storer

_words = stack_words(T_WORDS)


def winograd(
    *, dtype: str, lanes: int, mr: int, nv: int, m: int, stride: int = 1, taps: int = 3
) -> Callable[..., None]:
    """Return the Winograd convolution; one unit is a block of tiles and of output panels.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        mr: Most rows of a contraction tile.
        nv: Blocks of output channels of a panel.
        m: 2 or 4, output pixels of a tile along each side; 3 with 4 taps, 2 with 5.
        stride: 1, or 2 with m = 2, 3 taps and low tiles.
        taps: Weights along each side.

    Words (numbered as those of ``conv_kernels.direct`` where they mean the same)::

        0 x  1 weights [point][panel][input block][values of the point][lane][columns]  2 y
        3 bias (padded; 0: none)  4 residual (0: none)
        5 images  6 input blocks of the sums: of an image, times kernel D  7 output blocks
        8..10 input D H W  11..13 output D H W  14 kernel D  17 stride D  20 dilation D
        23..25 pads before D H W
        26 contraction tile, or strip where tiles are low
        27 post kernel (0: none)  28 F_* flags  29 lower  30 upper (float64)
        31 tiles of a unit  33 panels of a unit
        32 sums lie where the values of earlier points were (1; no more blocks out than in, all
        panels in one unit), so that half as much must stay in the cache
        34 scratch  35 its bytes per worker
        36 what units do: all (0), or one stage of a single block of tiles, of which all panels are
           one unit's: transform the input (1), multiply (2), transform the sums (3)
        37 bytes between images of x  38 of y  39 of the residual
        40 values and sums that the stages share  41 panels of a unit that multiplies
        42 channels of the last input block that count (stride 1; 0: all)
        43 bytes between the weights of points (stride 1), beyond the weights
        44 output blocks of y, of the residual and of the bias that come before those computed
        47 steps of a segment of the sums (strips), in blocks

    A tile has n x n inputs and as many values (n = m + taps - 1, or 5 with stride 2) at ``n n``, or
    9, points. A worker's scratch, aligned to 64 bytes, holds ``2 n n`` vectors, then for each of
    ``tiles | 1`` tiles ``n n (input blocks + 1)`` vectors, then ``points (panels of a unit * nv +
    1)``; with word 32 only one point of the latter, before the values.
    Units: ceil(images * tiles of an image / tiles of a unit) * panel blocks, panels innermost;
    units of one block of tiles that run in one call transform it once. Of the stages (low tiles):
    input blocks of the sums; points * blocks of panels, panels innermost; output blocks.
    """
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
    def places(args: int) -> int:
        """Return the tiles for which a unit has room: an odd number spreads over the caches."""
        return arg(args, 31) | 1 if low else arg(args, 31)

    @register_jitable
    def values_of(point: int) -> int:
        """Return how many values a tile has at a point, for each input channel."""
        if not strided:
            return 1
        return (1 if point // 3 == 2 else 2) * (1 if point % 3 == 2 else 2)

    @register_jitable
    def first_of(point: int) -> int:
        """Return how many values come before those of a point."""
        if not strided:
            return point
        i, j = point // 3, point % 3
        return 10 * i + (2 * j if i == 2 else 4 * j)

    @register_jitable
    def full_tiles(outputs: int) -> int:
        """Return how many tiles along an axis are not short."""
        return max(0, outputs - (outputs + m - 1) // m * (m - 1))

    @register_jitable
    def start_of(tile: int, full: int) -> int:
        """Return the first output of a tile along an axis of which so many come full first."""
        return tile * m - max(0, tile - full)

    @register_jitable
    def values_at(args: int, point: int, first: int, count: int) -> int:
        """Return how many of a unit's tiles have values at a point."""
        inf_i, inf_j = point // side == side - 1, point % side == side - 1
        if not (inf_i or inf_j):
            return count
        across, down = (arg(args, 13) + m - 1) // m, (arg(args, 12) + m - 1) // m
        columns = full_tiles(arg(args, 13)) if inf_j else across
        rows = full_tiles(arg(args, 12)) if inf_i else down
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
    def region(args: int, point: int) -> int:
        """Return the bytes before the values of a point."""
        if not strided:
            return point * (arg(args, 6) + 1) * places(args) * pixel
        return (first_of(point) * arg(args, 6) + point) * places(args) * pixel

    @register_jitable
    def weights_at(args: int, point: int, panel: int) -> int:
        """Return the address of the weights of a panel at a point."""
        before = first_of(point) * arg(args, 7) + panel * nv * values_of(point)
        return arg(args, 1) + before * arg(args, 6) * lanes * pixel + point * arg(args, 43)

    @register_jitable
    def keep_values(
        args: int, half: int, j: int, to: int, below: int, block: int, step: int, apart: int
    ) -> None:
        """Transform column j of what the rows gave and store it at its points.

        Those in the row of infinity begin at ``below``, the others at ``to``.
        """
        d = forward(half + j * pixel, n * pixel)
        if not strided:
            at = j * step + block * apart
            store_inputs(d, to + at, n * step, below + at + (n - 1) * n * step)
        else:
            point = j // 2
            values, other = (1 if point == 2 else 2), j % 2
            at = (2 * values * block + other) * apart
            top = to + at + region(args, point)
            store(top, d[0])
            store(top + values * apart, d[1])
            top = to + at + region(args, point + 3)
            store(top, d[2])
            store(top + values * apart, d[3])
            at = (values * block + other) * apart
            store(below + at + region(args, point + 6), d[4])

    @register_jitable
    def transform_tile(
        args: int,
        x: int,
        h0: int,
        w0: int,
        scratch: int,
        to: tuple[int, int, int, int],
        block: int,
        step: int,
        apart: int,
    ) -> None:
        """Transform the tile at row h0 and column w0 of a block of an image.

        ``to`` is where its values go: those of no infinity, of a row, of a column, and of both.
        """
        height, width = arg(args, 9), arg(args, 10)
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
            keep_values(args, half, j, to[0], to[1], block, step, apart)
        keep_values(args, half, n - 1, to[2], to[3], block, step, apart)

    @register_jitable
    def announce(args: int, x: int, h0: int, w0: int) -> None:
        """Ask for what a tile will read: little is computed for each value of it."""
        row = arg(args, 10) * pixel
        s = x + h0 * row + w0 * pixel
        for _ in range(n):
            for line in range(0, n * pixel, 64):
                prefetch(s + line)
            s += row

    @register_jitable
    def transform_input(
        args: int, first: int, count: int, begin: int, end: int, scratch: int, a: int
    ) -> None:
        across, down = (arg(args, 13) + m - 1) // m, (arg(args, 12) + m - 1) // m
        columns, lines = full_tiles(arg(args, 13)), full_tiles(arg(args, 12))
        blocks = arg(args, 6)
        area = arg(args, 9) * arg(args, 10) * pixel
        row = pixel if low else (blocks + 1) * pixel
        step, apart = region(args, 1), places(args) * pixel if low else pixel
        depth, slices, own = arg(args, 8), arg(args, 11), blocks // arg(args, 14)
        # Neighbours of a tile lie beside it: in the input, and among the values of its block.
        for b in range(begin, end):
            above = b // own * arg(args, 20) - arg(args, 23)
            plane, i, j = first // (across * down), first // across % down, first % across
            # The values at infinity of short tiles are overwritten by those of the next full one.
            to, low_to, right_to, corner_to = a, a, a, a
            for _ in range(count):
                d = plane % slices * arg(args, 17) + above
                image = plane // slices
                x = arg(args, 0) + image * arg(args, 37) + (b % own * depth + d) * area
                h0 = start_of(i, lines) * stride - arg(args, 24)
                w0 = start_of(j, columns) * stride - arg(args, 25)
                if d < 0 or d >= depth:
                    h0 = -n  # no row of it lies inside
                places_of = (to, low_to, right_to, corner_to)
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
                    announce(args, x, h1 - arg(args, 24), w1 - arg(args, 25))
                transform_tile(args, x, h0, w0, scratch, places_of, b, step, apart)

    @register_jitable
    def run_tiles(args: int, t: int, count: int, vectors: int, a: int, c: int) -> None:
        """Run the contraction tiles of a panel of a point."""
        i = 0
        while i < count:
            rows = rows_of(count - i, mr)
            put(t, T_A, a + i * arg(t, T_ARS))
            put(t, T_C, c + i * arg(t, T_CRS))
            call_kernel(arg(args, 26), t, rows, vectors, 0)
            i += rows

    @register_jitable
    def run_strips(
        args: int, t: int, count: int, vectors: int, steps: int, a: int, c: int, coming: int
    ) -> None:
        """Run the strips of a panel of a point, as many blocks of the sums at a time as fit.

        ``coming`` is where the weights are that follow.
        """
        most = arg(args, 47)
        put(t, T_SB2, lanes * vectors * pixel)
        put(t, T_PACE, 2 * vectors * pixel // ((count + mr - 1) // mr))
        done = 0
        while done < steps:
            part = min(most, steps - done)
            rest = arg(args, 42) if done + part == steps else 0
            put(t, T_N2, part - 1 if rest != 0 else part)
            put(t, T_KLAST, rest)
            put(t, T_IRS, done)
            put(t, T_A, a + done * arg(t, T_SA2))
            put(t, T_C, c)
            put(t, T_AHEAD, arg(t, T_B) + part * arg(t, T_SB2) if done + part < steps else coming)
            call_kernel(arg(args, 26), t, count, vectors, 0)
            put(t, T_B, arg(t, T_B) + part * arg(t, T_SB2))
            done += part

    @register_jitable
    def multiply(
        args: int,
        t: int,
        point: int,
        panel: int,
        last_panel: int,
        then: int,
        first: int,
        tiles: int,
        a: int,
        c: int,
    ) -> None:
        """Multiply the values of a point by the weights of panels.

        ``then`` is the panel with which the next point begins, ``c`` the sums of the first panel.
        """
        count = values_at(args, point, first, tiles)
        if count == 0:
            return
        blocks, out_blocks = arg(args, 6), arg(args, 7)
        c_row = (arg(args, 33) * nv + 1) * pixel
        apart = places(args) * pixel if low else pixel
        put(t, T_ARS, (blocks + 1) * pixel)
        put(t, T_CRS, c_row)
        put(t, T_SA2, apart)
        put(t, T_CJS, apart)
        put(t, T_KIN, blocks * lanes - (-arg(args, 42) % lanes))
        steps = values_of(point) * blocks
        for p in range(panel, last_panel):
            vectors = min(nv, out_blocks - p * nv)
            put(t, T_B, weights_at(args, point, p))
            put(t, T_BKS, vectors * pixel)
            at = c + point * places(args) * c_row + (p - panel) * nv * apart
            if low:
                last = p + 1 == last_panel
                coming = weights_at(args, point + last, then if last else p + 1)
                source = a + region(args, point)
                run_strips(args, t, count, vectors, steps, source, at, coming)
            else:
                run_tiles(args, t, count, vectors, a + region(args, point), at)

    @register_jitable
    def write_tile(
        args: int,
        post: int,
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
        """Transform a tile of a block back, finish what lies inside the image and store it.

        ``s`` is where its sums begin, numbered as those of ``transform_tile`` are.
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
        if arg(args, 27) != 0:
            for i in range(rows):
                put(post, T_C, y + i * row)
                call_kernel(arg(args, 27), post, cols, 1, 0)

    @register_jitable
    def transform_output(
        args: int,
        post: int,
        first: int,
        count: int,
        block: int,
        last_block: int,
        scratch: int,
        c: int,
    ) -> None:
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        columns, lines = full_tiles(ow_n), full_tiles(oh_n)
        across, down = (ow_n + m - 1) // m, (oh_n + m - 1) // m
        slices, point = arg(args, 11), places(args) * (arg(args, 33) * nv + 1) * pixel
        c_row = (arg(args, 33) * nv + 1) * pixel
        row, apart = (pixel, places(args) * pixel) if low else (c_row, pixel)
        least, most = splat(-math.inf), splat(math.inf)
        if arg(args, 28) & F_LO:
            least = splat(ld_f64(args + 8 * 29))
        if arg(args, 28) & F_HI:
            most = splat(ld_f64(args + 8 * 30))
        for b in range(block, last_block):
            plane, i, j = first // (across * down), first // across % down, first % across
            bias, place = zero(), b + arg(args, 44)
            if arg(args, 3) != 0:
                bias = load(arg(args, 3) + place * pixel)
            s = c + (b - block) * apart
            low_s, right_s, corner_s = s, s, s
            for _ in range(count):
                image, od = plane // slices, plane % slices
                oh, ow = start_of(i, lines), start_of(j, columns)
                at = (((place * slices + od) * oh_n + oh) * ow_n + ow) * pixel
                y = arg(args, 2) + image * arg(args, 38) + at
                res = arg(args, 4)
                if res != 0:
                    res += image * arg(args, 39) + at
                rows = min(m if i < lines else m - 1, oh_n - oh)
                cols = min(m if j < columns else m - 1, ow_n - ow)
                sums_of = (s, low_s, right_s, corner_s)
                write_tile(
                    args, post, sums_of, point, scratch, y, res, bias, least, most, ow_n * pixel,
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
    def run_stage(args: int, t: int, post: int, begin: int, end: int, scratch: int) -> None:
        """Run units of one stage of a single block of tiles."""
        stage, count, out_blocks = arg(args, 36), arg(args, 31), arg(args, 7)
        apart = places(args) * pixel
        a = arg(args, 40)
        c = a + n * n * (arg(args, 6) + 1) * apart
        if stage == 1:
            transform_input(args, 0, count, begin, end, scratch, a)
        elif stage == 2:
            pb, panels = arg(args, 41), arg(args, 33)
            panel_blocks = (panels + pb - 1) // pb
            unit = begin
            while unit < end:
                point, first = unit // panel_blocks, unit % panel_blocks
                together = min(end - unit, panel_blocks - first)
                last = min(panels, (first + together) * pb)
                at = c + first * pb * nv * apart
                multiply(args, t, point, first * pb, last, 0, 0, count, a, at)
                unit += together
        else:
            at = c + begin * apart
            transform_output(args, post, 0, count, begin, min(end, out_blocks), scratch, at)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, post = _words(), _words()
        tiles, pb = arg(args, 31), arg(args, 33)
        scratch = arg(args, 34) + worker * arg(args, 35)
        out_blocks = arg(args, 7)
        panels = (out_blocks + nv - 1) // nv
        panel_blocks = (panels + pb - 1) // pb
        across, down = (arg(args, 13) + m - 1) // m, (arg(args, 12) + m - 1) // m
        total = arg(args, 5) * arg(args, 11) * across * down
        put(t, T_N0, 1)
        put(t, T_N1, 1)
        put(t, T_N2, 1)
        put(t, T_AKS, item)
        put(t, T_BJS, pixel)
        put(post, T_CRS, pixel)
        put(post, T_CJS, pixel)
        put(post, T_LO, arg(args, 29))
        put(post, T_HI, arg(args, 30))
        if low and arg(args, 36) != 0:
            run_stage(args, t, post, begin, end, scratch)
            return
        a = scratch + 2 * n * n * pixel
        c = a + n * n * places(args) * (arg(args, 6) + 1) * pixel
        if arg(args, 32):
            c = a
            a += (pb * nv + 1) * places(args) * pixel
        transformed = -1
        for unit in range(begin, end):
            block, panel = unit // panel_blocks, unit % panel_blocks * pb
            first = block * tiles
            count = min(tiles, total - first)
            if block != transformed:
                transform_input(args, first, count, 0, arg(args, 6), scratch, a)
                transformed = block
            last_panel = min(panels, panel + pb)
            for point in range(side * side):
                multiply(args, t, point, panel, last_panel, panel, first, count, a, c)
            last_block = min(out_blocks, last_panel * nv)
            transform_output(args, post, first, count, panel * nv, last_block, scratch, c)

    return kernel
