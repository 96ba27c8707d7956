"""Reference of Softmax, LogSoftmax and Hardmax.

Before opset 13 they flatten the input to two dimensions at ``axis``; onnx.reference does not. Its
LogSoftmax is the logarithm of a softmax, which may have underflowed to 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes
from subgraph.operators.schema import is_before


def _softmax(x: Array, axis: int) -> Array:
    powers: Array = np.exp(x - x.max(axis=axis, keepdims=True))
    return powers / _sum(powers, axis)


def _log_softmax(x: Array, axis: int) -> Array:
    shifted: Array = x - x.max(axis=axis, keepdims=True)
    return shifted - np.log(_sum(np.exp(shifted), axis))


def _sum(x: Array, axis: int) -> Array:
    """Return the sum; of half precision it is rounded once, at the end."""
    wide = np.float32 if x.dtype.itemsize < 4 else x.dtype
    total: Array = x.sum(axis=axis, keepdims=True, dtype=wide)
    return total.astype(x.dtype)


def _hardmax(x: Array, axis: int) -> Array:
    result = np.zeros_like(x)
    first = np.expand_dims(x.argmax(axis=axis), axis)
    np.put_along_axis(result, first, 1, axis=axis)
    return result


_FUNCTIONS = {"Hardmax": _hardmax, "LogSoftmax": _log_softmax, "Softmax": _softmax}


def softmax(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Softmax, its logarithm or Hardmax along an axis, before opset 13 over all later ones.

    Hardmax is 1 at the first maximum and 0 elsewhere.
    """
    x: Array = inputs[0]
    axis = int(attributes(node)["axis"])
    function = _FUNCTIONS[node.op_type]
    if x.size == 0:
        return [x.copy()]
    # Half precision is not widened: ONNX's test data are rounded after every step.
    if not is_before(node, 13):
        result = function(x, axis) if x.ndim else function(x.reshape(1), 0).reshape(())
    else:
        axis += x.ndim if axis < 0 else 0
        rows = math.prod(x.shape[:axis])
        result = function(x.reshape(rows, -1), 1).reshape(x.shape)
    return [result.astype(x.dtype)]
