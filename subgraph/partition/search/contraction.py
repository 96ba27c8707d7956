"""The contracted graph, in which every region is one node, and its topological order.

A region is contracted: its first member represents it, and takes over the edges of all members to
nodes outside. A region is contracted only if its members are convex, so the contracted graph has no
cycle, which is the invariant of all regions together (docs/partition.md, number 4). To be convex is
decided on the contracted graph: no node outside is an ancestor of one member and a descendant of
another.

The topological order is maintained as by D. J. Pearce and P. H. J. Kelly, "A dynamic topological
sort algorithm for directed acyclic graphs" (ACM Journal of Experimental Algorithmics 11, 2006): a
contraction searches only between the positions of the region's first and last member, and moves
only the nodes that it finds there. With n such nodes and e edges at them it takes O(n log n + e);
the logarithm is that of sorting.
"""

from __future__ import annotations

from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.structures import ContractedGraph, Region


def reset(graph: ContractedGraph, count: int) -> None:
    """Start without regions; the edges of ``count`` nodes are in their tables."""
    for node in range(count):
        graph.representative[node] = node
        graph.order[node] = node
    graph.producers_end = graph.in_end[count - 1] if count else 0
    graph.consumers_end = graph.out_end[count - 1] if count else 0


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
        region.member_epoch[member] = region.epoch
        position = graph.order[member]
        first = min(first, position)
        last = max(last, position)
    if last - first < region.size:  # nothing lies between
        return False
    for k in range(region.size):
        _visit_consumers(graph, region, region.members[k], last)
    k = 0
    while k < region.descendant_count:
        _visit_consumers(graph, region, region.descendants[k], last)
        k += 1
    is_common = False
    for k in range(region.size):
        is_common = _visit_producers(graph, region, region.members[k], first) or is_common
    k = 0
    while k < region.ancestor_count:
        is_common = _visit_producers(graph, region, region.ancestors[k], first) or is_common
        k += 1
    return is_common


def _visit_consumers(graph: ContractedGraph, region: Region, node: int, last: int) -> None:
    """Add the consumers of ``node`` before the position ``last`` to the descendants."""
    epoch = region.epoch
    for edge in range(graph.out_begin[node], graph.out_end[node]):
        neighbour = graph.representative[graph.consumers[edge]]
        if (
            graph.order[neighbour] < last
            and region.descendant_epoch[neighbour] != epoch
            and region.member_epoch[neighbour] != epoch
        ):
            region.descendant_epoch[neighbour] = epoch
            region.descendants[region.descendant_count] = neighbour
            region.descendant_count += 1


def _visit_producers(graph: ContractedGraph, region: Region, node: int, first: int) -> bool:
    """Add the producers of ``node`` after the position ``first`` to the ancestors.

    Returns:
        Whether one of them is a descendant too.
    """
    epoch = region.epoch
    is_common = False
    for edge in range(graph.in_begin[node], graph.in_end[node]):
        neighbour = graph.representative[graph.producers[edge]]
        if (
            graph.order[neighbour] > first
            and region.ancestor_epoch[neighbour] != epoch
            and region.member_epoch[neighbour] != epoch
        ):
            region.ancestor_epoch[neighbour] = epoch
            region.ancestors[region.ancestor_count] = neighbour
            region.ancestor_count += 1
            is_common = is_common or region.descendant_epoch[neighbour] == epoch
    return is_common


def contract(graph: ContractedGraph, region: Region) -> None:
    """Make a region of the members, sorted, which are free and convex; after `find_cones`.

    The first member is the region's representative. ``moved[:moved_count]`` are the nodes outside
    whose position has changed.
    """
    region.moved_count = 0
    for k in range(region.size):
        graph.free[region.members[k]] = 0
    if region.size == 1:
        return
    if region.ancestor_count or region.descendant_count:
        _reorder(graph, region)
    _merge_edges(graph, region)


