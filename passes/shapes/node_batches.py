"""The batch of a node's outputs: its operator's rule, sizes that are computed, and checks.

The values have types for a large prime as the number of rows, so that it divides sizes with rows
alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array
from subgraph.operators.batch_axes import Batch, BatchAxis, BatchCall, NoBatch, Sizes, fits
from subgraph.operators.operator import is_random, operator_of
from subgraph.operators.shape_values import to_array

from .size_changes import static_shape

# Operators that select or arrange elements of their first input; the others select.
_SELECTING = frozenset(
    {
        *("Cast", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
        *("Transpose", "Unsqueeze"),
    }
)
# Operators whose results are polynomials of the elements of their inputs.
_POLYNOMIAL = frozenset({"Add", "Concat", "Mul", "Neg", "ReduceProd", "ReduceSum", "Sub"})


def node_batches(
    node: Node,
    inputs: Sequence[Batch],
    known: Mapping[Value, Array | None],
    rows: int,
) -> Sequence[Batch]:
    """Return the batch of each output of a node.

    Args:
        node: The node; its values have types for this number of rows.
        inputs: The batch of each input; SHARED for one that is omitted.
        known: Shape values.
        rows: The number of rows, a large prime.
    """
    operator, result = operator_of(node), known.get(node.outputs[0])
    elements = [None if v is None else to_array(known.get(v), v.type) for v in node.inputs]
    unknown: list[Batch] = [None] * len(node.outputs)
    found: list[Batch]
    if node.bodies or node.subgraph is not None or is_random(node):
        return unknown
    if operator.by_type:
        return [_of_numbers(result, rows)]
    given: list[Batch] = list(inputs)
    if operator.dtype_at is not None:
        given[operator.dtype_at] = NoBatch.SHARED
    if None in given:
        return unknown
    if all(batch == NoBatch.SHARED for batch in given):
        found = [NoBatch.SHARED] * len(node.outputs)
    elif NoBatch.SIZES in given and _computes_sizes(node, given, elements, rows):
        found = [_of_numbers(result, rows), *unknown[1:]]
        if found[0] == NoBatch.SIZES:
            return found
    elif operator.batch is not None and all(
        batch != NoBatch.SIZES or k in operator.sized_by for k, batch in enumerate(given)
    ):
        shapes = [_sizes(value) for value in node.inputs]
        results = [_sizes(value) for value in node.outputs]
        if None in shapes or None in results:
            return unknown
        call = BatchCall(
            node,
            given,
            [shape or () for shape in shapes],
            [shape or () for shape in results],
            elements,
            rows,
        )
        try:
            found = list(operator.batch(call))
        except (LookupError, TypeError, ValueError, ArithmeticError, ShapeError):
            return unknown  # operands that do not fit
    else:
        return unknown
    return [
        batch if batch is not None and _fits(batch, value, rows) else None
        for batch, value in zip([*found, *unknown][: len(unknown)], node.outputs, strict=True)
    ]


def _fits(batch: Batch, value: Value, rows: int) -> bool:
    sizes = _sizes(value)
    return batch == NoBatch.SHARED if sizes is None else fits(batch, sizes, rows)


def _sizes(value: Value | None) -> Sizes | None:
    """Return the shape of a tensor, () of an omitted operand; None if a size is not known."""
    return () if value is None else static_shape(value.type)


def _of_numbers(numbers: Array | None, rows: int) -> Batch:
    """Return whether numbers are the same for all numbers of rows, or multiples of it.

    Args:
        numbers: Polynomials of the number of rows with small coefficients; None: not known.
        rows: The number of rows, a large prime.
    """
    if numbers is None:
        return None
    plain = [number for number in numbers.ravel().tolist() if not isinstance(number, bool)]
    if not all(isinstance(number, (int, float)) for number in plain):
        return None
    if all(abs(number) < rows // 2 for number in plain):
        return NoBatch.SHARED
    return NoBatch.SIZES if all(n % rows == 0 or abs(n) < rows // 2 for n in plain) else None


def _computes_sizes(
    node: Node, inputs: Sequence[Batch], known: Sequence[Array | None], rows: int
) -> bool:
    """Return whether a node computes numbers that have the same form for all numbers of rows.

    Args:
        node: A node of which an input is SIZES.
        inputs: The batch of each input.
        known: The elements of the inputs, None for those not known.
        rows: The number of rows, a large prime.
    """
    if node.domain or any(isinstance(batch, BatchAxis) for batch in inputs):
        return False
    if node.op_type in _SELECTING:
        return NoBatch.SIZES not in inputs[1:]
    if node.op_type == "Where":
        return inputs[0] == NoBatch.SHARED
    if node.op_type in _POLYNOMIAL:
        return True
    if node.op_type not in ("Div", "Equal") or known[0] is None or known[1] is None:
        return False
    pairs: list[tuple[Any, Any]] = list(np.broadcast(known[0], known[1]))
    if node.op_type == "Div":
        return all(b and float(a) % float(b) == 0 for a, b in pairs)
    # A size is neither 0 nor negative; whether it equals another number depends on the rows.
    return all(max(abs(a), abs(b)) < rows // 2 or -1 <= min(a, b) <= 0 for a, b in pairs)
