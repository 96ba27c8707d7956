"""Devices that fail when a request is made, states that move with a region, breakers of MULTI."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.simulated_device import (
    Clock,
    Recorder,
    RecorderSession,
    Simulated,
    X,
    check,
    relu,
    seven,
)


class Closed(Simulated):
    """Opens no session while ``error`` is set."""

    error: Exception | None = None

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return ClosedOp(graph, self)


class ClosedOp(sg.DefaultSubgraphOp):
    def __init__(self, graph: sg.Graph, owner: Closed) -> None:
        super().__init__(graph)
        self.owner = owner

    def session(self) -> sg.Session:
        if self.owner.error is not None:
            raise self.owner.error
        return super().session()


class Backed(Closed):
    """Has REFERENCE behind it."""

    fallback = ("REFERENCE",)


def closed(kind: type[Closed] = Closed, *names: str) -> tuple[sg.Core, list[Closed]]:
    core = sg.Core()
    devices = [kind() for _ in names or ("A", "B")]
    for name, device in zip(names or ("A", "B"), devices, strict=True):
        core.register_device(name, device)
    return core, devices


@pytest.mark.parametrize("graph", [seven, relu], ids=["several nodes", "one node"])
@pytest.mark.parametrize("profiling", [False, True])
def test_a_session_that_cannot_be_opened_falls_back(
    graph: Any, profiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    core, (a, _) = closed()
    config = {"ENABLE_PROFILING": profiling, "FALLBACK_RETRY": 10}
    model = core.compile_model(graph(), "HETERO:A,B", config)
    a.error = RuntimeError("no memory on the card")
    requests = [model.create_infer_request() for _ in range(2)]
    for request in (*requests, *requests):
        request.infer(X)
        check(model, graph())
    (told,) = model.fallbacks.values()
    assert told["failures"] == 3
    assert told["cause"] == "no memory on the card"
    assert model.execution_devices == ["B"]
    clock.now += 11
    a.error = None
    for request in requests:
        request.infer(X)
    assert model.execution_devices == ["A"]
    assert not profiling or {entry.device for entry in requests[0].profile()} == {"A"}


@pytest.mark.parametrize("device", ["A", "AUTO:A", "MULTI:A", "HETERO:A,REFERENCE"])
def test_a_device_with_another_behind_it_opens_that(device: str) -> None:
    core, (a,) = closed(Backed, "A")
    model = core.compile_model(seven(), device, {"FALLBACK_FAILURES": 1})
    a.error = OSError(5, "pipe")
    request = model.create_infer_request()
    np.testing.assert_allclose(request.infer(X)[0], model(X)[0])
    check(model, seven())
    assert model.execution_devices == ["REFERENCE"]


def test_the_third_opens_where_two_cannot() -> None:
    core, (a, b, _) = closed(Closed, "A", "B", "C")
    model = core.compile_model(seven(), "HETERO:A,B,C", {"FALLBACK_FAILURES": 1})
    a.error = b.error = RuntimeError("gone")
    for _ in range(3):
        check(model, seven())
    assert model.execution_devices == ["C"]


@pytest.mark.parametrize("device", ["A", "HETERO:A", "HETERO:A,B", "MULTI:A,B"])
def test_without_another_the_error_of_the_session_stands(device: str) -> None:
    core, devices = closed()
    model = core.compile_model(relu(), device)
    for each in devices:
        each.error = RuntimeError("gone")
    with pytest.raises((sg.DeviceError, RuntimeError), match="gone"):
        model.create_infer_request().infer(X)
    strict = core.compile_model(relu(), device, {"RUNTIME_FALLBACK": False})
    devices[1].error = None
    with pytest.raises((sg.DeviceError, RuntimeError), match="gone"):
        strict.create_infer_request()


def test_multi_makes_requests_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    core, (a, _) = closed()
    model = core.compile_model(seven(), "MULTI:A,B", {"FALLBACK_RETRY": 10})
    a.error = RuntimeError("gone")
    request = model.create_infer_request()
    check(model, seven())
    np.testing.assert_allclose(request.infer(X)[0], model(X)[0])
    assert model.execution_devices == ["B"]
    assert model.fallbacks["A"]["cause"] == "gone"
    a.error = None
    clock.now += 11
    check(model, seven())
    assert model.execution_devices == ["A", "B"]


class Summing(Simulated):
    """Adds up what a request gives it, in a state; fails when told to."""

    keeps = True
    fails_at = 0  # number of a run that fails

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return SummingOp(graph, self)


class SummingOp(sg.SubgraphOp):
    def __init__(self, graph: sg.Graph, owner: Summing) -> None:
        super().__init__(graph)
        self.owner = owner

    def session(self) -> sg.Session:
        return SummingSession(self, self.owner) if self.owner.keeps else PlainSession(self)


class PlainSession(sg.Session):
    def __call__(self, inputs: Any, outputs: Any = None) -> Any:
        return [np.maximum(inputs[0], 0)]


class SummingSession(sg.Session):
    def __init__(self, op: sg.SubgraphOp, owner: Summing) -> None:
        super().__init__(op)
        self.owner = owner
        self.total: Array = np.zeros((2, 3), np.float32)

    def __call__(self, inputs: Any, outputs: Any = None) -> Any:
        self.owner.runs += 1
        if self.owner.lost or self.owner.runs == self.owner.fails_at:
            raise RuntimeError("driver")
        self.total = self.total + inputs[0]
        return [self.total]

    def states(self) -> dict[str, Array]:
        return {"total": self.total}

    def set_states(self, states: Mapping[str, Array]) -> None:
        self.total = states.get("total", np.zeros((2, 3), np.float32))


def summing() -> tuple[sg.Core, Summing, Summing]:
    core = sg.Core()
    a, b = Summing(), Summing()
    core.register_device("A", a)
    core.register_device("B", b)
    return core, a, b


def neg_relu() -> sg.Graph:
    x = sg.input("x", (2, 3))
    return sg.Graph([x], [ops.Relu(x, name="relu")], "one")


@pytest.mark.parametrize("device", ["HETERO:A,B", "MULTI:A,B"])
@pytest.mark.parametrize("profiling", [False, True])
def test_states_of_a_request_move_with_it(
    device: str, profiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    core, a, b = summing()
    failures = 1 if device.startswith("MULTI") else 2
    config = {"FALLBACK_FAILURES": failures, "FALLBACK_RETRY": 10, "ENABLE_PROFILING": profiling}
    model = core.compile_model(neg_relu(), device, config)
    one, two = model.create_infer_request(), model.create_infer_request()
    for turn in range(1, 9):
        a.lost = 3 <= turn <= 6
        clock.now += 11 if turn == 7 else 0
        np.testing.assert_allclose(one.infer(X)[0], turn * X, rtol=1e-6)
        np.testing.assert_allclose(two.infer(2 * X)[0], turn * 2 * X, rtol=1e-6)
    assert "A" in model.execution_devices
    assert a.runs > 4
    assert b.runs >= 8


def looped() -> sg.Graph:
    """Return a Loop whose body has one region, which takes what comes in three times."""
    x = sg.input("x", (2, 3))
    number, going = sg.input("number", (), dtype="int64"), sg.input("going", (), dtype="bool")
    before = sg.input("before", (2, 3))
    total = ops.Relu(sg.capture(x), name="relu")
    body = sg.Graph([number, going, before], [ops.Identity(going), total], "body")
    turns = sg.parameter("turns", np.array(3))
    return sg.Graph([x], [ops.Loop(turns, None, x, body=body, name="loop")], "looped")


def branched() -> sg.Graph:
    """Return an If with a region in the branch that is taken."""
    x = sg.input("x", (2, 3))
    taken = sg.Graph([], [ops.Relu(sg.capture(x), name="relu")], "taken")
    other = sg.Graph([], [ops.Identity(sg.capture(x))], "other")
    flag = ops.Greater(ops.ReduceMax(x, keepdims=0), np.float32(0))
    return sg.Graph([x], [ops.If(flag, then_branch=taken, else_branch=other)], "branched")


@pytest.mark.parametrize("device", ["HETERO:A,B,REFERENCE", "MULTI:C,D"])
@pytest.mark.parametrize(("graph", "runs"), [(looped, 3), (branched, 1)])
@pytest.mark.parametrize("profiling", [False, True])
def test_states_of_regions_in_bodies_move(
    device: str, graph: Any, runs: int, profiling: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C and D run bodies by the default executor, and the region inside by an op that sums."""
    clock = Clock(monkeypatch)
    core, a, b = summing()
    a.takes = b.takes = {"Relu"}
    for name, owner in (("C", a), ("D", b)):
        core.register_device(name, Bodies(owner))
    failures = 1 if device.startswith("MULTI") else 2
    config = {"FALLBACK_FAILURES": failures, "FALLBACK_RETRY": 10, "ENABLE_PROFILING": profiling}
    model = core.compile_model(graph(), device, config)
    one, two = model.create_infer_request(), model.create_infer_request()
    for turn in range(1, 9):
        a.lost = 4 <= turn <= 6
        a.fails_at = a.runs + 2 if turn == 3 else 0  # where there are three: in their middle
        clock.now += 11 if turn == 7 else 0
        np.testing.assert_allclose(one.infer(X)[0], runs * turn * X, rtol=1e-6)
        np.testing.assert_allclose(two.infer(2 * X)[0], runs * turn * 2 * X, rtol=1e-6)
        (state,) = one.query_state()
        assert state.name.endswith("/total")
        np.testing.assert_allclose(state.state, runs * turn * X, rtol=1e-6)
    assert len(one.query_state()) == 1
    assert a.runs > 2 * runs
    assert b.runs > 4 * runs


