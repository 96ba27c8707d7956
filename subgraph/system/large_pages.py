"""Memory for weights and activations, in huge pages (2 MiB) where the system has them.

A core's TLB has some thousand entries. Weights of many megabytes in pages of 4 KiB, read once in
each run, miss it for every page. Linux backs an anonymous mapping with huge pages on request, if
they lie wholly inside the mapping; small arrays share a mapping for that.
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


ALIGN = 64  # bytes, of arrays and of values in memory plans: a cache line, and the widest vector
_HAS_HUGE_PAGES = hasattr(mmap, "MADV_HUGEPAGE")
_HUGE_PAGE = 1 << 21  # bytes of a huge page (x86-64, and AArch64 with 4 KiB pages)
_SLAB_BYTES = 8 * _HUGE_PAGE  # bytes of a mapping that arrays share (estimate)
_MIN_MAPPED_BYTES = 1 << 12  # bytes of a small page; smaller arrays are allocated by NumPy
_MAX_SHARED_BYTES = 2 * _HUGE_PAGE  # bytes; larger arrays have their own mapping (estimate)


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any], align: int = ALIGN) -> NDArray[Any]:
    """Return an uninitialised C-contiguous array, in huge pages if it is large enough.

    Args:
        shape: The shape.
        dtype: The dtype.
        align: The address is a multiple of this number of bytes, a power of two.
    """
    if guard_pages.MODE:
        return guard_pages.empty(shape, dtype)
    size = math.prod(shape) * dtype.itemsize
    if not _HAS_HUGE_PAGES or size < _MIN_MAPPED_BYTES:
        raw = _plain(size, align)
    elif size > _MAX_SHARED_BYTES:
        raw = mapped_empty(size)
    else:
        raw = _SLABS.allocate(size, align)
    return raw.view(dtype).reshape(shape)


def mapped_empty(size: int) -> NDArray[Any]:
    """Return an array of ``size`` bytes in a mapping of its own, aligned to huge pages."""
    if guard_pages.MODE:
        return guard_pages.empty((size,), np.dtype(np.uint8))
    if not _HAS_HUGE_PAGES or size < _MIN_MAPPED_BYTES:
        return _plain(size, ALIGN)
    try:
        mapping, start = _mapped(size)
    except OSError:
        return _plain(size, ALIGN)
    return np.frombuffer(mapping, np.uint8, size, start)


def _plain(size: int, align: int) -> NDArray[Any]:
    raw = np.empty(size + align, np.uint8)
    start = -raw.ctypes.data % align
    return raw[start : start + size]


def _mapped(size: int) -> tuple[Anonymous, int]:
    """Return a mapping with ``size`` bytes from a huge page's begin, and the offset of that."""
    mapping = Anonymous(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -np.frombuffer(mapping, np.uint8).ctypes.data % _HUGE_PAGE
    whole = size // _HUGE_PAGE * _HUGE_PAGE
    if whole:  # not for the rest, which would waste most of a huge page
        mapping.madvise(mmap.MADV_HUGEPAGE, start, whole)
    return mapping, start


class _Slab:
    """A bump allocator over mappings of huge pages.

    Memory is not reused. The pages of a freed array are returned to the system, although other
    arrays may keep the mapping alive.
    """

    def __init__(self) -> None:
        self._mapping: Anonymous | None = None
        self._at = self._end = 0
        self._lock = free_in_child(threading.Lock())

    def allocate(self, size: int, align: int) -> NDArray[Any]:
        with self._lock:
            start = -(-self._at // align) * align
            if self._mapping is None or start + size > self._end:
                try:
                    self._mapping, start = _mapped(_SLAB_BYTES)
                except OSError:
                    return _plain(size, align)
                self._end = start + _SLAB_BYTES
            mapping, self._at = self._mapping, start + size
        piece = (ctypes.c_uint8 * size).from_buffer(mapping, start)
        weakref.finalize(piece, _release, mapping, start, start + size).atexit = False
        return np.frombuffer(memoryview(piece).cast("B"), np.uint8)


def _release(mapping: Anonymous, start: int, end: int) -> None:
    """Return the pages that lie wholly in [start, end) of a mapping to the system."""
    start, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if end > start:
        mapping.madvise(mmap.MADV_DONTNEED, start, end - start)


_SLABS = _Slab()
