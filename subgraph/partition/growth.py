"""Strategy ``selector``: grow a region from a start node breadth first, asking the selector.

The order is MXNet's: from each node first its producers in input order, then its consumers in
topological order; a node refused over one link may be asked about again over another. What differs
is that growth does not go on from a node that is lost: one that a path links with an earlier
candidate over a node that cannot join any more. Below such a path a node waits, and goes on if the
node in its way joins after all; above it a node is barred. So the region keeps what is near its
start, the work stays near the region instead of running through the rest of the graph, and the
candidates are convex when growth ends.
"""

from __future__ import annotations

import heapq
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

from subgraph.partition.asking import INPUT, OUTPUT, Asker
from subgraph.partition.contraction import Contraction, Links
from subgraph.selector import SubgraphSelector

QUEUED, GROWN, WAITING = 0, 1, 2


class Surroundings:
    """The nodes around a growing region over which paths lead back into it.

    A node here is outside the region and leads into a candidate. It is *open* while it may still
    join from above: it is free, and one of its producers is a candidate whose turn is yet to come,
    or open. When it is not, and a candidate leads to it, the later of the two candidates, above and
    below, has to give way. If that is the one below, the node is *lost*, and what is below a lost
    node waits. Every change is passed on, so the cost is linear in what lies around the region
    between its first position and its candidates.

    Of two candidates, the later is the one whose first relative in the region was found later.

    Attributes:
        state: QUEUED, GROWN or WAITING for each candidate, in the order of discovery.
        barred: Former candidates that gave way to what lies below them.
        stale: Whether a lost node has joined, so that everything must be judged anew.
    """

    def __init__(self, space: Contraction, free: bytearray, start: int) -> None:
        """Surround the region that starts at ``start``."""
        self.space = space
        self.free = free
        self.start = start
        self.state: dict[int, int] = {start: QUEUED}
        # Rank: place in the order of discovery. Of each candidate, the first one above it in the
        # region (itself, if there is none), and the first one below.
        self._rank_above: dict[int, int] = {start: 0}
        self._rank_below: dict[int, int] = {start: 0}
        self.barred: set[int] = set()
        self.stale = False
        self._first = space.order[start]
        self._support: dict[int, int] = {}  # producers from which it may join; all nodes here
        self._up: dict[int, int] = {}  # rank of the first candidate that it leads to
        self._touched: set[int] = set()  # a candidate leads to it
        self._open: set[int] = set()
        self._lost: set[int] = set()
        self._pruned: list[tuple[int, int, int]] = []  # before the first position: heap

    def is_lost(self, node: int) -> bool:
        """Return whether candidate ``node``, whose producers have been asked about, must wait."""
        space, state = self.space, self.state
        roots: list[int] = []
        for source in space.ins[node]:
            mark = state.get(source)
            if mark == WAITING:
                return True
            if mark is None:
                roots.append(space.rep[source])
        self._explore(roots, self._rank_below[node])
        return any(root in self._lost for root in roots)

    def _explore(self, roots: Iterable[int], up: int) -> None:
        """Find what leads to ``roots``, which lead to the candidate of rank ``up``; judge it."""
        space, state, support, first = self.space, self.state, self._support, self._first
        order, rep = space.order, space.rep
        found: list[int] = []
        stack: list[int] = []
        sources: Sequence[int] = list(roots)
        while True:
            for source in sources:
                there = rep[source]
                if there in support or there in state:
                    continue
                if order[there] > first:
                    support[there] = 0
                    self._up[there] = up
                    stack.append(there)
                else:
                    heapq.heappush(self._pruned, (-order[there], there, up))
            if not stack:
                break
            node = stack.pop()
            found.append(node)
            sources = space.ins[node]
            space.searched += len(sources)
        found.sort(key=order.__getitem__)
        for node in found:
            self._judge(node)
        new = set(found)
        for node in found:
            self._tell(node, new)

    def _joinable(self, node: int) -> bool:
        return bool(self.free[node]) and node not in self.barred

    def _judge(self, node: int) -> None:
        count, lost = 0, False
        for source in self.space.ins[node]:
            there = self.space.rep[source]
            mark = self.state.get(there)
            if mark is not None:
                self._touched.add(node)
                count += mark == QUEUED
                lost |= mark == WAITING
            elif there in self._open:
                count += 1
            elif there in self._lost:
                lost = True
        self._support[node] = count
        joins = bool(count) and self._joinable(node)
        gives_way = node in self._touched and self._above(node) < self._up[node]
        if lost or (gives_way and not joins):
            self._lost.add(node)
        elif joins:
            self._open.add(node)

    def _tell(self, node: int, new: set[int]) -> None:
        """Pass on what was found about a new node to those that were here before."""
        older = [there for there in self._below(node) if there not in new]
        if node in self._lost:
            for there in older:
                self.lose(there)
        elif node in self._open:
            for there in older:
                self._support[there] += 1
            self._settle(older)
        elif node in self._touched:
            self._settle([node])

    def _above(self, node: int) -> int:
        """Return the rank of the first candidate that leads to a node outside."""
        state, rank = self.state, self._rank_above
        ranks = [rank[k] for k in self.space.ins[node] if state.get(k, WAITING) < WAITING]
        return min(ranks, default=len(rank))

    def added(self, node: int) -> None:
        """Take note of a new candidate."""
        self.state[node] = QUEUED
        self._link(node, self._rank_above, self.space.ins, self.space.outs)
        self._link(node, self._rank_below, self.space.outs, self.space.ins)
        was_open = node in self._open
        if node in self._lost:
            self._lost.discard(node)
            self.stale = True
        self._support.pop(node, None)
        self._touched.discard(node)
        self._open.discard(node)
        position = self.space.order[node]
        if position < self._first:
            self._first = position
            while self._pruned and -self._pruned[0][0] > position:
                _, there, up = heapq.heappop(self._pruned)
                self._explore([there], up)
        if not self._support:
            return
        work: list[int] = []
        for there in self._below(node):
            self._touched.add(there)
            if not was_open:
                self._support[there] += 1
            work.append(there)
        self._settle(work)

    def _link(self, node: int, ranks: dict[int, int], near: Links, far: Links) -> None:
        """Rank a new candidate by its ``near`` neighbours; pass a lower rank on to the far ones."""
        state = self.state
        rank = len(ranks)
        for other in near[node]:
            if state.get(other, WAITING) < WAITING and ranks[other] < rank:
                rank = ranks[other]
        ranks[node] = rank
        stack = [node]
        while stack:
            for other in far[stack.pop()]:
                if state.get(other, WAITING) < WAITING and ranks[other] > rank:
                    ranks[other] = rank
                    stack.append(other)

    def grown(self, node: int) -> None:
        """Take note that all neighbours of a candidate have been asked about."""
        self.state[node] = GROWN
        if not self._support:
            return
        work: list[int] = []
        for there in self._below(node):
            self._support[there] -= 1
            work.append(there)
        self._settle(work)

    def _below(self, node: int) -> list[int]:
        rep, support = self.space.rep, self._support
        return [rep[other] for other in self.space.outs[node] if rep[other] in support]

    def _settle(self, work: list[int]) -> None:
        while work:
            node = work.pop()
            if node in self._lost or node not in self._support:
                continue
            now = self._joinable(node) and self._support[node] > 0
            if now != (node in self._open):
                (self._open.add if now else self._open.discard)(node)
                for there in self._below(node):
                    self._support[there] += 1 if now else -1
                    work.append(there)
            if not now and node in self._touched:
                if self._above(node) < self._up[node]:
                    self.lose(node)
                else:
                    self._touched.discard(node)
                    for source in self.space.ins[node]:
                        if self.state.get(source, WAITING) < WAITING:
                            self._bar(source, self._up[node], work)

    def _bar(self, node: int, up: int, work: list[int]) -> None:
        """Give up a candidate that leads, over a node outside, to an earlier one."""
        mark = self.state.pop(node)
        self.barred.add(node)
        for there in self._below(node):
            self._support[there] -= mark == QUEUED
            work.append(there)
        self._explore([node], up)
        if node in self._support:
            work.append(node)

    def lose(self, node: int) -> None:
        """Let ``node``, a candidate or one outside, be lost, and with it what lies below."""
        state, space = self.state, self.space
        stack = [node]
        while stack:
            node = stack.pop()
            if node in state:
                if state[node] == WAITING or node == self.start:
                    continue
                state[node] = WAITING
            else:
                if node in self._lost:
                    continue
                self._lost.add(node)
                self._open.discard(node)
            for other in space.outs[node]:
                there = space.rep[other]
                if there in state or there in self._support:
                    stack.append(there)

    def renew(self) -> None:
        """Forget what was judged, after a lost node has joined."""
        self.stale = False
        for held in (self._support, self._up, self._touched, self._open, self._lost, self._pruned):
            held.clear()