class Bodies(Simulated):
    """Runs graphs by the default executor, with the region inside by another device's op."""

    def __init__(self, owner: Summing) -> None:
        super().__init__()
        self.owner = owner

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        cut = sg.optimize_for(graph, sg.ContainOpSelector({"Relu"}))
        for level in cut.levels():
            for node in level.nodes:
                if node.subgraph is not None:
                    node.op = SummingOp(node.subgraph, self.owner)
                    node.op.device = self.name
        return sg.DefaultSubgraphOp(cut)


def test_one_failure_in_a_body_is_counted() -> None:
    """Also where the region could make the run if it was asked once more."""
    core, a, b = summing()
    a.takes = b.takes = {"Relu"}
    model = core.compile_model(looped(), "HETERO:A,B,REFERENCE")
    request = model.create_infer_request()
    request.infer(X)
    a.fails_at = a.runs + 1
    np.testing.assert_allclose(request.infer(X)[0], 6 * X, rtol=1e-6)
    ((_, told),) = model.fallbacks.items()
    assert told["failures"] == 1
    assert b.runs == 1


def test_states_move_through_a_request_that_began_elsewhere() -> None:
    core, a, _ = summing()
    model = core.compile_model(neg_relu(), "HETERO:A,B", {"FALLBACK_FAILURES": 1})
    a.lost = True
    check_first = model.create_infer_request()
    check_first.infer(X)
    assert model.execution_devices == ["B"]
    request = model.create_infer_request()  # made while the breaker is open
    for turn in range(1, 4):
        np.testing.assert_allclose(request.infer(X)[0], turn * X, rtol=1e-6)


