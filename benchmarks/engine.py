"""Overhead of the execution engine: calls, steps, parallel steps, compiling and loading kernels.

python benchmarks/engine.py
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

from subgraph.engine.program.pool import Pool, call
from subgraph.engine.program.program import Program, Step
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.system import host

# A kernel that does nothing: it spins as often as its first argument says, which is 0.
EMPTY = Kernel("subgraph.engine.program.walker_kernels", "spin")
KERNELS = """
import json, sys, time
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel
start = time.perf_counter()
made = toolchain.prepare([
    Kernel("subgraph.engine.program.walker_kernels", "walk", sleep=True),
    Kernel("subgraph.engine.program.walker_kernels", "worker", sleep=True),
    Kernel("subgraph.engine.program.walker_kernels", "spin"),
    Kernel("subgraph.engine.program.walker_kernels", "wake"),
])
print(json.dumps([made, time.perf_counter() - start, "numba" in sys.modules]))
"""


def microseconds(run: Callable[[], object], repeats: int) -> float:
    """Return the median time of a call in microseconds."""
    times: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return 1e6 * statistics.median(times)


def programs() -> None:
    """Print the times of calls and steps."""
    address = EMPTY.address
    for tiny in (True, False):
        one, many = (Program([Step(address, 0, 0)] * n, tiny=tiny) for n in (1, 1001))
        single = microseconds(one.run, 5000)
        step = (microseconds(many.run, 1000) - single) / 1000
        kept = "kept" if tiny else "let go"
        print(f"call from Python, its lock {kept:6}  {single:8.2f} us,  a step more {step:7.4f} us")
    plain = microseconds(lambda: call(address, 0, 0, 0, 0), 5000)
    print(f"the same kernel through ctypes        {plain:6.2f} us")
    for threads in range(2, min(host.core_count(), 8) + 1, 2):
        pool = Pool(threads)
        shared = Program(
            [Step(address, 0, 0, 0), Step(address, 0, 8 * threads, 1)] * 500, threads, pool
        )
        alone = Program([Step(address, 0, 0, 0), Step(address, 0, 8 * threads, 0)] * 500)
        for program in (shared, alone):
            program.run()
        cost = (microseconds(shared.run, 200) - microseconds(alone.run, 200)) / 500
        print(f"sharing a step among {threads} threads            {cost:6.2f} us")
        pool.close()


def kernels() -> None:
    """Print the times of compiling and of loading kernels, each in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        for what in ("compile", "load"):
            done = subprocess.run(
                [sys.executable, "-c", KERNELS],
                env={**os.environ, "SUBGRAPH_CACHE_DIR": folder},
                capture_output=True,
                text=True,
                check=True,
            )
            made, seconds, numba = json.loads(done.stdout)
            took = f"{what} 4 kernels: {1e3 * seconds:.1f} ms"
            print(f"{took}, {made} compiled, numba imported: {numba}")


if __name__ == "__main__":
    print(f"{host.isa().cpu}, {host.isa().name}, {host.core_count()} cores")
    programs()
    kernels()
