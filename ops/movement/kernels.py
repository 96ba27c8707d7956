"""Kernels that move elements: strided copies, transpositions, fills, tables along an axis.

They know the size of an element only, not its dtype. Every one walks a grid: rows inside any number
of outer dimensions, with strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.irtools import ELEMENTS
from subgraph.engine.codegen.simd import ld as loads
from subgraph.engine.codegen.simd import ld_i32, ld_i64, memcpy, memset, vec
from subgraph.engine.codegen.simd import st as stores
from subgraph.engine.codegen.transpose import repeater, transposer, zipper

WORDS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


@register_jitable
def arg(args: int, index: int) -> int:
    """Return word ``index`` of the argument block."""
    word: int = ld_i64(args + 8 * index)
    return word


@register_jitable
def outer_offset(args: int, first: int, count: int, rest: int, which: int) -> int:
    """Return the offset in bytes of outer index ``rest`` for operand ``which`` (0 or 1).

    From word ``first`` on, each of ``count`` dimensions has (size, bytes in 0, bytes in 1).
    """
    offset = 0
    at = args + 8 * (first + 3 * count)
    for _ in range(count):
        at -= 24
        size = ld_i64(at)
        offset += rest % size * ld_i64(at + 8 + 8 * which)
        rest //= size
    return offset


def row_copy(item: int) -> Callable[..., None]:
    """Return ``copy(to, source, bytes)``: short rows by vectors, long ones by the C library."""
    v = vec("uint8", 32)
    load, store = v.load, v.store
    one, put = loads(WORDS[item]), stores(WORDS[item])

    @register_jitable
    def copy_row(to: int, source: int, count: int) -> None:
        if count >= 1024:
            memcpy(to, source, count)
            return
        at = 0
        while at + 32 <= count:
            store(to + at, load(source + at))
            at += 32
        if at < count and count >= 32:
            store(to + count - 32, load(source + count - 32))
        elif at < count:
            while at < count:
                put(to + at, one(source + at))
                at += item

    return copy_row


def copy(*, item: int, kind: str) -> Callable[..., None]:
    """Return the kernel that copies a strided array.

    Args:
        item: Bytes of an element.
        kind: ``"rows"`` where both rows are contiguous, ``"strided"`` in general.

    Words::

        0 source  1 target  2, 3 bytes added to them  4 elements of a row  5 of them in a unit
        6 rows  7 of them in a unit  8, 9 bytes between rows  10, 11 bytes between elements
        12 outer dimensions, then (size, bytes in source, bytes in target) of each

    Units: outer sizes * row tiles * tiles along a row.
    """
    load, store = loads(WORDS[item]), stores(WORDS[item])
    whole = kind == "rows"
    copy_row = row_copy(item)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        source, target = arg(args, 0) + arg(args, 2), arg(args, 1) + arg(args, 3)
        size, block, rows, row_block = arg(args, 4), arg(args, 5), arg(args, 6), arg(args, 7)
        from_row, to_row, from_step, to_step = (
            arg(args, 8),
            arg(args, 9),
            arg(args, 10),
            arg(args, 11),
        )
        outer = arg(args, 12)
        chunks, row_chunks = (size + block - 1) // block, (rows + row_block - 1) // row_block
        for unit in range(begin, end):
            first = unit % chunks * block
            rest = unit // chunks
            row = rest % row_chunks * row_block
            rest //= row_chunks
            x = source + row * from_row + first * from_step
            y = target + row * to_row + first * to_step
            x += outer_offset(args, 13, outer, rest, 0)
            y += outer_offset(args, 13, outer, rest, 1)
            count = min(block, size - first)
            for _ in range(min(row_block, rows - row)):
                if whole:
                    copy_row(y, x, count * item)
                else:
                    for i in range(count):
                        store(y + i * to_step, load(x + i * from_step))
                x += from_row
                y += to_row

    return kernel


def transpose(*, item: int, lanes: int) -> Callable[..., None]:
    """Return the kernel that transposes matrices.

    Words::

        0 source  1 target  2, 3 bytes added to them
        4 columns of the source (contiguous there), rows of the target
        5 rows of the source, columns of the target (contiguous there)
        6 bytes between rows of the source  7 of the target
        8 columns of the source in a unit, 9 rows of it
        12 outer dimensions, then (size, bytes in source, bytes in target) of each

    Units: outer sizes * column tiles * row tiles.
    """
    turn = transposer(WORDS[item], lanes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        source, target = arg(args, 0) + arg(args, 2), arg(args, 1) + arg(args, 3)
        columns, rows = arg(args, 4), arg(args, 5)
        from_row, to_row = arg(args, 6), arg(args, 7)
        column_block, row_block, outer = arg(args, 8), arg(args, 9), arg(args, 12)
        column_tiles = (columns + column_block - 1) // column_block
        row_tiles = (rows + row_block - 1) // row_block
        for unit in range(begin, end):
            row = unit % row_tiles * row_block
            rest = unit // row_tiles
            column = rest % column_tiles * column_block
            rest //= column_tiles
            x = source + outer_offset(args, 13, outer, rest, 0)
            y = target + outer_offset(args, 13, outer, rest, 1)
            row_end = min(rows, row + row_block)
            column_end = min(columns, column + column_block)
            row_whole = row_end - (row_end - row) % lanes
            column_whole = column_end - (column_end - column) % lanes
            for c in range(column, column_whole, lanes):
                for r in range(row, row_whole, lanes):
                    block = x + r * from_row + c * item
                    turn(block, from_row, lanes, lanes, y + c * to_row + r * item, to_row)
            # Blocks at the edges lie within the matrix, over what is copied beside them.
            last_row, last_column = max(row_end - lanes, 0), max(column_end - lanes, 0)
            for c in range(column, column_end, lanes):
                left = c if c < column_whole else last_column
                for r in range(row_whole if c < column_whole else row, row_end, lanes):
                    high = r if r < row_whole else last_row
                    turn(
                        x + high * from_row + left * item,
                        from_row,
                        min(lanes, row_end - high),
                        min(lanes, column_end - left),
                        y + left * to_row + high * item,
                        to_row,
                    )

    return kernel


def zip_rows(*, item: int, lanes: int, count: int, apart: bool) -> Callable[..., None]:
    """Return the kernel that writes elements of a few rows in turn, or puts them apart again.

    Words::

        0 source  1 target  2, 3 bytes added to them
        4 elements of a row  5 of them in a unit  6 bytes between rows
        7 outer dimensions, then (size, bytes in source, bytes in target) of each

    Units: outer sizes * tiles of a row.
    """
    turn = zipper(WORDS[item], lanes, count, apart)
    load, store = loads(WORDS[item]), stores(WORDS[item])
    from_item, to_item = (count * item, item) if apart else (item, count * item)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        source, target = arg(args, 0) + arg(args, 2), arg(args, 1) + arg(args, 3)
        size, block, step, outer = arg(args, 4), arg(args, 5), arg(args, 6), arg(args, 7)
        from_step, to_step = (item, step) if apart else (step, item)
        tiles = (size + block - 1) // block
        for unit in range(begin, end):
            first = unit % tiles * block
            rest = unit // tiles
            x = source + outer_offset(args, 8, outer, rest, 0) + first * from_item
            y = target + outer_offset(args, 8, outer, rest, 1) + first * to_item
            elements = min(block, size - first)
            whole = elements // lanes * lanes
            for i in range(0, whole, lanes):
                turn(x + i * from_item, y + i * to_item, step)
            for i in range(whole, elements):
                for k in range(count):
                    value = load(x + i * from_item + k * from_step)
                    store(y + i * to_item + k * to_step, value)

    return kernel


def fill(*, item: int) -> Callable[..., None]:
    """Return the kernel that fills an array with one element.

    Words: ``0 target, 1 elements, 2 elements of a unit, 3 address of the element``.
    Units: tiles.
    """
    load, store = loads(WORDS[item]), stores(WORDS[item])
    v = vec(WORDS[item], 64 // item)
    splat, store_all = v.splat, v.store
    lanes = 64 // item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        target, size, block, value = arg(args, 0), arg(args, 1), arg(args, 2), load(arg(args, 3))
        whole = splat(value)
        i, stop = begin * block, min(size, end * block)
        while i + lanes <= stop:
            store_all(target + i * item, whole)
            i += lanes
        while i < stop:
            store(target + i * item, value)
            i += 1

    return kernel


def sequence(*, dtype: str) -> Callable[..., None]:
    """Return the kernel that writes ``start + i * delta``.

    Words: ``0 target, 1 elements, 2 elements of a unit, 3 address of start, 4 of delta``.
    Units: tiles.
    """
    load, store = loads(dtype), stores(dtype)
    number, _, item = ELEMENTS[dtype]

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        target, size, block = arg(args, 0), arg(args, 1), arg(args, 2)
        start, delta = load(arg(args, 3)), load(arg(args, 4))
        for i in range(begin * block, min(size, end * block)):
            store(target + i * item, number(start + number(i) * delta))

    return kernel


def take(*, item: int) -> Callable[..., None]:
    """Return the kernel that takes slices along an axis by a table made with the plan.

    ``y[o, j, :] = x[o, table[j], :]``, a pad element where the table has -1.

    Words::

        0 x  1 y  2 table (int64)  3 address of the pad element
        4 outer size  5 axis size in x  6 in y  7 elements of a slice  8 slices of y in a unit
        9 first place and  10 number of slices that lie side by side in x too

    Units: outer size * tiles of the axis in y.
    """
    load, store = loads(WORDS[item]), stores(WORDS[item])
    copy_row = row_copy(item)

    @register_jitable
    def places(args: int, x: int, y: int, first: int, stop: int) -> None:
        """Take slices first to stop one by one; x is the axis' begin, y that of the target's."""
        table, inner = arg(args, 2), arg(args, 7)
        pad = load(arg(args, 3))
        if inner == 1:
            for j in range(first, stop):
                at = ld_i64(table + 8 * j)
                value = load(x + max(at, 0) * item)
                store(y + j * item, value if at >= 0 else pad)
            return
        for j in range(first, stop):
            at = ld_i64(table + 8 * j)
            to = y + j * inner * item
            if at >= 0:
                copy_row(to, x + at * inner * item, inner * item)
            else:
                for i in range(inner):
                    store(to + i * item, pad)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        taken, block = arg(args, 6), arg(args, 8)
        slice_bytes = arg(args, 7) * item
        run, run_end = arg(args, 9), arg(args, 9) + arg(args, 10)
        tiles = (taken + block - 1) // block
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * block
            stop = min(taken, first + block)
            x = arg(args, 0) + outer * arg(args, 5) * slice_bytes
            y = arg(args, 1) + outer * taken * slice_bytes
            low = min(max(run, first), stop)
            high = min(max(run_end, low), stop)
            places(args, x, y, first, low)
            if low < high:
                at = ld_i64(arg(args, 2) + 8 * low)
                copy_row(y + low * slice_bytes, x + at * slice_bytes, (high - low) * slice_bytes)
            places(args, x, y, high, stop)

    return kernel


def take_places(*, item: int, lanes: int, times: int) -> Callable[..., None]:
    """Return the kernel that takes elements of the last two axes by tables made with the plan.

    Args:
        item: Bytes of an element.
        lanes: Elements of a vector.
        times: How often each element of a row is repeated; 0: what a table says.

    Words::

        0 x  1 y  2 row in x of each row (int32)  3 place in x along a row (int32)
        4 rows in x  5 in y  6 elements of a row in x  7 in y  8 rows of y in a unit
        9 first place along a row and  10 number of places that lie side by side in x too

    Units: images * tiles of rows.
    """
    load, store, copy_row = loads(WORDS[item]), stores(WORDS[item]), row_copy(item)
    repeat = repeater(WORDS[item], lanes, max(times, 1))

    @register_jitable
    def spread(args: int, x: int, y: int) -> None:
        """Write a row."""
        size, taken = arg(args, 6), arg(args, 7)
        if times == 1:
            copy_row(y, x, size * item)
        elif times == 0 or size < lanes:
            places, run = arg(args, 3), arg(args, 9)
            behind = run + arg(args, 10)
            for j in range(run):
                store(y + j * item, load(x + ld_i32(places + 4 * j) * item))
            if run < behind:
                first = ld_i32(places + 4 * run)
                copy_row(y + run * item, x + first * item, (behind - run) * item)
            for j in range(behind, taken):
                store(y + j * item, load(x + ld_i32(places + 4 * j) * item))
        else:
            for i in range(0, size, lanes):
                at = min(i, size - lanes) * item
                repeat(x + at, y + at * times)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        rows, size, taken, block = arg(args, 2), arg(args, 4), arg(args, 5), arg(args, 8)
        from_row, to_row = arg(args, 6) * item, arg(args, 7) * item
        tiles = (taken + block - 1) // block
        for unit in range(begin, end):
            image, first = unit // tiles, unit % tiles * block
            before = -1
            for j in range(first, min(taken, first + block)):
                at = ld_i32(rows + 4 * j)
                y = arg(args, 1) + (image * taken + j) * to_row
                if at == before:
                    copy_row(y, y - to_row, to_row)
                else:
                    spread(args, arg(args, 0) + (image * size + at) * from_row, y)
                before = at

    return kernel


def clear_padding() -> Callable[..., None]:
    """Return the kernel that zeroes what the last channel block has beyond the last channel.

    Words: ``0 array, 1 blocks, 2 pixels, 3 bytes of a block's pixel, 4 bytes of it in use``.
    Units: images.
    """

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        blocks, pixels, pixel, used = arg(args, 1), arg(args, 2), arg(args, 3), arg(args, 4)
        for unit in range(begin, end):
            at = arg(args, 0) + ((unit + 1) * blocks - 1) * pixels * pixel
            for i in range(pixels):
                memset(at + i * pixel + used, 0, pixel - used)

    return kernel


def byte_table(*, item: int) -> Callable[..., None]:
    """Return the kernel that looks bytes up in a table of 256: ``y[i] = table[x[i]]``.

    Args:
        item: Bytes of an element of the table.

    Words: ``0 x, 1 y, 2 table, 3 elements, 4 elements of a unit``. Units: of elements.
    """
    byte = loads("uint8")
    load, store = loads(WORDS[item]), stores(WORDS[item])

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        x, y, table = arg(args, 0), arg(args, 1), arg(args, 2)
        at = begin * arg(args, 4)
        stop = min(end * arg(args, 4), arg(args, 3))
        while at + 8 <= stop:
            word = ld_i64(x + at)  # one load for eight bytes
            for k in range(8):
                store(y + (at + k) * item, load(table + ((word >> (8 * k)) & 255) * item))
            at += 8
        while at < stop:
            store(y + at * item, load(table + byte(x + at) * item))
            at += 1

    return kernel


def trilu(*, item: int, upper: bool) -> Callable[..., None]:
    """Return the kernel that keeps a triangle of matrices.

    Words: ``0 x, 1 y, 2 rows, 3 columns, 4 diagonal, 5 rows of all matrices``. Units: rows.
    """
    size = item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        rows, columns, diagonal = arg(args, 2), arg(args, 3), arg(args, 4)
        step = columns * size
        for unit in range(begin, end):
            x, y = arg(args, 0) + unit * step, arg(args, 1) + unit * step
            edge = unit % rows + diagonal
            if not upper:
                edge += 1
            edge = min(max(edge, 0), columns)
            low, high = edge * size, (columns - edge) * size
            if upper:
                memset(y, 0, low)
                memcpy(y + low, x + low, high)
            else:
                memcpy(y, x, low)
                memset(y + low, 0, high)

    return kernel


def reverse_sequence(*, item: int) -> Callable[..., None]:
    """Return the kernel that reverses the first elements of sequences.

    Words: ``0 x, 1 y, 2 lengths (int64), 3 batch size, 4 steps, 5 elements of a slice,
    6 bytes per batch entry, 7 bytes per step``. Units: batch size.
    """

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        steps, inner = arg(args, 4), arg(args, 5) * item
        for unit in range(begin, end):
            length = min(max(ld_i64(arg(args, 2) + 8 * unit), 0), steps)
            base = unit * arg(args, 6)
            for t in range(steps):
                at = length - 1 - t if t < length else t
                memcpy(
                    arg(args, 1) + base + t * arg(args, 7),
                    arg(args, 0) + base + at * arg(args, 7),
                    inner,
                )

    return kernel
