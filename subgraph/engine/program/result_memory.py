"""Memory of a run's results, taken again once the caller has let go of them.

The first touch of a page costs a fault of the processor, longer than filling the page takes:
results of megabytes in new memory every time can be dearer than the step that computes them.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from subgraph.graph.types import Array
from subgraph.system import guard_pages
from subgraph.system.large_pages import mapped_empty

_LEAST = 1 << 14  # bytes; smaller ones malloc cuts from memory that was touched before
_MOST = 1 << 25  # bytes; more is not kept while nobody needs it
_KEPT = 2  # a caller holds one result while the next is made
_COUNTED = getattr(sys, "_is_gil_enabled", lambda: True)()  # else counts of references lag behind


class ResultMemory:
    """Arrays of one shape and dtype for one output of one request.

    A result is a view of memory that is kept here. Whatever looks at it, the result, a view of it,
    a buffer or another library's tensor, refers to that memory: while it has more references than
    when it was idle, it is not given again.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype[Any], nbytes: int) -> None:
        """Begin with none."""
        self._shape = shape
        self._dtype = dtype
        self._nbytes = nbytes
        self._keeps = _COUNTED and _LEAST <= nbytes <= _MOST
        self._asked = False
        self._kept: list[_Kept] = []

    def take(self) -> Array:
        """Return an uninitialised array that nobody else looks at."""
        for kept in self._kept:
            if kept.is_idle():
                return kept.array[...]
        # What is asked for once need not be kept: sizes may change from run to run.
        if not self._keeps or not self._asked or len(self._kept) == _KEPT:
            self._asked = True
            make = guard_pages.empty if guard_pages.MODE else np.empty
            return make(self._shape, self._dtype)
        self._kept.append(_Kept(mapped_empty(self._nbytes).view(self._dtype).reshape(self._shape)))
        return self._kept[-1].array[...]


class _Kept:
    """An array whose memory is used again, and how many refer to that memory when idle."""

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
        """Return whether nobody but this looks at the memory."""
        return sys.getrefcount(self._memory) == self._idle
