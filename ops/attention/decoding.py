"""Operators of decoders: what the operands of rotary embeddings, states and caches must satisfy."""

from __future__ import annotations

from subgraph.graph.graph import Node
from subgraph.operators.requirements import (
    Tensor,
    choice,
    is_known,
    require,
    require_axis,
    require_dtype,
    require_rank,
    require_shape,
    require_within,
)


def require_heads(node: Node, name: str) -> int:
    """Return how many heads an attribute says there are; at least one."""
    heads = node.attrs.get(name, 0)
    require(isinstance(heads, int) and heads >= 1, "{} is {}, not at least 1", name, heads)
    return int(heads)


def require_split(name: str, x: Tensor, heads: int) -> int:
    """Return the size of a head of ``x`` [batch, positions, heads * size], which is whole."""
    require(x.shape[2] % heads == 0, "{} {} does not split into {} heads", name, x, heads)
    return x.shape[2] // heads


def rotary_operands(
    node: Node, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor | None = None
) -> None:
    """Raise ShapeError unless there is an angle for each pair of each token (ONNX, 23)."""
    require_rank("X", x, 3, 4)
    require_dtype("cos_cache", cosines, x.dtype)
    require_dtype("sin_cache", sines, x.dtype)
    if x.rank == 3:
        (batch, tokens, _), size = x.shape, require_split("X", x, require_heads(node, "num_heads"))
    else:
        batch, _, tokens, size = x.shape
    turned = node.attrs.get("rotary_embedding_dim", 0)
    require(isinstance(turned, int) and turned >= 0, "rotary_embedding_dim is {}", turned)
    turned = turned or size
    require(
        turned % 2 == 0 and size >= turned,
        "{} elements of a head of {} are to be turned in pairs",
        turned,
        size,
    )
    half = turned // 2
    if positions is None:
        why = "an angle for each pair of each token"
        require_shape("cos_cache", cosines, (batch, tokens, half), why)
        require_shape("sin_cache", sines, (batch, tokens, half), why)
        return
    require_rank("cos_cache", cosines, 2)
    rows = cosines.shape[0]
    require_shape("cos_cache", cosines, (rows, half), "an angle for each pair")
    require_shape("sin_cache", sines, (rows, half), "as many as there are cosines")
    require_dtype("position_ids", positions, "int64")
    require_shape("position_ids", positions, (batch, tokens), "one for each token")
    require(rows >= 1 or positions.size <= 0, "there are positions, but cos_cache is empty")
    require_within("position_ids", positions, 0, rows - 1)


_RULES = {"linear": "", "gated": "g", "delta": "d", "gated_delta": "gd"}


def linear_attention_operands(
    node: Node, query: Tensor, key: Tensor, value: Tensor, past: Tensor | None = None,
    decay: Tensor | None = None, beta: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless heads, state, decay and update rate fit (ONNX, 27)."""
    for name, given in (("query", query), ("key", key), ("value", value)):
        require_rank(name, given, 3)
        require_dtype(name, given, query.dtype)
    heads, owners = require_heads(node, "q_num_heads"), require_heads(node, "kv_num_heads")
    require(heads % owners == 0, "{} query heads do not share {} heads of keys", heads, owners)
    size, own = require_split("query", query, heads), require_split("value", value, owners)
    batch, tokens = query.shape[:2]
    require_shape("key", key, (batch, tokens, owners * size), "the size of the queries' heads")
    require_shape("value", value, (batch, tokens, value.shape[2]), "as many as queries")
    require_shape("past_state", past, (batch, owners, size, own), "a matrix for each head")
    rule = choice(node, "update_rule", "gated_delta", *_RULES)
    require("g" not in _RULES[rule] or decay is not None, "update_rule {!r} needs decay", rule)
    require("d" not in _RULES[rule] or beta is not None, "update_rule {!r} needs beta", rule)
    for name, gate, most in (("decay", decay, owners * size), ("beta", beta, 1)):
        if gate is None:
            continue
        require_rank(name, gate, 3)
        require_dtype(name, gate, query.dtype)
        columns = gate.shape[2]
        require_shape(name, gate, (batch, tokens, columns), "one for each token")
        require(columns in (owners, most), "{} {} is not of {} heads", name, gate, owners)


def flex_attention_operands(node: Node, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ShapeError unless heads of queries share those of keys and values (preview, 1)."""
    for name, given in (("Q", q), ("K", k), ("V", v)):
        require_rank(name, given, 4)
    require_dtype("K", k, q.dtype)
    batch, heads, _, size = q.shape
    shared, keys = k.shape[1:3]
    require_shape("K", k, (batch, shared, keys, size), "batch and size of a head as Q's")
    require_shape("V", v, (batch, shared, keys, v.shape[3]), "batch, heads and positions as K's")
    require(
        shared >= 1 and heads % shared == 0,
        "{} heads of queries do not share {} heads of keys",
        heads,
        shared,
    )


def tensor_scatter_operands(
    node: Node, cache: Tensor, update: Tensor, first: Tensor | None = None
) -> None:
    """Raise ShapeError unless the update fits into the cache for each sample (ONNX, 24)."""
    require(cache.rank >= 2, "past_cache has shape {}; it needs rank 2 or more", list(cache.shape))
    require_dtype("update", update, cache.dtype)
    axis = require_axis(node, cache.rank, default=-2)
    require(axis != 0, "axis is that of the samples")
    mode = choice(node, "mode", "linear", "linear", "circular")
    require_rank("update", update, cache.rank)
    count, places = update.shape[axis], cache.shape[axis]
    shape = (*cache.shape[:axis], count, *cache.shape[axis + 1 :])
    require_shape("update", update, shape, "that of the cache off the axis")
    require(places >= count, "an update of {} places into a cache of {}", count, places)
    require_dtype("write_indices", first, "int64")
    require_shape("write_indices", first, (cache.shape[0],), "one for each sample")
    if mode == "linear" and is_known(places) and is_known(count):
        require_within("write_indices", first, 0, places - count)
