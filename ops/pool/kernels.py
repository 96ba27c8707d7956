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
from subgraph.engine.codegen.simd import st, vec

from .arguments import GlobalPoolArguments, PoolWindowArguments

# Initial values of totals: of "max" by dtype, and of the kinds that propagate NaN.
LOWEST = {"float32": float("-inf"), "float64": float("-inf")}
_STARTS = {"maximum": -np.inf, "minimum": np.inf}


def combiner(kind: str, v: Any) -> Any:
    """Return the function ``(total, x) -> total`` that adds a vector to a kind of pooling."""
    largest, absolute = v.max, v.abs

    @register_jitable
    def take_max(total: Any, x: Any) -> Any:
        return largest(x, total)

    @register_jitable
    def take_sum(total: Any, x: Any) -> Any:
        return total + x

    @register_jitable
    def take_abs(total: Any, x: Any) -> Any:
        return total + absolute(x)

    @register_jitable
    def take_square(total: Any, x: Any) -> Any:
        return total + x * x

    return {
        "max": take_max,
        "average": take_sum,
        "l1": take_abs,
        "l2": take_square,
        "maximum": v.maximum,
        "minimum": v.minimum,
    }[kind]


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


def window(*, dtype: str, lanes: int, kind: str) -> Callable[..., None]:
    """Return the kernel of `PoolWindowArguments`, which pools windows over blocks of channels.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Channels of one block.
        kind: ``"max"``, ``"average"``, ``"l1"`` or ``"l2"``.
    """
    arguments = view_of(PoolWindowArguments)
    v = vec(dtype, lanes)
    load, store, splat = v.load, v.store, v.splat
    item = item_bytes(dtype)
    pixel = lanes * item
    combine, finish = combiner(kind, v), _finisher(kind, v)
    start = LOWEST[dtype] if kind == "max" else 0.0
    first_tap, end_tap = window_taps()

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        include, blocks = a.count_include_pad, a.blocks
        depth, height, width = a.image_depth, a.image_height, a.image_width
        od_n, oh_n, ow_n = a.output_depth, a.output_height, a.output_width
        kd, kh, kw = a.kernel_depth, a.kernel_height, a.kernel_width
        dd, dh, dw = a.dilation_depth, a.dilation_height, a.dilation_width
        sw = a.stride_width
        rb = a.rows
        row_blocks = (oh_n + rb - 1) // rb
        for unit in range(begin, end):
            oh0 = unit % row_blocks * rb
            od = unit // row_blocks % od_n
            block = unit // row_blocks // od_n % blocks
            image = unit // row_blocks // od_n // blocks
            x = a.x + image * a.x_image + block * depth * height * width * pixel
            y = a.y + image * a.y_image
            y += ((block * od_n + od) * oh_n + oh0) * ow_n * pixel
            d = od * a.stride_depth - a.pad_depth
            d_first, d_end = first_tap(d, dd), end_tap(d, dd, kd, depth)
            d_count = end_tap(d, dd, kd, depth + a.after_depth)
            for oh in range(oh0, min(oh_n, oh0 + rb)):
                h = oh * a.stride_height - a.pad_height
                h_first, h_end = first_tap(h, dh), end_tap(h, dh, kh, height)
                h_count = end_tap(h, dh, kh, height + a.after_height)
                plane = x + (d * height + h) * width * pixel
                ow = 0
                while ow < ow_n:
                    w = ow * sw - a.pad_width
                    if ow + 4 <= ow_n and w >= 0 and w + 3 * sw + (kw - 1) * dw < width:
                        p, q, r, s = splat(start), splat(start), splat(start), splat(start)
                        for i in range(d_first, d_end):
                            for j in range(h_first, h_end):
                                at = plane + ((i * dd * height + j * dh) * width + w) * pixel
                                for _ in range(kw):
                                    p = combine(p, load(at))
                                    q = combine(q, load(at + sw * pixel))
                                    r = combine(r, load(at + 2 * sw * pixel))
                                    s = combine(s, load(at + 3 * sw * pixel))
                                    at += dw * pixel
                        inside = max(d_end - d_first, 0) * max(h_end - h_first, 0)
                        count = (d_count * h_count if include != 0 else inside) * kw
                        store(y, finish(p, count))
                        store(y + pixel, finish(q, count))
                        store(y + 2 * pixel, finish(r, count))
                        store(y + 3 * pixel, finish(s, count))
                        y += 4 * pixel
                        ow += 4
                        continue
                    w_first, w_end = first_tap(w, dw), end_tap(w, dw, kw, width)
                    total = splat(start)
                    for i in range(d_first, d_end):
                        for j in range(h_first, h_end):
                            at = plane + (i * dd * height + j * dh) * width * pixel
                            at += (w + w_first * dw) * pixel
                            for _ in range(w_first, w_end):
                                total = combine(total, load(at))
                                at += dw * pixel
                    if include != 0:
                        count = d_count * h_count * end_tap(w, dw, kw, width + a.after_width)
                    else:
                        count = max(d_end - d_first, 0) * max(h_end - h_first, 0)
                        count *= max(w_end - w_first, 0)
                    store(y, finish(total, count))
                    y += pixel
                    ow += 1

    return kernel


