"""The pass "ExpandFunctions": operators that the standard defines by others become these."""

from __future__ import annotations

from subgraph.graph import Graph, Node, Value
from subgraph.pass_manager import register_pass
from subgraph.reference import function_outputs

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
            if not node.domain and node.op_type in _EXPANDED:
                replaced.update(_expanded(node))
        if not replaced:
            return graph
        graph.rewire(replaced)  # a body may hold such operators again


def _expanded(node: Node) -> dict[Value, Value]:
    """Return what stands for each output of a node."""
    made = function_outputs(node)
    if made is None:
        return {}
    pairs = zip(node.outputs, made, strict=False)
    return {old: new for old, new in pairs if new is not None}
