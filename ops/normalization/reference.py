"""Reference of BatchNormalization, MeanVarianceNormalization, LpNormalization and LRN.

onnx.reference uses batch statistics in BatchNormalization of opsets 1 to 13 for inference, too,
because of the default momentum, and lacks opset 1 and the attribute ``spatial``. The standard's
function body of MeanVarianceNormalization has float32 constants, which fit no other dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes
from subgraph.operators.schema import is_before
from subgraph.ops.shared.half_precision import is_half


def batch_normalization(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Y, and when training the running mean and variance.

    Training is chosen by ``training_mode`` since opset 14, by the number of outputs in opsets 7
    and 9, by ``is_test`` before.
    """
    x, scale, bias, mean, var = inputs[:5]
    options = attributes(node)
    epsilon = float(options["epsilon"])
    axes = (0, *range(2, x.ndim)) if options.get("spatial", 1) else (0,)
    if not _is_training(node, options):
        return [_normalized(x, scale, bias, mean, var, axes, epsilon)]
    momentum = float(options["momentum"])
    wide = x.astype(np.float32) if is_half(x) else x
    batch_mean, batch_var = wide.mean(axis=axes), wide.var(axis=axes)
    outputs = [
        _normalized(x, scale, bias, batch_mean, batch_var, axes, epsilon),
        (mean * momentum + batch_mean * (1 - momentum)).astype(mean.dtype),
        (var * momentum + batch_var * (1 - momentum)).astype(var.dtype),
    ]
    if not is_before(node, 14):
        return outputs
    return [*outputs, batch_mean.astype(mean.dtype), batch_var.astype(var.dtype)]


def _is_training(node: Node, options: dict[str, Any]) -> bool:
    if not is_before(node, 14):
        return bool(options["training_mode"])
    if not is_before(node, 7):
        return any(output.uses for output in node.outputs[1:])
    return not options.get("is_test")


def _normalized(
    x: Array,
    scale: Array,
    bias: Array,
    mean: Array,
    var: Array,
    axes: tuple[int, ...],
    epsilon: float,
) -> Array:
    """Return ``x`` normalized by statistics over ``axes``, in its dtype."""
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
    """Divide by the norm; the result is 0 where that is. onnx.reference lacks abs for p = 1."""
    x: Array = inputs[0]
    axis, order = int(node.attrs.get("axis", -1)), int(node.attrs.get("p", 2))
    wide = x.astype(np.float64)
    norm = np.linalg.norm(wide, ord=order, axis=axis, keepdims=True)
    return [np.divide(wide, norm, out=np.zeros_like(wide), where=norm != 0).astype(x.dtype)]


def local_response(node: Node, inputs: Sequence[Any]) -> list[Any]:
    """Normalize over adjacent channels; onnx.reference takes the batch size for their number."""
    x: Array = inputs[0]
    options = attributes(node)
    size, channels = int(options["size"]), x.shape[1]
    before, after = (size - 1) // 2, size // 2
    squares = x.astype(np.float64) ** 2
    total = np.zeros_like(squares)
    for c in range(channels):
        near = squares[:, max(0, c - before) : min(channels, c + after + 1)]
        total[:, c] = near.sum(axis=1)
    scale = (options["bias"] + options["alpha"] / size * total) ** options["beta"]
    return [(x / scale).astype(x.dtype)]


def batch_norm_scale(node: Node, inputs: Sequence[Any]) -> list[Array]:
    """Compute the factor of a BatchNormalization, in float64 inside."""
    scale, var = (np.asarray(a, np.float64) for a in inputs)
    return [(scale / np.sqrt(var + node.attrs["epsilon"])).astype(inputs[0].dtype)]


def scaled_shift(node: Node, inputs: Sequence[Any]) -> list[Array]:
    """Compute the bias of a convolution with a folded BatchNormalization, in float64 inside."""
    factor, bias, mean = (np.asarray(a, np.float64) for a in inputs[:3])
    before = inputs[3] if len(inputs) > 3 and inputs[3] is not None else 0.0
    shifted = (np.asarray(before, np.float64) - mean) * factor + bias
    return [shifted.astype(inputs[0].dtype)]
