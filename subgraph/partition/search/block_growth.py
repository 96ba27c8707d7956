"""One growth of strategy ``hetero`` inside a block: grow, reject, roll back.

The literal rule of the reference: add or reject one neighbour after the other; whenever a rejected
node lies on a path between two members, take members back, last first, and reject them, until none
does. Members have a rank, their position in the order of joining.

Here each node outside from which a path leads to a member has two labels: the least rank of such a
member (``min_descendant_rank``), and, if it lies between two members, the least rank of a member
from which a path leads to it (``min_ancestor_rank``). A rejected node must never have both. If a
node is rejected that has, the greater label is the rank of the first member to take back. Labels
are listed by the member whose joining caused them, so that taking it back removes them.

Invariant between two steps: no rejected node lies between two members. Each label is set at most
once before it is removed. So the steps take linear time in the edges of labelled nodes, those of
members that are taken back included, and one scan of ``pruned`` for each member that comes before
all earlier ones in the order.
"""

from __future__ import annotations

from subgraph.partition.search.blocks import next_neighbour
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.structures import BlockGrowth, Blocks, ContractedGraph

INFINITE = 1 << 30


def grow_in_block(
    graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, start: int, block: int
) -> int:
    """Grow from ``start``, consumers first, depth first, among the vertices of ``block``.

    Args:
        graph: The contracted graph.
        blocks: Its blocks.
        growth: Gets the region as ``members``; nodes on which it depends are added to
            ``dependencies``.
        start: The node from which the region grows.
        block: The block.

    Returns:
        The number of nodes of the region.
    """
    growth.epoch += 1
    growth.size = growth.joined_count = growth.boundary_count = growth.rejected_count = 0
    growth.ancestor_count = growth.descendant_count = growth.pruned_count = 0
    growth.first_position = INFINITE
    growth.block = block
    try_to_join(graph, blocks, growth, start)
    growth.stack[0] = start
    growth.cursor[start] = 0
    depth = 1
    while depth:
        node = growth.stack[depth - 1]
        if not growth.rank[node]:  # rolled back: its neighbours are not followed
            depth -= 1
            continue
        unmerged = next_neighbour(graph, growth.cursor, node)
        if unmerged < 0:
            depth -= 1
            continue
        neighbour = graph.representative[unmerged]
        if (
            growth.rank[neighbour]
            or growth.rejected[neighbour]
            or not in_block(blocks, growth, blocks.vertex[unmerged])
        ):
            continue
        if not graph.free[neighbour]:
            reject(growth, neighbour)
        elif try_to_join(graph, blocks, growth, neighbour):
            growth.stack[depth] = neighbour
            growth.cursor[neighbour] = 0
            depth += 1
        else:
            reject(growth, neighbour)
    count = growth.size
    _finish(growth)
    return count


def in_block(blocks: Blocks, growth: BlockGrowth, vertex: int) -> bool:
    """Return whether a vertex is in the block of the growth.

    Args:
        blocks: The blocks.
        growth: The growth.
        vertex: The representative of a node when the blocks were found.
    """
    return blocks.parent_block[vertex] == growth.block + 1 or blocks.top[growth.block] == vertex


def _finish(growth: BlockGrowth) -> None:
    """Complete the dependencies, leave only unexplored nodes in ``boundary``, clear all labels."""
    left = 0
    for k in range(growth.boundary_count):
        node = growth.boundary[k]
        if growth.explored_epoch[node] != growth.epoch:
            growth.boundary[left] = node
            left += 1
            depend_on(growth, node)
    growth.boundary_count = left
    for k in range(growth.joined_count):
        depend_on(growth, growth.joined[k])
    for k in range(growth.rejected_count):
        growth.rejected[growth.rejected_nodes[k]] = 0
        depend_on(growth, growth.rejected_nodes[k])
    _undo(growth, 0)


def depend_on(growth: BlockGrowth, node: int) -> None:
    """Note that the grown region depends on ``node``."""
    if growth.dependency_epoch[node] != growth.root_epoch:
        growth.dependency_epoch[node] = growth.root_epoch
        growth.dependencies[growth.dependency_count] = node
        growth.dependency_count += 1


def try_to_join(graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, node: int) -> bool:
    """Let ``node`` join, unless a rejected node would then lie between two members.

    Args:
        graph: The contracted graph.
        blocks: Its blocks.
        growth: The growth.
        node: A free neighbour of a member.

    Returns:
        Whether it joined.
    """
    if _has_rejected_producer_between(graph, growth, node):
        return False
    joins_between = False  # whether a consumer will lie between ``node`` and another member
    for edge in range(graph.out_begin[node], graph.out_end[node]):
        neighbour = graph.representative[graph.consumers[edge]]
        # A consumer with a path to a member would lie between ``node`` and that member.
        if growth.min_descendant_rank[neighbour]:
            if growth.rejected[neighbour]:
                return False
            joins_between = joins_between or not growth.min_ancestor_rank[neighbour]
    rank = growth.size
    _append_member(growth, node)
    growth.pending_count = 0
    if joins_between:
        _enqueue(growth, node, rank + 1)
    # Labels that are incomplete because of a rejected node leave with the member.
    if _label_ancestors(graph, blocks, growth, node, rank + 1) or _propagate_down(graph, growth):
        roll_back(growth, rank)
        return False
    _note_joined(growth, node, rank)
    return True


