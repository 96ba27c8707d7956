"""Strategy ``hetero``: grow from every root, keep the largest region, repeat (OpenVINO's rule).

The reference grows anew from all roots after every region that it keeps. Here nothing is grown
twice without need:

- A growth depends only on what it has looked at. It is kept until a node among that joins a region,
  or a move in the topological order brings one before its members that its search had left out.
- Roots count in order, and a node that an earlier root's region holds is no root. How many earlier
  roots hold a node is counted, so that a change is passed on to the roots behind it alone.
- Growth in one biconnected block of the graph does not depend on any other: all ways between them
  go through one node. So blocks are grown one by one from the node by which they are entered, and
  only those behind members that stay; a block of free nodes alone joins as a whole.
- Two nodes side by side between the same two neighbours, as in a wide diamond, are twins: to swap
  them changes nothing, so their regions are alike. While the first is a root, the second need not
  be grown: its region is of the same size, and covers no later root that the first does not.

Tables: the growth of a root is ``kept[kept_at:kept_end]``: members, then what was seen, then the
limits, each the number of nodes at which a search ended, that of the nodes which must stay behind
these in the order, and both. ``watchers`` (plus one) is for each node the first place among what
was seen that holds it, ``kept_next`` (plus one) the next, ``kept_root`` whose growth that is.
"""

from __future__ import annotations

from subgraph.partition.search.blocks import find_blocks
from subgraph.partition.search.sorting import heap_push, heap_remove
from subgraph.partition.search.tables import Tables
from subgraph.partition.search.trial import NEVER, grow_in_block, see

NOTHING, FULL = -1, -2


def start_roots(s: Tables, count: int) -> None:
    """Prepare to search among the ``free`` ones of ``count`` nodes."""
    for node in range(count):
        s.vertex[node] = s.rep[node]
    find_blocks(s, count)
    for block in range(s.blocks):
        refused = int(not s.free[s.top[block]])
        for k in range(s.block_at[block], s.block_end[block]):
            refused += not s.free[s.block_list[k]]
        s.refused[block] = refused
    _find_twins(s, count)
    for node in range(count):
        if s.free[node] and not _is_shadowed(s, node):
            s.dirties = heap_push(s.dirty, s.dirty_place, s.dirty_key, s.dirties, node)


def _find_twins(s: Tables, count: int) -> None:
    """Find for each node its twin just before it, and the reverse, both plus one.

    Twins have one producer and one consumer, the same, and stand side by side in the lists of both.
    """
    for node in range(count):
        for at in range(s.in_at[node], s.in_end[node]):
            s.spot[s.in_links[at]] = at
    for node in range(count):
        if s.rep[node] == node and s.out_end[node] - s.out_at[node] > 2:
            for at in range(s.out_at[node] + 1, s.out_end[node]):
                one, two = s.out_links[at - 1], s.out_links[at]
                if (
                    _has_one_each(s, one)
                    and _has_one_each(s, two)
                    and s.out_links[s.out_at[one]] == s.out_links[s.out_at[two]]
                    and s.spot[two] == s.spot[one] + 1
                ):
                    s.twin[two] = one + 1
                    s.next_twin[one] = two + 1


def _has_one_each(s: Tables, node: int) -> bool:
    return s.in_end[node] - s.in_at[node] == 1 and s.out_end[node] - s.out_at[node] == 1


def _is_shadowed(s: Tables, root: int) -> bool:
    twin = s.twin[root] - 1
    return twin >= 0 and s.free[twin] != 0 and s.holders[twin] == 0


def find_largest(s: Tables) -> int:
    """Return the root of the largest region (of equals, the smallest root); its nodes as members.

    Returns:
        NOTHING if there is none, FULL if more room is needed for growths: the search then goes on
        after `move_kept`.
    """
    while s.dirties:
        root = s.dirty[0]
        s.dirties = heap_remove(s.dirty, s.dirty_place, s.dirty_key, s.dirties, root)
        known = s.kept_members[root] > 0
        if not s.free[root] or s.holders[root] or _is_shadowed(s, root):
            if known:
                _drop(s, root)
        elif not known:
            _grow(s, root)
            if s.kept_used + s.regions + s.seens + s.limits_end > s.kept_room:
                _push_dirty(s, root)
                return FULL
            _install(s, root)
    if not s.largests:
        return NOTHING
    root = s.largest[0]
    s.size = s.kept_members[root]
    for k in range(s.size):
        s.members[k] = s.kept[s.kept_at[root] + k]
    return root


