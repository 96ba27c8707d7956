"""Kernels that convert images between layouts, in several orders."""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.matrix_registers import ROW_BYTES, ROWS
from subgraph.engine.codegen.simd import ld, load_as, memcpy, st, vec
from subgraph.engine.codegen.tiling import MATRIX_DEPTH
from subgraph.engine.codegen.transpose import transposer
from subgraph.engine.planner.layout_arguments import (
    CopyBytesArguments,
    RegistersArguments,
    ReorderArguments,
    StridesArguments,
)

from .arguments import PhasesArguments


def copy() -> Callable[..., None]:
    """Return the kernel of `CopyBytesArguments`."""
    arguments = view_of(CopyBytesArguments)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        first = begin * a.block
        last = min(end * a.block, a.size)
        memcpy(a.target + first, a.source + first, last - first)

    return kernel


def from_strides() -> Callable[..., None]:
    """Return the kernel of `StridesArguments`: it copies rows from anywhere to dense memory."""
    arguments = view_of(StridesArguments)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        n_1, n_2, n_3 = a.size_1, a.size_2, a.size_3
        for unit in range(begin, end):
            rest = unit // n_3
            offset = unit % n_3 * a.step_3 + rest % n_2 * a.step_2
            rest //= n_2
            offset += rest % n_1 * a.step_1 + rest // n_1 * a.step_0
            memcpy(a.target + unit * a.row, a.source + offset, a.row)

    return kernel


