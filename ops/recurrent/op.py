"""RNN, GRU, LSTM and QuantizedLSTM: requirements, types, reference.

onnx.reference knows one activation for each gate (RNN: two) and ignores ``activations``,
``activation_alpha``, ``activation_beta``, ``clip``, ``input_forget`` and ``sequence_lens``, so
the first three have a reference here, too. The equations are those of the ONNX standard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array, Dim, TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchCall
from subgraph.operators.operator import declare
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import (
    Tensor,
    decoded,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_shape,
    require_within,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import Types, Values, tensor

from .arguments import GATES

Activation = Callable[[Array], Array]
# (x, state) -> state; the first entry of a state is the hidden state
Cell = Callable[[Array, tuple[Array, ...]], tuple[Array, ...]]


# Activations of a direction, where a node names none.
DEFAULT_ACTIVATIONS = {
    "LSTM": ("sigmoid", "tanh", "tanh"),
    "GRU": ("sigmoid", "tanh"),
    "RNN": ("tanh",),
}


def recurrent_operands(
    node: Node, x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None,
    lengths: Tensor | None = None, h: Tensor | None = None, c: Tensor | None = None,
    p: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights and states have the sizes of X and R (ONNX, 1 to 22).

    Args:
        node: An LSTM, GRU or RNN; with ``layout`` 1, X and states begin with the batch.
        x: [steps, batch, elements].
        w: [directions, gates * hidden, elements].
        r: [directions, gates * hidden, hidden].
        b: Biases of W and then of R [directions, 2 * gates * hidden].
        lengths: Steps of each sequence [batch], int32; None: all.
        h: Initial hidden states [directions, batch, hidden]; None: 0.
        c: Initial cell states of LSTM, as ``h``.
        p: Peepholes of LSTM [directions, 3 * hidden].
    """
    for name, operand in (("X", x), ("W", w), ("R", r)):
        require_rank(name, operand, 3)
        require_dtype(name, operand, x.dtype)
    require(node.op_type == "LSTM" or (c is None and p is None), "only LSTM has inputs 6 and 7")
    layout = node.attrs.get("layout", 0)
    require(layout in (0, 1), "layout is {}, neither 0 nor 1", layout)
    steps, batch = x.shape[1::-1] if layout else x.shape[:2]
    directions, hidden = require_directions(node), r.shape[2]
    rows = GATES[node.op_type] * hidden
    stated = node.attrs.get("hidden_size", hidden)
    require(stated == hidden, "hidden_size is {}, R {} has {}", stated, list(r.shape), hidden)
    why = f"for {directions} direction(s), the elements of X and the hidden size of R"
    require_shape("W", w, (directions, rows, x.shape[2]), why)
    require_shape("R", r, (directions, rows, hidden), why)
    require_shape("B", b, (directions, 2 * rows), why)
    require_dtype("B", b, x.dtype)
    require_states((directions, batch, hidden), (h, c, p), x.dtype, swapped=bool(layout))
    require_lengths(lengths, steps, batch)


def require_directions(node: Node) -> int:
    """Return the number of directions that the node's attributes ask for.

    Raises:
        ShapeError: There is no such direction or activation, or activations are missing.
    """
    # "foward" is the default of GRU-1, misspelt in the standard.
    known_directions = ("forward", "foward", "reverse", "bidirectional")
    direction = require_choice(node, "direction", "forward", *known_directions)
    directions = 2 if direction == "bidirectional" else 1
    names = node.attrs.get("activations") or ()
    for name in map(decoded, names):
        known = name.lower() in _ACTIVATIONS
        require(known, "activations has {!r}; each is one of {}", name, ", ".join(_ACTIVATIONS))
    each = len(DEFAULT_ACTIVATIONS.get(node.op_type, DEFAULT_ACTIVATIONS["LSTM"]))
    require(
        not names or len(names) >= each * directions,
        "activations lists {} functions; {} direction(s) need {} each",
        len(names),
        directions,
        each,
    )
    return directions


