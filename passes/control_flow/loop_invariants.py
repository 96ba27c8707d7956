"""The pass "LoopInvariants": states of loops that no iteration changes become captured values.

Exporters that know no captures (tf2onnx) carry the weights of a loop's body as states, which the
body returns as it gets them. Kernels reformat weights, but not states, ahead of a run; and the
iterations of a loop run without Python between them only if its states are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from subgraph.graph.graph import Graph, Node, Value, copy_nodes, copy_value
from subgraph.operators.bodies import check_bodies
from subgraph.operators.inference import scanned_inputs
from subgraph.transform.pass_manager import register_pass

_T = TypeVar("_T")


@register_pass("LoopInvariants")
def loop_invariants(graph: Graph) -> Graph:
    """Return a copy in which each Loop and Scan has only states that may change."""
    graph = graph.clone()
    # The outer graph first: a capture of an outer loop's body may be an inner loop's state.
    work = [graph]
    for level in work:
        replaced: dict[Value, Value] = {}
        for node in level.nodes:
            if not node.domain and node.op_type in ("Loop", "Scan") and node.version != 8:
                # A new loop takes the results of new loops before it.
                replaced |= _replaced(node, replaced)
        level.rewire(replaced)
        work.extend(body for node in level.nodes for body in node.bodies)
    return graph


class _States(NamedTuple):
    """The states of a loop that its body returns unchanged.

    Attributes:
        unchanged: Their positions among all states.
        first_input: Position of the first state among the inputs of the loop, and of its body.
        first_result: Position of the first state among the results of the body.
    """

    unchanged: list[int]
    first_input: int
    first_result: int


def _unchanged_states(node: Node) -> _States:
    (body,) = node.bodies
    # Before the states come the iteration and condition of a Loop, and the condition that its body
    # returns.
    before, returned = (2, 1) if node.op_type == "Loop" else (0, 0)
    scanned = 0 if before else scanned_inputs(node, len(node.inputs))
    unchanged = [
        k
        for k in range(len(node.inputs) - before - scanned)
        if _origin(body.outputs[returned + k]) is body.inputs[before + k]
        and node.inputs[before + k] is not None
    ]
    return _States(unchanged, before, returned)


def _replaced(node: Node, new_values: Mapping[Value, Value]) -> dict[Value, Value]:
    """Return the new value of each output of a loop with unchanged states; empty without any.

    Args:
        node: The loop.
        new_values: New values of outputs of the loops before it.
    """
    check_bodies(node)
    states = _unchanged_states(node)
    unchanged, graph = states.unchanged, node.graph
    others = [value for k, value in enumerate(node.outputs) if k not in unchanged]
    # Without a use of another output the loop would be removed, and an error in its body with it.
    used = any(value.uses or (graph is not None and graph.is_output(value)) for value in others)
    if not unchanged or not used:
        return {}
    inputs = tuple(None if value is None else new_values.get(value, value) for value in node.inputs)
    outer = {k: value for k in unchanged if (value := inputs[states.first_input + k]) is not None}
    (body,) = node.bodies
    inner, captured = _without_states(body, states, outer)
    made = Node(
        node.op_type,
        _without(inputs, states.first_input, unchanged),
        outputs=len(others),
        name=node.name,
        version=node.version,
        attrs={name: inner if value is body else value for name, value in node.attrs.items()},
        metadata=node.metadata,
        captures=[*(new_values.get(value, value) for value in node.captures), *captured],
    )
    found = {node.outputs[k]: value for k, value in outer.items()}
    for old, new in zip(others, made.outputs, strict=True):
        new.name, new.type = old.name, old.type  # `rewire` takes the name of a graph output
        found[old] = new
    return found


def _without_states(
    body: Graph, states: _States, outer: Mapping[int, Value]
) -> tuple[Graph, list[Value]]:
    """Return a copy of a loop's body that captures its unchanged states, and what it captures.

    Args:
        body: The body.
        states: The unchanged states.
        outer: The value outside of the loop of each; a parameter needs no capture.

    Returns:
        The copy, and the outer values of the captures that it has beside those of ``body``.
    """
    values = {value: Value(value.name, value.type) for value in body.inputs + body.captures}
    inside = [values[value] for value in body.captures]
    captured: list[Value] = []
    for k, value in outer.items():
        state = body.inputs[states.first_input + k]
        values[state] = Value(state.name, value.type or state.type, parameter=value.parameter)
        if value.parameter is None:
            captured.append(value)
            inside.append(values[state])
    copies = copy_nodes(body.nodes, values)
    inputs = _without(body.inputs, states.first_input, states.unchanged)
    outputs = _without(body.outputs, states.first_result, states.unchanged)
    inner = Graph(
        [values[value] for value in inputs],
        [copy_value(value, values) for value in outputs],
        body.name,
        captures=inside,
        nodes=copies,
    )
    inner.attrs = dict(body.attrs)
    return inner, captured


def _without(items: tuple[_T, ...], start: int, positions: list[int]) -> list[_T]:
    """Return the items but those at ``positions``, which count from ``start``."""
    dropped = {start + k for k in positions}
    return [item for k, item in enumerate(items) if k not in dropped]


def _origin(value: Value) -> Value:
    """Return the value of which Identity nodes make this one."""
    while (node := value.producer) is not None and (node.op_type, node.domain) == ("Identity", ""):
        source = node.inputs[0]
        assert source is not None, "it is required"
        value = source
    return value
