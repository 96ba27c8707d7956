"""The operator "QuantizedLSTM" of "subgraph.cpu": an LSTM whose recurrence multiplies bytes.

It is the second half of ONNX Runtime's DynamicQuantizeLSTM (``contrib_quantized.py``); the first is
an ordinary product of bytes, of all inputs at once. In each step the hidden states of the whole
batch are quantised by their own range, as DynamicQuantizeLinear does it, and multiplied by weights
of 8 bits with exact sums.

``QuantizedLSTM(X, R, R_scale, R_zero_point, sequence_lens?, initial_h?, initial_c?, P?)`` gives Y,
Y_h and Y_c as LSTM does. X ``[steps, batch, directions * 4 * hidden]`` are the inputs times their
weights plus biases. R is ``[directions, hidden, 4 * hidden]``, its scale and zero point are
``[directions]`` or ``[directions, 4 * hidden]``. The attributes are those of LSTM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.operator import reference, shape_rule
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_dtype,
    require_rank,
    require_shape,
    requires,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import Types, Values, tensor

from .op import activations, long_memory, require_directions, require_lengths, require_states, scan

# Words of the kernel behind those of `recurrent_kernels`: scales, sums and zero points (0: all are
# 0) of R's columns, each ``[directions, gates, padded]``.
B_SCALES, B_SUMS, B_ZEROS = 37, 38, 39
BESIDE = 64  # bytes behind a row of quantised states, for its sum


@requires("QuantizedLSTM", domain=INTERNAL_DOMAIN)
def quantized_lstm_operands(
    node: Node, x: Tensor, r: Tensor, scale: Tensor, zero: Tensor, lengths: Tensor | None = None,
    h: Tensor | None = None, c: Tensor | None = None, p: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights, their scales and states have the sizes that R names."""
    require_rank("X", x, 3)
    require_rank("R", r, 3)
    require_dtype("X", x, "float32")
    require_dtype("R", r, "uint8", "int8")
    directions, hidden = require_directions(node), r.shape[1]
    steps, batch, gates = x.shape
    require_shape("R", r, (directions, hidden, 4 * hidden), f"of {directions} direction(s)")
    require(
        gates == directions * 4 * hidden,
        "X has {} products for {} direction(s) of {} elements",
        gates,
        directions,
        hidden,
    )
    for name, given, dtype in (("R_scale", scale, "float32"), ("R_zero_point", zero, r.dtype)):
        require_rank(name, given, 1, 2)
        require_dtype(name, given, dtype)
        shape = (directions, 4 * hidden)[: given.rank]
        require_shape(name, given, shape, "one for each direction, or for each of its columns")
    require_states(node, (directions, batch, hidden), (h, c, p), "float32")
    require_lengths(lengths, steps, batch)


@shape_rule("QuantizedLSTM", domain=INTERNAL_DOMAIN)
def states(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give every hidden state, and the last one of each kind."""
    x, r = tensor(types[0]), tensor(types[1])
    if x is None or x.shape is None or r is None or r.shape is None:
        return [None if x is None else TensorType(x.dtype)] * 3
    state = (r.shape[0], x.shape[1], r.shape[1])
    last = TensorType(x.dtype, state)
    return [TensorType(x.dtype, (x.shape[0], *state)), last, last]


def per_column(numbers: Array, hidden: int) -> Array:
    """Return ``[directions, 4 * hidden]`` of one number for each direction, or each column."""
    columns = numbers.reshape(len(numbers), -1)
    return np.broadcast_to(columns, (len(numbers), 4 * hidden))


@reference("QuantizedLSTM", domain=INTERNAL_DOMAIN)
def quantized_lstm(node: Node, inputs: Sequence[Any]) -> Sequence[Array]:
    """Return Y, Y_h and Y_c; gates in the order i, o, f, c; peepholes i, o, f."""
    given = attributes(node)
    x, r, scales, zeros = inputs[:4]
    optional: list[Any] = [*inputs[4:], *[None] * 4]
    lengths, h, c, p = optional[:4]
    steps, batch, _ = x.shape
    directions, hidden, _ = r.shape
    functions = activations(given, ("Sigmoid", "Tanh", "Tanh"), directions)
    lengths = np.full(batch, steps) if lengths is None else np.asarray(lengths)
    nothing = np.zeros((directions, batch, hidden), np.float32)
    h, c = nothing if h is None else h, nothing if c is None else c
    p = np.zeros((directions, 3 * hidden), np.float32) if p is None else p
    scales, zeros = per_column(scales, hidden), per_column(zeros, hidden)
    outputs: list[Array] = []
    lasts: list[tuple[Array, ...]] = []
    parts: list[Array] = np.split(x, directions, axis=2)
    for k, part in enumerate(parts):
        centred: Array = r[k].astype(np.int64) - zeros[k]
        cell = long_memory(
            _sums(centred, scales[k]), p[k], functions[k], coupled=bool(given.get("input_forget"))
        )
        backwards = k == 1 or given.get("direction") == "reverse"
        output, last = scan(part, lengths, cell, (h[k], c[k]), backwards)
        outputs.append(output)
        lasts.append(last)
    return [np.stack(outputs, 1), *(np.stack(states) for states in zip(*lasts, strict=True))]


def _sums(weights: Array, scales: Array) -> Any:
    """Return what adds the products of quantised states and weights less their zero points."""

    def sums(x: Array, hidden: Array) -> Array:
        least, most = np.float32(min(hidden.min(), 0)), np.float32(max(hidden.max(), 0))
        step = (most - least) / np.float32(255) if most > least else np.float32(1)
        zero = np.clip(np.rint(-least / step), 0, 255)
        held = np.clip(np.rint(hidden / step) + zero, 0, 255) - zero
        result: Array = x + (held.astype(np.int64) @ weights).astype(np.float32) * (step * scales)
        return result

    return sums
