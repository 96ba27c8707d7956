"""Loops whose number of iterations is known only at run time, run by CPU without Python."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.cpu import iterations
from subgraph.engine.cpu.region_session import CpuSession
from subgraph.graph.types import Array
from tests.support.peer import compare, random, session_of

F4 = np.float32


@pytest.fixture(autouse=True)
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The limit of each run of compiled iterations."""
    made: list[int | None] = []
    run = iterations.Iterations.run

    def recorded(self: iterations.Iterations, inputs: Sequence[Any], limit: int | None) -> Any:
        found = run(self, inputs, limit)
        made.append(limit)
        return found

    monkeypatch.setattr(iterations.Iterations, "run", recorded)
    return made


def _loop(
    states: Sequence[sg.Value],
    results: Sequence[sg.Value],
    going: sg.Value | None = None,
    number: sg.Value | None = None,
) -> sg.Graph:
    true = sg.input("going", (), "bool")
    inputs = [number or sg.input("number", (), "int64"), true, *states]
    return sg.Graph(inputs, [ops.Identity(true) if going is None else going, *results], "body")


def _counts(*numbers: int) -> list[Array]:
    return [np.array(number, np.int64) for number in numbers]


@pytest.mark.parametrize("size", [3, 60, 300])
def test_an_input_is_the_number_of_iterations(size: int, runs: list[int | None]) -> None:
    """The state is staged, larger than a stage, or too large to be copied between iterations."""
    count, x = sg.input("count", (), "int64"), sg.input("x", (size, size))
    state = sg.input("state", (size, size))
    weight = sg.parameter("w", random(size, size, seed=1) / size)
    stepped = ops.Tanh(ops.Add(ops.MatMul(state, weight), ops.MatMul(weight, state)))
    y = ops.Loop(count, None, x, body=_loop([state], [stepped]))
    x0 = random(size, size)
    compare(sg.Graph([count, x], [y]), *([n, x0] for n in _counts(0, 1, 2, 7, 3)))
    assert runs == ([] if size == 300 else [1, 2, 7, 3])


@pytest.mark.parametrize("threads", [1, 2])
def test_scan_outputs_and_the_iteration_number(threads: int, runs: list[int | None]) -> None:
    """More iterations than one chunk; each gathers an item of a captured value and is scanned."""
    count, x = sg.input("count", (), "int64"), sg.input("x", (70, 2, 8))
    start = sg.input("start", (2, 8))
    number, state = sg.input("number", (), "int64"), sg.input("state", (2, 8))
    stepped = ops.Tanh(ops.Add(state, ops.Gather(sg.capture(x), number)))
    squared = ops.Mul(ops.Cast(number, to=1), ops.ReduceSum(stepped, keepdims=0))
    body = _loop([state], [stepped, stepped, squared, ops.Add(number, number)], number=number)
    outputs = ops.Loop(count, None, start, body=body)
    rounds = [[n, random(70, 2, 8), random(2, 8)] for n in _counts(0, 1, 70, 33)]
    graph = sg.Graph([count, x, start], list(outputs))
    compare(graph, *rounds, INFERENCE_NUM_THREADS=threads)
    assert runs == [1, 70, 33]


