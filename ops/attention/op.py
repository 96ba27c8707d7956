"""Attention and the operators of decoders: requirements, types, reference.

onnx's own inference knows only some outputs of Attention. Its reference differs from the standard
in two points, which `attention_reference` mends: raw scores (mode 0) come with the softcap, and a
mask of one row for all queries is taken for a mask of one query if attention is causal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX, Array, Dim, TensorType, ValueType
from subgraph.operators.batch_axes import along
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard, variant
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_broadcast,
    require_dtype,
    require_rank,
    require_shape,
    require_whole_number,
    require_within,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import first_type
from subgraph.ops.shared.half_precision import in_float32
from subgraph.ops.shared.strides import product

from . import decoding
from .decoding import require_heads, require_split


def _divided(a: Dim, b: int) -> Dim:
    return a // b if isinstance(a, int) else None


def _heads(type_: ValueType | None, count: Any) -> tuple[Dim, Dim, Dim, Dim] | None:
    """Return batch, heads, positions and size of a head, None if the rank is unknown.

    Args:
        type_: Type of Q, K or V.
        count: Its number of heads, needed for rank 3.

    Raises:
        ShapeError: The rank is neither 3 with a number of heads, nor 4.
    """
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    if len(type_.shape) == 4:
        return type_.shape[0], type_.shape[1], type_.shape[2], type_.shape[3]
    if len(type_.shape) != 3 or not count:
        raise ShapeError(f"Attention needs rank 4, or rank 3 with numbers of heads; got {type_}")
    return type_.shape[0], int(count), type_.shape[1], _divided(type_.shape[2], int(count))


def _required_heads(node: Node, name: str, x: Tensor, attribute: str) -> tuple[int, int, int, int]:
    """Return batch, heads, positions and size of a head of operand ``x``, called ``name``.

    ``attribute`` is the number of heads, needed for rank 3.
    """
    if x.rank == 4:
        return x.shape[0], x.shape[1], x.shape[2], x.shape[3]
    heads = require_heads(node, attribute)
    return x.shape[0], heads, x.shape[1], require_split(name, x, heads)


def attention_operands(
    node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
    past_key: Tensor | None = None, past_value: Tensor | None = None, counts: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless heads, caches and mask fit together (ONNX, 23 to 25).

    Args:
        node: The Attention node; ``q_num_heads`` and ``kv_num_heads`` for rank 3.
        q: [batch, heads, queries, size], or [batch, queries, heads * size].
        k: [batch, kv_heads, keys, size], or of rank 3 as Q; kv_heads divides heads.
        v: As K, with a size of its own.
        mask: Added to the scores, or booleans (True: seen); it broadcasts to [batch, heads,
            queries, cached and new keys], but may end before the last keys.
        past_key: Cached keys [batch, kv_heads, positions, size], with ``past_value`` or not at all.
        past_value: Cached values, of V's size.
        counts: ``nonpad_kv_seqlen`` [batch]: keys of each sample that are no padding.
    """
    require_rank("Q", q, 3, 4)
    require_rank("K", k, q.rank)
    require_rank("V", v, q.rank)
    require_dtype("K", k, q.dtype)
    batch, heads, queries, size = _required_heads(node, "Q", q, "q_num_heads")
    own = _required_heads(node, "K", k, "kv_num_heads")
    values = _required_heads(node, "V", v, "kv_num_heads")
    shared, keys = own[1], own[2]
    for name, found, wanted in (
        ("K", own, (batch, shared, keys, size)),
        ("V", values, (batch, shared, keys, values[3])),
    ):
        require(
            all(a == b for a, b in zip(found, wanted, strict=True)),
            "{} is {} as batch, heads, positions, size; {} is needed: "
            "batch and heads of K and V, K's size of a head that of Q",
            name,
            list(found),
            list(wanted),
        )
    require(
        shared >= 1 and heads % shared == 0,
        "{} heads of queries are no multiple of {} heads of keys",
        heads,
        shared,
    )
    require(
        (past_key is None) == (past_value is None),
        "past_key and past_value: one is given without the other",
    )
    if past_key is not None and past_value is not None:
        require_rank("past_key", past_key, 4)
        require_dtype("past_key", past_key, k.dtype)
        require_dtype("past_value", past_value, v.dtype)
        before = past_key.shape[2]
        require_shape("past_key", past_key, (batch, shared, before, size), "as K")
        require_shape("past_value", past_value, (batch, shared, before, values[3]), "as V")
        keys = before + keys
    _require_mask(mask, (batch, heads, queries, keys))
    require_dtype("nonpad_kv_seqlen", counts, "int64")
    require_shape("nonpad_kv_seqlen", counts, (batch,), "one for each sample")
    require_within("nonpad_kv_seqlen", counts, 0, keys)
    _require_attributes(node)


