"""Regions of one request that do not depend on each other run at the same time."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.plugins.cpu import CpuDevice
from subgraph.graph.types import Array
from subgraph.runtime import step_schedule
from subgraph.runtime.executor_plan import Plan
from subgraph.runtime.step_schedule import Work, make_schedule
from tests.support.simulated_device import Simulated, expected

X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)


class Accelerator(sg.Device):
    """A device that takes what its affinity says, and calls back before each run of a region."""

    def __init__(self) -> None:
        self.inside = 0
        self.most_inside = 0
        self.meeting: threading.Barrier | None = None
        self.pause = 0.0
        self.error: Exception | None = None
        self.entered = threading.Event()
        self.lock = threading.Lock()

    def supports(self, node: sg.Node, options: Any) -> bool:
        return True

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return Region(graph, self)

    def run(self) -> None:
        """Stand for the time that the hardware takes."""
        with self.lock:
            self.inside += 1
            self.most_inside = max(self.inside, self.most_inside)
        try:
            meeting = self.meeting
            self.entered.set()
            if meeting is not None:
                meeting.wait(20)
            if self.error is not None:
                raise self.error
            time.sleep(self.pause)
        finally:
            with self.lock:
                self.inside -= 1


class Region(sg.DefaultSubgraphOp):
    def __init__(self, graph: sg.Graph, owner: Accelerator) -> None:
        super().__init__(graph)
        self.owner = owner

    def session(self) -> sg.Session:
        return RegionSession(self)


class RegionSession(sg.Session):
    def __init__(self, op: Region) -> None:
        super().__init__(op)
        self.owner = op.owner
        self.inner = sg.DefaultSubgraphOp.session(op)

    def __call__(self, inputs: Any, outputs: Any = None) -> Any:
        self.owner.run()
        return self.inner(inputs, outputs)


def on(device: str, value: Any) -> sg.Value:
    """Return a value whose node has this affinity."""
    assert isinstance(value, sg.Value)
    assert value.producer is not None
    value.producer.metadata = {"affinity": device}
    return value


def accelerators(*names: str) -> tuple[sg.Core, list[Accelerator]]:
    core = sg.Core()
    devices = [Accelerator() for _ in names]
    for name, device in zip(names, devices, strict=True):
        core.register_device(name, device)
    return core, devices


def two_parts() -> sg.Graph:
    """Return Relu on A beside Neg on B."""
    x = sg.input("x", ("N", 3))
    left, right = on("A", ops.Relu(x, name="left")), on("B", ops.Neg(x, name="right"))
    return sg.Graph([x], [left, right], "parts")


@pytest.fixture
def meeting() -> Iterator[tuple[sg.CompiledModel, Accelerator, Accelerator]]:
    """A model whose two parts wait for each other: they can only run at the same time."""
    core, (a, b) = accelerators("A", "B")
    a.meeting = b.meeting = threading.Barrier(2)
    model = core.compile_model(two_parts(), "HETERO:A,B", {"RUNTIME_FALLBACK": False})
    yield model, a, b
    a.meeting.abort()


def test_parts_on_two_devices_overlap(
    meeting: tuple[sg.CompiledModel, Accelerator, Accelerator],
) -> None:
    model, _, _ = meeting
    wanted = expected(two_parts(), X)

    def check(results: Any) -> None:
        for got, want in zip(results.values(), wanted, strict=True):
            np.testing.assert_array_equal(got, want)

    check(model(X))
    request = model.create_infer_request()
    check(request.infer(X))
    request.start_async(X)
    check(request.wait(20))
    assert [entry.node for entry in request.profile()] == ["A_0", "B_1"]


def test_they_take_the_time_of_the_longer_one() -> None:
    core, devices = accelerators("A", "B")
    model = core.compile_model(two_parts(), "HETERO:A,B")
    for device in devices:
        device.pause = 0.15
    start = time.perf_counter()
    model(X)
    assert time.perf_counter() - start < 0.28


def test_parallel_regions_can_be_switched_off() -> None:
    core, devices = accelerators("A", "B")
    lock = threading.Lock()
    for device in devices:
        device.lock = lock
        device.pause = 0.01
    model = core.compile_model(two_parts(), "HETERO:A,B", {"PARALLEL_REGIONS": False})
    seen: list[int] = []
    thread = threading.get_ident
    for device in devices:
        device.run = lambda: seen.append(thread())  # type: ignore[method-assign]
    model(X)
    assert seen == [thread()] * 2


def same_device() -> sg.Graph:
    """Return two regions of A that a step of B joins; nothing else is between them."""
    x = sg.input("x", ("N", 3))
    left, right = on("A", ops.Relu(x, name="left")), on("A", ops.Neg(x, name="right"))
    return sg.Graph([x], [on("B", ops.Add(left, right, name="sum"))], "same")


def test_regions_of_one_device_overlap_only_if_it_says_so() -> None:
    core, (a, _) = accelerators("A", "B")
    a.pause = 0.01
    model = core.compile_model(same_device(), "HETERO:A,B")
    assert Plan(model.graph).schedule is None
    model(X)
    assert a.most_inside == 1
    assert core.get_property("A", "CONCURRENT_REGIONS") is False

    class Several(Accelerator):
        concurrent_regions = True

    several = Several()
    several.meeting = threading.Barrier(2)
    core.register_device("SEVERAL", several)
    graph = same_device()
    for name in ("left", "right"):
        graph.node(name).metadata = {"affinity": "SEVERAL"}
    model = core.compile_model(graph, "HETERO:SEVERAL,B", {"RUNTIME_FALLBACK": False})
    np.testing.assert_array_equal(model(X)[0], expected(graph, X)[0])
    assert several.most_inside == 2
    assert core.get_property("SEVERAL", "CONCURRENT_REGIONS") is True


def test_ops_of_properties_overlap_by_their_device() -> None:
    together = threading.Barrier(2)

    class Meeting(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            together.wait(20)
            return [inputs[0] + np.float32(1)]

    class First(Meeting):
        device = "FIRST"

    class Second(Meeting):
        device = "SECOND"

    class Free(Meeting):
        concurrent = True

    x = sg.input("x", (2, 3))
    for kinds in ((First, Second), (Free, Free), (First, Free)):
        outputs: list[sg.Value] = []
        for kind in kinds:
            inner = sg.input("ix", (2, 3))
            graph = sg.Graph([inner], [ops.Relu(inner)])
            outputs += sg.subgraph_node(graph, kind(graph), inputs=[x]).outputs
        model = sg.CompiledModel(sg.Graph([x], outputs), device="TEST")
        for result in model(X).values():
            np.testing.assert_array_equal(result, X + 1)


@pytest.mark.parametrize("failing", ["A", "B"])
def test_a_part_that_fails_is_named_and_the_other_is_awaited(failing: str) -> None:
    core, (a, b) = accelerators("A", "B")
    bad, good = (a, b) if failing == "A" else (b, a)
    model = core.compile_model(two_parts(), "HETERO:A,B", {"RUNTIME_FALLBACK": False})
    request = model.create_infer_request()
    bad.error, good.pause = ValueError("broken"), 0.1
    with pytest.raises(sg.DeviceError, match="broken"):
        request.infer(X)
    assert good.inside == 0, "the run has ended while a part of it still ran"
    assert good.most_inside == 1
    both = good.error = ValueError("broken, too")
    with pytest.raises(sg.DeviceError, match="broken") as caught:
        request.infer(X)
    assert failing == "B" or any(str(both) in note for note in caught.value.__notes__)
    bad.error = good.error = None
    for got, want in zip(request.infer(X).values(), expected(two_parts(), X), strict=True):
        np.testing.assert_array_equal(got, want)


def test_another_device_takes_over_a_part() -> None:
    core, (a, b) = accelerators("A", "B")
    config = {"ENABLE_PROFILING": True, "FALLBACK_FAILURES": 2, "FALLBACK_RETRY": 0}
    model = core.compile_model(two_parts(), "HETERO:A,B", config)
    request = model.create_infer_request()
    b.error, a.pause = RuntimeError("out of order"), 0.02
    for _ in range(4):
        for got, want in zip(request.infer(X).values(), expected(two_parts(), X), strict=True):
            np.testing.assert_array_equal(got, want)
    profile = request.profile()
    assert [entry.node for entry in profile] == ["A_0", "B_1"]
    assert profile[0].fallback == ""
    assert "out of order" in profile[1].fallback
    assert list(model.get_property("FALLBACKS")) == ["B_1"]
    assert model.get_property("FALLBACKS")["B_1"]["open"]


def test_cancel_ends_both_parts() -> None:
    core, (a, b) = accelerators("A", "B")
    x = sg.input("x", ("N", 3))
    left = on("B", ops.Relu(on("A", ops.Relu(x))))
    right = on("A", ops.Neg(on("B", ops.Neg(x))))
    model = core.compile_model(sg.Graph([x], [left, right]), "HETERO:A,B")
    request = model.create_infer_request()
    a.meeting = b.meeting = threading.Barrier(3)
    request.start_async(X)
    assert a.entered.wait(20)
    assert b.entered.wait(20)
    request.cancel()
    a.meeting.wait(20)
    with pytest.raises(sg.RequestCancelledError):
        request.wait(20)
    assert a.most_inside == b.most_inside == 1
    a.meeting = b.meeting = None
    request.start_async(X)
    results = request.wait(20)
    assert results is not None
    np.testing.assert_array_equal(results[0], np.maximum(X, 0))


def random_graph(seed: int, homes: list[str], weighted: bool = False) -> sg.Graph:
    """Return a random graph whose nodes have random affinities, with all its ends as outputs."""
    rng = random.Random(seed)
    x = sg.input("x", ("N", 3))
    values: list[Any] = [x]
    for number in range(rng.randint(4, 14)):
        one, two = rng.choice(values[-5:]), rng.choice(values[-5:])
        kind = rng.randrange(4 if weighted else 3)
        if kind == 0:
            made = ops.Add(one, two)
        elif kind == 1:
            made = ops.Mul(ops.Tanh(one), two)
        elif kind == 2:
            made = ops.Relu(one)
        else:
            made = ops.MatMul(one, sg.parameter(f"w{number}", np.eye(3, dtype=np.float32)[::-1]))
        values.append(made)
    ends = [value for value in values[1:] if not value.consumers]
    graph = sg.Graph([x], ends, f"random{seed}")
    for node in graph.nodes:
        node.metadata = {"affinity": rng.choice(homes)}
    return graph


@pytest.mark.parametrize("config", [{}, {"ENABLE_PROFILING": True}, {"PIPELINE": False}])
def test_random_graphs_on_three_devices(config: dict[str, Any]) -> None:
    core, devices = accelerators("A", "B", "C")
    parallel = 0
    for seed in range(12):
        graph = random_graph(seed, ["A", "B", "C", "REFERENCE"])
        wanted = expected(graph, X)
        model = core.compile_model(graph, "HETERO:A,B,C,REFERENCE", config)
        parallel += Plan(model.graph).schedule is not None
        request = model.create_infer_request()
        for run in range(4):
            for device in devices:
                device.pause = random.Random(seed + run).choice([0.0, 0.0, 0.0005])
            for results in (model(X), request.infer(X)):
                for got, want in zip(results.values(), wanted, strict=True):
                    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
        if config.get("ENABLE_PROFILING"):
            order = [node.name for node in model.graph.nodes]
            assert [entry.node for entry in request.profile()] == order
    assert parallel >= 4
    assert all(device.most_inside == 1 for device in devices)


class Sharing(sg.SubgraphOp):
    """Notes which of its sessions work in the memory of another one."""

    shared: list[tuple[str, str]]

    def session(self) -> sg.Session:
        return SharingSession(self)


class SharingSession(sg.Session):
    def share(self, other: sg.Session) -> None:
        assert isinstance(self.op, Sharing)
        self.op.shared.append((self.op.device, other.op.device))


@pytest.mark.parametrize("concurrent", [False, True])
def test_regions_that_may_overlap_are_not_told_to_share_memory(concurrent: bool) -> None:
    x = sg.input("x", (2, 3))
    outputs: list[sg.Value] = []
    shared: list[tuple[str, str]] = []
    for device in ("A", "B", "A", "B"):
        inner = sg.input("ix", (2, 3))
        graph = sg.Graph([inner], [ops.Relu(inner)])
        op = Sharing(graph)
        op.device, op.shared, op.concurrent = device, shared, concurrent
        outputs += sg.subgraph_node(graph, op, inputs=[x]).outputs
    sg.CompiledModel(sg.Graph([x], outputs), device="TEST").create_infer_request()
    assert shared == ([] if concurrent else [("A", "A"), ("B", "B")])


def test_cpu_regions_that_overlap() -> None:
    core = sg.Core()
    for name in ("CPU2", "CPU3"):
        core.register_device(name, CpuDevice)
    rng = np.random.default_rng(0)
    for seed in range(6):
        graph = random_graph(seed, ["CPU", "CPU2", "CPU3"], weighted=True)
        model = core.compile_model(graph, "HETERO:CPU,CPU2,CPU3")
        x = rng.standard_normal((2000, 3)).astype(np.float32)
        wanted = expected(graph, x)
        request = model.create_infer_request()
        for _ in range(5):
            for got, want in zip(request.infer(x).values(), wanted, strict=True):
                np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_run_sees_one_version_of_weights_in_all_threads() -> None:
    core, (a, b) = accelerators("A", "B")
    x = sg.input("x", (3,))
    w = sg.parameter("w", np.ones(3, np.float32))
    outputs = [on(home, ops.Mul(x, w)) for home in ("A", "B")]
    outputs = [on("B", ops.Mul(outputs[0], w)), on("A", ops.Mul(outputs[1], w))]
    model = core.compile_model(sg.Graph([x], outputs), "HETERO:A,B")
    request = model.create_infer_request()
    a.meeting = b.meeting = threading.Barrier(3)
    request.start_async(np.ones(3, np.float32))
    assert a.entered.wait(20)
    assert b.entered.wait(20)
    model.parameters["w"].assign(np.full(3, 2, np.float32))
    meeting, a.meeting, b.meeting = a.meeting, None, None
    meeting.wait(20)
    results = request.wait(20)
    assert results is not None
    assert [result.tolist() for result in results.values()] == [[1, 1, 1]] * 2
    assert [result.tolist() for result in model(np.ones(3, np.float32)).values()] == [[4, 4, 4]] * 2


def test_requests_side_by_side_use_each_device_in_turns() -> None:
    core, (a, b) = accelerators("A", "B")
    a.pause = b.pause = 0.002
    x = sg.input("x", ("N", 3))
    left = on("B", ops.Relu(on("A", ops.Relu(x))))
    right = on("A", ops.Neg(on("B", ops.Neg(x))))
    graph = sg.Graph([x], [on("A", ops.Add(left, right))])
    model = core.compile_model(graph, "HETERO:A,B")
    requests = [model.create_infer_request() for _ in range(4)]
    wanted = expected(graph, X)[0]

    def infer(request: sg.InferRequest) -> Array:
        result: Array = request.infer(X)[0]
        return result

    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(infer, requests):
            np.testing.assert_array_equal(result, wanted)
    for _ in range(4):
        for request in requests:
            request.start_async(X)
        for request in requests:
            results = request.wait(20)
            assert results is not None
            np.testing.assert_array_equal(results[0], wanted)
    assert a.most_inside == b.most_inside == 1


def test_without_threads_the_parts_run_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core, (a, b) = accelerators("A", "B")
    model = core.compile_model(two_parts(), "HETERO:A,B")
    monkeypatch.setattr("subgraph.runtime.step_schedule._threads", NoThreads())
    for got, want in zip(model(X).values(), expected(two_parts(), X), strict=True):
        np.testing.assert_array_equal(got, want)
    assert a.most_inside == b.most_inside == 1


class NoThreads:
    def submit(self, task: Any) -> None:
        raise sg.DeviceError("no thread can be started")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_parts_overlap_in_a_forked_child() -> None:
    code = """
