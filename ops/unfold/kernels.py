"""Kernels between images and columns of windows: DeformConv's samples, Col2Im's sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.simd import ld, shuffle, st, vec
from subgraph.engine.codegen.tile import stack_words
from subgraph.ops.image.sampling_kernels import below
from subgraph.ops.movement.kernels import arg

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


def columns_to_image(*, dtype: str, lanes: int, stride: int) -> Function:
    """Return the kernel that adds windows up to the image of which they are columns.

    A vector of an image's row, or of every ``stride``-th of its elements, is written once: the sum
    of what the taps that reach it have there.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        stride: Stride along the last axis, 1 or 2; 0: any other.

    Words: ``0 columns [images, channels, taps, windows], 1 y [images, channels, *image], 2 to 4
    image, 5 to 7 taps, 8 to 10 windows, 11 to 13 strides, 14 to 16 pads, 17 to 19 dilations``,
    three axes each, ``20 bias (0: none), 21 channels``. Units: images * channels.
    """
    v = vec(dtype, lanes)
    load, load_m, bcast, zero, places = v.load, v.load_m, v.bcast, v.zero, vec("uint32", lanes)
    number, place = places.iota, places.splat
    store, store_n, item = v.store, v.store_n, v.itemsize
    take, put = ld(dtype), st(dtype)
    lower = shuffle(dtype, lanes, [i // 2 + i % 2 * lanes for i in range(lanes)])
    upper = shuffle(dtype, lanes, [(i + lanes) // 2 + i % 2 * lanes for i in range(lanes)])
    held = stack_words(max(1, lanes * item // 8))

    @register_jitable
    def apart(args: int, axis: int) -> Any:
        """Return how far taps that reach the same places are from each other, and their windows."""
        a, b = arg(args, 11 + axis), arg(args, 17 + axis)
        while b > 0:
            a, b = b, a % b
        return arg(args, 11 + axis) // a, arg(args, 17 + axis) // a

    @register_jitable
    def first(args: int, axis: int, place: int) -> Any:
        """Return the first tap that reaches a place, beyond the last one if none does; its window.

        The image need not have that window.
        """
        step, taps = arg(args, 11 + axis), arg(args, 5 + axis)
        at = place + arg(args, 14 + axis)
        if step == 1:
            return 0, at
        for tap in range(min(step, taps)):
            if at % step == 0:
                return tap, at // step
            at -= arg(args, 17 + axis)
        return taps, 0

    @register_jitable
    def total(args: int, x: int, steps: Any, taps: Any, windows: Any) -> Any:
        """Add what all taps have for a vector, from the first ones, with their windows, on."""
        # A `range` whose step is a variable divides before its first turn.
        wide, n = arg(args, 7), arg(args, 10)
        plane = arg(args, 8) * arg(args, 9) * n * item
        result, a, i = zero(), taps[0], windows[0]
        while a < arg(args, 5):
            b, j = taps[1], windows[1]
            while b < arg(args, 6):
                if 0 <= i < arg(args, 8) and 0 <= j < arg(args, 9):
                    c, w = taps[2], windows[2]
                    row = x + (a * arg(args, 6) + b) * wide * plane
                    row += (i * arg(args, 9) + j) * n * item
                    while c < wide:
                        at = row + c * plane + w * item
                        if w >= 0 and w + lanes <= n:
                            result = result + load(at)
                        elif w < n and w + lanes > 0:
                            # Windows before the first one count as large numbers.
                            result = result + load_m(at, number() + place(w) < place(n))
                        c += steps[2][0]
                        w -= steps[2][1]
                b += steps[1][0]
                j -= steps[1][1]
            a += steps[0][0]
            i -= steps[0][1]
        return result

    @register_jitable
    def row(args: int, x: int, to: int, bias: Any, steps: Any, at: Any, phases: Any) -> None:
        """Write a row of the image, whose first taps and windows along other axes are ``at``."""
        width, step = arg(args, 4), arg(args, 13)
        (a, i), (b, j) = at
        if stride == 0:
            buffer = held()
            for phase in range(min(step, width)):
                c, w = first(args, 2, phase)
                for q in range(0, (width - phase + step - 1) // step, lanes):
                    store(buffer, bias + total(args, x, steps, (a, b, c), (i, j, w + q)))
                    place = to + (phase + q * step) * item
                    for k in range(min(lanes, (width - phase + step - 1) // step - q)):
                        put(place + k * step * item, take(buffer + k * item))
            return
        c, w = phases[0]
        d, u = phases[1]
        for q in range(0, (width + stride - 1) // stride, lanes):
            even = bias + total(args, x, steps, (a, b, c), (i, j, w + q))
            left = width - q * stride
            if stride == 1:
                if left >= lanes:
                    store(to + q * item, even)
                else:
                    store_n(to + q * item, left, even)
                continue
            odd = bias + total(args, x, steps, (a, b, d), (i, j, u + q))
            place = to + 2 * q * item
            if left >= 2 * lanes:
                store(place, lower(even, odd))
                store(place + lanes * item, upper(even, odd))
            else:
                store_n(place, left, lower(even, odd))
                store_n(place + lanes * item, left - lanes, upper(even, odd))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        depth, height, width = arg(args, 2), arg(args, 3), arg(args, 4)
        taps = arg(args, 5) * arg(args, 6) * arg(args, 7)
        windows = arg(args, 8) * arg(args, 9) * arg(args, 10)
        steps = apart(args, 0), apart(args, 1), apart(args, 2)
        phases = first(args, 2, 0), first(args, 2, 1)
        down, along = arg(args, 11), arg(args, 12)
        for unit in range(begin, end):
            x = arg(args, 0) + unit * taps * windows * item
            image = arg(args, 1) + unit * depth * height * width * item
            bias = zero()
            if arg(args, 20) != 0:
                bias = bcast(arg(args, 20) + unit % arg(args, 21) * item)
            for first_slice in range(min(down, depth)):
                a, i = first(args, 0, first_slice)
                for z in range(first_slice, depth, down):
                    for first_row in range(min(along, height)):
                        b, j = first(args, 1, first_row)
                        for y in range(first_row, height, along):
                            to = image + (z * height + y) * width * item
                            row(args, x, to, bias, steps, ((a, i), (b, j)), phases)
                            j += 1
                    i += 1

    return kernel
