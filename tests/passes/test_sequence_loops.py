"""Loops that append to a sequence: it becomes a scan, or sums of segments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from tests.support.peer import check_results, session_of

F4 = np.float32


def _appending(shape: tuple[int, ...], **joined: Any) -> sg.Graph:
    """Return a loop that appends an item of this shape each turn, and joins what it has."""
    count, x = sg.input("count", (), "int64"), sg.input("x", shape)
    turn, true = sg.input("turn", (), "int64"), sg.input("going", (), "bool")
    state, items = sg.input("state", shape), ops.SequenceEmpty()
    held = sg.input("held", type=sg.SequenceType(sg.TensorType("float32")))
    stepped = ops.Tanh(ops.Add(state, F4(0.5)))
    results = [ops.Identity(true), stepped, ops.SequenceInsert(held, stepped), ops.Cast(turn, to=1)]
    body = sg.Graph([turn, true, state, held], results, "body")
    last, sequence, numbers = ops.Loop(count, None, x, items, body=body)
    return sg.Graph([count, x], [ops.ConcatFromSequence(sequence, **joined), last, numbers])


def _kinds(graph: sg.Graph) -> set[str]:
    return {node.op_type for level in graph.levels() for node in level.nodes}


@pytest.mark.parametrize("stacks", [0, 1])
@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 1, 3)])
def test_what_is_appended_is_stacked(shape: tuple[int, ...], stacks: int) -> None:
    """Along every axis, and along new ones; ONNX Runtime has sequences."""
    rng = np.random.default_rng(0)
    rank = len(shape) + stacks
    for axis in range(-rank, rank):
        graph = _appending(shape, axis=axis, new_axis=stacks)
        assert "ConcatFromSequence" not in _kinds(passes.apply_pass(graph, "CollectSequences"))
        model, session = sg.compile_model(graph, "CPU"), session_of(graph)
        for count in (1, 2, 7):
            given = [np.array(count), rng.standard_normal(shape).astype(F4)]
            check_results(model, session, given, tolerance=1e-6)


def test_of_no_turns_nothing_is_joined() -> None:
    model = sg.compile_model(_appending((2, 3), axis=1, new_axis=0), "CPU")
    assert model([np.array(0), np.zeros((2, 3), F4)])[0].shape == (2, 0)


@pytest.mark.parametrize("case", ["position", "read", "given away", "begun", "unknown", "strings"])
def test_sequences_that_stay(case: str) -> None:
    count = sg.input("count", (), "int64")
    text = case == "strings"
    type_ = "string" if text else "float32"
    x = sg.input("x", ("n",) if case == "unknown" else (2,), type_)
    turn, true = sg.input("turn", (), "int64"), sg.input("going", (), "bool")
    held = sg.input("held", type=sg.SequenceType(sg.TensorType(type_)))
    item = ops.Identity(sg.capture(x)) if text else ops.Neg(sg.capture(x))
    at = [np.array(0)] if case == "position" else []
    results = [ops.Identity(true), ops.SequenceInsert(held, item, *at)]
    if case == "read":
        results.append(ops.SequenceLength(held))
    body = sg.Graph([turn, true, held], results, "body")
    begun = (
        ops.SequenceConstruct(x) if case == "begun" else ops.SequenceEmpty(dtype=8 if text else 1)
    )
    outputs = ops.Loop(count, None, begun, body=body)
    sequence = outputs[0] if case == "read" else outputs
    found = [
        ops.ConcatFromSequence(sequence, axis=0),
        *([sequence] if case == "given away" else []),
    ]
    graph = sg.Graph([count, x], found)
    assert "ConcatFromSequence" in _kinds(passes.apply_pass(graph, "CollectSequences"))


def _bags(
    offsets: sg.Value,
    rows: sg.Value,
    bags: int,
    *,
    mean: bool = False,
    begin: int = 0,
    step: int = 1,
    empty: float = 0.0,
    axis: int = 0,
) -> Any:
    """Return the loop that PyTorch's exporter writes for EmbeddingBag."""
    turn, true = sg.input("turn", (), "int64"), sg.input("going", (), "bool")
    index = sg.input("index", (), "int64")
    held = sg.input("held", type=sg.SequenceType(sg.TensorType("float32")))
    one = sg.parameter("one", np.array(1))
    at = ops.Reshape(index, np.array([-1]))
    following = ops.Add(at, ops.CastLike(one, at))
    inner = sg.capture(offsets)
    first = ops.Slice(inner, at, following)
    last = ops.Slice(inner, following, ops.Add(at, np.array(2)))
    reduce = ops.ReduceMean if mean else ops.ReduceSum
    taken = ops.Slice(sg.capture(sg.capture(rows)), sg.capture(first), sg.capture(last))
    zeros = sg.parameter("zeros", np.full((1, 5), empty, F4))
    row = ops.If(
        ops.Equal(first, last),
        then_branch=sg.Graph([], [zeros], "then"),
        else_branch=sg.Graph([], [reduce(taken, np.array([axis]))], "else"),
    )
    stepped = ops.Add(index, np.array(step))
    results = [ops.Less(stepped, np.array(bags)), stepped, ops.SequenceInsert(held, row)]
    body = sg.Graph([turn, true, index, held], results, "body")
    start = sg.parameter("start", np.array(begin))
    _, sequence = ops.Loop(None, np.array(True), start, ops.SequenceEmpty(), body=body)
    return ops.Tanh(ops.ConcatFromSequence(sequence, axis=0))


