"""LSTM, GRU, RNN and QuantizedLSTM on OPENCL: the CPU's operands with kernels of their own."""

from __future__ import annotations

from functools import partial

import numpy as np

from subgraph.engine.planner.lowering import Lowering
from subgraph.engine.planner.operands import Argument
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.opencl.lowering import ClLowering, cl_lowering, cl_primitive, cl_shared
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.shared.activations import ACTIVATIONS
from subgraph.ops.shared.opencl_code import number, program, register, require

from .cpu import Cells, input_products, last_bias, strides
from .op import per_column
from .quantized_cpu import read_quantized_cells

cl_shared("LSTM", "GRU", "RNN")
_GROUP_ITEMS = 128  # work-items of a GPU that share a sequence (estimate)
_BLOCK_COLUMNS = 16  # adjacent columns that a work-item of a CPU sums in registers (estimate)
# Expressions of the activations, by their names in lower case.
_EXPRESSIONS = {
    "affine": "(p * x + q)",
    "scaledtanh": "(p * tanh(q * x))",
    "softsign": "(x / (1 + fabs(x)))",
    "thresholdedrelu": "(x > p ? x : 0)",
    **{name.lower(): form.opencl for name, form in ACTIVATIONS.items()},
}


def _transposed(weights: Array) -> Array:
    """Return ``[directions, hidden, gates * hidden]``."""
    return np.ascontiguousarray(weights.transpose(0, 2, 1))


@cl_primitive
def emit_cells(low: Lowering, c: Cells) -> None:
    """Launch a recurrent operator; the function of this name in ``cpu.py`` says more."""
    assert isinstance(low, ClLowering)
    require(low, c.x.dtype)
    batch, hidden = c.sizes[1], c.sizes[3]
    leading: list[Argument] = [
        input_products(low, c, hidden),
        low.weight("transposed", _transposed, c.r),
    ]
    leading.append(last_bias(low, c, hidden))
    _launch(low, c, "cells", leading, batch, {c.x.dtype: (c.gates + 3) * hidden})


@cl_lowering("QuantizedLSTM", domain=INTERNAL_DOMAIN, dtypes=("float32",))
def quantized_lstm(node: Node, low: ClLowering) -> None:
    """Launch QuantizedLSTM."""
    c = read_quantized_cells(node, low)
    batch, hidden = c.sizes[1], c.sizes[3]
    r, scales, zeros = (low.input(k) for k in range(1, 4))
    spread = partial(per_column, hidden=hidden)
    leading: list[Argument] = [
        c.x,
        low.weight("less zero points of columns", partial(_centred, hidden=hidden), r, zeros),
        low.weight(f"scales of {4 * hidden} columns", spread, scales),
    ]
    memory = {"float32": 6 * batch * hidden, "int32": batch * hidden}
    _launch(low, c, "quantized_cells", leading, 1, memory)


def _centred(weights: Array, zeros: Array, *, hidden: int) -> Array:
    """Return the weights less the zero points of their columns."""
    points = per_column(zeros, hidden)[:, None]
    return np.ascontiguousarray(weights.astype(np.int16) - points.astype(np.int16))


def _launch(
    low: ClLowering,
    c: Cells,
    name: str,
    leading: list[Argument],
    groups: int,
    memory: dict[str, int],
) -> None:
    """Launch a kernel for all directions, or for each if their activations differ.

    Args:
        low: The lowering.
        c: The operator.
        name: The kernel.
        leading: Its first arguments.
        groups: Work-groups of a direction.
        memory: Elements of each dtype of a work-group's scratch buffer.
    """
    steps, batch, _, hidden, directions = c.sizes
    one_launch = len(set(c.activations)) == 1
    count = directions if one_launch else 1
    group, block = (_GROUP_ITEMS, 1) if low.traits.is_gpu else (1, _BLOCK_COLUMNS)
    scratch = [temporary(low, dtype, (count * groups * each,)) for dtype, each in memory.items()]
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
    defines |= {"QUANTIZED": int(name == "quantized_cells")}
    # The kernel does not read an omitted operand: any buffer stands for it.
    buffers: list[Argument] = [*leading, *(of or scratch[0] for of in optional.values()), *scratch]
    row = strides(c, hidden)
    moved = [*strides(c, directions * c.gates * hidden)[0], *row[1], *row[2]]
    for first in range(1 if one_launch else directions):
        own = c.activations[first]
        texts = [_EXPRESSIONS[key] for key in own.names]
        for key, made in zip("FGH", (*texts, *texts, *texts), strict=False):
            defines[f"{key}(x, p, q)"] = made
        numbers = [*own.numbers, *[0.0] * (6 - len(own.numbers))]
        low.launch(
            program("recurrent/kernels", **defines),
            name,
            [
                *(*buffers, steps, batch, hidden, first, int(c.backwards), *moved),
                *(number(c.x.dtype, value) for value in (c.clip, *numbers)),
            ],
            (count * groups * group,),
            (group,),
            flops=2 * count * steps * batch * c.gates * hidden * hidden,
        )
