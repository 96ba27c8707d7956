"""DynamicQuantizeLinear of every size and number of threads: what ONNX Runtime gives."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import subgraph as sg
from subgraph import ops
from tests.support.peer import session_of


def graph_of(shape: tuple[int, ...]) -> sg.Graph:
    x = sg.input("x", shape)
    return sg.Graph([x], list(ops.DynamicQuantizeLinear(x)))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("shape", [(1,), (15,), (67,), (3, 40, 7), (16384,), (70003,), (2, 150000)])
@pytest.mark.parametrize("ends", [(-3.0, 5.0), (1.0, 2.0), (-2.0, -1.0)])
def test_like_onnx_runtime(threads: int, shape: tuple[int, ...], ends: tuple[float, float]) -> None:
    graph = graph_of(shape)
    rng = np.random.default_rng(len(shape) + threads)
    x = rng.uniform(*ends, shape).astype(np.float32)
    model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
    session = session_of(graph)
    wanted = session.run(None, {"x": x})
    found = model([x])
    for k, value in enumerate(wanted):
        np.testing.assert_array_equal(found[k], value)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("index", [0, 5, 40000, 69999, 70002])
def test_minmax_at_any_index_and_nan(threads: int, index: int) -> None:
    graph = graph_of((70003,))
    model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
    x = np.zeros(70003, np.float32)
    for value in (51.0, -51.0):
        x[index] = value
        found = model([x])
        quantized, scale, zero = found[0], found[1], found[2]
        assert scale == np.float32(51) / np.float32(255)
        assert zero == (255 if value < 0 else 0)
        assert quantized[index] == (0 if value < 0 else 255)
    x[index] = np.nan
    assert np.isnan(model([x])[1])


def test_nothing_but_zeros_is_what_the_reference_of_onnx_gives() -> None:
    graph, x = graph_of((70,)), np.zeros(70, np.float32)
    wanted: Any = ReferenceEvaluator(sg.to_onnx(graph)).run(None, {"x": x})
    found = sg.compile_model(graph, "CPU")([x])
    for k in range(3):
        np.testing.assert_array_equal(found[k], wanted[k])
