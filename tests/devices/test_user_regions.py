"""Regions of the default op, compiled by a device: fused as the whole model, and still known."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

import subgraph as sg
from subgraph import ops
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.graph.types import Array
from subgraph.operators.region_names import region_of
from subgraph.partition.property import SelectorProperty
from subgraph.partition.regions import without_default_regions
from subgraph.testing import feeds, graphs, selectors
from tests.support.opencl import missing
from tests.support.peer import session_of

DEVICES = ["CPU", "HETERO:CPU,REFERENCE", "REFERENCE", "AUTO"] + ["OPENCL"] * (not missing())
PROFILE = {"ENABLE_PROFILING": True}
IMAGE = np.random.default_rng(1).standard_normal((1, 3, 12, 12)).astype(np.float32)


def weight(name: str, *shape: int) -> sg.Value:
    rng = np.random.default_rng([*shape, len(name)])
    return sg.parameter(name, rng.standard_normal(shape).astype(np.float32) * 0.3)


def network(last: Callable[[Any], Any] = ops.Neg) -> sg.Graph:
    """Return two convolutions with clips, a residual sum, and ``last``."""
    x = sg.input("x", (1, 3, 12, 12))
    low, high = (sg.parameter(n, np.float32(v)) for n, v in (("low", 0), ("high", 6)))
    first = ops.Clip(ops.Conv(x, weight("w0", 16, 3, 3, 3), name="c0"), low, high, name="r0")
    second = ops.Conv(first, weight("w1", 16, 16, 1, 1), weight("b1", 16), name="c1")
    total = ops.Add(ops.Clip(second, low, high, name="r1"), first, name="sum")
    return sg.Graph([x], [last(ops.Relu(total, name="relu"))], name="network")


def run(model: sg.CompiledModel) -> Array:
    return np.asarray(model(IMAGE)[0])


def by_onnxruntime(graph: sg.Graph) -> Array:
    session = onnxruntime.InferenceSession(sg.to_onnx(graph, inline=True).SerializeToString())
    (found,) = session.run(None, {"x": IMAGE})
    return np.asarray(found)


def kernels(model: sg.CompiledModel) -> list[tuple[str, str, str]]:
    """Return what a run consists of; asked of a model that measures."""
    request = model.create_infer_request()
    request.infer([IMAGE])
    return sorted((entry.node, entry.op_type, entry.kernel) for entry in request.profile())


def fused(graph: sg.Graph) -> sg.Graph:
    """Return what the CPU runs of a graph all of whose nodes it takes."""
    op = sg.compile_model(graph, "CPU").graph.nodes[0].op
    assert isinstance(op, CpuSubgraphOp)
    return op.fused


class Doubles(sg.SubgraphOp):
    """Gives twice what the region gives."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        return [2 * np.asarray(r) for r in sg.DefaultSubgraphOp(self.subgraph).forward(inputs)]


class DoublesProperty(sg.SubgraphProperty):
    def __init__(self, *op_types: str) -> None:
        self.op_types = op_types

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector(set(self.op_types))

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, Doubles(subgraph), f"mine_{subgraph_id}")


EXPLICIT = ["HETERO:CPU", "HETERO:CPU,REFERENCE"] + ["HETERO:OPENCL,CPU"] * (not missing())
SELECTED = [{"Conv", "Clip"}, {"Conv"}, {"Clip", "Add"}, {"Add", "Relu", "Neg"}, {"Conv", "Add"}]


