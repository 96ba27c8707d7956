"""Locks across ``fork``: a child works whatever the other threads of its parent were doing.

A child has only the thread that forked. A lock that another thread held would stay locked in it,
and a module that another thread was importing would stay incomplete. A fork therefore acquires the
locks whose data must be consistent (`held_while_forking`), at a moment in which no other thread
imports a module. Locks that may be held for long, by work that publishes its results atomically,
are unlocked in the child (`free_in_child`). Libraries in C++ have locks of their own, which nobody
can unlock in a child: a fork waits until no thread works in one of them (`finished_before_fork`).
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
# Longest waits of a fork, in seconds (estimates).
_WORK_TIMEOUT = 30.0  # for each of: work in libraries, and imports
_SLEEP_TIMEOUT = 1.0  # for threads of libraries, which look for more work before they sleep
# Python's locks of the modules that are being imported, by name; private to Python.
_IMPORT_LOCKS: dict[str, Any] = getattr(sys.modules["_frozen_importlib"], "_module_locks", {})
_freed: weakref.WeakSet[Any] = weakref.WeakSet()
_held: list[Any] = []
_taken: list[Any] = []
_found_threads = False  # at the last fork of this process
_had_threads = False  # at the fork that made this process, or an earlier one
_entrance = threading.Lock()  # held by a fork, so that no work in a library begins
_working: dict[int, int] = {}  # by thread: how many blocks of `finished_before_fork` it is in
_has_worked = False  # whether a library may have threads


def free_in_child(lock: _L) -> _L:
    """Return ``lock``, which is unlocked in a child; unfinished work of its holder is lost."""
    _freed.add(lock)
    return lock


def held_while_forking(lock: _L, *, inner: bool = False) -> _L:
    """Return ``lock``, which the forking thread acquires before a fork and releases after it.

    Args:
        lock: A lock of a module, alive as long as the process.
        inner: Whether threads acquire it for short times while they hold other such locks, and
            acquire no other one while they hold it; a fork then acquires it last.
    """
    _held.insert(len(_held) if inner else 0, lock)
    return lock


class _LibraryWork:
    """The context of a thread's work in a library; one thread may enter it several times."""

    def __enter__(self) -> None:
        global _has_worked
        me = threading.get_ident()
        if me in _working:
            _working[me] += 1  # a fork that waits for the outer block must not stop the inner one
        else:
            with _entrance:
                _working[me] = 1
                _has_worked = True

    def __exit__(self, *_: object) -> None:
        me = threading.get_ident()
        _working[me] -= 1
        if not _working[me]:
            del _working[me]


# Work in a library whose locks a child could not acquire: a fork waits for the end of the block.
finished_before_fork = _LibraryWork()


def parent_had_threads_beside() -> bool:
    """Return whether PyTorch was loaded when this process was forked, with threads of a library.

    Threads of OpenMP are not Python's. Where threads cannot be counted, the answer is that for any
    forked process in which PyTorch was loaded.
    """
    return _had_threads


def _has_threads() -> bool:
    if "torch" not in sys.modules:
        return False
    try:
        return len(os.listdir("/proc/self/task")) > threading.active_count()
    except OSError:
        return True


def _before() -> None:
    global _taken, _found_threads
    _found_threads = _has_threads()
    _entrance.acquire()
    me = threading.get_ident()
    _wait_until(lambda: list(_working) in ([], [me]), _WORK_TIMEOUT)
    if _has_worked:
        _wait_until(_library_threads_sleep, _SLEEP_TIMEOUT)
    end = time.monotonic() + _WORK_TIMEOUT
    while True:
        taken = list(_held)
        for lock in taken:
            lock.acquire()
        if not _importing() or time.monotonic() > end:
            break
        _release(taken)  # the importing thread may need them
        time.sleep(0.001)
    _taken = taken


def _wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.0005)


def _library_threads_sleep() -> bool:
    """Return whether each thread that is not Python's sleeps, and thus holds no lock for long.

    Threads of a library such as TBB acquire its locks while they look for more work after a run.
    Where the states of threads are unknown, the answer comes after the time of such a search.
    """
    own = {thread.native_id for thread in threading.enumerate()}
    try:
        others = [name for name in os.listdir("/proc/self/task") if int(name) not in own]
    except OSError:
        time.sleep(0.01)
        return True
    # A thread that was seen asleep may have been woken by a later one: every one is seen twice.
    return all(_sleeps(thread) for _ in range(2) for thread in others)


def _sleeps(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] == b"S"
    except OSError:  # the thread has ended
        return True


def _importing() -> bool:
    """Return whether another thread is importing one of the packages of `_IMPORTED_LATE`."""
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
    _entrance.release()


def _after_in_child() -> None:
    global _had_threads
    _had_threads = _had_threads or _found_threads
    _release(_taken)
    me = threading.get_ident()
    for thread in list(_working):
        if thread != me:  # its work did not end in time
            del _working[thread]
    _entrance.release()
    for lock in list(_freed):
        lock._at_fork_reinit()  # private, but what Python's own modules use


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child
    )


class computed_once(Generic[_Owner, _Result]):
    """A property that is computed at its first access and then an attribute of the object.

    ``functools.cached_property`` of Python 3.11 holds a lock of the class during the computation,
    which a forked child could not acquire. This one has no lock: two threads may compute the value
    at the same time, and both get one of the results.
    """

    def __init__(self, compute: Callable[[_Owner], _Result]) -> None:
        """Decorate the function that computes the value from the object."""
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        """Store the name of the attribute."""
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...
    @overload
    def __get__(self, instance: _Owner, owner: type) -> _Result: ...
    def __get__(self, instance: _Owner | None, owner: type) -> Self | _Result:
        """Compute the value and store it as an attribute, which hides this property."""
        if instance is None:
            return self
        found: _Result = vars(instance).setdefault(self._name, self._compute(instance))
        return found