def _of_bags(ends: int = 9, bags: int = 8, **case: Any) -> sg.Graph:
    offsets, rows = sg.input("offsets", (ends,), "int64"), sg.input("rows", (30, 5))
    return sg.Graph([offsets, rows], [_bags(offsets, ops.Exp(rows), bags, **case)])


@pytest.mark.parametrize(("device", "threads"), [("CPU", 1), ("CPU", 2), ("OPENCL", 0)])
@pytest.mark.parametrize("mean", [False, True])
def test_bags_of_rows_are_segments(mean: bool, threads: int, device: str) -> None:
    """Empty ones, ends beyond the rows, and ends counted from the last one."""
    graph = _of_bags(mean=mean)
    assert not _kinds(passes.apply_pass(graph, "ReduceSegments")) & {"Loop", "If"}
    config = {"INFERENCE_NUM_THREADS": threads} if device == "CPU" else {}
    model = sg.compile_model(graph, device, config)
    session = session_of(graph)
    rng = np.random.default_rng(0)
    cases = [np.sort(rng.integers(0, 31, 9)) for _ in range(5)]
    cases += [
        np.array([0, 0, 3, 3, 3, 10, 29, 30, 99]),
        np.array([-9, -5, -5, -1, 30, 30, 31, 33, 33]),
    ]
    for offsets in cases:
        if mean:
            offsets = np.sort(np.clip(np.abs(offsets), 0, 30))
        given = [offsets, rng.standard_normal((30, 5)).astype(F4)]
        check_results(model, session, given, tolerance=1e-6)


@pytest.mark.parametrize(
    "case",
    [
        {"begin": 1, "ends": 10},
        {"step": 2},
        {"ends": 12},
        {"empty": 1.0},
        {"bags": 7},
    ],
)
def test_loops_that_are_no_segments(case: dict[str, Any]) -> None:
    graph = _of_bags(**case)
    assert "Loop" in _kinds(passes.apply_pass(graph, "ReduceSegments"))
    model, session = sg.compile_model(graph, "CPU"), session_of(graph)
    offsets = np.sort(np.random.default_rng(0).integers(0, 31, case.get("ends", 9)))
    check_results(model, session, [offsets, np.ones((30, 5), F4)], tolerance=1e-6)


def test_a_number_of_bags_that_changes() -> None:
    """What the pass has read is watched: a parameter that says other turns gives a loop again."""
    offsets, rows = sg.input("offsets", (9,), "int64"), sg.input("rows", (30, 5))
    graph = sg.Graph([offsets, rows], [_bags(offsets, rows, 8)])
    model = sg.compile_model(graph, "CPU")
    values = np.random.default_rng(0).standard_normal((30, 5)).astype(F4)
    given: list[Array] = [np.arange(0, 27, 3), values]
    check_results(model, session_of(graph), given, tolerance=1e-6)
    changed = next(name for name in model.parameters if "zeros" in name)
    model.parameters[changed].assign(np.full((1, 5), 3, F4))
    given[0][4] = given[0][3]
    check_results(model, session_of(graph), given, tolerance=1e-6)
