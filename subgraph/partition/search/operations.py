"""The operations of a search, with one entry point for Python and for machine code."""

from __future__ import annotations

from subgraph.partition.search.contraction import contract, find_cones, reset, shrink
from subgraph.partition.search.hetero import (
    claim,
    compact_cache,
    count_entries,
    find_largest,
    invalidate_moved,
    start_roots,
)
from subgraph.partition.search.region_growth import begin_growth, continue_growth
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.structures import SearchState

# The operations; ``command[1]`` and ``command[2]`` are their arguments and results.
# The graph has command[1] nodes, its edges are in their tables.
RESET = 0
# Make a region of command[1] members, which are sorted.
CONTRACT = 1
# Make command[1] members convex and connected, around command[2].
SHRINK = 2
# Make command[1] members connected, around command[2].
COMPONENT = 3
START_ROOTS = 4
# Return the root of the largest region; its command[1] members are sorted.
FIND_LARGEST = 5
# Do as FIND_LARGEST, and make a region of it.
CONTRACT_LARGEST = 6
# command[1] members are no longer free.
CLAIM = 7
# Return the number of cache entries of all growths.
COUNT_ENTRIES = 8
# Move them into the new tables, which have room for command[1].
COMPACT_CACHE = 9
# Begin to grow from command[1]. Return how many neighbours of command[1] are asked about, producers
# or consumers as command[2] says; 0 at the end: command[1] members, sorted, and command[2] that
# were given up.
GROW = 10
# Continue with the answers; the result is as GROW's.
ANSWER = 11
# Make a region of the nodes that have grown.
CONTRACT_GROWN = 12


def execute(state: SearchState) -> int:
    """Do one operation and return its result."""
    operation = state.message.command[0]
    if operation == RESET:
        state.graph.count = state.message.command[1]
        reset(state.graph, state.graph.count)
    elif operation == CONTRACT:
        state.region.size = state.message.command[1]
        _contract(state)
    elif operation in (SHRINK, COMPONENT):
        state.region.size = state.message.command[1]
        _shrink(state, state.message.command[2], operation == SHRINK)
    elif operation == START_ROOTS:
        start_roots(state.graph, state.blocks, state.device, state.graph.count)
        state.device.started = 1
    elif operation in (FIND_LARGEST, CONTRACT_LARGEST):
        return _find_largest(state, operation == CONTRACT_LARGEST)
    elif operation == CLAIM:
        state.region.size = state.message.command[1]
        for k in range(state.region.size):
            state.graph.free[state.region.members[k]] = 0
        claim(state.graph, state.region, state.blocks, state.device, state.cache)
    elif operation == COUNT_ENTRIES:
        return count_entries(state.block_growth, state.device, state.cache, state.graph.count)
    elif operation in (GROW, ANSWER):
        return _grow(state, operation == GROW)
    elif operation == CONTRACT_GROWN:
        contract(state.graph, state.region)
    elif operation == COMPACT_CACHE:
        compact_cache(state.cache, state.graph.count, state.message.command[1])
    return 0


def _grow(state: SearchState, is_new: bool) -> int:
    """Begin or continue a growth; the command gets its results."""
    count = (
        begin_growth(
            state.graph,
            state.region,
            state.growth,
            state.frontier,
            state.message,
            state.message.command[1],
        )
        if is_new
        else continue_growth(state.graph, state.region, state.growth, state.frontier, state.message)
    )
    state.message.command[1] = state.growth.candidate if count else state.region.size
    state.message.command[2] = state.growth.phase if count else state.growth.given_up_count
    return count


def _contract(state: SearchState) -> None:
    find_cones(state.graph, state.region)
    contract(state.graph, state.region)
    if state.device.started:
        invalidate_moved(state.graph, state.region, state.device, state.cache)


def _shrink(state: SearchState, anchor: int, convex: bool) -> None:
    is_common = find_cones(state.graph, state.region)
    shrink(state.graph, state.region, anchor, is_common and convex)
    state.message.command[1] = state.region.size
    state.message.command[2] = state.region.removed_count


def _find_largest(state: SearchState, contracted: bool) -> int:
    root = find_largest(
        state.graph, state.region, state.blocks, state.block_growth, state.device, state.cache
    )
    if root >= 0:
        # Free nodes represent themselves, so this sorts by number.
        sort_by(state.graph.representative, state.region.members, 0, state.region.size)
        state.message.command[1] = state.region.size
        if contracted:
            _contract(state)
            claim(state.graph, state.region, state.blocks, state.device, state.cache)
    return root
