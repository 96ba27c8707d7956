"""Mapped weights: give the pages of a model's file back once a weight was made of them.

A weight that was reformatted is not read again in the file's form. Its pages there count as the
process's memory until they are given back; they stay in the system's cache, and whoever reads them
after all gets them from there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from typing import Any

import numpy as np

from subgraph.parameters import Parameter

Array = np.ndarray[Any, Any]
_LEAST = 1 << 16


def release(parameters: Iterable[Parameter], made: Array) -> None:
    """Give back the file's pages behind the parameters, unless ``made`` is a view of them."""
    for parameter in parameters:
        array = parameter.array
        if array.nbytes >= _LEAST and not np.may_share_memory(array, made):
            _release(array)


def _release(array: Array) -> None:
    mapping = _mapping_of(array)
    advice = getattr(mmap, "MADV_DONTNEED", None)
    if mapping is None or advice is None:
        return
    first = np.frombuffer(mapping, np.uint8).ctypes.data
    begin = array.ctypes.data - first
    begin = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (array.ctypes.data - first + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        mapping.madvise(advice, begin, end - begin)


def _mapping_of(array: Array) -> mmap.mmap | None:
    """Return the read-only file mapping in which an array lies."""
    if array.flags.writeable or not array.flags.c_contiguous:
        return None
    at: Any = array
    while at is not None and not isinstance(at, mmap.mmap):
        at = at.obj if isinstance(at, memoryview) else getattr(at, "base", None)
    return at
