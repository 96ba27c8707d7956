"""The pass "LoopInvariants": states of loops that no iteration changes become captured values.

Exporters that know no captures (tf2onnx) carry the weights of a loop's body as states, which the
body returns as it gets them. Kernels reformat weights, but not states, ahead of a run; and the
iterations of a loop run without Python between them only if its states are small.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

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


def _replaced(node: Node, new_values: Mapping[Value, Value]) -> dict[Value, Value]:
    """Return the new value of each output of a loop with unchanged states; empty without any.

    Args:
        node: The loop.
        new_values: New values of outputs of the loops before it.
    """
    check_bodies(node)
    (body,) = node.bodies
    # Before the states come the iteration and condition of a Loop, and the condition that its body
    # returns.
    before, returned = (2, 1) if node.op_type == "Loop" else (0, 0)
    scanned = 0 if before else scanned_inputs(node, len(node.inputs))
    count = len(node.inputs) - before - scanned
    unchanged = [
        k
        for k in range(count)
        if _origin(body.outputs[returned + k]) is body.inputs[before + k]
        and node.inputs[before + k] is not None
    ]
    graph = node.graph
    others = [value for k, value in enumerate(node.outputs) if k not in unchanged]
    # Without a use of another output the loop would be removed, and an error in its body with it.
    used = any(value.uses or (graph is not None and graph.is_output(value)) for value in others)
    if not unchanged or not used:
        return {}
    values = {value: Value(value.name, value.type) for value in body.inputs + body.captures}
    inputs = tuple(None if value is None else new_values.get(value, value) for value in node.inputs)
    captures = [new_values.get(value, value) for value in node.captures]
    inside = [values[value] for value in body.captures]
    for k in unchanged:
        outer, state = inputs[before + k], body.inputs[before + k]
        assert outer is not None, "checked above"
        values[state] = Value(state.name, outer.type or state.type, parameter=outer.parameter)
        if outer.parameter is None:
            captures.append(outer)
            inside.append(values[state])
    copies = copy_nodes(body.nodes, values)
    changed_inputs = _without(body.inputs, before, unchanged)
    changed_outputs = _without(body.outputs, returned, unchanged)
    inner = Graph(
        [values[value] for value in changed_inputs],
        [copy_value(value, values) for value in changed_outputs],
        body.name,
        captures=inside,
        nodes=copies,
    )
    inner.attrs = dict(body.attrs)
    made = Node(
        node.op_type,
        _without(inputs, before, unchanged),
        outputs=len(node.outputs) - len(unchanged),
        name=node.name,
        version=node.version,
        attrs={name: inner if value is body else value for name, value in node.attrs.items()},
        metadata=node.metadata,
        captures=captures,
    )
    found: dict[Value, Value] = {}
    for old, new in zip(_without(node.outputs, 0, unchanged), made.outputs, strict=True):
        new.name, new.type = old.name, old.type  # `rewire` takes the name of a graph output
        found[old] = new
    for k in unchanged:
        outer = inputs[before + k]
        assert outer is not None, "checked above"
        found[node.outputs[k]] = outer
    return found


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
