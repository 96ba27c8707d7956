"""Conditions, turns and sequences that are known: CPU runs what they come to, as ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from tests.support.peer import check_results, random, session_of

F4 = np.float32


def _run(graph: sg.Graph, *inputs: Array) -> sg.CompiledModel:
    """Check CPU against ONNX Runtime; all of the model is CPU's."""
    model = sg.compile_model(graph, "CPU")
    assert not sg.default_core().query_model(graph, "CPU").reasons
    assert model.execution_devices == ["CPU"]
    _compare(model, graph, inputs)
    return model


def _compare(model: sg.CompiledModel, graph: sg.Graph, inputs: Sequence[Array]) -> None:
    check_results(model, session_of(graph), inputs, tolerance=2e-6)


def _body(inputs: Sequence[sg.Value], outputs: Sequence[sg.Value], name: str = "body") -> sg.Graph:
    return sg.Graph(list(inputs), list(outputs), name)


def _loop_inputs(*states: sg.Value) -> list[sg.Value]:
    return [sg.input("turn", (), "int64"), sg.input("going", (), "bool"), *states]


@pytest.mark.parametrize("shape", [(1, 3), (2, 3)])
def test_a_condition_on_a_shape(shape: tuple[int, int]) -> None:
    """As torch writes ``squeeze`` of a dimension that it does not know."""
    x = sg.input("x", shape)
    one = ops.Equal(ops.Gather(ops.Shape(x), np.int64(0)), np.int64(1))
    inner = sg.capture(x)
    squeezed = _body([], [ops.Neg(ops.Gather(inner, np.int64(0)))], "squeezed")
    other = sg.capture(x)
    kept = _body([], [ops.Exp(other)], "kept")
    y = ops.If(one, then_branch=squeezed, else_branch=kept)
    _run(sg.Graph([x], [ops.Relu(y)]), random(*shape))


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("kind", ["If", "Loop"])
def test_an_error_behind_a_number_that_is_known_is_not_lost(kind: str, device: str) -> None:
    """Only the sizes of the sum decide, and two of them are known before it is computed."""
    x, y, z = sg.input("x", ("N",)), sg.input("y", ("M",)), sg.input("z", (2,))
    total = ops.Add(ops.Expand(x, np.array([4, 3, 1])), y)
    number = ops.Gather(ops.Shape(total), np.int64(1))
    if kind == "If":
        bodies = [
            _body([], [op(sg.capture(z))], name) for name, op in (("a", ops.Neg), ("b", ops.Exp))
        ]
        result = ops.If(
            ops.Equal(number, np.int64(3)), then_branch=bodies[0], else_branch=bodies[1]
        )
        expected = -random(2)
    else:
        iteration, going, state = _loop_inputs(sg.input("state", (2,)))
        body = _body([iteration, going, state], [going, ops.Neg(state)])
        result = ops.Loop(number, None, z, body=body)
        expected = -random(2)
    model = sg.compile_model(sg.Graph([x, y, z], [result]), device)
    np.testing.assert_array_equal(model(random(5), random(5), random(2))[0], expected)
    with pytest.raises(sg.ShapeError, match="Add"):
        model(random(5), random(4), random(2))


def test_branches_whose_constants_have_one_name() -> None:
    """As the branches of an If in a loop have it that is unrolled."""
    x = sg.input("x", (4,))
    items: list[sg.Value] = []
    for number in range(2):
        bodies: list[sg.Graph] = []
        for name in ("less", "more"):
            node = sg.Node("Constant", attrs={"value": random(4, seed=number)})
            node.outputs[0].name = "same"
            bodies.append(_body([], [ops.SequenceConstruct(node.outputs[0])], name))
        condition = ops.Greater(ops.ReduceSum(x, keepdims=0), np.float32(number))
        made = ops.If(condition, then_branch=bodies[0], else_branch=bodies[1])
        items.append(ops.SequenceAt(made, np.array(0)))
    graph = sg.Graph([x], items)
    _compare(sg.compile_model(graph, "CPU"), graph, [random(4)])


def test_branches_whose_weights_have_one_name() -> None:
    x = sg.input("x", (4,))
    bodies: list[sg.Graph] = []
    for number, op in enumerate((ops.Add, ops.Mul)):
        weight = sg.parameter(f"w{number}", random(4, seed=number))
        weight.name = "w"  # as the reader names values of files that repeat names in branches
        bodies.append(_body([], [op(sg.capture(x), weight)], op.__name__))
    condition = ops.Greater(ops.ReduceSum(x, keepdims=0), np.float32(0))
    graph = sg.Graph([x], [ops.If(condition, then_branch=bodies[0], else_branch=bodies[1])])
    for sign in (1, -1):
        _run(graph, sign * np.ones(4, F4))


