"""ONNX Runtime's operators of decoders with hyper-connections and Engram's tables of n-grams.

Hyper-connections (Zhu et al., arXiv 2409.19606) run several residual streams beside a block; Engram
(DeepSeek, 2026) adds rows of tables that hashes of the last words select.
"""

from __future__ import annotations

from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_dtype,
    require_rank,
    require_shape,
    require_whole_number,
    require_within,
)

from .linear_attention import END

# Hyper-connections


def _streams(node: Node, x: Tensor) -> tuple[int, ...]:
    """Return the shape of the streams, ``[..., branches, size]``."""
    branches = require_whole_number(node, "num_branches", 0, least=0)
    if not branches:
        require(x.rank >= 2, "streams of shape {} have no branches", list(x.shape))
        return x.shape
    require(x.rank >= 1 and x.shape[-1] % branches == 0, "{} are no {} branches", x, branches)
    return (*x.shape[:-1], branches, x.shape[-1] // branches)


def _require_gates(name: str, gates: Tensor, shape: tuple[int, ...], flat: bool) -> None:
    """Raise ShapeError unless there is a gate for each branch, or each element.

    Args:
        name: Name of the operand.
        gates: The gates.
        shape: [..., branches, size].
        flat: Whether elements may be in one dimension, [..., branches * size].
    """
    *batch, branches, size = shape
    allowed = [(*batch, branches), (*batch, branches, 1), (*batch, branches, size)]
    allowed += [(*batch, branches * size)] if flat else []
    fits = any(gates.rank == len(form) and gates.shape == form for form in allowed)
    require(fits, "{} is {}; it must have one of the shapes {}", name, gates, allowed)


def pre_mix_operands(node: Node, x: Tensor, gates: Tensor) -> None:
    """Raise ShapeError unless there is a gate for each branch, or each element.

    Args:
        node: The HyperConnectionPreMix.
        x: [..., branches, size]; with ``num_branches`` [..., branches * size].
        gates: [..., branches], [..., branches, 1 or size], or in the form of ``x``.
    """
    _require_gates("pre_mix", gates, _streams(node, x), bool(node.attrs.get("num_branches")))


def _grouped(call: Call, x: Any) -> Any:
    """Return the streams in float32, [..., branches, size]."""
    x, branches = call.cast(x, "float32"), call.attribute("num_branches")
    if not branches:
        return x
    row = call.shape(x)[-1]
    # Reshape cannot compute a size (-1) if another dimension is empty.
    sizes = [branches, row // branches if isinstance(row, int) else -1]
    return call.Reshape(x, call.Concat(call.Shape(x, end=-1), sizes, axis=0))


def _gates(call: Call, gates: Any, x: Any) -> Any:
    """Return gates in float32, in a form that broadcasts to the grouped streams."""
    gates = call.cast(gates, "float32")
    if call.rank(gates) == call.rank(x):
        return gates
    if call.attribute("num_branches") and call.size(gates, -1) != call.size(x, -2):
        return call.Reshape(gates, call.Shape(x))
    return call.Unsqueeze(gates, [-1])


@function(
    "HyperConnectionPreMix",
    "streams, pre_mix -> output",
    requires=pre_mix_operands,
    num_branches=0,
    reduction_scale=1.0,
)
def hyper_connection_pre_mix(call: Call) -> Results:
    """Return the sum of streams times their gates, in float32."""
    x = _grouped(call, call.inputs[0])
    products = call.Mul(x, _gates(call, call.inputs[1], x))
    total = call.ReduceSum(products, [-2], keepdims=0)
    scaled = call.Mul(total, call.attribute("reduction_scale"))
    return [call.cast(scaled, call.dtype(call.inputs[0]))]


def post_mix_operands(
    node: Node, x: Tensor, block: Tensor, gates: Tensor, mix: Tensor | None = None
) -> None:
    """Raise ShapeError unless the operands are those of the same streams.

    Args:
        node: The HyperConnectionPostMix.
        x: [..., branches, size]; with ``num_branches`` [..., branches * size].
        block: [..., size].
        gates: [..., branches] or [..., branches, 1 or size].
        mix: [..., branches, branches].
    """
    shape = _streams(node, x)
    *batch, branches, size = shape
    require_dtype("block_output", block, x.dtype)
    require_shape("block_output", block, (*batch, size), "an element for each of a stream")
    _require_gates("post_mix", gates, shape, flat=False)
    require_shape("stream_mix", mix, (*batch, branches, branches), "a factor for each two streams")
    require_dtype("stream_mix", mix, gates.dtype)


@function(
    "HyperConnectionPostMix",
    "streams, block_output, post_mix, stream_mix? -> output",
    requires=post_mix_operands,
    num_branches=0,
)
def hyper_connection_post_mix(call: Call) -> Results:
    """Mix the streams and add a block's output times their gates, in float32."""
    given, block, gates, mix = call.inputs
    x = _grouped(call, given)
    rank = call.rank(x)
    added = call.Unsqueeze(call.cast(block, "float32"), [-2])
    added = call.Mul(_gates(call, gates, x), added)
    if mix is not None:
        swapped = (*range(rank - 2), rank - 1, rank - 2)
        x = call.MatMul(call.Transpose(call.cast(mix, "float32"), perm=swapped), x)
    total = call.Reshape(call.Add(x, added), call.Shape(given))
    return [call.cast(total, call.dtype(given))]


def branchwise_operands(node: Node, x: Tensor, scale: Tensor | None = None) -> None:
    """Raise ShapeError unless rows are whole branches, and the scale is that of one or of all.

    Args:
        node: The BranchwiseRMSNorm.
        x: [..., branches, size]; with ``num_branches`` [..., branches * size].
        scale: [branches * size], [branches, size] or [size].
    """
    *_, branches, size = _streams(node, x)
    if scale is not None and scale.shape not in ((branches * size,), (branches, size)):
        require_shape("scale", scale, (size,), "one for each element of a branch, or of all")


@function(
    "BranchwiseRMSNorm",
    "X, scale? -> Y",
    requires=branchwise_operands,
    epsilon=1e-5,
    num_branches=0,
)
def branchwise_rms_norm(call: Call) -> Results:
    """RMS normalization of the branches of a row, in float32."""
    given, scale = call.inputs
    x = _grouped(call, given)
    if scale is not None and call.rank(scale) == 1 and call.shape(scale)[0] != call.shape(x)[-1]:
        scale = call.Reshape(scale, call.Shape(x, start=-2))
    normal = call.Reshape(_normalized(call, x, scale), call.Shape(given))
    return [call.cast(normal, call.dtype(given))]


def _normalized(call: Call, x: Any, scale: Any) -> Any:
    """Return the RMS normalization of rows in float32, times factors of several rows (or None)."""
    x = call.cast(x, "float32")
    ones = call.Expand(call.constant(1.0, "float32"), call.Shape(x, start=-1))
    normal = call.RMSNormalization(x, ones, axis=-1, epsilon=call.attribute("epsilon"))
    return normal if scale is None else call.Mul(normal, call.cast(scale, "float32"))


# Engram


def gate_operands(
    node: Node, key: Tensor, query: Tensor, value: Tensor, key_scale: Tensor, query_scale: Tensor,
    value_scale: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless keys, queries and values are those of the same tokens.

    Args:
        node: The EngramGate.
        key: [batch, tokens, streams, size].
        query: As ``key``.
        value: [batch, tokens, size].
        key_scale: Factors of normalized keys, [streams, size].
        query_scale: Those of queries.
        value_scale: Those of the gated value; needed for the second output.
    """
    require_rank("key", key, 4)
    batch, tokens, streams, size = key.shape
    require_shape("query", query, key.shape, "that of key")
    require_shape("value", value, (batch, tokens, size), "an element for each of a key")
    scales = {"key_norm_scale": key_scale, "query_norm_scale": query_scale}
    for name, scale in {**scales, "conv_norm_scale": value_scale}.items():
        require_shape(name, scale, (streams, size), "a factor for each element of a token")
        require_dtype(name, scale, key.dtype)
    require(size != 0, "keys of shape {} have no elements", list(key.shape))
    missing = len(node.outputs) > 1 and value_scale is None
    require(not missing, "gated_value_normed needs conv_norm_scale")


@function(
    "EngramGate",
    "key, query, value, key_norm_scale, query_norm_scale, conv_norm_scale?"
    " -> output, gated_value_normed?",
    requires=gate_operands,
    epsilon=1e-5,
)
def engram_gate(call: Call) -> Results:
    """Multiply values by gates that follow from keys and queries, in float32."""
    key, query, value, key_scale, query_scale, value_scale = call.inputs
    dtype, size = call.dtype(key), call.size(key, 3)
    factors = _normalized(call, key, key_scale), _normalized(call, query, query_scale)
    dot = call.ReduceSum(call.Mul(*factors), [-1], keepdims=1)
    dot = call.Mul(dot, size**-0.5)
    root = call.Sqrt(call.Max(call.Abs(dot), 1e-6))
    gate = call.Sigmoid(call.Mul(call.Sign(dot), root))
    gated = call.Mul(gate, call.Unsqueeze(call.cast(value, "float32"), [2]))
    normal = None if value_scale is None else _normalized(call, gated, value_scale)
    return [call.cast(gated, dtype), None if normal is None else call.cast(normal, dtype)]


def hash_operands(
    node: Node, ids: Tensor, multipliers: Tensor, sizes: Tensor, past: Tensor | None = None,
    offsets: Tensor | None = None, end: Tensor | None = None, segments: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless there is a table for each head of each n-gram.

    Args:
        node: The NGramHashMapping.
        ids: [batch, tokens].
        multipliers: At least one for each word of the longest n-gram.
        sizes: Rows of each table; ``n_head_per_ngram`` tables for 2-grams, then for 3-grams, ...
        past: Ids before the first, [batch, words of the longest n-gram - 1].
        offsets: Added to the row of each table.
        end: The id that ends a text.
        segments: Numbers of the texts, [batch, tokens].
    """
    longest = require_whole_number(node, "max_ngram_size", least=2, most=1 << 6)
    heads = require_whole_number(node, "n_head_per_ngram", least=1, most=1 << 12)
    require_rank("input_ids", ids, 2)
    require_rank("multipliers", multipliers, 1)
    require(multipliers.shape[0] >= longest, "multipliers are fewer than {}", longest)
    tables = ((longest - 1) * heads,)
    require_shape("vocab_sizes", sizes, tables, "one for each table")
    require_within("vocab_sizes", sizes, 1, (1 << 63) - 1)
    require_shape("head_offsets", offsets, tables, "one for each table")
    require_shape("past_ids", past, (ids.shape[0], longest - 1), "the ids before the first")
    require_shape("eos_token_id", end, (), "one number")
    require_shape("segment_ids", segments, ids.shape, "that of input_ids")
    for name, operand in (("multipliers", multipliers), ("vocab_sizes", sizes), ("past_ids", past)):
        require_dtype(name, operand, ids.dtype)
    for name, operand in (("head_offsets", offsets), ("eos_token_id", end)):
        require_dtype(name, operand, ids.dtype)


@function(
    "NGramHashMapping",
    "input_ids, multipliers, vocab_sizes, past_ids?, head_offsets?, eos_token_id?, segment_ids?"
    " -> hash_ids, present_ids?",
    requires=hash_operands,
    max_ngram_size="int!",
    n_head_per_ngram="int!",
    pad_id="int!",
    reset_on_eos=0,
)
def ngram_hash_mapping(call: Call) -> Results:
    """Return rows of tables for the n-grams that end at each token, and the last ids."""
    ids, multipliers, sizes, past, offsets, end, segments = call.inputs
    longest, heads = call.attribute("max_ngram_size"), call.attribute("n_head_per_ngram")
    dtype, before = call.dtype(ids), longest - 1
    missing = call.constant(call.attribute("pad_id"), dtype) if end is None else end
    if past is None:
        past = call.Expand(missing, call.Concat(call.Shape(ids, end=1), [before], axis=0))
    known = call.Concat(past, ids, axis=1)

    def shifted(x: Any, words: int) -> Any:
        """Return ``x``, which has ``before`` columns more, as it was some words before."""
        stop = [-words if words else END]
        return call.Slice(x, [before - words], stop, [1])

    # Whether a text ends at a word, or begins there: words before that do not count.
    ends = (
        call.Equal(known, missing) if end is not None and call.attribute("reset_on_eos") else None
    )
    begins = None
    if segments is not None:
        first = call.Slice(segments, [0], [1], [1])
        former = call.Slice(call.Concat(first, segments, axis=1), [0], [-1], [1])
        changes = call.cast(call.Not(call.Equal(segments, former)), "int32")
        begins = call.cast(call.Pad(changes, [0, before, 0, 0]), "bool")
    # Sizes that are not positive are errors of Gather, as are indices of no table.
    tables = before * heads
    at = call.Where(call.Less(sizes, 1), [tables], [*range(tables)])
    sizes = call.Gather(sizes, at)
    found: list[Any] = []
    hashed: Any = None
    hidden: Any = None
    for k in range(longest):
        word = shifted(known, k)
        if k:
            for flags, words in ((ends, k), (begins, k - 1)):
                if flags is not None:
                    flag = shifted(flags, words)
                    hidden = flag if hidden is None else call.Or(hidden, flag)
            word = word if hidden is None else call.Where(hidden, missing, word)
        factor = call.Slice(multipliers, [k], [k + 1], [0])
        product = call.Mul(word, factor)
        hashed = product if hashed is None else call.BitwiseXor(hashed, product)
        if k:
            part = [(k - 1) * heads], [k * heads], [0]
            found.append(call.Mod(call.Unsqueeze(hashed, [2]), call.Slice(sizes, *part)))
    rows = found[0] if len(found) == 1 else call.Concat(*found, axis=2)
    last = call.Slice(known, [-before], [END], [1])
    return [rows if offsets is None else call.Add(rows, offsets), last]
