"""One trial growth of strategy ``hetero`` inside a block: grow, reject, roll back.

The literal rule of the reference: add or reject one neighbour after the other; whenever a rejected
node lies on a path between two nodes of the region, take nodes back, last first, and reject them,
until none does. Here every node outside that leads into the region is known with the first member
that it leads to (``up``) and the first that leads to it (``down``), so that one look tells how far
to go back. All marks are noted by member, and going back undoes them.

Tables: ``grown[:growns]`` is the region in the order of joining, ``place``, ``up`` and ``down`` are
numbers of members plus one. ``seen[:seens]`` is everything that the outcome depends on,
``joined[:joins]`` all that were members at any time, ``edge[:edges]`` what leads into the region
from before its first position, where the search ended.
"""

from __future__ import annotations

from subgraph.partition.search.blocks import next_neighbour
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.tables import Tables

NEVER = 1 << 30


def grow_in_block(s: Tables, start: int, block: int) -> int:
    """Grow from ``start``, consumers first, depth first, among the vertices of ``block``.

    What is seen is added to ``seen``.

    Returns:
        How many nodes of ``grown`` the region has.
    """
    s.trials += 1
    s.trial_epoch += 1
    s.growns = s.joins = s.edges = s.rejections = 0
    s.new_end = s.reached_end = s.pruned_end = 0
    s.first = NEVER
    s.block = block
    add(s, start)
    s.stack[0] = start
    s.cursor[start] = 0
    depth = 1
    while depth:
        node = s.stack[depth - 1]
        if not s.place[node]:  # rolled back: its neighbours are not followed
            depth -= 1
            continue
        link = next_neighbour(s, node)
        if link < 0:
            depth -= 1
            continue
        there = s.rep[link]
        if s.place[there] or s.rejected[there] or not in_block(s, s.vertex[link]):
            continue
        if not s.free[there]:
            reject(s, there)
        elif add(s, there):
            s.stack[depth] = there
            s.cursor[there] = 0
            depth += 1
        else:
            reject(s, there)
    count = s.growns
    _finish(s)
    return count


def in_block(s: Tables, vertex: int) -> bool:
    """Return whether a vertex is in the block of the trial."""
    return s.home[vertex] == s.block + 1 or s.top[s.block] == vertex


def _finish(s: Tables) -> None:
    """Complete what was seen, leave in ``edge`` what was not searched, clear all marks."""
    left = 0
    for k in range(s.edges):
        node = s.edge[k]
        if s.explored_at[node] != s.trial_epoch:
            s.edge[left] = node
            left += 1
            see(s, node)
    s.edges = left
    for k in range(s.joins):
        see(s, s.joined[k])
    for k in range(s.rejections):
        s.rejected[s.rejects[k]] = 0
        see(s, s.rejects[k])
    _undo(s, 0)


def see(s: Tables, node: int) -> None:
    """Note that the outcome depends on ``node``."""
    if s.seen_at[node] != s.seen_epoch:
        s.seen_at[node] = s.seen_epoch
        s.seen[s.seens] = node
        s.seens += 1


def add(s: Tables, node: int) -> bool:
    """Let ``node`` join, unless a rejected node would then lie between two members.

    Returns:
        Whether it joined. If not, nothing has changed.
    """
    rep, place, rejected, up = s.rep, s.place, s.rejected, s.up
    alone = True
    for at in range(s.in_at[node], s.in_end[node]):
        there = rep[s.in_links[at]]
        if not place[there]:
            alone = False
            if rejected[there]:
                for above in range(s.in_at[there], s.in_end[there]):
                    if place[rep[s.in_links[above]]]:
                        return False
    near = False
    for at in range(s.out_at[node], s.out_end[node]):
        there = rep[s.out_links[at]]
        if up[there]:
            if rejected[there]:
                return False
            near = near or not s.down[there]
    number = s.growns
    s.grown[number] = node
    s.growns += 1
    place[node] = number + 1
    s.trail_new[number] = s.new_end
    s.trail_reached[number] = s.reached_end
    s.trail_up[number] = up[node]
    s.trail_down[number] = s.down[node]
    s.trail_first[number] = s.first
    s.trail_pruned[number] = s.pruned_end
    up[node] = s.down[node] = 0
    s.spreads = 0
    if near:
        _will_spread(s, node, number + 1)
    broken = False
    if not (alone and s.order[node] >= s.first):
        broken = _find(s, node, number + 1)
    if broken or (s.spreads and _spread_down(s)):
        go_back(s, number)
        return False
    if s.joined_at[node] != s.trial_epoch:
        s.joined_at[node] = s.trial_epoch
        s.joined[s.joins] = node
        s.joins += 1
    for k in range(s.trail_new[number], s.new_end):
        s.explored_at[s.news[k]] = s.trial_epoch
        see(s, s.news[k])
    for k in range(s.trail_pruned[number], s.pruned_end):
        there = s.pruned[k]
        if s.edge_at[there] != s.trial_epoch:
            s.edge_at[there] = s.trial_epoch
            s.edge[s.edges] = there
            s.edges += 1
    return True


