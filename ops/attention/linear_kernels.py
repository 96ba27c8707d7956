"""Kernel of LinearAttention: a recurrent state for each head, updated token by token.

The state is a matrix S of keys by values. A token with key k and value v adds ``k (beta * (v - S^T
k))^T`` by the delta rule (Yang et al., "Parallelizing Linear Transformers with the Delta Rule",
2024), else ``k v^T``; its query q then gives ``S^T q``.

A column of the state depends on no other column. So a unit is a strip of `STATE_STRIP` vectors of
columns. Between the first token, which reads it where the state is, and the last, which writes it
there, its rows are contiguous in scratch, so that they fit into the first cache (16 KiB for 128
keys and vectors of 64 bytes). Rows a power of two apart would compete for few places of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import vec

from .arguments import STATE_STRIP, LinearAttentionArguments

Function = Callable[..., Any]


def linear_attention(*, dtype: str, lanes: int, gated: bool, delta: bool, past: bool) -> Function:
    """Return the kernel of `LinearAttentionArguments` for one update rule.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        gated: The state is multiplied by factors of decay before each token.
        delta: Update by the delta rule.
        past: There is a state to begin with; else it is zero.
    """
    arguments = view_of(LinearAttentionArguments)
    item, width = item_bytes(dtype), STATE_STRIP * lanes
    v = vec(dtype, width)
    store_n, zero = v.store_n, v.zero
    whole = _token(dtype, width, gated, delta, is_whole=True)
    part = _token(dtype, width, gated, delta, is_whole=False)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        keys, values = a.key_size, a.value_size
        strips = (values + width - 1) // width
        for unit in range(begin, end):
            head, column = unit // strips, unit % strips * width
            count = min(width, values - column)
            first = (head * keys * values + column) * item
            state, scratch = a.state + first, a.scratch + worker * a.scratch_bytes
            source, source_row = state, values * item
            if past:
                source = a.past + first
            else:
                for i in range(keys):
                    store_n(state + i * values * item, count, zero())
            for t in range(a.tokens):
                target, target_row = scratch, width * item
                if t == a.tokens - 1:
                    target, target_row = state, values * item
                if count == width:
                    whole(a, head, t, column, count, source, source_row, target, target_row)
                else:
                    part(a, head, t, column, count, source, source_row, target, target_row)
                source, source_row = target, target_row

    return kernel


def _token(dtype: str, width: int, gated: bool, delta: bool, *, is_whole: bool) -> Any:
    """Return ``f(a, head, t, column, count, source, source_row, target, target_row)``.

    The function computes a strip of the state after a token, and its columns of the results.

    Args:
        dtype: As for `linear_attention`.
        width: Columns of a strip.
        gated: As for `linear_attention`.
        delta: As for `linear_attention`.
        is_whole: The strip has all ``width`` columns.
    """
    v = vec(dtype, width)
    bcast, splat, zero, fma = v.bcast, v.splat, v.zero, v.fma
    item = item_bytes(dtype)
    load, store = _strip_memory(dtype, width, is_whole)

    @register_jitable
    def product(
        row: int, factors: int, step: int, keys: int, strip: int, next_row: int, count: int
    ) -> Any:
        """Return the product of a row, a key or a query, and a strip of the state.

        Args:
            row: Address of the row.
            factors: Address of a factor for each row of the state.
            step: Bytes from a factor to the next; 0: there are none.
            keys: Elements of the row.
            strip: Address of the strip.
            next_row: Bytes from a row of the state to the next.
            count: Columns of the strip.
        """
        even, odd = zero(), zero()
        for i in range(0, keys, 2):
            factor = bcast(row + i * item)
            if step != 0:
                factor = factor * bcast(factors + i * step)
            even = fma(factor, load(strip + i * next_row, count), even)
            if i + 1 < keys:
                factor = bcast(row + (i + 1) * item)
                if step != 0:
                    factor = factor * bcast(factors + (i + 1) * step)
                odd = fma(factor, load(strip + (i + 1) * next_row, count), odd)
        return even + odd

    @register_jitable
    def token(
        a: LinearAttentionArguments,
        head: int,
        t: int,
        column: int,
        count: int,
        source: int,
        source_row: int,
        target: int,
        target_row: int,
    ) -> None:
        """Compute a strip of the state of a head after a token, and its columns of the results.

        Args:
            a: The kernel's arguments.
            head: Index of the head of keys and values among those of all samples.
            t: Index of the token among those of the sample.
            column: First column of the strip.
            count: Its columns.
            source: Address of the strip before the token.
            source_row: Bytes from a row of that strip to the next.
            target: Address of the strip after the token.
            target_row: Bytes from a row of that strip to the next.
        """
        keys, values, heads = a.key_size, a.value_size, a.kv_heads
        index, own = head // heads * a.tokens + t, head % heads
        shared = a.heads // heads
        key = a.key + (index * heads + own) * keys * item
        added = load(a.value + ((index * heads + own) * values + column) * item, count)
        decay, step, factor = 0, 0, zero()
        if gated:
            decay = a.decay + (index * heads + own) * a.decays * item
            factor = bcast(decay)
            if a.decays != 1:
                step = item
        if delta:
            known = product(key, decay, step, keys, source, source_row, count)
            if gated and step == 0:
                known = known * factor
            rate = bcast(a.beta + (index * a.betas + own % a.betas) * item)
            added = (added - known) * rate
        query = a.query + (index * a.heads + own * shared) * keys * item
        result = zero()
        for i in range(keys):
            held = load(source + i * source_row, count)
            if gated:
                if step != 0:
                    factor = bcast(decay + i * step)
                held = held * factor
            held = fma(bcast(key + i * item), added, held)
            store(target + i * target_row, count, held)
            result = fma(bcast(query + i * item), held, result)
        scale = splat(a.scale)
        y = a.y + ((index * a.heads + own * shared) * values + column) * item
        store(y, count, result * scale)
        for _ in range(1, shared):  # the other queries that share the head
            query += keys * item
            y += values * item
            store(y, count, product(query, 0, 0, keys, target, target_row, count) * scale)

    return token


def _strip_memory(dtype: str, width: int, is_whole: bool) -> tuple[Any, Any]:
    """Return ``load(address, count)`` and ``store(address, count, strip)`` for rows of a strip."""
    v = vec(dtype, width)
    if not is_whole:
        return v.load_n, v.store_n
    whole_load, whole_store = v.load, v.store

    @register_jitable
    def load(address: int, count: int) -> Any:
        return whole_load(address)

    @register_jitable
    def store(address: int, count: int, strip: Any) -> None:
        whole_store(address, strip)

    return load, store
