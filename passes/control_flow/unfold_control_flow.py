"""The pass "UnfoldControlFlow": where a condition or a number of turns is known, plain nodes stay.

The taken branch of an If, the turns of a Loop or Scan and the items of a sequence then are nodes of
the graph around, which a device runs and fuses as all others. What depends on data stays as it is:
the default executor runs it, each body cut for the devices by itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from subgraph.graph.graph import Graph, Node, Value, copy_nodes
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, TensorType, numpy_dtype
from subgraph.operators.bodies import check_node
from subgraph.operators.inference import scanned_inputs
from subgraph.operators.operator import is_random
from subgraph.operators.shape_values import LIMIT
from subgraph.operators.type_inference import infer_graph
from subgraph.transform.pass_manager import apply_pass, register_pass

from .unfold_sequences import Sequences, concerns_sequences, constant, made_for, stacked

# Operators that take whatever they are given; of whole numbers some divide by zero.
_OF_FLOATS = frozenset({"Div", "Pow"})
_HARMLESS = _OF_FLOATS | {
    *("Abs", "Add", "And", "Cast", "Constant", "Equal", "Erf", "Exp", "Gemm", "Greater"),
    *("Identity", "Less", "MatMul", "Max", "Min", "Mul", "Neg", "Not", "Or", "ReduceMean"),
    *(
        "ReduceSum",
        "Relu",
        "Reshape",
        "Sigmoid",
        "Slice",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Sum",
        "Tanh",
        "Transpose",
        "Unsqueeze",
        "Where",
    ),
}
# Numbers that nodes touch: what a choice may cost, when running a branch by itself costs as much as
# some ten thousand, and a node in itself.
_CHEAP, _CALL = 32768, 64
_OF_PRODUCT = 16  # multiply-adds of a product in the time of one number
Known = Mapping[Value, Array | None]


@register_pass("UnfoldControlFlow")
@attrs.frozen
class UnfoldControlFlow:
    """Replace If, Loop, Scan and sequences by the nodes that they come to, where that is known.

    Attributes:
        limit: How many nodes the turns of loops may add.
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read.
    """

    limit: int = 4000
    guards: dict[Parameter, int] = attrs.field(factory=dict[Parameter, int])

    def __call__(self, graph: Graph) -> Graph:
        """Return a copy; what a body held shows once it stands outside, so it takes rounds."""
        graph = graph.clone()
        left = self.limit
        while any(_is_control_flow(node) or concerns_sequences(node) for node in graph.nodes):
            work = _Round(graph, infer_graph(graph, strict=False), self.guards, left)
            replaced = work.replacements()
            left = work.left
            if not replaced:
                break
            graph.rewire(replaced)
        # Turns of a loop do over what does not depend on the turn.
        return graph if left == self.limit else apply_pass(graph, "CommonSubexpressionElimination")


def _is_control_flow(node: Node) -> bool:
    return not node.domain and node.op_type in ("If", "Loop", "Scan")


class _Round:
    """What can be unfolded of a graph as it stands."""

    def __init__(self, graph: Graph, known: Known, guards: dict[Parameter, int], left: int) -> None:
        self.left = left
        self._graph = graph
        self._known = known
        self._guards = guards
        self._replaced: dict[Value, Value] = {}
        self._weights = {v.parameter: v for v in graph.values() if v.parameter is not None}
        self._sequences = Sequences(self._numbers, left)

    def replacements(self) -> dict[Value, Value]:
        """Return what stands for each value that goes."""
        for node in self._graph.nodes:
            if concerns_sequences(node):
                self._replaced.update(self._sequences.follow(node, self._now))
            elif _is_control_flow(node):
                made = self._unfolded(node)
                if made is not None:
                    for old, new in zip(node.outputs, made, strict=True):
                        new.type = new.type or old.type
                        self._replaced[old] = new
        return self._replaced

    def _unfolded(self, node: Node) -> Sequence[Value] | None:
        """Return what stands for the outputs of a node, None if it has to stay."""
        check_node(node)
        if node.op_type == "If":
            return self._branch(node)
        if any(_must_stay(inner) for level in node.bodies[0].levels() for inner in level.nodes):
            return None
        if node.op_type == "Loop":
            return self._loop(node, node.bodies[0])
        return None if node.version == 8 else self._scan(node, node.bodies[0])

    def _now(self, value: Value) -> Value:
        return self._replaced.get(value, value)

    def _numbers(self, value: Value | None) -> list[int] | None:
        """Return the whole numbers or truths that a value is known to hold."""
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
        """Note the parameters that a known value was computed from."""
        work, seen = [value], {value}
        while work:
            current = work.pop()
            if current.parameter is not None:
                self._guards[current.parameter] = current.parameter.version
            node = current.producer
            if node is None or node.op_type in ("Shape", "Size"):
                continue
            fresh = [v for v in node.sources if v not in seen]
            work += [v for v in fresh if v.parameter is None or v.parameter.array.size <= LIMIT]
            seen.update(fresh)

    def _branch(self, node: Node) -> Sequence[Value] | None:
        taken = self._number(node.inputs[0])
        if taken is not None:
            return self._copied_branch(node, "then_branch" if taken else "else_branch", "")
        if not _is_choice(node):
            return None
        condition = node.inputs[0]
        assert condition is not None, "it is required"
        then, other = (
            self._copied_branch(node, f"{key}_branch", f".{key}") for key in ("then", "else")
        )
        # More conditions than one are an error, and not a choice for each element.
        none = constant(node, np.empty(0, np.int64))
        (one,) = made_for(node, "Reshape", [self._now(condition), none])
        chosen = [
            made_for(node, "Where", [one, *pair])[0] for pair in zip(then, other, strict=True)
        ]
        for k, value in enumerate(chosen):
            assert value.producer is not None, "just made"
            value.producer.name = f"{node.name}.{k}" if k else node.name
        return chosen

    def _copied_branch(self, node: Node, key: str, mark: str) -> list[Value]:
        outer = iter(node.captures)
        for name, body in node.attrs.items():
            if isinstance(body, Graph):
                captured = [next(outer) for _ in body.captures]
                if name == key:
                    return self._copy(node, body, (), captured, mark)
        raise AssertionError("it is required")

    def _loop(self, node: Node, body: Graph) -> Sequence[Value] | None:
        limit, start = node.inputs[0], node.inputs[1]
        turns = self._number(limit)
        going = 1 if start is None else self._number(start)
        if turns is None or going is None or not self._goes_on(node, body):
            return None
        turns = max(turns, 0) if going else 0
        carried = [self._now(value) for value in node.inputs[2:] if value is not None]
        states = len(carried)
        if not self._take(body, turns):
            return None
        rows: list[list[Value]] = []
        for turn in range(turns):
            given = [
                constant(node, np.array(turn, np.int64)),
                constant(node, np.array(True)),
                *carried,
            ]
            results = self._copy(node, body, given, node.captures, f".{turn}")
            carried = list(results[1 : 1 + states])
            rows.append(list(results[1 + states :]))
        scanned = body.outputs[1 + states :]
        made = [
            _collected(node, [row[k] for row in rows], value, 0) for k, value in enumerate(scanned)
        ]
        return [*carried, *(v for v in made if v is not None)] if None not in made else None

    def _goes_on(self, node: Node, body: Graph) -> bool:
        """Return whether the body never ends the loop before its last turn."""
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
        given = [self._now(value) for value in node.inputs if value is not None]
        # Lengths that may differ are the default executor's to compare.
        lengths = {_length(value, axis) for value, axis in zip(given[states:], axes, strict=True)}
        turns = lengths.pop()
        if turns is None or lengths or not self._take(body, turns):
            return None
        carried = given[:states]
        rows: list[list[Value]] = []
        for turn in range(turns):
            items = [
                _item(node, value, turns - 1 - turn if backwards else turn, axis)
                for value, axis, backwards in zip(given[states:], axes, back, strict=True)
            ]
            made = self._copy(node, body, [*carried, *items], node.captures, f".{turn}")
            carried = list(made[:states])
            rows.append(list(made[states:]))
        axes = tuple(node.attrs.get("scan_output_axes") or (0,) * results)
        back = tuple(node.attrs.get("scan_output_directions") or (0,) * results)
        found = [
            _collected(node, [row[k] for row in (rows[::-1] if back[k] else rows)], v, axes[k])
            for k, v in enumerate(body.outputs[states:])
        ]
        return [*carried, *(v for v in found if v is not None)] if None not in found else None

    def _take(self, body: Graph, turns: int) -> bool:
        """Return whether the turns may be unfolded; then there is less left for the following."""
        nodes = (node for level in body.levels() for node in level.nodes)
        added = turns * (1 + sum(node.op_type != "Constant" for node in nodes))
        if added > self.left:
            return False
        self.left -= added
        return True

    def _copy(
        self, node: Node, body: Graph, given: Sequence[Value], captured: Sequence[Value], mark: str
    ) -> list[Value]:
        """Return what stands for the outputs of a body after one turn on these inputs.

        The mark is for the names of nodes: the turn's, or that of one branch beside another.
        """
        values = dict(zip(body.inputs, given, strict=True))
        values.update(zip(body.captures, map(self._now, captured), strict=True))

        def weight(value: Value) -> Value:
            assert value.parameter is not None, "all else is captured"
            known = self._weights.setdefault(value.parameter, value)
            if known is value:
                known = Value(value.name, value.type, parameter=value.parameter)
                self._weights[value.parameter] = known
            values[value] = known
            return known

        copies = copy_nodes(body.nodes, values, weight)
        origin = (node.metadata or {}).get("origin", node.name)
        for copy in copies:
            copy.name = f"{node.name}/{copy.name}{mark}"
            copy.metadata = {**(copy.metadata or {}), "origin": origin}
            for value in copy.outputs:
                value.name = ""
                if node.op_type != "If":
                    value.type = None  # what holds for one turn need not for another
        return [values.get(value) or weight(value) for value in body.outputs]


def _is_choice(node: Node) -> bool:
    """Return whether an If costs less when both branches are computed, and then one is chosen.

    They must be able to run: some operators refuse values that the condition keeps from them.
    """
    condition = node.inputs[0]
    type_ = None if condition is None else condition.type
    if not isinstance(type_, TensorType) or type_.shape is None:
        return False
    work = 0
    for body in node.bodies:
        for inner in body.nodes:
            if inner.domain or inner.op_type not in _HARMLESS or inner.bodies:
                return False
            sizes = [_elements(value) for value in (*inner.sources, *inner.outputs)]
            if inner.op_type == "Slice":
                sizes[-1] = sizes[-1] or sizes[0]  # it takes no more than there is
            floats = all(_is_float(value) for value in inner.outputs)
            if None in sizes or (inner.op_type in _OF_FLOATS and not floats):
                return False
            known = [size for size in sizes if size is not None]
            work += _work(inner.op_type, known) + _CALL
    pairs = list(zip(*(body.outputs for body in node.bodies), strict=True))
    return work <= _CHEAP and all(a.type == b.type and _elements(a) is not None for a, b in pairs)


def _work(op_type: str, sizes: Sequence[int]) -> int:
    """Return what a node costs, in numbers that a node of elements would touch meanwhile."""
    match op_type:
        case "Constant":
            return max(sizes)
        case "Gemm" | "MatMul":
            multiply_adds = math.isqrt(math.prod((*sizes[:2], sizes[-1])))
            return max(*sizes, multiply_adds // _OF_PRODUCT)
        case _:
            return sum(sizes)


def _is_float(value: Value) -> bool:
    return isinstance(value.type, TensorType) and "float" in value.type.dtype


def _elements(value: Value) -> int | None:
    """Return how many numbers a value has, None if nobody knows or it has none."""
    type_ = value.type
    if not isinstance(type_, TensorType) or not type_.is_static or type_.dtype == "string":
        return None
    return math.prod(dim for dim in type_.shape or () if isinstance(dim, int))


def _must_stay(node: Node) -> bool:
    """Return whether a node may stand in one place only: it keeps state, or draws numbers."""
    return node.op is not None or is_random(node)


def _length(value: Value, axis: int) -> int | None:
    type_ = value.type
    if not isinstance(type_, TensorType) or type_.shape is None:
        return None
    length = type_.shape[axis]
    return length if isinstance(length, int) else None


def _item(node: Node, value: Value, position: int, axis: int) -> Value:
    index = constant(node, np.array(position, np.int64))
    return made_for(node, "Gather", [value, index], axis=axis)[0]


def _collected(node: Node, items: Sequence[Value], inner: Value, axis: int) -> Value | None:
    """Return a value's items of all turns along a new axis, None if nobody knows their shape."""
    if items:
        return stacked(node, items, axis)
    type_ = inner.type
    if not isinstance(type_, TensorType) or not type_.is_static or type_.shape is None:
        return None
    dims = [dim for dim in type_.shape if isinstance(dim, int)]
    dims.insert(axis % (len(dims) + 1), 0)
    return constant(node, np.empty(dims, numpy_dtype(type_.dtype)))
