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
@pytest.mark.parametrize("times", [1, 5])
def test_between_convolutions(dtype: str, channels: int, times: int) -> None:
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
    for _ in range(times):
        first = swish(first, dtype, scale, zero, quantised=True)
    second = convolved(first, channels, 2)
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


class Chain:
    """A function of one byte with a conversion to bytes and back after each operator."""

    def __init__(self, seed: int, dtype: str) -> None:
        self.rng = np.random.default_rng(seed)
        self.dtype = dtype

    def pair(self) -> tuple[Array, Array]:
        """Return a scale and a zero point."""
        info = np.iinfo(self.dtype)
        zero = self.rng.integers(info.min, info.max + 1)
        return np.array(self.rng.uniform(0.02, 0.06), np.float32), np.array(zero, self.dtype)

    def number(self) -> Array:
        return np.array(self.rng.uniform(0.5, 2), np.float32)

    def rounded(self, x: sg.Value) -> sg.Value:
        pair = self.pair()
        return ops.DequantizeLinear(ops.QuantizeLinear(x, *pair), *pair)

    def longer(self, x: sg.Value) -> sg.Value:
        match int(self.rng.integers(5)):
            case 0:
                made = ops.Add(x, self.number())
            case 1:
                made = ops.Mul(self.number(), x)
            case 2:
                made = ops.Div(x, self.number())
            case 3:
                made = ops.Clip(x, np.array(-1, np.float32), np.array(2, np.float32))
            case _:  # HardSwish, as exporters spell it out
                gate = ops.Clip(ops.Add(x, self.number()), np.array(0, np.float32), self.number())
                made = ops.Mul(x, self.rounded(gate))
        return self.rounded(made)


@BOTH
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("shape", [(3, 700), (2, 3, 5), (0, 4), ("N", 31)])
def test_long_chains(seed: int, dtype: str, shape: tuple[int | str, ...]) -> None:
    chain = Chain(seed, dtype)
    x = sg.input("x", shape, dtype)
    made = ops.DequantizeLinear(x, *chain.pair())
    values = [made := chain.longer(made) for _ in range(4 + seed)]
    outputs = [ops.QuantizeLinear(made, *chain.pair()) if seed % 2 else made]
    if seed > 4:  # a value inside that is a result, too, and a loop that reads it
        outputs += [values[2], ops.Add(values[2], ops.Neg(values[1]))]
    graph = sg.Graph([x], outputs, "net")
    info = np.iinfo(dtype)
    sizes = [40 if isinstance(size, str) else size for size in shape]
    given = chain.rng.integers(info.min, info.max + 1, sizes).astype(dtype)
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    got = request.infer([given])
    wanted = sg.compile_model(graph, "REFERENCE")([given])
    for one, other in zip(got.values(), wanted.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    if given.size > 1024:
        found = [entry for entry in request.profile() if "byte_table" in entry.kernel]
        # Parts between several results are short: tables of them depend on the size of vectors.
        assert seed > 4 or len(found) == 1
        assert all(entry.op_type == "FusedElementwise" for entry in request.profile())


def test_a_long_function_of_bytes_before_another_operand_has_a_table_of_its_own() -> None:
    chain = Chain(5, "uint8")
    x, y = sg.input("x", (64, 64), "uint8"), sg.input("y", (64, 64), "uint8")
    made = ops.DequantizeLinear(x, *chain.pair())
    for _ in range(4):
        made = chain.longer(made)
    summed = ops.Add(made, ops.DequantizeLinear(y, *chain.pair()))
    graph = sg.Graph([x, y], [ops.QuantizeLinear(summed, *chain.pair())], "net")
    given = [chain.rng.integers(0, 256, (64, 64)).astype(np.uint8) for _ in "xy"]
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    assert "byte_table" in kernels_of(model, *given)
    wanted = sg.compile_model(graph, "REFERENCE")(given)[0]
    np.testing.assert_array_equal(model(given)[0], wanted)