@pytest.mark.parametrize("chunk", [7, 1000])
@pytest.mark.parametrize("most", [None, 5, 3000])
def test_the_condition_ends_the_loop(
    most: int | None, chunk: int, runs: list[int | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(iterations, "_TINY_CHUNK_ITERATIONS", chunk)
    start = sg.input("start", (4,), "int64")
    state = sg.input("state", (4,), "int64")
    stepped = ops.Add(state, np.int64(3))
    going = ops.Less(ops.ReduceMax(stepped, keepdims=0), np.int64(5000))
    limit = None if most is None else np.array(most, np.int64)
    outputs = ops.Loop(limit, np.array(True), start, body=_loop([state], [stepped, stepped], going))
    model = sg.Graph([start], list(outputs))
    compare(model, *([np.array([k, 1, 2, 3])] for k in (0, 4000, 9000)))
    assert len(runs) == 3 or most == 5  # loops of a few iterations are unrolled


def test_states_are_swapped_and_shared(runs: list[int | None]) -> None:
    """One output becomes two states, two states swap, and one state has no reader."""
    count = sg.input("count", (), "int64")
    starts = [sg.input(name, (3,)) for name in "abcde"]
    a, b, c, d, e = states = [sg.input(f"{name}_", (3,)) for name in "abcde"]
    total = ops.Add(ops.Add(a, b), c)
    results = [ops.Identity(b), ops.Identity(a), total, total, ops.Identity(e), ops.Neg(d)]
    outputs = ops.Loop(count, None, *starts, body=_loop(states, results))
    rounds = [[n, *(random(3, seed=k) for k in range(5))] for n in _counts(1, 2, 3, 6)]
    compare(sg.Graph([count, *starts], list(outputs)), *rounds)
    assert runs == [1, 2, 3, 6]


def test_states_that_grow(runs: list[int | None]) -> None:
    """The executor runs the iterations one by one."""
    count, x = sg.input("count", (), "int64"), sg.input("x", (1, 4))
    state = sg.input("state", ("rows", 4))
    row = ops.ReduceSum(state, np.array([0]), keepdims=1)
    y = ops.Loop(count, None, x, body=_loop([state], [ops.Concat(state, ops.Tanh(row), axis=0)]))
    x0 = random(1, 4)
    rounds = [[n, x0] for n in _counts(0, 1, 9, 5, 60, 40)]
    compare(sg.Graph([count, x], [y]), *rounds, PLAN_CACHE_SIZE=4)
    assert not runs


def test_shapes_and_weights_that_change_between_runs(runs: list[int | None]) -> None:
    count, x = sg.input("count", (), "int64"), sg.input("x", ("rows", 8))
    state = sg.input("state", ("rows", 8))
    weight = sg.parameter("w", random(8, 8, seed=1))
    y = ops.Loop(count, None, x, body=_loop([state], [ops.Tanh(ops.MatMul(state, weight))]))
    graph = sg.Graph([count, x], [y])
    # More shapes than a session has executable plans, so that some are bound again.
    sizes = [1, 5, 3, 5, 900, 2, 1, 7, 9, 11, 13, 15, 17, 5, 7]
    (number,) = _counts(4)
    model = compare(graph, *([number, random(n, 8)] for n in sizes))
    assert len(runs) == len(sizes)
    model.parameters["w"].assign(random(8, 8, seed=2))
    session = session_of(graph)
    for n in sizes:
        inputs = {"count": number, "x": random(n, 8, seed=n)}
        np.testing.assert_allclose(model(inputs)[0], session.run(None, inputs)[0], atol=1e-5)


@pytest.mark.plain_memory
def test_a_body_that_is_bound_to_other_shapes_and_back(runs: list[int | None]) -> None:
    """States of 280000 bytes are too large to be copied, so that their loop is not compiled.

    Later iterations wrote to the results of that loop, which had been freed.
    """
    count, x, state = sg.input("count", (), "int64"), sg.input("x", ("N",)), sg.input("s", ("N",))
    body = _loop([state], [ops.Tanh(ops.Add(state, np.float32(0.5)))])
    graph = sg.Graph([count, x], [ops.Loop(count, None, x, body=body)])
    sizes = [50000, 51000, *[60000, 70000] * 3, 60000]
    model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": 1, "PLAN_CACHE_SIZE": 2})
    held: list[Array] = []  # otherwise a fault could be a crash
    for k, size in enumerate(sizes):
        held += [random(size, seed=k)]
        held += [model([*_counts(2), held[-1]])[0]]
        want = np.tanh(np.tanh(held[-2] + F4(0.5)) + F4(0.5))
        np.testing.assert_allclose(held[-1], want, rtol=0, atol=1e-6)
    assert runs == [2] * sum(size < 70000 for size in sizes)


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize(("backwards", "axis"), [(0, 0), (1, 0), (0, 2), (1, 1)])
def test_scan_of_unknown_length(
    backwards: int,
    axis: int,
    chunk: int,
    runs: list[int | None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(iterations, "_TINY_CHUNK_ITERATIONS", chunk)
    dims: list[int | str] = [2, 8]
    dims.insert(axis, "length")
    start, x = sg.input("start", (2, 8)), sg.input("x", dims)
    state, item = sg.input("state", (2, 8)), sg.input("item", (2, 8))
    stepped = ops.Tanh(ops.Add(state, item))
    outputs = ops.Scan(
        start,
        x,
        body=sg.Graph([state, item], [stepped, ops.Neg(stepped), ops.Exp(item)], "body"),
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[backwards],
        scan_output_axes=[axis, 0],
        scan_output_directions=[0, backwards],
    )
    rounds: list[list[Array]] = []
    for length in (1, 40, 7):
        shape = [2, 8]
        shape.insert(axis, length)
        rounds.append([random(2, 8), random(*shape, seed=length)])
    compare(sg.Graph([start, x], list(outputs)), *rounds)
    assert runs == [1, 40, 7]


def test_a_loop_inside_a_loop(runs: list[int | None]) -> None:
    count, x = sg.input("count", (), "int64"), sg.input("x", (4,))
    inner, outer = sg.input("inner", (4,)), sg.input("outer", (4,))
    stepped = ops.Tanh(outer)
    deep = _loop([inner], [ops.Add(ops.Mul(inner, F4(0.5)), sg.capture(stepped))])
    nested = ops.Loop(sg.capture(count), None, stepped, body=deep)
    y = ops.Loop(count, None, x, body=_loop([outer], [nested]))
    compare(sg.Graph([count, x], [y]), *([n, random(4)] for n in _counts(0, 1, 6)))
    assert runs == [1, *[6] * 6]


def test_a_branch_in_a_body(runs: list[int | None]) -> None:
    count, x = sg.input("count", (), "int64"), sg.input("x", (4,))
    state = sg.input("state", (4,))
    chosen = ops.If(
        ops.Greater(ops.ReduceSum(state, keepdims=0), F4(4)),
        then_branch=sg.Graph([], [ops.Mul(sg.capture(state), F4(0.25))], "then"),
        else_branch=sg.Graph([], [ops.Exp(sg.capture(state))], "else"),
    )
    y = ops.Loop(count, None, x, body=_loop([state], [chosen]))
    compare(sg.Graph([count, x], [y]), *([n, random(4)] for n in _counts(0, 1, 6)))
    assert runs == [1, 6]


def test_results_belong_to_the_caller() -> None:
    count, x = sg.input("count", (), "int64"), sg.input("x", (4,))
    state = sg.input("state", (4,))
    outputs = ops.Loop(count, None, x, body=_loop([state], [ops.Neg(state), ops.Identity(state)]))
    model = sg.compile_model(sg.Graph([count, x], list(outputs)), "CPU")
    x0 = random(4)
    results = model([np.array(3), x0])
    first = [np.array(item) for item in results.values()]
    for item in results.values():
        item += 1
    for found, wanted in zip(model([np.array(3), x0]).values(), first, strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_requests_on_several_threads() -> None:
    count, x = sg.input("count", (), "int64"), sg.input("x", ("rows", 8))
    state = sg.input("state", ("rows", 8))
    weight = sg.parameter("w", random(8, 8, seed=1))
    y = ops.Loop(count, None, x, body=_loop([state], [ops.Tanh(ops.MatMul(state, weight))]))
    graph = sg.Graph([count, x], [y])
    model, session = sg.compile_model(graph, "CPU"), session_of(graph)

    def work(seed: int) -> None:
        request = model.create_infer_request()
        for n in range(1, 12):
            x0 = {"count": np.array(n), "x": random(1 + (n + seed) % 5, 8, seed=seed)}
            wanted = session.run(None, x0)[0]
            np.testing.assert_allclose(request.infer(x0)[0], wanted, atol=1e-5)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(8)))


@pytest.mark.parametrize("empty", [False, True])
def test_a_loop_without_end_is_cancelled(empty: bool) -> None:
    """Both with a body that computes and with one that only passes its state on."""
    x, state = sg.input("x", (64, 64)), sg.input("state", (64, 64))
    true = sg.input("going", (), "bool")
    stepped = ops.Identity(state) if empty else ops.Tanh(state)
    inputs = [sg.input("number", (), "int64"), true, state]
    body = sg.Graph(inputs, [ops.Identity(true), stepped], "body")
    y = ops.Loop(None, np.array(True), x, body=body)
    request = sg.compile_model(sg.Graph([x], [y]), "CPU").create_infer_request()
    request.start_async([random(64, 64)])
    assert request.wait(0.2) is None
    timer = threading.Timer(0.1, request.cancel)
    timer.start()
    with pytest.raises(sg.RequestCancelledError):
        request.wait(60)
    timer.join()


def _without_end() -> sg.Graph:
    x, state = sg.input("x", ("rows", 8)), sg.input("state", ("rows", 8))
    true = sg.input("going", (), "bool")
    inputs = [sg.input("number", (), "int64"), true, state]
    body = sg.Graph(inputs, [ops.Identity(true), ops.Tanh(state)], "body")
    return sg.Graph([x], [ops.Loop(None, np.array(True), x, body=body)])


def test_a_loop_is_cancelled_before_its_first_iteration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is cancelled before the body is planned, and before a cached plan is found."""
    request = sg.compile_model(_without_end(), "CPU").create_infer_request()
    ready = CpuSession.ready

    def cancelling(self: CpuSession, inputs: Sequence[Any]) -> Any:
        request.cancel()
        return ready(self, inputs)

    monkeypatch.setattr(CpuSession, "ready", cancelling)
    for rows in (1, 2, 1):
        request.start_async([random(rows, 8)])
        with pytest.raises(sg.RequestCancelledError):
            assert request.wait(20) is not None, "the loop does not end"


def test_results_beyond_the_memory_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_MEMORY_LIMIT", "1M")
    x, state = sg.input("x", (64, 64)), sg.input("state", (64, 64))
    outputs = ops.Loop(None, np.array(True), x, body=_loop([state], [ops.Neg(state), state]))
    model = sg.compile_model(sg.Graph([x], list(outputs)), "CPU")
    with pytest.raises(sg.LimitError, match="results of"):
        model([random(64, 64)])
