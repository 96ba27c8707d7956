"""One trial growth of strategy ``hetero`` inside a block: grow, reject, roll back.

The literal rule of the reference: add or reject one neighbour after the other; whenever a rejected
node lies on a path between two nodes of the region, take nodes back, last first, and reject them,
until none does. Here every node outside that leads into the region is known with the first member
that it leads to (``up``) and the first that leads to it (``down``), so that one look tells how far
to go back. All marks are noted by member, and going back undoes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from subgraph.partition.contraction import Contraction

NEVER = 1 << 60


class Trial:
    """Grows from one node within one block; one object serves again and again.

    Attributes:
        members: The region, in the order of joining.
        seen: Everything that the outcome depends on.
    """

    def __init__(
        self, space: Contraction, free: bytearray, vertex: Sequence[int], single: bytearray
    ) -> None:
        """Prepare to grow.

        Args:
            space: The contracted graph.
            free: 1 for each node that may join.
            vertex: The vertex that each node belongs to.
            single: 1 for each node that is in one block, and so has all its neighbours in it.
        """
        self.space = space
        self.free = free
        self.vertex = vertex
        self.single = single
        self.members: list[int] = []
        self.seen: set[int] = set()
        self._place: dict[int, int] = {}  # of each member among the members
        self._rejected: set[int] = set()
        self._up: dict[int, int] = {}
        self._down: dict[int, int] = {}
        # For each member what its joining changed, to undo it.
        self._trail: list[tuple[list[int], list[int], int, int, int, int]] = []
        self._first = NEVER
        self._pruned: list[int] = []

    def grow(self, start: int, block: Collection[int]) -> list[int]:
        """Grow from ``start``, consumers first, depth first, among the vertices of ``block``."""
        self.members = []
        self.seen = {start}
        for held in (self._place, self._rejected, self._up, self._down):
            held.clear()
        self._trail.clear()
        self._pruned.clear()
        self._first = NEVER
        self.block = block
        place, rejected = self._place, self._rejected
        rep, vertex, free = self.space.rep, self.vertex, self.free
        outs, ins = self.space.outs, self.space.ins
        self._add(start)
        stack: list[tuple[int, Iterator[int]]] = [(start, iter((*outs[start], *ins[start])))]
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
                    if there in self._down:
                        self._reject(there)
                        break
                    rejected.add(there)
                    continue
                if self._add(there):
                    for removed in self._go_back(len(self.members) - 1):
                        self._reject(removed)
                    break
                stack.append((there, iter((*outs[there], *ins[there]))))
                break
            else:
                stack.pop()
        self.seen |= rejected
        self.seen.update(self.members)
        return self.members

    def _add(self, node: int) -> bool:
        """Let ``node`` join; return whether a rejected node now lies between two members."""
        space, place, up, down = self.space, self._place, self._up, self._down
        rep, rejected = space.rep, self._rejected
        number = len(self.members)
        self.members.append(node)
        place[node] = number
        new: list[int] = []
        reached: list[int] = []
        marks = (up.pop(node, NEVER), down.pop(node, NEVER), self._first, len(self._pruned))
        self._trail.append((new, reached, *marks))
        if space.order[node] < marks[2] or any(rep[k] not in place for k in space.ins[node]):
            self._find(node, number, new)
        if not up:
            return False
        spread = [(node, number)]
        bad = False
        for there in new:
            earliest = NEVER
            for other in space.ins[there]:
                source = rep[other]
                mark = place.get(source)
                if mark is None:
                    mark = down.get(source, NEVER)
                if mark < earliest:
                    earliest = mark
            if earliest != NEVER:
                down[there] = earliest
                spread.append((there, earliest))
                bad |= there in rejected
        for source, mark in spread:  # grows while it is walked
            for other in space.outs[source]:
                there = rep[other]
                if there in up and there not in down:
                    down[there] = mark
                    reached.append(there)
                    bad |= there in rejected
                    spread.append((there, mark))
        return bad

    def _find(self, node: int, number: int, new: list[int]) -> None:
        """Find what leads to ``node`` from behind the first member; fill ``new`` in order."""
        space, place, up, pruned = self.space, self._place, self._up, self._pruned
        order, rep, ins = space.order, space.rep, space.ins
        stack: list[int] = []
        first = self._first
        if order[node] < first:
            first = self._first = order[node]
            for there in [k for k in pruned if order[k] > first]:
                if there not in up and there not in place:
                    up[there] = number
                    stack.append(there)
        new += stack
        stack.append(node)
        while stack:
            here = stack.pop()
            sources = ins[here]
            space.searched += len(sources)
            if not self.single[here]:
                block, vertex = self.block, self.vertex
                sources = [other for other in sources if vertex[other] in block]
            for other in sources:
                there = rep[other]
                if there in up or there in place:
                    continue
                if order[there] < first:
                    pruned.append(there)
                    self.seen.add(there)
                    continue
                up[there] = number
                new.append(there)
                stack.append(there)
        if len(new) > 1:
            new.sort(key=order.__getitem__)
        self.seen.update(new)

    def _reject(self, node: int) -> None:
        up, down = self._up, self._down
        work = [node]
        while work:
            node = work.pop()
            self._rejected.add(node)
            mark = down.get(node)
            if mark is not None:
                work += self._go_back(max(mark, up[node]))

    def _go_back(self, number: int) -> list[int]:
        """Take back all members from ``number`` on; return them."""
        up, down, place = self._up, self._down, self._place
        removed = self.members[number:]
        for node in reversed(removed):
            new, reached, mark, earliest, self._first, pruned = self._trail.pop()
            for there in reached:
                down.pop(there, None)
            for there in new:
                up.pop(there, None)
                down.pop(there, None)
            if mark != NEVER:
                up[node] = mark
            if earliest != NEVER:
                down[node] = earliest
            del self._pruned[pruned:]
            del place[node]
        del self.members[number:]
        self._rejected.update(removed)
        self.seen.update(removed)
        return removed
