"""Kernel of LinearAttention: a recurrent state for each head, one token after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable

from subgraph.engine.codegen.simd import ld, memcpy, st
from subgraph.ops.movement.kernels import arg

Function = Callable[..., Any]
_word = ld("float64")
_REAL: dict[str, Any] = {"float32": np.float32, "float64": np.float64}
_ITEM = {"float32": 4, "float64": 8}


def linear_attention(*, dtype: str, gated: bool, delta: bool, past: bool) -> Function:
    """Return the kernel of one update rule.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        gated: Whether the state decays.
        delta: Whether a token replaces what the state says of its key, not adds to it.
        past: Whether there is a state to begin with; else it is zero.

    Words: ``0 query [batch, tokens, heads * keys], 1 key [batch, tokens, own * keys],
    2 value [batch, tokens, own * values], 3 past state, 4 exp(decay), 5 beta,
    6 y [batch, tokens, heads * values], 7 state [batch, own, keys, values], 8 tokens, 9 heads,
    10 own heads of keys and values, 11 keys, 12 values, 13 scale, 14 decays of a head (1 or keys),
    15 betas of a token (1 or own), 16 scratch, 17 bytes of it for each worker``.
    Units: batch * own.
    """
    load, store = ld(dtype), st(dtype)
    item, real = _ITEM[dtype], _REAL[dtype]

    @register_jitable
    def update(args: int, token: int, own: int, state: int, spare: int) -> None:
        keys, values, heads = arg(args, 11), arg(args, 12), arg(args, 10)
        key = arg(args, 1) + (token * heads + own) * keys * item
        value = arg(args, 2) + (token * heads + own) * values * item
        if gated:
            each = arg(args, 14)
            decay = arg(args, 4) + (token * heads + own) * each * item
            for i in range(keys):
                factor = load(decay + i % each * item)
                row = state + i * values * item
                for j in range(values):
                    store(row + j * item, load(row + j * item) * factor)
        if delta:
            each = arg(args, 15)
            beta = load(arg(args, 5) + (token * each + own % each) * item)
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
    def answer(args: int, token: int, head: int, state: int, scale: Any) -> None:
        keys, values, heads = arg(args, 11), arg(args, 12), arg(args, 9)
        query = arg(args, 0) + (token * heads + head) * keys * item
        y = arg(args, 6) + (token * heads + head) * values * item
        for j in range(values):
            store(y + j * item, real(0))
        for i in range(keys):
            factor = load(query + i * item) * scale
            row = state + i * values * item
            for j in range(values):
                store(y + j * item, load(y + j * item) + factor * load(row + j * item))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        tokens, heads, owners = arg(args, 8), arg(args, 9), arg(args, 10)
        size = arg(args, 11) * arg(args, 12) * item
        scale, shared = real(_word(args + 104)), heads // owners
        spare = arg(args, 16) + worker * arg(args, 17)
        for unit in range(begin, end):
            sample, own = unit // owners, unit % owners
            state = arg(args, 7) + unit * size
            if past:
                memcpy(state, arg(args, 3) + unit * size, size)
            else:
                for i in range(size // item):
                    store(state + i * item, real(0))
            for t in range(tokens):
                token = sample * tokens + t
                update(args, token, own, state, spare)
                for head in range(own * shared, (own + 1) * shared):
                    answer(args, token, head, state, scale)

    return kernel
