"""What a file declares of a value that is computed need not hold: kernels do not rely on it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import subgraph as sg

DEVICES = ("REFERENCE", "CPU", "OPENCL")
_OF = {"MatMul": ((3, 4), (4, 5)), "Conv": ((1, 2, 4, 4), (6, 2, 1, 1))}


def model_with_residual(op_type: str, declared: Sequence[int | str]) -> onnx.ModelProto:
    """Return Relu(op(x, w) + r), where r is reshaped at run time and its shape only declared."""
    given, weights = _OF[op_type]
    nodes = [
        helper.make_node("Reshape", ["c", "shape"], ["r"]),
        helper.make_node(op_type, ["x", "w"], ["p"]),
        helper.make_node("Add", ["p", "r"], ["q"]),
        helper.make_node("Relu", ["q"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", *given[1:]]),
        helper.make_tensor_value_info("c", TensorProto.FLOAT, ["K"]),
        helper.make_tensor_value_info("shape", TensorProto.INT64, ["R"]),
    ]
    graph = helper.make_graph(
        nodes,
        "declared",
        inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(np.ones(weights, np.float32), "w")],
        value_info=[helper.make_tensor_value_info("r", TensorProto.FLOAT, declared)],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("op_type", "declared", "real"),
    [
        ("MatMul", ["N", 5], (1, 5)),
        ("MatMul", ["N", 5], (5,)),
        ("MatMul", ["N", 5], (3, 1)),
        ("MatMul", ["N", 5], (2, 3, 5)),
        ("Conv", ["N", 6, 4, 4], (6, 1, 1)),
        ("Conv", ["N", 6, 4, 4], (1, 1, 4, 4)),
        ("Conv", ["N", 6, 4, 4], (2, 6, 4, 4)),
    ],
)
def test_a_residual_of_another_shape_broadcasts(
    device: str, op_type: str, declared: list[int | str], real: tuple[int, ...]
) -> None:
    x = np.ones(_OF[op_type][0], np.float32)
    r = np.arange(np.prod(real), dtype=np.float32)
    compiled = sg.compile_model(sg.load(model_with_residual(op_type, declared)), device)
    found = compiled([x, r, np.array(real, np.int64)])[0]
    depth = 4 if op_type == "MatMul" else 2
    shape = (3, 5) if op_type == "MatMul" else (1, 6, 4, 4)
    np.testing.assert_array_equal(found, np.full(shape, depth) + r.reshape(real))
