"""Convolutions: requirements of operands, and shape inference.

CausalConvWithState has no lowering: on CPU and OPENCL the pass "ExpandFunctions" replaces it by the
function body of the standard, which has a Conv.
"""

from __future__ import annotations

from subgraph.dtypes import FLOATS
from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.inference import infer_by_onnx
from subgraph.operators.operator import declare
from subgraph.operators.requirements import (
    Tensor,
    decoded,
    require,
    require_choice,
    require_dtype,
    require_numbers,
    require_rank,
    require_shape,
    require_whole_number,
)
from subgraph.ops.elementwise.op import Types, Values, tensor
from subgraph.ops.pool.windows import (
    INT8,
    MAX_EXTENT,
    require_filters,
    require_image,
    require_kernel_shape,
    window_counts,
    windows_of,
)
from subgraph.ops.unfold.op import deform_conv_operands

from . import reference


def conv_operands(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Require that filters and bias fit the input's channels (ONNX Conv, opset 1 to 22).

    Args:
        node: The node; ``group`` and the attributes of windows are checked.
        x: Input, ``[N, C, *spatial]``, of a float dtype.
        w: Filters, ``[M, C / group, *kernel]``.
        bias: ``[M]``, or None.

    Raises:
        ShapeError: They do not fit.
    """
    require_dtype("X", x, *FLOATS)
    for name, operand in (("W", w), ("B", bias)):
        require_dtype(name, operand, x.dtype)
    require_filters(node, x, w, bias)


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


def conv_transpose_operands(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Require that filters and bias fit the input's channels (ONNX ConvTranspose, opset 1 to 22).

    ``output_shape`` may begin with the sizes of the batch and of the channels, which are ignored.

    Args:
        node: The node.
        x: Input, ``[N, C, *spatial]``, of a float dtype.
        w: Filters, ``[C, M / group, *kernel]``.
        bias: ``[M]``, or None.

    Raises:
        ShapeError: They do not fit, or the result would have a negative size.
    """
    require_dtype("X", x, *FLOATS)
    for name, operand in (("W", w), ("B", bias)):
        require_dtype(name, operand, x.dtype)
    require_image(x)
    shapes = list(w.shape), list(x.shape)
    require(w.rank == x.rank, "filters of shape {} for an input of shape {}", *shapes)
    require(w.shape[0] == x.shape[1], "filters of shape {} for an input of shape {}", *shapes)
    group = require_whole_number(node, "group", 1, least=1)
    require(x.shape[1] % group == 0, "{} channels do not divide into {} groups", x.shape[1], group)
    require_shape("B", bias, (w.shape[1] * group,), "one for each output channel")
    require_kernel_shape(node, w.shape[2:])
    count = x.rank - 2
    windows = windows_of(node, count)
    extra = require_numbers(node, "output_padding", count, 0, 0, MAX_EXTENT)
    asked = node.attrs.get("output_shape")
    if asked:
        require_numbers(
            node, "output_shape", count + 2 if len(asked) > count else count, 0, 0, MAX_EXTENT
        )
    for k, (size, taps) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        require(size >= 1, "X has shape {}: no elements to take filters times", shapes[1])
        reach = (taps - 1) * windows.dilations[k] + 1
        require(
            taps >= 1 and reach <= MAX_EXTENT,
            "filters of shape {} have no taps, or too far apart",
            w.shape,
        )
        made = windows.strides[k] * (size - 1) + extra[k] + reach - sum(windows.pads[k])
        fits = bool(asked) or windows.auto != "NOTSET" or made >= 0
        require(fits, "{} elements in dimension {} after pads {}", made, k, windows.pads[k])


def causal_convolution_operands(
    node: Node,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
) -> None:
    """Raise ShapeError unless each channel has a filter, and the state its size (opset 27).

    Args:
        node: The CausalConvWithState node.
        x: Input, [batch, channels, steps].
        weight: Filters, [channels, 1, taps].
        bias: A number for each channel; None: 0.
        past_state: The inputs before the first step, [batch, channels, taps - 1]; None: 0.
    """
    require_rank("input", x, 3)
    require_rank("weight", weight, 3)
    batch, channels, _ = x.shape
    taps = weight.shape[2]
    require_shape("weight", weight, (channels, 1, taps), "one filter for each channel")
    require(taps >= 1, "the filters are empty")
    require(x.shape[2] >= 1, "the input has shape {}: no elements to filter", x.shape)
    require_shape("bias", bias, (channels,), "one for each channel")
    state = (batch, channels, taps - 1)
    require_shape("past_state", past_state, state, "as many places as a filter has before its last")
    require_choice(node, "activation", "none", "none", "silu", "swish")


def convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer ``[N, M, *spatial]`` of Conv: a channel for each filter, a pixel for each window.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    x = tensor(types[0])
    return [None if x is None else _filtered(node, x.dtype, types[0], types[1])]


def convolution_integer(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of ConvInteger: the shape of Conv, int32.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    return [_filtered(node, "int32", types[0], types[1])]


def qlinear_convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of QLinearConv: the shape of Conv, the dtype of the result's zero point.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    zero = tensor(types[7])
    return [None if zero is None else _filtered(node, zero.dtype, types[0], types[3])]


def _filtered(
    node: Node, dtype: str, image: ValueType | None, filters: ValueType | None
) -> TensorType:
    x, w = tensor(image), tensor(filters)
    if x is None or x.shape is None or w is None or w.shape is None:
        return TensorType(dtype)
    if len(x.shape) < 3 or len(w.shape) != len(x.shape):
        raise ShapeError(f"filters of rank {len(w.shape)} for an input of rank {len(x.shape)}")
    return TensorType(dtype, (x.shape[0], w.shape[0], *window_counts(node, x.shape, w.shape[2:])))


def convolution_transpose(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of ConvTranspose.

    ``auto_pad=VALID`` and unknown sizes are left to the inference of the onnx package. SAME gives
    ``stride`` pixels for each of the input, or all if there are fewer, as onnx.reference and ONNX
    Runtime have it; onnx's inference adds ``output_padding`` to that. An ``output_shape`` is taken
    as it is; onnx's inference leaves out sizes that are smaller than the input's.

    Args:
        node: The node, with the attributes of windows.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs.
    """
    x, w = tensor(types[0]), tensor(types[1])
    auto = decoded(node.attrs.get("auto_pad", "NOTSET"))
    if x is None or w is None:
        return infer_by_onnx(node, types, values)
    sizes, taps = list(x.shape or ()), list(w.shape or ())
    groups = int(node.attrs.get("group", 1))
    asked = node.attrs.get("output_shape")
    if asked and len(sizes) >= 3:
        made = taps[1] if len(taps) == len(sizes) else None
        channels = made * groups if isinstance(made, int) else None
        return [TensorType(x.dtype, (sizes[0], channels, *map(int, asked[2 - len(sizes) :])))]
    if asked or auto == "VALID":
        return infer_by_onnx(node, types, values)
    known = all(isinstance(dim, int) for dim in (*sizes[1:], *taps))
    if not known or len(sizes) != len(taps) or len(sizes) < 3 or sizes[1] != taps[0]:
        return infer_by_onnx(node, types, values)
    count = len(sizes) - 2
    strides, dilations = (
        require_numbers(node, name, count, 1) for name in ("strides", "dilations")
    )
    pads, more = (
        require_numbers(node, "pads", 2 * count, 0),
        require_numbers(node, "output_padding", count, 0),
    )
    pixels: list[Dim] = []
    for k, (size, tap) in enumerate(zip(sizes[2:], taps[2:], strict=True)):
        assert isinstance(size, int), "sizes are known here"
        assert isinstance(tap, int), "sizes are known here"
        full = strides[k] * (size - 1) + more[k] + (tap - 1) * dilations[k] + 1
        padded = full - pads[k] - pads[count + k]
        pixels.append(padded if auto == "NOTSET" else min(strides[k] * size, full))
    channels = taps[1] * groups if isinstance(taps[1], int) else None
    return [TensorType(x.dtype, (sizes[0], channels, *pixels))]


# The operators of this family, each in all its versions.
declare("CausalConvWithState", requires=causal_convolution_operands)
declare("Conv", requires=conv_operands, infer=convolution, compute=reference.conv)
declare(
    "ConvTranspose",
    requires=conv_transpose_operands,
    infer=convolution_transpose,
    compute=reference.conv_transpose,
)
declare("DeformConv", requires=deform_conv_operands, infer=convolution)
