"""Activations that run over a finished tile while it is in the L1 cache.

Relu and Clip are part of the tiles themselves; the kernel here computes the other ones of
`activations`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.bfloat16 import store_bfloat16
from subgraph.engine.codegen.simd import shuffle, vec
from subgraph.engine.codegen.tiling import TileBlock
from subgraph.engine.codegen.vmath import function

# Activations without parameters that `vmath` computes.
_FUNCTIONS = frozenset({"Sigmoid", "Tanh", "Gelu", "Silu", "Softplus"})
_ROUGH = frozenset({"Sigmoid", "Silu"})  # those that have a form for products of bfloat16


def activation(
    *, dtype: str, lanes: int, act: str, rounded: str = "", storage: str = ""
) -> Callable[..., None]:
    """Return the kernel that applies an activation to a tile, in place.

    It is called with ``(address of a TileBlock, rows, vectors of a row, 0)``.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of one vector.
        act: A name of `activations.ACTIVATIONS`, whose parameters p and q are ``low`` and ``high``
            of the block; or ``"Linear"`` (``p * x + q``).
        rounded: As of `vector_activation`.
        storage: ``"bfloat16"`` if the results are stored in it at `TileBlock.rounded` instead.
    """
    block = view_of(TileBlock)
    v = vec(dtype, lanes)
    load, store, load_n, store_n = v.load, v.store, v.load_n, v.store_n
    apply = vector_activation(act, v, rounded)
    put, half = store_bfloat16 if storage else store, lanes * 2
    two, four = (_several(act, dtype, lanes, count, rounded, put) for count in (2, 4))

    @register_jitable
    def column(at: int, step: int, to: int, to_step: int, rows: int, p: float, q: float) -> None:
        i = 0
        while i + 4 <= rows:
            four(at + i * step, step, to + i * to_step, to_step, p, q)
            i += 4
        if i + 2 <= rows:
            two(at + i * step, step, to + i * to_step, to_step, p, q)
            i += 2
        if i < rows:
            put(to + i * to_step, apply(load(at + i * step), p, q))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        t = block(args)
        rows, vectors = begin, end
        c, crs, cjs = t.c, t.c_row, t.c_vector
        tail = t.tail
        p, q = t.low, t.high
        # Only the last vector of a row can be partial. The memory behind it may belong to another
        # tile.
        whole = vectors if tail <= 0 or tail >= lanes else vectors - 1
        for j in range(whole):
            at = c + j * cjs
            if storage:
                column(at, crs, t.rounded + j * half, 2 * half, rows, p, q)
            else:
                column(at, crs, at, crs, rows, p, q)
        if whole < vectors:
            for i in range(rows):
                at = c + i * crs + whole * cjs
                store_n(at, tail, apply(load_n(at, tail), p, q))

    return kernel


def _several(act: str, dtype: str, lanes: int, count: int, rounded: str, put: Any) -> Any:
    """Return ``f(address, step, to, to_step, p, q)`` over ``count`` (2 or 4) vectors.

    They are ``step`` bytes apart, and their results ``to_step`` bytes. Several vectors at once hide
    the latency of the activation's chain of operations.
    """
    load, half = vec(dtype, lanes).load, vec(dtype, lanes * count // 2)
    apply = vector_activation(act, vec(dtype, lanes * count), rounded)
    join = shuffle(dtype, half.lanes, range(2 * half.lanes))
    halves = [
        shuffle(dtype, 2 * half.lanes, range(first, first + half.lanes))
        for first in (0, half.lanes)
    ]
    low, high = halves
    if count == 2:

        @register_jitable
        def run_two(at: int, step: int, to: int, to_step: int, p: float, q: float) -> None:
            both = apply(join(load(at), load(at + step)), p, q)
            put(to, low(both, both))
            put(to + to_step, high(both, both))

        return run_two
    join_one = shuffle(dtype, lanes, range(2 * lanes))
    first, second = (shuffle(dtype, 2 * lanes, range(k, k + lanes)) for k in (0, lanes))

    @register_jitable
    def run_four(at: int, step: int, to: int, to_step: int, p: float, q: float) -> None:
        a = join_one(load(at), load(at + step))
        b = join_one(load(at + 2 * step), load(at + 3 * step))
        every = apply(join(a, b), p, q)
        a, b = low(every, every), high(every, every)
        put(to, first(a, a))
        put(to + to_step, second(a, a))
        put(to + 2 * to_step, first(b, b))
        put(to + 3 * to_step, second(b, b))

    return run_four


def vector_activation(act: str, v: Any, rounded: str = "") -> Any:
    """Return ``f(vector, p, q)``, an activation with its parameters p and q.

    Args:
        act: As of `activation`.
        v: Operations on vectors.
        rounded: ``"bfloat16"`` behind products of operands that were rounded to it: the sigmoid is
            computed to 12 bits (`vmath.emit`).
    """
    if act in _FUNCTIONS:
        ending = f"_{rounded}" if rounded and act in _ROUGH else ""
        simple = function(act.lower() + ending, v.dtype, v.lanes)

        @register_jitable
        def one(x: Any, p: float, q: float) -> Any:
            return simple(x)

        return one
    return {**_transcendental(v, rounded), **_linear_parts(v)}[act]


def _transcendental(v: Any, rounded: str) -> dict[str, Any]:
    """Return the activations that compute an exponential and have a formula of their own."""
    dtype, lanes = v.dtype, v.lanes
    splat, fma, select = v.splat, v.fma, v.select
    sigmoid = function(f"sigmoid_{rounded}" if rounded else "sigmoid", dtype, lanes)
    exp, expm1 = function("exp", dtype, lanes), function("expm1", dtype, lanes)
    most = 20.0 if dtype == "float32" else 40.0

    @register_jitable
    def gelu_tanh(x: Any, p: float, q: float) -> Any:
        # The factors are 2 sqrt(2 / pi) and 0.044715 times that.
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        inner = x * fma(x * splat(0.07135481627260025), x, splat(1.5957691216057308))
        return x * sigmoid(inner)

    @register_jitable
    def mish(x: Any, p: float, q: float) -> Any:
        # As `subgraph.ops.elementwise.expressions` computes it.
        power = exp(select(x > splat(most), splat(most), x))
        n = power * (power + splat(2.0))
        return x * (n / (n + splat(2.0)))

    @register_jitable
    def elu(x: Any, p: float, q: float) -> Any:
        # Where x is positive the exponential may overflow, and its result is discarded. Unlike
        # exp(x) - 1, expm1 keeps the digits of small results.
        return select(x < splat(0.0), expm1(x) * splat(p), x)

    @register_jitable
    def swish(x: Any, p: float, q: float) -> Any:
        return x * sigmoid(x * splat(p))

    return {"GeluTanh": gelu_tanh, "Mish": mish, "Elu": elu, "Swish": swish}


def _linear_parts(v: Any) -> dict[str, Any]:
    """Return the activations that are made of linear parts."""
    splat, fma, largest, smallest, select = v.splat, v.fma, v.max, v.min, v.select

    @register_jitable
    def hard_sigmoid(x: Any, p: float, q: float) -> Any:
        line = fma(x, splat(p), splat(q))
        return smallest(splat(1.0), largest(splat(0.0), line))

    @register_jitable
    def hard_swish(x: Any, p: float, q: float) -> Any:
        return x * hard_sigmoid(x, 1.0 / 6.0, 0.5)

    @register_jitable
    def leaky_relu(x: Any, p: float, q: float) -> Any:
        return select(x < splat(0.0), x * splat(p), x)

    @register_jitable
    def linear(x: Any, p: float, q: float) -> Any:
        return fma(x, splat(p), splat(q))

    return {
        "HardSigmoid": hard_sigmoid,
        "HardSwish": hard_swish,
        "LeakyRelu": leaky_relu,
        "Linear": linear,
    }
