"""HETERO makes no region of constants and views alone; they join what is beside them."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.simulated_device import Simulated, check

VIEWS = {
    "Identity": lambda x: ops.Identity(x, name="light"),
    "Reshape": lambda x: ops.Reshape(x, np.array([3, 2]), name="light"),
    "Flatten": lambda x: ops.Flatten(x, name="light"),
    "Squeeze": lambda x: ops.Squeeze(x, name="light"),
    "Unsqueeze": lambda x: ops.Unsqueeze(x, np.array([0]), name="light"),
    "Transpose": lambda x: ops.Transpose(x, perm=[0, 1], name="light"),
}
LIGHT = {*VIEWS, "Constant"}


def two(first: set[str] | None, second: set[str] | None) -> tuple[sg.Core, Simulated, Simulated]:
    core = sg.Core()
    a, b = Simulated(first), Simulated(second)
    core.register_device("A", a)
    core.register_device("B", b)
    return core, a, b


def between(view: str) -> sg.Graph:
    """Return Neg, a view, Exp."""
    x = sg.input("x", (2, 3))
    y = ops.Exp(VIEWS[view](ops.Neg(x, name="neg")), name="exp")
    return sg.Graph([x], [y], view)


def with_constant() -> sg.Graph:
    x = sg.input("x", (2, 3))
    held = ops.Constant(value=np.array([1, 2, 3], np.float32), name="light")
    return sg.Graph([x], [ops.Mul(ops.Relu(x, name="relu"), held, name="mul")], "constant")


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_alone_goes_to_the_device_beside_it(view: str) -> None:
    core, a, b = two({*LIGHT, "Relu"}, None)
    graph = between(view)
    assert set(core.query_model(graph, "HETERO:A,B").values()) == {"B"}
    model = core.compile_model(graph, "HETERO:A,B")
    assert not a.compiled
    assert len(b.compiled) == 1
    assert model.execution_devices == ["B"]
    check(model, graph)


def test_a_constant_alone_goes_to_its_consumer() -> None:
    core, a, b = two({"Constant", "Relu"}, None)
    graph = with_constant()
    model = core.compile_model(graph, "HETERO:A,B")
    assert a.compiled == [["relu"]]
    assert sorted(b.compiled[0]) == ["light", "mul"]
    check(model, graph)


def test_a_constant_that_its_consumer_cannot_take_is_no_region() -> None:
    core, a, b = two({"Constant", "Relu"}, {"Mul"})
    graph = with_constant()
    model = core.compile_model(graph, "HETERO:A,B")
    assert (a.compiled, b.compiled) == ([["relu"]], [["mul"]])
    assert model.get_property("NUMBER_OF_SUBGRAPHS") == 2
    check(model, graph)


def test_a_view_and_its_constant_shape_are_no_region() -> None:
    core, a, b = two({*LIGHT, "Relu"}, None)
    x = sg.input("x", (2, 3))
    shape = ops.Constant(value=np.array([3, 2]), name="shape")
    y = ops.Exp(ops.Reshape(ops.Neg(x), shape, name="reshape"))
    graph = sg.Graph([x], [y], "shaped")
    check(core.compile_model(graph, "HETERO:A,B"), graph)
    assert not a.compiled
    assert len(b.compiled) == 1


def test_what_stays_where_it_is() -> None:
    # Beside another node of its device.
    core, a, b = two({*LIGHT, "Exp"}, None)
    graph = between("Reshape")
    check(core.compile_model(graph, "HETERO:A,B"), graph)
    assert a.compiled == [["light", "exp"]]
    # Where no device beside it can take it, or there is none.
    core, a, b = two(LIGHT, {"Neg", "Exp"})
    check(core.compile_model(graph, "HETERO:A,B"), graph)
    assert a.compiled == [["light"]]
    x = sg.input("x", (2, 3))
    alone = sg.Graph([x], [ops.Flatten(x)], "alone")
    a.compiled.clear()
    check(core.compile_model(alone, "HETERO:A,B"), alone)
    assert len(a.compiled) == 1
    # A transposition that moves elements is work.
    core, a, b = two({"Transpose"}, None)
    moved = sg.Graph([x], [ops.Exp(ops.Transpose(ops.Neg(x), perm=[1, 0], name="t"))], "moved")
    check(core.compile_model(moved, "HETERO:A,B"), moved)
    assert a.compiled == [["t"]]
    assert len(b.compiled) == 2
    # Placed by hand.
    core, a, b = two({*LIGHT, "Relu"}, None)
    by_hand = between("Identity")
    by_hand.node("light").metadata = {"affinity": "A"}
    check(core.compile_model(by_hand, "HETERO:B,A"), by_hand)
    assert a.compiled == [["light"]]


@pytest.mark.parametrize("view", VIEWS)
def test_a_selector_of_the_user_decides_about_views(view: str) -> None:
    """Its answer is the user's word, unlike a device's; min_size is the way to say otherwise."""
    graph = between(view)
    chosen = sg.ContainOpSelector({view})
    cut = sg.optimize_for(graph, chosen)
    assert [len(node.subgraph.nodes) for node in cut.nodes if node.subgraph is not None] == [1]
    sg.testing.check_partition(graph, cut)
    check(sg.compile_model(cut, "CPU"), graph)
    larger = sg.optimize_for(graph, chosen, min_size=2)
    assert [node for node in larger.nodes if node.subgraph is not None] == []


def test_a_selector_is_not_asked_about_constants() -> None:
    asked: list[str] = []

    class All(sg.SubgraphSelector):
        def select(self, node: sg.Node) -> bool:
            asked.append(node.op_type)
            return node.op_type == "Constant"

    cut = sg.optimize_for(with_constant(), All)
    assert [node for node in cut.nodes if node.subgraph is not None] == []
    assert set(asked) == {"Relu", "Mul"}
