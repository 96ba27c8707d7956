"""Placement in stages: the least time of the slowest device, against every way to split."""

from __future__ import annotations

import itertools
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.placement.cost import Link
from subgraph.devices.placement.profiles import Profile, write_profile
from subgraph.devices.placement.stages import place_in_stages, stage_seconds

FREE = Link(0.0, 1e30)


def chain(count: int) -> sg.Graph:
    value = x = sg.input("x", (2,))
    for number in range(count):
        value = ops.Relu(value, name=f"n{number}")
    return sg.Graph([x], [value], "chain")


def bottleneck(homes: list[str], times: dict[str, dict[str, float]]) -> float:
    sums = dict.fromkeys(homes, 0.0)
    for number, home in enumerate(homes):
        sums[home] += times[home].get(f"n{number}", float("inf"))
    return max(sums.values())


@pytest.mark.parametrize("seed", range(25))
def test_no_other_split_is_better(seed: int) -> None:
    rng = random.Random(seed)
    count, names = rng.randrange(1, 9), "ABC"[: rng.randrange(1, 4)]
    times = {d: {f"n{k}": rng.random() for k in range(count) if rng.random() < 0.8} for d in names}
    times[names[0]] = {f"n{k}": rng.random() for k in range(count)}
    found = place_in_stages(chain(count), names, times, FREE)
    best = float("inf")
    for order in itertools.permutations(names):
        for cuts in itertools.combinations_with_replacement(range(count + 1), len(order) - 1):
            ends = (*cuts, count)
            homes = [
                next(d for d, end in zip(order, ends, strict=True) if k < end) for k in range(count)
            ]
            best = min(best, bottleneck(homes, times))
    got = max(stage_seconds(chain(count), found, times, FREE).values())
    assert got <= best * (1 + 1e-5)


def test_a_transfer_that_costs_more_than_it_gains() -> None:
    times = {"A": {f"n{k}": 1.0 for k in range(6)}, "B": {f"n{k}": 0.9 for k in range(6)}}
    graph = chain(6)
    assert set(place_in_stages(graph, "AB", times, Link(0.1, 1e9)).values()) == {"A", "B"}
    assert set(place_in_stages(graph, "AB", times, Link(9.0, 1e9)).values()) == {"B"}
    assert place_in_stages(graph, "AB", {}, FREE) == {}


def test_branches_and_nodes_without_times() -> None:
    x = sg.input("x", (2,))
    a = ops.Relu(x, name="a")
    y = ops.Add(ops.Neg(a, name="b"), ops.Abs(a, name="c"), name="d")
    graph = sg.Graph([x], [y], "diamond")
    times = {"A": dict.fromkeys("abd", 1.0), "B": dict.fromkeys("abd", 1.0)}
    found = place_in_stages(graph, "AB", times, FREE)
    assert set(found) == set("abd")
    assert max(stage_seconds(graph, found, times, FREE).values()) == 2.0


def test_hetero_places_in_stages(tmp_path: Path) -> None:
    """The least time of a request leaves all on one device; the most requests need both."""
    core, graph = sg.Core(), chain(8)
    path = tmp_path / "times.json"
    times = {"CPU": 1.0, "REFERENCE": 1.1}
    write_profile(path, Profile({d: {f"n{k}": t for k in range(8)} for d, t in times.items()}))
    config: dict[str, Any] = {"PROFILE": str(path), "PLACEMENT": "COST"}
    device = "HETERO:CPU,REFERENCE"
    assert set(core.query_model(graph, device, config).values()) == {"CPU"}
    config["PLACEMENT"] = "STAGES"
    model = core.compile_model(graph, device, config)
    assert sorted(core.query_model(graph, device, config).values()) == 4 * ["CPU"] + 4 * [
        "REFERENCE"
    ]
    assert len(model.pipeline) == 2
    assert model.get_property("TRANSFERS") == 1
    assert model(np.array([-1, 2], np.float32))[0].tolist() == [0, 2]
