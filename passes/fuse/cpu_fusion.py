"""CpuFusion: the passes that the CPU device runs over a region before it is planned."""

from __future__ import annotations

from functools import partial
from typing import Any

import attrs

from subgraph.graph.graph import Graph, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType
from subgraph.partition.property import SubgraphProperty, register_property
from subgraph.passes.patterns import FUSION_PASSES, MATCHERS, PatternProperty, Stage, fusions
from subgraph.transform.pass_manager import apply_pass, may_change, register_pass

from .elementwise import ElementwiseProperty
from .quantized_sums import add_residuals
from .quantized_transposed import transposed_as_products


@register_pass("CpuFusion")
@attrs.frozen
class CpuFusion:
    """Run the simplifying passes and the fusions of the CPU device in their order.

    Attributes:
        integers: Whether QDQ models become integer operators of the CPU.
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read of each.
        prefix: What names of parameters begin with that replace constants.
    """

    integers: bool = True
    guards: dict[Parameter, int] = attrs.field(factory=dict[Parameter, int])
    prefix: str = ""

    def __call__(self, graph: Graph) -> Graph:
        """Return the fused graph."""
        if self.integers:
            graph = self._fused(graph, "integers")
        graph = apply_pass(graph, ["ExpandFunctions", "IdentityElimination"])
        graph = _applied(graph, "ConstantsToParameters", prefix=self.prefix)
        if any(not _has_shape(value) for value in graph.values()):
            graph = apply_pass(graph, "InferTypes", strict=False)
        before = graph
        if self.integers:
            graph = transposed_as_products(graph, self.guards)
            graph = self._fused(graph, "quantized")
        # The quantized patterns need a conversion for each user (`split_dequantize`); the copies
        # that were not fused are merged again.
        if graph is not before:
            graph = apply_pass(graph, "CommonSubexpressionElimination")
        graph = _applied(graph, "TransposeLast")
        graph = _applied(graph, "ReshapeFirst")
        graph = apply_pass(graph, "FoldScale")
        graph = _applied(graph, "PadDynamicOutputs")
        graph = self._fused(graph, "transformer", "epilogue", "activation")
        # Last, since activations that were chains of primitives are single nodes by now.
        graph = apply_pass(graph, "PartitionGraph", properties=[ElementwiseProperty()])
        return add_residuals(graph, self.guards) if self.integers else graph

    def _fused(self, graph: Graph, *stages: Stage) -> Graph:
        """Apply the fusions of these stages: first all passes, then all patterns in one pass."""
        present = _operators(graph)
        first = [each for stage in stages for each in fusions(FUSION_PASSES, stage, present)]
        if first:
            graph = apply_pass(graph, first)
            present = _operators(graph)
        matchers = {stage: fusions(MATCHERS, stage, present) for stage in stages}
        properties = [
            PatternProperty(f"cpu_{stage}", found, self.guards)
            for stage, found in matchers.items()
            if found
        ]
        return apply_pass(graph, "PartitionGraph", properties=properties) if properties else graph


# The patterns as properties for users; there every fused node keeps its region as inner graph.
_PROPERTIES: dict[str, tuple[Stage, ...]] = {
    "cpu_transformer": ("transformer", "activation"),
    "cpu_epilogue": ("epilogue",),
    "cpu_quantized": ("quantized",),
}


def _of_stages(name: str) -> SubgraphProperty:
    stages = _PROPERTIES[name]
    return PatternProperty(name, [each for stage in stages for each in fusions(MATCHERS, stage)])


for _name in _PROPERTIES:
    register_property(_name)(partial(_of_stages, _name))


def _operators(graph: Graph) -> set[str]:
    """Return the names of the operators of a graph and its bodies."""
    return {node.op_type for level in graph.levels() for node in level.nodes}


def _applied(graph: Graph, name: str, **options: Any) -> Graph:
    """Apply a pass unless the graph has none of its operators; this saves a copy and its check."""
    return apply_pass(graph, name, **options) if may_change(name, _operators(graph)) else graph


def _has_shape(value: Value) -> bool:
    """Return whether the type of a value is known, with the rank if it is a tensor."""
    if isinstance(value.type, TensorType):
        return value.type.shape is not None
    return value.type is not None
