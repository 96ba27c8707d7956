"""Strategy ``hetero``: grow from every root, keep the largest region, repeat (OpenVINO's rule).

The reference grows anew from all roots after every region that it makes. Here nothing is grown
twice without need:

- A growth depends only on what it has looked at. It is valid until a node among that joins a
  region, or a move in the topological order brings one before its members that its search had left
  out.
- Roots count in order, and a node that an earlier root's region holds is no root. How many earlier
  roots hold a node is counted, so that a change is passed on to the roots behind it alone.
- Growth in one biconnected block of the graph does not depend on any other: all ways between them
  go through one node. So blocks are grown one by one from the node by which they are entered, and
  only those behind members that stay; a block of free nodes alone joins as a whole.
- Two nodes side by side between the same two neighbours, as in a wide diamond, are twins: to swap
  them changes nothing, so their regions are alike. While the first is a root, the second need not
  be grown: its region is of the same size, and covers no later root that the first does not.

The limits of a growth are the nodes at which its searches ended, and those that must stay behind
these in the order.
"""

from __future__ import annotations

from subgraph.partition.search.block_growth import NEVER, grow_in_block, see
from subgraph.partition.search.blocks import find_blocks
from subgraph.partition.search.sorting import heap_push, heap_remove
from subgraph.partition.search.structures import (
    BlockGrowth,
    Blocks,
    ContractedGraph,
    DeviceSearch,
    GrowthCache,
    Region,
)

NOTHING, FULL = -1, -2


def start_roots(graph: ContractedGraph, blocks: Blocks, device: DeviceSearch, count: int) -> None:
    """Prepare a search among the nodes that are ``free``.

    Args:
        graph: The contracted graph.
        blocks: Gets its blocks.
        device: Gets the roots.
        count: Number of nodes.
    """
    for node in range(count):
        blocks.vertex[node] = graph.representative[node]
    find_blocks(graph, blocks, count)
    for block in range(blocks.count):
        refused = int(not graph.free[blocks.top[block]])
        for k in range(blocks.begin[block], blocks.end[block]):
            refused += not graph.free[blocks.nodes[k]]
        blocks.refused[block] = refused
    _find_twins(graph, device, count)
    for node in range(count):
        if graph.free[node] and not _is_shadowed(graph, device, node):
            heap_push(device.changed, node)


def _find_twins(graph: ContractedGraph, device: DeviceSearch, count: int) -> None:
    """Find for each node its twin just before it, and the reverse, both plus one.

    Twins have one producer and one consumer, the same, and stand side by side in the lists of both.
    """
    for node in range(count):
        for at in range(graph.in_at[node], graph.in_end[node]):
            device.link_index[graph.in_links[at]] = at
    for node in range(count):
        if graph.representative[node] == node and graph.out_end[node] - graph.out_at[node] > 2:
            for at in range(graph.out_at[node] + 1, graph.out_end[node]):
                one, two = graph.out_links[at - 1], graph.out_links[at]
                if (
                    _has_one_each(graph, one)
                    and _has_one_each(graph, two)
                    and graph.out_links[graph.out_at[one]] == graph.out_links[graph.out_at[two]]
                    and device.link_index[two] == device.link_index[one] + 1
                ):
                    device.previous_twin[two] = one + 1
                    device.next_twin[one] = two + 1


def _has_one_each(graph: ContractedGraph, node: int) -> bool:
    return (
        graph.in_end[node] - graph.in_at[node] == 1
        and graph.out_end[node] - graph.out_at[node] == 1
    )


def _is_shadowed(graph: ContractedGraph, device: DeviceSearch, root: int) -> bool:
    twin = device.previous_twin[root] - 1
    return twin >= 0 and graph.free[twin] != 0 and device.holders[twin] == 0


def find_largest(
    graph: ContractedGraph,
    region: Region,
    blocks: Blocks,
    growth: BlockGrowth,
    device: DeviceSearch,
    cache: GrowthCache,
) -> int:
    """Find the largest region; of equal ones, that of the smallest root.

    Args:
        graph: The contracted graph.
        region: Gets the members.
        blocks: Its blocks.
        growth: Grows in one block at a time.
        device: The roots.
        cache: The growths that are still valid.

    Returns:
        The root; NOTHING if there is no region; FULL if the cache has no room, so that the search
        must be repeated after `move_growths`.
    """
    while device.changed.count:
        root = device.changed.items[0]
        heap_remove(device.changed, root)
        known = cache.member_count[root] > 0
        if not graph.free[root] or device.holders[root] or _is_shadowed(graph, device, root):
            if known:
                _drop(graph, device, cache, root)
        elif not known:
            _grow(graph, blocks, growth, device, root)
            if cache.used + device.size + growth.seen_count + device.limits_end > cache.capacity:
                _push_dirty(device, root)
                return FULL
            _install(graph, growth, device, cache, root)
    if not device.largest.count:
        return NOTHING
    root = device.largest.items[0]
    region.size = cache.member_count[root]
    for k in range(region.size):
        region.members[k] = cache.nodes[cache.begin[root] + k]
    return root


