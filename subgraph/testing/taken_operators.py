"""Which operators a property takes: the answers of its selector for a node of each operator."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.operators.schema import get_schema, standard_operators
from subgraph.partition.property import SubgraphProperty, property_from

# Selectors often ask for a rank: an image and a matrix satisfy most of them.
SHAPES: tuple[tuple[int, ...], ...] = ((1, 2, 4, 4), (2, 3))
# Many ask for a weight, and for its shape: a kernel, a bias, a factor.
_WEIGHTS: dict[tuple[int, ...], tuple[tuple[int, ...], ...]] = {
    SHAPES[1]: ((3, 3), (3,), ()),
    SHAPES[0]: ((2, 2, 3, 3), (2, 2, 1, 1), (2, 1, 1)),
}
_OTHER_DTYPES = ("int64", "int8", "uint8", "float16", "float64", "bool")
# Each start operator is asked about all others, some 200. A selector that starts at more operators
# than this usually has a list of operators, all of which are starts (estimate).
_MAX_STARTS = 8  # start operators for which growth to every other operator is tried
_MAX_CHAIN = 5  # operators of the longest chain that is tried (estimate)


@attrs.frozen
class Taken:
    """What a selector takes.

    Attributes:
        names: The operators at which a region may start or to which it may grow, sorted.
        starts: Those at which it may start, sorted.
        chains: Operators of a region that has grown, each a consumer of the one before, and the
            rank of their operands.
    """

    names: tuple[str, ...] = ()
    starts: tuple[str, ...] = ()
    chains: tuple[tuple[tuple[str, ...], int], ...] = ()


@attrs.frozen
class _Step:
    """A node of a chain: its operator, and the shapes of its operands and weights."""

    name: str
    shape: tuple[int, ...]
    weight: tuple[int, ...] | None = None
    below: bool = True  # whether the region grew to it as a consumer, not as a producer


def taken_operators(prop: Any) -> Taken:
    """Return the operators of ONNX's domain at which a region may start or to which it may grow.

    The nodes have no attributes. Their operands are inputs of float32, weights, results of other
    nodes, or of other dtypes. An operator at whose node the selector raises counts as taken,
    because the selector may need attributes.

    Args:
        prop: A value of ``graph.attrs["subgraph_property"]``.
    """
    owner = copy.copy(property_from(prop))
    with suppress(Exception):  # an empty graph may be refused; the checks use real graphs
        owner.pre_partition(Graph(), {})
    names = [name for name, domain in standard_operators() if not domain]
    starts = {name: step for name in names if (step := _start(owner, name)) is not None}
    taken = set(starts)
    chains: list[tuple[_Step, ...]] = []
    grown: list[tuple[_Step, ...]] = [(step,) for step in starts.values()]
    for _ in range(_MAX_CHAIN - 1):
        longer: list[tuple[_Step, ...]] = []
        for path in grown[:_MAX_STARTS]:
            for name in names:
                step = None if name in taken else _growth(owner, path, name)
                if step is not None:
                    taken.add(name)
                    longer.append((*path, step))
        chains += longer
        grown = longer
    begun = {path[:-1] for path in chains}  # which go on in longer chains
    whole = tuple((_in_order(p), len(p[0].shape)) for p in chains if p not in begun)
    return Taken(tuple(sorted(taken)), tuple(sorted(starts)), whole)


def _in_order(path: tuple[_Step, ...]) -> tuple[str, ...]:
    """Return the operators of a chain, from the first producer to the last consumer."""
    above = [step.name for step in path[:0:-1] if not step.below]
    return (*above, path[0].name, *(step.name for step in path[1:] if step.below))


def plain_node(
    op_type: str,
    shape: tuple[int, ...],
    first: Value | None = None,
    *,
    dtype: str = "float32",
    inside: bool = False,
    weight: tuple[int, ...] | None = None,
) -> Node:
    """Return a node without attributes on operands of one shape.

    Args:
        op_type: An operator of ONNX's own domain.
        shape: Shape of the operands, and of the outputs as far as types are stated.
        first: The first operand; None: a new value.
        dtype: Dtype of the operands and outputs.
        inside: Whether each operand is the result of a node of its own, and a node uses the result.
        weight: Shape of the operands after the first, which are weights; None: they are none.
    """
    schema = get_schema(op_type)
    count = max(schema.min_inputs, min(schema.max_inputs, 2))
    type_ = TensorType(dtype, shape)
    inputs = [Value(f"{op_type}_in{k}", type_) for k in range(count)]
    if weight is not None:
        held = _parameter(dtype, weight)
        inputs[1:] = [Value(f"w{k}", held.type, parameter=held) for k in range(1, count)]
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


@cache
def _parameter(dtype: str, shape: tuple[int, ...]) -> Parameter:
    return Parameter("w", np.ones(shape, numpy_dtype(dtype)))


def _relu(value: Value, name: str) -> Node:
    return Node("Relu", [value], outputs=[Value(f"{name}_out", value.type)], name=name)


def _start(owner: SubgraphProperty, op_type: str) -> _Step | None:
    """Return a node of an operator at which a region may start; None if there is none."""
    for node, step in _start_nodes(op_type):
        try:
            if owner.create_subgraph_selector().select(node):
                return step
        except Exception:
            return step
    return None


def _start_nodes(op_type: str) -> Iterator[tuple[Node, _Step]]:
    for inside in (False, True):
        for shape in SHAPES:
            yield plain_node(op_type, shape, inside=inside), _Step(op_type, shape)
    # A selector may take integers or half precision only.
    for dtype in _OTHER_DTYPES:
        yield plain_node(op_type, SHAPES[1], dtype=dtype), _Step(op_type, SHAPES[1])
    if get_schema(op_type).max_inputs > 1:
        for shape, weights in _WEIGHTS.items():
            for weight in weights:
                node = plain_node(op_type, shape, weight=weight)
                yield node, _Step(op_type, shape, weight)


def _growth(owner: SubgraphProperty, path: tuple[_Step, ...], name: str) -> _Step | None:
    """Return the step by which a region that has grown along ``path`` grows to operator ``name``.

    None: it grows neither to a consumer nor to a producer with this operator.
    """
    weights: list[tuple[int, ...] | None] = [None]
    if get_schema(name).max_inputs > 1:
        weights += _WEIGHTS[path[0].shape]
    # The last node is asked first without weights, for a start in both shapes.
    shapes = SHAPES if len(path) == 1 and path[0].weight is None else (path[0].shape,)
    for shape in shapes:
        for below in (True, False):
            for weight in weights if shape == path[0].shape else [None]:
                step = _Step(name, shape, weight, below)
                try:
                    if _accepts(owner, (attrs.evolve(path[0], shape=shape), *path[1:], step)):
                        return step
                except Exception:
                    return step
    return None


def _accepts(owner: SubgraphProperty, path: tuple[_Step, ...]) -> bool:
    """Return whether a region starts at the first step and grows along the others."""
    above = [step for step in path[:0:-1] if not step.below]
    nodes: dict[_Step, Node] = {}
    last: Value | None = None
    for step in (*above, path[0], *(step for step in path[1:] if step.below)):
        node = plain_node(step.name, step.shape, last, weight=step.weight)
        if last is not None:
            last.uses.append(node)
        nodes[step], last = node, node.outputs[0]
    selector = owner.create_subgraph_selector()
    if not selector.select(nodes[path[0]]):
        return False
    top = bottom = nodes[path[0]]
    for step in path[1:]:
        node = nodes[step]
        ask = selector.select_output if step.below else selector.select_input
        if not ask(bottom if step.below else top, node):
            return False
        if step.below:
            bottom = node
        else:
            top = node
    return True
