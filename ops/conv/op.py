"""Convolutions and pools: what operands must satisfy, and shape rules."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, Shape, TensorType, ValueType
from subgraph.operators.operator import infer_by_onnx, shape_rule
from subgraph.operators.requirements import (
    FLOATS,
    Tensor,
    checked_numbers,
    numbers,
    require,
    require_dtype,
    require_shape,
    requires,
    whole_number,
)
from subgraph.ops.elementwise.expressions import text
from subgraph.ops.elementwise.op import Types, Values, tensor

# Strides, dilations, taps and pads are at most this: positions are counted in 64 bits.
MOST = 2**31 - 1
_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_BYTES = ("int8", "uint8")


@requires("Conv")
def conv_operands(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Raise ShapeError unless filters and bias fit the input's channels (ONNX Conv, 1 to 22)."""
    require_dtype("X", x, *FLOATS)
    for name, operand in (("W", w), ("B", bias)):
        require_dtype(name, operand, x.dtype)
    require_filters(node, x, w, bias)


@requires("ConvInteger")
def conv_integer_operands(
    node: Node, x: Tensor, w: Tensor, x_zero: Tensor | None = None, w_zero: Tensor | None = None
) -> None:
    """Raise ShapeError unless filters and zero points fit the input (ONNX ConvInteger, 10)."""
    _require_bytes(("x", x, x_zero), ("w", w, w_zero))
    require_filters(node, x, w, None)
    require_filter_numbers("x_zero_point", x_zero, 1)
    require_filter_numbers("w_zero_point", w_zero, w.shape[0])


@requires("QLinearConv")
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
    """Raise ShapeError unless filters, scales and zero points fit the input (QLinearConv, 10)."""
    _require_bytes(("x", x, x_zero), ("w", w, w_zero), ("y", y_zero, y_zero))
    require_dtype("B", bias, "int32")
    require_filters(node, x, w, bias)
    for name, operand in (("x_scale", x_scale), ("w_scale", w_scale), ("y_scale", y_scale)):
        require_dtype(name, operand, "float32")
        require_filter_numbers(name, operand, w.shape[0] if name == "w_scale" else 1)
    for name, zero in (("x_zero_point", x_zero), ("y_zero_point", y_zero)):
        require_filter_numbers(name, zero, 1)
    require_filter_numbers("w_zero_point", w_zero, w.shape[0])


def _require_bytes(*rows: tuple[str, Tensor, Tensor | None]) -> None:
    for name, operand, zero in rows:
        require_dtype(name, operand, *_BYTES)
        require_dtype(f"{name}_zero_point", zero, operand.dtype)


def require_filter_numbers(name: str, operand: Tensor | None, count: int) -> None:
    """Require that a scale or zero point is one number, or one for each of ``count`` filters."""
    if operand is None or operand.rank == 0:
        return
    fits = operand.rank == 1 and (operand.shape[0] == 1 or operand.shape[0] == count)
    require(fits, "{} has shape {}; it needs 1 or {} elements", name, list(operand.shape), count)


