"""Products of rows with the matrices that indices choose, as mixtures of experts have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops

GATHERS = ("Gather", "GatherND")


def experts(
    gather: str, sizes: tuple[int, int, int], dtype: str, *, first: bool, index: str = "int64"
) -> tuple[sg.Graph, Any]:
    """Return a graph of products with gathered matrices, and the matrices.

    Args:
        gather: The operator that takes the matrices.
        sizes: Sizes of the matrices, E of M rows and K columns.
        dtype: Their dtype.
        first: Whether a product is W x, with a column x; if not, it is x W', with a row x.
        index: Dtype of the indices.
    """
    count, rows, depth = sizes
    stored = sizes if first else (count, depth, rows)
    weights = np.random.default_rng(0).standard_normal(stored).astype(dtype)
    x = sg.input("x", ("N", depth, 1) if first else ("N", 1, depth), dtype)
    chosen = sg.input("chosen", ("N", 1) if gather == "GatherND" else ("N",), index)
    taken = getattr(ops, gather)(sg.parameter("w", weights), chosen)
    result = ops.MatMul(taken, x) if first else ops.MatMul(x, taken)
    return sg.Graph([x, chosen], [result]), weights


def arrays(
    gather: str, sizes: tuple[int, int, int], dtype: str, rows: int, *, first: bool
) -> tuple[Any, Any]:
    """Return vectors, and indices from both ends."""
    generator = np.random.default_rng(rows)
    shape = (rows, sizes[2], 1) if first else (rows, 1, sizes[2])
    chosen = generator.integers(-sizes[0], sizes[0], (rows, 1) if gather == "GatherND" else rows)
    return generator.standard_normal(shape).astype(dtype), chosen


def wanted(weights: Any, x: Any, chosen: Any, *, first: bool) -> Any:
    taken = weights[chosen.reshape(-1)]
    return taken @ x if first else x @ taken


@given(
    kind=st.sampled_from([("Gather", "int32"), ("Gather", "int64"), ("GatherND", "int64")]),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 140), st.integers(1, 70)),
    dtype=st.sampled_from(["float32", "float64"]),
    first=st.booleans(),
    rows=st.lists(st.integers(1, 200), min_size=1, max_size=2),
    threads=st.integers(1, 3),
)
@settings(max_examples=40, deadline=None)
def test_grouped_products(
    kind: tuple[str, str],
    sizes: tuple[int, int, int],
    dtype: str,
    first: bool,
    rows: list[int],
    threads: int,
) -> None:
    gather, index = kind
    graph, weights = experts(gather, sizes, dtype, first=first, index=index)
    config = {"INFERENCE_NUM_THREADS": threads, "ENABLE_PROFILING": True, "RUNTIME_FALLBACK": False}
    request = sg.compile_model(graph, "CPU", config).create_infer_request()
    for count in rows:
        x, chosen = arrays(gather, sizes, dtype, count, first=first)
        result = request.infer([x, chosen.astype(index)])[0]
        tolerance = 1e-4 if dtype == "float32" else 1e-10
        exact = wanted(weights, x, chosen, first=first)
        np.testing.assert_allclose(result, exact, rtol=tolerance, atol=tolerance)
        assert any("grouped" in each.kernel for each in request.profile())


@pytest.mark.parametrize("gather", GATHERS)
def test_all_rows_use_one_matrix(gather: str) -> None:
    graph, weights = experts(gather, (4, 40, 33), "float32", first=True)
    x, chosen = arrays(gather, (4, 40, 33), "float32", 300, first=True)
    chosen[:] = 2
    result = sg.compile_model(graph, "CPU")(x, chosen)[0]
    np.testing.assert_allclose(result, wanted(weights, x, chosen, first=True), rtol=1e-4, atol=1e-4)


def test_new_weights() -> None:
    graph, weights = experts("Gather", (4, 40, 33), "float32", first=True)
    model = sg.compile_model(graph, "CPU")
    x, chosen = arrays("Gather", (4, 40, 33), "float32", 20, first=True)
    model(x, chosen)
    model.parameters["w"].assign(2 * weights)
    exact = wanted(2 * weights, x, chosen, first=True)
    np.testing.assert_allclose(model(x, chosen)[0], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gather", GATHERS)
@pytest.mark.parametrize("index", [4, -5, 1 << 40])
def test_an_index_out_of_range_is_an_error(gather: str, index: int) -> None:
    graph, weights = experts(gather, (4, 40, 33), "float32", first=False)
    model = sg.compile_model(graph, "CPU", {"RUNTIME_FALLBACK": False})
    x, chosen = arrays(gather, (4, 40, 33), "float32", 6, first=False)
    wrong = chosen.copy()
    wrong[3] = index
    with pytest.raises(sg.SubgraphError, match=rf"{index}.*\[-4, 3\]"):
        model(x, wrong)
    exact = wanted(weights, x, chosen, first=False)
    np.testing.assert_allclose(model(x, chosen)[0], exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 5])
def test_what_is_no_grouped_product(rows: int) -> None:
    """One vector for all indices, and no vectors, are computed as the model says."""
    weights = np.random.default_rng(0).standard_normal((3, 8, 6)).astype(np.float32)
    x, chosen = sg.input("x", ("N", 6, 1)), sg.input("chosen", ("P",), "int64")
    taken = ops.Gather(sg.parameter("w", weights), chosen)
    model = sg.compile_model(sg.Graph([x, chosen], [ops.MatMul(taken, x)]), "CPU")
    given = np.ones((min(rows, 1), 6, 1), np.float32)
    indices = np.arange(rows) % 3
    np.testing.assert_allclose(model(given, indices)[0], weights[indices] @ given, rtol=1e-5)


def test_gathered_matrices_that_others_read_too() -> None:
    weights = np.random.default_rng(0).standard_normal((3, 8, 6)).astype(np.float32)
    x, chosen = sg.input("x", (4, 6, 1)), sg.input("chosen", (4,), "int64")
    taken = ops.Gather(sg.parameter("w", weights), chosen)
    model = sg.compile_model(sg.Graph([x, chosen], [ops.MatMul(taken, x), taken]), "CPU")
    given, indices = np.ones((4, 6, 1), np.float32), np.array([0, 2, 2, 1])
    results = model(given, indices)
    np.testing.assert_array_equal(results[1], weights[indices])
    np.testing.assert_allclose(results[0], weights[indices] @ given, rtol=1e-5, atol=1e-6)
