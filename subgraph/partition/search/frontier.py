"""The nodes around a growing region over which paths lead back into it; see `growth`.

A node *here* is outside the region and leads into a candidate. It is *open* while it may still join
from above: it is free, and one of its producers is a candidate whose turn is yet to come, or open.
When it is not, and a candidate leads to it (it is *touched*), the later of the two candidates,
above and below, has to give way. If that is the one below, the node is *lost*, and what is below a
lost node waits. If it is the one above, that is barred. Every change is passed on, so the cost is
linear in what lies around the region between its first position and its candidates.

Of two candidates, the later is the one whose first relative in the region was found later.

Tables: ``state`` is of each candidate QUEUED, GROWN or WAITING, else 0; ``candidates`` are all that
ever were, in the order of discovery, which is their rank. ``rank_above`` is of each the rank of the
first one above it in the region, ``rank_below`` of the first below. ``around`` has the flags of a
node, ``support`` the number of producers from which it may join, ``leads_to`` the rank of the first
candidate that it leads to.

What follows from a change is done step by step, without recursion: on a stack of frames, each tells
of nodes that were found, or settles nodes whose support has changed, the last first.
"""

from __future__ import annotations

from subgraph.partition.search.sorting import heap_push, heap_remove, sort_by
from subgraph.partition.search.tables import Tables

QUEUED, GROWN, WAITING = 1, 2, 3
HERE, TOUCHED, OPEN, LOST = 1, 2, 4, 8


def surround(s: Tables, start: int) -> None:
    """Surround the region that starts at ``start``."""
    s.start = start
    s.candidates[0] = start
    s.ranks = 1
    s.state[start] = QUEUED
    s.rank_above[start] = s.rank_below[start] = 0
    s.first = s.order[start]
    s.stale = 0


def leave(s: Tables) -> None:
    """Forget the region and what is around it."""
    renew(s)
    for k in range(s.ranks):
        node = s.candidates[k]
        s.state[node] = s.barred[node] = s.complete[node] = s.waited[node] = 0


def renew(s: Tables) -> None:
    """Forget what was judged, after a lost node has joined."""
    s.stale = 0
    for k in range(s.circled):
        s.around[s.circle[k]] = 0
    s.circled = 0
    for k in range(s.farthest):
        s.far_place[s.far[k]] = 0
    s.farthest = 0


def _stays(s: Tables, node: int) -> bool:
    """Return whether ``node`` is a candidate that does not wait."""
    return s.state[node] == QUEUED or s.state[node] == GROWN


def is_lost(s: Tables, node: int) -> bool:
    """Return whether candidate ``node``, whose producers have been asked about, must wait."""
    roots = 0
    for at in range(s.in_at[node], s.in_end[node]):
        source = s.in_links[at]
        if s.state[source] == WAITING:
            return True
        if not s.state[source]:
            s.stack[roots] = s.slots[roots] = s.rep[source]
            roots += 1
    _explore(s, roots, s.rank_below[node])
    _follow(s)
    lost = 0
    for k in range(roots):
        lost |= s.around[s.slots[k]] & LOST
    return lost != 0


def _explore(s: Tables, roots: int, rank: int) -> None:
    """Find what leads to the roots on the stack, which lead to the candidate of ``rank``.

    It is judged; the others are told of it by a frame.
    """
    begin = s.tells_end
    size = 0
    for k in range(roots):
        size = _meet(s, s.stack[k], rank, size)
    while size:
        size -= 1
        node = s.work[size]
        s.tells[s.tells_end] = node
        s.tells_end += 1
        s.searched += s.in_end[node] - s.in_at[node]
        for at in range(s.in_at[node], s.in_end[node]):
            size = _meet(s, s.rep[s.in_links[at]], rank, size)
    if s.tells_end == begin:
        return
    sort_by(s.order, s.tells, begin, s.tells_end)
    s.tellings += 1
    for k in range(begin, s.tells_end):
        _judge(s, s.tells[k])
        s.telling[s.tells[k]] = s.tellings
    frame = s.frames
    s.frames += 1
    s.frame_head[frame] = -1
    s.frame_begin[frame] = s.frame_at[frame] = begin
    s.frame_end[frame] = s.tells_end
    s.frame_node[frame] = s.tellings


