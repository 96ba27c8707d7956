"""TENSORRT without a card: the networks that TensorRT parses and builds, refits, exported engines.

TensorRT-RTX builds engines on a machine without a card. Requests, their shapes and memory are
tested with ONNX Runtime in the place of engines. What runs on a card is tested with the other
backends, in test_backends.py and test_operators.py, where there is one.
"""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends import tensorrt
from subgraph.devices.backends.base import library_model_of
from subgraph.devices.backends.libraries.tensorrt_engine import EngineModel, network_and_weights
from subgraph.graph.types import Array
from tests.devices.backends.test_operators import USES, graph_of
from tests.support.backends import installed, is_missing, no_package
from tests.support.cards.tensorrt_engines import Cardless, OrtTensorrt

needs_package = pytest.mark.skipif(bool(no_package("TENSORRT")), reason=no_package("TENSORRT"))
needs_rtx = pytest.mark.skipif(
    bool(no_package("TENSORRT")) or tensorrt.TensorrtDevice.module != "tensorrt_rtx",
    reason="tensorrt-rtx, which builds engines without a card, is not the installed TensorRT",
)


@pytest.fixture
def core() -> sg.Core:
    made = sg.Core()
    made.register_device("CARDLESS", Cardless)
    made.register_device("ORT", OrtTensorrt)
    return made


def dense(rows: int | str = 3) -> tuple[sg.Graph, sg.Parameter]:
    x = sg.input("x", type=sg.TensorType("float32", (rows, 6)))
    w = sg.parameter("w", np.ones((6, 4), np.float32))
    assert w.parameter is not None
    return sg.Graph([x], [ops.Softmax(ops.Relu(ops.MatMul(x, w)))], "dense"), w.parameter


def engines_of(model: sg.CompiledModel) -> EngineModel:
    op = model.graph.nodes[0].op
    assert isinstance(op, tensorrt.TensorrtOp)
    found = op.compiled()
    assert isinstance(found, EngineModel)
    return found


def reasons(core: sg.Core, *outputs: sg.Value, inputs: list[sg.Value]) -> str:
    found = core.query_model(sg.Graph(inputs, outputs, "refused"), "CARDLESS")
    return "; ".join(found.reasons.values())


@needs_rtx
def test_operators_are_built(core: sg.Core) -> None:
    """All that a query takes, the library builds; what it refuses has the library's reason."""
    refused: list[str] = []
    for case in USES:
        graph = graph_of(case)
        found = core.query_model(graph, "CARDLESS")
        refused += found.reasons.values()
        if found:
            [(low, high, plan)] = engines_of(core.compile_model(graph, "CARDLESS")).plans()
            type_ = graph.inputs[0].type
            assert isinstance(type_, sg.TensorType)
            assert low == high == (type_.shape,)
            assert len(plan) > 1000
    assert len(refused) < len(USES) / 2
    of_library = [reason for reason in refused if reason.startswith("TensorRT-RTX: ValueError: ")]
    assert any("does not support dilations" in reason for reason in of_library)


@needs_rtx
@pytest.mark.parametrize("weights", ["inside", "inputs"])
@pytest.mark.parametrize("precision", ["f32", "tf32"])
def test_an_engine_for_a_range_of_shapes(core: sg.Core, weights: str, precision: str) -> None:
    graph, _ = dense("N")
    config = {"WEIGHTS": weights, "PRECISION": precision}
    compiled = core.compile_model(graph, "CARDLESS", config)
    found = engines_of(compiled)
    assert found.plans() == []  # no run has had a size yet
    options = core.device("CARDLESS").options_for(config)
    op = compiled.graph.nodes[0].op
    assert isinstance(op, tensorrt.TensorrtOp)
    model = library_model_of(op.subgraph, op.inputs)
    rest = ((6, 4),) if weights == "inputs" else ()
    low, best, high = (((n, 6), *rest) for n in (1, 2, 9))
    assert len(found.builder.plan(model, options, (low, best, high))) > 1000
    with pytest.raises(RuntimeError, match=r"[Pp]rofile"):
        found.builder.plan(model, options, (high, best, low))


