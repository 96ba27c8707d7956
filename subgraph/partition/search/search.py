"""The Python interface of a search for regions: edges of a graph, and operations by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from subgraph.partition.search import operations
from subgraph.partition.search.backend import Ints, make_backend
from subgraph.partition.search.hetero import FULL

# Cache entries for growths at the beginning, for each node (estimate; the cache grows when full).
_ROOM = 8


class Edges(NamedTuple):
    """The edges of a graph as adjacency lists in compressed form.

    Attributes:
        in_ends: For each node the index in ``producers`` after its last one.
        producers: Producers of the nodes, one node after the other, distinct, in input order.
        out_ends: For each node the index in ``consumers`` after its last one.
        consumers: Consumers of the nodes, one node after the other, in topological order.
    """

    in_ends: Ints
    producers: Ints
    out_ends: Ints
    consumers: Ints

    @classmethod
    def of(cls, in_ends: Ints, producers: Ints) -> Edges:
        """Find the consumers from the producers; see the attributes of the class."""
        count = len(in_ends)
        users = np.repeat(np.arange(count, dtype=np.int32), np.diff(in_ends, prepend=0))
        consumers = users[np.argsort(producers, kind="stable")]
        out_ends = np.cumsum(np.bincount(producers, minlength=count), dtype=np.int32)
        return cls(in_ends, producers, out_ends, consumers)


class Search:
    """Nodes 0..n-1 in topological order, and the regions among them.

    Attributes:
        command: The next operation, its arguments and its results; see `operations`.
        asked: Nodes that the selector is asked about; see `begin_growth`.
        answers: The answers, 1 or 0; see `begin_growth`.
        run: Does the operation in ``command`` and returns its result.
    """

    def __init__(self, edges: Edges, *, compiled: bool | None = None) -> None:
        """Start without regions.

        Args:
            edges: The graph's edges.
            compiled: Whether to use machine code; None: by the number of nodes.
        """
        count = len(edges.in_ends)
        backend = make_backend(count, len(edges.producers), compiled=compiled)
        self.count = count
        self._backend = backend
        self.command = backend.message.command
        self.asked, self.answers = backend.message.asked, backend.message.answers
        self.run = backend.run
        backend.write("graph.producers", edges.producers)
        backend.write("graph.consumers", edges.consumers)
        for name, ends in (("in", edges.in_ends), ("out", edges.out_ends)):
            begins = np.concatenate([np.zeros(1, np.int32), ends])[:count]
            backend.write(f"graph.{name}_begin", begins)
            backend.write(f"graph.{name}_end", ends)
        self._do(operations.RESET, count)

    def _do(self, operation: int, one: int = 0, two: int = 0) -> int:
        command = self.command
        command[0], command[1], command[2] = operation, one, two
        return self.run()

    def contract(self, members: Sequence[int]) -> None:
        """Make a region of ``members``, sorted free nodes that are convex."""
        self._backend.write("region.members", members)
        self._do(operations.CONTRACT, len(members))

    def shrink(self, members: Sequence[int], anchor: int) -> tuple[list[int], list[int]]:
        """Return a convex, connected part of ``members``, and the rest; see `contraction.shrink`.

        Args:
            members: Free nodes, sorted.
            anchor: The one that stays in any case.
        """
        return self._part(operations.SHRINK, members, anchor)

    def components(self, members: Sequence[int]) -> list[list[int]]:
        """Return the connected parts of sorted ``members``, in the order of their first nodes."""
        parts: list[list[int]] = []
        left = list(members)
        while left:
            part, left = self._part(operations.COMPONENT, left, left[0])
            parts.append(part)
        return parts

    def _part(
        self, operation: int, members: Sequence[int], anchor: int
    ) -> tuple[list[int], list[int]]:
        backend = self._backend
        backend.write("region.members", members)
        self._do(operation, len(members), anchor)
        size, dropped = self.command[1], self.command[2]
        return backend.read("region.members", 0, size), backend.read("region.removed", 0, dropped)

    def set_free(self, free: Iterable[int]) -> None:
        """Set the nodes that may join regions: 1 in ``free`` for each."""
        self._backend.write("graph.free", np.fromiter(free, np.int32, self.count))

    def begin_growth(self, start: int) -> int:
        """Begin to grow a region from the free node ``start``; see `region_growth`.

        Returns:
            The number of neighbours in ``asked``: producers or consumers of node ``command[1]``, as
            ``command[2]`` says. Their ``answers`` are 0; the caller writes 1 for each to which the
            region may grow, and calls `run`, which returns the next number; 0 at the end.
        """
        count = self._do(operations.GROW, start)
        self.command[0] = operations.ANSWER
        return count

    def grown(self) -> tuple[list[int], list[int]]:
        """Return the grown region's nodes, sorted, and the candidates that it gave up.

        A candidate is given up if the region would not be convex with it.
        """
        size, given_up = self.command[1], self.command[2]
        members = self._backend.read("region.members", 0, size)
        return members, self._backend.read("growth.given_up", 0, given_up) if given_up else []

    def contract_grown(self) -> None:
        """Make a region of the nodes that have grown."""
        self._do(operations.CONTRACT_GROWN)

    def start_roots(self, free: Iterable[int]) -> None:
        """Begin a search among the nodes of a device, 1 in ``free`` for each; see `hetero`."""
        self.set_free(free)
        self._make_room()
        self._do(operations.START_ROOTS)

    def largest(self, *, contract: bool) -> tuple[int, list[int]] | None:
        """Return root and members, sorted, of the largest region, None when there is no more.

        Of equals it is the smallest root's.

        Args:
            contract: Whether to make a region of it.
        """
        operation = operations.CONTRACT_LARGEST if contract else operations.FIND_LARGEST
        while (root := self._do(operation)) == FULL:
            self._make_room()
        if root < 0:
            return None
        return root, self._backend.read("region.members", 0, self.command[1])

    def _make_room(self) -> None:
        room = 2 * self._do(operations.COUNT_ENTRIES) + _ROOM * self.count + 16
        pairs = [
            ("cache.nodes", "cache.new_nodes"),
            ("cache.watching_root", "cache.new_watching_root"),
            ("cache.next_watcher", "cache.new_next_watcher"),
        ]
        for _, new in pairs:
            self._backend.allocate(new, room)
        self._do(operations.COMPACT_CACHE, room)
        for name, new in pairs:
            self._backend.replace(name, new)

    def claim(self, members: Sequence[int]) -> None:
        """Mark ``members`` of the largest region as not free, after `contract` of its parts."""
        self._backend.write("region.members", members)
        self._do(operations.CLAIM, len(members))
