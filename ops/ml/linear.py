"""Reference of LinearRegressor and LinearClassifier.

onnx.reference needs intercepts, has no transform of the regressor, and returns float64 for float64
inputs; the operators' outputs are float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes

from .scores import label_array, prepared, rows, transformed, two_scores


def parameters(node: Node) -> tuple[Array, Array]:
    """Return coefficients, a row of features for each score, and intercepts of scores or none."""
    options = attributes(node)
    names = ("coefficients", "intercepts")
    weights, added = (np.array(options[name] or (), np.float32) for name in names)
    return weights, added


def _products(node: Node, x: Array, count: int) -> Array:
    """Return X W + b in float32, [samples, count]."""
    weights, added = prepared(node, parameters)
    scores: Array = x.astype(np.float32) @ weights.reshape(count, -1).T
    return scores + added if added.size else scores


def linear_regressor(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the scores of each target in float32."""
    options = attributes(node)
    scores = _products(node, rows(inputs[0]), int(options["targets"]))
    return [transformed(scores, str(options["post_transform"]))]


def linear_classifier(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the label of each sample and its scores in float32.

    With coefficients for one score, its sign decides between two classes: the given labels, or 0
    and 1.
    """
    options = attributes(node)
    x, name = rows(inputs[0]), str(options["post_transform"])
    count = len(options["coefficients"] or ()) // max(x.shape[1], 1)
    scores = _products(node, x, count)
    labels = label_array(options["classlabels_strings"], options["classlabels_ints"])
    if count > 1:
        return [labels[scores.argmax(axis=1)], transformed(scores, name)]
    if len(labels) == 2:
        found = labels[(scores[:, 0] > 0).astype(int)]
        return [found, two_scores(scores[:, 0], name, signed=False)]
    numbers: list[Any] = ["0", "1"] if labels.dtype == object else [0, 1]
    return [
        np.array(numbers, labels.dtype)[(scores[:, 0] > 0).astype(int)],
        transformed(scores, name),
    ]