@pytest.mark.parametrize("device", ["HETERO:A,B", "MULTI:A,B"])
def test_states_that_the_next_device_does_not_keep_are_not_lost_silently(device: str) -> None:
    core, a, b = summing()
    b.keeps = False
    model = core.compile_model(neg_relu(), device)
    request = model.create_infer_request()
    request.infer(X)
    a.lost = True
    with pytest.raises(sg.DeviceError, match=r"has no states.*'total'") as caught:
        request.infer(X)
    assert "driver" in str(caught.value) + "".join(caught.value.__notes__)
    assert model.fallbacks == {}
    a.lost = False
    np.testing.assert_allclose(request.infer(X)[0], 2 * X)


def test_states_are_no_matter_of_the_check() -> None:
    core, _, _ = summing()
    model = core.compile_model(neg_relu(), "HETERO:A,B", {"FALLBACK_CHECK": True})
    request = model.create_infer_request()
    request.infer(np.full((2, 3), np.inf, np.float32))
    assert not np.isfinite(request.infer(-X)[0]).any()
    assert model.fallbacks == {}


class Poisoned(Simulated):
    """Gives NaN, in place of results, while ``poison`` is set."""

    poison = False

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return PoisonedOp(graph, self)


class PoisonedOp(sg.DefaultSubgraphOp):
    def __init__(self, graph: sg.Graph, owner: Poisoned) -> None:
        super().__init__(graph)
        self.owner = owner

    def session(self) -> sg.Session:
        return PoisonedSession(self, super().session())


class PoisonedSession(sg.Session):
    def __init__(self, op: PoisonedOp, inner: sg.Session) -> None:
        super().__init__(op)
        self.inner, self.owner = inner, op.owner

    def __call__(self, inputs: Any, outputs: Any = None) -> Any:
        self.owner.runs += 1
        results = self.inner(inputs, outputs)
        return [np.full_like(each, np.nan) for each in results] if self.owner.poison else results


