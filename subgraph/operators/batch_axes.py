"""How the rows of a batch pass through operators, and rules by which an operator declares it.

A model computes the rows of a batch independently if each row of its results depends on the same
row of its inputs alone. `Operator.batch` is the rule of one operator: it gets a `BatchCall`, a node
whose inputs have known batch axes, and returns those of the outputs. An operator without a rule is
not known to keep rows apart. `subgraph.passes.shapes.independent_rows` follows the batch through a
graph, and checks each answer against the sizes of the outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from typing import TypeAlias

import attrs
import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import Array

Sizes = tuple[int, ...]


@attrs.frozen
class BatchAxis:
    """Where the rows of a batch are in a tensor.

    An axis of ``outer * rows * inner`` elements holds them: element ``(o * rows + n) * inner + i``
    depends on row ``n``. So a batch can be followed when it is merged with heads or tokens.

    Attributes:
        axis: The axis.
        outer: Elements of the axis outside of the batch.
        inner: Elements of the axis inside of the batch.
    """

    axis: int
    outer: int = 1
    inner: int = 1

    def at(self, axis: int) -> BatchAxis:
        """Return the same batch at another axis."""
        return BatchAxis(axis, self.outer, self.inner)


class NoBatch(Enum):
    """A value without a batch axis.

    Attributes:
        SHARED: The same for all rows.
        SIZES: Numbers that are computed from the number of rows.
    """

    SHARED = auto()
    SIZES = auto()


Batch: TypeAlias = BatchAxis | NoBatch | None  # None: not known


@attrs.frozen
class BatchCall:
    """A node of which at least one input has a batch axis or sizes, and none is unknown.

    Attributes:
        node: The node.
        inputs: The batch of each input; SHARED for one that is omitted. Only inputs that state
            sizes (`Operator.sized_by`) are SIZES.
        shapes: The shape of each input, () for one that is omitted or has no shape.
        results: The shape of each output.
        known: The elements of the inputs, None for those not known.
        rows: The number of rows for which the shapes are, a large prime.
    """

    node: Node
    inputs: Sequence[Batch]
    shapes: Sequence[Sizes]
    results: Sequence[Sizes]
    known: Sequence[Array | None]
    rows: int

    def axis_of(self, k: int) -> BatchAxis | None:
        """Return the batch axis of an input; None if it has none or is omitted."""
        found = self.inputs[k] if k < len(self.inputs) else None
        return found if isinstance(found, BatchAxis) else None

    def only(self, *positions: int) -> bool:
        """Return whether no input but those at these positions has a batch axis."""
        return all(k in positions or self.axis_of(k) is None for k in range(len(self.inputs)))

    def integers(self, k: int, name: str) -> list[int] | None:
        """Return integers that are an input or, in old versions of an operator, an attribute.

        Args:
            k: Position of the input.
            name: Name of the attribute.

        Returns:
            The integers, [] if the node has neither; None if they are not known.
        """
        if k < len(self.node.inputs) and self.node.inputs[k] is not None:
            found = self.known[k]
            return None if found is None else [int(number) for number in found.reshape(-1)]
        return [int(number) for number in np.reshape(self.node.attrs.get(name, ()), -1)]

    def everywhere(self, batch: Batch) -> list[Batch]:
        """Return the same batch for all outputs."""
        return [batch] * len(self.results)

    def filled(self, k: int) -> Batch:
        """Return the batch of an output whose elements are repeated along all axes with rows."""
        return filled(self.results[k], self.rows)


BatchRule = Callable[[BatchCall], Sequence[Batch]]


def filled(shape: Sizes, rows: int) -> Batch:
    """Return the batch of a tensor of which all slices along an axis with rows are equal.

    Args:
        shape: Its shape.
        rows: The number of rows, a large prime.
    """
    axes = [axis for axis, size in enumerate(shape) if _has_rows(size, rows)]
    if len(axes) != 1:
        return None if axes else NoBatch.SHARED
    return BatchAxis(axes[0], shape[axes[0]] // rows)


def fits(batch: Batch, shape: Sizes, rows: int) -> bool:
    """Return whether a shape has the rows in the batch axis alone.

    Args:
        batch: The batch.
        shape: The shape.
        rows: The number of rows, a large prime.
    """
    others = list(shape)
    if isinstance(batch, BatchAxis):
        if not batch.axis < len(others):
            return False
        if others.pop(batch.axis) != batch.outer * rows * batch.inner:
            return False
    return not any(_has_rows(size, rows) for size in others)


def _has_rows(size: int, rows: int) -> bool:
    return size > 0 and size % rows == 0


def elementwise(call: BatchCall) -> Sequence[Batch]:
    """An output element depends on the elements at its position of inputs that broadcast.

    Before opset 7 the second operand may be aligned with other axes; it must then be shared.
    """
    found: set[BatchAxis] = set()
    rank = len(call.results[0])
    for k, shape in enumerate(call.shapes):
        batch = call.axis_of(k)
        if batch is not None:
            found.add(batch.at(batch.axis + rank - len(shape)))
    return call.everywhere(found.pop() if len(found) == 1 else None)


def first_input(call: BatchCall) -> Sequence[Batch]:
    """Each output is elementwise in the first input; the other inputs are shared."""
    return call.everywhere(call.axis_of(0) if call.only(0) else None)


def along(*axes: int) -> BatchRule:
    """Return the rule of operators that compute all indices of some axes independently.

    Inputs may have their batch in one of these axes, all in the same one; it is that of all
    outputs. So a convolution is ``along(0)``.

    Args:
        *axes: The axes, from the front.
    """

    def rule(call: BatchCall) -> Sequence[Batch]:
        found = {batch for batch in call.inputs if isinstance(batch, BatchAxis)}
        batch = found.pop() if len(found) == 1 else None
        return call.everywhere(batch if batch is not None and batch.axis in axes else None)

    return rule


def except_axes(mixed: Callable[[BatchCall], Collection[int] | None]) -> BatchRule:
    """Return the rule of operators that compute along some axes of the first input.

    All other axes are independent; other inputs are shared. Without ``keepdims`` the outputs lack
    the axes.

    Args:
        mixed: Returns the axes, from the front or back; None if they are not known.
    """

    def rule(call: BatchCall) -> Sequence[Batch]:
        batch, axes = call.axis_of(0), mixed(call)
        rank = len(call.shapes[0])
        if batch is None or axes is None or not call.only(0):
            return call.everywhere(None)
        apart = {axis % rank for axis in axes}
        if batch.axis in apart:
            return call.everywhere(None)
        removed = sum(axis < batch.axis for axis in apart)
        return [
            batch if len(shape) == rank else batch.at(batch.axis - removed)
            for shape in call.results
        ]

    return rule


def reshaped(call: BatchCall) -> Sequence[Batch]:
    """The output has the elements of the first input, in the same order."""
    batch = call.axis_of(0)
    (shape, *_), (result, *_) = call.shapes, call.results
    if batch is None or not call.only(0):
        return [None]
    before = math.prod(shape[: batch.axis]) * batch.outer
    axis = next((d for d, size in enumerate(result) if _has_rows(size, call.rows)), None)
    if axis is None:
        return [None]
    outer, rest = divmod(before, math.prod(result[:axis]))
    inner, more = divmod(result[axis] // call.rows, outer or 1)
    return [None if rest or more else BatchAxis(axis, outer, inner)]


def matrix_product(a: int, b: int) -> BatchRule:
    """Return the rule of products of stacks of matrices, ``[..., M, K]`` and ``[..., K, N]``.

    Args:
        a: Position of the left operand.
        b: Position of the right operand; the others are shared.
    """

    def rule(call: BatchCall) -> Sequence[Batch]:
        left, right = len(call.shapes[a]), len(call.shapes[b])
        found: set[BatchAxis] = set()
        for k, rank, other, depth in ((a, left, right, 1), (b, right, left, 2)):
            batch = call.axis_of(k)
            if batch is None:
                continue
            behind = rank - batch.axis  # 1: the last axis
            if behind == min(depth, rank):
                return [None]  # sums over the batch
            if other == 1:
                behind -= behind > 1  # the result lacks the columns, or the rows
            found.add(batch.at(len(call.results[0]) - behind))
        return [found.pop() if len(found) == 1 and call.only(a, b) else None]

    return rule
