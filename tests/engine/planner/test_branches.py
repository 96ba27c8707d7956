"""If on CPU: the steps of both branches are in one program, and a run executes one branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine.cpu import iterations
from subgraph.graph.types import Array
from subgraph.runtime import control_flow
from tests.support.peer import check_results, random, session_of

F4 = np.float32


@pytest.fixture(autouse=True, scope="module")
def by_python() -> Iterator[list[str]]:
    """The operators with bodies that the default executor ran; cheap branches stay branches."""
    found: list[str] = []
    make = control_flow.control_flow

    def recorded(node: sg.Node, bodies: Sequence[control_flow.BodyExecutor]) -> Any:
        run = make(node, bodies)

        def call(inputs: Sequence[Any]) -> Sequence[Any]:
            found.append(node.op_type)
            return run(inputs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control_flow, "control_flow", recorded)
        patch.setattr("subgraph.passes.control_flow.unfold_control_flow._MAX_BRANCH_COST", -1)
        yield found


@pytest.fixture
def python(by_python: list[str]) -> list[str]:
    """The operators that the default executor ran in one test."""
    by_python.clear()
    return by_python


def _both(graph: sg.Graph, *rounds: Sequence[Array]) -> sg.CompiledModel:
    """Check one thread against ONNX Runtime, and two threads against one bit for bit."""
    session = session_of(graph)
    one, two = (sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": n}) for n in (1, 2))
    for inputs in rounds:
        check_results(one, session, inputs, tolerance=1e-4)
        for mine, other in zip(one(list(inputs)), two(list(inputs)), strict=True):
            np.testing.assert_array_equal(mine, other)
    return one


def _branch(*results: sg.Value, name: str = "branch") -> sg.Graph:
    return sg.Graph([], list(results), name)


def _above(x: sg.Value, least: float = 0) -> sg.Value:
    return ops.Greater(ops.ReduceSum(x, keepdims=0), F4(least))


def _signs(*shape: int) -> list[list[Array]]:
    """Inputs for one branch, the other, and the first again."""
    positive = np.abs(random(*shape))
    return [[positive], [-positive], [positive]]


# ---------------------------------------------------------------- random graphs

_SIDE = 6
_IMAGE = (1, 16, 5, 5)
_Values = list[sg.Value]
# The sums that conditions compare with. Sums of these graphs are often exactly an integer, before
# rounding: 0 for a value that contains each number and its negative, 6 for a softmax. An integer
# here would let the rounding of the sum choose the branch.
_LEAST = (-2.3, -0.7, 0.4, 1.6, 2.9)
_WEIGHTS: dict[tuple[int, tuple[int, ...]], sg.Value] = {}


def _weight(draw: st.DrawFn, *shape: int) -> sg.Value:
    number = draw(st.integers(0, 3))
    key = number, shape
    if key not in _WEIGHTS:
        name = f"w{len(_WEIGHTS)}"
        _WEIGHTS[key] = sg.parameter(name, random(*shape, seed=number) / shape[1])
    return _WEIGHTS[key]


def _of_matrix(draw: st.DrawFn, values: _Values) -> sg.Value:
    a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
    match draw(st.integers(0, 7)):
        case 0:
            return ops.Tanh(ops.MatMul(a, _weight(draw, _SIDE, _SIDE)))
        case 1:
            return ops.MatMul(ops.Softmax(a, axis=1), ops.Sigmoid(b))
        case 2:  # parts of a larger value, one of them computed in its place
            both = ops.Concat(a, ops.Neg(b), axis=0)
            return ops.Add(
                ops.Slice(both, np.array([3]), np.array([_SIDE + 3]), np.array([0])),
                ops.ReduceMean(both, np.array([0]), keepdims=1),
            )
        case 3:
            return ops.Transpose(ops.Mul(a, b), perm=[1, 0])
        case 4:
            first, second = ops.Split(a, np.array([2, 4]), axis=0, outputs=2)
            return ops.Concat(second, first, axis=0)
        case 5:
            return ops.Identity(a)
        case 6:
            return ops.Reshape(ops.Relu(ops.Sub(a, b)), np.array([_SIDE, _SIDE]))
        case _:
            return ops.Sin(a)


def _of_image(draw: st.DrawFn, values: _Values) -> sg.Value:
    a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
    channels = _IMAGE[1]
    match draw(st.integers(0, 6)):
        case 0:
            return ops.Relu(ops.Conv(a, _weight(draw, channels, channels, 3, 3), pads=[1] * 4))
        case 1:
            return ops.Conv(a, _weight(draw, channels, channels, 1, 1))
        case 2:
            return ops.MaxPool(a, kernel_shape=[3, 3], pads=[1] * 4)
        case 3:
            return ops.Add(a, b)
        case 4:
            return ops.Mul(a, ops.Sigmoid(ops.GlobalAveragePool(b)))
        case 5:
            return ops.Transpose(a, perm=[0, 1, 3, 2])
        case _:
            return ops.Identity(a)


def _grown(draw: st.DrawFn, values: _Values, depth: int, image: bool, number: list[int]) -> _Values:
    values = list(values)
    for _ in range(draw(st.integers(0, 4))):
        if depth and draw(st.booleans()):
            values += _if(draw, values, depth - 1, image, number)
        else:
            values.append((_of_image if image else _of_matrix)(draw, values))
    return values


def _if(draw: st.DrawFn, values: _Values, depth: int, image: bool, number: list[int]) -> _Values:
    """Return an If over some of these values; a branch may be empty or return an outer value."""
    condition = _above(draw(st.sampled_from(values)), draw(st.sampled_from(_LEAST)))
    results = draw(st.integers(1, 2))
    bodies: list[sg.Graph] = []
    for _ in range(2):
        number[0] += 1
        inner = _grown(draw, [sg.capture(v) for v in values], depth, image, number)
        chosen = [draw(st.sampled_from(inner)) for _ in range(results)]
        bodies.append(_branch(*chosen, name=f"branch{number[0]}"))
    made = ops.If(condition, then_branch=bodies[0], else_branch=bodies[1], outputs=results)
    return [made] if results == 1 else list(made)


@st.composite
def _graphs(draw: st.DrawFn, image: bool) -> sg.Graph:
    shape = _IMAGE if image else (_SIDE, _SIDE)
    inputs = [sg.input(name, shape) for name in "xy"]
    values = _grown(draw, inputs, 2, image, number := [0])
    values += _if(draw, values, 1, image, number)
    values = _grown(draw, values, 0, image, number)
    return sg.Graph(inputs, [ops.Neg(values[-1]), ops.Sum(*values)], "random")


@pytest.mark.parametrize("image", [False, True])
def test_random_graphs(image: bool, by_python: list[str]) -> None:
    shape = _IMAGE if image else (_SIDE, _SIDE)

    @settings(max_examples=60, deadline=None)
    @given(_graphs(image))
    def check(graph: sg.Graph) -> None:
        by_python.clear()
        rounds = [[random(*shape, seed=k), random(*shape, seed=k + 1)] for k in range(4)]
        _both(graph, *rounds)
        assert not by_python

    check()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_branches_in_loops(data: st.DataObject) -> None:
    """The number of an iteration decides which branch it runs."""
    count, x = sg.input("count", (), "int64"), sg.input("x", (_SIDE, _SIDE))
    number, going = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    state = sg.input("state", (_SIDE, _SIDE))
    draw: Any = data.draw
    values = [state, ops.Mul(sg.capture(x), ops.Cast(number, to=1))]
    made = _if(draw, _grown(draw, values, 0, False, [0]), 1, False, [0])
    results = [ops.Identity(going), ops.Tanh(made[0]), ops.ReduceMean(made[-1], keepdims=0)]
    body = sg.Graph([number, going, state], results, "body")
    outputs = ops.Loop(count, None, x, body=body)
    rounds = [[np.array(n, np.int64), random(_SIDE, _SIDE, seed=n)] for n in (0, 1, 5, 9)]
    _both(sg.Graph([count, x], list(outputs)), *rounds)


# ---------------------------------------------------------------- one case each


@pytest.mark.parametrize("size", [8, 300])
def test_one_branch_is_run(size: int, python: list[str]) -> None:
    """With two threads, the steps of the larger size are divided among both."""
    x = sg.input("x", (size, size))
    weight = sg.parameter("w", random(size, size, seed=1) / size)
    inside = sg.capture(x)
    y = ops.If(
        _above(x),
        then_branch=_branch(ops.MatMul(ops.Tanh(ops.MatMul(inside, weight)), inside)),
        else_branch=_branch(ops.Exp(sg.capture(x))),
    )
    _both(sg.Graph([x], [ops.Add(y, x), y]), *_signs(size, size))
    assert not python


def test_one_run_makes_all_iterations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd and even iterations take different branches, without Python between them."""
    made: list[int] = []
    run = iterations.Iterations.run

    def recorded(self: iterations.Iterations, inputs: Sequence[Any], limit: int) -> Any:
        found = run(self, inputs, limit)
        made.append(limit)
        return found

    monkeypatch.setattr(iterations.Iterations, "run", recorded)
    count, x = sg.input("count", (), "int64"), sg.input("x", (4, 30))
    number, going = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    state = sg.input("state", (4, 30))
    weight = sg.parameter("w", random(30, 30, seed=1) / 30)
    product = ops.MatMul(sg.capture(state), weight)
    stepped = ops.If(
        ops.Equal(ops.Mod(number, np.int64(2)), np.int64(0)),
        then_branch=_branch(ops.Tanh(ops.MatMul(product, weight)), name="even"),
        else_branch=_branch(ops.Identity(sg.capture(state)), name="odd"),
    )
    body = sg.Graph([number, going, state], [ops.Identity(going), stepped, stepped], "body")
    graph = sg.Graph([count, x], list(ops.Loop(count, None, x, body=body)))
    _both(graph, *([np.array(n, np.int64), random(4, 30)] for n in (1, 2, 70)))
    assert set(made) == {1, 2, 70}


