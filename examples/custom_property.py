"""A property with its own kernel: chains of Mul, Add and Relu become one numba loop.

This is a complete accelerator: a stateful selector finds the chains, the property replaces each by
a subgraph node, and the node's operator runs the compiled loop. Scale and shift of each channel are
weights; the weight cache converts them to the form of the kernel once for each version. Run:
``python examples/custom_property.py``.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

import subgraph as sg
from subgraph import ops

CHAIN = ("Mul", "Add", "Relu")


class ChainSelector(sg.SubgraphSelector):
    """Follow Mul -> Add -> Relu as long as each result has a single consumer."""

    def __init__(self) -> None:
        self.found: list[sg.Node] = []

    def select(self, node: sg.Node) -> bool:
        """Start at a Mul by a weight."""
        self.found = [node]
        return node.op_type == CHAIN[0] and self._by_weight(node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
        """Accept the next operator of the chain."""
        if node is not self.found[-1] or len(self.found) == len(CHAIN):
            return False
        if len(node.outputs[0].consumers) > 1:
            return sg.Reject("its result has other consumers")
        if output_node.op_type != CHAIN[len(self.found)]:
            return False
        if output_node.op_type == "Add" and not self._by_weight(output_node):
            return sg.Reject("no operand of Add is a weight")
        self.found.append(output_node)
        return True

    def filter(self, candidates: list[sg.Node]) -> list[sg.Node]:
        """Accept whole chains only."""
        return candidates if len(candidates) == len(CHAIN) else []

    @staticmethod
    def _by_weight(node: sg.Node) -> bool:
        return any(value is not None and value.parameter is not None for value in node.inputs)


@numba.njit(nogil=True, cache=True)
def scale_shift_relu(x: Any, scale: Any, shift: Any, out: Any) -> None:
    """Compute ``max(x * scale + shift, 0)`` for rows of x (rows, channels)."""
    rows, channels = x.shape
    for i in range(rows):
        for j in range(channels):
            value = x[i, j] * scale[j] + shift[j]
            out[i, j] = value if value > 0 else 0


class ScaleShiftRelu(sg.SubgraphOp):
    """The operator of a chain: one pass over memory instead of three."""

    def forward(self, inputs: list[Any]) -> list[np.ndarray[Any, Any]]:
        """Run on arrays; weights are passed as Parameters."""
        x = next(value for value in inputs if isinstance(value, np.ndarray))
        scale, shift = (value for value in inputs if isinstance(value, sg.Parameter))
        channels = x.shape[-1]

        def row(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            return np.ascontiguousarray(np.broadcast_to(array, (channels,)))

        out = np.empty_like(x)
        scale_shift_relu(
            np.ascontiguousarray(x).reshape(-1, channels),
            self.weights.get(f"row{channels}", row, scale),
            self.weights.get(f"row{channels}", row, shift),
            out.reshape(-1, channels),
        )
        return [out]


@sg.register_property("scale_shift_relu")
class ScaleShiftReluProperty(sg.SubgraphProperty):
    """Finds the chains and gives each its operator."""

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        """Return a new selector."""
        return ChainSelector()

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node | sg.Reject:
        """Return the node that replaces a chain, or the reason why the kernel does not fit."""
        if len(subgraph.outputs) > 1:
            return sg.Reject("a result inside of the chain is used elsewhere")
        weights = [value.parameter for value in subgraph.inputs if value.parameter is not None]
        if len(weights) != 2 or len(subgraph.inputs) != 3:
            return sg.Reject("it is not one value, a scale and a shift")
        (x,) = (value.type for value in subgraph.inputs if value.parameter is None)
        if not isinstance(x, sg.TensorType) or not x.shape or x.dtype != "float32":
            return sg.Reject(f"its input is {x}, which has no rows of float32")
        if any(weight.array.shape not in {(), (1,), x.shape[-1:]} for weight in weights):
            return sg.Reject("a scale or shift is no row of one number for each channel")
        return sg.subgraph_node(
            subgraph, op=ScaleShiftRelu(subgraph), name=f"scale_shift_relu_{subgraph_id}"
        )


def main() -> None:
    """Build a small graph, run it with and without the property, and compare the results."""
    rng = np.random.default_rng(0)
    x = sg.input("x", shape=("N", 64), dtype="float32")
    value = x
    for layer in range(3):
        scale = sg.parameter(f"scale{layer}", rng.standard_normal(64).astype(np.float32))
        shift = sg.parameter(f"shift{layer}", rng.standard_normal(64).astype(np.float32))
        value = ops.Relu(ops.Add(ops.Mul(value, scale), shift))
    graph = sg.Graph(inputs=[x], outputs=[value], name="chains")
    cut = sg.optimize_for(graph, "scale_shift_relu")
    array = rng.standard_normal((1000, 64)).astype(np.float32)
    plain = sg.compile_model(graph, "REFERENCE")(x=array)[0]
    fused = sg.compile_model(cut, "REFERENCE")(x=array)[0]
    print(f"{len(graph.nodes)} nodes became {len(cut.nodes)}")
    print(f"largest difference {np.abs(plain - fused).max():.2e}")


if __name__ == "__main__":
    main()
