"""A Constant that a device refuses goes along, as a weight, with the nodes that it takes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.peer import session_of
from tests.support.simulated_device import Simulated, check

X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)
HELD = np.array([1, 2, 3], np.float32)


class Foreign(sg.Device):
    """Answers and compiles in its own way: it takes Add alone, of a value and a weight."""

    def __init__(self) -> None:
        self.seen: list[sg.Graph] = []

    def query_model(self, graph: sg.Graph, config: Any = None) -> dict[str, str]:
        return {node.name: self.name for node in graph.nodes if node.op_type == "Add"}

    def compile_model(self, graph: sg.Graph, config: Any = None) -> sg.CompiledModel:
        assert {node.op_type for node in graph.nodes} == {"Add"}, graph
        self.seen.append(graph)
        inner = graph.clone()
        return sg.CompiledModel(inner, device=self.name)


class WeightsAlone(Simulated):
    """Takes Add, its second operand a weight."""

    def supports(self, node: sg.Node, options: Any) -> bool | sg.Reject:
        if node.op_type != "Add":
            return sg.Reject(f"no {node.op_type} here")
        second = node.inputs[1]
        return second is not None and second.parameter is not None


def made(device: sg.Device) -> sg.Core:
    core = sg.Core()
    core.register_device("A", device)
    return core


def added(*, cast: bool = False, shared: bool = False) -> sg.Graph:
    """Return x + constant; the constant may be a Cast's result, and be used by a Mul, too."""
    x = sg.input("x", (2, 3))
    held = ops.Constant(value=HELD.astype(np.int64) if cast else HELD, name="held")
    if cast:
        held = ops.Cast(held, to=1, name="cast")
    y = ops.Add(x, held, name="add")
    if shared:
        y = ops.Mul(y, held, name="mul")
    return sg.Graph([x], [y], "added")


def subgraphs(model: sg.CompiledModel) -> list[sg.Node]:
    return [node for node in model.graph.nodes if node.subgraph is not None]


@pytest.mark.parametrize("cast", [False, True])
@pytest.mark.parametrize("kind", [lambda: Simulated({"Add"}), Foreign, WeightsAlone])
def test_a_device_without_constant_runs_what_takes_one(kind: Any, cast: bool) -> None:
    graph = added(cast=cast)
    core = made(kind())
    found = core.query_model(graph, "A")
    assert found == {node.name: "A" for node in graph.nodes}
    assert not found.reasons
    model = core.compile_model(graph, "A")
    assert list(model.parameters) == ["cast" if cast else "held"]
    assert not any(node.op_type in ("Constant", "Cast") for node in model.graph.nodes)
    check(model, graph)
    next(iter(model.parameters.values())).assign(10 * HELD)
    np.testing.assert_allclose(model(X)[0], X + 10 * HELD)


def split_sum(*, second_is_output: bool = False) -> sg.Graph:
    """Return x + a + b, where a Split of one constant gives a and b; b may be an output, too."""
    x = sg.input("x", (2, 3))
    both = ops.Constant(value=np.concatenate([HELD, 2 * HELD]), name="both")
    first, second = ops.Split(both, num_outputs=2, outputs=2, name="split")
    y = ops.Add(ops.Add(x, first, name="one"), second, name="two")
    return sg.Graph([x], [y, second] if second_is_output else [y], "split")


@pytest.mark.parametrize("kind", [lambda: Simulated({"Add"}), Foreign, WeightsAlone])
def test_the_outputs_of_a_split_go_along(kind: Any) -> None:
    graph = split_sum()
    core = made(kind())
    assert core.query_model(graph, "A") == {node.name: "A" for node in graph.nodes}
    model = core.compile_model(graph, "A")
    assert len(model.parameters) == 2
    check(model, graph)
    graph = split_sum(second_is_output=True)
    model = core.compile_model(graph, "HETERO:A,REFERENCE")
    assert "Split" in [node.op_type for node in model.graph.nodes]
    check(model, graph)


@pytest.mark.parametrize("kind", [lambda: Simulated({"Add"}), Foreign, WeightsAlone])
def test_a_split_whose_other_output_is_transposed_for_the_caller(kind: Any) -> None:
    x = sg.input("x", (2, 3))
    both = ops.Constant(value=np.stack([HELD, 2 * HELD]), name="both")
    first, second = ops.Split(both, num_outputs=2, outputs=2, name="split")
    graph = sg.Graph([x], [ops.Add(x, first), ops.Transpose(second)], "transposed")
    check(made(kind()).compile_model(graph, "HETERO:A,REFERENCE"), graph)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", [lambda: Simulated({"Add"}), Foreign, WeightsAlone])
