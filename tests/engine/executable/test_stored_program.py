"""Programs in exported models: used for their shapes and weights, only in files of this user."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices import blob
from subgraph.devices.blob import PROLOGUE, read_header
from subgraph.devices.export import region_nodes
from subgraph.devices.plugins import cpu
from subgraph.devices.plugins.multi import MultiModel
from subgraph.engine.cpu import stored_programs
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.engine.region import concrete_plan
from subgraph.graph.types import Array
from tests.support.small_network import region

pytestmark = pytest.mark.plain_memory
X = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)


def net(batch: int | str = 2) -> sg.Graph:
    """A net with packed weights, plain weights, a folded weight and a constant."""
    rng = np.random.default_rng(1)

    def weight(name: str, *shape: int) -> sg.Value:
        return sg.parameter(name, rng.standard_normal(shape).astype(np.float32) / 3)

    x = sg.input("x", (batch, 3, 8, 8))
    y = ops.Relu(ops.Conv(x, weight("w", 16, 3, 3, 3), weight("b", 16), pads=[1, 1, 1, 1]))
    y = ops.Relu(ops.Conv(y, weight("v", 16, 16, 1, 1)), name="act")
    flat = ops.Flatten(ops.GlobalAveragePool(y), name="flat")
    product = ops.MatMul(flat, weight("m", 16, 10), name="mm")
    scale = ops.Add(weight("s", 10), weight("t", 10), name="scale")
    return sg.Graph([x], [ops.Mul(product, scale), y], "net")


def exported(model: sg.CompiledModel) -> io.BytesIO:
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    return stream


def same(a: sg.CompiledModel, b: sg.CompiledModel, x: Array = X) -> None:
    for one, other in zip(a(x).values(), b(x).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


def forbid_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise AssertionError("nothing has to be planned")

    monkeypatch.setattr(concrete_plan, "make_plan", fail)
    monkeypatch.setattr(cpu, "fuse", fail)


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the signatures of all files written before be those of another user."""
    monkeypatch.setattr(blob, "signature", lambda *_: bytes(32))


def test_an_import_neither_reads_nor_plans_the_graph(core: sg.Core, tmp_path: Path) -> None:
    model = core.compile_model(net(), "CPU")
    path = tmp_path / "net.blob"
    model.export_model(path)
    with pytest.MonkeyPatch.context() as patch:
        forbid_planning(patch)
        for source in (path, io.BytesIO(path.read_bytes())):
            again = core.import_model(source, "CPU")
            same(again, model)
            assert not region(again).subgraph.is_loaded
            request = again.create_infer_request()
            request.infer(X)
            assert {e.node for e in request.profile()} >= {"mm"}
    assert [n.name for n in region(again).subgraph.nodes] == [
        n.name for n in region(model).subgraph.nodes
    ]
    assert region(again).subgraph.is_loaded
    again.graph.verify()
    assert set(again.parameters) == set(model.parameters)


def cut_net() -> sg.Graph:
    """The net, whose second convolution is to run on the reference device."""
    graph = net()
    act = graph.node("act")
    act.metadata = {"affinity": "REFERENCE"}
    return graph


