"""A static proof that the rows of a batch are computed independently.

The graph is typed with a large prime as the number of rows, and `subgraph.operators.batch_axes`
follows the batch from node to node. Numbers that are computed from the number of rows may state
sizes only. Control flow, random operators and operators without a rule prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subgraph.errors import SubgraphError, message_of
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchAxis, NoBatch
from subgraph.operators.operator import operator_of
from subgraph.operators.schema import contributed
from subgraph.operators.type_inference import infer_graph, retype
from subgraph.transform.pass_manager import apply_pass

from .constant_sizes import adapted
from .node_batches import node_batches

# The number of rows. Products with a few hundreds are exact in float32, in which some models
# compute sizes.
_ROWS = 10007
# Sizes for other dimensions that are not known, none a multiple of another.
_OTHER_SIZES = (127, 131, 137, 139, 149, 151, 157, 163, 167, 173, 179, 181, 191, 193, 197, 199)


def row_dependence(graph: Graph) -> str:
    """Return why rows of a batch may depend on each other, "" if it is proved that none does.

    Args:
        graph: A graph all of whose inputs have the same symbolic first dimension, the batch. Each
            output must have it, too.
    """
    typed, dimension = _typed(graph)
    if dimension is None:
        return "the first dimension of the inputs is not a batch of one name"
    try:
        if any(_is_expanded(node) for node in typed.nodes):
            infer_graph(typed, strict=False)
            typed, _ = _typed(apply_pass(typed, "ExpandFunctions"), dimension)
        known = infer_graph(typed, strict=False)
    except SubgraphError as error:
        return f"the sizes for many rows are not known: {message_of(error)}"
    batches: dict[Value, Batch] = dict.fromkeys(typed.inputs, BatchAxis(0))
    lost = ""
    for node in typed.nodes:
        inputs = [_batch_of(value, batches) for value in node.inputs]
        found = node_batches(node, inputs, known, _ROWS)
        batches.update(zip(node.outputs, found, strict=True))
        if None in found:
            lost = lost or f"node {node.name!r} ({node.op_type}) may mix rows"
            # Fewer rows go through this node, too, whatever reads its results. It may state a row
            # that they lack, as an index does.
            if not any(found):
                return lost
    for value in typed.outputs:
        found_batch = _batch_of(value, batches)
        if found_batch is None:
            return lost or f"output {value.name!r} depends on several rows"
        if found_batch != BatchAxis(0):
            return f"the first dimension of output {value.name!r} is not the batch"
    return ""


def independent_form(graph: Graph) -> Graph | None:
    """Return a graph for any number of rows, if they are proved to be independent.

    Args:
        graph: The graph; it is not changed. The batch, the first dimension of all inputs but
            weights, may be a name or a number, for which constants of the graph are adapted.

    Returns:
        The graph; None if inputs have other first dimensions, a constant cannot be adapted, or rows
        may depend on each other.
    """
    inputs = [value for value in graph.inputs if value.parameter is None]
    types = [value.type for value in inputs if isinstance(value.type, TensorType)]
    first = {type_.shape[0] if type_.shape else None for type_ in types}
    if len(first) != 1 or len(types) < len(inputs):
        return None
    if isinstance(first.pop(), int):
        new: dict[Value, ValueType | None] = {
            value: TensorType(type_.dtype, ("rows", *(type_.shape or ())[1:]))
            for value, type_ in zip(inputs, types, strict=True)
        }
        try:
            found = adapted(graph, new)
            if found.misfit:
                return None
            # In a region inputs that are weights hold them, so that sizes among them are known.
            graph, _ = retype(found.graph, [new.get(value) for value in graph.inputs])
            found.set_sizes(graph)
        except SubgraphError:
            return None
    return None if row_dependence(graph) else graph


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
    # The elements of a weight are known, also of one that is an input with a default.
    copy.inputs = tuple(value for value in copy.inputs if value.parameter is None)
    for node in copy.nodes:
        for value in node.outputs:
            value.type = None
    sizes: dict[Any, int] = {}
    others = iter(_OTHER_SIZES)
    for value in copy.inputs:
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
