"""A parallel map over short-lived Python threads, for weights that are made at a first run.

It is faster than a loop if the calls release the GIL, as compiled kernels and NumPy's copies do. If
the system refuses more threads, fewer do the work.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TypeVar

from subgraph.graph.limits import budgets, limited
from subgraph.graph.parameters import pinned, pinned_snapshot

T = TypeVar("T")
R = TypeVar("R")
_log = logging.getLogger("subgraph")


def start_threads(threads: Iterable[threading.Thread]) -> list[threading.Thread]:
    """Start threads until the system refuses one; return those that run."""
    running: list[threading.Thread] = []
    for thread in threads:
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            _log.info("no more than %d more threads can be had: %s", len(running), error)
            break
        running.append(thread)
    return running


def parallel_map(do: Callable[[T], R], work: Iterable[T], threads: int) -> list[R]:
    """Call ``do`` for every item of ``work`` on several threads, the caller's among them.

    All threads have the caller's pinned snapshot of parameters, and its budgets. The first error
    ends the work and is raised.

    Args:
        do: Function of one item.
        work: The items; a thread that is free takes the next one.
        threads: Largest number of threads, at least 1.

    Returns:
        The results, in the order of ``work``.
    """
    snapshot, limits = pinned_snapshot(), budgets()
    tasks = list(work)
    items = iter(enumerate(tasks))
    errors: list[BaseException] = []
    results: dict[int, R] = {}

    def run() -> None:
        with limited(*limits), nullcontext() if snapshot is None else pinned(snapshot):
            for number, item in items:
                if errors:
                    return
                try:
                    results[number] = do(item)
                except BaseException as error:
                    errors.append(error)

    helpers = start_threads(
        threading.Thread(target=run, name="subgraph-work", daemon=True) for _ in range(threads - 1)
    )
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(tasks))]
