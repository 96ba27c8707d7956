"""Growing a region breadth first, told which neighbours the selector takes; see `growth`.

A growth is done in steps. Each ends with neighbours of one candidate to ask the selector about, all
its producers or all its consumers; the next begins with the answers.

Tables: ``queue[queue_at:queue_end]`` are the candidates whose turn is yet to come; ``complete`` are
those whose neighbours were all asked about. ``asked[:asks]`` and ``answers`` are of the step.
"""

from __future__ import annotations

from subgraph.partition.search.contraction import find_cones, keep_component, mark_inside, shrink
from subgraph.partition.search.frontier import (
    GROWN,
    QUEUED,
    WAITING,
    added,
    grown,
    is_lost,
    leave,
    lose,
    renew,
    surround,
)
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.tables import Tables

PICK, PRODUCERS, CONSUMERS = 0, 1, 2


def begin_growth(s: Tables, start: int) -> int:
    """Begin to grow from ``start``; return how many neighbours to ask about, as `go_on` does."""
    leave(s)
    surround(s, start)
    s.queue[0] = start
    s.queue_at = 0
    s.queue_end = 1
    s.phase = PICK
    return go_on(s)


def go_on(s: Tables) -> int:
    """Take the answers, and go on until there are questions again.

    Returns:
        How many neighbours of ``growing`` are ``asked`` about, its producers or consumers as
        ``phase`` says; 0 when growth has ended.
    """
    while True:
        if s.phase == PICK:
            if s.queue_at == s.queue_end:
                if s.stale:
                    _resume(s)
                if s.queue_at == s.queue_end:
                    _finish(s)
                    return 0
            s.growing = s.queue[s.queue_at]
            s.queue_at += 1
            if s.state[s.growing] == QUEUED:
                _ask(s, s.growing, PRODUCERS)
        elif s.phase == PRODUCERS:
            _take_producers(s, s.growing)
        else:
            _take_consumers(s, s.growing)
        if s.phase != PICK and s.asks:
            return s.asks


def _ask(s: Tables, node: int, phase: int) -> None:
    s.phase = phase
    s.asks = 0
    links = s.in_links if phase == PRODUCERS else s.out_links
    begin = s.in_at[node] if phase == PRODUCERS else s.out_at[node]
    end = s.in_end[node] if phase == PRODUCERS else s.out_end[node]
    for at in range(begin, end):
        other = links[at]
        if not s.state[other] and s.free[other] and not s.barred[other]:
            s.asked[s.asks] = other
            s.asks += 1


def _join(s: Tables, node: int) -> None:
    added(s, node)
    s.queue[s.queue_end] = node
    s.queue_end += 1


def _take_producers(s: Tables, node: int) -> None:
    cut_off = False
    k = 0
    for at in range(s.in_at[node], s.in_end[node]):
        other = s.in_links[at]
        if k < s.asks and s.asked[k] == other:
            if s.answers[k]:
                _join(s, other)
            else:
                cut_off = True
            k += 1
        elif not s.state[other] or s.state[other] == WAITING:
            cut_off = True
    if cut_off and is_lost(s, node) and node != s.start:
        lose(s, node)
    if s.state[node] == QUEUED:
        _ask(s, node, CONSUMERS)
    else:
        s.phase = PICK


def _take_consumers(s: Tables, node: int) -> None:
    for k in range(s.asks):
        if s.answers[k]:
            _join(s, s.asked[k])
    s.complete[node] = 1
    if s.state[node] == QUEUED:
        grown(s, node)
    s.phase = PICK


def _resume(s: Tables) -> None:
    """Judge all candidates anew; queue those that waited and need not any more."""
    renew(s)
    s.queue_at = s.queue_end = 0
    count = s.ranks
    for k in range(count):
        node = s.candidates[k]
        s.waited[node] = s.state[node] == WAITING and not s.complete[node]
        if s.state[node]:
            s.state[node] = GROWN if s.complete[node] else QUEUED
    for k in range(count):
        node = s.candidates[k]
        if s.state[node] and is_lost(s, node) and node != s.start:
            lose(s, node)
    for k in range(count):
        node = s.candidates[k]
        if s.waited[node] and s.state[node] == QUEUED:
            s.queue[s.queue_end] = node
            s.queue_end += 1


def _finish(s: Tables) -> None:
    """Make what has grown the members, convex and connected; the rest is ``given``."""
    s.size = s.given_up = 0
    for k in range(s.ranks):
        node = s.candidates[k]
        if s.state[node] == GROWN:
            s.members[s.size] = node
            s.size += 1
        else:
            s.given[s.given_up] = node
            s.given_up += 1
    sort_by(s.rep, s.members, 0, s.size)  # free nodes stand for themselves
    if s.given_up:
        mark_inside(s)
        keep_component(s, s.start)
    if find_cones(s):
        shrink(s, s.start, True)
        for k in range(s.moves):
            s.given[s.given_up] = s.moved[k]
            s.given_up += 1
        find_cones(s)
