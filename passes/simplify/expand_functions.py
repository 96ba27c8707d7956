"""The pass "ExpandFunctions": operators that are defined by others become these.

Those of the standard by the function bodies of its schemas, where no device has kernels for them;
those that ONNX Runtime has added by the bodies in ``ops/contrib_*.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from subgraph.errors import ShapeError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.functions import expanded, function_of
from subgraph.operators.inference import is_checked_in_runs
from subgraph.operators.operator import operator_key
from subgraph.operators.reference import function_outputs
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.transform.pass_manager import register_pass

# Operators without a kernel of their own, whose function bodies have kernels.
_EXPANDED = frozenset(
    {
        *("BlackmanWindow", "CausalConvWithState", "CenterCropPad", "HammingWindow", "HannWindow"),
        *("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss", "SwiGLU"),
    }
)


@register_pass("ExpandFunctions")
def expand_functions(graph: Graph) -> Graph:
    """Return a copy in which losses, windows, SwiGLU and more are the operators they stand for."""
    graph = graph.clone()
    while True:
        replaced: dict[Value, Value] = {}
        for node in graph.nodes:
            if any(value in replaced for value in node.inputs if value is not None):
                # What stands for it is made of what stands for its inputs.
                node.inputs = tuple(v if v is None else replaced.get(v, v) for v in node.inputs)
            made = list(zip_longest(node.outputs, _stand_ins(node)[: len(node.outputs)]))
            # A node whose stand-ins leave out what somebody uses would stay, and be expanded again.
            if any(new is None and (old.uses or graph.is_output(old)) for old, new in made):
                continue
            replaced.update((old, new) for old, new in made if new is not None)
        if not replaced:
            return graph
        graph.rewire(replaced)  # a body may hold such operators again


def _required(node: Node) -> Value:
    """Return the first input of a node, in a form that only holds where all inputs fit it."""
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
    """Return a node's inputs, the first one in a form that only holds where all fit the node."""
    if function_of(node) is None or not is_checked_in_runs(node):
        return node.inputs
    return [_required(node), *node.inputs[1:]]


def _stand_ins(node: Node) -> Sequence[Value | None]:
    """Return what stands for each output of a node; nothing for one that stays."""
    if not node.domain and node.op_type in _EXPANDED:
        return function_outputs(node, [_required(node), *node.inputs[1:]]) or ()
    try:
        return expanded(node, _checked_inputs(node)) or ()
    except (ShapeError, UnsupportedOpError):
        return ()  # the reference knows the types then, or says what is wrong
