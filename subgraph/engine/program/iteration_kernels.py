"""The loop of programs: runs a program repeatedly by one call (`subgraph.engine.cpu.iterations`).

Before and after each iteration it copies memory: slices of scanned inputs, carried values from
outputs to inputs, and outputs to their slices of the stacked results.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import atomic_load, call_kernel, ld_i64, ld_u8, memcpy, st_i64
from subgraph.engine.program import abi

_STEP = abi.WORD * abi.COPY_WORDS


@register_jitable
def _copy(rows: int, count: int) -> None:
    """Make the copies of ``count`` rows (`abi.COPY_SOURCE`), and advance the rows' addresses."""
    for row in range(rows, rows + count * _STEP, _STEP):
        source, target = ld_i64(row + abi.COPY_SOURCE), ld_i64(row + abi.COPY_TARGET)
        memcpy(target, source, ld_i64(row + abi.COPY_BYTES))
        st_i64(row + abi.COPY_SOURCE, source + ld_i64(row + abi.COPY_BYTES + abi.WORD))
        st_i64(row + abi.COPY_TARGET, target + ld_i64(row + abi.COPY_BYTES + 2 * abi.WORD))


def iterate() -> Callable[..., None]:
    """Return the kernel that runs iterations.

    Its first argument is the address of a block of `abi.ITERATIONS_WORDS`; it has no work units.
    """

    def kernel(block: int, _begin: int, _end: int, _worker: int) -> None:
        inner = ld_i64(block + abi.ITERATIONS_INNER)
        limit = ld_i64(block + abi.ITERATIONS_LIMIT)
        done = ld_i64(block + abi.ITERATIONS_DONE)
        number = ld_i64(block + abi.ITERATIONS_NUMBER)
        condition = ld_i64(block + abi.ITERATIONS_CONDITION)
        status = 0
        while done < limit and status == 0:
            st_i64(number, done)
            _copy(
                ld_i64(block + abi.ITERATIONS_BEFORE),
                ld_i64(block + abi.ITERATIONS_BEFORE + abi.WORD),
            )
            call_kernel(ld_i64(inner + abi.RUN_WALK), inner, 0, 0, 0)
            # The walker reads this word before each step; a program without steps never does.
            if atomic_load(ld_i64(inner + abi.RUN_CANCEL)) != 0:
                status = 1
                break
            done += 1
            if condition != 0 and ld_u8(condition) == 0:
                status = 2
            _copy(
                ld_i64(block + abi.ITERATIONS_AFTER),
                ld_i64(block + abi.ITERATIONS_AFTER + abi.WORD),
            )
        st_i64(block + abi.ITERATIONS_DONE, done)
        st_i64(block + abi.RUN_STATUS, status)

    return kernel