def _meet(s: Tables, there: int, rank: int, size: int) -> int:
    if s.around[there] or s.state[there]:
        return size
    if s.order[there] > s.first:
        s.around[there] = HERE
        s.circle[s.circled] = there
        s.circled += 1
        s.support[there] = 0
        s.leads_to[there] = rank
        s.work[size] = there
        return size + 1
    if not s.far_place[there] or rank < s.leads_to[there]:
        s.leads_to[there] = rank
    s.far_key[there] = -s.order[there]
    s.farthest = heap_push(s.far, s.far_place, s.far_key, s.farthest, there)
    return size


def _joinable(s: Tables, node: int) -> bool:
    return s.free[node] != 0 and not s.barred[node]


def _judge(s: Tables, node: int) -> None:
    count = 0
    lost = touched = False
    for at in range(s.in_at[node], s.in_end[node]):
        there = s.rep[s.in_links[at]]
        mark = s.state[there]
        if mark:
            touched = True
            count += mark == QUEUED
            lost = lost or mark == WAITING
        elif s.around[there] & OPEN:
            count += 1
        elif s.around[there] & LOST:
            lost = True
    flags = HERE
    if touched:
        flags |= TOUCHED
    s.support[node] = count
    joins = count > 0 and _joinable(s, node)
    if lost or (touched and not joins and _above(s, node) < s.leads_to[node]):
        flags |= LOST
    elif joins:
        flags |= OPEN
    s.around[node] = flags


def _above(s: Tables, node: int) -> int:
    """Return the rank of the first candidate that leads to a node outside."""
    first = s.ranks
    for at in range(s.in_at[node], s.in_end[node]):
        source = s.in_links[at]
        if _stays(s, source):
            first = min(first, s.rank_above[source])
    return first


def added(s: Tables, node: int) -> None:
    """Take note of a new candidate."""
    s.state[node] = QUEUED
    rank = s.ranks
    for at in range(s.in_at[node], s.in_end[node]):
        if _stays(s, s.in_links[at]):
            rank = min(rank, s.rank_above[s.in_links[at]])
    s.rank_above[node] = rank
    _pass_above(s, node, rank)
    rank = s.ranks
    for at in range(s.out_at[node], s.out_end[node]):
        if _stays(s, s.out_links[at]):
            rank = min(rank, s.rank_below[s.out_links[at]])
    s.rank_below[node] = rank
    _pass_below(s, node, rank)
    s.candidates[s.ranks] = node
    s.ranks += 1
    was_open = s.around[node] & OPEN
    if s.around[node] & LOST:
        s.stale = 1
    s.around[node] = 0
    position = s.order[node]
    if position < s.first:
        s.first = position
        while s.farthest and s.order[s.far[0]] > position:
            there = s.far[0]
            s.farthest = heap_remove(s.far, s.far_place, s.far_key, s.farthest, there)
            s.stack[0] = there
            _explore(s, 1, s.leads_to[there])
            _follow(s)
    frame = _settle(s)
    for at in range(s.out_at[node], s.out_end[node]):
        there = s.rep[s.out_links[at]]
        if s.around[there]:
            s.around[there] |= TOUCHED
            if not was_open:
                s.support[there] += 1
            _put(s, frame, there)
    _follow(s)


def _pass_above(s: Tables, node: int, rank: int) -> None:
    s.work[0] = node
    size = 1
    while size:
        size -= 1
        here = s.work[size]
        for at in range(s.out_at[here], s.out_end[here]):
            other = s.out_links[at]
            if _stays(s, other) and s.rank_above[other] > rank:
                s.rank_above[other] = rank
                s.work[size] = other
                size += 1


def _pass_below(s: Tables, node: int, rank: int) -> None:
    s.work[0] = node
    size = 1
    while size:
        size -= 1
        here = s.work[size]
        for at in range(s.in_at[here], s.in_end[here]):
            other = s.in_links[at]
            if _stays(s, other) and s.rank_below[other] > rank:
                s.rank_below[other] = rank
                s.work[size] = other
                size += 1


def grown(s: Tables, node: int) -> None:
    """Take note that all neighbours of a candidate have been asked about."""
    s.state[node] = GROWN
    _support_below(s, node, -1, _settle(s))
    _follow(s)


def _support_below(s: Tables, node: int, change: int, frame: int) -> None:
    """Change the support of what is below ``node``, and let it be settled."""
    for at in range(s.out_at[node], s.out_end[node]):
        there = s.rep[s.out_links[at]]
        if s.around[there]:
            s.support[there] += change
            _put(s, frame, there)


