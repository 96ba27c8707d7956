"""The contracted graph: every chosen region one node, kept in a topological order.

All questions of reachability are answered here, so that regions chosen one after another never
form a cycle together. The order is maintained as Pearce and Kelly do it ("A dynamic topological
sort algorithm for directed acyclic graphs", 2006): a merge searches only between the positions of
the region's first and last node, and moves only what it finds there.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

Links = Sequence[Sequence[int]]
Cones = tuple[set[int], set[int]]


class Contraction:
    """Nodes 0..n-1 in topological order, and the regions among them.

    Attributes:
        rep: For each node the node that stands for its region; itself outside of regions.
        order: Position of each node (for regions: of their ``rep``) in a topological order.
        ins: Producers of each node, distinct; of a region's ``rep``, those of the region.
        outs: Consumers alike. Look neighbours up in ``rep``.
        regions: The members of each region, sorted, by ``rep``.
        searched: Links that searches have followed so far; tests watch that it stays linear.
    """

    def __init__(self, preds: Links, succs: Links) -> None:
        """Start without regions; the lists of links are not changed."""
        count = len(preds)
        self.rep = list(range(count))
        self.order = list(range(count))
        self.ins: list[Sequence[int]] = list(preds)
        self.outs: list[Sequence[int]] = list(succs)
        self.regions: dict[int, list[int]] = {}
        self.searched = 0

    def cones(self, members: Collection[int]) -> Cones:
        """Return what lies after and before ``members``, between their first and last position.

        Args:
            members: Free nodes. They are convex if the two sets have nothing in common.
        """
        order, rep = self.order, self.rep
        positions = [order[m] for m in members]
        first, last = min(positions), max(positions)
        if last - first < len(positions):  # nothing lies between
            return set(), set()
        after: set[int] = set()
        before: set[int] = set()
        for links, found, forward in ((self.outs, after, True), (self.ins, before, False)):
            stack = list(members)
            while stack:
                neighbours = links[stack.pop()]
                self.searched += len(neighbours)
                for other in neighbours:
                    there = rep[other]
                    position = order[there]
                    if (
                        (position < last if forward else position > first)
                        and there not in found
                        and there not in members
                    ):
                        found.add(there)
                        stack.append(there)
        return after, before

    def choose(self, members: Collection[int], cones: Cones | None = None) -> list[int]:
        """Make a region of ``members``, free nodes that are convex; return the nodes that moved.

        The region's representative is its first member.

        Args:
            members: The nodes.
            cones: What `cones` gives for them, if known.
        """
        chosen = sorted(members)
        self.regions[chosen[0]] = chosen
        if len(chosen) == 1:
            return []
        inside = frozenset(chosen)
        after, before = self.cones(inside) if cones is None else cones
        assert after.isdisjoint(before), "a region must be convex before it is chosen"
        moved = self._reorder(chosen, after, before) if after or before else []
        self._contract(chosen, inside)
        return moved

    def _reorder(self, chosen: list[int], after: set[int], before: set[int]) -> list[int]:
        order = self.order
        early = sorted(before, key=order.__getitem__)
        late = sorted(after, key=order.__getitem__)
        slots = sorted([order[m] for m in (*early, *chosen, *late)])
        moved: list[int] = []
        places = [*zip(early, slots, strict=False)]
        if late:
            places += zip(late, slots[-len(late) :], strict=True)
        for node, slot in places:
            if order[node] != slot:
                order[node] = slot
                moved.append(node)
        order[chosen[0]] = slots[len(early)]
        return moved

    def _contract(self, chosen: list[int], inside: Collection[int]) -> None:
        rep, first = self.rep, chosen[0]
        ins: dict[int, None] = {}
        outs: dict[int, None] = {}
        for member in chosen:
            for other in self.ins[member]:
                if other not in inside:
                    ins[other] = None
            for other in self.outs[member]:
                if other not in inside:
                    outs[other] = None
        for member in chosen:
            rep[member] = first
        self.ins[first] = list(ins)
        self.outs[first] = list(outs)

    def shrink(self, members: set[int], keep: int, cones: Cones | None = None) -> set[int]:
        """Return a convex, connected part of ``members`` that holds ``keep``; linear.

        First the members from which a path leaves and comes back to ``keep`` go; then, in order,
        those that a path reaches which has left what is kept. What is no longer connected to
        ``keep`` goes last.
        """
        after, before = self.cones(members) if cones is None else cones
        between = after & before
        kept = self._without_detours(members, between, keep) if between else members
        return self.component(kept, keep)

    def _without_detours(self, members: set[int], between: set[int], keep: int) -> set[int]:
        rep, order = self.rep, self.order
        sweep = sorted((*members, *between), key=order.__getitem__)
        leads: set[int] = set()  # to keep, inside all the way
        strays: set[int] = set()  # to keep, over a node outside
        for node in reversed(sweep):
            for other in self.outs[node]:
                there = rep[other]
                if there in strays:
                    strays.add(node)
                    break
                if there == keep or there in leads:
                    if node in between:
                        strays.add(node)
                        break
                    leads.add(node)
        kept: set[int] = set()
        reached: set[int] = set()  # from what is kept, over a node outside
        for node in sweep:
            taken = node in members and node not in strays
            for other in self.ins[node]:
                there = rep[other]
                if there in reached or (not taken and there in kept):
                    reached.add(node)
                    break
            else:
                if taken:
                    kept.add(node)
        return kept

    def component(self, members: Collection[int], start: int) -> set[int]:
        """Return the members connected with ``start`` over links between members."""
        found = {start}
        stack = [start]
        while stack:
            node = stack.pop()
            for links in (self.ins[node], self.outs[node]):
                for other in links:
                    if other in members and other not in found:
                        found.add(other)
                        stack.append(other)
        return found

    def components(self, members: Iterable[int]) -> list[set[int]]:
        """Return the connected parts of ``members``, in the order of their first nodes."""
        left = set(members)
        parts: list[set[int]] = []
        for start in sorted(left):
            if start in left:
                part = self.component(left, start)
                left -= part
                parts.append(part)
        return parts