def _push_dirty(s: Tables, node: int) -> None:
    s.dirties = heap_push(s.dirty, s.dirty_place, s.dirty_key, s.dirties, node)


def _look_again(s: Tables, node: int) -> None:
    """Note that ``node`` or its twin may have become a root, or may be none any more."""
    _look_at(s, node)
    if s.next_twin[node]:
        _look_at(s, s.next_twin[node] - 1)


def _look_at(s: Tables, node: int) -> None:
    if s.kept_members[node] or (s.free[node] and not s.holders[node]):
        _push_dirty(s, node)


def _grow(s: Tables, root: int) -> None:
    """Grow from ``root``: its ``region``, what was ``seen`` and the ``limits``."""
    s.seen_epoch += 1
    s.seens = s.limits_end = 0
    s.region[0] = root
    s.regions = 1
    s.entries[0] = root
    s.behinds[0] = 0
    count = 1
    while count:
        count -= 1
        entry, behind = s.entries[count], s.behinds[count]
        block = s.home[entry] or s.first_block[entry]
        while block:
            if block != behind:
                begin = s.regions
                _grow_block(s, entry, block - 1)
                for k in range(begin, s.regions):
                    node = s.region[k]
                    if s.first_block[node]:  # it is in other blocks too
                        s.entries[count] = node
                        s.behinds[count] = block
                        count += 1
            block = s.first_block[entry] if block == s.home[entry] else s.next_block[block - 1]
    for k in range(s.regions):
        see(s, s.region[k])


def _grow_block(s: Tables, entry: int, block: int) -> None:
    """Let what joins in a block from ``entry`` join the region."""
    if s.refused[block]:
        count = grow_in_block(s, entry, block)
        for k in range(count):
            _join(s, entry, s.grown[k])
        if s.edges:
            _limit(s)
    else:
        _join(s, entry, s.top[block])
        for k in range(s.block_at[block], s.block_end[block]):
            _join(s, entry, s.block_list[k])


def _join(s: Tables, entry: int, node: int) -> None:
    if node != entry:
        s.region[s.regions] = node
        s.regions += 1


def _limit(s: Tables) -> None:
    """Add the limits of the last trial."""
    at = s.limits_end
    s.limits[at] = s.edges
    s.limits[at + 1] = s.joins
    at += 2
    for k in range(s.edges):
        s.limits[at] = s.edge[k]
        at += 1
    for k in range(s.joins):
        s.limits[at] = s.joined[k]
        at += 1
    s.limits_end = at


def _install(s: Tables, root: int) -> None:
    """Keep the growth of ``root``."""
    begin = at = s.kept_used
    s.kept_at[root] = begin
    s.kept_members[root] = s.regions
    s.kept_seen[root] = s.seens
    for k in range(s.regions):
        s.kept[at] = s.region[k]
        at += 1
    for k in range(s.seens):
        _watch(s, root, s.seen[k], at)
        at += 1
    for k in range(s.limits_end):
        s.kept[at] = s.limits[k]
        at += 1
    s.kept_end[root] = s.kept_used = at
    s.largest_key[root] = -s.regions
    s.largests = heap_push(s.largest, s.largest_place, s.largest_key, s.largests, root)
    for k in range(begin, begin + s.regions):
        node = s.kept[k]
        if node > root:
            s.holders[node] += 1
            if s.holders[node] == 1:
                _look_again(s, node)


def _watch(s: Tables, root: int, node: int, at: int) -> None:
    s.kept[at] = node
    s.kept_root[at] = root
    s.kept_next[at] = s.watchers[node]
    s.watchers[node] = at + 1


