"""A static proof that the rows of a batch are computed independently.

The graph is typed with a large prime as the number of rows, and `subgraph.operators.batch_axes`
follows the batch from node to node. Numbers that are computed from the number of rows may state
sizes only. Control flow, random operators and operators without a rule prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import Array, TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchAxis, BatchCall, NoBatch, Sizes, fits
from subgraph.operators.operator import is_random, operator_of
from subgraph.operators.schema import contributed
from subgraph.operators.shape_values import to_array
from subgraph.operators.type_inference import infer_graph
from subgraph.transform.pass_manager import apply_pass

# The number of rows. Products with a few hundreds are exact in float32, in which some models
# compute sizes.
_ROWS = 10007
# Sizes for other dimensions that are not known, none a multiple of another.
_OTHER_SIZES = (127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199)
# Operators that select or arrange elements of their first input; the others select.
_SELECTING = frozenset(
    {
        *("Cast", "Expand", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
        *("Transpose", "Unsqueeze"),
    }
)
# Operators whose results are polynomials of the elements of their inputs.
_POLYNOMIAL = frozenset({"Add", "Concat", "Mul", "Neg", "ReduceProd", "ReduceSum", "Sub"})


def row_dependence(graph: Graph) -> str:
    """Return why rows of a batch may depend on each other, "" if it is proved that none does.

    Args:
        graph: A graph all of whose inputs have the same symbolic first dimension, the batch. Each
            output must have it, too.
    """
    typed, dimension = _typed(graph)
    if dimension is None:
        return "the first dimension of the inputs is not a batch of one name"
    if any(_is_expanded(node) for node in typed.nodes):
        infer_graph(typed, strict=False)
        typed, _ = _typed(apply_pass(typed, "ExpandFunctions"), dimension)
    known = infer_graph(typed, strict=False)
    batches: dict[Value, Batch] = {}
    for value in typed.inputs:
        batches[value] = BatchAxis(0) if value.parameter is None else NoBatch.SHARED
    lost = ""
    for node in typed.nodes:
        inputs = [_batch_of(value, batches) for value in node.inputs]
        found = node_batches(
            node,
            inputs,
            [None if value is None else _known(value, known) for value in node.inputs],
            known.get(node.outputs[0]),
            _ROWS,
        )
        batches.update(zip(node.outputs, found, strict=True))
        if None in found and None not in inputs and not lost:
            lost = f"node {node.name!r} ({node.op_type}) may mix rows"
    for value in typed.outputs:
        found_batch = _batch_of(value, batches)
        if found_batch is None:
            return lost or f"output {value.name!r} depends on several rows"
        if found_batch != BatchAxis(0):
            return f"the first dimension of output {value.name!r} is not the batch"
    return ""


def _is_expanded(node: Node) -> bool:
    """Return whether the pass "ExpandFunctions" replaces a node by others, which have rules."""
    return contributed(node.op_type, node.domain) or operator_of(node).by_body


def _typed(graph: Graph, dimension: Any = None) -> tuple[Graph, Any]:
    """Return a copy whose only types are those of inputs, with numbers for names of dimensions.

    Args:
        graph: The graph.
        dimension: The batch dimension; None: the first one of all inputs.

    Returns:
        The copy, and the batch dimension, None if inputs have another first one.
    """
    copy = graph.clone()
    for node in copy.nodes:
        for value in node.outputs:
            value.type = None
    sizes: dict[Any, int] = {}
    others = iter(_OTHER_SIZES)
    for value in copy.inputs:
        if value.parameter is not None:
            continue
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        if not shape or not (isinstance(shape[0], str) or shape[0] == _ROWS):
            return copy, None
        dimension = dimension or shape[0]
        if shape[0] not in (dimension, _ROWS):
            return copy, None
        sizes[dimension] = _ROWS
        assert isinstance(value.type, TensorType)
        dims: list[int] = []
        for axis, dim in enumerate(shape):
            key = (value, axis) if dim is None else dim
            if not isinstance(dim, int) and key not in sizes:
                sizes[key] = next(others, 0)
                if not sizes[key]:
                    return copy, None
            dims.append(dim if isinstance(dim, int) else sizes[key])
        value.type = TensorType(value.type.dtype, dims)
    return copy, dimension


def _batch_of(value: Value | None, batches: Mapping[Value, Batch]) -> Batch:
    """Return the batch of an operand; an omitted one and a weight are shared."""
    if value is None or (value.parameter is not None and value not in batches):
        return NoBatch.SHARED
    return batches.get(value)


def _known(value: Value, known: Mapping[Value, Array | None]) -> Array | None:
    """Return the elements of a weight, of a constant, or of shape arithmetic."""
    if value.parameter is not None:
        return value.parameter.array
    return to_array(known.get(value), value.type)


def node_batches(
    node: Node,
    inputs: Sequence[Batch],
    known: Sequence[Array | None],
    result: Array | None,
    rows: int,
) -> Sequence[Batch]:
    """Return the batch of each output of a node.

    Args:
        node: The node; its values have types for this number of rows.
        inputs: The batch of each input; SHARED for one that is omitted.
        known: The elements of the inputs, None for those not known.
        result: The shape value of the first output; None: not known.
        rows: The number of rows, a large prime.
    """
    operator = operator_of(node)
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
    elif NoBatch.SIZES in given and _computes_sizes(node, given, known, rows):
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
            known,
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
    if value is None:
        return ()
    type_: ValueType | None = value.type
    if not isinstance(type_, TensorType) or not type_.is_static:
        return None
    return tuple(dim for dim in type_.shape or () if isinstance(dim, int))


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