class Growth:
    """Grows regions in one graph for one property.

    Attributes:
        via: For each node that was a candidate, the node it was found from (itself: the start).
    """

    def __init__(self, asker: Asker, space: Contraction, via: array[int]) -> None:
        """Grow over the free nodes of the asker's graph; fills ``via``."""
        self.asker = asker
        self.space = space
        self.via = via

    def grow(self, selector: SubgraphSelector, start: int) -> tuple[set[int], list[int]]:
        """Grow from ``start``; return the candidates, and those that had to be given up."""
        around = Surroundings(self.space, self.asker.work.free, start)
        state = around.state
        self.via[start] = start
        queue = deque([start])
        complete: set[int] = set()
        while queue:
            while queue:
                node = queue.popleft()
                if state.get(node) == QUEUED:
                    self._expand(selector, node, around, queue, complete)
            if around.stale:
                self._resume(around, queue, complete)
        kept = {node for node, mark in state.items() if mark == GROWN}
        given_up = [node for node, mark in state.items() if mark == WAITING]
        given_up += sorted(around.barred)
        if given_up:
            kept = self.space.component(kept, start)
        return kept, given_up

    def _expand(
        self,
        selector: SubgraphSelector,
        node: int,
        around: Surroundings,
        queue: deque[int],
        complete: set[int],
    ) -> None:
        work = self.asker.work
        nodes, free, forced, state = work.nodes, work.free, work.forced, around.state
        refusals, via, this = self.asker.refusals, self.via, nodes[node]
        barred, cut_off = around.barred, False
        for other in work.preds[node]:
            if other in state:
                cut_off |= state[other] == WAITING
                continue
            if free[other] and other not in barred:
                try:
                    answer = forced[other] or selector.select_input(this, nodes[other])
                    taken = bool(answer)
                except Exception as error:
                    self.asker.fail(selector, INPUT, node, other, error)
                if taken:
                    via[other] = node
                    around.added(other)
                    queue.append(other)
                    continue
                refusals[other] = (INPUT, node, answer)
            cut_off = True
        if cut_off and around.is_lost(node) and node != around.start:
            around.lose(node)
        if state.get(node) != QUEUED:
            return
        for other in work.succs[node]:
            if other in state or not free[other] or other in barred:
                continue
            try:
                answer = forced[other] or selector.select_output(this, nodes[other])
                taken = bool(answer)
            except Exception as error:
                self.asker.fail(selector, OUTPUT, node, other, error)
            if taken:
                via[other] = node
                around.added(other)
                queue.append(other)
            else:
                refusals[other] = (OUTPUT, node, answer)
        complete.add(node)
        if state.get(node) == QUEUED:
            around.grown(node)

    def _resume(self, around: Surroundings, queue: deque[int], complete: set[int]) -> None:
        """Judge all candidates anew; queue those that waited and need not any more."""
        around.renew()
        state = around.state
        waited = {node for node, mark in state.items() if mark == WAITING}
        nodes = list(state)
        for node in nodes:
            state[node] = GROWN if node in complete else QUEUED
        for node in nodes:
            if node in state and around.is_lost(node) and node != around.start:
                around.lose(node)
        queue.extend(n for n in nodes if n in waited - complete and state.get(n) == QUEUED)
