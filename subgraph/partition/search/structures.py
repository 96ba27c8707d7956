"""The structures of a search: named tables of integers and counters, on which its functions work.

Functions that read and write nothing else run as they stand on small graphs; on large ones the same
text runs as machine code (`backend`, `search_kernels`). A signature names the structures that a
function and those it calls may touch.

Conventions of all tables:

- Nodes, blocks and ranks are counted from 0. An entry "plus one" is 0 where there is none, so that
  every table begins with zeros.
- A list that is shorter than its table is written ``items[:count]``.
- A table ``x_epoch`` is a set that is emptied in constant time: a node is in the set while its
  entry equals the structure's current ``epoch``.
- "Scratch" tables have no meaning between two operations.
"""

from __future__ import annotations

from collections.abc import Iterator

# Sizes of tables. PerNode: one entry for each node and some more. PerEdge: two entries for each
# edge, since a region gets its own list of edges. Pool: replaced by a longer table when full.
PerNode = list[int]
PerEdge = list[int]
Pool = list[int]


class Message:
    """The messages between Python and the search.

    Attributes:
        command: An operation, its arguments, its results; see `operations`.
        asked: Neighbours that the selector is asked about.
        answers: 1 for each of them that the region may grow to, else 0.
    """

    command: Pool
    asked: PerNode
    answers: PerNode


class ContractedGraph:
    """The graph in which every region is contracted to one node; see `contraction`.

    The adjacency lists are in compressed form, one list of neighbours after the other.

    Attributes:
        count: Number of nodes.
        representative: For each node the one that stands for its region; itself outside of regions.
            Entries of ``producers`` and ``consumers`` have to be looked up here.
        order: Position of each node in a topological order; valid for representatives.
        in_begin: ``producers[in_begin[n]:in_end[n]]`` are the producers of node n; of a
            representative, those of its region.
        producers: Producers of all nodes; ``producers_end`` entries are used.
        out_begin: ``consumers[out_begin[n]:out_end[n]]`` are the consumers of node n, alike.
        free: 1 for each node that may join a region.
    """

    count: int
    representative: PerNode
    order: PerNode
    in_begin: PerNode
    in_end: PerNode
    producers: PerEdge
    producers_end: int
    out_begin: PerNode
    out_end: PerNode
    consumers: PerEdge
    consumers_end: int
    free: PerNode


class Region:
    """A set of nodes that may become a region, and its cones; see `contraction`.

    Attributes:
        members: The set is ``members[:size]``; ``member_epoch`` marks it.
        ancestors: ``ancestors[:ancestor_count]`` have a path to a member, ``descendants`` alike one
            from a member; both only between the first and the last position of a member.
        removed: ``removed[:removed_count]`` are nodes that have left the set.
        moved: ``moved[:moved_count]`` are nodes whose position in the order has changed.
        visit_order: Scratch: nodes in the order in which a function visits them.
        positions: Scratch: positions to be assigned anew, ascending.
        mark: Scratch: for each node an epoch, which says what a function has found out about it.
        epoch: The current epoch of all tables of this structure.
    """

    members: PerNode
    size: int
    member_epoch: PerNode
    ancestors: PerNode
    ancestor_count: int
    ancestor_epoch: PerNode
    descendants: PerNode
    descendant_count: int
    descendant_epoch: PerNode
    removed: PerNode
    removed_count: int
    moved: PerNode
    moved_count: int
    visit_order: PerNode
    positions: PerNode
    mark: PerNode
    epoch: int


class Heap:
    """A binary heap of nodes that knows where each node is; ``items[0]`` has the least (key, node).

    Attributes:
        items: The nodes are ``items[:count]``.
        index: For each node its index in ``items`` plus one.
        keys: For each node its key, which stays while the node is in the heap.
    """

    items: PerNode
    index: PerNode
    keys: PerNode
    count: int


