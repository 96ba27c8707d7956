"""Sequences whose items are known values, for the pass "UnfoldControlFlow": each becomes these."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array, SequenceType, TensorType, dtype_of
from subgraph.passes import _patterns

Items = tuple[Value, ...]
Numbers = Callable[[Value | None], "list[int] | None"]
_SEQUENCES = frozenset(
    {
        *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty"),
        *("SequenceErase", "SequenceInsert", "SequenceLength", "SplitToSequence"),
    }
)


def concerns_sequences(node: Node) -> bool:
    """Return whether a node makes, changes, reads or hands on a sequence."""
    handed_on = node.op_type == "Identity" and type(node.outputs[0].type) is SequenceType
    return not node.domain and (node.op_type in _SEQUENCES or handed_on)


def made_for(
    node: Node, op_type: str, inputs: Sequence[Value], outputs: int = 1, **attributes: Any
) -> tuple[Value, ...]:
    """Return the outputs of a new node that stands for a part of ``node``."""
    origin = {"origin": (node.metadata or {}).get("origin", node.name)}
    made = Node(op_type, inputs, outputs=outputs, version=11, attrs=attributes, metadata=origin)
    return made.outputs


def constant(node: Node, array: Array) -> Value:
    """Return the output of a Constant node that stands for a part of ``node``."""
    array.flags.writeable = False
    (value,) = made_for(node, "Constant", (), value=array)
    value.type = TensorType(dtype_of(array), array.shape)
    return value


class Sequences:
    """The items of the sequences of a graph, as far as they are known."""

    def __init__(self, numbers: Numbers, limit: int) -> None:
        """Follow sequences.

        Args:
            numbers: Returns the whole numbers that a value is known to hold.
            limit: How many items a sequence may have.
        """
        self._numbers = numbers
        self._limit = limit
        self._items: dict[Value, Items] = {}

    def follow(self, node: Node, now: Callable[[Value], Value]) -> dict[Value, Value]:
        """Note what a node makes of sequences; return what stands for a tensor that it gives.

        Args:
            node: A node of which `concerns_sequences` is true.
            now: Returns what stands for a value.
        """
        made = node.outputs[0]
        inputs = [None if value is None else now(value) for value in node.inputs]
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
        # Strings have no kernels: what works on them stays whole, and with the default executor.
        if pieces is not None and not any(
            _patterns.dtype_of(piece) == "string" for piece in pieces
        ):
            self._items[made] = pieces
        return {}

    def _position(self, value: Value | None, count: int) -> int | None:
        """Return where an index points among ``count`` places, None if nobody knows."""
        at = self._numbers(value)
        if at is None or len(at) != 1 or not -count <= at[0] < count:
            return None
        return at[0] % count

    def _changed(self, node: Node, inputs: Sequence[Value | None], items: Items) -> Items | None:
        """Return the items after SequenceInsert or SequenceErase, None if nobody knows where."""
        count = len(items)
        erase = node.op_type == "SequenceErase"
        where = next(iter(node.inputs[1 if erase else 2 :]), None)
        if erase:
            at = count - 1 if where is None else self._position(where, count)
            return None if at is None or at < 0 else (*items[:at], *items[at + 1 :])
        at = count if where is None else self._place(where, count)
        item = inputs[1]
        return None if at is None or item is None else (*items[:at], item, *items[at:])

    def _place(self, where: Value, count: int) -> int | None:
        """Return where to insert: before an item, or after the last one."""
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
        pieces = made_for(node, "Split", [source], len(sizes), axis=axis, split=tuple(sizes))
        for piece, size in zip(pieces, sizes, strict=True):
            dims = list(type_.shape)
            dims[axis] = size
            piece.type = TensorType(type_.dtype, dims)
        if wanted is None and not node.attrs.get("keepdims", 1):
            return tuple(made_for(node, "Squeeze", [piece], axes=(axis,))[0] for piece in pieces)
        return pieces

    def _sizes(self, wanted: Value | None, length: int) -> list[int] | None:
        """Return how much of the axis each item takes."""
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
    return made_for(node, "Concat", items, axis=axis)[0]


def stacked(node: Node, items: Sequence[Value], axis: int) -> Value:
    """Return the items along a new axis."""
    rows = [made_for(node, "Unsqueeze", [item], axes=(axis,))[0] for item in items]
    return made_for(node, "Concat", rows, axis=axis)[0]
