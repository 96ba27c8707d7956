"""The machinery of passes: registry, options, checked promises, instruments."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.passes import apply_pass
from subgraph.transform.pass_manager import PASSES, may_change, options_of, snapshot

_T = TypeVar("_T")


class Register(Protocol):
    def __call__(self, name: str) -> Callable[[_T], _T]: ...


def small() -> sg.Graph:
    x = sg.input("x", (2, 3))
    return sg.Graph([x], [ops.Relu(ops.Neg(x, name="neg"), name="act")], name="small")


@pytest.fixture
def register() -> Iterator[Register]:
    """Return register_pass whose names are forgotten after the test."""
    names: list[str] = []

    def add(name: str) -> Any:
        names.append(name)
        return passes.register_pass(name)

    yield add
    for name in names:
        PASSES.unregister(name)


def test_functions_and_classes_are_passes(register: Register) -> None:
    @register("TestRename")
    def rename(graph: sg.Graph, *, name: str = "renamed") -> sg.Graph:
        graph = graph.clone()
        graph.name = name
        return graph

    @register("TestSuffix")
    @attrs.frozen
    class Suffix:
        suffix: str = "!"

        def __call__(self, graph: sg.Graph) -> sg.Graph:
            graph = graph.clone()
            graph.name += self.suffix
            return graph

    graph = small()
    assert apply_pass(graph, "TestRename").name == "renamed"
    assert apply_pass(graph, rename, name="b").name == "b"
    assert apply_pass(graph, ["TestRename", "TestSuffix"], name="c", suffix="?").name == "c?"
    assert apply_pass(graph, [Suffix("1"), [Suffix, "TestSuffix"]]).name == "small1!!"
    assert apply_pass(graph, []) is graph
    assert passes.TestRename is rename
    assert "TestSuffix" in dir(passes)
    assert options_of("TestSuffix") == ("suffix",)
    assert options_of(rename) == ("name",)
    assert graph.name == "small"


def test_names_and_options_that_are_not_known(register: Register) -> None:
    with pytest.raises(sg.PassError, match="did you mean 'ConstantFolding'"):
        apply_pass(small(), "ConstantFoldin")
    with pytest.raises(sg.PassError, match=r"no option 'size'; known: size_limit"):
        apply_pass(small(), "ConstantFolding", size=3)
    with pytest.raises(sg.PassError, match="not a pass"):
        apply_pass(small(), 3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(sg.PassError, match=r"passes take a Graph, got 'model\.onnx'"):
        apply_pass("model.onnx", [])  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(AttributeError, match="NoSuchPass"):
        _ = passes.NoSuchPass
    register("TestTwice")(lambda graph: graph)
    with pytest.raises(sg.PassError, match="two owners"):

        @register("TestTwice")
        def other(graph: sg.Graph) -> sg.Graph:  # pyright: ignore[reportUnusedFunction]
            return graph

    with pytest.raises(sg.PassError, match="register_pass takes"):
        passes.register_pass(small)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_pass_that_breaks_its_promise_is_named() -> None:
    def attributes(graph: sg.Graph) -> sg.Graph:
        graph.nodes[0].attrs["alpha"] = 2.0
        return graph.clone()

    def names(graph: sg.Graph) -> sg.Graph:
        graph.nodes[0].name = "other"
        return graph.clone()

    def wiring(graph: sg.Graph) -> sg.Graph:
        act = graph.node("act")
        act.inputs = graph.inputs
        return graph.clone()

    def types(graph: sg.Graph) -> sg.Graph:
        graph.nodes[0].outputs[0].type = None
        return graph.clone()

    def in_place(graph: sg.Graph) -> sg.Graph:
        graph.rewire({graph.node("act").outputs[0]: graph.node("neg").outputs[0]})
        return graph

    for bad in (attributes, names, wiring, types, in_place):
        with pytest.raises(sg.PassError, match=f"'{bad.__name__}' changed the graph 'small'"):
            apply_pass(small(), bad)

    def nothing(graph: sg.Graph) -> Any:
        return None

    def broken(graph: sg.Graph) -> sg.Graph:
        graph = graph.clone()
        graph.nodes[1].inputs = (sg.Value("nowhere"),)
        return graph

    with pytest.raises(sg.PassError, match="'nothing' returned NoneType"):
        apply_pass(small(), nothing)
    with pytest.raises(sg.PassError, match="'broken' returned a graph that does not verify"):
        apply_pass(small(), broken)
    with passes.Checks(output=False):
        apply_pass(small(), broken)
    with passes.Checks(input=False):
        apply_pass(small(), in_place)


def test_errors_of_a_pass_name_it() -> None:
    def fails(graph: sg.Graph) -> sg.Graph:
        raise KeyError("oops")

    def refuses(graph: sg.Graph) -> sg.Graph:
        raise sg.ShapeError("no")

    with pytest.raises(sg.PassError, match=r"'fails' failed on graph 'small': KeyError: 'oops'"):
        apply_pass(small(), fails)
    with pytest.raises(sg.ShapeError) as caught:
        apply_pass(small(), refuses)
    assert caught.value.__notes__ == ["in pass 'refuses' on graph 'small'"]


def test_snapshot_sees_bodies_and_stays_for_what_is_untouched() -> None:
    c, x = sg.input("c", (), dtype="bool"), sg.input("x", (2,))
    branches = [sg.Graph([], [ops.Neg(sg.capture(x))]) for _ in range(2)]
    graph = sg.Graph([c, x], [ops.If(c, then_branch=branches[0], else_branch=branches[1])])
    mark = snapshot(graph)
    graph.clone()
    str(graph)
    assert snapshot(graph) == mark
    graph.nodes[0].bodies[1].nodes[0].attrs["a"] = 1
    assert snapshot(graph) != mark


@pytest.mark.parametrize(
    "change",
    [
        lambda g: setattr(g, "name", "other"),
        lambda g: g.metadata.update(by="me"),
        lambda g: g.attrs.update(key=1),
        lambda g: setattr(g, "outputs", g.nodes[0].outputs),
        lambda g: setattr(g.inputs[0], "type", None),
        lambda g: setattr(g.nodes[0], "name", "other"),
        lambda g: setattr(g.nodes[0], "version", 1),
        lambda g: setattr(g.nodes[0], "metadata", {"affinity": "CPU"}),
        lambda g: setattr(g.nodes[1], "inputs", g.inputs),
        lambda g: setattr(g.nodes[0].outputs[0], "type", None),
        lambda g: setattr(g.nodes[0].outputs[0], "producer", g.nodes[1]),
        lambda g: g.nodes[0].outputs[0].uses.append(g.nodes[1]),
    ],
)
def test_a_snapshot_shows_every_change(change: Callable[[sg.Graph], object]) -> None:
    graph = small()
    before = snapshot(graph)
    change(graph)
    assert snapshot(graph) != before


def test_instruments_see_every_pass_and_stay_in_their_thread() -> None:
    seen: list[str] = []
    hooks = passes.Hooks(
        before=lambda name, graph: seen.append(f"before {name} {len(graph.nodes)}"),
        after=lambda name, graph, result, seconds: seen.append(f"after {name} {result.name}"),
    )
    printed, differences, timing = io.StringIO(), io.StringIO(), passes.Timing()

    def drop_act(graph: sg.Graph) -> sg.Graph:
        graph = graph.clone()
        graph.rewire({graph.node("act").outputs[0]: graph.node("neg").outputs[0]})
        return graph

    with timing, passes.Printing(printed):
        apply_pass(small(), [drop_act], instruments=[hooks, passes.Diff(differences)])
        other = threading.Thread(target=apply_pass, args=(small(), "DeadCodeElimination"))
        other.start()
        other.join()
    apply_pass(small(), "DeadCodeElimination")
    assert seen == ["before drop_act 2", "after drop_act small"]
    assert [(t.name, t.nodes_before, t.nodes_after) for t in timing.times] == [("drop_act", 2, 1)]
    assert "2 -> 1 nodes" in str(timing)
    assert printed.getvalue().startswith('# after drop_act\ngraph "small" {')
    assert "-  %act: float32[2, 3] = Relu" in differences.getvalue()


def test_a_pass_does_not_change_parameters() -> None:
    def zeros(graph: sg.Graph) -> sg.Graph:
        for parameter in graph.parameters.values():
            parameter.assign(parameter.array * 0)
        return graph.clone()

    x, w = sg.input("x", (2,)), sg.parameter("w", np.ones(2, np.float32))
    with pytest.raises(sg.PassError, match="'zeros' changed parameters of the graph 'g'"):
        passes.apply_pass(sg.Graph([x], [ops.Add(x, w)], "g"), zeros)


@pytest.mark.parametrize(
    ("name", "operator", "other"),
    [
        ("ConstantsToParameters", "Constant", "Relu"),
        ("PadDynamicOutputs", "NonZero", "Relu"),
        ("ReshapeFirst", "Transpose", "Reshape"),
    ],
)
def test_a_pass_declares_the_operators_that_it_changes(
    name: str, operator: str, other: str
) -> None:
    assert may_change(name, {other, operator})
    assert not may_change(name, {other})
    assert may_change("FoldScale", {other})  # declares none
    with pytest.raises(sg.PassError, match="Missing"):
        may_change("Missing", {other})


def test_what_is_no_pass_is_refused(register: Register) -> None:
    wrong: Any = 3
    with pytest.raises(sg.PassError, match="3 is no pass; give a function or a class"):
        register("not a pass")(wrong)


def test_a_pass_without_options_says_so(register: Register) -> None:
    register("no options")(lambda graph: graph)
    with pytest.raises(sg.PassError, match="has no option 'depth'; it takes none"):
        apply_pass(small(), "no options", depth=3)


@pytest.mark.parametrize("wrong", [0, "neg", "node"])
def test_only_values_are_rewired(wrong: Any) -> None:
    graph = small()
    given: Any = graph.nodes[0] if wrong == "node" else wrong
    for replacements in ({given: graph.inputs[0]}, {graph.nodes[0].outputs[0]: given}):
        with pytest.raises(sg.ModelError, match=r"give values .*node\.outputs\[0\]"):
            graph.rewire(replacements)
    assert len(graph.nodes) == 2