class RegionGrowth:
    """The candidates of a growth that asks a selector; see `region_growth`.

    Attributes:
        start: The node from which the region grows.
        phase: PICK, or whether producers or consumers of ``candidate`` are asked about.
        candidate: The candidate whose neighbours are asked about.
        queue: ``queue[queue_begin:queue_end]`` are the candidates not yet looked at.
        ask_count: Number of neighbours in the current message.
        expanded: 1 for the candidates all of whose neighbours were asked about.
        was_waiting: Scratch of `_requeue_waiting`: 1 for the candidates that waited when it began.
        stale: 1 if a node on a detour has joined, so that all candidates must be judged again.
        state: QUEUED, EXPANDED or WAITING for each candidate, else 0.
        barred: 1 for the nodes that must not join any more.
        candidates: ``candidates[:candidate_count]`` are all that ever were, in the order of
            discovery, which is their rank.
        min_ancestor_rank: For each candidate the least rank among itself and its ancestors in the
            region.
        min_descendant_rank: For each candidate the least rank among itself and its descendants.
        given_up: ``given_up[:given_up_count]`` are candidates that are not in the region.
    """

    start: int
    phase: int
    candidate: int
    queue: PerNode
    queue_begin: int
    queue_end: int
    ask_count: int
    expanded: PerNode
    was_waiting: PerNode
    stale: int
    state: PerNode
    barred: PerNode
    candidates: PerNode
    candidate_count: int
    min_ancestor_rank: PerNode
    min_descendant_rank: PerNode
    given_up: PerNode
    given_up_count: int


class Frontier:
    """The nodes outside of a growing region that have a path to it; see `frontier`.

    Attributes:
        first_position: Position of the region's first candidate in the order.
        flags: ANCESTOR, SUCCESSOR, OPEN and DETOUR for each of ``nodes[:node_count]``, else 0.
        support: For each node the number of producers over which it may still join.
        min_descendant_rank: For each node the least rank of a candidate to which it has a path.
        pruned: Nodes before ``first_position``, at which the search ended, the last position first.
        roots: Scratch: producers of the candidate in question.
        stack: Scratch: nodes from which a search begins.
        work: Scratch: nodes that a search has yet to look at.
        detour_stack: Scratch: nodes to mark as DETOUR.
        discovered: ``discovered[:discovered_end]`` are new nodes whose flags have yet to be passed
            on to their consumers.
        batch_of: For each node the number of the search that discovered it.
        batch_count: Number of such searches.
        frame_of: The frame (plus one) in which a node waits to be classified again.
            ``next_in_frame`` and ``previous_in_frame`` (plus one) link the nodes of a frame.
        frame_head: For each of ``frame_count`` frames its first node (plus one), -1 for a frame
            that passes on the flags of ``discovered[frame_cursor:frame_end]``.
        frame_begin: For such a frame the index of its first node in ``discovered``.
        frame_cursor: Index of the frame's next discovered node, or of the next producer of
            ``frame_node``.
        frame_node: The node whose producers a frame bars, -1 if none; of a frame that passes on
            flags, the number of its batch.
        frame_barred: The candidate that a frame barred last, -1 if none.
    """

    first_position: int
    flags: PerNode
    nodes: PerEdge
    node_count: int
    support: PerNode
    min_descendant_rank: PerNode
    pruned: Heap
    roots: PerNode
    stack: PerNode
    work: PerNode
    detour_stack: PerEdge
    discovered: PerNode
    discovered_end: int
    batch_of: PerNode
    batch_count: int
    frame_of: PerNode
    next_in_frame: PerNode
    previous_in_frame: PerNode
    frame_count: int
    frame_head: PerEdge
    frame_begin: PerEdge
    frame_cursor: PerEdge
    frame_end: PerEdge
    frame_node: PerEdge
    frame_barred: PerEdge


