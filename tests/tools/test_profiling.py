"""Profiles of runs: what a step is measured against, and what arithmetic it is said to do."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.system.host import core_count
from subgraph.tools.profiling import Limits, cores_of, profile_model


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
    assert one.or_better(two) == two.or_better(one) == Limits(3.0, {8: 4.0, 16: 5.0})


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
    assert cores_of(model) == (asked or core_count())


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
