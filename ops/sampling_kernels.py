"""Kernels that sample images at computed places: RoiAlign, MaxRoiPool, GridSample.

A place that is no number, or far outside, never leads outside the image.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.simd import ld, st, vec

from .movement_kernels import arg

Function = Callable[..., Any]
_word = ld("float64")
_REAL: dict[str, Any] = {"float32": np.float32, "float64": np.float64}
_ITEM = {"float32": 4, "float64": 8}
_FAR = 1e9  # places beyond are not told apart


@register_jitable
def below(x: float) -> int:
    """Return the largest whole number that is not above ``x``."""
    if x != x:
        return -1
    whole = int(min(max(x, -_FAR), _FAR))
    return whole - 1 if whole > x else whole


def roi_align(*, dtype: str, largest: bool) -> Function:
    """Return the kernel of RoiAlign.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        largest: Whether a bin is the maximum of its weighted pixels, not their average.

    Words: ``0 x [images, channels, H, W], 1 regions [n, 4], 2 images of regions (int64), 3 y,
    4 images, 5 channels, 6 H, 7 W, 8 bins down, 9 bins across, 10 samples of a bin or 0, 11 scale,
    12 whether pixels lie at halves``. Units: regions * channels.
    """
    load, store, image_of = ld(dtype), st(dtype), ld("int64")
    item, real = _ITEM[dtype], _REAL[dtype]

    @register_jitable
    def low_end(at: Any, size: int) -> tuple[int, int, Any]:
        """Return the two neighbours of a place and how far it is from the first."""
        at = max(at, real(0))
        low = int(at)
        if low >= size - 1:
            return size - 1, size - 1, real(0)
        return low, low + 1, at - real(low)

    @register_jitable
    def one_bin(
        image: int, args: int, top: Any, left: Any, high: Any, wide: Any, down: int, across: int
    ) -> Any:
        height, width = arg(args, 6), arg(args, 7)
        total = real(0)
        started = False
        for i in range(down):
            y = top + (real(i) + real(0.5)) * high / real(down)
            for j in range(across):
                x = left + (real(j) + real(0.5)) * wide / real(across)
                a, b, c, d = real(0), real(0), real(0), real(0)
                if y >= -1 and y <= height and x >= -1 and x <= width:
                    y0, y1, fy = low_end(y, height)
                    x0, x1, fx = low_end(x, width)
                    hy, hx = real(1) - fy, real(1) - fx
                    a = hy * hx * load(image + (y0 * width + x0) * item)
                    b = hy * fx * load(image + (y0 * width + x1) * item)
                    c = fy * hx * load(image + (y1 * width + x0) * item)
                    d = fy * fx * load(image + (y1 * width + x1) * item)
                if largest:
                    found = max(max(a, b), max(c, d))
                    total = max(total, found) if started else found
                    started = True
                else:
                    total += a + b + c + d
        return total if largest else total / real(max(down * across, 1))

    @register_jitable
    def samples(size: Any, bins: int, wanted: int) -> int:
        if wanted > 0:
            return wanted
        each = min(max(size / real(bins), real(0)), real(4096))
        count = int(each)
        return count + 1 if real(count) < each else count

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, height, width = arg(args, 5), arg(args, 6), arg(args, 7)
        bins_down, bins_across, wanted = arg(args, 8), arg(args, 9), arg(args, 10)
        scale, half = real(_word(args + 88)), arg(args, 12) != 0
        shift = real(0.5) if half else real(0)
        for unit in range(begin, end):
            region = arg(args, 1) + unit // channels * 4 * item
            number = image_of(arg(args, 2) + unit // channels * 8)
            number = min(max(number, 0), arg(args, 4) - 1)
            image = arg(args, 0) + (number * channels + unit % channels) * height * width * item
            left, top = load(region) * scale - shift, load(region + item) * scale - shift
            wide = load(region + 2 * item) * scale - shift - left
            high = load(region + 3 * item) * scale - shift - top
            if not half:
                wide, high = max(wide, real(1)), max(high, real(1))
            down, across = samples(high, bins_down, wanted), samples(wide, bins_across, wanted)
            high, wide = high / real(bins_down), wide / real(bins_across)
            y = arg(args, 3) + unit * bins_down * bins_across * item
            for i in range(bins_down):
                for j in range(bins_across):
                    at_y, at_x = top + real(i) * high, left + real(j) * wide
                    store(y, one_bin(image, args, at_y, at_x, high, wide, down, across))
                    y += item

    return kernel


def max_roi_pool(*, dtype: str) -> Function:
    """Return the kernel of MaxRoiPool.

    Words: ``0 x [images, channels, H, W], 1 regions [n, 5], 2 y, 3 images, 4 channels, 5 H, 6 W,
    7 bins down, 8 bins across, 9 scale``. Units: regions * channels.
    """
    load, store = ld(dtype), st(dtype)
    item, real = _ITEM[dtype], _REAL[dtype]

    @register_jitable
    def rounded(x: Any) -> int:
        return below(float(x) + 0.5) if x >= 0 else -below(0.5 - float(x))

    @register_jitable
    def bounds(start: int, size: int, bins: int, bin: int, limit: int) -> tuple[int, int]:
        first = start + bin * size // bins
        last = start + ((bin + 1) * size + bins - 1) // bins
        return min(max(first, 0), limit), min(max(last, 0), limit)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, height, width = arg(args, 4), arg(args, 5), arg(args, 6)
        down, across, scale = arg(args, 7), arg(args, 8), real(_word(args + 72))
        for unit in range(begin, end):
            region = arg(args, 1) + unit // channels * 5 * item
            number = min(max(below(float(load(region))), 0), arg(args, 3) - 1)
            left, top = (
                rounded(load(region + item) * scale),
                rounded(load(region + 2 * item) * scale),
            )
            right = rounded(load(region + 3 * item) * scale)
            bottom = rounded(load(region + 4 * item) * scale)
            high, wide = max(bottom - top + 1, 1), max(right - left + 1, 1)
            image = arg(args, 0) + (number * channels + unit % channels) * height * width * item
            y = arg(args, 2) + unit * down * across * item
            for i in range(down):
                y0, y1 = bounds(top, high, down, i, height)
                for j in range(across):
                    x0, x1 = bounds(left, wide, across, j, width)
                    found = real(0)
                    for r in range(y0, y1):
                        for c in range(x0, x1):
                            value = load(image + (r * width + c) * item)
                            if (r == y0 and c == x0) or value > found:
                                found = value
                    store(y, found)
                    y += item

    return kernel


def grid_sample(
    *, dtype: str, lanes: int, grid: str, mode: str, padding: str, corners: bool
) -> Function:
    """Return the kernel of GridSample over up to three dimensions.

    For each place of a block it writes down the pixels around and their weights; then each channel
    is a sum over them, vectors of places at once.

    Args:
        dtype: Dtype of the image, ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        grid: Dtype of the grid.
        mode: ``"nearest"``, ``"linear"`` or ``"cubic"``.
        padding: ``"zeros"``, ``"border"`` or ``"reflection"``.
        corners: Whether -1 and 1 are the centres of the outermost pixels, not their edges.

    Words: ``0 x [images, channels, D, H, W], 1 grid [images, places, dimensions], 2 y, 3 channels,
    4 D, 5 H, 6 W, 7 dimensions, 8 places, 9 scratch, 10 bytes of it for each worker,
    11 places of a block (a multiple of ``lanes``)``. Units: images * blocks.

    The scratch has, for each dimension, four places and four weights (192 bytes); then for each
    pixel around where it lies in the image (int32, -1 for none) for all places of the block; then
    the weights of these.
    """
    v, numbers_of = vec(dtype, lanes), vec("int32", lanes)
    load_all, store_all, store_n, gather, fma = v.load, v.store, v.store_n, v.gather, v.fma
    nothing, select, all_of = v.zero, v.select, v.mask_n
    load_numbers, none, larger = numbers_of.load, numbers_of.zero, numbers_of.max
    get, put, put_number = ld(grid), st(dtype), st("int32")
    place_of, put_place, put_weight = ld("int64"), st("int64"), st("float64")
    item, step, real = _ITEM[dtype], _ITEM[grid], _REAL[grid]
    taps = {"nearest": 1, "linear": 2, "cubic": 4}[mode]
    zeros, border = padding == "zeros", padding == "border"
    nearest, cubic = mode == "nearest", mode == "cubic"

    @register_jitable
    def reflected(x: float, least: float, most: float) -> float:
        extent = most - least
        if extent <= 0:
            return least
        outside = least - x if x < least else x - most
        if not outside > 0:
            return x
        turns = below(outside / extent)
        rest = outside - turns * extent
        from_least = (turns % 2 == 0) == (x < least)
        return least + rest if from_least else most - rest

    @register_jitable
    def pixel(at: int, size: int, least: float, most: float) -> int:
        """Return the pixel that stands for one inside or outside, -1 for none."""
        if zeros:
            return at if 0 <= at < size else -1
        if not border:
            at = int(reflected(float(at), least, most))
        return min(max(at, 0), size - 1)

    @register_jitable
    def weight(distance: float) -> float:
        """Return the weight of a neighbour: linear, or Keys' cubic with alpha -0.75."""
        x = abs(distance)
        if not cubic:
            return 1.0 - x
        if x <= 1:
            return (1.25 * x - 2.25) * x * x + 1
        return ((-0.75 * x + 3.75) * x - 6.0) * x + 3.0

    @register_jitable
    def prepare(table: int, number: Any, size: int) -> None:
        """Write places and weights of the neighbours along a dimension."""
        if corners:
            at = float((number + real(1)) / real(2) * real(size - 1))
            least, most = 0.0, size - 1.0
        else:
            at = float(((number + real(1)) * real(size) - real(1)) / real(2))
            least, most = -0.5, size - 0.5
        if at != at:
            at = -1.0
        at = min(max(at, -_FAR), _FAR)
        if nearest:
            whole = below(at + 0.5)
            at = float(whole - 1 if whole - at == 0.5 and whole % 2 != 0 else whole)
        if at < least or at > most:
            if border:
                at = min(max(at, 0.0), size - 1.0)
            elif not zeros:
                at = reflected(at, least, most)
        first = int(at) if nearest else below(at) - (1 if cubic else 0)
        for k in range(taps):
            put_place(table + 8 * k, pixel(first + k, size, least, most))
            put_weight(table + 32 + 8 * k, 1.0 if nearest else weight(at - (first + k)))

    @register_jitable
    def write(args: int, table: int, at: int, deep: int, tall: int) -> None:
        """Write down the pixels around place ``at`` of the block, and their weights."""
        height, width, block = arg(args, 5), arg(args, 6), arg(args, 11)
        number = table + 192 + 4 * at
        share = table + 192 + deep * tall * taps * block * 4 + item * at
        for i in range(deep):
            z, of_z = place_of(table + 8 * i), _word(table + 32 + 8 * i)
            for j in range(tall):
                y, of_y = place_of(table + 64 + 8 * j), of_z * _word(table + 96 + 8 * j)
                for k in range(taps):
                    x, of_x = place_of(table + 128 + 8 * k), _word(table + 160 + 8 * k)
                    inside = min(min(z, y), x) >= 0
                    put_number(number, (z * height + y) * width + x if inside else -1)
                    put(share, of_y * of_x)
                    number += 4 * block
                    share += item * block

    @register_jitable
    def sampled(image: int, numbers: int, shares: int, count: int, block: int) -> Any:
        """Return a vector of places."""
        total, every = nothing(), all_of(lanes)
        for t in range(count):
            at = load_numbers(numbers + 4 * t * block)
            # All are read and some cleared: where the machine has no gathering, masks are branches.
            value = gather(image, larger(at, none()), every)
            value = select(at >= none(), value, nothing())
            total = fma(load_all(shares + item * t * block), value, total)
        return total

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, plane = arg(args, 3), arg(args, 4) * arg(args, 5) * arg(args, 6) * item
        rank, places, block = arg(args, 7), arg(args, 8), arg(args, 11)
        table = arg(args, 9) + worker * arg(args, 10)
        for d in range(3 - rank):
            put_place(table + 64 * d, 0)
            put_weight(table + 64 * d + 32, 1.0)
        deep, tall = taps if rank > 2 else 1, taps if rank > 1 else 1
        around = deep * tall * taps
        numbers, shares = table + 192, table + 192 + around * block * 4
        blocks = (places + block - 1) // block
        for unit in range(begin, end):
            image, first = unit // blocks, unit % blocks * block
            count = min(block, places - first)
            # Vectors read beyond the last place: the first one stands there once more.
            for p in range((count + lanes - 1) // lanes * lanes):
                at = image * places + first + (p if p < count else 0)
                for d in range(3 - rank, 3):
                    where = arg(args, 1) + (at * rank + 2 - d) * step
                    prepare(table + 64 * d, get(where), arg(args, 4 + d))
                write(args, table, p, deep, tall)
            for c in range(image * channels, (image + 1) * channels):
                x = arg(args, 0) + c * plane
                y = arg(args, 2) + (c * places + first) * item
                for p in range(0, count, lanes):
                    found = sampled(x, numbers + 4 * p, shares + item * p, around, block)
                    if p + lanes <= count:
                        store_all(y + p * item, found)
                    else:
                        store_n(y + p * item, count - p, found)

    return kernel
