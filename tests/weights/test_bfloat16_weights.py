"""Weights held in bfloat16: products equal those of rounded weights in float32."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.kernels import run_node

BFLOAT16 = {"WEIGHTS_PRECISION": "bfloat16"}
QUICK = settings(max_examples=40, deadline=None)


def rounded(array: Array) -> Array:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


@QUICK
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 300)),
    turned=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_products(sizes: tuple[int, int, int], turned: bool, threads: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = sizes
    a = rng.standard_normal((m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if turned else (k, n)).astype(np.float32)
    c = rng.standard_normal(n).astype(np.float32)
    given_b = b.T if turned else b
    (got,) = run_node(
        "Gemm",
        [a, b, c],
        [(m, n)],
        {"transB": int(turned)},
        constant=[1, 2],
        threads=threads,
        cuts=[0.3],
        options=BFLOAT16,
    )
    wanted = a.astype(np.float64) @ rounded(given_b).astype(np.float64) + c
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("inputs", "outputs", "kernel", "groups"), [
    (16, 24, 1, 1), (3, 20, 3, 1), (24, 40, 3, 1), (40, 17, 5, 1), (32, 64, 3, 2),
])  # fmt: skip
def test_convolutions(inputs: int, outputs: int, kernel: int, groups: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, inputs, 9, 10)).astype(np.float32)
    w = rng.standard_normal((outputs, inputs // groups, kernel, kernel)).astype(np.float32)
    attributes = {"pads": [kernel // 2] * 4, "group": groups}
    results = [
        run_node(
            "Conv", [x, held], [(1, outputs, 9, 10)], attributes, constant=[1], options=options
        )[0]
        for held, options in (
            (w, BFLOAT16 | {"WINOGRAD": False}),
            (rounded(w), {"WINOGRAD": False}),
        )
    ]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-4)


def test_special_values_and_rounding() -> None:
    # One row of ones: the result is each weight as it is held.
    b = np.array([[1.00390625, 1.01171875, -np.inf, np.nan, 3.4e38, 1e-40, -0.0, 1e30]])
    b = b.astype(np.float32)
    ones = np.ones((1, 1), np.float32)
    (got,) = run_node("MatMul", [ones, b], [(1, 8)], constant=[1], options=BFLOAT16)
    np.testing.assert_array_equal(got, rounded(b))


def test_updates_are_followed_and_half_the_memory_is_held() -> None:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal((256, 512)).astype(np.float32)
    x = sg.input("x", shape=(1, 256), dtype="float32")
    graph = sg.Graph([x], [ops.MatMul(x, sg.parameter("w", weights))])
    model = sg.compile_model(graph, "CPU", BFLOAT16)
    given_x = rng.standard_normal((1, 256)).astype(np.float32)
    np.testing.assert_allclose(model([given_x])[0], given_x @ rounded(weights), atol=1e-4)
    model.parameters["w"].assign(2 * weights)
    np.testing.assert_allclose(model([given_x])[0], 2 * given_x @ rounded(weights), atol=2e-4)


def test_the_option_is_declared() -> None:
    assert sg.Core().get_property("CPU", "WEIGHTS_PRECISION") == ""
    with pytest.raises(sg.ConfigError):
        sg.compile_model(
            sg.Graph([(x := sg.input("x", shape=(1,), dtype="float32"))], [ops.Relu(x)]),
            "CPU",
            {"WEIGHTS_PRECISION": "float8"},
        )
