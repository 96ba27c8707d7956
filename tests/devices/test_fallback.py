"""Regions whose own op fails: the next device runs them, a breaker counts, profiles tell."""

from __future__ import annotations

import copy
import logging
import threading
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.simulated_device import Clock, Recorder, Simulated, X, check, relu, seven


class Moody(Simulated):
    """Raises ``error`` in every run, if there is one; gives ``poison`` instead of results."""

    def __init__(self, takes: set[str] | None = None) -> None:
        super().__init__(takes)
        self.error: Exception | None = None
        self.poison: float | None = None

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return MoodyOp(graph, self)


class MoodyOp(Recorder):
    def session(self) -> sg.Session:
        return MoodySession(self)


class MoodySession(sg.Session):
    def __init__(self, op: MoodyOp) -> None:
        super().__init__(op)
        self.inner = sg.DefaultSubgraphOp.session(op)
        self.owner = op.owner

    def __call__(self, inputs: Any, outputs: Any = None) -> Any:
        owner = self.owner
        assert isinstance(owner, Moody)
        owner.runs += 1
        if owner.error is not None:
            raise copy.copy(owner.error)  # its traceback would keep the sessions
        results = self.inner(inputs, outputs)
        if owner.poison is not None:
            results = [np.full_like(each, owner.poison) for each in results]
        return results


def moody(*names: str) -> tuple[sg.Core, list[Moody]]:
    core = sg.Core()
    devices = [Moody() for _ in names]
    for name, device in zip(names, devices, strict=True):
        core.register_device(name, device)
    return core, devices


ERRORS = [
    sg.DeviceError("lost"),
    RuntimeError("driver"),
    KeyError("k"),
    OSError(5, "pipe"),
    sg.InternalError("bug"),
    AssertionError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("graph", [seven, relu], ids=["several nodes", "one node"])
@pytest.mark.parametrize("profiling", [False, True])
def test_any_exception_moves_the_region(
    error: Exception, graph: Any, profiling: bool, caplog: Any
) -> None:
    core, (a, _) = moody("A", "B")
    model = core.compile_model(graph(), "HETERO:A,B", {"ENABLE_PROFILING": profiling})
    a.error = error
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            check(model, graph())
    assert caplog.text.count("continues on B") == 1, "a cause is logged once"
    assert a.runs == 2
    (told,) = model.get_property("FALLBACKS").values()
    assert told["failures"] == 2
    assert str(error) in told["cause"]
    # The text of these says little without their class.
    assert type(error).__name__ in told["cause"] or not isinstance(
        error, (KeyError, AssertionError)
    )
    assert not told["open"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_breaker_opens_and_tries_again(
    monkeypatch: pytest.MonkeyPatch, caplog: Any, asynchronous: bool
) -> None:
    clock = Clock(monkeypatch)
    core, (a, b) = moody("A", "B")
    config = {"FALLBACK_FAILURES": 2, "FALLBACK_RETRY": 10}
    model = core.compile_model(seven(), "HETERO:A,B", config)
    request = model.create_infer_request()

    def run() -> tuple[int, int]:
        before = a.runs, b.runs
        if asynchronous:
            request.start_async(X)
            request.wait(20)
        else:
            request.infer(X)
        np.testing.assert_allclose(request.get_output(0), wanted, rtol=1e-6)
        return a.runs - before[0], b.runs - before[1]

    wanted = model(X)[0]
    a.error = RuntimeError("driver")
    with caplog.at_level(logging.WARNING):
        assert [run() for _ in range(4)] == [(1, 1), (1, 1), (0, 1), (0, 1)]
        assert model.execution_devices == ["B"]
        clock.now += 9
        assert run() == (0, 1)
        clock.now += 2
        assert [run(), run()] == [(1, 1), (0, 1)], "one run tries again, and fails"
        clock.now += 11
        a.error = None
        assert [run(), run()] == [(1, 0), (1, 0)]
    assert model.execution_devices == ["A"]
    assert caplog.text.count("driver") == 1
    assert caplog.text.count("runs on B from now on") == 1
    assert caplog.text.count("runs on A again") == 1


def test_a_run_that_succeeds_begins_the_count_anew() -> None:
    core, (a, _) = moody("A", "B")
    model = core.compile_model(relu(), "HETERO:A,B", {"FALLBACK_FAILURES": 2})
    for _ in range(3):
        a.error = RuntimeError("driver")
        check(model, relu())
        a.error = None
        check(model, relu())
    assert model.execution_devices == ["A"]
    (told,) = model.fallbacks.values()
    assert told["failures"] == 3


@pytest.mark.parametrize(
    "error",
    [
        sg.ShapeError("bad rank"),
        sg.LimitError("budget"),
        sg.ModelError("no such row"),
        sg.MissingInputError("no x"),
    ],
    ids=lambda e: type(e).__name__,
)
def test_what_is_the_callers_fault_is_raised_and_not_counted(error: Exception) -> None:
    core, (a, b) = moody("A", "B")
    model = core.compile_model(seven(), "HETERO:A,B", {"FALLBACK_FAILURES": 1})
    a.error = error
    for _ in range(2):
        with pytest.raises(type(error), match=str(error)):
            model(X)
    assert b.runs == 0
    assert model.fallbacks == {}
    a.error = None
    check(model, seven())
    assert model.execution_devices == ["A"]


def test_what_the_next_device_raises_too_is_not_counted() -> None:
    core, (a, b) = moody("A", "B")
    model = core.compile_model(seven(), "HETERO:A,B", {"FALLBACK_FAILURES": 1})
    a.error, b.error = IndexError("row 7 of 3"), IndexError("row 7 of 3")
    for _ in range(2):
        with pytest.raises(sg.DeviceError, match="row 7 of 3"):
            model(X)
    a.error = None
    check(model, seven())
    assert model.execution_devices == ["A"]


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "REFERENCE"])
def test_an_index_out_of_range_opens_no_breaker(device: str) -> None:
    x, rows = sg.input("x", (3, 2)), sg.input("rows", (1,), "int64")
    graph = sg.Graph([x, rows], [ops.Gather(x, rows)], "rows")
    model = sg.Core().compile_model(graph, device, {"FALLBACK_FAILURES": 1})
    data = np.arange(6, dtype=np.float32).reshape(3, 2)
    before = model.execution_devices
    for _ in range(2):
        with pytest.raises(sg.SubgraphError):
            model(data, np.array([7]))
    np.testing.assert_array_equal(model(data, np.array([2]))[0], data[2:])
    assert model.execution_devices == before
    assert model.fallbacks == {}


