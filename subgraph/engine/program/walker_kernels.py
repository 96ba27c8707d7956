"""The compiled functions that run programs: the walker, and the loop of its helpers.

**Work distribution.** The *walker* (the thread that calls a program) executes the steps in order.
It *publishes* a step with enough work units to the helpers of the pool: the units are divided into
one contiguous region per thread, each of equal *slices*. A slice is one unit, or more if the number
of units does not fit in a ticket. A region's *ticket* is one word with (threads, slices, next
slice), so that one compare-and-swap both checks that the step is still open to a thread and takes
the next slices. A thread takes half of the slices that a region has left, at least the step's
grain: large pieces come first, and small ones balance cores of different speeds. Each thread
empties its own region first, then those of the others (guided self-scheduling with stealing).

**Completion.** The walker waits until POOL_REMAINING, the number of unfinished slices, is 0. It
waits for slices that were taken, never for a thread, so a helper that sleeps or was descheduled
delays nothing. The published words change only after that, so they cannot change under a thread
that holds slices.

**Waking.** Sleeping helpers are woken on other cores than the walker's. Otherwise the scheduler may
queue them behind the walker: on a virtual machine Linux takes a core that the host has put to sleep
for a busy one, and the helper starts milliseconds late. The walker therefore removes its own core
from the sleeper's set of cores before it wakes it; the helper restores the set after its first
step.

The words of a pool's state and of a run block are those of `subgraph.engine.program.abi`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import njit, types

from subgraph.engine.codegen.irtools import I32, I64, VOID, call_intrinsic, define, pointer
from subgraph.engine.codegen.simd import (
    atomic_add,
    atomic_cas,
    atomic_load,
    atomic_store,
    call_kernel,
    ld_i64,
    pause,
    st_i64,
)
from subgraph.engine.program import abi
from subgraph.system import host

Function = Callable[..., Any]
# The decorator of functions that kernels call. Without wrappers for Python and C they compile in
# two thirds of the time.
_helper = njit(
    nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True, _nrt=False
)
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
# Numbers of the system call futex, and of the monotonic clock, by system.
_FUTEX = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
# Rounds of POOL_SPINS pauses that a helper spins after Python woke it, until its program starts:
# a millisecond by default (estimate).
_PATIENCE = 20
_CLOCK_MONOTONIC = {"linux": 1, "darwin": 6}


def _emit_futex(builder: Any, operation: int, address: Any, value: Any) -> None:
    """Emit the system call futex(address, operation, value); its result is not used.

    Args:
        builder: LLVM's builder.
        operation: `_WAIT` or `_WAKE`.
        address: Address of a word; the futex is its lower half (little-endian).
        value: The value to sleep on, or the most threads to wake.
    """
    number = _FUTEX[host.architecture()]
    fnty = ir.FunctionType(I64, [I64], var_arg=True)
    module = builder.module
    syscall = module.globals.get("syscall") or ir.Function(module, fnty, "syscall")
    where = pointer(builder, address, I32)
    builder.call(syscall, [I64(number), where, I64(operation), value, I64(0), I64(0), I64(0)])


def _emit_yield(builder: Any, _context: Any, _args: Any) -> None:
    call_intrinsic(builder, "sched_yield", I32, [])


def _emit_now(builder: Any, _context: Any, _args: Any) -> Any:
    """Emit the monotonic clock in nanoseconds; processor cycles where it is not known."""
    clock = _CLOCK_MONOTONIC.get(sys.platform)
    if clock is None:
        return call_intrinsic(builder, "llvm.readcyclecounter", I64, [])
    with builder.goto_entry_block():
        spec = builder.alloca(ir.ArrayType(I64, 2))
    call_intrinsic(builder, "clock_gettime", I32, [I32(clock), spec])
    words = [builder.load(builder.gep(spec, [I32(0), I32(i)]), typ=I64) for i in range(2)]
    return builder.add(builder.mul(words[0], I64(1_000_000_000)), words[1])


def _emit_own_core(builder: Any, _context: Any, _args: Any) -> Any:
    return builder.sext(call_intrinsic(builder, "sched_getcpu", I32, []), I64)


def _emit_cores(name: str) -> Any:
    """Return the emitter of a C function that reads or sets the set of cores of a thread.

    The intrinsic is ``(thread, cores) -> int64``: the thread's identifier (0 for the caller), the
    address of a set of `abi.LINE` bytes, and 0 for success.
    """

    def emit(builder: Any, _context: Any, args: Any) -> Any:
        thread, cores = args
        where = pointer(builder, cores, I64)
        size = I64(abi.LINE)
        failed = call_intrinsic(builder, name, I32, [builder.trunc(thread, I32), size, where])
        return builder.sext(failed, I64)

    return emit


own_core = define(types.int64, [], _emit_own_core)
get_cores = define(types.int64, [types.int64] * 2, _emit_cores("sched_getaffinity"))
set_cores = define(types.int64, [types.int64] * 2, _emit_cores("sched_setaffinity"))
now_ns = define(types.int64, [], _emit_now)
futex_wait = define(VOID, [types.int64] * 2, lambda b, c, a: _emit_futex(b, _WAIT, a[0], a[1]))
futex_wake = define(VOID, [types.int64] * 2, lambda b, c, a: _emit_futex(b, _WAKE, a[0], a[1]))
yield_core = define(VOID, [], _emit_yield if sys.platform != "win32" else lambda b, c, a: None)


@_helper
def _drain(pool: int, region: int, worker: int) -> int:
    """Take and run slices of one region until none is left.

    Args:
        pool: Address of the pool's state.
        region: Index of the region.
        worker: Index of the executing thread.

    Returns:
        Number of slices that were run.
    """
    ticket = pool + abi.POOL_TICKETS + region * abi.LINE
    done = 0
    while True:
        word = atomic_load(ticket)
        threads = word >> (2 * abi.TICKET_BITS)
        slices = (word >> abi.TICKET_BITS) & abi.TICKET_MASK
        first = word & abi.TICKET_MASK
        if worker >= threads or first >= slices:
            return done
        least = ld_i64(pool + abi.POOL_LEAST)
        left = slices - first
        take = max(least, (left + 1) // 2)
        if left - take < least:
            take = left
        # Another step with an equal ticket may have been published meanwhile. The swap then takes
        # slices of that one, of which any number up to what is left is correct.
        if atomic_cas(ticket, word, word + take) != word:
            continue
        units = ld_i64(pool + abi.POOL_UNITS)
        size = ld_i64(pool + abi.POOL_SLICE)
        total = (units + size - 1) // size
        begin = (total * region // threads + first) * size
        call_kernel(
            ld_i64(pool + abi.POOL_KERNEL),
            ld_i64(pool + abi.POOL_ARGS),
            begin,
            min(begin + take * size, units),
            worker,
        )
        done += take


@_helper
def _help(pool: int, worker: int) -> None:
    """Run the remaining slices of the published step, those of the thread's own region first.

    Args:
        pool: Address of the pool's state.
        worker: Index of the executing thread.
    """
    size = ld_i64(pool + abi.POOL_SIZE)
    done = 0
    for k in range(size):
        region = worker + k
        if region >= size:
            region -= size
        done += _drain(pool, region, worker)
    if done > 0:
        atomic_add(pool + abi.POOL_REMAINING, -done)


@_helper
def _sleep(pool: int, seen: int, worker: int) -> int:
    """Sleep on the futex until a step is published; the helper's own part of waking it.

    Args:
        pool: Address of the pool's state.
        seen: Sequence number of the last step that the helper has seen.
        worker: Index of the helper.

    Returns:
        The word at POOL_ASLEEP: 2 if the walker has moved the helper to other cores, else 1.
    """
    asleep = pool + abi.POOL_TICKETS + worker * abi.LINE + abi.POOL_ASLEEP
    atomic_store(asleep, 1)
    atomic_add(pool + abi.POOL_SLEEPERS, 1)
    futex_wait(pool + abi.POOL_SEQUENCE, seen & 0xFFFFFFFF)
    atomic_add(pool + abi.POOL_SLEEPERS, -1)
    found: int = atomic_load(asleep)
    atomic_store(asleep, 0)
    return found


def worker(*, sleep: bool) -> Function:
    """Return the kernel of a helper: it runs slices of published steps until the pool stops.

    Its arguments are the address of the pool's state, a sequence number, 0, and the helper's index.
    It waits for POOL_SEQUENCE to differ from the sequence number.

    Args:
        sleep: Whether an idle helper sleeps on a futex. If not, the kernel returns when no program
            runs on the pool, and the helper sleeps in Python.
    """

    def kernel(pool: int, seen: int, _end: int, worker: int) -> None:
        limit = ld_i64(pool + abi.POOL_SPINS)
        idle = 0
        rounds = 0
        moved = False
        while True:
            current = atomic_load(pool + abi.POOL_SEQUENCE)
            if current != seen:
                seen = current
                idle = 0
                rounds = 0
                if atomic_load(pool + abi.POOL_STOP) != 0:
                    return
                _help(pool, worker)
                if sleep and moved:
                    set_cores(0, pool + abi.POOL_CORES)
                    moved = False
            elif idle < limit:
                idle += 1
                pause()
            elif sleep:
                moved |= _sleep(pool, seen, worker) == 2
                idle = 0
            elif rounds < _PATIENCE:
                # The program for which Python woke the helper may start a little later.
                idle = 0
                rounds += 1
            elif atomic_load(pool + abi.POOL_WALKERS) == 0:
                return
            else:
                yield_core()

    return kernel


def spin() -> Function:
    """Return the kernel that executes ``count``, its first argument, pauses; it is timed."""

    def kernel(count: int, _begin: int, _end: int, _worker: int) -> None:
        for _ in range(count):
            pause()

    return kernel


def wake() -> Function:
    """Return the kernel that wakes all helpers that sleep on a pool's sequence word."""

    def kernel(pool: int, _begin: int, _end: int, _worker: int) -> None:
        atomic_add(pool + abi.POOL_SEQUENCE, 1)
        futex_wake(pool + abi.POOL_SEQUENCE, abi.MAX_THREADS)

    return kernel


