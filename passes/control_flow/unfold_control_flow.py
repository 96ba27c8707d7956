"""The pass "UnfoldControlFlow": control flow with known conditions and counts becomes plain nodes.

The taken branch of an If, the iterations of a Loop or Scan and the items of a sequence become nodes
of the graph around, which a device runs and fuses like all others. Control flow that depends on
data stays: the default executor runs it, and each body is partitioned like a separate model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value, copy_nodes
from subgraph.graph.naming import Names
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, TensorType, numpy_dtype
from subgraph.operators.bodies import captures_of, check_node
from subgraph.operators.inference import scanned_inputs
from subgraph.operators.operator import is_random, is_speculatable, operator_of
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.operators.shape_values import LIMIT
from subgraph.operators.type_inference import infer_graph
from subgraph.passes.patterns import dtype_of, shape_of, static_size
from subgraph.transform.pass_manager import apply_pass, register_pass

from .unfold_sequences import Sequences, concerns_sequences, constant, replacement_outputs, stacked

# Costs are counted in elements that an elementwise node reads or writes; all three are estimates.
# To run one branch from Python costs as much as some ten thousand elements.
_MAX_BRANCH_COST = 32768  # of both branches together
_NODE_COST = 64  # of running a node, in addition to its elements
_MULTIPLY_ADDS_PER_ELEMENT = 16  # of a matrix product, in the time of one element
# The arrays of values that are known before a run; None for unknown elements.
Known = Mapping[Value, Array | None]


@register_pass("UnfoldControlFlow")
@attrs.frozen
class UnfoldControlFlow:
    """Replace If, Loop, Scan and sequences by plain nodes where conditions and counts are known.

    Attributes:
        limit: The most nodes that iterations of loops may add.
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read of each.
    """

    limit: int = 4000
    guards: dict[Parameter, int] = attrs.field(factory=dict[Parameter, int])

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy; in rounds, since unfolded bodies may hold control flow themselves."""
        graph = graph.clone()
        left = self.limit
        while any(_is_control_flow(node) or concerns_sequences(node) for node in graph.nodes):
            work = _Round(graph, infer_graph(graph, strict=False), self.guards, left)
            replaced = work.replacements()
            left = work.left
            if not replaced:
                break
            graph.rewire(replaced)
        # Each iteration computes again what does not depend on it; equal nodes become one.
        return graph if left == self.limit else apply_pass(graph, "CommonSubexpressionElimination")


def _is_control_flow(node: Node) -> bool:
    return not node.domain and node.op_type in ("If", "Loop", "Scan")


