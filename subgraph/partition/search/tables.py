"""The state of a search: named lists of integers, on which all functions of the search work.

Functions that read and write nothing else run as they stand on small graphs; on large ones the same
text runs as machine code (`machine`, `search_kernels`). A table that holds the number of something
"plus one" has 0 where there is none, so that all tables begin with zeros.
"""

from __future__ import annotations

PerNode = list[int]
PerLink = list[int]
Pool = list[int]


class Tables:
    """All tables and counters; each annotation says how long a table is.

    PerNode: one entry a node and some more. PerLink: room for each link twice, since a region gets
    a list of its own. Pool: replaced by a longer one when it is full. int: a counter.
    """

    # What Python and the search tell each other: an operation, its arguments, its results.
    told: Pool
    count: int
    has_roots: int

    # The contracted graph; see `contraction`.
    rep: PerNode
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
    members: PerNode
    size: int
    inside: PerNode
    early: PerNode
    earlies: int
    early_at: PerNode
    late: PerNode
    lates: int
    late_at: PerNode
    moved: PerNode
    moves: int
    sweep: PerNode
    slots: PerNode
    note: PerNode
    epoch: int
    searched: int

    # A growth that asks; see `growing` and `surroundings`.
    start: int
    phase: int
    growing: int
    queue: PerNode
    queue_at: int
    queue_end: int
    asked: PerNode
    answers: PerNode
    asks: int
    complete: PerNode
    waited: PerNode
    stale: int
    state: PerNode
    barred: PerNode
    candidates: PerNode
    ranks: int
    rank_above: PerNode
    rank_below: PerNode
    around: PerNode
    circle: PerLink
    circled: int
    support: PerNode
    leads_to: PerNode
    far: PerNode
    far_place: PerNode
    far_key: PerNode
    farthest: int
    losing: PerLink
    tells: PerNode
    tells_end: int
    telling: PerNode
    tellings: int
    work_frame: PerNode
    work_next: PerNode
    work_last: PerNode
    frames: int
    frame_head: PerLink
    frame_begin: PerLink
    frame_at: PerLink
    frame_end: PerLink
    frame_node: PerLink
    frame_barred: PerLink
    given: PerNode
    given_up: int

    # Biconnected blocks; see `blocks`.
    found: PerNode
    low: PerNode
    parent: PerNode
    passed: PerNode
    stack: PerNode
    cursor: PerNode
    home: PerNode
    first_block: PerNode
    next_block: PerNode
    top: PerNode
    block_at: PerNode
    block_end: PerNode
    block_list: PerNode
    blocks: int

    # One growth in a block; see `trial`.
    vertex: PerNode
    block: int
    grown: PerNode
    growns: int
    place: PerNode
    rejected: PerNode
    rejects: PerNode
    rejections: int
    up: PerNode
    down: PerNode
    news: PerNode
    new_end: int
    reached: PerNode
    reached_end: int
    pruned: PerNode
    pruned_end: int
    is_pruned: PerNode
    first: int
    trail_new: PerNode
    trail_reached: PerNode
    trail_up: PerNode
    trail_down: PerNode
    trail_first: PerNode
    trail_pruned: PerNode
    spread: PerNode
    spread_mark: PerNode
    spreads: int
    work: PerNode
    edge: PerNode
    edges: int
    edge_at: PerNode
    joined: PerNode
    joins: int
    joined_at: PerNode
    explored_at: PerNode
    trial_epoch: int
    seen: PerNode
    seens: int
    seen_at: PerNode
    seen_epoch: int
    trials: int

    # All roots of one device; see `hetero`.
    refused: PerNode
    spot: PerNode
    twin: PerNode
    next_twin: PerNode
    holders: PerNode
    region: PerNode
    regions: int
    entries: PerNode
    behinds: PerNode
    limits: PerLink
    limits_end: int
    kept_at: PerNode
    kept_members: PerNode
    kept_seen: PerNode
    kept_end: PerNode
    kept: Pool
    kept_next: Pool
    kept_root: Pool
    kept_used: int
    kept_room: int
    new_kept: Pool
    new_next: Pool
    new_root: Pool
    watchers: PerNode
    touched: PerNode
    touched_at: PerNode
    dirty: PerNode
    dirty_place: PerNode
    dirty_key: PerNode
    dirties: int
    largest: PerNode
    largest_place: PerNode
    largest_key: PerNode
    largests: int


FIELDS: dict[str, str] = {name: str(kind) for name, kind in Tables.__annotations__.items()}
