"""Loops that append to a sequence which is joined behind them, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
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


@pytest.mark.parametrize("stacks", [0, 1])
@pytest.mark.parametrize("shape", [(4,), (2, 1, 3)])
def test_what_is_appended_is_joined(shape: tuple[int, ...], stacks: int) -> None:
    """Along every axis, and along new ones."""
    rng = np.random.default_rng(0)
    rank = len(shape) + stacks
    for axis in range(-rank, rank):
        graph = _appending(shape, axis=axis, new_axis=stacks)
        model, session = sg.compile_model(graph, "CPU"), session_of(graph)
        for count in (1, 7):
            given = [np.array(count), rng.standard_normal(shape).astype(F4)]
            check_results(model, session, given, tolerance=1e-6)


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


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize(
    "case",
    [{}, {"mean": True}, {"begin": 1, "ends": 10}, {"step": 2}, {"ends": 12}, {"empty": 1.0}],
)
def test_bags_of_rows(case: dict[str, Any], device: str) -> None:
    """Empty ones, ends beyond the rows, and ends counted from the last one."""
    graph = _of_bags(**case)
    model, session = sg.compile_model(graph, device), session_of(graph)
    rng, ends = np.random.default_rng(0), case.get("ends", 9)
    cases = [np.sort(rng.integers(0, 31, ends))]
    if ends == 9 and not case.get("mean"):
        cases += [
            np.array([0, 0, 3, 3, 3, 10, 29, 30, 99]),
            np.array([-9, -5, -5, -1, 30, 30, 31, 33, 33]),
        ]
    for offsets in cases:
        given = [offsets, rng.standard_normal((30, 5)).astype(F4)]
        check_results(model, session, given, tolerance=1e-6)


def test_a_number_of_bags_that_changes() -> None:
    """A parameter inside of a branch inside of a loop may be assigned."""
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
