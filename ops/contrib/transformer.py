"""ONNX Runtime's fused operators of transformers besides attention: activations, norms, embeddings.

Its optimizer writes them into BERT-like models, decoders and diffusion models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_rank,
    require_shape,
    require_single,
)


def added(call: Call, *terms: Value | None, requires: str = "") -> Any:
    """Return the sum of terms, from left to right; None without any.

    Args:
        call: The node.
        terms: The terms; None is skipped.
        requires: Requirement of each Add, declared in `operands`.
    """
    total: Any = None
    for term in terms:
        if term is not None:
            total = term if total is None else call.Add(total, term, requires=requires)
    return total


def channels_first(call: Call, x: Any, operator: Callable[[Any], Any], *, last: Any = True) -> Any:
    """Return ``operator(x)``, computed with channels first.

    Args:
        call: The node.
        x: The input.
        operator: A function of an input with channels first.
        last: Whether the input and the result have channels last.
    """
    if not last:
        return operator(x)
    rank = call.rank(x)
    transposed = call.Transpose(x, perm=(0, rank - 1, *range(1, rank - 1)))
    return call.Transpose(operator(transposed), perm=(0, *range(2, rank), 1))


def softmax_from(call: Call, x: Any, axis: int) -> Any:
    """Return the softmax over an axis and all later ones, as Softmax was before opset 13."""
    if axis in (-1, call.rank(x) - 1):
        return call.Softmax(x, axis=-1)
    return call.Reshape(call.Softmax(call.Flatten(x, axis=axis), axis=-1), call.Shape(x))


def _sum_with_skip(call: Call, x: Value | None, skip: Value | None, bias: Value | None) -> Any:
    """Return the sum of an input, a residual (``skip``) and a bias."""
    total = added(call, x, skip, requires="same_rows")
    return added(call, total, bias, requires="one_row")


# Activations


@function("Gelu", "X -> Y")
def gelu(call: Call) -> Results:
    """GELU by the error function."""
    return [call.Gelu(call.inputs[0])]


@function("BiasGelu", "A, B -> C")
def bias_gelu(call: Call) -> Results:
    """GELU of a sum."""
    return [call.Gelu(call.Add(*call.inputs, requires="one_row"))]


@function("FastGelu", "X, bias? -> Y")
def fast_gelu(call: Call) -> Results:
    """GELU by a hyperbolic tangent."""
    return [call.Gelu(added(call, *call.inputs, requires="one_row"), approximate="tanh")]


@function("GemmFastGelu", "X, W, bias? -> Y")
def gemm_fast_gelu(call: Call) -> Results:
    """GELU by a hyperbolic tangent of a product."""
    x, w, bias = call.inputs
    total = added(call, call.MatMul(x, w), bias, requires="one_row")
    return [call.Gelu(total, approximate="tanh")]


@function("QuickGelu", "X -> Y", alpha=1.702)
def quick_gelu(call: Call) -> Results:
    """``x * sigmoid(alpha * x)``."""
    return [call.Swish(call.inputs[0], alpha=call.attribute("alpha"))]


@function("BiasSplitGelu", "X, bias -> Y")
def bias_split_gelu(call: Call) -> Results:
    """Multiply the left half of a sum by the GELU of the right half."""
    total = call.Add(*call.inputs, requires="one_row")
    left, right = call.Split(total, axis=-1, num_outputs=2, outputs=2)
    return [call.Mul(left, call.Gelu(right))]


@function("BiasAdd", "X, bias, skip -> Y")
def bias_add(call: Call) -> Results:
    """Add an input, a bias and a residual."""
    x, bias, skip = call.inputs
    return [call.Add(call.Add(x, bias, requires="one_row"), skip, requires="same_shape")]


@function("BiasSoftmax", "data, bias -> output", axis=1, is_inner_broadcast="int!")
def bias_softmax(call: Call) -> Results:
    """Softmax of a sum, over an axis and all later ones."""
    total = call.Add(*call.inputs, requires="into_first")
    return [softmax_from(call, total, call.attribute("axis"))]


@function(
    "BiasDropout", "data, bias, residual?, ratio?, training_mode? -> output, mask?", seed="int"
)
def bias_dropout(call: Call) -> Results:
    """Dropout of a sum, plus a residual."""
    data, bias, residual, ratio, training = call.inputs
    seed = call.attribute("seed")
    total = call.Add(data, bias, requires="one_row")
    kept, mask = call.Dropout(total, ratio, training, outputs=2, seed=seed)
    return [added(call, kept, residual, requires="same_shape"), mask]


def gated_add_operands(
    node: Node, x: Tensor, y: Tensor, gate: Tensor, weight: Tensor | None = None
) -> None:
    """Raise ShapeError unless both terms have one shape, and each row a gate.

    Args:
        node: The GatedAdd.
        x: [..., size].
        y: As ``x``.
        gate: [..., 1].
        weight: See `gated_add`.
    """
    require(x.rank >= 1, "X is a scalar")
    require_shape("Y", y, x.shape, "that of X")
    if weight is None:
        require_shape("gate", gate, (*x.shape[:-1], 1), "a number for each row")


@function("GatedAdd", "X, Y, gate, gate_weight? -> output", requires=gated_add_operands)
def gated_add(call: Call) -> Results:
    """Add rows times their gates; only CUDA computes the gates, by ``gate_weight``."""
    x, y, gate, weight = call.inputs
    if weight is not None:
        raise call.unsupported("gate_weight")
    return [call.Add(x, call.Mul(y, gate))]


def scaled_silu_operands(node: Node, x: Tensor, scale: Tensor | None = None) -> None:
    """Raise ShapeError unless the scale is a scalar."""
    require_shape("scale", scale, (), "one number")


@function("ScaledSiLU", "X, scale? -> Y", requires=scaled_silu_operands, alpha=1.0)
def scaled_silu(call: Call) -> Results:
    """SiLU of a scaled input."""
    x, scale = call.inputs
    dtype = call.dtype(x)
    # The product is rounded to the input's dtype before SiLU, as ONNX Runtime's is.
    factor: Any = call.attribute("alpha") if scale is None else call.cast(scale, "float32")
    scaled = call.cast(call.Mul(call.cast(x, "float32"), factor), dtype)
    return [call.Swish(scaled)]


# Normalization


def _rms(
    call: Call, x: Any, scale: Value | None, axis: int, requires: str = ""
) -> list[Value | None]:
    """Return the RMS normalization, and the factor of each row if that output is used.

    Args:
        call: The node; ``epsilon``.
        x: The input.
        scale: Factors of the normalized input.
        axis: First axis of a row.
        requires: Requirement of RMSNormalization, declared in `operands`.
    """
    epsilon = call.attribute("epsilon")
    normal = call.RMSNormalization(x, scale, axis=axis, epsilon=epsilon, requires=requires)
    if not call.is_used("inv_std_var"):
        return [normal, None]
    axes = list(range(axis, 0)) if axis < 0 else list(range(axis, call.rank(x)))
    # The factors are float32 for inputs of every dtype (``stash_type`` 1).
    wide = call.cast(x, "float32")
    squares = call.ReduceMean(call.Mul(wide, wide), axes)
    return [normal, call.Reciprocal(call.Sqrt(call.Add(squares, epsilon)))]


@function(
    "SimplifiedLayerNormalization",
    "X, scale -> Y, inv_std_var?",
    domain="",
    axis=-1,
    epsilon=1e-5,
    stash_type=1,
)
def simplified_layer_normalization(call: Call) -> Results:
    """RMS normalization; the result has the dtype of the scale."""
    x, scale = call.inputs
    return _rms(call, call.cast(x, call.dtype(scale)), scale, call.attribute("axis"))


@function(
    "SkipSimplifiedLayerNormalization",
    "input, skip, gamma, bias? -> output, mean?, inv_std_var?, input_skip_bias_sum?",
    epsilon=1e-12,
)
def skip_simplified_layer_normalization(call: Call) -> Results:
    """RMS normalization of a sum, and the sum."""
    x, skip, gamma, bias = call.inputs
    total = _sum_with_skip(call, x, skip, bias)
    normal, factor = _rms(call, total, gamma, -1, "factors_of_rows")
    return [normal, None, factor, total]


@function(
    "SkipLayerNormalization",
    "input, skip, gamma, beta?, bias? -> output, mean?, inv_std_var?, input_skip_bias_sum?",
    epsilon=1e-12,
)
def skip_layer_normalization(call: Call) -> Results:
    """Layer normalization of a sum, and the sum."""
    x, skip, gamma, beta, bias = call.inputs
    total = _sum_with_skip(call, x, skip, bias)
    options = {"axis": -1, "epsilon": call.attribute("epsilon"), "requires": "factors_of_rows"}
    if call.is_used("mean") or call.is_used("inv_std_var"):
        return [*call.LayerNormalization(total, gamma, beta, outputs=3, **options), total]
    return [call.LayerNormalization(total, gamma, beta, **options), None, None, total]


def _group_norm(call: Call, x: Any) -> Any:
    """Return ``x`` with groups of channels normalized, by the node's attributes and factors."""
    gamma, beta = call.inputs[1:3]
    dtype = call.dtype(x)
    factors = call.cast(gamma, dtype), call.cast(beta, dtype)
    options = {"epsilon": call.attribute("epsilon"), "num_groups": call.attribute("groups")}

    def normalized(x: Any) -> Any:
        made = call.GroupNormalization(x, *factors, **options)
        # Activation 1 is SiLU, which is Swish with its default alpha of 1.
        return call.Swish(made) if call.attribute("activation") else made

    return channels_first(call, x, normalized, last=call.attribute("channels_last"))


