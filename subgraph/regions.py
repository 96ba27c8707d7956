"""Regions undone and taken out: `inline_subgraphs` and `region_model`."""

from __future__ import annotations

from typing import Literal

from subgraph.errors import PartitionError
from subgraph.graph import Graph, Node, Value
from subgraph.graph_copy import copy_node, copy_value
from subgraph.partition.record import KEY
from subgraph.subgraph_op import AFFINITY

Weights = Literal["inside", "inputs"]


def inline_subgraphs(graph: Graph) -> Graph:
    """Return the graph with the nodes of its subgraph nodes in their places, bodies included.

    This undoes a partition. Regions inside regions are inlined too, and so are calls of functions
    that ``sg.load(..., functions="keep")`` left. Inputs, outputs, parameters, nodes and values keep
    their names; a node whose name another node outside has gets that of its region before it. The
    ops of the regions are dropped, and so is the record that `explain` reads.

    Args:
        graph: The graph; it stays as it is.
    """
    return _inlined(graph, devices_only=False)


def without_device_regions(graph: Graph) -> Graph:
    """Return a compiled model's graph as it was before a device cut it, to compile it again.

    Regions of a user's partition stay; nodes forget the device that ran them.
    """
    return _inlined(graph, devices_only=True)


def _inlined(graph: Graph, *, devices_only: bool) -> Graph:
    values: dict[Value, Value] = {}
    inputs = [copy_value(v, values) for v in graph.inputs]
    captures = [copy_value(v, values) for v in graph.captures]
    inlining = _Inlining(graph, devices_only)
    inlining.add(graph, values)
    return Graph(
        inputs,
        inlining.outputs(graph, values),
        graph.name,
        nodes=inlining.nodes,
        captures=captures,
        attrs={k: v for k, v in graph.attrs.items() if devices_only or k != KEY},
        opsets=inlining.opsets,
        metadata=graph.metadata,
        doc=graph.doc,
    )


class _Inlining:
    """Copies of the nodes of a graph, with those of its subgraph nodes in their places."""

    def __init__(self, graph: Graph, devices_only: bool) -> None:
        self.nodes: list[Node] = []
        self.opsets = dict(graph.opsets)
        self._devices_only = devices_only
        self._node_names = {node.name for node in graph.nodes if not self._goes(node)}
        self._value_names = {value.name for value in graph.values()}

    def _goes(self, node: Node) -> bool:
        """Return whether the nodes of this one's inner graph take its place."""
        of_device = AFFINITY in (node.metadata or {})
        return node.subgraph is not None and (of_device or not self._devices_only)

    def add(self, graph: Graph, values: dict[Value, Value], holder: str = "") -> None:
        """Copy the nodes of ``graph``.

        Args:
            graph: The graph, or the inner graph of a subgraph node.
            values: Copies of the values that it takes from outside and gives outside.
            holder: Name of the subgraph node.
        """
        for node in graph.nodes:
            if node.subgraph is not None and self._goes(node):
                self._inline(node, node.subgraph, values)
                continue
            given = {value for value in node.outputs if value in values}
            copy = copy_node(node, values)
            for key, held in node.attrs.items():
                if isinstance(held, Graph):
                    copy.attrs[key] = _inlined(held, devices_only=self._devices_only)
            if self._devices_only and copy.metadata:
                copy.metadata.pop(AFFINITY, None)
            if holder:
                copy.name = _unique(copy.name, holder, self._node_names)
                for value in node.outputs:
                    if value not in given:
                        made = values[value]
                        made.name = _unique(made.name, holder, self._value_names)
            self.nodes.append(copy)

    def _inline(self, node: Node, inner: Graph, values: dict[Value, Value]) -> None:
        self.opsets = {**inner.opsets, **self.opsets}
        # Nodes may share an inner graph: each gets copies of its own.
        inside: dict[Value, Value] = {}
        for formal, actual in zip(inner.inputs, node.inputs, strict=True):
            if actual is not None:
                inside[formal] = copy_value(actual, values)
        for formal, actual in zip(inner.outputs, node.outputs, strict=True):
            if formal.producer is not None and formal not in inside:
                inside[formal] = copy_value(actual, values)
        self.add(inner, inside, node.name)
        for formal, actual in zip(inner.outputs, node.outputs, strict=True):
            values[actual] = copy_value(formal, inside)

    def outputs(self, graph: Graph, values: dict[Value, Value]) -> list[Value]:
        """Return the copies of the graph's outputs, each under its name."""
        found: list[Value] = []
        for value in graph.outputs:
            copy = copy_value(value, values)
            if copy.name != value.name:  # a region hands on an input, or gives one result twice
                identity = Node("Identity", [copy], version=1)
                self.nodes.append(identity)
                copy = values[value] = identity.outputs[0]
                copy.name, copy.type = value.name, value.type
            found.append(copy)
        return found


def _unique(name: str, holder: str, taken: set[str]) -> str:
    """Return a name that is free; empty, for the graph to choose, if its region's does not help."""
    if name in taken:
        name = f"{holder}/{name}"
        if name in taken:
            return ""
    taken.add(name)
    return name


def region_model(subgraph: Node | Graph, *, weights: Weights = "inside") -> Graph:
    """Return a region as a model of its own, for ``sg.compile_model``, ``sg.save``, ``sg.to_onnx``.

    Its ports have the names and the order of the inner graph's inputs and outputs. Parameters are
    shared with the region, so those inside follow every assignment.

    Args:
        subgraph: A subgraph node, or an inner graph as ``create_subgraph_node`` gets it.
        weights: "inside" keeps parameters in the model; its inputs are the other inputs of the
            region. "inputs" makes every parameter that the region takes an input, so that the model
            takes what ``SubgraphOp.forward`` gets. Parameters that only bodies of control flow use
            stay inside.

    Raises:
        PartitionError: the node is no subgraph node, or ``weights`` is neither of the two.
    """
    if weights not in ("inside", "inputs"):
        raise PartitionError(f"weights is {weights!r}; it is 'inside' or 'inputs'")
    inner = subgraph.subgraph if isinstance(subgraph, Node) else subgraph
    if inner is None:
        raise PartitionError(
            f"{subgraph!r} is no subgraph node; give one that a partition made, or its subgraph"
        )
    copy, values = inner.clone_with_map()
    inputs: list[Value] = []
    for value in inner.inputs:
        mine = values[value]
        if value.parameter is None:
            inputs.append(mine)
        elif weights == "inputs":
            mine.type, mine.parameter = value.parameter.type, None
            inputs.append(mine)
    return Graph(
        inputs,
        copy.outputs,
        subgraph.name,
        nodes=copy.nodes,
        attrs=copy.attrs,
        opsets=copy.opsets,
        doc=copy.doc,
    )