def _will_spread(s: Tables, node: int, mark: int) -> None:
    s.spread[s.spreads] = node
    s.spread_mark[s.spreads] = mark
    s.spreads += 1


def _find(s: Tables, node: int, mark: int) -> bool:
    """Find what leads to ``node``, which has joined, from behind the first member.

    Returns:
        Whether a rejected node lies between; then the rest is not complete.
    """
    order, rep, place, rejected = s.order, s.rep, s.place, s.rejected
    stack, up = s.work, s.up
    begin = s.new_end
    size = 0  # a node above a rejected one is kept on the stack as its complement
    if order[node] < s.first:
        s.first = order[node]
        for k in range(s.pruned_end):
            there = s.pruned[k]
            if order[there] > s.first and not up[there] and not place[there]:
                up[there] = mark
                s.news[s.new_end] = there
                s.new_end += 1
                stack[size] = there
                size += 1
    first = s.first
    closed = size > 0  # whether some member leads to what is found
    stack[size] = node
    size += 1
    while size:
        size -= 1
        here = stack[size]
        above = here < 0
        if above:
            here = ~here
        elif rejected[here]:
            above = True
        s.searched += s.in_end[here] - s.in_at[here]
        for at in range(s.in_at[here], s.in_end[here]):
            link = s.in_links[at]
            if not in_block(s, s.vertex[link]):
                continue
            there = rep[link]
            if place[there] or s.down[there]:
                if above:
                    return True
                closed = True
            elif up[there]:
                continue
            elif order[there] < first:
                if not s.is_pruned[there]:
                    s.is_pruned[there] = 1
                    s.pruned[s.pruned_end] = there
                    s.pruned_end += 1
            else:
                up[there] = mark
                s.news[s.new_end] = there
                s.new_end += 1
                stack[size] = ~there if above else there
                size += 1
    if closed and s.new_end > begin:
        sort_by(order, s.news, begin, s.new_end)
        return _connect(s, begin)
    return False


def _connect(s: Tables, begin: int) -> bool:
    """Mark what is new, in order, if members lead to it; True at the first rejected one."""
    for k in range(begin, s.new_end):
        there = s.news[k]
        earliest = NEVER
        for at in range(s.in_at[there], s.in_end[there]):
            source = s.rep[s.in_links[at]]
            mark = s.place[source] or s.down[source]
            if mark and mark < earliest:
                earliest = mark
        if earliest != NEVER:
            if s.rejected[there]:
                return True
            s.down[there] = earliest
            _will_spread(s, there, earliest)
    return False


def _spread_down(s: Tables) -> bool:
    """Pass marks on to what lies between members now; True at the first rejected node."""
    k = 0
    while k < s.spreads:
        source = s.spread[k]
        for at in range(s.out_at[source], s.out_end[source]):
            there = s.rep[s.out_links[at]]
            if s.up[there] and not s.down[there]:
                if s.rejected[there]:
                    return True
                s.down[there] = s.spread_mark[k]
                s.reached[s.reached_end] = there
                s.reached_end += 1
                _will_spread(s, there, s.spread_mark[k])
        k += 1
    return False


def reject(s: Tables, node: int) -> None:
    """Reject a neighbour; members go back until it lies between no two of them."""
    work = s.work
    work[0] = node
    count = 1
    while count:
        count -= 1
        node = work[count]
        _mark_rejected(s, node)
        if s.down[node]:
            number = max(s.down[node], s.up[node]) - 1
            last = s.growns
            go_back(s, number)
            for k in range(number, last):
                work[count] = s.grown[k]
                count += 1


def _mark_rejected(s: Tables, node: int) -> None:
    if not s.rejected[node]:
        s.rejected[node] = 1
        s.rejects[s.rejections] = node
        s.rejections += 1


def go_back(s: Tables, number: int) -> None:
    """Take back all members from ``number`` on, and reject them."""
    for k in range(number, s.growns):
        _mark_rejected(s, s.grown[k])
    _undo(s, number)


def _undo(s: Tables, number: int) -> None:
    while s.growns > number:
        s.growns -= 1
        last = s.growns
        node = s.grown[last]
        while s.reached_end > s.trail_reached[last]:
            s.reached_end -= 1
            s.down[s.reached[s.reached_end]] = 0
        while s.new_end > s.trail_new[last]:
            s.new_end -= 1
            there = s.news[s.new_end]
            s.up[there] = s.down[there] = 0
        while s.pruned_end > s.trail_pruned[last]:
            s.pruned_end -= 1
            s.is_pruned[s.pruned[s.pruned_end]] = 0
        s.up[node] = s.trail_up[last]
        s.down[node] = s.trail_down[last]
        s.first = s.trail_first[last]
        s.place[node] = 0
