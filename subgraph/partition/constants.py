"""Constants as weights: a region's op gets constants as Parameters.

Constants are the outputs of Constant nodes, and of nodes that depend only on these: for example
ConstantOfShape, or a Cast, Transpose or Split of a constant. A body has the constants that it
captures, too. While a property cuts a graph, their values carry a Parameter, so that selectors see
an initializer. A constant that a region uses is replaced by its Parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array
from subgraph.operators.operator import is_random, operator_of
from subgraph.operators.reference import evaluate

_VALUES = ("value", "value_float", "value_floats", "value_int", "value_ints")
_CAPTURE = -1  # stands in a place (see `ConstantWeights`) for the number of a node


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


def constant_nodes(graph: Graph, captured: AbstractSet[Value] = frozenset()) -> list[Node]:
    """Return the nodes of ``graph`` whose outputs are constant, in topological order.

    Args:
        graph: The graph.
        captured: The captures of the graph, a body, that are constant.
    """
    # Operators whose result may be constant although no input comes from a constant node.
    kinds = {(node.op_type, node.domain): node for node in graph.nodes}
    first = {kind for kind, node in kinds.items() if _may_be_first(node)}
    # Many graphs have no constants but their weights, and need no walk.
    if not captured and not first:
        return []
    inputs = set(graph.inputs)
    known = set(captured)
    found: list[Node] = []
    for node in graph.nodes:
        if not known and (node.op_type, node.domain) not in first:
            continue
        if _is_constant(node, known, inputs):
            known.update(node.outputs)
            found.append(node)
    return found


def _may_be_first(node: Node) -> bool:
    return node.op_type == "Constant" or operator_of(node).shape_at is not None


def _is_constant(node: Node, known: set[Value], inputs: set[Value]) -> bool:
    if node.op_type == "Constant":
        return constant_array(node) is not None
    # A Parameter there counts as a constant, since inferred types depend on its content.
    shape = operator_of(node).shape_at
    count = 0
    for position, value in enumerate(node.inputs):
        if value is None or value in known:
            count += value is not None
        elif position == shape and value.parameter is not None and value not in inputs:
            count += 1
        else:
            return False
    plain = not node.domain and node.subgraph is None and not node.captures
    # A node without operands is no constant: its operator may compute another result in every run.
    return bool(count) and plain and not is_random(node) and not node.bodies


def constant_arrays(
    nodes: Sequence[Node], captured: Mapping[Value, Array] | None = None
) -> dict[Value, Array]:
    """Return the arrays that `constant_nodes` compute, by value.

    Nodes that fail are left out: a failure is reported when the model runs.

    Args:
        nodes: The result of `constant_nodes`.
        captured: The arrays of constant captures.
    """
    known = dict(captured or {})
    found: dict[Value, Array] = {}
    for node in nodes:
        for value, array in zip(node.outputs, _results(node, known), strict=False):
            if isinstance(array, np.ndarray):
                known[value] = found[value] = array
    return found


def _results(node: Node, known: Mapping[Value, Array]) -> Sequence[Any]:
    """Return the arrays of a node's outputs; none if the node fails."""
    held = constant_array(node)
    if held is not None:
        return (held,)
    arrays = [_operand(value, known) for value in node.inputs]
    if any(a is None and v is not None for a, v in zip(arrays, node.inputs, strict=True)):
        return ()
    try:
        return evaluate(node, arrays)
    except SubgraphError:
        return ()


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
    arrays = constant_arrays(nodes)
    lifted = {
        node.name
        for node in nodes
        if node.name in names and all(_may_be_weight(v, arrays, graph) for v in node.outputs)
    }
    replaced: dict[Value, Value] = {}
    for value, array in arrays.items():
        assert value.producer is not None, "only results of nodes are computed"
        # A constant that only replaced constants use needs no Parameter.
        if value.producer.name in lifted and any(n.name not in lifted for n in value.uses):
            parameter = Parameter.adopt(_unique(value.name, known), array)
            replaced[value] = _over(value, parameter)
    graph.rewire(replaced)
    return lifted


def _may_be_weight(value: Value, arrays: Mapping[Value, Array], graph: Graph) -> bool:
    """Return whether a Parameter can replace a value of ``graph``.

    A constant that is a graph output stays a node, which has the output's name.
    """
    return value in arrays and arrays[value].dtype != object and not graph.is_output(value)


def _over(value: Value, parameter: Parameter) -> Value:
    """Return a value of the same name over the Parameter."""
    return Value(value.name, parameter.type, parameter=parameter)


