"""Every operator on every device that takes it, against the reference: NumPy and onnx.reference."""

from __future__ import annotations

from functools import cache
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array, dtype_of
from subgraph.operators.builder import operator
from subgraph.operators.reference import evaluate
from tests.support.operator_cases import SHAPES, Case, Inputs, all_cases

CASES = all_cases()
DEVICES = ["CPU"]
HALVES = {"float16": 3e-3, "bfloat16": 1.6e-2}
RELATIVE = {"float32": 2e-5, "float64": 1e-12, **HALVES}


@cache
def core() -> sg.Core:
    return sg.Core()


def graph_of(case: Case) -> tuple[sg.Graph, list[Array]]:
    """Return the operator alone as a graph, and what its inputs get."""
    values: list[Any] = []
    given_: list[Array] = []
    inputs: list[Any] = []
    for k, array in enumerate(case.inputs):
        if array is None:
            values.append(None)
        elif k in case.constants:
            values.append(sg.parameter(f"w{k}", array))
        else:
            values.append(sg.input(f"x{k}", array.shape, dtype_of(array)))
            inputs.append(values[-1])
            given_.append(array)
    made = operator(case.op)(
        *values, outputs=case.outputs, version=case.version, name="tried", **case.attrs
    )
    outputs = list(made) if isinstance(made, tuple) else [made]
    return sg.Graph(inputs=inputs, outputs=outputs, name="case"), given_


def expected(graph: sg.Graph, case: Case) -> list[Array]:
    """Return what the reference gives; half precision is computed in single and then rounded."""
    node = graph.nodes[0]
    arrays = [np.asarray(a) if a is not None else None for a in case.inputs]
    halves = {dtype_of(a) for a in arrays if a is not None} & set(HALVES)
    if not halves or case.op in ("Cast", "CastLike"):
        return [np.asarray(r) for r in evaluate(node, arrays)]
    wide = [a.astype(np.float32) if a is not None and dtype_of(a) in HALVES else a for a in arrays]
    half = next(a.dtype for a in arrays if a is not None and dtype_of(a) in HALVES)
    results = [np.asarray(r) for r in evaluate(node, wide)]
    return [r.astype(half) if r.dtype == np.float32 else r for r in results]


def assert_close(got: Array, want: Array, tolerance: float, what: str) -> None:
    """Compare with the tolerance that the dtype has."""
    assert got.shape == want.shape, what
    assert got.dtype == want.dtype, what
    relative = RELATIVE.get(dtype_of(want))
    if relative is None:
        np.testing.assert_array_equal(got, want, err_msg=what)
        return
    absolute = max(tolerance, relative / 100) if dtype_of(want) != "float64" else tolerance / 1e3
    np.testing.assert_allclose(
        got.astype(np.float64),
        want.astype(np.float64),
        rtol=relative,
        atol=absolute,
        err_msg=what,
    )


