"""Values that convolutions over matrix tiles store as bfloat16 for the nodes that read them.

The readers round these values anyway, or can store their own results as bfloat16: a convolution
then writes half the bytes, and its readers need no step that rounds their input. OpenVINO stores
values between convolutions in the same way.
"""

from __future__ import annotations

from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_ROWS
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.shared.tile_planning import Activation, round_up

_INPUT, _RESIDUAL = 0, 3  # operands of FusedConv that may be bfloat16; Conv has the first of them
_MAX_DEPTH = 3  # nodes between two convolutions that are looked at (estimate)


def is_read_as_bfloat16(node: Node, depth: int = 0) -> bool:
    """Return whether all readers of a node's only output take values of bfloat16.

    The answer is an estimate: the plan converts the value for a reader that needs float32.

    Args:
        node: The node.
        depth: Number of nodes between the convolution and this node.
    """
    if depth > _MAX_DEPTH or len(node.outputs) != 1 or node.graph is None:
        return False
    value = node.outputs[0]
    if not value.uses or node.graph.is_output(value):
        return False
    return all(_takes_bfloat16(user, value, depth) for user in value.consumers)


def stores_bfloat16(node: Node, y: Operand, outputs: int, act: Activation) -> bool:
    """Return whether a convolution over matrix tiles stores its output as bfloat16.

    Args:
        node: The convolution, transposed or not.
        y: Its output.
        outputs: Channels of a group of y.
        act: The activation.
    """
    channels = round_up(outputs, MATRIX_ROWS)
    # Lanes beyond C must be zero, and the two vectors of a panel are a block of 32 channels.
    whole = channels % MATRIX_DEPTH == 0 and (act.keeps_zero or channels == outputs)
    return y.layout == "blocked" and whole and is_read_as_bfloat16(node)


def _takes_bfloat16(user: Node, value: Value, depth: int) -> bool:
    """Return whether a node reads a value as bfloat16."""
    if user.op_type in ("Conv", "FusedConv") and user.domain in ("", INTERNAL_DOMAIN):
        positions = {k for k, v in enumerate(user.inputs) if v is value}
        return positions <= {_INPUT, _RESIDUAL} and _multiplies_matrices(user)
    if user.op_type == "ConvTranspose" and user.domain == "":
        only_input = all(v is not value for v in user.inputs[1:])
        return only_input and _size(user.inputs[1], 1) >= MATRIX_ROWS and _multiplies_matrices(user)
    if user.op_type in ("MaxPool", "AveragePool") and user.domain == "":
        return is_read_as_bfloat16(user, depth + 1)
    if user.op_type == "Concat" and user.domain == "":
        fits = user.attrs.get("axis") == 1 and all(map(_fills_blocks, user.inputs))
        return fits and is_read_as_bfloat16(user, depth + 1)
    return False


def _fills_blocks(value: Value | None) -> bool:
    """Return whether an input of a Concat is the result of a convolution, in whole blocks."""
    producer = None if value is None else value.producer
    made = producer is not None and producer.op_type in ("Conv", "FusedConv", "ConvTranspose")
    return made and _size(value, 1) % MATRIX_DEPTH == 0


def _multiplies_matrices(convolution: Node) -> bool:
    """Return whether a convolution multiplies matrix tiles: groups are whole blocks of channels."""
    groups, filters = int(convolution.attrs.get("group", 1)), convolution.inputs[1]
    # Filters are [M, C / groups, ...], those of a transposed convolution [C, M / groups, ...].
    channels, of_group = _size(filters, 0), _size(filters, 1)
    whole = channels % (groups * MATRIX_DEPTH) == 0 and of_group % MATRIX_DEPTH == 0
    return groups == 1 or whole


def _size(value: Value | None, axis: int) -> int:
    """Return a dimension of a value; 1 if it is unknown."""
    type_ = None if value is None else value.type
    shape = type_.shape if isinstance(type_, TensorType) else None
    size = shape[axis] if shape is not None and len(shape) > axis else None
    return size if isinstance(size, int) else 1
