"""The nodes outside of a growing region that have a path to it; see `region_growth`.

Candidates are nodes that the selector has accepted. Their rank is the order in which they were
found. Each node outside that has a path to a candidate has flags:

- ANCESTOR: it has such a path.
- SUCCESSOR: it is a consumer of a candidate.
- OPEN: it may still join from above: it is free, and a producer is a queued candidate or OPEN.
- DETOUR: it cannot join and lies on a path between two candidates, or is below such a node.

A SUCCESSOR that is not OPEN is on a path between two candidates, so the later one must leave. It is
the one with the greater least rank among its relatives in the region: ``min_ancestor_rank`` of the
upper one is compared with ``min_descendant_rank`` of the lower one. If it is the lower one, the
node becomes a DETOUR, and candidates below wait: they continue if the node joins later. If it is
the upper one, it is barred for good.

When no frame is left, a path between active candidates (those that do not wait) over nodes outside
has only OPEN nodes; paths to the start are an exception, since the start never waits. At the end of
a growth no node is OPEN. `region_growth` removes what is not convex even so. The algorithm is not
from the literature. Its ``support`` works as in arc consistency (AC-4, Mohr and Henderson 1986): a
node is looked at again only if one of its producers has changed.

The consequences of a change are processed without recursion, on a stack of frames. A frame passes
the flags of newly discovered nodes on, or classifies nodes again whose support has changed.
"""

from __future__ import annotations

from subgraph.partition.search.sorting import heap_push, heap_remove, sort_by
from subgraph.partition.search.structures import ContractedGraph, Frontier, RegionGrowth

QUEUED, EXPANDED, WAITING = 1, 2, 3
ANCESTOR, SUCCESSOR, OPEN, DETOUR = 1, 2, 4, 8


def start_region(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, start: int
) -> None:
    """Begin with the region of ``start`` alone.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes outside.
        start: The start node.
    """
    growth.start = start
    growth.candidates[0] = start
    growth.candidate_count = 1
    growth.state[start] = QUEUED
    growth.min_ancestor_rank[start] = growth.min_descendant_rank[start] = 0
    frontier.first_position = graph.order[start]
    growth.stale = 0


def clear_region(growth: RegionGrowth, frontier: Frontier) -> None:
    """Clear the region and the nodes outside."""
    clear_frontier(growth, frontier)
    for k in range(growth.candidate_count):
        node = growth.candidates[k]
        growth.state[node] = growth.barred[node] = 0
        growth.expanded[node] = growth.was_waiting[node] = 0


def clear_frontier(growth: RegionGrowth, frontier: Frontier) -> None:
    """Clear the nodes outside, to classify them again after a node on a detour has joined."""
    growth.stale = 0
    for k in range(frontier.node_count):
        frontier.flags[frontier.nodes[k]] = 0
    frontier.node_count = 0
    for k in range(frontier.pruned.count):
        frontier.pruned.index[frontier.pruned.items[k]] = 0
    frontier.pruned.count = 0


def _is_active(growth: RegionGrowth, node: int) -> bool:
    """Return whether ``node`` is a candidate that does not wait."""
    return growth.state[node] == QUEUED or growth.state[node] == EXPANDED


