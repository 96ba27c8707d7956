"""What `query_model` answers is what `compile_model` does with the same arguments."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.simulated_device import Simulated


class OnlyFloat32(Simulated):
    """Takes what gives float32, and leaves the rest to REFERENCE."""

    fallback = ("REFERENCE",)

    def supports(self, node: sg.Node, options: object) -> bool | sg.Reject:
        type_ = node.outputs[0].type
        return isinstance(type_, sg.TensorType) and type_.dtype == "float32"


def core() -> sg.Core:
    made = sg.Core()
    made.register_device("F", OnlyFloat32())
    return made


def test_a_query_takes_preprocessing() -> None:
    x = sg.input("x", (1, 3, 4, 4))
    graph = sg.Graph([x], [ops.Relu(x, name="relu")], "net")
    steps = {"x": sg.Preprocess(dtype="uint8", layout="NHWC", scale=255)}
    made = core()
    found = made.query_model(graph, "REFERENCE", preprocess=steps)
    model = made.compile_model(graph, "REFERENCE", preprocess=steps)
    assert set(found) == {node.name for node in model.graph.nodes}
    assert len(found) > 1
    assert model(np.ones((1, 4, 4, 3), np.uint8))[0].shape == (1, 3, 4, 4)


def test_a_query_heeds_the_precision() -> None:
    x = sg.input("x", (2, 3), "float16")
    graph = sg.Graph([x], [ops.Tanh(ops.Relu(x, name="relu"), name="tanh")], "net")
    made = core()
    assert not made.query_model(graph, "F")
    found = made.query_model(graph, "F", {"INFERENCE_PRECISION": "float32"})
    assert {"relu", "tanh"} <= set(found)
    model = made.compile_model(graph, "F", {"INFERENCE_PRECISION": "float32"})
    assert "F" in model.execution_devices


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
def test_an_item_of_a_sequence_that_the_device_does_not_run_is_refused(
    device: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With a known index it becomes plain nodes, but a region takes no sequences."""
    if device not in sg.default_core().available_devices:
        pytest.skip(f"{device} is not available")
    x, y, n = sg.input("x", (3,)), sg.input("y", (3,)), sg.input("n", (), "int64")
    items = ops.SequenceConstruct(x, y)
    known = ops.Relu(ops.SequenceAt(items, np.int64(1), name="known"), name="relu")
    graph = sg.Graph([x, y, n], [known, ops.SequenceAt(items, n, name="unknown")])
    found = sg.default_core().query_model(graph, device)
    assert "known" not in found
    assert "relu" in found
    assert "sequence" in found.reasons["known"]
    one, two = np.ones(3, np.float32), np.full(3, 2, np.float32)
    results = sg.compile_model(graph, device)(one, two, np.array(0))
    np.testing.assert_array_equal(results[0], two)
    np.testing.assert_array_equal(results[1], one)
    assert not caplog.records, "no region fails"
