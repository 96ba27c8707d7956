"""DecoderMaskedMultiHeadAttention of ONNX Runtime: one token, and a cache with room for more."""

from __future__ import annotations

from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    known_numbers,
    require,
    require_rank,
    require_shape,
    require_single,
)
from subgraph.ops.attention.decoding import require_heads, require_split

from .attention import attend, axes, dimension, key_mask, mask_scores, positions_below, unpacked
from .transformer import added

_INT64 = 7  # element type of ONNX


def masked_operands(
    node: Node, query: Tensor, key: Tensor | None = None, value: Tensor | None = None,
    mask: Tensor | None = None, scores: Tensor | None = None, past_key: Tensor | None = None,
    past_value: Tensor | None = None, before: Tensor | None = None, *rest: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError unless there is one token, and room for it in the cache.

    Args:
        node: The node; ``num_heads``.
        query: [batch, 1, heads * size].
        key: As the query, or for cross attention [batch, heads, positions, size].
        value: As the key.
        mask: 0 and 1, [batch, positions].
        scores: Added to those of the positions, [batch or 1, heads or 1, 1, positions].
        past_key: Cached keys [batch, heads, room, size].
        past_value: Cached values, as the keys.
        before: Number of cached positions, one int32.
        rest: Operands of beams, which the body refuses, and the bias.
    """
    require_rank("query", query, 3)
    require(query.shape[1] == 1, "query has {} tokens; it must have one", query.shape[1])
    require(key is not None and value is not None, "key or value is missing")
    if mask is not None:
        require_rank("mask_index", mask, 2)
    size = require_split("query", query, require_heads(node, "num_heads"))
    heads = query.shape[2] // size
    bias = rest[2] if len(rest) > 2 else None
    require_shape("bias", bias, (3 * query.shape[2],), "one for queries, keys and values")
    if key is None or key.rank == 4:
        return
    require_shape("key", key, query.shape, "that of the query")
    require_shape("value", value, query.shape, "that of the query")
    require(past_key is not None and before is not None, "past_key or its length is missing")
    if past_key is None:
        return
    require_rank("past_key", past_key, 4)
    room = past_key.shape[2]
    require_shape("past_key", past_key, (query.shape[0], heads, room, size), "room for all tokens")
    require_shape("past_value", past_value, past_key.shape, "that of past_key")
    require_single("past_sequence_length", before, "int32")
    for count in known_numbers(before) or ():
        require(0 <= count < room, "past_sequence_length is {}; there is room for {}", count, room)
    for name, operand in (("mask_index", mask), ("attention_bias", scores)):
        longest = 0 if operand is None else operand.shape[operand.rank - 1]
        require(longest <= room, "{} has {} positions; there is room for {}", name, longest, room)


@function(
    "DecoderMaskedMultiHeadAttention",
    "query, key?, value?, mask_index?, attention_bias?, past_key?, past_value?, "
    "past_sequence_length?, beam_width?, cache_indirection?, bias? -> output, present_key?, "
    "present_value?, qk?",
    requires=masked_operands,
    mask_filter_value="float",
    num_heads="int!",
    output_qk="int",
    past_present_share_buffer="int",
    scale="float",
)
def decoder_masked_attention(call: Call) -> Results:
    """Attention of one token to those before it, whose keys and values a cache with room holds."""
    query, key, value, padding, scores, past_key, past_value, before = call.inputs[:8]
    for name in ("beam_width", "cache_indirection"):
        if call.input(name) is not None:
            raise call.unsupported(f"the input {name}")
    if call.is_used("qk"):
        raise call.unsupported("the output qk")
    heads = require_heads(call.node, "num_heads")
    query, key, value = unpacked(call, query, key, value, call.input("bias"))
    scale = call.attribute("scale") or None  # 0 means the default
    if call.rank(key) == 4:
        mask = None
        if padding is not None:
            allowed = key_mask(call, padding, dimension(call, key, 2), call.shape(query)[0])
            mask = mask_scores(call, allowed, call.dtype(query))
        made = attend(
            call, (query, key, value), (heads, heads), mask=added(call, mask, scores), scale=scale
        )
        return [made[0], None, None]
    if not call.attribute("past_present_share_buffer"):
        raise call.unsupported("past_present_share_buffer=0")
    start = call.Reshape(call.Cast(before, to=_INT64), axes(call, 1))
    starts = call.Expand(start, call.Shape(query, start=0, end=1))
    shape = axes(call, 0, 0, heads, call.size(query, 2) // heads)
    cache: list[Any] = []
    for x, past in ((key, past_key), (value, past_value)):
        new = call.Transpose(call.Reshape(x, shape), perm=(0, 2, 1, 3))
        cache.append(call.TensorScatter(past, new, starts, axis=2))
    room = dimension(call, past_key, 2)
    mask = call.LessOrEqual(positions_below(call, room), start)
    dtype, padded = call.dtype(query), None
    if padding is not None:
        # Positions without an entry are those that the mask hides anyway.
        allowed = key_mask(call, _extended(call, call.Cast(padding, to=9), room), room, None)
        padded = mask_scores(call, allowed, dtype)
    if scores is not None:
        scores = _extended(call, scores, room)
    scores = added(call, padded, scores)
    if scores is None:
        mask = call.Unsqueeze(mask, axes(call, 0, 1, 2))
    else:
        mask = call.Where(mask, scores, call.constant(float("-inf"), dtype))
    made = attend(call, (query, *cache), (heads, heads), mask=mask, scale=scale)
    return [made[0], *cache]


def _extended(call: Call, x: Any, room: Any) -> Any:
    """Return an operand with zeros behind its last axis, up to a size of ``room``."""
    rank = call.rank(x)
    missing = call.Unsqueeze(call.Sub(room, dimension(call, x, rank - 1)), axes(call, 0))
    shape = call.Concat(call.Shape(x, start=0, end=rank - 1), missing, axis=0)
    return call.Concat(x, call.Expand(call.constant(0, call.dtype(x)), shape), axis=-1)
