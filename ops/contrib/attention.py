"""ONNX Runtime's attention operators, by the standard's Attention.

Masked scores get ``mask_filter_value`` added, as in ONNX Runtime; so the result of a row in which
all keys are masked is a mean of the values, not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_rank,
    require_shape,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.attention.decoding import require_heads

from .quantized import scaled_sums
from .transformer import added


def dimension(call: Call, x: Any, axis: int) -> Any:
    """Return the size of a dimension at run time, as a scalar.

    Args:
        call: The node.
        x: The value.
        axis: The dimension.
    """
    return call.Squeeze(call.Shape(x, start=axis, end=axis + 1), [0])


def mask_scores(call: Call, mask: Any, keys: Any, query: Any) -> Any:
    """Return what a mask adds to scores: 0 for keys that it allows, else ``mask_filter_value``.

    Args:
        call: The node.
        mask: See `_allowed_keys`; None: there is no mask, and the result is None.
        keys: Number of keys, a scalar.
        query: Queries [batch, positions, heads * size].
    """
    if mask is None:
        return None
    allowed = _allowed_keys(call, mask, keys, call.shape(query)[0])
    dtype, filler = call.dtype(query), call.attribute("mask_filter_value")
    # -10000 is ONNX Runtime's documented default.
    hidden = call.constant(-10000.0 if filler is None else filler, dtype)
    return call.Where(allowed, call.constant(0, dtype), hidden)


def _allowed_keys(call: Call, mask: Any, keys: Any, batch: Any) -> Any:
    """Return which keys a mask of the node allows, booleans [batch, 1, queries or 1, keys].

    Args:
        call: The node.
        mask: 0 and 1, [batch, keys] or [batch, queries, keys]; or positions: [batch] at which keys
            end, [2 * batch] at which they end and then at which they begin, or [3 * batch + 2] at
            which they end and then sums for kernels without padding.
        keys: Number of keys, a scalar.
        batch: Number of batches, None if it is not known.
    """
    rank = call.rank(mask)
    if rank in (2, 3):
        return call.Unsqueeze(call.cast(mask, "bool"), [1, 2] if rank == 2 else [1])
    if rank != 1:
        raise call.unsupported(f"a mask of {rank} dimensions")
    position = call.cast(call.Range(0, keys, 1), call.dtype(mask))

    def spread(positions: Any) -> Any:
        return call.Unsqueeze(positions, [1, 2, 3])

    count = call.shape(mask)[0]
    # With unknown sizes the usual form, ends alone, is assumed. For the other form the mask then
    # has twice the batches, which the requirement `all_batches` refuses in a run.
    if count == batch or not (isinstance(count, int) and isinstance(batch, int)):
        return call.Less(position, spread(mask))
    if count == 3 * batch + 2:
        return call.Less(position, spread(call.Slice(mask, [0], [batch])))
    if count != 2 * batch:
        raise call.unsupported(f"a mask of {count} positions for {batch} batches")
    ends, starts = call.Split(mask, axis=0, num_outputs=2, outputs=2)
    inside = call.Less(position, spread(ends)), call.GreaterOrEqual(position, spread(starts))
    return call.And(*inside)


def attend(
    call: Call,
    operands: Sequence[Any],
    heads: tuple[int, int],
    *,
    mask: Any = None,
    past: Sequence[Any] = (None, None),
    positions: tuple[Value | None, Value | None, int] | None = None,
    requires: str = "all_keys",
    **attributes: Any,
) -> list[Any]:
    """Return the result, and all keys and values, cached and new (None where no output wants them).

    Args:
        call: The node.
        operands: Queries, keys and values, each [batch, positions, heads * size], or the latter two
            [batch, heads, positions, size].
        heads: Heads of queries, and of keys.
        mask: Added to the scores; None: nothing.
        past: Cached keys and values, [batch, heads, positions, size]; None: there are none.
        positions: Position of the first query of each batch, sinks and window of DecoderAttention,
            for keys by heads and none cached; None: the standard's operator.
        requires: Additional requirement of the standard's operator, declared in `operands`.
        attributes: Of the standard's operator.
    """
    query, key, value = operands
    if call.rank(key) == 4:
        size = call.size(key, 3)
        query = call.Transpose(call.Reshape(query, [0, 0, heads[0], size]), perm=(0, 2, 1, 3))
        # Without cached ones, all keys and values are the new ones, which need no copy.
        out: list[Any] = [None, key, value]
        operands = (query, key, value, mask, *past)
        if positions is not None:
            starts, sinks, window = positions
            attributes |= {"domain": INTERNAL_DOMAIN, "requires": requires, "window": window}
            out[0] = call.DecoderAttention(query, key, value, mask, starts, sinks, **attributes)
        elif past[0] is None:
            out[0] = call.Attention(*operands, **attributes, requires=requires)
        else:
            out = list(call.Attention(*operands, **attributes, outputs=3, requires=requires))
        last = call.shape(value)[3]
        # Reshape cannot compute a size (-1) if another dimension is empty.
        hidden = heads[0] * last if isinstance(last, int) else -1
        flat = call.Reshape(call.Transpose(out[0], perm=(0, 2, 1, 3)), [0, 0, hidden])
        return [flat, *out[1:]]
    attributes |= {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
    if past[0] is None and not (call.is_used("present") or call.is_used("present_key")):
        # With one output no device has to copy keys and values that nothing reads.
        made = call.Attention(query, key, value, mask, **attributes, requires=requires)
        return [made, None, None]
    operands = (query, key, value, mask, *past)
    return list(call.Attention(*operands, **attributes, outputs=3, requires=requires))


def _self_attention(call: Call, qkv: Any, sizes: Sequence[int] | None) -> Results:
    """Return the results of Attention and QAttention.

    Args:
        call: The node.
        qkv: Queries, keys and values side by side [batch, positions, sum of the sizes].
        sizes: Their sizes; None: all are equal.
    """
    call.refuse_all_but(do_rotary=0, past_present_share_buffer=0)
    heads = require_heads(call.node, "num_heads")
    sizes = sizes or [call.size(qkv, -1) // 3] * 3
    query, key, value = call.Split(qkv, list(sizes), axis=-1, outputs=3)
    past, keys = [None, None], dimension(call, query, 1)
    cached = call.input("past")
    if cached is not None:
        past = [call.Gather(cached, call.constant(k, "int64"), axis=0) for k in range(2)]
        # The mask has an entry for cached keys too.
        keys = call.Add(keys, dimension(call, cached, 3))
    mask = mask_scores(call, call.input("mask_index"), keys, query)
    made, key, value = attend(
        call,
        (query, key, value),
        (heads, heads),
        mask=added(call, mask, call.input("attention_bias")),
        past=past,
        # The node's mask has an entry for each batch. A bias alone may broadcast over batches.
        requires="all_keys" if mask is None else "all_batches",
        is_causal=call.attribute("unidirectional"),
        scale=call.attribute("scale") or None,  # 0 means the default
    )
    if key is None:
        return [made, None]
    # ONNX Runtime's operator caches keys and values in one tensor.
    parts = [call.Unsqueeze(part, [0]) for part in (key, value)]
    return [made, call.Concat(*parts, axis=0)]


def attention_operands(
    node: Node,
    x: Tensor,
    weights: Tensor,
    _bias: Tensor | None = None,
    mask: Tensor | None = None,
    past: Tensor | None = None,
    *_others: Tensor | None,
) -> None:
    """Raise ShapeError unless weights have a column for each element of all heads.

    Args:
        node: The Attention; ``qkv_hidden_sizes`` for sizes that differ.
        x: [batch, positions, hidden].
        weights: [hidden, sizes of queries, keys and values].
        mask: See `_allowed_keys`.
        past: Cached keys and values [2, batch, heads, positions, size].
    """
    _require_self(node, x, weights, mask, past)


def quantized_attention_operands(
    node: Node, x: Tensor, weights: Tensor, _bias: Tensor, _x_scale: Tensor, _w_scale: Tensor,
    mask: Tensor | None = None, _x_zero: Tensor | None = None, _w_zero: Tensor | None = None,
    past: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights have a column for each element of all heads.

    Args:
        node: The QAttention.
        x: [batch, positions, hidden], bytes.
        weights: [hidden, 3 * heads * size], bytes.
        mask: See `_allowed_keys`.
        past: Cached keys and values [2, batch, heads, positions, size].
    """
    _require_self(node, x, weights, mask, past)


