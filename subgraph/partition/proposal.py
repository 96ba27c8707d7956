"""First and second step of a partition: propose regions, prune them by size and number."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import attrs

from subgraph.partition.asking import Asker
from subgraph.partition.contraction import Cones, Contraction
from subgraph.partition.growth import Growth
from subgraph.partition.record import CAPPED, MADE, SMALL
from subgraph.partition.search import Search
from subgraph.selector import SubgraphSelector


@attrs.define(slots=True)
class Proposal:
    """A region: numbers of its nodes, sorted, and the node at which it started."""

    members: list[int]
    start: int


@attrs.define(slots=True)
class Proposals:
    """Everything that one search found.

    Attributes:
        regions: In the order in which they were chosen.
        via: For each node the one it was found from; see `record.Run`.
        given_up: Nodes that would have closed a cycle, with the position of the region.
        filtered: Nodes that the filter dropped, with the position of the region they were kept
            out of (the next one, if the filter left nothing).
        selector: Name of the selectors' class.
    """

    regions: list[Proposal]
    via: array[int]
    given_up: dict[int, int]
    filtered: dict[int, int]
    selector: str = ""


def propose(asker: Asker, made: Sequence[list[int]], strategy: str) -> Proposals:
    """Find regions over the free nodes; they are free no more.

    Args:
        asker: Asks the selectors of one property about the nodes of one graph.
        made: The regions that were made of this graph before.
        strategy: How regions grow.

    Raises:
        PartitionError: the selector misbehaved.
    """
    if strategy == "hetero":
        return _propose_by_device(asker, made)
    found = Proposals([], array("i", [-1]) * len(asker.work.nodes), {}, {})
    space = Contraction(asker.work.preds, asker.work.succs)
    for members in made:
        space.choose(members)
    _propose_by_growth(asker, space, found)
    return found


def _propose_by_growth(asker: Asker, space: Contraction, found: Proposals) -> None:
    free = asker.work.free
    growth = Growth(asker, space, found.via)
    for start in range(len(free)):
        if not free[start]:
            continue
        selector = asker.selector()
        found.selector = found.selector or type(selector).__name__
        if not asker.select(selector, start):
            continue
        kept, given_up = growth.grow(selector, start)
        cones = space.cones(kept)
        if not cones[0].isdisjoint(cones[1]):
            convex = space.shrink(kept, start, cones)
            given_up.extend(kept - convex)
            kept, cones = convex, space.cones(convex)
        for node in given_up:
            found.given_up[node] = len(found.regions)
        left = asker.filter(selector, sorted(kept))
        if len(left) == len(kept):
            _choose(left, start, free, space, found, cones)
        else:
            _choose_filtered(kept, left, start, free, space, found)


def _propose_by_device(asker: Asker, made: Sequence[list[int]]) -> Proposals:
    work = asker.work
    taken = bytearray(len(work.free))
    kinds: dict[type[SubgraphSelector], None] = {}
    for node, free in enumerate(work.free):
        if free:
            selector = asker.selector()
            kinds[type(selector)] = None
            taken[node] = asker.select(selector, node)
    name = next(iter(kinds)).__name__ if kinds else ""
    found = Proposals([], array("i", [-1]) * len(taken), {}, {}, name)
    search = Search(work.links)
    for members in made:
        search.choose(members)
    search.start_roots(taken)
    keeps_all = all(kind.filter is SubgraphSelector.filter for kind in kinds)
    while (best := search.largest(take=keeps_all)) is not None:
        start, members = best
        for node in members:
            found.via[node] = start
        if keeps_all:
            found.regions.append(Proposal(members, start))
        else:
            left = asker.filter_device(members, start)
            _choose_left(search, members, left, start, found)
            search.take(members)
    for region in found.regions:
        for node in region.members:
            work.free[node] = 0
    return found


def _choose_left(
    search: Search, members: list[int], left: list[int], start: int, found: Proposals
) -> None:
    """Choose what a filter left of a region: each connected part one, made convex again."""
    if len(left) == len(members):
        found.regions.append(Proposal(members, start))
        search.choose(members)
        return
    for node in set(members).difference(left):
        found.filtered[node] = len(found.regions)
    for part in search.components(left):
        first = start if start in part else part[0]
        convex, rest = search.shrink(part, first)
        for node in rest:
            found.given_up[node] = len(found.regions)
        found.regions.append(Proposal(convex, first))
        search.choose(convex)


def _choose(
    members: Iterable[int],
    start: int,
    free: bytearray,
    space: Contraction,
    found: Proposals,
    cones: Cones | None = None,
) -> list[int]:
    chosen = sorted(members)
    for node in chosen:
        free[node] = 0
    found.regions.append(Proposal(chosen, start))
    return space.choose(chosen, cones)


def _choose_filtered(
    kept: set[int],
    left: Sequence[int],
    start: int,
    free: bytearray,
    space: Contraction,
    found: Proposals,
) -> list[int]:
    """Choose what a filter left: each connected part a region, made convex again."""
    for node in kept.difference(left):
        found.filtered[node] = len(found.regions)
    moved: list[int] = []
    for part in space.components(left):
        first = start if start in part else min(part)
        convex = space.shrink(part, first)
        for node in part - convex:
            found.given_up[node] = len(found.regions)
        moved += _choose(convex, first, free, space, found)
    return moved


def prune(regions: Sequence[Proposal], min_size: int, max_subgraphs: int | None) -> list[str]:
    """Return the fate of each region: MADE, SMALL, or CAPPED; of too many the largest stay.

    Between regions of one size the one chosen first stays.
    """
    fates = [MADE if len(region.members) >= min_size else SMALL for region in regions]
    stay = [k for k, fate in enumerate(fates) if fate == MADE]
    if max_subgraphs is not None and len(stay) > max_subgraphs:
        stay.sort(key=lambda k: (-len(regions[k].members), k))
        for k in stay[max_subgraphs:]:
            fates[k] = CAPPED
    return fates
