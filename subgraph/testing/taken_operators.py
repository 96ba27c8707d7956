"""Which operators a property takes: the answers of its selector for a node of each operator."""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.schema import get_schema, standard_operators
from subgraph.partition.property import SubgraphProperty, property_from

# Selectors often ask for a rank: an image and a matrix satisfy most of them.
SHAPES = ((1, 2, 4, 4), (2, 3))
_OTHER_DTYPES = ("int64", "int8", "uint8", "float16", "float64", "bool")
# Each start operator is asked about all others, some 200. A selector that starts at more operators
# than this usually has a list of operators, all of which are starts (estimate).
_MAX_STARTS = 8  # start operators for which growth to every other operator is tried


def taken_operators(prop: Any) -> list[str]:
    """Return the operators of ONNX's domain at which a region may start or to which it may grow.

    The nodes have no attributes. Their operands are inputs of float32, results of other nodes, or
    of other dtypes. An operator at whose node the selector raises counts as taken, because the
    selector may need attributes.

    Args:
        prop: A value of ``graph.attrs["subgraph_property"]``.
    """
    owner = copy.copy(property_from(prop))
    with suppress(Exception):  # an empty graph may be refused; the checks use real graphs
        owner.pre_partition(Graph(), {})
    names = [name for name, domain in standard_operators() if not domain]
    starts = [name for name in names if _may_start(owner, name)]
    taken = set(starts)
    for start in starts[:_MAX_STARTS]:
        for name in names:
            if name not in taken and _grows(owner, start, name):
                taken.add(name)
    return sorted(taken)


def plain_node(
    op_type: str,
    shape: tuple[int, ...],
    first: Value | None = None,
    *,
    dtype: str = "float32",
    inside: bool = False,
) -> Node:
    """Return a node without attributes on operands of one shape.

    Args:
        op_type: An operator of ONNX's own domain.
        shape: Shape of the operands, and of the outputs as far as types are stated.
        first: The first operand; None: a new value.
        dtype: Dtype of the operands and outputs.
        inside: Whether each operand is the result of a node of its own, and a node uses the result.
    """
    schema = get_schema(op_type)
    count = max(schema.min_inputs, min(schema.max_inputs, 2))
    type_ = TensorType(dtype, shape)
    inputs = [Value(f"{op_type}_in{k}", type_) for k in range(count)]
    if inside:
        inputs = [_relu(value, f"before{k}").outputs[0] for k, value in enumerate(inputs)]
    if first is not None:
        inputs[:1] = [first]
    outputs = [Value(f"{op_type}_out{k}", type_) for k in range(max(1, schema.min_outputs))]
    node = Node(op_type, inputs, outputs=outputs, name=op_type)
    if inside:
        outputs[0].uses.append(_relu(outputs[0], "after"))
        for value in inputs:
            value.uses.append(node)
    return node


def _relu(value: Value, name: str) -> Node:
    return Node("Relu", [value], outputs=[Value(f"{name}_out", value.type)], name=name)


def _may_start(owner: SubgraphProperty, op_type: str) -> bool:
    """Return whether a region may start at a node of an operator."""
    nodes = [
        plain_node(op_type, shape, inside=inside) for inside in (False, True) for shape in SHAPES
    ]
    # A selector may take integers or half precision only.
    nodes += [plain_node(op_type, SHAPES[1], dtype=dtype) for dtype in _OTHER_DTYPES]
    for node in nodes:
        try:
            if owner.create_subgraph_selector().select(node):
                return True
        except Exception:
            return True
    return False


def _grows(owner: SubgraphProperty, start: str, name: str) -> bool:
    """Return whether a region that starts at ``start`` grows to a consumer or producer ``name``."""
    for shape in SHAPES:
        above = plain_node(start, shape)
        below = plain_node(name, shape, above.outputs[0])
        try:
            selector = owner.create_subgraph_selector()
            if selector.select(above) and selector.select_output(above, below):
                return True
            above = plain_node(name, shape)
            below = plain_node(start, shape, above.outputs[0])
            selector = owner.create_subgraph_selector()
            if selector.select(below) and selector.select_input(below, above):
                return True
        except Exception:
            return True
    return False
