"""Requirements of the operands of quantized operators: dtypes, scales and zero points.

Each function raises ShapeError unless its operands fit each other and the node's attributes.
"""

from __future__ import annotations

from collections.abc import Sequence

from subgraph.dtypes import HALF_FLOATS
from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_axis,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.ops.matmul.op import require_product
from subgraph.ops.pool.windows import INT8, require_filters

_FLOATS = ("float32", *HALF_FLOATS)


def quantize_operands(node: Node, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> None:
    """Raise ShapeError unless scales are one, one along an axis, or one for each block.

    Args:
        node: A QuantizeLinear or DequantizeLinear (ONNX, 10 to 25).
        x: The input.
        scale: A scalar; a vector along ``axis``; or, with ``block_size``, of x's shape with as many
            elements along the axis as there are blocks.
        zero: The zero point, of the scale's shape and of the quantized dtype.
    """
    stated = node.attrs.get("output_dtype", 0)
    require(not stated or stated in DTYPE_OF_ONNX, "output_dtype {} is no dtype of ONNX", stated)
    if node.op_type == "DequantizeLinear":
        require_dtype("the zero point", zero, x.dtype)
    elif stated:
        require_dtype("the zero point", zero, DTYPE_OF_ONNX[stated])
    block = node.attrs.get("block_size", 0)
    require(isinstance(block, int) and block >= 0, "block_size is {}", block)
    for name, operand in (("the scale", scale), ("the zero point", zero)):
        if operand is not None:
            _require_granularity(node, name, operand, x, block)
    if zero is not None and zero.rank and scale.rank:
        require_shape("the zero point", zero, scale.shape, "one for each scale")


def _require_granularity(node: Node, name: str, operand: Tensor, x: Tensor, block: int) -> None:
    """Require one number for all of ``x``, one for each index of an axis, or one for each block."""
    if operand.rank == 0:
        return
    if operand.rank == 1 and not (block and x.rank == 1):
        # An axis is needed only where there is more than one number.
        axis = node.attrs.get("axis", 1)
        inside = isinstance(axis, int) and -x.rank <= axis < x.rank
        count: int = x.shape[axis] if inside else 1
        require(
            operand.shape[0] == 1 or operand.shape[0] == count,
            "{} has {} elements; {} has one, or one for each of the {} along axis {}",
            name,
            operand.shape[0],
            x,
            count,
            axis,
        )
        return
    require(block > 0, "{} has shape {}, but there is no block_size", name, operand.shape)
    require_rank(name, operand, x.rank)
    axis = require_axis(node, x.rank, default=1)
    blocks = -(-x.shape[axis] // block)
    wanted = (*x.shape[:axis], blocks, *x.shape[axis + 1 :])
    require_shape(name, operand, wanted, f"one for each block of {block} along axis {axis}")


def dynamic_quantize_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the operand is float32; every shape fits (ONNX, 11)."""
    require_dtype("x", x, "float32")


def conv_integer_operands(
    node: Node, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> None:
    """Require that filters and zero points fit the input (ONNX ConvInteger, opset 10).

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``, uint8 or int8.
        w: Filters, ``[M, C / group, *kernel]``, uint8 or int8.
        x_zero: Zero point of x, one number; None: 0.
        w_zero: Zero point of w, one number or one for each filter; None: 0.

    Raises:
        ShapeError: They do not fit.
    """
    _require_int8(("x", x, x_zero), ("w", w, w_zero))
    require_filters(node, x, w, None)
    require_filter_numbers("x_zero_point", x_zero, 1)
    require_filter_numbers("w_zero_point", w_zero, w.shape[0])


def qlinear_conv_operands(
    node: Node,
    x: Tensor,
    x_scale: Tensor,
    x_zero: Tensor,
    w: Tensor,
    w_scale: Tensor,
    w_zero: Tensor,
    y_scale: Tensor,
    y_zero: Tensor,
    bias: Tensor | None = None,
) -> None:
    """Require that filters, scales and zero points fit the input (ONNX QLinearConv, opset 10).

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``, uint8 or int8.
        x_scale: Scale of x, one float32.
        x_zero: Zero point of x, one number.
        w: Filters, ``[M, C / group, *kernel]``, uint8 or int8.
        w_scale: Scale of w, one float32 or one for each filter.
        w_zero: Zero point of w, as many.
        y_scale: Scale of the result, one float32.
        y_zero: Zero point of the result, one number; its dtype is that of the result.
        bias: ``[M]``, int32, in units of ``x_scale * w_scale``; None: none.

    Raises:
        ShapeError: They do not fit.
    """
    _require_int8(("x", x, x_zero), ("w", w, w_zero), ("y", y_zero, y_zero))
    require_dtype("B", bias, "int32")
    require_filters(node, x, w, bias)
    for name, operand in (("x_scale", x_scale), ("w_scale", w_scale), ("y_scale", y_scale)):
        require_dtype(name, operand, "float32")
        require_filter_numbers(name, operand, w.shape[0] if name == "w_scale" else 1)
    for name, zero in (("x_zero_point", x_zero), ("y_zero_point", y_zero)):
        require_filter_numbers(name, zero, 1)
    require_filter_numbers("w_zero_point", w_zero, w.shape[0])


def fused_qlinear_conv_operands(node: Node, x: Tensor, *others: Tensor | None) -> None:
    """Require that filters, scales, zero points and bias fit, as QLinearConv does.

    ``others`` are x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias and its scale, and
    those of a residual (`qlinear_operands`), which the lowering checks.
    """
    padded: list[Tensor | None] = list(others)
    padded += [None] * 9
    x_scale, x_zero, w, w_scale, w_zero, y_scale, y_zero, bias, bias_scale = padded[:9]
    if w is None:
        raise ShapeError("the filters are missing")
    require_filters(node, x, w, bias)
    singles = (x_scale, x_zero, y_scale, y_zero)
    for name, operand in zip(("x_scale", "x_zero", "y_scale", "y_zero"), singles, strict=True):
        require_filter_numbers(name, operand, 1)
    for name, operand in (("w_scale", w_scale), ("w_zero", w_zero), ("b_scale", bias_scale)):
        require_filter_numbers(name, operand, w.shape[0])


def matmul_integer_operands(
    node: Node, a: Tensor, b: Tensor, za: Tensor | None = None, zb: Tensor | None = None
) -> None:
    """Require that the matrices and their zero points fit (ONNX MatMulInteger, 10).

    Args:
        node: The node.
        a: ``[..., M, K]``, uint8 or int8.
        b: ``[..., K, N]``, uint8 or int8.
        za: Zero point of a, one number or one for each row; None: 0.
        zb: Zero point of b, one number or one for each column; None: 0.

    Raises:
        ShapeError: They do not fit.
    """
    require_dtype("A", a, *INT8)
    require_dtype("B", b, *INT8)
    require_product(a, b)
    require_dtype("a_zero_point", za, a.dtype)
    require_dtype("b_zero_point", zb, b.dtype)
    _require_per_row("a_zero_point", za, a.shape)
    _require_per_column("b_zero_point", zb, b.shape)


def qlinear_matmul_operands(
    node: Node, a: Tensor, a_scale: Tensor, a_zero: Tensor, b: Tensor, b_scale: Tensor,
    b_zero: Tensor, y_scale: Tensor, y_zero: Tensor,
) -> None:  # fmt: skip
    """Require that matrices, scales and zero points fit (ONNX QLinearMatMul, 10 to 21).

    Args:
        node: The node.
        a: ``[..., M, K]``, of 8 bits.
        a_scale: Scale of a, one number or one for each row.
        a_zero: Zero point of a, as many.
        b: ``[..., K, N]``, of 8 bits.
        b_scale: Scale of b, one number or one for each column.
        b_zero: Zero point of b, as many.
        y_scale: Scale of the result, one number or one for each row.
        y_zero: Zero point of the result, as many; its dtype is that of the result.

    Raises:
        ShapeError: They do not fit.
    """
    require_product(a, b)
    for name, scale in (("a_scale", a_scale), ("b_scale", b_scale), ("y_scale", y_scale)):
        require_dtype(name, scale, *_FLOATS)
    require_dtype("a_zero_point", a_zero, a.dtype)
    require_dtype("b_zero_point", b_zero, b.dtype)
    for name, scale, zero in (("a", a_scale, a_zero), ("y", y_scale, y_zero)):
        _require_per_row(f"{name}_scale", scale, a.shape)
        _require_per_row(f"{name}_zero_point", zero, a.shape)
    _require_per_column("b_scale", b_scale, b.shape)
    _require_per_column("b_zero_point", b_zero, b.shape)


def fused_qlinear_matmul_operands(
    node: Node, a: Tensor, a_scale: Tensor, a_zero: Tensor | None, b: Tensor, b_scale: Tensor,
    b_zero: Tensor | None, y_scale: Tensor | None = None, y_zero: Tensor | None = None,
    c: Tensor | None = None, c_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Require that scales and zero points fit: one for A and Y, one or one per column for B and C.

    Args:
        node: The FusedQLinearMatMul; with ``transB`` B is ``[N, K]``.
        a: Left side, ``[..., K]``, uint8 or int8.
        a_scale: Scale of a, one number.
        a_zero: Zero point of a, one number; None: 0.
        b: Right side, ``[K, N]``, uint8 or int8.
        b_scale: Scale of b, one number or one for each column.
        b_zero: Zero point of b, as many; None: 0.
        y_scale: Scale of the result, one number; None if the result is a float.
        y_zero: Zero point of the result, one number; None: 0.
        c: Added to each row, ``[N]``; None: nothing.
        c_scale: Scale of c, one number or one for each column.

    Raises:
        ShapeError: They do not fit.
    """
    require_rank("B", b, 2)
    require(a.rank >= 1, "a matrix product of a scalar")
    rows, columns = b.shape[::-1] if node.attrs.get("transB", 0) else b.shape
    require(a.shape[-1] == rows, "{} columns meet {} rows", a.shape[-1], rows)
    require_dtype("a_zero", a_zero, a.dtype)
    require_dtype("b_zero", b_zero, b.dtype)
    require_shape("C", c, (columns,), "one for each column")
    singles = (("a_scale", a_scale), ("a_zero", a_zero), ("y_scale", y_scale), ("y_zero", y_zero))
    for name, operand in singles:
        require_filter_numbers(name, operand, 1)
    for name, operand in (("b_scale", b_scale), ("b_zero", b_zero), ("c_scale", c_scale)):
        require_filter_numbers(name, operand, columns)


def _require_int8(*rows: tuple[str, Tensor, Tensor | None]) -> None:
    for name, operand, zero in rows:
        require_dtype(name, operand, *INT8)
        require_dtype(f"{name}_zero_point", zero, operand.dtype)


def require_filter_numbers(name: str, operand: Tensor | None, count: int) -> None:
    """Require that a scale or zero point is one number, or one for each of ``count`` filters.

    Args:
        name: The operand's name in the error.
        operand: The scale or zero point; None passes.
        count: Number of filters.

    Raises:
        ShapeError: It has another shape.
    """
    if operand is None or operand.rank == 0:
        return
    fits = operand.rank == 1 and (operand.shape[0] == 1 or operand.shape[0] == count)
    require(fits, "{} has shape {}; it needs 1 or {} elements", name, list(operand.shape), count)


def _require_per_row(name: str, operand: Tensor | None, shape: Sequence[int]) -> None:
    """Require one number for the whole left side ``[..., M, K]``, or one for each of its rows."""
    rows = shape[-2] if len(shape) > 1 else 1
    _require_along(name, operand, rows, (*shape[:-1], 1), "rows")


def _require_per_column(name: str, operand: Tensor | None, shape: Sequence[int]) -> None:
    """Require one number for the whole right side ``[..., K, N]``, or one for each column."""
    columns = shape[-1] if len(shape) > 1 else 1
    _require_along(name, operand, columns, (*shape[:-2], 1, columns), "columns")


def _require_along(
    name: str, operand: Tensor | None, count: int, full: Sequence[int], noun: str
) -> None:
    if operand is None or operand.rank == 0:
        return
    if operand.rank == 1:
        size = operand.shape[0]
        require(size == 1 or size == count, "{} has {} elements for {} {}", name, size, count, noun)
        return
    require(
        operand.rank == len(full) and all(a == b for a, b in zip(operand.shape, full, strict=True)),
        "{} has shape {} for {} {}; it is a scalar, a vector, or has shape {}",
        name,
        list(operand.shape),
        count,
        noun,
        list(full),
    )
