"""Target: random graphs, partitioned by random selectors; hypothesis draws both from the bytes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import passes, testing
from subgraph.testing import random_selectors


class _Property(sg.SubgraphProperty):
    """A property with the selectors of a recipe."""

    def __init__(self, recipe: random_selectors.Recipe) -> None:
        """Make a property with selectors of ``recipe``."""
        self._recipe = recipe

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        """Return a new selector."""
        return self._recipe()


@settings(
    database=None, deadline=None, suppress_health_check=cast("list[HealthCheck]", list(HealthCheck))
)
@given(
    graph=st.one_of(testing.topologies(), testing.graphs(max_nodes=8)),
    recipes=st.lists(testing.selectors() | testing.misbehaving_selectors(), min_size=1, max_size=3),
    strategy=st.sampled_from(["selector", "hetero"]),
    least=st.integers(1, 3),
)
def _check(
    graph: sg.Graph,
    recipes: list[random_selectors.Recipe],
    strategy: str,
    least: int,
) -> None:
    graph.attrs["subgraph_property"] = [_Property(recipe) for recipe in recipes]
    try:
        after = passes.apply_pass(graph, "PartitionGraph", strategy=strategy, min_size=least)
    except sg.PassError:
        return  # the allowed outcome of a selector that breaks the contract
    testing.check_partition(graph, after, inputs=testing.feeds(graph))


def seeds() -> Iterator[bytes]:
    """Yield bytes of several lengths."""
    rng = random.Random(0)
    for length in (16, 64, 128, 256, 512, 1024) * 8:
        yield rng.randbytes(length)


def run(data: bytes) -> None:
    """Check one partition."""
    check: Any = _check  # hypothesis adds the attribute
    check.hypothesis.fuzz_one_input(data)
