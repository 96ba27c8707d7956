"""LSTM, GRU, RNN and RotaryEmbedding on OPENCL: the CPU's shape work, other kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import Lowering, Operand, Word
from subgraph.opencl.lowering import ClLowering, cl_kernel, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource, definitions

from .elementwise_cpu import temporary
from .opencl_code import line, register, require
from .products_opencl import Array, number
from .recurrent_cpu import Cells, input_products, last_bias

cl_shared("LSTM", "GRU", "RNN", "RotaryEmbedding")
_TEAM = 128  # work-items of a GPU that share a sequence
_BLOCK = 16  # neighbouring columns that a CPU sums in registers
# By the standard's names in lower case; ``a`` and ``b`` are alpha and beta.
_ACTIVATIONS = {
    "affine": "(a * x + b)",
    "elu": "(x < 0 ? a * expm1(x) : x)",
    "hardsigmoid": "clamp(a * x + b, (T)0, (T)1)",
    "leakyrelu": "(x < 0 ? a * x : x)",
    "relu": "(x < 0 ? 0 : x)",
    "scaledtanh": "(a * tanh(b * x))",
    "sigmoid": "(1 / (1 + exp(-x)))",
    "softplus": "(fmax(x, (T)0) + log1p(exp(-fabs(x))))",
    "softsign": "(x / (1 + fabs(x)))",
    "tanh": "tanh(x)",
    "thresholdedrelu": "(x > a ? x : 0)",
}


def _recurrence(weights: Array) -> Array:
    """Return ``[directions, hidden, gates * hidden]``."""
    return np.ascontiguousarray(weights.transpose(0, 2, 1))


@cl_primitive
def emit_cells(low: Lowering, c: Cells) -> None:
    """Launch a recurrent operator; see the CPU's function of this name."""
    assert isinstance(low, ClLowering)
    dtype = c.x.dtype
    require(low, dtype)
    steps, batch, _, hidden, directions = c.sizes
    together = len(set(c.activations)) == 1
    count = directions if together else 1
    group, block = (_TEAM, 1) if low.traits.is_gpu else (1, _BLOCK)
    held = temporary(low, dtype, (count * batch * (c.gates + 3) * hidden,))
    outputs = dict(enumerate(low.outputs))
    optional: dict[str, Word | None] = {
        "PEEPHOLES": c.peepholes,
        "HAS_H": c.hidden,
        "HAS_C": c.cell,
        "LENGTHS": c.lengths,
        "HAS_Y": outputs.get(0),
        "HAS_H_LAST": outputs.get(1),
        "HAS_C_LAST": outputs.get(2) if c.kind == "LSTM" else None,
    }
    defines: dict[str, str | int] = {name: int(of is not None) for name, of in optional.items()}
    defines |= {"T": register(dtype), "GROUP": group, "BLOCK": block, "CELL": c.gates}
    defines |= {"LINEAR": int(c.linear), "COUPLED": int(c.coupled)}
    places: list[Word] = [input_products(low, c, hidden), low.weight("turned", _recurrence, c.r)]
    # A buffer that is not there is never touched; the memory of the groups stands in for it.
    places += [last_bias(low, c, hidden), *(of or held for of in optional.values()), held]
    for first in range(1 if together else directions):
        own = c.activations[first]
        texts = [_ACTIVATIONS[name] for name in own.names]
        for name, made in zip("FGH", (*texts, *texts, *texts), strict=False):
            defines[f"{name}(x, a, b)"] = made
        numbers = [*own.numbers, *[0.0] * (6 - len(own.numbers))]
        low.launch(
            ClSource("recurrent", defines=definitions(defines)),
            "cells",
            [
                *(*places, steps, batch, hidden, first, int(c.backwards), *_strides(c)),
                *(number(dtype, value) for value in (c.clip, *numbers)),
            ],
            (count * batch * group,),
            (group,),
            flops=2 * count * steps * batch * c.gates * hidden * hidden,
        )


def _strides(c: Cells) -> list[int]:
    """Return the steps between steps and sequences of inputs, of states, and of results."""
    steps, batch, _, hidden, directions = c.sizes
    wide, row = directions * c.gates * hidden, directions * hidden
    if c.batch_first:
        return [wide, steps * wide, row, hidden, row, steps * row, hidden]
    return [batch * wide, wide, hidden, batch * hidden, batch * row, hidden, batch * hidden]


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
    defines: dict[str, str | int] = {"T": register(dtype), **flags}
    places = [x, y, cosines, sines, positions if known else x]
    elements = [step // x.itemsize for step in steps if isinstance(step, int)]
    low.launch(
        ClSource("rotary", defines=tuple(sorted(defines.items()))),
        "turn",
        [x.size, *places, heads, tokens, size, half, *elements, rows],
        *line(low, x.size),
    )
