"""Other processes that compile kernels into the cache: numba itself compiles one at a time.

A worker is a fresh interpreter that reads kernels as lines of JSON and answers each with a line; a
thread of this process feeds each worker from one queue. The calling thread compiles too. What a
worker cannot do is left to the caller, who gets the error.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from subgraph.engine.toolchain.kernel import Kernel
from subgraph.system import host
from subgraph.weights.sharing import start_threads

_LEAST_PER_WORKER = 3  # below this a worker's start costs more than it gives
_MOST_WORKERS = 15
_DONE = "done"
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from subgraph.engine.toolchain.toolchain import keep; "
    "from subgraph.engine.toolchain.compile_workers import work; work(keep)"
)
_Tell = Callable[[Kernel, float | None], None]


def worthwhile_workers(kernels: int) -> int:
    """Return how many processes besides this one should share the compilation of some kernels."""
    if not Path(sys.executable or "none").stem.startswith(("python", "pypy")):
        return 0  # inside another program, whose executable is no interpreter
    return max(0, min(host.core_count() - 1, kernels // _LEAST_PER_WORKER, _MOST_WORKERS))


def compile_kernels(
    kernels: Sequence[Kernel], workers: int, compile_here: Callable[[Kernel], None], tell: _Tell
) -> None:
    """Compile kernels into the cache with other processes' help.

    Args:
        kernels: What to compile.
        workers: How many other processes.
        compile_here: Compiles one in this process.
        tell: Called before a worker compiles a kernel, with None, and after, with the seconds.

    Raises:
        KernelError: From ``compile_here``.
    """
    tasks: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    left: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    for kernel in kernels:
        tasks.put(kernel)
    feeders = start_threads(
        threading.Thread(
            target=_feed, args=(tasks, left, tell), name="subgraph-compile", daemon=True
        )
        for _ in range(workers)
    )

    try:
        _drain(tasks, compile_here)
    finally:
        _drain(tasks, lambda _: None)  # after an error nobody starts another
        for feeder in feeders:
            feeder.join()
    _drain(left, compile_here)


def _drain(tasks: queue.SimpleQueue[Kernel], use: Callable[[Kernel], None]) -> None:
    while True:
        try:
            kernel = tasks.get_nowait()
        except queue.Empty:
            return
        use(kernel)


class _Worker:
    """A process that compiles, from this side."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._say(sys.path)

    def _say(self, message: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def compile(self, kernel: Kernel) -> bool:
        """Return whether the kernel is in the cache now."""
        self._say([kernel.module, kernel.factory, dict(kernel.variant)])
        answer = self._process.stdout.readline() if self._process.stdout is not None else ""
        return answer.strip() == _DONE

    def close(self) -> None:
        """Let it end: its input ends."""
        self._process.communicate()


def _feed(tasks: queue.SimpleQueue[Kernel], left: queue.SimpleQueue[Kernel], tell: _Tell) -> None:
    """Body of a feeder's thread: give one worker kernels until there are none."""
    worker: _Worker | None = None

    def ask(kernel: Kernel) -> None:
        nonlocal worker
        start = time.perf_counter()
        tell(kernel, None)
        try:
            worker = worker or _Worker()
            done = worker.compile(kernel)
        except OSError:
            done = False
        if done:
            tell(kernel, time.perf_counter() - start)
        else:
            left.put(kernel)

    _drain(tasks, ask)
    if worker is not None:
        worker.close()


def _frozen(value: Any) -> Any:
    """Turn a list back into the tuple that it was before JSON."""
    return value if isinstance(value, int | float | str) else tuple(value)


def work(keep: Callable[[Kernel], None]) -> None:
    """Be a worker: compile what the standard input names, until it ends.

    Args:
        keep: Compiles a kernel into the cache.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # a kernel module may print
    for line in sys.stdin:
        module, factory, variant = cast("tuple[str, str, dict[str, Any]]", json.loads(line))
        options = {name: _frozen(value) for name, value in variant.items()}
        try:
            keep(Kernel(module, factory, **options))
        except Exception:
            # The caller compiles it again, and gets the error where it can be raised.
            answers.write("failed\n")
        else:
            answers.write(f"{_DONE}\n")
        answers.flush()