@pytest.mark.parametrize(("channels", "side"), [(16, 6), (256, 64)])
def test_converted_outer_values_are_not_shared_between_branches(
    channels: int, side: int, python: list[str]
) -> None:
    """The blocked form that one branch makes of a value or weight is not used after the other.

    The weights of the larger case are transformed in each run.
    """
    shape = 1, channels, side, side
    x = sg.input("x", shape)
    filters = sg.parameter("w", random(channels, channels, 3, 3, seed=1) / 9 / channels)
    outer = ops.Sin(ops.Transpose(x, perm=[0, 1, 3, 2]))

    def convolved(value: sg.Value) -> sg.Value:
        return ops.Conv(value, filters, pads=[1, 1, 1, 1])

    y = ops.If(
        _above(x),
        then_branch=_branch(convolved(sg.capture(outer)), name="then"),
        else_branch=_branch(ops.Neg(convolved(sg.capture(outer))), name="else"),
    )
    _both(sg.Graph([x], [y, ops.Add(y, convolved(outer)), convolved(outer)]), *_signs(*shape))
    assert not python


def test_a_result_that_contains_an_outer_value(python: list[str]) -> None:
    """The other branch reads the same value and writes its result to the same memory."""
    x = sg.input("x", (4, 6))
    outer = ops.Sin(x)
    y = ops.If(
        _above(x),
        then_branch=_branch(ops.Concat(sg.capture(x), sg.capture(outer), axis=0), name="then"),
        else_branch=_branch(
            ops.Concat(ops.Neg(sg.capture(outer)), ops.Cos(sg.capture(outer)), axis=0),
            name="else",
        ),
    )
    _both(sg.Graph([x], [ops.Add(y, F4(1))]), *_signs(4, 6))
    assert not python


