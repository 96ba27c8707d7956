"""Turning activations between the plain and the blocked layout, square blocks at a time."""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.simd import vec
from subgraph.engine.tile import arg, item_bytes
from subgraph.engine.transpose import transposer


def to_blocked(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel from ``[N][C][pixels]`` to ``[N][C / lanes][pixels][lanes]``.

    Words: ``0 source, 1 target, 2 channels, 3 pixels``. Channels beyond C become zero.
    Units: N * ceil(C / lanes).
    """
    v = vec(dtype, lanes)
    store, zero = v.store, v.zero
    turn = transposer(dtype, lanes)
    item = item_bytes(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, pixels = arg(args, 2), arg(args, 3)
        blocks = (channels + lanes - 1) // lanes
        for unit in range(begin, end):
            image, block = unit // blocks, unit % blocks
            taken = min(lanes, channels - block * lanes)
            source = arg(args, 0) + (image * channels + block * lanes) * pixels * item
            target = arg(args, 1) + unit * pixels * lanes * item
            for p in range(0, pixels, lanes):
                count = min(lanes, pixels - p)
                to = target + p * lanes * item
                if taken < lanes:
                    for i in range(count):
                        store(to + i * lanes * item, zero())
                turn(source + p * item, pixels * item, taken, count, to, lanes * item)

    return kernel


def to_plain(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel from ``[N][C / lanes][pixels][lanes]`` to ``[N][C][pixels]``.

    Words and units are those of ``to_blocked``.
    """
    turn = transposer(dtype, lanes)
    item = item_bytes(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        channels, pixels = arg(args, 2), arg(args, 3)
        blocks = (channels + lanes - 1) // lanes
        for unit in range(begin, end):
            image, block = unit // blocks, unit % blocks
            taken = min(lanes, channels - block * lanes)
            source = arg(args, 0) + unit * pixels * lanes * item
            target = arg(args, 1) + (image * channels + block * lanes) * pixels * item
            for p in range(0, pixels, lanes):
                count = min(lanes, pixels - p)
                turn(
                    source + p * lanes * item,
                    lanes * item,
                    count,
                    taken,
                    target + p * item,
                    pixels * item,
                )

    return kernel
