"""Processes that run numbered tasks, each of which may crash or hang its process."""

from __future__ import annotations

import multiprocessing as mp
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import inf
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

Prepare = Callable[[], Callable[[int], Any]]


class Lost(str):
    """The answer of a task whose process died or took too long: what happened."""


class _Worker:
    """A process and the task that it runs.

    Attributes:
        channel: Connection to the process.
        task: The task, None if it runs none.
    """

    def __init__(self, prepare: Prepare) -> None:
        context = mp.get_context("fork")
        self.channel, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, prepare), daemon=True)
        self._process.start()
        other.close()
        self.task: int | None = None
        self._started = self._used = 0.0

    def give(self, task: int | None) -> None:
        """Begin a task, if there is one."""
        self.task, self._started = task, time.perf_counter()
        self._used = processor_seconds(self._process.pid)
        if task is not None:
            self.channel.send(task)

    def answer(self) -> Any:
        """Return the answer of the task, which has ended; `Lost` if the process died."""
        try:
            return self.channel.recv()
        except (EOFError, OSError):
            self._process.join()
            return Lost(f"the process died (exit code {self._process.exitcode})")

    def is_late(self, seconds: float, processor: float) -> bool:
        """Return whether the task takes too long by the clock, or uses too much processor time."""
        waited = time.perf_counter() - self._started
        if waited <= min(seconds, processor):
            return False
        return waited > seconds or processor_seconds(self._process.pid) - self._used > processor

    def end(self, seconds: float = 0.0) -> None:
        """End the process; it may go on for ``seconds``."""
        with suppress(OSError):
            self.channel.send(None)
        self._process.join(seconds)
        self._process.kill()
        self._process.join()


def _serve(channel: Connection, prepare: Prepare) -> None:
    """Run the tasks that come through a channel, silently, until None comes."""
    warnings.simplefilter("ignore")
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    run = prepare()
    while (task := channel.recv()) is not None:
        channel.send(run(task))


def processor_seconds(pid: int | None) -> float:
    """Return the processor time that a process has used; 0 where the system does not say it."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def run_tasks(
    prepare: Prepare, tasks: Sequence[int], jobs: int, seconds: float, processor: float = inf
) -> Iterator[tuple[int, Any]]:
    """Run tasks in forked processes; yield each with its answer, in the order in which they end.

    Args:
        prepare: Called in each process; returns the function that runs a task there.
        tasks: Numbers of the tasks.
        jobs: Number of processes; one that dies or takes too long is replaced.
        seconds: Most seconds of a task by the clock.
        processor: Most seconds of processor time of a task.
    """
    waiting = iter(tasks)
    workers = [_Worker(prepare) for _ in range(min(jobs, len(tasks)))]
    try:
        for worker in workers:
            worker.give(next(waiting, None))
        while busy := [w.channel for w in workers if w.task is not None]:
            ready = wait(busy, timeout=0.5)
            for place, worker in enumerate(workers):
                task = worker.task
                if task is None:
                    continue
                if worker.channel in ready:
                    answer = worker.answer()
                elif worker.is_late(seconds, processor):
                    answer = Lost(f"no result within {min(seconds, processor):g} s")
                else:
                    continue
                if isinstance(answer, Lost):
                    worker.end()
                    workers[place] = worker = _Worker(prepare)
                worker.give(next(waiting, None))
                yield task, answer
    finally:
        for worker in workers:
            worker.end(0.0 if worker.task is not None else 2.0)
