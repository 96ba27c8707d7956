"""Placement by cost: the cheapest one is found, and the measurements that it stands on."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.placement import cost, profiles
from subgraph.devices.placement.cost import Link, place_by_cost, placement_cost, transfers
from subgraph.devices.placement.profiles import measure, measure_link, read_profile, write_profile
from subgraph.operators.subgraph_op import ProfileEntry

X = np.array([[1, -2, 3]], np.float32)


def net() -> sg.Graph:
    x, w = sg.input("x", ("N", 3)), sg.parameter("w", np.ones((3, 4), np.float32))
    hidden = ops.Relu(ops.MatMul(x, w, name="mm"), name="relu")
    return sg.Graph([x], [ops.Sigmoid(hidden, name="sig")], "net")


class NoExponential(sg.Device):
    """Takes the products of `net`, and not its Sigmoid."""

    def supports(self, node: sg.Node, options: sg.DeviceOptions) -> bool | sg.Reject:
        return node.op_type in ("MatMul", "Relu")


@pytest.fixture
def core() -> sg.Core:
    made = sg.Core()
    made.register_device("MYDEV", NoExponential)
    return made


def random_costs(seed: int) -> tuple[sg.Graph, list[str], dict[str, dict[str, float]], Link]:
    rng = random.Random(seed)
    values = [sg.input("x", (256,))]
    for k in range(rng.randint(3, 8)):
        values.append(ops.Add(rng.choice(values), rng.choice(values), name=f"n{k}"))
    graph = sg.Graph([values[0]], values[1:], "g")
    devices = ["A", "B", "C"][: rng.choice([2, 2, 3])]
    times = {
        d: {n.name: rng.uniform(0, 5e-6) for n in graph.nodes if d == "A" or rng.random() < 0.9}
        for d in devices
    }
    return graph, devices, times, Link(1e-6, 1e9)


@pytest.mark.parametrize("seed", range(40))
def test_the_cheapest_placement_is_found(seed: int) -> None:
    graph, devices, times, link = random_costs(seed)
    found = place_by_cost(graph, devices, times, link)
    names = [n.name for n in graph.nodes]
    costs = [
        placement_cost(graph, dict(zip(names, choice, strict=True)), times, link)
        for choice in itertools.product(devices, repeat=len(names))
        if all(name in times[d] for name, d in zip(names, choice, strict=True))
    ]
    slack = 1 + 1e-9 if len(devices) == 2 else 1.1
    assert placement_cost(graph, found, times, link) <= min(costs) * slack


def test_fixed_nodes_stay_and_greedy_is_not_better() -> None:
    graph, devices, times, link = random_costs(3)
    fixed = {graph.nodes[1].name: devices[1]}
    found = place_by_cost(graph, devices, times, link, fixed)
    assert found[graph.nodes[1].name] == devices[1]
    for seed in range(40):
        graph, devices, times, link = random_costs(seed)
        greedy = {
            n.name: min(devices, key=lambda d, n=n: times[d].get(n.name, 1)) for n in graph.nodes
        }
        best = place_by_cost(graph, devices, times, link)
        worst = placement_cost(graph, greedy, times, link)
        assert placement_cost(graph, best, times, link) <= worst * (1 + 1e-9)


def test_a_cut_of_a_long_chain_takes_few_searches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search looks at all edges; one for each augmenting path would take quadratic time."""
    x = value = sg.input("x", (256,))
    for k in range(2000):
        value = ops.Neg(value, name=f"n{k}")
    graph, rng, searches = sg.Graph([x], [value]), random.Random(0), 0
    times = {d: {n.name: rng.uniform(1e-6, 1e-4) for n in graph.nodes} for d in ("A", "B")}
    max_flow: Any = vars(cost)["_MaxFlow"]
    levels = max_flow._levels

    def counted(flow: Any) -> Any:
        nonlocal searches
        searches += 1
        return levels(flow)

    monkeypatch.setattr(max_flow, "_levels", counted)
    place_by_cost(graph, ["A", "B"], times, Link(2e-5, 1e9))
    assert 0 < searches < 100


def test_transfers_are_counted_once_for_each_device_that_reads() -> None:
    x = sg.input("x", (4,))
    a = ops.Relu(x, name="a")
    outs = [ops.Neg(a, name="b"), ops.Abs(a, name="c"), ops.Exp(a, name="d")]
    graph = sg.Graph([x], outs)
    homes = {"a": "A", "b": "B", "c": "B", "d": "C"}
    moved = transfers(graph, {n: homes[n.name] for n in graph.nodes})
    assert sorted((v.name, s, t) for v, s, t in moved) == [(a.name, "A", "B"), (a.name, "A", "C")]


def test_measured_times_are_kept_on_disk(tmp_path: Path, core: sg.Core) -> None:
    devices = [core.device("MYDEV"), core.device("REFERENCE")]
    profile = measure(net(), devices, {"x": X})
    assert profile.regions == {"mm to relu": ["mm", "relu"], "sig": ["sig"]}
    assert set(profile.times["MYDEV"]) == {"mm to relu"}
    assert set(profile.times["REFERENCE"]) == {"mm to relu", "sig"}
    path = tmp_path / "times.json"
    write_profile(path, profile)
    assert read_profile(path) == profile
    text = path.read_text()
    for bad in (
        "{}",
        text.replace("latency", "late"),
        text.replace('"regions": {', '"regions": {"r": 1, '),
        text.replace('"bandwidth": ', '"bandwidth": -'),
    ):
        path.write_text(bad)
        with pytest.raises(sg.BlobError, match="not a profile"):
            read_profile(path)


def test_a_transfer_is_what_a_run_takes_beside_the_node(
    core: sg.Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(profiles, "time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class RemoteSession(sg.Session):
        """Moves a gigabyte a second, a millisecond later; its node takes far longer."""

        def __call__(self, inputs: Any, outputs: Any = None) -> Any:
            clock[0] += 2 * (1e-3 + inputs[0].nbytes * 1e-9) + 7
            return (inputs[0],)

        def profile(self) -> list[ProfileEntry]:
            return [ProfileEntry("n", "Relu", "REMOTE", "k", 7.0)]

    class RemoteOp(sg.SubgraphOp):
        def session(self) -> sg.Session:
            return RemoteSession(self)

    class RemoteDevice(sg.Device):
        def supports(self, node: sg.Node, options: Any) -> bool:
            return True

        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            return RemoteOp(graph)

    core.register_device("REMOTE", RemoteDevice)
    link = measure_link(core.device("REMOTE"))
    assert link is not None
    assert link.latency == pytest.approx(1e-3)
    assert link.bandwidth == pytest.approx(1e9)
    found = measure(net(), [core.device("REMOTE"), core.device("REFERENCE")], {"x": X})
    assert found.link.latency == pytest.approx(1e-3)
    assert set(found.times["REMOTE"].values()) == {7.0}