def _reorder(graph: ContractedGraph, region: Region) -> None:
    """Make the members adjacent in the order: ancestors, members, descendants.

    These share out the positions that they had together. One position for the members is enough;
    their others remain unused.
    """
    order, nodes, positions = graph.order, region.visit_order, region.positions
    sort_by(order, region.ancestors, 0, region.ancestor_count)
    sort_by(order, region.descendants, 0, region.descendant_count)
    count = 0
    for k in range(region.ancestor_count):
        nodes[count] = region.ancestors[k]
        count += 1
    for k in range(region.size):
        nodes[count] = region.members[k]
        count += 1
    for k in range(region.descendant_count):
        nodes[count] = region.descendants[k]
        count += 1
    sort_by(order, nodes, 0, count)
    for k in range(count):
        positions[k] = order[nodes[k]]
    for k in range(region.ancestor_count):
        _set_position(graph, region, region.ancestors[k], positions[k])
    last_positions = count - region.descendant_count
    for k in range(region.descendant_count):
        _set_position(graph, region, region.descendants[k], positions[last_positions + k])
    order[region.members[0]] = positions[region.ancestor_count]


def _set_position(graph: ContractedGraph, region: Region, node: int, position: int) -> None:
    if graph.order[node] != position:
        graph.order[node] = position
        region.moved[region.moved_count] = node
        region.moved_count += 1


def _merge_edges(graph: ContractedGraph, region: Region) -> None:
    """Let the first member represent all; its new edges are those that leave the region."""
    # The new lists are appended, with each node outside once; tables of edges have room for them.
    first = region.members[0]
    in_begin, out_begin = graph.producers_end, graph.consumers_end
    region.epoch += 1
    for k in range(region.size):
        graph.representative[region.members[k]] = first
    for k in range(region.size):
        member = region.members[k]
        for edge in range(graph.in_begin[member], graph.in_end[member]):
            neighbour = graph.producers[edge]
            if graph.representative[neighbour] != first and region.mark[neighbour] != region.epoch:
                region.mark[neighbour] = region.epoch
                graph.producers[graph.producers_end] = neighbour
                graph.producers_end += 1
    region.epoch += 1
    for k in range(region.size):
        member = region.members[k]
        for edge in range(graph.out_begin[member], graph.out_end[member]):
            neighbour = graph.consumers[edge]
            if graph.representative[neighbour] != first and region.mark[neighbour] != region.epoch:
                region.mark[neighbour] = region.epoch
                graph.consumers[graph.consumers_end] = neighbour
                graph.consumers_end += 1
    graph.in_begin[first], graph.in_end[first] = in_begin, graph.producers_end
    graph.out_begin[first], graph.out_end[first] = out_begin, graph.consumers_end


def shrink(graph: ContractedGraph, region: Region, anchor: int, is_common: bool) -> None:
    """Reduce the members to a convex, connected part that holds ``anchor``; after `find_cones`.

    First members with a path to ``anchor`` over a node outside are removed; then, in topological
    order, members that a path from remaining members reaches over a node outside; last, members
    that are not connected to ``anchor``. Takes linear time but for sorting.

    Args:
        graph: The contracted graph.
        region: The members; those that leave are ``removed[:removed_count]``.
        anchor: A member.
        is_common: The result of `find_cones`.
    """
    if is_common:
        _remove_detours(graph, region, anchor)
    else:
        mark_members(region)
    restrict_to_component(graph, region, anchor)


def mark_members(region: Region) -> None:
    """Mark the members in ``member_epoch``."""
    region.epoch += 1
    for k in range(region.size):
        region.member_epoch[region.members[k]] = region.epoch


def _remove_detours(graph: ContractedGraph, region: Region, anchor: int) -> None:
    """Unmark members in ``member_epoch`` until no path between members has a node outside."""
    nodes, marked = region.visit_order, region.epoch
    count = 0
    for k in range(region.size):
        nodes[count] = region.members[k]
        count += 1
    # Nodes outside that are ancestors and descendants lie on paths between members.
    for k in range(region.ancestor_count):
        if region.descendant_epoch[region.ancestors[k]] == marked:
            nodes[count] = region.ancestors[k]
            count += 1
    sort_by(graph.order, nodes, 0, count)
    detour = _mark_detours_to_anchor(graph, region, anchor, count, marked)
    stays = _mark_reached_by_detours(graph, region, count, marked, detour)
    region.epoch += 1
    for k in range(region.size):
        member = region.members[k]
        if region.member_epoch[member] == stays:
            region.member_epoch[member] = region.epoch


