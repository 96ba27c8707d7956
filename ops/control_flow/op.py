"""Control flow, sequences and optionals: requirements, and reference semantics of a few.

`subgraph.operators.bodies` checks the numbers of inputs and outputs of bodies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.types import MAX_RANK, SequenceType, ValueType
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard
from subgraph.operators.requirements import (
    Tensor,
    int_list,
    is_known,
    require,
    require_axis,
    require_dtype,
    require_same_dtype,
    require_shape,
    require_single,
    require_whole_number,
    require_within,
)

Operand = ValueType | Tensor | None


def if_operands(node: Node, condition: Tensor) -> None:
    """Raise ShapeError unless the condition is one bool, of any rank (ONNX If, opsets 1 to 25)."""
    require_dtype("cond", condition, "bool")
    require(condition.size == 1, "cond has shape {}; it must hold one element", condition.shape)


def loop_operands(
    node: Node, limit: Tensor | None = None, condition: Tensor | None = None, *carried: Operand
) -> None:
    """Raise ShapeError unless the limit is one int64, the condition one bool (opsets 1 to 25).

    Args:
        node: The Loop node.
        limit: Maximum number of iterations; None: unlimited.
        condition: Whether the first iteration runs; None: it does.
        carried: Initial values of the loop-carried variables.
    """
    require_single("M", limit, "int64")
    require_single("cond", condition, "bool")


def scan_operands(node: Node, *operands: Operand) -> None:
    """Raise ShapeError unless all scan inputs have one length (ONNX Scan, opsets 8 to 25)."""
    count = int(node.attrs["num_scan_inputs"])
    scanned = operands[len(operands) - count :]
    if node.version == 8:
        first = len(operands) - count
        _batches(operands[0] if first else None, operands[1:first], scanned)
        return
    axes = node.attrs.get("scan_input_axes") or (0,) * count
    length: int | None = None
    for k, (operand, axis) in enumerate(zip(scanned, axes, strict=False)):
        require(isinstance(operand, Tensor), "scan input {} is {}, not a tensor", k, operand)
        if not isinstance(operand, Tensor):
            continue
        shape = operand.shape
        inside = -len(shape) <= axis < len(shape)
        require(inside, "scan_input_axes has {}, scan input {} rank {}", axis, k, len(shape))
        size = shape[axis]
        if length is None and is_known(size):
            length = size
        require(length is None or size == length, "scan inputs have {} and {} items", length, size)


def _batches(lengths: Operand, states: tuple[Operand, ...], scanned: tuple[Operand, ...]) -> None:
    """Raise ShapeError unless Scan-8's operands have one batch, and lengths fit into the time axis.

    Args:
        lengths: Number of iterations for each entry of the batch; None: all of the time axis.
        states: Initial states, [batch, ...].
        scanned: Scan inputs, [batch, time, ...].
    """
    tensors = [operand for operand in scanned if isinstance(operand, Tensor)]
    require(len(tensors) == len(scanned), "scan inputs must be tensors")
    require(all(each.rank >= 2 for each in tensors), "scan inputs need a batch and a time axis")
    shape = tensors[0].shape[:2]
    for each in tensors[1:]:
        require_shape("a scan input", Tensor("", each.shape[:2]), shape, "batch and time of each")
    for state in states:
        if isinstance(state, Tensor):
            require_shape("a state", Tensor("", state.shape[:1]), shape[:1], "its batch")
    if isinstance(lengths, Tensor):
        require_shape("sequence_lens", lengths, shape[:1], "one for each entry of the batch")
        require_within("sequence_lens", lengths, 0, shape[1])


def any_operands(node: Node, first: Operand, *others: Operand) -> None:
    """Accept every value; tensors that become one sequence must have one dtype."""
    if node.op_type == "SequenceConstruct":
        require_same_dtype(*(x for x in (first, *others) if isinstance(x, Tensor)))


def empty_operands(node: Node) -> None:
    """Accept a node without operands."""


def _sequence(operand: Operand) -> None:
    """Require that an operand is a sequence."""
    kind = isinstance(operand, SequenceType)
    require(kind, "input_sequence is {}, not a sequence", operand)


def at_operands(node: Node, items: Operand, position: Tensor | None = None) -> None:
    """Raise ShapeError unless the position is one integer (ONNX, opset 11).

    Args:
        node: A SequenceAt, or a SequenceErase, which by default erases the last tensor.
        items: The sequence.
        position: Index into it; None: the default of SequenceErase.
    """
    _sequence(items)
    require(position is not None or node.op_type == "SequenceErase", "position is missing")
    require_single("position", position, "int64", "int32")


def insert_operands(
    node: Node, items: Operand, item: Operand, position: Tensor | None = None
) -> None:
    """Raise ShapeError unless the position is one integer (ONNX SequenceInsert, opset 11).

    Args:
        node: The node.
        items: The sequence.
        item: The tensor to insert.
        position: Index before which it is inserted; None: at the end.
    """
    _sequence(items)
    require_single("position", position, "int64", "int32")


def joined_operands(node: Node, items: Operand) -> None:
    """Raise ShapeError unless the input is a sequence and the axis may exist (opset 11).

    The rank of the tensors of a ConcatFromSequence is not known here.
    """
    _sequence(items)
    require_whole_number(node, "axis", least=-MAX_RANK - 1, most=MAX_RANK)


def split_operands(node: Node, x: Tensor, split: Tensor | None = None) -> None:
    """Raise ShapeError unless the parts fill the axis (ONNX SplitToSequence, opsets 11 to 24).

    Args:
        node: The node.
        x: The tensor.
        split: The size of each part, or of all parts if it is a scalar; None: parts of size 1.
    """
    require(x.rank >= 1, "a scalar has no axis to split")
    size = x.shape[require_axis(node, x.rank)]
    parts = int_list(node, "split", split)
    if split is None or parts is None:
        return
    if split.rank == 0:
        require(parts[0] >= 1, "split is {}; parts have at least 1 element", parts[0])
        return
    require(all(part >= 0 for part in parts), "split {} has a negative size", parts)
    require(sum(parts) == size, "split {} does not fill an axis of size {}", parts, size)


def any_optional(node: Node, value: Operand = None) -> None:
    """Accept any value, or none; an empty optional is None."""


def optional(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input, or the empty optional (None) without one."""
    return [inputs[0] if inputs else None]


