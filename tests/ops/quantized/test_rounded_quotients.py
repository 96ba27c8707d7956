"""QuantizeLinear by one scale, next to ties, against NumPy's division."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

FEW = settings(max_examples=30, deadline=None)
_SIZE = 4096
_MODELS: dict[tuple[str, int | None], sg.CompiledModel] = {}


def model_of(dtype: str, zero: int | None) -> sg.CompiledModel:
    """Return a model whose scale is an input, so that one serves all examples."""
    if (dtype, zero) not in _MODELS:
        x, scale = sg.input("x", (_SIZE,), "float32"), sg.input("s", (), "float32")
        points = () if zero is None else (sg.parameter("z", np.array(zero, dtype)),)
        graph = sg.Graph([x, scale], [ops.QuantizeLinear(x, scale, *points)])
        _MODELS[dtype, zero] = sg.compile_model(graph, "CPU")
    return _MODELS[dtype, zero]


def wanted(x: Array, scale: np.float32, dtype: str, zero: int | None) -> tuple[Array, Array]:
    """Return the bytes, and where the quotient is a number."""
    info = np.iinfo(dtype)
    with np.errstate(all="ignore"):
        real = np.rint(x / scale) + np.float32(zero or 0)
    known = ~np.isnan(real)
    return np.clip(np.where(known, real, 0), info.min, info.max).astype(dtype), known


@pytest.mark.parametrize(("dtype", "zero"), [("uint8", None), ("uint8", 131), ("int8", -7)])
@FEW
@given(
    mantissa=st.integers(1 << 23, (1 << 24) - 1),
    exponent=st.sampled_from([*range(-30, 5), -149, -140, -126, -120, -119, -100, 60, 72, 73, 103]),
    negative=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_numbers_next_to_ties(
    dtype: str, zero: int | None, mantissa: int, exponent: int, negative: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    with np.errstate(all="ignore"):
        scale = np.float32(-mantissa if negative else mantissa) * np.float32(2.0**exponent)
        ties = rng.integers(-600, 600, _SIZE) / 2
        x = (ties * np.float64(scale)).astype(np.float32)
    bits = x.view(np.int32)
    bits += rng.integers(-3, 4, _SIZE).astype(np.int32)
    x[:8] = [0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3e38, -3e38]
    got = next(iter(model_of(dtype, zero)([x, np.asarray(scale)]).values()))
    bytes_, known = wanted(x, scale, dtype, zero)
    np.testing.assert_array_equal(got[known], bytes_[known])


@pytest.mark.parametrize("scale", [0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38])
def test_scales_that_are_no_scales(scale: float) -> None:
    x = np.random.default_rng(0).standard_normal(_SIZE).astype(np.float32)
    got = next(iter(model_of("uint8", 131)([x, np.asarray(scale, np.float32)]).values()))
    bytes_, known = wanted(x, np.float32(scale), "uint8", 131)
    np.testing.assert_array_equal(got[known], bytes_[known])


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("precision", ["FLOAT16", "BFLOAT16", "FLOAT"])
def test_the_precision_of_a_division_is_that_of_its_attribute(precision: str, device: str) -> None:
    if device not in sg.default_core().available_devices:
        pytest.skip("there is no OpenCL device")
    values = np.random.default_rng(4).normal(0, 3, 4096).astype(np.float32)
    x, scale = sg.input("x", values.shape, "float32"), sg.parameter("s", np.float32(0.013))
    kind = int(onnx.TensorProto.DataType.Value(precision))
    made = ops.QuantizeLinear(x, scale, sg.parameter("z", np.uint8(7)), precision=kind)
    graph = sg.Graph([x], [made])
    assert set(sg.default_core().query_model(graph, device)) == {made.producer.name}
    expected = sg.compile_model(graph, "REFERENCE")(values)[0]
    np.testing.assert_array_equal(sg.compile_model(graph, device)(values)[0], expected)