_GROUP_ATTRIBUTES: dict[str, Any] = {"activation": "int!", "channels_last": 1, "epsilon": 1e-5}


@function("GroupNorm", "X, gamma, beta -> Y", groups="int!", **_GROUP_ATTRIBUTES)
def group_norm(call: Call) -> Results:
    """Normalize groups of channels."""
    return [_group_norm(call, call.inputs[0])]


@function(
    "SkipGroupNorm", "X, gamma, beta, skip, bias? -> Y, S?", groups="int!", **_GROUP_ATTRIBUTES
)
def skip_group_norm(call: Call) -> Results:
    """Normalize groups of channels of a sum; the skip may be [N, C] or [N, 1, 1, C]."""
    x, _, _, skip, bias = call.inputs
    if call.rank(skip) == 2:
        skip = call.Unsqueeze(skip, [1, 2])
    total = added(call, x, skip, bias, requires="into_first")
    return [_group_norm(call, total), total]


# Embeddings


def embedding_operands(
    node: Node, ids: Tensor, segments: Tensor | None, words: Tensor, positions: Tensor,
    segment_table: Tensor | None, gamma: Tensor, beta: Tensor, mask: Tensor | None = None,
    *others: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError unless the mask has the shape of the ids, and factors that of an entry.

    Args:
        node: An EmbedLayerNormalization, or its quantized form.
        ids: Ids of words [batch, positions].
        segments: Ids of segments, as ``ids``; None: there are none.
        words: Table of words [words, hidden].
        positions: Table of positions [positions, hidden].
        segment_table: Table of segments [segments, hidden].
        gamma: Factors of the normalized sum [hidden].
        beta: Added to it [hidden].
        mask: 1 for words that are no padding, as ``ids``.
        *others: Not read here.
    """
    require_rank("word_embedding", words, 2)
    require_shape("mask", mask, ids.shape, "that of input_ids")
    for name, factor in (("gamma", gamma), ("beta", beta)):
        require_shape(name, factor, words.shape[1:], "one for each element of an entry")


def _embedded(call: Call, tables: Sequence[Any], norm: Sequence[Any]) -> Results:
    """Return the normalized sum of three embeddings, the counts of the mask, and the sum.

    Args:
        call: The node.
        tables: Embeddings of words, positions and segments (or None).
        norm: Scale and bias of the normalization.
    """
    ids, segments = call.inputs[:2]
    words, positions, segment_table = tables
    mask, position_ids = call.input("mask"), call.input("position_ids")
    total = call.Gather(words, ids)
    if position_ids is not None:
        position = call.Gather(positions, position_ids)
    else:
        position = call.Slice(positions, [0], call.Shape(ids, start=1, end=2), [0])
    total = call.Add(total, position, requires="same_rows")
    if segment_table is not None and segments is not None:
        total = call.Add(total, call.Gather(segment_table, segments), requires="same_shape")
    normal = call.LayerNormalization(total, *norm, axis=-1, epsilon=call.attribute("epsilon"))
    if not (call.is_used("mask_index") or call.is_used("mask_index_out")):
        return [normal, None, total]
    of = ids if mask is None else mask
    # Without a mask ONNX Runtime returns counts of 0. Mul gives them the shape and dtype of the
    # ids.
    ones = call.Mul(of, 0) if mask is None else call.cast(call.Equal(of, 1), call.dtype(of))
    return [normal, call.ReduceSum(ones, [1], keepdims=0), total]


@function(
    "EmbedLayerNormalization",
    "input_ids, segment_ids?, word_embedding, position_embedding, segment_embedding?, gamma, beta, "
    "mask?, position_ids? -> output, mask_index?, embedding_sum?",
    requires=embedding_operands,
    epsilon=1e-12,
    mask_index_type=0,
)
def embed_layer_normalization(call: Call) -> Results:
    """Add the embeddings of words, positions and segments, and normalize."""
    return _embedded(call, call.inputs[2:5], call.inputs[5:7])


@function(
    "QEmbedLayerNormalization",
    "input_ids, segment_ids?, word_embedding_quant, position_embedding_quant, segment_embedding?, "
    "gamma_quant, beta_quant, mask?, word_embedding_scale, position_embedding_scale, "
    "segment_embedding_scale?, gamma_scale, beta_scale, word_embedding_zero_point, "
    "position_embedding_zero_point, segment_embedding_zero_point?, gamma_zero_point, "
    "beta_zero_point -> layernorm_out, mask_index_out",
    requires=embedding_operands,
    epsilon=1e-12,
)
def quantized_embed_layer_normalization(call: Call) -> Results:
    """EmbedLayerNormalization of quantized tables and factors."""
    quantized, scales, zeros = call.inputs[2:7], call.inputs[8:13], call.inputs[13:18]
    floats = [
        None if table is None else call.DequantizeLinear(table, scale, zero)
        for table, scale, zero in zip(quantized, scales, zeros, strict=True)
    ]
    return _embedded(call, floats[:3], floats[3:])[:2]


def position_bias_operands(node: Node, table: Tensor, queries: Tensor, keys: Tensor) -> None:
    """Raise ShapeError unless there are buckets for exact distances, below the largest distance.

    Args:
        node: The RelativePositionBias: ``max_distance``, ``is_bidirectional``.
        table: Biases of each bucket [buckets, heads].
        queries: Number of queries, one element.
        keys: Number of keys, one element.
    """
    require_rank("bias_table", table, 2)
    require_single("query_length", queries)
    require_single("key_length", keys)
    buckets, most = table.shape[0], node.attrs["max_distance"]
    exact = buckets // (4 if node.attrs.get("is_bidirectional", 0) else 2)
    require(exact >= 1, "bias_table has {} buckets, too few for exact distances", buckets)
    require(most > exact, "max_distance is {}; {} distances have exact buckets", most, exact)


@function("RelativePositionBias", "bias_table, query_length, key_length -> output",
          requires=position_bias_operands,
          is_bidirectional=0, max_distance="int!")  # fmt: skip
def relative_position_bias(call: Call) -> Results:
    """Biases of T5, [1, heads, queries, keys]: the table's row for the bucket of a distance.

    Half of the buckets are for exact distances, the others grow logarithmically up to
    ``max_distance`` (Raffel et al., "Exploring the Limits of Transfer Learning", 2020).
    """
    table, queries, keys = call.inputs
    both, buckets = call.attribute("is_bidirectional"), call.size(table, 0)

    def positions(count: Value | None, axis: int) -> Any:
        scalar = call.Reshape(call.Cast(count, to=7), [])
        return call.Unsqueeze(call.Range(0, scalar, 1), [axis])

    distance = call.Sub(positions(queries, 1), positions(keys, 0))  # positive for earlier keys
    offset: Any = None
    if both:
        buckets //= 2
        offset = call.Mul(call.cast(call.Less(distance, 0), "int64"), buckets)
        distance = call.Abs(distance)
    else:
        distance = call.Max(distance, 0)
    exact = buckets // 2
    # Smaller distances have exact buckets, and their logarithm, perhaps of 0, is not used.
    clipped = call.cast(call.Max(distance, exact), "float32")
    ratio = call.Log(call.Div(clipped, float(exact)))
    span = math.log(call.attribute("max_distance") / exact)
    steps = call.cast(call.Mul(call.Div(ratio, span), float(buckets - exact)), "int64")
    large = call.Min(call.Add(steps, exact), buckets - 1)
    bucket = call.Where(call.Less(distance, exact), distance, large)
    if both:
        bucket = call.Add(bucket, offset)
    picked = call.Transpose(call.Gather(table, bucket), perm=(2, 0, 1))
    return [call.Unsqueeze(picked, [0])]
