"""Strategy hetero equals the reference's algorithm, written down literally below, on random graphs.

The oracle asks every question of reachability of a closure that it computes anew after every
region, with regions chosen as single nodes. It knows nothing of the package.
"""

from __future__ import annotations

import random
from itertools import chain

import numpy as np
import pytest

from subgraph.engine.program.search_code import CompiledSearch
from subgraph.partition.search.backend import use_code
from subgraph.partition.search.search import Edges, Search

use_code(CompiledSearch)
Links = list[list[int]]


class Oracle:
    """The literal algorithm: DESIGN 4 and the wiki page HeteroPluginArchitecture."""

    def __init__(self, preds: Links) -> None:
        self.preds = preds
        self.succs: Links = [[] for _ in preds]
        for node, sources in enumerate(preds):
            for source in sources:
                self.succs[source].append(node)
        self.group = list(range(len(preds)))

    def reachable(self) -> list[set[int]]:
        """Closure of the contracted graph, by group."""
        out: list[set[int]] = [set() for _ in self.preds]
        for start in set(self.group):
            stack = [k for k, g in enumerate(self.group) if g == start]
            while stack:
                for other in self.succs[stack.pop()]:
                    there = self.group[other]
                    if there not in out[start] and there != start:
                        out[start].add(there)
                        stack += [k for k, g in enumerate(self.group) if g == there]
        return out

    def partition(self, mine: set[int]) -> list[tuple[int, list[int]]]:
        """Return the regions of one device as (root, members), in the order of choice."""
        left = set(mine)
        regions: list[tuple[int, list[int]]] = []
        while left:
            reach = self.reachable()
            best: tuple[int, list[int]] | None = None
            covered: set[int] = set()
            for root in sorted(left):
                if root in covered:
                    continue
                grown = self.grow(root, left, reach)
                covered |= set(grown)
                if best is None or len(grown) > len(best[1]):
                    best = (root, grown)
            assert best is not None
            for node in best[1]:
                self.group[node] = min(best[1])
            left -= set(best[1])
            regions.append((best[0], sorted(best[1])))
        return regions

    def grow(self, root: int, left: set[int], reach: list[set[int]]) -> list[int]:
        grown: list[int] = []
        rejected: set[int] = set()

        def broken() -> bool:
            return any(
                rejects in reach[a] and b in reach[rejects]
                for rejects in rejected
                for a in grown
                for b in grown
            )

        def visit(node: int) -> None:
            for other in self.succs[node] + self.preds[node]:
                if node not in grown:
                    return  # rolled back: its neighbours are not followed
                there = self.group[other]
                if there in grown or there in rejected:
                    continue
                if other in left:
                    grown.append(there)
                else:
                    rejected.add(there)
                while broken():
                    rejected.add(grown.pop())
                if there in grown:
                    visit(there)

        grown.append(root)
        visit(root)
        return grown


def fast(
    preds: Links, devices: list[set[int]], *, compiled: bool
) -> list[list[tuple[int, list[int]]]]:
    ends = np.cumsum([len(sources) for sources in preds], dtype=np.int32)
    ins = np.array([source for sources in preds for source in sources], np.int32)
    edges = Edges.of(ends, ins)
    out: list[list[tuple[int, list[int]]]] = []
    for mine in devices:
        search = Search(edges, compiled=compiled)
        for _, members in chain.from_iterable(out):
            search.contract(members)
        search.start_roots(k in mine for k in range(len(preds)))
        regions: list[tuple[int, list[int]]] = []
        while (best := search.largest(contract=True)) is not None:
            regions.append(best)
        out.append(regions)
    return out


def random_graph(seed: int) -> tuple[Links, list[set[int]]]:
    rng = random.Random(seed)
    count = rng.randint(1, 28)
    window = rng.choice([2, 3, 5, 30])
    density = rng.choice([0.5, 1.0, 1.7, 2.5])
    preds: Links = []
    for node in range(count):
        pool = list(range(max(0, node - window), node))
        wanted = min(len(pool), int(rng.random() * 2 * density + 0.5))
        preds.append(rng.sample(pool, wanted))
    share = rng.choice([0.5, 0.7, 0.85, 0.95])
    first = {k for k in range(count) if rng.random() < share}
    second = {k for k in range(count) if k not in first and rng.random() < 0.8}
    if rng.random() < 0.3:
        first, second = second, first
    return preds, [first, second]


def check(seed: int) -> None:
    preds, devices = random_graph(seed)
    oracle = Oracle(preds)
    taken: set[int] = set()
    expected: list[list[tuple[int, list[int]]]] = []
    for mine in devices:
        regions = oracle.partition(mine - taken)
        taken |= {node for _, members in regions for node in members}
        expected.append(regions)
    for compiled in (False, True):
        found = fast(preds, devices, compiled=compiled)
        assert found == expected, (seed, compiled, preds, devices)


def test_the_worked_example_of_the_reference() -> None:
    preds: Links = [[], [0], [1], [1], [2, 3], [4], [5]]
    devices = [{0, 1, 2, 4, 5, 6}, {3}]
    expected = [[(4, [2, 4, 5, 6]), (0, [0, 1])], [(3, [3])]]
    oracle = Oracle(preds)
    assert [oracle.partition(mine) for mine in devices] == expected
    for compiled in (False, True):
        assert fast(preds, devices, compiled=compiled) == expected


@pytest.mark.parametrize("block", range(10))
def test_equal_on_random_graphs(block: int) -> None:
    for seed in range(block * 250, (block + 1) * 250):
        check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_equal_on_many_random_graphs(block: int) -> None:
    for seed in range(10_000 + block * 2_000, 10_000 + (block + 1) * 2_000):
        check(seed)
