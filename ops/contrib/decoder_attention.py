"""ONNX Runtime's attention operators of decoders, which take one token or a part of a sequence.

RotaryEmbedding, GroupQueryAttention, and DecoderMaskedMultiHeadAttention, which takes one token and
a cache with room for more.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    known_numbers,
    require,
    require_dtype,
    require_rank,
    require_shape,
    require_single,
    require_within,
)
from subgraph.ops.attention.decoding import require_heads, require_split

from .attention import attend, dimension, mask_scores, unpacked
from .transformer import added


def rotary_operands(
    node: Node, x: Tensor, positions: Tensor, cosines: Tensor, _sines: Tensor
) -> None:
    """Raise ShapeError unless a table has the angles of a head, and positions are the first or all.

    Heads that are longer than ``rotary_embedding_dim`` keep their last elements.

    Args:
        node: The RotaryEmbedding.
        x: [batch, heads, positions, size] or [batch, positions, heads * size].
        positions: [1], the first position of all batches, or [batch, positions].
        cosines: [rows, pairs].
    """
    require_rank("cos_cache", cosines, 2)
    require(cosines.shape[1] >= 1, "cos_cache has no angles")
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
    """Rotate pairs of elements by the angles of their positions."""
    x, positions, cosines, _ = call.inputs
    call.refuse_all_but(is_packed_batching=0, scale=1.0)
    heads = call.attribute("num_heads")
    if call.rank(x) == 3 and not heads:
        # Without num_heads the table of angles says the size of a head: a cosine for each pair of
        # elements.
        heads = call.size(x, 2) // (2 * call.size(cosines, 1))
    if call.rank(positions) == 1:  # of the first token of each batch
        tokens = call.Range(0, dimension(call, x, 1 if call.rank(x) == 3 else 2), 1)
        row = call.Unsqueeze(call.Add(positions, tokens), [0])
        batch = call.Concat(call.Shape(x, start=0, end=1), [1], axis=0)
        positions = call.Expand(row, batch)
    return [_rotated(call, x, positions, heads)]


def _rotated(call: Call, x: Any, positions: Any, heads: int) -> Any:
    """Return RotaryEmbedding of queries or keys by the node's table of angles."""
    rank = call.rank(x)
    interleaved = "interleaved" if call.node.op_type == "RotaryEmbedding" else "rotary_interleaved"
    # GroupQueryAttention has no such attribute; the table of angles says the size.
    size = 0 if "rotary" in interleaved else call.attribute("rotary_embedding_dim")
    cosines, sines = call.input("cos_cache"), call.input("sin_cache")
    if not size:  # elements of a head after those pairs are copied
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


def multimodal_rotary_operands(
    node: Node, x: Tensor, positions: Tensor, cosines: Tensor, sines: Tensor
) -> None:
    """Raise ShapeError unless the three sections are the pairs that are rotated.

    Args:
        node: The MRotaryEmbedding: ``mrope_section``, and the attributes of RotaryEmbedding.
        x: [batch, heads, tokens, size], or [batch, tokens, heads * size].
        positions: [3, batch, tokens], int64: time, height and width.
        cosines: [rows, pairs].
        sines: As the cosines.
    """
    require_rank("input", x, 3, 4)
    tokens = (x.shape[0], x.shape[1 if x.rank == 3 else 2])
    require_dtype("position_ids", positions, "int64")
    require_shape("position_ids", positions, (3, *tokens), "three for each token")
    require_rank("cos_cache", cosines, 2)
    require_shape("sin_cache", sines, cosines.shape, "that of cos_cache")
    sections = node.attrs.get("mrope_section", ())
    fits = len(sections) == 3 and min(sections) >= 0 and sum(sections) == cosines.shape[1]
    require(fits, "mrope_section is {}; cos_cache has {} pairs", sections, cosines.shape[1])
    layout = node.attrs.get("mrope_layout", 0)
    require(layout in (0, 1), "mrope_layout is {}; it is 0 or 1", layout)
    rotated, heads = (node.attrs.get(n, 0) for n in ("rotary_embedding_dim", "num_heads"))
    require(heads >= 1 or (x.rank == 4 and not rotated), "num_heads is needed")
    require(rotated in (0, 2 * sum(sections)), "rotary_embedding_dim is {}", rotated)
    if not rotated:
        size = x.shape[3] if x.rank == 4 else require_split("input", x, heads)
        require(size == 2 * sum(sections), "heads of {} for {} pairs", size, sum(sections))
    require_within("position_ids", positions, 0, cosines.shape[0] - 1)


