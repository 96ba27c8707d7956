"""LSTM, GRU, RNN and LSTM of bytes on OPENCL: the CPU's shapes, other kernels."""

from __future__ import annotations

from functools import partial

import numpy as np

from subgraph.engine.planner.lowering import Argument, Lowering
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.opencl.lowering import ClLowering, cl_lowering, cl_primitive, cl_shared
from subgraph.opencl.runtime import ClSource, definitions
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.shared.opencl_code import number, register, require

from .bytes_cpu import read_byte_cells
from .cpu import Cells, input_products, last_bias
from .op import per_column

cl_shared("LSTM", "GRU", "RNN")
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
    require(low, c.x.dtype)
    batch, hidden = c.sizes[1], c.sizes[3]
    given: list[Argument] = [input_products(low, c, hidden), low.weight("turned", _recurrence, c.r)]
    given.append(last_bias(low, c, hidden))
    _launch(low, c, "cells", given, batch, {c.x.dtype: (c.gates + 3) * hidden})


@cl_lowering("QuantizedLSTM", domain=INTERNAL_DOMAIN, dtypes=("float32",))
def quantized_lstm(node: Node, low: ClLowering) -> None:
    """Launch an LSTM whose recurrence multiplies bytes."""
    c = read_byte_cells(node, low)
    batch, hidden = c.sizes[1], c.sizes[3]
    r, scales, zeros = (low.input(k) for k in range(1, 4))
    spread = partial(per_column, hidden=hidden)
    given: list[Argument] = [
        c.x,
        low.weight("less zero points of columns", partial(_centred, hidden=hidden), r, zeros),
        low.weight(f"scales of {4 * hidden} columns", spread, scales),
    ]
    memory = {"float32": 6 * batch * hidden, "int32": batch * hidden}
    _launch(low, c, "byte_cells", given, 1, memory)


def _centred(weights: Array, zeros: Array, *, hidden: int) -> Array:
    points = per_column(zeros, hidden)[:, None]
    return np.ascontiguousarray(weights.astype(np.int16) - points.astype(np.int16))


def _launch(
    low: ClLowering, c: Cells, name: str, given: list[Argument], groups: int, memory: dict[str, int]
) -> None:
    """Launch a kernel for all directions, or for each if their activations differ.

    Args:
        low: The lowering.
        c: The operator.
        name: The kernel.
        given: Its first arguments.
        groups: Work-groups of a direction.
        memory: Elements of each dtype that a work-group holds.
    """
    steps, batch, _, hidden, directions = c.sizes
    together = len(set(c.activations)) == 1
    count = directions if together else 1
    group, block = (_TEAM, 1) if low.traits.is_gpu else (1, _BLOCK)
    held = [temporary(low, dtype, (count * groups * each,)) for dtype, each in memory.items()]
    outputs = dict(enumerate(low.outputs))
    optional: dict[str, Argument | None] = {
        "PEEPHOLES": c.peepholes,
        "HAS_H": c.hidden,
        "HAS_C": c.cell,
        "LENGTHS": c.lengths,
        "HAS_Y": outputs.get(0),
        "HAS_H_LAST": outputs.get(1),
        "HAS_C_LAST": outputs.get(2) if c.kind == "LSTM" else None,
    }
    defines: dict[str, str | int] = {key: int(of is not None) for key, of in optional.items()}
    defines |= {"T": register(c.x.dtype), "GROUP": group, "BLOCK": block, "CELL": c.gates}
    defines |= {"LINEAR": int(c.linear), "COUPLED": int(c.coupled)}
    defines |= {"BYTES": int(name == "byte_cells")}
    # A buffer that is not there is never touched; the memory of the groups stands in for it.
    places: list[Argument] = [*given, *(of or held[0] for of in optional.values()), *held]
    for first in range(1 if together else directions):
        own = c.activations[first]
        texts = [_ACTIVATIONS[key] for key in own.names]
        for key, made in zip("FGH", (*texts, *texts, *texts), strict=False):
            defines[f"{key}(x, a, b)"] = made
        numbers = [*own.numbers, *[0.0] * (6 - len(own.numbers))]
        low.launch(
            ClSource("recurrent/kernels", defines=definitions(defines)),
            name,
            [
                *(*places, steps, batch, hidden, first, int(c.backwards), *_strides(c)),
                *(number(c.x.dtype, value) for value in (c.clip, *numbers)),
            ],
            (count * groups * group,),
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
