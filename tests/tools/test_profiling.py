"""Profiles of runs: what a step is measured against, and what arithmetic it is said to do."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.system.host import core_count
from subgraph.tools.profiling import Limits, core_limit, profile_model, write_trace


def entry(seconds: float, moved: int = 0, flops: int = 0) -> ProfileEntry:
    return ProfileEntry("n", "Conv", "CPU", "k", seconds, moved, flops)


def test_a_step_stands_beside_what_binds_it() -> None:
    limits = Limits(100e9, {1000: 50e9, 1_000_000: 10e9})
    assert limits.row(entry(1e-3, flops=80_000_000), 2e-3)["of the limit"] == "80%"
    assert limits.row(entry(1e-3, flops=80_000_000), 2e-3)["share"] == "50.0%"
    # Few bytes stay in a cache, more than were measured come from memory.
    assert limits.row(entry(1e-6, moved=1000), 1.0)["of the limit"] == "2%"
    assert limits.row(entry(1e-3, moved=5_000_000), 1.0)["of the limit"] == "50%"
    assert limits.row(entry(1e-3), 1.0)["of the limit"] == ""


def test_the_better_of_two_measurements_counts() -> None:
    one, two = Limits(3.0, {8: 1.0, 16: 5.0}), Limits(2.0, {8: 4.0, 16: 2.0})
    assert one.maximum(two) == two.maximum(one) == Limits(3.0, {8: 4.0, 16: 5.0})


def test_limits_are_measured_on_all_cores_at_once() -> None:
    limits = Limits.measure(2)
    assert limits.flops > 1e8
    assert list(limits.bytes) == sorted(limits.bytes)
    assert min(limits.bytes.values()) > 1e7


@pytest.mark.parametrize(
    ("device", "asked"), [("CPU", 1), ("CPU", 3), ("CPU", 0), ("REFERENCE", 0)]
)
def test_cores_are_those_a_model_may_use(device: str, asked: int) -> None:
    x = sg.input("x", (2, 3))
    config = {"INFERENCE_NUM_THREADS": asked} if asked else {}
    model = sg.compile_model(sg.Graph([x], [ops.Relu(x)]), device, config)
    assert core_limit(model) == (asked or core_count())


def test_a_loop_is_of_the_device_that_makes_its_turns() -> None:
    count, x = sg.input("count", (), "int64"), sg.input("x", (4,))
    turn, true = sg.input("turn", (), "int64"), sg.input("going", (), "bool")
    state = sg.input("state", (4,))
    body = sg.Graph([turn, true, state], [ops.Identity(true), ops.Tanh(state)], "body")
    graph = sg.Graph([count, x], [ops.Loop(count, None, x, body=body)])
    request = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True}).create_infer_request()
    request.infer([np.array(3), np.ones(4, np.float32)])
    (loop,) = [entry for entry in request.profile() if entry.op_type == "Loop"]
    assert (loop.device, loop.kernel) == ("CPU", "executor")


def test_a_fast_algorithm_is_said_to_do_what_it_does() -> None:
    x = sg.input("x", (1, 64, 32, 32))
    weight = np.ones((64, 64, 3, 3), np.float32)
    graph = sg.Graph([x], [ops.Conv(x, weight, pads=(1, 1, 1, 1))])
    arrays = {"x": np.ones((1, 64, 32, 32), np.float32)}
    flops: dict[str, int] = {}
    for allowed in (True, False):
        config = {"ENABLE_PROFILING": True, "WINOGRAD": allowed}
        for step in profile_model(sg.compile_model(graph, "CPU", config), arrays, 1):
            flops[".".join(step.kernel.split(".")[:2])] = step.flops
    assert flops["conv.kernels"] == 2 * 64 * 64 * 9 * 32 * 32
    # F(4x4, 3x3): 36 products for 16 outputs.
    assert flops["conv.winograd_kernels"] == 2 * 64 * 64 * 36 * 8 * 8


def fork() -> sg.Graph:
    """Return two branches that join."""
    x = sg.input("x", (64, 64))
    a, b = (sg.parameter(n, np.ones((64, 64), np.float32)) for n in "ab")
    return sg.Graph([x], [ops.Add(ops.Tanh(ops.MatMul(x, a)), ops.Erf(ops.MatMul(x, b)))], "fork")


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "OPENCL", "HETERO:OPENCL,CPU"])
def test_entries_say_when_and_where_they_ran(device: str) -> None:
    model = sg.compile_model(fork(), device, {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    x = np.ones((64, 64), np.float32)
    request.infer(x)
    begin = time.perf_counter()
    request.infer(x)
    end = time.perf_counter()
    entries = request.profile()
    slack = 1e-3 if "OPENCL" in device else 0.0  # its clock is set by one moment of the host's
    assert len(entries) >= 3
    for entry in entries:
        assert begin - slack <= entry.start <= entry.end <= end + slack
        assert entry.seconds == pytest.approx(entry.end - entry.start, abs=1e-9)
        assert entry.thread == (0 if entry.device == "OPENCL" else threading.get_ident())
    if device == "REFERENCE":
        assert [e.start for e in entries] == sorted(e.start for e in entries)


def test_an_asynchronous_run_names_its_thread() -> None:
    model = sg.compile_model(fork(), "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    request.start_async(np.ones((64, 64), np.float32))
    request.wait()
    (thread,) = {entry.thread for entry in request.profile()}
    assert thread not in (0, threading.get_ident())


def test_a_loop_lasts_as_long_as_its_body() -> None:
    count, x = sg.input("count", (), "int64"), sg.input("x", (4,))
    turn, true = sg.input("turn", (), "int64"), sg.input("going", (), "bool")
    state = sg.input("state", (4,))
    body = sg.Graph([turn, true, state], [ops.Identity(true), ops.Tanh(state)], "body")
    graph = sg.Graph([count, x], [ops.Loop(count, None, x, body=body, name="loop")])
    request = sg.compile_model(
        graph, "REFERENCE", {"ENABLE_PROFILING": True}
    ).create_infer_request()
    request.infer([np.array(3), np.ones(4, np.float32)])
    entries = request.profile()
    (loop,) = [entry for entry in entries if entry.node == "loop"]
    inside = [entry for entry in entries if entry is not loop]
    assert len(inside) == 6
    assert all(loop.start <= entry.start <= entry.end <= loop.end for entry in inside)
    assert loop.seconds == pytest.approx(
        loop.end - loop.start - sum(entry.seconds for entry in inside), abs=1e-9
    )


class Quiet(sg.SubgraphOp):
    """Says what its nodes took, and not when."""

    def session(self) -> sg.Session:
        return QuietSession(self)

    def forward(self, inputs: list[Any]) -> list[Any]:
        return [np.tanh(inputs[0])]


class QuietSession(sg.Session):
    def profile(self) -> list[ProfileEntry]:
        return [ProfileEntry(name, "Tanh", "MINE", "k", 1e-6) for name in ("one", "two")]


def test_entries_without_a_start_follow_each_other() -> None:
    x = sg.input("x", (4,))
    inner = sg.Graph([x], [ops.Tanh(x)], "inner")
    node = sg.subgraph_node(inner, op=Quiet(inner), inputs=[x])
    graph = sg.Graph([x], node.outputs, "outer")
    request = sg.compile_model(
        graph, "REFERENCE", {"ENABLE_PROFILING": True}
    ).create_infer_request()
    begin = time.perf_counter()
    request.infer(np.ones(4, np.float32))
    one, two = request.profile()
    assert begin <= one.start
    assert one.end == two.start
    assert one.thread == threading.get_ident()


def traced(tmp_path: Path, entries: list[ProfileEntry]) -> tuple[list[Any], dict[int, str]]:
    path = tmp_path / "trace.json"
    write_trace(path, entries)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    return [e for e in events if e["ph"] == "X"], names


def test_a_trace_shows_threads_and_queues_side_by_side(tmp_path: Path) -> None:
    def at(node: str, start: float, end: float, thread: int, device: str = "CPU") -> ProfileEntry:
        return attrs.evolve(
            ProfileEntry(node, "Conv", device, "k", end - start),
            start=100 + start,
            end=100 + end,
            thread=thread,
        )

    spans = [
        at("outer", 0.0, 1.0, 7),
        at("inner", 0.25, 0.5, 7),
        at("crossing", 0.75, 1.5, 7),
        at("other", 0.25, 1.25, 8),
        at("queued", 0.5, 0.75, 0, "OPENCL"),
    ]
    events, names = traced(tmp_path, spans)
    found = {e["name"]: (e["ts"], e["dur"], e["tid"]) for e in events}
    assert found["outer"][:2] == (0.0, 1e6)
    assert found["crossing"][:2] == (0.75e6, 0.75e6)
    rows = {name: row for name, (_, _, row) in found.items()}
    assert rows["outer"] == rows["inner"]
    assert len({rows[name] for name in ("outer", "crossing", "other", "queued")}) == 4
    shown = {name: names[row] for name, row in rows.items()}
    assert shown["outer"] == shown["crossing"] == "thread 7"
    assert shown["other"] == "thread 8"
    assert shown["queued"] == "OPENCL, queue"
    assert all(e["args"]["device"] for e in events)


def test_a_trace_of_a_real_run_overlaps_in_no_row(tmp_path: Path) -> None:
    model = sg.compile_model(fork(), "CPU", {"ENABLE_PROFILING": True})
    entries = profile_model(model, {"x": np.ones((64, 64), np.float32)}, 3)
    events, names = traced(tmp_path, entries)
    assert len(events) == len(entries)
    assert set(names) == {e["tid"] for e in events}
    for row in names:
        ends = 0.0
        for event in sorted((e for e in events if e["tid"] == row), key=lambda e: e["ts"]):
            assert event["ts"] >= ends - 0.01
            ends = event["ts"] + event["dur"]
