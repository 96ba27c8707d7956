"""Operators whose results differ from run to run, so that passes neither merge nor fold them."""

from __future__ import annotations

import numpy as np

from subgraph.graph.graph import Node

# Of ONNX's own domain; each of their nodes draws numbers.
RANDOM_OPERATORS = frozenset(
    {
        *("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike"),
        *("RandomUniform", "RandomUniformLike"),
    }
)


def is_random(node: Node) -> bool:
    """Return whether a node may give other results for equal inputs: a Dropout may, in training."""
    return node.op_type in RANDOM_OPERATORS or (node.op_type == "Dropout" and may_train(node))


def may_train(node: Node) -> bool:
    """Return whether a Dropout is in training mode, or may be: ``training_mode`` is no constant."""
    if node.version and node.version < 7:
        return not node.attrs.get("is_test", 0)
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return False
    mode = node.inputs[2].producer
    if mode is None or mode.op_type != "Constant" or "value" not in mode.attrs:
        return True
    return bool(np.asarray(mode.attrs["value"]).any())