def test_a_branch_that_gives_what_it_takes_and_a_weight() -> None:
    x = sg.input("x", (4,))
    weight = sg.parameter("w", random(4))
    branch = _body([], [sg.capture(x), weight])
    other = _body([], [ops.Neg(sg.capture(x)), weight], "other")
    kept, given = ops.If(np.array(True), then_branch=branch, else_branch=other)
    graph = sg.Graph([x], [kept, given, ops.Add(kept, given)])
    model = _run(graph, random(4, seed=1))
    model.parameters["w"].assign(np.ones(4, F4))
    _compare(model, graph, [random(4, seed=2)])


def test_a_condition_and_a_number_of_turns_that_are_assigned_anew() -> None:
    x = sg.input("x", (4,))
    taken = sg.parameter("taken", np.array(True))
    turns = sg.parameter("turns", np.array(3, np.int64))
    y = ops.If(
        taken,
        then_branch=_body([], [ops.Neg(sg.capture(x))], "neg"),
        else_branch=_body([], [ops.Exp(sg.capture(x))], "exp"),
    )
    state = sg.input("state", (4,))
    going = sg.input("going", (), "bool")
    body = _body(
        [sg.input("turn", (), "int64"), going, state],
        [ops.Identity(going), ops.Add(state, ops.Mul(state, F4(0.5)))],
    )
    last = ops.Loop(turns, None, y, body=body)
    model = sg.compile_model(sg.Graph([x], [last]), "CPU")
    given = random(4)
    np.testing.assert_allclose(model([given])[0], -given * F4(1.5**3), rtol=1e-6)
    model.parameters["turns"].assign(np.array(0, np.int64))
    np.testing.assert_allclose(model([given])[0], -given, rtol=1e-6)
    model.parameters["taken"].assign(np.array(False))
    model.parameters["turns"].assign(np.array(2, np.int64))
    np.testing.assert_allclose(model([given])[0], np.exp(given) * F4(1.5**2), rtol=1e-6)
    # More turns than are unfolded: the reference takes the region over.
    model.parameters["turns"].assign(np.array(5000, np.int64))
    assert not np.isfinite(model([given])[0]).any()


@pytest.mark.parametrize("turns", [0, 1, 5])
def test_a_loop_with_results_of_every_turn(turns: int) -> None:
    x = sg.input("x", (2, 3))
    weight = sg.parameter("w", random(3, 3))
    turn, going, state = _loop_inputs(sg.input("state", (2, 3)))
    moved = ops.Tanh(ops.Add(ops.MatMul(state, weight), ops.Cast(turn, to=1)))
    body = _body([turn, going, state], [ops.Identity(going), moved, ops.Mul(moved, sg.capture(x))])
    last, all_turns = ops.Loop(np.int64(turns), np.array(True), x, body=body)
    graph = sg.Graph([x], [last, ops.Neg(all_turns)])
    model = _run(graph, random(2, 3))
    model.parameters["w"].assign(random(3, 3, seed=4))
    _compare(model, graph, [random(2, 3, seed=5)])


def test_a_shape_that_grows_from_turn_to_turn() -> None:
    x = sg.input("x", (1, 3))
    turn, going, state = _loop_inputs(sg.input("state", (None, 3)))
    body = _body([turn, going, state], [going, ops.Concat(state, ops.Neg(state), axis=0)])
    _run(sg.Graph([x], [ops.Loop(np.int64(3), None, x, body=body)]), random(1, 3))


def test_a_loop_in_a_branch_in_a_loop() -> None:
    x = sg.input("x", (3,))
    turn, going, state = _loop_inputs(sg.input("state", (3,)))
    inner_inputs = _loop_inputs(sg.input("inner_state", (3,)))
    around = sg.capture(state)
    outer = sg.capture(around)
    inner = _body(inner_inputs, [inner_inputs[1], ops.Add(inner_inputs[2], outer)], "inner")
    loop = ops.Loop(np.int64(2), None, around, body=inner)
    even = ops.Equal(ops.Mod(turn, np.int64(2)), np.int64(0))
    chosen = ops.If(
        even,
        then_branch=_body([], [loop], "even"),
        else_branch=_body([], [ops.Mul(sg.capture(state), F4(0.25))], "odd"),
    )
    body = _body([turn, going, state], [going, chosen])
    _run(sg.Graph([x], [ops.Loop(np.int64(4), None, x, body=body)]), random(3))


