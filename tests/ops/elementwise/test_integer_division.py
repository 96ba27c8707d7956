"""Division and remainder of integers on CPU, against Python's integers."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")


@pytest.mark.parametrize("dtype", DTYPES)
def test_quotients_are_exact(dtype: str) -> None:
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)
    edges = np.array([low, low + 1, 0, 1, 2, 3, 7, high // 2, high - 1, high], dtype)
    whole = rng.integers(low, high, 4000, dtype=dtype, endpoint=True)
    whole[2000:] //= 1 << limits.bits // 4  # vectors of large numbers, and of smaller ones alone
    # Multiples of the divisor and their neighbours, where a rounded quotient would be wrong.
    divisors = rng.integers(2, min(high, 1 << 16), 4000).astype(dtype)
    near = (whole // divisors) * divisors - rng.integers(0, 2, 4000).astype(dtype)
    a = np.concatenate([np.repeat(edges, len(edges)), whole, near])
    b = np.concatenate([np.tile(edges, len(edges)), whole[::-1], divisors])
    x, y = sg.input("x", ("N",), dtype), sg.input("y", ("N",), dtype)
    model = sg.compile_model(sg.Graph([x, y], [ops.Div(x, y), ops.Mod(x, y)]), "CPU")
    quotients, remainders = model([a, b]).values()
    for p, q, quotient, rest in zip(
        a.tolist(), b.tolist(), quotients.tolist(), remainders.tolist(), strict=True
    ):
        exact = 0 if q == 0 else abs(p) // abs(q) * (1 if (p < 0) == (q < 0) else -1)
        assert quotient == (exact if exact <= high else low), (p, q)
        assert rest == (0 if q == 0 else p % q), (p, q)
