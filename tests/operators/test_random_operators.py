"""Random operators: every pass asks the same function, and Dropout is one of them in training."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.operators.operator import is_random
from subgraph.passes import apply_pass

DROPOUTS = {  # version, training_mode, attributes -> may give other results for equal inputs
    "opset 1": (1, "", {}, True),
    "opset 6": (6, "", {"ratio": 0.5}, True),
    "opset 6 at inference": (6, "", {"is_test": 1}, False),
    "opset 10": (10, "", {}, False),
    "opset 13": (13, "", {}, False),
    "training": (13, "true", {}, True),
    "not training": (13, "false", {}, False),
    "said at run time": (13, "input", {}, True),
}


def dropout(name: str, x: sg.Value) -> sg.Node:
    """Return the case's Dropout over a value."""
    version, mode, attributes, _ = DROPOUTS[name]
    inputs: list[sg.Value | None] = [x]
    if mode:
        training = sg.input("t", (), "bool")
        if mode != "input":
            training = ops.Constant(value=np.array(mode == "true"))
        inputs = [x, None, training]
    return sg.Node("Dropout", inputs, outputs=1, version=version, attrs=attributes)


def graph_of(*results: sg.Value) -> sg.Graph:
    modes = [v.producer.inputs[2] for v in results if v.producer and len(v.producer.inputs) > 2]
    inputs = [sg.input("x", (64,)), *(v for v in modes if v is not None and v.producer is None)]
    return sg.Graph(list(dict.fromkeys(inputs)), list(results))


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_random_in_training(name: str) -> None:
    node = dropout(name, ops.Constant(value=np.ones(64, np.float32)))
    assert is_random(node) == DROPOUTS[name][3]


@pytest.mark.parametrize("name", DROPOUTS)
def test_equal_nodes_are_merged_and_folded_unless_they_are_random(name: str) -> None:
    x = ops.Constant(value=np.ones(64, np.float32))
    first = dropout(name, x)
    second = sg.Node("Dropout", first.inputs, outputs=1, version=first.version, attrs=first.attrs)
    graph = graph_of(first.outputs[0], second.outputs[0])
    merged = apply_pass(graph, "CommonSubexpressionElimination")
    count = sum(node.op_type == "Dropout" for node in merged.nodes)
    assert count == (2 if DROPOUTS[name][3] else 1)
    folded = apply_pass(graph, "ConstantFolding")
    assert any(node.op_type == "Dropout" for node in folded.nodes) == DROPOUTS[name][3]
