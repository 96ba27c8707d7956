"""REFERENCE: runs every operator by its reference implementation.

All other devices are tested against it. It runs the nodes that no other device supports.
"""

from __future__ import annotations

from typing import Any

from subgraph.devices.device import Config, Device, DeviceList
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import runs_by_default
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.settings import DeviceOptions


class ReferenceDevice(Device):
    """Runs graphs node by node in Python."""

    without_regions = True

    def supports(self, node: Node, options: DeviceOptions) -> bool:
        """Return True for every node."""
        return True

    def _own_op_reason(self, node: Node) -> str:
        return ""  # the default executor calls such ops

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Return a model that the default executor runs node by node, without a partition."""
        from subgraph.devices.export import region_nodes
        from subgraph.devices.fallback import add_fallback

        work, options = graph.clone(), self.options_for(config)
        for node in region_nodes(work):
            if not runs_by_default(node.op):
                add_fallback(node, DeviceList([self], {}, options))
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