def _has_rejected_producer_between(graph: ContractedGraph, growth: BlockGrowth, node: int) -> bool:
    """Return whether a rejected producer of ``node`` is a consumer of a member."""
    for edge in range(graph.in_begin[node], graph.in_end[node]):
        neighbour = graph.representative[graph.producers[edge]]
        if growth.rejected[neighbour]:
            for above in range(graph.in_begin[neighbour], graph.in_end[neighbour]):
                if growth.rank[graph.representative[graph.producers[above]]]:
                    return True
    return False


def _append_member(growth: BlockGrowth, node: int) -> None:
    """Append ``node`` to the members, and save what `_undo` restores."""
    rank = growth.size
    growth.members[rank] = node
    growth.size += 1
    growth.rank[node] = rank + 1
    growth.saved_ancestor_count[rank] = growth.ancestor_count
    growth.saved_descendant_count[rank] = growth.descendant_count
    growth.saved_min_descendant_rank[rank] = growth.min_descendant_rank[node]
    growth.saved_min_ancestor_rank[rank] = growth.min_ancestor_rank[node]
    growth.saved_first_position[rank] = growth.first_position
    growth.saved_pruned_count[rank] = growth.pruned_count
    growth.min_descendant_rank[node] = growth.min_ancestor_rank[node] = 0


def _note_joined(growth: BlockGrowth, node: int, rank: int) -> None:
    """Note that ``node`` stays a member for now, and the nodes that its joining has found."""
    if growth.joined_epoch[node] != growth.epoch:
        growth.joined_epoch[node] = growth.epoch
        growth.joined[growth.joined_count] = node
        growth.joined_count += 1
    for k in range(growth.saved_ancestor_count[rank], growth.ancestor_count):
        growth.explored_epoch[growth.ancestors[k]] = growth.epoch
        depend_on(growth, growth.ancestors[k])
    for k in range(growth.saved_pruned_count[rank], growth.pruned_count):
        outside = growth.pruned[k]
        if growth.boundary_epoch[outside] != growth.epoch:
            growth.boundary_epoch[outside] = growth.epoch
            growth.boundary[growth.boundary_count] = outside
            growth.boundary_count += 1


def _enqueue(growth: BlockGrowth, node: int, label: int) -> None:
    """Note that nodes below ``node`` may get ``label``, a rank plus one."""
    growth.pending[growth.pending_count] = node
    growth.pending_rank[growth.pending_count] = label
    growth.pending_count += 1


def _label_ancestors(
    graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, node: int, label: int
) -> bool:
    """Label the nodes after the first member from which a path leads to ``node``.

    Args:
        graph: The contracted graph.
        blocks: Its blocks.
        growth: The growth.
        node: The member that has joined last.
        label: Its rank plus one.

    Returns:
        Whether one of them is rejected and lies between members; the labels are then incomplete.
    """
    begin = growth.ancestor_count
    size = _label_pruned(graph, growth, node, label)
    is_between = size > 0  # whether a path leads from a member to the nodes that were found
    growth.work[size] = node
    size += 1
    while size:
        size -= 1
        current = growth.work[size]
        is_above_rejected = current < 0  # such nodes are on the stack as their complement
        if is_above_rejected:
            current = ~current
        elif growth.rejected[current]:
            is_above_rejected = True
        for edge in range(graph.in_begin[current], graph.in_end[current]):
            unmerged = graph.producers[edge]
            if not in_block(blocks, growth, blocks.vertex[unmerged]):
                continue
            neighbour = graph.representative[unmerged]
            if growth.rank[neighbour] or growth.min_ancestor_rank[neighbour]:
                if is_above_rejected:
                    return True
                is_between = True
            elif growth.min_descendant_rank[neighbour]:
                continue
            # Before the first member no node lies between members. If an earlier member joins, the
            # search continues there (`_label_pruned`).
            elif graph.order[neighbour] < growth.first_position:
                _prune(growth, neighbour)
            else:
                _label_ancestor(growth, neighbour, label)
                growth.work[size] = ~neighbour if is_above_rejected else neighbour
                size += 1
    if is_between and growth.ancestor_count > begin:
        sort_by(graph.order, growth.ancestors, begin, growth.ancestor_count)
        return _label_between(graph, growth, begin)
    return False