def test_a_cancelled_run_is_no_failure() -> None:
    core, (a, _) = moody("A", "B")
    model = core.compile_model(seven(), "HETERO:A,B", {"FALLBACK_FAILURES": 1})
    a.error = sg.RequestCancelledError("cancelled")
    with pytest.raises(sg.RequestCancelledError):
        model(X)
    assert model.fallbacks == {}


@pytest.mark.parametrize("graph", [seven, relu], ids=["several nodes", "one node"])
@pytest.mark.parametrize("profiling", [False, True])
def test_if_the_last_device_fails_too_the_error_names_both(graph: Any, profiling: bool) -> None:
    core, (a, b) = moody("A", "B")
    model = core.compile_model(graph(), "HETERO:A,B", {"ENABLE_PROFILING": profiling})
    a.error, b.error = RuntimeError("first"), ValueError("second")
    request = model.create_infer_request()
    for _ in range(2):
        with pytest.raises(sg.DeviceError, match="'B': ValueError: second") as caught:
            request.infer(X)
        assert "A failed before: first" in caught.value.__notes__
    assert model.fallbacks == {}


def branches() -> sg.Graph:
    x, flag = sg.input("x", ("N", 3)), sg.input("flag", (), "bool")
    then, other = (sg.Graph(outputs=[op(sg.capture(x))]) for op in (ops.Relu, ops.Sin))
    return sg.Graph([x, flag], [ops.If(flag, then_branch=then, else_branch=other)], "branches")


def loop() -> sg.Graph:
    x, count = sg.input("x", ("N", 3)), sg.input("count", (), "int64")
    number, again, v = (
        sg.input("i", (), "int64"),
        sg.input("go", (), "bool"),
        sg.input("v", ("N", 3)),
    )
    body = sg.Graph([number, again, v], [ops.Identity(again), ops.Relu(v)], "body")
    return sg.Graph([x, count], [ops.Loop(count, None, x, body=body)], "loop")