@function(
    "MRotaryEmbedding",
    "input, position_ids, cos_cache, sin_cache -> output",
    requires=multimodal_rotary_operands,
    interleaved=0,
    is_packed_batching=0,
    mrope_layout=0,
    mrope_section="ints!",
    num_heads=0,
    rotary_embedding_dim=0,
    scale=1.0,
)
def multimodal_rotary_embedding(call: Call) -> Results:
    """Rotate pairs by angles of three positions, each for its section of the pairs (M-RoPE)."""
    x, positions, cosines, sines = call.inputs
    call.refuse_all_but(is_packed_batching=0, scale=1.0)
    sections = [int(size) for size in call.attribute("mrope_section")]
    pairs = sum(sections)
    stream = np.repeat(np.arange(3), sections)
    if call.attribute("mrope_layout") == 1:
        # Height and width take every third pair, from the second and the third on.
        stream = np.zeros(pairs, np.int64)
        for k in (1, 2):
            stream[k : min(3 * sections[k], pairs) : 3] = k
    # Gather would count negative positions from the end of the table.
    last = call.constant(np.iinfo(np.int64).max, "int64")
    positions = call.Where(call.Less(positions, 0), last, positions)
    parts = call.Split(positions, axis=0, num_outputs=3, outputs=3)
    rows = [call.Squeeze(part, [0]) for part in parts]
    tables: list[Any] = []
    for table in (cosines, sines):
        angles = [call.Gather(table, row) for row in rows]
        chosen = angles[0]
        for k in (1, 2):
            chosen = call.Where(call.constant(stream == k), angles[k], chosen)
        tables.append(chosen)
    rotary: dict[str, Any] = {
        "interleaved": call.attribute("interleaved"),
        "rotary_embedding_dim": 2 * pairs,
        "num_heads": call.attribute("num_heads") if call.rank(x) == 3 else None,
    }
    return [call.RotaryEmbedding(x, *tables, **rotary)]


