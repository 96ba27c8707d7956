"""One growth of strategy ``hetero`` inside a block: grow, reject, roll back.

The literal rule of the reference: add or reject one neighbour after the other; whenever a rejected
node lies on a path between two nodes of the region, take nodes back, last first, and reject them,
until none does. Here each node outside that leads into the region is marked with the first member
that it leads to (``up``) and the first member that leads to it (``down``), so the two marks say how
many members to take back. Marks are listed by member, and taking a member back removes its marks.
"""

from __future__ import annotations

from subgraph.partition.search.blocks import next_neighbour
from subgraph.partition.search.sorting import sort_by
from subgraph.partition.search.structures import BlockGrowth, Blocks, ContractedGraph

NEVER = 1 << 30


def grow_in_block(
    graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, start: int, block: int
) -> int:
    """Grow from ``start``, consumers first, depth first, among the vertices of ``block``.

    Args:
        graph: The contracted graph.
        blocks: Its blocks.
        growth: Gets the region as ``members``; nodes on which it depends are added to ``seen``.
        start: The node from which the region grows.
        block: The block.

    Returns:
        The number of nodes of the region.
    """
    growth.count += 1
    growth.epoch += 1
    growth.size = growth.joined_count = growth.edge_count = growth.rejected_count = 0
    growth.above_end = growth.reached_end = growth.pruned_end = 0
    growth.first = NEVER
    growth.block = block
    add(graph, blocks, growth, start)
    growth.stack[0] = start
    growth.cursor[start] = 0
    depth = 1
    while depth:
        node = growth.stack[depth - 1]
        if not growth.number[node]:  # rolled back: its neighbours are not followed
            depth -= 1
            continue
        link = next_neighbour(graph, growth.cursor, node)
        if link < 0:
            depth -= 1
            continue
        there = graph.representative[link]
        if (
            growth.number[there]
            or growth.rejected[there]
            or not in_block(blocks, growth, blocks.vertex[link])
        ):
            continue
        if not graph.free[there]:
            reject(growth, there)
        elif add(graph, blocks, growth, there):
            growth.stack[depth] = there
            growth.cursor[there] = 0
            depth += 1
        else:
            reject(growth, there)
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
    return blocks.home[vertex] == growth.block + 1 or blocks.top[growth.block] == vertex


def _finish(growth: BlockGrowth) -> None:
    """Complete ``seen``, leave only unsearched nodes in ``edges``, and clear all marks."""
    left = 0
    for k in range(growth.edge_count):
        node = growth.edges[k]
        if growth.explored_epoch[node] != growth.epoch:
            growth.edges[left] = node
            left += 1
            see(growth, node)
    growth.edge_count = left
    for k in range(growth.joined_count):
        see(growth, growth.joined[k])
    for k in range(growth.rejected_count):
        growth.rejected[growth.rejected_nodes[k]] = 0
        see(growth, growth.rejected_nodes[k])
    _undo(growth, 0)


def see(growth: BlockGrowth, node: int) -> None:
    """Note that the grown region depends on ``node``."""
    if growth.seen_in[node] != growth.seen_epoch:
        growth.seen_in[node] = growth.seen_epoch
        growth.seen[growth.seen_count] = node
        growth.seen_count += 1


def add(graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, node: int) -> bool:
    """Let ``node`` join, unless a rejected node would then lie between two members.

    Args:
        graph: The contracted graph.
        blocks: Its blocks.
        growth: The growth.
        node: A free neighbour of a member.

    Returns:
        Whether it joined. If not, nothing has changed.
    """
    rep, place, rejected, up = graph.representative, growth.number, growth.rejected, growth.up
    alone = True
    for at in range(graph.in_at[node], graph.in_end[node]):
        there = rep[graph.in_links[at]]
        if not place[there]:
            alone = False
            if rejected[there]:
                for above in range(graph.in_at[there], graph.in_end[there]):
                    if place[rep[graph.in_links[above]]]:
                        return False
    near = False
    for at in range(graph.out_at[node], graph.out_end[node]):
        there = rep[graph.out_links[at]]
        if up[there]:
            if rejected[there]:
                return False
            near = near or not growth.down[there]
    number = growth.size
    growth.members[number] = node
    growth.size += 1
    place[node] = number + 1
    growth.saved_above_end[number] = growth.above_end
    growth.saved_reached_end[number] = growth.reached_end
    growth.saved_up[number] = up[node]
    growth.saved_down[number] = growth.down[node]
    growth.saved_first[number] = growth.first
    growth.saved_pruned_end[number] = growth.pruned_end
    up[node] = growth.down[node] = 0
    growth.spread_count = 0
    if near:
        _will_spread(growth, node, number + 1)
    broken = False
    if not (alone and graph.order[node] >= growth.first):
        broken = _find_above(graph, blocks, growth, node, number + 1)
    if broken or (growth.spread_count and _spread_down(graph, growth)):
        go_back(growth, number)
        return False
    if growth.joined_epoch[node] != growth.epoch:
        growth.joined_epoch[node] = growth.epoch
        growth.joined[growth.joined_count] = node
        growth.joined_count += 1
    for k in range(growth.saved_above_end[number], growth.above_end):
        growth.explored_epoch[growth.above[k]] = growth.epoch
        see(growth, growth.above[k])
    for k in range(growth.saved_pruned_end[number], growth.pruned_end):
        there = growth.pruned[k]
        if growth.edge_epoch[there] != growth.epoch:
            growth.edge_epoch[there] = growth.epoch
            growth.edges[growth.edge_count] = there
            growth.edge_count += 1
    return True


