"""LSTM, GRU and RNN on the CPU device: one matrix product for all inputs, then the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs
import numpy as np

from subgraph.engine.planner.constants import derived_operand
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Argument, Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.requirements import decoded
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.elementwise.primitives import primitive
from subgraph.ops.movement.packing import pack_matrices, packed_size
from subgraph.ops.shared.delegation import delegate
from subgraph.ops.shared.tile_planning import Tiles, grain, round_up, tiles
from subgraph.system import host

from .arguments import GATES, ROW_SUM_BYTES, CellsArguments
from .op import Activations, activations


@attrs.frozen
class Cells:
    """A recurrent operator; ``op.recurrent_operands`` describes the operands.

    Attributes:
        kind: ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
        sizes: Steps, batch, elements of an input, hidden size, directions.
        x: The inputs, or (QuantizedLSTM) their products with the weights.
        w: Weights of the inputs (QuantizedLSTM: not used).
        r: Recurrence weights.
        bias: Biases.
        lengths: Lengths of sequences; None: all have all steps.
        hidden: Initial hidden states.
        cell: Initial cell states.
        peepholes: Weights of peepholes.
        activations: Those of each direction.
        batch_first: ``layout`` 1: X, Y and the states begin with the batch.
        backwards: The only direction goes backwards.
        linear: GRU's ``linear_before_reset``.
        coupled: LSTM's ``input_forget``.
        clip: Bound of the arguments of activations; 0: none.
    """

    kind: str
    sizes: tuple[int, int, int, int, int]
    x: Operand
    w: Operand
    r: Operand
    bias: Operand | None
    lengths: Operand | None
    hidden: Operand | None
    cell: Operand | None
    peepholes: Operand | None
    activations: tuple[Activations, ...]
    batch_first: bool
    backwards: bool
    linear: bool
    coupled: bool
    clip: float

    @property
    def gates(self) -> int:
        """Gates of the cell."""
        return GATES[self.kind]


@lowering("LSTM", "GRU", "RNN", dtypes=("float32", "float64"))
def recurrent(node: Node, low: Lowering) -> None:
    """Lower a recurrent operator."""
    emit_cells(low, read_cells(node, low))


def read_cells(node: Node, low: Lowering) -> Cells:
    """Return a node's operands and attributes.

    Raises:
        Unsupported: There is no kernel for them.
    """
    x, w, r = low.input(0), low.input(1), low.input(2)
    batch_first = bool(node.attrs.get("layout", 0))
    steps, batch = reversed(x.shape[:2]) if batch_first else x.shape[:2]
    sizes = (steps, batch, x.shape[2], r.shape[2], r.shape[0])
    weights = (w, r, low.optional(3))
    return cells_of(node, low, node.op_type, sizes, weights, bias=low.optional(3), w=w, r=r)


def cells_of(
    node: Node,
    low: Lowering,
    kind: str,
    sizes: tuple[int, int, int, int, int],
    weights: Iterable[Operand | None],
    *,
    w: Operand,
    r: Operand,
    bias: Operand | None = None,
) -> Cells:
    """Return a recurrent operator whose inputs from 4 on are lengths, states and peepholes.

    Args:
        node: The node.
        low: Its lowering.
        kind: ``"LSTM"``, ``"GRU"`` or ``"RNN"``.
        sizes: Steps, batch, elements of an input, hidden size, directions.
        weights: Operands that must be constant, besides the peepholes.
        w: Weights of the inputs.
        r: Recurrence weights.
        bias: Biases.

    Raises:
        Unsupported: There is no kernel for it.
    """
    lengths, hidden, cell, peepholes = (low.optional(k) for k in range(4, 8))
    if any(o is not None and not o.constant for o in (*weights, peepholes)):
        raise Unsupported(f"{node.op_type} with weights that are computed at run time")
    if 0 in sizes:
        raise Unsupported(f"{node.op_type} of an empty tensor")
    if lengths is not None and lengths.known is not None and (lengths.known == sizes[0]).all():
        lengths = None
    if lengths is not None:
        emit_range_check(low, lengths, "sequence_lens", 0, sizes[0])
    return Cells(
        kind=kind,
        sizes=sizes,
        x=low.input(0),
        w=w,
        r=r,
        bias=bias,
        lengths=lengths,
        hidden=hidden,
        cell=cell,
        peepholes=peepholes,
        activations=activations(node.attrs, kind, sizes[4]),
        batch_first=bool(node.attrs.get("layout", 0)),
        backwards=decoded(node.attrs.get("direction", "forward")) == "reverse",
        linear=kind == "GRU" and bool(node.attrs.get("linear_before_reset", 0)),
        coupled=kind == "LSTM" and bool(node.attrs.get("input_forget", 0)),
        clip=float(node.attrs.get("clip") or 0.0),
    )


# ---------------------------------------------------------------- weights


def padded_gates(array: Array, gates: int, padded: int) -> Array:
    """Return an array with every gate padded by zeros.

    Args:
        array: ``[..., gates * hidden]``.
        gates: Gates in its last dimension.
        padded: Elements of a gate in the result, at least ``hidden``.
    """
    hidden = array.shape[-1] // gates
    if hidden == padded:
        return array
    split = array.reshape(*array.shape[:-1], gates, hidden)
    result = np.zeros((*split.shape[:-1], padded), array.dtype)
    result[..., :hidden] = split
    return result.reshape(*array.shape[:-1], gates * padded)


def _input_weights(weights: Array, *, gates: int, padded: int) -> Array:
    """Return ``[input, directions * gates * padded]``."""
    transposed = padded_gates(weights.transpose(2, 0, 1), gates, padded)
    return np.ascontiguousarray(transposed.reshape(len(transposed), -1))


def _input_bias(biases: Array, *, gates: int, padded: int, linear: bool) -> Array:
    """Return the biases that the product of the inputs adds.

    Those of W and R, but with ``linear`` only that of W for the last gate: its reset gate
    multiplies the recurrence and its bias.
    """
    size = biases.shape[1] // 2
    total = biases[:, :size] + biases[:, size:]
    if linear:
        last = size - size // gates
        total[:, last:] = biases[:, last:size]
    return padded_gates(total, gates, padded).reshape(-1)


def _last_bias(biases: Array, *, gates: int, padded: int, linear: bool) -> Array:
    """Return the recurrence bias of GRU's last gate, 0 if `_input_bias` includes it."""
    hidden = biases.shape[1] // 2 // gates
    last = biases[:, -hidden:] if linear else np.zeros((len(biases), hidden), biases.dtype)
    return np.ascontiguousarray(padded_gates(last, 1, padded))


