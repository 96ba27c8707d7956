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
        joined: All that were members at any time.
        edge: What leads into the region from before its first position, where the search ended.
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
        self.joined: set[int] = set()
        self.edge: set[int] = set()
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
        self.seen = set()
        self.joined = set()
        self.edge = set()
        for held in (self._place, self._rejected, self._up, self._down):
            held.clear()
        self._trail.clear()
        self._pruned.clear()
        self._first = NEVER
        self.block = block
        place, rejected = self._place, self._rejected
        rep, vertex, free, single = self.space.rep, self.vertex, self.free, self.single
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
                if there in place or there in rejected:
                    continue
                if not single[node] and vertex[other] not in block:
                    continue
                if not free[there]:
                    if there in self._down:
                        self._reject(there)
                        break
                    rejected.add(there)
                    continue
                if not self._add(there):
                    self._reject(there)
                    break
                stack.append((there, iter((*outs[there], *ins[there]))))
                break
            else:
                stack.pop()
        self.edge -= self.seen
        self.seen |= self.edge
        self.seen |= self.joined
        self.seen |= rejected
        return self.members

    def _add(self, node: int) -> bool:
        """Let ``node`` join, unless a rejected node would then lie between two members.

        Returns:
            Whether it joined. If not, nothing has changed.
        """
        space, place, up, down = self.space, self._place, self._up, self._down
        rep, ins, rejected = space.rep, space.ins, self._rejected
        alone = True
        for other in ins[node]:
            there = rep[other]
            if there not in place:
                alone = False
                if there in rejected:
                    for source in ins[there]:
                        if rep[source] in place:
                            return False
        near = False
        for other in space.outs[node]:
            there = rep[other]
            if there in up:
                if there in rejected:
                    return False
                near = near or there not in down
        number = len(self.members)
        self.members.append(node)
        place[node] = number
        new: list[int] = []
        reached: list[int] = []
        first, pruned = self._first, len(self._pruned)
        marks = up.pop(node, NEVER), down.pop(node, NEVER)
        self._trail.append((new, reached, *marks, first, pruned))
        spread = [(node, number)] if near else []
        if (
            not (alone and space.order[node] >= first) and self._find(node, number, new, spread)
        ) or (spread and self._spread(spread, reached)):
            self._go_back(number)
            return False
        self.joined.add(node)
        if new:
            self.seen.update(new)
        if len(self._pruned) > pruned:
            self.edge.update(self._pruned[pruned:])
        return True

    def _find(self, node: int, number: int, new: list[int], spread: list[tuple[int, int]]) -> bool:
        """Find what leads to ``node`` from behind the first member.

        Args:
            node: It has joined.
            number: Its place.
            new: Filled with what was found, in order.
            spread: Filled with those that a member leads to, and the place of the first such.

        Returns:
            Whether a rejected node lies between; then the rest is not complete.
        """
        space, place, up, down = self.space, self._place, self._up, self._down
        order, rep, ins = space.order, space.rep, space.ins
        rejected, pruned, single = self._rejected, self._pruned, self.single
        looked_at = 0
        stack: list[int] = []  # a node above a rejected one is kept as its complement
        first = self._first
        if order[node] < first:
            first = self._first = order[node]
            for there in [k for k in pruned if order[k] > first]:
                if there not in up and there not in place:
                    up[there] = number
                    stack.append(there)
        closed = bool(stack)  # whether some member leads to what is found
        new += stack
        stack.append(node)
        while stack:
            here = stack.pop()
            above = here < 0
            if above:
                here = ~here
            elif here in rejected:
                above = True
            sources = ins[here]
            looked_at += len(sources)
            if not single[here]:
                block, vertex = self.block, self.vertex
                sources = [other for other in sources if vertex[other] in block]
            for other in sources:
                there = rep[other]
                if there in place or there in down:
                    if above:
                        space.searched += looked_at
                        return True
                    closed = True
                elif there in up:
                    continue
                elif order[there] < first:
                    pruned.append(there)
                else:
                    up[there] = number
                    new.append(there)
                    stack.append(~there if above else there)
        space.searched += looked_at
        if closed and new:
            if len(new) > 1:
                new.sort(key=order.__getitem__)
            return self._connect(new, spread)
        return False

    def _connect(self, new: list[int], spread: list[tuple[int, int]]) -> bool:
        """Mark those of ``new``, in order, that members lead to; True at the first rejected one."""
        place, down = self._place, self._down
        rep, ins, rejected = self.space.rep, self.space.ins, self._rejected
        for there in new:
            earliest = NEVER
            for other in ins[there]:
                source = rep[other]
                mark = place.get(source)
                if mark is None:
                    mark = down.get(source, NEVER)
                if mark < earliest:
                    earliest = mark
            if earliest != NEVER:
                if there in rejected:
                    return True
                down[there] = earliest
                spread.append((there, earliest))
        return False

    def _spread(self, spread: list[tuple[int, int]], reached: list[int]) -> bool:
        """Pass marks on to what lies between members now; True at the first rejected node."""
        up, down, rejected = self._up, self._down, self._rejected
        rep, outs = self.space.rep, self.space.outs
        for source, mark in spread:  # grows while it is walked
            for other in outs[source]:
                there = rep[other]
                if there in up and there not in down:
                    if there in rejected:
                        return True
                    down[there] = mark
                    reached.append(there)
                    spread.append((there, mark))
        return False

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
        return removed
