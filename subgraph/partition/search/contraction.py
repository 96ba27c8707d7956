"""The contracted graph: every chosen region one node, kept in a topological order.

All questions of reachability are answered here, so that regions chosen one after another never
form a cycle together. The order is maintained as Pearce and Kelly do it ("A dynamic topological
sort algorithm for directed acyclic graphs", 2006): a merge searches only between the positions of
the region's first and last node, and moves only what it finds there.

Tables: ``rep`` is for each node the one that stands for its region, itself outside of regions;
``order`` its position; ``in_links[in_at:in_end]`` its producers and ``out_links`` its consumers, of
a ``rep`` those of the region. Look neighbours up in ``rep``. The set in question is
``members[:size]``; ``searched`` counts the links that searches have followed.
"""

from __future__ import annotations

from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.tables import Tables


def prepare(s: Tables, count: int) -> None:
    """Start without regions; the links are in their tables."""
    for node in range(count):
        s.rep[node] = node
        s.order[node] = node
    s.in_used = s.in_end[count - 1] if count else 0
    s.out_used = s.out_end[count - 1] if count else 0


def find_cones(s: Tables) -> bool:
    """Find what lies after and before the members, between their first and last position.

    Returns:
        Whether these sets, ``late`` and ``early``, have a node in common: the members, which are
        free, are then not convex.
    """
    s.epoch += 1
    s.lates = 0
    s.earlies = 0
    first = last = s.order[s.members[0]]
    for k in range(s.size):
        member = s.members[k]
        s.inside[member] = s.epoch
        position = s.order[member]
        first = min(first, position)
        last = max(last, position)
    if last - first < s.size:  # nothing lies between
        return False
    rep = s.rep
    for k in range(s.size):
        member = s.members[k]
        for at in range(s.out_at[member], s.out_end[member]):
            _reach_late(s, rep[s.out_links[at]], last)
        s.searched += s.out_end[member] - s.out_at[member]
    k = 0
    while k < s.lates:
        node = s.late[k]
        k += 1
        for at in range(s.out_at[node], s.out_end[node]):
            _reach_late(s, rep[s.out_links[at]], last)
        s.searched += s.out_end[node] - s.out_at[node]
    common = False
    for k in range(s.size):
        member = s.members[k]
        for at in range(s.in_at[member], s.in_end[member]):
            common = _reach_early(s, rep[s.in_links[at]], first) or common
        s.searched += s.in_end[member] - s.in_at[member]
    k = 0
    while k < s.earlies:
        node = s.early[k]
        k += 1
        for at in range(s.in_at[node], s.in_end[node]):
            common = _reach_early(s, rep[s.in_links[at]], first) or common
        s.searched += s.in_end[node] - s.in_at[node]
    return common


def _reach_late(s: Tables, node: int, last: int) -> None:
    if s.order[node] < last and s.late_at[node] != s.epoch and s.inside[node] != s.epoch:
        s.late_at[node] = s.epoch
        s.late[s.lates] = node
        s.lates += 1


def _reach_early(s: Tables, node: int, first: int) -> bool:
    if s.order[node] > first and s.early_at[node] != s.epoch and s.inside[node] != s.epoch:
        s.early_at[node] = s.epoch
        s.early[s.earlies] = node
        s.earlies += 1
        return s.late_at[node] == s.epoch
    return False


def choose(s: Tables) -> None:
    """Make a region of the members, sorted, which are free and convex; after `find_cones`.

    The first member is the region's representative. ``moved[:moves]`` are the other nodes whose
    position has changed.
    """
    s.moves = 0
    for k in range(s.size):
        s.free[s.members[k]] = 0
    if s.size == 1:
        return
    if s.earlies or s.lates:
        _reorder(s)
    _contract(s)


def _reorder(s: Tables) -> None:
    """Move what is before the members to the first of all their positions, the rest behind."""
    order, sweep, slots = s.order, s.sweep, s.slots
    sort_by(order, s.early, 0, s.earlies)
    sort_by(order, s.late, 0, s.lates)
    count = 0
    for k in range(s.earlies):
        sweep[count] = s.early[k]
        count += 1
    for k in range(s.size):
        sweep[count] = s.members[k]
        count += 1
    for k in range(s.lates):
        sweep[count] = s.late[k]
        count += 1
    sort_by(order, sweep, 0, count)
    for k in range(count):
        slots[k] = order[sweep[k]]
    for k in range(s.earlies):
        _move(s, s.early[k], slots[k])
    for k in range(s.lates):
        _move(s, s.late[k], slots[count - s.lates + k])
    order[s.members[0]] = slots[s.earlies]


