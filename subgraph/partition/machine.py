"""Where a search runs: the functions as they stand on lists, or their machine code on arrays.

Python takes a hundred times longer, but machine code must be loaded, and compiled once on a machine
that has never done so. Below LOAD nodes Python is quicker than loading; below COMPILE nodes it is
quicker than compiling, and machine code serves if it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from subgraph.partition.tables import FIELDS, Tables

if TYPE_CHECKING:
    from subgraph.engine.kernel import Kernel

LOAD = 2_000
COMPILE = 50_000

Ints = NDArray[np.int32]


class Machine:
    """Tables as lists, and what does an operation on them.

    Attributes:
        tables: The tables. Counters are the search's own, what is told goes through ``told``.
        run: Does the operation that ``told`` says and returns its result.
    """

    tables: Tables
    run: Callable[[], int]

    def __init__(self, count: int, links: int) -> None:
        """Make tables for ``count`` nodes and ``links`` links."""
        from subgraph.partition.operations import serve

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
        return getattr(self.tables, name)[begin:end]


class CompiledMachine(Machine):
    """Tables as arrays, and machine code."""

    def __init__(self, kernel: Kernel, count: int, links: int) -> None:
        """Load the code and make tables for ``count`` nodes and ``links`` links."""
        from subgraph.engine import layout
        from subgraph.engine.entry import entry

        self.tables = Tables()
        self._arrays: dict[str, Ints] = {}
        fields = dict(kernel.variant)["tables_at"]
        assert isinstance(fields, int)
        words = fields // layout.WORD
        self._block = np.zeros(words + len(FIELDS), np.int64)
        self._words = {name: words + k for k, name in enumerate(FIELDS)}
        for name, kind in FIELDS.items():
            if kind != "int":
                self.place(name, _size(kind, count, links))
        self._block[layout.RUN_WALK // layout.WORD] = kernel.address
        self.run = entry(self._block.ctypes.data)

    def place(self, name: str, size: int) -> None:
        """Give a table that many entries, all 0."""
        array = self._arrays[name] = np.zeros(size, np.int32)
        self._block[self._words[name]] = array.ctypes.data
        setattr(self.tables, name, array.data)

    def took_over(self, name: str, other: str) -> None:
        """Note that the search has put the table ``other`` in the place of ``name``."""
        self._arrays[name] = self._arrays[other]
        setattr(self.tables, name, getattr(self.tables, other))

    def put(self, name: str, values: Sequence[int] | Ints) -> None:
        """Fill a table from its beginning."""
        self._arrays[name][: len(values)] = values

    def read(self, name: str, begin: int, end: int) -> list[int]:
        """Return entries of a table."""
        view: Any = getattr(self.tables, name)
        return view[begin:end].tolist()


def _size(kind: str, count: int, links: int) -> int:
    return {"PerNode": count + 2, "PerLink": 2 * links + 4 * count + 16, "Pool": 4}[kind]


def make_machine(count: int, links: int, *, compiled: bool | None = None) -> Machine:
    """Return a machine for a search in a graph of ``count`` nodes and ``links`` links.

    Args:
        count: How many nodes.
        links: How many links.
        compiled: Whether to use machine code; None: if it is worth its price.
    """
    if compiled or (compiled is None and count >= LOAD):
        from subgraph.engine import toolchain

        kernel = _kernel()
        if compiled or count >= COMPILE or toolchain.is_there(kernel):
            return CompiledMachine(kernel, count, links)
    return Machine(count, links)


def _kernel() -> Kernel:
    from subgraph.engine import layout
    from subgraph.engine.kernel import Kernel

    return Kernel(
        "subgraph.partition.search_kernels",
        "search",
        result=layout.RUN_STATUS,
        tables_at=layout.RUN_WORDS * layout.WORD,
    )
