"""First and second step of a partition: propose regions, prune them by size and number."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

from subgraph.partition.growth import grow
from subgraph.partition.record import CAPPED, MADE, SMALL
from subgraph.partition.search.search import Search
from subgraph.partition.selector import SubgraphSelector
from subgraph.partition.selector_driver import SelectorDriver

_MOST_GROWTHS = 8  # attempts to grow one region by a selector that keeps state (estimate)


@attrs.define(slots=True)
class Proposal:
    """A proposed region.

    Attributes:
        members: Numbers of its nodes, sorted.
        start: Number of the node from which it grew.
    """

    members: list[int]
    start: int


@attrs.define(slots=True)
class Proposals:
    """The result of one search.

    Attributes:
        regions: In the order in which they were chosen.
        via: For each node the one it was found from; see `record.Run`.
        given_up: Nodes that a region gave up since they would have closed a cycle, with the
            position of the region.
        filtered: Nodes that the filter dropped, with the position of their region (of the next one
            if the filter dropped all).
        selector: Name of the selectors' class.
    """

    regions: list[Proposal]
    via: array[int]
    given_up: dict[int, int]
    filtered: dict[int, int]
    selector: str = ""


def propose(driver: SelectorDriver, made: Sequence[list[int]], strategy: str) -> Proposals:
    """Find regions among the free nodes, and mark their nodes as not free.

    Args:
        driver: Asks the selectors of one property about the nodes of one graph.
        made: Members of the regions that were replaced before.
        strategy: One of `options.STRATEGIES`.

    Raises:
        PartitionError: a selector raised or answered with an unexpected type.
    """
    work = driver.work
    found = Proposals([], array("i", [-1]) * len(work.nodes), {}, {})
    search = Search(work.edges)
    for members in made:
        # Earlier regions are one node each for the search, as in the final graph. A new region that
        # forms a cycle with them is therefore not convex in the contracted graph.
        search.contract(members)
    _PROPOSERS[strategy](driver, search, found)
    return found


def _propose_by_growth(driver: SelectorDriver, search: Search, found: Proposals) -> None:
    free = driver.work.free
    search.set_free(free)
    for start in range(len(free)):
        if not free[start]:
            continue
        selector = driver.selector()
        found.selector = found.selector or type(selector).__name__
        if not driver.select(selector, start):
            continue
        selector, members, without, given_up = _grow_region(
            driver, search, found.via, selector, start
        )
        for node in (*without, *given_up):
            found.given_up[node] = len(found.regions)
        left = driver.filter(selector, members)
        first = len(found.regions)
        if len(left) == len(members):
            found.regions.append(Proposal(members, start))
            search.contract_grown()
        else:
            _contract_filtered(search, members, left, start, found)
        for region in found.regions[first:]:
            for node in region.members:
                free[node] = 0
        # The nodes that were kept from this region may join a later one.
        if without:
            search.set_free(free)


def _grow_region(
    driver: SelectorDriver, search: Search, via: array[int], selector: SubgraphSelector, start: int
) -> tuple[SubgraphSelector, list[int], list[int], list[int]]:
    """Grow a region; if the selector keeps state, again without the nodes that were given up.

    A selector that counts nodes, for example, has counted those too; so each growth begins with a
    fresh or reset selector. Ends when no node is given up, or after `_MOST_GROWTHS`.

    Args:
        driver: Makes selectors and checks their answers.
        search: The search.
        via: Gets for each candidate the node from which it was found; see `growth.grow`.
        selector: The selector of the first growth.
        start: The region's start node.

    Returns:
        The last selector, the region's nodes, the nodes that were left out, which are not free in
        the search, and the nodes that the last growth gave up.
    """
    members, given_up = grow(driver, search, via, selector, start)
    without: list[int] = []
    keeps_state = type(selector).reset is not SubgraphSelector.reset
    for _ in range(_MOST_GROWTHS if keeps_state else 0):
        if not given_up:
            break
        without += given_up
        free = bytearray(driver.work.free)
        for node in without:
            free[node] = 0
        search.set_free(free)
        selector = driver.selector()
        driver.select(selector, start)
        members, given_up = grow(driver, search, via, selector, start)
    return selector, members, without, given_up


def _propose_by_device(driver: SelectorDriver, search: Search, found: Proposals) -> None:
    work = driver.work
    taken = bytearray(len(work.free))
    kinds: dict[type[SubgraphSelector], None] = {}
    for node, free in enumerate(work.free):
        if free:
            selector = driver.selector()
            kinds[type(selector)] = None
            taken[node] = driver.select(selector, node)
    found.selector = next(iter(kinds)).__name__ if kinds else ""
    search.start_roots(taken)
    # Without a filter the search can make a region of the largest candidate at once, without a call
    # for each of its parts.
    keeps_all = all(kind.filter is SubgraphSelector.filter for kind in kinds)
    while (best := search.largest(contract=keeps_all)) is not None:
        start, members = best
        for node in members:
            found.via[node] = start
        if keeps_all:
            found.regions.append(Proposal(members, start))
        else:
            left = driver.filter_device(members, start)
            _contract_filtered(search, members, left, start, found)
            search.claim(members)
    for region in found.regions:
        for node in region.members:
            work.free[node] = 0


_PROPOSERS = {"selector": _propose_by_growth, "hetero": _propose_by_device}  # by strategy


def _contract_filtered(
    search: Search, members: list[int], left: list[int], start: int, found: Proposals
) -> None:
    """Make regions of the nodes that a filter left: each connected part, shrunk to be convex.

    Args:
        search: The search.
        members: The region before the filter.
        left: The nodes that the filter left, sorted.
        start: The region's start node.
        found: The regions are added here.
    """
    if len(left) == len(members):
        found.regions.append(Proposal(members, start))
        search.contract(members)
        return
    for node in set(members).difference(left):
        found.filtered[node] = len(found.regions)
    for part in search.components(left):
        first = start if start in part else part[0]
        convex, rest = search.shrink(part, first)
        for node in rest:
            found.given_up[node] = len(found.regions)
        found.regions.append(Proposal(convex, first))
        search.contract(convex)


def prune(
    regions: Sequence[Proposal], min_size: int, max_subgraphs: int | None, forced: bytearray
) -> list[str]:
    """Return the status of each region: MADE, SMALL or CAPPED.

    Args:
        regions: The proposed regions.
        min_size: Smaller regions are SMALL unless they have a forced node.
        max_subgraphs: If more regions remain, those with a forced node, then the largest, then the
            first are MADE and the others CAPPED; None: no limit.
        forced: 1 for each node that the option ``include`` names.
    """
    must = [False] * len(regions)
    if any(forced):
        must = [any(map(forced.__getitem__, region.members)) for region in regions]
    large = [len(region.members) >= min_size for region in regions]
    statuses = [MADE if one or other else SMALL for one, other in zip(must, large, strict=True)]
    stay = [k for k, status in enumerate(statuses) if status == MADE]
    if max_subgraphs is not None and len(stay) > max_subgraphs:
        # The position is the last key, so that equal sizes are decided by the order of the graph.
        stay.sort(key=lambda k: (not must[k], -len(regions[k].members), k))
        for k in stay[max_subgraphs:]:
            statuses[k] = CAPPED
    return statuses
