"""MULTI and AUTO: requests spread over devices, a device chosen, devices lost."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import Session
from tests.support.simulated_device import Simulated, X, check, expected, seven, two_devices

devices = pytest.fixture(two_devices)


def test_multi_spreads_requests(devices: Any) -> None:
    core, a, b = devices
    a.takes = None
    model = core.compile_model(seven(), "MULTI:A,B")
    assert model.execution_devices == ["A", "B"]
    assert model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS") == 2
    a.pause = b.pause = 0.01
    pool = sg.InferQueue(model)
    got: list[Array] = []
    pool.set_callback(lambda request, _: got.append(request.results[0]))
    for _ in range(10):
        pool.start_async([X])
    pool.wait_all()
    assert a.runs >= 3
    assert b.runs >= 3
    assert a.runs + b.runs == 10
    for each in got:
        np.testing.assert_array_equal(each, expected(seven())[0])


def test_multi_goes_on_without_a_lost_device(devices: Any, caplog: Any) -> None:
    core, a, b = devices
    a.takes = None
    model = core.compile_model(seven(), "MULTI:A,B")
    requests = [model.create_infer_request() for _ in range(4)]
    a.lost = True
    with caplog.at_level(logging.WARNING):
        for request in requests:
            np.testing.assert_array_equal(request.infer(X)[0], expected(seven())[0])
    assert caplog.text.count("goes on without device A") == 1
    b.lost = True
    with pytest.raises(sg.DeviceError, match="device lost"):
        requests[0].infer(X)


def test_what_a_request_held_on_a_lost_device_is_freed(
    devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Records that pytest keeps hold the error, and so the frames that raised it.
    monkeypatch.setattr(logging.getLogger("subgraph"), "disabled", True)
    core, a, _ = devices
    a.takes = None
    request = core.compile_model(seven(), "MULTI:A,B").create_infer_request()
    request.infer(X)

    def held() -> set[str]:
        gc.collect()
        # By type: a proxy whose object is gone has no class.
        sessions = [found for found in gc.get_objects() if issubclass(type(found), Session)]
        return {session.op.device for session in sessions if session.op.device in ("A", "B")}

    assert held() == {"A"}
    a.lost = True
    request.infer(X)
    assert held() == {"B"}


def test_multi_starts_without_a_device_that_cannot(devices: Any, caplog: Any) -> None:
    core, _, b = devices
    with caplog.at_level(logging.WARNING):
        model = core.compile_model(seven(), "MULTI:A,B")
    assert model.execution_devices == ["B"]
    assert "MULTI goes on without a device: A" in caplog.text
    b.takes = {"Relu"}
    with pytest.raises(sg.DeviceError, match="no device of MULTI can run 'seven'"):
        core.compile_model(seven(), "MULTI:A,B")


def test_auto_takes_the_first_candidate_that_can(devices: Any) -> None:
    core, _, _ = devices
    assert core.compile_model(seven(), "AUTO:A,B").device == "B"
    assert core.compile_model(seven(), "AUTO:B,A").device == "B"
    with pytest.raises(sg.DeviceError, match="no device can run 'seven'"):
        core.compile_model(seven(), "AUTO:A")
    check(core.compile_model(seven()), seven())


@pytest.mark.parametrize("choice", [{}, {"MEASURE": True}])
def test_auto_repeats_a_failed_run_on_the_next_candidate(devices: Any, choice: Any) -> None:
    core, a, b = devices
    a.takes = None
    b.pause = 0.02
    model = core.compile_model(seven(), "AUTO:A,B", {**choice, "FALLBACK_FAILURES": 2})
    assert model.execution_devices == ["A"]
    a.lost = True
    for _ in range(2):
        np.testing.assert_array_equal(model(X)[0], expected(seven())[0])
    assert model.execution_devices == ["B"]
    (failures,) = model.get_property("FALLBACKS").values()
    assert failures["cause"] == "device lost"
    alone = core.compile_model(seven(), "AUTO:A,B", {"RUNTIME_FALLBACK": False})
    with pytest.raises(sg.DeviceError, match="device lost"):
        alone(X)


class Backed(Simulated):
    fallback = ("REFERENCE",)


@pytest.mark.parametrize("device", ["AUTO:B,CPU", "BATCH:B(4)"])
def test_a_model_that_another_one_runs_reports_its_failures(device: str) -> None:
    core, backed = sg.Core(), Backed()
    core.register_device("B", backed)
    if "CPU" not in core.available_devices:
        core.register_device("CPU", Simulated())
    x = sg.input("x", ("N", 3))
    graph = sg.Graph([x], [ops.Tanh(x)], "net")
    model: Any = core.compile_model(graph, device, {"FALLBACK_FAILURES": 2})
    if device.startswith("AUTO"):
        assert model.ready.wait(20)
    assert model.execution_devices == ["B"]
    assert model.get_property("FALLBACKS") == {}
    backed.lost = True
    for _ in range(2):
        check(model, graph)
    (failures,) = model.get_property("FALLBACKS").values()
    assert failures["cause"] == "device lost"
    assert model.get_property("EXECUTION_DEVICES") == failures["runs_on"] == ["REFERENCE"]


@pytest.mark.parametrize("device", ["AUTO:A,CPU", "MULTI:CPU,REFERENCE", "BATCH:CPU(4)"])
def test_a_model_that_another_one_runs_reports_its_strategies(device: str) -> None:
    core = sg.Core()
    core.register_device("A", Simulated({"NoOperator"}))
    x = sg.input("x", ("N", 3))
    model: Any = core.compile_model(sg.Graph([x], [ops.Tanh(x)], "net"), device)
    model(X)
    ((region, report),) = model.get_property("REGION_STRATEGIES").items()
    assert region.rpartition("/")[2] == "net"
    assert sum(report["chosen"].values())


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("-CPU", "B"), ("-A", "CPU"), ("-A,-B", "CPU"), ("A,B, -A", "B")],
)
def test_auto_leaves_out_devices(devices: Any, wanted: str, found: str) -> None:
    core = devices[0]
    others = [name for name in core.available_devices if name not in ("A", "B", "CPU")]
    left_out = [f"-{name.partition('.')[0]}" for name in others]
    model = core.compile_model(seven(), f"AUTO:{','.join([wanted, *left_out])}")
    assert model.execution_devices == [found]


def test_a_list_that_leaves_no_device_or_an_unknown_one_out_is_an_error() -> None:
    with pytest.raises(sg.ConfigError, match="'CPU,-CPU' excludes all devices"):
        sg.compile_model(seven(), "AUTO:CPU,-CPU")
    with pytest.raises(sg.DeviceError, match="no device named 'CPX'; did you mean 'CPU'"):
        sg.compile_model(seven(), "AUTO:-CPX")
    with pytest.raises(sg.ConfigError, match="AUTO needs devices"):
        sg.compile_model(seven(), "AUTO: ")


def test_auto_measures_on_demand(devices: Any) -> None:
    core, a, _ = devices
    a.takes = None
    a.pause = 0.01
    assert core.compile_model(seven(), "AUTO:A,B", {"MEASURE": True}).device == "B"


def test_auto_starts_on_cpu_while_another_compiles() -> None:
    core = sg.Core()
    gate = threading.Event()

    class Slow(Simulated):
        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            gate.wait(20)
            return super().create_op(graph, options)

    slow = Slow()
    core.register_device("SLOW", slow)
    if "CPU" not in core.available_devices:
        core.register_device("CPU", Simulated())
    model: Any = core.compile_model(seven(), "AUTO:SLOW,CPU")
    request = model.create_infer_request()
    check(model, seven())
    request.infer(X)
    assert slow.runs == 0
    gate.set()
    assert model.ready.wait(20)
    check(model, seven())
    request.infer(X)
    assert slow.runs == 3, "once before requests move there"
    assert model.execution_devices == ["SLOW"]


@pytest.mark.parametrize("first_run", [False, True])
def test_a_first_run_prepares_the_better_device(first_run: bool) -> None:
    """For the sizes of the last request, where those of the graph's inputs are not known."""
    core, gate = sg.Core(), threading.Event()
    seen: list[tuple[int, ...]] = []

    class Slow(Simulated):
        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            gate.wait(20)
            return Noting(graph)

    class Noting(sg.SubgraphOp):
        def forward(self, inputs: Sequence[Array]) -> list[Array]:
            seen.append(inputs[0].shape)
            return [inputs[0] + 1]

    core.register_device("SLOW", Slow())
    x = sg.input("x", ("N", 3))
    graph = sg.Graph([x], [ops.Add(x, np.float32(1))])
    model: Any = core.compile_model(graph, "AUTO:SLOW,CPU")
    request, data = model.create_infer_request(), np.ones((5, 3), np.float32)
    if first_run:
        np.testing.assert_array_equal(request.infer(data)[0], data + 1)
    gate.set()
    assert model.ready.wait(20)
    assert seen == ([(5, 3)] if first_run else [])
    np.testing.assert_array_equal(request.infer(data)[0], data + 1)
    assert model.execution_devices == ["SLOW"]


