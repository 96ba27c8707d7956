"""Callbacks of requests: their arguments, errors, threads, and whom they may wait for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.runtime.task_executor import TaskExecutor
from tests.support.gates import Gate, chain

X = np.array([1, 2], np.float32)


def test_callback_gets_request_and_error(gated: tuple[sg.CompiledModel, Gate]) -> None:
    request = gated[0].create_infer_request()
    calls: list[Any] = []
    request.set_callback(lambda r, error: calls.append((r, error, r.results if not error else 0)))
    request.start_async(X)
    results = request.wait(20)
    assert calls == [(request, None, results)]
    request.start_async(-X)
    with pytest.raises(sg.DeviceError):
        request.wait(20)
    assert isinstance(calls[1][1], sg.DeviceError)
    for callback in (lambda: calls.append("none"), lambda r: calls.append(r)):
        request.set_callback(callback)
        request.start_async(X)
        request.wait(20)
    assert calls[2:] == ["none", request]


def test_an_exception_in_a_callback_is_reported(
    gated: tuple[sg.CompiledModel, Gate], caplog: pytest.LogCaptureFixture
) -> None:
    request = gated[0].create_infer_request()

    def bad(_: Any) -> None:
        raise KeyError("user's mistake")

    request.set_callback(bad)
    request.start_async(X)
    with pytest.raises(KeyError, match="user's mistake") as caught:
        request.wait(20)
    assert "raised by the callback of request 1 of model" in caught.value.__notes__[0]
    assert "callback" in caplog.text
    wrong: Any = 3
    with pytest.raises(sg.ConfigError, match="a callback is a function"):
        request.set_callback(wrong)
    assert request.results[0].tolist() == [2, 3]


def test_a_callback_may_start_the_request_again(gated: tuple[sg.CompiledModel, Gate]) -> None:
    request = gated[0].create_infer_request()
    done = threading.Event()
    rounds: list[float] = []

    def again(r: sg.InferRequest) -> None:
        rounds.append(r.results[0][0])
        if len(rounds) < 5:
            r.start_async(r.results[0])
        else:
            done.set()

    request.set_callback(again)
    request.start_async(X)
    assert done.wait(20)
    assert rounds == [2, 3, 4, 5, 6]


def test_a_callback_may_wait_for_other_requests(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, _ = gated
    first, second = model.create_infer_request(), model.create_infer_request()
    seen: list[float] = []

    def nested(request: sg.InferRequest) -> None:
        second.set_callback(lambda r: seen.append(r.results[0][0]))
        second.start_async(request.results[0])
        results = second.wait(20)
        assert results is not None
        seen.append(results[0][0])

    first.set_callback(nested)
    first.start_async(X)
    assert first.wait(20) is not None
    assert seen == [3, 3]

    pool = sg.InferQueue(model, 1)
    values: list[float] = []

    def more(request: sg.InferRequest, left: int) -> None:
        values.append(request.results[0][0])
        if left:
            other = request.results[0]
            threading.Thread(target=pool.start_async, args=([other], left - 1)).start()

    pool.set_callback(more)
    pool.start_async([X], 3)
    deadline = time.monotonic() + 20
    while len(values) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert values == [2, 3, 4, 5]


def test_a_callback_that_waits_holds_up_nothing_but_its_own_wait() -> None:
    model, _ = chain()
    other_model, _ = chain()
    entered, release = threading.Event(), threading.Event()
    called: list[str] = []

    def called_with(name: str) -> Callable[[], None]:
        return lambda: called.append(name)

    def slow() -> None:
        entered.set()
        release.wait(20)
        called.append("slow")

    first = model.create_infer_request()
    first.set_callback(slow)
    first.start_async(X)
    assert entered.wait(20)
    for name, owner in (("same model", model), ("other model", other_model)):
        request = owner.create_infer_request()
        request.set_callback(called_with(name))
        request.start_async(X)
        assert request.wait(10) is not None, f"{name}: waited for the callback of another request"
    assert first.wait(0.01) is None
    assert called == ["same model", "other model"]
    release.set()
    assert first.wait(20) is not None
    assert called[-1] == "slow"


def test_callbacks_of_a_queue_do_not_wait_for_each_other() -> None:
    model, _ = chain()
    pool = sg.InferQueue(model, 3)
    together = threading.Barrier(3)
    numbers: list[int] = []

    def meet(request: sg.InferRequest, number: int) -> None:
        together.wait(20)
        numbers.append(number)

    pool.set_callback(meet)
    for number in range(6):
        pool.start_async(X, number)
    pool.wait_all()
    assert sorted(numbers) == list(range(6))


def test_threads_of_callbacks_end_when_they_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subgraph.runtime.task_executor._IDLE_SECONDS", 0.05)
    executor = TaskExecutor("bursts", threads=None)
    together = threading.Barrier(9)

    def meet() -> None:
        together.wait(20)

    def threads() -> int:
        return sum(thread.name.startswith("subgraph-bursts") for thread in threading.enumerate())

    for _ in range(3):
        for _ in range(8):
            executor.submit(meet)
        assert threads() == 8
        together.wait(20)
        deadline = time.monotonic() + 20
        while threads() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threads() == 0
