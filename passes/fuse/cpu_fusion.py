"""CpuFusion: the passes that the CPU device runs over a region before it is planned."""

from __future__ import annotations

import math

import attrs

from subgraph.graph.graph import Graph, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType
from subgraph.operators.shape_values import LIMIT
from subgraph.passes._patterns import PatternProperty, is_op
from subgraph.transform.pass_manager import apply_pass, register_pass

from . import epilogue as fuse_epilogue
from . import quantized as fuse_quantized
from . import transformer as fuse_transformer
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
        if self.integers and any(is_op(n, "QLinearMatMul", "ConvInteger") for n in graph.nodes):
            graph = apply_pass(graph, "FloatProducts")
        if self.integers and any(is_op(node, "ConvInteger") for node in graph.nodes):
            graph = apply_pass(graph, "SplitZeroPoint")
        graph = apply_pass(graph, ["ExpandFunctions", "IdentityElimination"])
        graph = _applied(graph, "ConstantsToParameters")
        if any(not _known(value) for value in graph.values()):
            graph = apply_pass(graph, "InferTypes", strict=False)
        for parameter in graph.parameters.values():
            # Types follow from what may be shapes and axes.
            if _may_be_shape(parameter):
                self.guards[parameter] = parameter.version
        if self.integers and any(is_op(node, "DequantizeLinear") for node in graph.nodes):
            quantized = PatternProperty("cpu_quantized", fuse_quantized.MATCHERS, self.guards)
            graph = apply_pass(graph, "SplitDequantize")
            graph = apply_pass(graph, "PartitionGraph", properties=[quantized])
            graph = apply_pass(graph, "CommonSubexpressionElimination")
        graph = _applied(graph, "ReshapeFirst")
        graph = apply_pass(graph, "FoldScale")
        graph = _applied(graph, "BoundShapes")
        graph = apply_pass(graph, "PartitionGraph", properties=self._properties(graph))
        # Afterwards: activations that were spelled out are single nodes now.
        return apply_pass(graph, "PartitionGraph", properties=[ElementwiseProperty()])

    def _properties(self, graph: Graph) -> list[PatternProperty]:
        held = _operators(graph)
        rows = (
            ("cpu_transformer", fuse_transformer.MATCHERS, fuse_transformer.NEEDED),
            ("cpu_epilogue", fuse_epilogue.MATCHERS, ((),)),
            ("cpu_activation", fuse_transformer.ACTIVATIONS, fuse_transformer.ACTIVATIONS_NEEDED),
        )
        return [
            PatternProperty(name, matchers, self.guards)
            for name, matchers, needed in rows
            if any(held.issuperset(row) for row in needed)
        ]


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