def require_states(
    state: tuple[int, int, int],
    optional: tuple[Tensor | None, Tensor | None, Tensor | None],
    dtype: str,
    *,
    swapped: bool = False,
) -> None:
    """Require initial states of a shape, and peepholes.

    Args:
        state: Directions, batch, hidden size.
        optional: Initial hidden and cell states, and peepholes; None for an omitted one.
        dtype: The dtype that all of them must have.
        swapped: States begin with the batch.
    """
    directions, batch, hidden = state
    shape = (batch, directions, hidden) if swapped else state
    why = f"for {directions} direction(s), the sequences of X and the hidden size of R"
    h, c, p = optional
    require_shape("initial_h", h, shape, why)
    require_shape("initial_c", c, shape, why)
    require_shape("P", p, (directions, 3 * hidden), why)
    for name, operand in (("initial_h", h), ("initial_c", c), ("P", p)):
        require_dtype(name, operand, dtype)


def require_lengths(lengths: Tensor | None, steps: int, batch: int) -> None:
    """Require lengths of sequences that are within the steps.

    Args:
        lengths: Steps of each sequence; None: all.
        steps: Steps of X.
        batch: Sequences of X.
    """
    require_dtype("sequence_lens", lengths, "int32")
    require_shape("sequence_lens", lengths, (batch,), "one for each sequence")
    require_within("sequence_lens", lengths, 0, steps)


