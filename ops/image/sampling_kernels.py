"""The kernel of GridSample, which samples images at computed points (regions: roi_kernels.py).

Coordinates that are NaN or far outside are clamped, so that no memory outside the image is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import DEPTH, HEIGHT, WIDTH, along, view_of
from subgraph.engine.codegen.simd import convert, ld, st, vec
from subgraph.engine.codegen.transpose import interleaver

from .arguments import TAPS, GridSampleArguments

Function = Callable[..., Any]
_word = ld("float64")
_FAR = 1e9  # bound of coordinates in pixels: beyond all images, and within int32


@register_jitable
def clamped_floor(x: float) -> int:
    """Return the largest integer not above ``x``, clamped to [-_FAR, _FAR]; -1 for NaN."""
    if x != x:
        return -1
    whole = int(min(max(x, -_FAR), _FAR))
    return whole - 1 if whole > x else whole


def grid_sample(
    *, dtype: str, lanes: int, grid: str, mode: str, padding: str, corners: bool, blocked: bool
) -> Function:
    """Return the kernel of `GridSampleArguments`, over up to three dimensions.

    For each point of a block it writes the neighbouring pixels and their weights to a table. Then
    each channel is a sum over them, for a vector of points at a time, or in the blocked layout for
    a vector of channels.

    Args:
        dtype: Dtype of the image, ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        grid: Dtype of the grid.
        mode: ``"nearest"``, ``"linear"`` or ``"cubic"``.
        padding: ``"zeros"``, ``"border"`` or ``"reflection"``.
        corners: Whether -1 and 1 are the centres of the outermost pixels, else their edges.
        blocked: Whether image and result are in the blocked layout; channels are then blocks.
    """
    plain_padding = padding in ("zeros", "border")
    in_vectors = mode == "linear" and plain_padding and dtype == grid == "float32" and lanes > 1
    vectors: Any = _vector_neighbours_2d(lanes, padding == "zeros", corners) if in_vectors else None
    prepare, write = (
        _neighbours_along(grid, mode, padding, corners),
        _neighbours(dtype, TAPS[mode]),
    )
    neighbours = prepare, write, vectors
    return _point_sampler(dtype, lanes, grid, TAPS[mode], blocked, neighbours)


def _point_sampler(
    dtype: str, lanes: int, grid: str, taps: int, blocked: bool, neighbours: tuple[Any, Any, Any]
) -> Function:
    """Return the kernel of `grid_sample`; ``neighbours`` are the functions that fill its table."""
    arguments = view_of(GridSampleArguments)
    v, item, step = vec(dtype, lanes), item_bytes(dtype), item_bytes(grid)
    get, put_index, put_weight = ld(grid), st("int64"), st("float64")
    each = lanes * item if blocked else item
    prepare, write, write_vector = neighbours
    in_vectors = write_vector is not None
    store_all, store_n = v.store, v.store_n
    sampled, mixed = _weighted_sums(dtype, lanes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, depth = a.channels, along(a.image, DEPTH)
        plane = depth * along(a.image, HEIGHT) * along(a.image, WIDTH) * each
        rank, points, block = a.dimensions, a.points, a.block
        table = a.scratch + worker * a.scratch_bytes
        for d in range(3 - rank):
            put_index(table + 64 * d, 0)
            put_weight(table + 64 * d + 32, 1.0)
        # Missing dimensions are entered once as pixel 0 with weight 1, so the loops below need no
        # cases for the rank.
        deep, tall = taps if rank > 2 else 1, taps if rank > 1 else 1
        around = deep * tall * taps
        numbers, shares = table + 192, table + 192 + around * block * 4
        blocks = (points + block - 1) // block
        for unit in range(begin, end):
            image, first = unit // blocks, unit % blocks * block
            count = min(block, points - first)
            done = 0  # points whose neighbours are computed as vectors
            if in_vectors and rank == 2:
                done = count // lanes * lanes
                for p in range(0, done, lanes):
                    where = a.grid + (image * points + first + p) * 2 * step
                    write_vector(a, where, table + 64, numbers + 4 * p, shares + item * p)
            # Vectors read beyond the last point: the rest of the table repeats the first point.
            for p in range(done, (count + lanes - 1) // lanes * lanes):
                at = image * points + first + (p if p < count else 0)
                for d in range(3 - rank, 3):
                    where = a.grid + (at * rank + 2 - d) * step
                    prepare(table + 64 * d, get(where), along(a.image, d))
                write(a, table, p, deep, tall)
            for c in range(image * channels, (image + 1) * channels):
                x = a.x + c * plane
                y = a.y + (c * points + first) * each
                if blocked:
                    for p in range(count):
                        found = mixed(x, numbers + 4 * p, shares + item * p, around, block)
                        store_all(y + p * each, found)
                    continue
                for p in range(0, count, lanes):
                    found = sampled(x, numbers + 4 * p, shares + item * p, around, block)
                    if p + lanes <= count:
                        store_all(y + p * item, found)
                    else:
                        # The next elements belong to the next channel, which may be complete
                        # already.
                        store_n(y + p * item, count - p, found)

    return kernel


@register_jitable
def _reflected(x: float, least: float, most: float) -> float:
    """Return a coordinate reflected at both ends until it lies in [least, most]."""
    extent = most - least
    if extent <= 0:
        return least
    outside = least - x if x < least else x - most
    if not outside > 0:
        return x
    periods = clamped_floor(outside / extent)
    rest = outside - periods * extent
    from_least = (periods % 2 == 0) == (x < least)
    return least + rest if from_least else most - rest


def _padded_pixel(padding: str) -> Function:
    """Return ``f(at, size, least, most)``: the pixel that a padding puts at an index."""
    zeros, border = padding == "zeros", padding == "border"

    @register_jitable
    def pixel(at: int, size: int, least: float, most: float) -> int:
        """Return the pixel that the padding puts at index ``at``, -1 for none."""
        if zeros:
            return at if 0 <= at < size else -1
        if not border:
            # The neighbours of a reflected coordinate can lie outside again, so each is reflected
            # by itself.
            at = int(_reflected(float(at), least, most))
        return min(max(at, 0), size - 1)

    return pixel


def _neighbours_along(grid: str, mode: str, padding: str, corners: bool) -> Function:
    """Return ``f(table, number, size)``: pixels and weights around a coordinate of the grid.

    The parameters are those of `grid_sample`. The function writes an int64 for each pixel to the
    table, and a float64 for each weight from byte 32 on.
    """
    put_index, put_weight, real = st("int64"), st("float64"), np.dtype(grid).type
    taps, zeros, border = TAPS[mode], padding == "zeros", padding == "border"
    nearest, cubic = mode == "nearest", mode == "cubic"
    pixel = _padded_pixel(padding)

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
        """Write indices and weights of the neighbours along a dimension."""
        if corners:
            at = float((number + real(1)) / real(2) * real(size - 1))
            least, most = 0.0, size - 1.0
        else:
            at = float(((number + real(1)) * real(size) - real(1)) / real(2))
            least, most = -0.5, size - 0.5
        # A NaN in the grid must not reach the conversion to an integer, whose result is undefined.
        if at != at:
            at = -1.0
        at = min(max(at, -_FAR), _FAR)
        if nearest:
            # ONNX rounds halves to the nearest even pixel, so an odd one that was rounded up is
            # taken back.
            whole = clamped_floor(at + 0.5)
            at = float(whole - 1 if whole - at == 0.5 and whole % 2 != 0 else whole)
        if at < least or at > most:
            if border:
                at = min(max(at, 0.0), size - 1.0)
            elif not zeros:
                at = _reflected(at, least, most)
        first = int(at) if nearest else clamped_floor(at) - (1 if cubic else 0)
        for k in range(taps):
            put_index(table + 8 * k, pixel(first + k, size, least, most))
            put_weight(table + 32 + 8 * k, 1.0 if nearest else weight(at - (first + k)))

    return prepare


def _neighbours(dtype: str, taps: int) -> Function:
    """Return ``f(a, table, at, deep, tall)``: it combines the neighbours along all dimensions.

    ``deep`` and ``tall`` are the neighbours along depth and height; ``at`` is the point of the
    block.
    """
    put, put_number, index_of, item = st(dtype), st("int32"), ld("int64"), item_bytes(dtype)

    @register_jitable
    def write(a: GridSampleArguments, table: int, at: int, deep: int, tall: int) -> None:
        """Write the pixels around point ``at`` of the block, and their weights."""
        height, width, block = along(a.image, HEIGHT), along(a.image, WIDTH), a.block
        number = table + 192 + 4 * at
        share = table + 192 + deep * tall * taps * block * 4 + item * at
        for i in range(deep):
            z, of_z = index_of(table + 8 * i), _word(table + 32 + 8 * i)
            for j in range(tall):
                y, of_y = index_of(table + 64 + 8 * j), of_z * _word(table + 96 + 8 * j)
                for k in range(taps):
                    x, of_x = index_of(table + 128 + 8 * k), _word(table + 160 + 8 * k)
                    inside = min(min(z, y), x) >= 0
                    put_number(number, (z * height + y) * width + x if inside else -1)
                    put(share, of_y * of_x)
                    number += 4 * block
                    share += item * block

    return write


def _weighted_sums(dtype: str, lanes: int) -> tuple[Function, Function]:
    """Return the sums over pixels: for a vector of points, and for a block of channels."""
    v, numbers_of = vec(dtype, lanes), vec("int32", lanes)
    load_all, gather, fma = v.load, v.gather, v.fma
    nothing, select, all_of = v.zero, v.select, v.mask_n
    load_numbers, none, larger = numbers_of.load, numbers_of.zero, numbers_of.max
    number_of, share_of, repeat = ld("int32"), ld(dtype), v.splat
    item = v.itemsize
    wide = lanes * item

    @register_jitable
    def sampled(image: int, numbers: int, shares: int, count: int, block: int) -> Any:
        """Return one channel of a vector of points."""
        total, every = nothing(), all_of(lanes)
        for t in range(count):
            at = load_numbers(numbers + 4 * t * block)
            # Gather all and clear some: without a gather instruction a mask would cost branches.
            value = gather(image, larger(at, none()), every)
            value = select(at >= none(), value, nothing())
            total = fma(load_all(shares + item * t * block), value, total)
        return total

    @register_jitable
    def mixed(image: int, numbers: int, shares: int, count: int, block: int) -> Any:
        """Return a block of channels of one point."""
        total = nothing()
        for t in range(count):
            at = number_of(numbers + 4 * t * block)
            # A pixel outside the image counts as 0 and must not be loaded.
            if at >= 0:
                share = repeat(share_of(shares + item * t * block))
                total = fma(share, load_all(image + at * wide), total)
        return total

    return sampled, mixed


def _vector_neighbours_2d(lanes: int, zeros: bool, corners: bool) -> Function:
    """Return ``write(arguments, grid, table, numbers, shares)`` for images of two dimensions.

    It computes the four linear neighbours of a vector of points and their weights, as `_neighbours`
    does for one point. ``table`` has room for two vectors, ``numbers`` gets indices, ``shares``
    weights.
    """
    v, numbers_of = vec("float32", lanes), vec("int32", lanes)
    load, store, splat, select, floor = v.load, v.store, v.splat, v.select, v.floor
    largest, least_of, isnan = v.max, v.min, v.isnan
    repeat, choose, store_numbers = numbers_of.splat, numbers_of.select, numbers_of.store
    fewer, whole_of = numbers_of.min, convert("float32", "int32", lanes)
    apart, row, real = interleaver("float32", lanes, 2, True), 4 * lanes, np.float32

    @register_jitable
    def neighbours(number: Any, size: int) -> Any:
        """Return the pixels before coordinates along a dimension, and the next ones' weights."""
        one = splat(real(1))
        if corners:
            at = (number + one) / splat(real(2)) * splat(real(size - 1))
        else:
            at = ((number + one) * splat(real(size)) - one) / splat(real(2))
        at = select(isnan(at), splat(real(-1)), at)
        # With a border the coordinate itself is clamped, so that its weights become 0 and 1; with
        # zeros it is only kept in the range of int32.
        low, high = (real(-_FAR), real(_FAR)) if zeros else (real(0), real(size - 1))
        at = least_of(largest(at, splat(low)), splat(high))
        below = floor(at)
        return whole_of(below), at - below

    @register_jitable
    def inside(pixel: Any, size: int) -> Any:
        return (pixel >= repeat(0)) & (pixel < repeat(size))

    @register_jitable
    def write(a: GridSampleArguments, grid: int, table: int, numbers: int, shares: int) -> None:
        height, width, block = along(a.image, HEIGHT), along(a.image, WIDTH), 4 * a.block
        apart(grid, table, row)
        x, of_x = neighbours(load(table), width)
        y, of_y = neighbours(load(table + row), height)
        one, first, shares_of_y = splat(real(1)), y, splat(real(1)) - of_y
        for j in range(2):
            left, right = first * repeat(width) + x, x + repeat(1)
            if zeros:
                there = inside(first, height)
                last = choose(there & inside(right, width), left + repeat(1), repeat(-1))
                left = choose(there & inside(x, width), left, repeat(-1))
            else:
                # At the last column the right neighbour has the weight 0 but is loaded
                # nevertheless, so its index must lie inside the image.
                last = first * repeat(width) + fewer(right, repeat(width - 1))
            store_numbers(numbers + 2 * j * block, left)
            store_numbers(numbers + (2 * j + 1) * block, last)
            store(shares + 2 * j * block, shares_of_y * (one - of_x))
            store(shares + (2 * j + 1) * block, shares_of_y * of_x)
            first, shares_of_y = y + repeat(1), of_y
            if not zeros:
                # The lower neighbour of the last row has the weight 0, but is loaded as well.
                first = fewer(first, repeat(height - 1))

    return write