@pytest.mark.parametrize(
    ("graph", "second"),
    [(branches, np.array(True)), (loop, np.array(2))],
    ids=["branch", "loop"],
)
def test_regions_in_bodies_count_among_the_devices(graph: Any, second: Array) -> None:
    core, (a, _) = moody("A", "B")
    a.takes = {"Relu"}
    config = {"FALLBACK_FAILURES": 1}
    model = core.compile_model(graph(), "HETERO:A,B,REFERENCE", config)
    assert "A" in model.execution_devices
    a.error = RuntimeError("driver")
    np.testing.assert_array_equal(model([X, second])[0], np.maximum(X, 0))
    assert "A" not in model.execution_devices
    assert "B" in model.execution_devices


def test_three_devices_in_turn(caplog: Any) -> None:
    core, (a, b, c) = moody("A", "B", "C")
    model = core.compile_model(seven(), "HETERO:A,B,C", {"FALLBACK_FAILURES": 2})
    a.error, b.error = RuntimeError("first"), ValueError("second")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            check(model, seven())
    assert (a.runs, b.runs, c.runs) == (2, 2, 4)
    assert model.execution_devices == ["C"]
    assert caplog.text.count("continues on B: first") == 1
    assert caplog.text.count("continues on C: ValueError: second") == 1


def test_without_fallback_the_error_stands() -> None:
    core, (a, b) = moody("A", "B")
    model = core.compile_model(seven(), "HETERO:A,B", {"RUNTIME_FALLBACK": False})
    a.error = RuntimeError("driver")
    with pytest.raises(sg.DeviceError, match="RuntimeError: driver"):
        model(X)
    assert b.runs == 0


def test_profiles_show_who_ran_and_why() -> None:
    core, (a, _) = moody("A", "B")
    config = {"ENABLE_PROFILING": True, "FALLBACK_FAILURES": 2}
    model = core.compile_model(seven(), "HETERO:A,B", config)
    request = model.create_infer_request()
    request.infer(X)
    assert {(e.device, e.fallback) for e in request.profile()} == {("A", "")}
    a.error = RuntimeError("driver")
    for failures in (1, 2, 2):
        request.infer(X)
        assert request.profile(), "a node that failed is listed, too"
        for entry in request.profile():
            assert entry.device == "B"
            assert "driver" in entry.fallback
            assert entry.fallback.startswith("A failed")
        assert next(iter(model.fallbacks.values()))["failures"] == failures
    assert "2 times, tried again in" in request.profile()[0].fallback


def test_weights_and_states_carry_over() -> None:
    """What was assigned before and after the move counts; a loop's state is that of the caller."""
    core, (a, b) = moody("A", "B")
    x, state = sg.input("x", (2, 3)), sg.input("state", (2, 3))
    w = sg.parameter("w", np.ones((3, 3), np.float32))
    following = ops.Add(ops.MatMul(x, w), state)
    model = core.compile_model(
        sg.Graph([x, state], [following], "recurrent"), "HETERO:A,B", {"FALLBACK_FAILURES": 1}
    )
    value, wanted = np.zeros_like(X), np.zeros_like(X)
    weight = np.ones((3, 3), np.float32)
    for turn in range(6):
        a.error = RuntimeError("driver") if turn in (2, 3) else None
        weight = weight + turn
        model.parameters["w"].assign(weight)
        value = model(X, value)[0]
        wanted = X @ weight + wanted
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert (a.runs, b.runs) == (3, 4)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_results_that_are_not_finite_count_if_asked_for(poison: float, caplog: Any) -> None:
    core, (a, b) = moody("A", "B")
    graph = relu()
    trusting = core.compile_model(graph, "HETERO:A,B")
    model = core.compile_model(
        graph, "HETERO:A,B", {"FALLBACK_CHECK": True, "FALLBACK_FAILURES": 2}
    )
    check(model, graph)
    bad = X.copy()
    bad[0, 0] = poison
    np.testing.assert_array_equal(model(bad)[0], np.maximum(bad, 0))
    assert model.fallbacks == {}, "the reference gives them, too"
    a.poison = poison
    assert not np.isfinite(trusting(X)[0]).any()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            check(model, graph)
    assert model.execution_devices == ["B"]
    assert b.runs == 1
    assert caplog.text.count("NaN or Inf where the reference has none") == 1


class Picky(sg.SubgraphOp):
    """Computes its nodes' Relu; raises when told to."""

    error: Exception | None = None
    runs = 0

    def forward(self, inputs: list[Any]) -> list[Array]:
        type(self).runs += 1
        if Picky.error is not None:
            raise Picky.error
        return [np.maximum(inputs[0], 0)]


class PickyProperty(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=Picky(subgraph), name=f"picky{subgraph_id}")


