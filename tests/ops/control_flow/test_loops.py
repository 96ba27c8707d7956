"""Loops whose number of iterations has no end."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper
from wrong_sizes.table import rows

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES

ENDLESS = 1 << 62


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("constants", ["", "trips", "trips state"])
@pytest.mark.timeout(120)
def test_a_loop_without_end_is_cancelled(device: str, constants: str) -> None:
    """Compiling does not run it; a request ends soon after `cancel`."""
    row = next(row for row in rows() if row.op == "Loop")
    node = helper.make_node("Loop", ["trips", "", "state"], ["o", "listed"], **row.options)
    node.attribute[0].g.output.pop()  # what it lists would fill the memory first
    node.output.pop()
    graph = helper.make_graph([node], "g", [], [onnx.ValueInfoProto(name="o")])
    given: dict[str, Array] = {}
    for name, array in (("trips", np.array(ENDLESS)), ("state", np.zeros(2, np.float32))):
        if name in constants:
            graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        else:
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(helper.make_tensor_value_info(name, kind, array.shape))
            given[name] = array
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    request = sg.compile_model(model, device).create_infer_request()
    request.start_async(given)
    assert not request.wait(0.3)
    request.cancel()
    with pytest.raises(sg.RequestCancelledError):
        request.wait(60)