@pytest.mark.parametrize("device", ["HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "MULTI:CPU"])
def test_an_import_over_several_devices_neither_reads_nor_plans_the_graph(
    core: sg.Core, device: str
) -> None:
    graph = cut_net()
    model = core.compile_model(graph, device)
    stream = exported(model)
    with pytest.MonkeyPatch.context() as patch:
        forbid_planning(patch)
        again = core.import_model(stream)
        same(again, model)
    assert again.device == device
    parts = list(again.by_device.values()) if isinstance(again, MultiModel) else [again]
    for part in parts:
        for node in region_nodes(part.graph):
            assert isinstance(node.op, CpuSubgraphOp)
            assert not node.op.subgraph.is_loaded
    assert set(again.parameters) == set(model.parameters)
    for each in (model, again):
        each.parameters["w"].assign(np.zeros((16, 3, 3, 3), np.float32))
    same(again, model)


def test_every_shape_that_ran_is_in_the_file(core: sg.Core) -> None:
    model = core.compile_model(net("N"), "CPU")
    for count in (1, 2):
        model(X[:count])
    again = core.import_model(exported(model), "CPU")
    for count in (2, 1, 2):
        same(again, model, X[:count])
    assert not region(again).subgraph.is_loaded
    three = np.concatenate([X, X[:1]])
    same(again, model, three)
    assert region(again).subgraph.is_loaded


def test_weights_of_a_model_of_any_size_are_in_the_file(core: sg.Core) -> None:
    """Without a run, the weights that do not depend on the batch size are in the file."""
    model = core.compile_model(net("N"), "CPU")
    stream = exported(model)
    assert read_header(stream)["packed"]
    again = core.import_model(stream, "CPU")
    for count in (2, 1):
        same(again, model, X[:count])
    assert region(again).weights.stats().made <= 1


def test_changed_weights_are_used(core: sg.Core) -> None:
    model = core.compile_model(net(), "CPU")
    again = core.import_model(exported(model), "CPU")
    same(again, model)
    request = again.create_infer_request()
    request.infer(X)
    for name in ("v", "m", "t", "w"):
        for each in (model, again):
            each.parameters[name].assign(each.parameters[name].array * 2)
        same(again, model)
        for one, other in zip(request.infer(X).values(), model(X).values(), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_a_weight_replaced_for_one_run(core: sg.Core) -> None:
    x, w = sg.input("x", (2, 4)), sg.parameter("w", np.eye(4, dtype=np.float32))
    graph = sg.Graph([x, w], [ops.MatMul(x, w)], "net")
    model = core.compile_model(graph, "CPU")
    again = core.import_model(exported(model), "CPU")
    data, own = np.ones((2, 4), np.float32), np.full((4, 4), 3, np.float32)
    for _ in range(2):
        assert again(data)[0].tolist() == data.tolist()
        assert again(x=data, w=own)[0].tolist() == (12 * data).tolist()


def test_an_imported_program_is_exported_again(core: sg.Core) -> None:
    model = core.compile_model(net("N"), "CPU")
    model(X)
    first = exported(model)
    again = core.import_model(first, "CPU")
    same(again, model)
    second = exported(again)
    first.seek(0)
    a, b = read_header(first), read_header(second)
    assert len(a["packed"]) == len(b["packed"]) > 0
    counts = [len(kept["programs"]) for h in (a, b) for kept in h["op_data"].values()]
    assert counts == [1, 1]
    same(core.import_model(second, "CPU"), model)
    same(again, model)


@pytest.mark.parametrize(
    "config", [{"INFERENCE_NUM_THREADS": 3}, {"BLOCKED_LAYOUT": False}, {"WINOGRAD": False}]
)
def test_other_options_are_planned_anew(core: sg.Core, config: dict[str, Any]) -> None:
    model = core.compile_model(net(), "CPU", {"INFERENCE_NUM_THREADS": 1})
    again = core.import_model(exported(model), "CPU", config)
    same(again, model)
    assert region(again).subgraph.is_loaded


def test_a_file_of_somebody_else_is_planned_anew(
    core: sg.Core, foreign: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = core.compile_model(net(), "CPU")
    stream = exported(model)

    def fail(*_: Any) -> Any:
        raise AssertionError("its words are followed")

    monkeypatch.setattr(stored_programs, "read", fail)
    again = core.import_model(stream, "CPU")
    same(again, model)


def test_damage_of_a_large_file_is_found_before_it_is_used(core: sg.Core, tmp_path: Path) -> None:
    """Large weights are checked when they are first read: by a run, or by the caller."""
    x = sg.input("x", (1, 1200))
    w = sg.parameter("w", np.ones((1200, 1200), np.float32))
    model = core.compile_model(sg.Graph([x], [ops.MatMul(x, w)]), "CPU")
    path = tmp_path / "big.blob"
    model.export_model(path)
    data = bytearray(path.read_bytes())
    rng = np.random.default_rng(0)
    positions = [
        0,
        9,
        40,
        70,
        PROLOGUE + 3,
        *rng.integers(0, len(data), 40).tolist(),
        len(data) - 1,
    ]
    row = np.ones((1, 1200), np.float32)

    def use(source: Path | io.BytesIO) -> None:
        again = core.import_model(source, "CPU")
        # What it does not read is of no use to the run.
        assert again(row)[0].tolist() == [[1200] * 1200]
        assert (again.parameters["w"].array == 1).all()

    for position in positions:
        data[position] ^= 4
        path.write_bytes(data)
        for source in (path, io.BytesIO(data)):
            with pytest.raises(sg.BlobError):
                use(source)
        data[position] ^= 4
    path.write_bytes(data)
    assert core.import_model(path)(np.ones((1, 1200), np.float32))[0][0, 0] == 1200


def test_the_model_cache_plans_nothing(
    core: sg.Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = net()
    config = {"CACHE_DIR": str(tmp_path)}
    model = core.compile_model(graph, "CPU", config)
    want = model(X)
    forbid_planning(monkeypatch)
    again = core.compile_model(graph, "CPU", config)
    for one, other in zip(again(X).values(), want.values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    monkeypatch.undo()
    assert again.parameters["m"] is graph.parameters["m"]
    graph.parameters["m"].assign(np.zeros((16, 10), np.float32))
    assert not again(X)[0].any()


def test_parameters_over_one_array_are_all_in_the_file(core: sg.Core) -> None:
    """A loader may use one array for equal constants; each is stored under its own name."""
    shared = np.array(2, np.float32)
    x = sg.input("x", (2, 4))
    a, b = sg.parameter("a", shared), sg.parameter("b", shared)
    for value in (a, b):
        assert value.parameter is not None
        value.parameter.assign(shared)
    y = ops.Mul(ops.Exp(ops.Mul(x, a)), b)
    model = core.compile_model(sg.Graph([x], [ops.Softmax(y), y], "net"), "CPU")
    data = np.ones((2, 4), np.float32)
    want = model(data)
    again = core.import_model(exported(model), "CPU")
    got = again(data)
    assert not region(again).subgraph.is_loaded
    for one, other in zip(got.values(), want.values(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_weights_for_a_fixed_batch_and_any_size(core: sg.Core) -> None:
    """A Reshape accepts one sample only; weights of the sample sizes that fit are still stored."""
    x = sg.input("x", ("N", 3, "H", "W"))
    w = sg.parameter("w", np.random.default_rng(0).random((16, 3, 3, 3), np.float32))
    y = ops.GlobalAveragePool(ops.Conv(x, w, pads=[1, 1, 1, 1]))
    flat = ops.Reshape(y, sg.parameter("s", np.array([1, 16], np.int64)))
    model = core.compile_model(sg.Graph([x], [flat], "net"), "CPU")
    stream = exported(model)
    assert any("w" in item["parameters"] for item in read_header(stream)["packed"])
    same(core.import_model(stream, "CPU"), model, X[:1])


def test_constants_that_are_nodes_are_in_the_program(core: sg.Core) -> None:
    """Constant nodes become parameters of the region, but not of the exported model."""
    x = sg.input("x", (2, 4))
    index = ops.Constant(value=np.array([3, 1], np.int64))
    table = sg.parameter("table", np.random.default_rng(0).random((5, 4), np.float32))
    y = ops.Add(ops.Mul(x, ops.Constant(value=np.float32(3))), ops.Gather(table, index))
    model = core.compile_model(sg.Graph([x], [ops.Exp(y)], "net"), "CPU")
    data = np.full((2, 4), 0.1, np.float32)
    again = core.import_model(exported(model), "CPU")
    np.testing.assert_array_equal(again(data)[0], model(data)[0])
    assert not region(again).subgraph.is_loaded
    for each in (model, again):
        each.parameters["table"].assign(np.zeros((5, 4), np.float32))
    np.testing.assert_allclose(again(data)[0], np.exp(data * 3), rtol=1e-6)
    np.testing.assert_allclose(again(data)[0], model(data)[0], rtol=1e-6)
