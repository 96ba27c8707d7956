"""The contracted graph, in which every chosen region is one node, and its topological order.

Reachability is decided here on the contracted graph, so that all regions together never form a
cycle. The order is maintained as Pearce and Kelly do it ("A dynamic topological
sort algorithm for directed acyclic graphs", 2006): a merge searches only between the positions of
the region's first and last node, and moves only what it finds there.
"""

from __future__ import annotations

from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.structures import ContractedGraph, Region


def prepare(graph: ContractedGraph, count: int) -> None:
    """Start without regions; the links are in their tables."""
    for node in range(count):
        graph.representative[node] = node
        graph.order[node] = node
    graph.in_used = graph.in_end[count - 1] if count else 0
    graph.out_used = graph.out_end[count - 1] if count else 0


def find_cones(graph: ContractedGraph, region: Region) -> bool:
    """Find descendants and ancestors of the members, between their first and last position.

    Returns:
        Whether a node is both; the members, which are free, are then not convex.
    """
    region.epoch += 1
    region.descendant_count = 0
    region.ancestor_count = 0
    first = last = graph.order[region.members[0]]
    for k in range(region.size):
        member = region.members[k]
        region.inside[member] = region.epoch
        position = graph.order[member]
        first = min(first, position)
        last = max(last, position)
    if last - first < region.size:  # nothing lies between
        return False
    rep = graph.representative
    for k in range(region.size):
        member = region.members[k]
        for at in range(graph.out_at[member], graph.out_end[member]):
            _reach_descendant(graph, region, rep[graph.out_links[at]], last)
        graph.links_followed += graph.out_end[member] - graph.out_at[member]
    k = 0
    while k < region.descendant_count:
        node = region.descendants[k]
        k += 1
        for at in range(graph.out_at[node], graph.out_end[node]):
            _reach_descendant(graph, region, rep[graph.out_links[at]], last)
        graph.links_followed += graph.out_end[node] - graph.out_at[node]
    common = False
    for k in range(region.size):
        member = region.members[k]
        for at in range(graph.in_at[member], graph.in_end[member]):
            common = _reach_ancestor(graph, region, rep[graph.in_links[at]], first) or common
        graph.links_followed += graph.in_end[member] - graph.in_at[member]
    k = 0
    while k < region.ancestor_count:
        node = region.ancestors[k]
        k += 1
        for at in range(graph.in_at[node], graph.in_end[node]):
            common = _reach_ancestor(graph, region, rep[graph.in_links[at]], first) or common
        graph.links_followed += graph.in_end[node] - graph.in_at[node]
    return common


def _reach_descendant(graph: ContractedGraph, region: Region, node: int, last: int) -> None:
    if (
        graph.order[node] < last
        and region.descendant_epoch[node] != region.epoch
        and region.inside[node] != region.epoch
    ):
        region.descendant_epoch[node] = region.epoch
        region.descendants[region.descendant_count] = node
        region.descendant_count += 1


def _reach_ancestor(graph: ContractedGraph, region: Region, node: int, first: int) -> bool:
    if (
        graph.order[node] > first
        and region.ancestor_epoch[node] != region.epoch
        and region.inside[node] != region.epoch
    ):
        region.ancestor_epoch[node] = region.epoch
        region.ancestors[region.ancestor_count] = node
        region.ancestor_count += 1
        return region.descendant_epoch[node] == region.epoch
    return False


def choose(graph: ContractedGraph, region: Region) -> None:
    """Make a region of the members, sorted, which are free and convex; after `find_cones`.

    The first member is the region's representative. ``moved[:move_count]`` are the other nodes
    whose position has changed.
    """
    region.move_count = 0
    for k in range(region.size):
        graph.free[region.members[k]] = 0
    if region.size == 1:
        return
    if region.ancestor_count or region.descendant_count:
        _reorder(graph, region)
    _contract(graph, region)


def _reorder(graph: ContractedGraph, region: Region) -> None:
    """Move ancestors to the first of all the positions, and descendants to the last ones."""
    order, sweep, slots = graph.order, region.sweep, region.slots
    sort_by(order, region.ancestors, 0, region.ancestor_count)
    sort_by(order, region.descendants, 0, region.descendant_count)
    count = 0
    for k in range(region.ancestor_count):
        sweep[count] = region.ancestors[k]
        count += 1
    for k in range(region.size):
        sweep[count] = region.members[k]
        count += 1
    for k in range(region.descendant_count):
        sweep[count] = region.descendants[k]
        count += 1
    sort_by(order, sweep, 0, count)
    for k in range(count):
        slots[k] = order[sweep[k]]
    for k in range(region.ancestor_count):
        _move(graph, region, region.ancestors[k], slots[k])
    for k in range(region.descendant_count):
        _move(graph, region, region.descendants[k], slots[count - region.descendant_count + k])
    order[region.members[0]] = slots[region.ancestor_count]


def _move(graph: ContractedGraph, region: Region, node: int, slot: int) -> None:
    if graph.order[node] != slot:
        graph.order[node] = slot
        region.moved[region.move_count] = node
        region.move_count += 1


