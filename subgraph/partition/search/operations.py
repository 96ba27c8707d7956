"""The operations of a search, with one entry point for Python and for machine code."""

from __future__ import annotations

from subgraph.partition.search.contraction import choose, find_cones, prepare, shrink
from subgraph.partition.search.hetero import (
    count_cached,
    find_largest,
    follow_moves,
    move_growths,
    start_roots,
    take,
)
from subgraph.partition.search.region_growth import begin_growth, go_on
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.structures import SearchState

# The operations; ``words[1]`` and ``words[2]`` are their arguments and results.
# The graph has words[1] nodes, its links are in their tables.
PREPARE = 0
# Make a region of words[1] members, which are sorted.
CHOOSE = 1
# Make words[1] members convex and connected, around words[2].
SHRINK = 2
# Make words[1] members connected, around words[2].
COMPONENT = 3
START_ROOTS = 4
# Return the root of the largest region; its words[1] members are sorted.
FIND_LARGEST = 5
# The same, and make a region of it.
TAKE_LARGEST = 6
# words[1] members are no longer free.
TAKE = 7
# Return the number of cache entries of all growths.
COUNT_CACHED = 8
# Move them into the new tables, which have room for words[1].
MOVE_GROWTHS = 9
# Begin to grow from words[1]. Return how many neighbours of words[1] are asked about, producers or
# consumers as words[2] says; 0 at the end: words[1] members, sorted, and words[2] given up.
GROW = 10
# Go on with the answers; the result is as GROW's.
ANSWER = 11
# Make a region of the nodes that have grown.
TAKE_GROWN = 12


def serve(state: SearchState) -> int:
    """Do one operation and return its result."""
    operation = state.message.words[0]
    if operation == PREPARE:
        state.graph.count = state.message.words[1]
        prepare(state.graph, state.graph.count)
    elif operation == CHOOSE:
        state.region.size = state.message.words[1]
        _choose(state)
    elif operation in (SHRINK, COMPONENT):
        state.region.size = state.message.words[1]
        _shrink(state, state.message.words[2], operation == SHRINK)
    elif operation == START_ROOTS:
        start_roots(state.graph, state.blocks, state.device, state.graph.count)
        state.device.started = 1
    elif operation in (FIND_LARGEST, TAKE_LARGEST):
        return _find_largest(state, operation == TAKE_LARGEST)
    elif operation == TAKE:
        state.region.size = state.message.words[1]
        for k in range(state.region.size):
            state.graph.free[state.region.members[k]] = 0
        take(state.graph, state.region, state.blocks, state.device, state.cache)
    elif operation == COUNT_CACHED:
        return count_cached(state.block_growth, state.device, state.cache, state.graph.count)
    elif operation in (GROW, ANSWER):
        return _grow(state, operation == GROW)
    elif operation == TAKE_GROWN:
        choose(state.graph, state.region)
    elif operation == MOVE_GROWTHS:
        move_growths(state.cache, state.graph.count, state.message.words[1])
    return 0


def _grow(state: SearchState, begins: bool) -> int:
    count = (
        begin_growth(
            state.graph,
            state.region,
            state.growth,
            state.frontier,
            state.message,
            state.message.words[1],
        )
        if begins
        else go_on(state.graph, state.region, state.growth, state.frontier, state.message)
    )
    state.message.words[1] = state.growth.candidate if count else state.region.size
    state.message.words[2] = state.growth.phase if count else state.growth.given_up_count
    return count


def _choose(state: SearchState) -> None:
    find_cones(state.graph, state.region)
    choose(state.graph, state.region)
    if state.device.started:
        follow_moves(state.graph, state.region, state.device, state.cache)


def _shrink(state: SearchState, keep: int, convex: bool) -> None:
    common = find_cones(state.graph, state.region)
    shrink(state.graph, state.region, keep, common and convex)
    state.message.words[1] = state.region.size
    state.message.words[2] = state.region.move_count


def _find_largest(state: SearchState, taken: bool) -> int:
    root = find_largest(
        state.graph, state.region, state.blocks, state.block_growth, state.device, state.cache
    )
    if root >= 0:
        sort_by(
            state.graph.representative, state.region.members, 0, state.region.size
        )  # free nodes stand for themselves
        state.message.words[1] = state.region.size
        if taken:
            _choose(state)
            take(state.graph, state.region, state.blocks, state.device, state.cache)
    return root
