"""The schedule: nodes follow those they depend on, and nodes of one weight are adjacent."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner import schedule
from subgraph.engine.planner.schedule import scheduled
from subgraph.graph.graph import Node


@pytest.fixture(autouse=True)
def small_weights_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "_MIN_SHARED_WEIGHT_BYTES", 1)


def _weights(count: int) -> list[sg.Value]:
    return [sg.parameter(f"w{k}", np.ones((2, 2, 1, 1), np.float32)) for k in range(count)]


def _runs(order: Sequence[Node]) -> bool:
    """Return whether each node comes after the producers of its inputs."""
    place = {node: k for k, node in enumerate(order)}
    return all(place[p] < place[node] for node in order for p in node.predecessors())


def test_levels_of_a_detection_head_are_interleaved() -> None:
    first, second = _weights(2)
    maps = [sg.input(f"x{k}", (1, 2, k, k)) for k in (5, 3, 1)]
    heads = [ops.Conv(ops.Relu(ops.Conv(x, first)), second) for x in maps]
    graph = sg.Graph(maps, heads)
    order = scheduled(graph.nodes)
    assert [n.op_type for n in order] == ["Conv"] * 3 + ["Relu"] * 3 + ["Conv"] * 3
    assert _runs(order)


def test_nodes_that_depend_on_each_other_stay_in_order() -> None:
    (weight,) = _weights(1)
    x = sg.input("x", (1, 2, 3, 3))
    graph = sg.Graph([x], [ops.Conv(ops.Relu(ops.Conv(x, weight)), weight)])
    assert scheduled(graph.nodes) == graph.nodes


def test_groups_that_depend_on_each_other() -> None:
    """Only one of two groups that depend on each other can be made adjacent."""
    a, b = _weights(2)
    x, y = (sg.input(name, (1, 2, 3, 3)) for name in "xy")
    graph = sg.Graph([x, y], [ops.Conv(ops.Conv(x, a), b), ops.Conv(ops.Conv(y, b), a)])
    order = scheduled(graph.nodes)
    assert _runs(order)
    weights = [node.inputs[1] for node in order]
    assert weights in ([a, b, b, a], [b, a, a, b])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 100), st.integers(0, 100)), min_size=1))
def test_random_graphs_are_in_topological_order(steps: list[tuple[int, int, int]]) -> None:
    """Each node is an Add or a convolution by one of three weights."""
    weights = _weights(3)
    x = sg.input("x", (1, 2, 3, 3))
    values = [x]
    for kind, left, right in steps:
        a, b = values[left % len(values)], values[right % len(values)]
        values.append(ops.Add(a, b) if kind == 3 else ops.Conv(a, weights[kind]))
    graph = sg.Graph([x], values[1:])
    order = scheduled(graph.nodes)
    assert sorted(map(id, order)) == sorted(map(id, graph.nodes))
    assert _runs(order)
