"""Strategy ``hetero``: grow from every root, keep the largest region, repeat (OpenVINO's rule).

The reference grows anew from all roots after every region that it keeps. Here nothing is grown
twice without need:

- A growth depends only on what it has looked at. It is kept until a node among that joins a region,
  or a move in the topological order brings one before its members that its search had left out.
- Roots count in order, and a node that an earlier root's region holds is no root. How many earlier
  roots hold a node is counted, so that a change is passed on to the roots behind it alone.
- Growth in one biconnected block of the graph does not depend on any other: all ways between them
  go through one node. So blocks are grown one by one from the node by which they are entered, and
  only those behind members that stay; a block of free nodes alone joins as a whole.
- Two nodes side by side between the same two neighbours, as in a wide diamond, are twins: to swap
  them changes nothing, so their regions are alike. While the first is a root, the second need not
  be grown: its region is of the same size, and covers no later root that the first does not.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from itertools import pairwise

import attrs

from subgraph.partition.blocks import find_blocks
from subgraph.partition.contraction import Contraction
from subgraph.partition.trial import Trial

# Growth in larger blocks is not kept: they change with almost every region.
SMALL_BLOCK = 64
# Growth in blocks of up to so many nodes is looked up by their form.
TINY_BLOCK = 8


# Nodes at which searches ended, and nodes that must stay behind these in the topological order.
Limit = tuple[set[int], set[int]]
# Which nodes of a block are free, and the consumers and producers of each by their places.
Form = tuple[bytes, tuple[tuple[int, ...], ...]]


@attrs.define(slots=True, eq=False)
class Grown:
    """What a root's growth gave: members, what it looked at, whether it still counts."""

    root: int
    members: set[int]
    seen: set[int]
    limits: list[Limit]
    valid: bool = True