class Blocks:
    """The blocks (biconnected components) and the block-cut tree of a graph; see `blocks`.

    Attributes:
        count: Number of blocks. Block b has the node ``top[b]``, which the search visits first, and
            ``nodes[begin[b]:end[b]]``.
        discovered: For each node the time of its first visit, 0 before.
        low: For each node the least time among it and what its subtree reaches by one edge.
        parent: The node from which each was visited, -1 for the first of a component.
        pending: Scratch: visited nodes that have no block yet.
        path: Scratch: nodes from the first to the current one.
        cursor: Scratch: for each node how many of its neighbours were visited.
        parent_block: For each node the one block (plus one) in which it is not the top.
        first_child: For each node the first block (plus one) of which it is the top.
        next_sibling: For each block the next one (plus one) with the same top.
        vertex: For each node its representative when the blocks were found.
        not_free: For each block how many of its nodes are not free.
    """

    count: int
    discovered: PerNode
    low: PerNode
    parent: PerNode
    pending: PerNode
    path: PerNode
    cursor: PerNode
    parent_block: PerNode
    first_child: PerNode
    next_sibling: PerNode
    top: PerNode
    begin: PerNode
    end: PerNode
    nodes: PerNode
    vertex: PerNode
    not_free: PerNode


class BlockGrowth:
    """One growth of strategy ``hetero`` inside a block; see `block_growth`.

    Attributes:
        block: The block.
        members: The region is ``members[:size]``, in the order of joining, which is their rank.
        rank: For each member its rank plus one.
        rejected: 1 for each of ``rejected_nodes[:rejected_count]``.
        min_descendant_rank: For each node outside with a path to a member, the least rank (plus
            one) of such a member.
        min_ancestor_rank: For each of these nodes with a path from a member, the least rank (plus
            one) of such a member. The node then lies between two members.
        ancestors: ``ancestors[:ancestor_count]`` are the nodes with ``min_descendant_rank``.
        descendants: ``descendants[:descendant_count]`` are those of them that a path from a member
            reached after they had been found.
        pruned: ``pruned[:pruned_count]`` are the nodes before ``first_position`` at which the
            search ended; ``is_pruned`` is 1 for them.
        first_position: Position of the region's first member in the order, INFINITE if it is empty.
        saved_ancestor_count: What taking back the member of each rank restores, as all ``saved_x``.
        pending: Scratch: ``pending[:pending_count]`` are nodes whose rank ``pending_rank`` (plus
            one) has to be passed on to the nodes below.
        stack: Scratch: nodes whose neighbours are being followed; ``cursor``: how many were.
        work: Scratch: nodes that a search has yet to look at.
        boundary: ``boundary[:boundary_count]`` are nodes before the region, at which a search for
            any member has ended; ``boundary_epoch`` marks them.
        joined: ``joined[:joined_count]`` were members at any time; ``joined_epoch`` marks them.
        explored_epoch: The growth in which the producers of a node were followed last.
        epoch: Number of growths so far.
        dependencies: ``dependencies[:dependency_count]`` are the nodes on which the outcome for one
            root depends; ``dependency_epoch`` marks them with ``root_epoch``.
    """

    block: int
    members: PerNode
    size: int
    rank: PerNode
    rejected: PerNode
    rejected_nodes: PerNode
    rejected_count: int
    min_descendant_rank: PerNode
    min_ancestor_rank: PerNode
    ancestors: PerNode
    ancestor_count: int
    descendants: PerNode
    descendant_count: int
    pruned: PerNode
    pruned_count: int
    is_pruned: PerNode
    first_position: int
    saved_ancestor_count: PerNode
    saved_descendant_count: PerNode
    saved_min_descendant_rank: PerNode
    saved_min_ancestor_rank: PerNode
    saved_first_position: PerNode
    saved_pruned_count: PerNode
    pending: PerNode
    pending_rank: PerNode
    pending_count: int
    stack: PerNode
    cursor: PerNode
    work: PerNode
    boundary: PerNode
    boundary_count: int
    boundary_epoch: PerNode
    joined: PerNode
    joined_count: int
    joined_epoch: PerNode
    explored_epoch: PerNode
    epoch: int
    dependencies: PerNode
    dependency_count: int
    dependency_epoch: PerNode
    root_epoch: int


