"""Convolutions: requirements of operands, and shape inference."""

from __future__ import annotations

from subgraph.dtypes import FLOATS
from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.batch_axes import along
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
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import Types, Values, first_type, tensor
from subgraph.ops.pool.windows import (
    MAX_EXTENT,
    convolution,
    require_filters,
    require_image,
    require_kernel_shape,
    windows_of,
)
from subgraph.ops.shared.half_precision import in_float32

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


def fused_conv_operands(
    node: Node, x: Tensor, w: Tensor, b: Tensor | None = None, r: Tensor | None = None
) -> None:
    """Require a bias of one number per output channel, and a residual of the result's shape.

    FusedConv is ``act(Conv(X, W, B) + R)``, with the attributes of Conv and those of an activation
    (see `subgraph.ops.shared.activations`). The Add that was fused would broadcast B and R;
    the kernel does not.

    Args:
        node: The FusedConv.
        x: Input, ``[N, C, *spatial]``.
        w: Filters, ``[M, C / group, *kernel]``.
        b: Bias, ``[M]``, or None.
        r: Residual, of the result's shape and x's dtype, or None.

    Raises:
        ShapeError: They do not fit.
    """
    require_shape("B", b, w.shape[:1], "one for each output channel")
    if r is None:
        return
    require_dtype("R", r, x.dtype)
    own = convolution(node, [TensorType(x.dtype, x.shape), TensorType(w.dtype, w.shape)], ())[0]
    assert isinstance(own, TensorType), "a convolution gives a tensor"
    require_shape("R", r, own.sizes, "the result's")


def added_weights(node: Node, w: Tensor, added: Tensor | None = None) -> None:
    """Require a weight that fits into another one, or one factor for each output channel.

    AddConvWeights is the weight of the convolution that computes the sum of the results of two, or
    of one and of its input, scaled or as it is. The attribute ``offset`` is the tap of W at which
    the other weight begins, or that reads the pixel at the place of the result.

    Args:
        node: The AddConvWeights.
        w: Filters, ``[M, C / group, *kernel]``.
        added: Smaller filters, ``[M, C / group, *kernel]``, of w's dtype; factors, ``[M]``; or
            None, factors of 1.

    Raises:
        ShapeError: They do not fit.
    """
    offset = [int(tap) for tap in node.attrs["offset"]]
    sizes = [1] * len(offset)
    if added is not None:
        require_dtype("the added weight", added, w.dtype)
        filters = w.shape[: min(2, added.rank)]
        sizes = list(added.shape[2:]) or sizes
        own = (*filters, *added.shape[2:])
        require_shape("the added weight", added, own, "as many filters as W has")
    fits = len(sizes) == len(offset) == w.rank - 2
    fits = fits and all(
        tap >= 0 and tap + size <= own
        for tap, size, own in zip(offset, sizes, w.shape[2:], strict=True)
    )
    require(fits, "the added weight, {}, lies at tap {} of W, {}", sizes, offset, w)


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
    pads = require_numbers(node, "pads", 2 * count, 0)
    more = require_numbers(node, "output_padding", count, 0)
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
declare("CausalConvWithState", requires=causal_convolution_operands, by_body=True, batch=along(0))
declare(
    "Conv",
    requires=conv_operands,
    infer=convolution,
    compute=in_float32(reference.conv),
    grows=True,
    batch=along(0),
)
declare(
    "ConvTranspose",
    requires=conv_transpose_operands,
    infer=convolution_transpose,
    compute=reference.conv_transpose,
    grows=True,
    batch=along(0),
)
declare(
    "AddConvWeights",
    domain=INTERNAL_DOMAIN,
    requires=added_weights,
    infer=first_type,
    compute=reference.add_conv_weights,
)
declare("FusedConv", domain=INTERNAL_DOMAIN, requires=fused_conv_operands)
