"""Growing a region breadth first, by the answers of a selector; see `partition.growth`.

A growth is done in steps. Each ends with neighbours of one candidate to ask the selector about, all
its producers or all its consumers; the next begins with the answers.
"""

from __future__ import annotations

from subgraph.partition.search.contraction import (
    find_cones,
    mark_members,
    restrict_to_component,
    shrink,
)
from subgraph.partition.search.frontier import (
    EXPANDED,
    QUEUED,
    WAITING,
    add_candidate,
    clear_frontier,
    clear_region,
    finish_candidate,
    is_behind_detour,
    mark_detour,
    start_region,
)
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.structures import (
    ContractedGraph,
    Frontier,
    Message,
    Region,
    RegionGrowth,
)

PICK, PRODUCERS, CONSUMERS = 0, 1, 2


def begin_growth(
    graph: ContractedGraph,
    region: Region,
    growth: RegionGrowth,
    frontier: Frontier,
    message: Message,
    start: int,
) -> int:
    """Begin to grow from ``start``; the result is that of `continue_growth`.

    Args:
        graph: The contracted graph.
        region: Gets the members when growth ends.
        growth: The growth.
        frontier: The nodes outside.
        message: Questions and answers.
        start: The start node.
    """
    clear_region(growth, frontier)
    start_region(graph, growth, frontier, start)
    growth.queue[0] = start
    growth.queue_begin = 0
    growth.queue_end = 1
    growth.phase = PICK
    return continue_growth(graph, region, growth, frontier, message)


def continue_growth(
    graph: ContractedGraph,
    region: Region,
    growth: RegionGrowth,
    frontier: Frontier,
    message: Message,
) -> int:
    """Take the answers, and continue until there are new questions.

    Args:
        graph: The contracted graph.
        region: Gets the members when growth ends.
        growth: The growth.
        frontier: The nodes outside.
        message: Questions and answers.

    Returns:
        The number of neighbours of ``candidate`` that are ``asked`` about, producers or consumers
        as ``phase`` says; 0 when growth has ended.
    """
    while True:
        if growth.phase == PICK:
            if growth.queue_begin == growth.queue_end:
                if growth.stale:
                    _requeue_waiting(graph, growth, frontier)
                if growth.queue_begin == growth.queue_end:
                    _finish(graph, region, growth)
                    return 0
            growth.candidate = growth.queue[growth.queue_begin]
            growth.queue_begin += 1
            if growth.state[growth.candidate] == QUEUED:
                _ask(graph, growth, message, growth.candidate, PRODUCERS)
        elif growth.phase == PRODUCERS:
            _process_producers(graph, growth, frontier, message, growth.candidate)
        else:
            _process_consumers(graph, growth, frontier, message, growth.candidate)
        if growth.phase != PICK and growth.ask_count:
            return growth.ask_count


def _ask(
    graph: ContractedGraph, growth: RegionGrowth, message: Message, node: int, phase: int
) -> None:
    """Begin a phase: ask about the neighbours of ``node`` that may join."""
    growth.phase = phase
    growth.ask_count = 0
    neighbours = graph.producers if phase == PRODUCERS else graph.consumers
    begin = graph.in_begin[node] if phase == PRODUCERS else graph.out_begin[node]
    end = graph.in_end[node] if phase == PRODUCERS else graph.out_end[node]
    for edge in range(begin, end):
        neighbour = neighbours[edge]
        if not growth.state[neighbour] and graph.free[neighbour] and not growth.barred[neighbour]:
            message.asked[growth.ask_count] = neighbour
            message.answers[growth.ask_count] = 0
            growth.ask_count += 1


def _join(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int) -> None:
    """Add a candidate, last in the queue."""
    add_candidate(graph, growth, frontier, node)
    growth.queue[growth.queue_end] = node
    growth.queue_end += 1


def _process_producers(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, message: Message, node: int
) -> None:
    """Take the answers about the producers of ``node``; ask about its consumers if it may stay."""
    may_wait = False  # whether a producer is outside, or waits
    k = 0
    for edge in range(graph.in_begin[node], graph.in_end[node]):
        neighbour = graph.producers[edge]
        # ``asked`` has those of the producers that were asked about, in the same order.
        if k < growth.ask_count and message.asked[k] == neighbour:
            if message.answers[k]:
                _join(graph, growth, frontier, neighbour)
            else:
                may_wait = True
            k += 1
        elif not growth.state[neighbour] or growth.state[neighbour] == WAITING:
            may_wait = True
    # The search for detours is costly; if all producers are active candidates, there is none.
    if may_wait and is_behind_detour(graph, growth, frontier, node) and node != growth.start:
        mark_detour(graph, growth, frontier, node)
    if growth.state[node] == QUEUED:
        _ask(graph, growth, message, node, CONSUMERS)
    else:
        growth.phase = PICK


def _process_consumers(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, message: Message, node: int
) -> None:
    """Take the answers about the consumers of ``node``, which is then expanded."""
    for k in range(growth.ask_count):
        if message.answers[k]:
            _join(graph, growth, frontier, message.asked[k])
    growth.expanded[node] = 1
    if growth.state[node] == QUEUED:
        finish_candidate(graph, growth, frontier, node)
    growth.phase = PICK


def _requeue_waiting(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier) -> None:
    """Classify all nodes again, and queue the candidates that need not wait any more."""
    clear_frontier(growth, frontier)
    # All candidates that were not barred become active, and those behind a detour wait again.
    growth.queue_begin = growth.queue_end = 0
    count = growth.candidate_count
    for k in range(count):
        node = growth.candidates[k]
        growth.was_waiting[node] = growth.state[node] == WAITING and not growth.expanded[node]
        if growth.state[node]:
            growth.state[node] = EXPANDED if growth.expanded[node] else QUEUED
    for k in range(count):
        node = growth.candidates[k]
        if (
            growth.state[node]
            and is_behind_detour(graph, growth, frontier, node)
            and node != growth.start
        ):
            mark_detour(graph, growth, frontier, node)
    for k in range(count):
        node = growth.candidates[k]
        if growth.was_waiting[node] and growth.state[node] == QUEUED:
            growth.queue[growth.queue_end] = node
            growth.queue_end += 1


def _finish(graph: ContractedGraph, region: Region, growth: RegionGrowth) -> None:
    """Make a convex, connected part of the expanded candidates the members; give up the rest."""
    region.size = growth.given_up_count = 0
    for k in range(growth.candidate_count):
        node = growth.candidates[k]
        if growth.state[node] == EXPANDED:
            region.members[region.size] = node
            region.size += 1
        else:
            growth.given_up[growth.given_up_count] = node
            growth.given_up_count += 1
    # Free nodes represent themselves, so this sorts by number.
    sort_by(graph.representative, region.members, 0, region.size)
    # A candidate that was given up may have connected others with the start.
    if growth.given_up_count:
        mark_members(region)
        restrict_to_component(graph, region, growth.start)
    if find_cones(graph, region):
        shrink(graph, region, growth.start, True)
        for k in range(region.removed_count):
            growth.given_up[growth.given_up_count] = region.removed[k]
            growth.given_up_count += 1
        # `contract` needs the ancestors and descendants of the members that remain.
        find_cones(graph, region)
