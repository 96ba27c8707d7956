"""The reference of operators that sum half precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import numpy as np

from subgraph.dtypes import HALF_FLOATS
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, dtype_of

Reference = Callable[[Node, Sequence[Any]], Sequence[Any]]


def is_half(array: Array) -> bool:
    """Return whether the elements are float16 or bfloat16."""
    return dtype_of(array) in HALF_FLOATS


def in_float32(compute: Reference, rounded: int | None = None) -> Reference:
    """Return a reference that computes half precision in float32 and rounds its results.

    NumPy sums bfloat16 in bfloat16, in which a sum of ones stops at 256, and onnx.reference squares
    float16 in float16. The devices compute both in float32.

    Args:
        compute: The reference of an operator, for float32, too.
        rounded: Number of results that have the first input's dtype; None: all.
    """

    @wraps(compute)
    def run(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
        dtype: np.dtype[Any] = inputs[0].dtype
        if not is_half(inputs[0]):
            return compute(node, inputs)
        wide = [
            part if part is None or part.dtype != dtype else part.astype(np.float32)
            for part in inputs
        ]
        results = list(compute(node, wide))
        count = len(results) if rounded is None else rounded
        return [*(result.astype(dtype) for result in results[:count]), *results[count:]]

    return run