def picky() -> tuple[sg.Graph, sg.Graph]:
    x = sg.input("x", ("N", 3))
    graph = sg.Graph([x], [ops.Neg(ops.Relu(x, name="relu"), name="neg")], "net")
    return graph, sg.optimize_for(graph, PickyProperty())


@pytest.mark.parametrize(
    "device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE", "HETERO:CPU", "MULTI:CPU", "AUTO"]
)
def test_a_propertys_region_falls_back(
    device: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    graph, cut = picky()
    model: Any = sg.Core().compile_model(cut, device)
    if hasattr(model, "ready"):  # AUTO: its models for CPU and for a better device count apart
        assert model.ready.wait(60)
    assert "Picky" in model.execution_devices
    monkeypatch.setattr(Picky, "runs", 0)
    monkeypatch.setattr(Picky, "error", RuntimeError("no driver"))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            check(model, graph)
    assert Picky.runs == 3, "the breaker has opened"
    assert caplog.text.count("no driver") == 1
    assert "Picky" not in model.execution_devices


def test_models_of_one_cut_graph_have_breakers_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, cut = picky()
    core = sg.Core()
    model = core.compile_model(cut, "CPU", {"FALLBACK_FAILURES": 1})
    strict = core.compile_model(cut, "REFERENCE", {"RUNTIME_FALLBACK": False})
    with monkeypatch.context() as patch:
        patch.setattr(Picky, "error", RuntimeError("no driver"))
        check(model, graph)
        with pytest.raises(sg.DeviceError, match=r"Picky\.forward: RuntimeError: no driver"):
            strict(X)
    check(strict, graph)
    assert list(model.fallbacks) == ["picky0"]
    assert strict.fallbacks == {}


def test_an_op_with_types_of_its_own_has_no_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """The inner graph gives other shapes than the op, which nodes behind it count on."""
    _, cut = picky()
    monkeypatch.setattr(Picky, "infer_types", lambda self, inputs: [inputs[0]])
    model = sg.Core().compile_model(cut, "CPU")
    monkeypatch.setattr(Picky, "error", RuntimeError("no driver"))
    with pytest.raises(sg.DeviceError, match="no driver"):
        model(X)


def test_multi_lists_the_devices_that_are_left() -> None:
    core, (a, _) = moody("A", "B")
    model = core.compile_model(seven(), "MULTI:A,B")
    assert model.execution_devices == ["A", "B"]
    a.error = RuntimeError("driver")
    check(model, seven())
    assert model.execution_devices == ["B"]
    assert model.get_property("EXECUTION_DEVICES") == ["B"]


def test_requests_side_by_side_share_the_breaker() -> None:
    core, (a, _) = moody("A", "B")
    model = core.compile_model(seven(), "HETERO:A,B", {"FALLBACK_FAILURES": 2})
    a.error = RuntimeError("driver")
    threads = [threading.Thread(target=check, args=(model, seven())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert model.execution_devices == ["B"]
    tried = a.runs
    check(model, seven())
    assert a.runs == tried


class Writing(sg.SubgraphOp):
    """Writes to an input, by the way given, and fails afterwards."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        item = inputs[0]
        for array in item if isinstance(item, list) else [item]:
            array[...] = 9
        raise ValueError("after writing")


class WritingProperty(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Tanh", "ConcatFromSequence"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=Writing(subgraph))


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE"])
@pytest.mark.parametrize("kind", ["input", "between", "sequence"])
def test_an_op_that_writes_to_its_inputs_changes_no_result(device: str, kind: str) -> None:
    """The caller's array, values that other nodes read, and the inputs of the repeated run."""
    x = sg.input("x", (2, 2), "float32")
    h = ops.Sigmoid(x) if kind == "between" else x
    t = (
        ops.ConcatFromSequence(ops.SequenceConstruct(x, x), axis=0)
        if kind == "sequence"
        else ops.Tanh(h)
    )
    graph = sg.Graph([x], [t, ops.Add(h, x), h])
    array = np.full((2, 2), 0.25, np.float32)
    want = list(sg.compile_model(graph, "REFERENCE")([array]).values())
    graph.attrs["subgraph_property"] = WritingProperty()
    model = sg.compile_model(sg.passes.apply_pass(graph, "PartitionGraph"), device)
    for _ in range(2):
        found = model([array])
        for one, other in zip(found.values(), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    assert (array == 0.25).all()
    (report,) = model.get_property("FALLBACKS").values()
    assert "read-only" in report["cause"]