def test_results_that_are_constants_weights_inputs_and_one_another(python: list[str]) -> None:
    x = sg.input("x", (2, 3))
    weight = sg.parameter("w", random(2, 3, seed=1))
    computed = ops.Tanh(sg.capture(x))
    then = _branch(ops.Constant(value=random(2, 3, seed=2)), computed, computed, name="then")
    other = _branch(ops.Identity(weight), sg.capture(x), ops.Exp(sg.capture(x)), name="else")
    outputs = ops.If(_above(x), then_branch=then, else_branch=other, outputs=3)
    _both(sg.Graph([x], list(outputs)), *_signs(2, 3))
    assert not python


def test_empty_branches(python: list[str]) -> None:
    x = sg.input("x", (2, 3))
    outer = ops.Sin(x)
    y = ops.If(
        _above(x),
        then_branch=_branch(sg.capture(x), name="then"),
        else_branch=_branch(sg.capture(outer), name="else"),
    )
    _both(sg.Graph([x], [y, ops.Neg(y)]), *_signs(2, 3))
    assert not python


def test_values_without_elements(python: list[str]) -> None:
    x = sg.input("x", ("rows", 3))
    y = ops.If(
        _above(x),
        then_branch=_branch(ops.Exp(sg.capture(x)), name="then"),
        else_branch=_branch(ops.Neg(sg.capture(x)), name="else"),
    )
    _both(sg.Graph([x], [y]), [random(0, 3)], [random(2, 3)], [-np.ones((9, 3), F4)])
    assert not python