def _panels(weights: Array, *, of: Tiles, first: int, last: int, padded: int) -> Array:
    """Return the recurrence weights of gates [first, last) in panels, direction by direction."""
    hidden = weights.shape[2]
    part = weights[:, first * hidden : last * hidden].transpose(0, 2, 1)
    return pack_matrices(padded_gates(part, last - first, padded), of)


def _constant(
    low: Lowering, shape: tuple[int, ...], recipe: str, make: Callable[..., Array], source: Operand
) -> Operand:
    """Return an operand that is a weight computed from another.

    Args:
        low: The lowering, which caches weights.
        shape: Shape of the result.
        recipe: Name of the computation, in the cache and of the operand.
        make: Computes the array.
        source: The weight that it is computed from.
    """
    weight = low.weight(recipe, make, source)
    return derived_operand(f"{source.name}.{recipe}", source.dtype, shape, weight)


def input_products(low: Lowering, c: Cells, padded: int) -> Operand:
    """Emit the product of the inputs of all steps and W, plus biases.

    Args:
        low: Where the step goes.
        c: The operator.
        padded: Elements of a gate in the result, at least the hidden size.

    Returns:
        ``[first, second of X's dimensions, directions, gates, padded]``, flat after the second.
    """
    steps, batch, width, _, directions = c.sizes
    columns = directions * c.gates * padded
    inputs = Operand(c.x.name, c.x.dtype, (steps * batch, width), known=c.x.known)
    inputs.storage, inputs.offset = c.x.storage, c.x.offset
    make = partial(_input_weights, gates=c.gates, padded=padded)
    operands = [inputs, _constant(low, (width, columns), f"inputs {padded}", make, c.w)]
    if c.bias is not None:
        make = partial(_input_bias, gates=c.gates, padded=padded, linear=c.linear)
        recipe = f"bias {c.gates} {padded} {int(c.linear)}"
        operands.append(_constant(low, (columns,), recipe, make, c.bias))
    products = temporary(low, c.x.dtype, (steps * batch, columns))
    delegate(low, "Gemm", operands, products)
    return products