@needs_package
def test_refusals(core: sg.Core) -> None:
    x = sg.input("x", type=sg.TensorType("float32", (3, 3)))
    image = sg.input("image", type=sg.TensorType("float32", (1, 2, 8, 8)))
    dilated = ops.MaxPool(image, kernel_shape=[2, 2], dilations=[2, 2])
    assert "UNSUPPORTED_NODE" in reasons(core, dilated, inputs=[image])
    assert "sizes that follow from values" in reasons(core, ops.NonZero(x), inputs=[x])
    assert "Hardmax is not left to" in reasons(core, ops.Hardmax(x), inputs=[x])
    wrong = sg.Node("Gather", [x, x], outputs=1)
    wrong.outputs[0].type = x.type
    assert "type" in reasons(core, wrong.outputs[0], inputs=[x])
    shape = sg.input("shape", type=sg.TensorType("int64", (2,)))
    taken = reasons(core, ops.Reshape(x, shape), inputs=[x, shape])
    assert "decide shapes, and are not constant" in taken
    wide = sg.input("wide", type=sg.TensorType("float64", (3, 3)))
    assert "not used for float64" in reasons(core, ops.Relu(wide), inputs=[wide])


@needs_rtx
def test_exported_models_have_the_engine(core: sg.Core) -> None:
    model = core.compile_model(dense()[0], "CARDLESS")
    file = io.BytesIO()
    model.export_model(file)
    [stored] = engines_of(model).stored
    assert engines_of(core.import_model(file.getvalue(), "CARDLESS")).stored == [stored]


needs_ort = pytest.mark.skipif(
    bool(no_package("TENSORRT")) or is_missing("ONNXRUNTIME"),
    reason="TensorRT or ONNX Runtime, which runs its networks here, is not installed",
)


@needs_ort
@pytest.mark.parametrize("shapes", ["range", "exact"])
def test_engines_serve_ranges_of_shapes(core: sg.Core, shapes: str) -> None:
    graph, parameter = dense("N")
    config = {"SHAPES": shapes, "RUNTIME_FALLBACK": False}
    model = core.compile_model(graph, "ORT", config)
    for count in (4, 2, 3, 4, 7, 5):
        x = np.random.default_rng(count).standard_normal((count, 6)).astype(np.float32)
        wanted = sg.compile_model(graph, "REFERENCE")(x=x)[0]
        np.testing.assert_allclose(model(x=x)[0], wanted, atol=1e-6)
    built: Any = engines_of(model).builder
    rows = [tuple(each[0][0] for each in shapes) for shapes in built.built]
    ranges = [(4, 4, 4), (2, 2, 4), (2, 7, 7)]
    assert rows == (ranges if shapes == "range" else [(n, n, n) for n in (4, 2, 3, 7, 5)])
    parameter.assign(np.zeros((6, 4), np.float32))
    np.testing.assert_allclose(model(x=x)[0], np.full((5, 4), 0.25), atol=1e-6)


@needs_ort
def test_the_kit(core: sg.Core) -> None:
    report = sg.testing.check_device("ORT", core=core, max_examples=4)
    assert set(report.passed) | {"refusals"} >= set(sg.testing.DEVICE_CHECKS)


def clipped(largest: float, weight: Array) -> bytes:
    x = sg.input("x", type=sg.TensorType("float32", (3, 6)))
    w, high = sg.parameter("w", weight), sg.parameter("high", np.float32(largest))
    graph = sg.Graph([x], [ops.Clip(ops.MatMul(x, w), None, high)], "clipped")
    return library_model_of(graph, [0])


def test_values_that_a_refit_replaces() -> None:
    """Operands that the parser reads, as the bounds of Clip, make another network."""
    weight = np.ones((6, 4), np.float32)
    network, digests = network_and_weights(clipped(1, weight))
    assert len(digests) == 1
    same, changed = network_and_weights(clipped(1, 2 * weight))
    assert same == network
    assert digests.keys() == changed.keys()
    assert digests != changed
    assert network_and_weights(clipped(2, weight))[0] != network


@pytest.mark.parametrize("device", installed("TENSORRT"))
@pytest.mark.parametrize("shapes", ["range", "exact"])
def test_refit_on_a_card(device: str, shapes: str) -> None:
    graph, parameter = dense("N")
    config: dict[str, Any] = {"WEIGHTS": "refit", "SHAPES": shapes, "RUNTIME_FALLBACK": False}
    model = sg.compile_model(graph, device, config)
    for seed in range(4):
        rng = np.random.default_rng(seed)
        parameter.assign(rng.standard_normal((6, 4)).astype(np.float32))
        for count in (2, 5, 3):
            x = rng.standard_normal((count, 6)).astype(np.float32)
            wanted = sg.compile_model(graph, "REFERENCE")(x=x)[0]
            np.testing.assert_allclose(model(x=x)[0], wanted, atol=1e-5)
