"""Softmax and normalizations: what operands must satisfy, and shape rules."""

from __future__ import annotations

from subgraph.dtypes import FLOATS
from subgraph.graph.graph import Node
from subgraph.graph.types import TensorType, ValueType
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_axes,
    require_axis,
    require_broadcast,
    require_dtype,
    require_shape,
    whole_number,
)
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.shared.strides import normal_axis

from . import reference, softmax_reference


def softmax_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axis exists; before opset 13 its default is 1 (1 to 13)."""
    require_dtype("the input", x, *FLOATS)
    require_axis(node, x.rank, 1 if 0 < node.version < 13 else -1)


def layer_normalization_operands(
    node: Node, x: Tensor, scale: Tensor, bias: Tensor | None = None
) -> None:
    """Raise ShapeError unless the axis exists and the factors broadcast to the input (17 to 23)."""
    require(x.rank >= 1, "the input is a scalar")
    require_axis(node, x.rank, -1)
    for name, operand in (("X", x), ("Scale", scale), ("B", bias)):
        require_dtype(name, operand, *FLOATS)
    for name, operand in (("Scale", scale), ("B", bias)):
        require_broadcast(name, operand, x.shape, "the shape of the input")


def instance_normalization_operands(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> None:
    """Raise ShapeError unless scale and bias have a number for each channel (1 to 22)."""
    _require_channels(x)
    for name, operand in (("scale", scale), ("B", bias)):
        require_dtype(name, operand, *FLOATS)
        require_shape(name, operand, x.shape[1:2], "one for each channel")


def group_normalization_operands(node: Node, x: Tensor, scale: Tensor, bias: Tensor) -> None:
    """Raise ShapeError unless channels divide into groups, with factors for each (18 to 21).

    Opset 18 has a scale and a bias for each group, opset 21 for each channel.
    """
    _require_channels(x)
    groups = whole_number(node, "num_groups", least=1)
    channels = x.shape[1]
    require(channels % groups == 0, "{} channels do not divide into {} groups", channels, groups)
    old = 0 < node.version < 21
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

    An input of one dimension has one channel. Before opset 9 ``spatial`` 0 asks for statistics of
    each pixel of each channel.
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
    """Raise ShapeError unless there are channels, and a count of them to sum over (1 to 13)."""
    _require_channels(x)
    whole_number(node, "size", least=1)


def lp_normalization_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axis exists and the norm is the first or the second (1 to 22)."""
    require_dtype("the input", x, *FLOATS)
    require_axis(node, x.rank, -1)
    whole_number(node, "p", 2, least=1, most=2)


def mean_variance_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the axes exist, each once (9 to 13)."""
    require_dtype("the input", x, *FLOATS)
    require_axes(x.rank, node.attrs.get("axes", (0, 2, 3)))


def same(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input."""
    x = tensor(types[0])
    axis = node.attrs.get("axis")
    if x is not None and x.shape is not None and isinstance(axis, int):
        normal_axis(axis, len(x.shape))
    return [x]


def layer_normalization(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input; statistics have size 1 from the axis on."""
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [x]
    axis = normal_axis(int(node.attrs.get("axis", -1)), len(x.shape))
    stash = "float32" if node.attrs.get("stash_type", 1) == 1 else "bfloat16"
    statistics = TensorType(stash, (*x.shape[:axis], *(1 for _ in x.shape[axis:])))
    return [x, statistics, statistics]


def batch_normalization(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input; the statistics have those of the fourth and fifth."""
    mean, variance = tensor(types[3]), tensor(types[4])
    return [tensor(types[0]), mean, variance, mean, variance]


# The operators of this family, each in all its versions.
declare(
    "BatchNormalization",
    requires=batch_normalization_operands,
    infer=batch_normalization,
    compute=reference.batch_normalization,
)
declare("GroupNormalization", requires=group_normalization_operands, infer=same)
declare("Hardmax", requires=softmax_operands, infer=same, compute=softmax_reference.hardmax)
declare("InstanceNormalization", requires=instance_normalization_operands, infer=same)
declare("LRN", requires=local_response_operands, infer=same, compute=reference.local_response)
declare("LayerNormalization", requires=layer_normalization_operands, infer=layer_normalization)
declare("LogSoftmax", requires=softmax_operands, infer=same, compute=softmax_reference.log_softmax)
declare(
    "LpNormalization",
    requires=lp_normalization_operands,
    infer=same,
    compute=reference.lp_normalization,
)
declare(
    "MeanVarianceNormalization",
    requires=mean_variance_operands,
    infer=same,
    compute=reference.mean_variance,
)
declare("RMSNormalization", requires=layer_normalization_operands, infer=same)
declare("Softmax", requires=softmax_operands, infer=same, compute=softmax_reference.softmax)