@_helper
def _move_sleepers(pool: int) -> None:
    """Restrict all sleeping helpers to other cores than the one this thread runs on."""
    cores, others = pool + abi.POOL_CORES, pool + abi.POOL_OTHER_CORES
    own = own_core()
    if own < 0 or own >= 8 * abi.LINE or get_cores(0, cores) != 0:
        return
    some = 0
    for k in range(abi.LINE // abi.WORD):
        word = ld_i64(cores + k * abi.WORD)
        if k == own >> 6:
            word &= ~(1 << (own & 63))
        st_i64(others + k * abi.WORD, word)
        some |= word
    if some == 0:
        return
    for worker in range(1, ld_i64(pool + abi.POOL_SIZE)):
        line = pool + abi.POOL_TICKETS + worker * abi.LINE
        if atomic_cas(line + abi.POOL_ASLEEP, 1, 2) == 1:
            set_cores(ld_i64(line + abi.POOL_THREAD), others)


def _publisher(*, sleep: bool) -> Function:
    """Return ``f(pool, row, units, threads, grain)``, which publishes a step to a pool's helpers.

    The step is divided into one region per thread. ``pool`` is the address of the pool's state,
    ``row`` that of the step's row, ``grain`` the least units that a thread takes.

    Args:
        sleep: Whether helpers sleep on a futex, so that they must be woken.
    """

    def publish(pool: int, row: int, units: int, threads: int, grain: int) -> None:
        size = (units >> abi.TICKET_BITS) + 1
        total = (units + size - 1) // size
        st_i64(pool + abi.POOL_KERNEL, ld_i64(row + abi.ROW_KERNEL))
        st_i64(pool + abi.POOL_ARGS, ld_i64(row + abi.ROW_ARGS))
        st_i64(pool + abi.POOL_UNITS, units)
        st_i64(pool + abi.POOL_SLICE, size)
        st_i64(pool + abi.POOL_LEAST, (grain + size - 1) // size)
        atomic_store(pool + abi.POOL_REMAINING, total)
        for region in range(threads):
            slices = total * (region + 1) // threads - total * region // threads
            word = (threads << (2 * abi.TICKET_BITS)) | (slices << abi.TICKET_BITS)
            atomic_store(pool + abi.POOL_TICKETS + region * abi.LINE, word)
        atomic_add(pool + abi.POOL_SEQUENCE, 1)
        if sleep and atomic_load(pool + abi.POOL_SLEEPERS) > 0:
            _move_sleepers(pool)
            futex_wake(pool + abi.POOL_SEQUENCE, abi.MAX_THREADS)

    return _helper(publish)


@_helper
def _await_slices(pool: int) -> None:
    """Wait until all slices of the published step are finished, and unpublish it."""
    limit = ld_i64(pool + abi.POOL_SPINS)
    spins = 0
    while atomic_load(pool + abi.POOL_REMAINING) > 0:
        if spins < limit:
            spins += 1
            pause()
        else:
            # The thread with the last slices may be waiting for this core.
            yield_core()
    atomic_store(pool + abi.POOL_BUSY, 0)


def walk(*, sleep: bool) -> Function:
    """Return the walker, the kernel that runs a program: its first argument is a run block.

    Args:
        sleep: Whether idle helpers sleep on a futex, so that the walker must wake them.
    """
    publish = _publisher(sleep=sleep)

    def kernel(run: int, _begin: int, _end: int, _worker: int) -> None:
        row = ld_i64(run + abi.RUN_ROWS)
        stop = row + abi.WORD * abi.ROW_WORDS * ld_i64(run + abi.RUN_STEPS)
        pool = ld_i64(run + abi.RUN_POOL)
        threads = ld_i64(run + abi.RUN_THREADS)
        cancel = ld_i64(run + abi.RUN_CANCEL)
        times = ld_i64(run + abi.RUN_TIMES)
        if pool != 0:
            threads = min(threads, ld_i64(pool + abi.POOL_SIZE))
            atomic_add(pool + abi.POOL_WALKERS, 1)
        else:
            threads = 1
        status = 0
        while row < stop:
            if atomic_load(cancel) != 0:
                status = 1
                break
            if times != 0:
                st_i64(times, now_ns())
            units = ld_i64(row + abi.ROW_UNITS)
            grain = ld_i64(row + abi.ROW_GRAIN)
            parts = 1
            if threads > 1 and grain > 0 and units > grain:
                parts = min(threads, (units + grain - 1) // grain)
                # With as many programs as threads, each is fastest on a core of its own.
                if atomic_load(pool + abi.POOL_WALKERS) >= threads or (
                    atomic_cas(pool + abi.POOL_BUSY, 0, 1) != 0
                ):
                    parts = 1
            if parts > 1:
                publish(pool, row, units, parts, grain)
                _help(pool, 0)
                _await_slices(pool)
            else:
                call_kernel(ld_i64(row + abi.ROW_KERNEL), ld_i64(row + abi.ROW_ARGS), 0, units, 0)
            if times != 0:
                st_i64(times + abi.WORD, now_ns())
                times += 2 * abi.WORD
            if grain < 0:
                skipped = ld_i64(ld_i64(row + abi.ROW_ARGS) + abi.BRANCH_SKIP)
                row += skipped * abi.WORD * abi.ROW_WORDS
                if times != 0:
                    times += skipped * 2 * abi.WORD
            row += abi.WORD * abi.ROW_WORDS
        if pool != 0:
            atomic_add(pool + abi.POOL_WALKERS, -1)
        st_i64(run + abi.RUN_STATUS, status)

    return kernel