def _will_spread(growth: BlockGrowth, node: int, mark: int) -> None:
    growth.spread[growth.spread_count] = node
    growth.spread_mark[growth.spread_count] = mark
    growth.spread_count += 1


def _find_above(
    graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, node: int, mark: int
) -> bool:
    """Find the nodes after the first member that lead to ``node``, which has joined.

    Returns:
        Whether one of them is rejected and lies between members; the marks are then incomplete.
    """
    order, rep, place, rejected = graph.order, graph.representative, growth.number, growth.rejected
    stack, up = growth.work, growth.up
    begin = growth.above_end
    size = 0  # a node above a rejected one stands on the stack as its complement
    if order[node] < growth.first:
        growth.first = order[node]
        for k in range(growth.pruned_end):
            there = growth.pruned[k]
            if order[there] > growth.first and not up[there] and not place[there]:
                up[there] = mark
                growth.above[growth.above_end] = there
                growth.above_end += 1
                stack[size] = there
                size += 1
    first = growth.first
    closed = size > 0  # whether some member leads to what is found
    stack[size] = node
    size += 1
    while size:
        size -= 1
        here = stack[size]
        above = here < 0
        if above:
            here = ~here
        elif rejected[here]:
            above = True
        graph.links_followed += graph.in_end[here] - graph.in_at[here]
        for at in range(graph.in_at[here], graph.in_end[here]):
            link = graph.in_links[at]
            if not in_block(blocks, growth, blocks.vertex[link]):
                continue
            there = rep[link]
            if place[there] or growth.down[there]:
                if above:
                    return True
                closed = True
            elif up[there]:
                continue
            elif order[there] < first:
                if not growth.is_pruned[there]:
                    growth.is_pruned[there] = 1
                    growth.pruned[growth.pruned_end] = there
                    growth.pruned_end += 1
            else:
                up[there] = mark
                growth.above[growth.above_end] = there
                growth.above_end += 1
                stack[size] = ~there if above else there
                size += 1
    if closed and growth.above_end > begin:
        sort_by(order, growth.above, begin, growth.above_end)
        return _mark_between(graph, growth, begin)
    return False


def _mark_between(graph: ContractedGraph, growth: BlockGrowth, begin: int) -> bool:
    """Mark new nodes to which members lead, in order; return True at the first rejected one."""
    for k in range(begin, growth.above_end):
        there = growth.above[k]
        earliest = NEVER
        for at in range(graph.in_at[there], graph.in_end[there]):
            source = graph.representative[graph.in_links[at]]
            mark = growth.number[source] or growth.down[source]
            if mark and mark < earliest:
                earliest = mark
        if earliest != NEVER:
            if growth.rejected[there]:
                return True
            growth.down[there] = earliest
            _will_spread(growth, there, earliest)
    return False


def _spread_down(graph: ContractedGraph, growth: BlockGrowth) -> bool:
    """Mark nodes that lie between members now; return True at the first rejected one."""
    k = 0
    while k < growth.spread_count:
        source = growth.spread[k]
        for at in range(graph.out_at[source], graph.out_end[source]):
            there = graph.representative[graph.out_links[at]]
            if growth.up[there] and not growth.down[there]:
                if growth.rejected[there]:
                    return True
                growth.down[there] = growth.spread_mark[k]
                growth.reached[growth.reached_end] = there
                growth.reached_end += 1
                _will_spread(growth, there, growth.spread_mark[k])
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
        if growth.down[node]:
            number = max(growth.down[node], growth.up[node]) - 1
            last = growth.size
            go_back(growth, number)
            for k in range(number, last):
                work[count] = growth.members[k]
                count += 1


def _mark_rejected(growth: BlockGrowth, node: int) -> None:
    if not growth.rejected[node]:
        growth.rejected[node] = 1
        growth.rejected_nodes[growth.rejected_count] = node
        growth.rejected_count += 1


def go_back(growth: BlockGrowth, number: int) -> None:
    """Take back all members from ``number`` on, and reject them."""
    for k in range(number, growth.size):
        _mark_rejected(growth, growth.members[k])
    _undo(growth, number)


def _undo(growth: BlockGrowth, number: int) -> None:
    while growth.size > number:
        growth.size -= 1
        last = growth.size
        node = growth.members[last]
        while growth.reached_end > growth.saved_reached_end[last]:
            growth.reached_end -= 1
            growth.down[growth.reached[growth.reached_end]] = 0
        while growth.above_end > growth.saved_above_end[last]:
            growth.above_end -= 1
            there = growth.above[growth.above_end]
            growth.up[there] = growth.down[there] = 0
        while growth.pruned_end > growth.saved_pruned_end[last]:
            growth.pruned_end -= 1
            growth.is_pruned[growth.pruned[growth.pruned_end]] = 0
        growth.up[node] = growth.saved_up[last]
        growth.down[node] = growth.saved_down[last]
        growth.first = growth.saved_first[last]
        growth.number[node] = 0
