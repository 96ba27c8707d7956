"""Nodes of thousands of operands or outputs, and long chains of views, take linear time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from tests.support.budgets import model_bytes, tensor_info, within

_FLOAT = TensorProto.FLOAT


@pytest.mark.parametrize("op_type", ["Sum", "Mean", "Max", "Min"])
@pytest.mark.parametrize("count", [16, 17, 31, 32, 50])
def test_many_operands_give_what_numpy_gives(op_type: str, count: int) -> None:
    generator = np.random.default_rng(count)
    shapes = [(3, 4), (4,), (3, 1), (1,)]
    arrays = [generator.standard_normal(shapes[k % 4]).astype(np.float32) for k in range(count)]
    inputs = [sg.input(f"x{k}", array.shape) for k, array in enumerate(arrays)]
    graph = sg.Graph(inputs, [getattr(sg.ops, op_type)(*inputs)])
    found = sg.compile_model(graph, "CPU")(*arrays)[0]
    stacked = np.stack([np.broadcast_to(array, (3, 4)) for array in arrays])
    expected = getattr(np, op_type.lower())(stacked, axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_thousands_of_operands_need_no_kernel_of_their_own() -> None:
    count = 2000
    inputs = [sg.input(f"x{k}", (4,)) for k in range(count)]
    model = sg.compile_model(sg.Graph(inputs, [sg.ops.Sum(*inputs)]), "CPU")
    with within(60):  # two kernels may have to be compiled
        found = model(*[np.full(4, k, np.float32) for k in range(count)])[0]
    assert found.tolist() == [count * (count - 1) / 2] * 4


def test_the_time_of_a_plan_is_linear_in_the_operands_of_a_node() -> None:
    """Each operand may be overwritten in its step, which was searched among all for each again."""
    seconds: list[float] = []
    for count in (2_000, 20_000):
        graph = sg.load(
            model_bytes(
                [helper.make_node("Max", ["x"] * count, ["y"])],
                [tensor_info("x", [2])],
                [tensor_info("y", [2])],
            )
        )
        sg.compile_model(graph, "CPU")  # kernels and modules
        begin = time.process_time()
        sg.compile_model(graph, "CPU")
        seconds.append(time.process_time() - begin)
    assert seconds[1] < 30 * seconds[0]


def test_thousands_of_outputs_take_linear_time() -> None:
    count = 20_000
    names = [f"y{k}" for k in range(count)]
    node = helper.make_node("Split", ["x"], names, axis=0, num_outputs=count)
    content = model_bytes(
        [node], [tensor_info("x", [count])], [tensor_info(name, [1]) for name in names]
    )
    with within(20):
        found = sg.compile_model(content, "CPU")(np.arange(count, dtype=np.float32))
    assert [int(found[k][0]) for k in (0, 7, count - 1)] == [0, 7, count - 1]


def test_a_chain_of_parts_in_parts_takes_linear_time() -> None:
    """Each result is a part of the next one: what it is in the end was walked for each again."""
    count = 3000
    nodes = [
        helper.make_node("Concat", [f"v{k}", "v0"], [f"v{k + 1}"], axis=0) for k in range(count)
    ]
    content = model_bytes(nodes, [tensor_info("v0", [1])], [tensor_info(f"v{count}", [count + 1])])
    with within(30):
        assert sg.compile_model(content, "CPU")(np.ones(1, np.float32))[0].sum() == count + 1
