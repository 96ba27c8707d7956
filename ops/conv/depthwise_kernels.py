"""Kernels of depthwise convolution (each channel has its own filter) in the blocked layout."""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel
from subgraph.engine.codegen.tile import rows_of, stack_words
from subgraph.engine.codegen.tiling import (
    TileBlock,
)

from .arguments import DepthwiseArguments, WindowRowsArguments
from .copy_kernels import Box, strip_copier

_tile_block = stack_block(TileBlock)
_box = stack_block(Box)
_NEAR = 256  # vectors of outputs that fit in the L1 cache until their activation (estimate)
_zeros = stack_words(8)  # as many bytes as the widest vector


@register_jitable
def taps_inside(first: int, last: int, taps: int, dilation: int, size: int) -> tuple[int, int]:
    """Return the first tap of neighbouring windows inside the image, and the number of such taps.

    Args:
        first: Pixel that the first tap of the first window reads.
        last: Pixel that the first tap of the last window reads.
        taps: Taps along the axis.
        dilation: Pixels from a tap to the next one.
        size: Pixels of the image along the axis.
    """
    begin = max(0, (dilation - 1 - last) // dilation)
    return begin, max(0, min(taps, (size - first + dilation - 1) // dilation) - begin)


def depthwise(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the kernel of `DepthwiseArguments`.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        mr: Most pixels of a tile.
    """
    arguments = view_of(DepthwiseArguments)
    item = item_bytes(dtype)
    pixel = lanes * item
    copy_strip = strip_copier(dtype, lanes, False)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t, where = _tile_block(), _box()
        blocks = a.blocks
        depth, height, width = a.image_depth, a.image_height, a.image_width
        od_n, oh_n, ow_n = a.output_depth, a.output_height, a.output_width
        kd, kh, kw = a.kernel_depth, a.kernel_height, a.kernel_width
        sd, sh, sw = a.stride_depth, a.stride_height, a.stride_width
        dd, dh, dw = a.dilation_depth, a.dilation_height, a.dilation_width
        rb, scratch = a.rows, a.scratch
        if scratch != 0:
            scratch += worker * a.scratch_bytes
        tile, activate = a.tile, a.activation
        row_blocks = (oh_n + rb - 1) // rb
        taps = kd * kh * kw
        t.a_row = sw * pixel
        t.a_step = dw * pixel
        t.b_step = pixel
        t.outer_count = kd
        t.inner_count = 1
        t.outer_b = kh * kw * pixel
        t.middle_b = kw * pixel
        along, down = a.y_column * pixel, a.y_row * pixel
        t.c_row = along
        t.residual_row = along
        t.flags = a.flags
        t.low = a.low
        t.high = a.high
        for unit in range(begin, end):
            oh = unit % row_blocks * rb
            od = unit // row_blocks % od_n
            block = unit // row_blocks // od_n % blocks
            image = unit // row_blocks // od_n // blocks
            rows = min(rb, oh_n - oh)
            x = a.x + image * a.x_image + block * depth * height * width * pixel
            d0, h0, w0 = od * sd - a.pad_depth, oh * sh - a.pad_height, -a.pad_width
            row, plane = width * pixel, height * width * pixel
            if scratch == 0:
                x += d0 * plane + h0 * row + w0 * pixel
            else:
                where.depth = d0
                where.row = h0
                where.column = w0
                where.depths = (kd - 1) * dd + 1
                where.rows = (rows - 1) * sh + (kh - 1) * dh + 1
                where.columns = (ow_n - 1) * sw + (kw - 1) * dw + 1
                copy_strip(a, 1, x, scratch, where)
                row = where.columns * pixel
                plane = where.rows * row
                x = scratch
            t.outer_a = dd * plane
            t.middle_a = dh * row
            t.start = a.bias + block * pixel if a.bias != 0 else 0
            out = (block * a.y_block + od * a.y_plane) * pixel + oh * down + a.y_offset
            y = a.y + image * a.y_image + out
            res = a.residual
            if res != 0:
                res += image * a.residual_image + out
            for r in range(rows):
                first, count = taps_inside(h0 + r * sh, h0 + r * sh, kh, dh, height)
                t.middle_count = count
                above = first * dh * row
                weights = a.weights + (block * taps + first * kw) * pixel
                i = 0
                while i < ow_n:
                    m = rows_of(ow_n - i, mr)
                    at = r * down + i * along
                    left = w0 + i * sw
                    first, count = taps_inside(left, left + (m - 1) * sw, kw, dw, width)
                    t.steps = count
                    t.b = weights + first * pixel
                    t.a = x + r * sh * row + above + (i * sw + first * dw) * pixel
                    t.c = y + at
                    t.residual = res + at if res != 0 else 0
                    call_kernel(tile, t, m, 1, 0)
                    if activate != 0:
                        call_kernel(activate, t, m, 1, 0)
                    i += m

    return kernel


def windows(*, dtype: str, lanes: int, mr: int) -> Callable[..., None]:
    """Return the kernel of `WindowRowsArguments`: convolution of single channels or small groups.

    It loads each pixel once for all outputs of its row, and needs no scratch.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of a block.
        mr: Most windows of a row of windows.
    """
    arguments = view_of(WindowRowsArguments)
    pixel = lanes * item_bytes(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        blocks = a.blocks
        height, width = a.image_height, a.image_width
        oh_n, ow_n = a.output_height, a.output_width
        kh, kw = a.kernel_height, a.kernel_width
        sh, dh = a.stride_height, a.dilation_height
        ph, pw = a.pad_height, a.pad_width
        rb = a.rows
        windows, activate = a.tile, a.activation
        row_blocks = (oh_n + rb - 1) // rb
        row_weights = a.group_channels * kw * pixel
        t.middle_a = dh * width * pixel
        t.middle_b = row_weights
        t.c_row = pixel
        t.flags = a.flags
        t.low = a.low
        t.high = a.high
        t.zeros = _zeros()
        tile = rows_of(ow_n, mr)
        tiles = (ow_n + tile - 1) // tile
        t.outer_count = tiles
        t.inner_count = (ow_n - tile) * pixel
        t.a_row = sh * width * pixel
        t.c_row = ow_n * pixel
        t.left = pw
        t.right = max(0, (ow_n - 1) * a.stride_width - pw + kw - width)
        # Rows whose windows lie inside the image run in one call; with an activation, as many as
        # stay in the L1 cache until it reads them.
        middle = (ph + sh - 1) // sh
        after = max(middle, (height + ph - (kh - 1) * dh - 1) // sh + 1)
        most = oh_n if activate == 0 else max(1, _NEAR // ow_n)
        for unit in range(begin, end):
            oh = unit % row_blocks * rb
            block = unit // row_blocks % blocks
            image = unit // row_blocks // blocks
            x = a.x + image * a.x_image + (block * height * width - pw) * pixel
            weights = a.weights + block * kh * row_weights
            t.start = a.bias + block * pixel if a.bias != 0 else 0
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
                y = a.y + image * a.y_image + out
                res = a.residual
                t.middle_count = last - first
                t.a = x + (h + first * dh) * width * pixel
                t.b = weights + first * row_weights
                t.c = y
                t.residual = res + image * a.residual_image + out if res != 0 else 0
                call_kernel(windows, t, tile, count, 0)
                if activate != 0:
                    t.c_row = pixel
                    call_kernel(activate, t, count * ow_n, 1, 0)
                    t.c_row = ow_n * pixel
                r += count

    return kernel
