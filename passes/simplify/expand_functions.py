"""The pass "ExpandFunctions": operators that are defined by other operators are expanded.

Standard operators without kernels are expanded by the function bodies of their ONNX schemas,
operators of ONNX Runtime by the bodies in ``ops/contrib``.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import zip_longest

from subgraph.errors import ShapeError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.functions import expanded, function_of
from subgraph.operators.inference import is_checked_in_runs
from subgraph.operators.operator import operator_key, operator_of
from subgraph.operators.reference import function_outputs
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.transform.pass_manager import register_pass


@register_pass("ExpandFunctions")
def expand_functions(graph: Graph, only: Collection[str] | None = None) -> Graph:
    """Return a copy in which losses, windows, SwiGLU and others are expanded.

    Args:
        graph: The graph; it is not changed.
        only: Names of the operators to expand; None: all.
    """
    graph = graph.clone()
    while True:
        replaced: dict[Value, Value] = {}
        for node in graph.nodes:
            if only is not None and node.op_type not in only:
                continue
            if any(value in replaced for value in node.inputs if value is not None):
                # The expansion of a node takes the expansions of its inputs.
                node.inputs = tuple(v if v is None else replaced.get(v, v) for v in node.inputs)
            made = list(zip_longest(node.outputs, _expansion(node)[: len(node.outputs)]))
            # A node with a used output that the body does not define would be expanded forever.
            if any(new is None and (old.uses or graph.is_output(old)) for old, new in made):
                continue
            replaced.update((old, new) for old, new in made if new is not None)
        if not replaced:
            return graph
        graph.rewire(replaced)  # a body may hold such operators again


def _required(node: Node) -> Value:
    """Return the first input of a node through a check of all its operands.

    The check, a "Required" node, fails in a run whose operands violate the node's requirements.
    """
    made = Node(
        "Required",
        node.inputs,
        name=f"{node.name}.required",
        domain=INTERNAL_DOMAIN,
        version=node.version,
        attrs={**node.attrs, "required_of": operator_key(node.op_type, node.domain)},
        metadata=node.metadata,
    )
    first = node.inputs[0]
    made.outputs[0].type = None if first is None else first.type
    return made.outputs[0]


def _checked_inputs(node: Node) -> Sequence[Value | None]:
    """Return a node's inputs, the first one through a check if runs must check the operands."""
    if function_of(node) is None or not is_checked_in_runs(node):
        return node.inputs
    # The body reads its first input through the check, so that its result depends on the check.
    return [_required(node), *node.inputs[1:]]


def _expansion(node: Node) -> Sequence[Value | None]:
    """Return the replacement of each output of a node; none for a node that stays."""
    if operator_of(node).by_body:
        return function_outputs(node, [_required(node), *node.inputs[1:]]) or ()
    try:
        return expanded(node, _checked_inputs(node)) or ()
    except (ShapeError, UnsupportedOpError):
        return ()  # the node stays: the reference runs it or reports the error
