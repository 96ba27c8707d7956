"""ONNX Runtime's attention operators, by the standard's Attention and RotaryEmbedding.

What masks hide gets ``mask_filter_value`` added to its score, as there; a row of which a mask hides
everything is then a mean, not zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.ops.attention.decoding import require_heads

from .transformer import added

Results = Sequence[Value | None]
_INT64 = 7


def _axes(call: Call, *axes: int) -> Value:
    return call.constant(axes, "int64")


def _count(call: Call, x: Any, axis: int) -> Any:
    """Return a dimension of a value, as a scalar."""
    return call.Squeeze(call.Shape(x, start=axis, end=axis + 1), _axes(call, 0))


def _places(call: Call, count: Any) -> Any:
    """Return 0, 1, ... of so many."""
    return call.Range(call.constant(0, "int64"), count, call.constant(1, "int64"))


def _scores_of(call: Call, allowed: Any, dtype: str) -> Any:
    """Return 0 where a mask allows, and the node's filter value elsewhere."""
    given = call.attribute("mask_filter_value")
    hidden = call.constant(-10000.0 if given is None else given, dtype)
    return call.Where(allowed, call.constant(0, dtype), hidden)


def _mask(call: Call, mask: Any, keys: Any, batch: Any) -> Any:
    """Return which keys a mask of the node allows, as [batch, 1, queries or 1, keys]; None: all.

    Args:
        call: The node.
        mask: Of 0 and 1: [batch, keys] or [batch, queries, keys]; of positions: [batch], where keys
            end, or [2 * batch], where they end and where they begin.
        keys: How many keys there are, a scalar.
        batch: How many batches there are, where that is known.
    """
    rank = call.rank(mask)
    if rank in (2, 3):
        return call.Unsqueeze(call.Cast(mask, to=9), _axes(call, *((1, 2) if rank == 2 else (1,))))
    if rank != 1:
        raise call.unsupported(f"a mask of {rank} dimensions")
    place = call.cast(_places(call, keys), call.dtype(mask))

    def spread(positions: Any) -> Any:
        return call.Unsqueeze(positions, _axes(call, 1, 2, 3))

    count = call.shape(mask)[0]
    if count == batch or not (isinstance(count, int) and isinstance(batch, int)):
        return call.Less(place, spread(mask))
    if count != 2 * batch:
        raise call.unsupported(f"a mask of {count} positions for {batch} batches")
    ends, starts = call.Split(mask, axis=0, num_outputs=2, outputs=2)
    inside = call.Less(place, spread(ends)), call.GreaterOrEqual(place, spread(starts))
    return call.And(*inside)


def _attend(
    call: Call,
    operands: Sequence[Any],
    heads: tuple[int, int],
    *,
    mask: Any = None,
    past: Sequence[Any] = (None, None),
    requires: str = "all_keys",
    **attributes: Any,
) -> list[Any]:
    """Return the result, and the keys and values with those before.

    Args:
        call: The node.
        operands: Queries, keys and values, each [batch, positions, heads * size], or the latter two
            [batch, heads, positions, size].
        heads: How many heads queries and keys have.
        mask: What is added to the scores.
        past: Keys and values before, [batch, heads, positions, size].
        requires: What the standard's operator requires besides (`contrib_operands`).
        attributes: Of the standard's operator.
    """
    query, key, value = operands
    if call.rank(key) == 4:
        size = call.size(key, 3)
        shape = call.constant([0, 0, heads[0], size], "int64")
        query = call.Transpose(call.Reshape(query, shape), perm=(0, 2, 1, 3))
        out = call.Attention(
            query, key, value, mask, *past, **attributes, outputs=3, requires=requires
        )
        joined = call.constant([0, 0, -1], "int64")
        flat = call.Reshape(call.Transpose(out[0], perm=(0, 2, 1, 3)), joined)
        return [flat, *out[1:]]
    attributes |= {"q_num_heads": heads[0], "kv_num_heads": heads[1]}
    if past[0] is None and not (call.is_used("present") or call.is_used("present_key")):
        made = call.Attention(query, key, value, mask, **attributes, requires=requires)
        return [made, None, None]
    operands = (query, key, value, mask, *past)
    return list(call.Attention(*operands, **attributes, outputs=3, requires=requires))


