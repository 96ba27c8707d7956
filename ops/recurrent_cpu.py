"""LSTM, GRU and RNN on the CPU device: one matrix product for all inputs, then the steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from subgraph.engine.constants import as_it_is
from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import Lowering, Operand, Storage, Unsupported, Weight, Word, lowering
from subgraph.graph import Node

from .composite_cpu import delegate
from .elementwise_cpu import temporary
from .elementwise_expressions import text

Array = np.ndarray[Any, Any]
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_USUAL = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}


def _input_weights(weights: Array, *, direction: int) -> Array:
    return np.ascontiguousarray(weights[direction].T)


def _recurrence(weights: Array) -> Array:
    return np.ascontiguousarray(weights.transpose(0, 2, 1))


def _input_bias(biases: Array, *, direction: int, gates: int, hidden: int, own: int) -> Array:
    """Return the biases that are added to the inputs: of the last ``own`` gates not both."""
    size = gates * hidden
    total = biases[direction, :size] + biases[direction, size:]
    if own:
        total[size - own * hidden :] = biases[direction, size - own * hidden : size]
    return total


def _last_bias(biases: Array, *, hidden: int) -> Array:
    return np.ascontiguousarray(biases[:, -hidden:])


def _constant(
    low: Lowering, shape: tuple[int, ...], recipe: str, make: Callable[..., Array], source: Operand
) -> Operand:
    """Return what ``make`` gives of a weight as an operand."""
    made = Operand(f"{source.name}.{recipe}", source.dtype, shape)
    made.derived = low.weight(recipe, make, source)
    plain = Weight("plain", as_it_is, (made.derived,))
    made.storage = Storage("weight", made.nbytes, weight=plain)
    return made


def _kind(node: Node, directions: int) -> str:
    """Return the kernel's name of the cell.

    Raises:
        Unsupported: its activations or options are unusual.
    """
    for name in ("clip", "input_forget", "layout", "activation_alpha", "activation_beta"):
        if node.attrs.get(name):
            raise Unsupported(f"{node.op_type} with {name}")
    given = node.attrs.get("activations")
    usual = _USUAL[node.op_type] * directions
    names = usual if not given else [text(name).capitalize() for name in given]
    if node.op_type == "RNN" and names in (["Tanh"] * directions, ["Relu"] * directions):
        return names[0]
    if names != usual:
        raise Unsupported(f"{node.op_type} with activations {names}")
    return node.op_type


@lowering("LSTM", "GRU", "RNN", dtypes=("float32", "float64"))
def recurrent(node: Node, low: Lowering) -> None:
    """Lower a recurrent operator with the usual activations."""
    x, w, r = low.given(0), low.given(1), low.given(2)
    bias, lengths = low.optional(3), low.optional(4)
    steps, batch, width = x.shape
    directions, hidden = r.shape[0], r.shape[2]
    kind, gates = _kind(node, directions), _GATES[node.op_type]
    if lengths is not None and (lengths.known is None or (lengths.known != steps).any()):
        raise Unsupported(f"{node.op_type} with sequences of different lengths")
    if low.optional(7) is not None:
        raise Unsupported("LSTM with peepholes")
    if 0 in (steps, batch, hidden, width) or not (w.constant and r.constant):
        raise Unsupported(f"{node.op_type} without elements or with computed weights")
    linear = bool(node.attrs.get("linear_before_reset", 0)) and kind == "GRU"
    size = gates * hidden
    products = temporary(low, x.dtype, (directions, steps * batch, size))
    for k in range(directions):
        inputs = Operand(x.name, x.dtype, (steps * batch, width), known=x.known)
        inputs.storage, inputs.offset = x.storage, x.offset
        matrix = _constant(
            low, (width, size), f"inputs{k}", partial(_input_weights, direction=k), w
        )
        operands = [inputs, matrix]
        if bias is not None:
            own = 1 if kind == "GRU" else 0
            make = partial(_input_bias, direction=k, gates=gates, hidden=hidden, own=own)
            recipe = f"bias{k} {gates} {hidden} {own}"
            operands.append(_constant(low, (size,), recipe, make, bias))
        part = Operand(products.name, x.dtype, (steps * batch, size))
        part.storage, part.offset = products.storage, k * steps * batch * size * x.itemsize
        delegate(low, "Gemm", operands, part)
    last: Word = low.weight("zeros", np.array, np.zeros((directions, hidden), x.dtype))
    if bias is not None:
        last = low.weight(f"last_bias {hidden}", partial(_last_bias, hidden=hidden), bias)
    scratch = low.scratch((gates + 4) * hidden * x.itemsize, per_worker=True)
    outputs = dict(enumerate(low.outputs))
    words: list[Word] = [
        products,
        low.weight("recurrence", _recurrence, r),
        last,
        low.optional(5) or 0,
        (low.optional(6) or 0) if kind == "LSTM" else 0,
        *(outputs.get(k, 0) for k in range(2)),
        outputs.get(2, 0) if kind == "LSTM" else 0,
        *(steps, batch, hidden, directions),
        int(text(node.attrs.get("direction", "forward")) == "reverse"),
        scratch,
        scratch.nbytes,
    ]
    kernel = Kernel(
        "recurrent_kernels",
        "cells",
        dtype=x.dtype,
        lanes=low.lanes(x.dtype),
        kind=kind,
        linear=linear,
    )
    flops = 2 * directions * steps * batch * size * hidden
    low.emit(kernel, words, directions * batch, grain=1, flops=flops, bytes=r.nbytes * steps)