def is_behind_detour(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> bool:
    """Return whether a candidate must wait, since one of its producers waits or is a detour.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes outside.
        node: A candidate whose producers have all been asked about.
    """
    root_count = 0
    for edge in range(graph.in_begin[node], graph.in_end[node]):
        source = graph.producers[edge]
        # A waiting candidate is below a detour, and so is everything below it.
        if growth.state[source] == WAITING:
            return True
        if not growth.state[source]:
            frontier.stack[root_count] = frontier.roots[root_count] = graph.representative[source]
            root_count += 1
    _find_ancestors(graph, growth, frontier, root_count, growth.min_descendant_rank[node])
    _process_frames(graph, growth, frontier)
    flags = 0
    for k in range(root_count):
        flags |= frontier.flags[frontier.roots[k]]
    return flags & DETOUR != 0


def _find_ancestors(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, root_count: int, rank: int
) -> None:
    """Find the ancestors of the roots on the stack, which have a path to the candidate of ``rank``.

    The nodes found are classified; a frame passes their flags on to the others.
    """
    begin = frontier.discovered_end
    size = 0
    for k in range(root_count):
        size = _discover(graph, growth, frontier, frontier.stack[k], rank, size)
    while size:
        size -= 1
        node = frontier.work[size]
        frontier.discovered[frontier.discovered_end] = node
        frontier.discovered_end += 1
        for edge in range(graph.in_begin[node], graph.in_end[node]):
            size = _discover(
                graph, growth, frontier, graph.representative[graph.producers[edge]], rank, size
            )
    if frontier.discovered_end == begin:
        return
    # Classified in topological order, a node comes after its producers, whose flags it depends on.
    sort_by(graph.order, frontier.discovered, begin, frontier.discovered_end)
    frontier.batch_count += 1
    for k in range(begin, frontier.discovered_end):
        _classify(graph, growth, frontier, frontier.discovered[k])
        frontier.batch_of[frontier.discovered[k]] = frontier.batch_count
    # Consumers that an earlier search has discovered were classified without the new nodes.
    frame = frontier.frame_count
    frontier.frame_count += 1
    frontier.frame_head[frame] = -1
    frontier.frame_begin[frame] = frontier.frame_cursor[frame] = begin
    frontier.frame_end[frame] = frontier.discovered_end
    frontier.frame_node[frame] = frontier.batch_count


def _discover(
    graph: ContractedGraph,
    growth: RegionGrowth,
    frontier: Frontier,
    node: int,
    rank: int,
    size: int,
) -> int:
    """Visit a node outside that has a path to the candidate of ``rank``.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes outside; the node is put into ``work[:size]`` if it is new, or into
            ``pruned`` if it comes before all candidates.
        node: The node.
        rank: The candidate's rank.
        size: Number of nodes in ``work``.

    Returns:
        The new number of nodes in ``work``.
    """
    if frontier.flags[node] or growth.state[node]:
        return size
    # A node before the first candidate lies between no two candidates, so the search ends there. It
    # continues from ``pruned`` if an earlier candidate joins (`add_candidate`).
    if graph.order[node] > frontier.first_position:
        frontier.flags[node] = ANCESTOR
        frontier.nodes[frontier.node_count] = node
        frontier.node_count += 1
        frontier.support[node] = 0
        frontier.min_descendant_rank[node] = rank
        frontier.work[size] = node
        return size + 1
    if not frontier.pruned.index[node] or rank < frontier.min_descendant_rank[node]:
        frontier.min_descendant_rank[node] = rank
    # The heap gives the least key first; the last position is needed first.
    frontier.pruned.keys[node] = -graph.order[node]
    heap_push(frontier.pruned, node)
    return size


def _may_join(graph: ContractedGraph, growth: RegionGrowth, node: int) -> bool:
    return graph.free[node] != 0 and not growth.barred[node]


def _classify(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int) -> None:
    """Set the flags and the support of a newly discovered node."""
    support = 0
    is_detour = is_successor = False
    for edge in range(graph.in_begin[node], graph.in_end[node]):
        neighbour = graph.representative[graph.producers[edge]]
        state = growth.state[neighbour]
        if state:
            is_successor = True
            support += state == QUEUED
            is_detour = is_detour or state == WAITING
        elif frontier.flags[neighbour] & OPEN:
            support += 1
        elif frontier.flags[neighbour] & DETOUR:
            is_detour = True
    flags = ANCESTOR
    if is_successor:
        flags |= SUCCESSOR
    frontier.support[node] = support
    is_open = support > 0 and _may_join(graph, growth, node)
    if is_detour or (
        is_successor and not is_open and _lower_must_leave(graph, growth, frontier, node)
    ):
        flags |= DETOUR
    elif is_open:
        flags |= OPEN
    frontier.flags[node] = flags


def _lower_must_leave(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> bool:
    """Return whether the candidate below ``node`` is later than the ones above it."""
    first = growth.candidate_count
    for edge in range(graph.in_begin[node], graph.in_end[node]):
        source = graph.producers[edge]
        if _is_active(growth, source):
            first = min(first, growth.min_ancestor_rank[source])
    return first < frontier.min_descendant_rank[node]


def add_candidate(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> None:
    """Add a new candidate and classify the nodes below it again.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes outside.
        node: A node that the selector has accepted.
    """
    _rank_candidate(graph, growth, frontier, node)
    # An OPEN node counts in the support of its consumers already, as a queued candidate does.
    was_open = frontier.flags[node] & OPEN
    # Candidates below wait because of this node; growth judges them again when its queue is empty.
    if frontier.flags[node] & DETOUR:
        growth.stale = 1
    frontier.flags[node] = 0
    position = graph.order[node]
    if position < frontier.first_position:
        frontier.first_position = position
        # Nodes at which searches have ended may lie between candidates now.
        while frontier.pruned.count and graph.order[frontier.pruned.items[0]] > position:
            pruned = frontier.pruned.items[0]
            heap_remove(frontier.pruned, pruned)
            frontier.stack[0] = pruned
            _find_ancestors(graph, growth, frontier, 1, frontier.min_descendant_rank[pruned])
            _process_frames(graph, growth, frontier)
    frame = _begin_frame(frontier)
    for edge in range(graph.out_begin[node], graph.out_end[node]):
        neighbour = graph.representative[graph.consumers[edge]]
        if frontier.flags[neighbour]:
            frontier.flags[neighbour] |= SUCCESSOR
            if not was_open:
                frontier.support[neighbour] += 1
            _schedule(frontier, frame, neighbour)
    _process_frames(graph, growth, frontier)


def _rank_candidate(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> None:
    """Append ``node`` to the candidates, and update the least ranks of its relatives."""
    growth.state[node] = QUEUED
    least = growth.candidate_count
    for edge in range(graph.in_begin[node], graph.in_end[node]):
        if _is_active(growth, graph.producers[edge]):
            least = min(least, growth.min_ancestor_rank[graph.producers[edge]])
    growth.min_ancestor_rank[node] = least
    _lower_rank_of_descendants(graph, growth, frontier, node, least)
    least = growth.candidate_count
    for edge in range(graph.out_begin[node], graph.out_end[node]):
        if _is_active(growth, graph.consumers[edge]):
            least = min(least, growth.min_descendant_rank[graph.consumers[edge]])
    growth.min_descendant_rank[node] = least
    _lower_rank_of_ancestors(graph, growth, frontier, node, least)
    growth.candidates[growth.candidate_count] = node
    growth.candidate_count += 1


def _lower_rank_of_descendants(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, start: int, rank: int
) -> None:
    """Lower ``min_ancestor_rank`` of the active candidates below ``start`` to ``rank``."""
    frontier.work[0] = start
    size = 1
    while size:
        size -= 1
        node = frontier.work[size]
        for edge in range(graph.out_begin[node], graph.out_end[node]):
            neighbour = graph.consumers[edge]
            if _is_active(growth, neighbour) and growth.min_ancestor_rank[neighbour] > rank:
                growth.min_ancestor_rank[neighbour] = rank
                frontier.work[size] = neighbour
                size += 1


def _lower_rank_of_ancestors(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, start: int, rank: int
) -> None:
    """Lower ``min_descendant_rank`` of the active candidates above ``start`` to ``rank``."""
    frontier.work[0] = start
    size = 1
    while size:
        size -= 1
        node = frontier.work[size]
        for edge in range(graph.in_begin[node], graph.in_end[node]):
            neighbour = graph.producers[edge]
            if _is_active(growth, neighbour) and growth.min_descendant_rank[neighbour] > rank:
                growth.min_descendant_rank[neighbour] = rank
                frontier.work[size] = neighbour
                size += 1


def finish_candidate(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> None:
    """Mark a candidate as expanded; it no longer supports the nodes below it.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes outside.
        node: A candidate whose neighbours have all been asked about.
    """
    growth.state[node] = EXPANDED
    _change_support(graph, frontier, node, -1, _begin_frame(frontier))
    _process_frames(graph, growth, frontier)


def _change_support(
    graph: ContractedGraph, frontier: Frontier, node: int, change: int, frame: int
) -> None:
    """Change the support of the consumers of ``node``, which a frame classifies again.

    Args:
        graph: The contracted graph.
        frontier: The nodes outside.
        node: The node.
        change: Is added to the support.
        frame: Number of the frame.
    """
    for edge in range(graph.out_begin[node], graph.out_end[node]):
        neighbour = graph.representative[graph.consumers[edge]]
        if frontier.flags[neighbour]:
            frontier.support[neighbour] += change
            _schedule(frontier, frame, neighbour)


def _begin_frame(frontier: Frontier) -> int:
    """Begin a frame that classifies nodes again; return its number."""
    frame = frontier.frame_count
    frontier.frame_count += 1
    frontier.frame_head[frame] = 0
    frontier.frame_node[frame] = frontier.frame_barred[frame] = -1
    return frame


def _schedule(frontier: Frontier, frame: int, node: int) -> None:
    """Make ``node`` the next that a frame classifies; a node is in at most one frame."""
    if frontier.frame_of[node]:
        _unschedule(frontier, node)
    following = frontier.frame_head[frame]
    frontier.next_in_frame[node] = following
    if following:
        frontier.previous_in_frame[following - 1] = node + 1
    frontier.previous_in_frame[node] = 0
    frontier.frame_head[frame] = node + 1
    frontier.frame_of[node] = frame + 1


def _unschedule(frontier: Frontier, node: int) -> None:
    previous, following = frontier.previous_in_frame[node], frontier.next_in_frame[node]
    if previous:
        frontier.next_in_frame[previous - 1] = following
    else:
        frontier.frame_head[frontier.frame_of[node] - 1] = following
    if following:
        frontier.previous_in_frame[following - 1] = previous
    frontier.frame_of[node] = 0


def _process_frames(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier) -> None:
    """Process all frames, the last first, until none is left."""
    while frontier.frame_count:
        frame = frontier.frame_count - 1
        if frontier.frame_head[frame] < 0:
            _pass_on_next(graph, growth, frontier, frame)
        elif frontier.frame_node[frame] >= 0:
            _bar_next(graph, growth, frontier, frame)
        elif frontier.frame_head[frame]:
            node = frontier.frame_head[frame] - 1
            _unschedule(frontier, node)
            _reclassify(graph, growth, frontier, frame, node)
        else:
            frontier.frame_count -= 1


def _pass_on_next(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, frame: int
) -> None:
    """Pass the flags of the next new node on to consumers that were found in an earlier batch."""
    index = frontier.frame_cursor[frame]
    if index == frontier.frame_end[frame]:
        frontier.discovered_end = frontier.frame_begin[frame]
        frontier.frame_count -= 1
        return
    frontier.frame_cursor[frame] = index + 1
    node = frontier.discovered[index]
    flags = frontier.flags[node]
    batch = frontier.frame_node[frame]
    if flags & DETOUR:
        for edge in range(graph.out_begin[node], graph.out_end[node]):
            neighbour = graph.representative[graph.consumers[edge]]
            if frontier.flags[neighbour] and frontier.batch_of[neighbour] != batch:
                mark_detour(graph, growth, frontier, neighbour)
    elif flags & OPEN:
        inner = _begin_frame(frontier)
        for edge in range(graph.out_begin[node], graph.out_end[node]):
            neighbour = graph.representative[graph.consumers[edge]]
            if frontier.flags[neighbour] and frontier.batch_of[neighbour] != batch:
                frontier.support[neighbour] += 1
                _schedule(frontier, inner, neighbour)
    elif flags & SUCCESSOR:
        _schedule(frontier, _begin_frame(frontier), node)


def _reclassify(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, frame: int, node: int
) -> None:
    """Update OPEN and SUCCESSOR of a node whose support has changed.

    The change of a flag schedules the neighbours whose support it changes, marks a detour, or lets
    the frame bar candidates.

    Args:
        graph: The contracted graph.
        growth: The growing region.
        frontier: The state of its frontier.
        frame: The frame whose nodes are updated.
        node: The node.
    """
    # A detour stays one until `clear_frontier`. A node without flags has joined since it was
    # scheduled.
    flags = frontier.flags[node]
    if flags & DETOUR or not flags:
        return
    is_open = _may_join(graph, growth, node) and frontier.support[node] > 0
    if is_open and not flags & OPEN:
        frontier.flags[node] |= OPEN
        _change_support(graph, frontier, node, 1, frame)
    elif not is_open and flags & OPEN:
        frontier.flags[node] -= OPEN
        _change_support(graph, frontier, node, -1, frame)
    if not is_open and flags & SUCCESSOR:
        if _lower_must_leave(graph, growth, frontier, node):
            mark_detour(graph, growth, frontier, node)
        else:
            # The candidates above leave instead. The frame bars one at a time: the frames that
            # follow from each must be processed before the next.
            frontier.flags[node] -= SUCCESSOR
            frontier.frame_node[frame] = node
            frontier.frame_cursor[frame] = graph.in_begin[node]


def _bar_next(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, frame: int) -> None:
    """Bar the next candidate that has a path over the frame's node to an earlier one."""
    last = frontier.frame_barred[frame]
    if last >= 0:
        frontier.frame_barred[frame] = -1
        # The candidate is a node outside now, and its ancestors are known.
        if frontier.flags[last]:
            _schedule(frontier, frame, last)
    node = frontier.frame_node[frame]
    for edge in range(frontier.frame_cursor[frame], graph.in_end[node]):
        source = graph.producers[edge]
        if _is_active(growth, source):
            supports = growth.state[source] == QUEUED
            growth.state[source] = 0
            growth.barred[source] = 1
            # Consumers that keep their support are classified again, too: they have lost a
            # candidate above.
            _change_support(graph, frontier, source, -1 if supports else 0, frame)
            frontier.frame_cursor[frame] = edge + 1
            frontier.frame_barred[frame] = source
            frontier.stack[0] = source
            _find_ancestors(graph, growth, frontier, 1, frontier.min_descendant_rank[node])
            return
    frontier.frame_node[frame] = -1


def mark_detour(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int
) -> None:
    """Mark a node and the nodes below it as DETOUR; candidates among them wait.

    Args:
        graph: The contracted graph.
        growth: The growth.
        frontier: The nodes outside.
        node: A candidate, or a node outside.
    """
    frontier.detour_stack[0] = node
    size = 1
    while size:
        size -= 1
        node = frontier.detour_stack[size]
        if growth.state[node]:
            # The start never waits, so that no region loses it.
            if growth.state[node] == WAITING or node == growth.start:
                continue
            growth.state[node] = WAITING
        else:
            if frontier.flags[node] & DETOUR:
                continue
            frontier.flags[node] = (frontier.flags[node] | DETOUR) & ~OPEN
        for edge in range(graph.out_begin[node], graph.out_end[node]):
            neighbour = graph.representative[graph.consumers[edge]]
            if growth.state[neighbour] or frontier.flags[neighbour]:
                frontier.detour_stack[size] = neighbour
                size += 1
