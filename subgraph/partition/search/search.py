"""The Python interface of a search for regions: links of a graph, and operations by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from subgraph.partition.search import operations
from subgraph.partition.search.backend import Ints, make_backend
from subgraph.partition.search.hetero import FULL

# Cache entries for growths at the beginning, for each node (estimate; the cache grows when full).
_ROOM = 8


class Links(NamedTuple):
    """The links of a graph as arrays.

    Attributes:
        in_ends: For each node the index in ``ins`` after its last producer.
        ins: Producers of the nodes, one node after the other, distinct, in input order.
        out_ends: For each node the index in ``outs`` after its last consumer.
        outs: Consumers of the nodes, one node after the other, in topological order.
    """

    in_ends: Ints
    ins: Ints
    out_ends: Ints
    outs: Ints

    @classmethod
    def of(cls, in_ends: Ints, ins: Ints) -> Links:
        """Find the consumers from the producers; see the attributes of the class."""
        count = len(in_ends)
        consumers = np.repeat(np.arange(count, dtype=np.int32), np.diff(in_ends, prepend=0))
        outs = consumers[np.argsort(ins, kind="stable")]
        out_ends = np.cumsum(np.bincount(ins, minlength=count), dtype=np.int32)
        return cls(in_ends, ins, out_ends, outs)


class Grown(NamedTuple):
    """The result of a growth.

    Attributes:
        members: The region's nodes, sorted.
        given_up: Candidates that are not in it, since it would not be convex with them.
    """

    members: list[int]
    given_up: list[int]


class Search:
    """Nodes 0..n-1 in topological order, and the regions among them.

    Attributes:
        words: The next operation, its arguments and its results; see `operations`.
        asked: Nodes that the selector is asked about; see `begin_growth`.
        answers: The answers, 1 or 0; see `begin_growth`.
        go_on: Does the operation in ``words`` and returns its result.
    """

    def __init__(self, links: Links, *, compiled: bool | None = None) -> None:
        """Start without regions.

        Args:
            links: The graph's links.
            compiled: Whether to use machine code; None: by the number of nodes.
        """
        count = len(links.in_ends)
        backend = make_backend(count, len(links.ins), compiled=compiled)
        self.count = count
        self._backend = backend
        self.words = backend.message.words
        self.asked, self.answers = backend.message.asked, backend.message.answers
        self.go_on = backend.run
        for name, ends, items in (
            ("in", links.in_ends, links.ins),
            ("out", links.out_ends, links.outs),
        ):
            backend.put(f"graph.{name}_end", ends)
            backend.put(f"graph.{name}_at", np.concatenate([np.zeros(1, np.int32), ends])[:count])
            backend.put(f"graph.{name}_links", items)
        self._do(operations.PREPARE, count)

    def _do(self, operation: int, one: int = 0, two: int = 0) -> int:
        words = self.words
        words[0], words[1], words[2] = operation, one, two
        return self.go_on()

    def choose(self, members: Sequence[int]) -> None:
        """Make a region of ``members``, sorted free nodes that are convex."""
        self._backend.put("region.members", members)
        self._do(operations.CHOOSE, len(members))

    def shrink(self, members: Sequence[int], keep: int) -> tuple[list[int], list[int]]:
        """Return a convex, connected part of sorted ``members`` that holds ``keep``, and the rest.

        See `contraction.shrink`.
        """
        return self._part(operations.SHRINK, members, keep)

    def components(self, members: Sequence[int]) -> list[list[int]]:
        """Return the connected parts of sorted ``members``, in the order of their first nodes."""
        parts: list[list[int]] = []
        left = list(members)
        while left:
            part, left = self._part(operations.COMPONENT, left, left[0])
            parts.append(part)
        return parts

    def _part(
        self, operation: int, members: Sequence[int], keep: int
    ) -> tuple[list[int], list[int]]:
        backend = self._backend
        backend.put("region.members", members)
        self._do(operation, len(members), keep)
        size, dropped = self.words[1], self.words[2]
        return backend.read("region.members", 0, size), backend.read("region.moved", 0, dropped)

    def set_free(self, free: Iterable[int]) -> None:
        """Set the nodes that may join regions: 1 in ``free`` for each."""
        self._backend.put("graph.free", np.fromiter(free, np.int32, self.count))

    def begin_growth(self, start: int) -> int:
        """Begin to grow a region from the free node ``start``; see `region_growth`.

        Returns:
            The number of neighbours in ``asked``: producers or consumers of node ``words[1]``, as
            ``words[2]`` says. The caller writes 1 into ``answers`` for each to which the region may
            grow, else 0, and calls `go_on`, which returns the next number; 0 at the end.
        """
        count = self._do(operations.GROW, start)
        self.words[0] = operations.ANSWER
        return count

    def grown(self) -> Grown:
        """Return the grown region."""
        size, given_up = self.words[1], self.words[2]
        members = self._backend.read("region.members", 0, size)
        return Grown(
            members, self._backend.read("growth.given_up", 0, given_up) if given_up else []
        )

    def take_grown(self) -> None:
        """Make a region of the nodes that have grown."""
        self._do(operations.TAKE_GROWN)

    def start_roots(self, free: Iterable[int]) -> None:
        """Begin a search among the nodes of a device, 1 in ``free`` for each; see `hetero`."""
        self.set_free(free)
        self._make_room()
        self._do(operations.START_ROOTS)

    def largest(self, *, take: bool) -> tuple[int, list[int]] | None:
        """Return root and members, sorted, of the largest region, None when there is no more.

        Of equals it is the smallest root's.

        Args:
            take: Make a region of it.
        """
        operation = operations.TAKE_LARGEST if take else operations.FIND_LARGEST
        while (root := self._do(operation)) == FULL:
            self._make_room()
        if root < 0:
            return None
        return root, self._backend.read("region.members", 0, self.words[1])

    def _make_room(self) -> None:
        room = 2 * self._do(operations.COUNT_CACHED) + _ROOM * self.count + 16
        pairs = [
            ("cache.nodes", "cache.new_nodes"),
            ("cache.root", "cache.new_root"),
            ("cache.next", "cache.new_next"),
        ]
        for _, new in pairs:
            self._backend.place(new, room)
        self._do(operations.MOVE_GROWTHS, room)
        for name, new in pairs:
            self._backend.took_over(name, new)

    def take(self, members: Sequence[int]) -> None:
        """Mark ``members`` of the largest region as not free, after `choose` of its parts."""
        self._backend.put("region.members", members)
        self._do(operations.TAKE, len(members))
