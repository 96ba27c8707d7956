"""Mapped files: give pages back that were read and are not needed next.

A weight that was reformatted is not read again in the file's form, nor is LLVM's code once all
kernels are linked. Their pages count as the process's memory until they are given back; they stay
in the system's cache, and whoever reads them after all gets them from there.
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

_LEAST = 1 << 16


def release(parameters: Iterable[Parameter], made: Array) -> None:
    """Give back the file's pages behind the parameters, unless ``made`` is a view of them."""
    for parameter in parameters:
        held = parameter.published.held
        if isinstance(held, Unchecked) and not held.is_checked:
            continue  # nobody has read it
        array = parameter.array
        if array.nbytes >= _LEAST and not np.may_share_memory(array, made):
            release_array(array)


def release_array(array: Array) -> None:
    """Give back the pages of an array that lies in a mapped file; do nothing for any other."""
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
    return None if isinstance(at, Anonymous) else at


def release_library(name: str) -> int:
    """Give back the code and constants of a loaded library, on Linux.

    Args:
        name: How the library's file name begins.

    Returns:
        The bytes of address space that were given back; they may have held fewer pages.
    """
    if not sys.platform.startswith("linux"):
        return 0
    libc, total = ctypes.CDLL(None), 0
    for begin, size in _clean_parts(Path("/proc/self/maps").read_text(), name):
        if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), mmap.MADV_DONTNEED) == 0:
            total += size
    return total


def _clean_parts(maps: str, name: str) -> list[tuple[int, int]]:
    """Return address and size of a library's parts that are as in its file, from its mappings.

    What is read-only right before what is writable may have been relocated: it is no such part.
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
