"""Strategy ``hetero``: grow from every root, keep the largest region, repeat (OpenVINO's rule).

The rule is the one of OpenVINO's wiki page HeteroPluginArchitecture. It grows anew from all roots
after every region; a root is a free node that no region of an earlier root covers. Here the growths
are cached, and the result is the same:

- A growth depends only on the nodes that it has looked at. It is valid until one of these joins a
  region, or a change of the topological order moves a node at which its search has ended behind one
  of its members: its constraints say which nodes must stay before which.
- How many earlier roots cover a node is counted, so that a change is passed on only to later roots.
- Growth in one block of the graph does not depend on any other block, since all paths between them
  go through one node. So it goes down the block-cut tree, block by block, behind members that stay.
  A block of free nodes alone joins as a whole.
- Twins are two nodes with the same producer and the same consumer, adjacent in the lists of both,
  as in a wide diamond. Swapping them changes nothing. While the first is a root, the second is not
  grown: its region has the same size and covers no later root that the first one's does not.

The cost of a growth is given at `block_growth`. With k roots that are grown again after each region
it is k times that; in the benchmark's families of graphs few are, so that time grows almost
linearly with the graph (docs/partition.md). The rule of the cache and of twins is not from the
literature; lists of watchers are known from the watched literals of SAT solvers.
"""

from __future__ import annotations

from subgraph.partition.search.block_growth import INFINITE, depend_on, grow_in_block
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
        not_free = int(not graph.free[blocks.top[block]])
        for k in range(blocks.begin[block], blocks.end[block]):
            not_free += not graph.free[blocks.nodes[k]]
        blocks.not_free[block] = not_free
    _find_twins(graph, device, count)
    for node in range(count):
        if graph.free[node] and not _is_shadowed(graph, device, node):
            heap_push(device.dirty, node)


def _find_twins(graph: ContractedGraph, device: DeviceSearch, count: int) -> None:
    """Find for each node its twin just before it, and the reverse, both plus one.

    Twins have one producer and one consumer, the same, and are adjacent in the lists of both.
    """
    for node in range(count):
        for edge in range(graph.in_begin[node], graph.in_end[node]):
            device.edge_index[graph.producers[edge]] = edge
    for node in range(count):
        if graph.representative[node] == node and graph.out_end[node] - graph.out_begin[node] > 2:
            for edge in range(graph.out_begin[node] + 1, graph.out_end[node]):
                one, two = graph.consumers[edge - 1], graph.consumers[edge]
                if (
                    _has_one_each(graph, one)
                    and _has_one_each(graph, two)
                    and graph.consumers[graph.out_begin[one]]
                    == graph.consumers[graph.out_begin[two]]
                    and device.edge_index[two] == device.edge_index[one] + 1
                ):
                    device.previous_twin[two] = one + 1
                    device.next_twin[one] = two + 1


def _has_one_each(graph: ContractedGraph, node: int) -> bool:
    return (
        graph.in_end[node] - graph.in_begin[node] == 1
        and graph.out_end[node] - graph.out_begin[node] == 1
    )


