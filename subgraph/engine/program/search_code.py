"""The partition search as machine code: implements `subgraph.partition.search.backend.SearchCode`.

The search is a kernel whose block begins with a run block (`abi.RUN_ROWS`), so that the entry of
programs calls it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from subgraph.engine.program import abi
from subgraph.engine.program.entry import entry
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel


class CompiledSearch:
    """The compiled search.

    Attributes:
        first: Index of the first int64 word of a block after the run block; the search's own state.
    """

    first = abi.RUN_WORDS

    def __init__(self) -> None:
        """Name the kernel without loading its code."""
        self._kernel = Kernel(
            "subgraph.partition.search.search_kernels",
            "search",
            result=abi.RUN_STATUS,
            state_at=abi.RUN_WORDS * abi.WORD,
        )

    def is_loaded(self) -> bool:
        """Return whether this process has loaded the code."""
        return toolchain.is_loaded(self._kernel)

    def is_cached(self) -> bool:
        """Return whether the code is available without compiling it."""
        return toolchain.is_cached(self._kernel)

    def bind(self, block: NDArray[np.int64]) -> Callable[[], int]:
        """Return a callable that runs the search and returns its status.

        Args:
            block: The run block and the state of the search, int64; it must outlive the callable.
        """
        block[abi.RUN_WALK // abi.WORD] = self._kernel.address
        return entry(block.ctypes.data)