def global_pool(*, dtype: str, lanes: int, kind: str, plain: bool) -> Callable[..., None]:
    """Return the kernel of `GlobalPoolArguments`, which pools whole images.

    A blocked image has four interleaved partial sums, a plain one ``lanes``; the order of additions
    depends on sizes only. The kinds ``"maximum"`` and ``"minimum"``, which propagate NaN, need the
    blocked layout.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector; when not plain, channels of a block.
        kind: ``"max"``, ``"average"``, ``"l1"``, ``"l2"``, ``"maximum"`` or ``"minimum"``.
        plain: x is in the plain layout, else in the blocked one.
    """
    arguments = view_of(GlobalPoolArguments)
    item = item_bytes(dtype)
    pixel = lanes * item
    blocked, channel = _blocked_pooler(dtype, lanes, kind), _channel_pooler(dtype, lanes, kind)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        count, blocks = a.pixels, a.blocks
        for unit in range(begin, end):
            image, block = unit // blocks, unit % blocks
            x = a.x + image * a.x_image
            y = a.y + image * a.y_image
            if plain:
                channel(x + block * count * item, y + block * item, count)
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


def _blocked_pooler(dtype: str, lanes: int, kind: str) -> Any:
    """Return ``f(x, y, count)``, which pools ``count`` pixels of a block of channels."""
    v = vec(dtype, lanes)
    load, store, splat = v.load, v.store, v.splat
    pixel = lanes * v.itemsize
    start = LOWEST[dtype] if kind == "max" else _STARTS.get(kind, 0.0)
    combine, finish = combiner(kind, v), _finisher(kind, v)
    merge = combiner(kind if kind == "max" or kind in _STARTS else "average", v)

    @register_jitable
    def blocked(x: int, y: int, count: int) -> None:
        a, b, c, d = splat(start), splat(start), splat(start), splat(start)
        i = 0
        while i + 4 <= count:
            at = x + i * pixel
            a = combine(a, load(at))
            b = combine(b, load(at + pixel))
            c = combine(c, load(at + 2 * pixel))
            d = combine(d, load(at + 3 * pixel))
            i += 4
        while i < count:
            a = combine(a, load(x + i * pixel))
            i += 1
        store(y, finish(merge(merge(a, b), merge(c, d)), count))

    return blocked


def _channel_pooler(dtype: str, lanes: int, kind: str) -> Any:
    """Return ``f(x, y, count)``, which pools ``count`` contiguous pixels of one channel."""
    v, one = vec(dtype, lanes), vec(dtype, 1)
    load, splat, get, item = v.load, v.splat, v.get, v.itemsize
    total_of = v.hmax if kind == "max" else v.sum
    store1 = st(dtype)
    load_one, splat_one, get_one = one.load, one.splat, one.get
    start, largest = LOWEST[dtype] if kind == "max" else _STARTS.get(kind, 0.0), kind == "max"
    combine, combine_one, finish = combiner(kind, v), combiner(kind, one), _finisher(kind, v)
    pixel = lanes * item

    @register_jitable
    def channel(x: int, y: int, count: int) -> None:
        total = splat(start)
        vectors = count // lanes
        for i in range(vectors):
            total = combine(total, load(x + i * pixel))
        rest = splat_one(start)
        for i in range(vectors * lanes, count):
            rest = combine_one(rest, load_one(x + i * item))
        value, other = total_of(total), get_one(rest, 0)
        if largest:
            value = value if value > other else other
        else:
            value += other
        store1(y, get(finish(splat(value), count), 0))

    return channel
