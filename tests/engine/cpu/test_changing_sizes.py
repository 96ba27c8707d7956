"""Loops in whose iterations data decide sizes, or states grow: CPU against ONNX Runtime."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.peer import check_results, compare, session_of

F4 = np.float32


def _loop(
    body: Callable[[sg.Value], Sequence[sg.Value]], *states: tuple[sg.Value, sg.Value]
) -> Any:
    """Return a loop of ``count`` iterations.

    Args:
        body: Returns the states, then the scan outputs, of the iteration with a number.
        *states: Initial values, and the inputs of the body that read the states.
    """
    number, true = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    inputs = [number, true, *(inner for _, inner in states)]
    graph = sg.Graph(inputs, [ops.Identity(true), *body(number)], "body")
    return ops.Loop(
        sg.input("count", (), "int64"), None, *(outer for outer, _ in states), body=graph
    )


def _inputs(value: Any) -> list[sg.Value]:
    """Return the inputs that a value depends on, ``count`` first."""
    found: dict[str, sg.Value] = {}
    work = [value]
    while work:
        current = work.pop()
        if current.producer is not None:
            work += current.producer.sources
        elif current.parameter is None:
            found[current.name] = current
    return [found.pop("count"), *(found[name] for name in sorted(found))]


def _compare(outputs: Any, *rounds: Sequence[Array], threads: int = 1) -> sg.CompiledModel:
    values = list(outputs) if isinstance(outputs, tuple) else [outputs]
    graph = sg.Graph(_inputs(values[0]), values)
    return compare(graph, *rounds, INFERENCE_NUM_THREADS=threads)


def _scores(*counts: int, size: int = 90) -> Array:
    """Return rows; each number is the count of positive elements in a row."""
    rng = np.random.default_rng(len(counts))
    rows = -1 - rng.random((len(counts), size)).astype(F4)
    for row, count in zip(rows, counts, strict=True):
        row[rng.permutation(size)[:count]] *= -1
    return rows


def _numbers(*numbers: int) -> list[Array]:
    return [np.array(number, np.int64) for number in numbers]


_FOUND = [
    [40, 50, 30, 44, 61, 33, 70, 90],
    [40, 0, 33, 1, 2, 50, 0, 0],
    [0, 1, 0, 90, 20, 21, 22, 80],
]


def _filtered(number: sg.Value, operator_: str) -> Any:
    row = ops.Gather(sg.capture(sg.input("x", (8, 90))), number, axis=0)
    mask = ops.Greater(row, F4(0))
    if operator_ == "Compress":
        return ops.Compress(row, mask, axis=0)
    if operator_ == "Unique":
        return ops.Unique(ops.Round(ops.Mul(ops.Relu(row), F4(40))))
    return ops.Gather(row, ops.Squeeze(ops.NonZero(mask), np.array([0])))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("operator_", ["NonZero", "Compress", "Unique"])
@pytest.mark.parametrize("found", _FOUND)
def test_sizes_follow_from_counts_of_elements(
    found: list[int], operator_: str, threads: int
) -> None:
    """Some counts are 0 or 1, and some loops have no iterations."""
    total, state = sg.input("total", ()), sg.input("state", ())

    def body(number: sg.Value) -> Sequence[sg.Value]:
        selected = ops.Exp(_filtered(number, operator_))
        first = ops.ReduceSum(selected, keepdims=0)
        return [
            ops.Add(state, first),
            first,
            ops.Shape(selected),
            ops.ReduceSum(ops.Tanh(selected)),
        ]

    rounds = [[n, np.ones((), F4), _scores(*found)] for n in _numbers(8, 0, 1, 5)]
    _compare(_loop(body, (total, state)), *rounds, threads=threads)


def test_alternating_shapes() -> None:
    x = sg.input("x", (8, "n"))

    def body(number: sg.Value) -> Sequence[sg.Value]:
        row = ops.Gather(sg.capture(x), number, axis=0)
        return [ops.ReduceSum(ops.Compress(row, ops.Greater(row, F4(0))), keepdims=0)]

    found = [40, 50, 30, 44, 61, 33, 70, 20]
    rounds = [[np.array(8), _scores(*found, size=size)] for size in (90, 80, 85, 90, 80, 85)]
    _compare(_loop(body), *rounds)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("axis", [0, 1])
def test_states_that_grow(axis: int, threads: int) -> None:
    """Attention reads a growing cache; another state shrinks, and its sum is scanned."""
    shape = (1, 16) if axis == 0 else (16, 1)
    x, more = sg.input("x", shape), sg.input("x2", ("m",))
    dims: tuple[int | str, ...] = ("n", 16) if axis == 0 else (16, "n")
    grown = sg.input("x1", dims)
    state, selected, rest = sg.input("s", shape), sg.input("k", dims), sg.input("r", ("q",))

    def body(number: sg.Value) -> Sequence[sg.Value]:
        longer = ops.Concat(selected, state, axis=axis)
        pair = [state, ops.Transpose(longer)] if axis == 0 else [ops.Transpose(longer), state]
        scores = ops.Softmax(ops.MatMul(*pair), axis=1 - axis)
        read = [scores, longer] if axis == 0 else [longer, scores]
        following = ops.Tanh(ops.MatMul(*read))
        fewer = ops.Slice(rest, np.array([1]), np.array([1 << 40]))
        return [following, longer, fewer, ops.ReduceSum(fewer, keepdims=0)]

    rng = np.random.default_rng(0)
    rounds = [
        [n, rng.random(shape).astype(F4), rng.random(held).astype(F4), rng.random(90).astype(F4)]
        for n, begun in zip(_numbers(30, 0, 1, 60, 44), (1, 3, 9, 20, 1), strict=True)
        for held in [(begun, 16) if axis == 0 else (16, begun)]
    ]
    _compare(_loop(body, (x, state), (grown, selected), (more, rest)), *rounds, threads=threads)


@pytest.mark.parametrize("found", _FOUND)
def test_found_elements_are_collected(found: list[int]) -> None:
    """The state grows by the elements that each iteration finds; it may be empty at first."""
    start, held = sg.input("start", ("n",)), sg.input("held", ("n",))

    def body(number: sg.Value) -> Sequence[sg.Value]:
        return [ops.Concat(ops.Neg(held), _filtered(number, "NonZero"), axis=0)]

    begun: list[Array] = [np.zeros(0, F4), np.ones(3, F4), np.ones(50, F4)]
    rounds = [[n, start, _scores(*found)] for n in _numbers(8, 0, 3) for start in begun]
    _compare(_loop(body, (start, held)), *rounds)


def test_one_output_for_two_states_that_grow() -> None:
    starts = [sg.input(name, (name,)) for name in ("x1", "x2")]
    one, two = states = [sg.input(name, (name,)) for name in ("s1", "s2")]

    def body(number: sg.Value) -> Sequence[sg.Value]:
        longer = ops.Concat(one, ops.Neg(two), np.ones(1, F4), axis=0)
        return [longer, longer]

    rounds = [[n, np.ones(9, F4), np.ones(4, F4)] for n in _numbers(5, 9)]
    _compare(_loop(body, *zip(starts, states, strict=True)), *rounds)


def test_a_state_that_doubles() -> None:
    start, held = sg.input("start", ("n",)), sg.input("held", ("n",))

    def body(number: sg.Value) -> Sequence[sg.Value]:
        return [ops.Concat(held, ops.Tanh(held), axis=0), ops.ReduceSum(held, keepdims=0)]

    rounds = [[n, np.linspace(0.1, 1, 9, dtype=F4)] for n in _numbers(13, 2, 13)]
    _compare(_loop(body, (start, held)), *rounds)


def _boxes(seed: int, count: int = 12) -> Array:
    rng = np.random.default_rng(seed)
    first = rng.integers(-3, 30, (count, 2))
    return np.concatenate([first, first + rng.integers(0, 20, (count, 2))], 1)


def test_boxes_are_cropped_from_an_image() -> None:
    """Data decide offset and size of the slices; some are empty, some reach beyond the image."""

    def body(number: sg.Value) -> Sequence[sg.Value]:
        box = ops.Gather(sg.capture(sg.input("boxes", (12, 4), "int64")), number, axis=0)
        corners = [ops.Gather(box, np.array(ends)) for ends in ([0, 1], [2, 3])]
        image = sg.capture(sg.input("x", (3, 32, 40)))
        cut = ops.Slice(image, *corners, np.array([1, 2]))
        return [ops.ReduceSum(cut, np.array([1, 2]), keepdims=0), ops.Shape(cut)]

    image = np.random.default_rng(0).random((3, 32, 40)).astype(F4)
    rounds = [[np.array(12), _boxes(seed), image] for seed in range(4)]
    _compare(_loop(body), *rounds)


def test_boxes_that_suppress_each_other() -> None:
    def body(number: sg.Value) -> Sequence[sg.Value]:
        boxes = sg.capture(sg.input("boxes", (1, 60, 4)))
        scores = ops.Gather(sg.capture(sg.input("x", (5, 60))), number, axis=0)
        selected = ops.NonMaxSuppression(
            boxes, ops.Unsqueeze(scores, np.array([0, 1])), np.array([20]), np.array([0.5], F4)
        )
        best = ops.Gather(scores, ops.Gather(selected, np.array(2), axis=1))
        return [ops.ReduceMax(best, keepdims=0), ops.ReduceMean(best, keepdims=0)]

    rng = np.random.default_rng(0)
    corners = rng.random((1, 60, 2)).astype(F4)
    boxes = np.concatenate([corners, corners + rng.random((1, 60, 2)).astype(F4) / 4], 2)
    rounds = [[n, boxes, rng.random((5, 60)).astype(F4)] for n in _numbers(5, 3, 5)]
    _compare(_loop(body), *rounds)


def test_threads_give_the_same_bits() -> None:
    def body(number: sg.Value) -> Sequence[sg.Value]:
        selected = ops.Exp(_filtered(number, "NonZero"))
        return [ops.ReduceMean(selected, keepdims=0), ops.ReduceLogSumExp(selected, keepdims=0)]

    outputs = _loop(body)
    graph = sg.Graph(_inputs(outputs[0]), list(outputs))
    inputs = [np.array(8), _scores(*_FOUND[1])]
    one, two = (
        sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": n})(inputs) for n in (1, 2)
    )
    for found, wanted in zip(one.values(), two.values(), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_a_weight_that_changes_and_a_condition() -> None:
    weight = sg.parameter("w", np.full(1, 2, F4))
    number, true = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    start, state = sg.input("start", (1,)), sg.input("state", (1,))
    selected = ops.Compress(
        ops.Gather(sg.capture(sg.input("x", (8, 90))), number, axis=0), np.ones(90, bool)
    )
    found = ops.NonZero(ops.Greater(selected, F4(0)))
    total = ops.Add(state, ops.Mul(weight, ops.Cast(ops.ReduceSum(ops.Shape(found)), to=1)))
    body = sg.Graph([number, true, state], [ops.Less(ops.Squeeze(total), F4(300)), total], "body")
    y = ops.Loop(sg.input("count", (), "int64"), None, start, body=body)
    graph = sg.Graph(_inputs(y), [y])
    model, session = sg.compile_model(graph, "CPU"), session_of(graph)
    inputs = [np.array(8), np.zeros(1, F4), _scores(*_FOUND[0])]
    check_results(model, session, inputs, tolerance=1e-6)
    model.parameters["w"].assign(np.full(1, 0.25, F4))
    check_results(model, session_of(graph), inputs, tolerance=1e-6)


def test_a_data_dependent_loop_is_cancelled() -> None:
    number, true = sg.input("number", (), "int64"), sg.input("going", (), "bool")
    x, state = sg.input("x", (90,)), sg.input("state", (90,))
    selected = ops.Gather(state, ops.Squeeze(ops.NonZero(ops.Greater(state, F4(0))), np.array([0])))
    total = ops.Tanh(ops.ReduceSum(selected, keepdims=0))
    results = [ops.Identity(true), ops.Add(ops.Mul(state, F4(0.5)), total)]
    y = ops.Loop(None, np.array(True), x, body=sg.Graph([number, true, state], results, "body"))
    request = sg.compile_model(sg.Graph([x], [y]), "CPU").create_infer_request()
    for _ in range(2):
        request.start_async([np.arange(90, dtype=F4)])
        assert request.wait(0.2) is None
        timer = threading.Timer(0.1, request.cancel)
        timer.start()
        with pytest.raises(sg.RequestCancelledError):
            request.wait(60)
        timer.join()
