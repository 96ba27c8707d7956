"""Memory of a run's results, reused once the caller holds no reference to them.

The first access to a page is a page fault, which takes longer than filling the page. Results of
megabytes in new memory in every run could take longer than the step that computes them.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from subgraph.graph.types import Array
from subgraph.system import guard_pages
from subgraph.system.large_pages import mapped_empty

_LEAST_BYTES = 1 << 14  # malloc takes smaller arrays from memory that is already mapped
_MOST_BYTES = 1 << 25  # larger arrays would hold too much memory while they are idle
_ARRAYS = 2  # a caller often holds one result while the next is computed
# Without the global lock, reference counts are not exact.
_COUNTED = getattr(sys, "_is_gil_enabled", lambda: True)()


class ResultMemory:
    """Arrays of one shape and dtype for one output of one request.

    A result is a view of memory that is cached here. Everything that reads the result (views,
    buffers, tensors of other libraries) holds a reference to that memory. Memory is reused only
    when it has no more references than when it was idle.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> None:
        """Begin with no array.

        Args:
            shape: Shape of the arrays.
            dtype: Their dtype.
            nbytes: Bytes of one array.
        """
        self._shape = shape
        self._dtype = dtype
        self._nbytes = nbytes
        self._reuses = _COUNTED and _LEAST_BYTES <= nbytes <= _MOST_BYTES
        self._taken = False
        self._cached: list[_Cached] = []

    def take(self) -> Array:
        """Return an uninitialised array to which nobody else holds a reference."""
        for cached in self._cached:
            if cached.is_idle():
                return cached.array[...]
        # The first array is not cached, because sizes may change from run to run.
        if not self._reuses or not self._taken or len(self._cached) == _ARRAYS:
            self._taken = True
            make = guard_pages.empty if guard_pages.MODE else np.empty
            return make(self._shape, self._dtype)
        # One expression: a name for the memory would count as a reference to it.
        self._cached.append(
            _Cached(mapped_empty(self._nbytes).view(self._dtype).reshape(self._shape))
        )
        return self._cached[-1].array[...]


class _Cached:
    """An array whose memory is reused, and the count of references to that memory when idle."""

    def __init__(self, array: Array) -> None:
        self.array = array
        self._memory: Any = array
        base = array.base
        while isinstance(base, np.ndarray):
            self._memory = array = base
            base = array.base
        del array, base
        self._idle = sys.getrefcount(self._memory)

    def is_idle(self) -> bool:
        """Return whether nobody else holds a reference to the memory."""
        return sys.getrefcount(self._memory) == self._idle
