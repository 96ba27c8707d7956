"""LinearAttention on the CPU device: a work unit is a strip of the state of a head."""

from __future__ import annotations

from subgraph.dtypes import item_bytes
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.operators.requirements import decoded
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary
from subgraph.ops.shared.delegation import delegate

from .arguments import STATE_STRIP, LinearAttentionArguments
from .decoding import UPDATE_RULES


@lowering("LinearAttention", dtypes=("float32", "float64"))
def linear_attention(node: Node, low: Lowering) -> None:
    """Lower LinearAttention: every update rule, shared heads, a state as input and output."""
    query, key, value = (low.input(k) for k in range(3))
    y, past = low.output(), low.optional(3)
    rule = decoded(node.attrs.get("update_rule", "gated_delta"))
    if y.size == 0:
        raise Unsupported("LinearAttention with an empty output")
    gated, delta = (letter in UPDATE_RULES[rule] for letter in "gd")
    heads, kv_heads = int(node.attrs["q_num_heads"]), int(node.attrs["kv_num_heads"])
    batch, tokens = query.shape[:2]
    key_size, value_size = query.shape[2] // heads, value.shape[2] // kv_heads
    decay = None
    if gated:  # the input has logarithms of the factors
        decay = temporary(low, query.dtype, low.input(4).shape)
        delegate(low, "Exp", [low.input(4)], decay)
    beta = low.input(5) if delta else None
    present = low.outputs[1] if len(low.outputs) > 1 else None
    if present is not None and present.dtype == query.dtype:
        state = present
    else:
        state = temporary(low, query.dtype, (batch, kv_heads, key_size, value_size))
    begin = None if past is None else cast_to(low, past, query.dtype)
    scale = float(node.attrs.get("scale", 0.0)) or key_size**-0.5
    lanes = low.lanes(query.dtype)
    arguments = LinearAttentionArguments(
        query=query,
        key=key,
        value=value,
        past=begin or 0,
        decay=decay or 0,
        beta=beta or 0,
        y=y,
        state=state,
        tokens=tokens,
        heads=heads,
        kv_heads=kv_heads,
        key_size=key_size,
        value_size=value_size,
        scale=scale,
        decays=decay.shape[2] // kv_heads if decay else 1,
        betas=beta.shape[2] if beta else 1,
        **low.worker_scratch(key_size * STATE_STRIP * lanes * item_bytes(query.dtype)),
    )
    kernel = Kernel(
        "subgraph.ops.attention.linear_kernels",
        "linear_attention",
        dtype=query.dtype,
        lanes=lanes,
        gated=gated,
        delta=delta,
        past=past is not None,
    )
    flops = 2 * tokens * batch * kv_heads * key_size * value_size * (2 + heads // kv_heads)
    strips = -(-value_size // (STATE_STRIP * lanes))
    low.emit(kernel, arguments, batch * kv_heads * strips, grain=1, flops=flops, bytes=2 * y.nbytes)
    if present is not None and present is not state:
        emit_cast(low, state, present)
