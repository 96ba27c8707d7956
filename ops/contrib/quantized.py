"""ONNX Runtime's operators on quantized tensors, as its quantizer writes them ("QOperator").

Each is its float operator between DequantizeLinear and QuantizeLinear, as ONNX Runtime's
documentation defines it. Devices with integer kernels fuse that (``passes/fuse/quantized.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.recurrent.op import require_per_column

from .transformer import channels_first, softmax_from

Given = Sequence[Value | None]


def dequantize(call: Call, quantized: Given) -> Any:
    """Return the floats of a quantized value: bytes, scale and zero point (or None)."""
    return call.DequantizeLinear(*quantized, requires="one_scale")


def quantize(call: Call, x: Any, scale: Any, zero: Any, dtype: str) -> Any:
    """Return a quantized value.

    Args:
        call: The node.
        x: The floats.
        scale: The scale.
        zero: The zero point; None: 0.
        dtype: ``"uint8"`` or ``"int8"``, that of the zero point.
    """
    # Without a zero point the standard's operator returns uint8.
    if zero is None and dtype != "uint8":
        zero = call.constant(0, dtype)
    return call.QuantizeLinear(x, scale, zero, requires="one_scale")


def _requantized(
    call: Call,
    operator: Callable[[Any], Any] | Callable[[Any, Any], Any],
    given: Sequence[Any] | None = None,
) -> list[Value | None]:
    """Return ``operator`` of dequantized inputs, quantized.

    Args:
        call: The node.
        operator: A function of the floats of each input.
        given: Bytes, scale and zero point of each input, then scale and zero point of the result;
            None: the node's inputs.
    """
    *operands, scale, zero = call.inputs if given is None else given
    floats = [dequantize(call, operands[k : k + 3]) for k in range(0, len(operands), 3)]
    return [quantize(call, operator(*floats), scale, zero, call.dtype(operands[0]))]


def _channels_first(call: Call, x: Any, operator: Callable[[Any], Any]) -> Any:
    return channels_first(call, x, operator, last=call.attribute("channels_last"))


_BINARY_FORM = "A, A_scale, A_zero_point?, B, B_scale, B_zero_point?, C_scale, C_zero_point? -> C"


@function("QLinearAdd", _BINARY_FORM)
def qlinear_add(call: Call) -> Results:
    """Add."""
    return _requantized(call, call.Add)


@function("QLinearMul", _BINARY_FORM)
def qlinear_mul(call: Call) -> Results:
    """Multiply."""
    return _requantized(call, call.Mul)


@function("QLinearSigmoid", "X, X_scale, X_zero_point?, Y_scale, Y_zero_point? -> Y")
def qlinear_sigmoid(call: Call) -> Results:
    """Sigmoid."""
    return _requantized(call, call.Sigmoid)


@function("QLinearLeakyRelu", "X, X_scale, X_zero_point?, Y_scale, Y_zero_point? -> Y", alpha=0.01)
def qlinear_leaky_relu(call: Call) -> Results:
    """LeakyRelu."""
    return _requantized(call, lambda x: call.LeakyRelu(x, alpha=call.attribute("alpha")))


@function(
    "QLinearSoftmax", "X, X_scale, x_zero_point?, y_scale, y_zero_point -> Y", axis=-1, opset="int!"
)
def qlinear_softmax(call: Call) -> Results:
    """Softmax over an axis or, for opsets before 13, over it and all later ones."""
    axis = call.attribute("axis")

    if call.attribute("opset") >= 13:
        return _requantized(call, lambda x: call.Softmax(x, axis=axis))
    return _requantized(call, lambda x: softmax_from(call, x, axis))


@function(
    "QLinearAveragePool",
    "X, x_scale, x_zero_point?, y_scale, y_zero_point? -> Y",
    auto_pad="NOTSET",
    ceil_mode=0,
    channels_last=0,
    count_include_pad=0,
    kernel_shape="ints!",
    pads="ints",
    strides="ints",
)
def qlinear_average_pool(call: Call) -> Results:
    """Average over windows."""
    names = ("auto_pad", "ceil_mode", "count_include_pad", "kernel_shape", "pads", "strides")
    options = call.attributes(*names)
    if options["auto_pad"] != "NOTSET":
        # The standard allows no pads beside auto_pad, where ONNX Runtime ignores them.
        options["pads"] = None
    return _requantized(
        call, lambda x: _channels_first(call, x, lambda v: call.AveragePool(v, **options))
    )


@function(
    "QLinearGlobalAveragePool",
    "X, x_scale, x_zero_point, y_scale, y_zero_point -> Y",
    channels_last=0,
)
def qlinear_global_average_pool(call: Call) -> Results:
    """Average over each channel."""
    return _requantized(call, lambda x: _channels_first(call, x, call.GlobalAveragePool))


@function(
    "QLinearReduceMean",
    "data, data_scale, data_zero_point?, reduced_scale, reduced_zero_point? -> reduced",
    axes="ints!",
    keepdims="int!",
)
def qlinear_reduce_mean(call: Call) -> Results:
    """Average over axes."""
    axes, keep = list(call.attribute("axes")), call.attribute("keepdims")
    return _requantized(call, lambda x: call.ReduceMean(x, axes, keepdims=keep))


@function("QLinearConcat", "Y_scale, Y_zero_point, inputs* -> Y", axis="int!")
def qlinear_concat(call: Call) -> Results:
    """Concatenate inputs that have scales of their own."""
    scale, zero, *rest = call.inputs
    complete = len(rest) % 3 == 0 and None not in (*rest[::3], *rest[1::3])
    require(complete, "each input needs a scale and a zero point")

    def concat(*parts: Any) -> Any:
        return call.Concat(*parts, axis=call.attribute("axis"))

    return _requantized(call, concat, (*rest, scale, zero))


@function(
    "QLinearWhere",
    "condition, X, x_scale, x_zero_point, Y, y_scale, y_zero_point, z_scale, z_zero_point -> Z",
)
def qlinear_where(call: Call) -> Results:
    """Select elements of two inputs by a condition."""
    condition, *given = call.inputs
    return _requantized(call, lambda x, y: call.Where(condition, x, y), given)


@function(
    "QGemm",
    "A, a_scale, a_zero_point, B, b_scale, b_zero_point, C?, y_scale?, y_zero_point? -> Y",
    alpha=1.0,
    transA=0,
    transB=0,
)
def qgemm(call: Call) -> Results:
    """Multiply matrices; without y_scale the result is float.

    C has the scale of the products, B one scale or one for each column of the product.
    """
    a, a_scale, a_zero, b, b_scale, b_zero, c, y_scale, y_zero = call.inputs
    transpose_b, alpha = call.attribute("transB"), call.attribute("alpha")
    if alpha != 1.0:
        # Into the scale of A, so that the scale of C, which is that of the products, has the factor
        # too.
        a_scale = call.Mul(a_scale, alpha)
    left = call.DequantizeLinear(a, a_scale, a_zero, requires="one_scale")
    # Scales of B belong to columns of the product, which are rows of a transposed B.
    right = call.DequantizeLinear(b, b_scale, b_zero, axis=0 if transpose_b else 1)
    bias = None
    if c is not None:
        scale = call.Mul(a_scale, b_scale)
        one_scale, sizes = call.shape(b_scale) in ((), (1,)), call.shape(c)
        # A size that is not known may be 1; DequantizeLinear does not broadcast to the scales.
        if len(sizes) == 1 and (one_scale or (isinstance(sizes[0], int) and sizes[0] != 1)):
            bias = call.DequantizeLinear(c, scale, axis=0)
        else:
            bias = call.Mul(call.cast(c, "float32"), scale)
    result = call.Gemm(left, right, bias, transA=call.attribute("transA"), transB=transpose_b)
    if y_scale is None:
        return [result]
    dtype = "uint8" if y_zero is None else call.dtype(y_zero)
    return [quantize(call, result, y_scale, y_zero, dtype)]


@function(
    "QLinearConv",
    "x, x_scale, x_zero_point, w, w_scale, w_zero_point, y_scale, y_zero_point, B? -> y",
    auto_pad="NOTSET",
    channels_last=0,
    dilations="ints",
    group=1,
    kernel_shape="ints",
    pads="ints",
    strides="ints",
)
def qlinear_conv(call: Call) -> Results:
    """Convolve, with channels first or last."""
    names = ("auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    options = call.attributes(*names)
    rest = call.inputs[1:]
    return [_channels_first(call, call.inputs[0], lambda x: call.QLinearConv(x, *rest, **options))]


@function("DequantizeLinear", "x, x_scale, x_zero_point? -> y", axis="int")
@function("QuantizeLinear", "x, y_scale, y_zero_point? -> y", axis="int")
def as_standard(call: Call) -> Results:
    """Quantize or dequantize, as the standard does."""
    return call.as_standard()


def scaled_sums(
    call: Call, sums: Any, a_scale: Any, b_scale: Any, bias: Value | None, dtype: str
) -> Any:
    """Return integer sums scaled to floats, plus a bias.

    By the same operators as ONNX Runtime's ``quantize_dynamic``, so that they fuse alike.
    """
    scale = call.Mul(a_scale, b_scale)
    floats = call.Mul(call.cast(sums, dtype), scale, requires="into_first")
    return floats if bias is None else call.Add(floats, bias, requires="one_row")


def integer_to_float_operands(
    node: Node, _a: Tensor, _b: Tensor, _a_scale: Tensor, b_scale: Tensor, *_: Tensor | None
) -> None:
    """Raise ShapeError unless B has one scale, or one for each of its columns."""
    single = b_scale.rank < 2 or b_scale.shape[b_scale.rank - 2] == 1
    require(single, "b_scale has shape {}; it has one row", list(b_scale.shape))


def dynamic_quantize_operands(
    node: Node, _a: Tensor, _b: Tensor, b_scale: Tensor, *_: Tensor | None
) -> None:
    """Raise ShapeError unless B has one scale, or one for each of its columns."""
    integer_to_float_operands(node, _a, _b, b_scale, b_scale)


@function(
    "MatMulIntegerToFloat",
    "A, B, a_scale, b_scale, a_zero_point?, b_zero_point?, bias? -> Y",
    requires=integer_to_float_operands,
)
def matmul_integer_to_float(call: Call) -> Results:
    """Multiply quantized matrices, and scale."""
    a, b, a_scale, b_scale, a_zero, b_zero, bias = call.inputs
    sums = call.MatMulInteger(a, b, a_zero, b_zero)
    return [scaled_sums(call, sums, a_scale, b_scale, bias, call.dtype(a_scale))]


@function(
    "DynamicQuantizeMatMul",
    "A, B, b_scale, b_zero_point?, bias? -> Y",
    requires=dynamic_quantize_operands,
)
def dynamic_quantize_matmul(call: Call) -> Results:
    """Multiply A, quantized by its own range, by a quantized matrix."""
    a, b, b_scale, b_zero, bias = call.inputs
    bytes_, a_scale, a_zero = call.DynamicQuantizeLinear(a, outputs=3)
    sums = call.MatMulInteger(bytes_, b, a_zero, b_zero)
    return [scaled_sums(call, sums, a_scale, b_scale, bias, "float32")]


def dynamic_quantize_lstm_operands(
    node: Node, _x: Tensor, w: Tensor, r: Tensor, bias: Tensor | None, _lengths: Tensor | None,
    _h: Tensor | None, _c: Tensor | None, _p: Tensor | None, w_scale: Tensor, w_zero: Tensor,
    r_scale: Tensor, r_zero: Tensor,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights, scales and biases have the sizes of W and the states.

    Args:
        node: The DynamicQuantizeLSTM.
        w: [directions, elements, 4 * hidden].
        r: [directions, hidden, 4 * hidden].
        bias: [directions, 8 * hidden].
        w_scale: [directions] or [directions, 4 * hidden].
        w_zero: As ``w_scale``.
        r_scale: As ``w_scale``, of R.
        r_zero: As ``r_scale``.
    """
    require_rank("W", w, 3)
    require_rank("R", r, 3)
    require_dtype("R", r, w.dtype)
    directions, gates, hidden = w.shape[0], w.shape[2], r.shape[1]
    require_shape("R", r, (directions, hidden, 4 * hidden), "of directions and hidden sizes")
    require(gates == 4 * hidden, "W has {} columns for states of {}", gates, hidden)
    stated = node.attrs.get("hidden_size")
    require(stated is None or stated == hidden, "hidden_size is {}, R has {}", stated, hidden)
    require_shape("B", bias, (directions, 2 * gates), "those of inputs and states")
    numbers = {"W_scale": w_scale, "W_zero_point": w_zero}
    numbers |= {"R_scale": r_scale, "R_zero_point": r_zero}
    require_per_column(numbers, directions, hidden)


