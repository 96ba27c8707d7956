"""The nodes around a growing region over which paths lead back into it; see `region_growth`.

A node is HERE if it is outside the region and leads into a candidate. It is OPEN while it may still
join from above: it is free, and one of its producers is a queued candidate or OPEN. A node is
TOUCHED if a candidate leads to it. A node that is TOUCHED but not OPEN lies on a path between two
candidates that it cannot join, so the later one must leave. If that is the lower one, the node is
LOST, and candidates below a LOST node wait. If it is the upper one, it is barred. Every change is
passed on, so the cost is linear in the nodes and links around the region.

Of two candidates, the later is the one whose first relative in the region was found later.

The consequences of a change are processed without recursion, on a stack of frames. A frame passes
on newly found nodes, or judges nodes again whose support has changed.
"""

from __future__ import annotations

from subgraph.partition.search.sorting import heap_push, heap_remove, sort_by
from subgraph.partition.search.structures import ContractedGraph, Frontier, RegionGrowth

QUEUED, GROWN, WAITING = 1, 2, 3
HERE, TOUCHED, OPEN, LOST = 1, 2, 4, 8


def surround(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, start: int) -> None:
    """Begin with the region of ``start`` alone.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes around the region.
        start: The start node.
    """
    growth.start = start
    growth.candidates[0] = start
    growth.candidate_count = 1
    growth.state[start] = QUEUED
    growth.rank_above[start] = growth.rank_below[start] = 0
    frontier.first = graph.order[start]
    growth.stale = 0


def leave(growth: RegionGrowth, frontier: Frontier) -> None:
    """Clear the region and the nodes around it."""
    renew(growth, frontier)
    for k in range(growth.candidate_count):
        node = growth.candidates[k]
        growth.state[node] = growth.barred[node] = growth.complete[node] = growth.waited[node] = 0


def renew(growth: RegionGrowth, frontier: Frontier) -> None:
    """Clear the nodes around the region, to judge them again after a lost node has joined."""
    growth.stale = 0
    for k in range(frontier.node_count):
        frontier.flags[frontier.nodes[k]] = 0
    frontier.node_count = 0
    for k in range(frontier.far.count):
        frontier.far.place[frontier.far.items[k]] = 0
    frontier.far.count = 0


def _stays(growth: RegionGrowth, node: int) -> bool:
    """Return whether ``node`` is a candidate that does not wait."""
    return growth.state[node] == QUEUED or growth.state[node] == GROWN


def is_lost(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int) -> bool:
    """Return whether a candidate must wait since a lost node leads to it.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes around the region.
        node: A candidate whose producers have all been asked about.
    """
    roots = 0
    for at in range(graph.in_at[node], graph.in_end[node]):
        source = graph.in_links[at]
        if growth.state[source] == WAITING:
            return True
        if not growth.state[source]:
            frontier.stack[roots] = frontier.roots[roots] = graph.representative[source]
            roots += 1
    _explore(graph, growth, frontier, roots, growth.rank_below[node])
    _follow(graph, growth, frontier)
    lost = 0
    for k in range(roots):
        lost |= frontier.flags[frontier.roots[k]] & LOST
    return lost != 0


def _explore(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, roots: int, rank: int
) -> None:
    """Find the nodes that lead to the roots on the stack, which lead to the candidate of ``rank``.

    The nodes found are judged; a frame passes them on to the others.
    """
    begin = frontier.announced_end
    size = 0
    for k in range(roots):
        size = _meet(graph, growth, frontier, frontier.stack[k], rank, size)
    while size:
        size -= 1
        node = frontier.work[size]
        frontier.announced[frontier.announced_end] = node
        frontier.announced_end += 1
        graph.links_followed += graph.in_end[node] - graph.in_at[node]
        for at in range(graph.in_at[node], graph.in_end[node]):
            size = _meet(
                graph, growth, frontier, graph.representative[graph.in_links[at]], rank, size
            )
    if frontier.announced_end == begin:
        return
    sort_by(graph.order, frontier.announced, begin, frontier.announced_end)
    frontier.announcements += 1
    for k in range(begin, frontier.announced_end):
        _judge(graph, growth, frontier, frontier.announced[k])
        frontier.announcement[frontier.announced[k]] = frontier.announcements
    frame = frontier.frame_count
    frontier.frame_count += 1
    frontier.frame_head[frame] = -1
    frontier.frame_begin[frame] = frontier.frame_at[frame] = begin
    frontier.frame_end[frame] = frontier.announced_end
    frontier.frame_node[frame] = frontier.announcements


def _meet(
    graph: ContractedGraph,
    growth: RegionGrowth,
    frontier: Frontier,
    there: int,
    rank: int,
    size: int,
) -> int:
    if frontier.flags[there] or growth.state[there]:
        return size
    if graph.order[there] > frontier.first:
        frontier.flags[there] = HERE
        frontier.nodes[frontier.node_count] = there
        frontier.node_count += 1
        frontier.support[there] = 0
        frontier.leads_to[there] = rank
        frontier.work[size] = there
        return size + 1
    if not frontier.far.place[there] or rank < frontier.leads_to[there]:
        frontier.leads_to[there] = rank
    frontier.far.keys[there] = -graph.order[there]
    heap_push(frontier.far, there)
    return size


