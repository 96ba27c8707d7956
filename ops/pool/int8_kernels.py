"""Kernel of MaxPool of bytes, in blocks of 16 channels or in the plain layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld_i8, ld_u8, st_i8, vec

from .arguments import PoolInt8Arguments
from .kernels import window_taps

_BLOCK = 16  # channels of a block: `tile_int.BLOCK`
_WIDE = 32  # bytes of a step over a row: a vector of 256 bits


def max_pool(*, dtype: str, blocked: bool) -> Callable[..., None]:
    """Return the kernel of `PoolInt8Arguments`: the maximum over columns, then over rows.

    Args:
        dtype: ``"int8"`` or ``"uint8"``.
        blocked: Planes are blocks of 16 channels.
    """
    arguments = view_of(PoolInt8Arguments)
    wide = vec(dtype, _WIDE)
    store, splat = wide.store, wide.splat
    least, pixel = -128 if dtype == "int8" else 0, _BLOCK if blocked else 1
    down, along = _rows_reducer(dtype), _windows_reducer(dtype, blocked)
    first_tap, end_tap = window_taps()

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        height, width = a.image_height, a.image_width
        oh_n, ow_n, kh, kw = a.output_height, a.output_width, a.kernel_height, a.kernel_width
        dh, row, left = a.dilation_height, width * pixel, a.pad_width * pixel
        scratch = a.scratch + worker * a.scratch_bytes
        for at in range(0, a.scratch_size, _WIDE):
            store(scratch + at, splat(least))
        for unit in range(begin, end):
            plane, oh = unit // oh_n, unit % oh_n
            h = oh * a.stride_height - a.pad_height
            first, last = first_tap(h, dh), end_tap(h, dh, kh, height)
            x = a.x + plane * height * row
            down(x, row, (h + first * dh) * row, last - first, dh * row, scratch + left)
            y = a.y + unit * ow_n * pixel
            along(scratch, y, ow_n, kw, a.stride_width, a.dilation_width)

    return kernel


def _rows_reducer(dtype: str) -> Any:
    """Return ``f(x, row, first, count, step, to)``: the maximum over rows of ``row`` bytes."""
    v = vec(dtype, _WIDE)
    load, store, splat, most = v.load, v.store, v.splat, v.max
    load1 = ld_i8 if dtype == "int8" else ld_u8
    least = -128 if dtype == "int8" else 0

    @register_jitable
    def down(x: int, row: int, first: int, count: int, step: int, to: int) -> None:
        """Write the largest of ``count`` rows, ``step`` apart from the one at ``x + first``."""
        at = 0
        while at < row:
            if at + _WIDE > row and row >= _WIDE:
                at = row - _WIDE  # the last vector overlaps the one before
            if at + _WIDE <= row:
                found = splat(least)
                for i in range(count):
                    found = most(load(x + first + i * step + at), found)
                store(to + at, found)
                at += _WIDE
            else:
                one = least
                for i in range(count):
                    one = max(one, load1(x + first + i * step + at))
                st_i8(to + at, one)
                at += 1

    return down


def _windows_reducer(dtype: str, blocked: bool) -> Any:
    """Return ``f(row, y, outputs, taps, stride, dilation)``: the maximum over columns of a row."""
    v, block = vec(dtype, _WIDE), vec(dtype, _BLOCK)
    load, store, most = v.load, v.store, v.max
    load_block, store_block, most_block = block.load, block.store, block.max
    load1 = ld_i8 if dtype == "int8" else ld_u8
    pixel = _BLOCK if blocked else 1

    @register_jitable
    def along(row: int, y: int, outputs: int, taps: int, stride: int, dilation: int) -> None:
        """Write the largest of each window of a row.

        Args:
            row: Address of the row, with its padding.
            y: Address of the results.
            outputs: Number of windows.
            taps: Pixels of a window.
            stride: Pixels between windows.
            dilation: Pixels between taps.
        """
        j = 0
        while not blocked and stride == 1 and j + _WIDE <= outputs:
            found = load(row + j)
            for k in range(1, taps):
                found = most(load(row + j + k * dilation), found)
            store(y + j, found)
            j += _WIDE
        while j < outputs:
            at = row + j * stride * pixel
            if blocked:
                sixteen = load_block(at)
                for k in range(1, taps):
                    sixteen = most_block(load_block(at + k * dilation * pixel), sixteen)
                store_block(y + j * pixel, sixteen)
            else:
                one = load1(at)
                for k in range(1, taps):
                    one = max(one, load1(at + k * dilation))
                st_i8(y + j, one)
            j += 1

    return along
