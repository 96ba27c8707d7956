"""Pooling: requirements of operands, and shape inference."""

from __future__ import annotations

from collections.abc import Sequence

from subgraph.dtypes import FLOATS
from subgraph.graph.graph import Node
from subgraph.graph.types import TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchCall, along
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_dtype,
    require_numbers,
    require_whole_number,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.shared.half_precision import in_float32

from . import reference
from .windows import INT8, MAX_EXTENT, require_image, require_windows, window_counts


def pool_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless windows fit into the input (ONNX pooling operators, 1 to 22)."""
    require_dtype("X", x, *FLOATS, *(INT8 if node.op_type.endswith("MaxPool") else ()))
    require_image(x)
    require(bool(node.attrs.get("kernel_shape")), "kernel_shape is missing")
    count = x.rank - 2
    kernel = require_numbers(node, "kernel_shape", count, 1, 1, MAX_EXTENT)
    _require_pixels(x)
    require_windows(node, x.shape[2:], kernel)
    require_whole_number(node, "storage_order", 0, least=0, most=1)
    _require_power(node)


def global_pool_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless there are channels with at least one pixel (ONNX, 1 to 22)."""
    require_dtype("X", x, *FLOATS)
    require(x.rank >= 2, "the input has shape {}; it needs rank 2 or more", list(x.shape))
    _require_pixels(x)
    _require_power(node)


def _require_pixels(x: Tensor) -> None:
    for size in x.shape[2:]:
        require(size >= 1, "the input is {}: no elements to pool", x)


def _require_power(node: Node) -> None:
    """Require that ``p`` of LpPool is above zero; opset 1 has it as a float."""
    power = node.attrs.get("p", 2)
    require(isinstance(power, int | float) and power > 0, "p is {!r}; it must be above 0", power)


def pool(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the types of pooling: one element for each window; MaxPool also has int64 indices.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    kernel = [int(v) for v in node.attrs["kernel_shape"]]
    shape = (*x.shape[:2], *window_counts(node, x.shape, kernel))
    return [TensorType(x.dtype, shape), TensorType("int64", shape)]


def global_pool(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of global pooling: one pixel for each channel.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    return [TensorType(x.dtype, (*x.shape[:2], *(1 for _ in x.shape[2:])))]


def max_pool_batch(call: BatchCall) -> Sequence[Batch]:
    """The second output has indices into the whole input, so that they depend on the row."""
    return [along(0, 1)(call)[0], None]


# The operators of this family, each in all its versions.
declare(
    "AveragePool",
    "LpPool",
    requires=pool_operands,
    infer=pool,
    compute=reference.pool,
    grows=True,
    batch=along(0, 1),
)
declare(
    *("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool"),
    requires=global_pool_operands,
    infer=global_pool,
    compute=in_float32(reference.global_pool),
    batch=along(0, 1),
)
declare(
    "MaxPool",
    requires=pool_operands,
    infer=pool,
    compute=reference.max_pool,
    grows=True,
    batch=max_pool_batch,
)
declare("FusedQMaxPool", domain=INTERNAL_DOMAIN, requires=pool_operands)
