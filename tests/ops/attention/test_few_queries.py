"""Attention of few queries against float64 NumPy: every order, mask, shared heads, any threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subgraph.operators.schema import INTERNAL_DOMAIN
from tests.support.kernels import run_node

from .test_kernels import check_attention, reference


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (4, 1), (6, 2), (20, 1)]),
    positions=st.tuples(st.integers(1, 6), st.sampled_from([1, 2, 7, 8, 9, 33, 300])),
    sizes=st.tuples(st.sampled_from([1, 5, 8, 37]), st.sampled_from([1, 6, 16, 41])),
    orders=st.tuples(*[st.sampled_from(["bhtd", "bthd"])] * 3, st.sampled_from(["", "bhdt"])),
    mask=st.sampled_from(["none", "keys", "pairs", "full"]),
    causal=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_few_queries(orders: tuple[str, str, str, str], **drawn: Any) -> None:
    q, k, v, o = orders[0], orders[3] or orders[1], orders[1], orders[2]
    check_attention(orders=(q, k, v, o), **drawn)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2)])
def test_a_query_that_looks_at_nothing(heads: tuple[int, int]) -> None:
    """NaN, as exp(-inf - -inf) is; the others are not touched by it."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, heads[0], 1, 16)).astype(np.float32)
    k, v = (rng.standard_normal((2, heads[1], 40, 16)).astype(np.float32) for _ in range(2))
    mask = np.zeros((2, 1, 1, 40), np.float32)
    mask[1] = -np.inf
    (got,) = run_node("FusedAttention", [q, k, v, mask], [q.shape], {}, domain=INTERNAL_DOMAIN)
    assert np.isnan(got[1]).all()
    np.testing.assert_allclose(got[0], reference(q, k, v, None, 1.0, False)[0], atol=1e-5)
