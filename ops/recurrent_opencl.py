"""LSTM, GRU, RNN and RotaryEmbedding on OPENCL: the CPU's shape work, other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import Lowering, Operand, Unsupported, Word
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource

from .elementwise_cpu import temporary
from .opencl_code import line, register, require
from .recurrent_cpu import Cells, input_products, last_bias

Array = np.ndarray[Any, Any]
cl_shared("LSTM", "GRU", "RNN", "RotaryEmbedding")
_TEAM = 128  # work-items of a GPU that share a sequence
_BLOCK = 16  # neighbouring columns that a CPU sums in registers


@cl_primitive
def emit_cells(low: Lowering, c: Cells) -> None:
    """Launch the steps of recurrent cells; see the CPU's function of this name."""
    assert isinstance(low, ClLowering)
    require(low, c.x.dtype)
    steps, batch, _, hidden, directions = c.sizes
    names = {of.names for of in c.activations}
    usual = {"LSTM": {("sigmoid", "tanh", "tanh")}, "GRU": {("sigmoid", "tanh")}}
    if names not in (usual.get(c.kind), {("tanh",)}, {("relu",)}):
        raise Unsupported(f"{c.kind} with activations {sorted(names)}")
    if c.lengths is not None or c.peepholes is not None:
        raise Unsupported(f"{c.kind} with lengths of sequences or peepholes")
    if c.batch_first or c.coupled or c.clip:
        raise Unsupported(f"{c.kind} with layout, input_forget or clip")
    outputs = dict(enumerate(low.outputs))
    last_cell = outputs.get(2) if c.kind == "LSTM" else None
    optional = [c.hidden, c.cell, outputs.get(0), outputs.get(1), last_cell]
    flags = {
        name: int(operand is not None)
        for name, operand in zip(
            ("HAS_H", "HAS_C", "HAS_Y", "HAS_H_LAST", "HAS_C_LAST"), optional, strict=True
        )
    }
    units = directions * batch
    group, block = (_TEAM, 1) if low.traits.is_gpu else (1, _BLOCK)
    numbers = {"CELL": c.gates, "LINEAR": int(c.linear), "RELU": int(names == {("relu",)})}
    defines = {"T": register(c.x.dtype), "GROUP": group, "BLOCK": block, **numbers, **flags}
    held = temporary(low, c.x.dtype, (units * (c.gates + 4) * hidden,))
    places: list[Word] = [input_products(low, c, hidden)]
    places += [low.weight("recurrence", _recurrence, c.r), last_bias(low, c, hidden)]
    # A buffer that is not there is never touched; the memory of the group stands in for it.
    low.launch(
        ClSource("recurrent", defines=tuple(sorted(defines.items()))),
        "cells",
        [
            *places,
            *(held if operand is None else operand for operand in optional),
            *(held, steps, batch, hidden, directions, int(c.backwards)),
        ],
        (units * group,),
        (group,),
    )


def _recurrence(weights: Array) -> Array:
    return np.ascontiguousarray(weights.transpose(0, 2, 1))


@cl_kernel("rotary_kernels", "rotate")
def rotate(low: ClLowering, kernel: Kernel, words: Sequence[Word]) -> None:
    """Launch RotaryEmbedding."""
    variant: dict[str, Any] = dict(kernel.variant)
    dtype = variant["dtype"]
    require(low, dtype)
    x, y, cosines, sines, positions, heads, tokens, size, half, *steps, rows = words
    assert isinstance(x, Operand)
    known = not isinstance(positions, int)
    flags = {"PAIRS": int(variant["interleaved"]), "POSITIONS": int(known)}
    defines = {"T": register(dtype), **flags}
    places = [x, y, cosines, sines, positions if known else x]
    elements = [step // x.itemsize for step in steps if isinstance(step, int)]
    low.launch(
        ClSource("rotary", defines=tuple(sorted(defines.items()))),
        "turn",
        [x.size, *places, heads, tokens, size, half, *elements, rows],
        *line(low, x.size),
    )
