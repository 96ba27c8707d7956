"""Kernel of LinearAttention: a recurrent state for each head, one token after the other."""

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
        gated: Whether the state decays.
        delta: Whether a token replaces what the state says of its key, not adds to it.
        past: Whether there is a state to begin with; else it is zero.
    """
    arguments = view_of(LinearAttentionArguments)
    load, store = ld(dtype), st(dtype)
    item, real = item_bytes(dtype), np.dtype(dtype).type

    @register_jitable
    def update(a: LinearAttentionArguments, token: int, own: int, state: int, spare: int) -> None:
        keys, values, heads = a.keys, a.values, a.owners
        key = a.key + (token * heads + own) * keys * item
        value = a.value + (token * heads + own) * values * item
        if gated:
            each = a.decays
            decay = a.decay + (token * heads + own) * each * item
            for i in range(keys):
                factor = load(decay + i % each * item)
                row = state + i * values * item
                for j in range(values):
                    store(row + j * item, load(row + j * item) * factor)
        if delta:
            each = a.betas
            beta = load(a.beta + (token * each + own % each) * item)
            for j in range(values):
                store(spare + j * item, load(value + j * item))
            for i in range(keys):
                factor = load(key + i * item)
                row = state + i * values * item
                for j in range(values):
                    held = load(spare + j * item) - factor * load(row + j * item)
                    store(spare + j * item, held)
            for j in range(values):
                store(spare + j * item, load(spare + j * item) * beta)
            value = spare
        for i in range(keys):
            factor = load(key + i * item)
            row = state + i * values * item
            for j in range(values):
                store(row + j * item, load(row + j * item) + factor * load(value + j * item))

    @register_jitable
    def answer(a: LinearAttentionArguments, token: int, head: int, state: int, scale: Any) -> None:
        keys, values, heads = a.keys, a.values, a.heads
        query = a.query + (token * heads + head) * keys * item
        y = a.y + (token * heads + head) * values * item
        for j in range(values):
            store(y + j * item, real(0))
        for i in range(keys):
            factor = load(query + i * item) * scale
            row = state + i * values * item
            for j in range(values):
                store(y + j * item, load(y + j * item) + factor * load(row + j * item))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        tokens, heads, owners = a.tokens, a.heads, a.owners
        size = a.keys * a.values * item
        scale, shared = real(a.scale), heads // owners
        spare = a.scratch + worker * a.scratch_bytes
        for unit in range(begin, end):
            sample, own = unit // owners, unit % owners
            state = a.state + unit * size
            if past:
                memcpy(state, a.past + unit * size, size)
            else:
                for i in range(size // item):
                    store(state + i * item, real(0))
            for t in range(tokens):
                token = sample * tokens + t
                update(a, token, own, state, spare)
                for head in range(own * shared, (own + 1) * shared):
                    answer(a, token, head, state, scale)

    return kernel
