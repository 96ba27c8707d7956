"""Results are the caller's own: none is in the memory of an input, whatever hands it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from subgraph.partition.property import SelectorProperty

_HANDED_ON: dict[str, Callable[[sg.Value], sg.Value]] = {
    "input": lambda x: x,
    "identity": lambda x: sg.ops.Identity(x),
    "reshape": lambda x: sg.ops.Reshape(x, np.array([3, 2])),
    "slice": lambda x: sg.ops.Slice(x, np.array([1]), np.array([2])),
    "transpose": lambda x: sg.ops.Transpose(x),
    "sequence": lambda x: sg.ops.SequenceAt(sg.ops.SequenceConstruct(x), np.array(0)),
    "list": lambda x: sg.ops.SequenceConstruct(x),
}


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE", "AUTO"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", _HANDED_ON)
def test_a_result_is_not_in_the_memory_of_an_input(name: str, beside: bool, device: str) -> None:
    x = sg.input("x", (2, 3))
    outputs = [_HANDED_ON[name](x), *([sg.ops.Relu(x)] if beside else [])]
    model = sg.compile_model(sg.Graph([x], outputs), device)
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(2):
        for result in (model(given)[0], model.create_infer_request().infer([given])[0]):
            array: Any = result[0] if isinstance(result, list) else result
            assert not np.shares_memory(array, given)
            array[...] = -1
    assert given.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("dtype", [">f4", "<f4"])
def test_an_output_may_be_written_in_either_byte_order(dtype: str, device: str) -> None:
    x = sg.input("x", (3,))
    request = sg.compile_model(sg.Graph([x], [sg.ops.Relu(x)]), device).create_infer_request()
    target = np.zeros(3, dtype)
    request.set_output(0, target)
    request.infer(np.array([-1, 2, 3], np.float32))
    assert target.dtype == np.dtype(dtype)
    assert target.tolist() == [0, 2, 3]


class HandsOn(sg.SubgraphOp):
    """Returns its input, a view of it, a weight, and one new array twice."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        x, w = inputs
        new = x + 1
        return [x, x[::-1], w.array, new, new]


def _hands_on() -> tuple[sg.Value, tuple[sg.Value, ...]]:
    x, w = sg.input("x", (4,)), sg.parameter("w", np.arange(4, dtype=np.float32))
    inner_x = sg.input("inner_x", (4,))
    inner_w = sg.Value("inner_w", w.type, parameter=w.parameter)
    inner_outputs = [sg.ops.Relu(inner_x) for _ in range(5)]
    inner = sg.Graph([inner_x, inner_w], inner_outputs, "inner")
    return x, sg.subgraph_node(inner, HandsOn(inner), inputs=[x, w]).outputs


@pytest.mark.parametrize("beside", [False, True])
def test_results_of_a_users_op_are_the_callers_own(beside: bool) -> None:
    x, outputs = _hands_on()
    more = [sg.ops.Neg(x)] if beside else []
    graph = sg.Graph([x], [*outputs, *more], "net")
    model, given = sg.compile_model(graph, "CPU"), np.arange(4, dtype=np.float32)
    for _ in range(2):
        found = list(model(given).values())
        expected = [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]]
        for result, right in zip(found, expected, strict=False):
            assert result.tolist() == right
            result[...] = -1


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE", "AUTO"])
@pytest.mark.parametrize("region", [False, True])
def test_a_result_is_in_the_memory_of_no_other_result_or_weight(region: bool, device: str) -> None:
    x, w = sg.input("x", (4, 4)), sg.parameter("w", np.eye(4, dtype=np.float32))
    product = sg.ops.Relu(sg.ops.MatMul(x, w))
    outputs = [product, sg.ops.Transpose(product), sg.ops.Reshape(product, np.array([16]))]
    outputs += [*sg.ops.Split(product, num_outputs=2), sg.ops.Identity(product)]
    outputs += [sg.ops.Identity(w), sg.ops.Transpose(w), sg.ops.Reshape(w, np.array([2, 8]))]
    graph = sg.Graph([x], outputs)
    if region:
        taken = {"MatMul", "Relu", "Transpose", "Reshape", "Split", "Identity"}
        graph = sg.optimize_for(graph, SelectorProperty(sg.ContainOpSelector(taken), "views"))
        assert any(node.subgraph is not None for node in graph.nodes)
    model, given = sg.compile_model(graph, device), np.ones((4, 4), np.float32)
    for _ in range(2):
        found = model(given)
        for k in range(len(outputs)):
            own = [np.ones((4, 4)), np.eye(4)][k > 5]
            expected = {2: own.reshape(16), 3: own[:2], 4: own[:2], 8: own.reshape(2, 8)}
            np.testing.assert_array_equal(found[k], expected.get(k, own))
            found[k][...] = -1


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("looped", [False, True])
def test_an_item_of_a_sequence_is_not_a_constant_of_the_model(looped: bool, device: str) -> None:
    x = sg.input("x", (2,))
    if looped:
        go, number = sg.input("go", (), "bool"), sg.input("number", (), "int64")
        items = sg.Value("items", sg.SequenceType(sg.TensorType("float32", (2,))))
        held = sg.ops.Constant(value=np.array([1, 2], np.float32))
        body = sg.Graph([number, go, items], [go, sg.ops.SequenceInsert(items, held)], "body")
        made = sg.ops.Loop(np.array(2), None, sg.ops.SequenceConstruct(x), body=body)
    else:
        constant = sg.ops.Constant(value=np.array([1, 2], np.float32))
        made = sg.ops.SequenceConstruct(x, constant)
    model, given = sg.compile_model(sg.Graph([x], [made]), device), np.zeros(2, np.float32)
    for _ in range(2):
        result = model(given)[0]
        assert result[1].tolist() == [1, 2]
        result[1][...] = -1