def test_sizes_that_change_from_call_to_call(python: list[str]) -> None:
    """Programs of a symbolic plan, whose sizes are computed for each instance."""
    x = sg.input("x", ("rows", 8))
    weight = sg.parameter("w", random(8, 8, seed=1))
    y = ops.If(
        _above(x),
        then_branch=_branch(ops.Relu(ops.MatMul(sg.capture(x), weight)), name="then"),
        else_branch=_branch(ops.Concat(ops.Sin(sg.capture(x)), axis=0), name="else"),
    )
    rounds = [[np.full((rows, 8), sign, F4)] for rows in (3, 5, 17, 40, 41) for sign in (1, -1)]
    _both(sg.Graph([x], [ops.Softmax(y, axis=1)]), *rounds)
    assert not python


def test_a_condition_on_sizes(python: list[str]) -> None:
    """Each outcome has its plans, instances of symbolic plans among them."""
    x = sg.input("x", ("rows", 4))
    many = ops.Greater(ops.Gather(ops.Shape(x), np.int64(0)), np.int64(10))
    inside = sg.capture(x)
    y = ops.If(
        many,
        then_branch=_branch(ops.ReduceMax(inside, np.array([1]), keepdims=0), name="then"),
        else_branch=_branch(ops.Concat(inside, ops.Tanh(inside), axis=1), name="else"),
    )
    _both(sg.Graph([x], [ops.Exp(y)]), *([random(rows, 4)] for rows in (3, 5, 20, 8, 30, 11)))
    assert not python


def test_a_condition_on_sizes_that_sample_sizes_do_not_fit(python: list[str]) -> None:
    """The query's sample sizes do not fit the Reshape, so it cannot decide the condition."""
    x, z = sg.input("x", ("rows", "samples")), sg.input("z", (1, 5))
    frames = ops.Reshape(x, np.array([1, -1, 100]))
    flat = ops.Equal(ops.Gather(ops.Shape(frames), np.int64(1)), np.int64(2))
    inside = sg.capture(z)
    y = ops.If(
        flat,
        then_branch=_branch(ops.Squeeze(inside, np.array([0])), name="then"),
        else_branch=_branch(ops.Exp(inside), name="else"),
    )
    rounds = [[random(4, 50), random(1, 5)], [random(3, 100), random(1, 5)]]
    _both(sg.Graph([x, z], [ops.Tanh(y), ops.Neg(frames)]), *rounds)
    assert not python


def test_branches_of_other_shapes_are_run_by_the_executor(python: list[str]) -> None:
    x = sg.input("x", ("rows", 3))
    inside = sg.capture(x)
    y = ops.If(
        _above(x),
        then_branch=_branch(ops.Concat(inside, ops.Tanh(inside), axis=0), name="then"),
        else_branch=_branch(ops.Exp(sg.capture(x)), name="else"),
    )
    graph = sg.Graph([x], [ops.Neg(y), ops.Sin(x)])
    _both(graph, *_signs(2, 3), *_signs(5, 3))
    assert "If" in python
    fixed = sg.input("x", (2, 3))
    inside = sg.capture(fixed)
    y = ops.If(
        _above(fixed),
        then_branch=_branch(ops.Concat(inside, inside, axis=0), name="then"),
        else_branch=_branch(ops.Exp(sg.capture(fixed)), name="else"),
        name="choice",
    )
    found: Any = sg.default_core().query_model(sg.Graph([fixed], [y]), "CPU")
    assert "float32[4, 3] and as float32[2, 3]" in found.reasons["choice"]


def test_data_decide_the_shape_inside_a_branch(python: list[str]) -> None:
    x = sg.input("x", (4, 3))
    flat = ops.Reshape(sg.capture(x), np.array([-1]))
    total = ops.ReduceSum(ops.Compress(flat, ops.Greater(flat, F4(0.5))))
    y = ops.If(
        _above(x),
        then_branch=_branch(ops.Squeeze(total, np.array([0])), name="then"),
        else_branch=_branch(ops.ReduceMax(sg.capture(x), keepdims=0), name="else"),
    )
    _both(sg.Graph([x], [ops.Neg(y)]), *_signs(4, 3))


def _selected(size: int, rows: int | str = "rows") -> sg.Graph:
    """Return a network for each of two rates; the sizes fit only the selected one."""
    rate, x = sg.input("rate", (), "int64"), sg.input("x", (rows, size))

    def network(width: int, name: str) -> sg.Graph:
        parts = ops.Reshape(sg.capture(x), np.array([0, 2, width]))
        weight = sg.parameter(f"w{width}", random(width, 4, seed=width))
        return _branch(
            ops.Tanh(ops.ReduceMean(ops.MatMul(parts, weight), np.array([1]))), name=name
        )

    y = ops.If(
        ops.Equal(rate, np.int64(16)),
        then_branch=network(16, "then"),
        else_branch=network(8, "else"),
    )
    return sg.Graph([rate, x], [ops.Neg(y)])


