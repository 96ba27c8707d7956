"""Kernels of LSTM, GRU and RNN: all steps of some sequences, after the inputs were multiplied.

A unit is a block of sequences in one direction: their recurrence weights are read once a step for
all of them. Every gate is padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import ld_i32, memcpy, memset, vec

from .arguments import CellsArguments
from .byte_kernels import byte_recurrence
from .product_kernels import product

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
        rows: Most sequences of a unit.
        nv: Vectors of a panel.
        kind: ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
        activations: Names in lower case, as the standard lists them.
        linear: GRU's ``linear_before_reset``.
        coupled: LSTM's ``input_forget``.
        peepholes: LSTM's cell states reach its gates.
        clip: What activations get is bounded.
        weights: ``"int8"`` where those of the recurrence are bytes (LSTM), else empty.
    """
    arguments = view_of(CellsArguments)
    v = vec(dtype, lanes)
    load, load_n, store, fma, splat = v.load, v.load_n, v.store, v.fma, v.splat
    item = v.itemsize
    size = lanes * item
    times = product(dtype, lanes, rows, nv)
    gates = {"LSTM": 4, "GRU": 3}.get(kind, 1)
    recur = byte_recurrence(lanes, rows, nv, gates) if weights == "int8" else _no_bytes
    made = [_activation(name, v, k, clip) for k, name in enumerate(activations)]
    f, g, h_of = (*made, *made, *made)[:3]

    @register_jitable
    def long_memory(a: CellsArguments, at: int, h: int, c: int, holes: int, row: int) -> None:
        """Gates in the order input, output, forget, cell."""
        for j in range(0, row, size):
            cell = load(c + j)
            i, forget, o = load(at + j), load(at + 2 * row + j), load(at + row + j)
            if peepholes:
                i = fma(load(holes + j), cell, i)
                forget = fma(load(holes + 2 * row + j), cell, forget)
            i = f(a, i)
            kept = splat(1.0) - i if coupled else f(a, forget)
            cell = fma(kept, cell, i * g(a, load(at + 3 * row + j)))
            if peepholes:
                o = fma(load(holes + row + j), cell, o)
            store(c + j, cell)
            store(h + j, f(a, o) * h_of(a, cell))

    @register_jitable
    def simple(a: CellsArguments, at: int, h: int, row: int) -> None:
        for j in range(0, row, size):
            store(h + j, f(a, load(at + j)))

    @register_jitable
    def reset_state(a: CellsArguments, at: int, h: int, to: int, row: int) -> None:
        """Store the reset gate times the state."""
        for j in range(0, row, size):
            store(to + j, f(a, load(at + row + j)) * load(h + j))

    @register_jitable
    def gated(a: CellsArguments, at: int, h: int, inner: int, inputs: int, row: int) -> None:
        """Gates in the order update, reset, hidden; ``inner`` is the recurrence of the last."""
        for j in range(0, row, size):
            z, n = f(a, load(at + j)), load(inner + j)
            if linear:
                n = fma(f(a, load(at + row + j)), n, load(inputs + j))
            n = g(a, n)
            store(h + j, fma(z, load(h + j), (splat(1.0) - z) * n))

    @register_jitable
    def start(to: int, source: int, step: int, count: int, row: int, width: int) -> None:
        memset(to, 0, count * row)
        if source != 0:
            for i in range(count):
                memcpy(to + i * row, source + i * step, width)

    @register_jitable
    def length_of(a: CellsArguments, sequence: int) -> int:
        steps = a.steps
        if a.lengths == 0:
            return steps
        length: int = ld_i32(a.lengths + 4 * sequence)
        return min(max(length, 0), steps)

    @register_jitable
    def gather(
        a: CellsArguments, first: int, count: int, step: int, back: int, x: int, to: int
    ) -> None:
        """Copy the inputs of a step: sequences of different lengths go backwards from their end."""
        row = a.padded * item * gates
        for i in range(count):
            length = length_of(a, first + i)
            t = length - 1 - step if back != 0 and step < length else step
            source = x + t * a.inputs_step + (first + i) * a.inputs_sequence
            memcpy(to + i * row, source, row)

    @register_jitable
    def advance(
        a: CellsArguments, direction: int, count: int, memory: int, x: int, step: int
    ) -> None:
        """Compute the sums of all gates that do not need others; ``x``: inputs, ``step`` bytes."""
        padded, depth = a.padded, a.size
        row = padded * item
        at = memory + 3 * count * row
        weights = a.weights + direction * a.weights_direction
        vectors = padded // lanes * (2 if kind == "GRU" else gates)
        times(count, memory, row, weights, vectors, depth, x, step, at, gates * row)
        if kind == "GRU":
            last = a.last_weights + direction * a.last_direction
            inner, vectors = memory + 2 * count * row, padded // lanes
            if linear:
                bias = a.last_bias + direction * row
                times(count, memory, row, last, vectors, depth, bias, 0, inner, row)
            else:
                reset = memory + count * row
                for i in range(count):
                    reset_state(a, at + i * gates * row, memory + i * row, reset + i * row, row)
                x += 2 * row
                times(count, reset, row, last, vectors, depth, x, step, inner, row)

    @register_jitable
    def add_inputs(a: CellsArguments, x: int, sums: int) -> None:
        """Add the inputs of all gates, which are not padded, to the sums of a sequence."""
        width, row = a.size, a.padded * item
        for gate in range(gates):
            source, to = x + gate * width * item, sums + gate * row
            whole = width // lanes * size
            for j in range(0, whole, size):
                store(to + j, load(to + j) + load(source + j))
            if whole < row:
                rest = load_n(source + whole, width % lanes)
                store(to + whole, load(to + whole) + rest)

    @register_jitable
    def advance_bytes(a: CellsArguments, direction: int, count: int, memory: int) -> None:
        """Compute what the recurrence adds to all gates."""
        padded, width = a.padded, a.size
        panels = a.weights + direction * a.weights_direction
        sums = memory + 3 * count * padded * item
        held = sums + gates * count * padded * item
        before = direction * gates * padded * 4
        recur(a, panels, before, count, width, padded, memory, sums, held)

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
            for given, to in ((a.hidden, memory), (a.cell, c)):
                start(to, given + state if given != 0 else 0, a.state_sequence, count, row, width)
            base = a.inputs + direction * a.inputs_direction
            holes = a.peepholes + direction * 3 * row
            for step in range(steps):
                t = steps - 1 - step if back != 0 else step
                x, between = base + t * a.inputs_step, a.inputs_sequence
                x += first * between
                if weights == "int8":
                    advance_bytes(a, direction, count, memory)
                else:
                    if a.lengths != 0:
                        gather(a, first, count, step, back, base, at)
                        x, between = at, gates * row
                    advance(a, direction, count, memory, x, between)
                for i in range(count):
                    length = length_of(a, first + i)
                    sums, h = at + i * gates * row, memory + i * row
                    if step < length:
                        t = length - 1 - step if back != 0 else step
                        if weights == "int8":
                            add_inputs(a, base + t * a.inputs_step + i * between, sums)
                        if kind == "LSTM":
                            long_memory(a, sums, h, c + i * row, holes, row)
                        elif kind == "GRU":
                            own = x + i * between + 2 * row
                            gated(a, sums, h, inner + i * row, own, row)
                        else:
                            simple(a, sums, h, row)
                    else:
                        t = step
                    if a.y != 0:
                        y = a.y + t * a.y_step + direction * a.y_direction
                        y += (first + i) * a.y_sequence
                        if step < length:
                            memcpy(y, h, width)
                        else:
                            memset(y, 0, width)
            for last, source in ((a.last_hidden, memory), (a.last_cell, c)):
                if last != 0:
                    for i in range(count):
                        to = last + state + i * a.state_sequence
                        memcpy(to, source + i * row, width)

    return kernel


