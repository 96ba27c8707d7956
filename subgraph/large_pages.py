"""Memory for weights and activations, in large pages where the system has them.

A core looks up where a page lies for some thousand pages at a time: weights of many megabytes, read
once a run in pages of 4 KiB, wait for that again and again. Linux backs an anonymous mapping with
pages of 2 MiB where it is asked to, and only where such a page lies wholly inside the mapping:
arrays of less share one.
"""

from __future__ import annotations

import math
import mmap
import threading
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_OFFERED = hasattr(mmap, "MADV_HUGEPAGE")
_PAGE = 1 << 21
_SLAB = 8 * _PAGE
_LEAST = 1 << 12  # bytes of an array that is worth a place in a slab
_MOST = 2 * _PAGE  # of an array that shares a slab with others


class Anonymous(mmap.mmap):
    """A mapping that no file is behind: what is given back of it is lost."""


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any], align: int = 64) -> Array:
    """Return an uninitialised C-contiguous array whose address is a multiple of ``align``."""
    size = math.prod(shape) * dtype.itemsize
    if not _OFFERED or size < _LEAST:
        raw = np.empty(size + align, np.uint8)
        start = -raw.ctypes.data % align
        raw = raw[start : start + size]
    elif size > _MOST:
        raw = mapped_empty(size)
    else:
        raw = _SHARED.take(size, align)
    return raw.view(dtype).reshape(shape)


def mapped_empty(size: int) -> Array:
    """Return so many bytes that share their pages with nothing else, aligned to large pages."""
    if not _OFFERED or size < _LEAST:
        return aligned_empty((size,), np.dtype(np.uint8))
    mapping = Anonymous(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = np.frombuffer(mapping, np.uint8)
    start = -raw.ctypes.data % _PAGE
    whole = size // _PAGE * _PAGE
    if whole:  # the rest would fill a page that nothing else may use
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return raw[start : start + size]


class _Slab:
    """Large pages that arrays are cut from, one behind the other.

    An array keeps the pages that it was cut from alive, and is never cut from twice.
    """

    def __init__(self) -> None:
        self._left = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def take(self, size: int, align: int) -> Array:
        with self._lock:
            start = -self._left.ctypes.data % align
            if start + size > self._left.size:
                self._left, start = mapped_empty(_SLAB), 0
            taken = self._left[start : start + size]
            self._left = self._left[start + size :]
        return taken


_SHARED = _Slab()