def _push_dirty(device: DeviceSearch, node: int) -> None:
    heap_push(device.changed, node)


def _look_again(
    graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, node: int
) -> None:
    """Note that ``node`` or its twin may have become a root, or may be none any more."""
    _look_at(graph, device, cache, node)
    if device.next_twin[node]:
        _look_at(graph, device, cache, device.next_twin[node] - 1)


def _look_at(graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, node: int) -> None:
    if cache.member_count[node] or (graph.free[node] and not device.holders[node]):
        _push_dirty(device, node)


def _grow(
    graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, device: DeviceSearch, root: int
) -> None:
    """Grow from ``root``: fills ``members``, ``seen`` and ``limits``."""
    growth.seen_epoch += 1
    growth.seen_count = device.limits_end = 0
    device.members[0] = root
    device.size = 1
    device.entries[0] = root
    device.entry_blocks[0] = 0
    count = 1
    while count:
        count -= 1
        entry, behind = device.entries[count], device.entry_blocks[count]
        block = blocks.home[entry] or blocks.first_block[entry]
        while block:
            if block != behind:
                begin = device.size
                _grow_block(graph, blocks, growth, device, entry, block - 1)
                for k in range(begin, device.size):
                    node = device.members[k]
                    if blocks.first_block[node]:  # it is in other blocks too
                        device.entries[count] = node
                        device.entry_blocks[count] = block
                        count += 1
            block = (
                blocks.first_block[entry]
                if block == blocks.home[entry]
                else blocks.next_block[block - 1]
            )
    for k in range(device.size):
        see(growth, device.members[k])


def _grow_block(
    graph: ContractedGraph,
    blocks: Blocks,
    growth: BlockGrowth,
    device: DeviceSearch,
    entry: int,
    block: int,
) -> None:
    """Add the nodes of a block that grow from ``entry`` to the region."""
    if blocks.refused[block]:
        count = grow_in_block(graph, blocks, growth, entry, block)
        for k in range(count):
            _join(device, entry, growth.members[k])
        if growth.edge_count:
            _limit(growth, device)
    else:
        _join(device, entry, blocks.top[block])
        for k in range(blocks.begin[block], blocks.end[block]):
            _join(device, entry, blocks.nodes[k])


def _join(device: DeviceSearch, entry: int, node: int) -> None:
    if node != entry:
        device.members[device.size] = node
        device.size += 1


def _limit(growth: BlockGrowth, device: DeviceSearch) -> None:
    """Add the limits of the last growth in a block."""
    at = device.limits_end
    device.limits[at] = growth.edge_count
    device.limits[at + 1] = growth.joined_count
    at += 2
    for k in range(growth.edge_count):
        device.limits[at] = growth.edges[k]
        at += 1
    for k in range(growth.joined_count):
        device.limits[at] = growth.joined[k]
        at += 1
    device.limits_end = at


def _install(
    graph: ContractedGraph, growth: BlockGrowth, device: DeviceSearch, cache: GrowthCache, root: int
) -> None:
    """Store the growth of ``root`` in the cache."""
    begin = at = cache.used
    cache.begin[root] = begin
    cache.member_count[root] = device.size
    cache.seen_count[root] = growth.seen_count
    for k in range(device.size):
        cache.nodes[at] = device.members[k]
        at += 1
    for k in range(growth.seen_count):
        _watch(cache, root, growth.seen[k], at)
        at += 1
    for k in range(device.limits_end):
        cache.nodes[at] = device.limits[k]
        at += 1
    cache.end[root] = cache.used = at
    device.largest.keys[root] = -device.size
    heap_push(device.largest, root)
    for k in range(begin, begin + device.size):
        node = cache.nodes[k]
        if node > root:
            device.holders[node] += 1
            if device.holders[node] == 1:
                _look_again(graph, device, cache, node)


def _watch(cache: GrowthCache, root: int, node: int, at: int) -> None:
    cache.nodes[at] = node
    cache.root[at] = root
    cache.next[at] = cache.watchers[node]
    cache.watchers[node] = at + 1


