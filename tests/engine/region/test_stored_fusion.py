"""Fusions in exported models: an import rebuilds the same graph, or fuses by itself."""

from __future__ import annotations

import copy
import io
import json
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.blob import read_header
from subgraph.devices.plugins import cpu
from subgraph.engine.region import region_op
from subgraph.engine.region.stored_fusion import describe, rebuild
from subgraph.text_form.writer import print_graph
from tests.support.blobs import forged
from tests.support.small_network import region

RNG = np.random.default_rng(3)
X = RNG.standard_normal((1, 4, 8, 8)).astype(np.float32)


def weight(name: str, *shape: int) -> Any:
    return sg.parameter(name, RNG.standard_normal(shape).astype(np.float32) / 4)


def net() -> sg.Graph:
    """A net of convolutions with epilogues, elementwise operators, and a product with a bias."""
    x = sg.input("x", (1, 4, 8, 8), "float32")
    y = ops.Relu(ops.Conv(x, weight("w", 4, 4, 3, 3), weight("b", 4), pads=[1, 1, 1, 1]))
    z = ops.Relu(ops.Add(ops.Conv(y, weight("v", 4, 4, 1, 1)), x, name="plus"), name="end")
    chain = ops.Mul(ops.Tanh(ops.Sqrt(ops.Abs(z))), z, name="chain")
    shape = sg.parameter("shape", np.array([4, 64], np.int64))
    product = ops.MatMul(ops.Reshape(chain, shape), weight("m", 64, 6))
    return sg.Graph([x], [ops.Add(product, weight("c", 6)), z], "net")


def exported(model: sg.CompiledModel) -> io.BytesIO:
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    return stream


def same(a: sg.CompiledModel, b: sg.CompiledModel) -> None:
    for one, other in zip(a(X).values(), b(X).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def no_fusion(*_: Any) -> Any:
    raise AssertionError("nothing has to be fused")


def test_a_described_graph_is_rebuilt() -> None:
    op = region(sg.Core().compile_model(net(), "CPU"))
    before = print_graph(op.subgraph, "all")
    entries = describe(op.subgraph, op.fused)
    assert entries is not None
    assert any(isinstance(entry, dict) for entry in entries)
    again = rebuild(op.subgraph, json.loads(json.dumps(entries)))
    again.attrs = op.fused.attrs  # what its partition has noted
    assert print_graph(again, "all") == print_graph(op.fused, "all")
    assert print_graph(op.subgraph, "all") == before


def test_other_graphs_are_not_described() -> None:
    core = sg.Core()
    op = region(core.compile_model(net(), "CPU"))
    other = region(core.compile_model(net(), "CPU"))
    assert describe(op.subgraph, other.fused) is None, "its weights are others"
    changed = op.fused.clone()
    next(node for node in changed.nodes if node.op_type == "Reshape").attrs["allowzero"] = 1
    assert describe(op.subgraph, changed) is None


def test_an_import_does_not_fuse(monkeypatch: pytest.MonkeyPatch) -> None:
    core = sg.Core()
    model = core.compile_model(net(), "CPU")
    stream = exported(model)
    assert read_header(stream)["op_data"]
    fuse = cpu.fuse
    monkeypatch.setattr(cpu, "fuse", no_fusion)
    again = core.import_model(stream, "CPU")
    same(again, model)
    stream.seek(0)
    alone = {"FUSION": False, "RUNTIME_FALLBACK": False}
    plain = core.import_model(stream, "CPU", alone)
    with pytest.raises(sg.DeviceError, match="has to be fused"):
        plain(X)
    monkeypatch.setattr(cpu, "fuse", fuse)
    stream.seek(0)
    plain = core.import_model(stream, "CPU", {"FUSION": False})
    same(plain, model)
    assert len(region(plain).fused.nodes) > len(region(again).fused.nodes)


def test_a_weight_that_the_fusion_depends_on_changes_after_an_import() -> None:
    core = sg.Core()
    again = core.import_model(exported(core.compile_model(net(), "CPU")), "CPU")
    again(X)
    again.parameters["shape"].assign(np.array([-1, 64], np.int64))
    again.parameters["m"].assign(again.parameters["m"].array * 2)
    model = core.compile_model(again.graph.clone(), "REFERENCE")
    same(again, model)


def lies() -> list[Any]:
    def nodes(change: Any) -> Any:
        return lambda kept: change(kept["nodes"])

    def fused(key: str, value: Any) -> Any:
        return nodes(lambda n: next(e for e in n if isinstance(e, dict)).__setitem__(key, value))

    changes = [lambda kept, v=v: kept.__setitem__("nodes", v) for v in (None, 3, "x", [3], [[]])]
    changes += [lambda kept, v=v: kept.__setitem__("guards", v) for v in (None, 3, ["nobody"])]
    changes += [
        nodes(lambda n: n.pop()),
        nodes(lambda n: n.append(n[0])),
        nodes(lambda n: n.clear()),
    ]
    # Attributes of an operator that it has stay: a file that says them otherwise is another model.
    for key in ("op", "name", "attrs", "inputs", "inside", "graph", "nodes", "metadata"):
        changes += [fused(key, value) for value in (3, [], ["x"])]
    for key in ("op", "name", "inputs", "inside", "graph", "nodes"):
        changes += [fused(key, None), fused(key, {"x": 3})]
    return changes


@pytest.mark.parametrize("number", range(len(lies())))
def test_wrong_descriptions_with_valid_checksums(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = sg.Core()
    model = core.compile_model(net(), "CPU")
    stream = exported(model)

    def lie(header: dict[str, Any], body: bytearray) -> None:
        (kept,) = header["op_data"].values()
        before = copy.deepcopy(kept)
        lies()[number](kept)
        assert kept != before

    def fail(*_: Any) -> Any:
        raise AssertionError("what somebody else says of a fusion is used")

    monkeypatch.setattr(region_op, "rebuild", fail)
    same(core.import_model(forged(stream.getvalue(), lie), "CPU"), model)
