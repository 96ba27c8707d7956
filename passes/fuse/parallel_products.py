"""The pass "AddProducts": a sum of products of one value with weights becomes one product.

Models that were adapted to a task with adapters of low rank (LoRA) compute ``x W + x A B``, where A
has few columns and B as few rows. The result is ``x (W + A B)``. (Source: Hu et al., "LoRA:
Low-Rank Adaptation of Large Language Models", 2021, section 4.1.) The pass computes nothing: the
sum of the weights is a node on parameters, which the weight cache computes, and computes again when
another adapter is assigned to A and B. The scale of an adapter is part of B by then (`fold_scale`).

Weights in 16 bits and quantized weights stay apart: products read them as they are stored, in half
or an eighth of the memory of a sum in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.passes.patterns import (
    FLOATS,
    Context,
    dtype_of,
    fusion_pass,
    is_op,
    merge_sums,
    part_of,
    shape_of,
    weight_node,
)

# Operators between a weight and its Cast or DequantizeLinear: a Transpose and a scale (estimate).
_MOST_STEPS = 2


@fusion_pass("AddProducts", "transformer", "MatMul")
def add_products(graph: Graph) -> Graph:
    """Return ``graph``, or a copy in which products whose results are added are one."""
    return merge_sums(graph, _sum, _made)


@attrs.frozen
class _Product:
    """A product of a value with a weight, and an addition.

    Attributes:
        x: The value.
        weight: The weight, ``[K, N]``.
        shift: Weight that is added to each row of the result, ``[N]``, or None.
    """

    x: Value
    weight: Value
    shift: Value | None = None


def _sum(
    context: Context, sums: Mapping[Node, _Product], node: Node, first: Value, second: Value
) -> _Product | None:
    """Return the product that computes an addition; see `merge_sums`."""
    for one in _products(context, sums, node, first):
        for other in _products(context, sums, node, second):
            if one.x is other.x and shape_of(one.weight) == shape_of(other.weight):
                weight, shift = _added(one.weight, other.weight), _either(one.shift, other.shift)
                return _Product(one.x, weight, shift)
    return None


def _made(node: Node, found: _Product, replaced: Mapping[Value, Value]) -> Value:
    """Return the result of the product that replaces an addition."""
    made = part_of(node, "MatMul", replaced.get(found.x, found.x), found.weight)
    if found.shift is None:
        return made
    return part_of(node, "Add", made, found.shift, version=14)


def _added(first: Value, second: Value) -> Value:
    return weight_node("Add", [first, second], shape_of(first))


def _either(first: Value | None, second: Value | None) -> Value | None:
    if first is None or second is None:
        return second if first is None else first
    return _added(first, second)


def _products(
    context: Context, sums: Mapping[Node, _Product], user: Node, value: Value
) -> Iterator[_Product]:
    """Yield the forms of a value, which only ``user`` reads, as a product with a weight."""
    node = value.producer
    if node is None or context.sole_user(value) is not user or dtype_of(value) not in FLOATS:
        return
    shift: Value | None = None
    if is_op(node, "Add") and node not in sums:
        shifts = [v for v in node.inputs if v is not None and context.is_weight(v)]
        other = context.other_operand(node, shifts[0]) if len(shifts) == 1 else None
        if other is None or other.producer is None or context.sole_user(other) is not node:
            return
        shift, node = shifts[0], other.producer
    found = [sums[node]] if node in sums else _of_matmul(context, node)
    for product in found:
        if shift is None or shape_of(shift) == (shape_of(product.weight) or ())[1:]:
            yield attrs.evolve(product, shift=_either(product.shift, shift))


def _of_matmul(context: Context, node: Node) -> Iterator[_Product]:
    """Yield the result of a MatMul with a weight as a product, and ``(x A) B`` as ``x (A B)``."""
    if not is_op(node, "MatMul") or not _is_matrix(context, node.inputs[1]):
        return
    x, weight = node.inputs
    if x is None or weight is None or _is_narrow(weight):
        return
    yield _Product(x, weight)
    inner = x.producer
    if inner is None or not is_op(inner, "MatMul") or context.sole_user(x) is not node:
        return
    first, factor = inner.inputs
    if first is not None and factor is not None and _is_matrix(context, factor):
        shape = (*(shape_of(factor) or ())[:1], *(shape_of(weight) or ())[1:])
        yield _Product(first, weight_node("MatMul", [factor, weight], shape))


def _is_matrix(context: Context, value: Value | None) -> bool:
    """Return whether a value is a weight of two known dimensions."""
    shape = shape_of(value) or ()
    return context.is_weight(value) and len(shape) == 2 and all(isinstance(n, int) for n in shape)


def _is_narrow(weight: Value) -> bool:
    """Return whether a weight is computed from one of fewer bits."""
    values = [weight]
    for _ in range(_MOST_STEPS + 1):
        nodes = [value.producer for value in values if value.producer is not None]
        if any(is_op(node, "Cast", "DequantizeLinear") for node in nodes):
            return True
        values = [value for node in nodes for value in node.inputs if value is not None]
    return False
