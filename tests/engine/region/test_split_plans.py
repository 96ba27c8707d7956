"""Shapes that follow from values which a region itself computes: CPU and OPENCL run it in parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.region import concrete_plan, split_plan

pytestmark = pytest.mark.usefixtures("quick_opencl_builds")
DEVICES = ("CPU", "OPENCL")


def _compile(graph: sg.Graph, device: str, **config: Any) -> sg.CompiledModel:
    if device not in sg.default_core().available_devices:
        pytest.skip(f"{device} cannot start here")
    return sg.compile_model(graph, device, config)


def _whole(value: Any) -> Any:
    return ops.Cast(ops.ReduceSum(ops.Relu(value), keepdims=0), to=7)


@pytest.mark.parametrize("device", DEVICES)
def test_a_range_up_to_a_computed_number(device: str) -> None:
    x = sg.input("x", (600,))
    numbers = ops.Cast(ops.Range(np.int64(0), _whole(x), np.int64(1)), to=1)
    graph = sg.Graph([x], [ops.Neg(numbers), ops.Tanh(x)])
    model = _compile(graph, device)
    for count in (7, 2, 7, 0):
        data = np.full(600, (count + 0.5) / 600, np.float32)
        results = model([data])
        np.testing.assert_array_equal(results[0], -np.arange(count, dtype=np.float32))
        np.testing.assert_allclose(results[1], np.tanh(data), rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_of_parts(device: str) -> None:
    """The second computed length follows from results of the first part."""
    x = sg.input("x", (600,))
    ones = ops.ConstantOfShape(ops.Unsqueeze(_whole(x), np.array([0])), value=np.ones(1, "f4"))
    twice = ops.Concat(ones, ones, axis=0)
    longer = ops.ConstantOfShape(ops.Unsqueeze(_whole(twice), np.array([0])))
    graph = sg.Graph([x], [ops.Add(twice, np.float32(1)), ops.Exp(longer)])
    results = _compile(graph, device)([np.full(600, 3.5 / 600, np.float32)])
    assert results[0].tolist() == [2.0] * 6
    assert results[1].tolist() == [1.0] * 6


@pytest.mark.parametrize("device", DEVICES)
def test_a_weight_that_changes_and_a_profile(device: str) -> None:
    x = sg.input("x", (600,))
    weight = sg.parameter("w", np.float32(2))
    count = _whole(ops.Mul(x, weight))
    graph = sg.Graph(
        [x], [ops.Mul(ops.Cast(ops.Range(np.int64(0), count, np.int64(1)), to=1), 3.0)]
    )
    model = _compile(graph, device, ENABLE_PROFILING=True)
    request = model.create_infer_request()
    data = np.full(600, 2.3 / 600, np.float32)
    assert len(request.infer([data])[0]) == 4
    model.parameters["w"].assign(np.float32(4))
    assert len(request.infer([data])[0]) == 9
    assert {entry.device for entry in request.profile()} == {device}


@pytest.mark.parametrize("device", DEVICES)
def test_the_profile_is_that_of_the_last_run_whether_it_was_split_or_not(device: str) -> None:
    count = sg.input("n", (1,), "int64")
    graph = sg.Graph([count], [ops.Exp(ops.ConstantOfShape(count))])
    request = _compile(graph, device, ENABLE_PROFILING=True).create_infer_request()
    for value in range(1, 10):  # more values than get plans of their own
        request.infer([np.array([value])])
    assert "ConstantOfShape" in [entry.op_type for entry in request.profile()]
    before = {entry.start for entry in request.profile()}
    request.infer([np.array([1])])  # its plan of the whole region is still there
    assert before.isdisjoint(entry.start for entry in request.profile())


@pytest.mark.parametrize("device", DEVICES)
def test_axes_and_diagonals_that_are_inputs_or_computed(device: str) -> None:
    """They decide how a node is computed, not its shape: there is a plan for each value."""
    x, axis = sg.input("x", (3, 4, 4)), sg.input("axis", (), "int64")
    less = ops.Sub(axis, np.int64(1))
    graph = sg.Graph(
        [x, axis],
        [
            ops.CumSum(x, axis),
            ops.CumSum(ops.Exp(x), less, reverse=1),
            ops.Trilu(ops.Neg(x), less, upper=0),
        ],
    )
    model = _compile(graph, device)
    data = np.random.default_rng(0).standard_normal((3, 4, 4)).astype(np.float32)
    for k in (1, 2, 0, 1):
        results = model([data, np.array(k)])
        np.testing.assert_allclose(results[0], np.cumsum(data, k), rtol=1e-5, atol=1e-5)
        flipped = np.flip(np.cumsum(np.flip(np.exp(data), k - 1), k - 1), k - 1)
        np.testing.assert_allclose(results[1], flipped, rtol=1e-5)
        np.testing.assert_array_equal(results[2], np.tril(-data, k - 1))
    placed = sg.default_core().query_model(graph, device)
    assert set(placed) == {node.name for node in graph.nodes}, placed.reasons


@pytest.mark.parametrize("device", DEVICES)
def test_an_axis_that_data_decide(device: str) -> None:
    x = sg.input("x", (5, 600))
    axis = ops.Cast(ops.Greater(ops.ReduceMax(x, keepdims=0), np.float32(1)), to=7)
    graph = sg.Graph([x], [ops.CumSum(ops.Neg(x), axis)])
    model = _compile(graph, device)
    for scale in (0.5, 2.0, 0.25):
        data = np.full((5, 600), scale, np.float32)
        expected = np.cumsum(-data, int(scale > 1))
        np.testing.assert_allclose(model([data])[0], expected, rtol=1e-5)


@pytest.mark.parametrize("device", DEVICES)
def test_parts_after_a_count_depend_on_a_shape(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second count on, a symbolic plan serves the calls."""
    plans: list[Any] = []
    make = concrete_plan.make_plan
    monkeypatch.setattr(concrete_plan, "make_plan", lambda *a: plans.append(a) or make(*a))
    x = sg.input("x", (50, 8))
    found = ops.Transpose(ops.NonZero(ops.Greater(ops.ReduceSum(x, axes=[1]), np.float32(0))))
    rows = ops.Gather(x, ops.Squeeze(ops.Slice(found, [0], [1], [1]), [1]))
    weight = sg.parameter("w", np.ones((8, 3), np.float32))
    graph = sg.Graph([x], [ops.Softmax(ops.MatMul(rows, weight)), ops.Exp(rows), found])
    model = _compile(graph, device)
    rng = np.random.default_rng(0)
    for count in (20, 7, 9, 0, 31, 1, 50, 12):
        data = np.abs(rng.standard_normal((50, 8)).astype(np.float32)) + 0.1
        data[rng.permutation(50)[count:]] *= -1
        results = model([data])
        chosen = data[data.sum(1) > 0]
        assert len(chosen) == count
        even = np.full((count, 3), 1 / 3, np.float32)
        np.testing.assert_allclose(results[0], even, rtol=1e-6)
        np.testing.assert_allclose(results[1], np.exp(chosen), rtol=1e-6)
        assert results[2].flags.c_contiguous
    if device == "CPU":
        assert len(plans) < 8


