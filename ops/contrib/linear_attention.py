"""ONNX Runtime's operators of decoders with a recurrent state (Qwen3.5, Qwen3-Next, Kimi, Mamba).

Linear attention keeps a matrix for each head instead of a cache of keys and values. The standard
has its operators since opset 27; these are their older forms, with further options.
"""

from __future__ import annotations

import math
from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
    require_whole_number,
)
from subgraph.ops.attention.decoding import UPDATE_RULES, require_heads, require_rule, require_split

_OPSET = 27  # of LinearAttention in the standard
END = (1 << 63) - 1  # the end of a dimension, for Slice


def require_causal_filters(
    node: Node, x: Tensor, weight: Tensor, bias: Tensor | None, channels: int
) -> int:
    """Require filters of a causal convolution; return the steps that they reach back.

    Args:
        node: The node: ``activation``, ``dilation``.
        x: What is filtered.
        weight: Filters, [channels, 1, taps].
        bias: A number for each channel.
        channels: Number of channels.
    """
    require_rank("weight", weight, 3)
    taps = weight.shape[2]
    require_dtype("weight", weight, x.dtype)
    require_shape("weight", weight, (channels, 1, taps), "a filter for each channel")
    require(taps >= 1, "the filters are empty")
    require_shape("bias", bias, (channels,), "one for each channel")
    require_choice(node, "activation", "none", "none", "silu", "swish")
    return (taps - 1) * require_whole_number(node, "dilation", 1, least=1, most=1 << 24)


def causal_convolution_operands(
    node: Node,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past: Tensor | None = None,
) -> None:
    """Raise ShapeError unless each channel has a filter, and the state the steps before the first.

    Args:
        node: The CausalConvWithState.
        x: [batch, channels, steps]; with ``channels_last`` [batch, steps, ...], whose last
            dimensions are the channels.
        weight: Filters, [channels, 1, taps].
        bias: A number for each channel.
        past: ``(taps - 1) * dilation`` steps before the first, in the layout of ``x``.
    """
    last = require_whole_number(node, "channels_last", 0, least=0, most=1) == 1
    if last:
        require(x.rank >= 3, "input has rank {}, at least 3 is needed", x.rank)
    else:
        require_rank("input", x, 3)
    require(x.size != 0, "the input has shape {}: no elements to filter", x.shape)
    shape = x.shape[2:] if last else x.shape[1:2]
    channels = math.prod(shape)
    steps = require_causal_filters(node, x, weight, bias, channels)
    state = (x.shape[0], steps, *shape) if last else (x.shape[0], channels, steps)
    require_shape("past_state", past, state, "the steps that a filter reaches back")


@function(
    "CausalConvWithState",
    "input, weight, bias?, past_state? -> output, present_state, state_update?",
    requires=causal_convolution_operands,
    activation="none",
    channels_last=0,
    dilation=1,
    input_channel_offset=0,
    input_channels=0,
    ndim=1,
    state_channels_last=-1,
    state_length=0,
    state_update_capacity=0,
    state_window=0,
)
def causal_conv_with_state(call: Call) -> Results:
    """Convolve each channel with the steps up to the present one; return the last steps too."""
    x, weight, bias, past = call.inputs
    call.refuse_all_but(  # only CUDA implements others
        ndim=1, state_window=0, state_length=0, state_channels_last=-1, input_channels=0,
        input_channel_offset=0, state_update_capacity=0,
    )  # fmt: skip
    last, dilation = call.attribute("channels_last"), call.attribute("dilation")
    steps = (call.size(weight, 2) - 1) * dilation
    given: Any = x
    if last:
        channels = call.size(weight, 0)
        x, past = (p if p is None else _channels_second(call, p, channels) for p in (x, past))
    pads = [0, 0, steps, 0, 0, 0]
    padded = call.Pad(x, pads) if past is None else call.Concat(past, x, axis=2)
    y = call.Conv(padded, weight, bias, group=call.size(weight, 0), dilations=[dilation])
    if call.attribute("activation") != "none":
        y = call.Swish(y)
    present = call.Slice(padded, [-steps if steps else END], [END], [2])
    if not last:
        return [y, present, None]
    y = call.Reshape(call.Transpose(y, perm=(0, 2, 1)), call.Shape(given))
    sizes = call.Shape(given, start=2)
    state = call.Concat(call.Shape(given, end=1), [steps], sizes, axis=0)
    return [y, call.Reshape(call.Transpose(present, perm=(0, 2, 1)), state), None]


