"""Thread pools for programs: Python daemon threads that run one compiled loop.

A pool of ``size`` threads has ``size - 1`` helpers; the calling thread is the first. After the last
step of a program helpers spin for some microseconds and then sleep, so that an idle pool takes no
processor time. Where possible they sleep on a futex, which the walker wakes by itself
(`walker_kernels`); elsewhere on a condition of Python, which `Pool.wake_helpers` notifies.

No program ever waits for a helper to arrive. A pool without helpers (after a fork), or one that
another program uses, makes the program run on fewer threads and never blocks it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from subgraph.engine.program import abi
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.errors import ConfigError
from subgraph.system import host
from subgraph.system.environment import SPIN_MICROSECONDS
from subgraph.system.forking import free_in_child
from subgraph.weights.parallel import start_threads

_MODULE = "subgraph.engine.program.walker_kernels"
_SIGNATURE = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
# Longest wait for each helper to end (estimate); then it is left behind, as a daemon.
_JOIN_SECONDS = 1.0
# Longest sleep of a helper in Python, in seconds (estimate); then it looks for work by itself.
_WAIT_SECONDS = 60.0
# Pauses of one timing of the pause instruction, some 25 microseconds, and timings (estimates).
_TIMED_PAUSES, _TIMINGS = 1000, 5


def sleeps_in_kernel() -> bool:
    """Return whether helpers can sleep on a futex: on Linux, if its system call is known."""
    return sys.platform == "linux" and host.architecture() in (
        "x86_64",
        "aarch64",
        "riscv64",
        "ppc64le",
    )


def call(address: int, args: int, begin: int, end: int, worker: int) -> None:
    """Call a compiled kernel through ctypes, which releases Python's lock meanwhile.

    Args:
        address: Machine address of the kernel.
        args: Address of its argument block.
        begin: First work unit.
        end: One past the last work unit.
        worker: Index of the executing thread.
    """
    _SIGNATURE(address)(args, begin, end, worker)


@cache
def helper_kernels(in_kernel: bool) -> tuple[Kernel, ...]:
    """Return the kernels of helpers that sleep on a futex, or in Python if not ``in_kernel``."""
    loop = (Kernel(_MODULE, "spin"), Kernel(_MODULE, "worker", sleep=in_kernel))
    return (*loop, Kernel(_MODULE, "wake")) if in_kernel else loop


@cache
def _pauses_per_microsecond() -> float:
    """Return how many pause instructions this machine executes in a microsecond at best."""
    spin = Kernel(_MODULE, "spin").address
    best = float("inf")
    for _ in range(_TIMINGS):
        start = time.perf_counter()
        call(spin, _TIMED_PAUSES, 0, 0, 0)
        best = min(best, time.perf_counter() - start)
    return _TIMED_PAUSES / (1e6 * max(best, 1e-9))


class _State:
    """The memory that a pool's threads share, and the condition on which they sleep in Python.

    Helpers hold the state and not the pool, so that a pool without users is collected.

    Attributes:
        size: Threads of the pool, the caller included.
        in_kernel: Whether helpers sleep on a futex.
        words: The state that compiled code uses (`abi.POOL_SEQUENCE` and the following), int64.
        address: Address of the words, a multiple of `abi.LINE`.
        wakened: Notified to wake helpers that sleep in Python.
        waiting: Number of helpers that sleep in Python.
    """

    def __init__(self, size: int, in_kernel: bool) -> None:
        self.size = size
        self.in_kernel = in_kernel
        nbytes = abi.pool_bytes(size)
        self._memory = np.zeros(nbytes + abi.LINE, np.uint8)
        skip = -self._memory.ctypes.data % abi.LINE
        self.words: NDArray[np.int64] = self._memory[skip : skip + nbytes].view(np.int64)
        self.address = self.words.ctypes.data
        self.wakened = threading.Condition()
        self.waiting = 0

    def get(self, offset: int) -> int:
        """Return the word at an offset in bytes."""
        return int(self.words[offset // abi.WORD])

    def put(self, offset: int, value: int) -> None:
        """Set the word at an offset in bytes."""
        self.words[offset // abi.WORD] = value


# Keeps the states whose helpers may still run compiled code after their pool was collected.
_states: set[_State] = set()
_pools: weakref.WeakSet[Pool] = weakref.WeakSet()  # all pools, for the interpreter's end and forks
_shared: dict[int, Pool] = {}  # by size: see `shared`
_shared_lock = free_in_child(threading.Lock())


class Pool:
    """A pool of threads for programs.

    Args:
        size: Number of threads, the caller of a program included.
        in_kernel: Whether helpers sleep on a futex rather than in Python; None to do so where it
            is possible.

    Attributes:
        size: Number of threads.
        in_kernel: Whether helpers sleep on a futex.
        address: Address of the pool's state, for run blocks; the same also after a fork.
        started: Whether the helpers run. The first program that uses the pool starts them.

    Raises:
        ConfigError: The size is not between 1 and 1024.
    """

    def __init__(self, size: int, in_kernel: bool | None = None) -> None:
        if not 1 <= size <= abi.MAX_THREADS:
            raise ConfigError(f"a pool has 1 to {abi.MAX_THREADS} threads, got {size}")
        self.size = size
        self.in_kernel = sleeps_in_kernel() if in_kernel is None else in_kernel
        self._state = _State(size, self.in_kernel)
        self.address = self._state.address
        self.started = size == 1
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False
        self._wake = 0
        _pools.add(self)

    def start(self) -> None:
        """Start the helpers unless they run or the pool is closed."""
        with self._lock:
            if self.started or self._closed:
                return
            state = self._state
            _reset(state)
            loop = Kernel(_MODULE, "worker", sleep=self.in_kernel).address
            wake = Kernel(_MODULE, "wake").address if self.in_kernel else 0
            self._wake = wake
            _states.add(state)
            self._threads = [
                threading.Thread(
                    target=_helper, args=(state, loop, k), name=f"subgraph-{k}", daemon=True
                )
                for k in range(1, self.size)
            ]
            self._threads = start_threads(self._threads)
            if not self._threads:
                return  # no thread could be started: the next program tries again
            self.started = True
            weakref.finalize(self, _stop, state, tuple(self._threads), wake).atexit = False

    def wake_helpers(self) -> None:
        """Start the helpers, or wake those that sleep in Python; called before a program runs."""
        if not self.started:
            self.start()
        if self._state.waiting:
            with self._state.wakened:
                self._state.wakened.notify_all()

    def close(self) -> None:
        """End the helpers; programs of this pool then run on their callers' threads alone."""
        with self._lock:
            self._closed = True
            if self.started and self._threads:
                _stop(self._state, tuple(self._threads), self._wake)
                self._threads = []

    def reset_after_fork(self) -> None:
        """Reset the pool in a forked child, which has no helpers and whose locks may be held."""
        self._lock = threading.Lock()
        self._state.wakened = threading.Condition()
        self._state.waiting = 0
        self._state.words[:] = 0
        self._threads = []
        if not self._closed:
            self.started = self.size == 1
        _reset(self._state)


