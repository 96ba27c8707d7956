"""Models in float16 and bfloat16 on CPU and OPENCL: float32 arithmetic, results rounded once."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def network(dtype: str) -> tuple[sg.Graph, Array]:
    half: Any = HALVES[dtype]
    rng = np.random.default_rng(0)
    x = sg.input("x", shape=(2, 16, 12, 12), dtype=dtype)
    w = sg.parameter("w", (rng.standard_normal((24, 16, 3, 3)) * 0.1).astype(half))
    v = sg.parameter("v", (rng.standard_normal((24, 10)) * 0.2).astype(half))
    b = sg.parameter("b", rng.standard_normal(10).astype(half))
    y = ops.Relu(ops.Conv(x, w, pads=[1, 1, 1, 1]))
    y = ops.MaxPool(y, kernel_shape=[2, 2], strides=[2, 2])
    pooled = ops.Flatten(ops.GlobalAveragePool(y))
    y = ops.Softmax(ops.Add(ops.MatMul(pooled, v), b))
    return sg.Graph([x], [y, pooled]), rng.standard_normal((2, 16, 12, 12)).astype(half)


def _recurrent(dtype: str) -> tuple[sg.Graph, Array]:
    """What has kernels for float32 only: cells, attention, the best of its scores."""
    half: Any = HALVES[dtype]
    rng = np.random.default_rng(1)

    def weight(*shape: int) -> sg.Value:
        return ops.Constant(value=(rng.standard_normal(shape) * 0.3).astype(half))

    x = sg.input("x", shape=(6, 2, 5), dtype=dtype)
    gates = weight(1, 32, 5), weight(1, 32, 8), weight(1, 64)
    lstm = ops.Squeeze(ops.LSTM(x, *gates, hidden_size=8, outputs=1), np.array([1]))
    gates = weight(1, 24, 8), weight(1, 24, 8), weight(1, 48)
    gru = ops.Squeeze(ops.GRU(lstm, *gates, hidden_size=8, outputs=1), np.array([1]))
    rows = ops.Transpose(gru, perm=[1, 0, 2])
    seen = ops.Attention(rows, rows, rows, q_num_heads=2, kv_num_heads=2, is_causal=1, outputs=1)
    product = ops.Einsum(seen, weight(8, 4), equation="btd,de->bte")
    best = ops.TopK(ops.Reshape(product, np.array([2, -1])), np.array([3]))[0]
    return sg.Graph([x], [best, product]), rng.standard_normal((6, 2, 5)).astype(half)


@pytest.mark.parametrize("make", [network, _recurrent])
@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("dtype", list(HALVES))
@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
def test_halves_run_on_kernels(device: str, dtype: str, fusion: bool, make: Any) -> None:
    if device not in sg.default_core().available_devices:
        pytest.skip("there is no OpenCL device")
    graph, x = make(dtype)
    assert len(sg.default_core().query_model(graph, device)) == len(graph.nodes)
    model = sg.compile_model(graph, device, {"ENABLE_PROFILING": True, "FUSION": fusion})
    request = model.create_infer_request()
    results = request.infer([x])
    assert not [entry for entry in request.profile() if entry.kernel == "reference"]
    truth = sg.compile_model(graph, "REFERENCE")([x])
    step = 2.0**-7 if dtype == "bfloat16" else 2.0**-10
    for got, wanted in zip(results.values(), truth.values(), strict=True):
        assert got.dtype == wanted.dtype == np.dtype(HALVES[dtype])
        apart = np.abs(got.astype(np.float32) - wanted.astype(np.float32))
        assert apart.max() <= 2 * step * max(1.0, float(np.abs(wanted.astype(np.float32)).max()))


@pytest.mark.parametrize("dtype", list(HALVES))
def test_updates_of_half_weights_are_followed(dtype: str) -> None:
    graph, x = network(dtype)
    model = sg.compile_model(graph, "CPU")
    model([x])
    model.parameters["v"].assign(np.zeros((24, 10), HALVES[dtype]))
    model.parameters["b"].assign(np.zeros(10, HALVES[dtype]))
    np.testing.assert_allclose(model([x])[0].astype(np.float32), 0.1, rtol=1e-2)


def test_weights_in_bfloat16_may_stay_so() -> None:
    graph, x = network("bfloat16")
    plain = sg.compile_model(graph, "CPU", {"WINOGRAD": False})
    held = sg.compile_model(graph, "CPU", {"WINOGRAD": False, "WEIGHTS_PRECISION": "bfloat16"})
    # Nothing is lost: they were bfloat16 before.
    np.testing.assert_array_equal(plain([x])[0], held([x])[0])
