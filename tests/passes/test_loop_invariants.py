"""LoopInvariants: loops capture what they do not change, and compute the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from tests.support.peer import check_results, random, session_of

F4 = np.float32


def _loop(trip: sg.Value, weight: sg.Value, x: sg.Value) -> tuple[sg.Value, ...]:
    """Return what a recurrence in the manner of tf2onnx makes, its weight carried as a state."""
    number, going = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    state, carried = sg.input("state", (1, 4)), sg.input("carried", (4, 4))
    new = ops.Tanh(ops.MatMul(state, carried))
    body = sg.Graph(
        [number, going, carried, state], [going, ops.Identity(carried), new, ops.Neg(new)], "body"
    )
    found: tuple[sg.Value, ...] = ops.Loop(trip, None, weight, x, body=body)
    return found


@pytest.mark.parametrize("times", [0, 1, 5])
@pytest.mark.parametrize("kind", ["parameter", "input", "computed"])
@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE"])
def test_a_state_that_is_returned_unchanged_is_captured(kind: str, device: str, times: int) -> None:
    trip, x = sg.input("trip", (), "int64"), sg.input("x", (1, 4))
    inputs: dict[str, Any] = {"trip": np.array(times), "x": random(1, 4)}
    given = [trip, x]
    weight = sg.parameter("w", random(4, 4, seed=1))
    if kind != "parameter":
        weight = sg.input("w", (4, 4))
        given.append(weight)
        inputs["w"] = random(4, 4, seed=1)
    if kind == "computed":
        weight = ops.Neg(weight)
    graph = sg.Graph(given, list(_loop(trip, weight, x)))
    changed = passes.apply_pass(graph, "LoopInvariants")
    (loop,) = (node for node in changed.nodes if node.op_type == "Loop")
    assert len(loop.inputs) == 3
    assert len(graph.outputs) == len(changed.outputs) == 3
    model = sg.compile_model(graph, device)
    check_results(model, session_of(graph), list(inputs.values()), tolerance=2e-6)
    for before, after in zip(
        sg.compile_model(graph, "REFERENCE")(inputs).values(),
        sg.compile_model(changed, "REFERENCE")(inputs).values(),
        strict=True,
    ):
        np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "AUTO"])
def test_outputs_keep_their_names(device: str) -> None:
    trip, x, weight = sg.input("trip", (), "int64"), sg.input("x", (1, 4)), sg.input("w", (4, 4))
    results = _loop(trip, weight, x)
    names = ["the weight", "last", "all"]
    for value, name in zip(results, names, strict=True):
        value.name = name
    graph = sg.Graph([trip, x, weight], list(results))
    changed = passes.apply_pass(graph, "LoopInvariants")
    assert [value.name for value in changed.outputs] == names
    found = sg.compile_model(graph, device)(np.array(2), random(1, 4), random(4, 4, seed=1))
    assert list(found) == names


def test_a_weight_that_a_loop_carries_can_be_assigned() -> None:
    trip, x = sg.input("trip", (), "int64"), sg.input("x", (1, 4))
    weight = sg.parameter("w", random(4, 4, seed=1))
    graph = sg.Graph([trip, x], list(_loop(trip, weight, x)))
    model = sg.compile_model(graph, "CPU")
    inputs = {"trip": np.array(3), "x": random(1, 4)}
    model(inputs)
    model.parameters["w"].assign(random(4, 4, seed=2))
    for found, expected in zip(
        model(inputs).values(), sg.compile_model(graph, "REFERENCE")(inputs).values(), strict=True
    ):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_loops_in_loops_and_scans_capture_too() -> None:
    weight_array = random(4, 4, seed=1)
    x, weight = sg.input("x", (3, 2, 4)), sg.parameter("w", weight_array)
    inner_weight, state = sg.input("carried", (4, 4)), sg.input("state", (2, 4))
    item = sg.input("item", (2, 4))
    number, going = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    passed, value = sg.input("passed", (4, 4)), sg.input("value", (2, 4))
    inner = sg.Graph(
        [number, going, passed, value], [going, passed, ops.MatMul(value, passed)], "inner"
    )
    _, moved = ops.Loop(np.int64(2), None, inner_weight, state, body=inner)
    body = sg.Graph([inner_weight, state, item], [inner_weight, ops.Add(moved, item)], "outer")
    outputs = ops.Scan(weight, np.zeros((2, 4), F4), x, body=body, num_scan_inputs=1)
    graph = sg.Graph([x], list(outputs))
    changed = passes.apply_pass(graph, "LoopInvariants")
    (scan,) = (node for node in changed.nodes if node.op_type == "Scan")
    (loop,) = (node for node in scan.bodies[0].nodes if node.op_type == "Loop")
    assert (len(scan.inputs), len(loop.inputs)) == (2, 3)
    assert loop.captures == scan.captures == (), "a parameter stands in each body itself"
    model = sg.compile_model(graph, "CPU")
    # ONNX Runtime 1.32 returns memory that nobody wrote for the first output.
    expected = np.zeros((2, 4), F4)
    for item_array in (array := random(3, 2, 4)):
        expected = expected @ weight_array @ weight_array + item_array
    found = model(array)
    np.testing.assert_array_equal(found[0], weight_array)
    np.testing.assert_allclose(found[1], expected, rtol=1e-5, atol=1e-6)


def test_a_state_that_changes_places_stays() -> None:
    x, y = sg.input("x", (2,)), sg.input("y", (2,))
    number, going = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    a, b = sg.input("a", (2,)), sg.input("b", (2,))
    body = sg.Graph([number, going, a, b], [going, b, a], "body")
    graph = sg.Graph([x, y], list(ops.Loop(np.int64(3), None, x, y, body=body)))
    changed = passes.apply_pass(graph, "LoopInvariants")
    (loop,) = (node for node in changed.nodes if node.op_type == "Loop")
    assert len(loop.inputs) == 4
    model = sg.compile_model(graph, "CPU")
    check_results(model, session_of(graph), [random(2), random(2, seed=1)], tolerance=0.0)


def test_loops_that_follow_each_other() -> None:
    """Later loops take changed and unchanged results of earlier ones, and capture them."""
    trip, x = sg.input("trip", (), "int64"), sg.input("x", (1, 4))
    weight = sg.input("w", (4, 4))
    first = _loop(trip, ops.Neg(weight), x)
    second = _loop(trip, first[0], first[1])
    inner = [sg.input("number", (), "int64"), sg.input("going", (), "bool")]
    carried, state = sg.input("carried", (4, 4)), sg.input("state", (1, 4))
    added = ops.Add(ops.MatMul(state, carried), sg.capture(second[1]))
    body = sg.Graph([*inner, carried, state], [inner[1], carried, added], "third")
    third = ops.Loop(trip, None, second[0], first[1], body=body)
    graph = sg.Graph([trip, x, weight], [*second, *third])
    changed = passes.apply_pass(graph, "LoopInvariants")
    loops = [node for node in changed.nodes if node.op_type == "Loop"]
    assert [len(node.inputs) for node in loops] == [3, 3, 3]
    inputs = [np.array(3), random(1, 4), random(4, 4, seed=1)]
    model = sg.compile_model(graph, "CPU")
    check_results(model, session_of(graph), inputs, tolerance=1e-5)
