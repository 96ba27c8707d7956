"""Fused attention against float64 NumPy: layouts of heads, masks, causality, shared key heads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine.codegen.tiling import row_counts, tile_run
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from tests.support.kernels import run_node

ORDERS = {"bhtd": (0, 1, 2, 3), "bthd": (0, 2, 1, 3), "bhdt": (0, 1, 3, 2)}


def reference(
    q: Array, k: Array, v: Array, mask: Array | None, scale: float, causal: bool
) -> Array:
    """Attend in float64 over ``[batch, heads, positions, size]``."""
    shared = q.shape[1] // k.shape[1]
    q, k, v = (a.astype(np.float64) for a in (q, k, v))
    k, v = np.repeat(k, shared, 1), np.repeat(v, shared, 1)
    scores = q @ k.swapaxes(2, 3) * scale
    if mask is not None:
        scores = scores + mask
    if causal:
        future = np.arange(scores.shape[3]) > np.arange(scores.shape[2])[:, None]
        scores = np.where(future, -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.asarray(weights / weights.sum(-1, keepdims=True) @ v)


def positions_first(q: Array, k: Array, v: Array, scale: float, causal: bool) -> Array:
    """Attend over ``[batch, positions, heads, size]``."""
    q, k, v = (a.swapaxes(1, 2) for a in (q, k, v))
    return reference(q, k, v, None, scale, causal).swapaxes(1, 2)


def check_attention(
    batch: int,
    heads: tuple[int, int],
    positions: tuple[int, int],
    sizes: tuple[int, int],
    orders: tuple[str, str, str, str],
    mask: str,
    causal: bool,
    dtype: str,
    threads: int,
    cuts: list[float],
    options: dict[str, str] | None = None,
    tolerance: float = 0.0,
) -> None:
    """Run random heads, of ``orders`` for Q, K, V and the output, beside the reference."""
    rng = np.random.default_rng(0)
    queries, keys = positions
    q = rng.standard_normal((batch, heads[0], queries, sizes[0])).astype(dtype)
    k = rng.standard_normal((batch, heads[1], keys, sizes[0])).astype(dtype)
    v = rng.standard_normal((batch, heads[1], keys, sizes[1])).astype(dtype)
    shapes = {
        "keys": (batch, 1, 1, keys),
        "pairs": (queries, keys),
        "full": (batch, heads[0], queries, keys),
    }
    added = None
    if mask != "none":
        added = rng.standard_normal(shapes[mask]).astype(dtype)
        added[rng.random(added.shape) < 0.3] = -np.inf
        added[..., 0] = 0
    wanted = reference(q, k, v, added, 0.4, causal)
    given_to = [
        np.ascontiguousarray(array.transpose(ORDERS[order]))
        for array, order in zip((q, k, v), orders, strict=False)
    ]
    (got,) = run_node(
        "FusedAttention",
        [*given_to, added],
        [wanted.transpose(ORDERS[orders[3]]).shape],
        {
            "scale": 0.4,
            "causal": int(causal),
            **{f"{name}_order": order for name, order in zip("qkvo", orders, strict=True)},
        },
        domain=INTERNAL_DOMAIN,
        threads=threads,
        cuts=cuts,
        options=options,
    )
    tolerance = tolerance or (1e-5 if dtype == "float32" else 1e-12)
    np.testing.assert_allclose(got.transpose(ORDERS[orders[3]]), wanted, rtol=0, atol=tolerance)


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    positions=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    orders=st.tuples(
        st.sampled_from(["bhtd", "bthd"]),
        st.sampled_from(["bhtd", "bthd", "bhdt"]),
        st.sampled_from(["bhtd", "bthd"]),
        st.sampled_from(["bhtd", "bthd"]),
    ),
    mask=st.sampled_from(["none", "keys", "pairs", "full"]),
    causal=st.booleans(),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_fused_attention(**drawn: Any) -> None:
    check_attention(**drawn)


def test_long_sequences_go_in_blocks() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1100, 2, 16)).astype(np.float32) for _ in range(3))
    wanted = positions_first(q, k, v, 0.25, True)
    (got,) = run_node(
        "FusedAttention",
        [q, k, v],
        [q.shape],
        {"scale": 0.25, "causal": 1, **{f"{name}_order": "bthd" for name in "qkvo"}},
        domain=INTERNAL_DOMAIN,
    )
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


HIDING = {
    "causal": lambda i, j, extra: j <= i + extra,
    "window": lambda i, j, extra: (j <= i + extra) & (j > i + extra - 40),
    "left padding": lambda i, j, extra: j >= 650 + 0 * i,
    "right padding": lambda i, j, extra: j < 70 + 0 * i,
    "gap": lambda i, j, extra: (j < 5) | (j > 800 + 0 * i),
    "one key": lambda i, j, extra: j == (i * 37) % 900,
    "nothing": lambda i, j, extra: j < 0 * i,
    "some rows": lambda i, j, extra: (j < 30) & (i % 3 != 0),
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("number", [-np.inf, float(np.finfo(np.float32).min), -1e4])
@pytest.mark.parametrize("queries", [1, 3, 70, 900])
@pytest.mark.parametrize("hides", HIDING)
def test_keys_that_a_mask_hides(hides: str, queries: int, number: float, precision: str) -> None:
    """Blocks of hidden keys are left out, but not those of a query that sees no key."""
    rng = np.random.default_rng(queries)
    shapes = (2, 4, queries, 16), (2, 2, 900, 16), (2, 2, 900, 8)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    i, j = np.arange(queries)[:, None], np.arange(900)
    seen = np.broadcast_to(HIDING[hides](i, j, 900 - queries), (queries, 900))
    mask = np.where(seen, rng.standard_normal((queries, 900)), number).astype(np.float32)
    # Sums with a mask are rounded to float32, which decides where all keys have a large one.
    scores = np.einsum("bhid,bhjd->bhij", q, np.repeat(k, 2, axis=1)) / np.float32(4) + mask
    with np.errstate(invalid="ignore"):
        weights = np.exp((scores - scores.max(axis=-1, keepdims=True)).astype(np.float64))
        weights /= weights.sum(axis=-1, keepdims=True)
    want = np.nan_to_num(weights) @ np.repeat(v, 2, axis=1)
    names = [sg.input(n, a.shape) for n, a in zip("qkvm", (q, k, v, mask), strict=True)]
    graph = sg.Graph(names, [ops.Attention(*names)])
    got = sg.compile_model(graph, "CPU", {"INFERENCE_PRECISION": precision})(q, k, v, mask)[0]
    # Scores beside -1e4 have three digits behind the point.
    close = 2e-5 if number != -1e4 else 2e-3
    np.testing.assert_allclose(got, want, 2e-4, close if precision == "float32" else 0.03)


@pytest.mark.parametrize("orders", ["bhtd bhtd", "bthd bthd", "bhdt bhdt"])
@pytest.mark.parametrize("mask", ["none", "keys", "heads", "one"])
@pytest.mark.parametrize("causal", [False, True])
def test_several_blocks_of_keys_and_panels_of_queries(orders: str, mask: str, causal: bool) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 300, 24)).astype(np.float32)
    k = rng.standard_normal((2, 3, 512, 24)).astype(np.float32)
    v = rng.standard_normal((2, 3, 512, 40)).astype(np.float32)
    shapes = {"keys": (2, 1, 1, 512), "heads": (1, 3, 300, 512), "one": (1, 1, 1, 1)}
    added = rng.standard_normal(shapes[mask]).astype(np.float32) if mask != "none" else None
    wanted = reference(q, k, v, added, 0.2, causal)
    of_k, of_v = orders.split()
    arrays = [q, k.transpose(ORDERS[of_k]), v.transpose(ORDERS[of_v])]
    results = [
        run_node(
            "FusedAttention",
            [*(np.ascontiguousarray(a) for a in arrays), added],
            [wanted.shape],
            {"scale": 0.2, "causal": int(causal), "k_order": of_k, "v_order": of_v},
            domain=INTERNAL_DOMAIN,
            threads=threads,
        )[0]
        for threads in (1, 2)
    ]
    np.testing.assert_allclose(results[0], wanted, rtol=0, atol=1e-5)
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize(
    ("heads", "size", "queries", "keys", "dtype"),
    [
        (16, 64, 40, 40, "float32"),
        (8, 64, 100, 700, "float32"),
        (4, 64, 33, 530, "float64"),
        (512, 37, 19, 21, "float32"),  # not a whole number of vectors
    ],
)
@pytest.mark.parametrize("causal", [False, True])
def test_rows_a_multiple_of_a_page_apart(
    heads: int, size: int, queries: int, keys: int, dtype: str, causal: bool
) -> None:
    check_attention(
        *(1, (heads, heads), (queries, keys), (16, size), ("bthd", "bthd", "bthd", "bthd"), "none"),
        *(causal, dtype, 2, [0.3]),
    )


@pytest.mark.parametrize("rank", [3, 4])
def test_onnx_attention(rank: int) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 4, 9, 8)).astype(np.float32)
    k, v = (rng.standard_normal((2, 2, 13, 8)).astype(np.float32) for _ in range(2))
    wanted = reference(q, k, v, None, 1 / np.sqrt(8), False)
    arrays = [q, k, v]
    if rank == 3:
        arrays = [a.swapaxes(1, 2).reshape(2, a.shape[2], -1) for a in arrays]
        wanted = wanted.swapaxes(1, 2).reshape(2, 9, -1)
    attrs = {"q_num_heads": 4, "kv_num_heads": 2} if rank == 3 else {}
    node_outputs = [wanted.shape]
    (got,) = run_node("Attention", arrays, node_outputs, attrs)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("most", [3, 4, 6, 8, 14])
def test_runs_of_tiles_take_every_row_once(most: int) -> None:
    heights = row_counts(most)
    for all_rows in range(1, 200):
        left = all_rows
        while left > 0:
            rows, count = tile_run(left, most)
            assert rows in heights
            assert count >= 1
            left -= rows * count
        assert left == 0