def last_bias(low: Lowering, c: Cells, padded: int) -> Argument:
    """Return the recurrence bias of GRU's last gate that the product of the inputs omits.

    Args:
        low: The lowering.
        c: The operator.
        padded: Elements of a gate in the result, at least the hidden size.

    Returns:
        ``[directions, padded]``, zeros where the product of the inputs includes the bias.
    """
    if c.bias is None:
        return low.weight("zeros", np.array, np.zeros((c.sizes[4], padded), c.x.dtype))
    make = partial(_last_bias, gates=c.gates, padded=padded, linear=c.linear)
    return low.weight(f"last bias {c.gates} {padded} {int(c.linear)}", make, c.bias)


# ---------------------------------------------------------------- steps


def unit_tiling(of: Tiles, threads: int, batch: int, directions: int) -> tuple[int, Tiles]:
    """Return the sequences of a work unit, and the tile of its recurrence.

    Args:
        of: The tiles of the dtype.
        threads: Threads that share the units.
        batch: Sequences of a direction.
        directions: Directions that run at the same time.
    """
    rows = min(batch, 6)  # the largest tile below
    while rows > 1 and directions * -(-batch // rows) < threads:
        rows = -(-rows // 2)
    rows = -(-batch // -(-batch // rows))
    wide = host.has_32_registers()
    # Rows and vectors of the tile: at least 8 independent sums hide the latency of a multiply-add,
    # and sums, a row of B and a broadcast fit into 16 (32) registers.
    mr, nv = next(
        (most, nv)
        for most, nv in (
            (1, 8),
            (2, 8 if wide else 4),
            (4, 6 if wide else 3),
            (6, 4 if wide else 2),
        )
        if rows <= most
    )
    return rows, Tiles(of.dtype, of.lanes, mr, nv)


@primitive
def emit_cells(low: Lowering, c: Cells) -> None:
    """Emit the steps of a recurrent operator.

    Raises:
        Unsupported: This device has no kernel for it.
    """
    _, batch, _, hidden, directions = c.sizes
    rows, of = unit_tiling(tiles(c.x.dtype), low.threads, batch, directions)
    padded = round_up(hidden, of.lanes)
    products = input_products(low, c, padded)
    # GRU's last gate is a product of its own: it multiplies the state times the reset gate, which
    # is known after the first two gates; with ``linear_before_reset`` its recurrence is kept apart
    # from the inputs, as the reset gate multiplies it alone.
    first_gates = 2 if c.kind == "GRU" else c.gates

    def panels(first: int, last: int) -> tuple[Argument, int]:
        """Return the recurrence weights of gates [first, last), and their bytes per direction."""
        if first == last:
            return 0, 0
        make = partial(_panels, of=of, first=first, last=last, padded=padded)
        recipe = f"recurrence {first} {last} {c.gates} {padded} {of.width}/{of.lanes}"
        size = packed_size((last - first) * padded, hidden, of)
        return low.weight(recipe, make, c.r), size * of.item

    row = c.gates * padded * of.item
    emit_steps(
        low,
        c,
        of,
        rows,
        Recurrence(
            inputs=products,
            strides=(*strides(c, directions * row)[0], row),
            weights=panels(0, first_gates),
            last_weights=panels(first_gates, c.gates),
            last_bias=last_bias(low, c, padded) if c.linear else 0,
        ),
    )


@attrs.frozen(eq=False)
class Recurrence:
    """Operands of the steps of a cell, except its states.

    Attributes:
        inputs: The inputs times their weights.
        strides: Bytes of ``inputs`` between steps, sequences and directions.
        weights: Recurrence weights in panels, and their bytes per direction; of GRU those of the
            first two gates.
        last_weights: The same of GRU's last gate.
        last_bias: Recurrence bias of GRU's last gate, with ``linear_before_reset``.
        columns: Scales, sums and zero points of the columns of int8 weights; None for others.
    """

    inputs: Argument
    strides: tuple[int, ...]
    weights: tuple[Argument, int]
    last_weights: tuple[Argument, int] = (0, 0)
    last_bias: Argument = 0
    columns: tuple[Argument, Argument, Argument] | None = None


def emit_steps(low: Lowering, c: Cells, of: Tiles, rows: int, r: Recurrence) -> None:
    """Emit `kernels.cells`, for all directions together or, with different activations, for each.

    Args:
        low: Where the steps go.
        c: The cell.
        of: The tile of its recurrence.
        rows: Sequences of a unit.
        r: The operands of the steps.
    """
    steps, batch, _, hidden, directions = c.sizes
    int8 = {"weights": "int8"} if r.columns is not None else {}
    # Activations are compiled into the kernel, and their numbers are arguments of all directions of
    # a launch.
    one_launch = len(set(c.activations)) == 1
    count = directions if one_launch else 1
    units = count * -(-batch // rows)
    flops = 2 * count * steps * batch * c.gates * hidden * hidden
    moved = c.r.nbytes // directions * count * steps
    arguments = _arguments(low, c, of, rows, r)
    for first in range(1 if one_launch else directions):
        own = c.activations[first]
        kernel = Kernel(
            "subgraph.ops.recurrent.kernels",
            "cells",
            dtype=of.dtype,
            lanes=of.lanes,
            rows=of.mr,
            nv=of.nv,
            kind=c.kind,
            activations=own.names,
            linear=c.linear,
            coupled=c.coupled,
            peepholes=c.peepholes is not None,
            clip=c.clip != 0.0,
            **int8,
        )
        low.emit(
            kernel, arguments(first), units, grain=grain(units, flops), flops=flops, bytes=moved
        )


_ACTIVATION_NUMBERS = ("f_alpha", "f_beta", "g_alpha", "g_beta", "h_alpha", "h_beta")


def _arguments(
    low: Lowering, c: Cells, of: Tiles, rows: int, r: Recurrence
) -> Callable[[int], CellsArguments]:
    """Return a function that makes the arguments of `kernels.cells` from a first direction."""
    steps, batch, _, hidden, _ = c.sizes
    padded = round_up(hidden, of.lanes)
    peepholes: Argument = 0
    if c.peepholes is not None:
        peepholes = low.weight(
            f"peepholes {padded}", partial(_padded_peepholes, padded=padded), c.peepholes
        )
    quantized = rows * (padded + ROW_SUM_BYTES) if r.columns else 0
    states_and_sums = (c.gates + 3) * rows * padded * of.item
    scratch = low.worker_scratch(states_and_sums + quantized)
    outputs = dict(enumerate(low.outputs))
    _, states, y = strides(c, hidden * of.item)
    scales, sums, zeros = r.columns or (0, 0, 0)

    def arguments(first: int) -> CellsArguments:
        numbers: dict[str, Any] = dict.fromkeys(_ACTIVATION_NUMBERS, 0.0)
        numbers |= zip(_ACTIVATION_NUMBERS, c.activations[first].numbers, strict=False)
        return CellsArguments(
            inputs=r.inputs,
            inputs_step=r.strides[0],
            inputs_sequence=r.strides[1],
            inputs_direction=r.strides[2],
            weights=r.weights[0],
            weights_direction=r.weights[1],
            last_weights=r.last_weights[0],
            last_direction=r.last_weights[1],
            last_bias=r.last_bias,
            peepholes=peepholes,
            hidden=c.hidden or 0,
            cell=c.cell or 0,
            state_sequence=states[0],
            state_direction=states[1],
            y=outputs.get(0, 0),
            y_step=y[0],
            y_sequence=y[1],
            y_direction=y[2],
            last_hidden=outputs.get(1, 0),
            last_cell=outputs.get(2, 0) if c.kind == "LSTM" else 0,
            lengths=c.lengths or 0,
            steps=steps,
            batch=batch,
            size=hidden,
            padded=padded,
            direction=first,
            backwards=int(c.backwards),
            rows=rows,
            **scratch,
            clip=c.clip,
            **numbers,
            scales=scales,
            sums=sums,
            zeros=zeros,
        )

    return arguments


def _padded_peepholes(weights: Array, *, padded: int) -> Array:
    return np.ascontiguousarray(padded_gates(weights, 3, padded))


def strides(c: Cells, item: int) -> tuple[list[int], list[int], list[int]]:
    """Return strides of the products of X, of states and of Y, times ``item``.

    Returns:
        Of the products between steps and sequences, of states between sequences and directions,
        of Y between steps, sequences and directions.
    """
    steps, batch, _, _, directions = c.sizes
    if c.batch_first:
        inputs, states, y = (1, steps), (directions, 1), (directions, steps * directions, 1)
    else:
        inputs, states, y = (batch, 1), (1, batch), (directions * batch, 1, batch)
    scaled = [[step * item for step in of] for of in (inputs, states, y)]
    return scaled[0], scaled[1], scaled[2]
