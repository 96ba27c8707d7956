"""Distances between all pairs of rows: the fused form on CPU, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

pytestmark = pytest.mark.filterwarnings("ignore")


def _random(*shape: int, dtype: str, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _run(graph: sg.Graph, *inputs: Array) -> tuple[Array, bool]:
    """Return the first result on CPU, and whether tiles of products computed it."""
    config = {"ENABLE_PROFILING": True, "RUNTIME_FALLBACK": False, "INFERENCE_NUM_THREADS": 2}
    request = sg.compile_model(graph, "CPU", config).create_infer_request()
    (result, *_) = request.infer(list(inputs)).values()
    return result, any("gemm" in each.kernel for each in request.profile())


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("lead", "sizes"),
    [
        ((), (1, 1, 1)),
        ((), (13, 37, 5)),
        ((), (3, 64, 30)),
        ((), (70, 1, 129)),
        ((2, 3), (5, 9, 3)),
        ((), (0, 4, 3)),
        ((), (4, 5, 0)),
    ],
)
def test_distances(
    lead: tuple[int, ...], sizes: tuple[int, int, int], dtype: str, weights: bool
) -> None:
    rows, others, length = sizes
    x = _random(*lead, rows, 1, length, dtype=dtype)
    y = _random(*lead, 1, others, length, dtype=dtype, seed=1)
    given = sg.input("x", x.shape, dtype)
    other = sg.parameter("y", y) if weights else sg.input("y", y.shape, dtype)
    difference = ops.Sub(other, given) if others % 2 else ops.Sub(given, other)
    squares = ops.Mul(difference, difference)
    if rows > 10:
        squares = ops.Pow(difference, sg.parameter("two", np.array(2, dtype)))
    total = ops.ReduceSum(squares, np.array([-1]), keepdims=0)
    inputs = [given] if weights else [given, other]
    result, fused = _run(sg.Graph(inputs, [ops.Sqrt(total)]), *([x] if weights else [x, y]))
    assert fused == (result.size > 0)
    expected = np.sqrt(((x - y).astype(np.float64) ** 2).sum(-1))
    tolerance = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(result, expected, tolerance, tolerance)


def test_near_rows_have_exact_distances() -> None:
    """``|x|^2 + |y|^2 - 2 x y`` would lose all digits."""
    x = (1000 + _random(6, 1, 8, dtype="float32")).astype(np.float32)
    y = x.reshape(1, 6, 8) + np.float32(2.0**-10)
    given = sg.input("x", ("N", 1, 8))
    difference = ops.Sub(given, sg.parameter("y", y))
    total = ops.ReduceSum(ops.Mul(difference, difference), np.array([2]), keepdims=0)
    model = sg.compile_model(sg.Graph([given], [total]), "CPU")
    for rows in (6, 2, 5):
        expected = ((x[:rows].astype(np.float64) - y) ** 2).sum(-1)
        np.testing.assert_allclose(model([x[:rows]])[0], expected, 1e-6)


@pytest.mark.parametrize("case", ["keepdims", "other axis", "used twice", "broadcast"])
def test_other_sums_of_squares(case: str) -> None:
    x, y = _random(5, 1, 4, dtype="float32"), _random(1, 7, 4, dtype="float32", seed=1)
    if case == "broadcast":
        y = y[..., :1]
    given = sg.input("x", x.shape), sg.input("y", y.shape)
    difference = ops.Sub(*given)
    axis, keep = (1 if case == "other axis" else 2), int(case == "keepdims")
    total = ops.ReduceSum(ops.Mul(difference, difference), np.array([axis]), keepdims=keep)
    outputs = [total, difference] if case == "used twice" else [total]
    result, fused = _run(sg.Graph(given, outputs), x, y)
    assert not fused
    expected = ((x - y) ** 2).sum(axis, keepdims=bool(keep))
    np.testing.assert_allclose(result, expected, 1e-5)
