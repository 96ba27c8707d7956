"""Gemm for the reference: the forms before opset 7. Inverses of matrices."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.operators.reference import attributes, standard, variant
from subgraph.operators.schema import is_before


def gemm(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return alpha A B + beta C; before opset 7, too, C broadcasts without ``broadcast``.

    Products of integers that are not scaled are exact; onnx.reference multiplies them by floats.
    """
    if is_before(node, 7):
        node = variant(node, version=7, drop=("broadcast",))
    options = attributes(node)
    scaled = options.get("alpha", 1.0) != 1 or options.get("beta", 1.0) != 1
    if scaled or inputs[0].dtype.kind not in "iu":
        return standard(node, inputs)
    a = inputs[0].T if options.get("transA", 0) else inputs[0]
    b = inputs[1].T if options.get("transB", 0) else inputs[1]
    product = a @ b
    c = inputs[2] if len(inputs) > 2 else None
    return [product if c is None else product + c]


def inverse(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the inverse of each matrix; NaN for one that has none."""
    x = inputs[0]
    try:
        return [np.linalg.inv(x)]
    except np.linalg.LinAlgError:  # at least one has no inverse
        found = np.full_like(x, np.nan)
        for index in np.ndindex(x.shape[:-2]):
            with suppress(np.linalg.LinAlgError):
                found[index] = np.linalg.inv(x[index])
        return [found]
