"""Task executors: the threads that run asynchronous requests, stage by stage, and their callbacks.

Threads start when work waits and end with the executor that owns them. After a fork the child
starts threads of its own. A task that has to wait for another task of its executor waits inside
`lent`: another thread may run tasks meanwhile, so that tasks cannot deadlock. An executor without a
maximum starts a thread for every task for which no thread is free; threads that have been idle for
`_IDLE_SECONDS` end.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager

from subgraph.errors import ConfigError, DeviceError, require_type
from subgraph.system.exiting import uninterrupted
from subgraph.system.forking import free_in_child
from subgraph.weights.parallel import start_threads

Task = Callable[[], None]
# Seconds that a free thread of an executor without a maximum waits for its next task. An estimate:
# starting a thread takes some 0.1 ms, so waiting longer saves no noticeable time.
_IDLE_SECONDS = 10.0
_local = threading.local()
_log = logging.getLogger("subgraph")


class _State:
    """State that an executor shares with its threads, which do not refer to the executor itself."""

    def __init__(self, threads: int | None) -> None:
        self.pid = os.getpid()
        self.tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        self.allowed = math.inf if threads is None else threads
        self.patience = _IDLE_SECONDS if threads is None else None
        self.alive = 0
        self.idle = 0
        self.pending = 0  # tasks that no thread has begun

    def put(self, task: Task, name: str) -> None:
        """Queue a task; start a thread for it if none is free.

        Raises:
            DeviceError: No thread can be started, and the executor has no thread, or no maximum and
                no free thread. The task is not queued.
        """
        with self.lock:
            self.pending += 1
        try:
            self.start_if_needed(name)
        except BaseException:
            with self.lock:
                # An executor with a fixed number of threads has one that will take the task later.
                waits = self.patience is None and self.alive > 0
                self.pending -= not waits
            if not waits:
                raise
        self.tasks.put(task)

    def start_if_needed(self, name: str) -> None:
        """Start a thread if tasks wait, none is free and one more is allowed.

        Raises:
            DeviceError: It cannot be started.
        """
        with self.lock:
            if self.idle >= self.pending or self.alive >= self.allowed:
                return
            self.alive += 1
            # The thread counts before it starts, so that other callers do not start one too many.
            number = self.alive
        thread = threading.Thread(
            target=_work, args=(self,), name=f"subgraph-{name}-{number}", daemon=True
        )
        if not start_threads([thread]):
            with self.lock:
                self.alive -= 1
            raise DeviceError(
                f"no thread can be started for asynchronous runs ({name}); use infer() instead"
            )

    def next_task(self) -> Task | None:
        """Return the next task; None: the thread is to end."""
        with self.lock:
            self.idle += 1
        while True:
            try:
                task, timed_out = self.tasks.get(timeout=self.patience), False
            except queue.Empty:
                task, timed_out = None, True
            with self.lock:
                if timed_out and self.pending >= self.idle:
                    continue  # a task was queued meanwhile, for which no thread was started
                self.idle -= 1
                if task is None:
                    self.alive -= 1
                else:
                    self.pending -= 1
            return task


def _work(state: _State) -> None:
    _local.state = state
    while (task := state.next_task()) is not None:
        with uninterrupted:
            try:
                task()
            except BaseException:
                _log.exception("a task of %r raised", threading.current_thread().name)
        del task  # it may refer to a request, which must not live on while this thread waits


def _stop(state: _State) -> None:
    for _ in range(state.alive):
        state.tasks.put(None)


class TaskExecutor:
    """Runs tasks in the order of submission on daemon threads.

    An error of a task is logged. The tasks of requests raise none: `wait` raises their errors.

    Attributes:
        name: Part of the names of its threads.
        threads: Most tasks that run at a time; None for no maximum.
    """

    def __init__(self, name: str, threads: int | None = 1) -> None:
        """Create an executor; its first thread starts with its first task.

        Args:
            name: Part of the names of its threads.
            threads: Most tasks that run at a time, at least 1; None for no maximum.

        Raises:
            ConfigError: ``threads`` is no whole number.
        """
        require_type(threads, (int, type(None)), ConfigError, "a number of threads, or None")
        self.name = name
        self.threads = None if threads is None else max(1, threads)
        self._lock = free_in_child(threading.Lock())
        self._state = self._new_state()

    def _new_state(self) -> _State:
        state = _State(self.threads)
        # The threads refer to the state only, so that an executor without users is collected; its
        # threads then end.
        weakref.finalize(self, _stop, state).atexit = False
        return state

    def submit(self, task: Task) -> None:
        """Queue a task.

        Raises:
            ConfigError: ``task`` cannot be called.
            DeviceError: A thread is needed and cannot be started.
        """
        if not callable(task):  # pyright: ignore[reportUnnecessaryComparison]
            raise ConfigError(f"a task is a function without arguments; got {task!r}")
        with self._lock:
            if self._state.pid != os.getpid():
                self._state = self._new_state()
            state = self._state
        state.put(task, self.name)


@contextmanager
def lent() -> Generator[None]:
    """Let another thread run tasks of this thread's executor while the block waits."""
    state: _State | None = getattr(_local, "state", None)
    if state is None or state.pid != os.getpid():
        yield
        return
    with state.lock:
        # The waiting thread does not count against the maximum meanwhile.
        state.allowed += 1
    try:
        state.start_if_needed("lent")
        yield
    finally:
        with state.lock:
            state.allowed -= 1
            if state.alive > state.allowed:
                state.tasks.put(None)  # one thread too many: the next free one ends