def to_blocked(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel of `ReorderArguments` from the plain to the blocked layout.

    It copies ``[N][C][pixels]`` to ``[N][C / lanes][pixels][lanes]``. Channels beyond C are zero.

    Args:
        dtype: Dtype of the elements.
        lanes: Channels of a block.
    """
    return _conversion(dtype, lanes, to_blocks=True)


def to_plain(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel of `ReorderArguments` from the blocked to the plain layout.

    It copies ``[N][C / lanes][pixels][lanes]`` to ``[N][C][pixels]``.

    Args:
        dtype: Dtype of the elements.
        lanes: Channels of a block.
    """
    return _conversion(dtype, lanes, to_blocks=False)


def _conversion(dtype: str, lanes: int, to_blocks: bool) -> Callable[..., None]:
    """Return the kernel of `ReorderArguments` to blocks of channels, or from them."""
    arguments = view_of(ReorderArguments)
    v = vec(dtype, lanes)
    store, zero, item = v.store, v.zero, v.itemsize
    transpose_block = transposer(dtype, lanes)
    pixel = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, pixels, blocks = a.channels, a.pixels, a.blocks
        part, parts = a.part, a.parts
        for unit in range(begin, end):
            first, block = unit % parts * part, unit // parts % blocks
            image = unit // parts // blocks
            # The lanes beyond the last channel have no place in the plain image: storing them
            # there would overwrite the next image or leave the array.
            taken = min(lanes, channels - block * lanes)
            plain = (image * channels + block * lanes) * pixels * item
            blocked = (image * blocks + block) * pixels * pixel
            for p in range(first, min(pixels, first + part), lanes):
                count = min(lanes, pixels - p, first + part - p)
                at_plain, at_blocked = plain + p * item, blocked + p * pixel
                if to_blocks:
                    source, to = a.source + at_plain, a.target + at_blocked
                    # The transposition below writes the existing channels only. Kernels read the
                    # others, and a NaN left there would spread through sums.
                    if taken < lanes:
                        for i in range(count):
                            store(to + i * pixel, zero())
                    transpose_block(source, pixels * item, taken, count, to, pixel)
                else:
                    source, to = a.source + at_blocked, a.target + at_plain
                    transpose_block(source, pixel, count, taken, to, pixels * item)

    return kernel


def to_channels_last(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel of `ReorderArguments` from the blocked layout to channels last.

    It copies ``[N][C / lanes][pixels][lanes]`` to ``[N][pixels][C]``; see `_channels_last`.

    Args:
        dtype: Dtype of the elements.
        lanes: Channels of a block.
    """
    return _channels_last(dtype, lanes, to_blocks=False)


def from_channels_last(*, dtype: str, lanes: int) -> Callable[..., None]:
    """Return the kernel of `ReorderArguments` from channels last to the blocked layout.

    It copies ``[N][pixels][C]`` to ``[N][C / lanes][pixels][lanes]``, with zeros in the channels
    beyond C; see `_channels_last`.

    Args:
        dtype: Dtype of the elements.
        lanes: Channels of a block.
    """
    return _channels_last(dtype, lanes, to_blocks=True)


def _channels_last(dtype: str, lanes: int, to_blocks: bool) -> Callable[..., None]:
    """Return the kernel of `ReorderArguments` between blocks of channels and channels last.

    In both layouts the channels of a block lie side by side at each pixel, so that vectors are
    copied. A work unit is a part of the pixels of all blocks, as many as the L1 cache holds.
    """
    arguments = view_of(ReorderArguments)
    v = vec(dtype, lanes)
    load, load_n, store, store_n, item = v.load, v.load_n, v.store, v.store_n, v.itemsize
    pixel = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, pixels, blocks, part, parts = a.channels, a.pixels, a.blocks, a.part, a.parts
        row = channels * item
        for unit in range(begin, end):
            first, image = unit % parts * part, unit // parts
            count = min(part, pixels - first)
            for block in range(blocks):
                taken = min(lanes, channels - block * lanes)
                last = (image * pixels + first) * row + block * pixel
                blocked = ((image * blocks + block) * pixels + first) * pixel
                if to_blocks:
                    source, to = a.source + last, a.target + blocked
                    for p in range(count):
                        if taken == lanes:
                            store(to + p * pixel, load(source + p * row))
                        else:
                            store(to + p * pixel, load_n(source + p * row, taken))
                else:
                    source, to = a.source + blocked, a.target + last
                    for p in range(count):
                        if taken == lanes:
                            store(to + p * row, load(source + p * pixel))
                        else:
                            store_n(to + p * row, taken, load(source + p * pixel))

    return kernel


def from_bfloat16(*, lanes: int) -> Callable[..., None]:
    """Return the kernel of `ReorderArguments` from the layout "bfloat16" to the blocked one.

    It converts ``[N][C / (2 lanes)][pixels][2 lanes]`` to ``[N][C / lanes][pixels][lanes]``.

    Args:
        lanes: Channels of a block of float32.
    """
    arguments = view_of(ReorderArguments)
    load, store = load_as("bfloat16", "float32", lanes), vec("float32", lanes).store
    pixel = lanes * 4  # bytes of a pixel, in both layouts

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        pixels, blocks, part, parts = a.pixels, a.blocks, a.part, a.parts
        for unit in range(begin, end):
            first, block = unit % parts * part, unit // parts % blocks
            image = unit // parts // blocks
            source = a.source + (image * ((blocks + 1) // 2) + block // 2) * pixels * pixel
            source += block % 2 * lanes * 2
            target = a.target + (image * blocks + block) * pixels * pixel
            for p in range(first, min(pixels, first + part)):
                store(target + p * pixel, load(source + p * pixel))

    return kernel


def from_registers() -> Callable[..., None]:
    """Return the kernel of `RegistersArguments`, which converts registers to rows of float32."""
    arguments = view_of(RegistersArguments)
    lanes = ROW_BYTES // 4  # a row of a register has two vectors
    load, store_n = load_as("bfloat16", "float32", lanes), vec("float32", lanes).store_n

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        steps = (a.columns + MATRIX_DEPTH - 1) // MATRIX_DEPTH
        for row in range(begin * ROWS, min(end * ROWS, a.rows)):
            source = a.source + (row // ROWS * steps * ROWS + row % ROWS) * ROW_BYTES
            target = a.target + row * a.columns * 4
            for column in range(0, a.columns, lanes):
                at = source + column // MATRIX_DEPTH * ROWS * ROW_BYTES
                at += column % MATRIX_DEPTH * 2
                store_n(target + column * 4, min(lanes, a.columns - column), load(at))

    return kernel


def phases(*, item: int, lanes: int) -> Callable[..., None]:
    """Return the kernel of `PhasesArguments`, which writes an image's phases as blocked channels.

    Channel ``(i * C + c) * across + j`` of the result has the pixels of channel c in the rows
    ``i, i + down, ...`` and the columns ``j, j + across, ...``, and zeros beyond the image.

    Args:
        item: Bytes of an element, 4 or 8.
        lanes: Elements of a block.
    """
    arguments = view_of(PhasesArguments)
    dtype = "float32" if item == 4 else "float64"
    load, store = ld(dtype), st(dtype)
    pixel = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, height, width = a.channels, a.height, a.width
        rows, columns, blocks = a.rows, a.columns, a.blocks
        down, across = a.down, a.across
        for unit in range(begin, end):
            image, row = unit // rows, unit % rows
            for channel in range(blocks * lanes):
                to = ((image * blocks + channel // lanes) * rows + row) * columns * pixel
                to += a.target + channel % lanes * item
                i, rest = channel // (channels * across), channel % (channels * across)
                c, j = rest // across, rest % across
                h = row * down + i
                # Channels that only complete the last block have i >= down, and the last row of a
                # phase can lie below the image. Nothing may be read for them; their pixels are
                # zero.
                count = (width - j + across - 1) // across if i < down and h < height else 0
                source = a.source + (((image * channels + c) * height + h) * width + j) * item
                for w in range(count):
                    store(to + w * pixel, load(source + w * across * item))
                for w in range(count, columns):
                    store(to + w * pixel, 0.0)

    return kernel