class _Round:
    """Finds the replacements of control flow in a graph, without a look into replaced bodies.

    Attributes:
        left: The most nodes that iterations may still add.
    """

    def __init__(self, graph: Graph, known: Known, guards: dict[Parameter, int], left: int) -> None:
        """Prepare a round.

        Args:
            graph: The graph.
            known: Arrays of values that are known before a run.
            guards: Filled as in `UnfoldControlFlow`.
            left: The most nodes that iterations may add.
        """
        self.left = left
        self._graph = graph
        self._known = known
        self._guards = guards
        self._replaced: dict[Value, Value] = {}
        # Values computed by nodes from whose sizes numbers of the present node follow, in order.
        self._measured: dict[Value, None] = {}
        # Weights of two bodies may have one name, as in the branches of an If.
        self._names = Names(value.name for value in graph.values())
        self._weights = {v.parameter: v for v in graph.values() if v.parameter is not None}
        self._sequences = Sequences(self._numbers, left)

    def replacements(self) -> dict[Value, Value]:
        """Return the new value of each output of unfolded nodes."""
        for node in self._graph.nodes:
            found: dict[Value, Value] = {}
            if concerns_sequences(node):
                found = self._sequences.follow(node, self._current)
            elif _is_control_flow(node):
                made = self._unfolded(node)
                if made is not None:
                    found = dict(zip(node.outputs, made, strict=True))
            for old, new in found.items():
                new.type = new.type or old.type
                self._replaced[old] = self._after_measured(node, new)
            self._measured.clear()
        return self._replaced

    def _after_measured(self, node: Node, value: Value) -> Value:
        """Return the value through a Required node that also takes the values of `_measured`.

        Otherwise a measured value may have no user left; the node that computes it would be
        removed, and its error with it.
        """
        measured = [self._current(other) for other in self._measured]
        self._measured.clear()
        if not measured or not isinstance(value.type, TensorType):
            return value
        name, operands = f"{node.name}.measured", [value, *measured]
        made = Node("Required", operands, name=name, domain=INTERNAL_DOMAIN)
        made.outputs[0].type = value.type
        return made.outputs[0]

    def _unfolded(self, node: Node) -> Sequence[Value] | None:
        """Return the new values of the outputs of a node; None if the node stays."""
        check_node(node)
        if node.op_type == "If":
            return self._branch(node)
        if any(_must_stay(inner) for level in node.bodies[0].levels() for inner in level.nodes):
            return None
        if node.op_type == "Loop":
            return self._loop(node, node.bodies[0])
        return None if node.version == 8 else self._scan(node, node.bodies[0])

    def _current(self, value: Value) -> Value:
        """Return the replacement of a value, or the value itself."""
        return self._replaced.get(value, value)

    def _numbers(self, value: Value | None) -> list[int] | None:
        """Return the integers or booleans of a known value; None for any other value."""
        elements = None if value is None else self._known.get(value)
        if value is None or elements is None:
            return None
        items = elements.ravel().tolist()
        if not all(isinstance(item, int) for item in items):
            return None
        self._depend_on(value)
        return [int(item) for item in items]

    def _number(self, value: Value | None) -> int | None:
        numbers = self._numbers(value)
        return numbers[0] if numbers is not None and len(numbers) == 1 else None

    def _depend_on(self, value: Value) -> None:
        """Note the parameters and the measured values from which a known value was computed."""
        work, seen = [value], {value}
        while work:
            current = work.pop()
            if current.parameter is not None:
                self._guards[current.parameter] = current.parameter.version
            node = current.producer
            if node is None:
                continue
            if operator_of(node).by_type:
                self._measured.update((v, None) for v in node.sources if v.producer is not None)
                continue
            fresh = [v for v in node.sources if v not in seen]
            work += [v for v in fresh if v.parameter is None or v.parameter.array.size <= LIMIT]
            seen.update(fresh)

    def _branch(self, node: Node) -> Sequence[Value] | None:
        taken = self._number(node.inputs[0])
        if taken is not None:
            return self._copied_branch(node, "then_branch" if taken else "else_branch", "")
        if not _is_cheap_choice(node):
            return None
        condition = node.inputs[0]
        assert condition is not None, "it is required"
        then, other = (
            self._copied_branch(node, f"{key}_branch", f".{key}") for key in ("then", "else")
        )
        # The Reshape fails for several conditions, which Where would apply to each element.
        none = constant(node, np.empty(0, np.int64))
        (one,) = replacement_outputs(node, "Reshape", [self._current(condition), none])
        chosen = [
            replacement_outputs(node, "Where", [one, *pair])[0]
            for pair in zip(then, other, strict=True)
        ]
        for k, value in enumerate(chosen):
            assert value.producer is not None, "just made"
            value.producer.name = f"{node.name}.{k}" if k else node.name
        return chosen

    def _copied_branch(self, node: Node, key: str, suffix: str) -> list[Value]:
        """Return the outputs of a copy of the branch in attribute ``key``; see `_copy`."""
        captured = node.captures[captures_of(node)[key]]
        return self._copy(node, node.attrs[key], (), captured, suffix)

    def _loop(self, node: Node, body: Graph) -> Sequence[Value] | None:
        limit, condition = node.inputs[0], node.inputs[1]
        count = self._number(limit)
        begins = 1 if condition is None else self._number(condition)
        if count is None or begins is None or not self._never_ends_early(node, body):
            return None
        count = max(count, 0) if begins else 0
        carried = [self._current(value) for value in node.inputs[2:] if value is not None]
        states = len(carried)
        if not self._has_room(body, count):
            return None
        rows: list[list[Value]] = []
        for iteration in range(count):
            inputs = [
                constant(node, np.array(iteration, np.int64)),
                constant(node, np.array(True)),
                *carried,
            ]
            results = self._copy(node, body, inputs, node.captures, f".{iteration}")
            carried = list(results[1 : 1 + states])
            rows.append(list(results[1 + states :]))
        scanned = body.outputs[1 + states :]
        made = [
            _collected(node, [row[k] for row in rows], value, 0) for k, value in enumerate(scanned)
        ]
        return [*carried, *(v for v in made if v is not None)] if None not in made else None

    def _never_ends_early(self, node: Node, body: Graph) -> bool:
        """Return whether the condition that the body computes is known to be true."""
        value = body.outputs[0]
        outer = dict(zip(body.captures, node.captures, strict=True))
        while value.producer is not None and value.producer.op_type in ("Identity", "Cast"):
            source = value.producer.inputs[0]
            assert source is not None, "it is required"
            value = source
        if value is body.inputs[1]:
            return True
        if value in outer:
            return bool(self._number(outer[value]))
        if value.parameter is not None and value.parameter.array.size == 1:
            self._guards[value.parameter] = value.parameter.version
            return bool(value.parameter.array.reshape(-1)[0])
        producer = value.producer
        if producer is None or producer.op_type != "Constant" or "value" not in producer.attrs:
            return False
        return bool(np.asarray(producer.attrs["value"]).all())

    def _scan(self, node: Node, body: Graph) -> Sequence[Value] | None:
        count = scanned_inputs(node, len(node.inputs))
        states = len(node.inputs) - count
        results = len(body.outputs) - states
        axes = tuple(node.attrs.get("scan_input_axes") or (0,) * count)
        back = tuple(node.attrs.get("scan_input_directions") or (0,) * count)
        inputs = [self._current(value) for value in node.inputs if value is not None]
        # If the scanned lengths differ, the default executor reports it.
        lengths = {_length(value, axis) for value, axis in zip(inputs[states:], axes, strict=True)}
        length = lengths.pop()
        if length is None or lengths or not self._has_room(body, length):
            return None
        carried = inputs[:states]
        rows: list[list[Value]] = []
        for iteration in range(length):
            items = [
                _item(node, value, length - 1 - iteration if backwards else iteration, axis)
                for value, axis, backwards in zip(inputs[states:], axes, back, strict=True)
            ]
            made = self._copy(node, body, [*carried, *items], node.captures, f".{iteration}")
            carried = list(made[:states])
            rows.append(list(made[states:]))
        axes = tuple(node.attrs.get("scan_output_axes") or (0,) * results)
        back = tuple(node.attrs.get("scan_output_directions") or (0,) * results)
        found = [
            _collected(node, [row[k] for row in (rows[::-1] if back[k] else rows)], v, axes[k])
            for k, v in enumerate(body.outputs[states:])
        ]
        return [*carried, *(v for v in found if v is not None)] if None not in found else None

    def _has_room(self, body: Graph, count: int) -> bool:
        """Return whether ``count`` iterations fit into `left`, and subtract them if so."""
        nodes = (node for level in body.levels() for node in level.nodes)
        added = count * (1 + sum(node.op_type != "Constant" for node in nodes))
        if added > self.left:
            return False
        self.left -= added
        return True

    def _copy(
        self,
        node: Node,
        body: Graph,
        inputs: Sequence[Value],
        captured: Sequence[Value],
        suffix: str,
    ) -> list[Value]:
        """Copy the nodes of a body for one iteration, and return the values of its outputs.

        Args:
            node: The control-flow node.
            body: One of its bodies.
            inputs: Values for the inputs of the body.
            captured: Outer values of the body's captures.
            suffix: Appended to the names of nodes: ".0" for the first iteration, ".then" for a
                branch that is computed beside the other, "" for the only branch.
        """
        values = dict(zip(body.inputs, inputs, strict=True))
        values.update(zip(body.captures, map(self._current, captured), strict=True))
        for value in body.values():
            weight = value.parameter
            if weight is not None and value not in values:
                if weight not in self._weights:
                    name = self._names.fresh(value.name)
                    self._weights[weight] = Value(name, value.type, parameter=weight)
                values[value] = self._weights[weight]
        copies = copy_nodes(body.nodes, values)
        origin = (node.metadata or {}).get("origin", node.name)
        for copy in copies:
            copy.name = f"{node.name}/{copy.name}{suffix}"
            copy.metadata = {**(copy.metadata or {}), "origin": origin}
            for value in copy.outputs:
                value.name = ""
                if node.op_type != "If":
                    value.type = None  # the type of a state may change between iterations
        return [values[value] for value in body.outputs]


