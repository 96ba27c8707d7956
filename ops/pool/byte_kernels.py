"""Kernel of MaxPool of bytes in blocks of 16 channels: maxima over rows, then over columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import vec

from .arguments import PoolBytesArguments
from .kernels import window_taps

_BLOCK = 16  # channels of a block: `tile_int.BLOCK`
_WIDE = 32  # bytes of a step over a row: a vector of 256 bits


def max_pool(*, dtype: str) -> Callable[..., None]:
    """Return the kernel of `PoolBytesArguments`.

    A window of h x w pixels takes h + w maxima, where `kernels.window` takes h * w.

    Args:
        dtype: ``"int8"`` or ``"uint8"``.
    """
    arguments = view_of(PoolBytesArguments)
    block = vec(dtype, _BLOCK)
    load, store, most, splat = block.load, block.store, block.max, block.splat
    least = int(np.iinfo(dtype).min)
    down = _rows_reducer(dtype)
    first_tap, end_tap = window_taps()

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        height, row = a.image_height, a.image_width * _BLOCK
        oh_n, ow_n, kh, kw = a.output_height, a.output_width, a.kernel_height, a.kernel_width
        dh, dw, step = a.dilation_height, a.dilation_width * _BLOCK, a.stride_width * _BLOCK
        scratch = a.scratch + worker * a.scratch_bytes
        for at in range(0, a.scratch_size, _BLOCK):
            store(scratch + at, splat(least))
        for unit in range(begin, end):
            plane, oh = unit // oh_n, unit % oh_n
            h = oh * a.stride_height - a.pad_height
            first, last = first_tap(h, dh), end_tap(h, dh, kh, height)
            x = a.x + plane * height * row + (h + first * dh) * row
            down(x, row, last - first, dh * row, scratch + a.pad_width * _BLOCK)
            y = a.y + unit * ow_n * _BLOCK
            for j in range(ow_n):
                window = scratch + j * step
                found = load(window)
                for k in range(1, kw):
                    found = most(load(window + k * dw), found)
                store(y + j * _BLOCK, found)

    return kernel


def _rows_reducer(dtype: str) -> Any:
    """Return ``f(x, row, count, step, to)``: the maximum over rows of ``row`` bytes."""
    v, block = vec(dtype, _WIDE), vec(dtype, _BLOCK)
    load, store, most, splat = v.load, v.store, v.max, v.splat
    load_block, store_block, most_block = block.load, block.store, block.max
    splat_block, least = block.splat, int(np.iinfo(dtype).min)

    @register_jitable
    def down(x: int, row: int, count: int, step: int, to: int) -> None:
        """Write the largest of ``count`` rows at ``x``, ``step`` bytes apart, to ``to``."""
        at = 0
        while at + _WIDE <= row:
            found = splat(least)
            for i in range(count):
                found = most(load(x + i * step + at), found)
            store(to + at, found)
            at += _WIDE
        if at < row:
            last = splat_block(least)
            for i in range(count):
                last = most_block(load_block(x + i * step + at), last)
            store_block(to + at, last)

    return down