def _require_attributes(node: Node) -> None:
    """Require attributes in the ranges of the standard."""
    softcap = node.attrs.get("softcap", 0.0)
    require(softcap >= 0, "softcap is {}; it must be above 0, or 0 for none", softcap)
    mode = node.attrs.get("qk_matmul_output_mode", 0)
    require(mode in (0, 1, 2, 3), "qk_matmul_output_mode is {}, not 0, 1, 2 or 3", mode)
    precision = DTYPE_OF_ONNX.get(node.attrs.get("softmax_precision", 1), "")
    require("float" in precision, "softmax_precision {} is no float", precision)
    for name in ("left_window_size", "right_window_size"):
        require_whole_number(node, name, -1, least=-1)


def _require_mask(mask: Tensor | None, scores: tuple[int, int, int, int]) -> None:
    """Require a mask that broadcasts to the scores; it may have fewer keys."""
    if mask is None:
        return
    require_rank("attn_mask", mask, 1, 2, 3, 4)
    (mask_keys, keys), *others = zip(reversed(mask.shape), reversed(scores), strict=False)
    require(
        all(a == 1 or a == b for a, b in others) and keys >= mask_keys,
        "attn_mask has shape {}, which does not broadcast to the scores {}",
        list(mask.shape),
        list(scores),
    )


