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
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

_Owner = TypeVar("_Owner")
_Result = TypeVar("_Result")
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


class computed_once(Generic[_Owner, _Result]):
    """A property that is computed at its first access and then an attribute of the object.

    ``functools.cached_property`` of Python 3.11 holds a lock of the class while it computes: a
    child of ``fork`` would wait for it without end, and threads for each other. Here two threads
    may compute the same value, of which either is right.
    """

    def __init__(self, compute: Callable[[_Owner], _Result]) -> None:
        """Take the function that computes the value from the object."""
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Note the name under which the value becomes an attribute."""
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: _Owner, owner: type) -> _Result: ...
    def __get__(self, instance: _Owner | None, owner: type) -> Self | _Result:
        """Compute the value and let it take the place of this property."""
        if instance is None:
            return self
        value = self._compute(instance)
        vars(instance)[self._name] = value
        return value
