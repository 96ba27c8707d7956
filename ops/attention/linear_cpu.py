"""LinearAttention on the CPU device: one unit is the recurrent state of a head."""

from __future__ import annotations

from subgraph.engine.planner.lowering import Lowering, Operand, Unsupported, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.ops.composite.cpu import delegate
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, temporary
from subgraph.ops.elementwise.expressions import text

from .arguments import LinearAttentionArguments

# Whether the state decays, and whether a token replaces what the state says of its key.
_RULES = {
    "linear": (False, False),
    "gated": (True, False),
    "delta": (False, True),
    "gated_delta": (True, True),
}


@lowering("LinearAttention", dtypes=("float32", "float64"))
def linear_attention(node: Node, low: Lowering) -> None:
    """Lower LinearAttention with every update rule, shared heads, and a state that comes along."""
    query, key, value = (low.input(k) for k in range(3))
    y, past = low.output(), low.optional(3)
    rule = text(node.attrs.get("update_rule", "gated_delta"))
    if rule not in _RULES or y.size == 0:
        raise Unsupported(f"LinearAttention with update_rule {rule!r}, or of nothing")
    gated, delta = _RULES[rule]
    heads, owners = int(node.attrs["q_num_heads"]), int(node.attrs["kv_num_heads"])
    batch, tokens = query.shape[:2]
    keys, values = query.shape[2] // heads, value.shape[2] // owners
    if heads % owners or keys * heads != query.shape[2] or keys * owners != key.shape[2]:
        raise Unsupported(f"LinearAttention of {heads} heads over {owners}")
    decay: Operand | int = 0
    beta: Operand | int = 0
    if gated:
        given = low.input(4)
        decay = temporary(low, query.dtype, given.shape)
        delegate(low, "Exp", [given], decay)
    if delta:
        beta = low.input(5)
    shape = (batch, owners, keys, values)
    held = low.outputs[1] if len(low.outputs) > 1 else None
    state = held
    if held is None or held.dtype != query.dtype:
        state = temporary(low, query.dtype, shape)
    begin = None if past is None else cast_to(low, past, query.dtype)
    scratch = low.scratch(8 * values, per_worker=True)
    scale = float(node.attrs.get("scale", 0.0)) or keys**-0.5
    assert state is not None, "there is a state of its own where none is wanted"
    arguments = LinearAttentionArguments(
        query=query,
        key=key,
        value=value,
        past=begin or 0,
        decay=decay,
        beta=beta,
        y=y,
        state=state,
        tokens=tokens,
        heads=heads,
        owners=owners,
        keys=keys,
        values=values,
        scale=scale,
        decays=decay.shape[2] // owners if isinstance(decay, Operand) else 1,
        betas=beta.shape[2] if isinstance(beta, Operand) else 1,
        scratch=scratch,
        scratch_bytes=scratch.nbytes,
    )
    kernel = Kernel(
        "subgraph.ops.attention.linear_kernels",
        "linear_attention",
        dtype=query.dtype,
        gated=gated,
        delta=delta,
        past=past is not None,
    )
    flops = 2 * tokens * batch * owners * keys * values * (2 + heads // owners)
    low.emit(kernel, arguments, batch * owners, grain=1, flops=flops, bytes=2 * y.nbytes)
    if held is not None and held is not state:
        emit_cast(low, state, held)