def _channels_second(call: Call, x: Any, channels: int) -> Any:
    """Return ``[batch, steps, ...]`` as ``[batch, channels, steps]``."""
    if call.rank(x) > 3:
        x = call.Reshape(x, call.Concat(call.Shape(x, end=2), [channels], axis=0))
    return call.Transpose(x, perm=(0, 2, 1))


def repeated(call: Call, x: Any, heads: int, times: int) -> Any:
    """Return ``[batch, tokens, heads * size]`` with each head ``times`` times in a row."""
    if times == 1:
        return x
    parts = call.Reshape(x, [0, 0, heads, 1, -1])
    return call.Reshape(call.Expand(parts, [1, 1, 1, times, 1]), [0, 0, -1])


def flat(call: Call, x: Any) -> Any:
    """Return ``[batch, tokens, ...]`` with all elements of a token in one dimension."""
    return call.Reshape(x, [0, 0, -1]) if call.rank(x) > 3 else x


def attend_tokens(
    call: Call, query: Any, key: Any, value: Any, state: Any, decay: Any, beta: Any,
    heads: tuple[int, int], scale: float,
) -> Any:  # fmt: skip
    """Return the results and the last state of the standard's LinearAttention.

    Decay and update rate are left out where the node's rule has none.

    Args:
        call: The node; ``update_rule``.
        query: [batch, tokens, heads * size].
        key: [batch, tokens, kv_heads * size].
        value: [batch, tokens, kv_heads * value_size].
        state: State to begin with, [batch, kv_heads, size, value_size], or None.
        decay: Logarithms of the factors of decay.
        beta: Update rates.
        heads: Numbers of heads of queries, and of keys and values.
        scale: Factor of the queries; 0: the standard's.
    """
    rule = call.attribute("update_rule")
    return call.LinearAttention(
        query,
        key,
        value,
        state,
        decay if "g" in UPDATE_RULES[rule] else None,
        beta if "d" in UPDATE_RULES[rule] else None,
        q_num_heads=heads[0],
        kv_num_heads=heads[1],
        scale=scale,
        update_rule=rule,
        outputs=2,
        opset=_OPSET,
    )


