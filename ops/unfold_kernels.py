"""Kernels between images and columns of windows: DeformConv's samples, Col2Im's sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.simd import ld, st, vec

from .movement_kernels import arg
from .sampling_kernels import below

Function = Callable[..., Any]
_REAL: dict[str, Any] = {"float32": np.float32, "float64": np.float64}
_ITEM = {"float32": 4, "float64": 8}


def deform_columns(*, dtype: str, masked: bool) -> Function:
    """Return the kernel that samples images where offsets say, for each tap of a window.

    Pixels outside an image are zero.

    Words: ``0 x [images, channels, H, W], 1 offsets [images, groups * taps * 2, down, across],
    2 mask [images, groups * taps, down, across], 3 columns [images, channels, taps, down * across],
    4 channels, 5 H, 6 W, 7 groups of offsets, 8 taps down, 9 taps across, 10 down, 11 across,
    12 and 13 strides, 14 and 15 pads, 16 and 17 dilations``. Units: images * groups * taps.
    """
    load, store = ld(dtype), st(dtype)
    item, real = _ITEM[dtype], _REAL[dtype]

    @register_jitable
    def pixel(image: int, y: int, x: int, height: int, width: int) -> Any:
        if y < 0 or y >= height or x < 0 or x >= width:
            return real(0)
        return load(image + (y * width + x) * item)

    @register_jitable
    def sample(image: int, y: Any, x: Any, height: int, width: int) -> Any:
        y0, x0 = below(float(y)), below(float(x))
        fy, fx = y - real(y0), x - real(x0)
        top = pixel(image, y0, x0, height, width) * (real(1) - fx)
        top += pixel(image, y0, x0 + 1, height, width) * fx
        low = pixel(image, y0 + 1, x0, height, width) * (real(1) - fx)
        low += pixel(image, y0 + 1, x0 + 1, height, width) * fx
        return top * (real(1) - fy) + low * fy

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, height, width, groups = arg(args, 4), arg(args, 5), arg(args, 6), arg(args, 7)
        across_taps, down, across = arg(args, 9), arg(args, 10), arg(args, 11)
        taps, places = arg(args, 8) * across_taps, down * across
        each = channels // groups
        for unit in range(begin, end):
            tap, group = unit % taps, unit // taps % groups
            first = unit // (taps * groups) * channels + group * each
            offset = arg(args, 1) + unit * 2 * places * item
            weight = arg(args, 2) + unit * places * item
            for i in range(down):
                for j in range(across):
                    place = i * across + j
                    y = real(i * arg(args, 12) - arg(args, 14) + tap // across_taps * arg(args, 16))
                    x = real(j * arg(args, 13) - arg(args, 15) + tap % across_taps * arg(args, 17))
                    y += load(offset + place * item)
                    x += load(offset + (places + place) * item)
                    factor = load(weight + place * item) if masked else real(1)
                    # Also false for NaN: such a place is nowhere.
                    near = y > -1 and y < height and x > -1 and x < width
                    for c in range(each):
                        to = arg(args, 3) + (((first + c) * taps + tap) * places + place) * item
                        found = real(0)
                        if near:
                            image = arg(args, 0) + (first + c) * height * width * item
                            found = sample(image, y, x, height, width) * factor
                        store(to, found)

    return kernel


def columns_to_image(*, dtype: str, lanes: int) -> Function:
    """Return the kernel that adds windows up to the image of which they are columns.

    Words: ``0 columns [images, channels, taps, windows], 1 y [images, channels, *image], 2 to 4
    image, 5 to 7 taps, 8 to 10 windows, 11 to 13 strides, 14 to 16 pads, 17 to 19 dilations``,
    three axes each. Units: images * channels.
    """
    load, store = ld(dtype), st(dtype)
    v = vec(dtype, lanes)
    load_v, store_v, load_n, store_n = v.load, v.store, v.load_n, v.store_n
    item, real = _ITEM[dtype], _REAL[dtype]

    @register_jitable
    def add_row(x: int, to: int, count: int, step: int) -> None:
        """Add ``count`` elements to every ``step``-th one from ``to``."""
        k = 0
        while step == 1 and k + lanes <= count:
            store_v(to + k * item, load_v(to + k * item) + load_v(x + k * item))
            k += lanes
        if step == 1 and k < count:
            left, place = count - k, to + k * item
            store_n(place, left, load_n(place, left) + load_n(x + k * item, left))
            k = count
        while k < count:
            place = to + k * step * item
            store(place, load(place) + load(x + k * item))
            k += 1

    @register_jitable
    def at(args: int, axis: int, window: int, tap: int) -> int:
        return window * arg(args, 11 + axis) - arg(args, 14 + axis) + tap * arg(args, 17 + axis)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        depth, height, width = arg(args, 2), arg(args, 3), arg(args, 4)
        pixels = depth * height * width
        taps = arg(args, 5) * arg(args, 6) * arg(args, 7)
        windows = arg(args, 8) * arg(args, 9) * arg(args, 10)
        for unit in range(begin, end):
            image = arg(args, 1) + unit * pixels * item
            for p in range(pixels):
                store(image + p * item, real(0))
            for tap in range(taps):
                a = tap // (arg(args, 6) * arg(args, 7))
                b, c = tap // arg(args, 7) % arg(args, 6), tap % arg(args, 7)
                x = arg(args, 0) + (unit * taps + tap) * windows * item
                begin_x, step = at(args, 2, 0, c), arg(args, 13)
                # Of a row those windows whose tap lies inside the image.
                first = max(0, (step - 1 - begin_x) // step)
                count = min(arg(args, 10), (width - begin_x + step - 1) // step) - first
                for i in range(arg(args, 8)):
                    z = at(args, 0, i, a)
                    for j in range(arg(args, 9)):
                        y = at(args, 1, j, b)
                        row = (i * arg(args, 9) + j) * arg(args, 10)
                        if z < 0 or z >= depth or y < 0 or y >= height:
                            continue
                        to = image + ((z * height + y) * width + begin_x + first * step) * item
                        add_row(x + (row + first) * item, to, count, step)

    return kernel