import os, sys, threading, time, warnings
import numpy as np, subgraph as sg
from subgraph import ops
warnings.simplefilter("ignore")
class Meeting(sg.SubgraphOp):
    def forward(self, inputs):
        together.wait(20)
        time.sleep(0.02)  # long enough that running side by side is worth a thread
        return [inputs[0] + np.float32(1)]
x = sg.input("x", (2,))
outputs = []
for device in ("A", "B"):
    inner = sg.input("ix", (2,))
    graph = sg.Graph([inner], [ops.Relu(inner)])
    op = Meeting(graph)
    op.device = device
    outputs += sg.subgraph_node(graph, op, inputs=[x]).outputs
model = sg.CompiledModel(sg.Graph([x], outputs))
def run():
    global together
    together = threading.Barrier(2)
    for result in model(np.ones(2, np.float32)).values():
        assert result.tolist() == [2, 2]
run()
child = os.fork()
run()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("fine")
else:
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "fine", done.stderr


def test_short_parts_stay_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_schedule, "HANDOVER_SECONDS", 0.1)  # on a busy machine runs take ms
    core, devices = accelerators("A", "B")
    model = core.compile_model(two_parts(), "HETERO:A,B")
    request = model.create_infer_request()
    for _ in range(50):  # the runs at first may be slow
        request.infer(X)
    seen: set[int] = set()
    for device in devices:
        device.run = lambda: seen.add(threading.get_ident())  # type: ignore[method-assign]
    request.infer(X)
    assert seen == {threading.get_ident()}


