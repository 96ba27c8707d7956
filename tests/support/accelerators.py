"""A model, an accelerator's property and its op, for tests of saved partitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array


class CountingOp(sg.SubgraphOp):
    """Runs its region on REFERENCE and counts its calls."""

    calls = 0

    def forward(self, inputs: list[Any]) -> list[Array]:
        CountingOp.calls += 1
        return [np.asarray(r) for r in sg.DefaultSubgraphOp(self.subgraph).forward(inputs)]


class Accelerator(sg.SubgraphProperty):
    """Takes MatMul and Relu, not the node that it was told to avoid."""

    level = 1
    seen: tuple[str, ...] = ()

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return Chosen()

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node | None:
        op = CountingOp(subgraph)
        op.keep = self.level
        return sg.subgraph_node(subgraph, op=op, name=f"accelerated_{subgraph_id}")

    def pre_partition(self, graph: sg.Graph, options: Mapping[str, Any]) -> None:
        self.level = options.get("level", 1)
        self.seen = tuple(node.op_type for node in graph.nodes)


class Chosen(sg.SubgraphSelector):
    def select(self, node: sg.Node) -> bool | sg.Reject:
        return node.op_type in ("MatMul", "Relu") or sg.Reject(f"{node.op_type} is too slow")

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool | sg.Reject:
        return self.select(input_node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
        return self.select(output_node)


def network() -> sg.Graph:
    x = sg.input("x", ("N", 4))
    w = sg.parameter("w", np.arange(16, dtype=np.float32).reshape(4, 4) / 16)
    h = ops.Relu(ops.MatMul(x, w, name="product"), name="relu")
    h = ops.Sin(h, name="sin")
    return sg.Graph([x], [ops.Relu(ops.MatMul(h, w, name="more"), name="end")], name="network")


def regions(graph: sg.Graph) -> list[sg.Node]:
    return [node for node in graph.nodes if node.subgraph is not None]


def by_file(graph: sg.Graph) -> sg.Graph:
    return sg.load(sg.to_onnx(graph).SerializeToString())


def by_text(graph: sg.Graph) -> sg.Graph:
    return sg.parse(sg.print_graph(graph, data="all"))


ARRAY = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


def run(graph: sg.Graph, array: Array = ARRAY) -> Array:
    result: Array = sg.compile_model(graph, "REFERENCE")(array)[0]
    return result
