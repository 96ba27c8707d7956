"""Half precision on every device: Softmax and LogSoftmax rounded after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.types import numpy_dtype


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
@given(seed=st.integers(0, 1000), axis=st.sampled_from([0, 1, -1]))
@settings(max_examples=10, deadline=None)
def test_half_precision_is_that_of_the_reference(
    device: str, dtype: str, op_type: str, seed: int, axis: int
) -> None:
    if device not in sg.default_core().available_devices:
        pytest.skip(f"device {device} cannot start here")
    x = sg.input("x", ("N", "C", "L"), dtype)
    graph = sg.Graph([x], [getattr(ops, op_type)(x, axis=axis)])
    generator = np.random.default_rng(seed)
    shape = generator.integers(1, 40, 3)
    array = (generator.standard_normal(shape) * 3).astype(numpy_dtype(dtype))
    got = sg.compile_model(graph, device)([array])[0].astype(np.float32)
    expected = sg.compile_model(graph, "REFERENCE")([array])[0].astype(np.float32)
    # The order of a sum may move its one rounding by a step, the quotient's rounding adds another.
    step = 2**-10 if dtype == "float16" else 2**-7
    # A logarithm of that sum, one step of it apart, is off by as much whatever it is near.
    near = step if op_type == "LogSoftmax" else 1e-6
    np.testing.assert_allclose(got, expected, rtol=2.01 * step, atol=near)
    assert np.mean(got == expected) > 0.9
