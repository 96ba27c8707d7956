"""Softmax and normalizations: requirements and types."""

from __future__ import annotations

from collections.abc import Sequence

from subgraph.dtypes import FLOATS
from subgraph.graph.graph import Node
from subgraph.graph.types import TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchCall, along, except_axes
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_axes,
    require_axis,
    require_broadcast,
    require_dtype,
    require_shape,
    require_whole_number,
)
from subgraph.operators.schema import INTERNAL_DOMAIN, is_before
from subgraph.ops.elementwise.op import Types, Values, first_type, tensor
from subgraph.ops.shared.half_precision import in_float32
from subgraph.ops.shared.strides import normal_axis

from . import reference, softmax_reference


def softmax_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axis exists; before opset 13 its default is 1 (1 to 13)."""
    require_dtype("the input", x, *FLOATS)
    require_axis(node, x.rank, 1 if is_before(node, 13) else -1)


def layer_normalization_operands(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> None:
    """Raise ShapeError unless the axis exists and the factors broadcast to the input (17 to 23).

    Args:
        node: A LayerNormalization or RMSNormalization; statistics are over ``axis`` and later ones.
        x: The input.
        scale: Factors of the normalized input.
        bias: Added to it; None: nothing.
    """
    require(x.rank >= 1, "the input is a scalar")
    require_axis(node, x.rank, -1)
    for name, operand in (("X", x), ("Scale", scale), ("B", bias)):
        require_dtype(name, operand, *FLOATS)
    for name, operand in (("Scale", scale), ("B", bias)):
        require_broadcast(name, operand, x.shape, "the shape of the input")


def instance_normalization_operands(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> None:
    """Raise ShapeError unless scale and bias have a number for each channel (1 to 22).

    Args:
        node: The InstanceNormalization.
        x: Images [batch, channels, ...].
        scale: Factors [channels].
        bias: Added [channels].
    """
    _require_channels(x)
    for name, operand in (("scale", scale), ("B", bias)):
        require_dtype(name, operand, *FLOATS)
        require_shape(name, operand, x.shape[1:2], "one for each channel")


def group_normalization_operands(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> None:
    """Raise ShapeError unless channels divide into groups, with factors for each (18 to 21).

    Args:
        node: The GroupNormalization: ``num_groups``.
        x: Images [batch, channels, ...].
        scale: Factors [groups] in opset 18, [channels] from 21 on.
        bias: Added, shaped as ``scale``.
    """
    _require_channels(x)
    groups = require_whole_number(node, "num_groups", least=1)
    channels = x.shape[1]
    require(channels % groups == 0, "{} channels do not divide into {} groups", channels, groups)
    old = is_before(node, 21)
    count, why = (groups, "group") if old else (channels, "channel")
    for name, operand in (("scale", scale), ("bias", bias)):
        require_dtype(name, operand, *FLOATS)
        require_shape(name, operand, (count,), f"one for each {why}")


def _require_channels(x: Tensor) -> None:
    require(x.rank >= 2, "the input has shape {}; it needs a dimension of channels", list(x.shape))
    require_dtype("the input", x, *FLOATS)


def batch_normalization_operands(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, var: Tensor
) -> None:
    """Raise ShapeError unless statistics and factors have a number for each channel (1 to 15).

    Args:
        node: The BatchNormalization. Before opset 9, ``spatial`` 0 means that there is a number
            for each pixel of each channel.
        x: Images [batch, channels, ...]; a vector has one channel.
        scale: Factors [channels].
        bias: Added [channels].
        mean: Mean of each channel.
        var: Variance of each channel.
    """
    require(x.rank >= 1, "the input is a scalar")
    require_dtype("X", x, *FLOATS)
    shape, why = x.shape[1:2] if x.rank > 1 else (1,), "one for each channel"
    if not node.attrs.get("spatial", 1):
        shape, why = x.shape[1:], "one for each element of an image, as spatial is 0"
    for name, operand in (("scale", scale), ("B", bias), ("mean", mean), ("var", var)):
        require_dtype(name, operand, *FLOATS)
        require_shape(name, operand, shape, why)


def local_response_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless there are channels, and ``size`` is positive (1 to 13)."""
    _require_channels(x)
    require_whole_number(node, "size", least=1)


def lp_normalization_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axis exists and ``p`` is 1 or 2 (1 to 22)."""
    require_dtype("the input", x, *FLOATS)
    require_axis(node, x.rank, -1)
    require_whole_number(node, "p", 2, least=1, most=2)


def mean_variance_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axes exist, each once (9 to 13)."""
    require_dtype("the input", x, *FLOATS)
    require_axes(x.rank, node.attrs.get("axes", (0, 2, 3)))


