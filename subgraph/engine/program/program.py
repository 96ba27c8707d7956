"""A program: steps (kernel, arguments, units) that one call from Python runs from first to last.

A step with a grain may be divided among a pool's threads, in pieces of at least that many units. A
step without one runs on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from subgraph.engine.program import abi
from subgraph.engine.program.entry import entry
from subgraph.engine.program.pool import Pool, helper_kernels, sleeps_in_kernel
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.system import guard_pages

# Least nanoseconds of a step that is shared among threads, and of a piece of it. Publishing a step
# takes about 300, and its data must also move between cores.
_LEAST_SHARED_NS = 4000.0
_LEAST_PIECE_NS = 1000.0


class Step(NamedTuple):
    """One row of a program.

    Attributes:
        kernel: Machine address of a kernel.
        args: Address of its arguments, which must live as long as the program.
        units: Number of work units.
        grain: Least work units of a thread; with 0 the step runs on one thread. With
            `abi.BRANCH_GRAIN` the units are the next rows, which the step may have skipped.
    """

    kernel: int
    args: int
    units: int
    grain: int = 0


def grain(units: int, nanoseconds: float, least: int = 1) -> int:
    """Return the grain of a step from an estimate of its time on one thread.

    Args:
        units: Work units of the step.
        nanoseconds: Estimated time of all units.
        least: Least units of a piece.

    Returns:
        Units of the smallest piece, which takes at least a microsecond; 0, for one thread, if the
        step is too short to be shared.
    """
    if units < 2 or nanoseconds < _LEAST_SHARED_NS:
        return 0
    return max(least, 1, round(units * _LEAST_PIECE_NS / nanoseconds))


def runtime_kernels(pool: Pool | None) -> tuple[Kernel, ...]:
    """Return the kernels that every program needs: the walker, and those of the pool's helpers."""
    if pool is None or pool.size == 1:
        return (walker(sleeps_in_kernel()),)
    return (walker(pool.in_kernel), *helper_kernels(pool.in_kernel))


@cache
def walker(in_kernel: bool) -> Kernel:
    """Return the kernel that walks a program.

    Args:
        in_kernel: Whether idle helpers sleep on a futex and must be woken; otherwise in Python.
    """
    return Kernel("subgraph.engine.program.walker_kernels", "walk", sleep=in_kernel)


class Program:
    """Steps in the order in which they run, ready to be called.

    Args:
        steps: The steps.
        threads: Most threads of a step.
        pool: The pool whose helpers run pieces of steps; None with one thread.
        tiny: Whether a run takes some microseconds only. Python's lock is then held during the
            run, because releasing it takes longer than others could use it.

    Attributes:
        rows: The program's rows, int64 (steps, 4), for inspection.
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
        self._call = entry(self._block.ctypes.data)

    def _make_block(self, times: int) -> NDArray[np.int64]:
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

    def resize(self, sizes: NDArray[np.int64]) -> None:
        """Set the units and grains of all steps, int64 (steps, 2)."""
        self.rows[:, 2:] = sizes

    def run(self) -> bool:
        """Run all steps; return False when ``cancel`` ended the run before the last."""
        self.rouse()
        return not self._call()

    def rouse(self) -> None:
        """Wake the pool's helpers."""
        if self._pool is not None:
            self._pool.rouse()

    @property
    def block_address(self) -> int:
        """Address of its run block, for a compiled function that runs it repeatedly."""
        return self._block.ctypes.data

    @property
    def function(self) -> Callable[[], object]:
        """A callable that runs all steps; with one thread it is the compiled entry itself."""
        return self.run if self._pool is not None else self._call

    def run_timed(self) -> tuple[bool, NDArray[np.int64]]:
        """Run all steps and measure each.

        Returns:
            What ``run`` returns, and the start and end of every step, int64 (steps, 2): nanoseconds
            of the monotonic clock (``time.perf_counter_ns`` on Linux); 0 for steps not reached.
        """
        times = np.zeros((len(self.rows), 2), np.int64)
        block = self._make_block(times.ctypes.data)
        self.rouse()
        return not entry(block.ctypes.data)(), times

    def running(self) -> list[int]:
        """Return the steps that have begun and not ended; only recorded with guard pages."""
        return np.flatnonzero(self._times[:, 0] > self._times[:, 1]).tolist()

    @property
    def cancel_address(self) -> int:
        """Address of the word that ends a run before its next step once it is not 0."""
        return self._cancel.ctypes.data

    def cancel(self) -> None:
        """Make a run stop before its next step, also a run that is yet to start."""
        self._cancel[0] = 1

    def misfit(self) -> bool:
        """Return whether the run ended because of sizes that it does not serve, and clear that."""
        found = int(self._cancel[0]) == abi.MISFIT
        if found:
            self.clear()
        return found

    def clear(self) -> None:
        """Undo ``cancel``."""
        self._cancel[0] = 0
