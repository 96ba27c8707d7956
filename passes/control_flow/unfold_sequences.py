"""Sequences for the pass "UnfoldControlFlow": one with a known count becomes a tuple of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array, SequenceType, TensorType, dtype_of
from subgraph.passes import patterns

Items = tuple[Value, ...]
Numbers = Callable[[Value | None], "list[int] | None"]
_SEQUENCES = frozenset(
    {
        *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty"),
        *("SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence"),
    }
)


def concerns_sequences(node: Node) -> bool:
    """Return whether a node creates, changes, reads or forwards a sequence."""
    handed_on = node.op_type == "Identity" and type(node.outputs[0].type) is SequenceType
    return not node.domain and (node.op_type in _SEQUENCES or handed_on)


def replacement_outputs(
    node: Node, op_type: str, inputs: Sequence[Value], outputs: int = 1, **attributes: Any
) -> tuple[Value, ...]:
    """Return the outputs of a new node that replaces a part of ``node``.

    Args:
        node: The replaced node; the new one notes it as origin.
        op_type: Operator of the new node, of opset 11 of the standard.
        inputs: Inputs of the new node.
        outputs: Number of its outputs.
        attributes: Attributes of the new node.
    """
    origin = {"origin": (node.metadata or {}).get("origin", node.name)}
    made = Node(op_type, inputs, outputs=outputs, version=11, attrs=attributes, metadata=origin)
    return made.outputs


def constant(node: Node, array: Array) -> Value:
    """Return the output of a Constant node that replaces a part of ``node``; freezes ``array``."""
    array.flags.writeable = False
    (value,) = replacement_outputs(node, "Constant", (), value=array)
    value.type = TensorType(dtype_of(array), array.shape)
    return value


class Sequences:
    """The items of each sequence of a graph whose number of items is known."""

    def __init__(self, numbers: Numbers, limit: int) -> None:
        """Begin without known sequences.

        Args:
            numbers: Returns the integers of a value that is known before a run; None for others.
            limit: The most items of a sequence that is followed.
        """
        self._numbers = numbers
        self._limit = limit
        self._items: dict[Value, Items] = {}

    def follow(self, node: Node, current: Callable[[Value], Value]) -> dict[Value, Value]:
        """Compute the items of a node's sequence, or the replacement of its tensor.

        Args:
            node: A node of which `concerns_sequences` is true.
            current: Returns the replacement of a value, or the value itself.

        Returns:
            The replacement of the node's output if that is a tensor; empty if not, or if the items
            are unknown.
        """
        made = node.outputs[0]
        inputs = [None if value is None else current(value) for value in node.inputs]
        if node.op_type == "SplitToSequence":
            pieces = self._split(node, inputs)
        elif node.op_type in ("SequenceEmpty", "SequenceConstruct"):
            pieces = tuple(value for value in inputs if value is not None)
        else:
            items = self._items.get(inputs[0]) if inputs[0] is not None else None
            if items is None:
                return {}
            if node.op_type == "Identity":
                self._items[made] = items
                return {}
            if node.op_type == "ConcatFromSequence":
                joined = _joined(node, items)
                return {} if joined is None else {made: joined}
            if node.op_type == "SequenceLength":
                return {made: constant(node, np.array(len(items), np.int64))}
            if node.op_type == "SequenceAt":
                at = self._position(node.inputs[1], len(items))
                return {} if at is None else {made: items[at]}
            pieces = self._changed(node, inputs, items)
        # Sequences of strings stay: no device has kernels for the operators that would use items.
        if pieces is not None and not any(patterns.dtype_of(piece) == "string" for piece in pieces):
            self._items[made] = pieces
        return {}

    def _position(self, value: Value | None, count: int) -> int | None:
        """Return an index into ``count`` items, at least 0; None if unknown or out of range."""
        at = self._numbers(value)
        if at is None or len(at) != 1 or not -count <= at[0] < count:
            return None
        return at[0] % count

    def _changed(self, node: Node, inputs: Sequence[Value | None], items: Items) -> Items | None:
        """Return the items after SequenceInsert or SequenceErase; None if the index is unknown."""
        count = len(items)
        erase = node.op_type == "SequenceErase"
        where = next(iter(node.inputs[1 if erase else 2 :]), None)
        if erase:
            at = count - 1 if where is None else self._position(where, count)
            return None if at is None or at < 0 else (*items[:at], *items[at + 1 :])
        at = count if where is None else self._insert_position(where, count)
        item = inputs[1]
        return None if at is None or item is None else (*items[:at], item, *items[at:])

    def _insert_position(self, where: Value, count: int) -> int | None:
        """Return the index of an inserted item, 0 to ``count``; None if unknown or out of range."""
        at = self._numbers(where)
        return count if at == [count] else self._position(where, count)

    def _split(self, node: Node, inputs: Sequence[Value | None]) -> Items | None:
        source, axis = inputs[0], int(node.attrs.get("axis", 0))
        type_ = None if source is None else source.type
        if source is None or not isinstance(type_, TensorType) or type_.shape is None:
            return None
        length = type_.shape[axis]
        if not isinstance(length, int):
            return None
        wanted = node.inputs[1] if len(node.inputs) > 1 else None
        sizes = self._sizes(wanted, length)
        if sizes is None or not 0 < len(sizes) <= self._limit or sum(sizes) != length:
            return None
        pieces = replacement_outputs(
            node, "Split", [source], len(sizes), axis=axis, split=tuple(sizes)
        )
        for piece, size in zip(pieces, sizes, strict=True):
            dims = list(type_.shape)
            dims[axis] = size
            piece.type = TensorType(type_.dtype, dims)
        if wanted is None and not node.attrs.get("keepdims", 1):
            return tuple(
                replacement_outputs(node, "Squeeze", [piece], axes=(axis,))[0] for piece in pieces
            )
        return pieces

    def _sizes(self, wanted: Value | None, length: int) -> list[int] | None:
        """Return the length of each item of SplitToSequence along the axis; None if unknown."""
        if wanted is None:
            return [1] * length
        numbers = self._numbers(wanted)
        if numbers is None or not isinstance(wanted.type, TensorType) or min(numbers) < 1:
            return None
        if wanted.type.shape != ():
            return numbers
        step = numbers[0]
        whole, rest = divmod(length, step)
        return [step] * whole + [rest] * (rest > 0)


def _joined(node: Node, items: Items) -> Value | None:
    if not items:
        return None
    axis = int(node.attrs["axis"])
    if node.attrs.get("new_axis", 0):
        return stacked(node, items, axis)
    return replacement_outputs(node, "Concat", items, axis=axis)[0]


def stacked(node: Node, items: Sequence[Value], axis: int) -> Value:
    """Return the items, at least one, concatenated along a new axis.

    Args:
        node: The node that the new ones replace.
        items: Values of one shape.
        axis: Position of the new axis.
    """
    rows = [replacement_outputs(node, "Unsqueeze", [item], axes=(axis,))[0] for item in items]
    return replacement_outputs(node, "Concat", rows, axis=axis)[0]
