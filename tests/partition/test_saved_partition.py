"""A saved partition is one after loading: ops are made again, and reasons are there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.partition.property import PROPERTIES, SelectorProperty
from subgraph.partition.record import KEY, PartitionRecord
from subgraph.testing import graphs, selectors
from tests.support import accelerators
from tests.support.accelerators import (
    ARRAY,
    Accelerator,
    Chosen,
    CountingOp,
    by_file,
    by_text,
    network,
    regions,
    run,
)

Trip = Callable[[sg.Graph], sg.Graph]
quick = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
trips = pytest.mark.parametrize("trip", [by_file, by_text])


@trips
def test_a_registered_property_makes_its_ops_again(trip: Trip, accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator)
    loaded = trip(cut)
    assert [type(node.op) for node in regions(loaded)] == [CountingOp, CountingOp]
    assert [node.name for node in loaded.nodes] == [node.name for node in cut.nodes]
    before = CountingOp.calls
    np.testing.assert_array_equal(run(loaded), run(network()))
    assert CountingOp.calls == before + 2
    for node in regions(loaded):
        assert node.op is not None
        assert node.op.subgraph is node.subgraph


def test_the_plain_text_of_a_graph_keeps_its_ops_too(accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator)
    assert [type(node.op) for node in regions(sg.parse(str(cut)))] == [CountingOp, CountingOp]
    assert str(sg.parse(str(cut))) == str(cut)


@trips
def test_options_come_back_before_ops_are_made(trip: Trip, accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator, level=3, min_size=2)
    assert [node.op.keep for node in regions(trip(cut)) if node.op] == [3, 3]


OPTIONS: dict[str, Any] = {
    "NumPy scalar": np.float32(0.5),
    "tuple": ("a", (1, 2.5), None),
    "set": {"b", "a"},
    "bytes": b"\x00\xff",
    "keys": {1: "one", "subgraph.kind": [2]},
}


@trips
@pytest.mark.parametrize("name", OPTIONS)
def test_options_keep_their_types(trip: Trip, name: str, accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator, level=OPTIONS[name])
    for node in regions(trip(cut)):
        assert node.op is not None
        assert node.op.keep == OPTIONS[name]
        assert type(node.op.keep) is type(OPTIONS[name])


@trips
def test_an_option_may_be_an_array(trip: Trip, accelerator: str) -> None:
    table = np.arange(6, dtype=">i2").reshape(2, 3)
    for node in regions(trip(sg.optimize_for(network(), accelerator, level={"table": table}))):
        assert node.op is not None
        np.testing.assert_array_equal(node.op.keep["table"], table)
        assert node.op.keep["table"].dtype == table.dtype


def test_a_property_sees_the_model_as_it_was_before_the_cut(accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator)
    made: list[Accelerator] = []

    def factory() -> Accelerator:
        made.append(Accelerator())
        return made[-1]

    PROPERTIES.unregister(accelerator)
    sg.register_property(accelerator, factory)
    by_file(cut)
    assert [owner.seen for owner in made] == [("MatMul", "Relu", "Sin", "MatMul", "Relu")]


class Tuned(Accelerator):
    """A property with an argument, kept by ``saved_options``."""

    def __init__(self, level: int = 1) -> None:
        self.level = level

    def pre_partition(self, graph: sg.Graph, options: Mapping[str, Any]) -> None:
        self.level = options.get("tuned", self.level)

    def saved_options(self) -> Mapping[str, Any]:
        return {"tuned": self.level}


def test_state_of_a_property_object_comes_back() -> None:
    sg.register_property("test_tuned", Tuned)
    try:
        loaded = by_file(sg.optimize_for(network(), Tuned(level=7)))
    finally:
        PROPERTIES.unregister("test_tuned")
    assert [node.op.keep for node in regions(loaded) if node.op] == [7, 7]


class Unknown(Accelerator):
    """A property that is registered nowhere."""


@trips
def test_an_unknown_property_gives_the_default_op_and_one_warning(
    trip: Trip, caplog: pytest.LogCaptureFixture
) -> None:
    cut = sg.optimize_for(network(), Unknown())
    with caplog.at_level(logging.WARNING, logger="subgraph"):
        loaded = trip(cut)
    assert [type(node.op) for node in regions(loaded)] == [sg.DefaultSubgraphOp] * 2
    (message,) = caplog.messages
    assert "'Unknown'" in message
    assert "'accelerated_0'" in message
    np.testing.assert_array_equal(run(loaded), run(network()))
    # Saved again by a process that does not know it, a process that does makes the ops.
    caplog.clear()
    sg.register_property("Unknown", Unknown)
    try:
        again = trip(loaded)
    finally:
        PROPERTIES.unregister("Unknown")
    assert [type(node.op) for node in regions(again)] == [CountingOp, CountingOp]
    assert not caplog.messages


def test_regions_of_the_default_op_need_no_property(caplog: pytest.LogCaptureFixture) -> None:
    cut = sg.optimize_for(network(), sg.ContainOpSelector({"MatMul"}))
    assert len(regions(by_file(cut))) == 2
    assert not caplog.messages


def test_an_op_made_by_hand_is_named_when_it_is_lost(caplog: pytest.LogCaptureFixture) -> None:
    inner = network()
    x = sg.input("x", ("N", 4))
    w = sg.parameter("w", np.zeros((4, 4), np.float32))
    node = sg.subgraph_node(
        sg.region_model(inner), op=CountingOp(sg.region_model(inner)), inputs=[x]
    )
    by_file(sg.Graph([x], [ops.Add(node.outputs[0], w)]))
    (message,) = caplog.messages
    assert "CountingOp" in message


def test_a_property_that_refuses_or_raises_says_why(
    accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    cut = sg.optimize_for(network(), accelerator)

    class Refusing(Accelerator):
        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> Any:
            if subgraph_id:
                raise RuntimeError("no driver")
            return sg.Reject("too old")

    PROPERTIES.unregister(accelerator)
    sg.register_property(accelerator, Refusing)
    loaded = by_file(cut)
    assert [type(node.op) for node in regions(loaded)] == [sg.DefaultSubgraphOp] * 2
    assert ["too old" in text for text in caplog.messages] == [True, False]
    assert ["no driver" in text for text in caplog.messages] == [False, True]


def test_an_error_in_every_region_is_logged_once(
    accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    cut = sg.optimize_for(network(), accelerator)

    class Failing(Accelerator):
        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> Any:
            raise RuntimeError(f"no driver for {subgraph.name}")

    PROPERTIES.unregister(accelerator)
    sg.register_property(accelerator, Failing)
    by_file(cut)
    (message,) = caplog.messages
    assert "2 regions" in message
    assert "no driver" in message


def test_another_version_of_a_property_is_said(
    accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    cut = sg.optimize_for(network(), accelerator)

    class Newer(Accelerator):
        version = "2"

    PROPERTIES.unregister(accelerator)
    sg.register_property(accelerator, Newer)
    assert [type(node.op) for node in regions(by_file(cut))] == [CountingOp, CountingOp]
    (message,) = caplog.messages
    assert "''" in message
    assert "'2'" in message


def test_an_option_without_a_form_in_a_file_is_said(
    accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    for option in (object(), [np.zeros(100_000)]):
        caplog.clear()
        cut = sg.optimize_for(network(), accelerator, level=option)
        assert [type(node.op) for node in regions(by_file(cut))] == [sg.DefaultSubgraphOp] * 2
        (message,) = caplog.messages
        assert "'level'" in message


@pytest.mark.parametrize(
    "option",
    [
        {"subgraph.kind": ["array", ["|O", [1], "AAAAAAAAAAA="]]},
        {"subgraph.kind": ["array", ["<f4", [2, -1, 3], "AAAA"]]},
        {"subgraph.kind": ["odd", 1]},
        {"subgraph.kind": 5},
        {"subgraph.kind": ["set", [[1]]]},
        {"subgraph.kind": ["complex", [10**400, 1]]},
        {"subgraph.kind": ["bytes", "?"]},
    ],
)
def test_damaged_options_give_the_default_op(
    option: Any, accelerator: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = sg.to_onnx(sg.optimize_for(network(), accelerator, level=1))
    for node in model.graph.node:
        for entry in node.metadata_props:
            note = json.loads(entry.value)
            note["options"] = {"level": option}
            entry.value = json.dumps(note)
    assert [type(node.op) for node in regions(sg.load(model))] == [sg.DefaultSubgraphOp] * 2
    (message,) = caplog.messages
    assert "damaged" in message


def test_regions_in_bodies_and_in_regions(accelerator: str) -> None:
    x, flag = sg.input("x", (2, 4)), sg.input("flag", (), "bool")
    then, other = (sg.Graph(outputs=[op(sg.capture(x))]) for op in (ops.Relu, ops.Sin))
    choice = ops.If(flag, then_branch=then, else_branch=other, name="choice")
    inside = sg.optimize_for(sg.Graph([x, flag], [choice], name="choices"), accelerator)
    assert regions(inside.node("choice").bodies[0])
    whole = sg.optimize_for(inside, sg.ContainOpSelector({"If"}))
    for graph in (by_file(inside), by_file(whole), by_text(whole)):
        level = graph
        if regions(graph):
            subgraph = regions(graph)[0].subgraph
            assert subgraph is not None
            level = subgraph
        (node,) = regions(level.nodes[0].bodies[0])
        assert type(node.op) is CountingOp
        got = sg.compile_model(graph, "REFERENCE")({"x": ARRAY, "flag": np.array(True)})[0]
        np.testing.assert_array_equal(got, np.maximum(ARRAY, 0))


# Reasons


@trips
def test_explain_answers_as_before(trip: Trip, accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator, min_size=2, level=2)
    loaded = trip(cut)
    for node in ("product", "relu", "sin", "more", "end", "accelerated_0"):
        before, after = sg.explain(cut, node), sg.explain(loaded, node)
        folder = f"{Path(accelerators.__file__).parent}/"
        reasons = tuple(reason.replace(folder, "") for reason in before.reasons)
        assert (after.node, after.op_type, after.subgraph, after.property, after.reasons) == (
            before.node,
            before.op_type,
            before.subgraph,
            before.property,
            reasons,
        )
    record = loaded.attrs[KEY]
    assert isinstance(record, PartitionRecord)
    assert record.runs[0].property == accelerator
    assert record.runs[0].options["level"] == 2
    again = sg.optimize_for(loaded, accelerator, min_size=2, level=2)
    assert sg.print_graph(again) == sg.print_graph(loaded)


def test_a_file_does_not_tell_the_folders_of_its_maker(accelerator: str) -> None:
    model = sg.to_onnx(sg.optimize_for(network(), accelerator))
    assert str(Path(accelerators.__file__).parent).encode() not in model.SerializeToString()
    assert Path(accelerators.__file__).name.encode() in model.SerializeToString()


@quick
@given(data=st.data())
def test_records_of_random_partitions_come_back(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    strategy = data.draw(st.sampled_from(["selector", "hetero"]))
    owner = SelectorProperty(data.draw(selectors()))
    size = data.draw(st.integers(1, 3))
    cut = sg.optimize_for(graph, owner, strategy=strategy, min_size=size)
    loaded = by_file(cut)
    names = [n.name for n in cut.nodes] + [n.name for r in regions(cut) for n in inner_nodes(r)]
    for name in names:
        before, after = sg.explain(cut, name), sg.explain(loaded, name)
        assert (after.subgraph, after.property) == (before.subgraph, before.property)
        assert len(after.reasons) == len(before.reasons)


def inner_nodes(node: sg.Node) -> tuple[sg.Node, ...]:
    return () if node.subgraph is None else node.subgraph.nodes


RECORD = "subgraph.partition"


def damaged(change: Callable[[Any], Any]) -> bytes:
    model = sg.to_onnx(sg.optimize_for(network(), Chosen))
    (entry,) = [p for p in model.graph.metadata_props if p.key == RECORD]
    held = json.loads(entry.value)
    changed = change(held)
    entry.value = changed if isinstance(changed, str) else json.dumps(held)
    return model.SerializeToString()


def _set(path: str, value: Any) -> Callable[[Any], None]:
    def change(held: Any) -> None:
        *where, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        for part in where:
            held = held[part]
        held[last] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda held: "{",
        lambda held: "[" * 100_000,
        lambda held: "3",
        _set("format", 99),
        _set("names", 5),
        _set("names.0.0", 5),
        _set("runs.0.names", 1),
        _set("runs.0.via.0", 1000),
        _set("runs.0.via.0", "x"),
        _set("runs.0.via.0", True),
        _set("runs.0.region", []),
        _set("runs.0.region.0", 10**30),
        _set("runs.0.regions.0.2", "odd"),
        _set("runs.0.refusals.0", [0, 9, 0, 0]),
        _set("runs.0.refusals.0.3", 77),
        _set("runs.0.forced", {"a": 1}),
        _set("rejects.0", ["a"]),
        lambda held: held["runs"][0].pop("via") and None,
    ],
)
def test_a_damaged_record_is_said_and_left_out(
    change: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = sg.load(damaged(change))
    assert KEY not in loaded.attrs
    (message,) = caplog.messages
    assert "damaged" in message
    assert len(regions(loaded)) == 2


@pytest.mark.parametrize("note", ["{", "[]", '{"op": 3}', '{"op": "A", "odd": 1}', "null"])
def test_a_damaged_note_gives_the_default_op(note: str, caplog: pytest.LogCaptureFixture) -> None:
    model = sg.to_onnx(sg.optimize_for(network(), Accelerator()))
    for node in model.graph.node:
        for entry in node.metadata_props:
            entry.value = note
    loaded = sg.load(model)
    assert [type(node.op) for node in regions(loaded)] == [sg.DefaultSubgraphOp] * 2
    assert len(caplog.messages) == 1