@function(
    "DynamicQuantizeLSTM",
    "X, W, R, B?, sequence_lens?, initial_h?, initial_c?, P?, W_scale, W_zero_point, R_scale, "
    "R_zero_point -> Y?, Y_h?, Y_c?",
    requires=dynamic_quantize_lstm_operands,
    activation_alpha="floats",
    activation_beta="floats",
    activations="strings",
    clip="float",
    direction="forward",
    hidden_size="int",
    input_forget=0,
)
def dynamic_quantize_lstm(call: Call) -> Results:
    """LSTM with quantized weights: inputs are quantized by one range, states in each step.

    W is [directions, inputs, 4 * hidden], with scales and zero points for each direction or column.
    The results are those of ONNX Runtime with one thread.
    """
    x, w, r, biases, *rest = call.inputs[:8]
    w_scale, w_zero, *of_r = call.inputs[8:]
    directions, inputs, gates = (call.size(w, axis) for axis in range(3))
    columns = directions * gates

    def flat(value: Any) -> Any:
        """Return a number for each column of all directions."""
        if call.rank(value) == 1:
            value = call.Unsqueeze(value, [1])
        complete = call.Expand(value, [directions, gates])
        return call.Reshape(complete, [columns])

    # The weights of all directions stand side by side, so that one product serves all directions
    # and steps.
    transposed = call.Reshape(call.Transpose(w, perm=(1, 0, 2)), [inputs, columns])
    lengths = rest[0]
    if lengths is not None:
        # Steps after the end of a sequence must not extend the range.
        steps = call.Squeeze(call.Shape(x, start=0, end=1), [0])
        step = call.Unsqueeze(call.Range(0, steps, 1), [1])
        inside = call.Less(step, call.cast(lengths, "int64"))
        x = call.Where(call.Unsqueeze(inside, [2]), x, call.constant(0, "float32"))
    bytes_, scale, zero = call.DynamicQuantizeLinear(x, outputs=3)
    sums = call.MatMulInteger(bytes_, transposed, zero, flat(w_zero))
    bias = None
    if biases is not None:
        both = call.Reshape(biases, [directions, 2, gates])
        # ONNX adds the bias of inputs and that of states to the same gates, so that their sum is
        # added once.
        both = call.ReduceSum(both, [1], keepdims=0)
        bias = call.Reshape(both, [columns])
    products = scaled_sums(call, sums, scale, flat(w_scale), bias, "float32")
    names = ("activation_alpha", "activation_beta", "activations", "clip", "direction")
    options = call.attributes(*names, "input_forget")
    states = call.QuantizedLSTM(
        products, r, *of_r, *rest, outputs=3, domain=INTERNAL_DOMAIN, **options
    )
    return list(states)
