"""Kernel of LinearAttention: a recurrent state for each head, updated token by token.

The state is a matrix S of keys by values. A token with key k and value v adds ``k (beta * (v - S^T
k))^T`` by the delta rule (Yang et al., "Parallelizing Linear Transformers with the Delta Rule",
2024), else ``k v^T``; its query q then gives ``S^T q``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld, memcpy, st

from .arguments import LinearAttentionArguments

Function = Callable[..., Any]


def linear_attention(*, dtype: str, gated: bool, delta: bool, past: bool) -> Function:
    """Return the kernel of `LinearAttentionArguments` for one update rule.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        gated: The state is multiplied by factors of decay before each token.
        delta: Update by the delta rule.
        past: There is a state to begin with; else it is zero.
    """
    arguments = view_of(LinearAttentionArguments)
    store, item, real = st(dtype), item_bytes(dtype), np.dtype(dtype).type
    update, read_state = _updater(dtype, gated, delta), _state_reader(dtype)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        tokens, heads, kv_heads = a.tokens, a.heads, a.kv_heads
        size = a.key_size * a.value_size * item
        scale, shared = real(a.scale), heads // kv_heads
        difference = a.scratch + worker * a.scratch_bytes
        for unit in range(begin, end):
            sample, kv_head = unit // kv_heads, unit % kv_heads
            state = a.state + unit * size
            if past:
                memcpy(state, a.past + unit * size, size)
            else:
                for i in range(size // item):
                    store(state + i * item, real(0))
            # Each token needs the state after the one before, so only heads and samples are
            # computed in parallel. The queries that share a head read its state while it is in the
            # cache.
            for t in range(tokens):
                token = sample * tokens + t
                update(a, token, kv_head, state, difference)
                for head in range(kv_head * shared, (kv_head + 1) * shared):
                    read_state(a, token, head, state, scale)

    return kernel


def _updater(dtype: str, gated: bool, delta: bool) -> Any:
    """Return ``f(a, token, kv_head, state, difference)``; the parameters: `linear_attention`."""
    load, store, item = ld(dtype), st(dtype), item_bytes(dtype)

    @register_jitable
    def update(
        a: LinearAttentionArguments, token: int, kv_head: int, state: int, difference: int
    ) -> None:
        """Update the state of a head by a token.

        Args:
            a: The kernel's arguments.
            token: Index of the token among those of all samples.
            kv_head: Head of the keys and values.
            state: Address of the state, ``[keys, values]``.
            difference: Scratch for a value.
        """
        keys, values, heads = a.key_size, a.value_size, a.kv_heads
        key = a.key + (token * heads + kv_head) * keys * item
        value = a.value + (token * heads + kv_head) * values * item
        if gated:
            each = a.decays
            decay = a.decay + (token * heads + kv_head) * each * item
            for i in range(keys):
                # A head has either one factor or one for each key: ``each`` is 1 or the number of
                # keys.
                factor = load(decay + i % each * item)
                row = state + i * values * item
                for j in range(values):
                    store(row + j * item, load(row + j * item) * factor)
        if delta:
            each = a.betas
            beta = load(a.beta + (token * each + kv_head % each) * item)
            for j in range(values):
                store(difference + j * item, load(value + j * item))
            # Keys are the outer loop here and below, although sums are over keys: rows of the state
            # are contiguous, and the inner loop over values has no dependency between its
            # iterations.
            for i in range(keys):
                factor = load(key + i * item)
                row = state + i * values * item
                for j in range(values):
                    error = load(difference + j * item) - factor * load(row + j * item)
                    store(difference + j * item, error)
            for j in range(values):
                store(difference + j * item, load(difference + j * item) * beta)
            value = difference
        for i in range(keys):
            factor = load(key + i * item)
            row = state + i * values * item
            for j in range(values):
                store(row + j * item, load(row + j * item) + factor * load(value + j * item))

    return update


def _state_reader(dtype: str) -> Any:
    """Return ``f(a, token, head, state, scale)``, which multiplies a query by the state."""
    load, store = ld(dtype), st(dtype)
    item, real = item_bytes(dtype), np.dtype(dtype).type

    @register_jitable
    def read_state(
        a: LinearAttentionArguments, token: int, head: int, state: int, scale: Any
    ) -> None:
        """Write the result of a query: the product of the scaled query and the state."""
        keys, values, heads = a.key_size, a.value_size, a.heads
        query = a.query + (token * heads + head) * keys * item
        y = a.y + (token * heads + head) * values * item
        for j in range(values):
            store(y + j * item, real(0))
        for i in range(keys):
            factor = load(query + i * item) * scale
            row = state + i * values * item
            for j in range(values):
                store(y + j * item, load(y + j * item) + factor * load(row + j * item))

    return read_state
