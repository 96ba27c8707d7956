"""HETERO on graphs that hold regions of a user's partition."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.simulated_device import X, check, two_devices

devices = pytest.fixture(two_devices)


class Doubles(sg.SubgraphOp):
    """A user's own op."""

    device = "MINE"

    def forward(self, inputs: list[Any]) -> list[Array]:
        return [np.maximum(inputs[0], 0) * 2]


class DoublesProperty(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Tanh"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, Doubles(subgraph), f"mine_{subgraph_id}")


def user_graph() -> sg.Graph:
    x = sg.input("x", ("N", 3))
    w = sg.parameter("w", np.full((3, 3), 0.5, np.float32))
    hidden = ops.Relu(ops.Add(ops.MatMul(x, w), x))
    return sg.Graph([x], [ops.Neg(ops.Relu(ops.Tanh(hidden)))], "user")


def test_default_regions_of_a_user_run_on_the_device(devices: Any) -> None:
    core, a, b = devices
    b.takes = {"MatMul", "Neg"}
    sg.register_selector("test_hetero_relu_add", lambda: sg.ContainOpSelector({"Relu", "Add"}))
    cut = sg.optimize_for(user_graph(), "test_hetero_relu_add")
    count = sum(node.subgraph is not None for node in cut.nodes)
    assert count == 2
    model = core.compile_model(cut, "HETERO:A,B,REFERENCE")
    assert sorted(len(part) for part in a.compiled) == [1, 2]
    assert sum(node.subgraph is not None for node in model.graph.nodes) == count + 2
    check(model, user_graph())
    assert a.runs == 2
    model.parameters["w"].assign(np.ones((3, 3), np.float32))
    changed = user_graph()
    changed.parameters["w"].assign(np.ones((3, 3), np.float32))
    check(model, changed)
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    again = core.import_model(stream, "HETERO", {"ALLOW_RECOMPILE": False})
    check(again, changed)
    assert a.runs == 6
    assert [n.op.device for n in cut.nodes if n.op is not None] == ["default"] * count


def test_a_region_that_no_device_takes_whole_is_cut_again(devices: Any) -> None:
    core, a, b = devices
    b.takes = {"MatMul"}
    cut = sg.optimize_for(user_graph(), sg.ContainOpSelector({"MatMul", "Add", "Relu", "Tanh"}))
    (node,) = [node for node in cut.nodes if node.subgraph is not None]
    model = core.compile_model(cut, "HETERO:A,B,REFERENCE")
    assert b.compiled == [["MatMul_0"]]
    assert sum(len(part) for part in a.compiled) == 3
    check(model, user_graph())
    model.parameters["w"].assign(np.ones((3, 3), np.float32))
    changed = user_graph()
    changed.parameters["w"].assign(np.ones((3, 3), np.float32))
    check(model, changed)
    assert node.op is not None
    assert type(node.op) is sg.DefaultSubgraphOp


def test_a_users_own_ops_are_left_alone(devices: Any) -> None:
    core, _, _ = devices
    cut = sg.optimize_for(user_graph(), DoublesProperty())
    for device in ("REFERENCE", "HETERO:A,REFERENCE", "HETERO:A,B", "CPU"):
        model = core.compile_model(cut, device)
        hidden = np.maximum(X @ np.full((3, 3), 0.5, np.float32) + X, 0)
        np.testing.assert_allclose(model(X)[0], -2 * hidden, rtol=1e-6)
        with pytest.raises(sg.BlobError, match="runs by Doubles"):
            model.export_model(io.BytesIO())
