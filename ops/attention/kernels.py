"""Fused attention: softmax(scale * Q K^T + mask) V without the matrix of scores in memory.

Everything is computed transposed: keys are rows, queries are lanes. K and V are then the broadcast
operand of panels (``subgraph.engine.codegen.panel``), and the softmax reduces across rows, without
horizontal operations. Keys are read in blocks, with running maximum and sum of the softmax (Milakov
and Gimelshein, "Online normalizer calculation for softmax", 2018; Dao et al., "FlashAttention",
2022); several panels of queries use a block while it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.simd import call_kernel, ld, vec
from subgraph.engine.codegen.tiling import TileBlock
from subgraph.ops.movement.kernels import row_copy

from .arguments import AttentionArguments, AttentionOperands
from .panel_parts import (
    block_softmax,
    future_masker,
    mask_scanner,
    mask_writer,
    past_masker,
    query_packer,
    result_writer,
    score_adder,
    score_bounder,
)

_tile_block = stack_block(TileBlock)


@register_jitable
def head_operands(a: AttentionOperands, batch: int, head: int) -> tuple[int, int, int, int]:
    """Return the addresses of Q, K, V and the mask (0: none) of a head.

    Args:
        a: The kernel's arguments.
        batch: Number of the batch element.
        head: Number of the head of Q.
    """
    q = a.q + batch * a.q_batch + head * a.q_head
    key_head = head // a.sharing
    k = a.k + batch * a.k_batch + key_head * a.k_head
    v_at = a.v + batch * a.v_batch + key_head * a.v_head
    mask = a.mask
    if mask != 0:
        mask += batch * a.mask_batch + head * a.mask_head
    return q, k, v_at, mask


_load_start = ld("int64")


@register_jitable
def first_position(a: AttentionOperands, batch: int) -> int:
    """Return how many keys come before the first query of a sample.

    ``starts`` is an input, which may hold any numbers.
    """
    start: int = a.offset
    if a.starts != 0:
        start = max(0, min(_load_start(a.starts + batch * 8), a.keys))
    return start


@register_jitable
def visible_keys(a: AttentionOperands, last: int, offset: int) -> int:
    """Return how many keys the queries before ``last`` see.

    At least one key stays visible: the first block initializes maxima, sums and results. If even
    that key is hidden, `mask_future` sets its scores to minus infinity.

    Args:
        a: The kernel's arguments.
        last: The query after the last one.
        offset: Keys before the first query.
    """
    return max(min(a.keys, last + offset), 1) if a.causal != 0 else a.keys


def attention(
    *, dtype: str, lanes: int, mr: int, nv: int, bounded: bool = False
) -> Callable[..., None]:
    """Return the kernel of `AttentionArguments`.

    Args:
        dtype: Of the elements, ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        mr: Most rows of a panel's tile.
        nv: Vectors of a row of a panel: a panel is ``nv * lanes`` queries.
        bounded: Whether scores have a bound, ``softcap``.
    """
    arguments = view_of(AttentionArguments)
    pack_queries, write = query_packer(dtype, lanes), result_writer(dtype, lanes)
    copy_value = row_copy(item_bytes(dtype))
    attend = _panel_attention(dtype, lanes, nv, bounded)
    hides_all, shows_each = mask_scanner(dtype, lanes)
    item, width = item_bytes(dtype), nv * lanes

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        queries, depth, values = a.queries, a.key_size, a.value_size
        heads, keys_block, panels = a.heads, a.keys_block, a.panels
        row = width * item
        # The three rows beyond queries and results hold the state of the softmax: maxima, sums, and
        # the factors that rescale earlier results.
        panel_bytes = (depth + values + 3) * row
        first_panel = a.scratch + worker * a.scratch_bytes
        scores = first_panel + panels * panel_bytes
        pieces = (queries + panels * width - 1) // (panels * width)
        for unit in range(begin, end):
            start = unit % pieces * panels * width
            stop = min(queries, start + panels * width)
            head, batch = unit // pieces % heads, unit // pieces // heads
            q, k, v_at, mask = head_operands(a, batch, head)
            sink = a.sinks + head * a.sink_head if a.sinks != 0 else 0
            # The queries are packed once for a unit, since every block of keys multiplies all of
            # them.
            for first in range(start, stop, width):
                panel = first_panel + (first - start) // width * panel_bytes
                count = min(width, queries - first)
                pack_queries(q + first * a.q_row, a.q_row, count, depth, panel, a.scale)
            offset = first_position(a, batch)
            visible, earliest = visible_keys(a, stop, offset), 0
            if a.window != 0:
                # Blocks before the window of the first query are left out, but never all blocks.
                earliest = max(0, min(start + offset + 1 - a.window, visible - 1))
                earliest = earliest // keys_block * keys_block
            # Blocks that a mask hides from all queries of a panel are left out, as those of padding
            # and of causal masks. A query that sees no key gives all of them the same weight.
            step = a.mask_row
            skips = mask != 0 and a.mask_key == item and a.causal == 0 and a.window == 0
            skips = skips and shows_each(mask + start * step, step, stop - start, a.keys)
            for key in range(earliest, visible, keys_block):
                block_keys = min(keys_block, visible - key)
                v_line = a.v_line
                v_block = v_at + key * (item if a.v_across != 0 else v_line)
                if a.v_copy != 0:
                    copied = a.scratch + worker * a.scratch_bytes + a.v_copy
                    for value in range(block_keys):
                        to = copied + value * values * item
                        copy_value(to, v_block + value * v_line, values * item)
                    v_block, v_line = copied, values * item
                for first in range(start, stop, width):
                    panel = first_panel + (first - start) // width * panel_bytes
                    seen = visible_keys(a, min(first + width, queries), offset) - key
                    # A block after the last query of a panel is hidden from it, and leaves its
                    # state as it is. The first block is never left out.
                    if skips and key > earliest:
                        rows = mask + first * step + key * item
                        if hides_all(rows, step, min(width, queries - first), block_keys):
                            seen = 0
                    if seen > 0:
                        seen = min(block_keys, seen)
                        where = k, v_block, v_line, mask, sink, scores
                        attend(a, t, panel, first, key, seen, key - offset, key > earliest, where)
            out = a.y + batch * a.y_batch + head * a.y_head
            for first in range(start, stop, width):
                results = first_panel + (first - start) // width * panel_bytes + depth * row
                to, count = out + first * a.y_row, min(width, queries - first)
                state = results + values * row
                write(to, a.y_row, count, values, results, state, a.zero_unseen)

    return kernel


def _panel_attention(dtype: str, lanes: int, nv: int, bounded: bool) -> Any:
    """Return ``f(a, t, panel, first, key, keys, limit, later, where)``.

    ``panel`` is the panel's scratch: its queries, its results, the state of its softmax. ``first``
    is its first query, ``key`` the block's first key, ``keys`` their number, ``limit`` the position
    of ``key`` less that of query 0, and ``later`` whether the head had a block before. ``where``
    are addresses: K of the head, the block's first value and the distance of values, mask and sink
    (0: none) of the head, and scratch for the scores of (keys + 1) * queries.
    ``bounded`` is that of `attention`.
    """
    write_mask, mask_past = mask_writer(dtype, lanes), past_masker(dtype, lanes)
    mask_future = future_masker(dtype, lanes)
    bound_scores, add_to_scores = score_bounder(dtype, lanes), score_adder(dtype, lanes)
    softmax, item = block_softmax(dtype, lanes), item_bytes(dtype)
    store, splat, load1 = vec(dtype, lanes).store, vec(dtype, lanes).splat, ld(dtype)
    size, width, row = lanes * item, nv * lanes, nv * lanes * item

    @register_jitable
    def attend(
        a: AttentionArguments,
        t: TileBlock,
        panel: int,
        first: int,
        key: int,
        keys: int,
        limit: int,
        later: bool,
        where: tuple[int, int, int, int, int, int],
    ) -> None:
        """Update a panel's results by a block of keys."""
        k, v, v_line, mask, sink, scores = where
        depth, values = a.key_size, a.value_size
        count = min(width, a.queries - first)
        # Rows of a panel have as many vectors as it has queries for, so that a short last panel
        # takes less time than a full one.
        vectors = (count + lanes - 1) // lanes
        out, state = panel + depth * row, panel + (depth + values) * row
        beside = scores + (a.keys_block + 1) * row  # the mask of bounded scores
        t.row_bias = 0
        t.start_row = 0
        t.start = 0
        if mask != 0:
            step, key_step = a.mask_row, a.mask_key
            at = mask + first * step + key * key_step
            # A mask that all queries share is one number for each key, which is a row of the panel:
            # the product adds it as a bias, without a copy. Any other mask is written to where the
            # scores go, and the product is added to it.
            # A bound applies to the scores without the mask, which is added later: see below.
            if bounded:
                write_mask(at, step, key_step, count, keys, beside)
            elif step == 0 and key_step == item:
                t.row_bias = at
            else:
                write_mask(at, step, key_step, count, keys, scores)
                t.start_row = 1
        # In lines across the keys a block begins some elements into each line; otherwise it begins
        # with a later line.
        t.a = k + key * (item if a.k_across != 0 else a.k_line)
        t.a_row = a.k_line
        t.b = panel
        t.c = scores
        t.steps = depth
        call_kernel(a.k_panel, t, keys, vectors, 0)
        if bounded:
            end = scores + keys * vectors * size
            bound_scores(scores, end, a.softcap)
            if mask != 0:
                add_to_scores(scores, end, beside)
        if a.causal != 0:
            mask_future(limit - first, keys, vectors, scores)
        if a.window != 0:
            mask_past(limit - first + a.window, keys, vectors, scores)
        weighed = keys
        if sink != 0 and not later:
            # The sink takes weight like a key, but has no value.
            line = vectors * size
            for at in range(scores + keys * line, scores + (keys + 1) * line, size):
                store(at, splat(load1(sink)))
            weighed += 1
        softmax(scores, weighed, vectors, state, later)
        t.row_bias = 0
        t.start_row = 0
        # The first block overwrites the results, so that scratch needs no initialization. Later
        # blocks may raise the maximum: results so far are relative to the former one, and are
        # multiplied by the factor that the softmax has left in its state.
        if later:
            t.start = state + 2 * vectors * size
        t.a = v
        t.a_row = v_line
        t.b = scores
        t.c = out
        t.steps = keys
        call_kernel(a.v_panel, t, values, vectors, 0)

    return attend
