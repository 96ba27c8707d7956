"""Machine code of the partition's search, in the interface of its `backend`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from subgraph.engine.program import abi
from subgraph.engine.program.entry import entry
from subgraph.engine.toolchain import toolchain
from subgraph.engine.toolchain.kernel import Kernel


class CompiledSearch:
    """The compiled functions of the search; see `subgraph.partition.search.backend.SearchCode`.

    Attributes:
        first: Index of the first word of a block that the search may use.
    """

    first = abi.RUN_WORDS

    def __init__(self) -> None:
        """Name the kernel; its code is not loaded yet."""
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
        """Return a callable that runs the search over a block of words and returns its result."""
        block[abi.RUN_WALK // abi.WORD] = self._kernel.address
        return entry(block.ctypes.data)
