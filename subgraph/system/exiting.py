"""The end of the process waits for threads that are in the middle of other people's code.

Python ends a daemon thread where it next asks for the interpreter's lock. In C++ code, as that of
OpenCL drivers and of other runtimes that devices call, the process then aborts instead of ending.
So such code runs `uninterrupted`: at exit, threads that are in it may finish, for some seconds, and
no other thread begins. `_PATIENCE` is a bound for code that never returns, and an estimate.
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
_PATIENCE = 5.0  # seconds
_LOOK = 0.001  # seconds between two looks at who is still inside


class _Local(threading.local):
    depth = 0  # how often this thread has entered


class Uninterrupted:
    """A block that the end of the process waits for; may be entered again inside."""

    def __init__(self) -> None:
        """Begin with no thread inside."""
        self._local = _Local()
        self._never = threading.Event()
        self.begin_in_child()

    def begin_in_child(self) -> None:
        """In a forked child: of the threads of its parent only this one is there."""
        # Changed without a lock, for each is one operation: entering must cost next to nothing.
        self._inside = {threading.get_ident()} if self._local.depth else set[int]()
        self._ending = False

    def __enter__(self) -> None:
        """Enter; while the process ends, only the main thread does."""
        if self._local.depth == 0:
            own = threading.get_ident()
            self._inside.add(own)  # before it looks, or the end might not see it
            if self._ending and threading.current_thread() is not threading.main_thread():
                self._inside.discard(own)
                self._never.wait(_PATIENCE)  # then something at the end waits for this thread
                self._inside.add(own)
        self._local.depth += 1

    def __exit__(self, *_: object) -> None:
        """Leave."""
        self._local.depth -= 1
        if self._local.depth == 0:
            self._inside.discard(threading.get_ident())

    def end(self) -> None:
        """Wait until no other thread is inside, or patience is at its end."""
        self._ending = True
        until = time.monotonic() + _PATIENCE
        while self._inside - {threading.get_ident()} and time.monotonic() < until:
            time.sleep(_LOOK)


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
