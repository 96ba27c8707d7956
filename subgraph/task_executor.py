"""Task executors: the threads that run asynchronous requests, stage by stage, and their callbacks.

Threads start when work waits and end with the executor that owns them. After a fork the child
starts threads of its own.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Callable

Task = Callable[[], None]


class TaskExecutor:
    """Runs tasks in the order given on up to ``threads`` daemon threads; a task must not raise."""

    def __init__(self, name: str, threads: int = 1) -> None:
        """Make an executor; it has no thread before there is a task."""
        self.name = name
        self.threads = max(1, threads)
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._idle = _Count()
        self._started = 0
        started: list[int] = []
        self._started_threads = started
        weakref.finalize(self, _stop, self._tasks, started).atexit = False

    def submit(self, task: Task) -> None:
        """Queue a task."""
        with self._lock:
            if self._pid != os.getpid():
                self._reset()
            self._tasks.put(task)
            if self._idle.value < self._tasks.qsize() and self._started < self.threads:
                self._started += 1
                self._started_threads.append(1)
                threading.Thread(
                    target=_work,
                    args=(self._tasks, self._idle),
                    name=f"subgraph-{self.name}-{self._started}",
                    daemon=True,
                ).start()


class _Count:
    """Number of threads that wait; ``+= 1`` on an attribute is one step under the GIL."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0


def _work(tasks: queue.SimpleQueue[Task | None], idle: _Count) -> None:
    while True:
        idle.value += 1
        task = tasks.get()
        idle.value -= 1
        if task is None:
            return
        task()
        del task  # keep nothing of a request alive while waiting


def _stop(tasks: queue.SimpleQueue[Task | None], started: list[int]) -> None:
    for _ in started:
        tasks.put(None)
