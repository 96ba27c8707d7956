"""ONNX Runtime's GatedDeltaNet: linear attention over tokens of several requests in a row.

Its state is a matrix of values by keys, that of LinearAttention one of keys by values.
"""

from __future__ import annotations

from typing import Any

from subgraph.graph.graph import Node, Value
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.ops.attention.decoding import require_rule

from .linear_attention import attend_tokens, flat, repeated


def delta_net_operands(
    node: Node, query: Tensor, key: Tensor | None, value: Tensor | None,
    bounds: Tensor | None = None, decay: Tensor | None = None, beta: Tensor | None = None,
    state: Tensor | None = None, a_log: Tensor | None = None, bias: Tensor | None = None,
    *_others: Tensor | None,
) -> None:  # fmt: skip
    """Raise ShapeError unless heads, state, gates and requests fit the tokens.

    Args:
        node: The GatedDeltaNet.
        query: [tokens, heads, size], or [batch, tokens, heads, size]; without key and value
            [tokens, 2 * heads * size + value_heads * value_size], or the same for each batch.
        key: As ``query``; None: packed.
        value: [..., value_heads, value_size].
        bounds: First token of each request, and the number of tokens: [requests + 1], int32.
        decay: Logarithms of decay, [..., value_heads] or [..., value_heads, size].
        beta: Update rates, [..., value_heads].
        state: State to begin with, [batch, value_heads, value_size, size], float32.
        a_log: [value_heads], for a gate.
        bias: [value_heads], [value_heads, size] or [value_heads * size], for a gate.
    """
    needs = require_rule(node, decay, beta)
    require(("g" in needs) == (decay is not None), "decay and update_rule do not fit")
    require(("d" in needs) == (beta is not None), "beta and update_rule do not fit")
    require((key is None) == (value is None), "key and value: one is given without the other")
    if key is None:
        require(state is not None, "packed queries, keys and values need initial_state")
        assert state is not None, "required above"
        require_rank("initial_state", state, 4)
        require_rank("query", query, 2, 3)
        tokens = query.shape[:-1]
        value_heads, value_size, size = state.shape[1:]
        rest = query.shape[-1] - value_heads * value_size
        require(size >= 1 and rest % (2 * size) == 0, "rows of query are no heads of {}", size)
        heads = rest // (2 * size)
    else:
        assert value is not None, "given with key"
        require_rank("query", query, 3, 4)
        require_rank("value", value, query.rank)
        tokens, (heads, size) = query.shape[:-2], query.shape[-2:]
        value_heads, value_size = value.shape[-2:]
        require_shape("key", key, query.shape, "that of query")
        require_shape("value", value, (*tokens, value_heads, value_size), "of the same tokens")
    fits = heads >= 1 and value_heads >= 1 and value_heads % heads == 0
    require(fits, "{} heads of values are no multiple of {} heads of keys", value_heads, heads)
    batch = tokens[0] if len(tokens) == 2 else -1
    if bounds is not None:
        require(batch < 0, "cu_seqlens needs tokens of all requests in one dimension")
        require_rank("cu_seqlens", bounds, 1)
        require_dtype("cu_seqlens", bounds, "int32")
        batch = bounds.shape[0] - 1
        require(batch >= 1, "cu_seqlens has {} numbers; there is one more than requests", batch + 1)
    require(
        batch >= 0 or state is not None, "without initial_state or cu_seqlens, no batch is known"
    )
    if state is not None:
        batch = batch if batch >= 0 else state.shape[0]
        kind = (batch, value_heads, value_size, size)
        require_shape("initial_state", state, kind, "a matrix for each head of each request")
        require_dtype("initial_state", state, "float32")
    if bounds is None and len(tokens) == 1:
        require(batch > 0 and tokens[0] % batch == 0, "{} tokens, {} requests", tokens[0], batch)
    _gate_operands(node, (*tokens, value_heads), size, (decay, beta, a_log, bias))