def _move(s: Tables, node: int, slot: int) -> None:
    if s.order[node] != slot:
        s.order[node] = slot
        s.moved[s.moves] = node
        s.moves += 1


def _contract(s: Tables) -> None:
    first = s.members[0]
    in_begin, out_begin = s.in_used, s.out_used
    s.epoch += 1
    for k in range(s.size):
        s.rep[s.members[k]] = first
    for k in range(s.size):
        member = s.members[k]
        for at in range(s.in_at[member], s.in_end[member]):
            other = s.in_links[at]
            if s.rep[other] != first and s.note[other] != s.epoch:
                s.note[other] = s.epoch
                s.in_links[s.in_used] = other
                s.in_used += 1
    s.epoch += 1
    for k in range(s.size):
        member = s.members[k]
        for at in range(s.out_at[member], s.out_end[member]):
            other = s.out_links[at]
            if s.rep[other] != first and s.note[other] != s.epoch:
                s.note[other] = s.epoch
                s.out_links[s.out_used] = other
                s.out_used += 1
    s.in_at[first], s.in_end[first] = in_begin, s.in_used
    s.out_at[first], s.out_end[first] = out_begin, s.out_used


def shrink(s: Tables, keep: int, common: bool) -> None:
    """Make the members a convex, connected part of them that holds ``keep``; after `find_cones`.

    First the members from which a path leaves and comes back to ``keep`` go; then, in order, those
    that a path reaches which has left what is kept. What is no longer connected to ``keep`` goes
    last. What went is in ``moved[:moves]``. Linear.

    Args:
        s: The tables.
        keep: A member.
        common: What `find_cones` returned.
    """
    if common:
        _drop_detours(s, keep)
    else:
        mark_inside(s)
    keep_component(s, keep)


def mark_inside(s: Tables) -> None:
    """Mark the members as those inside."""
    s.epoch += 1
    for k in range(s.size):
        s.inside[s.members[k]] = s.epoch


def _drop_detours(s: Tables, keep: int) -> None:
    """Leave only those members inside that no path over a node outside connects."""
    rep, sweep, note = s.rep, s.sweep, s.note
    marked = s.epoch
    count = 0
    for k in range(s.size):
        sweep[count] = s.members[k]
        count += 1
    for k in range(s.earlies):
        if s.late_at[s.early[k]] == marked:
            sweep[count] = s.early[k]
            count += 1
    sort_by(s.order, sweep, 0, count)
    leads = s.epoch + 1  # to keep, inside all the way
    strays = s.epoch + 2  # to keep, over a node outside
    s.epoch += 2
    for k in range(count - 1, -1, -1):
        node = sweep[k]
        for at in range(s.out_at[node], s.out_end[node]):
            there = rep[s.out_links[at]]
            if note[there] == strays:
                note[node] = strays
                break
            if there == keep or note[there] == leads:
                if s.inside[node] != marked:
                    note[node] = strays
                    break
                note[node] = leads
    kept = s.epoch + 1
    reached = s.epoch + 2  # from what is kept, over a node outside
    s.epoch += 2
    for k in range(count):
        node = sweep[k]
        taken = s.inside[node] == marked and note[node] != strays
        lost = False
        for at in range(s.in_at[node], s.in_end[node]):
            there = rep[s.in_links[at]]
            if note[there] == reached or (not taken and note[there] == kept):
                lost = True
                break
        if lost:
            note[node] = reached
        elif taken:
            note[node] = kept
            s.inside[node] = kept
    s.epoch = kept + 2
    for k in range(s.size):
        member = s.members[k]
        if s.inside[member] == kept:
            s.inside[member] = s.epoch


def keep_component(s: Tables, start: int) -> None:
    """Make the members those, among the inside ones, that links between these join to ``start``.

    Those left out are in ``moved[:moves]``.
    """
    inside, epoch = s.inside, s.epoch
    s.epoch += 1
    s.sweep[0] = start
    inside[start] = s.epoch
    count = 1
    k = 0
    while k < count:
        node = s.sweep[k]
        k += 1
        for at in range(s.in_at[node], s.in_end[node]):
            there = s.in_links[at]
            if inside[there] == epoch:
                inside[there] = s.epoch
                s.sweep[count] = there
                count += 1
        for at in range(s.out_at[node], s.out_end[node]):
            there = s.out_links[at]
            if inside[there] == epoch:
                inside[there] = s.epoch
                s.sweep[count] = there
                count += 1
    s.moves = 0
    size = 0
    for k in range(s.size):
        member = s.members[k]
        if inside[member] == s.epoch:
            s.members[size] = member
            size += 1
        else:
            s.moved[s.moves] = member
            s.moves += 1
    s.size = size
