"""Kernels that move elements: strided copies, transpositions, fills, tables along an axis.

They depend on the size of an element, not on its dtype. Arrays are rows inside any number of outer
dimensions, with strides in bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.dtypes import UNSIGNED
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.irtools import ELEMENTS
from subgraph.engine.codegen.simd import ld as loads
from subgraph.engine.codegen.simd import ld_i32, ld_i64, memcpy, memset, vec
from subgraph.engine.codegen.simd import st as stores
from subgraph.engine.codegen.transpose import interleaver, repeater, transposer
from subgraph.ops.elementwise.byte_arguments import ByteTableArguments, ClearPaddingArguments

from .arguments import (
    ChannelsArguments,
    CopyArguments,
    FillArguments,
    ReverseSequenceArguments,
    SequenceArguments,
    TakeArguments,
    TakeLastAxesArguments,
    TransposeArguments,
    TriluArguments,
    ZipArguments,
)

WORDS = UNSIGNED


@register_jitable
def outer_offset(dims: int, count: int, rest: int, which: int) -> int:
    """Return the offset in bytes of outer index ``rest`` for operand ``which`` (0 or 1).

    Args:
        dims: Address of the outer dimensions: size, bytes in operand 0, bytes in operand 1 of each.
        count: Number of outer dimensions.
        rest: The index in row-major order, less than the product of the sizes.
        which: The operand.
    """
    offset = 0
    # Each dimension has three int64 values, 24 bytes. The last one varies fastest in row-major
    # order, so it is taken from the index first.
    at = dims + 24 * count
    for _ in range(count):
        at -= 24
        size = ld_i64(at)
        offset += rest % size * ld_i64(at + 8 + 8 * which)
        rest //= size
    return offset


def row_copy(item: int) -> Callable[..., None]:
    """Return ``copy(to, source, bytes)``, which copies short rows by vectors, others by memcpy."""
    v, half = vec("uint8", 32), vec("uint8", 16)
    load, store, load_half, store_half = v.load, v.store, half.load, half.store
    one, put = loads(WORDS[item]), stores(WORDS[item])

    @register_jitable
    def copy_row(to: int, source: int, count: int) -> None:
        # From 1024 bytes on (an estimate) the call of memcpy costs little next to the copy.
        if count >= 1024:
            memcpy(to, source, count)
            return
        at = 0
        while at + 32 <= count:
            store(to + at, load(source + at))
            at += 32
        # The last vector ends with the row and overlaps the one before it. It writes the same bytes
        # a second time, but none beyond the row, which may belong to another thread.
        if at == count:
            return
        if count >= 32:
            store(to + count - 32, load(source + count - 32))
        elif count >= 16:
            store_half(to, load_half(source))
            store_half(to + count - 16, load_half(source + count - 16))
        else:
            while at < count:
                put(to + at, one(source + at))
                at += item

    return copy_row


def copy(*, item: int, kind: str) -> Callable[..., None]:
    """Return the kernel of `CopyArguments`, which copies a strided array.

    Args:
        item: Bytes of an element.
        kind: ``"rows"`` if the rows of both arrays are contiguous, ``"strided"`` in general.
    """
    arguments = view_of(CopyArguments)
    load, store = loads(WORDS[item]), stores(WORDS[item])
    whole = kind == "rows"
    copy_row = row_copy(item)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        source, target = a.source + a.source_offset, a.target + a.target_offset
        if source == target:  # the planner has placed the output in the memory of the input
            return
        size, block, rows, row_block = a.row_size, a.row_block, a.rows, a.rows_block
        from_row, to_row = a.source_row, a.target_row
        from_step, to_step = a.source_step, a.target_step
        outer = a.outer
        chunks, row_chunks = (size + block - 1) // block, (rows + row_block - 1) // row_block
        for unit in range(begin, end):
            first = unit % chunks * block
            rest = unit // chunks
            row = rest % row_chunks * row_block
            rest //= row_chunks
            x = source + row * from_row + first * from_step
            y = target + row * to_row + first * to_step
            x += outer_offset(a.dims, outer, rest, 0)
            y += outer_offset(a.dims, outer, rest, 1)
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


def channels(*, item: int, lanes: int) -> Callable[..., None]:
    """Return the kernel of `ChannelsArguments`, which copies channels between images in blocks.

    The channels may begin at any lane of a block, in the source and in the target. Behind the last
    channel of the target the lanes of its block are set to 0.

    Args:
        item: Bytes of an element.
        lanes: Channels of a block.
    """
    arguments = view_of(ChannelsArguments)
    v = vec(WORDS[item], lanes)
    load_n, store_n, zero, pixel = v.load_n, v.store_n, v.zero, lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        pixels, part, first_block = a.pixels, a.part, a.target_first // lanes
        parts = (pixels + part - 1) // part
        blocks = (a.target_first + a.count - 1) // lanes - first_block + 1
        for unit in range(begin, end):
            first = unit % parts * part
            block = first_block + unit // parts % blocks
            image = unit // parts // blocks
            taken = min(part, pixels - first)
            target = a.target + ((image * a.target_blocks + block) * pixels + first) * pixel
            at = max(a.target_first, block * lanes)
            last = min(a.target_first + a.count, (block + 1) * lanes)
            # The channels of a block of the target lie in at most two blocks of the source.
            while at < last:
                channel = a.source_first + at - a.target_first
                lane, source_block = channel % lanes, channel // lanes
                source = a.source + lane * item
                source += ((image * a.source_blocks + source_block) * pixels + first) * pixel
                count, to = min(last - at, lanes - lane), target + at % lanes * item
                for i in range(taken):
                    store_n(to + i * pixel, count, load_n(source + i * pixel, count))
                at += count
            if last == a.target_channels:
                rest, to = (block + 1) * lanes - last, target + last % lanes * item
                for i in range(taken if rest > 0 else 0):
                    store_n(to + i * pixel, rest, zero())

    return kernel


def transpose(*, item: int, lanes: int) -> Callable[..., None]:
    """Return the kernel of `TransposeArguments`, which transposes matrices.

    Args:
        item: Bytes of an element.
        lanes: Rows and columns of the square blocks that are transposed in registers.
    """
    arguments = view_of(TransposeArguments)
    transpose_block = transposer(WORDS[item], lanes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        source, target = a.source + a.source_offset, a.target + a.target_offset
        columns, rows = a.columns, a.rows
        from_row, to_row = a.source_row, a.target_row
        column_block, row_block, outer = a.columns_block, a.rows_block, a.outer
        column_tiles = (columns + column_block - 1) // column_block
        row_tiles = (rows + row_block - 1) // row_block
        for unit in range(begin, end):
            row = unit % row_tiles * row_block
            rest = unit // row_tiles
            column = rest % column_tiles * column_block
            rest //= column_tiles
            x = source + outer_offset(a.dims, outer, rest, 0)
            y = target + outer_offset(a.dims, outer, rest, 1)
            row_end = min(rows, row + row_block)
            column_end = min(columns, column + column_block)
            row_whole = row_end - (row_end - row) % lanes
            column_whole = column_end - (column_end - column) % lanes
            for c in range(column, column_whole, lanes):
                for r in range(row, row_whole, lanes):
                    block = x + r * from_row + c * item
                    to = y + c * to_row + r * item
                    transpose_block(block, from_row, lanes, lanes, to, to_row)
            # If they reach back into the tile of another unit, both units write the same values.
            # Blocks at the edges are moved into the matrix and overlap the blocks before them.
            last_row, last_column = max(row_end - lanes, 0), max(column_end - lanes, 0)
            for c in range(column, column_end, lanes):
                left = c if c < column_whole else last_column
                for r in range(row_whole if c < column_whole else row, row_end, lanes):
                    high = r if r < row_whole else last_row
                    transpose_block(
                        x + high * from_row + left * item,
                        from_row,
                        min(lanes, row_end - high),
                        min(lanes, column_end - left),
                        y + left * to_row + high * item,
                        to_row,
                    )

    return kernel


def zip_rows(*, item: int, lanes: int, count: int, apart: bool) -> Callable[..., None]:
    """Return the kernel of `ZipArguments`, which interleaves a few rows or takes them apart.

    Args:
        item: Bytes of an element.
        lanes: Elements of a vector.
        count: Number of rows, 2 to 4.
        apart: Take interleaved rows apart instead of interleaving rows.
    """
    arguments = view_of(ZipArguments)
    zip_block = interleaver(WORDS[item], lanes, count, apart)
    load, store = loads(WORDS[item]), stores(WORDS[item])
    from_item, to_item = (count * item, item) if apart else (item, count * item)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        source, target = a.source + a.source_offset, a.target + a.target_offset
        size, block, step, outer = a.row_size, a.row_block, a.row_step, a.outer
        from_step, to_step = (item, step) if apart else (step, item)
        tiles = (size + block - 1) // block
        for unit in range(begin, end):
            first = unit % tiles * block
            rest = unit // tiles
            x = source + outer_offset(a.dims, outer, rest, 0) + first * from_item
            y = target + outer_offset(a.dims, outer, rest, 1) + first * to_item
            elements = min(block, size - first)
            whole = elements // lanes * lanes
            for i in range(0, whole, lanes):
                zip_block(x + i * from_item, y + i * to_item, step)
            for i in range(whole, elements):
                for k in range(count):
                    value = load(x + i * from_item + k * from_step)
                    store(y + i * to_item + k * to_step, value)

    return kernel


def fill(*, item: int) -> Callable[..., None]:
    """Return the kernel of `FillArguments`, which fills an array with one element.

    Args:
        item: Bytes of an element.
    """
    arguments = view_of(FillArguments)
    load, store = loads(WORDS[item]), stores(WORDS[item])
    v = vec(WORDS[item], 64 // item)
    splat, store_all = v.splat, v.store
    lanes = 64 // item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        target, size, block, value = a.target, a.size, a.block, load(a.value)
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
    """Return the kernel of `SequenceArguments`, which writes ``start + i * delta``.

    Args:
        dtype: Of the numbers.
    """
    arguments = view_of(SequenceArguments)
    load, store = loads(dtype), stores(dtype)
    number, _, item = ELEMENTS[dtype]

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        target, size, block = a.target, a.size, a.block
        start, delta = load(a.start), load(a.delta)
        for i in range(begin * block, min(size, end * block)):
            # Range is defined by the index. Adding delta again and again would accumulate rounding
            # errors and make the units depend on each other.
            store(target + i * item, number(start + number(i) * delta))

    return kernel


def take(*, item: int) -> Callable[..., None]:
    """Return the kernel of `TakeArguments`, which takes slices along an axis by a table.

    ``y[o, j, :] = x[o, table[j], :]``, or the pad element if ``table[j]`` is -1.

    Args:
        item: Bytes of an element.
    """
    arguments = view_of(TakeArguments)
    load, store = loads(WORDS[item]), stores(WORDS[item])
    copy_row = row_copy(item)

    @register_jitable
    def take_each(a: TakeArguments, x: int, y: int, first: int, stop: int) -> None:
        """Copy the slices from ``first`` to before ``stop`` of the target one by one.

        Args:
            a: The arguments.
            x: Address of the first slice of the axis in the source.
            y: Address of the first slice of the axis in the target.
            first: First slice of the target.
            stop: The slice after the last one.
        """
        table, inner = a.table, a.inner
        pad = load(a.pad)
        if inner == 1:
            for j in range(first, stop):
                # A pad loads element 0 and discards it: the address stays inside the axis and the
                # choice needs no branch.
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
        a = arguments(args)
        taken, block = a.taken, a.block
        slice_bytes = a.inner * item
        run, run_end = a.run, a.run + a.run_size
        tiles = (taken + block - 1) // block
        for unit in range(begin, end):
            outer, first = unit // tiles, unit % tiles * block
            stop = min(taken, first + block)
            x = a.x + outer * a.axis_size * slice_bytes
            y = a.y + outer * taken * slice_bytes
            # The slices from run to run_end of the target are consecutive in the source, such as
            # the interior of a Pad, so one copy moves those that lie in this unit.
            low = min(max(run, first), stop)
            high = min(max(run_end, low), stop)
            take_each(a, x, y, first, low)
            if low < high:
                at = ld_i64(a.table + 8 * low)
                copy_row(y + low * slice_bytes, x + at * slice_bytes, (high - low) * slice_bytes)
            take_each(a, x, y, high, stop)

    return kernel


def take_last_axes(*, item: int, lanes: int, times: int) -> Callable[..., None]:
    """Return the kernel of `TakeLastAxesArguments`, which takes elements of two axes by tables.

    Args:
        item: Bytes of an element.
        lanes: Elements of a vector.
        times: Repetitions of each element of a row; 0: a table has the elements.
    """
    arguments = view_of(TakeLastAxesArguments)
    load, store, copy_row = loads(WORDS[item]), stores(WORDS[item]), row_copy(item)
    repeat = repeater(WORDS[item], lanes, max(times, 1))

    @register_jitable
    def spread(a: TakeLastAxesArguments, x: int, y: int) -> None:
        """Write the row at address ``y`` from the row at address ``x``."""
        size, taken = a.row_size, a.taken_row_size
        if times == 1:
            copy_row(y, x, size * item)
        elif times == 0 or size < lanes:
            table, run = a.column_table, a.run
            behind = run + a.run_size
            for j in range(run):
                store(y + j * item, load(x + ld_i32(table + 4 * j) * item))
            if run < behind:
                first = ld_i32(table + 4 * run)
                copy_row(y + run * item, x + first * item, (behind - run) * item)
            for j in range(behind, taken):
                store(y + j * item, load(x + ld_i32(table + 4 * j) * item))
        else:
            for i in range(0, size, lanes):
                # The last vector is moved into the row, as reading beyond it may leave the array;
                # it writes the same values again.
                at = min(i, size - lanes) * item
                repeat(x + at, y + at * times)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        rows, size, taken, block = a.row_table, a.rows, a.taken_rows, a.block
        from_row, to_row = a.row_size * item, a.taken_row_size * item
        tiles = (taken + block - 1) // block
        for unit in range(begin, end):
            image, first = unit // tiles, unit % tiles * block
            # No row has the index -1, so a unit always computes its first row and never reads one
            # that another unit may still be writing.
            before = -1
            for j in range(first, min(taken, first + block)):
                at = ld_i32(rows + 4 * j)
                y = a.y + (image * taken + j) * to_row
                if at == before:
                    copy_row(y, y - to_row, to_row)
                else:
                    spread(a, a.x + (image * size + at) * from_row, y)
                before = at

    return kernel


def clear_padding() -> Callable[..., None]:
    """Return the kernel of `ClearPaddingArguments`.

    It writes zeros to the lanes of the last channel block that have no channel.
    """
    arguments = view_of(ClearPaddingArguments)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        blocks, pixels, pixel, used = a.blocks, a.pixels, a.pixel, a.used
        for unit in range(begin, end):
            at = a.array + ((unit + 1) * blocks - 1) * pixels * pixel
            for i in range(pixels):
                memset(at + i * pixel + used, 0, pixel - used)

    return kernel


def byte_table(*, item: int) -> Callable[..., None]:
    """Return the kernel of `ByteTableArguments`: ``y[i] = table[x[i]]``.

    Args:
        item: Bytes of an element of the table.
    """
    arguments = view_of(ByteTableArguments)
    byte = loads("uint8")
    load, store = loads(WORDS[item]), stores(WORDS[item])

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        x, y, table = a.x, a.y, a.table
        at = begin * a.block
        stop = min(end * a.block, a.size)
        while at + 8 <= stop:
            # The sign of the shifted word does not matter, since only its lowest byte is kept.
            word = ld_i64(x + at)  # one load for eight bytes
            for k in range(8):
                store(y + (at + k) * item, load(table + ((word >> (8 * k)) & 255) * item))
            at += 8
        while at < stop:
            store(y + at * item, load(table + byte(x + at) * item))
            at += 1

    return kernel


def trilu(*, item: int, upper: bool) -> Callable[..., None]:
    """Return the kernel of `TriluArguments`, which keeps a triangle of matrices.

    Args:
        item: Bytes of an element.
        upper: Keep the upper triangle, else the lower one.
    """
    arguments = view_of(TriluArguments)
    size = item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        rows, columns, diagonal = a.rows, a.columns, a.diagonal
        step = columns * size
        for unit in range(begin, end):
            x, y = a.x + unit * step, a.y + unit * step
            edge = unit % rows + diagonal
            if not upper:
                edge += 1
            # A row can lie wholly on one side of the diagonal; a negative length would copy beyond
            # the row.
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
    """Return the kernel of `ReverseSequenceArguments`.

    It reverses the first elements of each sequence and copies the others.

    Args:
        item: Bytes of a number.
    """
    arguments = view_of(ReverseSequenceArguments)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        steps, inner = a.steps, a.inner * item
        for unit in range(begin, end):
            # A length out of range is reported by a step of its own; clamped here, it reads no
            # memory outside the sequence.
            length = min(max(ld_i64(a.lengths + 8 * unit), 0), steps)
            base = unit * a.batch_step
            for t in range(steps):
                at = length - 1 - t if t < length else t
                memcpy(
                    a.y + base + t * a.time_step,
                    a.x + base + at * a.time_step,
                    inner,
                )

    return kernel