def state_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of Y and of the last states.

    Args:
        node: An LSTM, GRU or RNN; direction, layout and, for an unknown R, ``hidden_size``.
        types: Of X, W and R; others are not read.
        values: Not used.
    """
    x, r = tensor(types[0]), tensor(types[2])
    if x is None or x.shape is None:
        return [None if x is None else TensorType(x.dtype)] * 3
    hidden: Dim = node.attrs.get("hidden_size")
    if hidden is None and r is not None and r.shape is not None:
        hidden = r.shape[-1]
    both = node.attrs.get("direction", "forward") in ("bidirectional", b"bidirectional")
    length, batch, count = x.shape[0], x.shape[1], 2 if both else 1
    if node.attrs.get("layout", 0):
        batch, length = length, batch
        last = TensorType(x.dtype, [batch, count, hidden])
        return [TensorType(x.dtype, [batch, length, count, hidden]), last, last]
    last = TensorType(x.dtype, [count, batch, hidden])
    return [TensorType(x.dtype, [length, count, batch, hidden]), last, last]


def _sigmoid(x: Array) -> Array:
    return 0.5 * (np.tanh(0.5 * x) + 1.0)


# Name in lower case -> function of x, alpha, beta; defaults of alpha and beta, as far as the
# function takes them (the defaults of the operators of these names).
_ACTIVATIONS: Mapping[str, tuple[Callable[[Array, float, float], Array], tuple[float, ...]]] = {
    "relu": (lambda x, a, b: np.maximum(x, 0), ()),
    "tanh": (lambda x, a, b: np.tanh(x), ()),
    "sigmoid": (lambda x, a, b: _sigmoid(x), ()),
    "affine": (lambda x, a, b: a * x + b, (1.0, 0.0)),
    "leakyrelu": (lambda x, a, b: np.where(x < 0, a * x, x), (0.01,)),
    "thresholdedrelu": (lambda x, a, b: np.where(x > a, x, 0), (1.0,)),
    "scaledtanh": (lambda x, a, b: a * np.tanh(b * x), (1.0, 1.0)),
    "hardsigmoid": (lambda x, a, b: np.clip(a * x + b, 0, 1), (0.2, 0.5)),
    "elu": (lambda x, a, b: np.where(x < 0, a * np.expm1(np.minimum(x, 0)), x), (1.0,)),
    "softsign": (lambda x, a, b: x / (1 + np.abs(x)), ()),
    "softplus": (lambda x, a, b: np.logaddexp(x, x.dtype.type(0)), ()),
}


@attrs.frozen
class Activations:
    """The activations of one direction.

    Attributes:
        names: In lower case.
        numbers: Alpha and beta of each, one after another; 0 for one that it does not take.
    """

    names: tuple[str, ...]
    numbers: tuple[float, ...]

    def functions(self, clip: float) -> list[Activation]:
        """Return the functions; ``clip`` bounds their arguments, 0: it does not."""
        numbers = zip(self.names, self.numbers[::2], self.numbers[1::2], strict=True)
        return [partial(_activate, name, clip, alpha, beta) for name, alpha, beta in numbers]


def _activate(name: str, clip: float, alpha: float, beta: float, x: Array) -> Array:
    return _ACTIVATIONS[name][0](np.clip(x, -clip, clip) if clip else x, alpha, beta)


def activations(options: Mapping[str, Any], kind: str, directions: int) -> tuple[Activations, ...]:
    """Return the activations of each direction.

    Args:
        options: The node's attributes. Activations that take an alpha (beta) take the next number
            of ``activation_alpha`` (``activation_beta``), while there is one.
        kind: ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
        directions: How many there are.
    """
    usual = DEFAULT_ACTIVATIONS[kind]
    listed = [decoded(name).lower() for name in options.get("activations") or usual * directions]
    alphas, betas = (iter(options.get(f"activation_{name}") or ()) for name in ("alpha", "beta"))
    made: list[Activations] = []
    for k in range(directions):
        names = listed[k * len(usual) :][: len(usual)]
        numbers: list[float] = []
        for name in names:
            defaults = (*_ACTIVATIONS[name][1], None, None)
            for source, default in zip((alphas, betas), defaults, strict=False):
                numbers.append(0.0 if default is None else float(next(source, default)))
        made.append(Activations(tuple(names), tuple(numbers)))
    return tuple(made)


def _functions(options: Mapping[str, Any], kind: str, directions: int) -> list[list[Activation]]:
    """Return the activations of each direction, clipped if the node says so."""
    clip = float(options.get("clip") or 0.0)
    return [own.functions(clip) for own in activations(options, kind, directions)]


def _prepare(
    inputs: Sequence[Any], options: Mapping[str, Any], gates: int
) -> tuple[Array, Array, Array, Array, Array, Array, Array, Array]:
    """Return a node's inputs in layout 0, in float32 or float64; `recurrent_operands` names them.

    Omitted lengths are all steps, other omitted inputs zeros. ``options`` are the node's
    attributes, ``gates`` the gates of its cell.
    """
    x, w, r = inputs[:3]
    b = inputs[3] if len(inputs) > 3 else None
    precision = np.float64 if x.dtype == np.float64 else np.float32
    swap = bool(options.get("layout"))
    x = np.swapaxes(x, 0, 1) if swap else x
    directions, hidden = r.shape[0], r.shape[2]
    b = np.zeros((directions, 2 * gates * hidden)) if b is None else b
    lengths, h, c, p = _optional(inputs, x, (directions, hidden), swap=swap)
    x, w, r, b, h, c, p = (array.astype(precision) for array in (x, w, r, b, h, c, p))
    return x, w, r, b, lengths, h, c, p


def _optional(
    inputs: Sequence[Any], x: Array, sizes: tuple[int, int], *, swap: bool = False
) -> tuple[Array, Array, Array, Array]:
    """Return lengths, states and peepholes: inputs 4 to 7, or all steps and zeros.

    Args:
        inputs: The node's inputs.
        x: Its first one, [steps, batch, elements].
        sizes: Directions, and elements of a state.
        swap: States begin with the batch.
    """
    steps, batch = x.shape[:2]
    lengths, h, c, p = [*inputs[4:], *[None] * 4][:4]
    lengths = np.full(batch, steps) if lengths is None else np.asarray(lengths).reshape(batch)
    none = np.zeros((sizes[0], batch, sizes[1]), np.float32)
    h, c = (none if s is None else np.swapaxes(s, 0, 1) if swap else s for s in (h, c))
    return lengths, h, c, np.zeros((sizes[0], 3 * sizes[1]), np.float32) if p is None else p


def scan(
    x: Array, lengths: Array, cell: Cell, state: tuple[Array, ...], backwards: bool
) -> tuple[Array, tuple[Array, ...]]:
    """Run a cell along axis 0; after its length, a sequence keeps its state and outputs 0.

    Args:
        x: What the cell gets in each step [steps, batch, elements].
        lengths: Steps of each sequence [batch].
        cell: ``(x[step], state) -> next state``.
        state: The first state, arrays [batch, hidden].
        backwards: Each sequence is read from its last step to its first.

    Returns:
        The hidden states of all steps [steps, batch, hidden], and the last state.
    """
    steps, batch = x.shape[:2]
    outputs = np.zeros((steps, batch, state[0].shape[-1]), x.dtype)
    rows = list(range(batch))
    for step in range(steps):
        active = step < lengths
        at = np.where(active, lengths - 1 - step, step) if backwards else np.full(batch, step)
        following = cell(x[at, rows], state)
        state = tuple(
            np.where(active[:, None], new, old) for new, old in zip(following, state, strict=True)
        )
        outputs[at[active], np.flatnonzero(active)] = state[0][active]
    return outputs, state


def _scan_directions(
    xs: Sequence[Array],
    lengths: Array,
    cells: Sequence[Cell],
    states: Iterable[tuple[Array, ...]],
    options: Mapping[str, Any],
) -> list[Array]:
    """Return Y and the last states of all directions; see `scan`."""
    results: list[Array] = []
    lasts: list[tuple[Array, ...]] = []
    for k, (x, cell, state) in enumerate(zip(xs, cells, states, strict=False)):
        backwards = options.get("direction") == "reverse" or k == 1
        output, last = scan(x, lengths, cell, state, backwards)
        results.append(output)
        lasts.append(last)
    return [np.stack(results, 1), *(np.stack(parts) for parts in zip(*lasts, strict=True))]


def _run(
    node: Node,
    inputs: Sequence[Any],
    make_cell: Callable[[Array, Array, Array, Array, Sequence[Activation]], Cell],
    states: int = 1,
) -> list[Array]:
    """Return Y and the last states, in the node's layout and X's dtype.

    Args:
        node: The node.
        inputs: Its inputs.
        make_cell: ``(W, R, biases of both, peepholes, activations) -> cell`` for a direction, W
            and R transposed.
        states: Arrays of a state: 1, or 2 with a cell state.
    """
    options = attributes(node)
    x, w, r, b, lengths, h, c, p = _prepare(inputs, options, GATES[node.op_type])
    functions = _functions(options, node.op_type, len(w))
    cells = [
        make_cell(w[k].T, r[k].T, b[k].reshape(2, -1), p[k], own) for k, own in enumerate(functions)
    ]
    starts = zip(*(h, c)[:states], strict=True)
    outputs = _scan_directions([x] * len(cells), lengths, cells, starts, options)
    if options.get("layout"):
        first = outputs[0].transpose(2, 0, 1, 3)
        outputs = [first, *(state.swapaxes(0, 1) for state in outputs[1:])]
    return [output.astype(inputs[0].dtype) for output in outputs]


def rnn(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Y and Y_h."""

    def make_cell(w: Array, r: Array, b: Array, p: Array, functions: Sequence[Activation]) -> Cell:
        bias: Array = b.sum(0)
        return lambda x, state: (functions[0](x @ w + state[0] @ r + bias),)

    return _run(node, inputs, make_cell)