def linear_attention_operands(
    node: Node, query: Tensor, key: Tensor, value: Tensor, past: Tensor | None = None,
    decay: Tensor | None = None, beta: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless the heads of keys divide those of values, and heads can be shared.

    The standard's operator, in the body, checks the other sizes.

    Args:
        node: The LinearAttention.
        query: [batch, tokens, q_num_heads * size].
        key: [batch, tokens, key_heads * size].
        value: [batch, tokens, kv_num_heads * value_size].
        past: State to begin with.
        decay: Logarithms of the factors of decay.
        beta: Update rates.
    """
    heads, kv_heads = require_heads(node, "q_num_heads"), require_heads(node, "kv_num_heads")
    fits = heads % kv_heads == 0 or kv_heads % heads == 0
    require(fits, "{} heads of queries and {} of values: neither divides", heads, kv_heads)
    require_rank("query", query, 3)
    require_rank("key", key, 3)
    size = require_split("query", query, heads)
    fits = size >= 1 and key.shape[2] >= size and key.shape[2] % size == 0
    require(fits, "key {} has no heads of {} elements, as query", key, size)
    key_heads = key.shape[2] // size
    require(kv_heads % key_heads == 0, "{} heads of values, {} of keys", kv_heads, key_heads)
    require_rule(node, decay, beta)


@function(
    "LinearAttention",
    "query, key, value, past_state?, decay?, beta? -> output, present_state",
    requires=linear_attention_operands,
    chunk_size=64,
    kv_num_heads="int!",
    q_num_heads="int!",
    scale=0.0,
    state_window=0,
    update_rule="gated_delta",
)
def linear_attention(call: Call) -> Results:
    """Linear attention; heads of values may be more than those of queries and keys."""
    query, key, value, past, decay, beta = call.inputs
    call.refuse_all_but(state_window=0)
    heads, kv_heads = call.attribute("q_num_heads"), call.attribute("kv_num_heads")
    dtype = call.dtype(query)
    # The state may have more precision than the tokens.
    kind = dtype if past is None else call.dtype(past)
    q, k = call.cast(query, kind), call.cast(key, kind)
    v, decay, beta = (None if x is None else call.cast(x, kind) for x in (value, decay, beta))
    widths = call.shape(q)[2], call.shape(k)[2]
    # With unknown sizes there is a key for each head of values, which the standard's operator
    # checks in a run.
    if isinstance(widths[0], int) and isinstance(widths[1], int):
        key_heads = widths[1] // (widths[0] // heads)
        k = repeated(call, k, key_heads, kv_heads // key_heads)
    if kv_heads > heads:
        q = repeated(call, q, heads, kv_heads // heads)
        heads = kv_heads
    scale = call.attribute("scale")
    y, state = attend_tokens(call, q, k, v, past, decay, beta, (heads, kv_heads), scale)
    return [call.cast(y, dtype), state]


def linear_gate_operands(
    node: Node, a: Tensor, bias: Tensor, scale: Tensor, b: Tensor | None = None
) -> None:
    """Raise ShapeError unless each head has a bias and a scale, and both gates one shape.

    Args:
        node: The LinearAttentionGate.
        a: [..., heads].
        bias: [heads], float32.
        scale: [heads], float32.
        b: As ``a``.
    """
    require(a.rank >= 1, "a is a scalar")
    require_shape("dt_bias", bias, a.shape[-1:], "one for each head")
    require_shape("decay_scale", scale, a.shape[-1:], "one for each head")
    require_dtype("dt_bias", bias, "float32")
    require_dtype("decay_scale", scale, "float32")
    require_shape("b", b, a.shape, "that of a")


@function(
    "LinearAttentionGate",
    "a, dt_bias, decay_scale, b? -> decay, beta?",
    requires=linear_gate_operands,
)
def linear_attention_gate(call: Call) -> Results:
    """Decay ``decay_scale * softplus(a + dt_bias)`` and update rate ``sigmoid(b)``, in float32."""
    a, bias, scale, b = call.inputs
    dtype = call.dtype(a)
    decay = call.Mul(call.Softplus(call.Add(call.cast(a, "float32"), bias)), scale)
    beta = None if b is None else call.cast(call.Sigmoid(call.cast(b, "float32")), dtype)
    return [call.cast(decay, dtype), beta]


def gated_norm_operands(node: Node, x: Tensor, scale: Tensor, gate: Tensor) -> None:
    """Raise ShapeError unless rows are whole groups of the scale's size.

    Args:
        node: The GatedRMSNorm.
        x: [..., groups * size].
        scale: [size].
        gate: As ``x``.
    """
    require_rank("scale", scale, 1)
    size = scale.shape[0]
    require(x.rank >= 1 and size >= 1, "X is a scalar, or scale is empty")
    require(x.shape[-1] % size == 0, "rows of {} are no groups of {}", x.shape[-1], size)
    require_shape("gate", gate, x.shape, "that of X")
    require_choice(node, "activation", "silu", "silu", "swish", "sigmoid")


@function(
    "GatedRMSNorm",
    "X, scale, gate -> Y",
    requires=gated_norm_operands,
    activation="silu",
    epsilon=1e-5,
)
def gated_rms_norm(call: Call) -> Results:
    """RMS normalization of groups of a row, times an activation of a gate, in float32."""
    x, scale, gate = call.inputs
    dtype, size = call.dtype(x), call.size(scale, 0)
    rows, factors, gates = (call.cast(v, "float32") for v in (x, scale, gate) if v is not None)
    split = call.shape(x)[-1] != size
    if split:
        groups = call.Concat(call.Shape(x, end=-1), [-1, size], axis=0)
        rows = call.Reshape(rows, groups)
    normal: Any = call.RMSNormalization(
        rows, factors, axis=-1, epsilon=call.attribute("epsilon"), requires="factors_of_rows"
    )
    if split:
        normal = call.Reshape(normal, call.Shape(x))
    is_sigmoid = call.attribute("activation") == "sigmoid"
    gates = call.Sigmoid(gates) if is_sigmoid else call.Swish(gates)
    return [call.cast(call.Mul(normal, gates), dtype)]
