"""Derivatives: what ExpandGradient builds, against differences of the graph's own results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.graph import Value
from subgraph.graph.types import Array
from subgraph.operators.builder import operator

pytestmark = pytest.mark.filterwarnings("ignore")
_gradient = operator("Gradient", "ai.onnx.preview.training")


def _run(graph: sg.Graph, inputs: dict[str, Array]) -> list[Array]:
    results = sg.compile_model(graph, "REFERENCE")(inputs)
    return [results[k] for k in range(len(graph.outputs))]


def _check(build: Callable[..., Value], *arrays: Array, tolerance: float = 1e-5) -> None:
    """Compare the derivatives of sum(build(...)) with central differences."""
    inputs = [sg.input(f"x{k}", a.shape, a.dtype) for k, a in enumerate(arrays)]
    y = build(*inputs)
    y.name = "y"
    names = [v.name for v in inputs]
    grads = _gradient(*inputs, xs=names, y="y", outputs=len(inputs))
    grads = (grads,) if isinstance(grads, Value) else grads
    graph = sg.passes.apply_pass(sg.Graph(inputs, [y, *grads]), "ExpandGradient")
    assert not any(node.op_type == "Gradient" for node in graph.nodes)
    feeds = dict(zip(names, arrays, strict=True))
    found = _run(graph, feeds)[1:]
    for name, array, grad in zip(names, arrays, found, strict=True):
        assert grad.shape == array.shape
        assert grad.dtype == array.dtype
        expected = np.zeros_like(array)
        step = 1e-5
        for place in np.ndindex(array.shape):
            sides: list[float] = []
            for sign in (1, -1):
                moved = array.copy()
                moved[place] += sign * step
                sides.append(float(_run(graph, feeds | {name: moved})[0].sum()))
            expected[place] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(grad, expected, rtol=tolerance, atol=tolerance)


def _random(*shape: int, seed: int = 0) -> Array:
    generator = np.random.default_rng(seed)
    signs = np.where(generator.random(shape) < 0.5, -1, 1)
    return np.array(generator.uniform(0.3, 2.0, shape) * signs)


_UNARY: dict[str, Callable[[Value], Value]] = {
    name: operator(name)
    for name in ("Neg", "Exp", "Sin", "Cos", "Tanh", "Sigmoid", "Softplus", "Relu", "Abs", "Erf")
}
_SHAPED: dict[str, Callable[[Value], Value]] = {
    "reciprocal": lambda x: ops.Reciprocal(x),
    "leaky relu": lambda x: ops.LeakyRelu(x, alpha=0.3),
    "log": lambda x: ops.Log(ops.Mul(x, x)),
    "sqrt": lambda x: ops.Sqrt(ops.Mul(x, x)),
    "pow": lambda x: ops.Pow(ops.Abs(x), np.array(2.5)),
    "reshape": lambda x: ops.Mul(ops.Reshape(x, [6]), np.arange(6.0)),
    "flatten": lambda x: ops.Mul(ops.Flatten(x, axis=0), np.arange(6.0)),
    "transpose": lambda x: ops.Mul(ops.Transpose(x), np.arange(2.0)),
    "sum": lambda x: ops.Exp(ops.ReduceSum(x, [1], keepdims=0)),
    "sum along no axis": lambda x: ops.Exp(ops.ReduceSum(x, noop_with_empty_axes=1, keepdims=0)),
    "sum along empty axes": lambda x: ops.Exp(ops.ReduceSum(x, np.zeros(0, np.int64), keepdims=0)),
    "mean along empty axes": lambda x: ops.Exp(
        ops.ReduceMean(x, np.zeros(0, np.int64), keepdims=0, noop_with_empty_axes=1)
    ),
    "mean": lambda x: ops.Exp(ops.ReduceMean(x)),
    "mean of all": lambda x: ops.Exp(ops.ReduceMean(x, keepdims=0)),
    "softmax": lambda x: ops.Mul(ops.Softmax(x), np.arange(3.0)),
    "log softmax": lambda x: ops.Mul(ops.LogSoftmax(x, axis=0), np.arange(3.0)),
    "concat": lambda x: ops.Mul(ops.Concat(x, ops.Exp(x), axis=1), np.arange(6.0)),
    "split": lambda x: ops.Exp(ops.Split(x, [1, 2], axis=1, outputs=2)[1]),
    "where": lambda x: ops.Where(ops.Greater(x, np.array(0.0)), ops.Exp(x), ops.Sin(x)),
    "gather": lambda x: ops.Exp(ops.Gather(x, np.array([1, 1, 0]))),
    "expand": lambda x: ops.Exp(ops.Expand(x, [4, 2, 3])),
    "unsqueeze": lambda x: ops.Exp(ops.Unsqueeze(x, [0])),
    "max": lambda x: ops.Max(x, ops.Sin(x), np.array(0.1)),
    "cast": lambda x: ops.Cast(ops.Exp(ops.Cast(x, to=11)), to=11),
    "cast to integers": lambda x: ops.Add(ops.Cast(ops.Cast(x, to=7), to=11), ops.Exp(x)),
    "dropout in training": lambda x: ops.Mul(
        ops.Dropout(ops.Sin(x), 0.25, np.array(True), seed=3, outputs=2)[0], np.arange(3.0)
    ),
    "identity": lambda x: ops.Mean(ops.Identity(x), ops.Dropout(ops.Sin(x), outputs=1)),
}


@pytest.mark.parametrize("name", [*_UNARY, *_SHAPED])
def test_derivatives_of_one_variable(name: str) -> None:
    _check({**_UNARY, **_SHAPED}[name], _random(2, 3))


@pytest.mark.parametrize("name", ["Add", "Sub", "Mul", "Div"])
@given(data=st.data())
@settings(max_examples=5, deadline=None)
def test_derivatives_follow_broadcasting(name: str, data: st.DataObject) -> None:
    shapes = st.sampled_from([(), (3,), (1, 3), (2, 1), (2, 3), (1, 1)])
    a, b = data.draw(shapes), data.draw(shapes)
    _check(operator(name), _random(*a), _random(*b, seed=7))


@pytest.mark.parametrize(
    ("a", "b"),
    [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((3,), (3, 4)), ((2, 3), (3,)), ((3,), (3,))],
)
def test_derivatives_of_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    _check(lambda x, y: ops.Sin(ops.MatMul(x, y)), _random(*a), _random(*b, seed=3))


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("right", [0, 1])
def test_derivatives_of_gemm(left: int, right: int) -> None:
    a, b = ((3, 2) if left else (2, 3)), ((4, 3) if right else (3, 4))

    def build(x: Value, y: Value, z: Value) -> Value:
        return ops.Sin(ops.Gemm(x, y, z, alpha=0.7, beta=1.3, transA=left, transB=right))

    _check(build, _random(*a), _random(*b, seed=3), _random(4, seed=5))


@pytest.mark.parametrize(
    "attrs",
    [
        {},
        {"pads": [1, 1, 1, 1]},
        {"strides": [2, 2], "pads": [0, 1, 1, 0]},
        {"strides": [3, 2]},
        {"dilations": [2, 1]},
        {"strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"strides": [2, 1], "auto_pad": "SAME_LOWER"},
        {"strides": [2, 2], "auto_pad": "VALID"},
    ],
)
def test_derivatives_of_conv(attrs: dict[str, Any]) -> None:
    def build(x: Value, w: Value, b: Value) -> Value:
        return ops.GlobalAveragePool(ops.Tanh(ops.Conv(x, w, b, **attrs)))

    _check(build, _random(1, 2, 6, 5), _random(3, 2, 3, 2, seed=3), _random(3, seed=5))


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("attrs", [{}, {"strides": [2, 2], "pads": [1, 0, 0, 1]}])
def test_derivatives_of_conv_in_groups(groups: int, attrs: dict[str, Any]) -> None:
    def build(x: Value, w: Value, b: Value) -> Value:
        return ops.GlobalAveragePool(ops.Tanh(ops.Conv(x, w, b, group=groups, **attrs)))

    weight = _random(4 * groups // 2, 4 // groups, 2, 1, seed=3)
    _check(build, _random(2, 4, 4, 3), weight, _random(2 * groups, seed=5))


@pytest.mark.parametrize(
    "attrs",
    [
        {"kernel_shape": [2, 3]},
        {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 1]},
        {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1},
        {"kernel_shape": [3, 3], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
        {"kernel_shape": [2, 2], "strides": [3, 1], "pads": [1, 1, 0, 0], "ceil_mode": 1},
    ],
)
@pytest.mark.parametrize("kind", ["MaxPool", "AveragePool", "counted"])
def test_derivatives_of_pools(kind: str, attrs: dict[str, Any]) -> None:
    if kind == "counted":
        if "auto_pad" in attrs:
            pytest.skip("what automatic padding counts is not stated")
        attrs = {**attrs, "count_include_pad": 1}
    name = "AveragePool" if kind == "counted" else kind

    def build(x: Value) -> Value:
        made = operator(name)(x, **attrs)
        return ops.Sin(made[0] if isinstance(made, tuple) else made)

    _check(build, _random(1, 2, 5, 4))


def test_windows_in_the_padding_alone_have_no_derivative() -> None:
    x = sg.input("x", (1, 1, 5), "float64")
    y, _ = ops.MaxPool(x, kernel_shape=[2], pads=[3, 4], outputs=2)
    y.name = "y"
    graph = sg.Graph([x], [_gradient(x, xs=["x"], y="y", outputs=1), y])
    graph = sg.passes.apply_pass(graph, "ExpandGradient")
    found = _run(graph, {"x": np.arange(5.0).reshape(1, 1, 5)})
    np.testing.assert_array_equal(found[0], [[[1, 1, 1, 1, 2]]])


def test_second_derivatives_and_values_at_another_place() -> None:
    x, at = sg.input("x", (3,), "float64"), sg.input("at", (3,), "float64")
    y = ops.Sin(ops.Mul(x, x))
    y.name = "y"
    first = _gradient(x, xs=["x"], y="y", outputs=1)
    first.name = "first"
    second = _gradient(x, xs=["x"], y="first", outputs=1)
    elsewhere = _gradient(at, xs=["x"], y="y", outputs=1)
    graph = sg.passes.apply_pass(sg.Graph([x, at], [first, second, elsewhere, y]), "ExpandGradient")
    v, w = np.array([0.3, -1.0, 2.0]), np.array([1.0, 0.5, -0.2])
    found = _run(graph, {"x": v, "at": w})
    np.testing.assert_allclose(found[0], 2 * v * np.cos(v * v))
    np.testing.assert_allclose(found[1], 2 * np.cos(v * v) - 4 * v * v * np.sin(v * v))
    np.testing.assert_allclose(found[2], 2 * w * np.cos(w * w))


def test_what_has_no_derivative_is_refused_by_name() -> None:
    x = sg.input("x", (2, 2), "float64")
    y = ops.Det(x, name="det")
    y.name = "y"
    graph = sg.Graph([x], [_gradient(x, xs=["x"], y="y", outputs=1)])
    graph = sg.Graph([x], [*graph.outputs, y])
    with pytest.raises(sg.UnsupportedOpError, match="derivative of Det"):
        sg.passes.apply_pass(graph, "ExpandGradient")


def test_operands_aligned_at_an_axis_are_refused() -> None:
    x, b = sg.input("x", (3, 3), "float64"), sg.input("b", (3,), "float64")
    attributes = {"axis": 0, "broadcast": 1}
    (y,) = sg.Node("Add", [x, b], name="sum", version=6, attrs=attributes).outputs
    y.name = "y"
    graph = sg.Graph([x, b], [_gradient(x, xs=["x"], y="y", outputs=1), y])
    with pytest.raises(sg.UnsupportedOpError, match="derivative of Add before opset 7"):
        sg.passes.apply_pass(graph, "ExpandGradient")


def _derivative(build: Callable[[Value], Value], array: Array) -> Array:
    x = sg.input("x", array.shape, array.dtype)
    y = build(x)
    y.name = "y"
    graph = sg.Graph([x], [y, _gradient(x, xs=["x"], y="y")])
    return _run(sg.passes.apply_pass(graph, "ExpandGradient"), {"x": array})[1]


@pytest.mark.parametrize(
    ("build", "array", "expected"),
    [
        (lambda x: ops.Pow(x, np.zeros(2)), [0.0, 2.0], [0, 0]),
        (lambda x: ops.Pow(x, np.array([2.0, 1.0])), [0.0, 0.0], [0, 1]),
        (lambda x: ops.Gather(x, np.array([0])), [np.inf, np.nan], [1, 0]),
        (lambda x: ops.Floor(x), [np.inf, np.nan], [0, 0]),
        (lambda x: ops.Split(x, [1, 1], axis=0, outputs=2)[0], [1.0, np.inf], [1, 0]),
        (
            lambda x: ops.Exp(ops.Where(np.array([True, False]), x, np.zeros(2))),
            [1000.0, np.inf],
            [np.inf, 0],
        ),
    ],
    ids=["power 0", "powers of 0", "gather", "constant", "split", "where"],
)
def test_derivatives_of_numbers_that_are_not_finite(
    build: Callable[[Value], Value], array: list[float], expected: list[float]
) -> None:
    np.testing.assert_array_equal(_derivative(build, np.array(array)), np.array(expected))


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("OneHot", lambda x: ops.OneHot(np.array([1]), np.array(3), x)),
        ("Range", lambda x: ops.Range(ops.ReduceMin(x, keepdims=0), np.array(9.0), np.array(1.0))),
    ],
)
def test_values_that_operators_copy_are_not_taken_for_constants(
    name: str, build: Callable[[Value], Value]
) -> None:
    with pytest.raises(sg.UnsupportedOpError, match=f"derivative of {name}"):
        _derivative(build, np.array([1.0, 2.0]))


def test_dropout_in_training_needs_its_mask() -> None:
    x = sg.input("x", (2, 2), "float64")
    y = ops.Dropout(x, 0.5, np.array(True), name="drop", outputs=1)
    y.name = "y"
    graph = sg.Graph([x], [_gradient(x, xs=["x"], y="y", outputs=1), y])
    with pytest.raises(sg.UnsupportedOpError, match="'drop' in training needs its mask"):
        sg.passes.apply_pass(graph, "ExpandGradient")


def test_load_expands_the_gradient_and_the_model_can_be_saved() -> None:
    text = """
        <ir_version: 8, opset_import: ["" : 16, "ai.onnx.preview.training" : 1]>
        net (float[3] x) => (float[3] y, float[3] g) {
            y = Mul (x, x)
            [grad] g = ai.onnx.preview.training.Gradient <xs: strings = ["x"], y: string = "y"> (x)
        }
    """
    graph = sg.load(onnx.parser.parse_model(text))
    again = sg.load(sg.to_onnx(graph))
    v = np.array([1, -2, 3], np.float32)
    for one in (graph, again):
        assert _run(one, {"x": v})[1].tolist() == [2, -4, 6]