def layer_normalization_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of the first input, and of statistics, which have size 1 from ``axis`` on.

    Args:
        node: The LayerNormalization; ``stash_type`` is the dtype of the statistics.
        types: Of the first input; others are not read.
        values: Not used.
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [x]
    axis = normal_axis(int(node.attrs.get("axis", -1)), len(x.shape))
    stash = "float32" if node.attrs.get("stash_type", 1) == 1 else "bfloat16"
    statistics = TensorType(stash, (*x.shape[:axis], *(1 for _ in x.shape[axis:])))
    return [x, statistics, statistics]


def batch_normalization_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of the first input, and those of mean and variance for the statistics.

    Args:
        node: Not used.
        types: Of all five inputs.
        values: Not used.
    """
    mean, variance = tensor(types[3]), tensor(types[4])
    return [tensor(types[0]), mean, variance, mean, variance]


def factors(node: Node, first: Tensor, *others: Tensor | None) -> None:
    """Require that all operands have the first one's shape, one number for each channel.

    For BatchNormScale, ``scale / sqrt(var + epsilon)``, and ScaledShift, ``(B - mean) * factor +
    bias``: what remains of a BatchNormalization that was folded into weights. The plan makes their
    results constant operands, which the weight cache recomputes when a parameter changes.
    """
    for operand in others:
        require_shape("an operand", operand, first.shape, "as many as the first has")


def _softmax_axes(call: BatchCall) -> Sequence[int]:
    """Return the axis; before opset 13 it and all later ones."""
    old, rank = is_before(call.node, 13), len(call.shapes[0])
    axis = normal_axis(int(call.node.attrs.get("axis", 1 if old else -1)), rank)
    return range(axis, rank) if old else [axis]


def _later_axes(call: BatchCall) -> Sequence[int]:
    rank = len(call.shapes[0])
    return range(normal_axis(int(call.node.attrs.get("axis", -1)), rank), rank)


def _norm_axis(call: BatchCall) -> Sequence[int]:
    return [int(call.node.attrs.get("axis", -1))]


def _channels(call: BatchCall) -> Sequence[int]:
    return [1]


def _mean_axes(call: BatchCall) -> Sequence[int]:
    return [int(axis) for axis in call.node.attrs.get("axes", (0, 2, 3))]


def _batch_normalized(call: BatchCall) -> Sequence[Batch]:
    """In training mode the statistics are those of the batch."""
    node = call.node
    old = is_before(node, 7) and not node.attrs.get("is_test", 0)
    if old or node.attrs.get("training_mode", 0) or (is_before(node, 14) and len(node.outputs) > 1):
        return call.everywhere(None)
    return along(0)(call)


_of_softmax = except_axes(_softmax_axes)
_of_later_axes = except_axes(_later_axes)


# The operators of this family, each in all its versions.
declare(
    "BatchNormalization",
    requires=batch_normalization_operands,
    infer=batch_normalization_types,
    compute=reference.batch_normalization,
    batch=_batch_normalized,
)
declare(
    "GroupNormalization", requires=group_normalization_operands, infer=first_type, batch=along(0)
)
declare(
    *("Hardmax", "LogSoftmax", "Softmax"),
    requires=softmax_operands,
    infer=first_type,
    compute=softmax_reference.softmax,
    batch=_of_softmax,
)
declare(
    "InstanceNormalization",
    requires=instance_normalization_operands,
    infer=first_type,
    compute=in_float32(standard),
    batch=along(0),
)
declare(
    "LRN",
    requires=local_response_operands,
    infer=first_type,
    compute=reference.local_response,
    batch=except_axes(_channels),
)
declare(
    "LayerNormalization",
    requires=layer_normalization_operands,
    infer=layer_normalization_types,
    compute=in_float32(standard, rounded=1),
    batch=_of_later_axes,
)
declare(
    "LpNormalization",
    requires=lp_normalization_operands,
    infer=first_type,
    compute=reference.lp_normalization,
    batch=except_axes(_norm_axis),
)
declare(
    "MeanVarianceNormalization",
    requires=mean_variance_operands,
    infer=first_type,
    compute=reference.mean_variance,
    batch=except_axes(_mean_axes),
)
declare(
    "RMSNormalization",
    requires=layer_normalization_operands,
    infer=first_type,
    compute=in_float32(standard),
    batch=_of_later_axes,
)
declare(
    "BatchNormScale",
    domain=INTERNAL_DOMAIN,
    requires=factors,
    infer=first_type,
    compute=reference.batch_norm_scale,
)
declare(
    "ScaledShift",
    domain=INTERNAL_DOMAIN,
    requires=factors,
    infer=first_type,
    compute=reference.scaled_shift,
)