def group_query_operands(
    node: Node, query: Tensor, key: Tensor | None, value: Tensor | None,
    past_key: Tensor | None, past_value: Tensor | None, lengths: Tensor, total: Tensor,
    cosines: Tensor | None = None, sines: Tensor | None = None, *_others: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError unless keys, caches and angles are pairs, and each batch has a length.

    Args:
        node: The GroupQueryAttention.
        query: [batch, positions, heads * size], or packed with keys and values.
        key: [batch, positions, kv_heads * size]; None: packed.
        value: As ``key``.
        past_key: Cached keys [batch, kv_heads, positions, size].
        past_value: Cached values, as ``past_key``.
        lengths: ``seqlens_k`` [batch] or [batch, 1], int32: all positions of each batch, less 1.
        total: Positions of the longest batch, one number.
        cosines: Table of angles, needed for ``do_rotary``.
        sines: As ``cosines``.
    """
    require_rank("query", query, 3)
    pairs = {
        "key and value": (key, value),
        "past_key and past_value": (past_key, past_value),
        "cos_cache and sin_cache": (cosines, sines),
    }
    for names, (first, second) in pairs.items():
        require((first is None) == (second is None), "{}: one is given without the other", names)
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
    """Causal attention of decoders with a cache, in which heads share keys.

    Batch b has ``seqlens_k[b] + 1`` positions, the new ones at the end.
    """
    call.refuse_all_but(
        sliding_window_cache=0, qk_output=0, k_quant_type="NONE", v_quant_type="NONE",
        kv_cache_bit_width=0,
    )  # fmt: skip
    call.refuse_inputs("query_seqlens")
    operands: list[Any] = call.inputs[:7]
    query, key, value, past_key, past_value, lengths, total = operands
    heads, kv_heads = (require_heads(call.node, name) for name in ("num_heads", "kv_num_heads"))
    if key is None:
        size = call.size(query, 2) // (heads + 2 * kv_heads)
        sizes = [heads * size, kv_heads * size, kv_heads * size]
        query, key, value = call.Split(query, sizes, axis=2, outputs=3)
    else:
        size = call.size(query, 2) // heads
    query = _normalized(call, query, call.input("q_norm_weight"), size)
    key = _normalized(call, key, call.input("k_norm_weight"), size)
    count = dimension(call, query, 1)
    ends = call.Add(call.Reshape(call.cast(lengths, "int64"), [-1]), 1)
    # In a prompt of sequences of several lengths the shorter ones are padded at their ends, so that
    # they have more queries than positions and still begin at 0.
    starts = call.Max(call.Sub(ends, count), call.constant(0, "int64"))
    if call.attribute("do_rotary"):
        positions = call.input("position_ids")
        if positions is None:
            first = call.Unsqueeze(starts, [1])
            positions = call.Add(first, call.Range(0, count, 1))
        query = _rotated(call, query, positions, heads)
        key = _rotated(call, key, positions, kv_heads)
    new = [
        call.Transpose(
            call.Reshape(x, _shape_by_heads(call, x, query, kv_heads, size)), perm=(0, 2, 1, 3)
        )
        for x in (key, value)
    ]
    if past_key is not None:
        # The cache of the file may be shorter than all positions, or have room for more.
        missing = _missing_positions(call, past_key, total)
        pairs = zip((past_key, past_value), new, strict=True)
        new = [_updated_cache(call, before, after, missing, starts) for before, after in pairs]
    made = attend(
        call,
        (query, *new),
        (heads, kv_heads),
        # 0 means the default, 1 / sqrt(size), which the standard has for a missing attribute.
        scale=call.attribute("scale") or None,
        **_visibility(call, new[0], starts, heads, past_key is None),
    )
    return [made[0], *new]


def _sinks(call: Call, keys: Any, heads: int) -> Value | None:
    """Return the score of each head's sink; None if there are none.

    ``smooth_softmax`` is a sink of score 0, unless there is an input with the scores.
    """
    found: Value | None = call.input("head_sink")
    if found is None and call.attribute("smooth_softmax") == 1:
        found = call.constant(np.zeros(heads), call.dtype(keys))
    return found


def _normalized(call: Call, x: Any, weight: Value | None, size: int) -> Any:
    """Return queries or keys with each head normalized, if there is a weight."""
    if weight is None:
        return x
    hidden = call.shape(x)[2]
    # Reshape cannot compute a size (-1) if another dimension is empty.
    last, heads = (hidden, hidden // size) if isinstance(hidden, int) else (-1, -1)
    rows = call.Reshape(x, [0, 0, heads, size])
    normal = call.RMSNormalization(rows, weight, epsilon=call.attribute("qk_norm_epsilon"))
    return call.Reshape(normal, [0, 0, last])


def _shape_by_heads(call: Call, x: Any, query: Any, heads: int, size: int) -> Any:
    """Return the shape of keys or values split into heads, with as many positions as queries."""
    sizes = call.shape(query)[:2]
    if call.shape(x)[:2] == sizes and None not in sizes:
        return [0, 0, heads, size]
    return call.Concat(call.Shape(query, start=0, end=2), [heads, size], axis=0)


def _missing_positions(call: Call, past: Any, total: Any) -> Any:
    """Return the number of positions that a cache lacks, a vector of one element."""
    before = dimension(call, past, 2)
    wanted = call.Max(before, call.Reshape(call.cast(total, "int64"), []))
    return call.Unsqueeze(call.Sub(wanted, before), [0])


def _updated_cache(call: Call, past: Any, new: Any, missing: Any, starts: Any) -> Any:
    """Return a cache, padded by ``missing`` positions, with new entries from ``starts`` on."""
    shape = call.Concat(
        call.Shape(past, start=0, end=2), missing, call.Shape(past, start=3, end=4), axis=0
    )
    zeros = call.Expand(call.constant(0, call.dtype(past)), shape)
    return call.TensorScatter(call.Concat(past, zeros, axis=2), new, starts, axis=2)


def _visibility(call: Call, keys: Any, starts: Any, heads: int, fresh: bool) -> dict[str, Any]:
    """Return which keys queries see, as arguments of `attend`.

    Args:
        call: The node.
        keys: All keys.
        starts: Positions of the first queries, [batch].
        heads: Heads of queries.
        fresh: Whether there is no cache: positions begin at 0.
    """
    causal, bias = bool(call.attribute("causal")), call.input("attention_bias")
    if not (causal or (bias is None and fresh)):
        raise call.unsupported("causal=0 and a cache or bias")
    window = max(int(call.attribute("local_window_size")), 0) if causal else 0
    sinks, softcap = _sinks(call, keys, heads), call.attribute("softcap")
    found: dict[str, Any] = {"mask": bias, "is_causal": int(causal), "softcap": softcap}
    if fresh and not window and sinks is None:
        return found
    return found | {"positions": (None if fresh else starts, sinks, window)}


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
    call.refuse_inputs("beam_width", "cache_indirection")
    if call.is_used("qk"):
        raise call.unsupported("the output qk")
    heads = require_heads(call.node, "num_heads")
    query, key, value = unpacked(call, query, key, value, call.input("bias"))
    scale = call.attribute("scale") or None  # 0 means the default
    if call.rank(key) == 4:
        mask = added(call, mask_scores(call, padding, dimension(call, key, 2), query), scores)
        made = attend(call, (query, key, value), (heads, heads), mask=mask, scale=scale)
        return [made[0], None, None]
    if not call.attribute("past_present_share_buffer"):
        raise call.unsupported("past_present_share_buffer=0")
    start = call.Reshape(call.cast(before, "int64"), [1])
    starts = call.Expand(start, call.Shape(query, start=0, end=1))
    shape = [0, 0, heads, call.size(query, 2) // heads]
    cache: list[Any] = []
    for x, past in ((key, past_key), (value, past_value)):
        new = call.Transpose(call.Reshape(x, shape), perm=(0, 2, 1, 3))
        cache.append(call.TensorScatter(past, new, starts, axis=2))
    room = dimension(call, past_key, 2)
    mask = call.LessOrEqual(call.Range(0, room, 1), start)
    if padding is not None:
        # Positions without an entry are those that the mask hides anyway.
        padding = _extended(call, call.cast(padding, "bool"), room)
    if scores is not None:
        scores = _extended(call, scores, room)
    scores = added(call, mask_scores(call, padding, room, query), scores)
    if scores is None:
        mask = call.Unsqueeze(mask, [0, 1, 2])
    else:
        mask = call.Where(mask, scores, call.constant(float("-inf"), call.dtype(query)))
    made = attend(call, (query, *cache), (heads, heads), mask=mask, scale=scale)
    return [made[0], *cache]


def _extended(call: Call, x: Any, room: Any) -> Any:
    """Return an operand with zeros behind its last axis, up to a size of ``room``."""
    rank = call.rank(x)
    missing = call.Unsqueeze(call.Sub(room, dimension(call, x, rank - 1)), [0])
    shape = call.Concat(call.Shape(x, start=0, end=rank - 1), missing, axis=0)
    return call.Concat(x, call.Expand(call.constant(0, call.dtype(x)), shape), axis=-1)
