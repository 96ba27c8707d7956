"""Work shared out to Python threads that come and go: weights made when a model first runs.

It pays where what is called lets go of Python's lock, as compiled kernels and NumPy's copies do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TypeVar

from subgraph.parameters import pinned, pinned_snapshot

T = TypeVar("T")


def shared_out(do: Callable[[T], object], work: Iterable[T], threads: int) -> None:
    """Call ``do`` for every item of ``work``, each taken by the thread that is free first.

    All threads see the snapshot of parameters that the caller has pinned. The first error ends the
    work and is raised.
    """
    snapshot = pinned_snapshot()
    items = iter(list(work))
    errors: list[BaseException] = []

    def run() -> None:
        with nullcontext() if snapshot is None else pinned(snapshot):
            for item in items:
                if errors:
                    return
                try:
                    do(item)
                except BaseException as error:
                    errors.append(error)

    helpers = [threading.Thread(target=run, daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if errors:
        raise errors[0]
