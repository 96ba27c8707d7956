"""What operands of control flow, of sequences and of optionals must satisfy.

Numbers of inputs and outputs of bodies are `subgraph.operators.bodies`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import MAX_RANK, SequenceType, ValueType
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard
from subgraph.operators.requirements import (
    Tensor,
    is_known,
    listed,
    require,
    require_axis,
    require_dtype,
    require_same_dtype,
    require_shape,
    require_single,
    whole_number,
)

Operand = ValueType | Tensor | None


def if_operands(node: Node, condition: Tensor) -> None:
    """Raise ShapeError unless the condition is one truth value, of any rank (ONNX, 1 to 25)."""
    require_dtype("cond", condition, "bool")
    require(condition.size == 1, "cond has shape {}; it must hold one element", condition.shape)


def loop_operands(
    node: Node, limit: Tensor | None = None, condition: Tensor | None = None, *carried: Operand
) -> None:
    """Raise ShapeError unless the limit is one number, the condition a truth value (1 to 25)."""
    require_single("M", limit, "int64")
    require_single("cond", condition, "bool")


def scan_operands(node: Node, *operands: Operand) -> None:
    """Raise ShapeError unless what is scanned has one length along its axes (ONNX, 8 to 25)."""
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
    """Raise ShapeError unless all have one batch, and lengths lie within what is scanned."""
    tensors = [operand for operand in scanned if isinstance(operand, Tensor)]
    require(len(tensors) == len(scanned), "what is scanned must be tensors")
    require(all(each.rank >= 2 for each in tensors), "scan inputs need a batch and a time axis")
    shape = tensors[0].shape[:2]
    for each in tensors[1:]:
        require_shape("a scan input", Tensor("", each.shape[:2]), shape, "batch and time of each")
    for state in states:
        if isinstance(state, Tensor):
            require_shape("a state", Tensor("", state.shape[:1]), shape[:1], "its batch")
    if isinstance(lengths, Tensor):
        require_shape("sequence_lens", lengths, shape[:1], "one for each entry of the batch")
        if lengths.known is not None:
            for length in lengths.known.reshape(-1).tolist():
                require(0 <= length <= shape[1], "a length is {} of {}", length, shape[1])


def any_operands(node: Node, first: Operand, *others: Operand) -> None:
    """Take every value; tensors that become one sequence have one dtype."""
    if node.op_type == "SequenceConstruct":
        require_same_dtype(*(x for x in (first, *others) if isinstance(x, Tensor)))


def empty_operands(node: Node) -> None:
    """Take nothing."""


def _sequence(operand: Operand) -> None:
    kind = isinstance(operand, SequenceType)
    require(kind, "input_sequence is {}, not a sequence", operand)


def at_operands(node: Node, items: Operand, position: Tensor | None = None) -> None:
    """Raise ShapeError unless the position is one number (ONNX, 11)."""
    _sequence(items)
    require(position is not None or node.op_type == "SequenceErase", "position is missing")
    require_single("position", position, "int64", "int32")


def insert_operands(
    node: Node, items: Operand, item: Operand, position: Tensor | None = None
) -> None:
    """Raise ShapeError unless the position is one number (ONNX, 11)."""
    _sequence(items)
    require_single("position", position, "int64", "int32")


def joined_operands(node: Node, items: Operand) -> None:
    """Raise ShapeError unless it is a sequence, and the axis may be one of its tensors (ONNX, 11).

    Their rank is not known here.
    """
    _sequence(items)
    whole_number(node, "axis", least=-MAX_RANK - 1, most=MAX_RANK)


def split_operands(node: Node, x: Tensor, split: Tensor | None = None) -> None:
    """Raise ShapeError unless the parts fill the axis (ONNX, 11 to 24)."""
    require(x.rank >= 1, "a scalar has no axis to split")
    size = x.shape[require_axis(node, x.rank)]
    parts = listed(node, "split", split)
    if split is None or parts is None:
        return
    if split.rank == 0:
        require(parts[0] >= 1, "split is {}; parts have at least 1 element", parts[0])
        return
    require(all(part >= 0 for part in parts), "split {} has a negative size", parts)
    require(sum(parts) == size, "split {} does not fill an axis of size {}", parts, size)


def optional_operands(node: Node, value: Operand = None) -> None:
    """Take every value, or none."""


def held_operands(node: Node, value: Operand = None) -> None:
    """Take every value: an optional that is empty is none."""


def optional(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the input, or nothing (None) without one."""
    return [inputs[0] if inputs else None]


def sequence_insert(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the sequence with one more tensor, by default behind the last.

    Raises:
        ShapeError: the position lies outside [-n, n]; a list of Python takes every number.
    """
    count, position = len(inputs[0]), inputs[2] if len(inputs) > 2 else None
    at = count if position is None else int(np.asarray(position).reshape(-1)[0])
    if not -count <= at <= count:
        raise ShapeError(f"position is {at}, outside [-{count}, {count}] of {count} tensors")
    return standard(node, inputs)


def optional_has_element(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return whether there is a value."""
    return [np.array(bool(inputs) and inputs[0] is not None)]


def optional_get_element(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the value.

    Raises:
        ShapeError: there is none.
    """
    if not inputs or inputs[0] is None:
        raise ShapeError(f"node {node.name!r} (OptionalGetElement): the optional is empty")
    return [inputs[0]]


# The operators of this family, each in all its versions.
declare("ConcatFromSequence", requires=joined_operands)
declare("If", requires=if_operands)
declare("Loop", requires=loop_operands)
declare("Optional", requires=optional_operands, compute=optional)
declare("OptionalGetElement", requires=held_operands, compute=optional_get_element)
declare("OptionalHasElement", requires=held_operands, compute=optional_has_element)
declare("Scan", requires=scan_operands)
declare("SequenceAt", "SequenceErase", requires=at_operands)
declare("SequenceConstruct", "SequenceLength", "SequenceMap", requires=any_operands)
declare("SequenceEmpty", requires=empty_operands)
declare("SequenceInsert", requires=insert_operands, compute=sequence_insert)
declare("SplitToSequence", requires=split_operands)
