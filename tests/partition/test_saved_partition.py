"""A saved partition stays one: ops made again, reasons kept, plain models, regions as models."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from subgraph.partition.property import PROPERTIES, SelectorProperty
from subgraph.partition.record import KEY, PartitionRecord
from subgraph.testing import feeds, graphs, selectors
from tests.support.blobs import forged

Trip = Callable[[sg.Graph], sg.Graph]
quick = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)


class CountingOp(sg.SubgraphOp):
    """Runs its region on REFERENCE and counts its calls."""

    calls = 0

    def forward(self, inputs: list[Any]) -> list[Array]:
        CountingOp.calls += 1
        return [np.asarray(r) for r in sg.DefaultSubgraphOp(self.subgraph).forward(inputs)]


class Accelerator(sg.SubgraphProperty):
    """Takes MatMul and Relu, not the node that it was told to avoid."""

    level = 1
    seen: tuple[str, ...] = ()

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return Chosen()

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node | None:
        op = CountingOp(subgraph)
        op.keep = self.level
        return sg.subgraph_node(subgraph, op=op, name=f"accelerated_{subgraph_id}")

    def pre_partition(self, graph: sg.Graph, options: Mapping[str, Any]) -> None:
        self.level = options.get("level", 1)
        self.seen = tuple(node.op_type for node in graph.nodes)


class Chosen(sg.SubgraphSelector):
    def select(self, node: sg.Node) -> bool | sg.Reject:
        return node.op_type in ("MatMul", "Relu") or sg.Reject(f"{node.op_type} is too slow")

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool | sg.Reject:
        return self.select(input_node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
        return self.select(output_node)


@pytest.fixture
def accelerator() -> Iterator[str]:
    name = "test_accelerator"
    sg.register_property(name, Accelerator)
    yield name
    PROPERTIES.unregister(name)


def network() -> sg.Graph:
    x = sg.input("x", ("N", 4))
    w = sg.parameter("w", np.arange(16, dtype=np.float32).reshape(4, 4) / 16)
    h = ops.Relu(ops.MatMul(x, w, name="product"), name="relu")
    h = ops.Sin(h, name="sin")
    return sg.Graph([x], [ops.Relu(ops.MatMul(h, w, name="more"), name="end")], name="network")


def regions(graph: sg.Graph) -> list[sg.Node]:
    return [node for node in graph.nodes if node.subgraph is not None]


def by_file(graph: sg.Graph) -> sg.Graph:
    return sg.load(sg.to_onnx(graph).SerializeToString())


def by_text(graph: sg.Graph) -> sg.Graph:
    return sg.parse(sg.print_graph(graph, data="all"))


trips = pytest.mark.parametrize("trip", [by_file, by_text])
ARRAY = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def run(graph: sg.Graph, array: Array = ARRAY) -> Array:
    result: Array = sg.compile_model(graph, "REFERENCE")(array)[0]
    return result


# Ops are made again


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
    cut = sg.optimize_for(network(), accelerator, level=object())
    assert [type(node.op) for node in regions(by_file(cut))] == [sg.DefaultSubgraphOp] * 2
    (message,) = caplog.messages
    assert "'level'" in message


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
        folder = f"{Path(__file__).parent}/"
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
    assert str(Path(__file__).parent).encode() not in model.SerializeToString()
    assert Path(__file__).name.encode() in model.SerializeToString()


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


# Plain models


def test_a_plain_model_is_written_for_other_readers(tmp_path: Path, accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator)
    sg.save(cut, tmp_path / "plain.onnx", inline=True)
    model = onnx.load(tmp_path / "plain.onnx")
    onnx.checker.check_model(model, full_check=True)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {""}
    assert not model.graph.metadata_props
    assert model == sg.to_onnx(cut, inline=True)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    (got,) = session.run(None, {"x": ARRAY})
    np.testing.assert_allclose(got, run(network()), rtol=1e-6)


def test_inlining_undoes_a_partition(accelerator: str) -> None:
    graph = network()
    back = sg.inline_subgraphs(sg.optimize_for(graph, accelerator))
    back.verify()
    assert str(back) == str(graph)
    assert KEY not in back.attrs


@quick
@given(data=st.data())
def test_inlining_random_partitions(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    cut = sg.optimize_for(graph, SelectorProperty(data.draw(selectors())))
    back = sg.inline_subgraphs(cut)
    back.verify()
    assert sorted(node.name for node in back.nodes) == sorted(node.name for node in graph.nodes)
    assert {v.name: v.type for v in back.values()} == {v.name: v.type for v in graph.values()}
    assert [v.name for v in back.outputs] == [v.name for v in graph.outputs]
    given_arrays = feeds(graph)
    wanted = sg.compile_model(graph, "REFERENCE")(given_arrays)
    got = sg.compile_model(back, "REFERENCE")(given_arrays)
    for position in range(len(graph.outputs)):
        np.testing.assert_array_equal(got[position], wanted[position])


def test_inlining_a_graph_that_two_nodes_share() -> None:
    x = sg.input("x", (4,))
    inner = sg.Graph([x], [ops.Sin(ops.Relu(x, name="a"), name="b")], name="inner")
    y = sg.input("y", (4,))
    first = sg.subgraph_node(inner, name="first", inputs=[y])
    second = sg.subgraph_node(inner, name="second", inputs=[first.outputs[0]])
    graph = sg.Graph([y], [ops.Relu(second.outputs[0], name="a")])
    back = sg.inline_subgraphs(graph)
    back.verify()
    assert [node.name for node in back.nodes] == ["first/a", "b", "second/a", "second/b", "a"]
    array = np.linspace(-1, 1, 4, dtype=np.float32)
    np.testing.assert_array_equal(run(back, array), run(graph, array))


def test_inlining_a_region_that_hands_an_input_on_and_gives_a_value_twice() -> None:
    x = sg.input("x", (4,))
    y = ops.Relu(x)
    inner = sg.Graph([x], [x, y, y], name="inner")
    outer = sg.input("outer", (4,))
    node = sg.subgraph_node(inner, name="r", inputs=[outer])
    for value, name in zip(node.outputs, "abc", strict=True):
        value.name = name
    graph = sg.Graph([outer], node.outputs)
    back = sg.inline_subgraphs(graph)
    back.verify()
    assert [value.name for value in back.outputs] == ["a", "b", "c"]
    results = sg.compile_model(back, "REFERENCE")(np.array([-1, 0, 1, 2], np.float32))
    assert [results[k].tolist() for k in range(3)] == [[-1, 0, 1, 2], [0, 0, 1, 2], [0, 0, 1, 2]]


# Regions as models


@pytest.mark.parametrize("weights", ["inside", "inputs"])
@pytest.mark.parametrize("by_node", [True, False])
def test_a_region_as_a_model_of_its_own(weights: Any, by_node: bool) -> None:
    node = regions(sg.optimize_for(network(), Chosen))[0]
    assert node.subgraph is not None
    model = sg.region_model(node if by_node else node.subgraph, weights=weights)
    model.verify()
    wanted = ["x"] if weights == "inside" else ["x", "w"]
    assert [value.name for value in model.inputs] == wanted
    assert [value.name for value in model.outputs] == ["relu"]
    assert sorted(model.parameters) == (["w"] if weights == "inside" else [])
    proto = sg.to_onnx(model)
    onnx.checker.check_model(proto, full_check=True)
    w = network().parameters["w"].array
    given_arrays = {"x": ARRAY} if weights == "inside" else {"x": ARRAY, "w": w}
    (got,) = onnxruntime.InferenceSession(proto.SerializeToString()).run(None, given_arrays)
    np.testing.assert_allclose(got, np.maximum(ARRAY @ w, 0), rtol=1e-6)


def test_a_region_model_shares_its_weights_with_the_region() -> None:
    cut = sg.optimize_for(network(), Chosen)
    model = sg.compile_model(sg.region_model(regions(cut)[0]), "REFERENCE")
    cut.parameters["w"].assign(np.ones((4, 4), np.float32))
    wanted = np.maximum(ARRAY @ np.ones((4, 4), np.float32), 0)
    np.testing.assert_allclose(model(ARRAY)[0], wanted, rtol=1e-6)


def test_what_is_no_region_is_refused() -> None:
    graph = network()
    with pytest.raises(sg.PartitionError, match="no subgraph node"):
        sg.region_model(graph.nodes[0])
    odd: Any = "outside"
    with pytest.raises(sg.PartitionError, match="'inside' or 'inputs'"):
        sg.region_model(graph, weights=odd)


# Exported models


class ExportedOp(CountingOp):
    """Says what an exported model keeps of it."""

    table: Array | None = None
    restored = 0

    def prepare(self) -> None:
        self.table = np.arange(5, dtype=np.float32)

    def to_export(self, file: Any) -> dict[str, Any]:
        return {"table": file.array(self.table)}

    def restore(self, saved: Mapping[str, Any], file: Any) -> None:
        type(self).restored += 1
        self.table = file.array(saved["table"])


class Exported(Accelerator):
    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=ExportedOp(subgraph), name=f"exported_{subgraph_id}")


def exported(graph: sg.Graph, device: str) -> bytes:
    stream = io.BytesIO()
    sg.compile_model(graph, device).export_model(stream)
    return stream.getvalue()


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("own", [True, False])
def test_ops_that_say_how_take_part_in_an_export(
    device: str, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they have kept is given to them only from a file that this user has signed."""
    if not own:
        monkeypatch.setattr("subgraph.devices.blob.signature", lambda *_: bytes(32))
    sg.register_property("test_exported", Exported)
    restored = ExportedOp.restored
    try:
        data = exported(sg.optimize_for(network(), "test_exported"), device)
        model = sg.import_model(data, device)
    finally:
        PROPERTIES.unregister("test_exported")
    assert ExportedOp.restored == restored + 2 * own
    made = [node.op for node in model.graph.nodes if isinstance(node.op, ExportedOp)]
    assert len(made) == 2
    before = CountingOp.calls
    np.testing.assert_allclose(model(ARRAY)[0], run(network()), rtol=1e-6)
    assert CountingOp.calls == before + 2