def test_the_constant_reaches_the_region_as_a_parameter(kind: Any, shared: bool) -> None:
    graph = added(shared=shared)
    core = made(kind())
    found = core.query_model(graph, "HETERO:A,REFERENCE")
    assert found["held"] == found["add"] == "A"
    model = core.compile_model(graph, "HETERO:A,REFERENCE")
    (region,) = subgraphs(model)
    assert region.subgraph is not None
    assert [value.name for value in region.subgraph.inputs if value.parameter is not None] == [
        "held"
    ]
    assert [node.name for node in region.subgraph.nodes] == ["add"]
    assert {"held"} == set(model.parameters)
    assert not any(node.op_type == "Constant" for node in model.graph.nodes)
    check(model, graph)


def test_devices_share_one_constant() -> None:
    core = made(a := Simulated({"Add"}))
    core.register_device("B", b := Simulated({"Mul"}))
    graph = added(shared=True)
    assert core.query_model(graph, "HETERO:A,B") == {"held": "A", "add": "A", "mul": "B"}
    model = core.compile_model(graph, "HETERO:A,B")
    assert (a.compiled, b.compiled) == ([["add"]], [["mul"]])
    check(model, graph)
    model.parameters["held"].assign(10 * HELD)
    np.testing.assert_allclose(model(X)[0], (X + 10 * HELD) * 10 * HELD)


def test_a_constant_alone_is_refused_with_a_reason() -> None:
    core = made(Simulated({"Add"}))
    x = sg.input("x", (2, 3))
    held = ops.Constant(value=HELD, name="held")
    graph = sg.Graph([x], [ops.Add(x, x, name="add"), ops.Mul(x, held, name="mul")], "apart")
    found = core.query_model(graph, "A")
    assert found == {"add": "A"}
    assert set(found.reasons) == {"mul", "held"}
    # It is a result of the model, which a weight cannot be.
    given = sg.Graph([x], [ops.Add(x, held, name="plus"), held], "given")
    assert core.query_model(given, "A") == {"plus": "A"}
    with pytest.raises(sg.UnsupportedOpError, match="held"):
        core.compile_model(given, "A")
    model = core.compile_model(given, "HETERO:A,REFERENCE")
    assert core.query_model(given, "HETERO:A,REFERENCE") == {"plus": "A", "held": "REFERENCE"}
    check(model, given)


def test_what_metadata_places_stays_there() -> None:
    core = made(a := Simulated({"Add"}))
    graph = added()
    graph.node("held").metadata = {"affinity": "REFERENCE"}
    assert core.query_model(graph, "HETERO:A,REFERENCE")["held"] == "REFERENCE"
    model = core.compile_model(graph, "HETERO:A,REFERENCE")
    assert a.compiled == [["add"]]
    assert any(node.op_type == "Constant" for node in model.graph.nodes)
    check(model, graph)


def test_a_constant_follows_into_a_body() -> None:
    core = made(a := Simulated({"Add"}))
    x = sg.input("x", (2, 3))
    held = ops.Constant(value=HELD, name="held")
    outer = sg.capture(x)
    inner = sg.Graph([], [ops.Add(outer, held, name="add")], "then", captures=[outer])
    outer = sg.capture(x)
    other = sg.Graph([], [ops.Neg(outer, name="neg")], "else", captures=[outer])
    flag = sg.input("flag", (), "bool")
    y = ops.If(flag, then_branch=inner, else_branch=other, name="if")
    graph = sg.Graph([x, flag], [y], "branches")
    model = core.compile_model(graph, "HETERO:A,REFERENCE")
    assert a.compiled == [["add"]]
    session = session_of(graph)
    for taken in (True, False):
        feeds = {"x": X, "flag": np.array(taken)}
        (want,) = session.run(None, feeds)
        np.testing.assert_allclose(model(feeds)[0], want)


def test_an_exported_model_keeps_the_weight() -> None:
    import io

    core = made(Simulated({"Add"}))
    graph = added()
    for device in ("A", "HETERO:A,REFERENCE"):
        file = io.BytesIO()
        core.compile_model(graph, device).export_model(file)
        file.seek(0)
        check(core.import_model(file, device), graph)


def test_cpu_takes_constants_as_before() -> None:
    graph = added(shared=True)
    model = sg.compile_model(graph, "CPU")
    assert not model.parameters
    assert sg.query_model(graph, "CPU") == {"held": "CPU", "add": "CPU", "mul": "CPU"}
    check(model, graph)
