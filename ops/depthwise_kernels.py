"""Depthwise convolution in the blocked layout: every channel has its own filter."""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.simd import call_kernel, vec
from subgraph.engine.tile import arg, item_bytes, put, rows_of, stack_words
from subgraph.engine.tiling import (
    T_A,
    T_AKS,
    T_ARS,
    T_B,
    T_BKS,
    T_C,
    T_CRS,
    T_FLAGS,
    T_HI,
    T_INIT,
    T_KIN,
    T_LO,
    T_N0,
    T_N1,
    T_N2,
    T_RES,
    T_RRS,
    T_SA0,
    T_SA1,
    T_SB0,
    T_SB1,
    T_WORDS,
)

from .conv_kernels import strip_copier

_words = stack_words(T_WORDS)
_where = stack_words(8)


def depthwise(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the depthwise convolution; one unit is a block of rows of one block of channels.

    Weights are ``[C / lanes][kd][kh][kw][lanes]``. The words are numbered as those of
    ``conv_kernels.direct``; not used are 5, 7, 32, 33 and 36::

        0 x  1 weights  2 y  3 bias (padded to whole blocks; 0: none)  4 residual (0: none)
        6 channel blocks
        8..10 input D H W  11..13 output D H W  14..16 kernel D H W  17..19 strides
        20..22 dilations  23..25 pads before (D H W)
        26 depthwise tile  27 post kernel (0: none)  28 F_* flags  29 lower  30 upper (float64)
        31 output rows of a unit
        34 scratch (0: x is read in place: no pads)  35 its bytes per worker
        37 bytes between images of x  38 of y  39 of the residual

    A worker's scratch holds ``reach(D) * reach(H) * reach(W)`` blocks (see ``direct``).
    Units: N * channel blocks * output D * row blocks.
    """
    item = item_bytes(dtype)
    pixel = lanes * item
    copy_strip = strip_copier(dtype, lanes, False)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, where = _words(), _where()
        blocks = arg(args, 6)
        depth, height, width = arg(args, 8), arg(args, 9), arg(args, 10)
        od_n, oh_n, ow_n = arg(args, 11), arg(args, 12), arg(args, 13)
        kd, kh, kw = arg(args, 14), arg(args, 15), arg(args, 16)
        sd, sh, sw = arg(args, 17), arg(args, 18), arg(args, 19)
        dd, dh, dw = arg(args, 20), arg(args, 21), arg(args, 22)
        rb, scratch = arg(args, 31), arg(args, 34)
        if scratch != 0:
            scratch += worker * arg(args, 35)
        tile, post = arg(args, 26), arg(args, 27)
        row_blocks = (oh_n + rb - 1) // rb
        taps = kd * kh * kw
        put(t, T_ARS, sw * pixel)
        put(t, T_AKS, dw * pixel)
        put(t, T_BKS, pixel)
        put(t, T_N0, kd)
        put(t, T_N1, kh)
        put(t, T_N2, 1)
        put(t, T_KIN, kw)
        put(t, T_SB0, kh * kw * pixel)
        put(t, T_SB1, kw * pixel)
        put(t, T_CRS, pixel)
        put(t, T_RRS, pixel)
        put(t, T_FLAGS, arg(args, 28))
        put(t, T_LO, arg(args, 29))
        put(t, T_HI, arg(args, 30))
        for unit in range(begin, end):
            oh = unit % row_blocks * rb
            od = unit // row_blocks % od_n
            block = unit // row_blocks // od_n % blocks
            image = unit // row_blocks // od_n // blocks
            rows = min(rb, oh_n - oh)
            x = arg(args, 0) + image * arg(args, 37) + block * depth * height * width * pixel
            d0, h0, w0 = od * sd - arg(args, 23), oh * sh - arg(args, 24), -arg(args, 25)
            row, plane = width * pixel, height * width * pixel
            if scratch == 0:
                x += d0 * plane + h0 * row
            else:
                put(where, 0, d0)
                put(where, 1, h0)
                put(where, 2, w0)
                put(where, 3, (kd - 1) * dd + 1)
                put(where, 4, (rows - 1) * sh + (kh - 1) * dh + 1)
                put(where, 5, (ow_n - 1) * sw + (kw - 1) * dw + 1)
                copy_strip(args, 1, x, scratch, where)
                row = arg(where, 5) * pixel
                plane = arg(where, 4) * row
                x = scratch
            put(t, T_SA0, dd * plane)
            put(t, T_SA1, dh * row)
            put(t, T_B, arg(args, 1) + block * taps * pixel)
            put(t, T_INIT, arg(args, 3) + block * pixel if arg(args, 3) != 0 else 0)
            out = ((block * od_n + od) * oh_n + oh) * ow_n * pixel
            y = arg(args, 2) + image * arg(args, 38) + out
            res = arg(args, 4)
            if res != 0:
                res += image * arg(args, 39) + out
            for r in range(rows):
                i = 0
                while i < ow_n:
                    m = rows_of(ow_n - i, mr)
                    at = (r * ow_n + i) * pixel
                    put(t, T_A, x + r * sh * row + i * sw * pixel)
                    put(t, T_C, y + at)
                    put(t, T_RES, res + at if res != 0 else 0)
                    call_kernel(tile, t, m, 1, 0)
                    if post != 0:
                        call_kernel(post, t, m, 1, 0)
                    i += m

    return kernel


def windows(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the depthwise convolution over tiles that load every pixel once for all its outputs.

    Words and units are those of ``depthwise``, with these differences: word 26 is the window tile
    of ``mr`` pixels, kernel D is 1, there is no dilation along W, and

        33 columns of what is copied: 0: only what meets the border, tile by tile; else whole strips
        34 scratch (always)  35 its bytes per worker

    A worker's scratch holds a strip (``reach(H)`` rows of word 33 blocks), or what one tile reads:
    ``kh`` rows of ``(mr - 1) * sw + kw`` blocks.
    """
    item = item_bytes(dtype)
    pixel = lanes * item
    v = vec(dtype, lanes)
    load, store, zero = v.load, v.store, v.zero

    @register_jitable
    def copy_row(row: int, width: int, first: int, count: int, to: int) -> None:
        """Copy pixels [first, first + count) of a row; what lies outside it is zero."""
        left = min(max(-first, 0), count)
        right = max(min(width - first, count), left)
        for i in range(left):
            store(to + i * pixel, zero())
        source = row + first * pixel
        for i in range(left, right):
            store(to + i * pixel, load(source + i * pixel))
        for i in range(right, count):
            store(to + i * pixel, zero())

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t = _words()
        blocks = arg(args, 6)
        height, width = arg(args, 9), arg(args, 10)
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        kh, kw = arg(args, 15), arg(args, 16)
        sh, sw = arg(args, 18), arg(args, 19)
        dh = arg(args, 21)
        ph, pw = arg(args, 24), arg(args, 25)
        rb, columns = arg(args, 31), arg(args, 33)
        scratch = arg(args, 34) + worker * arg(args, 35)
        tile, post = arg(args, 26), arg(args, 27)
        row_blocks = (oh_n + rb - 1) // rb
        put(t, T_SB1, kw * pixel)
        put(t, T_CRS, pixel)
        put(t, T_RRS, pixel)
        put(t, T_FLAGS, arg(args, 28))
        put(t, T_LO, arg(args, 29))
        put(t, T_HI, arg(args, 30))
        for unit in range(begin, end):
            oh = unit % row_blocks * rb
            block = unit // row_blocks % blocks
            image = unit // row_blocks // blocks
            x = arg(args, 0) + image * arg(args, 37) + block * height * width * pixel
            weights = arg(args, 1) + block * kh * kw * pixel
            put(t, T_INIT, arg(args, 3) + block * pixel if arg(args, 3) != 0 else 0)
            rows = min(rb, oh_n - oh)
            h0 = oh * sh - ph
            if columns != 0:
                to = scratch
                for h in range(h0, h0 + (rows - 1) * sh + (kh - 1) * dh + 1):
                    inside = width if 0 <= h < height else -columns
                    copy_row(x + h * width * pixel, inside, -pw, columns, to)
                    to += columns * pixel
            for r in range(rows):
                out = ((block * oh_n + oh + r) * ow_n) * pixel
                y = arg(args, 2) + image * arg(args, 38) + out
                res = arg(args, 4)
                if res != 0:
                    res += image * arg(args, 39) + out
                h = h0 + r * sh
                first = (-h + dh - 1) // dh if h < 0 else 0
                last = min(kh, (height - h + dh - 1) // dh)
                if columns != 0:
                    first, last = 0, kh
                put(t, T_N1, last - first)
                h += first * dh
                i = 0
                while i < ow_n:
                    m = rows_of(ow_n - i, mr)
                    w = i * sw - pw
                    count = (m - 1) * sw + kw
                    if columns != 0:
                        put(t, T_A, scratch + (r * sh * columns + i * sw) * pixel)
                        put(t, T_SA1, dh * columns * pixel)
                    elif w >= 0 and w + count <= width:
                        put(t, T_A, x + (h * width + w) * pixel)
                        put(t, T_SA1, dh * width * pixel)
                    else:
                        for k in range(last - first):
                            row = x + (h + k * dh) * width * pixel
                            copy_row(row, width, w, count, scratch + k * count * pixel)
                        put(t, T_A, scratch)
                        put(t, T_SA1, count * pixel)
                    put(t, T_B, weights + first * kw * pixel)
                    put(t, T_C, y + i * pixel)
                    put(t, T_RES, res + i * pixel if res != 0 else 0)
                    call_kernel(tile, t, m, 1, 0)
                    if post != 0:
                        call_kernel(post, t, m, 1, 0)
                    i += m

    return kernel