@pytest.mark.parametrize("op_types", SELECTED, ids=lambda names: "+".join(sorted(names)))
def test_regions_are_fused_as_the_whole_model(op_types: set[str]) -> None:
    graph = network()
    cut = sg.optimize_for(graph, sg.ContainOpSelector(op_types))
    assert any(node.subgraph is not None for node in cut.nodes)
    models = [sg.compile_model(each, "CPU", PROFILE) for each in (graph, cut)]
    assert kernels(models[1]) == kernels(models[0])
    np.testing.assert_array_equal(run(models[1]), run(models[0]))
    np.testing.assert_allclose(run(models[1]), by_onnxruntime(graph), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("devices", EXPLICIT)
@pytest.mark.parametrize("op_types", SELECTED, ids=lambda names: "+".join(sorted(names)))
def test_a_list_of_devices_fuses_across_regions(op_types: set[str], devices: str) -> None:
    graph = network()
    cut = sg.optimize_for(graph, sg.ContainOpSelector(op_types))
    models = [sg.compile_model(each, devices, PROFILE) for each in (graph, cut)]
    assert kernels(models[1]) == kernels(models[0])
    np.testing.assert_array_equal(run(models[1]), run(models[0]))
    for region in cut.nodes:
        for node in region.subgraph.nodes if region.subgraph is not None else ():
            assert sg.explain(models[1].graph, node).subgraph == region.name


def test_nodes_of_a_region_go_to_the_device_of_its_affinity() -> None:
    def cut(inner: dict[str, str]) -> sg.Graph:
        found = sg.optimize_for(network(), sg.ContainOpSelector({"Conv", "Clip", "Add", "Relu"}))
        (region,) = [node for node in found.nodes if node.subgraph is not None]
        region.metadata = {**(region.metadata or {}), "affinity": "REFERENCE"}
        assert region.subgraph is not None
        for name, device in inner.items():
            region.subgraph.node(name).metadata = {"affinity": device}
        return found

    for inner, wanted in (({}, "REFERENCE"), ({"c0": "CPU"}, "CPU,REFERENCE")):
        graph = cut(inner)
        (region,) = [node.name for node in graph.nodes if node.subgraph is not None]
        assert sg.query_model(graph, "HETERO:CPU,REFERENCE")[region] == wanted
        model = sg.compile_model(graph, "HETERO:CPU,REFERENCE", PROFILE)
        request = model.create_infer_request()
        request.infer([IMAGE])
        devices = {entry.node: entry.device for entry in request.profile()}
        assert devices["c1"] == devices["relu"] == "REFERENCE"
        assert devices["c0"] == inner.get("c0", "REFERENCE")
        np.testing.assert_allclose(run(model), by_onnxruntime(network()), rtol=1e-4, atol=1e-4)


@settings(
    max_examples=30,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
@given(data=st.data())
def test_random_regions_leave_what_was_cut(data: st.DataObject) -> None:
    graph = data.draw(graphs())
    cut = sg.optimize_for(graph, SelectorProperty(data.draw(selectors())))
    text = str(cut)
    inner = sg.optimize_for(cut, SelectorProperty(data.draw(selectors())))
    for each in (cut, inner):
        found = without_default_regions(each)
        found.verify()
        assert not any(node.subgraph is not None for node in found.nodes)
        assert sorted(node.name for node in found.nodes) == sorted(n.name for n in graph.nodes)
        for node in found.nodes:
            assert sg.explain(each, node.name).subgraph == (region_of(node) or None)
    assert str(cut) == text
    arrays = feeds(graph)
    wanted = sg.compile_model(graph, "REFERENCE")(arrays)
    got = sg.compile_model(cut, "CPU")(arrays)
    for k in range(len(graph.outputs)):
        np.testing.assert_allclose(got[k], wanted[k], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_the_next_call_sees_an_assigned_weight(device: str) -> None:
    cut = sg.optimize_for(network(), sg.ContainOpSelector({"Conv", "Clip"}))
    model = sg.compile_model(cut, device)
    np.testing.assert_allclose(run(model), by_onnxruntime(network()), rtol=1e-4, atol=1e-4)
    changed = network()
    for name, factor in (("w1", -1.5), ("b1", 3), ("high", 0.5)):
        array = changed.parameters[name].array * np.float32(factor)
        changed.parameters[name].assign(array)
        model.parameters[name].assign(array)
        np.testing.assert_allclose(run(model), by_onnxruntime(changed), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
def test_a_profile_names_the_region_of_every_node(device: str) -> None:
    cut = sg.optimize_for(network(), sg.ContainOpSelector({"Conv"}))
    first, second = (node.name for node in cut.nodes if node.subgraph is not None)
    request = sg.compile_model(cut, device, PROFILE).create_infer_request()
    request.infer([IMAGE])
    entries = {entry.node: entry.region for entry in request.profile()}
    assert set(entries.values()) == {first, second, ""}


def test_a_kernel_over_two_regions_names_both() -> None:
    x = sg.input("x", (64, 64))
    graph = sg.Graph([x], [ops.Exp(ops.Tanh(ops.Neg(x, name="a"), name="b"), name="c")])
    cut = sg.optimize_for(graph, [sg.ContainOpSelector({kind}) for kind in ("Neg", "Exp")])
    names = [node.name for node in cut.nodes if node.subgraph is not None]
    request = sg.compile_model(cut, "CPU", PROFILE).create_infer_request()
    request.infer([np.ones((64, 64), np.float32)])
    assert [entry.region for entry in request.profile()] == [",".join(names)]


@pytest.mark.parametrize("last", [ops.Neg, lambda y: ops.Cast(y, to=TensorProto.STRING)])
def test_the_record_stays(last: Callable[[Any], Any]) -> None:
    """Strings have no kernels: such a model is cut for CPU and REFERENCE."""
    cut = sg.optimize_for(network(last), sg.ContainOpSelector({"Conv", "Clip"}))
    text = str(cut)
    model = sg.compile_model(cut, "CPU")
    model(IMAGE)
    assert str(cut) == text
    assert all(type(n.op) is sg.DefaultSubgraphOp for n in cut.nodes if n.subgraph is not None)
    for name in ("c0", "r0", "c1"):
        wanted, found = sg.explain(cut, name), sg.explain(model.graph, name)
        assert wanted.subgraph is not None
        assert (found.subgraph, found.property) == (wanted.subgraph, wanted.property)
        assert found.reasons[0] == wanted.reasons[0]


def test_a_model_that_needs_a_fallback_is_fused_across_regions() -> None:
    def last(y: Any) -> Any:
        return ops.Cast(y, to=TensorProto.STRING)

    graph = network(last)
    cut = sg.optimize_for(graph, sg.ContainOpSelector({"Conv"}))
    models = [sg.compile_model(each, "CPU", PROFILE) for each in (graph, cut)]
    assert kernels(models[1]) == kernels(models[0])
    assert run(models[1]).tolist() == run(models[0]).tolist()


def test_regions_with_an_op_of_their_own_stay() -> None:
    graph = network()
    # One beside a default region, and one inside of one.
    beside = sg.optimize_for(graph, [DoublesProperty("Add"), sg.ContainOpSelector({"Conv"})])
    x = sg.input("x", (1, 3, 12, 12))
    inside = sg.Graph([x], [sg.subgraph_node(beside, name="around", inputs=[x]).outputs[0]])
    relu = network(lambda y: y)
    session = session_of(relu)
    wanted = -2 * np.asarray(session.run(None, {"x": IMAGE})[0])
    for cut in (beside, inside):
        for device in DEVICES:
            model = sg.compile_model(cut, device)
            np.testing.assert_allclose(run(model), wanted, rtol=1e-4, atol=1e-4)


def test_a_query_answers_for_regions() -> None:
    def last(y: Any) -> Any:
        return ops.Cast(y, to=TensorProto.STRING, name="text")

    graph = network(last)
    cut = sg.optimize_for(graph, sg.ContainOpSelector({"Conv", "Cast"}))
    names = {
        inner.name: node.name
        for node in cut.nodes
        if node.subgraph
        for inner in node.subgraph.nodes
    }
    found = sg.query_model(cut, "CPU")
    assert set(found) == {node.name for node in cut.nodes} - {names["text"]}
    assert set(found.reasons) == {names["text"]}


@pytest.mark.parametrize("op_types", [{"Conv", "Clip"}, {"Conv"}, {"Add", "Relu"}])
def test_an_exported_model_has_its_regions_and_kernels(op_types: set[str]) -> None:
    cut = sg.optimize_for(network(), sg.ContainOpSelector(op_types))
    model = sg.compile_model(cut, "CPU", PROFILE)
    before = run(model)
    stream = io.BytesIO()
    model.export_model(stream)
    again = sg.import_model(stream.getvalue(), "CPU", {"ALLOW_RECOMPILE": False})
    np.testing.assert_array_equal(run(again), before)
    requests = [each.create_infer_request() for each in (model, again)]
    for request in requests:
        request.infer([IMAGE])
    told = [
        [(e.node, e.op_type, e.kernel, e.bytes, e.flops, e.region) for e in request.profile()]
        for request in requests
    ]
    assert told[1] == told[0]
    inner = again.graph.nodes[0].subgraph
    assert inner is not None
    kept = [node.name for node in inner.nodes if node.subgraph is not None]
    assert kept == [node.name for node in cut.nodes if node.subgraph is not None]
    # Where a weight changes the stored program's content, it follows too.
    array = np.full((16, 16, 1, 1), 0.1, np.float32)
    changed = network()
    changed.parameters["w1"].assign(array)
    again.parameters["w1"].assign(array)
    np.testing.assert_allclose(run(again), by_onnxruntime(changed), rtol=1e-4, atol=1e-4)


def test_regions_in_branches_and_calls_of_functions_are_fused() -> None:
    x = sg.input("x", (1, 3, 12, 12))
    flag = sg.input("flag", (), dtype="bool")
    inside = sg.capture(x)
    chain = ops.Relu(ops.Conv(inside, weight("w", 8, 3, 3, 3), name="conv"), name="relu")
    other = ops.Neg(ops.Conv(inside, weight("v", 8, 3, 3, 3)))
    branches = [sg.Graph([], [y]) for y in (chain, other)]
    choice = ops.If(flag, then_branch=branches[0], else_branch=branches[1])
    graph = sg.Graph([x, flag], [choice], name="choices")
    cut = sg.optimize_for(graph, sg.ContainOpSelector({"Conv"}))
    models = [sg.compile_model(each, "CPU", PROFILE) for each in (graph, cut)]
    for taken in (True, False):
        results = [model([IMAGE, np.array(taken)])[0] for model in models]
        np.testing.assert_array_equal(results[1], results[0])
    seen = [len(without_default_regions(each).nodes[-1].bodies[0].nodes) for each in (graph, cut)]
    assert seen[0] == seen[1]

    body = [helper.make_node("Neg", ["a"], ["b"]), helper.make_node("Exp", ["b"], ["c"])]
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 1)]
    function = helper.make_function("mine", "Twice", ["a"], ["c"], body, opsets[:1])
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [64, 64]) for n in ("x", "y")]
    nodes = [
        helper.make_node("Twice", ["x"], ["h"], domain="mine"),
        helper.make_node("Tanh", ["h"], ["y"]),
    ]
    called = helper.make_graph(nodes, "called", ends[:1], ends[1:])
    proto = helper.make_model(called, opset_imports=opsets, functions=[function], ir_version=10)
    kept, inlined = (sg.load(proto, functions=how) for how in ("keep", "inline"))
    assert kept.nodes[0].subgraph is not None
    assert [n.op_type for n in fused(kept).nodes] == [n.op_type for n in fused(inlined).nodes]