@pytest.mark.parametrize("device", DEVICES)
def test_independent_counts_need_one_cut(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector counts the boxes of each of its classes; one cut serves all classes."""
    cuts: list[str] = []

    def counted(graph: sg.Graph, node: sg.Node, make_op: Any) -> sg.Graph:
        cuts.append(node.name)
        return cut_at(graph, node, make_op)

    cut_at = split_plan.cut_at
    monkeypatch.setattr(split_plan, "cut_at", counted)
    classes = 40
    x = sg.input("x", (600, classes))
    found: list[sg.Value] = []
    for number in range(classes):
        scores = ops.Gather(x, np.int64(number), axis=1)
        at = ops.Squeeze(ops.NonZero(ops.Greater(scores, np.float32(1))), np.array([0]))
        found.append(ops.Mul(ops.Gather(scores, at, axis=0), np.float32(number)))
    every = ops.Concat(*found, axis=0)
    large = ops.Squeeze(ops.NonZero(ops.Greater(every, np.float32(40))), np.array([0]))
    graph = sg.Graph([x], [every, ops.Neg(ops.Gather(every, large, axis=0))])
    model = _compile(graph, device)
    for seed in range(3):
        data = np.random.default_rng(seed).standard_normal((600, classes)).astype(np.float32)
        wanted = np.concatenate([k * row[row > 1] for k, row in enumerate(data.T)])
        results = model([data])
        np.testing.assert_allclose(results[0], wanted, rtol=1e-6)
        np.testing.assert_allclose(results[1], -wanted[wanted > 40], rtol=1e-6)
    if device == "CPU":
        assert len(set(cuts)) <= 2
