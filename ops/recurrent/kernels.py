"""Kernels of LSTM, GRU and RNN: all steps of some sequences, after the inputs were multiplied.

A unit is a block of sequences in one direction: their recurrence weights are read once a step for
all of them. Every gate is padded to whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.simd import ld_f64, ld_i32, memcpy, memset, vec
from subgraph.ops.movement.kernels import arg

from .byte_kernels import byte_recurrence
from .product_kernels import product

Function = Callable[..., Any]
C_INPUTS = 0  # inputs times weights plus biases, then bytes between steps, sequences, directions
C_WEIGHTS = 4  # recurrence weights in panels, then bytes between directions
C_LAST = 6  # weights of GRU's last gate, then bytes between directions
C_BIAS = 8  # its recurrence bias [directions, padded] (linear_before_reset)
C_PEEPHOLES = 9  # [directions, 3, padded]
C_HIDDEN, C_CELL = 10, 11  # initial states, 0 for zeros
C_STATE = 12  # bytes between sequences and between directions of states
C_Y = 14  # output (0: none), then bytes between steps, sequences, directions
C_LAST_HIDDEN, C_LAST_CELL = 18, 19  # last states, 0 for none
C_LENGTHS = 20  # int32 length of each sequence, 0: all whole
C_STEPS, C_BATCH, C_SIZE, C_PADDED = 21, 22, 23, 24
C_DIRECTION, C_BACKWARDS = 25, 26  # first direction; whether that goes backwards
C_ROWS, C_SCRATCH, C_SCRATCH_BYTES = 27, 28, 29  # sequences of a unit; memory of a worker
C_CLIP = 30  # bound of what activations get (float64)
C_NUMBERS = 31  # alpha and beta of each activation (float64)


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
    """Return the kernel that runs a cell along sequences; its words are the ``C_*``.

    Units: directions * ceil(batch / rows of a unit). A worker's memory holds ``gates + 3`` rows of
    padded elements for each sequence of a unit; with weights of bytes, whose words come behind the
    ``C_*``, as many bytes and ``BESIDE``, too. All sequences are one unit's then, and the inputs'
    gates are not padded.

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
    def long_memory(args: int, at: int, h: int, c: int, holes: int, row: int) -> None:
        """Gates in the order input, output, forget, cell."""
        for j in range(0, row, size):
            cell = load(c + j)
            i, forget, o = load(at + j), load(at + 2 * row + j), load(at + row + j)
            if peepholes:
                i = fma(load(holes + j), cell, i)
                forget = fma(load(holes + 2 * row + j), cell, forget)
            i = f(args, i)
            kept = splat(1.0) - i if coupled else f(args, forget)
            cell = fma(kept, cell, i * g(args, load(at + 3 * row + j)))
            if peepholes:
                o = fma(load(holes + row + j), cell, o)
            store(c + j, cell)
            store(h + j, f(args, o) * h_of(args, cell))

    @register_jitable
    def simple(args: int, at: int, h: int, row: int) -> None:
        for j in range(0, row, size):
            store(h + j, f(args, load(at + j)))

    @register_jitable
    def reset_state(args: int, at: int, h: int, to: int, row: int) -> None:
        """Store the reset gate times the state."""
        for j in range(0, row, size):
            store(to + j, f(args, load(at + row + j)) * load(h + j))

    @register_jitable
    def gated(args: int, at: int, h: int, inner: int, inputs: int, row: int) -> None:
        """Gates in the order update, reset, hidden; ``inner`` is the recurrence of the last."""
        for j in range(0, row, size):
            z, n = f(args, load(at + j)), load(inner + j)
            if linear:
                n = fma(f(args, load(at + row + j)), n, load(inputs + j))
            n = g(args, n)
            store(h + j, fma(z, load(h + j), (splat(1.0) - z) * n))

    @register_jitable
    def start(to: int, source: int, step: int, count: int, row: int, width: int) -> None:
        memset(to, 0, count * row)
        if source != 0:
            for i in range(count):
                memcpy(to + i * row, source + i * step, width)

    @register_jitable
    def length_of(args: int, sequence: int) -> int:
        steps = arg(args, C_STEPS)
        if arg(args, C_LENGTHS) == 0:
            return steps
        length: int = ld_i32(arg(args, C_LENGTHS) + 4 * sequence)
        return min(max(length, 0), steps)

    @register_jitable
    def gather(args: int, first: int, count: int, step: int, back: int, x: int, to: int) -> None:
        """Copy the inputs of a step: sequences of different lengths go backwards from their end."""
        row = arg(args, C_PADDED) * item * gates
        for i in range(count):
            length = length_of(args, first + i)
            t = length - 1 - step if back != 0 and step < length else step
            source = x + t * arg(args, C_INPUTS + 1) + (first + i) * arg(args, C_INPUTS + 2)
            memcpy(to + i * row, source, row)

    @register_jitable
    def advance(args: int, direction: int, count: int, memory: int, x: int, step: int) -> None:
        """Compute the sums of all gates that do not need others; ``x``: inputs, ``step`` bytes."""
        padded, depth = arg(args, C_PADDED), arg(args, C_SIZE)
        row = padded * item
        at = memory + 3 * count * row
        weights = arg(args, C_WEIGHTS) + direction * arg(args, C_WEIGHTS + 1)
        vectors = padded // lanes * (2 if kind == "GRU" else gates)
        times(count, memory, row, weights, vectors, depth, x, step, at, gates * row)
        if kind == "GRU":
            last = arg(args, C_LAST) + direction * arg(args, C_LAST + 1)
            inner, vectors = memory + 2 * count * row, padded // lanes
            if linear:
                bias = arg(args, C_BIAS) + direction * row
                times(count, memory, row, last, vectors, depth, bias, 0, inner, row)
            else:
                reset = memory + count * row
                for i in range(count):
                    reset_state(args, at + i * gates * row, memory + i * row, reset + i * row, row)
                x += 2 * row
                times(count, reset, row, last, vectors, depth, x, step, inner, row)

    @register_jitable
    def add_inputs(args: int, x: int, sums: int) -> None:
        """Add the inputs of all gates, which are not padded, to the sums of a sequence."""
        width, row = arg(args, C_SIZE), arg(args, C_PADDED) * item
        for gate in range(gates):
            source, to = x + gate * width * item, sums + gate * row
            whole = width // lanes * size
            for j in range(0, whole, size):
                store(to + j, load(to + j) + load(source + j))
            if whole < row:
                rest = load_n(source + whole, width % lanes)
                store(to + whole, load(to + whole) + rest)

    @register_jitable
    def advance_bytes(args: int, direction: int, count: int, memory: int) -> None:
        """Compute what the recurrence adds to all gates."""
        padded, width = arg(args, C_PADDED), arg(args, C_SIZE)
        panels = arg(args, C_WEIGHTS) + direction * arg(args, C_WEIGHTS + 1)
        sums = memory + 3 * count * padded * item
        held = sums + gates * count * padded * item
        before = direction * gates * padded * 4
        recur(args, panels, before, count, width, padded, memory, sums, held)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        steps, batch = arg(args, C_STEPS), arg(args, C_BATCH)
        row, width = arg(args, C_PADDED) * item, arg(args, C_SIZE) * item
        memory = arg(args, C_SCRATCH) + worker * arg(args, C_SCRATCH_BYTES)
        block = arg(args, C_ROWS)
        blocks = (batch + block - 1) // block
        for unit in range(begin, end):
            direction, first = unit // blocks + arg(args, C_DIRECTION), unit % blocks * block
            count = min(block, batch - first)
            back = 1 if direction == 1 or arg(args, C_BACKWARDS) != 0 else 0
            c = memory + count * row
            inner = c + count * row
            at = inner + count * row
            state = first * arg(args, C_STATE) + direction * arg(args, C_STATE + 1)
            for word, to in ((C_HIDDEN, memory), (C_CELL, c)):
                given = arg(args, word)
                start(to, given + state if given != 0 else 0, arg(args, C_STATE), count, row, width)
            base = arg(args, C_INPUTS) + direction * arg(args, C_INPUTS + 3)
            holes = arg(args, C_PEEPHOLES) + direction * 3 * row
            for step in range(steps):
                t = steps - 1 - step if back != 0 else step
                x, between = base + t * arg(args, C_INPUTS + 1), arg(args, C_INPUTS + 2)
                x += first * between
                if weights == "int8":
                    advance_bytes(args, direction, count, memory)
                else:
                    if arg(args, C_LENGTHS) != 0:
                        gather(args, first, count, step, back, base, at)
                        x, between = at, gates * row
                    advance(args, direction, count, memory, x, between)
                for i in range(count):
                    length = length_of(args, first + i)
                    sums, h = at + i * gates * row, memory + i * row
                    if step < length:
                        t = length - 1 - step if back != 0 else step
                        if weights == "int8":
                            add_inputs(args, base + t * arg(args, C_INPUTS + 1) + i * between, sums)
                        if kind == "LSTM":
                            long_memory(args, sums, h, c + i * row, holes, row)
                        elif kind == "GRU":
                            own = x + i * between + 2 * row
                            gated(args, sums, h, inner + i * row, own, row)
                        else:
                            simple(args, sums, h, row)
                    else:
                        t = step
                    if arg(args, C_Y) != 0:
                        y = arg(args, C_Y) + t * arg(args, C_Y + 1) + direction * arg(args, C_Y + 3)
                        y += (first + i) * arg(args, C_Y + 2)
                        if step < length:
                            memcpy(y, h, width)
                        else:
                            memset(y, 0, width)
            for word, source in ((C_LAST_HIDDEN, memory), (C_LAST_CELL, c)):
                if arg(args, word) != 0:
                    for i in range(count):
                        to = arg(args, word) + state + i * arg(args, C_STATE)
                        memcpy(to, source + i * row, width)

    return kernel


@register_jitable
def _no_bytes(
    args: int, weights: int, before: int, count: int, width: int, padded: int, h: int, sums: int,
    held: int,
) -> None:  # fmt: skip
    """Stand for the recurrence of bytes where there is none."""


def _activation(name: str, v: Any, position: int, clip: bool) -> Function:
    """Return ``f(words, vector)`` of an activation with its alpha and beta."""
    plain = _plain(name, v)
    splat, least, most = v.splat, v.minimum, v.maximum
    where = 8 * (C_NUMBERS + 2 * position)

    @register_jitable
    def apply(args: int, x: Any) -> Any:
        if clip:
            bound = splat(ld_f64(args + 8 * C_CLIP))
            x = least(most(x, -bound), bound)
        return plain(x, splat(ld_f64(args + where)), splat(ld_f64(args + where + 8)))

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
