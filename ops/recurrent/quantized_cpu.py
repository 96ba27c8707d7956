"""QuantizedLSTM on the CPU device: an LSTM with int8 recurrence weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from subgraph.engine.planner.lowering import Lowering, lowering
from subgraph.engine.planner.operands import Argument, Operand, Weight
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.tile_planning import Tiles, round_up, tiles

from .cpu import Cells, Recurrence, cells_of, emit_steps, padded_gates, strides, unit_tiling
from .op import per_column


@lowering("QuantizedLSTM", domain=INTERNAL_DOMAIN, dtypes=("float32",))
def quantized_lstm(node: Node, low: Lowering) -> None:
    """Lower QuantizedLSTM."""
    c = read_quantized_cells(node, low)
    _, batch, _, size, directions = c.sizes
    x, r, scale, zero = (low.input(k) for k in range(4))
    # All sequences of a direction are one unit, as their states are quantized by one range.
    _, of = unit_tiling(tiles("float32"), 1, batch, 1)
    row = c.gates * size * of.item
    between, _, _ = strides(c, directions * row)
    recurrence = Recurrence(
        inputs=x,
        strides=(*between, row),
        weights=_weights(low, of, r),
        columns=_columns(low, round_up(size, of.lanes), size, r, scale, zero),
    )
    emit_steps(low, c, of, batch, recurrence)


def read_quantized_cells(node: Node, low: Lowering) -> Cells:
    """Return a node's operands and attributes; X is the product of inputs and weights.

    Raises:
        Unsupported: There is no kernel for them.
    """
    x, r, scale, zero = (low.input(k) for k in range(4))
    steps, batch, width = x.shape
    sizes = (steps, batch, width, r.shape[1], r.shape[0])
    return cells_of(node, low, "LSTM", sizes, (r, scale, zero), w=x, r=r)


def _weights(low: Lowering, of: Tiles, r: Operand) -> tuple[Argument, int]:
    """Return R in panels, and its bytes per direction."""
    _, hidden, _ = r.shape
    padded = round_up(hidden, of.lanes)
    quads = -(-hidden // 4)
    make = partial(_byte_panels, of=of, padded=padded)
    packed = low.weight(f"quantized recurrence {padded} {of.width}/{of.lanes}", make, r)
    return packed, quads * 4 * 4 * padded


def signed(weights: Array) -> Array:
    """Return weights as int8: uint8 less 128."""
    return (weights ^ 128).view(np.int8) if weights.dtype == np.uint8 else weights


def _byte_panels(weights: Array, *, of: Tiles, padded: int) -> Array:
    """Return panels ``[direction][panel][quad][column][4]``; the last panel may be narrower."""
    directions, hidden, _ = weights.shape
    quads = -(-hidden // 4)
    whole = padded_gates(signed(weights), 4, padded)
    deep = np.zeros((directions, quads * 4, 4 * padded), np.int8)
    deep[:, :hidden] = whole
    split = deep.reshape(directions, quads, 4, 4 * padded).swapaxes(2, 3)
    found = [
        np.ascontiguousarray(matrix[:, begin : begin + of.width]).reshape(-1)
        for matrix in split
        for begin in range(0, 4 * padded, of.width)
    ]
    return np.concatenate(found)


def _columns(
    low: Lowering, padded: int, hidden: int, r: Operand, scale: Operand, zero: Operand
) -> tuple[Argument, Argument, Argument]:
    """Return scales, sums and zero points of R's columns, each gate padded to ``padded``."""

    def weight(name: str, make: Callable[[Array], Array], source: Operand) -> Weight:
        def spread(array: Array) -> Array:
            return np.ascontiguousarray(padded_gates(make(array), 4, padded))

        return low.weight(f"{name} of quantized recurrence {padded}", spread, source)

    def scales(array: Array) -> Array:
        return per_column(array, hidden)

    def sums(array: Array) -> Array:
        found: Array = signed(array).sum(1, dtype=np.int32)
        return found

    def zeros(array: Array) -> Array:
        return per_column(signed(array), hidden).astype(np.int32)

    return weight("scales", scales, scale), weight("sums", sums, r), weight("zeros", zeros, zero)
