"""Fused attention: softmax(scale * Q K^T + mask) V without the matrix of scores in memory.

Everything is computed transposed: keys are rows, queries are lanes. K and V are then read in place
as the broadcast operand of contraction tiles, and the softmax runs down the rows without any
horizontal step. Keys come in blocks, with running maximum and sum of the softmax (Milakov and
Gimelshein 2018; Dao et al., "FlashAttention", 2022).
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.emit import item_bytes
from subgraph.engine.simd import call_kernel, ld, ld_f64, memcpy, vec
from subgraph.engine.tile import arg, put, rows_of, stack_words
from subgraph.engine.tiling import (
    T_A,
    T_AKS,
    T_ARS,
    T_B,
    T_BJS,
    T_BKS,
    T_C,
    T_CJS,
    T_CRS,
    T_FLAGS,
    T_IJS,
    T_INIT,
    T_IRS,
    T_KIN,
    T_N0,
    T_N1,
    T_N2,
    T_RBIAS,
    T_RES,
    T_WORDS,
)
from subgraph.engine.transpose import transposer
from subgraph.engine.vmath import function

_words = stack_words(T_WORDS)


def attention(*, dtype: str, lanes: int, mr: int, nv: int) -> Callable[..., None]:
    """Return the fused attention; one unit is a panel of ``nv * lanes`` queries of one head.

    All strides are bytes. Elements of Q and of the output along a row are contiguous.

    Words::

        0 Q  1 K  2 V  3 output  4 mask, added to the scaled scores (0: none)
        5 queries  6 keys  7 size of a key  8 size of a value  9 heads  10 query heads of a key head
        11 12 13 strides of Q: batch, head, query
        14 15 16 17 of K: batch, head, key, element
        18 19 20 21 of V: batch, head, key, element
        22 23 24 of the output: batch, head, query
        25 26 27 28 of the mask: batch, head, query (0: one row for all), key
        29 contraction tile  30 scale (float64)
        31 causal: 1 if query q sees keys up to q + word 32 only  32 offset
        33 keys of a block  34 scratch, aligned to 64 bytes  35 its bytes per worker
        36 copy blocks of K and V first (1): for keys a multiple of 2048 bytes apart
        37 a query that may look at no key gives 0 (1), not NaN (0)

    A worker's scratch holds ``size of a key + size of a value + keys of a block + 3`` rows of
    ``nv * lanes`` elements and ``lanes * lanes`` more, with word 36 another keys of a block times
    ``(max(size of a key, size of a value) + 16)``. A mask with a stride of queries needs keys one
    element apart, word 36 contiguous elements in K and V.
    Units: batch * heads * ceil(queries / (nv * lanes)).
    """
    v = vec(dtype, lanes)
    load, store, splat, zero = v.load, v.store, v.splat, v.zero
    largest, select, iota = v.max, v.select, v.iota
    load1 = ld(dtype)
    exp, turn = function("exp_flushed", dtype, lanes), transposer(dtype, lanes)
    item = item_bytes(dtype)
    size = lanes * item
    width = nv * lanes
    row = width * item
    lowest = float("-inf")

    @register_jitable
    def pack_queries(q: int, step: int, count: int, depth: int, to: int, scale: float) -> None:
        factor = splat(scale)
        for d in range(depth):
            for j in range(nv):
                store(to + d * row + j * size, zero())
        for d in range(0, depth, lanes):
            for j in range(0, count, lanes):
                turn(
                    q + j * step + d * item,
                    step,
                    min(lanes, count - j),
                    min(lanes, depth - d),
                    to + d * row + j * item,
                    row,
                )
        for d in range(depth):
            for j in range(nv):
                store(to + d * row + j * size, load(to + d * row + j * size) * factor)

    @register_jitable
    def add_mask(mask: int, step: int, count: int, keys: int, scores: int, spare: int) -> None:
        """Add a mask that differs between queries: blocks of it are turned through ``spare``."""
        for k in range(0, keys, lanes):
            taken = min(lanes, keys - k)
            for j in range(0, count, lanes):
                turn(mask + j * step + k * item, step, min(lanes, count - j), taken, spare, size)
                for i in range(taken):
                    at = scores + (k + i) * row + j * item
                    store(at, load(at) + load(spare + i * size))

    @register_jitable
    def hide_future(first_query: int, key: int, keys: int, offset: int, scores: int) -> None:
        for k in range(keys):
            for j in range(nv):
                limit = key + k - offset - first_query - j * lanes
                if limit > 0:
                    at = scores + k * row + j * size
                    seen = iota() >= splat(float(limit))
                    store(at, select(seen, load(at), splat(lowest)))

    @register_jitable
    def soften(scores: int, keys: int, out: int, values: int, state: int) -> None:
        """Turn a block of scores into weights; bring maximum, sum and output to the new maximum."""
        for j in range(nv):
            at = scores + j * size
            top_at, sum_at = state + j * size, state + row + j * size
            before = load(top_at)
            top = before
            for k in range(keys):
                top = largest(load(at + k * row), top)
            # A row of nothing but -inf must not become NaN here: a later block may hold more.
            base = select(top > splat(lowest), top, zero())
            factor = exp(before - base)
            total = load(sum_at) * factor
            for k in range(keys):
                weight = exp(load(at + k * row) - base)
                store(at + k * row, weight)
                total = total + weight
            store(top_at, top)
            store(sum_at, total)
            for d in range(values):
                to = out + d * row + j * size
                store(to, load(to) * factor)

    @register_jitable
    def rows_times(t: int, tile: int, count: int, a: int, step: int, c: int, mask: int) -> None:
        """Run tiles over ``count`` rows of A."""
        vectors = nv
        masked, mask_step = mask != 0, arg(t, T_IRS)
        put(t, T_CRS, row)
        i = 0
        while i < count:
            m = rows_of(count - i, mr)
            put(t, T_A, a + i * step)
            put(t, T_C, c + i * row)
            if masked:
                put(t, T_RBIAS, mask + i * item)
            if mask_step != 0:
                put(t, T_INIT, c + i * row)
            call_kernel(tile, t, m, vectors, 0)
            i += m

    @register_jitable
    def write(
        out: int, step: int, count: int, values: int, source: int, state: int, spare: int
    ) -> None:
        for j in range(nv):
            total = load(state + row + j * size)
            if spare != 0:  # a row that may look at nothing gives 0
                total = select(total > zero(), total, splat(1.0))
            inverse = splat(1.0) / total
            for d in range(values):
                at = source + d * row + j * size
                store(at, load(at) * inverse)
        for d in range(0, values, lanes):
            for j in range(0, count, lanes):
                turn(
                    source + d * row + j * item,
                    row,
                    min(lanes, values - d),
                    min(lanes, count - j),
                    out + j * step + d * item,
                    step,
                )

    @register_jitable
    def gather(source: int, step: int, rows: int, count: int, to: int) -> None:
        """Copy rows to where they do not all fall into the same cache set."""
        for r in range(rows):
            memcpy(to + r * (count + 16) * item, source + r * step, count * item)

    @register_jitable
    def block(args: int, t: int, scratch: int, unit_words: int) -> None:
        """Run one block of keys: the six words are its first key, its keys, and addresses."""
        key, keys = arg(unit_words, 0), arg(unit_words, 1)
        k, v_at = arg(unit_words, 2), arg(unit_words, 3)
        mask, first = arg(unit_words, 4), arg(unit_words, 5)
        count = arg(unit_words, 6)
        depth, values = arg(args, 7), arg(args, 8)
        scores = scratch + depth * row
        out = scores + arg(args, 33) * row
        state = out + values * row
        copies = state + 3 * row + lanes * size
        source, step = k + key * arg(args, 16), arg(args, 16)
        if arg(args, 36) != 0:
            gather(source, step, keys, depth, copies)
            source, step = copies, (depth + 16) * item
        put(t, T_ARS, step)
        put(t, T_AKS, arg(args, 17))
        put(t, T_B, scratch)
        put(t, T_KIN, depth)
        put(t, T_INIT, 0)
        put(t, T_IRS, 0)
        put(t, T_RBIAS, 0)
        row_mask = mask if arg(args, 27) == 0 and arg(args, 28) == item else 0
        bias = row_mask + key * item if row_mask != 0 else 0
        rows_times(t, arg(args, 29), keys, source, step, scores, bias)
        put(t, T_RBIAS, 0)
        if mask != 0 and arg(args, 27) != 0:
            add_mask(mask + key * item, arg(args, 27), count, keys, scores, state + 3 * row)
        elif mask != 0 and row_mask == 0:
            for i in range(keys):
                extra = splat(load1(mask + (key + i) * arg(args, 28)))
                for j in range(nv):
                    at = scores + i * row + j * size
                    store(at, load(at) + extra)
        if arg(args, 31) != 0:
            hide_future(first, key, keys, arg(args, 32), scores)
        soften(scores, keys, out, values, state)
        source, step = v_at + key * arg(args, 20), arg(args, 20)
        if arg(args, 36) != 0:
            gather(source, step, keys, values, copies)
            source, step = copies, (values + 16) * item
        put(t, T_ARS, arg(args, 21))
        put(t, T_AKS, step)
        put(t, T_B, scores)
        put(t, T_KIN, keys)
        put(t, T_IRS, row)
        rows_times(t, arg(args, 29), values, source, arg(args, 21), out, 0)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t, unit_words = _words(), _words()
        queries, keys, depth, values = arg(args, 5), arg(args, 6), arg(args, 7), arg(args, 8)
        heads, shared, keys_block = arg(args, 9), arg(args, 10), arg(args, 33)
        scratch = arg(args, 34) + worker * arg(args, 35)
        panels = (queries + width - 1) // width
        out = scratch + (depth + keys_block) * row
        state = out + values * row
        put(t, T_N0, 1)
        put(t, T_N1, 1)
        put(t, T_N2, 1)
        put(t, T_BKS, row)
        put(t, T_BJS, size)
        put(t, T_CJS, size)
        put(t, T_IJS, size)
        put(t, T_RES, 0)
        put(t, T_FLAGS, 0)
        for unit in range(begin, end):
            first = unit % panels * width
            head, batch = unit // panels % heads, unit // panels // heads
            count = min(width, queries - first)
            step = arg(args, 13)
            q = arg(args, 0) + batch * arg(args, 11) + head * arg(args, 12) + first * step
            pack_queries(q, step, count, depth, scratch, ld_f64(args + 8 * 30))
            for j in range(nv):
                store(state + j * size, splat(lowest))
                store(state + row + j * size, zero())
            for d in range(values * nv):
                store(out + d * size, zero())
            key_head = head // shared
            put(unit_words, 2, arg(args, 1) + batch * arg(args, 14) + key_head * arg(args, 15))
            put(unit_words, 3, arg(args, 2) + batch * arg(args, 18) + key_head * arg(args, 19))
            mask = arg(args, 4)
            if mask != 0:
                mask += batch * arg(args, 25) + head * arg(args, 26) + first * arg(args, 27)
            put(unit_words, 4, mask)
            put(unit_words, 5, first)
            put(unit_words, 6, count)
            seen = keys
            if arg(args, 31) != 0:
                seen = max(min(keys, first + count + arg(args, 32)), 1)
            for key in range(0, seen, keys_block):
                put(unit_words, 0, key)
                put(unit_words, 1, min(keys_block, seen - key))
                block(args, t, scratch, unit_words)
            to = arg(args, 3) + batch * arg(args, 22) + head * arg(args, 23)
            spare = arg(args, 37)
            write(to + first * arg(args, 24), arg(args, 24), count, values, out, state, spare)

    return kernel