@pytest.mark.parametrize("back", [0, 1])
@pytest.mark.parametrize(("axis", "to"), [(0, 0), (1, -1)])
def test_scan(back: int, axis: int, to: int) -> None:
    x = sg.input("x", (4, 5, 2))
    start = sg.input("start", (2,))
    state, item = sg.input("state", (2,)), sg.input("item", (5 if axis == 0 else 4, 2))
    after = ops.Tanh(ops.Add(state, ops.ReduceMean(item, np.array([0]), keepdims=0)))
    body = _body([state, item], [after, ops.Mul(item, after)])
    last, rows = ops.Scan(
        start,
        x,
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[back],
        scan_output_axes=[to],
        scan_output_directions=[1 - back],
    )
    _run(sg.Graph([x, start], [last, rows]), random(4, 5, 2), random(2))


def test_a_sequence_that_a_branch_hands_on() -> None:
    """As torch writes ``if t % 3 == 2: items.append(...)``."""
    x = sg.input("x", (7, 2))
    inner = sg.input("items", type=sg.SequenceType(sg.TensorType("float32")))
    turn, going, items = _loop_inputs(inner)
    row = ops.Gather(sg.capture(x), turn)
    more = ops.SequenceInsert(items, row)
    chosen = ops.If(
        ops.Equal(ops.Mod(turn, np.int64(3)), np.int64(2)),
        then_branch=_body([], [ops.SequenceInsert(sg.capture(more), sg.capture(row))], "more"),
        else_branch=_body([], [ops.Identity(sg.capture(more))], "same"),
    )
    body = _body([turn, going, items], [going, chosen])
    made = ops.Loop(np.int64(7), None, ops.SequenceEmpty(dtype=1), body=body)
    outputs = [ops.ConcatFromSequence(made, axis=0), ops.SequenceLength(made)]
    _run(sg.Graph([x], outputs), random(7, 2))


def _choice(x: sg.Value, then: sg.Value, other: sg.Value, dims: int = 0) -> sg.Value:
    """Return one of two values, as the largest number of x says."""
    large = ops.Greater(ops.ReduceMax(x, keepdims=0), F4(1))
    if dims:
        large = ops.Unsqueeze(large, np.zeros(dims, np.int64))
    return ops.If(large, then_branch=_body([], [then], "then"), else_branch=_body([], [other]))


@pytest.mark.parametrize("dims", [0, 1])
def test_a_cheap_branch_is_chosen_once_both_are_computed(dims: int) -> None:
    """What the other branch makes of the numbers, not-a-number even, does not show."""
    x = sg.input("x", (3, 4))
    root = ops.Sqrt(ops.Sub(F4(1), sg.capture(x)))
    weight = sg.parameter("w", random(3, 3))
    product = ops.MatMul(weight, sg.capture(x))
    y = _choice(x, product, ops.Div(F4(1), root), dims)
    graph = sg.Graph([x], [ops.Neg(y)])
    model = _run(graph, np.full((3, 4), 2, F4))
    assert not any(n.op_type == "If" for n in passes.apply_pass(graph, "UnfoldControlFlow").nodes)
    _compare(model, graph, [np.full((3, 4), -2, F4)])
    _compare(model, graph, [np.full((3, 4), 1, F4)])
    model.parameters["w"].assign(random(3, 3, seed=1))
    _compare(model, graph, [random(3, 4, seed=2)])


def test_branches_whose_nodes_have_the_same_names() -> None:
    x = sg.input("x", (3, 4))
    then = ops.Neg(ops.Mul(sg.capture(x), F4(3), name="both"))
    graph = sg.Graph([x], [_choice(x, then, ops.Neg(ops.Mul(sg.capture(x), F4(5), name="both")))])
    model = _run(graph, random(3, 4))
    _compare(model, graph, [random(3, 4) - 9])
    assert not any(n.op_type == "If" for n in passes.apply_pass(graph, "UnfoldControlFlow").nodes)


