"""Operators that select elements: TopK, NonZero, Compress, Unique, NonMaxSuppression.

The output types of the common ones are computed here and not by onnx, so that a process that runs a
detector need not load the onnx package.
"""

from __future__ import annotations

from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.batch_axes import BatchCall, except_axes
from subgraph.operators.inference import infer_by_onnx
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    any_tensor,
    int_list,
    require,
    require_axis,
    require_single,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.movement.types import input_or_attribute
from subgraph.ops.shared.strides import normal_axis

from . import padded, reference


def top_operands(node: Node, x: Tensor, k: Tensor | None = None) -> None:
    """Require that the axis has at least k elements (ONNX TopK, 1 to 24).

    Args:
        node: The node; opset 1 has ``k`` as an attribute.
        x: The input.
        k: Number of elements to select, one number; None in opset 1.
    """
    require(x.rank >= 1, "a scalar has no axis")
    axis = require_axis(node, x.rank, -1)
    require_single("k", k)
    for many in int_list(node, "k", k) or []:
        require(0 <= many <= x.shape[axis], "k is {}; axis {} has {}", many, axis, x.shape[axis])


def top_k(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the k largest elements along an axis, and of their indices.

    Args:
        node: The TopK node.
        types: Types of data and k, None while unknown.
        values: Contents of constant inputs: k may be among them; in opset 1 it is an attribute.
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype), TensorType("int64")]
    axis = normal_axis(int(node.attrs.get("axis", -1)), len(x.shape))
    stated_k = input_or_attribute(node, values, 1, "k")
    k: Dim = None if stated_k is None else stated_k[0]
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return [TensorType(x.dtype, shape), TensorType("int64", shape)]


def non_zero(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of NonZero: an index for each dimension of each element that is not zero.

    Args:
        node: The NonZero node.
        types: Type of the input, None while unknown.
        values: Contents of constant inputs.
    """
    x = tensor(types[0])
    rank = None if x is None or x.shape is None else len(x.shape)
    if rank == 0:
        return infer_by_onnx(node, types, values)
    return [TensorType("int64", (rank, None))]


def unique(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of Unique: the elements or slices, and three lists of indices and counts.

    Args:
        node: The node; ``axis`` is read.
        types: Types of the inputs, None while unknown.
        values: Contents of constant inputs; not read.
    """
    x, axis = tensor(types[0]), node.attrs.get("axis")
    if x is None:
        return [None]
    shape: list[Dim] | None = [None]
    if axis is not None:
        shape = None if x.shape is None else list(x.shape)
        if shape is not None:
            shape[normal_axis(int(axis), len(shape))] = None
    return [TensorType(x.dtype, shape), *[TensorType("int64", [None])] * 3]


def non_max_suppression(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of NonMaxSuppression: image, class and box of each selected box.

    Args:
        node: The node; not read.
        types: Types of the inputs; not read.
        values: Contents of constant inputs; not read.
    """
    return [TensorType("int64", (None, 3))]


def _selected_axis(call: BatchCall) -> list[int]:
    return [int(call.node.attrs.get("axis", -1))]


# The operators of this family, each in all its versions.
declare("Compress", requires=padded.compress_operands)
declare(
    "NonMaxSuppression",
    requires=padded.non_max_suppression_operands,
    infer=non_max_suppression,
    compute=reference.non_max_suppression,
)
declare("NonZero", requires=any_tensor, infer=non_zero)
declare(
    "TopK",
    requires=top_operands,
    infer=top_k,
    compute=reference.top_k,
    sized_by=(1,),
    batch=except_axes(_selected_axis),
)
declare("Unique", requires=padded.unique_operands, infer=unique, compute=reference.unique)
declare(
    "PaddedCompress",
    domain=INTERNAL_DOMAIN,
    requires=padded.compress_operands,
    infer=padded.compress,
    compute=padded.padded,
)
declare(
    "PaddedNonMaxSuppression",
    domain=INTERNAL_DOMAIN,
    requires=padded.non_max_suppression_operands,
    infer=padded.non_max_suppression,
    compute=padded.padded,
)
declare(
    "PaddedNonZero",
    domain=INTERNAL_DOMAIN,
    requires=any_tensor,
    infer=padded.non_zero,
    compute=padded.padded,
)
declare(
    "PaddedUnique",
    domain=INTERNAL_DOMAIN,
    requires=padded.unique_operands,
    infer=padded.unique,
    compute=padded.padded,
)
declare(
    "Trim",
    domain=INTERNAL_DOMAIN,
    requires=padded.trim_operands,
    infer=padded.trim,
    compute=padded.trimmed,
)
