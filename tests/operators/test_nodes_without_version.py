"""A node that was made without a version has the newest form of its operator, on every device."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx.defs
import pytest

import subgraph as sg
from subgraph.testing import conformance

pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def _cases() -> dict[str, conformance.Case]:
    """Return the first two cases of ONNX's suite for the newest form of each operator."""
    found: dict[str, conformance.Case] = {}
    for case in conformance.cases():
        if case.kind != "node" or case.name in conformance.IMPOSSIBLE or "random" in case.category:
            continue
        model, _ = case.load()
        if len(model.graph.node) != 1 or model.graph.node[0].domain:
            continue
        op_type = model.graph.node[0].op_type
        newest = onnx.defs.get_schema(op_type).since_version
        [opset] = [o.version for o in model.opset_import if not o.domain]
        if onnx.defs.get_schema(op_type, opset).since_version == newest:
            key = op_type if op_type not in found else f"{op_type} again"
            found.setdefault(key, case)
    return found


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_a_node_without_a_version_has_the_newest_form(device: str) -> None:
    wrong: dict[str, str] = {}
    for key, case in _cases().items():
        model, sets = case.load()
        graph = sg.load(model)
        for node in graph.nodes:
            node.version = 0
        compiled = sg.compile_model(graph, device)
        for inputs, expected in sets:
            results = compiled(list(inputs))
            try:
                conformance.assert_matches(
                    case, expected, [results[k] for k in range(len(expected))]
                )
            except AssertionError as error:
                wrong[key] = str(error)[:200]
    assert len(_cases()) > 200
    assert not wrong


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_batch_normalization_without_a_version_is_inference(device: str) -> None:
    arrays = [np.random.default_rng(0).random((2, 3, 4), np.float32), *[np.ones(3, np.float32)] * 4]
    ports = [sg.input(f"i{k}", array.shape, "float32") for k, array in enumerate(arrays)]
    node = sg.Node("BatchNormalization", ports)
    found = sg.compile_model(sg.Graph(ports, [node.outputs[0]]), device)(arrays)[0]
    np.testing.assert_allclose(found, (arrays[0] - 1) / np.sqrt(1 + 1e-5) + 1, rtol=1e-5)
