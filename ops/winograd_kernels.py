"""Winograd convolution F(m x m, 3 x 3), stride 1, in the blocked layout.

``m * m`` outputs are computed from ``(m + 2)^2`` inputs with as many multiplications: 2.25 times
fewer for m = 2, 4 times fewer for m = 4. Input tiles are transformed, multiplied point by point
with the transformed weights (a batch of GEMMs over contraction tiles) and transformed back, a block
of tiles at a time so that everything but the weights stays in the second cache level.

Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (2015). F(4) evaluates at
``0, 2/3, -2/3, 3/2, -3/2, infinity``: of the points tried, those with the smallest error in float32
(about 3e-6 of the largest output over 256 channels; 1e-5 at the usual 0, 1, -1, 2, -2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.simd import call_kernel, ld_f64, vec
from subgraph.engine.tile import arg, item_bytes, put, rows_of, stack_words
from subgraph.engine.tiling import (
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
    T_FLAGS,
    T_HI,
    T_INIT,
    T_KIN,
    T_LO,
    T_N0,
    T_N1,
    T_N2,
    T_PACE,
    T_RBIAS,
    T_RES,
    T_WORDS,
)

_words = stack_words(T_WORDS)


def _forward(v: Any, m: int) -> Any:
    """Return ``f(source, step, target, step)``: the input transform of one row of vectors."""
    load, store, fma, splat = v.load, v.store, v.fma, v.splat

    @register_jitable
    def forward2(s: int, ss: int, d: int, ds: int) -> None:
        d0, d1, d2, d3 = load(s), load(s + ss), load(s + 2 * ss), load(s + 3 * ss)
        store(d, d0 - d2)
        store(d + ds, d1 + d2)
        store(d + 2 * ds, d2 - d1)
        store(d + 3 * ds, d1 - d3)

    a, b = 2.0 / 3.0, 1.5
    a2, b2 = a * a, b * b

    @register_jitable
    def forward4(s: int, ss: int, d: int, ds: int) -> None:
        d0, d1, d2 = load(s), load(s + ss), load(s + 2 * ss)
        d3, d4, d5 = load(s + 3 * ss), load(s + 4 * ss), load(s + 5 * ss)
        store(d, fma(splat(-(a2 + b2)), d2, d0 + d4))
        even, odd = fma(splat(-b2), d2, d4), fma(splat(-b2), d1, d3)
        store(d + ds, fma(splat(a), odd, even))
        store(d + 2 * ds, fma(splat(-a), odd, even))
        even, odd = fma(splat(-a2), d2, d4), fma(splat(-a2), d1, d3)
        store(d + 3 * ds, fma(splat(b), odd, even))
        store(d + 4 * ds, fma(splat(-b), odd, even))
        store(d + 5 * ds, fma(splat(-(a2 + b2)), d3, d1 + d5))

    return forward2 if m == 2 else forward4


def _backward(v: Any, m: int) -> Any:
    """Return ``f(source, step, target, step)``: the output transform of one row of vectors."""
    load, store, fma, splat = v.load, v.store, v.fma, v.splat

    @register_jitable
    def backward2(s: int, ss: int, d: int, ds: int) -> None:
        m0, m1, m2, m3 = load(s), load(s + ss), load(s + 2 * ss), load(s + 3 * ss)
        store(d, m0 + m1 + m2)
        store(d + ds, m1 - m2 - m3)

    a, b = 2.0 / 3.0, 1.5
    a2, b2, a3, b3 = a * a, b * b, a * a * a, b * b * b

    @register_jitable
    def backward4(s: int, ss: int, d: int, ds: int) -> None:
        m1, m2 = load(s + ss), load(s + 2 * ss)
        sum_a, diff_a = m1 + m2, m1 - m2
        m3, m4 = load(s + 3 * ss), load(s + 4 * ss)
        sum_b, diff_b = m3 + m4, m3 - m4
        store(d, load(s) + sum_a + sum_b)
        store(d + ds, fma(splat(a), diff_a, splat(b) * diff_b))
        store(d + 2 * ds, fma(splat(a2), sum_a, splat(b2) * sum_b))
        last = fma(splat(b3), diff_b, load(s + 5 * ss))
        store(d + 3 * ds, fma(splat(a3), diff_a, last))

    return backward2 if m == 2 else backward4


def winograd(*, dtype: str, lanes: int, mr: int, nv: int, m: int) -> Callable[..., None]:
    """Return the Winograd convolution; one unit is a block of tiles and of output panels.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        mr: Most rows of a contraction tile.
        nv: Blocks of output channels of a panel.
        m: 2 or 4, output pixels of a tile along each side; n = m + 2 below.

    Words (numbered as those of ``conv_kernels.direct`` where they mean the same)::

        0 x  1 weights [n * n][panel][input channel][columns], transformed  2 y
        3 bias (padded; 0: none)  4 residual (0: none)
        5 images  6 input blocks  7 output blocks
        9 10 input H W  12 13 output H W  24 25 pads before H W
        26 contraction tile  27 post kernel (0: none)  28 F_* flags  29 lower  30 upper (float64)
        31 tiles of a unit  33 panels of a unit
        34 scratch  35 its bytes per worker
        37 bytes between images of x  38 of y  39 of the residual

    A worker's scratch, aligned to 64 bytes, holds ``2 n n`` vectors, ``n n tiles`` rows of
    ``(input blocks + 1)`` vectors and ``n n tiles`` rows of ``(panels of a unit * nv + 1)``.
    Units: ceil(images * tiles of an image / tiles of a unit) * panel blocks, panels innermost;
    units of one block of tiles that run in one call transform it once.
    """
    v = vec(dtype, lanes)
    load, store, zero, splat, at_least, at_most = v.load, v.store, v.zero, v.splat, v.max, v.min
    item = item_bytes(dtype)
    pixel = lanes * item
    n = m + 2
    forward, backward = _forward(v, m), _backward(v, m)

    @register_jitable
    def gather(args: int, x: int, h0: int, w0: int, patch: int) -> int:
        """Copy an input tile that reaches over the border; return where it lies."""
        height, width = arg(args, 9), arg(args, 10)
        for i in range(n):
            for j in range(n):
                h, w = h0 + i, w0 + j
                to = patch + (i * n + j) * pixel
                if h >= 0 and h < height and w >= 0 and w < width:
                    store(to, load(x + (h * width + w) * pixel))
                else:
                    store(to, zero())
        return patch

    @register_jitable
    def transform_input(args: int, first: int, count: int, scratch: int) -> None:
        height, width = arg(args, 9), arg(args, 10)
        across, blocks = (arg(args, 13) + m - 1) // m, arg(args, 6)
        per_image = across * ((arg(args, 12) + m - 1) // m)
        patch, half = scratch, scratch + n * n * pixel
        row = (blocks + 1) * pixel
        point = arg(args, 31) * row
        target = scratch + 2 * n * n * pixel
        for q in range(count):
            image, place = (first + q) // per_image, (first + q) % per_image
            h0 = place // across * m - arg(args, 24)
            w0 = place % across * m - arg(args, 25)
            inside = h0 >= 0 and w0 >= 0 and h0 + n <= height and w0 + n <= width
            x = arg(args, 0) + image * arg(args, 37)
            for b in range(blocks):
                if inside:
                    s, down = x + (h0 * width + w0) * pixel, width * pixel
                else:
                    s, down = gather(args, x, h0, w0, patch), n * pixel
                for i in range(n):
                    forward(s + i * down, pixel, half + i * n * pixel, pixel)
                to = target + q * row + b * pixel
                for j in range(n):
                    forward(half + j * pixel, n * pixel, to + j * point, n * point)
                x += height * width * pixel

    @register_jitable
    def multiply(
        args: int, t: int, panel: int, last_panel: int, count: int, a: int, c: int
    ) -> None:
        blocks, out_blocks = arg(args, 6), arg(args, 7)
        depth = blocks * lanes
        row, c_row = (blocks + 1) * pixel, (arg(args, 33) * nv + 1) * pixel
        tiles = arg(args, 31)
        put(t, T_ARS, row)
        put(t, T_CRS, c_row)
        put(t, T_KIN, depth)
        for point in range(n * n):
            for p in range(panel, last_panel):
                vectors = min(nv, out_blocks - p * nv)
                put(t, T_B, arg(args, 1) + (point * out_blocks + p * nv) * depth * pixel)
                put(t, T_BKS, vectors * pixel)
                # The tiles of a panel together bring the next one closer.
                pace = 2 * vectors * pixel // ((count + mr - 1) // mr)
                put(t, T_PACE, pace)
                coming = arg(t, T_B) + depth * vectors * pixel
                i = 0
                while i < count:
                    rows = rows_of(count - i, mr)
                    put(t, T_A, a + (point * tiles + i) * row)
                    put(t, T_C, c + (point * tiles + i) * c_row + (p - panel) * nv * pixel)
                    put(t, T_AHEAD, coming)
                    coming += depth // 2 * pace
                    call_kernel(arg(args, 26), t, rows, vectors, 0)
                    i += rows

    @register_jitable
    def write_tile(args: int, post: int, half: int, y: int, res: int, rows: int, cols: int) -> None:
        """Finish the m x m outputs at ``half`` and store what lies inside the image."""
        flags, width = arg(args, 28), arg(args, 13)
        lo, hi = splat(ld_f64(args + 8 * 29)), splat(ld_f64(args + 8 * 30))
        for i in range(rows):
            for j in range(cols):
                value = load(half + (i * m + j) * pixel)
                at = (i * width + j) * pixel
                if res != 0:
                    value = value + load(res + at)
                if flags & 1:
                    value = at_least(lo, value)
                if flags & 2:
                    value = at_most(hi, value)
                store(y + at, value)
            if arg(args, 27) != 0:
                put(post, T_C, y + i * width * pixel)
                call_kernel(arg(args, 27), post, cols, 1, 0)

    @register_jitable
    def transform_output(
        args: int, post: int, first: int, count: int, block: int, last_block: int, scratch: int
    ) -> None:
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        across, tiles = (ow_n + m - 1) // m, arg(args, 31)
        per_image = across * ((oh_n + m - 1) // m)
        half = scratch + n * n * pixel
        row = (arg(args, 33) * nv + 1) * pixel
        point = tiles * row
        source = scratch + 2 * n * n * pixel + n * n * tiles * (arg(args, 6) + 1) * pixel
        for q in range(count):
            image, place = (first + q) // per_image, (first + q) % per_image
            oh, ow = place // across * m, place % across * m
            rows, cols = min(m, oh_n - oh), min(m, ow_n - ow)
            for b in range(block, last_block):
                s = source + q * row + (b - block) * pixel
                for i in range(n):
                    backward(s + i * n * point, point, half + i * m * pixel, pixel)
                for j in range(m):
                    backward(half + j * pixel, m * pixel, scratch + j * pixel, m * pixel)
                if arg(args, 3) != 0:
                    bias = load(arg(args, 3) + b * pixel)
                    for i in range(m * m):
                        store(scratch + i * pixel, load(scratch + i * pixel) + bias)
                at = ((b * oh_n + oh) * ow_n + ow) * pixel
                y = arg(args, 2) + image * arg(args, 38) + at
                res = arg(args, 4)
                if res != 0:
                    res += image * arg(args, 39) + at
                write_tile(args, post, scratch, y, res, rows, cols)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, post = _words(), _words()
        tiles, pb = arg(args, 31), arg(args, 33)
        scratch = arg(args, 34) + worker * arg(args, 35)
        out_blocks = arg(args, 7)
        panels = (out_blocks + nv - 1) // nv
        panel_blocks = (panels + pb - 1) // pb
        across, down = (arg(args, 13) + m - 1) // m, (arg(args, 12) + m - 1) // m
        total = arg(args, 5) * across * down
        put(t, T_N0, 1)
        put(t, T_N1, 1)
        put(t, T_N2, 1)
        put(t, T_AKS, item)
        put(t, T_BJS, pixel)
        put(t, T_CJS, pixel)
        put(t, T_INIT, 0)
        put(t, T_RBIAS, 0)
        put(t, T_RES, 0)
        put(t, T_FLAGS, 0)
        put(post, T_CRS, pixel)
        put(post, T_CJS, pixel)
        put(post, T_LO, arg(args, 29))
        put(post, T_HI, arg(args, 30))
        a = scratch + 2 * n * n * pixel
        c = a + n * n * tiles * (arg(args, 6) + 1) * pixel
        transformed = -1
        for unit in range(begin, end):
            block, panel = unit // panel_blocks, unit % panel_blocks * pb
            first = block * tiles
            count = min(tiles, total - first)
            if block != transformed:
                transform_input(args, first, count, scratch)
                transformed = block
            last_panel = min(panels, panel + pb)
            multiply(args, t, panel, last_panel, count, a, c)
            last_block = min(out_blocks, last_panel * nv)
            transform_output(args, post, first, count, panel * nv, last_block, scratch)

    return kernel
