"""ONNX Runtime's operators on sequences of several lengths that are packed one behind the other."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from subgraph.graph.graph import Node
from subgraph.operators.functions import Call, Results, function
from subgraph.operators.requirements import (
    Tensor,
    known_numbers,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
    require_whole_number,
)

from .attention import axes
from .linear_attention import END, refuse_cuda_only


def convolution_operands(
    node: Node, x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None, state: Tensor,
    count: Tensor | None = None, delta: Tensor | None = None, mask: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless each channel has a filter, and each sequence a state.

    Args:
        node: The VarlenCausalConvWithState.
        x: Tokens of all sequences, [tokens, channels].
        weight: Filters, [channels, 1, taps].
        ends: 0 and the end of each sequence.
        bias: A number for each channel.
        state: ``(taps - 1) * dilation`` tokens before each sequence, [sequences, channels, ...].
        count: For each sequence the tokens to return; needed if ``state_update_capacity`` is not 0.
        delta: For CUDA only.
        mask: For CUDA only.
    """
    require_rank("input", x, 2)
    require_rank("weight", weight, 3)
    require_rank("cumulative_sequence_length", ends, 1)
    require(ends.shape[0] >= 2, "there is no sequence")
    channels, taps, sequences = x.shape[1], weight.shape[2], ends.shape[0] - 1
    require_dtype("weight", weight, x.dtype)
    require_shape("weight", weight, (channels, 1, taps), "a filter for each channel")
    require(taps >= 1, "the filters are empty")
    require_shape("bias", bias, (channels,), "one for each channel")
    steps = (taps - 1) * require_whole_number(node, "dilation", 1, least=1, most=1 << 24)
    require_shape("initial_state", state, (sequences, channels, steps), "tokens before the first")
    capacity = require_whole_number(node, "state_update_capacity", 0, least=0, most=8)
    given = "given" if count is not None else "missing"
    require((count is not None) == (capacity > 0), "capture_count is {} for {}", given, capacity)
    require_shape("capture_count", count, (sequences,), "one for each sequence")
    require_choice(node, "activation", "none", "none", "silu", "swish")
    known = known_numbers(ends) or []
    ordered = all(a <= b for a, b in pairwise(known))
    fits = not known or (known[0] == 0 and known[-1] == x.shape[0] and ordered)
    require(fits, "sequences end at {} of {} tokens", known[1:], x.shape[0])


@function(
    "VarlenCausalConvWithState",
    "input, weight, cumulative_sequence_length, bias?, initial_state, capture_count?,"
    " kernel_delta?, previous_mask? -> output, final_state, state_update?",
    requires=convolution_operands,
    activation="none",
    delta_offset=0,
    dilation=1,
    group_size=1,
    state_update_capacity=0,
)
def varlen_causal_conv_with_state(call: Call) -> Results:
    """Convolve each channel of each sequence with the tokens up to the present one, in float32."""
    x, weight, cumulative, bias, state, count, delta, mask = call.inputs
    if delta is not None or mask is not None:
        raise call.unsupported("kernel_delta or previous_mask")
    refuse_cuda_only(call, delta_offset=0, group_size=1)
    dtype, channels, taps = call.dtype(x), call.size(weight, 0), call.size(weight, 2)
    dilation, capacity = call.attribute("dilation"), call.attribute("state_update_capacity")
    steps = (taps - 1) * dilation
    cumulative = call.cast(cumulative, "int64")
    zero, one = axes(call, 0), axes(call, 1)
    starts = call.Slice(cumulative, zero, axes(call, -1), zero)
    ends = call.Slice(cumulative, one, axes(call, END), zero)
    # One table has the states and behind them the tokens, so that a tap is a row of it.
    table, before = x, zero
    if steps:
        rows = call.Reshape(call.Transpose(state, perm=(0, 2, 1)), axes(call, -1, channels))
        table, before = call.Concat(rows, x, axis=0), call.Shape(rows, end=1)

    def gathered(sequence: Any, length: Any, position: Any, distances: list[int]) -> Any:
        """Return rows of tokens ``distances`` before a position, which is at the end of ``length``.

        Args:
            sequence: Number of the sequence, [n, 1].
            length: Tokens of the sequence before the position.
            position: The position among all tokens.
            distances: Distances, [m].

        Returns:
            [n, m, channels].
        """
        away = axes(call, *distances)
        token = call.Sub(call.Add(before, position), away)
        stored = call.Sub(call.Add(call.Mul(call.Add(sequence, one), steps), length), away)
        return call.Gather(table, call.Where(call.GreaterOrEqual(length, away), token, stored))

    count_of = call.Squeeze(call.Shape(x, end=1), zero)
    tokens = call.Unsqueeze(call.Range(0, count_of, 1), one)
    sequence = call.ReduceSum(call.cast(call.GreaterOrEqual(tokens, ends), "int64"), one)
    sequence = call.Add(sequence, _misfit(call, starts, ends, call.Shape(x, end=1)))
    local = call.Sub(tokens, call.Gather(starts, sequence))
    taken = gathered(sequence, local, tokens, [steps - j * dilation for j in range(taps)])
    # Filters as [taps, channels].
    filters = call.Transpose(call.Reshape(weight, axes(call, channels, taps)), perm=(1, 0))
    products = call.Mul(call.cast(taken, "float32"), call.cast(filters, "float32"))
    y = call.ReduceSum(products, one, keepdims=0)
    if bias is not None:
        y = call.Add(y, call.cast(bias, "float32"))
    if call.attribute("activation") != "none":
        y = call.Swish(y)
    lengths = call.Unsqueeze(call.Sub(ends, starts), one)
    final = state
    if steps:
        size = call.Squeeze(call.Shape(starts), zero)
        numbers = call.Unsqueeze(call.Range(0, size, 1), one)
        last = call.Unsqueeze(ends, one)
        final = gathered(numbers, lengths, last, [steps - k for k in range(steps)])
        final = call.Transpose(final, perm=(0, 2, 1))
    update = None
    if capacity:
        shown = call.Clip(call.cast(count, "int64"), 0, capacity)
        shown = call.Min(call.Unsqueeze(shown, one), lengths)
        slots = axes(call, *range(capacity))
        places = call.Add(call.Unsqueeze(starts, one), slots)
        nothing = call.Pad(x, axes(call, 0, 0, 1, 0))  # with a row of zeros at the end
        update = call.Gather(nothing, call.Where(call.Less(slots, shown), places, axes(call, -1)))
    return [call.cast(y, dtype), final, update]


def _misfit(call: Call, starts: Any, ends: Any, tokens: Any) -> Any:
    """Return 0 if the sequences are exactly the tokens, else a number beyond all sequences.

    Args:
        call: The node.
        starts: First token of each sequence.
        ends: Token behind the last one of each sequence.
        tokens: The number of tokens, [1].
    """
    zero = axes(call, 0)
    first = call.Slice(starts, zero, axes(call, 1), zero)
    last = call.Slice(ends, axes(call, -1), axes(call, END), zero)
    negative = call.Min(call.ReduceMin(call.Sub(ends, starts), zero, keepdims=1), zero)
    wrong = call.Add(call.Abs(first), call.Sub(call.Abs(call.Sub(last, tokens)), negative))
    return call.Mul(call.Min(wrong, axes(call, 1)), 1 << 40)
