"""Reductions and running sums against NumPy: shapes, axes, dtypes, NaN, any cut into units."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.ops.reduce.cpu import emit_reduction
from tests.support.kernels import run_node

CUTS = st.lists(st.floats(0, 1), max_size=3)
SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 7, 8, 9, 16, 17, 31, 40, 70]), min_size=1, max_size=3)


def _draw(shape: list[int], dtype: str, special: bool) -> Array:
    rng = np.random.default_rng(len(shape))
    if dtype == "int64":
        return rng.integers(-3, 4, shape).astype(dtype)
    x = rng.standard_normal(shape).astype(dtype)
    if special:
        x.reshape(-1)[:: max(5, x.size // 3)] = np.nan
        x.reshape(-1)[1 :: max(7, x.size // 4)] = -np.inf
    return x


@settings(max_examples=120, deadline=None)
@given(
    sizes=SIZES,
    kept=st.integers(0, 7),
    op=st.sampled_from(["Sum", "Max", "Mean"]),
    dtype=st.sampled_from(["float32", "int64"]),
    special=st.booleans(),
    cuts=CUTS,
)
@example([40, 70, 70], 1, "Sum", "float32", False, []).via("sums that nearly cancel")
def test_reductions(
    sizes: list[int], kept: int, op: str, dtype: str, special: bool, cuts: list[float]
) -> None:
    op = "Max" if op == "Mean" and dtype == "int64" else op
    x = _draw(sizes, dtype, special and op == "Max")
    axes = tuple(d for d in range(x.ndim) if not kept >> d & 1) or tuple(range(x.ndim))
    function = {"Sum": np.sum, "Max": np.max, "Mean": np.mean}[op]
    wide = x.astype(np.float64) if dtype == "float32" else x
    wanted = function(wide, axis=axes, keepdims=True)
    order = np.array(axes, np.int64)
    (got,) = run_node(f"Reduce{op}", [x, order], [wanted.shape], constant=[1], cuts=cuts)
    (whole,) = run_node(f"Reduce{op}", [x, order], [wanted.shape], constant=[1])
    np.testing.assert_array_equal(got, whole)
    if op == "Max" or dtype == "int64":
        np.testing.assert_array_equal(got, wanted)
        return
    # How far sums stray follows from what is summed, not from what is left of it.
    assert (
        np.abs(got - wanted) <= 2.0**-22 * function(np.abs(wide), axis=axes, keepdims=True)
    ).all()


@settings(max_examples=60, deadline=None)
@given(
    sizes=SIZES,
    axis=st.integers(0, 2),
    dtype=st.sampled_from(["float32", "int64"]),
    flags=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    cuts=CUTS,
)
def test_running_sums(
    sizes: list[int], axis: int, dtype: str, flags: tuple[int, int], cuts: list[float]
) -> None:
    x = _draw(sizes, dtype, False)
    axis = min(axis, x.ndim - 1)
    reversed_x = np.flip(x, axis) if flags[0] else x
    wanted = np.cumsum(reversed_x, axis, dtype=x.dtype if dtype != "float32" else np.float64)
    wanted = wanted - reversed_x if flags[1] else wanted
    wanted = np.flip(wanted, axis) if flags[0] else wanted
    attrs = {"reverse": flags[0], "exclusive": flags[1]}
    (got,) = run_node("CumSum", [x, np.array(axis)], [x.shape], attrs, constant=[1], cuts=cuts)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("op", ["Max", "Min"])
@pytest.mark.parametrize("size", [3, 8, 30, 33, 150])
def test_nan_is_passed_on_from_every_place(op: str, size: int) -> None:
    x = np.zeros((size, size), np.float32)
    np.fill_diagonal(x, np.nan)
    axes = np.array([1], np.int64)
    (got,) = run_node(f"Reduce{op}", [x, axes], [(size, 1)], constant=[1])
    assert np.isnan(got).all()


@pytest.mark.parametrize("op", ["Max", "Min", "Mean"])
@pytest.mark.parametrize("pixels", [1, 3, 50])
def test_minmax_of_images_in_blocks_of_channels(op: str, pixels: int) -> None:
    rng = np.random.default_rng(pixels)
    x = rng.standard_normal((2, 21, pixels)).astype(np.float32)
    if op != "Mean":
        x[0, 3, pixels // 2], x[1, 4], x[1, 5] = np.nan, -np.inf, np.inf
    function = {"Max": np.max, "Min": np.min, "Mean": np.mean}[op]
    wanted = function(x, axis=2, keepdims=True)
    axes = np.array([2], np.int64)
    (got,) = run_node(f"Reduce{op}", [x, axes], [wanted.shape], constant=[1], blocked=[0])
    np.testing.assert_allclose(got, wanted, rtol=0 if op != "Mean" else 1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("shape", "axes"), [((1 << 18, 20), (0,)), ((1 << 18, 90), (0,)), ((1 << 17, 2, 4), (0, 2))]
)
def test_long_sums_lose_few_digits(shape: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """One sum over positive numbers of unequal sizes loses its smallest ones."""
    x = (np.abs(np.random.default_rng(0).standard_normal(shape)) ** 3).astype(np.float32)
    value = sg.input("x", shape)
    graph = sg.Graph([value], [ops.ReduceMean(value, np.array(axes), keepdims=0)])
    found = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": 1})(x)[0]
    np.testing.assert_allclose(found, x.astype(np.float64).mean(axes), rtol=1e-5)


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_lowering_that_reduces_half_precision_itself_is_refused(device: str, dtype: str) -> None:
    """The kernels would read two elements as one; the reference runs the node instead."""

    def sum_of_rows(node: sg.Node, low: Any) -> None:
        emit_reduction(low, "sum", low.input(0), low.output(), [1])

    core = sg.Core()
    if device not in core.available_devices:
        pytest.skip("no OpenCL device")
    core.add_extension(
        sg.Operator(
            schema=sg.Schema("SumOfRows", "com.example", inputs=("x",), outputs=("y",)),
            compute=lambda node, inputs: [inputs[0].sum(axis=1)],
            infer=lambda node, types, values: [sg.TensorType(dtype, (3,))],
            kernels={device: sum_of_rows},
        )
    )
    x = sg.input("x", (3, 8), dtype)
    graph = sg.Graph([x], [ops.SumOfRows(x)])
    found = core.query_model(graph, device)
    assert found.reasons == {"SumOfRows_0": f"a reduction of {dtype} that was not widened"}