def _label_pruned(graph: ContractedGraph, growth: BlockGrowth, node: int, label: int) -> int:
    """Label the pruned nodes that come after ``node``, if it is the new first member.

    Args:
        graph: The contracted graph.
        growth: The growth; these nodes are put into ``work``.
        node: The member that has joined last.
        label: Its rank plus one.

    Returns:
        The number of these nodes.
    """
    size = 0
    if graph.order[node] < growth.first_position:
        growth.first_position = graph.order[node]
        for k in range(growth.pruned_count):
            pruned = growth.pruned[k]
            if (
                graph.order[pruned] > growth.first_position
                and not growth.min_descendant_rank[pruned]
                and not growth.rank[pruned]
            ):
                _label_ancestor(growth, pruned, label)
                growth.work[size] = pruned
                size += 1
    return size


def _label_ancestor(growth: BlockGrowth, node: int, label: int) -> None:
    growth.min_descendant_rank[node] = label
    growth.ancestors[growth.ancestor_count] = node
    growth.ancestor_count += 1


def _prune(growth: BlockGrowth, node: int) -> None:
    """Note that the search ends at ``node``, which comes before the first member."""
    if not growth.is_pruned[node]:
        growth.is_pruned[node] = 1
        growth.pruned[growth.pruned_count] = node
        growth.pruned_count += 1


def _label_between(graph: ContractedGraph, growth: BlockGrowth, begin: int) -> bool:
    """Label the new nodes to which a path leads from a member, in order.

    Args:
        graph: The contracted graph.
        growth: The growth.
        begin: Index of the first new node among ``ancestors``.

    Returns:
        Whether one of them is rejected; the labels are then incomplete.
    """
    for k in range(begin, growth.ancestor_count):
        node = growth.ancestors[k]
        least = INFINITE
        for edge in range(graph.in_begin[node], graph.in_end[node]):
            neighbour = graph.representative[graph.producers[edge]]
            label = growth.rank[neighbour] or growth.min_ancestor_rank[neighbour]
            if label and label < least:
                least = label
        if least != INFINITE:
            if growth.rejected[node]:
                return True
            growth.min_ancestor_rank[node] = least
            _enqueue(growth, node, least)
    return False


def _propagate_down(graph: ContractedGraph, growth: BlockGrowth) -> bool:
    """Label the nodes that lie between members now.

    Returns:
        Whether one of them is rejected; the labels are then incomplete.
    """
    k = 0
    while k < growth.pending_count:
        node, label = growth.pending[k], growth.pending_rank[k]
        for edge in range(graph.out_begin[node], graph.out_end[node]):
            neighbour = graph.representative[graph.consumers[edge]]
            if growth.min_descendant_rank[neighbour] and not growth.min_ancestor_rank[neighbour]:
                if growth.rejected[neighbour]:
                    return True
                growth.min_ancestor_rank[neighbour] = label
                growth.descendants[growth.descendant_count] = neighbour
                growth.descendant_count += 1
                _enqueue(growth, neighbour, label)
        k += 1
    return False


def reject(growth: BlockGrowth, node: int) -> None:
    """Reject a neighbour; take back members, the last first, until it lies between no two."""
    work = growth.work
    work[0] = node
    count = 1
    while count:
        count -= 1
        node = work[count]
        _mark_rejected(growth, node)
        if growth.min_ancestor_rank[node]:
            rank = max(growth.min_ancestor_rank[node], growth.min_descendant_rank[node]) - 1
            size = growth.size
            roll_back(growth, rank)
            # The members taken back are rejected nodes now, and each may lie between two others.
            for k in range(rank, size):
                work[count] = growth.members[k]
                count += 1


def _mark_rejected(growth: BlockGrowth, node: int) -> None:
    if not growth.rejected[node]:
        growth.rejected[node] = 1
        growth.rejected_nodes[growth.rejected_count] = node
        growth.rejected_count += 1


def roll_back(growth: BlockGrowth, rank: int) -> None:
    """Take back all members from ``rank`` on, and reject them."""
    for k in range(rank, growth.size):
        _mark_rejected(growth, growth.members[k])
    _undo(growth, rank)


def _undo(growth: BlockGrowth, rank: int) -> None:
    """Take back all members from ``rank`` on, with the labels that their joining caused."""
    while growth.size > rank:
        growth.size -= 1
        last = growth.size
        node = growth.members[last]
        while growth.descendant_count > growth.saved_descendant_count[last]:
            growth.descendant_count -= 1
            growth.min_ancestor_rank[growth.descendants[growth.descendant_count]] = 0
        while growth.ancestor_count > growth.saved_ancestor_count[last]:
            growth.ancestor_count -= 1
            ancestor = growth.ancestors[growth.ancestor_count]
            growth.min_descendant_rank[ancestor] = growth.min_ancestor_rank[ancestor] = 0
        while growth.pruned_count > growth.saved_pruned_count[last]:
            growth.pruned_count -= 1
            growth.is_pruned[growth.pruned[growth.pruned_count]] = 0
        growth.min_descendant_rank[node] = growth.saved_min_descendant_rank[last]
        growth.min_ancestor_rank[node] = growth.saved_min_ancestor_rank[last]
        growth.first_position = growth.saved_first_position[last]
        growth.rank[node] = 0
