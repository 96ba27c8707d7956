"""Random operators: every pass asks the same function, and Dropout is one of them in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.lowering import Unsupported
from subgraph.graph.types import Array
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


@pytest.mark.parametrize("random", [False, True])
def test_an_operator_of_a_user_declares_that_it_is_random(random: bool) -> None:
    """The CPU's plan computed a random operator on constants once, instead of in every run."""
    name = f"Draw{random}"
    schema = sg.Schema(
        name, "test.random", inputs=("x",), outputs=("y",), min_inputs=1, max_inputs=1,
        min_outputs=1, max_outputs=1,
    )  # fmt: skip
    draws: list[int] = []

    def draw(node: sg.Node, inputs: Sequence[Any]) -> list[Array]:
        draws.append(len(draws))
        return [np.full_like(inputs[0], len(draws))]

    def refuse(node: sg.Node, low: Any) -> None:
        raise Unsupported("this node")

    operator = sg.Operator(
        schema, draw, lambda node, types, values: [types[0]], {"CPU": refuse}, random=random
    )
    core = sg.Core()
    core.add_extension(operator)
    x = sg.input("x", (2,))
    node = sg.Node(name, [ops.Constant(value=np.zeros(2, np.float32))], domain="test.random")
    assert is_random(node) == random
    model = core.compile_model(sg.Graph([x], [ops.Add(ops.Neg(x), node.outputs[0])]), "CPU")
    runs = [model([np.zeros(2, np.float32)])[0].tolist() for _ in range(2)]
    assert (runs[0] == runs[1]) != random