def test_ops_that_do_not_say_how_are_refused(accelerator: str) -> None:
    with pytest.raises(sg.BlobError, match=r"CountingOp.*to_export"):
        exported(sg.optimize_for(network(), accelerator), "REFERENCE")


class Because(sg.SubgraphSelector):
    def select(self, node: sg.Node) -> bool | sg.Reject:
        return node.op_type in ("MatMul", "Relu") or sg.Reject(f"no {node.op_type} here")


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "HETERO:CPU", "HETERO:CPU,REFERENCE"])
def test_explain_answers_for_an_imported_model(device: str, foreign: bool) -> None:
    cut = sg.optimize_for(network(), Because())
    model = sg.compile_model(cut, device)
    stream = io.BytesIO()
    model.export_model(stream)
    data = stream.getvalue()
    imported = sg.import_model(forged(data, lambda *_: None, b"other") if foreign else data, device)
    for node in ("product", "relu", "sin", "more", "end"):
        wanted, found = sg.explain(model.graph, node), sg.explain(imported.graph, node)
        assert (found.subgraph, found.property) == (wanted.subgraph, wanted.property)
        folder = f"{Path(__file__).parent}/"  # of the user's own files the name alone is kept
        assert found.reasons == tuple(reason.replace(folder, "") for reason in wanted.reasons)
    assert sg.explain(imported.graph, "relu").subgraph == sg.explain(cut, "relu").subgraph


def test_an_exported_op_whose_property_is_not_there(caplog: pytest.LogCaptureFixture) -> None:
    class Elsewhere(Exported):
        pass

    data = exported(sg.optimize_for(network(), Elsewhere()), "REFERENCE")
    model = sg.import_model(data, "REFERENCE")
    (message,) = caplog.messages
    assert "'Elsewhere'" in message
    np.testing.assert_allclose(model(ARRAY)[0], run(network()), rtol=1e-6)


def test_passes_keep_what_is_known_of_an_op(accelerator: str) -> None:
    cut = sg.optimize_for(network(), accelerator)
    tidy = passes.apply_pass(cut, ["ConstantFolding", "InferTypes", "DeadCodeElimination"])
    assert [type(node.op) for node in regions(by_file(tidy))] == [CountingOp, CountingOp]
