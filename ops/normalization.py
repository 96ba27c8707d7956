"""Softmax and normalizations: shape rules."""

from __future__ import annotations

from subgraph.graph import Node
from subgraph.op import shape_rule
from subgraph.types import TensorType, ValueType

from .elementwise import Types, Values, tensor
from .strides import normal_axis


@shape_rule(
    "CumProd",
    "CumSum",
    "GroupNormalization",
    "Hardmax",
    "InstanceNormalization",
    "LRN",
    "LogSoftmax",
    "LpNormalization",
    "MeanVarianceNormalization",
    "RMSNormalization",
    "Softmax",
)
def same(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input."""
    x = tensor(types[0])
    axis = node.attrs.get("axis")
    if x is not None and x.shape is not None and isinstance(axis, int):
        normal_axis(axis, len(x.shape))
    return [x]


@shape_rule("LayerNormalization")
def layer_normalization(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input; statistics have size 1 from the axis on."""
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [x]
    axis = normal_axis(int(node.attrs.get("axis", -1)), len(x.shape))
    stash = "float32" if node.attrs.get("stash_type", 1) == 1 else "bfloat16"
    statistics = TensorType(stash, (*x.shape[:axis], *(1 for _ in x.shape[axis:])))
    return [x, statistics, statistics]


@shape_rule("BatchNormalization")
def batch_normalization(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the type of the first input; the statistics have those of the fourth and fifth."""
    mean, variance = tensor(types[3]), tensor(types[4])
    return [tensor(types[0]), mean, variance, mean, variance]
