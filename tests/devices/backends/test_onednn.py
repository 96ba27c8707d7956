"""oneDNN: products take their biases with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends.libraries.onednn_graph import with_biases
from tests.support.backends import installed


def _parameter(name: str, *shape: int) -> sg.Value:
    values = np.random.default_rng(len(name)).standard_normal(shape)
    return sg.parameter(name, values.astype(np.float32))


def _residual(x: Any, product: Any) -> list[Any]:
    return [ops.Add(x, ops.Add(product, _parameter("bias", 4)))]


def _bias_first(x: Any, product: Any) -> list[Any]:
    return [ops.Relu(ops.Add(_parameter("bias", 4), product))]


def _product_is_read_twice(x: Any, product: Any) -> list[Any]:
    return [ops.Mul(product, ops.Add(product, _parameter("bias", 4)))]


def _product_is_an_output(x: Any, product: Any) -> list[Any]:
    return [product, ops.Add(product, _parameter("bias", 4))]


def _one_number(x: Any, product: Any) -> list[Any]:
    return [ops.Add(product, _parameter("bias", 1))]


def _added_to_itself(x: Any, product: Any) -> list[Any]:
    return [ops.Add(product, product)]


def _a_matrix(x: Any, product: Any) -> list[Any]:
    return [ops.Add(product, _parameter("matrix", 3, 4))]


# How many sums of each case are biases.
CASES = {
    _residual: 1,
    _bias_first: 1,
    _product_is_read_twice: 0,
    _product_is_an_output: 0,
    _one_number: 0,
    _added_to_itself: 0,
    _a_matrix: 0,
}


def _graph(case: Any) -> sg.Graph:
    x = sg.input("x", (3, 4))
    return sg.Graph([x], case(x, ops.MatMul(x, _parameter("w", 4, 4))), case.__name__)


@pytest.mark.parametrize("case", CASES)
def test_which_sums_are_biases(case: Any) -> None:
    body = onnx.shape_inference.infer_shapes(sg.to_onnx(_graph(case))).graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in body.initializer}
    for port in (*body.input, *body.value_info, *body.output):
        shapes[port.name] = tuple(dim.dim_value for dim in port.type.tensor_type.shape.dim)
    operations = with_biases(body, shapes)
    assert len(operations) == len(body.node) - CASES[case]
    made = [name for _, _, results in operations for name in results]
    read = {name for node, bias, _ in operations for name in (*node.input, bias) if name}
    assert len(set(made)) == len(made)
    assert read <= {*made, *(port.name for port in body.input), *shapes}
    assert {port.name for port in body.output} <= set(made)


@pytest.mark.parametrize("device", installed("ONEDNN"))
@pytest.mark.parametrize("weights", ["inside", "inputs"])
@pytest.mark.parametrize("case", CASES)
def test_results_with_biases(case: Any, weights: str, device: str) -> None:
    graph = _graph(case)
    data = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    config = {"WEIGHTS": weights, "RUNTIME_FALLBACK": False}
    model = sg.compile_model(graph, f"HETERO:{device},REFERENCE", config)
    assert device in model.get_property("EXECUTION_DEVICES")
    expected = sg.compile_model(graph, "REFERENCE")(data)
    for k, found in enumerate(model(data).values()):
        np.testing.assert_allclose(found, expected[k], atol=1e-5)