def _joinable(graph: ContractedGraph, growth: RegionGrowth, node: int) -> bool:
    return graph.free[node] != 0 and not growth.barred[node]


def _judge(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int) -> None:
    count = 0
    lost = touched = False
    for at in range(graph.in_at[node], graph.in_end[node]):
        there = graph.representative[graph.in_links[at]]
        mark = growth.state[there]
        if mark:
            touched = True
            count += mark == QUEUED
            lost = lost or mark == WAITING
        elif frontier.flags[there] & OPEN:
            count += 1
        elif frontier.flags[there] & LOST:
            lost = True
    flags = HERE
    if touched:
        flags |= TOUCHED
    frontier.support[node] = count
    joins = count > 0 and _joinable(graph, growth, node)
    if lost or (touched and not joins and _above(graph, growth, node) < frontier.leads_to[node]):
        flags |= LOST
    elif joins:
        flags |= OPEN
    frontier.flags[node] = flags


def _above(graph: ContractedGraph, growth: RegionGrowth, node: int) -> int:
    """Return the rank of the first candidate that leads to a node outside."""
    first = growth.candidate_count
    for at in range(graph.in_at[node], graph.in_end[node]):
        source = graph.in_links[at]
        if _stays(growth, source):
            first = min(first, growth.rank_above[source])
    return first