@register_jitable
def _no_bytes(
    a: CellsArguments, weights: int, before: int, count: int, width: int, padded: int, h: int,
    sums: int, held: int,
) -> None:  # fmt: skip
    """Stand for the recurrence of bytes where there is none."""


@register_jitable
def _f_numbers(a: CellsArguments) -> tuple[float, float]:
    return a.f_alpha, a.f_beta


@register_jitable
def _g_numbers(a: CellsArguments) -> tuple[float, float]:
    return a.g_alpha, a.g_beta


@register_jitable
def _h_numbers(a: CellsArguments) -> tuple[float, float]:
    return a.h_alpha, a.h_beta


def _activation(name: str, v: Any, position: int, clip: bool) -> Function:
    """Return ``f(arguments, vector)`` of an activation with its alpha and beta."""
    plain = _plain(name, v)
    splat, least, most = v.splat, v.minimum, v.maximum
    numbers = (_f_numbers, _g_numbers, _h_numbers)[position]

    @register_jitable
    def apply(a: CellsArguments, x: Any) -> Any:
        if clip:
            bound = splat(a.clip)
            x = least(most(x, -bound), bound)
        alpha, beta = numbers(a)
        return plain(x, splat(alpha), splat(beta))

    return apply


def _plain(name: str, v: Any) -> Function:
    """Return ``f(x, alpha, beta)`` over vectors."""
    zero, splat, select, fma, size = v.zero, v.splat, v.select, v.fma, v.abs
    least, most = v.minimum, v.maximum
    vmath_name = name if name in ("sigmoid", "softplus") else "expm1" if name == "elu" else "tanh"
    known = vmath.function(vmath_name, v.dtype, v.lanes)

    def simple(x: Any, a: Any, b: Any) -> Any:
        return known(x)

    def relu(x: Any, a: Any, b: Any) -> Any:
        return most(x, zero())

    def affine(x: Any, a: Any, b: Any) -> Any:
        return fma(x, a, b)

    def leaky(x: Any, a: Any, b: Any) -> Any:
        return select(x < zero(), x * a, x)

    def threshold(x: Any, a: Any, b: Any) -> Any:
        return select(x > a, x, zero())

    def scaled(x: Any, a: Any, b: Any) -> Any:
        return a * known(b * x)

    def hard(x: Any, a: Any, b: Any) -> Any:
        return least(most(fma(x, a, b), zero()), splat(1.0))

    def elu(x: Any, a: Any, b: Any) -> Any:
        return select(x < zero(), a * known(least(x, zero())), x)

    def softsign(x: Any, a: Any, b: Any) -> Any:
        return x / (splat(1.0) + size(x))

    formulas: dict[str, Function] = {
        "affine": affine,
        "elu": elu,
        "hardsigmoid": hard,
        "leakyrelu": leaky,
        "relu": relu,
        "scaledtanh": scaled,
        "softsign": softsign,
        "thresholdedrelu": threshold,
    }
    return register_jitable(formulas.get(name, simple))