@pytest.mark.parametrize("why", ["large", "whole numbers by zero", "indices", "shapes", "a scalar"])
def test_a_branch_that_is_not_computed_for_nothing(why: str) -> None:
    shape = (200, 200) if why == "large" else (4,)
    x = sg.input("x", shape)
    inner = sg.capture(x)
    then, other = ops.Neg(inner), ops.Exp(sg.capture(x))
    if why == "whole numbers by zero":
        then = ops.Cast(ops.Div(np.int64(9), ops.Cast(inner, to=7)), to=1)
    elif why == "indices":
        then = ops.Gather(inner, ops.Cast(inner, to=7))
    elif why == "shapes":
        then = ops.Concat(inner, inner, axis=0)
    elif why == "a scalar":
        then, other = (ops.ReduceMax(value, keepdims=0) for value in (inner, other))
    graph = sg.Graph([x], [ops.Neg(_choice(x, then, other, dims=int(why == "a scalar")))])
    assert any(n.op_type == "If" for n in passes.apply_pass(graph, "UnfoldControlFlow").nodes)
    model = sg.compile_model(graph, "CPU")
    _compare(model, graph, [np.zeros(shape, F4)])
    if why != "whole numbers by zero":
        _compare(model, graph, [np.arange(np.prod(shape), dtype=F4).reshape(shape)])


@pytest.mark.parametrize("split", [None, np.int64(2), np.array([1, 3, 1])])
def test_parts_of_a_tensor_by_a_sequence(split: Any) -> None:
    """As torch writes ``split`` and ``unbind``."""
    x = sg.input("x", (2, 5))
    parts = ops.SplitToSequence(x, split, axis=1, keepdims=int(split is not None))
    first = ops.SequenceAt(parts, np.int64(0))
    last = ops.SequenceAt(parts, np.int64(-1))
    count = ops.SequenceLength(parts)
    _run(sg.Graph([x], [ops.Neg(first), ops.Exp(last), ops.Add(count, count)]), random(2, 5))


def test_a_list_that_a_loop_fills() -> None:
    """As torch writes ``outputs.append`` in a loop, and ``stack``."""
    x = sg.input("x", (4, 3))
    turn, going, held = _loop_inputs(
        sg.input("held", type=sg.SequenceType(sg.TensorType("float32")))
    )
    item = ops.Gather(sg.capture(x), turn)
    body = _body([turn, going, held], [going, ops.SequenceInsert(held, ops.Exp(item))])
    filled = ops.Loop(np.int64(4), None, ops.SequenceEmpty(), body=body)
    filled = ops.SequenceErase(filled, np.int64(1))
    filled = ops.SequenceInsert(filled, ops.Gather(x, np.int64(0)), np.int64(0))
    rows = ops.ConcatFromSequence(filled, axis=0, new_axis=1)
    flat = ops.ConcatFromSequence(filled, axis=0)
    _run(sg.Graph([x], [ops.Neg(rows), ops.Neg(flat)]), random(4, 3))


def test_opencl_runs_what_a_loop_comes_to() -> None:
    if "OPENCL" not in sg.default_core().available_devices:
        pytest.skip("OPENCL cannot start here")
    x = sg.input("x", (2, 3))
    turn, going, state = _loop_inputs(sg.input("state", (2, 3)))
    body = _body([turn, going, state], [going, ops.Tanh(ops.Add(state, ops.Cast(turn, to=1)))])
    graph = sg.Graph([x], [ops.Loop(np.int64(3), None, x, body=body)])
    assert not sg.default_core().query_model(graph, "OPENCL").reasons
    _compare(sg.compile_model(graph, "OPENCL"), graph, [random(2, 3)])


def test_what_depends_on_data_stays() -> None:
    x = sg.input("x", (200, 200))
    positive = ops.Greater(ops.ReduceSum(x, keepdims=0), F4(0))
    y = ops.If(
        positive,
        then_branch=_body([], [ops.Neg(sg.capture(x))], "neg"),
        else_branch=_body([], [ops.Exp(sg.capture(x))], "exp"),
    )
    turn, going, state = _loop_inputs(sg.input("state", (200, 200)))
    more = ops.Less(ops.ReduceMax(state, keepdims=0), F4(10))
    body = _body([turn, going, state], [more, ops.Add(state, ops.Abs(state))])
    z = ops.Loop(np.int64(100), np.array(True), y, body=body)
    graph = sg.Graph([x], [z])
    assert {n.op_type for n in passes.apply_pass(graph, "UnfoldControlFlow").nodes} >= {
        "If",
        "Loop",
    }
    model = sg.compile_model(graph, "CPU")
    for seed in range(4):
        _compare(model, graph, [random(200, 200, seed=seed)])


