"""The partition's work grows with the graph, counted in steps rather than seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from partition import FAMILIES, NotSin, build, random_graph

from subgraph.partition.op_names import OperatorNames
from subgraph.partition.property import SelectorProperty
from subgraph.partition.proposal import propose
from subgraph.partition.search import search
from subgraph.partition.search.backend import SearchBackend
from subgraph.partition.search.workspace import Workspace
from subgraph.partition.selector_driver import SelectorDriver


def steps(monkeypatch: pytest.MonkeyPatch, family: str, size: int, strategy: str) -> float:
    """Return function calls for each node."""
    graph = build(FAMILIES[family](size))
    work = Workspace.of(graph)
    driver = SelectorDriver(work, SelectorProperty(NotSin), OperatorNames(graph))
    calls = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    # Machine code makes no calls to count.
    monkeypatch.setattr(
        search, "make_backend", lambda count, links, **_: SearchBackend(count, links)
    )
    before: Callable[..., Any] | None = sys.getprofile()
    sys.setprofile(count)
    try:
        propose(driver, [], strategy)
    finally:
        sys.setprofile(before)
    return calls / len(graph.nodes)


@pytest.mark.parametrize("strategy", ["selector", "hetero"])
@pytest.mark.parametrize("family", [name for name in FAMILIES if "1000" not in name])
def test_steps_for_each_node_stay_the_same(
    monkeypatch: pytest.MonkeyPatch, family: str, strategy: str
) -> None:
    small, large = (
        steps(monkeypatch, family, 400, strategy),
        steps(monkeypatch, family, 1_900, strategy),
    )
    assert large < 1.6 * small + 5, (small, large)


def test_the_random_family_is_no_chain() -> None:
    plan = random_graph(500)
    assert sum(len(sources) for _, sources in plan) > 700
