"""What a request keeps and tells: states of its ops, inputs, its id in errors and profiles."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

X = np.array([[1, 2, 3]], np.float32)


class Sums(sg.SubgraphOp):
    """Adds up what it is given, and counts its runs."""

    def session(self) -> sg.Session:
        return SumsSession(self)


class SumsSession(sg.Session):
    def __init__(self, op: sg.SubgraphOp) -> None:
        super().__init__(op)
        self.set_states({})

    def __call__(self, inputs: Any, outputs: Any = None) -> Any:
        if (inputs[0] < 0).any():
            raise ValueError("negative input")
        self.total = self.total + inputs[0]
        self.runs = self.runs + 1
        return [(self.total * self.runs).astype(np.float32)]

    def states(self) -> dict[str, Array]:
        return {"total": self.total, "runs": self.runs}

    def set_states(self, states: Mapping[str, Array]) -> None:
        self.total: Array = states.get("total", np.zeros((1, 3), np.float32))
        self.runs: Array = states.get("runs", np.zeros((), np.int64))


@sg.register_property("test_request_state_sums")
class SumsProperty(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, Sums(subgraph), f"sums_{subgraph_id}")


def summing(device: str, *, alone: bool = False) -> sg.CompiledModel:
    x = sg.input("x", (1, 3))
    y = ops.Relu(x) if alone else ops.Neg(ops.Relu(ops.Abs(x)))
    graph = sg.Graph([x], [y], "summing")
    return sg.compile_model(sg.optimize_for(graph, "test_request_state_sums"), device)


DEVICES = ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "AUTO:CPU"]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_states_are_read_set_and_reset(device: str, alone: bool) -> None:
    sign = 1 if alone else -1
    request = summing(device, alone=alone).create_infer_request()
    for factor in (1, 4):
        np.testing.assert_array_equal(request.infer(X)[0], sign * X * factor)
    states = {state.name.rpartition("/")[2]: state for state in request.query_state()}
    assert list(states) == ["total", "runs"]
    assert all(state.name.endswith(f"/{name}") for name, state in states.items())
    np.testing.assert_array_equal(states["total"].state, X * 2)
    assert states["runs"].state == 2

    states["total"].state[:] = 100  # a copy
    states["runs"].state = np.array(0)
    np.testing.assert_array_equal(request.infer(X)[0], sign * X * 3)
    states["total"].reset()
    np.testing.assert_array_equal(states["total"].state, np.zeros((1, 3)))
    assert states["runs"].state == 1
    np.testing.assert_array_equal(request.infer(X)[0], sign * X * 2)
    request.reset_state()
    np.testing.assert_array_equal(request.infer(X)[0], sign * X)


@pytest.mark.parametrize("device", DEVICES)
def test_states_of_bodies_are_states_of_the_request(device: str) -> None:
    x = sg.input("x", (1, 3))
    number, going = sg.input("number", (), dtype="int64"), sg.input("going", (), dtype="bool")
    last = sg.input("last", (1, 3))
    taken = sg.Graph([], [ops.Relu(sg.capture(x), name="r")], "then")
    other = sg.Graph([], [ops.Neg(ops.Relu(sg.capture(x), name="r"))], "else")
    flag = ops.Greater(ops.ReduceMax(x, keepdims=0), np.float32(2))
    body = sg.Graph([number, going, last], [going, ops.Relu(sg.capture(x))], "body")
    twice = ops.Loop(sg.parameter("turns", np.array(2)), None, x, body=body, name="loop")
    choice = ops.If(flag, then_branch=taken, else_branch=other, name="if")
    graph = sg.Graph([x], [ops.Add(twice, choice)], "nested")
    model = sg.compile_model(sg.optimize_for(graph, "test_request_state_sums"), device)
    request = model.create_infer_request()
    np.testing.assert_array_equal(request.infer(X)[0], X * 4 + X)
    states = {state.name: state for state in request.query_state()}
    assert len(states) == 6  # of the loop's body and of both branches
    runs = {name: int(s.state) for name, s in states.items() if name.endswith("/runs")}
    assert sorted(runs.values()) == [0, 1, 2]
    (of_loop,) = [name for name in runs if name.startswith("loop/body/")]
    assert runs[of_loop] == 2
    states[of_loop].state = np.array(0)
    np.testing.assert_array_equal(request.infer(X)[0], X * 4 * 2 + X * 2 * 2)
    request.reset_state()
    np.testing.assert_array_equal(request.infer(X)[0], X * 4 + X)


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_fails_leaves_all_states_as_they_were(device: str) -> None:
    x, y = sg.input("x", (1, 3)), sg.input("y", (1, 3))
    graph = sg.Graph([x, y], [ops.Add(ops.Neg(ops.Relu(x)), ops.Tanh(ops.Relu(y)))], "two")
    model = sg.compile_model(
        sg.optimize_for(graph, "test_request_state_sums"), device, {"RUNTIME_FALLBACK": False}
    )
    request = model.create_infer_request()
    request.infer([X, X])
    before = {each.name: each.state for each in request.query_state()}
    assert len(before) == 4
    for run in (request.infer, lambda pair: request.start_async(pair) or request.wait()):
        for pair in ([X, -X], [-X, X]):
            with pytest.raises(sg.DeviceError, match="negative input"):
                run(pair)
            for each in request.query_state():
                np.testing.assert_array_equal(each.state, before[each.name])


@pytest.mark.parametrize("failing", [1, 2])
def test_a_reset_that_fails_leaves_all_states_as_they_were(
    failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = summing("CPU").create_infer_request()
    request.infer(X)
    before = {each.name: each.state for each in request.query_state()}
    set_states, calls = SumsSession.set_states, itertools.count(1)

    def set_or_fail(self: SumsSession, states: Mapping[str, Array]) -> None:
        set_states(self, states)
        if next(calls) == failing:
            raise MemoryError

    monkeypatch.setattr(SumsSession, "set_states", set_or_fail)
    with pytest.raises(MemoryError):
        request.query_state()[0].reset()
    for each in request.query_state():
        np.testing.assert_array_equal(each.state, before[each.name])


def test_states_are_those_of_one_request() -> None:
    model = summing("CPU")
    one, two = model.create_infer_request(), model.create_infer_request()
    one.infer(X)
    one.infer(X)
    np.testing.assert_array_equal(two.infer(X)[0], -X)
    assert one.query_state()[1].state == 2
    assert two.query_state()[1].state == 1


def test_an_array_that_is_no_such_state_is_refused() -> None:
    request = summing("CPU").create_infer_request()
    total = request.query_state()[0]
    with pytest.raises(sg.ModelError, match=r"is float32 of shape \(1, 3\); got int64 of shape"):
        total.state = np.ones((1, 3), np.int64)
    with pytest.raises(sg.ModelError, match=r"got float32 of shape \(3,\)"):
        total.state = np.ones(3, np.float32)
    np.testing.assert_array_equal(total.state, np.zeros((1, 3)))


def test_a_model_without_states_has_none() -> None:
    x = sg.input("x", (1, 3))
    request = sg.compile_model(sg.Graph([x], [ops.Relu(x)]), "CPU").create_infer_request()
    request.infer(X)
    assert request.query_state() == []
    request.reset_state()
    np.testing.assert_array_equal(request.infer(X)[0], X)


def test_states_of_a_busy_request_are_not_touched() -> None:
    opened = threading.Event()

    class Waiting(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            opened.wait(20)
            return [inputs[0]]

    x = sg.input("x", (1, 3))
    inner = sg.Graph([x], [ops.Relu(x)])
    outer = sg.input("x", (1, 3))
    node = sg.subgraph_node(inner, Waiting(inner), inputs=[outer])
    request = sg.CompiledModel(sg.Graph([outer], node.outputs, "net")).create_infer_request()
    request.start_async(X)
    for call in (request.query_state, request.reset_state):
        with pytest.raises(sg.RequestError, match=r"request 1 of model 'net' is busy"):
            call()
    opened.set()
    request.wait(20)


def test_get_input_gives_what_was_set_or_run() -> None:
    x, y = sg.input("x", (1, 3)), sg.input("y", (1, 3))
    default = sg.parameter("z", np.ones((1, 3), np.float32))
    graph = sg.Graph([x, y, default], [ops.Add(ops.Add(x, y), default)])
    request = sg.compile_model(graph, "CPU").create_infer_request()
    with pytest.raises(sg.RequestError, match="has no input 'x' yet"):
        request.get_input()
    request.infer({"x": X, "y": 2 * X})
    assert request.get_input("x") is X
    np.testing.assert_array_equal(request.get_input(1), 2 * X)
    np.testing.assert_array_equal(request.get_input("z"), np.ones((1, 3)))
    request.set_input("y", 3 * X)
    np.testing.assert_array_equal(request.get_input("y"), 3 * X)
    request.infer({"x": X, "y": X, "z": X})
    np.testing.assert_array_equal(request.get_input("z"), X)
    for wrong in ("w", 3, -1):
        with pytest.raises(sg.MissingInputError, match="the model has no input"):
            request.get_input(wrong)
        with pytest.raises(sg.MissingInputError, match="the model has no input"):
            request.set_input(wrong, X)


def test_requests_have_ids_that_errors_and_profiles_name() -> None:
    model = summing("CPU")
    requests = [model.create_infer_request() for _ in range(3)]
    assert [request.id for request in requests] == [1, 2, 3]
    requests[1].infer(X)
    assert {entry.request for entry in requests[1].profile()} == {2}
    with pytest.raises(sg.RequestError, match="request 3 of model 'summing' has not run"):
        requests[2].profile()
    for run in (requests[1].infer, requests[1].start_async):
        with pytest.raises(sg.ModelError) as refused:
            run(np.ones((1, 4), np.float32))
        assert refused.value.__notes__ == ["in request 2 of model 'summing'"]
    x = sg.input("x", (1, 3))
    inner = sg.Graph([x], [ops.Relu(x)], "inner")
    outer = sg.input("x", (1, 3))
    node = sg.subgraph_node(inner, Sums(inner), inputs=[outer])
    failing = sg.CompiledModel(sg.Graph([outer], node.outputs, "net"))
    failing.create_infer_request()
    request = failing.create_infer_request()
    with pytest.raises(sg.DeviceError, match="negative input") as caught:
        request.infer(-X)
    assert "in request 2 of model 'net'" in caught.value.__notes__
    request.start_async(-X)
    with pytest.raises(sg.DeviceError, match="negative input") as caught:
        request.wait(20)
    assert "in request 2 of model 'net'" in caught.value.__notes__