def require_filters(node: Node, x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    """Require that filters fit the channels of an image and its sizes, and the bias the filters."""
    require_image(x)
    require(w.rank == x.rank, "the filters {} and the input {} differ in rank", w, x)
    group = whole_number(node, "group", 1, least=1)
    outputs, taken, channels = w.shape[0], w.shape[1], x.shape[1]
    if not channels == taken * group:
        raise ShapeError(f"{channels} channels; the filters take {taken} in each of {group} groups")
    if not outputs % group == 0:
        raise ShapeError(f"{outputs} filters do not divide into {group} groups")
    require_shape("B", bias, w.shape[:1], "one for each filter")
    _require_kernel(node, w.shape[2:])
    require_windows(node, x.shape[2:], w.shape[2:])


def require_image(x: Tensor) -> None:
    """Require a batch, channels and at least one dimension of pixels."""
    require(x.rank >= 3, "the input is {}; it needs rank 3 or more", x)


def _require_kernel(node: Node, sizes: tuple[int, ...]) -> None:
    """Require that ``kernel_shape``, where it is given, is the size of the filters."""
    stated = node.attrs.get("kernel_shape")
    if stated and tuple(stated) != sizes:
        raise ShapeError(f"kernel_shape is {list(stated)}, the filters have {list(sizes)}")


@attrs.frozen
class Windows:
    """The attributes that say where windows lie, within their ranges.

    Attributes:
        strides: From window to window along each dimension.
        dilations: From tap to tap.
        pads: Before and after each dimension, by the attribute ``auto_pad`` 0.
        auto: That attribute.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    auto: str


def windows_of(node: Node, count: int) -> Windows:
    """Return the attributes of the windows over so many dimensions.

    Raises:
        ShapeError: one is out of its range, or has another count of numbers.
    """
    held = node.attrs
    strides, dilations, pads = held.get("strides"), held.get("dilations"), held.get("pads")
    return _windows(
        count,
        text(held.get("auto_pad", "NOTSET")),
        tuple(strides) if strides else None,
        tuple(dilations) if dilations else None,
        tuple(pads) if pads else None,
    )


@lru_cache(1024)
def _windows(
    count: int,
    auto: str,
    strides: tuple[int, ...] | None,
    dilations: tuple[int, ...] | None,
    pads: tuple[int, ...] | None,
) -> Windows:
    """Return what attributes say; plans ask again and again."""
    require(auto in _AUTO_PADS, "auto_pad is {!r}; it must be one of {}", auto, _AUTO_PADS)
    around = checked_numbers("pads", pads, 2 * count, 0, 0, MOST)
    if auto != "NOTSET":
        around = [0] * 2 * count
    return Windows(
        tuple(checked_numbers("strides", strides, count, 1, 1, MOST)),
        tuple(checked_numbers("dilations", dilations, count, 1, 1, MOST)),
        tuple(zip(around[:count], around[count:], strict=True)),
        auto,
    )


def require_windows(node: Node, sizes: Sequence[int], kernel: Sequence[int]) -> None:
    """Require that windows fit into an image, by the attributes that Conv and the pools have.

    Args:
        node: The node.
        sizes: Sizes of the image.
        kernel: Taps of a window along each of its dimensions.

    Raises:
        ShapeError: an attribute is out of its range, or no window fits.
    """
    given = windows_of(node, len(sizes))
    free = given.auto.startswith("SAME")
    rows = zip(sizes, kernel, given.dilations, given.pads, strict=True)
    for size, taps, dilation, (before, after) in rows:
        reach = (taps - 1) * dilation + 1
        fits = free or size + before + after >= reach
        if not (fits and taps >= 1 and reach <= MOST):
            raise ShapeError(
                f"a window of {taps} taps, {dilation} apart, does not fit into {size} elements "
                f"with pads {before}, {after}"
            )


@requires("ConvTranspose")
def conv_transpose_operands(node: Node, x: Tensor, w: Tensor, bias: Tensor | None = None) -> None:
    """Raise ShapeError unless filters and bias fit the input's channels (ConvTranspose, 1 to 22).

    The result has one channel for each of the filters of each group, and ``output_shape`` may
    begin with the sizes of the batch and of the channels, which say nothing new.
    """
    require_dtype("X", x, *FLOATS)
    for name, operand in (("W", w), ("B", bias)):
        require_dtype(name, operand, x.dtype)
    require_image(x)
    shapes = list(w.shape), list(x.shape)
    require(w.rank == x.rank, "filters of shape {} for an input of shape {}", *shapes)
    require(w.shape[0] == x.shape[1], "filters of shape {} for an input of shape {}", *shapes)
    group = whole_number(node, "group", 1, least=1)
    require(x.shape[1] % group == 0, "{} channels do not divide into {} groups", x.shape[1], group)
    require_shape("B", bias, (w.shape[1] * group,), "one for each output channel")
    _require_kernel(node, w.shape[2:])
    count = x.rank - 2
    given = windows_of(node, count)
    extra = numbers(node, "output_padding", count, 0, 0, MOST)
    asked = node.attrs.get("output_shape")
    if asked:
        numbers(node, "output_shape", count + 2 if len(asked) > count else count, 0, 0, MOST)
    for k, (size, taps) in enumerate(zip(x.shape[2:], w.shape[2:], strict=True)):
        reach = (taps - 1) * given.dilations[k] + 1
        require(
            taps >= 1 and reach <= MOST,
            "filters of shape {} have no taps, or too far apart",
            w.shape,
        )
        made = given.strides[k] * (size - 1) + extra[k] + reach - sum(given.pads[k])
        fits = bool(asked) or given.auto != "NOTSET" or made >= 0
        require(fits, "{} elements in dimension {} after pads {}", made, k, given.pads[k])


@requires("AveragePool", "LpPool", "MaxPool")
def pool_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless windows fit into the input (ONNX, 1 to 22)."""
    require_dtype("X", x, *FLOATS, *(_BYTES if node.op_type.endswith("MaxPool") else ()))
    require_image(x)
    require(bool(node.attrs.get("kernel_shape")), "kernel_shape is missing")
    count = x.rank - 2
    kernel = numbers(node, "kernel_shape", count, 1, 1, MOST)
    _require_pixels(x)
    require_windows(node, x.shape[2:], kernel)
    whole_number(node, "storage_order", 0, least=0, most=1)
    _require_power(node)


@requires("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool")
def global_pool_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless there are channels, of one element at least (ONNX, 1 to 22)."""
    require_dtype("X", x, *FLOATS)
    require(x.rank >= 2, "the input has shape {}; it needs rank 2 or more", list(x.shape))
    _require_pixels(x)
    _require_power(node)


def _require_pixels(x: Tensor) -> None:
    for size in x.shape[2:]:
        require(size >= 1, "the input is {}: no elements to pool", x)


def _require_power(node: Node) -> None:
    """Require a p-norm, of p above zero; the first version has it as a float."""
    power = node.attrs.get("p", 2)
    require(isinstance(power, int | float) and power > 0, "p is {!r}; it must be above 0", power)


def _spatial(node: Node, shape: Shape, kernel: Sequence[Dim]) -> list[Dim]:
    """Return the sizes of what windows give over the dimensions from the third on."""
    count = len(shape) - 2
    given = windows_of(node, count)
    ceil = bool(node.attrs.get("ceil_mode", 0))
    found: list[Dim] = []
    same_size = given.auto.startswith("SAME")
    for k, (size, taps) in enumerate(zip(shape[2:], kernel, strict=True)):
        stride = given.strides[k]
        if same_size:
            same = size if stride == 1 else None
            found.append(-(-size // stride) if isinstance(size, int) else same)
        elif not isinstance(taps, int):
            found.append(None)
        else:
            reach = (taps - 1) * given.dilations[k] + 1
            found.append(_count(size, reach, stride, *given.pads[k], ceil))
    return found


def _count(size: Dim, reach: int, stride: int, before: int, after: int, ceil: bool) -> Dim:
    """Return how many windows fit into one dimension."""
    if not isinstance(size, int):
        return size if stride == 1 and before + after == reach - 1 else None
    room = size + before + after - reach
    if room < 0:
        raise ShapeError(
            f"a window of {reach} does not fit into {size} with pads {before}, {after}"
        )
    count = room // stride + 1
    # A last window begins inside the input or before it, never in the pads behind.
    if ceil and room % stride and count * stride < size + before:
        count += 1
    return count


@shape_rule("Conv", "DeformConv")
def convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give one channel for each filter, and as many places as filters fit."""
    x = tensor(types[0])
    return [None if x is None else _filtered(node, x.dtype, types[0], types[1])]


@shape_rule("ConvInteger")
def convolution_of_bytes(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """As Conv, of bytes: with sums of 32 bits."""
    return [_filtered(node, "int32", types[0], types[1])]


@shape_rule("QLinearConv")
def qlinear_convolution(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """As Conv; the dtype is that of the result's zero point."""
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
    return TensorType(dtype, (x.shape[0], w.shape[0], *_spatial(node, x.shape, w.shape[2:])))


@shape_rule("ConvTranspose")
def transposed(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give room for the filters of all places; other ways of saying the size are left to onnx."""
    x, w = tensor(types[0]), tensor(types[1])
    auto = text(node.attrs.get("auto_pad", "NOTSET"))
    if x is None or w is None or auto != "NOTSET" or node.attrs.get("output_shape"):
        return infer_by_onnx(node, types, values)
    sizes, taps = list(x.shape or ()), list(w.shape or ())
    known = all(isinstance(dim, int) for dim in (*sizes[1:], *taps))
    if not known or len(sizes) != len(taps) or len(sizes) < 3 or sizes[1] != taps[0]:
        return infer_by_onnx(node, types, values)
    groups = int(node.attrs.get("group", 1))
    count = len(sizes) - 2
    strides, dilations = (numbers(node, name, count, 1) for name in ("strides", "dilations"))
    pads, more = numbers(node, "pads", 2 * count, 0), numbers(node, "output_padding", count, 0)
    places: list[Dim] = [
        strides[k] * (size - 1) + more[k] + (tap - 1) * dilations[k] + 1 - pads[k] - pads[count + k]
        for k, (size, tap) in enumerate(zip(sizes[2:], taps[2:], strict=True))
        if isinstance(size, int) and isinstance(tap, int)
    ]
    channels = taps[1] * groups if isinstance(taps[1], int) else None
    return [TensorType(x.dtype, (sizes[0], channels, *places))]


@shape_rule("AveragePool", "LpPool", "MaxPool")
def pool(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give as many places as windows fit; MaxPool's second output has their indices."""
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    if len(x.shape) < 3:
        raise ShapeError(f"a pool over an input of rank {len(x.shape)}")
    kernel = [int(v) for v in node.attrs["kernel_shape"]]
    shape = (*x.shape[:2], *_spatial(node, x.shape, kernel))
    return [TensorType(x.dtype, shape), TensorType("int64", shape)]


@shape_rule("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool")
def whole(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give one place for each channel."""
    x = tensor(types[0])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)]
    return [TensorType(x.dtype, (*x.shape[:2], *(1 for _ in x.shape[2:])))]
