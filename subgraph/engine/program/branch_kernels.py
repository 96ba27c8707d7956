"""The compiled function that decides which branch of an If a program goes through."""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.codegen.simd import ld_i64, ld_u8, st_i64
from subgraph.engine.program import abi


def branch() -> Callable[..., None]:
    """Return the kernel that skips its units, rows of the program, unless they are to run.

    Words: ``layout.BRANCH_CONDITION`` and the following.
    """

    def kernel(args: int, _begin: int, end: int, _worker: int) -> None:
        holds = ld_u8(ld_i64(args + abi.BRANCH_CONDITION)) != 0
        runs = holds == (ld_i64(args + abi.BRANCH_WHEN) != 0)
        st_i64(args + abi.BRANCH_SKIP, 0 if runs else end)

    return kernel
