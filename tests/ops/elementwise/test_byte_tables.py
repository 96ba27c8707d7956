"""Costly functions of one byte go by a table: against NumPy, ONNX Runtime, the program itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

BOTH = pytest.mark.parametrize("dtype", ["uint8", "int8"])


def swish(x: sg.Value, dtype: str, scale: Any, zero: Any, *, quantised: bool) -> sg.Value:
    """Return x * sigmoid(x) of a quantised value, each step of it rounded as files write it."""
    given = ops.DequantizeLinear(x, scale, zero)
    gate = (np.array(1 / 128, np.float32), np.array(3, dtype))
    shut = ops.DequantizeLinear(ops.QuantizeLinear(ops.Sigmoid(given), *gate), *gate)
    made = ops.QuantizeLinear(ops.Mul(given, shut), scale, zero)
    return made if quantised else ops.DequantizeLinear(made, scale, zero)


def kernels_of(model: sg.CompiledModel, *inputs: Array) -> str:
    request = model.create_infer_request()
    request.infer(list(inputs))
    return " ".join(entry.kernel for entry in request.profile())


@BOTH
@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("constant", [True, False])
def test_a_table_gives_what_the_program_gives(dtype: str, quantised: bool, constant: bool) -> None:
    x = sg.input("x", ("N",), dtype)
    scale, zero = np.array(0.05, np.float32), np.array(7, dtype)
    scales = [sg.parameter("scale", scale), sg.parameter("zero", zero)]
    inputs = [x]
    if not constant:  # scales that other nodes have computed
        scales = [sg.input("scale", (), "float32"), sg.input("zero", (), dtype)]
        inputs += scales
    graph = sg.Graph(inputs, [swish(x, dtype, *scales, quantised=quantised)], "net")
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True, "INFERENCE_NUM_THREADS": 2})
    more = [] if constant else [scale, zero]
    rng = np.random.default_rng(3)
    info = np.iinfo(dtype)
    for count in (1024, 40_003):
        given = rng.integers(info.min, info.max + 1, count).astype(dtype)
        assert "byte_table" in kernels_of(model, given, *more)
        pieces = [given[at : at + 1000] for at in range(0, count, 1000)]
        apart = np.concatenate([model([piece, *more])[0] for piece in pieces])
        got = model([given, *more])[0]
        np.testing.assert_array_equal(got, apart)
        real = (given.astype(np.float64) - 7) * scale
        gate = np.clip(np.rint(128 / (1 + np.exp(-real))) + 3, info.min, info.max) - 3
        wanted = np.clip(np.rint(real * gate / 128 / scale) + 7, info.min, info.max)
        steps = got.astype(np.float64) if quantised else np.rint(got / scale) + 7
        assert np.abs(steps - wanted).max() <= 1
    assert "byte_table" not in kernels_of(model, given[:1000], *more)


@BOTH
@pytest.mark.parametrize("channels", [12, 16])
def test_between_convolutions(dtype: str, channels: int) -> None:
    """In blocks of channels, with padding behind the last that has to stay zero."""
    rng = np.random.default_rng(channels)
    x = sg.input("x", (2, 3, 20, 20), "float32")
    scale, zero = np.array(0.02, np.float32), np.array(np.iinfo(dtype).min + 128, dtype)

    def convolved(given: sg.Value, inputs: int, seed: int) -> sg.Value:
        w = np.random.default_rng(seed).integers(-90, 90, (channels, inputs, 3, 3)).astype(np.int8)
        held = sg.parameter(f"w{seed}", w)
        w_scale = np.array(0.004, np.float32)
        taken = ops.DequantizeLinear(held, w_scale, np.array(0, np.int8))
        real = ops.Conv(ops.DequantizeLinear(given, scale, zero), taken, pads=[1, 1, 1, 1])
        return ops.QuantizeLinear(real, scale, zero)

    first = convolved(ops.QuantizeLinear(x, scale, zero), 3, 1)
    second = convolved(swish(first, dtype, scale, zero, quantised=True), channels, 2)
    graph = sg.Graph([x], [ops.DequantizeLinear(second, scale, zero)], "net")
    given = rng.standard_normal((2, 3, 20, 20)).astype(np.float32)
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    assert "byte_table" in kernels_of(model, given)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(sg.to_onnx(graph).SerializeToString(), options)
    (wanted,) = session.run(None, {"x": given})
    got = model(given)[0]
    apart = np.rint(np.abs(got - wanted) / scale)
    assert apart.max() <= 2
    assert (apart > 0).mean() < 0.05  # where a sum lies between two steps


def test_cheap_functions_and_other_operands_keep_their_program() -> None:
    x, y = sg.input("x", (4096,), "uint8"), sg.input("y", (4096,), "uint8")
    scale, zero = np.array(0.05, np.float32), np.array(7, np.uint8)
    a, b = (ops.DequantizeLinear(v, scale, zero) for v in (x, y))
    graph = sg.Graph([x, y], [a, ops.Sigmoid(ops.Mul(ops.Sigmoid(a), ops.Sigmoid(b)))], "net")
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    given = [np.arange(4096).astype(np.uint8)] * 2
    assert "byte_table" not in kernels_of(model, *given)
    real = (given[0].astype(np.float32) - 7) * scale
    np.testing.assert_allclose(model(given)[0], real, rtol=1e-6)
