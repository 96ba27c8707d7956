"""A program: steps (kernel, arguments, work units) that one call from Python runs in order.

A step with a grain may be divided among the threads of a pool, each of which takes at least that
many units at a time. A step without a grain runs on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from subgraph.engine.program import abi, entry
from subgraph.engine.program.pool import Pool, helper_kernels, sleeps_in_kernel
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.system import guard_pages

# Least nanoseconds of a step that is divided among threads, and of what a thread takes at a time
# (estimates: publishing a step takes about 300 ns, and its data must move between cores, too).
_LEAST_SHARED_NS = 4000.0
_LEAST_PIECE_NS = 1000.0


class Step(NamedTuple):
    """One row of a program.

    Attributes:
        kernel: Machine address of the kernel.
        args: Address of its argument block, which must live as long as the program.
        units: Number of work units.
        grain: Least work units that a thread takes; 0 to run the step on the calling thread.
            `abi.BRANCH_GRAIN` marks a branch step, whose units are the next rows: it decides
            whether they run.
    """

    kernel: int
    args: int
    units: int
    grain: int = 0


def grain(units: int, nanoseconds: float, least: int = 1) -> int:
    """Return the grain of a step from an estimate of its duration.

    Args:
        units: Work units of the step.
        nanoseconds: Estimated duration of all units on one thread.
        least: Lower bound of the grain in units, for kernels with a cost per call.

    Returns:
        The units that take about a microsecond, at least ``least``; 0 for a step that is too short
        to be divided.
    """
    if units < 2 or nanoseconds < _LEAST_SHARED_NS:
        return 0
    return max(least, 1, round(units * _LEAST_PIECE_NS / nanoseconds))


def runtime_kernels(pool: Pool | None) -> tuple[Kernel, ...]:
    """Return the kernels of every program on a pool: entry, walker, and those of the helpers."""
    if pool is None or pool.size == 1:
        return (entry.KERNEL, walker(sleeps_in_kernel()))
    return (entry.KERNEL, walker(pool.in_kernel), *helper_kernels(pool.in_kernel))


@cache
def walker(in_kernel: bool) -> Kernel:
    """Return the walker, the kernel that runs a program.

    Args:
        in_kernel: Whether idle helpers sleep on a futex, so that the walker must wake them; False
            if they sleep in Python.
    """
    return Kernel("subgraph.engine.program.walker_kernels", "walk", sleep=in_kernel)


class Program:
    """Steps in the order in which they run, ready to be called. One run at a time.

    Args:
        steps: The steps.
        threads: Most threads of a step, the caller included.
        pool: The pool whose helpers take part; None for one thread.
        tiny: Whether a run takes a few microseconds only. Python's lock is then held during the
            run, as other threads could hardly use it in that time.

    Attributes:
        rows: The steps as the walker reads them, int64 (steps, 4): `abi.ROW_KERNEL` and following.
        tiny: As passed.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        threads: int = 1,
        pool: Pool | None = None,
        *,
        tiny: bool = False,
    ) -> None:
        self.rows: NDArray[np.int64] = np.array(steps, np.int64).reshape(-1, abi.ROW_WORDS)
        self._cancel = np.zeros(1, np.int64)
        self._pool = pool if pool is not None and threads > 1 and pool.size > 1 else None
        in_kernel = self._pool.in_kernel if self._pool is not None else sleeps_in_kernel()
        self._walk = walker(in_kernel).address
        self._threads = threads
        self.tiny = tiny
        self._times: NDArray[np.int64] = np.zeros(
            (len(steps) if guard_pages.MODE else 0, 2), np.int64
        )
        self._block = self._make_block(self._times.ctypes.data if guard_pages.MODE else 0)
        self._call = entry.entry(self._block.ctypes.data)

    def _make_block(self, times: int) -> NDArray[np.int64]:
        """Return a run block; ``times`` is the address for the steps' times, 0 for none."""
        block = np.zeros(abi.RUN_WORDS, np.int64)
        words = {
            abi.RUN_ROWS: self.rows.ctypes.data,
            abi.RUN_STEPS: len(self.rows),
            abi.RUN_POOL: self._pool.address if self._pool is not None else 0,
            abi.RUN_THREADS: self._threads,
            abi.RUN_CANCEL: self._cancel.ctypes.data,
            abi.RUN_TIMES: times,
            abi.RUN_RELEASE: 0 if self.tiny else 1,
            abi.RUN_WALK: self._walk,
        }
        for offset, value in words.items():
            block[offset // abi.WORD] = value
        return block

    def set_sizes(self, sizes: NDArray[np.int64]) -> None:
        """Set the work units and grains of all steps: int64 (steps, 2)."""
        self.rows[:, 2:] = sizes

    def run(self) -> bool:
        """Run all steps; return False if `cancel` stopped the run before the last."""
        self.wake_helpers()
        return not self._call()

    def wake_helpers(self) -> None:
        """Start or wake the pool's helpers, before a run."""
        if self._pool is not None:
            self._pool.wake_helpers()

    @property
    def block_address(self) -> int:
        """Address of the run block, for a compiled loop that runs the program repeatedly."""
        return self._block.ctypes.data

    @property
    def function(self) -> Callable[[], object]:
        """A callable that runs all steps; its result is not that of `run`.

        On one thread it is the compiled entry itself, without a Python function around it.
        """
        return self.run if self._pool is not None else self._call

    def run_timed(self) -> tuple[bool, NDArray[np.int64]]:
        """Run all steps and measure the time of each.

        Returns:
            The result of `run`, and the start and end of every step, int64 (steps, 2), in
            nanoseconds of the monotonic clock (``time.perf_counter_ns`` on Linux). Both are 0 for
            steps that did not run. Other systems than Linux and macOS count processor cycles.
        """
        times = np.zeros((len(self.rows), 2), np.int64)
        block = self._make_block(times.ctypes.data)
        self.wake_helpers()
        return not entry.entry(block.ctypes.data)(), times

    def running(self) -> list[int]:
        """Return the indices of steps that have begun and not ended; empty without guard pages."""
        return np.flatnonzero(self._times[:, 0] > self._times[:, 1]).tolist()

    def cancel(self) -> None:
        """Stop the run before its next step; if none is running, stop the next run at its start."""
        self._cancel[0] = 1

    def clear(self) -> None:
        """Undo `cancel`, so that the program can run again."""
        self._cancel[0] = 0