def _drop(s: Tables, root: int) -> None:
    """Forget the growth of ``root``."""
    begin = s.kept_at[root]
    end = begin + s.kept_members[root]
    s.kept_members[root] = s.kept_seen[root] = 0
    s.kept_end[root] = 0
    s.largests = heap_remove(s.largest, s.largest_place, s.largest_key, s.largests, root)
    for k in range(begin, end):
        node = s.kept[k]
        if node > root:
            s.holders[node] -= 1
            if not s.holders[node] and s.free[node]:
                _look_again(s, node)


def _redo(s: Tables, root: int) -> None:
    _drop(s, root)
    _push_dirty(s, root)


def take(s: Tables) -> None:
    """Take note that the members are free no more; after `contraction.choose`."""
    for k in range(s.size):
        node = s.members[k]
        vertex = s.vertex[node]
        if s.home[vertex]:
            s.refused[s.home[vertex] - 1] += 1
        block = s.first_block[vertex]
        while block:
            s.refused[block - 1] += 1
            block = s.next_block[block - 1]
    for k in range(s.size):
        _look_again(s, s.members[k])
    for k in range(s.size):
        node = s.members[k]
        at = s.watchers[node]
        s.watchers[node] = 0
        while at:
            root = s.kept_root[at - 1]
            if _is_current(s, root, at - 1):
                _redo(s, root)
            at = s.kept_next[at - 1]


def follow_moves(s: Tables) -> None:
    """Grow again where the nodes that moved, after `contraction.choose`, make a difference."""
    s.epoch += 1
    count = 0
    for k in range(s.moves):
        node = s.moved[k]
        at = s.watchers[node]
        last = 0
        while at:
            root = s.kept_root[at - 1]
            following = s.kept_next[at - 1]
            if _is_current(s, root, at - 1):
                if s.touched_at[root] != s.epoch:
                    s.touched_at[root] = s.epoch
                    s.touched[count] = root
                    count += 1
                last = at
            elif last:
                s.kept_next[last - 1] = following
            else:
                s.watchers[node] = following
            at = following
    for k in range(count):
        if not _is_within_limits(s, s.touched[k]):
            _redo(s, s.touched[k])


def _is_current(s: Tables, root: int, at: int) -> bool:
    return s.kept_at[root] <= at < s.kept_end[root]


def _is_within_limits(s: Tables, root: int) -> bool:
    order, kept = s.order, s.kept
    at = s.kept_at[root] + s.kept_members[root] + s.kept_seen[root]
    while at < s.kept_end[root]:
        middle = at + 2 + kept[at]
        end = middle + kept[at + 1]
        first = NEVER
        for k in range(middle, end):
            first = min(first, order[kept[k]])
        for k in range(at + 2, middle):
            if order[kept[k]] > first:
                return False
        at = end
    return True


def count_kept(s: Tables, count: int) -> int:
    """Return the room that the growths of ``count`` nodes and the one at hand take."""
    room = s.regions + s.seens + s.limits_end
    for root in range(count):
        if s.kept_members[root]:
            room += s.kept_end[root] - s.kept_at[root]
    return room


def move_kept(s: Tables, count: int, room: int) -> None:
    """Move the growths of ``count`` nodes into the new tables, which have that room."""
    s.kept_room = room
    for node in range(count):
        s.watchers[node] = 0
    used = 0
    for root in range(count):
        if not s.kept_members[root]:
            continue
        begin = used
        seen = s.kept_at[root] + s.kept_members[root]
        for k in range(s.kept_at[root], s.kept_end[root]):
            node = s.kept[k]
            s.new_kept[used] = node
            if seen <= k < seen + s.kept_seen[root]:
                s.new_root[used] = root
                s.new_next[used] = s.watchers[node]
                s.watchers[node] = used + 1
            used += 1
        s.kept_at[root] = begin
        s.kept_end[root] = used
    s.kept_used = used
    s.kept, s.kept_root, s.kept_next = s.new_kept, s.new_root, s.new_next