def test_long_loops_stay() -> None:
    x = sg.input("x", (4,))
    turn, going, state = _loop_inputs(sg.input("state", (4,)))
    body = _body([turn, going, state], [going, ops.Mul(state, F4(0.999))])
    graph = sg.Graph([x], [ops.Loop(np.int64(6000), None, x, body=body)])
    assert any(n.op_type == "Loop" for n in passes.apply_pass(graph, "UnfoldControlFlow").nodes)
    given = random(4)
    found = sg.compile_model(graph, "CPU")([given])[0]
    np.testing.assert_allclose(found, given * 0.999**6000, rtol=1e-3)


def test_random_numbers_are_drawn_in_every_turn() -> None:
    x = sg.input("x", (400,))
    turn, going, state = _loop_inputs(sg.input("state", (400,)))
    body = _body([turn, going, state], [going, ops.RandomUniformLike(state, low=0.0, high=1.0)])
    graph = sg.Graph([x], [ops.Loop(np.int64(3), None, x, body=body)])
    assert any(n.op_type == "Loop" for n in passes.apply_pass(graph, "UnfoldControlFlow").nodes)
    found = sg.compile_model(graph, "CPU")([random(400)])[0]
    assert 0.3 < found.mean() < 0.7


def test_profile_and_export_of_unfolded_loops(tmp_path: Any) -> None:
    x = sg.input("x", (2, 3))
    turn, going, state = _loop_inputs(sg.input("state", (2, 3)))
    body = _body([turn, going, state], [going, ops.Tanh(ops.MatMul(state, random(3, 3)))])
    graph = sg.Graph([x], [ops.Loop(np.int64(3), None, x, body=body)])
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    given = random(2, 3)
    wanted = model([given])[0]
    request = model.create_infer_request()
    request.infer([given])
    assert sum(entry.kernel != "reference" for entry in request.profile()) >= 3
    model.export_model(tmp_path / "loop.blob")
    again = sg.default_core().import_model(tmp_path / "loop.blob", "CPU")
    np.testing.assert_array_equal(again([given])[0], wanted)


def test_as_many_turns_as_the_caller_says() -> None:
    """Sequences and constants between regions, by the executor; results are arrays of their own."""
    x = sg.input("x", (4, 3))
    turns = sg.input("turns", (), "int64")
    held_type = sg.SequenceType(sg.TensorType("float32", (3,)))
    turn, going, held = _loop_inputs(sg.input("held", type=held_type))
    first = ops.Neg(ops.Gather(x, np.int64(0)))
    row = ops.Mul(ops.Gather(sg.capture(x), turn), ops.Constant(value=np.array([2], F4)))
    more = ops.Identity(going)
    body = _body([turn, going, held], [more, ops.SequenceInsert(held, row), ops.Identity(row)])
    filled, rows = ops.Loop(turns, None, ops.SequenceConstruct(first), body=body)
    last = ops.SequenceAt(filled, np.int64(-1))
    count = ops.SequenceLength(filled)
    graph = sg.Graph([x, turns], [rows, last, count, ops.ConcatFromSequence(filled, axis=0)])
    model = sg.compile_model(graph, "CPU")
    for number in (2, 0, 4, 2):
        if number:
            _compare(model, graph, [random(4, 3), np.array(number, np.int64)])
        else:
            assert model([random(4, 3), np.array(0, np.int64)])[2] == 1


def test_the_profile_lists_what_runs_in_bodies() -> None:
    x = sg.input("x", (200, 200))
    y = ops.If(
        ops.Greater(ops.ReduceSum(x, keepdims=0), F4(0)),
        then_branch=_body([], [ops.Tanh(sg.capture(x), name="inside")], "then"),
        else_branch=_body([], [ops.Exp(sg.capture(x), name="other")], "else"),
        name="choice",
    )
    model = sg.compile_model(sg.Graph([x], [y]), "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    for value, wanted in ((1, "inside"), (-1, "other"), (1, "inside")):
        request.infer([np.full((200, 200), value, F4)])
        names = [entry.node for entry in request.profile()]
        assert names.count(wanted) == names.count("choice") == 1
        assert len({"inside", "other"}.intersection(names)) == 1
        assert all(entry.seconds >= 0 for entry in request.profile())
