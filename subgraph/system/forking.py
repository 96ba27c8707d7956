"""A forked child goes on by itself, whatever the other threads of its parent were doing.

Only the thread that forks lives on in the child: a lock that another one held would stay held there
for good, and a module that it was importing half made. Locks whose work a child must see whole are
taken while the process forks, at a moment in which no module is being imported. Those under which
work may take long, and puts its results in place at its end, are freed in the child.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from typing import Any, TypeVar

_L = TypeVar("_L", bound="threading.Lock | threading.RLock")
_IMPORTED_LATE = ("subgraph", "onnx", "numba", "llvmlite", "pyopencl")
_PATIENCE = 30.0  # seconds
# What Python itself asks, in vain in a child: who imports a module just now.
_IMPORT_LOCKS: dict[str, Any] = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
_freed: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Any] = []
_taken: list[Any] = []


def free_in_child(lock: _L) -> _L:
    """Return ``lock``; a child finds it free, and what its holder had begun not done."""
    _freed.add(lock)
    return lock


def held_while_forking(lock: _L, *, inner: bool = False) -> _L:
    """Return ``lock``; a fork waits for its turn.

    Args:
        lock: The lock.
        inner: Whether it is taken for a moment where others are held, and none while it is.
    """
    _held.insert(len(_held) if inner else 0, lock)
    return lock


def _before() -> None:
    global _taken
    end = time.monotonic() + _PATIENCE
    while True:
        taken = list(_held)
        for lock in taken:
            lock.acquire()
        if not _importing() or time.monotonic() > end:
            break
        _release(taken)  # what is being imported may need them
        time.sleep(0.001)
    _taken = taken


def _importing() -> bool:
    """Return whether another thread imports one of the packages that are imported when needed."""
    me = threading.get_ident()
    for name, lock in list(_IMPORT_LOCKS.items()):
        owner = getattr(lock(), "owner", None)
        if owner not in (None, me) and name.partition(".")[0] in _IMPORTED_LATE:
            return True
    return False


def _release(taken: list[Any]) -> None:
    for lock in reversed(taken):
        lock.release()


def _after_in_parent() -> None:
    _release(_taken)


def _after_in_child() -> None:
    _release(_taken)
    for lock in list(_freed):
        lock._at_fork_reinit()  # as Python's own modules do with theirs


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )
