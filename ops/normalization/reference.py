"""BatchNormalization, MeanVarianceNormalization and Dropout, for the reference.

onnx.reference mixes batch statistics into BatchNormalization of opsets 1 to 13 where the model
asks for inference (it takes the default momentum as a wish to train), and lacks opset 1 and the
attribute ``spatial``. It lacks Dropout of opsets 1 to 6. The standard's own definition of
MeanVarianceNormalization has numbers of float32, which go with no other dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes


def batch_normalization(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Y, and when training the running mean and variance.

    Since opset 14 ``training_mode`` says what is wanted, in opsets 7 and 9 the number of outputs,
    before that ``is_test``.
    """
    x, scale, bias, mean, var = inputs[:5]
    given = attributes(node)
    epsilon = float(given["epsilon"])
    axes = (0, *range(2, x.ndim)) if given.get("spatial", 1) else (0,)
    if not _is_training(node, given):
        return [_normalized(x, scale, bias, mean, var, axes, epsilon)]
    momentum = float(given["momentum"])
    batch_mean, batch_var = x.mean(axis=axes), x.var(axis=axes)
    outputs = [
        _normalized(x, scale, bias, batch_mean, batch_var, axes, epsilon),
        (mean * momentum + batch_mean * (1 - momentum)).astype(mean.dtype),
        (var * momentum + batch_var * (1 - momentum)).astype(var.dtype),
    ]
    if node.version >= 14:
        return outputs
    return [*outputs, batch_mean.astype(mean.dtype), batch_var.astype(var.dtype)]


def _is_training(node: Node, given: dict[str, Any]) -> bool:
    if node.version >= 14:
        return bool(given["training_mode"])
    if node.version >= 7:
        return any(output.uses for output in node.outputs[1:])
    return not given.get("is_test")


def _normalized(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    var: Array,
    axes: tuple[int, ...],
    epsilon: float,
) -> Array:
    shape = [1 if k in axes else size for k, size in enumerate(x.shape)]
    scale, bias, mean, var = (part.reshape(shape) for part in (scale, bias, mean, var))
    result: Array = scale * (x - mean) / np.sqrt(var + epsilon) + bias
    return result.astype(x.dtype)


def mean_variance(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return ``(x - mean) / (deviation + 1e-9)`` over the axes, computed in float64."""
    x: Array = inputs[0]
    wide = x.astype(np.float64)
    axes = tuple(int(axis) for axis in node.attrs.get("axes", (0, 2, 3)))
    centred = wide - wide.mean(axis=axes, keepdims=True)
    deviation: Array = np.sqrt((centred**2).mean(axis=axes, keepdims=True))
    return [(centred / (deviation + 1e-9)).astype(x.dtype)]


def lp_normalization(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Divide by the norm; onnx.reference leaves out the magnitude for p = 1."""
    x: Array = inputs[0]
    axis, order = int(node.attrs.get("axis", -1)), int(node.attrs.get("p", 2))
    wide = x.astype(np.float64)
    norm = np.linalg.norm(wide, ord=order, axis=axis, keepdims=True)
    return [np.divide(wide, norm, out=np.zeros_like(wide), where=norm != 0).astype(x.dtype)]


def local_response(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Normalize over neighbouring channels; onnx.reference stops at the batch size."""
    x: Array = inputs[0]
    given = attributes(node)
    size, channels = int(given["size"]), x.shape[1]
    before, after = (size - 1) // 2, size // 2
    squares = x.astype(np.float64) ** 2
    total = np.zeros_like(squares)
    for c in range(channels):
        near = squares[:, max(0, c - before) : min(channels, c + after + 1)]
        total[:, c] = near.sum(axis=1)
    scale = (given["bias"] + given["alpha"] / size * total) ** given["beta"]
    return [(x / scale).astype(x.dtype)]
