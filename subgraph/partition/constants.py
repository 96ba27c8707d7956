"""Constants as weights: a region's op gets constants as Parameters.

Constants are the outputs of Constant nodes, and of nodes that depend only on these: for example
ConstantOfShape, or a Cast or Transpose of a constant. While a property cuts a graph, their values
carry a Parameter, so that selectors see an initializer. A constant that a region uses is replaced
by its Parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.operators.evaluation import evaluate
from subgraph.operators.operator import is_random

_VALUES = ("value", "value_float", "value_floats", "value_int", "value_ints")
# Index of the operand that is a shape, axes or repeats. A Parameter there counts as a constant,
# since inferred types depend on its content.
_SHAPE_OPERAND = {"ConstantOfShape": 0, "Expand": 1, "Reshape": 1, "Tile": 1, "Unsqueeze": 1}
# Operators whose result may be constant although no input comes from a constant node.
_FIRST_CONSTANTS = frozenset({"Constant", *_SHAPE_OPERAND})


def constant_array(node: Node) -> Array | None:
    """Return the array of a Constant node; None for other nodes, and for Constants of strings."""
    if node.op_type != "Constant" or node.domain:
        return None
    for key in _VALUES:
        if key in node.attrs:
            held = node.attrs[key]
            if key == "value":
                return np.asarray(held)
            return np.asarray(held, np.float32 if "float" in key else np.int64)
    return None


def constant_nodes(graph: Graph) -> list[Node]:
    """Return the nodes of ``graph`` whose only output is constant, in topological order."""
    if _FIRST_CONSTANTS.isdisjoint([node.op_type for node in graph.nodes]):
        return []
    inputs = set(graph.inputs)
    known: set[Value] = set()
    found: list[Node] = []
    for node in graph.nodes:
        if not known and node.op_type not in _FIRST_CONSTANTS:
            continue
        if len(node.outputs) == 1 and _is_constant(node, known, inputs):
            known.update(node.outputs)
            found.append(node)
    return found


def _is_constant(node: Node, known: set[Value], inputs: set[Value]) -> bool:
    if node.op_type == "Constant":
        return constant_array(node) is not None
    shape = _SHAPE_OPERAND.get(node.op_type)
    count = 0
    for position, value in enumerate(node.inputs):
        if value is None or value in known:
            count += value is not None
        elif position == shape and value.parameter is not None and value not in inputs:
            count += 1
        else:
            return False
    plain = not node.domain and node.subgraph is None and not node.captures
    return bool(count) and plain and not is_random(node) and not node.bodies


def constant_arrays(nodes: Sequence[Node]) -> dict[Value, Array]:
    """Return the arrays that `constant_nodes` compute, by value.

    Nodes that fail are left out: a failure is reported when the model runs.
    """
    known: dict[Value, Array] = {}
    for node in nodes:
        held = constant_array(node)
        if held is not None:
            known[node.outputs[0]] = held
            continue
        arrays = [_operand(value, known) for value in node.inputs]
        if any(a is None and v is not None for a, v in zip(arrays, node.inputs, strict=True)):
            continue
        try:
            results = evaluate(node, arrays)
        except SubgraphError:
            continue
        if isinstance(results[0], np.ndarray):
            known[node.outputs[0]] = results[0]
    return known


def _operand(value: Value | None, known: Mapping[Value, Array]) -> Array | None:
    if value is None or value in known:
        return None if value is None else known[value]
    return None if value.parameter is None else value.parameter.array


def constants_to_weights(
    graph: Graph, names: AbstractSet[str], taken: AbstractSet[str] = frozenset()
) -> set[str]:
    """Replace constants of ``graph``, which is changed, by Parameters with the values' names.

    Args:
        graph: The graph.
        names: Names of nodes among `constant_nodes`. A node stays if it computes a graph output or
            strings, or if it fails.
        taken: Names that new parameters must not have, besides those of the graph's parameters.

    Returns:
        The names of the nodes that have been replaced.
    """
    nodes = constant_nodes(graph)
    names = names & {node.name for node in nodes}
    if not names:
        return set()
    known = {*taken, *graph.parameters}
    replaced: dict[Value, Value] = {}
    lifted: set[str] = set()
    for value, array in constant_arrays(nodes).items():
        assert value.producer is not None, "only results of nodes are computed"
        name = value.producer.name
        if name not in names or graph.is_output(value) or array.dtype == object:
            continue
        lifted.add(name)
        # A constant that only replaced constants use needs no Parameter.
        if any(user.name not in names for user in value.uses):
            parameter = Parameter.adopt(_unique(value.name, known), array)
            replaced[value] = Value(value.name, parameter.type, parameter=parameter)
    graph.rewire(replaced)
    return lifted


class ConstantWeights:
    """The constants of one graph that regions may use as weights.

    Attributes:
        numbers: Positions in the graph of the nodes that compute constants; no region has them.
    """

    def __init__(self, graph: Graph, skip: AbstractSet[str], names: set[str]) -> None:
        """Find the constants of ``graph``.

        Args:
            graph: The graph.
            skip: Names of nodes that do not become weights.
            names: Names of all parameters; the names of new ones are added.
        """
        self.numbers: list[int] = []
        self._weights: dict[int, Parameter] = {}
        found = [node for node in constant_nodes(graph) if node.name not in skip]
        if not found:
            return
        number = {node: k for k, node in enumerate(graph.nodes)}
        arrays = constant_arrays(found)
        for value, array in arrays.items():
            assert value.producer is not None, "only results of nodes are computed"
            self.numbers.append(number[value.producer])
            used = any(node.outputs[0] not in arrays for node in value.uses)
            # A constant that is a graph output stays a node, which has the output's name.
            if used and not graph.is_output(value) and array.dtype != object:
                parameter = Parameter.adopt(_unique(value.name, names), array)
                self._weights[number[value.producer]] = parameter

    def __bool__(self) -> bool:
        return bool(self._weights)

    def show(self, nodes: Sequence[Node]) -> None:
        """Attach the Parameters to the values of the constants, for selectors and the cut."""
        for number, parameter in self._weights.items():
            nodes[number].outputs[0].parameter = parameter

    def hide(self, nodes: Sequence[Node]) -> None:
        """Remove the Parameters that `show` has attached."""
        for number in self._weights:
            nodes[number].outputs[0].parameter = None

    def take(
        self, taken: AbstractSet[Parameter | None], nodes: Sequence[Node]
    ) -> dict[Value, Value]:
        """Return replacements of the constants that regions use, and forget these constants.

        Args:
            taken: Parameters that regions use.
            nodes: The graph's nodes by number.

        Returns:
            A value over the Parameter for each value of these constants.
        """
        replaced: dict[Value, Value] = {}
        for number, parameter in list(self._weights.items()):
            if parameter in taken:
                old = nodes[number].outputs[0]
                replaced[old] = Value(old.name, parameter.type, parameter=parameter)
                del self._weights[number]
        return replaced


def _unique(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is in ``taken``, and add it there."""
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique
