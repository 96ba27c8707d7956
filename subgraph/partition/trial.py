"""One trial growth of strategy ``hetero`` inside a block: grow, reject, roll back.

The literal rule of the reference: add or reject one neighbour after the other; whenever a rejected
node lies on a path between two nodes of the region, take nodes back, last first, and reject them,
until none does. Here every node outside that leads into the region is known with the first member
that it leads to (``up``) and the first that leads to it (``down``), so that one look tells how far
to go back. All marks are noted by member, and going back undoes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from subgraph.partition.contraction import Contraction

NEVER = 1 << 60


class Trial:
    """Grows from one node within one block.

    Attributes:
        members: The region, in the order of joining.
        seen: Everything that the outcome depends on.
    """

    def __init__(
        self, space: Contraction, free: bytearray, block: Collection[int], vertex: list[int]
    ) -> None:
        """Prepare to grow.

        Args:
            space: The contracted graph.
            free: 1 for each node that may join.
            block: The vertices among which growth goes on.
            vertex: The vertex that each node belongs to.
        """
        self.space = space
        self.free = free
        self.block = block
        self.vertex = vertex
        self.members: list[int] = []
        self.seen: set[int] = set()
        self._place: dict[int, int] = {}
        self._rejected: set[int] = set()
        self._outside: dict[int, list[int]] = {}  # [up, down]
        self._trail: list[tuple[list[int], list[int], list[int] | None, int, int]] = []
        self._first = NEVER
        self._pruned: list[int] = []

    def grow(self, start: int) -> list[int]:
        """Grow from ``start``: consumers first, depth first; return the members."""
        space, place, rejected = self.space, self._place, self._rejected
        rep, block, vertex, free = space.rep, self.block, self.vertex, self.free
        self._add(start)
        stack: list[tuple[int, Iterator[int]]] = [(start, self._neighbours(start))]
        while stack:
            node, neighbours = stack[-1]
            if node not in place:  # rolled back: its neighbours are not followed
                stack.pop()
                continue
            for other in neighbours:
                there = rep[other]
                if there in place or there in rejected or vertex[other] not in block:
                    continue
                if not free[there]:
                    self._reject(there)
                    break
                if self._add(there):
                    self._reject_from(len(self.members) - 1)
                    break
                stack.append((there, self._neighbours(there)))
                break
            else:
                stack.pop()
        self.seen.update(rejected)
        return self.members

    def _neighbours(self, node: int) -> Iterator[int]:
        return iter((*self.space.outs[node], *self.space.ins[node]))

    def _add(self, node: int) -> bool:
        """Let ``node`` join; return whether a rejected node now lies between two members."""
        space, outside, place = self.space, self._outside, self._place
        order, rep, block, vertex = space.order, space.rep, self.block, self.vertex
        number = len(self.members)
        self.members.append(node)
        place[node] = number
        self.seen.add(node)
        new: list[int] = []
        reached: list[int] = []
        self._trail.append((new, reached, outside.pop(node, None), self._first, len(self._pruned)))
        roots = [rep[k] for k in space.ins[node] if vertex[k] in block]
        if order[node] < self._first:
            self._first = order[node]
            roots += [k for k in self._pruned if order[k] > self._first]
        self._explore(roots, number, new)
        bad = False
        spread = [(node, number)]
        for there in new:
            mark = outside[there]
            for other in space.ins[there]:
                source = rep[other]
                if vertex[other] in block:
                    if source in place:
                        mark[1] = min(mark[1], place[source])
                    elif source in outside:
                        mark[1] = min(mark[1], outside[source][1])
            if mark[1] != NEVER:
                spread.append((there, mark[1]))
                bad |= there in self._rejected
        while spread:
            source, down = spread.pop()
            for other in space.outs[source]:
                there = rep[other]
                mark = outside.get(there)
                if mark is not None and mark[1] == NEVER:
                    mark[1] = down
                    reached.append(there)
                    bad |= there in self._rejected
                    spread.append((there, down))
        return bad

    def _explore(self, roots: list[int], number: int, new: list[int]) -> None:
        """Find what leads to ``roots`` from behind the first member; fill ``new`` in order."""
        space, outside, place, first = self.space, self._outside, self._place, self._first
        order, rep, block, vertex = space.order, space.rep, self.block, self.vertex
        stack = roots
        while stack:
            there = stack.pop()
            if there in place or there in outside:
                continue
            self.seen.add(there)
            if order[there] < first:
                self._pruned.append(there)
                continue
            outside[there] = [number, NEVER]
            new.append(there)
            sources = space.ins[there]
            space.searched += len(sources)
            stack.extend(rep[other] for other in sources if vertex[other] in block)
        new.sort(key=order.__getitem__)

    def _reject(self, node: int) -> None:
        work = [node]
        while work:
            node = work.pop()
            self._rejected.add(node)
            mark = self._outside.get(node)
            if mark is not None and mark[1] != NEVER:
                work += self._go_back(max(mark))

    def _reject_from(self, number: int) -> None:
        for node in self._go_back(number):
            self._reject(node)

    def _go_back(self, number: int) -> list[int]:
        """Take back all members from ``number`` on; return them."""
        removed = self.members[number:]
        outside = self._outside
        for node in reversed(removed):
            new, reached, mark, self._first, pruned = self._trail.pop()
            for there in reached:
                if there in outside:
                    outside[there][1] = NEVER
            for there in new:
                outside.pop(there, None)
            if mark is not None:
                outside[node] = mark
            del self._pruned[pruned:]
            del self._place[node]
        del self.members[number:]
        self._rejected.update(removed)
        return removed