def test_auto_stays_on_cpu_when_the_other_fails(caplog: Any) -> None:
    core = sg.Core()
    bad = Simulated()
    bad.refuses_to_compile = True
    core.register_device("BAD", bad)
    if "CPU" not in core.available_devices:
        core.register_device("CPU", Simulated())
    with caplog.at_level(logging.WARNING):
        model: Any = core.compile_model(seven(), "AUTO:BAD,CPU")
        assert model.ready.wait(20)
    assert "AUTO stays on" in caplog.text
    check(model, seven())


@pytest.mark.parametrize("kind", [sg.DeviceError, RuntimeError])
def test_auto_keeps_a_request_on_cpu_for_which_the_other_has_no_memory(
    kind: type[Exception], caplog: Any
) -> None:
    core = sg.Core()
    gate = threading.Event()

    class FullOp(sg.DefaultSubgraphOp):
        def session(self) -> Session:
            raise kind("no memory for another request")

    class Full(Simulated):
        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            gate.wait(20)
            return FullOp(graph)

    core.register_device("FULL", Full())
    if "CPU" not in core.available_devices:
        core.register_device("CPU", Simulated())
    x = sg.input("x", ("N", 3))  # of unknown sizes, so that the new model is not run before
    graph = sg.Graph([x], [ops.Tanh(x)])
    model: Any = core.compile_model(graph, "AUTO:FULL,CPU", {"RUNTIME_FALLBACK": False})
    request = model.create_infer_request()
    gate.set()
    assert model.ready.wait(20)
    assert model.execution_devices == ["FULL"]
    for _ in range(2):
        np.testing.assert_allclose(request.infer(X)[0], np.tanh(X), rtol=1e-5)
    assert caplog.text.count("a request stays on its first device: ") == 1