def test_values_are_freed_by_the_last_reader_of_any_task() -> None:
    rng = random.Random(0)
    for _ in range(300):
        count = rng.randint(2, 12)
        work: list[Work] = []
        for position in range(count):
            sources = [rng.randrange(position + 1) for _ in range(rng.randint(1, 3))]
            home = rng.choice(["A", "B", ""])
            work.append(Work(sources, [position + 1], home, bool(home), rng.random() < 0.1))
        results = {count}
        schedule = make_schedule(work, results)
        if schedule is None:
            continue
        order = [step for task in schedule.tasks for step in task.steps]
        assert sorted(order) == list(range(count))
        for number, task in enumerate(schedule.tasks):
            assert all(needed < number for needed in task.needs)
            assert len({work[k].device for k in task.steps}) == 1
        makers = {slot: k for k, each in enumerate(work) for slot in each.outputs}
        for k, each in enumerate(work):
            for slot in each.inputs:
                if slot not in makers:
                    continue
                mine, other = schedule.task_of[k], schedule.task_of[makers[slot]]
                assert mine == other or other in schedule.tasks[mine].needs
                if slot not in results and mine != other:
                    assert slot in schedule.tasks[mine].reads
        assert not results & schedule.readers.keys()


def test_a_simulated_device_still_fails_over() -> None:
    core = sg.Core()
    core.register_device("A", Simulated({"Relu"}))
    lost = Simulated()
    core.register_device("B", lost)
    model = core.compile_model(two_parts(), "HETERO:A,B,REFERENCE")
    lost.lost = True
    for got, want in zip(model(X).values(), expected(two_parts(), X), strict=True):
        np.testing.assert_array_equal(got, want)
