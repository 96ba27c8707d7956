"""Kernel of LSTM, GRU and RNN: runs sequences, whose inputs were multiplied by their weights.

A work unit is a block of sequences in one direction; each step reads the recurrence weights once
for all of them. Every gate is padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld_i32, memcpy, memset, vec

from .arguments import GATES, CellsArguments
from .cell_parts import activation_functions, gru_cell, lstm_cell, reset_gate, rnn_cell
from .product_kernels import product
from .quantized_kernels import quantized_recurrence

Function = Callable[..., Any]


def cells(
    *,
    dtype: str,
    lanes: int,
    rows: int,
    nv: int,
    kind: str,
    activations: tuple[str, ...],
    linear: bool,
    coupled: bool,
    peepholes: bool,
    clip: bool,
    weights: str = "",
) -> Function:
    """Return the kernel of `CellsArguments`: it runs a cell along sequences.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        rows: Most rows of a tile of the recurrence: sequences of a unit, unless weights are int8.
        nv: Vectors of a panel.
        kind: ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
        activations: Names in lower case, as the standard lists them.
        linear: GRU's ``linear_before_reset``.
        coupled: LSTM's ``input_forget``.
        peepholes: LSTM's cell states are added to its gates.
        clip: The arguments of activations are bounded.
        weights: ``"int8"`` for quantized recurrence weights (LSTM), ``""`` for those of ``dtype``.
    """
    v, int8 = vec(dtype, lanes), weights == "int8"
    functions = activation_functions(v, activations, clip)
    if kind == "LSTM":
        advance = lstm_cell(v, functions, coupled, peepholes)
    elif kind == "GRU":
        advance = gru_cell(v, functions, linear)
    else:
        advance = rnn_cell(v, functions)
    if int8:
        recur = quantized_recurrence(lanes, rows, nv, GATES[kind])
        parts: Sequence[Function | None] = (None, *_int8_parts(v, GATES[kind], recur))
    else:
        multiply = product(dtype, lanes, rows, nv)
        parts = _recurrence(v, kind, linear, multiply, reset_gate(v, functions)), None, None
    return _sequence_kernel(kind, v.itemsize, int8, parts, advance)


def _sequence_kernel(
    kind: str, item: int, int8: bool, parts: Sequence[Any], advance: Function
) -> Function:
    """Return the kernel of `cells`, whose recurrence weights may be ``int8``.

    ``item`` is the bytes of an element; ``parts`` are the functions of `_recurrence` and of
    `_int8_parts`, None for those that the weights do not need; ``advance`` is the cell.
    """
    arguments, gates = view_of(CellsArguments), GATES[kind]
    (gate_sums, quantized_sums, add_inputs), read_inputs = parts, _input_reader(item, gates)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        steps, batch = a.steps, a.batch
        row, width = a.padded * item, a.size * item
        memory = a.scratch + worker * a.scratch_bytes
        block = a.rows
        blocks = (batch + block - 1) // block
        for unit in range(begin, end):
            direction, first = unit // blocks + a.direction, unit % blocks * block
            count = min(block, batch - first)
            back = 1 if direction == 1 or a.backwards != 0 else 0
            c = memory + count * row
            inner = c + count * row
            at = inner + count * row
            state = first * a.state_sequence + direction * a.state_direction
            for source, to in ((a.hidden, memory), (a.cell, c)):
                start = source + state if source != 0 else 0
                _set_states(to, start, a.state_sequence, count, row, width)
            base = a.inputs + direction * a.inputs_direction
            holes = a.peepholes + direction * 3 * row
            for step in range(steps):
                t = steps - 1 - step if back != 0 else step
                x, between = base + t * a.inputs_step, a.inputs_sequence
                x += first * between
                # For all sequences at once, also those that have ended: the states of all are
                # quantized by one range, as DynamicQuantizeLinear would.
                if int8:
                    quantized_sums(a, direction, count, memory)
                else:
                    if a.lengths != 0:
                        read_inputs(a, first, count, step, back, base, at)
                        x, between = at, gates * row
                    gate_sums(a, direction, count, memory, x, between)
                for i in range(count):
                    length = _length_of(a, first + i)
                    sums, h = at + i * gates * row, memory + i * row
                    # After its end a sequence keeps its state, which is its last one. Its results
                    # are zeros at the steps from its length on, in both directions.
                    t = step
                    if step < length:
                        t = length - 1 - step if back != 0 else step
                        if int8:
                            add_inputs(a, base + t * a.inputs_step + i * between, sums)
                        own = x + i * between + 2 * row
                        advance(a, sums, h, c + i * row, inner + i * row, own, holes, row)
                    if a.y != 0:
                        y = a.y + t * a.y_step + direction * a.y_direction
                        _store_state(y + (first + i) * a.y_sequence, h, width, step < length)
            for last, source in ((a.last_hidden, memory), (a.last_cell, c)):
                if last != 0:
                    _store_states(last + state, source, a.state_sequence, count, row, width)

    return kernel


@register_jitable(forceinline=True)
def _store_state(to: int, h: int, width: int, inside: bool) -> None:
    """Copy a state of ``width`` bytes to the results; zeros after the end of its sequence."""
    if inside:
        memcpy(to, h, width)
    else:
        memset(to, 0, width)


@register_jitable(forceinline=True)
def _store_states(to: int, source: int, step: int, count: int, row: int, width: int) -> None:
    """Copy states from rows of ``row`` bytes; the parameters are those of `_set_states`."""
    for i in range(count):
        memcpy(to + i * step, source + i * row, width)


@register_jitable
def _set_states(to: int, source: int, step: int, count: int, row: int, width: int) -> None:
    """Copy initial states to rows; zeros without them (``source`` 0).

    Args:
        to: Rows of ``row`` bytes.
        source: States of ``width`` bytes, ``step`` bytes apart.
        step: Bytes between the states of sequences.
        count: Sequences.
        row: Bytes of a padded state.
        width: Bytes of a state.
    """
    # The padding of states is zeroed as well, as activations read it.
    memset(to, 0, count * row)
    if source != 0:
        for i in range(count):
            memcpy(to + i * row, source + i * step, width)


@register_jitable
def _length_of(a: CellsArguments, sequence: int) -> int:
    steps = a.steps
    if a.lengths == 0:
        return steps
    length: int = ld_i32(a.lengths + 4 * sequence)
    # Lengths are data: one that is out of range must not become an address outside the operands.
    return min(max(length, 0), steps)


def _input_reader(item: int, gates: int) -> Function:
    """Return ``f(a, first, count, step, back, x, to)``: the inputs of a step of some sequences.

    Sequences of different lengths, read backwards (``back`` 1), are at different times in a step;
    so their inputs, of ``count`` sequences from ``first`` on, are copied to rows at ``to``. ``x``
    are the products of the direction.
    """

    @register_jitable
    def read_inputs(
        a: CellsArguments, first: int, count: int, step: int, back: int, x: int, to: int
    ) -> None:
        """Copy the inputs of a step."""
        row = a.padded * item * gates
        for i in range(count):
            length = _length_of(a, first + i)
            t = length - 1 - step if back != 0 and step < length else step
            source = x + t * a.inputs_step + (first + i) * a.inputs_sequence
            memcpy(to + i * row, source, row)

    return read_inputs


def _recurrence(
    v: Any, kind: str, linear: bool, multiply: Function, reset_state: Function
) -> Function:
    """Return ``f(a, direction, count, memory, x, step)``: the sums of the gates of a step.

    Args:
        v: Operations on vectors.
        kind: ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
        linear: GRU's ``linear_before_reset``.
        multiply: The product with the recurrence weights.
        reset_state: That of `reset_gate`.
    """
    lanes, item, gates = v.lanes, v.itemsize, GATES[kind]

    @register_jitable
    def gate_sums(
        a: CellsArguments, direction: int, count: int, memory: int, x: int, step: int
    ) -> None:
        """Compute the sums of all gates, for GRU into two places: see `CellsArguments`.

        ``memory`` is scratch, ``x`` the first sequence's inputs, ``step`` the bytes between those
        of sequences.
        """
        padded, depth = a.padded, a.size
        row = padded * item
        at = memory + 3 * count * row
        weights = a.weights + direction * a.weights_direction
        vectors = padded // lanes * (2 if kind == "GRU" else gates)
        multiply(count, memory, row, weights, vectors, depth, x, step, at, gates * row)
        if kind == "GRU":
            last = a.last_weights + direction * a.last_direction
            inner, vectors = memory + 2 * count * row, padded // lanes
            if linear:
                bias = a.last_bias + direction * row
                multiply(count, memory, row, last, vectors, depth, bias, 0, inner, row)
            else:
                reset = memory + count * row
                for i in range(count):
                    reset_state(a, at + i * gates * row, memory + i * row, reset + i * row, row)
                x += 2 * row
                multiply(count, reset, row, last, vectors, depth, x, step, inner, row)

    return gate_sums


def _int8_parts(v: Any, gates: int, recur: Function) -> tuple[Function, Function]:
    """Return two functions that replace `_recurrence` for int8 weights.

    ``quantized_sums(a, direction, count, memory)`` computes what the recurrence adds to all gates,
    ``add_inputs(a, x, sums)`` adds the inputs of a sequence.
    """
    load, load_n, store, lanes, item = v.load, v.load_n, v.store, v.lanes, v.itemsize
    size = lanes * item

    @register_jitable
    def quantized_sums(a: CellsArguments, direction: int, count: int, memory: int) -> None:
        """Compute the products of states and weights, to be added to the gates of all sequences."""
        padded, width = a.padded, a.size
        panels = a.weights + direction * a.weights_direction
        sums = memory + 3 * count * padded * item
        quantized = sums + gates * count * padded * item
        before = direction * gates * padded * 4
        recur(a, panels, before, count, width, padded, memory, sums, quantized)

    @register_jitable
    def add_inputs(a: CellsArguments, x: int, sums: int) -> None:
        """Add the inputs of all gates, which are not padded, to the sums of a sequence."""
        width, row = a.size, a.padded * item
        for gate in range(gates):
            source, to = x + gate * width * item, sums + gate * row
            whole = width // lanes * size
            for j in range(0, whole, size):
                store(to + j, load(to + j) + load(source + j))
            # The rest is loaded as zeros after the width, so that the sums of the padding stay as
            # they are.
            if whole < row:
                rest = load_n(source + whole, width % lanes)
                store(to + whole, load(to + whole) + rest)

    return quantized_sums, add_inputs
