"""Turning activations between the plain and the blocked layout, square blocks at a time."""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import ld, memcpy, st, vec
from subgraph.engine.codegen.tile import arg
from subgraph.engine.codegen.transpose import transposer


def copy() -> Callable[..., None]:
    """Return the kernel that copies bytes.

    Words: ``0 source, 1 target, 2 bytes, 3 bytes of a unit``.
    """

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        first = begin * arg(args, 3)
        last = min(end * arg(args, 3), arg(args, 2))
        memcpy(arg(args, 1) + first, arg(args, 0) + first, last - first)

    return kernel


def to_blocked(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel from ``[N][C][pixels]`` to ``[N][C / lanes][pixels][lanes]``.

    Words: ``0 source, 1 target, 2 channels, 3 pixels, 4 blocks, 5 pixels of a unit, 6 units of a
    block``. Channels beyond C become zero. Units: N * blocks * units of a block.
    """
    v = vec(dtype, lanes)
    store, zero = v.store, v.zero
    turn = transposer(dtype, lanes)
    item = vec(dtype, lanes).itemsize
    pixel = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, pixels, blocks = arg(args, 2), arg(args, 3), arg(args, 4)
        part, parts = arg(args, 5), arg(args, 6)
        for unit in range(begin, end):
            first, block = unit % parts * part, unit // parts % blocks
            image = unit // parts // blocks
            taken = min(lanes, channels - block * lanes)
            source = arg(args, 0) + (image * channels + block * lanes) * pixels * item
            target = arg(args, 1) + (image * blocks + block) * pixels * pixel
            last = min(pixels, first + part)
            for p in range(first, last, lanes):
                count = min(lanes, last - p)
                to = target + p * pixel
                if taken < lanes:
                    for i in range(count):
                        store(to + i * pixel, zero())
                turn(source + p * item, pixels * item, taken, count, to, pixel)

    return kernel


def to_plain(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel from ``[N][C / lanes][pixels][lanes]`` to ``[N][C][pixels]``.

    Words and units are those of ``to_blocked``.
    """
    turn = transposer(dtype, lanes)
    item = vec(dtype, lanes).itemsize
    pixel = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, pixels, blocks = arg(args, 2), arg(args, 3), arg(args, 4)
        part, parts = arg(args, 5), arg(args, 6)
        for unit in range(begin, end):
            first, block = unit % parts * part, unit // parts % blocks
            image = unit // parts // blocks
            taken = min(lanes, channels - block * lanes)
            source = arg(args, 0) + (image * blocks + block) * pixels * pixel
            target = arg(args, 1) + (image * channels + block * lanes) * pixels * item
            last = min(pixels, first + part)
            for p in range(first, last, lanes):
                count = min(lanes, last - p)
                turn(source + p * pixel, pixel, count, taken, target + p * item, pixels * item)

    return kernel


def interleave(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel that puts phases of channels, held in the blocked layout, side by side.

    Pixel ``q * phases + p`` of channel c of the plain target is pixel q of channel ``p * channels +
    c`` of the source, along each axis; the last phase along D, H and W runs fastest.

    Words: ``0 source, 1 target, 2 channels of the target, 3 blocks of the source, 4..6 source D H
    W, 7..9 phases along D H W, 10..12 target D H W``. Units: N * target D * target H.
    """
    load, store = ld(dtype), st(dtype)
    item = vec(dtype, lanes).itemsize
    pixel = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, blocks = arg(args, 2), arg(args, 3)
        height, width = arg(args, 5), arg(args, 6)
        area = arg(args, 4) * height * width * pixel
        down, across = arg(args, 8), arg(args, 9)
        rows, columns = arg(args, 11), arg(args, 12)
        slices = arg(args, 10)
        for unit in range(begin, end):
            h, d, image = unit % rows, unit // rows % slices, unit // rows // slices
            phase = (d % arg(args, 7) * down + h % down) * across
            at = arg(args, 0) + image * blocks * area
            at += (d // arg(args, 7) * height + h // down) * width * pixel
            for c in range(channels):
                to = ((image * channels + c) * slices + d) * rows + h
                to = arg(args, 1) + to * columns * item
                for p in range(min(across, columns)):
                    channel = (phase + p) * channels + c
                    source = at + channel // lanes * area + channel % lanes * item
                    for i in range((columns - p + across - 1) // across):
                        store(to + (i * across + p) * item, load(source + i * pixel))

    return kernel


def sum_taps(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel that adds what each pixel gives to each tap up to an image.

    Channel ``(c, kd, kh, kw)`` of the source, held in the blocked layout, is what its pixels give
    to channel c of the plain target through that tap: pixel i adds to pixel ``i * stride + tap *
    dilation - pad`` along each axis, if there is one.

    Words: ``0 source, 1 target, 2 channels of the target, 3 blocks of the source, 4..6 source D H
    W, 7..9 taps, 10..12 target D H W, 13..15 strides, 16..18 dilations, 19..21 pads before, 22 bias
    (one element per channel; 0: none)``. Units: N * target D * target H.
    """
    load, store = ld(dtype), st(dtype)
    v = vec(dtype, lanes)
    item, zero, get = v.itemsize, v.zero, v.get
    pixel = lanes * item

    @register_jitable
    def read(args: int, axis: int, place: int, tap: int) -> int:
        """Return the source's pixel that gives to a place through a tap, or -1."""
        at = place + arg(args, 19 + axis) - tap * arg(args, 16 + axis)
        stride = arg(args, 13 + axis)
        return at // stride if at % stride == 0 and at // stride < arg(args, 4 + axis) else -1

    @register_jitable
    def add_tap(args: int, line: int, area: int, to: int, apart: int, tap: int, kw: int) -> None:
        """Add a row of the source, through a tap, to the rows of all channels, ``apart`` bytes."""
        stride, first = arg(args, 15), kw * arg(args, 18) - arg(args, 21)
        taps = arg(args, 7) * arg(args, 8) * arg(args, 9)
        begin = max(0, (stride - 1 - first) // stride)
        end = min(arg(args, 6), (arg(args, 12) - 1 - first) // stride + 1)
        for c in range(arg(args, 2)):
            channel = c * taps + tap
            source = line + channel // lanes * area + channel % lanes * item
            row = to + c * apart + first * item
            for i in range(begin, end):
                place = row + i * stride * item
                store(place, load(place) + load(source + i * pixel))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, blocks = arg(args, 2), arg(args, 3)
        height, width = arg(args, 5), arg(args, 6)
        area = arg(args, 4) * height * width * pixel
        slices, rows, columns = arg(args, 10), arg(args, 11), arg(args, 12)
        apart = slices * rows * columns * item
        for unit in range(begin, end):
            h, d, image = unit % rows, unit // rows % slices, unit // rows // slices
            at = arg(args, 0) + image * blocks * area
            to = arg(args, 1) + image * channels * apart + (d * rows + h) * columns * item
            for c in range(channels):
                bias = load(arg(args, 22) + c * item) if arg(args, 22) != 0 else get(zero(), 0)
                for i in range(columns):
                    store(to + c * apart + i * item, bias)
            for kd in range(arg(args, 7)):
                z = read(args, 0, d, kd)
                for kh in range(arg(args, 8)):
                    y = read(args, 1, h, kh)
                    if z < 0 or y < 0:
                        continue
                    line = at + (z * height + y) * width * pixel
                    first = (kd * arg(args, 8) + kh) * arg(args, 9)
                    for kw in range(arg(args, 9)):
                        add_tap(args, line, area, to, apart, first + kw, kw)

    return kernel


def phases(*, item: int, lanes: int) -> Callable[..., None]:
    """Return the kernel that sorts ``[N][C][H][W]`` by phases, into blocks of ``lanes`` channels.

    Channel ``(i * C + c) * across + j`` of the result has the pixels of channel c in the rows
    ``i, i + down, ...`` and the columns ``j, j + across, ...``, with zeros where the image ends.

    Args:
        item: Bytes of an element, 4 or 8.
        lanes: Elements of a block.

    Words::

        0 source  1 target  2 channels  3 rows  4 columns  5 rows and 6 columns of the target
        7 step down  8 step across  9 blocks, those beyond the last phase of zeros

    Units: N * rows of the target.
    """
    dtype = "float32" if item == 4 else "float64"
    load, store = ld(dtype), st(dtype)
    pixel = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, height, width = arg(args, 2), arg(args, 3), arg(args, 4)
        rows, columns, blocks = arg(args, 5), arg(args, 6), arg(args, 9)
        down, across = arg(args, 7), arg(args, 8)
        for unit in range(begin, end):
            image, row = unit // rows, unit % rows
            for channel in range(blocks * lanes):
                to = ((image * blocks + channel // lanes) * rows + row) * columns * pixel
                to += arg(args, 1) + channel % lanes * item
                i, rest = channel // (channels * across), channel % (channels * across)
                c, j = rest // across, rest % across
                h = row * down + i
                count = (width - j + across - 1) // across if i < down and h < height else 0
                source = arg(args, 0) + (((image * channels + c) * height + h) * width + j) * item
                for w in range(count):
                    store(to + w * pixel, load(source + w * across * item))
                for w in range(count, columns):
                    store(to + w * pixel, 0.0)

    return kernel