def attention(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> Sequence[ValueType | None]:
    """Return the types of Y, the present keys and values, and the scores.

    Args:
        node: The Attention node; numbers of heads for rank 3.
        types: Of Q, K, V, mask and cached keys.
        values: Not used.
    """
    q = _heads(types[0], node.attrs.get("q_num_heads"))
    k = _heads(types[1], node.attrs.get("kv_num_heads"))
    v = _heads(types[2], node.attrs.get("kv_num_heads"))
    if q is None or k is None or v is None:
        return [None] * len(node.outputs)
    dtypes = [t.dtype if isinstance(t, TensorType) else "float32" for t in types[:3]]
    total = k[2]
    past = types[4] if len(types) > 4 else None
    if past is not None:
        before = past.shape[2] if isinstance(past, TensorType) and past.shape else None
        total = before + total if isinstance(before, int) and isinstance(total, int) else None
    rank = types[0].rank if isinstance(types[0], TensorType) else None
    shape = (q[0], q[1], q[2], v[3]) if rank == 4 else (q[0], q[2], product((q[1], v[3])))
    return [
        TensorType(dtypes[0], shape),
        TensorType(dtypes[1], (k[0], k[1], total, k[3])),
        TensorType(dtypes[2], (v[0], v[1], total, v[3])),
        TensorType(dtypes[0], (q[0], q[1], q[2], total)),
    ][: len(node.outputs)]


def attention_reference(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Attention's results: onnx.reference's, corrected as said above."""
    inputs = list(inputs)
    if inputs[0].ndim == 3 and not inputs[0].size:  # onnx.reference cannot split nothing into heads
        return _without_queries(node, inputs)
    scale = node.attrs.get("scale")
    if scale is not None and inputs[0].dtype == np.float64:
        # onnx.reference takes the root of the attribute in float32.
        inputs[0] = inputs[0] * float(scale)
        node = variant(node, scale=1.0)
    if len(inputs) > 3 and inputs[3] is not None and node.attrs.get("is_causal", 0):
        mask, queries = inputs[3], inputs[0].shape[-2]
        inputs[3] = np.broadcast_to(mask, (*mask.shape[:-2], queries, mask.shape[-1]))
    results = list(standard(node, inputs))
    mode = int(node.attrs.get("qk_matmul_output_mode", 0))
    if len(results) > 3 and mode == 0 and float(node.attrs.get("softcap", 0.0)):
        without = variant(node, drop=("softcap",))
        results[3] = standard(without, inputs)[3]
    return results


def _without_queries(node: Node, inputs: list[Any]) -> Sequence[Any]:
    """Return the results for no queries, ``[batch, 0, width]``, by those of heads."""
    plain = variant(node, drop=("q_num_heads", "kv_num_heads"))
    y, *rest = attention_reference(plain, [*_by_heads(node, inputs[:3]), *inputs[3:]])
    batch, heads, queries, size = y.shape
    return [y.swapaxes(1, 2).reshape(batch, queries, heads * size), *rest]


def _by_heads(node: Node, operands: Sequence[Any]) -> list[Any]:
    """Return Q, K and V, ``[batch, positions, heads * size]``, split into heads."""
    counts = [int(node.attrs[f"{name}_num_heads"]) for name in ("q", "kv", "kv")]
    return [
        x.reshape(*x.shape[:2], heads, x.shape[2] // heads).swapaxes(1, 2)
        for x, heads in zip(operands, counts, strict=True)
    ]


def decoder_attention_operands(
    node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None,
    starts: Tensor | None = None, sinks: Tensor | None = None,
) -> None:  # fmt: skip
    """Require operands of Attention, a position for each sample and a sink for each head.

    DecoderAttention is Attention over keys that may be a cache with room for more. Query i of a
    sample has the position ``starts + i`` among the keys, 0 if they are omitted. With ``is_causal``
    it sees the keys up to its position, with ``window`` besides only as many of them, the last
    ones. A *sink* (Xiao et al., "Efficient streaming language models with attention sinks", 2023)
    is one more key of each head that takes weight by a score of its own, to which neither scale nor
    mask applies, nor ``softcap``, and whose value is 0. A query that sees no key gives 0.

    Args:
        node: The DecoderAttention, with attributes of Attention, and ``window`` (0: no limit).
        q: As for Attention, as the next three.
        k: Keys.
        v: Values.
        mask: Added to the scores of keys, or booleans.
        starts: Positions [batch], int64.
        sinks: The score of each head's sink, [heads].
    """
    attention_operands(node, q, k, v, mask)
    heads = _required_heads(node, "Q", q, "q_num_heads")[1]
    require_dtype("starts", starts, "int64")
    require_shape("starts", starts, (q.shape[0],), "one for each sample")
    require_dtype("sinks", sinks, q.dtype)
    require_shape("sinks", sinks, (heads,), "one for each head")
    require_whole_number(node, "window", 0, least=0)
    is_causal = bool(node.attrs.get("is_causal", 0))
    require(is_causal or not node.attrs.get("window", 0), "a window needs is_causal")


def decoder_attention(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> Sequence[ValueType | None]:
    """Return the type of Y; the arguments are those of `attention`, with two more operands."""
    return attention(node, types[:4], values)


def decoder_attention_reference(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the result of DecoderAttention: Attention with a mask, and one more key for sinks.

    Its key and its value are 0, and the mask adds the sink's score, minus infinity without sinks.
    """
    given: list[Any] = [*inputs, *[None for _ in range(len(inputs), 6)]]
    q, k, v, mask, starts, sinks = given
    rank, hidden = q.ndim, q.dtype.type("-inf")
    if rank == 3:
        q, k, v = _by_heads(node, (q, k, v))
    scores = (*q.shape[:3], k.shape[2])
    added: Array = np.zeros(scores, q.dtype)
    if mask is not None:
        # A mask may end before the last keys, which are then hidden.
        missing = [(0, 0)] * (mask.ndim - 1) + [(0, scores[3] - mask.shape[-1])]
        seen = np.where(mask, 0, hidden) if mask.dtype == bool else mask
        added = added + np.pad(seen, missing, constant_values=hidden).astype(q.dtype)
    if node.attrs.get("is_causal", 0):
        first: Array = np.zeros(scores[0], np.int64) if starts is None else starts
        # Positions before or after all keys hide as many as the first and the last one.
        queries, keys = int(scores[2]), int(scores[3])
        query = np.clip(first, 0, keys)[:, None, None, None] + np.arange(queries)[:, None]
        key, window = np.arange(keys), int(node.attrs.get("window", 0))
        is_seen = (key <= query) & ((window == 0) | (key > query - window))
        added = np.where(is_seen, added, hidden)
    of_sinks = np.full(scores[1], hidden) if sinks is None else sinks
    of_sinks = np.broadcast_to(of_sinks.reshape(1, -1, 1, 1), (*scores[:3], 1))
    mask = np.concatenate([added, of_sinks], axis=3)
    k, v = (np.pad(x, [(0, 0), (0, 0), (0, 1), (0, 0)]) for x in (k, v))
    same: dict[str, Any] = {
        name: node.attrs[name] for name in ("scale", "softcap") if name in node.attrs
    }
    plain = Node("Attention", [*node.inputs[:3], node.inputs[0]], version=24, attrs=same)
    y = attention_reference(plain, [q, k, v, mask])[0]
    return [y if rank == 4 else y.swapaxes(1, 2).reshape(*y.shape[::2], -1)]


def flex_attention_operands(node: Node, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ShapeError unless operands are those of Attention, split into heads (preview, 1)."""
    require_rank("Q", q, 4)
    attention_operands(node, q, k, v)


def fused_attention_operands(
    node: Node, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
) -> None:
    """Require that batch, heads, positions and sizes fit, and that the mask broadcasts.

    FusedAttention is ``softmax(scale * Q K' + M) V``. The attributes ``q_order``, ``k_order``,
    ``v_order`` and ``o_order`` (default ``"bhtd"``) name the dimensions of operands and result, a
    permutation of batch, heads, positions and size of a head: ``"bthd"`` and, for K, ``"bhdt"``
    save a transposition. Q and the result must end in d. K and V may have fewer heads than Q;
    consecutive heads of Q share one. ``scale`` is 1 and ``causal`` 0 by default. The products that
    were fused would broadcast; the kernel does not.

    Args:
        node: The FusedAttention, with the orders of dimensions.
        q: Queries, 4-D in the order ``q_order``.
        k: Keys, 4-D in the order ``k_order``.
        v: Values, 4-D in the order ``v_order``.
        mask: Added to the scores ``[batch, heads, queries, keys]``, to which it broadcasts; None.

    Raises:
        ShapeError: They do not fit.
    """
    operands: list[Tensor] = []
    for name, operand in (("q", q), ("k", k), ("v", v)):
        require_rank(name.upper(), operand, 4)
        require_dtype(name.upper(), operand, q.dtype)
        order = str(node.attrs.get(f"{name}_order", "bhtd"))
        require(sorted(order) == sorted("bhtd"), "{}_order is {!r}", name, order)
        shape = tuple(operand.shape[order.index(axis)] for axis in "bhtd")
        operands.append(Tensor(operand.dtype, shape))
    attention_operands(node, *operands)
    require_dtype("the mask", mask, q.dtype)
    scores = (*operands[0].shape[:3], operands[1].shape[2])
    require_broadcast("the mask", mask, scores, "the scores")


# The operators of this family, each in all its versions.
declare(
    "Attention",
    requires=attention_operands,
    infer=attention,
    compute=in_float32(attention_reference),
    batch=along(0),
)
declare("LinearAttention", requires=decoding.linear_attention_operands, batch=along(0))
declare("RotaryEmbedding", requires=decoding.rotary_operands, infer=first_type, batch=along(0))
declare("FlexAttention", domain="ai.onnx.preview", requires=flex_attention_operands)
declare("FusedAttention", domain=INTERNAL_DOMAIN, requires=fused_attention_operands)
declare(
    "DecoderAttention",
    domain=INTERNAL_DOMAIN,
    requires=decoder_attention_operands,
    infer=decoder_attention,
    compute=in_float32(decoder_attention_reference),
)
