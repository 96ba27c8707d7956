"""The search's two backends: Python functions on lists, and their machine code on arrays.

Machine code is up to a hundred times as fast, but it must be loaded, and compiled once on a machine
that has never done so. Below LOAD nodes Python is quicker than loading, and machine code is used
only if it is loaded; below COMPILE nodes Python is quicker than compiling, and machine code is used
only if it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from subgraph.partition.search.tables import FIELDS, Tables

LOADED = 60
LOAD = 2_000
COMPILE = 50_000

Ints = NDArray[np.int32]


class SearchCode(Protocol):
    """Machine code of the search, from whoever can compile it; see `use_code`.

    Attributes:
        first: Index of the first word of a block that is free for addresses of tables.
    """

    first: int

    def is_loaded(self) -> bool:
        """Return whether this process has the code."""
        ...

    def is_cached(self) -> bool:
        """Return whether the code need not be compiled."""
        ...

    def bind(self, block: NDArray[np.int64]) -> Callable[[], int]:
        """Return a callable that runs the search over a block of words and returns its result."""
        ...


_makers: list[Callable[[], SearchCode]] = []


def use_code(make: Callable[[], SearchCode]) -> None:
    """Let searches of many nodes run as machine code, which ``make`` returns when it is needed."""
    _makers[:] = [make]


class SearchBackend:
    """Tables as lists, and what does an operation on them.

    Attributes:
        tables: The tables. Counters are the search's own, what is told goes through ``told``.
        run: Does the operation that ``told`` says and returns its result.
    """

    tables: Tables
    run: Callable[[], int]

    def __init__(self, count: int, links: int) -> None:
        """Make tables for ``count`` nodes and ``links`` links."""
        from subgraph.partition.search.operations import serve

        self.tables = tables = Tables()
        for name, kind in FIELDS.items():
            setattr(tables, name, 0 if kind == "int" else [0] * _size(kind, count, links))
        self.run = lambda: serve(tables)

    def place(self, name: str, size: int) -> None:
        """Give a table that many entries, all 0."""
        setattr(self.tables, name, [0] * size)

    def took_over(self, name: str, other: str) -> None:
        """Note that the search has put the table ``other`` in the place of ``name``."""

    def put(self, name: str, values: Sequence[int] | Ints) -> None:
        """Fill a table from its beginning."""
        given = values.tolist() if isinstance(values, np.ndarray) else values
        getattr(self.tables, name)[: len(given)] = given

    def read(self, name: str, begin: int, end: int) -> list[int]:
        """Return entries of a table."""
        table: list[int] = getattr(self.tables, name)
        return table[begin:end]


class CompiledSearchBackend(SearchBackend):
    """Tables as arrays, and machine code; seen are ``told``, ``asked`` and ``answers`` alone."""

    def __init__(self, code: SearchCode, count: int, links: int) -> None:
        """Load the code and make tables for ``count`` nodes and ``links`` links."""
        self._first = code.first
        sizes = [0 if kind == "int" else _size(kind, count, links) for kind in FIELDS.values()]
        ends = np.cumsum(sizes)
        # Pages that nobody touches take no memory, so tables of the other strategy are free.
        memory = np.zeros(int(ends[-1]), np.int32)
        starts = memory.ctypes.data + (ends - sizes) * memory.itemsize
        self._block = np.zeros(self._first + len(FIELDS), np.int64)
        self._block[self._first :] = np.where(sizes, starts, 0)
        self._arrays: dict[str, Ints] = {}
        self._memory, self._ends = memory, dict(zip(FIELDS, ends.tolist(), strict=True))
        self._sizes = dict(zip(FIELDS, sizes, strict=True))
        self.tables = Tables()
        for name in ("told", "asked", "answers"):
            setattr(self.tables, name, self._table(name).data)
        self.run = code.bind(self._block)

    def _table(self, name: str) -> Ints:
        array = self._arrays.get(name)
        if array is None:
            end = self._ends[name]
            array = self._arrays[name] = self._memory[end - self._sizes[name] : end]
        return array

    def place(self, name: str, size: int) -> None:
        """Give a table that many entries, all 0."""
        array = self._arrays[name] = np.zeros(size, np.int32)
        self._block[self._first + list(FIELDS).index(name)] = array.ctypes.data

    def took_over(self, name: str, other: str) -> None:
        """Note that the search has put the table ``other`` in the place of ``name``."""
        self._arrays[name] = self._arrays[other]

    def put(self, name: str, values: Sequence[int] | Ints) -> None:
        """Fill a table from its beginning."""
        self._table(name)[: len(values)] = values

    def read(self, name: str, begin: int, end: int) -> list[int]:
        """Return entries of a table."""
        entries: list[int] = self._table(name)[begin:end].tolist()
        return entries


def _size(kind: str, count: int, links: int) -> int:
    return {"PerNode": count + 2, "PerLink": 2 * links + 4 * count + 16, "Pool": 4}[kind]


def make_backend(count: int, links: int, *, compiled: bool | None = None) -> SearchBackend:
    """Return a machine for a search in a graph of ``count`` nodes and ``links`` links.

    Args:
        count: How many nodes.
        links: How many links.
        compiled: Whether to use machine code; None: if it is worth its price.

    Raises:
        ValueError: machine code is asked for, and nobody has said how to make it (`use_code`).
    """
    if compiled is None:
        compiled = _is_worth_it(count)
    return CompiledSearchBackend(_code(), count, links) if compiled else SearchBackend(count, links)


def _is_worth_it(count: int) -> bool:
    if not _makers or count < LOADED or (count < LOAD and not _code.cache_info().currsize):
        return False
    code = _code()
    if count >= COMPILE or code.is_loaded():
        return True
    return count >= LOAD and code.is_cached()


@cache
def _code() -> SearchCode:
    if not _makers:
        raise ValueError("no machine code of the search: call use_code first")
    return _makers[0]()