def test_multi_checks_results_if_asked_for(caplog: Any) -> None:
    core = sg.Core()
    a, b = Poisoned(), Poisoned()
    core.register_device("A", a)
    core.register_device("B", b)
    trusting = core.compile_model(seven(), "MULTI:A,B")
    model = core.compile_model(seven(), "MULTI:A,B", {"FALLBACK_CHECK": True})
    a.poison = True
    assert np.isnan(trusting(X)[0]).all()
    request = model.create_infer_request()
    out = np.empty((2, 3), np.float32)
    request.set_output(0, out)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert request.infer(X)[0] is out
            np.testing.assert_allclose(out, model(X)[0])
            check(model, seven())
    assert model.execution_devices == ["B"]
    assert a.runs == 2, "that is, one of each model"
    assert caplog.text.count("NaN or Inf where the reference has none") == 1
    bad = np.full_like(X, np.nan)
    b_runs = b.runs
    assert np.isnan(model(bad)[0]).all()
    assert model.execution_devices == ["B"], "the reference gives NaN, too"
    assert b.runs == b_runs + 1


def test_multi_tries_a_failed_device_again(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    clock = Clock(monkeypatch)
    core = sg.Core()
    a, b = Simulated(), Simulated()
    core.register_device("A", a)
    core.register_device("B", b)
    model = core.compile_model(seven(), "MULTI:A,B", {"FALLBACK_RETRY": 10})
    requests = [model.create_infer_request() for _ in range(4)]

    def run() -> tuple[int, int]:
        before = a.runs, b.runs
        for request in requests:
            request.infer(X)
        return a.runs - before[0], b.runs - before[1]

    assert run() == (2, 2)
    a.lost = True
    with caplog.at_level(logging.WARNING):
        assert [run(), run()] == [(1, 4), (0, 4)]
        assert model.execution_devices == ["B"]
        assert model.get_property("FALLBACKS")["A"]["open"]
        clock.now += 11
        assert [run(), run()] == [(1, 4), (0, 4)], "one run tries again, and fails"
        clock.now += 11
        a.lost = False
        assert run()[0] >= 1
        assert run() == (2, 2), "requests spread anew"
    assert model.execution_devices == ["A", "B"]
    assert caplog.text.count("MULTI goes on without device A") == 1
    assert caplog.text.count("MULTI uses device A again") == 1


def test_multi_counts_failures_as_its_option_says() -> None:
    core = sg.Core()
    a, b = Simulated(), Simulated()
    core.register_device("A", a)
    core.register_device("B", b)
    model = core.compile_model(seven(), "MULTI:A,B", {"FALLBACK_FAILURES": 3})
    a.refused_rows = 2
    for _ in range(5):
        check(model, seven())
    assert model.execution_devices == ["A", "B"], "a device may refuse some inputs"
    a.refused_rows, a.lost = 0, True
    before, failures = model.fallbacks["A"]["failures"], 0
    while failures < 3:
        assert model.execution_devices == ["A", "B"]
        requests = [model.create_infer_request() for _ in range(2)]  # one at least is A's
        for request in requests:
            request.infer(X)
        failures = model.fallbacks["A"]["failures"] - before
    assert model.execution_devices == ["B"]
    strict = core.compile_model(seven(), "MULTI:A,B", {"RUNTIME_FALLBACK": False})
    with pytest.raises(sg.DeviceError, match="device lost"):
        strict(X)


class Repeating(Simulated):
    """Its sessions repeat their last run."""

    fallback = ("REFERENCE",)

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return RepeatingOp(graph, self)


class RepeatingOp(Recorder):
    def session(self) -> sg.Session:
        return RepeatingSession(self)


class RepeatingSession(RecorderSession):
    def run_inputs(self) -> Any:
        return self.__call__

    def repeat(self) -> Any:
        return self.__call__


def test_a_run_is_not_repeated_on_a_device_that_has_failed() -> None:
    core, device = sg.Core(), Repeating()
    core.register_device("REPEATING", device)
    x = sg.input("x", (2, 2))
    graph = sg.Graph([x], [ops.Relu(x)], "net")
    config = {"FALLBACK_FAILURES": 2, "FALLBACK_RETRY": 0}
    model = core.compile_model(graph, "REPEATING", config)
    given = np.array([[-1, 2], [3, -4]], np.float32)
    assert model(given)[0].tolist() == [[0, 2], [3, 0]]
    device.lost, device.runs = True, 0
    for _ in range(5):
        assert model(given)[0].tolist() == [[0, 2], [3, 0]]
    # The repeated run and the whole run of the first call, and that of the second call.
    assert device.runs == 3
    assert model.execution_devices == ["REFERENCE"]
