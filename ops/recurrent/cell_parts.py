"""Parts of recurrent kernels: activations, and the next states from the sums of a cell's gates.

A cell is ``f(a, sums, h, c, inner, own, holes, row)``, which updates the states of a sequence. Here
and in all functions ``a`` are the kernel's arguments, the others addresses: ``sums`` of the sums of
all gates, ``h`` of the hidden state, ``c`` and ``holes`` of LSTM's cell state and peepholes,
``inner`` and ``own`` of the recurrence and the inputs of GRU's last gate. A state and a gate are
rows of ``row`` bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen import vmath
from subgraph.ops.shared.activation_kernels import vector_activation

from .arguments import CellsArguments

Function = Callable[..., Any]
# Activations that fused operators have, too, by their names in lower case.
_SHARED = {
    "affine": "Linear",
    **{n.lower(): n for n in ("Elu", "HardSigmoid", "LeakyRelu", "Sigmoid", "Softplus", "Tanh")},
}


def activation_functions(v: Any, names: tuple[str, ...], clip: bool) -> list[Function]:
    """Return the activations f, g and h as ``function(arguments, vector)``.

    Args:
        v: Operations on vectors.
        names: In lower case, as the standard lists them; fewer than three are repeated.
        clip: Their arguments are bounded.
    """
    made = [_activation(name, v, k, clip) for k, name in enumerate(names)]
    return [*made, *made, *made][:3]


def lstm_cell(v: Any, functions: list[Function], coupled: bool, peepholes: bool) -> Function:
    """Return the cell of LSTM.

    Args:
        v: Operations on vectors.
        functions: The activations.
        coupled: ``input_forget``: the forget gate is 1 - the input gate.
        peepholes: Cell states, times ``holes``, are added to the gates.
    """
    load, store, fma, splat, size = v.load, v.store, v.fma, v.splat, v.lanes * v.itemsize
    f, g, h_of = functions

    @register_jitable
    def lstm(
        a: CellsArguments, sums: int, h: int, c: int, inner: int, own: int, holes: int, row: int
    ) -> None:
        """Update the states; gates are in the order input, output, forget, cell."""
        for j in range(0, row, size):
            cell = load(c + j)
            i, forget, o = load(sums + j), load(sums + 2 * row + j), load(sums + row + j)
            if peepholes:
                i = fma(load(holes + j), cell, i)
                forget = fma(load(holes + 2 * row + j), cell, forget)
            i = f(a, i)
            retained = splat(1.0) - i if coupled else f(a, forget)
            cell = fma(retained, cell, i * g(a, load(sums + 3 * row + j)))
            if peepholes:
                o = fma(load(holes + row + j), cell, o)
            store(c + j, cell)
            store(h + j, f(a, o) * h_of(a, cell))

    return lstm


def rnn_cell(v: Any, functions: list[Function]) -> Function:
    """Return the cell of RNN."""
    load, store, size, f = v.load, v.store, v.lanes * v.itemsize, functions[0]

    @register_jitable
    def rnn(
        a: CellsArguments, sums: int, h: int, c: int, inner: int, own: int, holes: int, row: int
    ) -> None:
        for j in range(0, row, size):
            store(h + j, f(a, load(sums + j)))

    return rnn


def gru_cell(v: Any, functions: list[Function], linear: bool) -> Function:
    """Return the cell of GRU.

    Args:
        v: Operations on vectors.
        functions: The activations.
        linear: ``linear_before_reset``: the reset gate multiplies the recurrence of the last gate,
            not the state that goes into it; ``inner`` is then without the inputs.
    """
    load, store, fma, splat, size = v.load, v.store, v.fma, v.splat, v.lanes * v.itemsize
    f, g = functions[:2]

    @register_jitable
    def gru(
        a: CellsArguments, sums: int, h: int, c: int, inner: int, own: int, holes: int, row: int
    ) -> None:
        """Update the state; gates are in the order update, reset, hidden."""
        for j in range(0, row, size):
            z, n = f(a, load(sums + j)), load(inner + j)
            if linear:
                n = fma(f(a, load(sums + row + j)), n, load(own + j))
            n = g(a, n)
            store(h + j, fma(z, load(h + j), (splat(1.0) - z) * n))

    return gru


def reset_gate(v: Any, functions: list[Function]) -> Function:
    """Return ``f(a, sums, h, to, row)``, writing GRU's state times its reset gate to ``to``."""
    load, store, size, f = v.load, v.store, v.lanes * v.itemsize, functions[0]

    @register_jitable
    def reset_state(a: CellsArguments, sums: int, h: int, to: int, row: int) -> None:
        for j in range(0, row, size):
            store(to + j, f(a, load(sums + row + j)) * load(h + j))

    return reset_state


def _activation(name: str, v: Any, position: int, clip: bool) -> Function:
    """Return ``f(arguments, vector)`` of an activation with its alpha and beta."""
    plain = _plain(name, v)
    splat, least, most = v.splat, v.minimum, v.maximum
    is_f, is_g = position == 0, position == 1

    @register_jitable
    def apply(a: CellsArguments, x: Any) -> Any:
        if clip:
            bound = splat(a.clip)
            x = least(most(x, -bound), bound)
        if is_f:
            return plain(x, a.f_alpha, a.f_beta)
        return plain(x, a.g_alpha, a.g_beta) if is_g else plain(x, a.h_alpha, a.h_beta)

    return apply


def _plain(name: str, v: Any) -> Function:
    """Return ``f(x, alpha, beta)`` over vectors."""
    if name in _SHARED:
        shared: Function = vector_activation(_SHARED[name], v)
        return shared
    zero, splat, select, size, most = v.zero, v.splat, v.select, v.abs, v.maximum
    tanh = vmath.function("tanh", v.dtype, v.lanes)

    def relu(x: Any, a: float, b: float) -> Any:
        return most(x, zero())

    def threshold(x: Any, a: float, b: float) -> Any:
        return select(x > splat(a), x, zero())

    def scaled(x: Any, a: float, b: float) -> Any:
        return splat(a) * tanh(splat(b) * x)

    def softsign(x: Any, a: float, b: float) -> Any:
        return x / (splat(1.0) + size(x))

    formulas: dict[str, Function] = {
        "relu": relu,
        "scaledtanh": scaled,
        "softsign": softsign,
        "thresholdedrelu": threshold,
    }
    return register_jitable(formulas[name])