def _is_cheap_choice(node: Node) -> bool:
    """Return whether to compute both branches of an If and choose one costs less than to run one.

    Both branches must be able to run: some operators fail for values that the condition excludes.
    """
    condition = node.inputs[0]
    type_ = None if condition is None else condition.type
    if not isinstance(type_, TensorType) or type_.shape is None:
        return False
    work = 0
    for body in node.bodies:
        for inner in body.nodes:
            if inner.bodies or not is_speculatable(inner):
                return False
            sizes = [_elements(value) for value in (*inner.sources, *inner.outputs)]
            if inner.op_type == "Slice":
                sizes[-1] = sizes[-1] or sizes[0]  # a slice has at most the elements of its input
            if None in sizes:
                return False
            known = [size for size in sizes if size is not None]
            work += _cost(inner.op_type, known) + _NODE_COST
    pairs = list(zip(*(body.outputs for body in node.bodies), strict=True))
    return work <= _MAX_BRANCH_COST and all(
        a.type == b.type and _elements(a) is not None for a, b in pairs
    )


def _cost(op_type: str, sizes: Sequence[int]) -> int:
    """Return the cost of a node, in elements of an elementwise node; see `_MAX_BRANCH_COST`.

    Args:
        op_type: The operator.
        sizes: Number of elements of each input and output, in order.
    """
    match op_type:
        case "Constant":
            return max(sizes)
        case "Gemm" | "MatMul":
            # [M, K] x [K, N] -> [M, N]: the square root of MK * KN * MN is M * K * N.
            multiply_adds = math.isqrt(math.prod((*sizes[:2], sizes[-1])))
            return max(*sizes, multiply_adds // _MULTIPLY_ADDS_PER_ELEMENT)
        case _:
            return sum(sizes)


def _elements(value: Value) -> int | None:
    """Return the number of elements of a value; None if unknown, or for strings."""
    return None if dtype_of(value) == "string" else static_size(shape_of(value))


def _must_stay(node: Node) -> bool:
    """Return whether copies of a node would differ: it keeps state or draws random numbers."""
    return node.op is not None or is_random(node)


def _length(value: Value, axis: int) -> int | None:
    shape = shape_of(value)
    length = None if shape is None else shape[axis]
    return length if isinstance(length, int) else None


def _item(node: Node, value: Value, position: int, axis: int) -> Value:
    index = constant(node, np.array(position, np.int64))
    return replacement_outputs(node, "Gather", [value, index], axis=axis)[0]


def _collected(node: Node, items: Sequence[Value], inner: Value, axis: int) -> Value | None:
    """Return the items of all iterations along a new axis.

    Args:
        node: The Loop or Scan.
        items: The item of each iteration.
        inner: The body's output, whose type is used if there is no iteration.
        axis: Position of the new axis.

    Returns:
        The stacked value; None if there is no iteration and the shape of an item is unknown.
    """
    if items:
        return stacked(node, items, axis)
    type_ = inner.type
    if not isinstance(type_, TensorType) or not type_.is_static or type_.shape is None:
        return None
    dims = [dim for dim in type_.shape if isinstance(dim, int)]
    dims.insert(axis % (len(dims) + 1), 0)
    return constant(node, np.empty(dims, numpy_dtype(type_.dtype)))
