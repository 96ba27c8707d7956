"""Shuffles of whole vectors: transposition of blocks, interleaving of rows, repetition of elements.

Packing of operands, conversion of layouts and reductions across columns use the transposition.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from subgraph.engine.codegen.irtools import (
    I64,
    INT64,
    VOID,
    concatenate,
    define,
    first_lanes,
    load_at,
    load_masked,
    shuffle_vectors,
    store_at,
    store_masked,
)
from subgraph.engine.codegen.simd import vec

_LANE_BYTES = 16  # of a 128-bit lane, within which shuffles are cheapest on x86 and AArch64


def emit_transpose(builder: Any, rows: list[Any], itemsize: int) -> list[Any]:
    """Emit the transposition of ``lanes`` vectors of ``lanes`` elements, in log2(lanes) rounds.

    Each round is one shuffle per vector. The first rounds transpose the squares within 128-bit
    lanes, by interleaving row i with row i + half as often as a row index has bits (a perfect
    shuffle each). The others exchange off-diagonal blocks of doubling size.

    Args:
        builder: LLVM's builder.
        rows: The vectors, as many as each has lanes, a power of two.
        itemsize: Bytes of an element.

    Returns:
        The columns.
    """
    lanes = len(rows)
    part = min(lanes, _LANE_BYTES // itemsize)
    low = [
        p + h + e * lanes for p in range(0, lanes, part) for h in range(part // 2) for e in (0, 1)
    ]
    high = [e + part // 2 for e in low]
    for _ in range(part.bit_length() - 1):
        interleaved: list[Any] = []
        for first in range(0, lanes, part):
            for i in range(first, first + part // 2):
                pair = rows[i], rows[i + part // 2]
                interleaved += [shuffle_vectors(builder, *pair, picks) for picks in (low, high)]
        rows = interleaved
    step = part
    while step < lanes:
        keep = [e if not e & step else e - step + lanes for e in range(lanes)]
        take = [e + step if not e & step else e + lanes for e in range(lanes)]
        exchanged = list(rows)
        for i in range(lanes):
            if not i & step:
                exchanged[i] = shuffle_vectors(builder, rows[i], rows[i + step], keep)
                exchanged[i + step] = shuffle_vectors(builder, rows[i], rows[i + step], take)
        rows, step = exchanged, step * 2
    return rows


@cache
def transposer(dtype: str, lanes: int) -> Any:
    """Return the intrinsic that transposes a block.

    Its arguments are ``(source, source step, rows, columns, target, target step)``. Row i of the
    source becomes column i of the target. ``rows`` and ``columns`` are at most ``lanes``; no other
    elements are read or written. Steps are bytes between rows.
    """
    v = vec(dtype, lanes)

    def whole(builder: Any, args: Sequence[Any]) -> None:
        source, step, _, _, target, to = args
        rows: list[Any] = []
        for i in range(lanes):
            at = builder.add(source, builder.mul(step, I64(i)))
            rows.append(load_at(builder, at, v.llvm, v.itemsize))
        for i, row in enumerate(emit_transpose(builder, rows, v.itemsize)):
            at = builder.add(target, builder.mul(to, I64(i)))
            store_at(builder, at, row, v.itemsize)

    def part(builder: Any, args: Sequence[Any]) -> None:
        # Rows beyond the block load from the first row, with an empty mask: a masked load whose
        # address is not mapped takes hundreds of cycles even with an empty mask.
        source, step, height, width, target, to = args
        rows: list[Any] = []
        for i in range(lanes):
            inside = builder.icmp_signed(">", height, I64(i))
            count = builder.select(inside, width, I64(0))
            at = builder.select(inside, builder.add(source, builder.mul(step, I64(i))), source)
            mask = first_lanes(builder, count, lanes)
            rows.append(load_masked(builder, at, v.llvm, mask, v.itemsize))
        # A row of the target has as many elements as the source has rows.
        wanted = first_lanes(builder, height, lanes)
        for i, row in enumerate(emit_transpose(builder, rows, v.itemsize)):
            with builder.if_then(builder.icmp_signed(">", width, I64(i))):
                at = builder.add(target, builder.mul(to, I64(i)))
                store_masked(builder, at, row, wanted, v.itemsize)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        full = I64(lanes)
        rows = builder.icmp_signed("==", args[2], full)
        columns = builder.icmp_signed("==", args[3], full)
        with builder.if_else(builder.and_(rows, columns)) as (then, otherwise):
            with then:
                whole(builder, args)
            with otherwise:
                part(builder, args)

    return define(VOID, [INT64] * 6, emit)


@cache
def interleaver(dtype: str, lanes: int, count: int, inverse: bool) -> Any:
    """Return ``(source, target, step)``, which interleaves rows, or undoes that.

    Interleaved are the first elements of all rows, then their second elements, and so on.

    Args:
        dtype: Dtype of the elements.
        lanes: Elements of a row.
        count: Number of rows.
        inverse: False: rows ``step`` bytes apart at ``source`` are written interleaved, without
            gaps, to ``target``. True: interleaved elements at ``source`` are written as rows
            ``step`` bytes apart.
    """
    v = vec(dtype, lanes)

    def at(builder: Any, start: Any, step: Any, k: int) -> Any:
        return builder.add(start, builder.mul(step, I64(k)))

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        source, target, step = args
        together = I64(lanes * v.itemsize)
        steps = (together, step) if inverse else (step, together)
        rows = [
            load_at(builder, at(builder, source, steps[0], k), v.llvm, v.itemsize)
            for k in range(count)
        ]
        joined = concatenate(builder, rows)
        for k in range(count):
            made = range(k * lanes, (k + 1) * lanes)
            if inverse:
                picks = [i * count + k for i in range(lanes)]
            else:
                picks = [i % count * lanes + i // count for i in made]
            row = shuffle_vectors(builder, joined, None, picks)
            store_at(builder, at(builder, target, steps[1], k), row, v.itemsize)

    return define(VOID, [INT64] * 3, emit)


@cache
def repeater(dtype: str, lanes: int, times: int) -> Any:
    """Return ``(source, target)``, which copies elements, each several times in a row.

    Args:
        dtype: Dtype of the elements.
        lanes: Elements that are read.
        times: How often each is written.
    """
    v = vec(dtype, lanes)

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        row = load_at(builder, args[0], v.llvm, v.itemsize)
        for k in range(times):
            picks = [(k * lanes + i) // times for i in range(lanes)]
            at = builder.add(args[1], I64(k * lanes * v.itemsize))
            store_at(builder, at, shuffle_vectors(builder, row, None, picks), v.itemsize)

    return define(VOID, [INT64] * 2, emit)
