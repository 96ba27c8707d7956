"""What a search can be asked for: one entry for Python and for machine code alike."""

from __future__ import annotations

from subgraph.partition.search.contraction import choose, find_cones, prepare, shrink
from subgraph.partition.search.growing import begin_growth, go_on
from subgraph.partition.search.hetero import (
    count_kept,
    find_largest,
    follow_moves,
    move_kept,
    start_roots,
    take,
)
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.tables import Tables

# The operations; ``told[1]`` and ``told[2]`` are their arguments and results.
PREPARE = 0  # told[1]: number of nodes
CHOOSE = 1  # members, sorted; told[1]: how many
SHRINK = 2  # members; told[1]: how many, told[2]: the one to keep; returns whether it was needed
COMPONENT = 3  # alike
START_ROOTS = 4
FIND_LARGEST = 5  # returns the root; members are sorted, told[1]: how many
TAKE_LARGEST = 6  # alike, and makes a region of it
TAKE = 7  # told[1]: how many members are free no more
COUNT_KEPT = 8  # returns the room that growths take
MOVE_KEPT = 9  # told[1]: room in the new tables
GROW = 10  # told[1]: start; returns how many neighbours of told[1] are asked about, by told[2]; or
ANSWER = 11  # alike; or 0 at the end: told[1] members, sorted, told[2] that were given up
TAKE_GROWN = 12  # makes a region of them


def serve(s: Tables) -> int:
    """Do one operation and return its result."""
    operation = s.told[0]
    if operation == PREPARE:
        s.count = s.told[1]
        prepare(s, s.count)
    elif operation == CHOOSE:
        s.size = s.told[1]
        _choose(s)
    elif operation in (SHRINK, COMPONENT):
        s.size = s.told[1]
        _shrink(s, s.told[2], operation == SHRINK)
    elif operation == START_ROOTS:
        start_roots(s, s.count)
        s.has_roots = 1
    elif operation in (FIND_LARGEST, TAKE_LARGEST):
        return _find_largest(s, operation == TAKE_LARGEST)
    elif operation == TAKE:
        s.size = s.told[1]
        for k in range(s.size):
            s.free[s.members[k]] = 0
        take(s)
    elif operation == COUNT_KEPT:
        return count_kept(s, s.count)
    elif operation in (GROW, ANSWER):
        return _grow(s, operation == GROW)
    elif operation == TAKE_GROWN:
        choose(s)
    elif operation == MOVE_KEPT:
        move_kept(s, s.count, s.told[1])
    return 0


def _grow(s: Tables, begins: bool) -> int:
    count = begin_growth(s, s.told[1]) if begins else go_on(s)
    s.told[1] = s.growing if count else s.size
    s.told[2] = s.phase if count else s.given_up
    return count


def _choose(s: Tables) -> None:
    find_cones(s)
    choose(s)
    if s.has_roots:
        follow_moves(s)


def _shrink(s: Tables, keep: int, convex: bool) -> None:
    common = find_cones(s)
    shrink(s, keep, common and convex)
    s.told[1] = s.size
    s.told[2] = s.moves


def _find_largest(s: Tables, taken: bool) -> int:
    root = find_largest(s)
    if root >= 0:
        sort_by(s.rep, s.members, 0, s.size)  # free nodes stand for themselves
        s.told[1] = s.size
        if taken:
            _choose(s)
            take(s)
    return root
