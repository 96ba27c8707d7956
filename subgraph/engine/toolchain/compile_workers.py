"""Worker processes that compile kernels into the cache, as numba compiles one kernel at a time.

A worker is a new interpreter that reads kernels as lines of JSON and answers each with a line. One
thread of this process feeds each worker from a common queue, and the calling thread compiles, too.
A kernel that a worker fails to compile is compiled again by the caller, who gets the error.
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

_LEAST_PER_WORKER = 3  # kernels; compiling fewer takes less time than starting a worker
_MOST_WORKERS = 15
_DONE = "done"
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.stdin.readline()); "
    "from subgraph.engine.toolchain.toolchain import compile_to_cache; "
    "from subgraph.engine.toolchain.compile_workers import work; work(compile_to_cache)"
)
_Report = Callable[[Kernel, float | None], None]


def worthwhile_workers(kernels: int) -> int:
    """Return the number of worker processes for the compilation of some kernels."""
    if not Path(sys.executable or "none").stem.startswith(("python", "pypy")):
        return 0  # inside another program, whose executable is no interpreter
    return max(0, min(host.core_count() - 1, kernels // _LEAST_PER_WORKER, _MOST_WORKERS))


def compile_kernels(
    kernels: Sequence[Kernel],
    workers: int,
    compile_here: Callable[[Kernel], None],
    report: _Report,
) -> None:
    """Compile kernels into the cache with worker processes.

    Args:
        kernels: The kernels.
        workers: Number of worker processes.
        compile_here: Compiles one in this process.
        report: Called with a kernel before a worker compiles it, with None, and after, with the
            seconds that it took.

    Raises:
        KernelError: Raised by ``compile_here``.
    """
    tasks: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    left: queue.SimpleQueue[Kernel] = queue.SimpleQueue()
    for kernel in kernels:
        tasks.put(kernel)
    feeders = start_threads(
        threading.Thread(
            target=_feed, args=(tasks, left, report), name="subgraph-compile", daemon=True
        )
        for _ in range(workers)
    )

    try:
        _drain(tasks, compile_here)
    finally:
        _drain(tasks, lambda _: None)  # after an error no worker starts another kernel
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
    """A worker process."""

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
        """Compile a kernel; return whether it is in the cache now."""
        self._send([kernel.module, kernel.factory, dict(kernel.variant)])
        answer = self._process.stdout.readline() if self._process.stdout is not None else ""
        return answer.strip() == _DONE

    def close(self) -> None:
        """End the process by closing its input."""
        self._process.communicate()


def _feed(
    tasks: queue.SimpleQueue[Kernel], left: queue.SimpleQueue[Kernel], report: _Report
) -> None:
    """Send kernels to one worker until there are none; the body of a feeder's thread."""
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
            left.put(kernel)

    _drain(tasks, ask)
    if worker is not None:
        worker.close()


def _frozen(value: Any) -> Any:
    """Return an option of a variant, with tuples again instead of JSON's lists."""
    return value if isinstance(value, int | float | str) else tuple(value)


def work(compile_to_cache: Callable[[Kernel], None]) -> None:
    """Compile the kernels that the standard input names until it ends; the body of a worker.

    Args:
        compile_to_cache: Compiles a kernel into the cache.
    """
    answers, sys.stdout = sys.stdout, sys.stderr  # a kernel module may print
    for line in sys.stdin:
        module, factory, variant = cast("tuple[str, str, dict[str, Any]]", json.loads(line))
        options = {name: _frozen(value) for name, value in variant.items()}
        try:
            compile_to_cache(Kernel(module, factory, **options))
        except Exception:
            # The caller compiles the kernel again, and gets the error.
            answers.write("failed\n")
        else:
            answers.write(f"{_DONE}\n")
        answers.flush()