def gru(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Y and Y_h; gates in the order z, r, h."""
    linear = bool(attributes(node).get("linear_before_reset"))

    def make_cell(w: Array, r: Array, b: Array, p: Array, functions: Sequence[Activation]) -> Cell:
        (wb, rb), (f, g), size = b, functions, len(r)

        def cell(x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
            h = state[0]
            xw = x @ w + wb
            gates = f(xw[:, : 2 * size] + h @ r[:, : 2 * size] + rb[: 2 * size])
            z, reset = gates[:, :size], gates[:, size:]
            rh, bh = r[:, 2 * size :], rb[2 * size :]
            inner = reset * (h @ rh + bh) if linear else (reset * h) @ rh + bh
            return ((1 - z) * g(xw[:, 2 * size :] + inner) + z * h,)

        return cell

    return _run(node, inputs, make_cell)


def lstm(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return Y, Y_h and Y_c; gates in the order i, o, f, c; peepholes i, o, f."""
    coupled = bool(attributes(node).get("input_forget"))

    def make_cell(w: Array, r: Array, b: Array, p: Array, functions: Sequence[Activation]) -> Cell:
        bias: Array = b.sum(0)
        return lstm_cell(lambda x, h: x @ w + h @ r + bias, p, functions, coupled=coupled)

    return _run(node, inputs, make_cell, states=2)


def lstm_cell(
    gates: Callable[[Array, Array], Array],
    peepholes: Array,
    functions: Sequence[Activation],
    *,
    coupled: bool,
) -> Cell:
    """Return LSTM's cell.

    Args:
        gates: ``(x, hidden state) -> sums`` of all gates [batch, 4 * hidden], in the order i, o,
            f, c.
        peepholes: Factors of the cell state in gates i, o, f [3 * hidden].
        functions: The activations f, g, h.
        coupled: ``input_forget``: the forget gate is 1 - the input gate.
    """
    pi, po, pf = peepholes.reshape(3, -1)
    f, g, h = functions

    def cell(x: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        hidden, c = state
        i, o, forget, new = np.split(gates(x, hidden), 4, axis=-1)
        i = f(i + pi * c)
        forget = 1 - i if coupled else f(forget + pf * c)
        c = forget * c + i * g(new)
        return f(o + po * c) * h(c), c

    return cell


def quantized_lstm_operands(
    node: Node, x: Tensor, r: Tensor, scale: Tensor, zero: Tensor, lengths: Tensor | None = None,
    h: Tensor | None = None, c: Tensor | None = None, p: Tensor | None = None,
) -> None:  # fmt: skip
    """Raise ShapeError unless weights, their scales and states have the sizes of R.

    The operator is written by a pass for DynamicQuantizeLSTM of ONNX Runtime.

    Args:
        node: The QuantizedLSTM; directions and activations as of an LSTM.
        x: Products of inputs and weights, plus biases [steps, batch, directions * 4 * hidden].
        r: Recurrence weights [directions, hidden, 4 * hidden], uint8 or int8.
        scale: Of R, [directions] or [directions, 4 * hidden].
        zero: Zero points of R, shaped alike.
        lengths: Steps of each sequence [batch], int32; None: all.
        h: Initial hidden states [directions, batch, hidden]; None: 0.
        c: Initial cell states, as ``h``.
        p: Peepholes [directions, 3 * hidden].
    """
    require_rank("X", x, 3)
    require_rank("R", r, 3)
    require_dtype("X", x, "float32")
    require_dtype("R", r, "uint8", "int8")
    directions, hidden = require_directions(node), r.shape[1]
    steps, batch, gates = x.shape
    require_shape("R", r, (directions, hidden, 4 * hidden), f"of {directions} direction(s)")
    require(
        gates == directions * 4 * hidden,
        "X has {} products for {} direction(s) of {} elements",
        gates,
        directions,
        hidden,
    )
    require_per_column({"R_scale": scale, "R_zero_point": zero}, directions, hidden)
    require_dtype("R_scale", scale, "float32")
    require_dtype("R_zero_point", zero, r.dtype)
    require_states((directions, batch, hidden), (h, c, p), "float32")
    require_lengths(lengths, steps, batch)


def require_per_column(numbers: Mapping[str, Tensor], directions: int, hidden: int) -> None:
    """Require numbers for each direction, or for each of the columns of its weights.

    Args:
        numbers: Scales and zero points by their names.
        directions: How many directions there are.
        hidden: Elements of a state.
    """
    for name, operand in numbers.items():
        require_rank(name, operand, 1, 2)
        shape = (directions, 4 * hidden)[: operand.rank]
        require_shape(name, operand, shape, "one for each direction, or for each of its columns")


def quantized_state_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of Y and of the last states.

    Args:
        node: The QuantizedLSTM.
        types: Of X and R; others are not read.
        values: Not used.
    """
    x, r = tensor(types[0]), tensor(types[1])
    if x is None or x.shape is None or r is None or r.shape is None:
        return [None if x is None else TensorType(x.dtype)] * 3
    state = (r.shape[0], x.shape[1], r.shape[1])
    last = TensorType(x.dtype, state)
    return [TensorType(x.dtype, (x.shape[0], *state)), last, last]


def per_column(numbers: Array, hidden: int) -> Array:
    """Return numbers, one for each direction or column, as ``[directions, 4 * hidden]``."""
    columns = numbers.reshape(len(numbers), -1)
    return np.broadcast_to(columns, (len(numbers), 4 * hidden))


def quantized_lstm(node: Node, inputs: Sequence[Any]) -> Sequence[Array]:
    """Return Y, Y_h and Y_c of an LSTM with a quantized recurrence.

    In each step the hidden states of all sequences are quantized as by DynamicQuantizeLinear, and
    multiplied by R in integers.
    """
    options = attributes(node)
    x, r, scales, zeros = inputs[:4]
    directions, hidden, _ = r.shape
    functions = _functions(options, "LSTM", directions)
    lengths, h, c, p = _optional(inputs, x, (directions, hidden))
    scales, zeros = per_column(scales, hidden), per_column(zeros, hidden)
    coupled = bool(options.get("input_forget"))
    cells = [
        lstm_cell(
            _quantized_gates(r[k].astype(np.int64) - zeros[k], scales[k]),
            p[k],
            functions[k],
            coupled=coupled,
        )
        for k in range(directions)
    ]
    parts = np.split(x, directions, axis=2)
    return _scan_directions(parts, lengths, cells, zip(h, c, strict=True), options)


def _quantized_gates(weights: Array, scales: Array) -> Any:
    """Return ``(x, hidden) -> sums``: gates of quantized states and centred weights, plus ``x``."""

    def sums(x: Array, hidden: Array) -> Array:
        least, most = np.float32(min(hidden.min(), 0)), np.float32(max(hidden.max(), 0))
        step = (most - least) / np.float32(255) if most > least else np.float32(1)
        zero = np.clip(np.rint(-least / step), 0, 255)
        states = np.clip(np.rint(hidden / step) + zero, 0, 255) - zero
        result: Array = x + (states.astype(np.int64) @ weights).astype(np.float32) * (step * scales)
        return result

    return sums


def recurrent_batch(call: BatchCall) -> Sequence[Batch]:
    """Sequences, lengths and states have the batch; weights are shared."""
    batch_axis = 0 if call.node.attrs.get("layout", 0) else 1
    axes = {0: batch_axis, 4: 0, 5: batch_axis, 6: batch_axis}
    batch = call.axis_of(0)
    inputs = enumerate(call.node.inputs)
    present = {k: call.axis_of(k) for k, value in inputs if k in axes and value is not None}
    if batch is None or not call.only(*axes):
        return call.everywhere(None)
    if any(found != batch.at(axes[k]) for k, found in present.items()):
        return call.everywhere(None)
    return [batch.at(0 if batch_axis == 0 else len(shape) - 2) for shape in call.results]


# The operators of this family, each in all its versions.
declare("GRU", requires=recurrent_operands, infer=state_types, compute=gru, batch=recurrent_batch)
declare("LSTM", requires=recurrent_operands, infer=state_types, compute=lstm, batch=recurrent_batch)
declare("RNN", requires=recurrent_operands, infer=state_types, compute=rnn, batch=recurrent_batch)
declare(
    "QuantizedLSTM",
    domain=INTERNAL_DOMAIN,
    requires=quantized_lstm_operands,
    infer=quantized_state_types,
    compute=quantized_lstm,
)
