"""SUBGRAPH_BACKEND partitions every model that is compiled; lists of what can be named there."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

X = np.array([[1, -2, 3]], np.float32)
NAME = "test_environment_backend"


class Counting(sg.SubgraphOp):
    runs = 0

    def forward(self, inputs: list[Any]) -> list[Array]:
        Counting.runs += 1
        return [np.maximum(inputs[0], 0)]


@sg.register_property(NAME)
class CountingProperty(sg.SubgraphProperty):
    """Runs Relu and counts.

    The lists show the first line alone.
    """

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, Counting(subgraph), f"counting_{subgraph_id}")


@sg.register_selector(f"{NAME}_selector")
def tanh_selector() -> sg.SubgraphSelector:
    """Takes Tanh."""
    return sg.ContainOpSelector({"Tanh"})


def net() -> sg.Graph:
    x = sg.input("x", (1, 3))
    return sg.Graph([x], [ops.Neg(ops.Tanh(ops.Relu(x, name="relu")))], "net")


def test_properties_and_selectors_are_listed() -> None:
    assert sg.list_properties()[NAME] == "Runs Relu and counts."
    assert not any("partial(func" in about for about in sg.list_properties().values())
    assert sg.list_selectors()[f"{NAME}_selector"] == "Takes Tanh."
    assert list(sg.list_properties()) == sorted(sg.list_properties())
    assert NAME not in sg.list_selectors()


DEVICES = ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "AUTO:CPU"]


@pytest.mark.parametrize("device", DEVICES)
def test_every_compiled_model_is_partitioned(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = sg.compile_model(net(), "REFERENCE")(X)[0]
    monkeypatch.setenv("SUBGRAPH_BACKEND", f"{NAME}, {NAME}_selector")
    Counting.runs = 0
    graph = net()
    model = sg.compile_model(graph, device)
    np.testing.assert_allclose(model(X)[0], want, rtol=1e-6)
    assert Counting.runs == 1
    assert all(node.subgraph is None for node in graph.nodes)
    assert "relu" not in sg.query_model(net(), device)
    already = sg.compile_model(sg.optimize_for(net(), NAME), device)
    already(X)
    assert Counting.runs == 2
    monkeypatch.setenv("SUBGRAPH_BACKEND", "")
    sg.compile_model(net(), device)(X)
    assert Counting.runs == 2


def test_a_name_that_nobody_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_BACKEND", f"{NAME[:-1]}")
    with pytest.raises(sg.PartitionError, match=f"did you mean '{NAME}'") as caught:
        sg.compile_model(net(), "CPU")
    assert any("SUBGRAPH_BACKEND" in note for note in caught.value.__notes__)
