"""Release of file-mapped pages that are probably not needed again.

A weight that was reformatted is not read again in the file's layout, nor is LLVM's code once all
kernels are linked. Until released, their pages count as memory of the process. They stay in the
system's page cache, from which a later read gets them.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from subgraph.graph.parameters import Parameter, Unchecked
from subgraph.graph.types import Array
from subgraph.system.guard_pages import Anonymous

_LEAST = 1 << 16  # bytes; smaller arrays are not released (estimate)


def release(parameters: Iterable[Parameter], made: Array) -> None:
    """Release the file's pages of the parameters from which ``made`` was computed, if no view."""
    for parameter in parameters:
        held = parameter.published.held
        if isinstance(held, Unchecked) and not held.is_checked:
            continue  # it has not been read
        array = parameter.array
        if array.nbytes >= _LEAST and not np.may_share_memory(array, made):
            release_array(array)


def release_array(array: Array) -> None:
    """Release the pages of an array in a mapped file; do nothing for other arrays."""
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
    """Return the read-only file mapping of an array, None if it is in other memory."""
    if array.flags.writeable or not array.flags.c_contiguous:
        return None
    at: Any = array
    while at is not None and not isinstance(at, mmap.mmap):
        at = at.obj if isinstance(at, memoryview) else getattr(at, "base", None)
    return None if isinstance(at, Anonymous) else at


def release_library(name: str) -> int:
    """Release the pages with code and constants of a loaded library; only on Linux.

    Args:
        name: Begin of the library's file name.

    Returns:
        Bytes of the released address range, of which some pages may not have been resident.
    """
    if not sys.platform.startswith("linux"):
        return 0
    libc, total = ctypes.CDLL(None), 0
    for begin, size in _clean_parts(Path("/proc/self/maps").read_text(), name):
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0:
            total += size
    return total


def _clean_parts(maps: str, name: str) -> list[tuple[int, int]]:
    """Return address and bytes of the mappings of a library that are unmodified.

    A read-only mapping directly before a writable one may have been relocated, and is left out.

    Args:
        maps: The text of /proc/self/maps.
        name: Begin of the library's file name.
    """
    rows = [line.split(maxsplit=5) for line in maps.splitlines() if f"/{name}" in line]
    mine = [row for row in rows if len(row) == 6 and Path(row[5]).name.startswith(name)]
    parts: list[tuple[int, int]] = []
    for row, after in pairwise([*mine, ["", "rw-p"]]):
        relocated = after[1].startswith("rw")
        if row[1] == "r-xp" or (row[1] == "r--p" and not relocated):
            begin, end = (int(word, 16) for word in row[0].split("-"))
            parts.append((begin, end - begin))
    return parts
