"""Growing a region breadth first, by the answers of a selector; see `partition.growth`.

A growth is done in steps. Each ends with neighbours of one candidate to ask the selector about, all
its producers or all its consumers; the next begins with the answers.
"""

from __future__ import annotations

from subgraph.partition.search.contraction import find_cones, keep_component, mark_inside, shrink
from subgraph.partition.search.frontier import (
    GROWN,
    QUEUED,
    WAITING,
    add_candidate,
    finish_candidate,
    is_lost,
    leave,
    lose,
    renew,
    surround,
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
    """Begin to grow from ``start``; the result is that of `go_on`.

    Args:
        graph: The contracted graph.
        region: Gets the members when growth ends.
        growth: The growth.
        frontier: The nodes around the region.
        message: Questions and answers.
        start: The start node.
    """
    leave(growth, frontier)
    surround(graph, growth, frontier, start)
    growth.queue[0] = start
    growth.queue_begin = 0
    growth.queue_end = 1
    growth.phase = PICK
    return go_on(graph, region, growth, frontier, message)


def go_on(
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
        frontier: The nodes around the region.
        message: Questions and answers.

    Returns:
        The number of neighbours of ``candidate`` that are ``asked`` about, producers or consumers
        as ``phase`` says; 0 when growth has ended.
    """
    while True:
        if growth.phase == PICK:
            if growth.queue_begin == growth.queue_end:
                if growth.stale:
                    _resume(graph, growth, frontier)
                if growth.queue_begin == growth.queue_end:
                    _finish(graph, region, growth)
                    return 0
            growth.candidate = growth.queue[growth.queue_begin]
            growth.queue_begin += 1
            if growth.state[growth.candidate] == QUEUED:
                _ask(graph, growth, message, growth.candidate, PRODUCERS)
        elif growth.phase == PRODUCERS:
            _take_producers(graph, growth, frontier, message, growth.candidate)
        else:
            _take_consumers(graph, growth, frontier, message, growth.candidate)
        if growth.phase != PICK and growth.ask_count:
            return growth.ask_count


def _ask(
    graph: ContractedGraph, growth: RegionGrowth, message: Message, node: int, phase: int
) -> None:
    growth.phase = phase
    growth.ask_count = 0
    links = graph.in_links if phase == PRODUCERS else graph.out_links
    begin = graph.in_at[node] if phase == PRODUCERS else graph.out_at[node]
    end = graph.in_end[node] if phase == PRODUCERS else graph.out_end[node]
    for at in range(begin, end):
        other = links[at]
        if not growth.state[other] and graph.free[other] and not growth.barred[other]:
            message.asked[growth.ask_count] = other
            growth.ask_count += 1


def _join(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, node: int) -> None:
    add_candidate(graph, growth, frontier, node)
    growth.queue[growth.queue_end] = node
    growth.queue_end += 1


def _take_producers(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, message: Message, node: int
) -> None:
    cut_off = False
    k = 0
    for at in range(graph.in_at[node], graph.in_end[node]):
        other = graph.in_links[at]
        if k < growth.ask_count and message.asked[k] == other:
            if message.answers[k]:
                _join(graph, growth, frontier, other)
            else:
                cut_off = True
            k += 1
        elif not growth.state[other] or growth.state[other] == WAITING:
            cut_off = True
    if cut_off and is_lost(graph, growth, frontier, node) and node != growth.start:
        lose(graph, growth, frontier, node)
    if growth.state[node] == QUEUED:
        _ask(graph, growth, message, node, CONSUMERS)
    else:
        growth.phase = PICK


def _take_consumers(
    graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier, message: Message, node: int
) -> None:
    for k in range(growth.ask_count):
        if message.answers[k]:
            _join(graph, growth, frontier, message.asked[k])
    growth.complete[node] = 1
    if growth.state[node] == QUEUED:
        finish_candidate(graph, growth, frontier, node)
    growth.phase = PICK


def _resume(graph: ContractedGraph, growth: RegionGrowth, frontier: Frontier) -> None:
    """Judge all candidates again, and queue those that need not wait any more."""
    renew(growth, frontier)
    growth.queue_begin = growth.queue_end = 0
    count = growth.candidate_count
    for k in range(count):
        node = growth.candidates[k]
        growth.waited[node] = growth.state[node] == WAITING and not growth.complete[node]
        if growth.state[node]:
            growth.state[node] = GROWN if growth.complete[node] else QUEUED
    for k in range(count):
        node = growth.candidates[k]
        if growth.state[node] and is_lost(graph, growth, frontier, node) and node != growth.start:
            lose(graph, growth, frontier, node)
    for k in range(count):
        node = growth.candidates[k]
        if growth.waited[node] and growth.state[node] == QUEUED:
            growth.queue[growth.queue_end] = node
            growth.queue_end += 1


def _finish(graph: ContractedGraph, region: Region, growth: RegionGrowth) -> None:
    """Make a convex, connected part of the grown nodes the members; the rest is ``given_up``."""
    region.size = growth.given_up_count = 0
    for k in range(growth.candidate_count):
        node = growth.candidates[k]
        if growth.state[node] == GROWN:
            region.members[region.size] = node
            region.size += 1
        else:
            growth.given_up[growth.given_up_count] = node
            growth.given_up_count += 1
    sort_by(graph.representative, region.members, 0, region.size)  # free nodes stand for themselves
    if growth.given_up_count:
        mark_inside(region)
        keep_component(graph, region, growth.start)
    if find_cones(graph, region):
        shrink(graph, region, growth.start, True)
        for k in range(region.move_count):
            growth.given_up[growth.given_up_count] = region.moved[k]
            growth.given_up_count += 1
        find_cones(graph, region)
