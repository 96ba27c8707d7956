"""Plain models of partitioned graphs, regions as models, and ops of regions in exported models."""

from __future__ import annotations

import io
from collections.abc import Mapping
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
from subgraph.partition.record import KEY
from subgraph.testing import feeds, graphs, selectors
from tests.support.accelerators import (
    ARRAY,
    Accelerator,
    Chosen,
    CountingOp,
    by_file,
    network,
    regions,
    run,
)
from tests.support.blobs import forged

quick = settings(
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)


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