class HeteroSearch:
    """Finds the largest region of one device again and again.

    Attributes:
        trials: Blocks grown node by node so far.
    """

    def __init__(self, space: Contraction, free: bytearray) -> None:
        """Search among the ``free`` nodes of ``space``; the array is changed."""
        self.space = space
        self.free = free
        self.trials = 0
        self._vertex = list(space.rep)
        self._blocks, self._blocks_of = find_blocks(space.ins, space.outs, self._vertex)
        self._refused = [sum(not free[k] for k in block) for block in self._blocks]
        self._sets: dict[int, frozenset[int]] = {}
        self._changes = [0] * len(self._blocks)
        self._moves = [0] * len(self._blocks)
        self._forms: dict[int, tuple[int, list[int], dict[int, tuple[int, ...]]]] = {}
        self._known_forms: dict[Form, dict[int, tuple[int, ...]]] = {}
        self._tried: dict[tuple[int, int], tuple[int, list[int], set[int], Limit]] = {}
        self._grown: dict[int, Grown] = {}
        self._holders = [0] * len(free)
        self._watchers: dict[int, list[Grown]] = {}
        self._largest: list[tuple[int, int, int, Grown]] = []
        self._installed = 0
        single = bytearray(len(self._blocks_of[vertex]) == 1 for vertex in self._vertex)
        self._trial = Trial(space, free, self._vertex, single)
        self._twin, self._next_twin = _find_twins(space)
        self._dirty = [k for k in range(len(free)) if free[k] and not self._is_shadowed(k)]

    def best(self) -> tuple[int, set[int]] | None:
        """Return root and members of the largest region (of equals, the smallest root's), or None.

        The caller keeps it and says so with `taken`.
        """
        while self._dirty:
            self._settle(heapq.heappop(self._dirty))
        while self._largest:
            _, root, _, grown = self._largest[0]
            if grown.valid:
                return root, grown.members
            heapq.heappop(self._largest)
        return None

    def _settle(self, root: int) -> None:
        known = self._grown.get(root)
        if not self.free[root] or self._holders[root] or self._is_shadowed(root):
            if known is not None:
                self._drop(known)
        elif known is None:
            self._install(self._grow(root))

    def _is_shadowed(self, root: int) -> bool:
        twin = self._twin.get(root)
        return twin is not None and bool(self.free[twin]) and not self._holders[twin]

    def _push(self, node: int) -> None:
        """Note that ``node`` may have become a root, or may be none any more."""
        if node in self._grown or (self.free[node] and not self._holders[node]):
            heapq.heappush(self._dirty, node)

    def _install(self, grown: Grown) -> None:
        root, holders = grown.root, self._holders
        self._grown[root] = grown
        self._installed += 1
        entry = (-len(grown.members), root, self._installed, grown)
        heapq.heappush(self._largest, entry)
        changed: list[int] = []
        for node in grown.members:
            if node > root:
                holders[node] += 1
                if holders[node] == 1:
                    changed.append(node)
        self._look_again(changed)
        for node in grown.seen:
            self._watchers.setdefault(node, []).append(grown)

    def _look_again(self, nodes: Iterable[int]) -> None:
        follower = self._next_twin.get
        for node in nodes:
            self._push(node)
            behind = follower(node)
            if behind is not None:
                self._push(behind)

    def _drop(self, grown: Grown) -> None:
        root, holders = grown.root, self._holders
        grown.valid = False
        del self._grown[root]
        changed: list[int] = []
        for node in grown.members:
            if node > root:
                holders[node] -= 1
                if not holders[node] and self.free[node]:
                    changed.append(node)
        self._look_again(changed)

    def taken(self, members: Iterable[int], moved: Iterable[int]) -> None:
        """Take note that ``members`` are free no more, and that ``moved`` changed their places."""
        members = list(members)
        for node in members:
            self.free[node] = 0
            for block in self._blocks_of[self._vertex[node]]:
                self._refused[block] += 1
                self._changes[block] += 1
        self._look_again(members)
        moved = list(moved)
        for node in moved:
            for block in self._blocks_of[self._vertex[node]]:
                self._moves[block] += 1
        for node in members:
            for grown in self._watchers.pop(node, ()):
                if grown.valid:
                    self._redo(grown)
        touched: dict[Grown, None] = {}
        for node in moved:
            watchers = self._watchers.get(node)
            if watchers:
                watchers = self._watchers[node] = [grown for grown in watchers if grown.valid]
                touched.update(dict.fromkeys(watchers))
        for grown in touched:
            if not self._within_limits(grown):
                self._redo(grown)

    def _redo(self, grown: Grown) -> None:
        self._drop(grown)
        heapq.heappush(self._dirty, grown.root)

    def _within_limits(self, grown: Grown) -> bool:
        order = self.space.order
        for before, behind in grown.limits:
            first = min([order[node] for node in behind])
            for node in before:
                if order[node] > first:
                    return False
        return True

    def _grow(self, root: int) -> Grown:
        members = {root}
        seen = {root}
        limits: list[Limit] = []
        blocks_of, refused = self._blocks_of, self._refused
        work = [(root, -1)]
        while work:
            entry, behind = work.pop()
            for number in blocks_of[entry]:
                if number == behind:
                    continue
                block = self._blocks[number]
                if not refused[number]:
                    joined: Iterable[int] = block
                elif len(block) <= TINY_BLOCK:
                    seen.update(block)
                    joined = self._look_up(number, entry)
                else:
                    joined = self._try(number, entry, seen, limits)
                for node in joined:
                    if node != entry:
                        members.add(node)
                        if len(blocks_of[node]) > 1:
                            work.append((node, number))
        seen |= members
        return Grown(root, members, seen, limits)

    def _try(self, number: int, entry: int, seen: set[int], limits: list[Limit]) -> list[int]:
        """Grow in a block from ``entry``; what was grown stands until the block changes."""
        known = self._tried.get((number, entry))
        changes = self._changes[number] + self._moves[number]
        if known is None or known[0] != changes:
            inside = self._sets.get(number)
            if inside is None:
                inside = self._sets[number] = frozenset(self._blocks[number])
            self.trials += 1
            joined = self._trial.grow(entry, inside)
            limit = (self._trial.edge, self._trial.joined)
            known = (changes, joined, self._trial.seen, limit)
            if len(inside) <= SMALL_BLOCK:
                self._tried[number, entry] = known
        seen |= known[2]
        if known[3][0]:
            limits.append(known[3])
        return known[1]

    def _look_up(self, number: int, entry: int) -> list[int]:
        """Grow in a tiny block from ``entry``; blocks of the same form grow alike."""
        known = self._forms.get(number)
        if known is None or known[0] != self._changes[number]:
            form, nodes = self._form(number)
            results = self._known_forms.setdefault(form, {})
            known = self._forms[number] = (self._changes[number], nodes, results)
        nodes, results = known[1:]
        place = nodes.index(entry)
        result = results.get(place)
        if result is None:
            self.trials += 1
            joined = self._trial.grow(entry, frozenset(self._blocks[number]))
            result = results[place] = tuple(map(nodes.index, joined))
        return [nodes[k] for k in result]

    def _form(self, number: int) -> tuple[Form, list[int]]:
        """Return a block's links and which nodes are free, by place among its nodes; and these."""
        space, vertex, free = self.space, self._vertex, self.free
        rep = space.rep
        block = self._blocks[number]
        nodes = [rep[node] for node in block]
        links: list[tuple[int, ...]] = []
        for node in nodes:
            for near in (space.outs[node], space.ins[node]):
                links.append(tuple([nodes.index(rep[k]) for k in near if vertex[k] in block]))
        return (bytes([free[node] for node in nodes]), tuple(links)), nodes


def _find_twins(space: Contraction) -> tuple[dict[int, int], dict[int, int]]:
    """Return for a node its twin just before it, and the reverse.

    Twins have one producer and one consumer, the same, and stand side by side in the lists of both.
    """
    twin: dict[int, int] = {}
    ins, outs = space.ins, space.outs
    for source, consumers in enumerate(outs):
        if len(consumers) < 3 or space.rep[source] != source:
            continue
        places: dict[int, dict[int, int]] = {}
        for one, two in pairwise(consumers):
            if len(ins[one]) == len(outs[one]) == len(ins[two]) == len(outs[two]) == 1:
                sink = outs[one][0]
                if outs[two][0] != sink:
                    continue
                place = places.get(sink)
                if place is None:
                    place = places[sink] = {node: k for k, node in enumerate(ins[sink])}
                if place.get(two, -1) == place.get(one, -3) + 1:
                    twin[two] = one
    return twin, {one: two for two, one in twin.items()}