def _require_self(
    node: Node, x: Tensor, weights: Tensor, mask: Tensor | None, past: Tensor | None
) -> None:
    """Check the operands that Attention and QAttention have in common.

    Args:
        node: The node.
        x: The input, of rank 3.
        weights: The weights of queries, keys and values, of rank 2.
        mask: The mask, or None.
        past: Keys and values of earlier tokens, or None.

    Raises:
        ShapeError: They do not fit.
    """
    require_rank("input", x, 3)
    require_rank("weights", weights, 2)
    sizes = node.attrs.get("qkv_hidden_sizes") or [weights.shape[1] // 3] * 3
    require(
        len(sizes) == 3 and min(sizes) >= 0 and sizes[0] == sizes[1],
        "qkv_hidden_sizes is {}; it has three sizes, those of queries and keys are equal",
        sizes,
    )
    require_shape("weights", weights, (x.shape[2], sum(sizes)), "from the input to all heads")
    if past is not None:
        require_rank("past", past, 5)
        require(past.shape[0] == 2, "past has {} parts, not keys and values", past.shape[0])
    if mask is not None and mask.rank > 1:
        require(mask.shape[0] == x.shape[0], "a mask of {} batches", mask.shape[0])


_SELF_ATTRIBUTES: dict[str, Any] = {
    "do_rotary": 0,
    "mask_filter_value": "float",
    "past_present_share_buffer": 0,
    "scale": "float",
    "unidirectional": 0,
}


@function(
    "Attention",
    "input, weights, bias?, mask_index?, past?, attention_bias?, past_sequence_length? -> "
    "output, present?",
    requires=attention_operands,
    num_heads="int!",
    qkv_hidden_sizes="ints",
    rotary_embedding_dim="int",
    **_SELF_ATTRIBUTES,
)
def attention(call: Call) -> Results:
    """Self-attention, including the product that computes queries, keys and values."""
    x, weights, bias = call.inputs[:3]
    product = added(call, call.MatMul(x, weights), bias, requires="one_row")
    return _self_attention(call, product, call.attribute("qkv_hidden_sizes"))


@function(
    "QAttention",
    "input, weight, bias, input_scale, weight_scale, mask_index?, input_zero_point?, "
    "weight_zero_point?, past? -> output, present?",
    requires=quantized_attention_operands,
    num_heads="int!",
    **_SELF_ATTRIBUTES,
)
def quantized_attention(call: Call) -> Results:
    """Self-attention whose first product is an int8 GEMM."""
    x, weights, bias, x_scale, w_scale, _, x_zero, w_zero, _ = call.inputs
    sums = call.MatMulInteger(x, weights, x_zero, w_zero)
    total = scaled_sums(call, sums, x_scale, w_scale, bias, call.dtype(bias))
    return _self_attention(call, total, None)


def multi_head_operands(
    node: Node,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    *_others: Tensor | None,
) -> None:
    """Raise ShapeError unless ranks define how queries, keys and values are packed.

    Args:
        node: The MultiHeadAttention; ``num_heads``.
        query: [batch, positions, heads * size]; without keys [batch, positions, heads, 3, size],
            packed with them.
        key: [batch, positions, heads * size], [batch, heads, positions, size]; without values
            [batch, positions, heads, 2, size], packed with them.
        value: As unpacked keys.
        bias: Of queries, keys and values, one vector.
        padding: See `_allowed_keys`.
    """
    require_rank("query", query, 5 if key is None else 3)
    packed, count = (query, 3) if key is None else (key, 2)
    if key is None or (value is None and key.rank == 5):
        require_rank("packed operands", packed, 5)
        wanted = (*packed.shape[:2], node.attrs.get("num_heads", 0), count, packed.shape[4])
        require_shape("packed operands", packed, wanted, "heads, then queries, keys and values")
    else:
        require(value is not None, "value is missing")
        require_rank("key", key, 3, 4)
    if bias is not None:
        require_rank("bias", bias, 1)
    if padding is not None and padding.rank > 1:
        require(padding.shape[0] == query.shape[0], "a mask of {} batches", padding.shape[0])


@function(
    "MultiHeadAttention",
    "query, key?, value?, bias?, key_padding_mask?, attention_bias?, past_key?, past_value?, "
    "past_sequence_length?, cache_indirection? -> output, present_key?, present_value?, qk?",
    requires=multi_head_operands,
    mask_filter_value="float",
    num_heads="int!",
    scale="float",
    unidirectional=0,
)
def multi_head_attention(call: Call) -> Results:
    """Attention of queries to keys and values, which may be packed or split into heads."""
    query, key, value, bias, padding, scores, past_key, past_value = call.inputs[:8]
    call.refuse_inputs("past_sequence_length", "cache_indirection")
    if call.is_used("qk"):
        raise call.unsupported("the output qk")
    heads = require_heads(call.node, "num_heads")
    operands = unpacked(call, query, key, value, bias)
    keys = dimension(call, operands[1], 1 if call.rank(operands[1]) == 3 else 2)
    if past_key is not None:
        keys = call.Add(keys, dimension(call, past_key, 2))
    mask = mask_scores(call, padding, keys, operands[0])
    is_causal = call.attribute("unidirectional")
    if is_causal and not _has_as_many_keys(call, *operands[:2]):
        mask, is_causal = added(call, _last_queries(call, operands[0], keys, past_key), mask), 0
    return attend(
        call,
        operands,
        (heads, heads),
        mask=added(call, mask, scores),
        past=(past_key, past_value),
        requires="all_keys" if padding is None else "all_batches",
        is_causal=is_causal,
        scale=call.attribute("scale") or None,  # 0 means the default
    )


def _has_as_many_keys(call: Call, query: Any, key: Any) -> bool:
    """Return whether there are known to be as many new keys as queries."""
    queries, keys = call.shape(query)[1], call.shape(key)[1 if call.rank(key) == 3 else 2]
    return queries is not None and queries == keys


def _last_queries(call: Call, query: Any, keys: Any, past: Any) -> Any:
    """Return what hides later keys from queries that are the last positions, [queries, keys].

    Args:
        call: The node.
        query: Queries [batch, positions, heads * size].
        keys: Number of cached and new keys, a scalar.
        past: Cached keys, which all queries see; None: there are none.
    """
    queries = dimension(call, query, 1)
    least = call.constant(0, "int64") if past is None else dimension(call, past, 2)
    first = call.Max(call.Sub(keys, queries), least)
    position = call.Add(call.Unsqueeze(call.Range(0, queries, 1), [1]), first)
    seen = call.LessOrEqual(call.Range(0, keys, 1), position)
    dtype = call.dtype(query)
    return call.Where(seen, call.constant(0, dtype), call.constant(float("-inf"), dtype))


def unpacked(call: Call, query: Any, key: Any, value: Any, bias: Any) -> list[Any]:
    """Return queries, keys and values as separate operands, their parts of the bias added."""
    operands: list[Any] = [query, key, value]
    if key is None or (value is None and call.rank(key) == 5):
        packed = query if key is None else key
        hidden = call.size(packed, 2) * call.size(packed, 4)
        count = 3 if key is None else 2
        parts = call.Split(packed, axis=3, num_outputs=count, outputs=count)
        found = [call.Reshape(part, [0, 0, hidden]) for part in parts]
        operands = found if key is None else [query, *found]
    if bias is None:
        return operands
    # Keys and values that are split into heads include their bias.
    sizes = [call.size(operands[0], -1)]
    sizes += sizes[:1]
    rest = call.size(bias, 0) - sum(sizes)
    parts = call.Split(bias, [*sizes, rest], axis=0, outputs=3)
    return [
        call.Add(x, part, requires="one_row") if call.rank(x) == 3 else x
        for x, part in zip(operands, parts, strict=True)
    ]
