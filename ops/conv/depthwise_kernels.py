"""Depthwise convolution in the blocked layout: every channel has its own filter."""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.emit import item_bytes
from subgraph.engine.codegen.simd import call_kernel
from subgraph.engine.codegen.tile import arg, put, rows_of, stack_words
from subgraph.engine.codegen.tiling import (
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
    T_LEFT,
    T_LO,
    T_N0,
    T_N1,
    T_N2,
    T_RES,
    T_RIGHT,
    T_RRS,
    T_SA0,
    T_SA1,
    T_SB0,
    T_SB1,
    T_WORDS,
    T_ZERO,
)

from .copy_kernels import strip_copier

_words = stack_words(T_WORDS)
_where = stack_words(8)
_NEAR = 256  # outputs that wait in the first cache for their activation
_zeros = stack_words(8)  # as many bytes as the widest vector


@register_jitable
def taps_inside(first: int, last: int, taps: int, dilation: int, size: int) -> tuple[int, int]:
    """Return the first tap of some windows that reads a pixel of the image, and how many may.

    ``first`` and ``last`` are where the first tap of the first and of the last window reads.
    """
    begin = max(0, (dilation - 1 - last) // dilation)
    return begin, max(0, min(taps, (size - first + dilation - 1) // dilation) - begin)


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
        40..42 pixels of y between outputs along W, H, D  43 between blocks of channels
        44 bytes from the start of an image of y to its first output

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
        put(t, T_N2, 1)
        put(t, T_SB0, kh * kw * pixel)
        put(t, T_SB1, kw * pixel)
        along, down = arg(args, 40) * pixel, arg(args, 41) * pixel
        put(t, T_CRS, along)
        put(t, T_RRS, along)
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
                x += d0 * plane + h0 * row + w0 * pixel
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
            put(t, T_INIT, arg(args, 3) + block * pixel if arg(args, 3) != 0 else 0)
            out = (block * arg(args, 43) + od * arg(args, 42)) * pixel + oh * down + arg(args, 44)
            y = arg(args, 2) + image * arg(args, 38) + out
            res = arg(args, 4)
            if res != 0:
                res += image * arg(args, 39) + out
            for r in range(rows):
                first, count = taps_inside(h0 + r * sh, h0 + r * sh, kh, dh, height)
                put(t, T_N1, count)
                above = first * dh * row
                weights = arg(args, 1) + (block * taps + first * kw) * pixel
                i = 0
                while i < ow_n:
                    m = rows_of(ow_n - i, mr)
                    at = r * down + i * along
                    left = w0 + i * sw
                    first, count = taps_inside(left, left + (m - 1) * sw, kw, dw, width)
                    put(t, T_KIN, count)
                    put(t, T_B, weights + first * pixel)
                    put(t, T_A, x + r * sh * row + above + (i * sw + first * dw) * pixel)
                    put(t, T_C, y + at)
                    put(t, T_RES, res + at if res != 0 else 0)
                    call_kernel(tile, t, m, 1, 0)
                    if post != 0:
                        call_kernel(post, t, m, 1, 0)
                    i += m

    return kernel


def windows(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the depthwise convolution that loads every pixel once for all outputs of its row.

    Words and units are those of ``depthwise``, with these differences: word 26 is the row of
    windows (``subgraph.engine.codegen.strip``), kernel D is 1, there is no dilation along W, at
    most half a window lies outside the image along W, there is no scratch, and y has no other
    pixels. Groups may have more channels than one, as many inputs as outputs: word 5 is their
    number, which divides ``lanes``, and weights are
    ``[C / lanes][kh][channel of a group][kw][lanes]``.
    """
    pixel = lanes * item_bytes(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t = _words()
        blocks = arg(args, 6)
        height, width = arg(args, 9), arg(args, 10)
        oh_n, ow_n = arg(args, 12), arg(args, 13)
        kh, kw = arg(args, 15), arg(args, 16)
        sh, dh = arg(args, 18), arg(args, 21)
        ph, pw = arg(args, 24), arg(args, 25)
        rb = arg(args, 31)
        windows, post = arg(args, 26), arg(args, 27)
        row_blocks = (oh_n + rb - 1) // rb
        row_weights = arg(args, 5) * kw * pixel
        put(t, T_SA1, dh * width * pixel)
        put(t, T_SB1, row_weights)
        put(t, T_CRS, pixel)
        put(t, T_FLAGS, arg(args, 28))
        put(t, T_LO, arg(args, 29))
        put(t, T_HI, arg(args, 30))
        put(t, T_ZERO, _zeros())
        tile = rows_of(ow_n, mr)
        tiles = (ow_n + tile - 1) // tile
        put(t, T_N0, tiles)
        put(t, T_N2, (ow_n - tile) * pixel)
        put(t, T_ARS, sh * width * pixel)
        put(t, T_CRS, ow_n * pixel)
        put(t, T_LEFT, pw)
        put(t, T_RIGHT, max(0, (ow_n - 1) * arg(args, 19) - pw + kw - width))
        # Rows between those that meet the border; all at once, or few that are still near.
        middle = (ph + sh - 1) // sh
        after = max(middle, (height + ph - (kh - 1) * dh - 1) // sh + 1)
        most = oh_n if post == 0 else max(1, _NEAR // ow_n)
        for unit in range(begin, end):
            oh = unit % row_blocks * rb
            block = unit // row_blocks % blocks
            image = unit // row_blocks // blocks
            x = arg(args, 0) + image * arg(args, 37) + (block * height * width - pw) * pixel
            weights = arg(args, 1) + block * kh * row_weights
            put(t, T_INIT, arg(args, 3) + block * pixel if arg(args, 3) != 0 else 0)
            stop = min(oh + rb, oh_n)
            r = oh
            while r < stop:
                h = r * sh - ph
                first, last, count = 0, kh, 1
                if r >= middle and r < after:
                    count = min(most, min(after, stop) - r)
                else:
                    first = (-h + dh - 1) // dh if h < 0 else 0
                    last = min(kh, (height - h + dh - 1) // dh)
                out = (block * oh_n + r) * ow_n * pixel
                y = arg(args, 2) + image * arg(args, 38) + out
                res = arg(args, 4)
                put(t, T_N1, last - first)
                put(t, T_A, x + (h + first * dh) * width * pixel)
                put(t, T_B, weights + first * row_weights)
                put(t, T_C, y)
                put(t, T_RES, res + image * arg(args, 39) + out if res != 0 else 0)
                call_kernel(windows, t, tile, count, 0)
                if post != 0:
                    put(t, T_CRS, pixel)
                    call_kernel(post, t, count * ow_n, 1, 0)
                    put(t, T_CRS, ow_n * pixel)
                r += count

    return kernel
