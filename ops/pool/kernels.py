"""Pooling kernels: windows in the blocked layout, whole images in both layouts.

Windows in the plain layout are in row_kernels.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import load_as, store_as, vec

from .arguments import GlobalPoolArguments, PoolWindowArguments

# Initial values of totals and values of the padding, by kind of pooling; 0 of all others.
_STARTS = {"max": float("-inf"), "min": float("inf")}
_NEGATIVE_NANS = 127  # bit patterns of bfloat16 that are NaN of negative sign
# The taps of a window along an axis: the first inside the image, their end, bytes between them.
Taps = tuple[int, int, int]


def combiner(kind: str, v: Any) -> Any:
    """Return the function ``(total, x) -> total`` that adds a vector to a kind of pooling."""
    maximum, minimum, absolute = v.maximum, v.minimum, v.abs
    is_max, is_min, is_absolute, is_squared = (kind == k for k in ("max", "min", "l1", "l2"))

    @register_jitable
    def combine(total: Any, x: Any) -> Any:
        # The new operand comes first: its test for NaN then does not wait for the total.
        if is_max:
            return maximum(x, total)
        if is_min:
            return minimum(x, total)
        if is_absolute:
            return total + absolute(x)
        return total + x * x if is_squared else total + x

    return combine


def start_of(kind: str) -> float:
    """Return the total of no pixels, which is also the value of the padding."""
    return _STARTS.get(kind, 0.0)


def merger(kind: str, v: Any) -> Any:
    """Return the function that joins two totals of a kind of pooling.

    Totals hold absolute values or squares already: they are added as they are.
    """
    return combiner(kind if kind in _STARTS else "average", v)


def window_taps() -> tuple[Any, Any]:
    """Return two functions for the taps of a window inside a dimension: the first, and their end.

    ``first_tap(at, dilation)`` and ``end_tap(at, dilation, taps, size)``: the window begins at
    pixel ``at``, which may be negative, and the dimension has ``size`` pixels.
    """

    @register_jitable
    def first_tap(at: int, dilation: int) -> int:
        if at >= 0:
            return 0
        return -at if dilation == 1 else (-at + dilation - 1) // dilation

    @register_jitable
    def end_tap(at: int, dilation: int, taps: int, size: int) -> int:
        left = size - at
        if (taps - 1) * dilation < left:
            return taps
        if left <= 0:
            return 0
        return left if dilation == 1 else (left + dilation - 1) // dilation

    return first_tap, end_tap


def window(*, dtype: str, lanes: int, kind: str, storage: str = "") -> Callable[..., None]:
    """Return the kernel of `PoolWindowArguments`, which pools windows over blocks of channels.

    Args:
        dtype: ``"float32"``, ``"float64"`` or, for maxima, ``"int8"`` or ``"uint8"``.
        lanes: Channels of one block.
        kind: ``"max"``, ``"average"``, ``"l1"`` or ``"l2"``.
        storage: ``"bfloat16"`` if images and results are stored so, ``""`` if in ``dtype``.
    """
    arguments = view_of(PoolWindowArguments)
    pixel = lanes * item_bytes(storage or dtype)
    four, one = _window_poolers(kind, vec(dtype, lanes), storage)
    first_tap, end_tap = window_taps()

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        include, blocks, rb = a.count_include_pad, a.blocks, a.rows
        depth, height, width = a.image_depth, a.image_height, a.image_width
        od_n, oh_n, ow_n = a.output_depth, a.output_height, a.output_width
        kd, kh, kw = a.kernel_depth, a.kernel_height, a.kernel_width
        dd, dh, dw, sw = a.dilation_depth, a.dilation_height, a.dilation_width, a.stride_width
        row_blocks = (oh_n + rb - 1) // rb
        for unit in range(begin, end):
            oh0, od = unit % row_blocks * rb, unit // row_blocks % od_n
            block = unit // row_blocks // od_n % blocks
            image = unit // row_blocks // od_n // blocks
            x = a.x + image * a.x_image + block * depth * height * width * pixel
            y = a.y + image * a.y_image
            y += ((block * od_n + od) * oh_n + oh0) * ow_n * pixel
            d = od * a.stride_depth - a.pad_depth
            d_first, d_end = first_tap(d, dd), end_tap(d, dd, kd, depth)
            d_count = end_tap(d, dd, kd, depth + a.after_depth)
            d_taps = d_first, d_end, dd * height * width * pixel
            for oh in range(oh0, min(oh_n, oh0 + rb)):
                h = oh * a.stride_height - a.pad_height
                h_first, h_end = first_tap(h, dh), end_tap(h, dh, kh, height)
                h_taps = h_first, h_end, dh * width * pixel
                if include != 0:
                    around = d_count * end_tap(h, dh, kh, height + a.after_height)
                else:
                    around = max(d_end - d_first, 0) * max(h_end - h_first, 0)
                ow = 0
                while ow < ow_n:
                    w = ow * sw - a.pad_width
                    at = x + ((d * height + h) * width + w) * pixel
                    # Four windows that touch no padding along the width share their taps, and their
                    # independent totals hide the latency of the operation.
                    if ow + 4 <= ow_n and w >= 0 and w + 3 * sw + (kw - 1) * dw < width:
                        w_taps = 0, kw, dw * pixel
                        four(y, at, d_taps, h_taps, w_taps, sw * pixel, around * kw)
                        y += 4 * pixel
                        ow += 4
                        continue
                    w_first, w_end = first_tap(w, dw), end_tap(w, dw, kw, width)
                    columns = max(w_end - w_first, 0)
                    if include != 0:
                        columns = end_tap(w, dw, kw, width + a.after_width)
                    one(y, at, d_taps, h_taps, (w_first, w_end, dw * pixel), around * columns)
                    y += pixel
                    ow += 1

    return kernel


def _window_poolers(kind: str, v: Any, storage: str) -> tuple[Any, Any]:
    """Return two functions that pool windows of a block of channels.

    ``four(y, at, depth, height, width, step, count)`` pools four adjacent windows, ``step`` bytes
    apart, that are inside the image's width; ``one(y, at, depth, height, width, count)`` pools one
    window. ``y`` is the address of the result, ``at`` that of the window's tap 0, which may be
    outside the image; the next are `Taps`. ``count`` is the divisor of an average.
    """
    pixel = v.lanes * item_bytes(storage or v.dtype)
    if kind == "max" and (storage or not v.dtype.startswith("float")):
        # Maxima need no conversion of each tap to float32: integers have the order of the elements.
        keys = vec("int16", v.lanes) if storage else v
        load, store = _key_memory(keys) if storage else (v.load, v.store)
        splat, start = keys.splat, float(np.iinfo(keys.dtype).min)
        combine = merge = combiner(kind, keys)
        finish: Any = _unchanged
    else:
        load = load_as(storage, v.dtype, v.lanes) if storage else v.load
        store = store_as(v.dtype, storage, v.lanes) if storage else v.store
        splat, start = v.splat, start_of(kind)
        combine, merge, finish = combiner(kind, v), merger(kind, v), _finisher(kind, v)

    @register_jitable
    def four(
        y: int, at: int, depth: Taps, height: Taps, width: Taps, step: int, count: int
    ) -> None:
        p, q, r, s = splat(start), splat(start), splat(start), splat(start)
        for i in range(depth[0], depth[1]):
            for j in range(height[0], height[1]):
                tap = at + i * depth[2] + j * height[2]
                for _ in range(width[1]):
                    p = combine(p, load(tap))
                    q = combine(q, load(tap + step))
                    r = combine(r, load(tap + 2 * step))
                    s = combine(s, load(tap + 3 * step))
                    tap += width[2]
        store(y, finish(p, count))
        store(y + pixel, finish(q, count))
        store(y + 2 * pixel, finish(r, count))
        store(y + 3 * pixel, finish(s, count))

    @register_jitable
    def one(y: int, at: int, depth: Taps, height: Taps, width: Taps, count: int) -> None:
        # Two independent accumulators hide the latency of the operation.
        p, q = splat(start), splat(start)
        for i in range(depth[0], depth[1]):
            for j in range(height[0], height[1]):
                tap = at + i * depth[2] + j * height[2] + width[0] * width[2]
                for _ in range(width[0], width[1] - 1, 2):
                    p = combine(p, load(tap))
                    q = combine(q, load(tap + width[2]))
                    tap += 2 * width[2]
                if max(width[1] - width[0], 0) % 2 > 0:
                    p = combine(p, load(tap))
        store(y, finish(merge(p, q), count))

    return four, one


def _key_memory(keys: Any) -> tuple[Any, Any]:
    """Return the functions that load bfloat16 as keys, and store keys as bfloat16.

    Keys are int16 in the order of the elements, above which is NaN: the bits of a positive element,
    and those of a negative one with the magnitude inverted, less a constant with which the NaN of
    negative sign exceed all other keys.
    """
    load, store, splat, shr = keys.load, keys.store, keys.splat, keys.shr

    @register_jitable
    def ordered(bits: Any) -> Any:
        """Invert the magnitude of negative elements; the function is its own inverse."""
        return bits ^ (shr(bits, splat(15)) & splat(0x7FFF))

    @register_jitable
    def load_keys(address: int) -> Any:
        return ordered(load(address)) - splat(_NEGATIVE_NANS)

    @register_jitable
    def store_keys(address: int, values: Any) -> None:
        store(address, ordered(values + splat(_NEGATIVE_NANS)))

    return load_keys, store_keys


@register_jitable
def _unchanged(total: Any, count: int) -> Any:
    """Return a total, which is the result of a window."""
    return total


def global_pool(
    *, dtype: str, lanes: int, kind: str, plain: bool, storage: str = ""
) -> Callable[..., None]:
    """Return the kernel of `GlobalPoolArguments`, which pools whole images.

    A blocked image has four interleaved partial sums, a plain one four vectors of them; the order
    of additions depends on sizes only.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector; when not plain, channels of a block.
        kind: ``"max"``, ``"min"``, ``"average"``, ``"l1"`` or ``"l2"``.
        plain: x is in the plain layout, else in the blocked one.
        storage: ``"bfloat16"`` if x is stored so, of whose pixels two blocks have half each; ``""``
            if in ``dtype``.
    """
    arguments = view_of(GlobalPoolArguments)
    item = item_bytes(dtype)
    pixel = lanes * item
    half = pixel // 2
    blocked = _blocked_pooler(dtype, lanes, kind, storage)
    channel = _channel_pooler(dtype, lanes, kind)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        count, blocks = a.pixels, a.blocks
        for unit in range(begin, end):
            image, block = unit // blocks, unit % blocks
            x = a.x + image * a.x_image
            y = a.y + image * a.y_image
            if plain:
                channel(x + block * count * item, y + block * item, count)
            elif storage:
                x += block // 2 * count * pixel + block % 2 * half
                blocked(x, y + block * pixel, count)
            else:
                blocked(x + block * count * pixel, y + block * pixel, count)

    return kernel


def _finisher(kind: str, v: Any) -> Any:
    """Return ``(total, count) -> result``: the mean, the root of a sum of squares, or the total."""
    splat, sqrt = v.splat, v.sqrt
    average, root = kind == "average", kind == "l2"

    @register_jitable
    def finish(total: Any, count: int) -> Any:
        if average:
            total = total / splat(float(count))
        if root:
            total = sqrt(total)
        return total

    return finish


def _vector_reducer(kind: str, v: Any, storage: str = "") -> Any:
    """Return ``f(x, count)``, which combines ``count`` vectors into a total.

    They are as many bytes apart as they have; in ``storage``, too.
    """
    load, splat, nbytes = v.load, v.splat, v.lanes * v.itemsize
    if storage:
        load = load_as(storage, v.dtype, v.lanes)
    start, combine, merge = start_of(kind), combiner(kind, v), merger(kind, v)

    @register_jitable
    def reduce(x: int, count: int) -> Any:
        # Four independent totals hide the latency; their order depends on the count only.
        a, b, c, d = splat(start), splat(start), splat(start), splat(start)
        i = 0
        while i + 4 <= count:
            at = x + i * nbytes
            a = combine(a, load(at))
            b = combine(b, load(at + nbytes))
            c = combine(c, load(at + 2 * nbytes))
            d = combine(d, load(at + 3 * nbytes))
            i += 4
        while i < count:
            a = combine(a, load(x + i * nbytes))
            i += 1
        return a if count < 4 else merge(merge(a, b), merge(c, d))

    return reduce


def _blocked_pooler(dtype: str, lanes: int, kind: str, storage: str) -> Any:
    """Return ``f(x, y, count)``, which pools ``count`` pixels of a block of channels."""
    v = vec(dtype, lanes)
    store, reduce, finish = v.store, _vector_reducer(kind, v, storage), _finisher(kind, v)

    @register_jitable
    def blocked(x: int, y: int, count: int) -> None:
        store(y, finish(reduce(x, count), count))

    return blocked


def _channel_pooler(dtype: str, lanes: int, kind: str) -> Any:
    """Return ``f(x, y, count)``, which pools ``count`` contiguous pixels of one channel."""
    v, one = vec(dtype, lanes), vec(dtype, 1)
    load, splat, store, pixel, item = one.load, one.splat, one.store, lanes * v.itemsize, v.itemsize
    across = {"max": v.hmax, "min": v.hmin}.get(kind, v.sum)
    reduce, start, combine = _vector_reducer(kind, v), start_of(kind), combiner(kind, one)
    merge, finish = merger(kind, one), _finisher(kind, one)

    @register_jitable
    def channel(x: int, y: int, count: int) -> None:
        vectors, rest = count // lanes, splat(start)
        for at in range(x + vectors * pixel, x + count * item, item):
            rest = combine(rest, load(at))
        store(y, finish(merge(splat(across(reduce(x, vectors))), rest), count))

    return channel
