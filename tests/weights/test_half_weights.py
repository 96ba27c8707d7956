"""Weights of models in half precision, which products of few rows read as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array, numpy_dtype
from subgraph.system import host

_HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def _model(dtype: str, weights: list[Array], *, rows: Any, transposed: bool) -> sg.Graph:
    """Return products with the same rows, each with a weight ``[K, N]``."""
    x = sg.input("x", (rows, weights[0].shape[0]), dtype)
    results = [
        ops.Gemm(x, sg.parameter(f"w{k}", w.T.copy()), transB=1)
        if transposed
        else ops.MatMul(x, sg.parameter(f"w{k}", w))
        for k, w in enumerate(weights)
    ]
    return sg.Graph([x], results)


def _run(model: sg.CompiledModel, x: Array) -> tuple[list[Array], str]:
    request = model.create_infer_request()
    found = list(request.infer({"x": x}).values())
    kernels = {entry.kernel for entry in request.profile() if "kernels.gemm" in entry.kernel}
    return found, " ".join(kernels)


def _is_read_as(dtype: str) -> bool:
    return dtype == "bfloat16" or host.widens_float16()


@_HALVES
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("size", [(40, 70), (128, 33), (1, 5)])
def test_products_are_those_of_float32(
    size: tuple[int, int], count: int, transposed: bool, dtype: str
) -> None:
    rng, half = np.random.default_rng(0), numpy_dtype(dtype)
    weights = [rng.standard_normal(size).astype(half) for _ in range(count)]
    graph = _model(dtype, weights, rows="rows", transposed=transposed)
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    step = 2.0**-10 if dtype == "float16" else 2.0**-7
    for rows in (1, 3, 50, 2):
        x = rng.standard_normal((rows, size[0])).astype(half)
        found, kernels = _run(model, x)
        assert ("float16" in kernels) == _is_read_as(dtype), kernels
        for array, w in zip(found, weights, strict=True):
            wide = [value.astype(np.float64) for value in (x, w)]
            allowed = step * (np.abs(wide[0]) @ np.abs(wide[1])) + 1e-6
            assert array.dtype == half
            assert (np.abs(array.astype(np.float64) - wide[0] @ wide[1]) <= allowed).all()


@_HALVES
def test_every_number_is_widened_exactly(dtype: str) -> None:
    """A row of the unit matrix picks a row of the weights: all finite numbers of 16 bits."""
    half = numpy_dtype(dtype)
    numbers = np.arange(1 << 16, dtype=np.uint16).view(half)
    weights = numbers[np.isfinite(numbers.astype(np.float32))].reshape(-1, 256)
    graph = _model(dtype, [weights], rows=1, transposed=False)
    request = sg.compile_model(graph, "CPU").create_infer_request()
    for x, wanted in zip(np.eye(len(weights), dtype=half), weights, strict=True):
        found = request.infer({"x": x[None]})[0][0]
        np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


@_HALVES
def test_weights_that_change(dtype: str) -> None:
    half = numpy_dtype(dtype)
    weights = np.ones((32, 48), half)
    graph = _model(dtype, [weights], rows=1, transposed=False)
    model = sg.compile_model(graph, "CPU")
    x = np.ones((1, 32), half)
    assert (model(x=x)[0] == 32).all()
    graph.parameters["w0"].assign(weights * half.type(2))
    assert (model(x=x)[0] == 64).all()


@_HALVES
def test_many_rows_read_float32(dtype: str) -> None:
    """Where the number of rows is known, and large, widening would take more time."""
    graph = _model(dtype, [np.ones((32, 48), numpy_dtype(dtype))], rows=64, transposed=False)
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    _, kernels = _run(model, np.ones((64, 32), numpy_dtype(dtype)))
    assert kernels
    assert "float16" not in kernels


def test_models_of_float32_are_not_rounded() -> None:
    """Weights that a Cast makes of other numbers than half precision."""
    rng = np.random.default_rng(1)
    exact = rng.standard_normal((32, 48))
    x = sg.input("x", (1, 32))
    weights = ops.Cast(sg.parameter("w", exact), to=1)
    model = sg.compile_model(sg.Graph([x], [ops.MatMul(x, weights)]), "CPU")
    given = rng.standard_normal((1, 32)).astype(np.float32)
    np.testing.assert_allclose(model(x=given)[0], given @ exact, rtol=1e-4, atol=1e-5)
