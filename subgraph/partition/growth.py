"""Strategy ``selector``: grow a region from a start node breadth first, asking the selector.

The order is MXNet's: from each node first its producers in input order, then its consumers in
topological order; a node refused over one link may be asked about again over another. What differs
is that growth does not go on below a node that is lost: one that a path reaches which has left the
region over a node that cannot join it any more. Such a node waits; if the node in its way joins
after all, it goes on. So the work stays near the region instead of running through the rest of the
graph, and the candidates are convex when growth ends.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable

from subgraph.partition.asking import INPUT, OUTPUT, Asker
from subgraph.partition.contraction import Contraction
from subgraph.selector import SubgraphSelector

QUEUED, GROWN, WAITING = 0, 1, 2


class Surroundings:
    """The nodes around a growing region over which paths lead back into it.

    A node here is outside the region and leads into a candidate. It is *open* while it may still
    join from above: it is free, and one of its producers is a candidate whose turn is yet to come,
    or open. It is *lost* when it is not open and a candidate leads to it, or a lost node does.
    A candidate below a lost node waits. Every change is passed on, so the cost is linear in what
    lies around the region between its first position and its candidates.
    """

    def __init__(self, space: Contraction, free: bytearray, start: int) -> None:
        """Surround the region that starts at ``start``."""
        self.space = space
        self.free = free
        self.start = start
        self.state: dict[int, int] = {start: QUEUED}
        self.first = space.order[start]
        self.support: dict[int, int] = {}  # producers from which it may join; the nodes here
        self.touched: set[int] = set()  # a candidate leads to it
        self.open: set[int] = set()
        self.lost: set[int] = set()
        self.pruned = -1  # last position of those before the first, which are not looked at
        self.stale = False

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
        self._explore(roots)
        return any(root in self.lost for root in roots)

    def _explore(self, roots: Iterable[int]) -> None:
        space, state, support, first = self.space, self.state, self.support, self.first
        order, rep = space.order, space.rep
        found: list[int] = []
        stack: list[int] = []
        for root in roots:
            if root not in support:
                if order[root] > first:
                    support[root] = 0
                    stack.append(root)
                else:
                    self.pruned = max(self.pruned, order[root])
        while stack:
            node = stack.pop()
            found.append(node)
            space.searched += len(space.ins[node])
            for source in space.ins[node]:
                there = rep[source]
                if there in support or there in state:
                    continue
                if order[there] > first:
                    support[there] = 0
                    stack.append(there)
                else:
                    self.pruned = max(self.pruned, order[there])
        found.sort(key=order.__getitem__)
        for node in found:
            self._judge(node)

    def _judge(self, node: int) -> None:
        count, lost = 0, False
        for source in self.space.ins[node]:
            there = self.space.rep[source]
            mark = self.state.get(there)
            if mark is not None:
                self.touched.add(node)
                count += mark == QUEUED
                lost |= mark == WAITING
            elif there in self.open:
                count += 1
            elif there in self.lost:
                lost = True
        self.support[node] = count
        if lost or (node in self.touched and not (count and self.free[node])):
            self.lost.add(node)
        elif count and self.free[node]:
            self.open.add(node)

    def added(self, node: int) -> None:
        """Take note of a new candidate."""
        self.state[node] = QUEUED
        position = self.space.order[node]
        if position < self.first:
            self.first = position
            self.stale |= self.pruned > position
        if not self.support:
            return
        was_open = node in self.open
        self.support.pop(node, None)
        self.touched.discard(node)
        self.open.discard(node)
        if node in self.lost:
            self.lost.discard(node)
            self.stale = True
        work: list[int] = []
        for there in self._below(node):
            self.touched.add(there)
            if not was_open:
                self.support[there] += 1
            work.append(there)
        self._settle(work)

    def grown(self, node: int) -> None:
        """Take note that all neighbours of a candidate have been asked about."""
        self.state[node] = GROWN
        if not self.support:
            return
        work: list[int] = []
        for there in self._below(node):
            self.support[there] -= 1
            work.append(there)
        self._settle(work)

    def _below(self, node: int) -> list[int]:
        rep, support = self.space.rep, self.support
        return [rep[other] for other in self.space.outs[node] if rep[other] in support]

    def _settle(self, work: list[int]) -> None:
        while work:
            node = work.pop()
            if node in self.lost:
                continue
            now = bool(self.free[node]) and self.support[node] > 0
            if now != (node in self.open):
                (self.open.add if now else self.open.discard)(node)
                for there in self._below(node):
                    self.support[there] += 1 if now else -1
                    work.append(there)
            if not now and node in self.touched:
                self.lose(node)

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
                if node in self.lost:
                    continue
                self.lost.add(node)
                self.open.discard(node)
            for other in space.outs[node]:
                there = space.rep[other]
                if there in state or there in self.support:
                    stack.append(there)

    def renew(self) -> None:
        """Judge everything anew, after a lost node has joined or the region has grown upwards."""
        self.stale = False
        for held in (self.support, self.touched, self.open, self.lost):
            held.clear()
        self.pruned = -1


class Growth:
    """Grows regions in one graph for one property.

    Attributes:
        via: For each node that was a candidate, the node it was found from (itself: the start).
        asked: Questions put so far.
    """

    def __init__(self, asker: Asker, space: Contraction, via: array[int]) -> None:
        """Grow over the free nodes of the asker's graph; fills ``via``."""
        self.asker = asker
        self.space = space
        self.via = via
        self.asked = 0

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
                if state[node] == QUEUED:
                    self._expand(selector, node, around, queue, complete)
            if around.stale:
                self._resume(around, queue, complete)
        kept = {node for node, mark in state.items() if mark == GROWN}
        given_up = [node for node, mark in state.items() if mark == WAITING]
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
        cut_off = False
        for other in work.preds[node]:
            if other in state:
                cut_off |= state[other] == WAITING
                continue
            if free[other]:
                self.asked += 1
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
        if cut_off and node != around.start and around.is_lost(node):
            around.lose(node)
            return
        for other in work.succs[node]:
            if other in state or not free[other]:
                continue
            self.asked += 1
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
        around.grown(node)

    def _resume(self, around: Surroundings, queue: deque[int], complete: set[int]) -> None:
        """Judge all candidates anew; queue those that waited and need not any more."""
        around.renew()
        state, order = around.state, self.space.order
        waited = {node for node, mark in state.items() if mark == WAITING}
        for node in sorted(state, key=order.__getitem__):
            state[node] = GROWN if node in complete else QUEUED
        for node in sorted(state, key=order.__getitem__):
            if node != around.start and around.is_lost(node):
                around.lose(node)
        queue.extend(n for n in sorted(waited - complete) if state[n] == QUEUED)