class ConstantWeights:
    """The constants of one graph that regions may use as weights.

    A constant is known by its place, which stays the same while regions are replaced: the number of
    its node and the position among the node's outputs, or `_CAPTURE` and the position among the
    captures.

    Attributes:
        numbers: Positions in the graph of the nodes that compute constants; no region has them.
    """

    def __init__(
        self,
        graph: Graph,
        nodes: Sequence[Node],
        skip: AbstractSet[str],
        names: set[str],
        outside: Mapping[Value, Parameter],
    ) -> None:
        """Find the constants of ``graph``.

        Args:
            graph: The graph.
            nodes: Its nodes by number.
            skip: Names of nodes that do not become weights.
            names: Names of all parameters; the names of new ones are added.
            outside: The Parameters of constant captures, if the graph is a body.
        """
        self._weights = {
            (_CAPTURE, position): outside[value]
            for position, value in enumerate(graph.captures)
            if value in outside
        }
        found = [n for n in constant_nodes(graph, outside.keys()) if n.name not in skip]
        self.numbers: list[int] = []
        if not found:
            return
        number = {node: k for k, node in enumerate(nodes)}
        arrays = constant_arrays(found, {value: p.array for value, p in outside.items()})
        for node in found:
            if any(value in arrays for value in node.outputs):
                self.numbers.append(number[node])
            if not all(_may_be_weight(value, arrays, graph) for value in node.outputs):
                continue
            several = len(node.outputs) > 1  # then all are replaced together, so that the node goes
            for position, value in enumerate(node.outputs):
                used = any(v not in arrays for user in value.uses for v in user.outputs)
                if used or (several and value.uses):
                    parameter = Parameter.adopt(_unique(value.name, names), arrays[value])
                    self._weights[number[node], position] = parameter

    def __bool__(self) -> bool:
        return bool(self._weights)

    def keep(self, graph: Graph, nodes: Sequence[Node]) -> None:
        """Forget the constants whose nodes have left the graph or are in a region now.

        Args:
            graph: The graph as it is now.
            nodes: Its nodes by number; the node of a region has the numbers of its members.
        """

        def stays(number: int) -> bool:
            node = nodes[number]
            return node.subgraph is None and node.graph is graph

        self.numbers = [number for number in self.numbers if stays(number)]
        self._weights = {
            place: parameter
            for place, parameter in self._weights.items()
            if place[0] == _CAPTURE or stays(place[0])
        }

    def values(self, graph: Graph, nodes: Sequence[Node]) -> Iterator[tuple[Value, Parameter]]:
        """Yield the constants' values with their Parameters.

        Args:
            graph: The graph as it is now.
            nodes: Its nodes by number.
        """
        for place, parameter in self._weights.items():
            yield _at(place, graph, nodes), parameter

    def show(self, graph: Graph, nodes: Sequence[Node]) -> None:
        """Attach the Parameters to the values of the constants, for selectors and the cut."""
        for value, parameter in self.values(graph, nodes):
            value.parameter = parameter

    def hide(self, graph: Graph, nodes: Sequence[Node]) -> None:
        """Remove the Parameters that `show` has attached."""
        for value, _ in self.values(graph, nodes):
            value.parameter = None

    def take(
        self, taken: AbstractSet[Parameter | None], graph: Graph, nodes: Sequence[Node]
    ) -> dict[Value, Parameter]:
        """Return Parameters by values of the nodes whose constants regions use; forget these.

        Args:
            taken: Parameters that regions use.
            graph: The graph as it is now.
            nodes: Its nodes by number.
        """
        # The node of a taken constant leaves the graph, so all its outputs are replaced. A capture
        # is replaced by `driver._Target.replace_captures`, from the graph that has the constant.
        makers = {place[0] for place, parameter in self._weights.items() if parameter in taken}
        own = [place for place in self._weights if place[0] in makers - {_CAPTURE}]
        return {_at(place, graph, nodes): self._weights.pop(place) for place in own}


def _at(place: tuple[int, int], graph: Graph, nodes: Sequence[Node]) -> Value:
    number, position = place
    return graph.captures[position] if number == _CAPTURE else nodes[number].outputs[position]


def replace_by_weights(graph: Graph, weights: Mapping[Value, Parameter]) -> None:
    """Replace values of ``graph``, which is changed, by Parameters, in its bodies too.

    A body gets a value of its own over the Parameter, in place of the capture. A capture that is an
    output of its body stays.

    Args:
        graph: The graph.
        weights: The Parameters by values of the graph.
    """
    if not weights:
        return
    levels: list[tuple[Graph, Mapping[Value, Parameter]]] = [(graph, weights)]
    for level, known in levels:
        for node in level.nodes:
            if not known.keys().isdisjoint(node.captures):
                levels += _drop_captures(node, known)
    for level, known in levels:
        level.rewire({value: _over(value, parameter) for value, parameter in known.items()})


def _drop_captures(
    node: Node, known: Mapping[Value, Parameter]
) -> Iterator[tuple[Graph, dict[Value, Parameter]]]:
    """Drop captures of the values in ``known``; yield the bodies with their Parameters by capture.

    The captures that a body lost are still used in it.
    """
    outer = iter(node.captures)
    remaining: list[Value] = []
    for body in node.bodies:
        pairs = list(zip(body.captures, outer, strict=False))
        inner = {v: known[o] for v, o in pairs if o in known and not body.is_output(v)}
        body.captures = tuple([v for v, _ in pairs if v not in inner])
        remaining += [o for v, o in pairs if v not in inner]
        if inner:
            yield body, inner
    node.captures = tuple(remaining)


def _unique(name: str, taken: set[str]) -> str:
    """Return the name, with a number if it is in ``taken``, and add it there."""
    unique, number = name, 0
    while unique in taken:
        number += 1
        unique = f"{name}_{number}"
    taken.add(unique)
    return unique
