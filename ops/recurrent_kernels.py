"""Kernels of LSTM, GRU and RNN: all steps of one sequence, after the inputs were multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine import vmath
from subgraph.engine.simd import memcpy, memset, vec

from .movement_kernels import arg

Function = Callable[..., Any]


def _product(dtype: str, lanes: int) -> Function:
    """Return ``add(to, start, matrix, step, x, count, size)``.

    ``to[j] = start[j] + sum over k of x[k] * matrix[k, j]`` for j below ``count``, k below
    ``size``; ``step`` is the bytes between rows of the matrix.
    """
    v = vec(dtype, lanes)
    load, store, load_m, store_m, mask_n = v.load, v.store, v.load_m, v.store_m, v.mask_n
    bcast, fma, item = v.bcast, v.fma, v.itemsize
    wide = lanes * item

    @register_jitable
    def add(to: int, start: int, matrix: int, step: int, x: int, count: int, size: int) -> None:
        j = 0
        while j + 4 * lanes <= count:
            at = j * item
            a, b = load(start + at), load(start + at + wide)
            c, d = load(start + at + 2 * wide), load(start + at + 3 * wide)
            row = matrix + at
            for k in range(size):
                factor = bcast(x + k * item)
                a, b = fma(factor, load(row), a), fma(factor, load(row + wide), b)
                c = fma(factor, load(row + 2 * wide), c)
                d = fma(factor, load(row + 3 * wide), d)
                row += step
            store(to + at, a)
            store(to + at + wide, b)
            store(to + at + 2 * wide, c)
            store(to + at + 3 * wide, d)
            j += 4 * lanes
        while j < count:
            at = j * item
            mask = mask_n(count - j)
            a = load_m(start + at, mask)
            row = matrix + at
            for k in range(size):
                a = fma(bcast(x + k * item), load_m(row, mask), a)
                row += step
            store_m(to + at, mask, a)
            j += lanes

    return add


def cells(*, dtype: str, lanes: int, kind: str, linear: bool) -> Function:
    """Return the kernel that runs a cell along sequences.

    Args:
        dtype: ``"float32"`` or ``"float64"``.
        lanes: Elements of a vector.
        kind: ``"LSTM"``, ``"GRU"``, ``"Tanh"`` or ``"Relu"`` (an RNN with that activation).
        linear: GRU's ``linear_before_reset``.

    Words::

        0 inputs times weights plus biases [directions, steps, batch, gates * hidden]
        1 recurrence weights [directions, hidden, gates * hidden]
        2 recurrence biases of GRU's last gate [directions, hidden]
        3, 4 initial hidden and cell states (0: zeros)  5 Y (0: none)
        6, 7 last hidden and cell states (0: none)  8 steps  9 batch  10 hidden size
        11 directions  12 whether the first direction goes backwards
        13 scratch  14 bytes of it for each worker: (gates + 4) * hidden elements

    Units: directions * batch.
    """
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, fma = v.load_m, v.store_m, v.mask_n, v.fma
    largest, zero, splat = v.maximum, v.zero, v.splat
    sigmoid, tanh = (vmath.function(name, dtype, lanes) for name in ("sigmoid", "tanh"))
    product, item = _product(dtype, lanes), v.itemsize
    gates = {"LSTM": 4, "GRU": 3}.get(kind, 1)

    @register_jitable
    def long_memory(g: int, h: int, c: int, width: int) -> None:
        """Gates in the order input, output, forget, cell."""
        row = width * item
        for j in range(0, width, lanes):
            at, mask = j * item, mask_n(width - j)
            i, f = sigmoid(load_m(g + at, mask)), sigmoid(load_m(g + 2 * row + at, mask))
            new = i * tanh(load_m(g + 3 * row + at, mask))
            cell = fma(f, load_m(c + at, mask), new)
            store_m(c + at, mask, cell)
            store_m(h + at, mask, sigmoid(load_m(g + row + at, mask)) * tanh(cell))

    @register_jitable
    def simple(g: int, h: int, width: int) -> None:
        for j in range(0, width, lanes):
            at, mask = j * item, mask_n(width - j)
            x = load_m(g + at, mask)
            store_m(h + at, mask, largest(x, zero()) if kind == "Relu" else tanh(x))

    @register_jitable
    def reset_state(g: int, h: int, to: int, width: int) -> None:
        """Store the reset gate times the state."""
        for j in range(0, width, lanes):
            at, mask = j * item, mask_n(width - j)
            r = sigmoid(load_m(g + width * item + at, mask))
            store_m(to + at, mask, r * load_m(h + at, mask))

    @register_jitable
    def gated(g: int, h: int, inner: int, inputs: int, width: int) -> None:
        """Gates in the order update, reset, hidden; ``inner`` is the recurrence of the last."""
        row = width * item
        for j in range(0, width, lanes):
            at, mask = j * item, mask_n(width - j)
            z, n = sigmoid(load_m(g + at, mask)), load_m(inner + at, mask)
            if linear:
                r = sigmoid(load_m(g + row + at, mask))
                n = fma(r, n, load_m(inputs + 2 * row + at, mask))
            n = tanh(n)
            store_m(h + at, mask, fma(z, load_m(h + at, mask), (splat(1.0) - z) * n))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        steps, batch, width = arg(args, 8), arg(args, 9), arg(args, 10)
        row = width * item
        for unit in range(begin, end):
            direction = unit // batch
            g = arg(args, 13) + worker * arg(args, 14)
            h, c, spare = g + gates * row, g + (gates + 1) * row, g + (gates + 2) * row
            start = g + (gates + 3) * row
            matrix = arg(args, 1) + direction * width * gates * row
            for word, state in ((3, h), (4, c)):
                if arg(args, word) != 0:
                    memcpy(state, arg(args, word) + unit * row, row)
                else:
                    memset(state, 0, row)
            backwards = direction == 1 or arg(args, 12) != 0
            for step in range(steps):
                t = steps - 1 - step if backwards else step
                x = ((direction * steps + t) * batch + unit % batch) * gates * row
                x += arg(args, 0)
                if kind == "LSTM":
                    product(g, x, matrix, gates * row, h, gates * width, width)
                    long_memory(g, h, c, width)
                elif kind == "GRU":
                    product(g, x, matrix, gates * row, h, 2 * width, width)
                    last = matrix + 2 * row
                    bias = arg(args, 2) + direction * row
                    if linear:
                        product(spare, bias, last, gates * row, h, width, width)
                    else:
                        reset_state(g, h, c, width)
                        for j in range(0, width, lanes):
                            at, mask = j * item, mask_n(width - j)
                            b = load_m(bias + at, mask) + load_m(x + 2 * row + at, mask)
                            store_m(start + at, mask, b)
                        product(spare, start, last, gates * row, c, width, width)
                    gated(g, h, spare, x, width)
                else:
                    product(g, x, matrix, gates * row, h, width, width)
                    simple(g, h, width)
                if arg(args, 5) != 0:
                    y = ((t * arg(args, 11) + direction) * batch + unit % batch) * row
                    memcpy(arg(args, 5) + y, h, row)
            if arg(args, 6) != 0:
                memcpy(arg(args, 6) + unit * row, h, row)
            if arg(args, 7) != 0:
                memcpy(arg(args, 7) + unit * row, c, row)

    return kernel
