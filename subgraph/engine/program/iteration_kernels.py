"""The compiled function that runs a program repeatedly (`subgraph.engine.cpu.iterations`).

Between two iterations it copies outputs of the program to the inputs that the next one reads.
"""

from __future__ import annotations

from collections.abc import Callable

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import atomic_load, call_kernel, ld_i64, ld_u8, memcpy, st_i64
from subgraph.engine.program import abi

_STEP = abi.WORD * abi.COPY_WORDS


@register_jitable
def _copy(rows: int, count: int) -> None:
    for row in range(rows, rows + count * _STEP, _STEP):
        source, target = ld_i64(row + abi.COPY_SOURCE), ld_i64(row + abi.COPY_TARGET)
        memcpy(target, source, ld_i64(row + abi.COPY_BYTES))
        st_i64(row + abi.COPY_SOURCE, source + ld_i64(row + abi.COPY_BYTES + abi.WORD))
        st_i64(row + abi.COPY_TARGET, target + ld_i64(row + abi.COPY_BYTES + 2 * abi.WORD))


def iterate() -> Callable[..., None]:
    """Return the kernel that runs iterations; its block begins with `abi.ITERATIONS_INNER`."""

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
            # A program without steps does not read the word itself.
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
