"""An interrupt at any time of the start of a run loses no request."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dis import opname
from types import FrameType
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.plugins import multi
from subgraph.runtime import infer_queue, infer_request
from subgraph.runtime.cancel import Cancel

FILES = (infer_queue.__file__, infer_request.__file__, multi.__file__)
X = np.ones(3, np.float32)


def _interrupt() -> None:
    raise KeyboardInterrupt


def interrupted_at(
    call: Callable[[], object], count: int, handler: Callable[[], None] = _interrupt
) -> bool:
    """Make a call with a signal at its ``count``-th chance in `FILES`; False: there is none.

    Python looks for signals at the start of a function and after a call.
    """
    left = count
    previous: dict[FrameType, str] = {}

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        # Of this thread; the code that gives requests back is not interrupted a second time.
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name in ("_give_up", "drop"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= previous.get(frame, "CALL").startswith(("CALL", "RESUME"))
            previous[frame] = opname[frame.f_code.co_code[frame.f_lasti]]
            if left == 0:
                handler()
        return trace

    sys._getframe().f_trace_opcodes = True  # for Python 3.12, which else begins too late
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except (KeyboardInterrupt, sg.RequestCancelledError):
        return True
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.fixture(scope="module")
def model() -> sg.CompiledModel:
    x = sg.input("x", (3,))
    return sg.compile_model(sg.Graph([x], [ops.Add(x, x)]), "REFERENCE")


@pytest.mark.parametrize("kind", ["queue", "start_async", "infer"])
def test_an_interrupt_loses_no_request(model: sg.CompiledModel, kind: str) -> None:
    queue, request = sg.InferQueue(model, 1), model.create_infer_request()
    calls: dict[str, Callable[[], object]] = {
        "queue": lambda: queue.start_async(X),
        "start_async": lambda: request.start_async(X),
        "infer": lambda: request.infer(X),
    }
    count = 1
    while interrupted_at(calls[kind], count):
        if kind == "queue":
            queue.wait_all()
            assert queue.is_ready(), f"lost by an interrupt before chance {count}"
        else:
            if request.is_busy:  # the run had begun
                request.wait(10)
            assert request.infer(X)[0].tolist() == [2, 2, 2]
        count += 1
    assert count > 10
    queue.wait_all()


def test_an_interrupt_leaves_no_load_behind() -> None:
    """A request of MULTI that an interrupt ends at its creation is not counted for its device."""
    x = sg.input("x", (3,))
    model = sg.compile_model(sg.Graph([x], [ops.Add(x, x)]), "MULTI:REFERENCE,CPU")
    count = 1
    gc.collect()
    gc.freeze()  # collections do not visit the objects of the tests before
    try:
        while interrupted_at(model.create_infer_request, count):
            gc.collect()  # the frames of the interrupted call, which `interrupted_at` noted
            runner: Any = model.create_runner(Cancel())
            assert runner.model.device == "REFERENCE", f"interrupt before chance {count}"
            del runner
            count += 1
    finally:
        gc.unfreeze()
    assert count > 10


@pytest.mark.parametrize("kind", ["start_async", "infer", "cancel"])
def test_a_signal_handler_may_cancel_at_any_time(model: sg.CompiledModel, kind: str) -> None:
    request = model.create_infer_request()

    def run_and_wait() -> None:
        request.start_async(X)
        request.wait()

    calls = {"start_async": run_and_wait, "infer": lambda: request.infer(X)}
    counts: list[int] = []

    def each_chance() -> None:
        count = 1
        while interrupted_at(calls.get(kind, request.cancel), count, request.cancel):
            assert request.infer(X)[0].tolist() == [2, 2, 2]
            count += 1
        counts.append(count)

    thread = threading.Thread(target=each_chance, daemon=True)
    thread.start()
    thread.join(10)
    assert counts, "the handler waits for a lock of the thread that it interrupted"
    assert counts[0] > 2
