"""Erf, AffineGrid and losses, for the reference: onnx.reference is not exact, or counts wrongly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.operator import reference
from subgraph.operators.reference import attributes, expand, standard

_erf = np.frompyfunc(math.erf, 1, 1)


@reference("Erf")
def erf(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the error function of each element."""
    x: Array = inputs[0]
    wide: Array = np.asarray(_erf(x.astype(np.float64)), object)
    return [wide.astype(np.float64).astype(x.dtype)]


@reference("AffineGrid")
def affine_grid(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the places that an affine map samples, for GridSample; theta (N, d, d+1)."""
    theta: Array = inputs[0]
    sizes = [int(size) for size in inputs[1]][2:]
    lines: list[Array] = []
    for size in sizes:
        if attributes(node)["align_corners"]:
            # One place alone is the first, -1, as linspace gives it.
            lines.append(np.linspace(-1, 1, size))
        else:
            lines.append((2 * np.arange(size) + 1) / size - 1)
    places = np.meshgrid(*lines, indexing="ij")
    points = np.stack([*reversed(places), np.ones(sizes)], axis=-1)
    grid: Array = np.einsum("...k,ndk->n...d", points, theta.astype(np.float64))
    return [grid.astype(theta.dtype)]


@reference("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def loss(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Compute a loss by its function body; onnx.reference counts labels that are ignored."""
    count = len(inputs)
    while count and inputs[count - 1] is None:
        count -= 1
    body = expand(node, inputs[:count])
    return standard(node, inputs) if body is None else body(inputs[:count])
