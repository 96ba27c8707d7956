"""Fused attention: softmax(scale * Q K^T + mask) V without the matrix of scores in memory.

Everything is computed transposed: keys are rows, queries are lanes. K and V are then the broadcast
operand of panels (``subgraph.engine.codegen.panel``), and the softmax runs down the rows without
any horizontal step. Keys come in blocks, with running maximum and sum of the softmax (Milakov and
Gimelshein 2018; Dao et al., "FlashAttention", 2022); several panels of queries share a block.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import Address
from subgraph.engine.codegen.simd import call_kernel, ld, vec
from subgraph.engine.codegen.tiling import TileBlock
from subgraph.engine.codegen.transpose import transposer
from subgraph.engine.codegen.vmath import function

from .arguments import AttentionArguments


class PanelBlock(TileBlock):
    """Arguments of a panel, and the blocks of K and V that it is to multiply with.

    Attributes:
        k_lines: First line of the block of K.
        k_pitch: Bytes between its lines.
        v_lines: First line of the block of V.
        v_pitch: Bytes between its lines.
    """

    k_lines: Address
    k_pitch: int
    v_lines: Address
    v_pitch: int


_panel_block = stack_block(PanelBlock)


def attention(*, dtype: str, lanes: int, mr: int, nv: int) -> Callable[..., None]:
    """Return the kernel of `AttentionArguments`.

    Args:
        dtype: Of the elements, ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows of a panel's tile.
        nv: Vectors of a row of a panel: a panel is ``nv * lanes`` queries.
    """
    arguments = view_of(AttentionArguments)
    v = vec(dtype, lanes)
    load, store, splat, zero = v.load, v.store, v.splat, v.zero
    largest, select, iota = v.max, v.select, v.iota
    load_m, store_m, first_lanes = v.load_m, v.store_m, v.mask_n
    load1 = ld(dtype)
    exp, turn = function("exp_flushed", dtype, lanes), transposer(dtype, lanes)
    item = item_bytes(dtype)
    size = lanes * item
    width = nv * lanes
    lowest = float("-inf")

    @register_jitable
    def pack_queries(q: int, step: int, count: int, depth: int, to: int, scale: float) -> None:
        """Turn queries into lanes; lanes without one are zeros."""
        factor = splat(scale)
        row = (count + lanes - 1) // lanes * size
        if count * item < row:
            for d in range(depth):
                store(to + (d + 1) * row - size, zero())
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
        for at in range(to, to + depth * row, size):
            store(at, load(at) * factor)

    @register_jitable
    def copy(source: int, step: int, lines: int, count: int, to: int, pitch: int) -> None:
        """Copy lines to where they do not all fall into the same cache sets."""
        whole, rest = count // lanes * size, count % lanes
        mask = first_lanes(rest)
        for r in range(lines):
            x, y = source + r * step, to + r * pitch
            for i in range(0, whole, size):
                store(y + i, load(x + i))
            if rest > 0:
                store_m(y + whole, mask, load_m(x + whole, mask))

    @register_jitable
    def lay_mask(mask: int, step: int, key_step: int, count: int, keys: int, scores: int) -> None:
        """Lay a mask where the scores will be added to it."""
        row = (count + lanes - 1) // lanes * size
        if step == 0:
            for k in range(keys):
                for at in range(scores + k * row, scores + (k + 1) * row, size):
                    store(at, splat(load1(mask + k * key_step)))
            return
        for k in range(0, keys, lanes):
            for j in range(0, count, lanes):
                turn(
                    mask + j * step + k * item,
                    step,
                    min(lanes, count - j),
                    min(lanes, keys - k),
                    scores + k * row + j * item,
                    row,
                )

    @register_jitable
    def hide_future(limit: int, keys: int, vectors: int, scores: int) -> None:
        """Hide key k of a block from the queries before ``limit + k``."""
        for k in range(max(0, 1 - limit), keys):
            for j in range(vectors):
                at = scores + (k * vectors + j) * size
                seen = iota() >= splat(float(limit + k - j * lanes))
                store(at, select(seen, load(at), splat(lowest)))

    @register_jitable
    def soften(scores: int, keys: int, vectors: int, state: int, later: bool) -> None:
        """Turn a block of scores into weights; bring maximum and sum to the new maximum.

        In a later block what sums so far are to be multiplied with is left behind them.
        """
        row = vectors * size
        even = scores + keys // 2 * 2 * row
        for j in range(0, row, size):
            top, other = splat(lowest), splat(lowest)
            if later:
                top = load(state + j)
            before = top
            for at in range(scores + j, even, 2 * row):
                top, other = largest(load(at), top), largest(load(at + row), other)
            if keys & 1:
                top = largest(load(even + j), top)
            top = largest(other, top)
            # A row of nothing but -inf must not become NaN here: a later block may hold more.
            base = select(top > splat(lowest), top, zero())
            total = zero()
            if later:
                factor = exp(before - base)
                total = load(state + row + j) * factor
                store(state + 2 * row + j, factor)
            for at in range(scores + j, scores + keys * row, row):
                weight = exp(load(at) - base)
                store(at, weight)
                total = total + weight
            store(state + j, top)
            store(state + row + j, total)

    @register_jitable
    def write(
        out: int, step: int, count: int, values: int, source: int, state: int, spare: int
    ) -> None:
        row = (count + lanes - 1) // lanes * size
        for j in range(0, row, size):
            total = load(state + row + j)
            if spare != 0:  # a row that may look at nothing gives 0
                total = select(total > zero(), total, splat(1.0))
            inverse = splat(1.0) / total
            for at in range(source + j, source + values * row, row):
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
    def block_lines(
        pitch: int, to: int, at: int, step: int, across: int, key: int, keys: int, length: int
    ) -> tuple[int, int]:
        """Return the address of the lines of a block of K or V, and the bytes between them."""
        at += key * (item if across != 0 else step)
        if pitch == 0:
            return at, step
        if across != 0:
            copy(at, step, length, keys, to, pitch)
        else:
            copy(at, step, keys, length, to, pitch)
        return to, pitch

    @register_jitable
    def attend(
        a: AttentionArguments,
        t: PanelBlock,
        place: int,
        first: int,
        key: int,
        keys: int,
        mask: int,
        scores: int,
    ) -> None:
        """Attend with a panel of queries to a block of keys, whose lines ``t`` holds."""
        depth, values = a.key_size, a.value_size
        count = min(width, a.queries - first)
        vectors = (count + lanes - 1) // lanes
        row = width * item
        out, state = place + depth * row, place + (depth + values) * row
        t.row_bias = 0
        t.start_row = 0
        t.start = 0
        if mask != 0:
            step, key_step = a.mask_row, a.mask_key
            at = mask + first * step + key * key_step
            if step == 0 and key_step == item:
                t.row_bias = at
            else:
                lay_mask(at, step, key_step, count, keys, scores)
                t.start_row = 1
        t.a = t.k_lines
        t.a_row = t.k_pitch
        t.b = place
        t.c = scores
        t.steps = depth
        call_kernel(a.k_panel, t, keys, vectors, 0)
        limit = key - a.offset - first
        if a.causal != 0:
            hide_future(limit, keys, vectors, scores)
        soften(scores, keys, vectors, state, key > 0)
        t.row_bias = 0
        t.start_row = 0
        if key > 0:
            t.start = state + 2 * vectors * size
        t.a = t.v_lines
        t.a_row = t.v_pitch
        t.b = scores
        t.c = out
        t.steps = keys
        call_kernel(a.v_panel, t, values, vectors, 0)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _panel_block()
        queries, keys, depth, values = a.queries, a.keys, a.key_size, a.value_size
        heads, keys_block, panels = a.heads, a.keys_block, a.panels
        row = width * item
        place_bytes = (depth + values + 3) * row
        places = a.scratch + worker * a.scratch_bytes
        scores = places + panels * place_bytes
        k_copy = scores + keys_block * row
        v_copy = k_copy + a.k_pitch * (depth if a.k_across != 0 else keys_block)
        pieces = (queries + panels * width - 1) // (panels * width)
        for unit in range(begin, end):
            start = unit % pieces * panels * width
            stop = min(queries, start + panels * width)
            head, batch = unit // pieces % heads, unit // pieces // heads
            q = a.q + batch * a.q_batch + head * a.q_head
            key_head = head // a.sharing
            k = a.k + batch * a.k_batch + key_head * a.k_head
            v_at = a.v + batch * a.v_batch + key_head * a.v_head
            mask = a.mask
            if mask != 0:
                mask += batch * a.mask_batch + head * a.mask_head
            for first in range(start, stop, width):
                place = places + (first - start) // width * place_bytes
                step, count = a.q_row, min(width, queries - first)
                pack_queries(q + first * step, step, count, depth, place, a.scale)
            seen = keys
            if a.causal != 0:
                seen = max(min(keys, stop + a.offset), 1)
            for key in range(0, seen, keys_block):
                taken = min(keys_block, seen - key)
                at, step = block_lines(
                    a.k_pitch, k_copy, k, a.k_line, a.k_across, key, taken, depth
                )
                t.k_lines = at
                t.k_pitch = step
                at, step = block_lines(
                    a.v_pitch, v_copy, v_at, a.v_line, a.v_across, key, taken, values
                )
                t.v_lines = at
                t.v_pitch = step
                for first in range(start, stop, width):
                    place = places + (first - start) // width * place_bytes
                    of_panel = taken
                    if a.causal != 0:
                        last = min(first + width, queries) + a.offset
                        of_panel = min(taken, max(last, 1) - key)
                    if of_panel > 0:
                        attend(a, t, place, first, key, of_panel, mask, scores)
            out = a.y + batch * a.y_batch + head * a.y_head
            for first in range(start, stop, width):
                place = places + (first - start) // width * place_bytes
                step, count = a.y_row, min(width, queries - first)
                write(
                    out + first * step,
                    step,
                    count,
                    values,
                    place + depth * row,
                    place + (depth + values) * row,
                    a.zero_unseen,
                )

    return kernel