def _gate_operands(
    node: Node, heads: tuple[int, ...], size: int, gates: tuple[Tensor | None, ...]
) -> None:
    """Require gates that fit.

    Args:
        node: The GatedDeltaNet.
        heads: Shape of a number for each head of each token.
        size: Elements of a key.
        gates: Decay, update rate, a_log and dt_bias.
    """
    decay, beta, a_log, bias = gates
    require_shape("beta", beta, heads, "one for each head of each token")
    if decay is not None and decay.shape != heads:
        require_shape("decay", decay, (*heads, size), "one for each head or key of each token")
    require_shape("a_log", a_log, heads[-1:], "one for each head")
    kind = require_choice(
        node, "gate_activation", "none", "none", "softplus", "qwen", "sigmoid", "kda"
    )
    require_choice(node, "beta_activation", "none", "none", "sigmoid")
    if kind == "none":
        require(a_log is None and bias is None, "a_log and dt_bias need gate_activation")
    else:
        require(a_log is not None and bias is not None, "gate_activation needs a_log and dt_bias")
        assert bias is not None, "required above"
        each = heads[-1] if decay is None or decay.shape == heads else heads[-1] * size
        require(
            bias.shape in ((heads[-1],), (heads[-1], size), (heads[-1] * size,))
            and bias.size in (heads[-1], each),
            "dt_bias has shape {}; one number for each head, or for each factor of decay",
            bias.shape,
        )