def _is_shadowed(graph: ContractedGraph, device: DeviceSearch, root: int) -> bool:
    """Return whether the twin before ``root`` is a root, so that ``root`` is not grown."""
    twin = device.previous_twin[root] - 1
    return twin >= 0 and graph.free[twin] != 0 and device.cover_count[twin] == 0


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
        must be repeated after `compact_cache`.
    """
    while device.dirty.count:
        root = device.dirty.items[0]
        heap_remove(device.dirty, root)
        is_cached = cache.member_count[root] > 0
        # A taken, covered or shadowed node is no root any more; its growth must not be chosen.
        if not graph.free[root] or device.cover_count[root] or _is_shadowed(graph, device, root):
            if is_cached:
                _invalidate(graph, device, cache, root)
        elif not is_cached:
            _grow(graph, blocks, growth, device, root)
            entries = device.size + growth.dependency_count + device.constraints_end
            # The number of entries is known only now. The root stays dirty and grows again.
            if cache.used + entries > cache.capacity:
                _mark_dirty(device, root)
                return FULL
            _store(graph, growth, device, cache, root)
    if not device.by_size.count:
        return NOTHING
    root = device.by_size.items[0]
    region.size = cache.member_count[root]
    for k in range(region.size):
        region.members[k] = cache.nodes[cache.begin[root] + k]
    return root


def _mark_dirty(device: DeviceSearch, node: int) -> None:
    heap_push(device.dirty, node)


def _recheck_with_twin(
    graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, node: int
) -> None:
    """Note that ``node`` or its twin may have become a root, or may be none any more."""
    _recheck(graph, device, cache, node)
    if device.next_twin[node]:
        _recheck(graph, device, cache, device.next_twin[node] - 1)


def _recheck(graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, node: int) -> None:
    if cache.member_count[node] or (graph.free[node] and not device.cover_count[node]):
        _mark_dirty(device, node)


def _grow(
    graph: ContractedGraph, blocks: Blocks, growth: BlockGrowth, device: DeviceSearch, root: int
) -> None:
    """Grow from ``root``: members and constraints of ``device``, dependencies of ``growth``."""
    growth.root_epoch += 1
    growth.dependency_count = device.constraints_end = 0
    device.members[0] = root
    device.size = 1
    device.entries[0] = root
    device.entry_blocks[0] = 0
    count = 1
    while count:
        count -= 1
        entry, came_from = device.entries[count], device.entry_blocks[count]
        # The block above the entry, then those below it, except the one just left.
        block = blocks.parent_block[entry] or blocks.first_child[entry]
        while block:
            if block != came_from:
                begin = device.size
                _grow_block(graph, blocks, growth, device, entry, block - 1)
                for k in range(begin, device.size):
                    node = device.members[k]
                    if blocks.first_child[node]:  # it is in other blocks too
                        device.entries[count] = node
                        device.entry_blocks[count] = block
                        count += 1
            block = (
                blocks.first_child[entry]
                if block == blocks.parent_block[entry]
                else blocks.next_sibling[block - 1]
            )
    # The region is no longer valid when another region takes a member.
    for k in range(device.size):
        depend_on(growth, device.members[k])


def _grow_block(
    graph: ContractedGraph,
    blocks: Blocks,
    growth: BlockGrowth,
    device: DeviceSearch,
    entry: int,
    block: int,
) -> None:
    """Add the nodes of a block that grow from ``entry`` to the region."""
    if blocks.not_free[block]:
        count = grow_in_block(graph, blocks, growth, entry, block)
        for k in range(count):
            _join(device, entry, growth.members[k])
        if growth.boundary_count:
            _add_constraints(growth, device)
    else:
        _join(device, entry, blocks.top[block])
        for k in range(blocks.begin[block], blocks.end[block]):
            _join(device, entry, blocks.nodes[k])


def _join(device: DeviceSearch, entry: int, node: int) -> None:
    if node != entry:
        device.members[device.size] = node
        device.size += 1


def _add_constraints(growth: BlockGrowth, device: DeviceSearch) -> None:
    """Add the constraints of the last growth in a block."""
    at = device.constraints_end
    device.constraints[at] = growth.boundary_count
    device.constraints[at + 1] = growth.joined_count
    at += 2
    for k in range(growth.boundary_count):
        device.constraints[at] = growth.boundary[k]
        at += 1
    for k in range(growth.joined_count):
        device.constraints[at] = growth.joined[k]
        at += 1
    device.constraints_end = at


def _store(
    graph: ContractedGraph, growth: BlockGrowth, device: DeviceSearch, cache: GrowthCache, root: int
) -> None:
    """Store the growth of ``root`` in the cache."""
    begin = at = cache.used
    cache.begin[root] = begin
    cache.member_count[root] = device.size
    cache.dependency_count[root] = growth.dependency_count
    for k in range(device.size):
        cache.nodes[at] = device.members[k]
        at += 1
    for k in range(growth.dependency_count):
        _add_watcher(cache, root, growth.dependencies[k], at)
        at += 1
    for k in range(device.constraints_end):
        cache.nodes[at] = device.constraints[k]
        at += 1
    cache.end[root] = cache.used = at
    device.by_size.keys[root] = -device.size
    heap_push(device.by_size, root)
    # Later roots in the region are covered, so they are no roots while it is in the cache.
    for k in range(begin, begin + device.size):
        node = cache.nodes[k]
        if node > root:
            device.cover_count[node] += 1
            if device.cover_count[node] == 1:
                _recheck_with_twin(graph, device, cache, node)


def _add_watcher(cache: GrowthCache, root: int, node: int, at: int) -> None:
    cache.nodes[at] = node
    cache.watching_root[at] = root
    cache.next_watcher[at] = cache.first_watcher[node]
    cache.first_watcher[node] = at + 1


def _invalidate(
    graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, root: int
) -> None:
    """Remove the growth of ``root`` from the cache."""
    begin = cache.begin[root]
    end = begin + cache.member_count[root]
    cache.member_count[root] = cache.dependency_count[root] = 0
    cache.end[root] = 0
    heap_remove(device.by_size, root)
    for k in range(begin, end):
        node = cache.nodes[k]
        if node > root:
            device.cover_count[node] -= 1
            if not device.cover_count[node] and graph.free[node]:
                _recheck_with_twin(graph, device, cache, node)


def _regrow(graph: ContractedGraph, device: DeviceSearch, cache: GrowthCache, root: int) -> None:
    """Remove the growth of ``root`` from the cache, and grow again if it still is a root."""
    _invalidate(graph, device, cache, root)
    _mark_dirty(device, root)


def claim(
    graph: ContractedGraph, region: Region, blocks: Blocks, device: DeviceSearch, cache: GrowthCache
) -> None:
    """Update roots and cached growths after `contraction.contract` has made a region.

    Args:
        graph: The contracted graph.
        region: The members, which are no longer free.
        blocks: The blocks.
        device: The roots.
        cache: The growths; those that depend on a member are removed.
    """
    for k in range(region.size):
        node = region.members[k]
        # A node is in the block above it and in all blocks of which it is the top.
        vertex = blocks.vertex[node]
        if blocks.parent_block[vertex]:
            blocks.not_free[blocks.parent_block[vertex] - 1] += 1
        block = blocks.first_child[vertex]
        while block:
            blocks.not_free[block - 1] += 1
            block = blocks.next_sibling[block - 1]
    for k in range(region.size):
        _recheck_with_twin(graph, device, cache, region.members[k])
    # Growths that have looked at a member would go another way now.
    for k in range(region.size):
        node = region.members[k]
        at = cache.first_watcher[node]
        cache.first_watcher[node] = 0
        while at:
            root = cache.watching_root[at - 1]
            if _is_valid_entry(cache, root, at - 1):
                _regrow(graph, device, cache, root)
            at = cache.next_watcher[at - 1]


def invalidate_moved(
    graph: ContractedGraph, region: Region, device: DeviceSearch, cache: GrowthCache
) -> None:
    """Remove the growths that depend on positions which `contraction.contract` has changed.

    Args:
        graph: The contracted graph.
        region: Its ``moved`` nodes have new positions.
        device: The roots; those of removed growths are grown again.
        cache: The growths.
    """
    region.epoch += 1
    count = 0
    for k in range(region.moved_count):
        node = region.moved[k]
        at = cache.first_watcher[node]
        previous = 0
        while at:
            root = cache.watching_root[at - 1]
            following = cache.next_watcher[at - 1]
            # Entries of removed growths are unlinked on the way. The constraints of a root are
            # checked once, after the loop, however many of its nodes have moved.
            if _is_valid_entry(cache, root, at - 1):
                if device.affected_epoch[root] != region.epoch:
                    device.affected_epoch[root] = region.epoch
                    device.affected_roots[count] = root
                    count += 1
                previous = at
            elif previous:
                cache.next_watcher[previous - 1] = following
            else:
                cache.first_watcher[node] = following
            at = following
    for k in range(count):
        if not _satisfies_constraints(graph, cache, device.affected_roots[k]):
            _regrow(graph, device, cache, device.affected_roots[k])


def _is_valid_entry(cache: GrowthCache, root: int, at: int) -> bool:
    """Return whether an entry still belongs to the growth of ``root``."""
    return cache.begin[root] <= at < cache.end[root]


def _satisfies_constraints(graph: ContractedGraph, cache: GrowthCache, root: int) -> bool:
    """Return whether all boundary nodes of a growth still come before the nodes that joined."""
    order, nodes = graph.order, cache.nodes
    at = cache.begin[root] + cache.member_count[root] + cache.dependency_count[root]
    while at < cache.end[root]:
        middle = at + 2 + nodes[at]
        end = middle + nodes[at + 1]
        first = INFINITE
        for k in range(middle, end):
            first = min(first, order[nodes[k]])
        for k in range(at + 2, middle):
            if order[nodes[k]] > first:
                return False
        at = end
    return True


def count_entries(growth: BlockGrowth, device: DeviceSearch, cache: GrowthCache, count: int) -> int:
    """Return the number of cache entries of all valid growths and of the current one.

    Args:
        growth: The current growth in a block.
        device: The current growth.
        cache: The valid growths.
        count: Number of nodes.
    """
    room = device.size + growth.dependency_count + device.constraints_end
    for root in range(count):
        if cache.member_count[root]:
            room += cache.end[root] - cache.begin[root]
    return room


def compact_cache(cache: GrowthCache, count: int, room: int) -> None:
    """Move the valid growths into the new tables of the cache.

    Args:
        cache: The growths.
        count: Number of nodes.
        room: Number of entries of each new table.
    """
    cache.capacity = room
    for node in range(count):
        cache.first_watcher[node] = 0
    # Lists of watchers are built anew, without the entries of removed growths.
    used = 0
    for root in range(count):
        if not cache.member_count[root]:
            continue
        begin = used
        watchers = cache.begin[root] + cache.member_count[root]
        for k in range(cache.begin[root], cache.end[root]):
            node = cache.nodes[k]
            cache.new_nodes[used] = node
            if watchers <= k < watchers + cache.dependency_count[root]:
                cache.new_watching_root[used] = root
                cache.new_next_watcher[used] = cache.first_watcher[node]
                cache.first_watcher[node] = used + 1
            used += 1
        cache.begin[root] = begin
        cache.end[root] = used
    cache.used = used
    cache.nodes = cache.new_nodes
    cache.watching_root = cache.new_watching_root
    cache.next_watcher = cache.new_next_watcher