def test_an_input_selects_the_branch_that_fits(python: list[str]) -> None:
    graph = _selected("samples")  # type: ignore[arg-type]
    rounds = [
        [np.array(rate, np.int64), random(rows, 2 * rate)]
        for rows, rate in ((3, 16), (3, 8), (5, 16), (5, 8), (7, 16), (3, 8))
    ]
    _both(graph, *rounds)
    assert not python


def test_an_input_of_many_values_is_not_a_selection(python: list[str]) -> None:
    """Plans are not specialized on a number that differs in every call."""
    graph = _selected("samples")  # type: ignore[arg-type]
    rounds = [[np.array(number, np.int64), random(3, 16)] for number in range(20, 40)]
    _both(graph, *rounds, [np.array(16, np.int64), random(3, 32)])
    assert "If" in python


def test_weights_inside_branches_change(python: list[str]) -> None:
    x = sg.input("x", (4, 8))
    weights = [sg.parameter(name, random(8, 8, seed=k)) for k, name in enumerate("ab")]
    branches = [_branch(ops.MatMul(sg.capture(x), w), name=w.name) for w in weights]
    y = ops.If(_above(x), then_branch=branches[0], else_branch=branches[1])
    model = sg.compile_model(sg.Graph([x], [y]), "CPU")
    for seed in (5, 6):
        for (item,), weight in zip(_signs(4, 8), weights, strict=False):
            assert weight.parameter is not None
            weight.parameter.assign(random(8, 8, seed=seed))
            wanted = item @ random(8, 8, seed=seed)
            np.testing.assert_allclose(model([item])[0], wanted, rtol=1e-4, atol=1e-5)
    assert not python


def test_quantized_values_in_branches_that_capture(python: list[str]) -> None:
    x = sg.input("x", (3, 4))
    scale, zero = sg.parameter("scale", F4(0.05)), sg.parameter("zero", np.uint8(3))

    def rounded(value: sg.Value) -> Any:
        return ops.DequantizeLinear(ops.QuantizeLinear(value, scale, zero), scale, zero)

    branches = [_branch(rounded(f(sg.capture(x)))) for f in (ops.Relu, ops.Tanh)]
    graph = sg.Graph([x], [ops.If(_above(x), then_branch=branches[0], else_branch=branches[1])])
    _both(graph, *_signs(3, 4))
    assert python == []


def test_constants_of_unfolded_loops_inside_and_beside_branches(python: list[str]) -> None:
    """Unfolding makes constants of the same names in the graph and in each branch."""
    x = sg.input("x", (3, 4))

    def sums(rows: sg.Value, number: int) -> Any:
        state, row = sg.input(f"state{number}", (4,)), sg.input(f"row{number}", (4,))
        body = sg.Graph([state, row], [ops.Add(state, row), ops.Mul(state, row)], f"body{number}")
        start = sg.parameter(f"start{number}", np.ones(4, F4))
        scan = ops.Scan(start, rows, num_scan_inputs=1, scan_input_directions=[1], body=body)
        return scan[1]

    inside = sg.capture(x)
    inner = ops.If(
        _above(inside, 1),
        then_branch=_branch(sums(sg.capture(inside), 1)),
        else_branch=_branch(sums(sg.capture(inside), 2)),
    )
    other = _branch(sums(sg.capture(x), 3))
    outer = ops.If(_above(x), then_branch=_branch(inner), else_branch=other)
    graph = sg.Graph([x], [ops.Sub(outer, sums(x, 4))])
    _both(graph, *_signs(3, 4))
    assert python == []


def test_an_exported_model_keeps_its_branches(tmp_path: Any, python: list[str]) -> None:
    x = sg.input("x", (4, 8))
    weight = sg.parameter("w", random(8, 8, seed=1))
    y = ops.If(
        _above(x),
        then_branch=_branch(ops.Relu(ops.MatMul(sg.capture(x), weight)), name="then"),
        else_branch=_branch(ops.Sin(sg.capture(x)), name="else"),
    )
    model = sg.compile_model(sg.Graph([x], [y]), "CPU")
    wanted = [model(inputs)[0] for inputs in _signs(4, 8)]
    model.export_model(tmp_path / "model.blob")
    again = sg.default_core().import_model(tmp_path / "model.blob", "CPU")
    for inputs, result in zip(_signs(4, 8), wanted, strict=True):
        np.testing.assert_array_equal(again(inputs)[0], result)
    assert not python