def _mark_detours_to_anchor(
    graph: ContractedGraph, region: Region, anchor: int, count: int, marked: int
) -> int:
    """Mark the nodes with a path to ``anchor`` over a node outside.

    Args:
        graph: The contracted graph.
        region: ``visit_order[:count]`` are the members and the nodes between them, in order.
        anchor: A member.
        count: Number of these nodes.
        marked: The entry of ``member_epoch`` for members.

    Returns:
        The entry of ``mark`` for these nodes.
    """
    mark = region.mark
    inside = region.epoch + 1  # a path to the anchor stays among members
    detour = region.epoch + 2  # a path to the anchor has a node outside
    region.epoch += 2
    # In reverse topological order all consumers of a node are marked before the node.
    for k in range(count - 1, -1, -1):
        node = region.visit_order[k]
        for edge in range(graph.out_begin[node], graph.out_end[node]):
            neighbour = graph.representative[graph.consumers[edge]]
            if mark[neighbour] == detour:
                mark[node] = detour
                break
            if neighbour == anchor or mark[neighbour] == inside:
                if region.member_epoch[node] != marked:
                    mark[node] = detour
                    break
                mark[node] = inside
    return detour


def _mark_reached_by_detours(
    graph: ContractedGraph, region: Region, count: int, marked: int, detour: int
) -> int:
    """Mark, in topological order, the members that may stay in ``member_epoch``.

    A member leaves if it is on a detour, or if a path from one that stays reaches it over a node
    outside.

    Args:
        graph: The contracted graph.
        region: ``visit_order[:count]`` are the members and the nodes between them, in order.
        count: Number of these nodes.
        marked: The entry of ``member_epoch`` for members until now.
        detour: The entry of ``mark`` for nodes on a detour.

    Returns:
        The entry of ``member_epoch`` for members that stay.
    """
    mark = region.mark
    stays = region.epoch + 1
    reached = region.epoch + 2  # from one that stays, over a node outside
    region.epoch += 2
    # In topological order all producers of a node are marked before the node.
    for k in range(count):
        node = region.visit_order[k]
        may_stay = region.member_epoch[node] == marked and mark[node] != detour
        is_reached = False
        for edge in range(graph.in_begin[node], graph.in_end[node]):
            neighbour = graph.representative[graph.producers[edge]]
            if mark[neighbour] == reached or (not may_stay and mark[neighbour] == stays):
                is_reached = True
                break
        if is_reached:
            mark[node] = reached
        elif may_stay:
            mark[node] = stays
            region.member_epoch[node] = stays
    return stays


def restrict_to_component(graph: ContractedGraph, region: Region, start: int) -> None:
    """Reduce the members to those that are connected to ``start`` among themselves.

    Args:
        graph: The contracted graph.
        region: The members, marked in ``member_epoch``, perhaps not all; those that leave are
            ``removed[:removed_count]``.
        start: A marked member.
    """
    marked = region.epoch
    region.epoch += 1
    region.visit_order[0] = start
    region.member_epoch[start] = region.epoch
    count = 1
    k = 0
    while k < count:
        node = region.visit_order[k]
        k += 1
        for edge in range(graph.in_begin[node], graph.in_end[node]):
            count = _visit_member(region, graph.producers[edge], marked, count)
        for edge in range(graph.out_begin[node], graph.out_end[node]):
            count = _visit_member(region, graph.consumers[edge], marked, count)
    region.removed_count = 0
    size = 0
    for k in range(region.size):
        member = region.members[k]
        if region.member_epoch[member] == region.epoch:
            region.members[size] = member
            size += 1
        else:
            region.removed[region.removed_count] = member
            region.removed_count += 1
    region.size = size


def _visit_member(region: Region, node: int, marked: int, count: int) -> int:
    """Append ``node`` to ``visit_order[:count]`` if it is a marked member; return the new count."""
    if region.member_epoch[node] != marked:
        return count
    region.member_epoch[node] = region.epoch
    region.visit_order[count] = node
    return count + 1
