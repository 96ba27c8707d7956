"""The compiled function that decides which branch of an If runs."""

from __future__ import annotations

from collections.abc import Callable

from subgraph.engine.codegen.simd import ld_i64, ld_u8, st_i64
from subgraph.engine.program import abi


def branch() -> Callable[..., None]:
    """Return the kernel of a step before the rows of a branch; its work units are these rows.

    It has the walker skip the rows unless the condition has the value for which they run. Its
    arguments are `abi.BRANCH_CONDITION` and the following words.
    """

    def kernel(args: int, _begin: int, end: int, _worker: int) -> None:
        holds = ld_u8(ld_i64(args + abi.BRANCH_CONDITION)) != 0
        runs = holds == (ld_i64(args + abi.BRANCH_WHEN) != 0)
        st_i64(args + abi.BRANCH_SKIP, 0 if runs else end)

    return kernel
