"""The search's two backends: Python functions on lists, and their machine code on arrays.

Machine code is up to a hundred times as fast, but it must be loaded, and on a new machine compiled
once. Below LOAD nodes a search in Python takes less time than loading, so machine code is used only
if it is loaded already, from LOADED nodes on. Below COMPILE nodes it takes less time than
compiling, so machine code is used only if it is in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from subgraph.partition.search.structures import Message, SearchState, field_kinds, leaves

# Least numbers of nodes for machine code that is loaded, cached, or not compiled yet.
LOADED = 60
LOAD = 2_000
COMPILE = 50_000

Ints = NDArray[np.int32]


class SearchCode(Protocol):
    """Machine code of the search; the engine, which compiles it, passes it to `use_code`.

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
    """Run large searches as machine code, which ``make`` returns at the first need."""
    _makers[:] = [make]


class SearchBackend:
    """The structures with lists as tables, and Python functions for the operations.

    A table is named by its path, as in ``graph.producers``.

    Attributes:
        message: Operation, arguments and results, between Python and the search.
        run: Does the operation in the message and returns its result.
    """

    message: Message
    run: Callable[[], int]

    def __init__(self, count: int, edges: int) -> None:
        """Make tables for ``count`` nodes and ``edges`` edges."""
        from subgraph.partition.search.operations import execute

        self._state = state = _zeroed(SearchState, count, edges)
        self.message = state.message
        self.run = lambda: execute(state)

    def _owner(self, path: str) -> tuple[Any, str]:
        structure, _, name = path.rpartition(".")
        return attrgetter(structure)(self._state), name

    def allocate(self, path: str, size: int) -> None:
        """Replace a table by one of ``size`` zeros."""
        setattr(*self._owner(path), [0] * size)

    def replace(self, path: str, other: str) -> None:
        """Note that the search has replaced table ``path`` by table ``other``."""

    def write(self, path: str, values: Sequence[int] | Ints) -> None:
        """Copy values to the beginning of a table."""
        entries = values.tolist() if isinstance(values, np.ndarray) else values
        getattr(*self._owner(path))[: len(entries)] = entries

    def read(self, path: str, begin: int, end: int) -> list[int]:
        """Return entries of a table.

        Args:
            path: The table, as in ``graph.producers``.
            begin: Index of the first entry.
            end: Index after the last entry.
        """
        table: list[int] = getattr(*self._owner(path))
        return table[begin:end]


class CompiledSearchBackend(SearchBackend):
    """The structures as a block of 64-bit words, arrays as tables, and machine code."""

    def __init__(self, code: SearchCode, count: int, edges: int) -> None:
        """Load the code and make tables for ``count`` nodes and ``edges`` edges."""
        sizes = [0 if kind == "int" else _size(kind, count, edges) for _, kind in LEAVES]
        ends = np.cumsum(sizes)
        # Untouched pages take no memory, so the tables of the unused strategy cost nothing.
        memory = np.zeros(int(ends[-1]), np.int32)
        starts = memory.ctypes.data + (ends - sizes) * memory.itemsize
        self._block = np.zeros(code.first + len(LEAVES), np.int64)
        self._block[code.first :] = np.where(sizes, starts, 0)
        self._words = {path: code.first + k for k, (path, _) in enumerate(LEAVES)}
        spans = zip(LEAVES, sizes, ends.tolist(), strict=True)
        self._arrays: dict[str, Ints] = {
            path: memory[end - size : end] for (path, _), size, end in spans
        }
        self.message = Message()
        for name in field_kinds(Message):
            setattr(self.message, name, self._arrays[f"message.{name}"].data)
        self.run = code.bind(self._block)

    def allocate(self, path: str, size: int) -> None:
        """Replace a table by one of ``size`` zeros."""
        array = self._arrays[path] = np.zeros(size, np.int32)
        self._block[self._words[path]] = array.ctypes.data

    def replace(self, path: str, other: str) -> None:
        """Note that the search has replaced table ``path`` by table ``other``."""
        self._arrays[path] = self._arrays[other]

    def write(self, path: str, values: Sequence[int] | Ints) -> None:
        """Copy values to the beginning of a table."""
        self._arrays[path][: len(values)] = values

    def read(self, path: str, begin: int, end: int) -> list[int]:
        """Return entries of a table.

        Args:
            path: The table, as in ``graph.producers``.
            begin: Index of the first entry.
            end: Index after the last entry.
        """
        entries: list[int] = self._arrays[path][begin:end].tolist()
        return entries


LEAVES = list(leaves(SearchState))


def _zeroed(structure: type, count: int, edges: int) -> Any:
    """Return a structure with lists of zeros for its tables."""
    made = structure()
    for name, kind in field_kinds(structure).items():
        if isinstance(kind, type):
            setattr(made, name, _zeroed(kind, count, edges))
        else:
            setattr(made, name, 0 if kind == "int" else [0] * _size(kind, count, edges))
    return made


def _size(kind: str, count: int, edges: int) -> int:
    return {"PerNode": count + 2, "PerEdge": 2 * edges + 4 * count + 16, "Pool": 4}[kind]


def make_backend(count: int, edges: int, *, compiled: bool | None = None) -> SearchBackend:
    """Return a backend for a search in a graph of ``count`` nodes and ``edges`` edges.

    Args:
        count: Number of nodes.
        edges: Number of edges.
        compiled: Whether to use machine code; None: by the number of nodes, see `LOAD`.

    Raises:
        ValueError: ``compiled`` is True without a call of `use_code`.
    """
    if compiled is None:
        compiled = _is_compiled(count)
    return CompiledSearchBackend(_code(), count, edges) if compiled else SearchBackend(count, edges)


def _is_compiled(count: int) -> bool:
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