def _contract(graph: ContractedGraph, region: Region) -> None:
    first = region.members[0]
    in_begin, out_begin = graph.in_used, graph.out_used
    region.epoch += 1
    for k in range(region.size):
        graph.representative[region.members[k]] = first
    for k in range(region.size):
        member = region.members[k]
        for at in range(graph.in_at[member], graph.in_end[member]):
            other = graph.in_links[at]
            if graph.representative[other] != first and region.note[other] != region.epoch:
                region.note[other] = region.epoch
                graph.in_links[graph.in_used] = other
                graph.in_used += 1
    region.epoch += 1
    for k in range(region.size):
        member = region.members[k]
        for at in range(graph.out_at[member], graph.out_end[member]):
            other = graph.out_links[at]
            if graph.representative[other] != first and region.note[other] != region.epoch:
                region.note[other] = region.epoch
                graph.out_links[graph.out_used] = other
                graph.out_used += 1
    graph.in_at[first], graph.in_end[first] = in_begin, graph.in_used
    graph.out_at[first], graph.out_end[first] = out_begin, graph.out_used


def shrink(graph: ContractedGraph, region: Region, keep: int, common: bool) -> None:
    """Reduce the members to a convex, connected part that holds ``keep``; after `find_cones`.

    First members with a path to ``keep`` over a node outside are removed; then, in topological
    order, members that a path from remaining members reaches over a node outside; last, members
    that are not connected to ``keep``. Removed members are in ``moved[:move_count]``. Takes linear
    time.

    Args:
        graph: The contracted graph.
        region: The members.
        keep: A member.
        common: What `find_cones` returned.
    """
    if common:
        _drop_detours(graph, region, keep)
    else:
        mark_inside(region)
    keep_component(graph, region, keep)


def mark_inside(region: Region) -> None:
    """Mark the members in ``inside``."""
    region.epoch += 1
    for k in range(region.size):
        region.inside[region.members[k]] = region.epoch


def _drop_detours(graph: ContractedGraph, region: Region, keep: int) -> None:
    """Unmark members in ``inside`` until no path between members has a node outside."""
    rep, sweep, note = graph.representative, region.sweep, region.note
    marked = region.epoch
    count = 0
    for k in range(region.size):
        sweep[count] = region.members[k]
        count += 1
    for k in range(region.ancestor_count):
        if region.descendant_epoch[region.ancestors[k]] == marked:
            sweep[count] = region.ancestors[k]
            count += 1
    sort_by(graph.order, sweep, 0, count)
    leads = region.epoch + 1  # to keep, inside all the way
    strays = region.epoch + 2  # to keep, over a node outside
    region.epoch += 2
    for k in range(count - 1, -1, -1):
        node = sweep[k]
        for at in range(graph.out_at[node], graph.out_end[node]):
            there = rep[graph.out_links[at]]
            if note[there] == strays:
                note[node] = strays
                break
            if there == keep or note[there] == leads:
                if region.inside[node] != marked:
                    note[node] = strays
                    break
                note[node] = leads
    stays = region.epoch + 1
    reached = region.epoch + 2  # from what stays, over a node outside
    region.epoch += 2
    for k in range(count):
        node = sweep[k]
        taken = region.inside[node] == marked and note[node] != strays
        lost = False
        for at in range(graph.in_at[node], graph.in_end[node]):
            there = rep[graph.in_links[at]]
            if note[there] == reached or (not taken and note[there] == stays):
                lost = True
                break
        if lost:
            note[node] = reached
        elif taken:
            note[node] = stays
            region.inside[node] = stays
    region.epoch = stays + 2
    for k in range(region.size):
        member = region.members[k]
        if region.inside[member] == stays:
            region.inside[member] = region.epoch


def keep_component(graph: ContractedGraph, region: Region, start: int) -> None:
    """Reduce the members to those in ``inside`` that are connected to ``start`` among themselves.

    Removed members are in ``moved[:move_count]``.

    Args:
        graph: The contracted graph.
        region: The members, marked in ``inside``.
        start: A member.
    """
    inside, epoch = region.inside, region.epoch
    region.epoch += 1
    region.sweep[0] = start
    inside[start] = region.epoch
    count = 1
    k = 0
    while k < count:
        node = region.sweep[k]
        k += 1
        for at in range(graph.in_at[node], graph.in_end[node]):
            there = graph.in_links[at]
            if inside[there] == epoch:
                inside[there] = region.epoch
                region.sweep[count] = there
                count += 1
        for at in range(graph.out_at[node], graph.out_end[node]):
            there = graph.out_links[at]
            if inside[there] == epoch:
                inside[there] = region.epoch
                region.sweep[count] = there
                count += 1
    region.move_count = 0
    size = 0
    for k in range(region.size):
        member = region.members[k]
        if inside[member] == region.epoch:
            region.members[size] = member
            size += 1
        else:
            region.moved[region.move_count] = member
            region.move_count += 1
    region.size = size