def _drop(graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, root: int) -> None:
    """Remove the growth of ``root`` from the cache."""
    begin = cache.begin[root]
    end = begin + cache.member_count[root]
    cache.member_count[root] = cache.seen_count[root] = 0
    cache.end[root] = 0
    heap_remove(device.largest, root)
    for k in range(begin, end):
        node = cache.nodes[k]
        if node > root:
            device.holders[node] -= 1
            if not device.holders[node] and graph.free[node]:
                _look_again(graph, device, cache, node)


def _redo(graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, root: int) -> None:
    _drop(graph, device, cache, root)
    _push_dirty(device, root)


def take(
    graph: ContractedGraph, region: Region, blocks: Blocks, device: DeviceSearch, cache: GrowthCache
) -> None:
    """Update roots and cached growths after `contraction.choose` has made a region.

    Args:
        graph: The contracted graph.
        region: The members, which are no longer free.
        blocks: The blocks.
        device: The roots.
        cache: The growths; those that have seen a member are dropped.
    """
    for k in range(region.size):
        node = region.members[k]
        vertex = blocks.vertex[node]
        if blocks.home[vertex]:
            blocks.refused[blocks.home[vertex] - 1] += 1
        block = blocks.first_block[vertex]
        while block:
            blocks.refused[block - 1] += 1
            block = blocks.next_block[block - 1]
    for k in range(region.size):
        _look_again(graph, device, cache, region.members[k])
    for k in range(region.size):
        node = region.members[k]
        at = cache.watchers[node]
        cache.watchers[node] = 0
        while at:
            root = cache.root[at - 1]
            if _is_current(cache, root, at - 1):
                _redo(graph, device, cache, root)
            at = cache.next[at - 1]


def follow_moves(
    graph: ContractedGraph, region: Region, device: DeviceSearch, cache: GrowthCache
) -> None:
    """Drop the growths that depend on positions which `contraction.choose` has changed.

    Args:
        graph: The contracted graph.
        region: Its ``moved`` nodes have new positions.
        device: The roots; those of dropped growths are grown again.
        cache: The growths.
    """
    region.epoch += 1
    count = 0
    for k in range(region.move_count):
        node = region.moved[k]
        at = cache.watchers[node]
        last = 0
        while at:
            root = cache.root[at - 1]
            following = cache.next[at - 1]
            if _is_current(cache, root, at - 1):
                if device.moved_epoch[root] != region.epoch:
                    device.moved_epoch[root] = region.epoch
                    device.moved_roots[count] = root
                    count += 1
                last = at
            elif last:
                cache.next[last - 1] = following
            else:
                cache.watchers[node] = following
            at = following
    for k in range(count):
        if not _is_within_limits(graph, cache, device.moved_roots[k]):
            _redo(graph, device, cache, device.moved_roots[k])


def _is_current(cache: GrowthCache, root: int, at: int) -> bool:
    return cache.begin[root] <= at < cache.end[root]


def _is_within_limits(graph: ContractedGraph, cache: GrowthCache, root: int) -> bool:
    order, nodes = graph.order, cache.nodes
    at = cache.begin[root] + cache.member_count[root] + cache.seen_count[root]
    while at < cache.end[root]:
        middle = at + 2 + nodes[at]
        end = middle + nodes[at + 1]
        first = NEVER
        for k in range(middle, end):
            first = min(first, order[nodes[k]])
        for k in range(at + 2, middle):
            if order[nodes[k]] > first:
                return False
        at = end
    return True


def count_cached(growth: BlockGrowth, device: DeviceSearch, cache: GrowthCache, count: int) -> int:
    """Return the number of cache entries of all valid growths and of the current one.

    Args:
        growth: The current growth in a block.
        device: The current growth.
        cache: The valid growths.
        count: Number of nodes.
    """
    room = device.size + growth.seen_count + device.limits_end
    for root in range(count):
        if cache.member_count[root]:
            room += cache.end[root] - cache.begin[root]
    return room


def move_growths(cache: GrowthCache, count: int, room: int) -> None:
    """Move the valid growths into the new tables of the cache.

    Args:
        cache: The growths.
        count: Number of nodes.
        room: Number of entries of the new tables.
    """
    cache.capacity = room
    for node in range(count):
        cache.watchers[node] = 0
    used = 0
    for root in range(count):
        if not cache.member_count[root]:
            continue
        begin = used
        seen = cache.begin[root] + cache.member_count[root]
        for k in range(cache.begin[root], cache.end[root]):
            node = cache.nodes[k]
            cache.new_nodes[used] = node
            if seen <= k < seen + cache.seen_count[root]:
                cache.new_root[used] = root
                cache.new_next[used] = cache.watchers[node]
                cache.watchers[node] = used + 1
            used += 1
        cache.begin[root] = begin
        cache.end[root] = used
    cache.used = used
    cache.nodes, cache.root, cache.next = cache.new_nodes, cache.new_root, cache.new_next
