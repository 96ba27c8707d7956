"""ONNX's Attention on the CPU device: caches, grouped heads, every kind of mask, softcap, scores.

The fused kernel, which stores no scores, runs it unless scores are an output;
those are lowered to MatMul, Softmax and MatMul.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.shared.delegation import delegate, viewed
from subgraph.ops.shared.strides import contiguous
from subgraph.ops.shared.tile_planning import FLOATS

from .arguments import BiasArguments
from .fused_cpu import AttentionSpec, Heads, emit_attention, heads_of, mask_steps, ordered

# Estimate: fewer elements of the mask take less time than starting a thread.
_MIN_ELEMENTS_PER_THREAD = 4096
_MAX_WINDOW = 1 << 30  # keys; sums of larger ones with positions would not fit OpenCL's int


@lowering("Attention", dtypes=FLOATS, layouts=("plain", "strided"))
def attention(node: Node, low: Lowering) -> None:
    """Lower Attention with all its inputs and outputs."""
    q, k, v, out = _split(node, low)
    past_key, past_value = low.optional(4), low.optional(5)
    past = 0 if past_key is None else past_key.shape[2]
    if 0 in (*q.sizes, past + k.sizes[2], v.sizes[3]):
        raise Unsupported("attention over an empty tensor")
    k = _present(low, k, past_key, 1)
    v = _present(low, v, past_value, 2)
    scale = float(node.attrs.get("scale", 1.0 / math.sqrt(q.sizes[3])))
    causal = bool(node.attrs.get("is_causal", 0))
    softcap = float(node.attrs.get("softcap", 0.0))
    scored = len(low.outputs) > 3
    if scored and any(x.operand.layout != "plain" for x in (q, k, v)):
        raise Unsupported("scores of a view")
    mask, flags = _mask(node, low, (q, k), past, causal=causal, always=scored)
    if not scored:
        # A mask that `_mask` wrote holds causality already.
        causal = causal and mask is low.optional(3)
        # A node with a subgraph was fused from a Softmax, which gives NaN where no key is seen,
        # unless its pattern says otherwise.
        zero_unseen = int(node.attrs.get("zero_unseen", node.subgraph is None))
        spec = AttentionSpec(
            *(q, k, v, out, mask, scale, causal, past, zero_unseen), softcap=softcap
        )
        emit_attention(low, spec)
        return
    assert mask is not None
    assert flags is not None
    _emit_unfused(node, low, (q, k, v, out), (mask, flags), scale, softcap)


@lowering("DecoderAttention", domain=INTERNAL_DOMAIN, dtypes=FLOATS, layouts=("plain", "strided"))
def decoder_attention(node: Node, low: Lowering) -> None:
    """Lower attention over a cache; see `subgraph.ops.attention.op`."""
    q, k, v, out = _split(node, low)
    if 0 in (*q.sizes, *k.sizes, *v.sizes):
        raise Unsupported("attention over an empty tensor")
    spec = AttentionSpec(
        *(q, k, v, out),
        mask=_mask(node, low, (q, k), 0, causal=False, always=False)[0],
        scale=float(node.attrs.get("scale", 1.0 / math.sqrt(q.sizes[3]))),
        causal=bool(node.attrs.get("is_causal", 0)),
        zero_unseen=1,
        starts=low.optional(4),
        sinks=low.optional(5),
        window=min(int(node.attrs.get("window", 0)), _MAX_WINDOW),
        softcap=float(node.attrs.get("softcap", 0.0)),
    )
    emit_attention(low, spec)


def _split(node: Node, low: Lowering) -> Sequence[Heads]:
    """Return Q, K, V and the result by heads."""
    operands = [low.input(0), low.input(1), low.input(2), low.output()]
    heads, shared = (int(node.attrs.get(f"{name}_num_heads", 0)) for name in ("q", "kv"))
    counts = (heads, shared, shared, heads)
    return [heads_of(o, n) for o, n in zip(operands, counts, strict=True)]


def _copy_heads(low: Lowering, x: Heads, target: Operand, first: int) -> None:
    """Copy heads into ``target`` [batch, heads, positions, size], the first one to ``first``."""
    steps = contiguous(target.memory_shape)
    emit_copy(
        low,
        x.operand,
        target,
        x.sizes,
        x.steps,
        steps,
        item=target.itemsize,
        to_offset=first * target.shape[3],
    )


def _present(low: Lowering, x: Heads, past: Operand | None, output: int) -> Heads:
    """Return the cached and the new keys (values) as one operand.

    Args:
        low: The lowering.
        x: The new keys (values).
        past: The cached ones [batch, heads, positions, size]; None: there are none.
        output: Index of the output that holds all of them, if the node has it.
    """
    listed = output < len(low.outputs)
    if past is None and not listed:
        return x
    if x.operand.layout != "plain":
        raise Unsupported("a view of new keys or values of a cache")
    before = 0 if past is None else past.shape[2]
    batch, heads, positions, size = x.sizes
    shape = (batch, heads, before + positions, size)
    whole = low.output(output) if listed else temporary(low, x.operand.dtype, shape)
    if past is not None and past.layout == "strided":
        if not listed or not low.extend(past, whole):
            raise Unsupported("a cache that does not grow by this node")
    elif past is not None and past.size:
        _copy_heads(low, ordered(past, "bhtd"), whole, 0)
    if x.operand.size:
        _copy_heads(low, x, whole, before)
    return ordered(whole, "bhtd")


def _mask(
    node: Node, low: Lowering, of: tuple[Heads, Heads], past: int, *, causal: bool, always: bool
) -> tuple[Operand | None, Operand | None]:
    """Return the tensor to add to the scores, and for each row of them whether it sees any key.

    The mask input itself (None without one) and no flags, where the fused kernel takes it so.

    Args:
        node: The Attention node.
        low: Its lowering.
        of: Queries, and cached and new keys.
        past: Cached keys, which come before the new ones.
        causal: Queries see no later keys.
        always: Write the mask and the flags in any case, with causality in the mask.
    """
    mask, counts = low.optional(3), low.optional(6)
    batch, _, queries, _ = of[0].sizes
    all_keys = of[1].sizes[2]
    left, right = (int(node.attrs.get(f"{k}_window_size", -1)) for k in ("left", "right"))
    dtype = low.input(0).dtype
    unchanged = mask is None or (mask.dtype == dtype and mask.shape[-1] == all_keys)
    if unchanged and counts is None and max(left, right) < 0 and not always:
        return mask, None
    heads, keys, steps = 1, 1, (0, 0, 0, 0)
    if mask is not None:
        keys = mask.shape[-1]
        if mask.dtype not in ("bool", dtype):
            raise Unsupported(f"a mask of {mask.dtype}")
        # A sum, from which a node with a subgraph was fused, repeats a mask of one key. Attention
        # hides the keys behind it.
        if node.subgraph is not None and keys != all_keys:
            raise Unsupported("a mask that broadcasts along keys")
        steps = mask_steps(mask)
        # A mask that all heads share is written once; the attention reads it with a stride of 0.
        heads = mask.shape[-3] if mask.rank > 2 else 1
    bias = temporary(low, dtype, (batch, heads, queries, all_keys))
    flags = temporary(low, dtype, (batch, heads, queries, 1))
    if counts is not None:
        emit_range_check(low, counts, "nonpad_kv_seqlen", 0, all_keys)
    arguments = BiasArguments(
        y=bias,
        mask=mask or 0,
        mask_batch=steps[0],
        mask_head=steps[1],
        mask_row=steps[2],
        mask_key=0 if mask is None else 1,
        mask_keys=keys,
        heads=heads,
        queries=queries,
        keys=all_keys,
        causal=int(causal),
        past=past,
        left=left,
        right=right,
        counts=counts or 0,
        flags=flags,
    )
    kind = "" if mask is None else mask.dtype
    low.emit(
        Kernel("subgraph.ops.attention.mask_kernels", "bias", dtype=dtype, mask=kind),
        arguments,
        batch * heads * queries,
        grain=max(1, _MIN_ELEMENTS_PER_THREAD // all_keys),
        bytes=bias.nbytes,
    )
    return bias, flags


def _emit_unfused(
    node: Node,
    low: Lowering,
    operands: tuple[Heads, Heads, Heads, Heads],
    mask: tuple[Operand, Operand],
    scale: float,
    softcap: float,
) -> None:
    """Emit scores, softmax and the product with the values, each in a step of its own.

    Args:
        node: The Attention node.
        low: Its lowering.
        operands: Q, K, V and the output.
        mask: Added to the scores, and for each row of them whether it sees any key.
        scale: Factor of the scores.
        softcap: Bound c of ``c * tanh(score / c)``; 0: none.
    """
    q, k, v, out = operands
    dtype = q.operand.dtype
    (batch, heads, queries, _), (_, kv_heads, keys, size) = q.sizes, v.sizes
    # Heads of queries that share a head of keys are rows of one product.
    stacks, rows = batch * kv_heads, heads // kv_heads * queries
    full = (batch, heads, queries, keys)
    # Each stage of the scores has memory of its own, as one of them may be an output.
    stages = [temporary(low, dtype, full) for _ in range(4)]
    if len(low.outputs) > 3:
        stages[int(node.attrs.get("qk_matmul_output_mode", 0))] = low.output(3)
    raw = temporary(low, dtype, full)
    _emit_products(low, q, k, viewed(low, raw, (stacks, rows, keys)))
    _emit_weights(low, raw, stages, mask, scale, softcap)
    result = temporary(low, dtype, (batch, heads, queries, size))
    values = temporary(low, dtype, v.sizes)
    _copy_heads(low, v, values, 0)
    weights = viewed(low, stages[3], (stacks, rows, keys))
    factors = [weights, viewed(low, values, (stacks, keys, size))]
    delegate(low, "MatMul", factors, viewed(low, result, (stacks, rows, size)))
    shape, item = result.shape, result.itemsize
    emit_copy(low, result, out.operand, shape, contiguous(shape), out.steps, item=item)


def _emit_weights(
    low: Lowering,
    raw: Operand,
    stages: Sequence[Operand],
    mask: tuple[Operand, Operand],
    scale: float,
    softcap: float,
) -> None:
    """Emit the stages of the scores: scaled, bounded, with the mask, and after the softmax.

    Args:
        low: The lowering.
        raw: The products of queries and keys.
        stages: The results.
        mask: Added to the scores, and for each row of them whether it sees any key.
        scale: Factor of the scores.
        softcap: Bound c of ``c * tanh(score / c)``; 0: none.
    """
    dtype, (bias, flags) = raw.dtype, mask
    e = Expression()
    product, added = e.input(dtype), e.input(dtype)
    scaled = e("mul", product, e.number(scale, dtype))
    bounded = scaled
    if softcap:
        cap = e.number(softcap, dtype)
        bounded = e("mul", e("tanh", e("div", scaled, cap)), cap)
    results = zip((scaled, bounded, e("add", bounded, added)), stages[:3], strict=True)
    emit_expression(low, e, [source(raw), source(bias)], list(results))
    softmax = temporary(low, dtype, raw.shape)
    delegate(low, "Softmax", [stages[2]], softmax)
    # Softmax is NaN in a row that sees no key; ONNX wants 0.
    e = Expression()
    value, seen = e.input(dtype), e.input(dtype)
    none = e.number(0.0, dtype)
    value = e("where", e("gt", seen, none), value, none, dtype=dtype)
    emit_expression(low, e, [source(softmax), source(flags)], [(value, stages[3])])


def _emit_products(low: Lowering, q: Heads, k: Heads, scores: Operand) -> None:
    """Emit Q K^T into ``scores`` [batch * heads of keys, queries that share a head, keys]."""
    dtype, (stacks, rows, _) = q.operand.dtype, scores.shape
    batch, kv_heads, keys, depth = k.sizes
    queries = temporary(low, dtype, q.sizes)
    _copy_heads(low, q, queries, 0)
    transposed = temporary(low, dtype, (stacks, depth, keys))
    shape = (batch, kv_heads, depth, keys)
    steps = (k.steps[0], k.steps[1], k.steps[3], k.steps[2])
    emit_copy(low, k.operand, transposed, shape, steps, contiguous(shape), item=transposed.itemsize)
    delegate(low, "MatMul", [viewed(low, queries, (stacks, rows, depth)), transposed], scores)
