"""CpuFusion: the passes that the CPU device runs over a region before it is planned."""

from __future__ import annotations

import math
from functools import partial

import attrs

from subgraph.graph.graph import Graph, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType
from subgraph.operators.shape_values import LIMIT
from subgraph.partition.property import SubgraphProperty, register_property
from subgraph.passes._patterns import FUSION_PASSES, MATCHERS, PatternProperty, Stage, fusions
from subgraph.transform.pass_manager import apply_pass, register_pass

from .elementwise import ElementwiseProperty

# What a pass is about: without any of these operators it would return a copy.
_ABOUT = {
    "BoundShapes": ("Compress", "NonMaxSuppression", "NonZero", "Unique"),
    "ConstantsToParameters": ("Constant",),
    "ReshapeFirst": ("Transpose",),
}


@register_pass("CpuFusion")
@attrs.frozen
class CpuFusion:
    """Lift constants, fold scales into weights, bound what a run finds, fuse patterns and chains.

    Attributes:
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read.
        integers: Whether QDQ models become integer operators of the CPU.
    """

    integers: bool = True
    guards: dict[Parameter, int] = attrs.field(factory=dict[Parameter, int])

    def __call__(self, graph: Graph) -> Graph:
        """Return the fused graph."""
        if self.integers:
            graph = self._fused(graph, "integers")
        graph = apply_pass(graph, ["ExpandFunctions", "IdentityElimination"])
        graph = _applied(graph, "ConstantsToParameters")
        if any(not _known(value) for value in graph.values()):
            graph = apply_pass(graph, "InferTypes", strict=False)
        for parameter in graph.parameters.values():
            # Types follow from what may be shapes and axes.
            if _may_be_shape(parameter):
                self.guards[parameter] = parameter.version
        before = graph
        if self.integers:
            graph = self._fused(graph, "quantized")
        if graph is not before:
            graph = apply_pass(graph, "CommonSubexpressionElimination")
        graph = _applied(graph, "ReshapeFirst")
        graph = apply_pass(graph, "FoldScale")
        graph = _applied(graph, "BoundShapes")
        graph = self._fused(graph, "transformer", "epilogue", "activation")
        # Afterwards: activations that were spelled out are single nodes now.
        return apply_pass(graph, "PartitionGraph", properties=[ElementwiseProperty()])

    def _fused(self, graph: Graph, *stages: Stage) -> Graph:
        """Apply the fusions of these stages: first all passes, then all patterns in one pass."""
        held = _operators(graph)
        first = [each for stage in stages for each in fusions(FUSION_PASSES, stage, held)]
        if first:
            graph = apply_pass(graph, first)
            held = _operators(graph)
        matchers = {stage: fusions(MATCHERS, stage, held) for stage in stages}
        properties = [
            PatternProperty(f"cpu_{stage}", found, self.guards)
            for stage, found in matchers.items()
            if found
        ]
        return apply_pass(graph, "PartitionGraph", properties=properties) if properties else graph


# The patterns as properties of a user, who keeps every fused node's region.
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
    """Return the operators of a graph and its bodies: looking for what is not there takes time."""
    return {node.op_type for level in graph.levels() for node in level.nodes}


def _applied(graph: Graph, name: str) -> Graph:
    """Apply a pass if the graph holds what it is about."""
    if _operators(graph).isdisjoint(_ABOUT[name]):
        return graph
    return apply_pass(graph, name)


def _known(value: Value) -> bool:
    if isinstance(value.type, TensorType):
        return value.type.shape is not None
    return value.type is not None


def _may_be_shape(parameter: Parameter) -> bool:
    type_ = parameter.type
    size = math.prod(dim for dim in type_.shape or () if isinstance(dim, int))
    return type_.dtype in ("int64", "int32") and size <= LIMIT
