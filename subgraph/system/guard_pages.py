"""Guard pages: memory whose neighbours cannot be touched, to prove that kernels stay inside.

With the environment variable ``SUBGRAPH_GUARD`` set to ``end`` (or ``1``) every area that a CPU
kernel sees ends at an inaccessible page: operands, weights in every form, constants, scratch memory
of each worker, argument blocks, copies of inputs, outputs. With ``begin`` it begins right behind
one. An access outside ends the process with a signal at the instruction that makes it. Weights,
constants and inputs are read-only besides. What is not written yet has all bits set: NaN, or -1.

The mode costs memory and time, and is for tests. It is read once.
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

from subgraph.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Span = tuple[int, int]  # where an area begins in a mapping, and its bytes
PAGE: Final = mmap.PAGESIZE
_OFFERED: Final = hasattr(mmap, "MAP_ANONYMOUS")  # elsewhere memory has no guard pages
_NONE, _READ, _READ_WRITE = 0, 1, 3  # PROT_NONE, PROT_READ, PROT_READ | PROT_WRITE
_UNWRITTEN = 0xFF
_MODES = {"": "", "0": "", "1": "end", "end": "end", "begin": "begin"}


def _chosen() -> str:
    said = os.environ.get("SUBGRAPH_GUARD", "").strip().lower()
    if said not in _MODES:
        raise ConfigError(
            f"SUBGRAPH_GUARD={said!r} is no mode; use end (or 1), begin, or 0 for none"
        )
    return _MODES[said]


MODE: str = _chosen()  # "end", "begin", or empty: no guard pages


class Anonymous(mmap.mmap):
    """A mapping that no file is behind: what is given back of it is lost."""


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


def place(sizes: Iterable[Any], rooms: Iterable[int] | None = None) -> tuple[list[Any], int]:
    """Return offsets at which areas stand between guard pages, and the size of the whole.

    Args:
        sizes: Bytes of each area.
        rooms: Bytes that each may grow to while it keeps its end, or its begin; None: none grows.
    """
    sizes = list(sizes)
    offsets: list[Any] = []
    at = PAGE
    for size, most in zip(sizes, sizes if rooms is None else rooms, strict=True):
        room = _rounded(most)
        offsets.append(at if MODE == "begin" else at + room - size)
        at += room + PAGE
    return offsets, at if offsets else 0


def apart(nbytes: Any) -> Any:
    """Return how far areas of ``nbytes`` begin from each other that stand between guard pages."""
    return _rounded(nbytes) + PAGE


def mapped(spans: Iterable[Span], total: int) -> NDArray[np.uint8]:
    """Return a mapping of ``total`` bytes of which only the pages of ``spans`` can be touched."""
    if not _OFFERED:
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
    _note(mapping, [(address + begin, size) for begin, size in spans])
    return whole


_areas: list[tuple[ref[Anonymous], list[Span]]] = []
_least_kept = 1024  # entries before those of mappings that are gone are looked for


def _note(mapping: Anonymous, spans: list[Span]) -> None:
    """Remember where the areas of a mapping lie, for reports."""
    global _least_kept
    if len(_areas) >= _least_kept:
        _areas[:] = [entry for entry in _areas if entry[0]() is not None]
        _least_kept = 2 * len(_areas) + 1024
    _areas.append((ref(mapping), spans))


def nearest(address: int) -> Span | None:
    """Return begin and size of the area that an address lies in or next to, None if none is."""
    spans = [span for mapping, spans in list(_areas) if mapping() is not None for span in spans]
    near = [
        (max(begin - address, address - begin - size), (begin, size))
        for begin, size in spans
        if begin - 2 * PAGE <= address < begin + size + 2 * PAGE
    ]
    return min(near)[1] if near else None


def empty(shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an array between guard pages."""
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    (start,), total = place([size])
    return mapped([(start, size)], total)[start : start + size].view(dtype).reshape(shape)


def argument_blocks(words: NDArray[Any], begins: Sequence[int]) -> NDArray[Any]:
    """Return a copy of argument words in which each block stands between guard pages.

    Args:
        words: The words, as `block_begin` has placed the blocks.
        begins: The first word of each block.
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
    """Return the words from ``begin`` on to the next guard page, at most a page of them."""
    return words[begin : (8 * begin // PAGE + 1) * PAGE // 8]


def block_begin(end: int, count: int) -> int:
    """Return the first word of a block of ``count`` words behind ``end`` words and a guard page."""
    (offset,), _ = place([8 * count])
    begin: int = (_rounded(8 * end) + offset) // 8
    return begin


def copied(array: NDArray[Any], *, writable: bool = False) -> NDArray[Any]:
    """Return a copy between guard pages; an array of objects as it is."""
    if array.dtype.hasobject:
        return array
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    if _OFFERED and copy.nbytes and not writable:
        first = copy.ctypes.data // PAGE * PAGE
        _protect(first, _rounded(copy.ctypes.data + copy.nbytes) - first, _READ)
    copy.flags.writeable = writable
    return copy