def _settle(s: Tables) -> int:
    """Begin a frame that settles nodes; return its number."""
    frame = s.frames
    s.frames += 1
    s.frame_head[frame] = 0
    s.frame_node[frame] = s.frame_barred[frame] = -1
    return frame


def _put(s: Tables, frame: int, node: int) -> None:
    """Let ``node`` be the next that a frame settles; it is in one frame once."""
    if s.work_frame[node]:
        _take_out(s, node)
    following = s.frame_head[frame]
    s.work_next[node] = following
    if following:
        s.work_last[following - 1] = node + 1
    s.work_last[node] = 0
    s.frame_head[frame] = node + 1
    s.work_frame[node] = frame + 1


def _take_out(s: Tables, node: int) -> None:
    last, following = s.work_last[node], s.work_next[node]
    if last:
        s.work_next[last - 1] = following
    else:
        s.frame_head[s.work_frame[node] - 1] = following
    if following:
        s.work_last[following - 1] = last
    s.work_frame[node] = 0


def _follow(s: Tables) -> None:
    """Do what all frames say, the last first."""
    while s.frames:
        frame = s.frames - 1
        if s.frame_head[frame] < 0:
            _tell_next(s, frame)
        elif s.frame_node[frame] >= 0:
            _bar_next(s, frame)
        elif s.frame_head[frame]:
            node = s.frame_head[frame] - 1
            _take_out(s, node)
            _settle_one(s, frame, node)
        else:
            s.frames -= 1


def _tell_next(s: Tables, frame: int) -> None:
    """Pass on what was found about a new node to those that were here before."""
    at = s.frame_at[frame]
    if at == s.frame_end[frame]:
        s.tells_end = s.frame_begin[frame]
        s.frames -= 1
        return
    s.frame_at[frame] = at + 1
    node = s.tells[at]
    flags = s.around[node]
    telling = s.frame_node[frame]
    if flags & LOST:
        for at in range(s.out_at[node], s.out_end[node]):
            there = s.rep[s.out_links[at]]
            if s.around[there] and s.telling[there] != telling:
                lose(s, there)
    elif flags & OPEN:
        inner = _settle(s)
        for at in range(s.out_at[node], s.out_end[node]):
            there = s.rep[s.out_links[at]]
            if s.around[there] and s.telling[there] != telling:
                s.support[there] += 1
                _put(s, inner, there)
    elif flags & TOUCHED:
        _put(s, _settle(s), node)


def _settle_one(s: Tables, frame: int, node: int) -> None:
    flags = s.around[node]
    if flags & LOST or not flags:
        return
    now = _joinable(s, node) and s.support[node] > 0
    if now and not flags & OPEN:
        s.around[node] |= OPEN
        _support_below(s, node, 1, frame)
    elif not now and flags & OPEN:
        s.around[node] -= OPEN
        _support_below(s, node, -1, frame)
    if not now and flags & TOUCHED:
        if _above(s, node) < s.leads_to[node]:
            lose(s, node)
        else:
            s.around[node] -= TOUCHED
            s.frame_node[frame] = node
            s.frame_at[frame] = s.in_at[node]


def _bar_next(s: Tables, frame: int) -> None:
    """Give up the next candidate that leads, over the frame's node, to an earlier one."""
    last = s.frame_barred[frame]
    if last >= 0:
        s.frame_barred[frame] = -1
        if s.around[last]:
            _put(s, frame, last)
    node = s.frame_node[frame]
    for at in range(s.frame_at[frame], s.in_end[node]):
        source = s.in_links[at]
        if _stays(s, source):
            queued = s.state[source] == QUEUED
            s.state[source] = 0
            s.barred[source] = 1
            _support_below(s, source, -1 if queued else 0, frame)
            s.frame_at[frame] = at + 1
            s.frame_barred[frame] = source
            s.stack[0] = source
            _explore(s, 1, s.leads_to[node])
            return
    s.frame_node[frame] = -1


def lose(s: Tables, node: int) -> None:
    """Let ``node``, a candidate or one outside, be lost, and with it what lies below."""
    s.losing[0] = node
    size = 1
    while size:
        size -= 1
        node = s.losing[size]
        if s.state[node]:
            if s.state[node] == WAITING or node == s.start:
                continue
            s.state[node] = WAITING
        else:
            if s.around[node] & LOST:
                continue
            s.around[node] = (s.around[node] | LOST) & ~OPEN
        for at in range(s.out_at[node], s.out_end[node]):
            there = s.rep[s.out_links[at]]
            if s.state[there] or s.around[there]:
                s.losing[size] = there
                size += 1
