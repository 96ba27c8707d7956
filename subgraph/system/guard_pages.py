"""Guard pages around every memory area of CPU kernels, to find accesses outside of them in tests.

With the environment variable ``SUBGRAPH_GUARD`` set to ``end`` (or ``1``) every area that a CPU
kernel accesses ends at an inaccessible page: operands, weights in every layout, constants, scratch
memory of each worker, argument blocks, copies of inputs, outputs. With ``begin`` it begins behind
one. An access outside raises SIGSEGV at the instruction. Weights, constants and inputs are
read-only. Unwritten memory has all bits set: NaN, or -1.

The mode costs memory and time. The variable is read once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final
from weakref import ref

import numpy as np

from subgraph.system.environment import GUARD

if TYPE_CHECKING:
    from numpy.typing import NDArray

Span = tuple[int, int]  # offset of an area in a mapping (or its address), and its bytes
PAGE: Final = mmap.PAGESIZE  # bytes
_SUPPORTED: Final = hasattr(mmap, "MAP_ANONYMOUS")  # without it areas have no guard pages
_NONE, _READ, _READ_WRITE = 0, 1, 3  # PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE
_UNWRITTEN = 0xFF  # each byte of a new area: as floats NaN, as signed integers -1
MODE: str = GUARD.value()  # "end", "begin", or empty: no guard pages


class Anonymous(mmap.mmap):
    """A mapping without file: ``MADV_DONTNEED`` discards its content."""


@cache
def _mprotect() -> Callable[[int, int, int], int]:
    function = ctypes.CDLL(None, use_errno=True).mprotect
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def _protect(address: int, size: int, access: int) -> None:
    if size and _mprotect()(address, size, access):
        code = ctypes.get_errno()
        raise OSError(code, f"mprotect of {size} bytes: {os.strerror(code)}")


def _rounded(nbytes: Any) -> Any:
    return -(-nbytes // PAGE) * PAGE


def guarded_offsets(sizes: Iterable[Any]) -> tuple[list[Any], int]:
    """Return offsets of areas of ``sizes`` bytes between guard pages, and the bytes of them all."""
    offsets: list[Any] = []
    at = PAGE
    for size in sizes:
        room = _rounded(size)
        offsets.append(at if MODE == "begin" else at + room - size)
        at += room + PAGE
    return offsets, at if offsets else 0


def guarded_stride(nbytes: Any) -> Any:
    """Return the distance in bytes of the begins of equal areas between guard pages."""
    return _rounded(nbytes) + PAGE


def mapped(spans: Iterable[Span], total: int) -> NDArray[np.uint8]:
    """Return a mapping of ``total`` bytes in which only the pages of ``spans`` are accessible."""
    if not _SUPPORTED:
        return np.full(max(total, PAGE), _UNWRITTEN, np.uint8)
    spans = list(spans)
    mapping = Anonymous(-1, max(total, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = np.frombuffer(mapping, np.uint8)
    address = whole.ctypes.data
    _protect(address, len(whole), _NONE)
    for begin, size in spans:
        first, end = begin // PAGE * PAGE, _rounded(begin + size)
        _protect(address + first, end - first, _READ_WRITE)
        whole[first:end] = _UNWRITTEN
    _record(mapping, [(address + begin, size) for begin, size in spans])
    return whole


_areas: list[tuple[ref[Anonymous], list[Span]]] = []
_prune_at = 1024  # entries of _areas at which those of unmapped memory are removed


def _record(mapping: Anonymous, spans: list[Span]) -> None:
    """Record the areas of a mapping, for `nearest_area`."""
    global _prune_at
    if len(_areas) >= _prune_at:
        _areas[:] = [entry for entry in _areas if entry[0]() is not None]
        _prune_at = 2 * len(_areas) + 1024
    _areas.append((ref(mapping), spans))


def nearest_area(address: int) -> Span | None:
    """Return address and bytes of the area nearest to an address; None if none is near."""
    spans = [span for mapping, spans in list(_areas) if mapping() is not None for span in spans]
    near = [
        (max(begin - address, address - begin - size), (begin, size))
        for begin, size in spans
        if begin - 2 * PAGE <= address < begin + size + 2 * PAGE
    ]
    return min(near)[1] if near else None


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an uninitialised array between guard pages."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    (start,), total = guarded_offsets([size])
    return mapped([(start, size)], total)[start : start + size].view(dtype).reshape(shape)


def argument_blocks(words: NDArray[Any], begins: Sequence[int]) -> NDArray[Any]:
    """Return a copy of kernels' argument words with guard pages between the blocks.

    Args:
        words: The words, int64; the blocks are at offsets of `block_begin`.
        begins: Index of the first word of each block.
    """
    pages = [8 * begin // PAGE for begin in begins]
    end = words.nbytes // PAGE
    spans = [(PAGE * a, PAGE * (b - 1 - a)) for a, b in pairwise([*pages, end])] if pages else []
    spans.append((PAGE * end, words.nbytes - PAGE * end))
    whole = mapped(spans, words.nbytes).view(np.int64)
    for begin, size in spans:
        whole[begin // 8 : (begin + size) // 8] = words[begin // 8 : (begin + size) // 8]
    return whole


def readable(words: NDArray[Any], begin: int) -> NDArray[Any]:
    """Return the words from index ``begin`` to the end of its page."""
    return words[begin : (8 * begin // PAGE + 1) * PAGE // 8]


def block_begin(end: int, count: int) -> int:
    """Return the index of a block of ``count`` words after ``end`` words and a guard page."""
    (offset,), _ = guarded_offsets([8 * count])
    begin: int = (_rounded(8 * end) + offset) // 8
    return begin


def guarded_copy(array: NDArray[Any], *, writable: bool = False) -> NDArray[Any]:
    """Return a copy between guard pages; an array of objects itself.

    Args:
        array: The array.
        writable: Whether the copy may be written.
    """
    if array.dtype.hasobject:
        return array
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    if writable:
        return copy
    if _SUPPORTED and copy.nbytes:
        first = copy.ctypes.data // PAGE * PAGE
        _protect(first, _rounded(copy.ctypes.data + copy.nbytes) - first, _READ)
    copy.flags.writeable = False
    return copy