def _self_attention(call: Call, qkv: Any, sizes: Sequence[int] | None) -> Results:
    """Return the results of Attention and QAttention for queries, keys and values side by side."""
    for name in ("do_rotary", "past_present_share_buffer"):
        if call.attribute(name):
            raise call.unsupported(f"{name}=1")
    heads = require_heads(call.node, "num_heads")
    sizes = sizes or [call.size(qkv, -1) // 3] * 3
    query, key, value = call.Split(qkv, call.constant(list(sizes), "int64"), axis=-1, outputs=3)
    past, keys = [None, None], _count(call, query, 1)
    given = call.input("past")
    if given is not None:
        past = [call.Gather(given, call.constant(k, "int64"), axis=0) for k in range(2)]
        keys = call.Add(keys, _count(call, given, 3))
    mask, held = None, call.input("mask_index")
    if held is not None:
        allowed = _mask(call, held, keys, call.shape(query)[0])
        mask = _scores_of(call, allowed, call.dtype(query))
    made, key, value = _attend(
        call,
        (query, key, value),
        (heads, heads),
        mask=added(call, mask, call.input("attention_bias")),
        past=past,
        requires="all_keys" if mask is None else "all_batches",
        is_causal=call.attribute("unidirectional"),
        scale=call.attribute("scale"),
    )
    if key is None:
        return [made, None]
    parts = [call.Unsqueeze(part, _axes(call, 0)) for part in (key, value)]
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
    """Raise ShapeError unless weights lead to all heads, and masks and a past fit the batches."""
    _require_self(node, x, weights, mask, past)


def quantised_attention_operands(
    node: Node, x: Tensor, weights: Tensor, _bias: Tensor, _x_scale: Tensor, _w_scale: Tensor,
    mask: Tensor | None = None, _x_zero: Tensor | None = None, _w_zero: Tensor | None = None,
    past: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights lead to all heads, and masks and a past fit the batches."""
    _require_self(node, x, weights, mask, past)


def _require_self(
    node: Node, x: Tensor, weights: Tensor, mask: Tensor | None, past: Tensor | None
) -> None:
    """Require three sizes of one product, a past of keys and values, and a mask for each batch."""
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


_SELF: dict[str, Any] = {
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
    **_SELF,
)
def attention(call: Call) -> Results:
    """Self-attention with the products that make queries, keys and values."""
    x, weights, bias = call.inputs[:3]
    sizes = call.attribute("qkv_hidden_sizes")
    if sizes is None:
        sizes = [call.size(weights, 1) // 3] * 3 if weights is not None else None
    product = added(call, call.MatMul(x, weights), bias, requires="one_row")
    return _self_attention(call, product, sizes)


@function(
    "QAttention",
    "input, weight, bias, input_scale, weight_scale, mask_index?, input_zero_point?, "
    "weight_zero_point?, past? -> output, present?",
    requires=quantised_attention_operands,
    num_heads="int!",
    **_SELF,
)
def quantised_attention(call: Call) -> Results:
    """Self-attention whose first product is one of bytes."""
    x, weights, bias, x_scale, w_scale, _, x_zero, w_zero, _ = call.inputs
    assert weights is not None, "the form says so"
    assert bias is not None, "the form says so"
    sums = call.MatMulInteger(x, weights, x_zero, w_zero)
    scale = call.Mul(x_scale, w_scale)
    floats = call.Mul(call.cast(sums, call.dtype(bias)), scale, requires="into_first")
    total = call.Add(floats, bias, requires="one_row")
    return _self_attention(call, total, [call.size(weights, 1) // 3] * 3)


def multi_head_operands(
    node: Node,
    query: Tensor,
    key: Tensor | None = None,
    value: Tensor | None = None,
    bias: Tensor | None = None,
    padding: Tensor | None = None,
    *_others: Tensor | None,
) -> None:
    """Raise ShapeError unless ranks tell how queries, keys and values come, and the bias is one."""
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
    """Attention of queries over keys and values, which may come packed, or with heads split off."""
    query, key, value, bias, padding, scores, past_key, past_value = call.inputs[:8]
    for name in ("past_sequence_length", "cache_indirection"):
        if call.input(name) is not None:
            raise call.unsupported(f"the input {name}")
    if call.is_used("qk"):
        raise call.unsupported("the output qk")
    heads = require_heads(call.node, "num_heads")
    operands = _unpacked(call, query, key, value, bias)
    keys = _count(call, operands[1], 1 if call.rank(operands[1]) == 3 else 2)
    if past_key is not None:
        keys = call.Add(keys, _count(call, past_key, 2))
    mask = None
    if padding is not None:
        allowed = _mask(call, padding, keys, call.shape(operands[0])[0])
        mask = _scores_of(call, allowed, call.dtype(operands[0]))
    return _attend(
        call,
        operands,
        (heads, heads),
        mask=added(call, mask, scores),
        past=(past_key, past_value),
        requires="all_keys" if mask is None else "all_batches",
        is_causal=call.attribute("unidirectional"),
        scale=call.attribute("scale"),
    )


def _unpacked(call: Call, query: Any, key: Any, value: Any, bias: Any) -> list[Any]:
    """Return queries, keys and values, with their parts of the bias."""
    operands: list[Any] = [query, key, value]
    if key is None or (value is None and call.rank(key) == 5):
        packed = query if key is None else key
        hidden = call.size(packed, 2) * call.size(packed, 4)
        flat = call.constant([0, 0, hidden], "int64")
        count = 3 if key is None else 2
        parts = call.Split(packed, axis=3, num_outputs=count, outputs=count)
        found = [call.Reshape(part, flat) for part in parts]
        operands = found if key is None else [query, *found]
    if bias is None:
        return operands
    # Keys and values with heads split off have their bias in them.
    sizes = [call.size(operands[0], -1)]
    sizes += sizes[:1]
    rest = call.size(bias, 0) - sum(sizes)
    parts = call.Split(bias, call.constant([*sizes, rest], "int64"), axis=0, outputs=3)
    return [
        call.Add(x, part, requires="one_row") if call.rank(x) == 3 else x
        for x, part in zip(operands, parts, strict=True)
    ]


# Rotary embedding


def rotary_operands(
    node: Node, x: Tensor, positions: Tensor, cosines: Tensor, _sines: Tensor
) -> None:
    """Raise ShapeError unless a table has the angles of a head, and positions are the first or all.

    Heads that are longer than ``rotary_embedding_dim`` keep their last elements.
    """
    require_rank("cos_cache", cosines, 2)
    heads = 1 if x.rank == 4 else node.attrs.get("num_heads", 0)
    if heads and not node.attrs.get("rotary_embedding_dim", 0):
        pairs, width = cosines.shape[1], x.shape[x.rank - 1]
        fits = width == 2 * pairs * heads
        require(fits, "cos_cache has {} angles for {} elements in {} heads", pairs, width, heads)
    if positions.rank == 1:
        require_shape("position_ids", positions, (1,), "the first position of all batches")


@function(
    "RotaryEmbedding",
    "input, position_ids, cos_cache, sin_cache -> output",
    requires=rotary_operands,
    interleaved=0,
    is_packed_batching=0,
    num_heads=0,
    rotary_embedding_dim=0,
    scale=1.0,
)
def rotary_embedding(call: Call) -> Results:
    """Turn pairs of elements by angles of their position."""
    x, positions, cosines, _ = call.inputs
    assert x is not None, "the form says so"
    assert positions is not None, "the form says so"
    assert cosines is not None, "the form says so"
    for name, plain in (("is_packed_batching", 0), ("scale", 1.0)):
        if call.attribute(name) != plain:
            raise call.unsupported(f"{name}={call.attribute(name)}")
    heads = call.attribute("num_heads")
    if call.rank(x) == 3 and not heads:
        heads = call.size(x, 2) // (2 * call.size(cosines, 1))
    if call.rank(positions) == 1:  # where the first of each batch is
        places = _places(call, _count(call, x, 1 if call.rank(x) == 3 else 2))
        row = call.Unsqueeze(call.Add(positions, places), _axes(call, 0))
        batch = call.Concat(call.Shape(x, start=0, end=1), _axes(call, 1), axis=0)
        positions = call.Expand(row, batch)
    return [_turned(call, x, positions, heads)]


def _turned(call: Call, x: Any, positions: Any, heads: int) -> Any:
    rank = call.rank(x)
    interleaved = "interleaved" if call.node.op_type == "RotaryEmbedding" else "rotary_interleaved"
    size = 0 if "rotary" in interleaved else call.attribute("rotary_embedding_dim")
    cosines, sines = call.input("cos_cache"), call.input("sin_cache")
    assert cosines is not None, "who calls has asked"
    if not size:  # the rest of a head stays
        size = 2 * call.size(cosines, 1)
    return call.RotaryEmbedding(
        x,
        cosines,
        sines,
        positions,
        interleaved=call.attribute(interleaved),
        num_heads=heads if rank == 3 else None,
        rotary_embedding_dim=size,
    )


# Attention of decoders


def group_query_operands(
    node: Node, query: Tensor, key: Tensor | None, value: Tensor | None,
    past_key: Tensor | None, past_value: Tensor | None, lengths: Tensor, total: Tensor,
    cosines: Tensor | None = None, sines: Tensor | None = None, *_others: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError unless keys come with values, caches in pairs, a length for each batch."""
    require_rank("query", query, 3)
    pairs = {
        "key and value": (key, value),
        "past_key and past_value": (past_key, past_value),
        "cos_cache and sin_cache": (cosines, sines),
    }
    for names, (first, second) in pairs.items():
        require((first is None) == (second is None), "{} come together", names)
    rotary = cosines is not None or not node.attrs.get("do_rotary", 0)
    require(rotary, "do_rotary needs cos_cache and sin_cache")
    require_dtype("seqlens_k", lengths, "int32")
    require_rank("seqlens_k", lengths, 1, 2)
    shape = (query.shape[0], 1)[: lengths.rank]
    require_shape("seqlens_k", lengths, shape, "one for each batch")
    require(total.size == 1, "total_sequence_length is no single number")


@function(
    "GroupQueryAttention",
    "query, key?, value?, past_key?, past_value?, seqlens_k, total_sequence_length, cos_cache?, "
    "sin_cache?, position_ids?, attention_bias?, head_sink?, k_scale?, v_scale?, q_norm_weight?, "
    "k_norm_weight?, query_seqlens? -> output, present_key?, present_value?, output_qk?",
    requires=group_query_operands,
    causal=1,
    do_rotary=0,
    k_quant_type="NONE",
    kv_cache_bit_width=0,
    kv_num_heads="int!",
    local_window_size=-1,
    num_heads="int!",
    qk_norm_epsilon=1e-6,
    qk_output=0,
    rotary_interleaved=0,
    scale="float",
    sliding_window_cache=0,
    smooth_softmax=-1,
    softcap=0.0,
    v_quant_type="NONE",
)
def group_query_attention(call: Call) -> Results:
    """Causal attention of decoders: heads share keys, the cache holds those before.

    Batch b has ``seqlens_k[b] + 1`` positions now; what is new stands behind what was there.
    """
    _refuse_group(call)
    operands: list[Any] = call.inputs[:7]
    query, key, value, past_key, past_value, lengths, total = operands
    heads, shared = (require_heads(call.node, name) for name in ("num_heads", "kv_num_heads"))
    if key is None:
        size = call.size(query, 2) // (heads + 2 * shared)
        sizes = call.constant([heads * size, shared * size, shared * size], "int64")
        query, key, value = call.Split(query, sizes, axis=2, outputs=3)
    else:
        size = call.size(query, 2) // heads
    query = _normalized(call, query, call.input("q_norm_weight"), size)
    key = _normalized(call, key, call.input("k_norm_weight"), size)
    count = _count(call, query, 1)
    ends = call.Add(call.Reshape(call.Cast(lengths, to=_INT64), _axes(call, -1)), 1)
    starts = call.Max(call.Sub(ends, count), call.constant(0, "int64"))
    places = call.Add(call.Unsqueeze(starts, _axes(call, 1)), _places(call, count))
    if call.attribute("do_rotary"):
        positions = call.input("position_ids")
        positions = places if positions is None else positions
        query = _turned(call, query, positions, heads)
        key = _turned(call, key, positions, shared)
    new = [
        call.Transpose(call.Reshape(x, _split(call, x, query, shared, size)), perm=(0, 2, 1, 3))
        for x in (key, value)
    ]
    if past_key is not None:
        more = _more(call, past_key, total)
        pairs = zip((past_key, past_value), new, strict=True)
        new = [_written(call, before, after, more, starts) for before, after in pairs]
    made = _attend(
        call,
        (query, *new),
        (heads, shared),
        mask=_window(call, new[0], places, past_key is None),
        is_causal=int(past_key is None and bool(call.attribute("causal"))),
        scale=call.attribute("scale") or None,
        softcap=call.attribute("softcap"),
    )
    return [made[0], *new]


def _refuse_group(call: Call) -> None:
    """Refuse caches in bytes and of a window, sinks, and scores as outputs."""
    plain = {"sliding_window_cache": 0, "qk_output": 0, "k_quant_type": "NONE"}
    for name, usual in {**plain, "v_quant_type": "NONE", "kv_cache_bit_width": 0}.items():
        if call.attribute(name) != usual:
            raise call.unsupported(f"{name}={call.attribute(name)}")
    if call.attribute("smooth_softmax") == 1:
        raise call.unsupported("smooth_softmax=1")
    for name in ("head_sink", "query_seqlens"):
        if call.input(name) is not None:
            raise call.unsupported(f"the input {name}")


def _normalized(call: Call, x: Any, weight: Value | None, size: int) -> Any:
    """Return queries or keys, each head normalized."""
    if weight is None:
        return x
    rows = call.Reshape(x, call.constant([0, 0, -1, size], "int64"))
    normal = call.RMSNormalization(rows, weight, epsilon=call.attribute("qk_norm_epsilon"))
    return call.Reshape(normal, call.constant([0, 0, -1], "int64"))


def _split(call: Call, x: Any, query: Any, heads: int, size: int) -> Any:
    """Return the shape of keys or values by heads: of as many positions as there are queries."""
    places = call.shape(query)[:2]
    if call.shape(x)[:2] == places and None not in places:
        return call.constant([0, 0, heads, size], "int64")
    return call.Concat(call.Shape(query, start=0, end=2), _axes(call, heads, size), axis=0)


def _more(call: Call, past: Any, total: Any) -> Any:
    """Return how many positions a cache lacks, a vector of one."""
    before = _count(call, past, 2)
    whole = call.Max(before, call.Reshape(call.Cast(total, to=_INT64), call.constant([], "int64")))
    return call.Unsqueeze(call.Sub(whole, before), _axes(call, 0))


def _written(call: Call, past: Any, new: Any, more: Any, starts: Any) -> Any:
    """Return a cache, made long enough, with what is new where each batch ends."""
    shape = call.Concat(
        call.Shape(past, start=0, end=2), more, call.Shape(past, start=3, end=4), axis=0
    )
    zeros = call.Expand(call.constant(0, call.dtype(past)), shape)
    return call.TensorScatter(call.Concat(past, zeros, axis=2), new, starts, axis=2)


def _window(call: Call, keys: Any, places: Any, fresh: bool) -> Any:
    """Return the mask of positions behind a query, and too far before it, with the node's bias."""
    window, bias = call.attribute("local_window_size"), call.input("attention_bias")
    if not call.attribute("causal"):
        if bias is None and fresh:
            return None
        raise call.unsupported("causal=0 and a cache or bias")
    if fresh and window < 0:
        return bias
    queries = call.Unsqueeze(places, _axes(call, 1, 3))
    place = _places(call, _count(call, keys, 2))
    allowed = call.LessOrEqual(place, queries)
    if window >= 0:
        allowed = call.And(allowed, call.Greater(place, call.Sub(queries, window)))
    if bias is None:
        return allowed
    return call.Where(allowed, bias, call.constant(float("-inf"), call.dtype(bias)))