def _reset(state: _State) -> None:
    """Set the words that stay the same while a pool's helpers run."""
    cores = host.core_count()
    # With more threads than cores a helper that spins takes the core that the caller needs.
    microseconds = SPIN_MICROSECONDS.value() if state.size <= cores else 1.0
    state.put(abi.POOL_SIZE, state.size)
    state.put(abi.POOL_SPINS, int(microseconds * _pauses_per_microsecond()))


def _helper(state: _State, loop: int, worker: int) -> None:
    """Run a helper's compiled loop until the pool stops; the body of its thread.

    Args:
        state: The pool's state.
        loop: Machine address of the loop (`walker_kernels.worker`). It returns only to end the
            helper or, if it does not sleep on a futex, for lack of programs.
        worker: Index of the thread.
    """
    enter: Callable[..., None] = _SIGNATURE(loop)
    line = abi.POOL_TICKETS + worker * abi.LINE
    state.put(line + abi.POOL_THREAD, threading.get_native_id())
    while not state.get(abi.POOL_STOP):
        # A sequence number other than the present one, so that the loop looks at the step that is
        # published already.
        enter(state.address, state.get(abi.POOL_SEQUENCE) - 1, 0, worker)
        if state.in_kernel:
            continue
        with state.wakened:
            state.waiting += 1
            while not state.get(abi.POOL_STOP) and not state.get(abi.POOL_WALKERS):
                if state.wakened.wait(timeout=_WAIT_SECONDS):
                    break
            state.waiting -= 1


def _stop(state: _State, threads: tuple[threading.Thread, ...], wake: int) -> None:
    """End helpers and wait for them. Nothing may be compiled here: garbage collection may call it.

    Args:
        state: The pool's state.
        threads: The helpers.
        wake: Machine address of `walker_kernels.wake`; 0 if helpers sleep in Python.
    """
    state.put(abi.POOL_STOP, 1)
    if state.in_kernel:
        call(wake, state.address, 0, 0, 0)
    else:
        with state.wakened:
            state.put(abi.POOL_SEQUENCE, state.get(abi.POOL_SEQUENCE) + 1)
            state.wakened.notify_all()
    for thread in threads:
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(_JOIN_SECONDS)
    if not any(thread.is_alive() for thread in threads):
        _states.discard(state)


def shared(size: int) -> Pool:
    """Return the pool of ``size`` threads that all programs of this process share."""
    with _shared_lock:
        if size not in _shared:
            _shared[size] = Pool(size)
        return _shared[size]


def _close_all() -> None:
    for pool in list(_pools):
        pool.close()


def _after_fork() -> None:
    _states.clear()
    for pool in list(_pools):
        pool.reset_after_fork()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
