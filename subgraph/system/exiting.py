"""At exit, the process waits for threads that are inside foreign C++ code.

At exit, Python ends a daemon thread when it next acquires the GIL. Inside C++ code, such as OpenCL
drivers and runtimes that devices call, this aborts the process. Such code therefore runs inside
`uninterrupted`: at exit, threads inside it may finish, and other threads may not enter it.

Drivers have threads of their own, too, that run what was enqueued. The process would crash if its
libraries' global objects were destroyed while these threads use them. A check that says whether
such work goes on is registered with `Uninterrupted.wait_for`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
# Seconds; the longest wait at exit, for code that never returns. A driver that compiles a kernel on
# a busy machine was seen to take 10.
_EXIT_TIMEOUT = 30.0
_POLL_INTERVAL = 0.001  # seconds between two checks for threads inside (estimate)


class _Local(threading.local):
    depth = 0  # number of nested blocks in which this thread is


class Uninterrupted:
    """A reentrant context manager; the exit of the process waits for threads inside it."""

    def __init__(self) -> None:
        """Begin with no thread inside."""
        self._local = _Local()
        self._never = threading.Event()
        self._checks: list[Callable[[], bool]] = []
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """Reset the state in a forked child, which has only this thread of its parent."""
        # A set without lock, because entering must be cheap; its operations are atomic.
        self._inside = {threading.get_ident()} if self._local.depth else set[int]()
        self._ending = False

    def __enter__(self) -> None:
        """Enter; while the process exits, only the main thread can."""
        if self._local.depth == 0:
            own = threading.get_ident()
            self._inside.add(own)  # before the check of _ending, so that `end` cannot miss it
            if self._ending and threading.current_thread() is not threading.main_thread():
                self._inside.discard(own)
                self._never.wait(_EXIT_TIMEOUT)  # later exit handlers may wait for this thread
                self._inside.add(own)
        self._local.depth += 1

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self._local.depth -= 1
        if self._local.depth == 0:
            self._inside.discard(threading.get_ident())

    def wait_for(self, is_working: Callable[[], bool]) -> None:
        """Register a function that tells whether work goes on for which no thread of Python waits.

        Args:
            is_working: At exit, the process waits while it returns True. It runs when no other
                thread is inside, and must not block.
        """
        self._checks.append(is_working)

    def end(self) -> None:
        """Wait, at most `_EXIT_TIMEOUT`, until no other thread is inside and no work goes on."""
        self._ending = True
        until = time.monotonic() + _EXIT_TIMEOUT
        while time.monotonic() < until and self._is_working():
            time.sleep(_POLL_INTERVAL)

    def _is_working(self) -> bool:
        others = self._inside - {threading.get_ident()}
        return bool(others) or any(is_working() for is_working in self._checks)


uninterrupted = Uninterrupted()
atexit.register(uninterrupted.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=uninterrupted.begin_in_child)


def uninterruptedly(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that runs `uninterrupted`."""

    @wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with uninterrupted:
            return function(*args, **kwargs)

    return run