def add_candidate(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> None:
    """Add a new candidate and judge the nodes around it again.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes around the region.
        node: A node that the selector has accepted.
    """
    growth.state[node] = QUEUED
    rank = growth.candidate_count
    for at in range(graph.in_at[node], graph.in_end[node]):
        if _stays(growth, graph.in_links[at]):
            rank = min(rank, growth.rank_above[graph.in_links[at]])
    growth.rank_above[node] = rank
    _pass_above(graph, growth, frontier, node, rank)
    rank = growth.candidate_count
    for at in range(graph.out_at[node], graph.out_end[node]):
        if _stays(growth, graph.out_links[at]):
            rank = min(rank, growth.rank_below[graph.out_links[at]])
    growth.rank_below[node] = rank
    _pass_below(graph, growth, frontier, node, rank)
    growth.candidates[growth.candidate_count] = node
    growth.candidate_count += 1
    was_open = frontier.flags[node] & OPEN
    if frontier.flags[node] & LOST:
        growth.stale = 1
    frontier.flags[node] = 0
    position = graph.order[node]
    if position < frontier.first:
        frontier.first = position
        while frontier.far.count and graph.order[frontier.far.items[0]] > position:
            there = frontier.far.items[0]
            heap_remove(frontier.far, there)
            frontier.stack[0] = there
            _explore(graph, growth, frontier, 1, frontier.leads_to[there])
            _follow(graph, growth, frontier)
    frame = _begin_frame(frontier)
    for at in range(graph.out_at[node], graph.out_end[node]):
        there = graph.representative[graph.out_links[at]]
        if frontier.flags[there]:
            frontier.flags[there] |= TOUCHED
            if not was_open:
                frontier.support[there] += 1
            _put(frontier, frame, there)
    _follow(graph, growth, frontier)


def _pass_above(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int, rank: int
) -> None:
    frontier.work[0] = node
    size = 1
    while size:
        size -= 1
        here = frontier.work[size]
        for at in range(graph.out_at[here], graph.out_end[here]):
            other = graph.out_links[at]
            if _stays(growth, other) and growth.rank_above[other] > rank:
                growth.rank_above[other] = rank
                frontier.work[size] = other
                size += 1


def _pass_below(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int, rank: int
) -> None:
    frontier.work[0] = node
    size = 1
    while size:
        size -= 1
        here = frontier.work[size]
        for at in range(graph.in_at[here], graph.in_end[here]):
            other = graph.in_links[at]
            if _stays(growth, other) and growth.rank_below[other] > rank:
                growth.rank_below[other] = rank
                frontier.work[size] = other
                size += 1


def finish_candidate(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> None:
    """Mark a candidate as grown; it no longer supports the nodes below it.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes around the region.
        node: A candidate whose neighbours have all been asked about.
    """
    growth.state[node] = GROWN
    _support_below(graph, frontier, node, -1, _begin_frame(frontier))
    _follow(graph, growth, frontier)


def _support_below(
    graph: ContractedGraph, frontier: Frontier, node: int, change: int, frame: int
) -> None:
    """Change the support of the nodes below ``node`` by ``change``, and judge them again."""
    for at in range(graph.out_at[node], graph.out_end[node]):
        there = graph.representative[graph.out_links[at]]
        if frontier.flags[there]:
            frontier.support[there] += change
            _put(frontier, frame, there)


def _begin_frame(frontier: Frontier) -> int:
    """Begin a frame that judges nodes again; return its number."""
    frame = frontier.frame_count
    frontier.frame_count += 1
    frontier.frame_head[frame] = 0
    frontier.frame_node[frame] = frontier.frame_barred[frame] = -1
    return frame


def _put(frontier: Frontier, frame: int, node: int) -> None:
    """Make ``node`` the next that a frame judges; a node is in at most one frame."""
    if frontier.work_frame[node]:
        _take_out(frontier, node)
    following = frontier.frame_head[frame]
    frontier.work_next[node] = following
    if following:
        frontier.work_last[following - 1] = node + 1
    frontier.work_last[node] = 0
    frontier.frame_head[frame] = node + 1
    frontier.work_frame[node] = frame + 1


def _take_out(frontier: Frontier, node: int) -> None:
    last, following = frontier.work_last[node], frontier.work_next[node]
    if last:
        frontier.work_next[last - 1] = following
    else:
        frontier.frame_head[frontier.work_frame[node] - 1] = following
    if following:
        frontier.work_last[following - 1] = last
    frontier.work_frame[node] = 0


def _follow(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier) -> None:
    """Process all frames, the last first, until none is left."""
    while frontier.frame_count:
        frame = frontier.frame_count - 1
        if frontier.frame_head[frame] < 0:
            _announce_next(graph, growth, frontier, frame)
        elif frontier.frame_node[frame] >= 0:
            _bar_next(graph, growth, frontier, frame)
        elif frontier.frame_head[frame]:
            node = frontier.frame_head[frame] - 1
            _take_out(frontier, node)
            _rejudge(graph, growth, frontier, frame, node)
        else:
            frontier.frame_count -= 1


def _announce_next(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, frame: int
) -> None:
    """Pass the state of a new node on to consumers that were found before it."""
    at = frontier.frame_at[frame]
    if at == frontier.frame_end[frame]:
        frontier.announced_end = frontier.frame_begin[frame]
        frontier.frame_count -= 1
        return
    frontier.frame_at[frame] = at + 1
    node = frontier.announced[at]
    flags = frontier.flags[node]
    telling = frontier.frame_node[frame]
    if flags & LOST:
        for at in range(graph.out_at[node], graph.out_end[node]):
            there = graph.representative[graph.out_links[at]]
            if frontier.flags[there] and frontier.announcement[there] != telling:
                lose(graph, growth, frontier, there)
    elif flags & OPEN:
        inner = _begin_frame(frontier)
        for at in range(graph.out_at[node], graph.out_end[node]):
            there = graph.representative[graph.out_links[at]]
            if frontier.flags[there] and frontier.announcement[there] != telling:
                frontier.support[there] += 1
                _put(frontier, inner, there)
    elif flags & TOUCHED:
        _put(frontier, _begin_frame(frontier), node)


def _rejudge(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, frame: int, node: int
) -> None:
    flags = frontier.flags[node]
    if flags & LOST or not flags:
        return
    now = _joinable(graph, growth, node) and frontier.support[node] > 0
    if now and not flags & OPEN:
        frontier.flags[node] |= OPEN
        _support_below(graph, frontier, node, 1, frame)
    elif not now and flags & OPEN:
        frontier.flags[node] -= OPEN
        _support_below(graph, frontier, node, -1, frame)
    if not now and flags & TOUCHED:
        if _above(graph, growth, node) < frontier.leads_to[node]:
            lose(graph, growth, frontier, node)
        else:
            frontier.flags[node] -= TOUCHED
            frontier.frame_node[frame] = node
            frontier.frame_at[frame] = graph.in_at[node]


def _bar_next(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, frame: int) -> None:
    """Give up the next candidate that leads, over the frame's node, to an earlier one."""
    last = frontier.frame_barred[frame]
    if last >= 0:
        frontier.frame_barred[frame] = -1
        if frontier.flags[last]:
            _put(frontier, frame, last)
    node = frontier.frame_node[frame]
    for at in range(frontier.frame_at[frame], graph.in_end[node]):
        source = graph.in_links[at]
        if _stays(growth, source):
            queued = growth.state[source] == QUEUED
            growth.state[source] = 0
            growth.barred[source] = 1
            _support_below(graph, frontier, source, -1 if queued else 0, frame)
            frontier.frame_at[frame] = at + 1
            frontier.frame_barred[frame] = source
            frontier.stack[0] = source
            _explore(graph, growth, frontier, 1, frontier.leads_to[node])
            return
    frontier.frame_node[frame] = -1


def lose(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int) -> None:
    """Mark a node and the nodes below it as lost; lost candidates wait.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes around the region.
        node: A candidate, or a node around the region.
    """
    frontier.losing[0] = node
    size = 1
    while size:
        size -= 1
        node = frontier.losing[size]
        if growth.state[node]:
            if growth.state[node] == WAITING or node == growth.start:
                continue
            growth.state[node] = WAITING
        else:
            if frontier.flags[node] & LOST:
                continue
            frontier.flags[node] = (frontier.flags[node] | LOST) & ~OPEN
        for at in range(graph.out_at[node], graph.out_end[node]):
            there = graph.representative[graph.out_links[at]]
            if growth.state[there] or frontier.flags[there]:
                frontier.losing[size] = there
                size += 1
