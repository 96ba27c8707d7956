"""The kernel of pooling windows in the plain layout that keep an image's width, or halve it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, shuffle, st, vec

from .arguments import PoolFlatArguments
from .kernels import LOWEST, combiner, window_taps


def flat(
    *, dtype: str, lanes: int, kind: str, stride: int, down: int, across: int
) -> Callable[..., None]:
    """Return the kernel of `PoolFlatArguments`.

    The image is taken for one long line: rows are joined along it, then columns, where a tap beyond
    the ends of a row counts nothing. So vectors are full however short rows are.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        kind: ``"max"``, ``"average"``, ``"l1"`` or ``"l2"``.
        stride: Stride along W, 1 or 2: how often the output's width goes into the image's.
        down: Rows of a window; 0: any number.
        across: Columns of a window; 0: any number.
    """
    arguments = view_of(PoolFlatArguments)
    v = vec(dtype, lanes)
    store, store_n, item = v.store, v.store_n, item_bytes(dtype)
    average = kind == "average"
    mark, scale = _marker(lanes, stride), _scaler(dtype, lanes, stride)
    join, join_some = _joiner(dtype, lanes, kind, down), _skipping_joiner(dtype, lanes, kind, down)
    windows = _window_joiner(dtype, lanes, kind, stride, across)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size, width, rows = a.image_height * a.image_width, a.output_width, a.output_height
        pixels = rows * width
        taps, near, together = a.kernel_width, a.dilation_width * item, a.images
        step, pad, further = width * 4, a.pad_width * item, lanes % max(width, 1)
        # All lines begin with a whole vector.
        reach = (taps - 1) * a.dilation_width
        before = (reach + lanes - 1) // lanes * lanes * item
        pitch = (pixels * stride + 2 * lanes - 1) // lanes * lanes * item + before
        line = a.scratch + worker * a.scratch_step + before
        scales = line + together * pitch
        masks = scales + (pixels + lanes) * item
        mark(a, masks)
        if average:
            scale(a, line, scales)
        for first in range(begin, end, together):
            # What was stored just now is slow to read: several images are joined, then used.
            count = min(together, end - first)
            for k in range(count):
                x = a.x + (first + k) * size * item
                if a.stride_height == 1:
                    join(a, x, line + k * pitch)
                else:
                    join_some(a, x, line + k * pitch)
            for k in range(count):
                y = a.y + (first + k) * pixels * item
                shifted, column = line + k * pitch - pad, 0
                # The next image writes over what this one leaves behind it.
                whole = min(pixels, pixels * (end - first - k) - lanes + 1)
                for j in range(0, whole, lanes):
                    at, bits = j * item, masks + column * 4
                    there = shifted + stride * at
                    store(y + at, windows(there, near, bits, step, taps, scales + at))
                    column += further
                    column -= width if column >= width else 0
                done = (max(whole, 0) + lanes - 1) // lanes * lanes
                if done < pixels:
                    at, bits = done * item, masks + column * 4
                    there = shifted + stride * at
                    total = windows(there, near, bits, step, taps, scales + at)
                    store_n(y + at, pixels - done, total)

    return kernel


def _marker(lanes: int, stride: int) -> Any:
    """Return what writes which lanes of a vector have each column of a window."""
    put_bits = st("uint32")

    @register_jitable
    def mark(a: PoolFlatArguments, masks: int) -> None:
        """Write which lanes of a vector that begins in a column have each column of a window."""
        width, dilation, pad = a.output_width, a.dilation_width, a.pad_width
        for tap in range(a.kernel_width):
            for column in range(width):
                bits, at = 0, column
                for lane in range(lanes):
                    inside = 0 <= at * stride + tap * dilation - pad < a.image_width
                    bits |= int(inside) << lane
                    at = at + 1 if at + 1 < width else 0
                put_bits(masks + column * 4, bits)
            masks += width * 4

    return mark


def _scaler(dtype: str, lanes: int, stride: int) -> Any:
    """Return what writes the factors of averages."""
    v = vec(dtype, lanes)
    load, store, splat, put, item = v.load, v.store, v.splat, st(dtype), item_bytes(dtype)
    first_tap, end_tap = window_taps()

    @register_jitable
    def scale(a: PoolFlatArguments, counts: int, scales: int) -> None:
        """Write one over the pixels that each window counts; ``counts`` has room for a row."""
        include, height, width = a.count_include_pad, a.image_height, a.image_width
        kh, kw, dh, dw = a.kernel_height, a.kernel_width, a.dilation_height, a.dilation_width
        for column in range(a.output_width):
            w = column * stride - a.pad_width
            found = end_tap(w, dw, kw, width) - first_tap(w, dw)
            if include != 0:
                found = end_tap(w, dw, kw, width + a.after_width)
            put(counts + column * item, float(max(found, 0)))
        for row in range(a.output_height):
            h = row * a.stride_height - a.pad_height
            found = end_tap(h, dh, kh, height) - first_tap(h, dh)
            if include != 0:
                found = end_tap(h, dh, kh, height + a.after_height)
            # The next row writes over what this one leaves behind it.
            for j in range(0, a.output_width, lanes):
                pixels = load(counts + j * item) * splat(float(max(found, 0)))
                store(scales + j * item, splat(1.0) / pixels)
            scales += a.output_width * item

    return scale


def _joiner(dtype: str, lanes: int, kind: str, down: int) -> Any:
    """Return what joins the rows of an image where the stride along the height is 1."""
    v, places = vec(dtype, lanes), vec("uint32", lanes)
    load, load_m, store, splat, select = v.load, v.load_m, v.store, v.splat, v.select
    number, place = places.iota, places.splat
    item, combine = item_bytes(dtype), combiner(kind, v)
    start = LOWEST[dtype] if kind == "max" else 0.0

    @register_jitable
    def join(a: PoolFlatArguments, x: int, line: int) -> None:
        """Join the rows of an image; taps above and below it are pixels before and behind it."""
        width, taps = a.image_width, a.kernel_height
        size, near = a.image_height * width, a.dilation_height * width
        pixels, pad = a.output_height * width, a.pad_height * width
        reach, step = (taps - 1) * near + lanes, near * item
        for j in range(0, pixels, lanes):
            at, total = j - pad, splat(start)
            if at >= 0 and at + reach <= size:
                for t in range(down if down > 0 else taps):
                    total = combine(total, load(x + at * item + t * step))
            else:
                for _ in range(taps):
                    if at < size and at + lanes > 0:
                        # Pixels before the first one count as large numbers.
                        mask = number() + place(at) < place(size)
                        value = load_m(x + at * item, mask)
                        total = combine(total, select(mask, value, splat(start)))
                    at += near
            store(line + j * item, total)

    return join


def _skipping_joiner(dtype: str, lanes: int, kind: str, down: int) -> Any:
    """Return what joins the rows of an image for any stride along the height."""
    v, places = vec(dtype, lanes), vec("uint32", lanes)
    load, load_m, store, splat = v.load, v.load_m, v.store, v.splat
    number, place = places.iota, places.splat
    item, combine = item_bytes(dtype), combiner(kind, v)
    start = LOWEST[dtype] if kind == "max" else 0.0
    first_tap, end_tap = window_taps()

    @register_jitable
    def join_some(a: PoolFlatArguments, x: int, line: int) -> None:
        """Join rows of an image where windows skip some."""
        height, width, rows, all_taps = (
            a.image_height,
            a.image_width,
            a.output_height,
            a.kernel_height,
        )
        stride, dilation, pad = a.stride_height, a.dilation_height, a.pad_height
        wide, end, reach = width * item, x + height * width * item, (all_taps - 1) * dilation
        step = dilation * wide
        for row in range(rows):
            h, taps = row * stride - pad, all_taps
            if h < 0 or h + reach >= height:
                first = first_tap(h, dilation)
                taps = max(end_tap(h, dilation, taps, height) - first, 0)
                h += first * dilation
            at, to = x + h * wide, line + row * wide
            last = at + (taps - 1) * step
            # The next row writes over what this one leaves behind it.
            for j in range(0, wide, lanes * item):
                total = splat(start)
                if last + j + lanes * item > end:
                    mask = number() < place(max((end - last - j) // item, 0))
                    for t in range(taps):
                        total = combine(total, load_m(at + j + t * step, mask))
                elif down > 0 and taps == down:
                    for t in range(down):
                        total = combine(total, load(at + j + t * step))
                else:
                    for t in range(taps):
                        total = combine(total, load(at + j + t * step))
                store(to + j, total)

    return join_some


def _window_joiner(dtype: str, lanes: int, kind: str, stride: int, across: int) -> Any:
    """Return what joins the columns of windows along the line of joined rows."""
    v = vec(dtype, lanes)
    load, splat, sqrt, select, mask_bits = v.load, v.splat, v.sqrt, v.select, v.mask_bits
    evens, take_bits = shuffle(dtype, lanes, range(0, 2 * lanes, 2)), ld("uint32")
    item, merge = item_bytes(dtype), combiner("max" if kind == "max" else "average", v)
    start = LOWEST[dtype] if kind == "max" else 0.0
    average, root = kind == "average", kind == "l2"

    @register_jitable
    def windows(place: int, near: int, bits: int, step: int, taps: int, scales: int) -> Any:
        """Join the columns of a vector of windows, ``near`` bytes apart."""
        total = splat(start)
        for t in range(across if across > 0 else taps):
            inside = mask_bits(take_bits(bits + t * step))
            value = load(place + t * near)
            if stride == 2:
                value = evens(value, load(place + t * near + lanes * item))
            total = merge(select(inside, value, splat(start)), total)
        if average:
            total = total * load(scales)
        if root:
            total = sqrt(total)
        return total

    return windows
