"""Concrete types and known elements of a plan's values, also through fused nodes.

The outputs of a fused node are inferred from its inner graph, node by node.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

from subgraph.errors import ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, TensorType, ValueType, numpy_dtype
from subgraph.operators.inference import infer_types
from subgraph.operators.shape_values import from_array, propagate, to_array

# Most elements of integer weights that may be shapes, axes or paddings, on which plans depend
# (estimate: far more than a tensor has axes). Larger ones count as data.
MAX_SHAPE_ELEMENTS = 256
# Most elements of vectors of bytes that may be zero points, on which packed weights depend
# (estimate: more than a layer has channels).
_MAX_ZERO_POINTS = 1 << 16


def concrete(type_: TensorType) -> tuple[int, ...]:
    """Return the shape of a static type.

    Raises:
        ShapeError: A dimension is not a number.
    """
    if not type_.is_static:
        raise ShapeError(f"{type_} is not a concrete type")
    return cast("tuple[int, ...]", type_.shape)


def infer_concrete(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> list[ValueType | None]:
    """Return the types of a node's outputs; those of a fused node come from its inner graph.

    Args:
        node: The node.
        types: Types of its inputs, None where one is omitted.
        values: Content of its inputs, None where unknown or omitted.

    Raises:
        ShapeError: The inputs do not fit the operator.
    """
    if node.subgraph is None:
        return infer_types(node, types, values)
    known = [None if array is None else from_array(array) for array in values]
    return _infer_inner(node.subgraph, types, known)[0]


def propagate_concrete(
    node: Node, known: Sequence[Array | None], types: Sequence[ValueType | None]
) -> Array | None:
    """Return the known elements of the first output; None if none are known.

    See `subgraph.operators.shape_values.propagate`, which this extends to fused nodes.

    Args:
        node: The node.
        known: Known elements of its inputs, None for an input without any.
        types: Types of its inputs, None where one is omitted.
    """
    if node.subgraph is None:
        return propagate(node, known, types)
    if any(elements is None for elements in known):
        return None
    return _infer_inner(node.subgraph, types, known)[1]


def _infer_inner(
    inner: Graph, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> tuple[list[ValueType | None], Array | None]:
    """Return the types of a fused node's outputs, and the known elements of the first one."""
    known_types: dict[Value, ValueType | None] = dict(zip(inner.inputs, types, strict=False))
    known_values: dict[Value, Array | None] = dict(zip(inner.inputs, values, strict=False))

    def type_of(value: Value | None) -> ValueType | None:
        if value is None:
            return None
        found = known_types.get(value)
        return value.parameter.type if found is None and value.parameter is not None else found

    def elements(value: Value | None) -> Array | None:
        if value is None:
            return None
        if value not in known_values and value.parameter is not None:
            known_values[value] = (
                from_array(value.parameter.array) if is_shape_like(value.parameter) else None
            )
        return known_values.get(value)

    for inside in inner.nodes:
        inner_types = [type_of(v) for v in inside.inputs]
        partial = [elements(v) for v in inside.inputs]
        arrays = [to_array(p, t) for p, t in zip(partial, inner_types, strict=True)]
        found = infer_concrete(inside, inner_types, arrays)
        known_types.update(zip(inside.outputs, found, strict=True))
        known_values[inside.outputs[0]] = propagate(inside, partial, inner_types)
    return [type_of(value) for value in inner.outputs], known_values.get(inner.outputs[0])


def is_shape_like(parameter: Parameter) -> bool:
    """Return whether a weight may be a shape, axes or paddings, so that plans depend on it."""
    type_ = parameter.type
    shape = concrete(type_)
    if type_.dtype in ("int8", "uint8") and len(shape) <= 1:
        return math.prod(shape) <= _MAX_ZERO_POINTS
    return math.prod(shape) <= MAX_SHAPE_ELEMENTS and numpy_dtype(type_.dtype).kind in "iub"
