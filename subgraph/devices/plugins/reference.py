"""REFERENCE: runs every operator by its definition; slow, and right.

Every other device is tested against it, and the nodes that no other device takes run here.
"""

from __future__ import annotations

from typing import Any

from subgraph.devices.device import Config, Device
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import runs_by_default
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.settings import DeviceOptions


class ReferenceDevice(Device):
    """The definition of every operator, node by node in Python."""

    def supports(self, node: Node, options: DeviceOptions) -> bool:
        """Take every node."""
        return True

    def _own_op_reason(self, node: Node) -> str:
        return ""  # the default executor walks over them

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Prepare the graph as it is: the default executor walks it node by node."""
        from subgraph.devices.export import region_nodes
        from subgraph.devices.fallback import guard

        work, options = graph.clone(), self.options_for(config)
        for node in region_nodes(work):
            if not runs_by_default(node.op):
                guard(node, [self], {}, options)
        return CompiledModel(
            work,
            device=self.name,
            options=options,
            source=graph,
            core=self.core,
        )

    def metrics(self) -> dict[str, Any]:
        """Return the metrics."""
        return {
            **super().metrics(),
            "FULL_DEVICE_NAME": "Reference implementation of ONNX",
            "OPTIMIZATION_CAPABILITIES": ["FP64", "FP32", "FP16", "BF16", "INT8"],
            "DEVICE_ARCHITECTURE": "python",
        }