@function(
    "GatedDeltaNet",
    "query, key?, value?, cu_seqlens?, decay?, beta?, initial_state?, a_log?, dt_bias?, "
    "capture_count?, state_update_active? -> output, final_state?, state_update?",
    requires=delta_net_operands,
    beta_activation="none",
    chunk_size=64,
    gate_activation="none",
    gate_lower_bound=-5.0,
    qk_l2_norm=0,
    scale=0.0,
    state_update_capacity=0,
    update_rule="gated_delta",
)
def gated_delta_net(call: Call) -> Results:
    """Linear attention of requests that follow each other, with a state of values by keys."""
    call.refuse_all_but(state_update_capacity=0)
    query, bounds, state = (call.input(n) for n in ("query", "cu_seqlens", "initial_state"))
    dtype = call.dtype(query)
    q, k, v, sizes = _heads_of_tokens(call)
    heads, value_heads, size, value_size = sizes
    if call.attribute("qk_l2_norm"):
        q, k = _normalized(call, q), _normalized(call, k)
    tokens: list[Any] = [q, k, v, _decay(call, size), _rate(call)]
    if state is not None:
        state = call.Transpose(state, perm=(0, 1, 3, 2))
    # [batch, tokens, heads, size] from here on; requests of different lengths are one batch each.
    if call.rank(q) == 3:
        batch = [1] if bounds is not None else call.Shape(state, end=1)
        tokens = [None if x is None else _batched(call, x, batch) for x in tokens]
    tokens[:2] = [repeated(call, x, heads, value_heads // heads) for x in tokens[:2]]
    parts = [None if x is None else flat(call, x) for x in tokens]

    def attend(parts: list[Any], state: Any) -> Any:
        q, k, v, decay, beta = parts
        scale = call.attribute("scale") or size**-0.5
        return attend_tokens(call, q, k, v, state, decay, beta, (value_heads, value_heads), scale)

    if bounds is None:
        y, last = attend(parts, state)
    else:
        y, last = _of_requests(call, parts, state, attend)
    whole = call.Shape(query, end=call.rank(query) - (1 if call.input("key") is None else 2))
    shape = call.Concat(whole, [value_heads, value_size], axis=0)
    y = call.cast(call.Reshape(y, shape), dtype)
    return [y, call.Transpose(last, perm=(0, 1, 3, 2)), None]


def _heads_of_tokens(call: Call) -> tuple[Any, Any, Any, tuple[int, int, int, int]]:
    """Return queries, keys and values ``[..., heads, size]`` in float32, and their sizes.

    The sizes are the heads of keys and of values, and the elements of a key and of a value.
    """
    query, key, value = (call.input(name) for name in ("query", "key", "value"))
    query = call.cast(query, "float32")
    if key is not None and value is not None:
        heads, size = (call.size(query, k) for k in (-2, -1))
        value_heads, value_size = (call.size(value, k) for k in (-2, -1))
        found = heads, value_heads, size, value_size
        return query, call.cast(key, "float32"), call.cast(value, "float32"), found
    state = call.input("initial_state")
    value_heads, value_size, size = (call.size(state, k) for k in (1, 2, 3))
    heads = (call.size(query, -1) - value_heads * value_size) // (2 * size)
    widths = [heads * size, heads * size, value_heads * value_size]
    parts = call.Split(query, widths, axis=-1, outputs=3)
    q, k, v = (
        call.Reshape(part, call.Concat(call.Shape(part, end=-1), form, axis=0))
        for part, form in zip(
            parts, [(heads, size), (heads, size), (value_heads, value_size)], strict=True
        )
    )
    return q, k, v, (heads, value_heads, size, value_size)


def _normalized(call: Call, x: Any) -> Any:
    """Return rows divided by their lengths; ONNX Runtime adds 1e-12 to the sums of squares."""
    squares = call.ReduceSumSquare(x, [-1], keepdims=1)
    return call.Div(x, call.Sqrt(call.Add(squares, 1e-12)))


def _decay(call: Call, size: int) -> Any:
    """Return the logarithms of decay in float32, after the gate; None without decay.

    Args:
        call: The GatedDeltaNet.
        size: Elements of a key.
    """
    decay, a_log, bias = (call.input(name) for name in ("decay", "a_log", "dt_bias"))
    if decay is None:
        return None
    raw, kind = call.cast(decay, "float32"), call.attribute("gate_activation")
    if kind == "none":
        return raw
    tokens = call.rank(call.inputs[0]) - (1 if call.input("key") is None else 2)
    per_key = call.rank(raw) == tokens + 2
    rates: Any = call.Exp(a_log)
    shift: Any = bias
    if per_key:
        rates = call.Unsqueeze(rates, [-1])
        has_keys = call.rank(bias) == 2 or call.size(bias, 0) != call.size(a_log, 0) or size == 1
        shift = call.Reshape(bias, [-1, size if has_keys else 1])
    total = call.Add(raw, shift)
    if kind in ("softplus", "qwen"):
        return call.Neg(call.Mul(rates, call.Softplus(total)))
    return call.Mul(call.Sigmoid(call.Mul(rates, total)), call.attribute("gate_lower_bound"))


def _rate(call: Call) -> Any:
    """Return the update rates in float32, after their activation; None without."""
    beta = call.input("beta")
    if beta is None:
        return None
    rate: Value = call.cast(beta, "float32")
    return call.Sigmoid(rate) if call.attribute("beta_activation") == "sigmoid" else rate


def _batched(call: Call, x: Any, batch: Any) -> Any:
    """Return ``[all tokens, ...]`` as ``[batch, tokens, ...]``."""
    shape = call.Concat(batch, [-1], call.Shape(x, start=1), axis=0)
    return call.Reshape(x, shape)


def _of_requests(call: Call, parts: list[Any], state: Any, attend: Any) -> tuple[Any, Any]:
    """Return results ``[1, tokens, ...]`` and the states of requests of different lengths.

    Args:
        call: The GatedDeltaNet.
        parts: Operands ``[1, tokens, ...]``, None for an omitted one.
        state: The states to begin with, or None.
        attend: Computes a batch from its operands and its state.
    """
    bounds = call.input("cu_seqlens")
    count = call.size(bounds, 0) - 1
    ends, begins = (call.Slice(bounds, [k], [k + count], [0]) for k in (1, 0))
    lengths = call.cast(call.Sub(ends, begins, requires="first_is_zero"), "int64")
    requests = [
        [None] * count if x is None else _listed(call.Split(x, lengths, axis=1, outputs=count))
        for x in parts
    ]
    results: list[Any] = []
    states: list[Any] = []
    for number, mine in enumerate(zip(*requests, strict=True)):
        begin = None if state is None else call.Gather(state, [number], axis=0)
        y, last = attend(list(mine), begin)
        results.append(y)
        states.append(last)
    return call.Concat(*results, axis=1), call.Concat(*states, axis=0)


def _listed(made: Any) -> list[Any]:
    """Return the outputs of a node of a body, which are no tuple if there is one."""
    return [made] if isinstance(made, Value) else list(made)
