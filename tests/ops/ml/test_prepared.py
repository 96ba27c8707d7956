"""The cache of models that attributes are converted to."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from subgraph.graph.graph import Node
from subgraph.ops.ml.scores import prepared


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Let threads take turns after each few instructions."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _count(node: Node) -> int:
    return len(node.attrs)


@pytest.mark.usefixtures("frequent_switches")
def test_many_models_are_prepared_by_several_threads() -> None:
    """The oldest entry was dropped by an iterator, which another thread's entry made invalid."""
    nodes = [Node("Scaler", attrs={"offset": (float(k),)}) for k in range(400)]

    def prepare(first: int) -> int:
        return sum(prepared(node, _count) for _ in range(600) for node in nodes[first::4])

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(prepare, range(4))) == [60000] * 4
