"""Fused attention of few queries, as in a decoder, which computes one token at a time.

Queries are rows here: each key and each value is read once, without packing, for all of them. The
panels of `kernels.attention` take as long for one query as for a panel's full width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, st, vec
from subgraph.engine.codegen.vmath import function

from .arguments import FewQueriesArguments
from .kernels import first_position, head_operands, visible_keys
from .panel_parts import mask_scanner, score_bounder
from .row_products import row_products

_SKIPPED = 64  # hidden keys that are left out at a time (estimate)


def few_queries(
    *, dtype: str, lanes: int, across: bool, bounded: bool = False
) -> Callable[..., None]:
    """Return the kernel of `FewQueriesArguments`.

    Args:
        dtype: Of the elements, ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        across: Adjacent in K are the keys, for each of their elements; else the elements of a key.
        bounded: Whether scores have a bound, ``softcap``.
    """
    arguments = view_of(FewQueriesArguments)
    v = vec(dtype, lanes)
    load_n, store_n, splat, zero = v.load_n, v.store_n, v.splat, v.zero
    load1, store1 = ld(dtype), st(dtype)
    item = item_bytes(dtype)
    along_rows, along_columns = row_products(dtype, lanes)
    score = _scorer(dtype, lanes, across, along_rows, along_columns)
    hides_all, shows_each = mask_scanner(dtype, lanes)
    soften, bound_scores = _softmax_row(dtype, lanes), score_bounder(dtype, lanes)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        queries, values = a.queries, a.value_size
        heads, step = a.heads, a.y_row
        scores = a.scratch + worker * a.scratch_bytes
        for unit in range(begin, end):
            batch, head = unit // heads, unit % heads
            q, k, v_at, masks = head_operands(a, batch, head)
            # The keys before the window of the first query and after the last one are not read.
            offset, first, keys = first_position(a, batch), 0, a.keys
            if a.causal != 0:
                keys = visible_keys(a, (queries - 1) * a.row_position + 1, offset)
            if a.window != 0:
                first = max(0, min(offset + 1 - a.window, keys - 1))
                keys -= first
                k += first * a.k_row
                v_at += first * a.v_row
                masks += first * a.mask_key if masks != 0 else 0
            skips = masks != 0 and a.mask_key == item and a.causal == 0 and a.window == 0
            if skips and shows_each(masks, a.mask_row, queries, keys):
                # Keys at both ends that a mask hides are not read, as those outside of a window. A
                # query that sees no key gives all of them the same weight.
                while keys > _SKIPPED and hides_all(
                    masks + (keys - _SKIPPED) * item, a.mask_row, queries, _SKIPPED
                ):
                    keys -= _SKIPPED
                while keys > _SKIPPED and hides_all(masks, a.mask_row, queries, _SKIPPED):
                    keys -= _SKIPPED
                    k += _SKIPPED * a.k_row
                    v_at += _SKIPPED * a.v_row
                    masks += _SKIPPED * item
            # Rows of scores are whole vectors: the softmax needs no masked loads and stores.
            room = (keys + int(a.sinks != 0) + lanes - 1) // lanes * lanes
            row = room * item
            out = a.y + batch * a.y_batch + head * a.y_head
            score(a, q, k, keys, scores, row)
            if bounded:
                bound_scores(scores, scores + queries * row, a.softcap)
            for i in range(queries):
                # The product of the weights and V adds to the output, which holds arbitrary bytes
                # before.
                for d in range(0, values, lanes):
                    store_n(out + i * step + d * item, min(lanes, values - d), zero())
                mask, hidden, seen = masks, 0, keys
                if mask != 0:
                    mask += i * a.mask_row
                if a.causal != 0:
                    seen = max(min(keys, i * a.row_position + 1 + offset - first), 0)
                if a.window != 0:
                    hidden = max(i * a.row_position + 1 + offset - first - a.window, 0)
                sink = a.sinks
                if sink != 0:
                    sink += head * a.sink_head + i * a.sink_row
                total = soften(scores + i * row, mask, hidden, seen, keys, sink, room)
                store1(scores + queries * row + i * item, total)
            along_rows(queries, keys, scores, row, item, v_at, a.v_row, out, step, values, 1.0)
            for i in range(queries):
                total = load1(scores + queries * row + i * item)
                if a.zero_unseen != 0 and total == 0.0:
                    total = 1.0
                clears = a.zero_unseen == 2 and not total > 0.0
                # The division by the sum of weights is done on the results, as there are fewer of
                # them (elements of a value) than weights (one for each key) in a long context.
                for d in range(0, values, lanes):
                    n, at = min(lanes, values - d), out + i * step + d * item
                    store_n(at, n, zero() if clears else load_n(at, n) / splat(total))

    return kernel


def _softmax_row(dtype: str, lanes: int) -> Any:
    """Return ``f(scores, mask, hidden, seen, keys, sink, room)``: a softmax before its division."""
    v = vec(dtype, lanes)
    load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n
    splat, zero, maximum, hmax, sum_of = v.splat, v.zero, v.maximum, v.hmax, v.sum
    load1, store1, exp = ld(dtype), st(dtype), function("exp_flushed", dtype, lanes)
    item = item_bytes(dtype)
    size, lowest = lanes * item, float("-inf")

    @register_jitable
    def soften(
        scores: int, mask: int, hidden: int, seen: int, keys: int, sink: int, room: int
    ) -> float:
        """Replace the scores of a row by weights; return their sum.

        Of ``keys`` keys those from ``hidden`` to before ``seen`` are visible; the row has ``room``
        elements, whole vectors, and the rest gets weight 0. ``mask`` (0: none) is added to the
        scores. ``sink`` (0: none) is the address of the sink's score, which the softmax includes.
        """
        if mask != 0:
            for k in range(0, seen, lanes):
                n, at = min(lanes, seen - k), k * item
                store_n(scores + at, n, load(scores + at) + load_n(mask + at, n))
        # Scores of hidden keys and of the padding become minus infinity: they do not raise the
        # maximum, and their exponential is 0.
        for k in range(seen, room):
            store1(scores + k * item, lowest)
        for k in range(min(hidden, keys)):
            store1(scores + k * item, lowest)
        if sink != 0:
            store1(scores + keys * item, load1(sink))
        # Scores less their maximum are at most 0, so that no exponential overflows.
        top = splat(lowest)
        for at in range(0, room * item, size):
            top = maximum(top, load(scores + at))
        most = hmax(top)
        # -inf - -inf is NaN; so the weights of a row that sees no key are 0.
        base = splat(most if most != lowest else 0.0)
        total = zero()
        for at in range(0, room * item, size):
            weight = exp(load(scores + at) - base)
            store(scores + at, weight)
            total = total + weight
        whole: float = sum_of(total)
        return whole

    return soften


def _scorer(dtype: str, lanes: int, across: bool, along_rows: Any, along_columns: Any) -> Any:
    """Return ``f(a, q, k, keys, scores, row)``: the scores of a head.

    The parameters are those of `few_queries`, and the functions of `row_products`.
    """
    v, item = vec(dtype, lanes), item_bytes(dtype)
    store, zero, size = v.store, v.zero, lanes * item

    @register_jitable
    def score(a: FewQueriesArguments, q: int, k: int, keys: int, scores: int, row: int) -> None:
        """Write the scaled scores of the queries of a head, ``row`` bytes for each."""
        rows = a.queries
        depth, step, scale = a.key_size, a.q_row, a.scale
        if across:
            # These products add to the scores; the scratch still holds those of an earlier unit.
            for i in range(rows):
                for at in range(0, row, size):
                    store(scores + i * row + at, zero())
            along_rows(rows, depth, q, step, item, k, a.k_element, scores, row, keys, scale)
        else:
            along_columns(rows, depth, q, step, k, a.k_row, scores, row, keys, scale)

    return score
