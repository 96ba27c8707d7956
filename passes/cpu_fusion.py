"""CpuFusion: the passes that the CPU device runs over a region before it is planned."""

from __future__ import annotations

import math

from subgraph import records
from subgraph.graph import Graph, Value
from subgraph.known_values import LIMIT
from subgraph.parameters import Parameter
from subgraph.pass_manager import apply_pass, register_pass
from subgraph.types import TensorType

from . import fuse_epilogue, fuse_quantized, fuse_transformer
from ._patterns import PatternProperty, is_op
from .fuse_elementwise import ElementwiseProperty


@register_pass("CpuFusion")
@records.frozen
class CpuFusion:
    """Lift constants, fold scales into weights, bound what a run finds, fuse patterns and chains.

    Attributes:
        guards: Filled with the parameters whose content the result depends on, and the version
            that was read.
        integers: Whether QDQ models become integer operators of the CPU.
    """

    integers: bool = True
    guards: dict[Parameter, int] = records.field(factory=dict[Parameter, int])

    def __call__(self, graph: Graph) -> Graph:
        """Return the fused graph."""
        if self.integers and any(is_op(node, "ConvInteger") for node in graph.nodes):
            graph = apply_pass(graph, "SplitZeroPoint")
        first = ["ExpandFunctions", "IdentityElimination", "ConstantsToParameters"]
        graph = apply_pass(graph, first)
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
        graph = apply_pass(graph, "FoldPad", guards=self.guards)
        graph = apply_pass(graph, ["SinkTransposes", "FoldScale", "MixChannels", "BoundShapes"])
        properties = [
            PatternProperty("cpu_transformer", fuse_transformer.MATCHERS, self.guards),
            PatternProperty("cpu_epilogue", fuse_epilogue.MATCHERS, self.guards),
            PatternProperty("cpu_activation", fuse_transformer.ACTIVATIONS, self.guards),
        ]
        graph = apply_pass(graph, "PartitionGraph", properties=properties)
        # Afterwards: activations that were spelled out are single nodes now.
        return apply_pass(graph, "PartitionGraph", properties=[ElementwiseProperty()])


def _known(value: Value) -> bool:
    if isinstance(value.type, TensorType):
        return value.type.shape is not None
    return value.type is not None


def _may_be_shape(parameter: Parameter) -> bool:
    type_ = parameter.type
    size = math.prod(dim for dim in type_.shape or () if isinstance(dim, int))
    return type_.dtype in ("int64", "int32") and size <= LIMIT
