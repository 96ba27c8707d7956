"""Memory for weights and activations, in large pages where the system has them.

A core looks up where a page lies for some thousand pages at a time: weights of many megabytes, read
once a run in pages of 4 KiB, wait for that again and again. Linux backs an anonymous mapping with
pages of 2 MiB where it is asked to, and only where such a page lies wholly inside the mapping:
arrays of less share one.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from subgraph.system import guard_pages
from subgraph.system.forking import free_in_child
from subgraph.system.guard_pages import Anonymous

if TYPE_CHECKING:
    from numpy.typing import NDArray


_OFFERED = hasattr(mmap, "MADV_HUGEPAGE")
_PAGE = 1 << 21
_SLAB = 8 * _PAGE
_LEAST = 1 << 12  # bytes of an array that is worth a place in a slab
_MOST = 2 * _PAGE  # of an array that shares a slab with others


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any], align: int = 64) -> NDArray[Any]:
    """Return an uninitialised C-contiguous array whose address is a multiple of ``align``."""
    if guard_pages.MODE:
        return guard_pages.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    if not _OFFERED or size < _LEAST:
        raw = _plain(size, align)
    elif size > _MOST:
        raw = mapped_empty(size)
    else:
        raw = _SHARED.take(size, align)
    return raw.view(dtype).reshape(shape)


def mapped_empty(size: int) -> NDArray[Any]:
    """Return so many bytes that share their pages with nothing else, aligned to large pages."""
    if guard_pages.MODE:
        return guard_pages.empty((size,), np.dtype(np.uint8))
    if not _OFFERED or size < _LEAST:
        return _plain(size, 64)
    try:
        mapping, start = _mapped(size)
    except OSError:
        return _plain(size, 64)
    return np.frombuffer(mapping, np.uint8, size, start)


def _plain(size: int, align: int) -> NDArray[Any]:
    raw = np.empty(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size]


def _mapped(size: int) -> tuple[Anonymous, int]:
    """Return a mapping that holds so many bytes, and where a large page begins in it."""
    mapping = Anonymous(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(mapping, np.uint8).ctypes.data % _PAGE
    whole = size // _PAGE * _PAGE
    if whole:  # the rest would fill a page that nothing else may use
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return mapping, start


class _Slab:
    """Large pages that arrays are cut from, one behind the other.

    A place is never cut twice. What lay there is given back with the array, though others may keep
    the mapping alive.
    """

    def __init__(self) -> None:
        self._mapping: Anonymous | None = None
        self._at = self._end = 0
        self._lock = free_in_child(threading.Lock())

    def take(self, size: int, align: int) -> NDArray[Any]:
        with self._lock:
            start = -(-self._at // align) * align
            if self._mapping is None or start + size > self._end:
                try:
                    self._mapping, start = _mapped(_SLAB)
                except OSError:
                    return _plain(size, align)
                self._end = start + _SLAB
            mapping, self._at = self._mapping, start + size
        piece = (ctypes.c_uint8 * size).from_buffer(mapping, start)
        weakref.finalize(piece, _give_back, mapping, start, start + size).atexit = False
        return np.frombuffer(memoryview(piece).cast("B"), np.uint8)


def _give_back(mapping: Anonymous, start: int, end: int) -> None:
    """Let the pages go that lie wholly in a part of a mapping."""
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


_SHARED = _Slab()