def sequence_insert(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the sequence with one more tensor, by default at the end.

    Raises:
        ShapeError: The position lies outside [-n, n]; Python's list.insert would clamp it.
    """
    count, position = len(inputs[0]), inputs[2] if len(inputs) > 2 else None
    at = count if position is None else int(np.asarray(position).reshape(-1)[0])
    if not -count <= at <= count:
        raise ShapeError(f"position is {at}, outside [-{count}, {count}] of {count} tensors")
    items = list(inputs[0])
    items.insert(at, inputs[1])  # onnx.reference inserts at the begin instead of at the end
    return [items]


def optional_has_element(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return whether the optional has a value."""
    return [np.array(bool(inputs) and inputs[0] is not None)]


def optional_get_element(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the value of the optional.

    Raises:
        ShapeError: It is empty.
    """
    if not inputs or inputs[0] is None:
        raise ShapeError(f"node {node.name!r} (OptionalGetElement): the optional is empty")
    return [inputs[0]]


def concat_from_sequence(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the tensors of a sequence as one; type inference does not know their sizes."""
    size = sum(getattr(item, "nbytes", 0) for item in inputs[0])
    check_memory(size, f"node {node.name!r} (ConcatFromSequence)")
    return standard(node, inputs)


# The operators of this family, each in all its versions.
declare("ConcatFromSequence", requires=joined_operands, compute=concat_from_sequence)
declare("If", requires=if_operands)
declare("Loop", requires=loop_operands)
declare("Optional", requires=any_optional, compute=optional)
declare("OptionalGetElement", requires=any_optional, compute=optional_get_element)
declare("OptionalHasElement", requires=any_optional, compute=optional_has_element)
declare("Scan", requires=scan_operands)
declare("SequenceAt", "SequenceErase", requires=at_operands)
declare("SequenceConstruct", "SequenceLength", "SequenceMap", requires=any_operands)
declare("SequenceEmpty", requires=empty_operands)
declare("SequenceInsert", requires=insert_operands, compute=sequence_insert)
declare("SplitToSequence", requires=split_operands)