def check(case: Case, device: str) -> None:
    """Run a case on a device, which must take it, and compare."""
    graph, arrays = graph_of(case)
    answer = core().query_model(graph, device)
    if device == "CPU" and graph.nodes:
        assert answer.get("tried") == device, getattr(answer, "reasons", {}).get("tried")
    elif "tried" not in answer:
        pytest.skip(f"{device} does not take it: {answer.reasons.get('tried')}")
    with np.errstate(all="ignore"):
        wanted = expected(graph, case)
    for value, want in zip(graph.outputs, wanted, strict=False):
        stated = value.type
        assert isinstance(stated, sg.TensorType), case.name
        assert stated.dtype == dtype_of(want), case.name
        if stated.is_static:
            assert stated.shape == want.shape, case.name
    results = core().compile_model(graph, device)(arrays)
    for k, want in enumerate(wanted):
        assert_close(np.asarray(results[k]), want, case.tolerance, f"{case.name} output {k}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_operator(case: Case, device: str) -> None:
    check(case, device)


SMALL = st.lists(st.integers(0, 5), max_size=4).map(tuple)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(SMALL, st.data())
def test_broadcasting(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Any two shapes that broadcast, in one order and the other."""
    cut = data.draw(st.integers(0, len(shape)))
    other = tuple(data.draw(st.sampled_from((n, 1))) for n in shape[cut:])
    make = Inputs(str(shape))
    check(Case("Sub", [make(shape), make(other)]), "CPU")
    check(Case("Less", [make(other), make(shape)]), "CPU")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 6), min_size=1, max_size=5).map(tuple), st.data())
def test_permutations_and_boxes(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Any permutation; any box with any steps."""
    x = Inputs(str(shape))(shape)
    order = tuple(data.draw(st.permutations(range(len(shape)))))
    check(Case("Transpose", [x], attrs={"perm": order}), "CPU")
    bound = st.integers(-8, 8)
    starts = np.array([data.draw(bound) for _ in shape], np.int64)
    ends = np.array([data.draw(bound) for _ in shape], np.int64)
    step = st.integers(-3, 3).filter(bool)
    steps = np.array([data.draw(step) for _ in shape], np.int64)
    axes = np.arange(len(shape), dtype=np.int64)
    check(Case("Slice", [x, starts, ends, axes, steps], constants=[1, 2, 3, 4]), "CPU")


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 20), min_size=1, max_size=4).map(tuple), st.data())
def test_reduced_axes(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Any set of axes, counted from either end."""
    x = Inputs(str(shape))(shape)
    rank = len(shape)
    axes = data.draw(st.lists(st.integers(0, rank - 1), unique=True))
    given_ = np.array([a - rank if data.draw(st.booleans()) else a for a in axes], np.int64)
    keep = {"keepdims": data.draw(st.integers(0, 1))}
    rounding = float(np.finfo(np.float32).eps * np.abs(x).sum())  # of a sum whose terms cancel
    for op in ("ReduceSum", "ReduceMax"):
        tolerance = max(1e-4, rounding) if op == "ReduceSum" else 1e-4
        case = Case(op, [x, given_], [1], version=18, attrs=keep, tolerance=tolerance)
        check(case, "CPU")


CHAIN_SHAPES = ((2, 16, 5, 7), (16, 1, 1), (1,), (2, 1, 5, 7), (7,), ())
ONE, TWO = ("Relu", "Tanh", "Neg", "Abs", "Sigmoid"), ("Add", "Sub", "Mul", "Max")


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_chains(data: st.DataObject) -> None:
    """Any graph of elementwise operators, fused and in place as the device likes."""
    inputs = [sg.input(f"x{k}", shape) for k, shape in enumerate(CHAIN_SHAPES)]
    values: list[Any] = list(inputs)
    for _ in range(data.draw(st.integers(1, 9))):
        pick = st.sampled_from(values)
        if data.draw(st.booleans()):
            values.append(
                operator(data.draw(st.sampled_from(TWO)))(data.draw(pick), data.draw(pick))
            )
        else:
            values.append(operator(data.draw(st.sampled_from(ONE)))(data.draw(pick)))
    made = values[len(inputs) :]
    more = data.draw(st.sets(st.integers(0, len(made) - 1), max_size=2))
    outputs = [made[-1], *(made[k] for k in sorted(more - {len(made) - 1}))]
    graph = sg.Graph(inputs=inputs, outputs=outputs)
    make = Inputs("chains")
    arrays = [make(shape) for shape in CHAIN_SHAPES]
    wanted = core().compile_model(graph, "REFERENCE")(arrays)
    results = core().compile_model(graph, "CPU")(arrays)
    for k in range(len(outputs)):
        assert_close(np.asarray(results[k]), np.asarray(wanted[k]), 1e-4, f"{graph}")


def test_threads_do_not_change_results() -> None:
    """The same bits for every number of threads."""
    make = Inputs("threads")
    cases = [
        Case("Exp", [make((37, 4099))]),
        Case("ReduceSum", [make((33, 5000)), np.array([0])], [1], version=13),
        Case("Softmax", [make((301, 77))], version=13),
        Case("Transpose", [make((130, 77, 5))], attrs={"perm": (2, 0, 1)}),
    ]
    for case in cases:
        graph, arrays = graph_of(case)
        results = [
            core().compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})(arrays)[0]
            for threads in (1, 2, 3)
        ]
        assert results[0].tobytes() == results[1].tobytes() == results[2].tobytes(), case.name


def test_a_view_beside_its_source_is_not_overwritten() -> None:
    """A step that reads a value and a view of it must not write over the value."""
    x = sg.input("x", (4, 300))
    y = ops.Relu(x)
    row = ops.Slice(y, np.array([0]), np.array([1]), np.array([0]))
    t = ops.Sigmoid(x)
    turned = ops.Transpose(t, perm=(1, 0))
    graph = sg.Graph(
        inputs=[x],
        outputs=[
            ops.Mul(ops.Add(y, row), np.float32(2)),
            ops.Sub(turned, ops.Reshape(t, np.array([300, 4]))),
        ],
    )
    array = Inputs("views")((4, 300))
    wanted = core().compile_model(graph, "REFERENCE")([array])
    results = core().compile_model(graph, "CPU")([array])
    for k in range(2):
        assert_close(results[k], wanted[k], 1e-6, f"output {k}")


def test_shapes_cover_rank_zero_empty_and_broadcast() -> None:
    """The table of shapes keeps its corners."""
    assert ((), ()) in SHAPES
    assert any(0 in a for a, _ in SHAPES)
    assert any(a != b for a, b in SHAPES)