class DeviceSearch:
    """The roots of one device, and the region that grows from one of them; see `hetero`.

    Attributes:
        started: 1 if there is a device.
        edge_index: Scratch: for each node the index of its last entry in ``producers``.
        previous_twin: For each node its twin just before it (plus one), ``next_twin`` just after.
        cover_count: For each node how many regions of earlier roots hold it.
        members: The region that grows is ``members[:size]``.
        entries: Scratch: nodes over which growth enters further blocks.
        entry_blocks: Scratch: the block (plus one) from which each of them is entered.
        constraints: ``constraints[:constraints_end]``, for each growth in a block: the lengths of
            its ``boundary`` and ``joined``, then both lists. The growth is valid while in the order
            no node of the first list comes after a node of the second.
        affected_roots: Scratch: roots whose growth depends on a node that moved.
        affected_epoch: Marks them.
        dirty: Nodes that may have become roots, or may be none any more.
        by_size: Roots with a valid growth, the largest region first.
    """

    started: int
    edge_index: PerNode
    previous_twin: PerNode
    next_twin: PerNode
    cover_count: PerNode
    members: PerNode
    size: int
    entries: PerNode
    entry_blocks: PerNode
    constraints: PerEdge
    constraints_end: int
    affected_roots: PerNode
    affected_epoch: PerNode
    dirty: Heap
    by_size: Heap


class GrowthCache:
    """The growths that are still valid, by their roots; see `hetero`.

    Attributes:
        begin: The growth of root r is ``nodes[begin[r]:end[r]]``: ``member_count[r]`` members, then
            ``dependency_count[r]`` nodes on which it depends, then its constraints.
        first_watcher: For each node the index (plus one) of one entry in ``nodes`` by which a
            growth depends on it. The others follow by ``next_watcher``.
        next_watcher: For each such entry the next one (plus one) for the same node.
        watching_root: For each such entry the root whose growth it belongs to.
        used: Number of entries used, of ``capacity``.
        new_nodes: Longer tables, into which `hetero.compact_cache` moves what is valid, as
            all ``new_x``.
    """

    begin: PerNode
    member_count: PerNode
    dependency_count: PerNode
    end: PerNode
    nodes: Pool
    next_watcher: Pool
    watching_root: Pool
    used: int
    capacity: int
    new_nodes: Pool
    new_next_watcher: Pool
    new_watching_root: Pool
    first_watcher: PerNode


class SearchState:
    """All structures of one search."""

    message: Message
    graph: ContractedGraph
    region: Region
    growth: RegionGrowth
    frontier: Frontier
    blocks: Blocks
    block_growth: BlockGrowth
    device: DeviceSearch
    cache: GrowthCache


def field_kinds(structure: type) -> dict[str, str | type]:
    """Return the kind of each field: a kind of table ("PerNode"), "int", or a structure."""
    kinds: dict[str, str] = structure.__annotations__
    return {name: _STRUCTURES.get(kind, kind) for name, kind in kinds.items()}


def leaves(structure: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the kind of each table and counter, as in ``graph.in_links``, in order."""
    for name, kind in field_kinds(structure).items():
        if isinstance(kind, str):
            yield prefix + name, kind
        else:
            yield from leaves(kind, f"{prefix}{name}.")


_STRUCTURES: dict[str, type] = {
    structure.__name__: structure
    for structure in (
        *(Message, ContractedGraph, Region, Heap, RegionGrowth, Frontier),
        *(Blocks, BlockGrowth, DeviceSearch, GrowthCache, SearchState),
    )
}