class Cancelled(Simulated):
    """A device that notes cancelled sessions, and may be interrupted when it opens one."""

    def __init__(self) -> None:
        super().__init__()
        self.cancelled = 0
        self.interrupted = False
        self.during: Callable[[], None] = lambda: None

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        owner = self

        class Noting(Session):
            def __call__(self, inputs: Any, outputs: Any = None) -> Any:
                owner.during()
                return super().__call__(inputs, outputs)

            def cancel(self) -> None:
                owner.cancelled += 1

        class Op(sg.DefaultSubgraphOp):
            def forward(self, inputs: list[Any]) -> list[Any]:
                if owner.lost:
                    raise sg.DeviceError("device lost")
                return list(sg.DefaultSubgraphOp.session(self)(inputs))

            def session(self) -> Session:
                if owner.interrupted:
                    raise KeyboardInterrupt
                return Noting(self)

        return Op(graph)


def test_an_interrupted_move_to_another_device_can_still_be_cancelled() -> None:
    """The request went on with its old sessions, which were no longer cancelled."""
    core, first, second = sg.Core(), Cancelled(), Cancelled()
    core.register_device("A", first)
    core.register_device("B", second)
    model = core.compile_model(seven(), "MULTI:A,B")
    request = model.create_infer_request()
    first.lost = second.interrupted = True
    with pytest.raises(KeyboardInterrupt):
        request.infer(X)
    first.lost = False
    first.during = request.cancel
    with pytest.raises(sg.RequestCancelledError):
        request.infer(X)
    assert first.cancelled == 1


def test_an_interrupted_switch_of_auto_is_made_by_the_next_run() -> None:
    core, other, gate = sg.Core(), Cancelled(), threading.Event()
    first = Cancelled()
    compiled = other.create_op

    def create_op(graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        gate.wait(20)
        return compiled(graph, options)

    other.create_op = create_op  # type: ignore[method-assign]
    core.unregister_device("CPU")
    core.register_device("CPU", first)
    core.register_device("OTHER", other)
    model: Any = core.compile_model(seven(), "AUTO:OTHER,CPU", {"RUNTIME_FALLBACK": False})
    request = model.create_infer_request()
    other.interrupted = True
    gate.set()
    assert model.ready.wait(20)
    with pytest.raises(KeyboardInterrupt):
        request.infer(X)
    other.interrupted = False
    other.during = request.cancel
    with pytest.raises(sg.RequestCancelledError):
        request.infer(X)
    assert (first.cancelled, other.cancelled) == (0, 1)


def test_auto_does_without_a_cpu_that_cannot_compile() -> None:
    core = sg.Core()
    bad = Simulated()
    bad.refuses_to_compile = True
    core.unregister_device("CPU")
    core.register_device("CPU", bad)
    core.register_device("GOOD", Simulated())
    model = core.compile_model(seven(), "AUTO:GOOD,CPU")
    assert model.device == "GOOD"
    check(model, seven())
    with pytest.raises(sg.DeviceError, match=r"no device can run 'seven': CPU: .*does not build"):
        core.compile_model(seven(), "AUTO:CPU")
