"""Requirements of the operators of decoders: rotary embeddings, linear attention, caches."""

from __future__ import annotations

from subgraph.graph.graph import Node
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
    require_within,
)


def require_heads(node: Node, name: str) -> int:
    """Return the number of heads that attribute ``name`` gives.

    Raises:
        ShapeError: It is missing, or below 1.
    """
    heads = node.attrs.get(name, 0)
    require(isinstance(heads, int) and heads >= 1, "{} is {}, not at least 1", name, heads)
    return int(heads)


def require_split(name: str, x: Tensor, heads: int) -> int:
    """Return the elements of a head.

    Args:
        name: The operand's name in the standard.
        x: The operand [batch, positions, heads * size].
        heads: Number of heads.

    Raises:
        ShapeError: The last dimension is no multiple of it.
    """
    require(x.shape[2] % heads == 0, "{} {} does not split into {} heads", name, x, heads)
    return x.shape[2] // heads


def rotary_operands(
    node: Node, x: Tensor, cosines: Tensor, sines: Tensor, positions: Tensor | None = None
) -> None:
    """Raise ShapeError unless there is an angle for each pair of each token (ONNX, 23).

    Args:
        node: The RotaryEmbedding node; ``num_heads`` for rank 3, ``rotary_embedding_dim`` elements
            of each head are rotated (0: all).
        x: [batch, heads, tokens, size], or [batch, tokens, heads * size].
        cosines: [batch, tokens, pairs], or with positions [rows, pairs].
        sines: As the cosines.
        positions: The row of cosines and sines for each token [batch, tokens], int64.
    """
    require_rank("X", x, 3, 4)
    require_dtype("cos_cache", cosines, x.dtype)
    require_dtype("sin_cache", sines, x.dtype)
    if x.rank == 3:
        (batch, tokens, _), size = x.shape, require_split("X", x, require_heads(node, "num_heads"))
    else:
        batch, _, tokens, size = x.shape
    rotated = node.attrs.get("rotary_embedding_dim", 0)
    require(isinstance(rotated, int) and rotated >= 0, "rotary_embedding_dim is {}", rotated)
    rotated = rotated or size
    require(
        rotated % 2 == 0 and size >= rotated,
        "rotary_embedding_dim is {}; it must be even, and at most {}, the size of a head",
        rotated,
        size,
    )
    half = rotated // 2
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


# Update rules of LinearAttention: "g" needs factors of decay, "d" an update rate.
UPDATE_RULES = {"linear": "", "gated": "g", "delta": "d", "gated_delta": "gd"}


def require_rule(node: Node, decay: Tensor | None, beta: Tensor | None) -> str:
    """Require the operands of the update rule; return what the rule needs, see `UPDATE_RULES`."""
    rule = require_choice(node, "update_rule", "gated_delta", *UPDATE_RULES)
    needs = UPDATE_RULES[rule]
    require("g" not in needs or decay is not None, "update_rule {!r} needs decay", rule)
    require("d" not in needs or beta is not None, "update_rule {!r} needs beta", rule)
    return needs


def linear_attention_operands(
    node: Node, query: Tensor, key: Tensor, value: Tensor, past: Tensor | None = None,
    decay: Tensor | None = None, beta: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless heads, state, decay and update rate fit (ONNX, 27).

    Args:
        node: The LinearAttention node: numbers of heads, and the update rule.
        query: [batch, tokens, heads * key_size].
        key: [batch, tokens, kv_heads * key_size]; kv_heads divides heads.
        value: [batch, tokens, kv_heads * value_size].
        past: State to begin with [batch, kv_heads, key_size, value_size].
        decay: [batch, tokens, kv_heads or kv_heads * key_size], which gated rules need.
        beta: Update rates [batch, tokens, kv_heads or 1], which delta rules need.
    """
    for name, operand in (("query", query), ("key", key), ("value", value)):
        require_rank(name, operand, 3)
        require_dtype(name, operand, query.dtype)
    heads, kv_heads = require_heads(node, "q_num_heads"), require_heads(node, "kv_num_heads")
    require(
        heads % kv_heads == 0,
        "{} heads of queries are no multiple of {} heads of keys",
        heads,
        kv_heads,
    )
    key_size = require_split("query", query, heads)
    value_size = require_split("value", value, kv_heads)
    batch, tokens = query.shape[:2]
    require_shape("key", key, (batch, tokens, kv_heads * key_size), "heads of the queries' size")
    require_shape("value", value, (batch, tokens, value.shape[2]), "one for each query")
    state = (batch, kv_heads, key_size, value_size)
    require_shape("past_state", past, state, "a matrix for each head")
    require_rule(node, decay, beta)
    for name, gate, other in (("decay", decay, kv_heads * key_size), ("beta", beta, 1)):
        if gate is None:
            continue
        require_rank(name, gate, 3)
        require_dtype(name, gate, query.dtype)
        columns = gate.shape[2]
        require_shape(name, gate, (batch, tokens, columns), "one for each token")
        require(
            columns in (kv_heads, other),
            "{} has {} columns, {} or {} are needed for {} heads",
            name,
            columns,
            kv_heads,
            other,
            kv_heads,
        )
