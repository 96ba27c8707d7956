"""Exported models with regions of other libraries: imports, and refusals with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.backends import PACKAGES, installed
from tests.support.small_network import exported

INSTALLED = installed(*PACKAGES)
X = np.random.default_rng(0).standard_normal((3, 6)).astype(np.float32)
STRICT = {"ALLOW_RECOMPILE": False}


def dense() -> sg.Graph:
    """Return a graph of a product, Relu, and Selu, of which tests leave Selu to CPU."""
    rng = np.random.default_rng(3)
    x = sg.input("x", type=sg.TensorType("float32", ("N", 6)))
    w = sg.parameter("w", rng.standard_normal((6, 4)).astype(np.float32))
    return sg.Graph([x], [ops.Selu(ops.Relu(ops.MatMul(x, w)), name="last")], "dense")


def compiled(device: str, way: str) -> sg.CompiledModel:
    """Return a model with a region on a device.

    Args:
        device: The device.
        way: "alone", "beside CPU" by an affinity, or "property".
    """
    graph = dense()
    if way == "alone":
        return sg.compile_model(graph, device)
    if way == "property":
        cut = sg.optimize_for(graph, device.lower(), exclude=["last"], INFERENCE_NUM_THREADS=1)
        return sg.compile_model(cut, "CPU")
    graph.node("last").metadata = {"affinity": "CPU"}
    return sg.compile_model(graph, f"HETERO:{device},CPU", {"INFERENCE_NUM_THREADS": 1})


def reference(value: Array | None = None) -> Array:
    graph = dense()
    if value is not None:
        graph.parameters["w"].assign(value)
    found: Array = sg.compile_model(graph, "REFERENCE")(X)[0]
    return found


WAYS = pytest.mark.parametrize("way", ["alone", "beside CPU", "property"])
DEVICES = pytest.mark.parametrize("device", INSTALLED)


@DEVICES
@WAYS
def test_an_imported_model_runs_on_the_same_devices(device: str, way: str) -> None:
    model = compiled(device, way)
    assert {device, *([] if way == "alone" else ["CPU"])} <= set(model.execution_devices)
    again = sg.import_model(exported(model), config=STRICT)
    assert again.execution_devices == model.execution_devices
    np.testing.assert_allclose(again(X)[0], reference(), atol=1e-6)
    value = np.random.default_rng(9).standard_normal((6, 4)).astype(np.float32)
    again.parameters["w"].assign(value)
    np.testing.assert_allclose(again(X)[0], reference(value), atol=1e-6)


@DEVICES
@WAYS
def test_a_file_of_another_version_of_the_library_is_refused_or_compiled_again(
    device: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = exported(compiled(device, way))
    kind: Any = type(sg.default_core().device(device))
    now = kind.version(sg.default_core().device(device))
    monkeypatch.setattr(kind, "version", lambda _: "99.0")
    with pytest.raises(sg.BlobError, match=rf"another {device}: library '{now}', here '99.0'"):
        sg.import_model(data, config=STRICT)
    again = sg.import_model(data)
    assert device in again.execution_devices
    np.testing.assert_allclose(again(X)[0], reference(), atol=1e-6)


@DEVICES
@pytest.mark.parametrize("way", ["beside CPU", "property"])
def test_a_file_whose_library_is_missing_is_refused_with_the_command_that_installs_it(
    device: str, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "model.sgb"
    path.write_bytes(exported(compiled(device, way)))
    kind: Any = type(sg.default_core().device(device))

    def missing(_: Any) -> Any:
        raise ImportError("no such module")

    monkeypatch.setattr(kind, "load", missing)
    with pytest.raises(sg.BlobError, match=r"is not installed.*pip install"):
        sg.Core().import_model(path, config=STRICT)


def test_an_op_of_a_device_that_nobody_registered_is_exported() -> None:
    """The attribute ``device`` of a user's op is any text, for profiles."""

    class Far(sg.SubgraphOp):
        device = "FAR"

        def forward(self, inputs: Any) -> Any:
            return [np.maximum(inputs[0], 0)]

        def to_export(self, file: Any) -> dict[str, Any]:
            return {}

    class FarProperty(sg.SubgraphProperty):
        def create_subgraph_selector(self) -> sg.SubgraphSelector:
            return sg.ContainOpSelector({"Relu"})

        def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
            return sg.subgraph_node(subgraph, Far(subgraph), f"far_{subgraph_id}")

    sg.register_property("far_for_export")(FarProperty)
    model = sg.compile_model(sg.optimize_for(dense(), "far_for_export"), "CPU")
    again = sg.import_model(exported(model), config=STRICT)
    np.testing.assert_allclose(again(X)[0], reference(), atol=1e-6)
