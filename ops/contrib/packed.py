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
    require_rank,
    require_shape,
    require_whole_number,
)

from .linear_attention import END, require_causal_filters


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
    require_rank("cumulative_sequence_length", ends, 1)
    require(ends.shape[0] >= 2, "there is no sequence")
    channels, sequences = x.shape[1], ends.shape[0] - 1
    steps = require_causal_filters(node, x, weight, bias, channels)
    require_shape("initial_state", state, (sequences, channels, steps), "tokens before the first")
    capacity = require_whole_number(node, "state_update_capacity", 0, least=0, most=8)
    given = "given" if count is not None else "missing"
    require((count is not None) == (capacity > 0), "capture_count is {} for {}", given, capacity)
    require_shape("capture_count", count, (sequences,), "one for each sequence")
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
    x, weight, cumulative, bias, state, count, *_ = call.inputs
    call.refuse_inputs("kernel_delta", "previous_mask")
    call.refuse_all_but(delta_offset=0, group_size=1)
    dtype, channels, taps = call.dtype(x), call.size(weight, 0), call.size(weight, 2)
    dilation, capacity = call.attribute("dilation"), call.attribute("state_update_capacity")
    steps = (taps - 1) * dilation
    cumulative = call.cast(cumulative, "int64")
    starts = call.Slice(cumulative, [0], [-1], [0])
    ends = call.Slice(cumulative, [1], [END], [0])
    # One table has the states and behind them the tokens, so that a tap is a row of it.
    table, before = x, [0]
    if steps:
        rows = call.Reshape(call.Transpose(state, perm=(0, 2, 1)), [-1, channels])
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
        token = call.Sub(call.Add(before, position), distances)
        stored = call.Sub(call.Add(call.Mul(call.Add(sequence, [1]), steps), length), distances)
        exists = call.GreaterOrEqual(length, distances)
        return call.Gather(table, call.Where(exists, token, stored))

    count_of = call.Squeeze(call.Shape(x, end=1), [0])
    tokens = call.Unsqueeze(call.Range(0, count_of, 1), [1])
    sequence = call.ReduceSum(call.cast(call.GreaterOrEqual(tokens, ends), "int64"), [1])
    sequence = call.Add(sequence, _misfit(call, starts, ends, call.Shape(x, end=1)))
    local = call.Sub(tokens, call.Gather(starts, sequence))
    taken = gathered(sequence, local, tokens, [steps - j * dilation for j in range(taps)])
    # Filters as [taps, channels].
    filters = call.Transpose(call.Reshape(weight, [channels, taps]), perm=(1, 0))
    products = call.Mul(call.cast(taken, "float32"), call.cast(filters, "float32"))
    y = call.ReduceSum(products, [1], keepdims=0)
    if bias is not None:
        y = call.Add(y, call.cast(bias, "float32"))
    if call.attribute("activation") != "none":
        y = call.Swish(y)
    lengths = call.Unsqueeze(call.Sub(ends, starts), [1])
    final = state
    if steps:
        size = call.Squeeze(call.Shape(starts), [0])
        numbers = call.Unsqueeze(call.Range(0, size, 1), [1])
        last = call.Unsqueeze(ends, [1])
        final = gathered(numbers, lengths, last, [steps - k for k in range(steps)])
        final = call.Transpose(final, perm=(0, 2, 1))
    update = None
    if capacity:
        shown = call.Clip(call.cast(count, "int64"), 0, capacity)
        shown = call.Min(call.Unsqueeze(shown, [1]), lengths)
        slots = [*range(capacity)]
        places = call.Add(call.Unsqueeze(starts, [1]), slots)
        nothing = call.Pad(x, [0, 0, 1, 0])  # with a row of zeros at the end
        update = call.Gather(nothing, call.Where(call.Less(slots, shown), places, [-1]))
    return [call.cast(y, dtype), final, update]


def _misfit(call: Call, starts: Any, ends: Any, tokens: Any) -> Any:
    """Return 0 if the sequences are exactly the tokens, else a number beyond all sequences.

    Args:
        call: The node.
        starts: First token of each sequence.
        ends: Token behind the last one of each sequence.
        tokens: The number of tokens, [1].
    """
    first = call.Slice(starts, [0], [1], [0])
    last = call.Slice(ends, [-1], [END], [0])
    negative = call.Min(call.ReduceMin(call.Sub(ends, starts), [0], keepdims=1), [0])
    wrong = call.Add(call.Abs(first), call.Sub(call.Abs(call.Sub(last, tokens)), negative))
    return call.Mul(call.Min(wrong, [1]), 1 << 40)
