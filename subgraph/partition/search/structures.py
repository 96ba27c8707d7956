"""The structures of a search: named lists of integers and counters, on which its functions work.

Functions that read and write nothing else run as they stand on small graphs; on large ones the same
text runs as machine code (`backend`, `search_kernels`). A signature names the structures that a
function and those it calls may touch. An entry that holds the number of something "plus one" is 0
where there is none, so that all tables begin with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator

# Sizes of tables. PerNode: one entry for each node and some more. PerLink: two entries for each
# link, since a region gets its own list of links. Pool: replaced by a longer table when full.
PerNode = list[int]
PerLink = list[int]
Pool = list[int]


class Message:
    """The messages between Python and the search.

    Attributes:
        words: An operation, its arguments, its results; see `operations`.
        asked: Neighbours that the selector is asked about.
        answers: 1 for each of them that the region may grow to, else 0.
    """

    words: Pool
    asked: PerNode
    answers: PerNode


class ContractedGraph:
    """The graph in which every chosen region is one node; see `contraction`.

    Attributes:
        count: Number of nodes.
        representative: For each node the one that stands for its region; itself outside of regions.
            Neighbours have to be looked up here.
        order: Position of each node in a topological order.
        in_links: ``in_links[in_at[n]:in_end[n]]`` are the producers of node n; of a representative,
            those of its region. ``in_used`` entries are taken in all.
        out_links: The consumers alike.
        free: 1 for each node that may join a region.
        links_followed: Number of links that all searches together have followed.
    """

    count: int
    representative: PerNode
    order: PerNode
    in_at: PerNode
    in_end: PerNode
    in_links: PerLink
    in_used: int
    out_at: PerNode
    out_end: PerNode
    out_links: PerLink
    out_used: int
    free: PerNode
    links_followed: int


class Region:
    """A set of nodes that may become a region, and what lies around it; see `contraction`.

    A table ``x_epoch`` or ``inside`` marks the nodes for which it holds the current ``epoch``.

    Attributes:
        members: The set is ``members[:size]``.
        ancestors: ``ancestors[:ancestor_count]`` lead to members, ``descendants`` alike follow from
            them; both between the members' first and last position.
        moved: ``moved[:move_count]`` are nodes that left the set, or whose position has changed.
        sweep: Scratch: nodes in the order in which a function goes through them.
        slots: Scratch: positions to be assigned.
        note: Scratch: a mark for each node, made with a new epoch.
    """

    members: PerNode
    size: int
    inside: PerNode
    ancestors: PerNode
    ancestor_count: int
    ancestor_epoch: PerNode
    descendants: PerNode
    descendant_count: int
    descendant_epoch: PerNode
    moved: PerNode
    move_count: int
    sweep: PerNode
    slots: PerNode
    note: PerNode
    epoch: int


class Heap:
    """A heap of nodes; the least (key, node) is ``items[0]``.

    Attributes:
        items: The nodes are ``items[:count]``.
        place: For each node its place among the items plus one.
        keys: For each node its key, which stays while the node is in the heap.
    """

    items: PerNode
    place: PerNode
    keys: PerNode
    count: int


class RegionGrowth:
    """The candidates of a growth that asks a selector; see `region_growth`.

    Attributes:
        start: The node from which the region grows.
        phase: PICK, or whether producers or consumers of ``candidate`` are asked about.
        queue: ``queue[queue_begin:queue_end]`` are the candidates not yet looked at.
        ask_count: Number of neighbours in the current message.
        complete: 1 for the candidates all of whose neighbours were asked about.
        waited: 1 for the candidates that had to wait when `_resume` began.
        stale: Whether a lost node has joined, so that all candidates must be judged again.
        state: QUEUED, GROWN or WAITING for each candidate, else 0.
        barred: 1 for the nodes that must not join any more.
        candidates: All that ever were, in the order of discovery, which is their rank.
        rank_above: For each candidate the rank of the first one above it in the region.
        rank_below: For each candidate the rank of the first one below it.
        given_up: ``given_up[:given_up_count]`` are candidates that are not in the region.
    """

    start: int
    phase: int
    candidate: int
    queue: PerNode
    queue_begin: int
    queue_end: int
    ask_count: int
    complete: PerNode
    waited: PerNode
    stale: int
    state: PerNode
    barred: PerNode
    candidates: PerNode
    candidate_count: int
    rank_above: PerNode
    rank_below: PerNode
    given_up: PerNode
    given_up_count: int


class Frontier:
    """The nodes around a growing region; see `frontier`.

    Attributes:
        first: First position of a candidate.
        flags: HERE, TOUCHED, OPEN and LOST for each of ``nodes[:node_count]``.
        support: For each node the number of producers from which it may join.
        leads_to: For each node the rank of the first candidate that it leads to.
        far: Nodes before ``first``, at which the search ended, the last position first.
        roots: Scratch: producers of the candidate in question.
        stack: Scratch: nodes from which a search begins.
        work: Scratch: nodes that a search has yet to look at.
        losing: Scratch: nodes that are lost next.
        announced: New nodes that frames pass on to those that were here before.
        announcement: For each node the number of the frame that passed it on last.
        work_frame: The frame (plus one) that judges a node again; ``work_next`` and ``work_last``
            (plus one) link the nodes of a frame.
        frame_head: For each of ``frame_count`` frames its first node (plus one), -1 for one that
            passes on ``announced[frame_at:frame_end]``.
        frame_node: The node over which a frame bars candidates, or the number of an announcement.
        frame_barred: The candidate that a frame barred last.
    """

    first: int
    flags: PerNode
    nodes: PerLink
    node_count: int
    support: PerNode
    leads_to: PerNode
    far: Heap
    roots: PerNode
    stack: PerNode
    work: PerNode
    losing: PerLink
    announced: PerNode
    announced_end: int
    announcement: PerNode
    announcements: int
    work_frame: PerNode
    work_next: PerNode
    work_last: PerNode
    frame_count: int
    frame_head: PerLink
    frame_begin: PerLink
    frame_at: PerLink
    frame_end: PerLink
    frame_node: PerLink
    frame_barred: PerLink


class Blocks:
    """The biconnected blocks of the contracted graph; see `blocks`.

    Attributes:
        count: Number of blocks. Block b has the node ``top[b]`` and ``nodes[begin[b]:end[b]]``.
        discovered: For each node the time of the first visit; ``low``: the least one reached.
        parent: The node from which each was visited.
        passed: Scratch: visited nodes that have no block yet; ``stack``: the path of the visit.
        cursor: For each node how many of its neighbours were visited.
        home: For each node the one block (plus one) in which it is not the top.
        first_block: For each node the first block (plus one) of which it is the top, followed by
            ``next_block`` (plus one) of each block.
        vertex: For each node its representative when the blocks were found.
        refused: For each block how many of its nodes are not free.
    """

    count: int
    discovered: PerNode
    low: PerNode
    parent: PerNode
    passed: PerNode
    stack: PerNode
    cursor: PerNode
    home: PerNode
    first_block: PerNode
    next_block: PerNode
    top: PerNode
    begin: PerNode
    end: PerNode
    nodes: PerNode
    vertex: PerNode
    refused: PerNode


class BlockGrowth:
    """One growth of strategy ``hetero`` inside a block; see `block_growth`.

    Attributes:
        count: Number of growths so far.
        block: The block.
        members: The region is ``members[:size]``, in the order of joining.
        number: For each node which member it is, plus one.
        rejected: 1 for each of ``rejected_nodes[:rejected_count]``.
        up: For each node outside that leads to a member the first such member's number.
        down: For each of them that a member leads to the first such member's number.
        above: ``above[:above_end]`` are the nodes with ``up``; ``reached`` those that got ``down``
            later; ``pruned`` those before the position ``first`` of the first member, at which the
            search ended.
        saved_up: What going back to before a member restores, as all tables ``saved_x``.
        spread: Scratch: nodes whose mark ``spread_mark`` has to be passed on.
        edges: ``edges[:edge_count]`` lead into the region from before its first position.
        joined: ``joined[:joined_count]`` were members at any time.
        explored_epoch: The growth in which the producers of a node were followed last.
        seen: ``seen[:seen_count]`` is everything that the outcome depends on.
    """

    count: int
    block: int
    members: PerNode
    size: int
    number: PerNode
    rejected: PerNode
    rejected_nodes: PerNode
    rejected_count: int
    up: PerNode
    down: PerNode
    above: PerNode
    above_end: int
    reached: PerNode
    reached_end: int
    pruned: PerNode
    pruned_end: int
    is_pruned: PerNode
    first: int
    saved_above_end: PerNode
    saved_reached_end: PerNode
    saved_up: PerNode
    saved_down: PerNode
    saved_first: PerNode
    saved_pruned_end: PerNode
    spread: PerNode
    spread_mark: PerNode
    spread_count: int
    stack: PerNode
    cursor: PerNode
    work: PerNode
    edges: PerNode
    edge_count: int
    edge_epoch: PerNode
    joined: PerNode
    joined_count: int
    joined_epoch: PerNode
    explored_epoch: PerNode
    epoch: int
    seen: PerNode
    seen_count: int
    seen_in: PerNode
    seen_epoch: int


class DeviceSearch:
    """The roots of one device, and the region that grows from one of them; see `hetero`.

    Attributes:
        started: Whether there is a device.
        link_index: Scratch: for each node the index of its last link.
        previous_twin: For each node its twin just before it (plus one), ``next_twin`` just after.
        holders: For each node how many regions of earlier roots hold it.
        members: The region that grows is ``members[:size]``.
        entries: Scratch: nodes that enter further blocks; ``entry_blocks``: from which (plus one).
        limits: For each growth in a block the number of ``edges``, that of ``joined``, and both.
        moved_roots: Scratch: roots whose growth has seen a node that moved.
        changed: Nodes that may have become roots, or may be none any more.
        largest: Roots with a valid growth, the largest region first.
    """

    started: int
    link_index: PerNode
    previous_twin: PerNode
    next_twin: PerNode
    holders: PerNode
    members: PerNode
    size: int
    entries: PerNode
    entry_blocks: PerNode
    limits: PerLink
    limits_end: int
    moved_roots: PerNode
    moved_epoch: PerNode
    changed: Heap
    largest: Heap


class GrowthCache:
    """The growths that are still valid, by their roots; see `hetero`.

    Attributes:
        begin: The growth of root r is ``nodes[begin[r]:end[r]]``: ``member_count[r]`` members, then
            the ``seen_count[r]`` nodes that it has seen, then its limits.
        watchers: For each node the first index (plus one) among the seen nodes that holds it.
        next: For each such index the next one (plus one).
        root: For each such index the root whose growth that is.
        used: Number of entries taken, of ``capacity``.
        new_nodes: Longer tables into which `move_growths` moves what is valid.
    """

    begin: PerNode
    member_count: PerNode
    seen_count: PerNode
    end: PerNode
    nodes: Pool
    next: Pool
    root: Pool
    used: int
    capacity: int
    new_nodes: Pool
    new_next: Pool
    new_root: Pool
    watchers: PerNode


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
