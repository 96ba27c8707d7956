"""Worker processes that compile kernels into the cache in parallel.

Processes rather than threads, because numba compiles under a global lock. A worker is a new
interpreter that reads one kernel per line of JSON and answers each with one line. A feeder thread
per worker takes kernels from a common queue; the calling thread compiles from it, too. Kernels that
a worker could not compile are compiled again by the calling thread, which raises the error.
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
from subgraph.system.json_values import with_tuples
from subgraph.weights.parallel import start_threads

# Kernels per worker: starting an interpreter and importing numba costs about as much as compiling
# this many (estimate).
_MIN_KERNELS_PER_WORKER = 3
_MAX_WORKERS = 15  # bounds the memory of the processes (estimate)
_DONE = "done"
# The program of a worker. Its first line of input is this process's ``sys.path``.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from subgraph.engine.toolchain.toolchain import compile_to_cache; "
    "from subgraph.engine.toolchain.compile_workers import work; work(compile_to_cache)"
)
_Report = Callable[[Kernel, float | None], None]


def worker_count(kernels: int) -> int:
    """Return how many worker processes to start for a number of kernels; 0 to compile here."""
    if not Path(sys.executable or "none").stem.startswith("python"):
        return 0  # Python is embedded: the executable is not an interpreter
    return max(0, min(host.core_count() - 1, kernels // _MIN_KERNELS_PER_WORKER, _MAX_WORKERS))


def compile_kernels(
    kernels: Sequence[Kernel],
    workers: int,
    compile_here: Callable[[Kernel], None],
    report: _Report,
) -> None:
    """Compile kernels into the cache with worker processes.

    Args:
        kernels: The kernels to compile.
        workers: Number of worker processes to start.
        compile_here: Compiles a kernel into the cache in this process.
        report: ``(kernel, None)`` is called before a worker compiles a kernel, and
            ``(kernel, seconds)`` after it has. Called from feeder threads.

    Raises:
        KernelError: ``compile_here`` raised it. No further kernel is started then.
    """
    tasks: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    failed: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    for kernel in kernels:
        tasks.put(kernel)
    feeders = start_threads(
        threading.Thread(
            target=_feed, args=(tasks, failed, report), name="subgraph-compile", daemon=True
        )
        for _ in range(workers)
    )

    try:
        _drain(tasks, compile_here)
    finally:
        _drain(tasks, lambda _: None)  # after an error no worker starts another kernel
        for feeder in feeders:
            feeder.join()
    _drain(failed, compile_here)


def _drain(tasks: queue.SimpleQueue[Kernel], use: Callable[[Kernel], None]) -> None:
    """Call ``use`` with kernels of a queue until it is empty."""
    while True:
        try:
            kernel = tasks.get_nowait()
        except queue.Empty:
            return
        use(kernel)


class _Worker:
    """A worker process and the pipes to it; see `work` for the protocol."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._send(sys.path)

    def _send(self, message: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def compile(self, kernel: Kernel) -> bool:
        """Have the worker compile a kernel into the cache; return whether it succeeded."""
        self._send([kernel.module, kernel.factory, dict(kernel.variant)])
        answer = self._process.stdout.readline() if self._process.stdout is not None else ""
        return answer.strip() == _DONE

    def close(self) -> None:
        """Close the worker's input, which ends it, and wait for its end."""
        self._process.communicate()


def _feed(
    tasks: queue.SimpleQueue[Kernel], failed: queue.SimpleQueue[Kernel], report: _Report
) -> None:
    """Send kernels to one worker until the queue is empty; the body of a feeder thread.

    The worker starts with the first kernel. A kernel that it does not compile, also because its
    process cannot start or has died, is put into ``failed``.
    """
    worker: _Worker | None = None

    def ask(kernel: Kernel) -> None:
        nonlocal worker
        start = time.perf_counter()
        report(kernel, None)
        try:
            worker = worker or _Worker()
            done = worker.compile(kernel)
        except OSError:
            done = False
        if done:
            report(kernel, time.perf_counter() - start)
        else:
            failed.put(kernel)

    _drain(tasks, ask)
    if worker is not None:
        worker.close()


def work(compile_to_cache: Callable[[Kernel], None]) -> None:
    """Compile the kernels that the standard input names until it ends; the body of a worker.

    A line of input is ``[module, factory, variant]``; the answer is ``done`` or ``failed``.

    Args:
        compile_to_cache: Compiles a kernel into the cache, or raises.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # a kernel module may print
    for line in sys.stdin:
        module, factory, variant = cast("tuple[str, str, dict[str, Any]]", json.loads(line))
        options = {name: with_tuples(value) for name, value in variant.items()}
        try:
            compile_to_cache(Kernel(module, factory, **options))
        except Exception:
            # The parent process compiles the kernel again and so raises the error itself.
            answers.write("failed\n")
        else:
            answers.write(f"{_DONE}\n")
        answers.flush()
