"""Results of products that other products read: stored as registers of matrix tiles."""

from __future__ import annotations

from collections import Counter
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

pytestmark = pytest.mark.usefixtures("tiles")
RNG = np.random.default_rng(0)
CONFIG = {"INFERENCE_PRECISION": "bfloat16", "ENABLE_PROFILING": True}


def rounded(array: Array) -> Array:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def weight(*shape: int) -> Array:
    return (RNG.standard_normal(shape) * 0.2).astype(np.float32)


def run(outputs: Any, x: sg.Value, array: Array, threads: int = 1) -> tuple[list[Array], Any]:
    """Return the results on CPU, and how often each kernel ran."""
    config = {**CONFIG, "INFERENCE_NUM_THREADS": threads}
    request = sg.compile_model(sg.Graph([x], outputs), "CPU", config).create_infer_request()
    results = request.infer([array])
    kernels = Counter(e.kernel.split("(")[0].rsplit(".", 1)[-1] for e in request.profile())
    return [results[k] for k in range(len(outputs))], kernels


def check(result: Array, expected: Array) -> None:
    """Compare results; a sum that is rounded to the other side changes an element by 2**-8."""
    np.testing.assert_allclose(result, expected, rtol=0, atol=0.01 * np.abs(expected).max())


@settings(max_examples=60, deadline=None)
@given(
    stack=st.lists(st.integers(1, 3), max_size=2),
    rows=st.integers(1, 70),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 5), st.integers(1, 70)),
    activation=st.sampled_from(["", "Relu", "Gelu"]),
    symbolic=st.booleans(),
    threads=st.integers(1, 2),
)
def test_a_product_of_a_product(
    stack: list[int],
    rows: int,
    sizes: tuple[int, int, int],
    activation: str,
    symbolic: bool,
    threads: int,
) -> None:
    depth, inner, columns = sizes[0], 32 * sizes[1], sizes[2]
    first, bias, second = weight(depth, inner), weight(inner), weight(inner, columns)
    shape = [*stack, rows, depth]
    x = sg.input("x", shape=("N", *shape[1:]) if symbolic else shape, dtype="float32")
    hidden = ops.Add(ops.MatMul(x, first), bias)
    if activation:
        hidden = getattr(ops, activation)(hidden)
    array = RNG.standard_normal(shape).astype(np.float32)
    (result,), kernels = run([ops.MatMul(hidden, second)], x, array, threads)
    assert kernels["round_rows"] == 1, kernels
    h = sg.input("h", shape=(*stack, rows, inner), dtype="float32")
    exact = rounded(array) @ rounded(first) + bias
    if activation:
        y = getattr(ops, activation)(h)
        exact = sg.compile_model(sg.Graph([h], [y]), "REFERENCE")([exact])[0]
    check(result, rounded(exact) @ rounded(second))


def test_two_products_read_the_same_registers() -> None:
    x = sg.input("x", shape=(20, 40), dtype="float32")
    first, one, two = weight(40, 64), weight(64, 48), weight(64, 16)
    hidden = ops.MatMul(x, first)
    array = weight(20, 40)
    results, kernels = run([ops.MatMul(hidden, one), ops.MatMul(hidden, two)], x, array)
    assert kernels["round_rows"] == 1, kernels
    exact = rounded(rounded(array) @ rounded(first))
    check(results[0], exact @ rounded(one))
    check(results[1], exact @ rounded(two))


@pytest.mark.parametrize("reader", ["output", "add", "right operand", "addend", "other size"])
def test_other_readers_get_float32(reader: str) -> None:
    inner = 40 if reader == "other size" else 64
    x = sg.input("x", shape=(20, 40), dtype="float32")
    first, second = weight(40, inner), weight(inner, 64)
    hidden = ops.MatMul(x, first)
    product = ops.MatMul(hidden, second)
    array = weight(20, 40)
    exact = rounded(array) @ rounded(first)
    outputs, wanted = [product], [rounded(exact) @ rounded(second)]
    if reader == "output":
        outputs, wanted = [*outputs, hidden], [*wanted, exact]
    elif reader == "add":
        outputs, wanted = [ops.Sqrt(ops.Abs(hidden)), product], [np.sqrt(np.abs(exact)), *wanted]
    elif reader == "right operand":
        left = weight(8, 20)
        outputs, wanted = [*outputs, ops.MatMul(left, hidden)], [*wanted, left @ exact]
    elif reader == "addend":
        outputs = [ops.Gemm(hidden, second, hidden)]
        wanted = [wanted[0] + exact]
    results, kernels = run(outputs, x, array)
    assert kernels["round_rows"] >= 2, kernels
    for result, expected in zip(results, wanted, strict=True):
        check(result, expected)


def test_a_reader_that_refuses_registers_gets_rows() -> None:
    """A stack of products with a stack of weights reads matrices, which do not begin a register."""
    x = sg.input("x", shape=(3, 7, 40), dtype="float32")
    first, second = weight(40, 64), weight(3, 64, 24)
    array = weight(3, 7, 40)
    (result,), kernels = run([ops.MatMul(ops.MatMul(x, first), second)], x, array)
    assert kernels["from_registers"] == 1, kernels
    check(result, rounded(rounded(array) @ rounded(first)) @ rounded(second))
