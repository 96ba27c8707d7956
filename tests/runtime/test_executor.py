"""The default executor: bodies against ONNX Runtime, profile, freeing, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import RunInputs, Session
from subgraph.runtime.executor import Executor
from subgraph.runtime.executor_plan import Plan, all_parameters


def run_onnx(model: onnx.ModelProto, feeds: dict[str, Array]) -> list[Any]:
    onnx.checker.check_model(model)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, feeds)


def made(nodes: Any, inputs: Any, outputs: Any, opset: int = 20, init: Any = ()) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(init))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def info(name: str, dims: Any, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, dims)


def check(model: onnx.ModelProto, **feeds: Array) -> None:
    expected = run_onnx(model, feeds)
    compiled = sg.compile_model(model, "REFERENCE")
    results = compiled(feeds)
    assert len(results) == len(expected)
    for got, want in zip(results.values(), expected, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


INT, BOOL = TensorProto.INT64, TensorProto.BOOL


def test_if_with_captures_in_both_branches() -> None:
    then = helper.make_graph(
        [helper.make_node("Add", ["a", "b"], ["t"])], "then", [], [info("t", [2])]
    )
    other = helper.make_graph(
        [helper.make_node("Sub", ["b", "a"], ["s"])], "else", [], [info("s", [2])]
    )
    model = made(
        [
            helper.make_node("Relu", ["x"], ["a"]),
            helper.make_node("Neg", ["x"], ["b"]),
            helper.make_node("If", ["c"], ["y"], then_branch=then, else_branch=other),
        ],
        [info("x", [2]), info("c", [], BOOL)],
        [info("y", [2])],
    )
    for taken in (True, False):
        check(model, x=np.array([1, -2], np.float32), c=np.array(taken))


def loop_model() -> onnx.ModelProto:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["v", "x"], ["v2"]),
            helper.make_node("ReduceSum", ["v2"], ["total"], keepdims=0),
            helper.make_node("Less", ["total", "limit"], ["go"]),
            helper.make_node("Mul", ["v2", "v2"], ["scan"]),
        ],
        "body",
        [info("i", [], INT), info("cond", [], BOOL), info("v", [2])],
        [info("go", [], BOOL), info("v2", [2]), info("scan", [2])],
    )
    return made(
        [helper.make_node("Loop", ["m", "", "x"], ["last", "scans"], body=body)],
        [info("x", [2]), info("m", [], INT), info("limit", [])],
        [info("last", [2]), info("scans", ["k", 2])],
    )


@pytest.mark.parametrize(("rounds", "limit"), [(5, 1e9), (100, 20.0), (0, 1.0)])
def test_loop_stops_by_count_and_by_condition(rounds: int, limit: float) -> None:
    check(
        loop_model(),
        x=np.array([1, 2], np.float32),
        m=np.array(rounds),
        limit=np.array(limit, np.float32),
    )


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("back", [0, 1])
def test_scan(axis: int, back: int) -> None:
    body = helper.make_graph(
        [
            helper.make_node("Add", ["s", "e"], ["s2"]),
            helper.make_node("Add", ["s2", "k"], ["o"]),
        ],
        "body",
        [info("s", [2]), info("e", [2])],
        [info("s2", [2]), info("o", [2])],
    )
    model = made(
        [
            helper.make_node(
                "Scan",
                ["s0", "x"],
                ["last", "y"],
                body=body,
                num_scan_inputs=1,
                scan_input_axes=[axis],
                scan_input_directions=[back],
                scan_output_axes=[axis],
                scan_output_directions=[1 - back],
            )
        ],
        [info("s0", [2]), info("x", [2, 2]), info("k", [2])],
        [info("last", [2]), info("y", [2, 2])],
    )
    check(
        model,
        s0=np.array([1, 2], np.float32),
        x=np.array([[1, 2], [3, 5]], np.float32),
        k=np.array([10, 20], np.float32),
    )


@pytest.mark.parametrize("batch", [0, 2])
def test_scan_of_opset_8_has_a_batch(batch: int) -> None:
    nodes = [helper.make_node("Add", ["s", "e"], ["t"]), helper.make_node("Neg", ["t"], ["o"])]
    parts = [info("s", [3]), info("e", [3])]
    body = helper.make_graph(nodes, "body", parts, [info("t", [3]), info("o", [3])])
    scan = helper.make_node("Scan", ["", "s0", "x"], ["last", "y"], body=body, num_scan_inputs=1)
    inputs = [info("s0", ["B", 3]), info("x", ["B", 4, 3])]
    graph = helper.make_graph(
        [scan], "scan", inputs, [info("last", ["B", 3]), info("y", ["B", 4, 3])]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 8)], ir_version=3)
    x = np.arange(batch * 12, dtype=np.float32).reshape(batch, 4, 3)
    results = sg.compile_model(sg.load(model), "REFERENCE")([np.ones((batch, 3), np.float32), x])
    sums = 1 + np.cumsum(x, axis=1, dtype=np.float32)
    np.testing.assert_array_equal(results["last"], sums[:, -1] if batch else np.ones((0, 3)))
    np.testing.assert_array_equal(results["y"], -sums)


def test_sequence_map() -> None:
    body = helper.make_graph(
        [helper.make_node("Add", ["e", "b"], ["o"])],
        "body",
        [info("e", [2]), info("b", [2])],
        [info("o", [2])],
    )
    model = made(
        [
            helper.make_node("SequenceConstruct", ["x", "x"], ["seq"]),
            helper.make_node("SequenceMap", ["seq", "b"], ["mapped"], body=body),
            helper.make_node("ConcatFromSequence", ["mapped"], ["y"], axis=0),
        ],
        [info("x", [2]), info("b", [2])],
        [info("y", [4])],
    )
    check(model, x=np.array([1, 2], np.float32), b=np.array([5, 6], np.float32))


def test_control_flow_of_partitioned_bodies_and_parameters_in_them() -> None:
    def double(value: sg.Value) -> sg.Value:
        inner_x = sg.input("ix", ("N",))
        inner = sg.Graph([inner_x], [ops.Add(inner_x, inner_x)], "inner")
        return sg.subgraph_node(inner, inputs=[value]).outputs[0]

    x, c = sg.input("x", ("N",)), sg.input("c", (), "bool")
    w = sg.parameter("w", np.array([3], np.float32))
    held = sg.capture(x)
    then = sg.Graph(outputs=[ops.Mul(double(held), sg.capture(w))], name="then")
    other = sg.Graph(outputs=[ops.Neg(sg.capture(x))], name="else")
    graph = sg.Graph([x, c], [ops.If(c, then_branch=then, else_branch=other)], "net")
    graph.verify()
    assert [p.name for p in all_parameters(graph)] == ["w"]
    model = sg.compile_model(graph, "REFERENCE")
    value = np.array([1, 2], np.float32)
    np.testing.assert_array_equal(model(value, np.array(True))[0], value * 6)
    np.testing.assert_array_equal(model(value, np.array(False))[0], -value)
    model.parameters["w"].assign(np.array([5], np.float32))
    np.testing.assert_array_equal(model(value, np.array(True))[0], value * 10)


def test_a_condition_with_many_values_is_an_error() -> None:
    body = sg.Graph(outputs=[ops.Constant(value=np.ones(1, np.float32))])
    c = sg.input("c", ("N",), "bool")
    graph = sg.Graph([c], [ops.If(c, then_branch=body, else_branch=body.clone())])
    with pytest.raises(sg.ModelError, match="condition has shape"):
        sg.compile_model(graph, "REFERENCE")(np.array([True, False]))


def test_values_are_freed_after_their_last_use() -> None:
    alive: list[weakref.ref[Array]] = []
    most: list[int] = []

    class Watch(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            gc.collect()
            most.append(sum(ref() is not None for ref in alive))
            result = inputs[0] + 1
            alive.append(weakref.ref(result))
            return [result]

    value = x = sg.input("x", (4,))
    for _ in range(20):
        ix = sg.input("ix", (4,))
        inner = sg.Graph([ix], [ops.Relu(ix)], "inner")
        value = sg.subgraph_node(inner, Watch(inner), inputs=[value]).outputs[0]
    result = Executor(Plan(sg.Graph([x], [value]))).run([np.zeros(4, np.float32)])
    np.testing.assert_array_equal(result[0], np.full(4, 20))
    assert max(most) == 1


def test_profile_lists_every_node_in_order() -> None:
    x = sg.input("x", (2, 3))
    graph = sg.Graph([x], [ops.Relu(ops.Neg(x, name="a"), name="b")])
    model = sg.compile_model(graph, "REFERENCE", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    for _ in range(2):
        request.infer(np.ones((2, 3), np.float32))
    profile = request.profile()
    assert [(e.node, e.op_type, e.device) for e in profile] == [
        ("a", "Neg", "REFERENCE"),
        ("b", "Relu", "REFERENCE"),
    ]
    assert all(e.seconds > 0 and e.bytes == 48 for e in profile)


def test_a_graph_of_a_parameter_and_an_input_alone() -> None:
    x, w = sg.input("x", (2,)), sg.parameter("w", np.array([7], np.float32))
    model = sg.compile_model(sg.Graph([x], [w, x]), "REFERENCE")
    results = model(np.array([1, 2], np.float32))
    assert results[0].tolist() == [7]
    assert results[1].tolist() == [1, 2]


def test_a_deep_graph_needs_no_recursion() -> None:
    value = x = sg.input("x", (1,))
    for _ in range(20_000):
        value = sg.Node("Neg", [value], version=13).outputs[0]
    model = sg.compile_model(sg.Graph([x], [value]), "REFERENCE")
    assert model(np.ones(1, np.float32))[0].tolist() == [1]


def growing_loop() -> onnx.ModelProto:
    """A loop that appends to a value: every turn has other shapes."""
    body = helper.make_graph(
        [
            helper.make_node("Concat", ["v", "x"], ["v2"], axis=0),
            helper.make_node("ReduceSum", ["v2"], ["total"], keepdims=0),
            helper.make_node("Less", ["total", "limit"], ["less"]),
            helper.make_node("Cast", ["less"], ["go"], to=BOOL),
        ],
        "body",
        [info("i", [], INT), info("cond", [], BOOL), info("v", [None, 2])],
        [info("go", [], BOOL), info("v2", [None, 2])],
    )
    return made(
        [helper.make_node("Loop", ["", "", "x"], ["last"], body=body)],
        [info("x", [1, 2]), info("limit", [])],
        [info("last", ["n", 2])],
    )


def test_shapes_of_a_loop_find_their_programs_again() -> None:
    model, x = growing_loop(), np.array([[1, 2]], np.float32)
    compiled = sg.compile_model(model, "CPU")
    for limit in (50, 9, 100):
        feeds = {"x": x, "limit": np.array(limit, np.float32)}
        for _ in range(2):
            np.testing.assert_array_equal(compiled(feeds)[0], run_onnx(model, feeds)[0])


def test_a_body_goes_the_short_way_again_after_a_bad_input() -> None:
    class Shorter(Session):
        def run_inputs(self) -> RunInputs:
            return self.short

        def short(self, inputs: Sequence[Any], outputs: Any = None) -> Sequence[Any]:
            taken.append(True)
            return self.op.forward(list(inputs))

    class Halving(sg.SubgraphOp):
        def session(self) -> Session:
            return Shorter(self)

        def forward(self, inputs: list[Any]) -> list[Array]:
            if (inputs[1] < 0).any():
                raise ValueError("negative")
            return [inputs[0], inputs[1] / np.float32(2)]

    taken: list[bool] = []
    going, state = sg.input("going", (), "bool"), sg.input("state", (2,))
    inner = sg.Graph([going, state], [ops.Identity(going), ops.Neg(state)], "inner")
    turn, going, state = (
        sg.input("turn", (), "int64"),
        sg.input("c", (), "bool"),
        sg.input("s", (2,)),
    )
    node = sg.subgraph_node(inner, Halving(inner), inputs=[going, state])
    body = sg.Graph([turn, going, state], node.outputs, "body")
    x = sg.input("x", (2,))
    graph = sg.Graph([x], [ops.Loop(np.array(3), None, x, body=body)])
    request = sg.CompiledModel(graph, device="TEST").create_infer_request()
    for given in (8, 16, -8, 24, 32):
        taken.clear()
        array = np.full(2, given, np.float32)
        if given < 0:
            with pytest.raises(sg.DeviceError, match="negative"):
                request.infer([array])
        else:
            np.testing.assert_array_equal(request.infer([array])[0], array / 8)
            assert len(taken) == 3


def test_a_cast_to_the_same_type_hands_its_value_on() -> None:
    x, c = sg.input("x", (2,)), sg.input("c", (), "bool")
    branches = [sg.Graph(outputs=[op(sg.capture(x))]) for op in (ops.Relu, ops.Neg)]
    taken = ops.Cast(c, to="bool", name="cast")
    graph = sg.Graph([x, c], [ops.If(taken, then_branch=branches[0], else_branch=branches[1])])
    run = Executor(Plan(graph)).run
    given = np.array([1, -2], np.float32)
    np.testing.assert_array_equal(run([given, np.array(True)])[0], [1, 0])
    np.testing.assert_array_equal(run([given, np.array(False)])[0], [-1, 2])
    alone = sg.Graph([c], [ops.Cast(c, to="bool")])
    condition = np.array(True)
    assert Executor(Plan(alone)).run([condition])[0] is not condition
