"""A forked child goes on by itself, whatever other threads of its parent were in the middle of."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.system.forking import free_in_child, held_while_forking
from subgraph.weights.cache import WeightCache
from tests.support.children import in_child

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]
X = np.arange(8, dtype=np.float32).reshape(1, 8)


class Gate:
    """Where a thread of the parent stands while it forks."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self.reached = threading.Event()
        self.opened = threading.Event()

    def pass_through(self) -> None:
        if os.getpid() == self.parent:
            self.reached.set()
            assert self.opened.wait(60)


@contextmanager
def standing_in(gate: Gate, work: Callable[[], object]) -> Generator[None]:
    """Let a thread do ``work`` up to the gate, and end it after the block."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert gate.reached.wait(60)
        yield
    finally:
        gate.opened.set()
        thread.join()


class GatedOp(sg.SubgraphOp):
    """Adds one behind a gate."""

    def __init__(self, subgraph: sg.Graph, gate: Gate) -> None:
        super().__init__(subgraph)
        self.gate = gate

    def forward(self, inputs: list[Any]) -> list[Any]:
        self.gate.pass_through()
        return [inputs[0] + np.float32(1)]


def gated(gate: Gate) -> sg.CompiledModel:
    x, ix = sg.input("x", (1, 8)), sg.input("ix", (1, 8))
    inner = sg.Graph([ix], [ops.Relu(ix)], "inner")
    value = sg.subgraph_node(inner, GatedOp(inner, gate), inputs=[x]).outputs[0]
    return sg.CompiledModel(sg.Graph([x], [value], "net"), device="TEST")


@pytest.mark.parametrize("kind", [threading.Lock, threading.RLock])
def test_locks(kind: Callable[[], threading.Lock]) -> None:
    gate = Gate()
    freed, taken = free_in_child(kind()), held_while_forking(kind(), inner=True)

    def hold() -> None:
        with freed:
            gate.pass_through()

    def check() -> None:
        for lock in (freed, taken):
            assert lock.acquire(timeout=5)
            lock.release()

    with standing_in(gate, hold):
        in_child(check, seconds=60)
        assert not freed.acquire(blocking=False)
    check()


def test_a_weight_that_is_being_made() -> None:
    gate = Gate()
    weights, parameter = WeightCache(), sg.Parameter("w", X)

    def double(array: Any) -> Any:
        gate.pass_through()
        return array * 2

    def check() -> None:
        np.testing.assert_array_equal(weights.get("double", double, parameter), X * 2)

    with standing_in(gate, check):
        in_child(check, seconds=60)
    check()


def test_a_transaction_is_seen_whole_or_not_at_all() -> None:
    first, second = sg.Parameter("first", np.zeros(1)), sg.Parameter("second", np.zeros(1))
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            with sg.transaction():
                first.assign(np.full(1, float(number)))
                second.assign(np.full(1, float(number)))

    def check() -> None:
        assert first.array == second.array
        with sg.transaction():
            first.assign(np.full(1, -1.0))
        assert first.array == -1

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    try:
        for _ in range(20):
            in_child(check, seconds=60)
    finally:
        stop.set()
        for writer in writers:
            writer.join()


def test_a_request_that_runs_belongs_to_the_parent() -> None:
    gate = Gate()
    request = gated(gate).create_infer_request()

    def check() -> None:
        assert not request.is_busy
        with pytest.raises(sg.RequestError, match=r"forked.*start_async\(\) again"):
            request.wait()
        request.start_async(X)
        results = request.wait(30)
        assert results is not None
        np.testing.assert_array_equal(results[0], X + 1)
        np.testing.assert_array_equal(request.infer(X)[0], X + 1)

    with standing_in(gate, lambda: request.start_async(X)):
        in_child(check, seconds=60)
        assert request.is_busy
    results = request.wait(30)
    assert results is not None
    np.testing.assert_array_equal(results[0], X + 1)


def test_a_synchronous_run_belongs_to_the_parent() -> None:
    gate = Gate()
    request = gated(gate).create_infer_request()

    def check() -> None:
        np.testing.assert_array_equal(request.infer(X)[0], X + 1)

    with standing_in(gate, check):
        in_child(check, seconds=60)
        with pytest.raises(sg.RequestError, match="busy"):
            request.infer(X)


def test_a_queue_has_all_its_requests() -> None:
    gate = Gate()
    queue = sg.InferQueue(gated(gate), 2)

    def check() -> None:
        assert queue.is_ready()
        seen: list[int] = []
        queue.set_callback(lambda request, number: seen.append(number))
        for number in range(6):
            queue.start_async(X, number)
        queue.wait_all()
        assert sorted(seen) == list(range(6))

    def fill() -> None:
        queue.start_async(X)
        queue.start_async(X)

    with standing_in(gate, fill):
        in_child(check, seconds=60)
    queue.wait_all()
    check()


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "AUTO"])
def test_children_of_a_busy_process(device: str) -> None:
    """Threads compile, run, and change weights; each child does all of that, too."""
    x = sg.input("x", ("N", 8))
    weight = sg.parameter("w", np.eye(8, dtype=np.float32))
    graph = sg.Graph([x], [ops.Neg(ops.Gemm(ops.Relu(x), weight))])
    core = sg.Core()
    model = core.compile_model(graph, device)
    shared = next(iter(model.parameters.values()))
    wanted = model(X)[0].tobytes()
    queue = sg.InferQueue(model, 2)
    stop = threading.Event()

    def call() -> None:
        assert model(X)[0].tobytes() == wanted
        assert core.compile_model(graph, device)(np.tile(X, (3, 1)))[0][:1].tobytes() == wanted

    def start() -> None:
        request = model.create_infer_request()
        request.start_async(X)
        results = request.wait(60)
        assert results is not None
        assert results[0].tobytes() == wanted

    def pool() -> None:
        for _ in range(3):
            queue.start_async(X)
        queue.wait_all()

    def write() -> None:
        shared.assign(np.eye(8, dtype=np.float32))

    failed: list[BaseException] = []

    def again_and_again(work: Callable[[], None]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            failed.append(error)

    def all_of_them() -> None:
        for work in works:
            work()

    works = [call, start, pool, write]
    threads = [threading.Thread(target=again_and_again, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        for _ in range(15):
            in_child(all_of_them, seconds=60)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failed
