"""The conditional jump of programs: runs or skips the steps of one branch of an If."""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.codegen.simd import ld_i64, ld_u8, st_i64
from subgraph.engine.program import abi


def branch() -> Callable[..., None]:
    """Return the kernel of the step before a branch's steps; a work unit is one of these steps.

    It writes how many of the next steps the walker skips: none if the condition has the branch's
    value, else all of them. Its arguments are `abi.BRANCH_CONDITION` and the following words.
    """

    def kernel(args: int, _begin: int, end: int, _worker: int) -> None:
        holds = ld_u8(ld_i64(args + abi.BRANCH_CONDITION)) != 0
        runs = holds == (ld_i64(args + abi.BRANCH_WHEN) != 0)
        st_i64(args + abi.BRANCH_SKIP, 0 if runs else end)

    return kernel
