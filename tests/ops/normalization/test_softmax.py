"""Half precision on every device: Softmax and LogSoftmax rounded after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import numpy_dtype


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
    # LogSoftmax: an error of one step in the sum is an absolute error of as much, also near 0.
    near = step if op_type == "LogSoftmax" else 1e-6
    np.testing.assert_allclose(got, expected, rtol=2.01 * step, atol=near)
    assert np.mean(got == expected) > 0.9


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax"])
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 280)),
    dtype=st.sampled_from(["float32", "float64"]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=40, deadline=None)
def test_rows_of_every_length(op_type: str, shape: tuple[int, int], dtype: str, seed: int) -> None:
    x = (5 * np.random.default_rng(seed).standard_normal(shape)).astype(dtype)
    wide = x.astype(np.float64) - x.max(1, keepdims=True)
    wanted = np.exp(wide) / np.exp(wide).sum(1, keepdims=True)
    if op_type == "LogSoftmax":
        wanted = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    rows = sg.input("x", ("N", "C"), dtype)
    graph = sg.Graph([rows], [getattr(ops, op_type)(rows, axis=-1)])
    one, three = (
        sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})([x])[0]
        for threads in (1, 3)
    )
    # A logarithm near 0 is a difference of numbers as large as the greatest element.
    near = 1e-6 if op_type == "Softmax" else 1e-6 * np.abs(x).max()
    np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=near)
    np.testing.assert_array_equal(one, three)


def test_rows_in_place_and_rows_of_infinities() -> None:
    rng = np.random.default_rng(3)
    x = sg.input("x", ("N", "C"), "float32")
    y = ops.Softmax(ops.Mul(ops.Softmax(ops.Add(x, x), axis=-1), x), axis=-1)
    compiled = sg.compile_model(sg.Graph([x], [y]), "CPU")
    for rows, size in ((33, 49), (17, 16), (40, 5), (16, 200)):
        array = rng.standard_normal((rows, size)).astype(np.float32)
        array[3, 0] = -np.inf
        once = np.exp(2 * array - 2 * array.max(1, keepdims=True))
        with np.errstate(invalid="ignore"):
            again = once / once.sum(1, keepdims=True) * array
        again = np.exp(again - again.max(1, keepdims=True))
        wanted = again / again.sum(1, keepdims=True)
        np.testing.assert_allclose(compiled([array])[0], wanted, rtol=1e-5)
