"""Undo a partition, make a region of a whole graph, and extract a region as a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from subgraph.errors import PartitionError, require_type
from subgraph.graph.graph import Graph, Node, Value, copy_nodes, copy_value
from subgraph.operators.subgraph_op import (
    AFFINITY,
    ASKED_AFFINITY,
    REGION,
    SubgraphOp,
    runs_by_default,
    subgraph_node,
)
from subgraph.partition.record import KEY, PartitionRecord, record_of

_OF_DEVICES = "AffinitySelector"  # the selector by which devices cut: devices/affinity_cut.py
Weights = Literal["inside", "inputs"]
_Chooser = Callable[[Node], bool]


def inline_subgraphs(graph: Graph) -> Graph:
    """Return the graph with the nodes of its subgraph nodes in their places, bodies included.

    This undoes a partition. Regions inside regions are inlined too, and so are calls of functions
    that ``sg.load(..., functions="keep")`` left. Inputs, outputs, parameters, nodes and values keep
    their names; a node whose name another node outside has gets that of its region before it. The
    ops of the regions are dropped, and so is the record that `explain` reads.

    Args:
        graph: The graph; it is not changed.
    """
    require_type(graph, Graph, PartitionError, "a graph")
    found = _inlined(graph, _has_subgraph)
    found.attrs.pop(KEY, None)
    return found


def without_device_regions(graph: Graph) -> Graph:
    """Return a compiled model's graph as it was before a device cut it, to compile it again.

    Regions of a user's partition stay. Nodes have again the affinity that the user gave them, if
    any, and the record that `explain` reads forgets how the device cut.
    """
    found = _inlined(graph, _is_device_region)
    for level in found.levels():
        runs = [r for r in record_of(level.attrs.pop(KEY, None)).runs if r.selector != _OF_DEVICES]
        if runs:
            level.attrs[KEY] = PartitionRecord(tuple(runs))
        for node in level.nodes:
            if node.metadata:
                asked = node.metadata.pop(ASKED_AFFINITY, None)
                node.metadata.pop(AFFINITY, None)
                if asked is not None:
                    node.metadata[AFFINITY] = asked
    return found


def without_default_regions(graph: Graph) -> Graph:
    """Return the graph with the nodes of regions that the default executor runs in their places.

    A device compiles these nodes with those around them, so that fusions and layouts reach over
    the borders of regions. Each node notes its region, for `region_of`, and takes over its affinity
    unless it has one. The record that `explain` reads stays, and so do regions with an op of their
    own.

    Args:
        graph: The graph; it stays as it is, and is returned itself if it has no such region.
    """
    nodes = (node for level in graph.levels() for node in level.nodes)
    if not any(map(_is_default_region, nodes)):
        return graph
    return _inlined(graph, _is_default_region, note_regions=True)


def _has_subgraph(node: Node) -> bool:
    return node.subgraph is not None


def _is_device_region(node: Node) -> bool:
    return node.subgraph is not None and AFFINITY in (node.metadata or {})


def _is_default_region(node: Node) -> bool:
    return node.subgraph is not None and runs_by_default(node.op)


def _inlined(
    graph: Graph,
    goes: _Chooser,
    *,
    note_regions: bool = False,
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Graph:
    values: dict[Value, Value] = {}
    inputs = [copy_value(v, values) for v in graph.inputs]
    captures = [copy_value(v, values) for v in graph.captures]
    inlining = _Inlining(graph, goes, note_regions=note_regions)
    inlining.add(graph, values, notes=notes)
    return Graph(
        inputs,
        inlining.outputs(graph, values),
        graph.name,
        nodes=inlining.nodes,
        captures=captures,
        attrs=graph.attrs,
        opsets=inlining.opsets,
        metadata=graph.metadata,
        doc=graph.doc,
    )


class _Inlining:
    """Copies of the nodes of a graph, with those of chosen subgraph nodes in their places."""

    def __init__(self, graph: Graph, goes: _Chooser, *, note_regions: bool) -> None:
        """Begin without nodes.

        Args:
            graph: The graph.
            goes: Returns whether a subgraph node is replaced by the nodes of its inner graph.
            note_regions: Whether these nodes note the outermost subgraph node that held them.
        """
        self.nodes: list[Node] = []
        self.opsets = dict(graph.opsets)
        self._goes = goes
        self._note_regions = note_regions
        self._node_names = {node.name for node in graph.nodes if not goes(node)}
        self._value_names = {value.name for value in graph.values()}

    def add(
        self,
        graph: Graph,
        values: dict[Value, Value],
        holder: str = "",
        notes: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Copy the nodes of ``graph``.

        Args:
            graph: The graph, or the inner graph of a subgraph node.
            values: Copies of the graph's inputs, captures and, for an inner graph, outputs.
            holder: Name of the subgraph node; "" for the graph itself.
            notes: Metadata for the nodes: the name of the outermost subgraph node around them, and
                the affinity of the innermost one that has any.
        """
        for node in graph.nodes:
            if node.subgraph is not None and self._goes(node):
                own = {k: v for k, v in (node.metadata or {}).items() if k == AFFINITY}
                notes_inside = {REGION: node.name, **notes, **own}
                self._inline(node, node.subgraph, values, notes_inside)
                continue
            # Values that are known before the node is copied are results of the region. They have
            # the names of the outer values, which must not change.
            known = {value for value in node.outputs if value in values}
            (copy,) = copy_nodes((node,), values)
            for key, held in node.attrs.items():
                if isinstance(held, Graph):
                    copy.attrs[key] = _inlined(
                        held, self._goes, note_regions=self._note_regions, notes=notes
                    )
            if self._note_regions and notes:
                copy.metadata = {**notes, **(copy.metadata or {}), REGION: notes[REGION]}
            if holder:
                copy.name = _unique(copy.name, holder, self._node_names)
                for value in node.outputs:
                    if value not in known:
                        made = values[value]
                        made.name = _unique(made.name, holder, self._value_names)
            self.nodes.append(copy)

    def _inline(
        self, node: Node, inner: Graph, values: dict[Value, Value], notes: Mapping[str, str]
    ) -> None:
        # Every node has the version of its own operator set, so a contradiction loses nothing here;
        # on saving `onnx_format.opsets` finds versions that fit all nodes.
        self.opsets = {**inner.opsets, **self.opsets}
        # Nodes may share an inner graph: each gets copies of its own.
        inside: dict[Value, Value] = {}
        for formal, actual in zip(inner.inputs, node.inputs, strict=True):
            if actual is not None:
                inside[formal] = copy_value(actual, values)
        for formal, actual in zip(inner.outputs, node.outputs, strict=True):
            # A result takes the name of the first outer value that it stands for. An input that is
            # handed on, or a result listed twice, has a name already; an output of the graph then
            # needs an Identity (see `outputs`).
            if formal.producer is not None and formal not in inside:
                inside[formal] = copy_value(actual, values)
        self.add(inner, inside, node.name, notes)
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
    """Return ``name``, or "holder/name" if it is taken; "" lets the graph choose if both are."""
    if name in taken:
        name = f"{holder}/{name}"
        if name in taken:
            return ""
    taken.add(name)
    return name


def whole_graph(graph: Graph, device: str, make_op: Callable[[Graph], SubgraphOp]) -> Graph:
    """Return an equivalent graph of one subgraph node; ``graph`` itself if it has no nodes.

    Args:
        graph: The graph.
        device: Name of the device, for the subgraph node's affinity.
        make_op: Makes the node's op from the inner graph, whose inputs are the graph's inputs,
            then its other parameters.
    """
    if not graph.nodes:
        return graph
    inner = graph.clone()
    inputs = set(inner.inputs)
    # Weights are inputs of the node, as in MXNet, although the op may cache a reformatted copy: the
    # op sees from the Parameter's version that a weight has changed.
    weights = [v for v in inner.values() if v.parameter is not None and v not in inputs]
    # The node computes each value once. Inputs that are outputs, and outputs listed twice, are
    # restored outside.
    outputs = list(dict.fromkeys(v for v in inner.outputs if v.producer is not None))
    sources = {v: Value(v.name, v.type, parameter=v.parameter) for v in (*inner.inputs, *weights)}
    outer_outputs = inner.outputs
    inner.inputs = (*inner.inputs, *weights)
    inner.outputs = tuple(outputs)
    node = subgraph_node(
        inner,
        make_op(inner),
        graph.name,
        inputs=list(sources.values()),
        metadata={AFFINITY: device},
    )
    for value, source in zip(node.outputs, outputs, strict=True):
        value.name = source.name
    made = {**sources, **dict(zip(outputs, node.outputs, strict=True))}
    return Graph(
        list(sources.values())[: len(graph.inputs)],
        [made[v] for v in outer_outputs],
        graph.name,
        nodes=[node],
        attrs=graph.attrs,
        opsets=graph.opsets,
        metadata=graph.metadata,
        doc=graph.doc,
    )


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
    require_type(subgraph, (Node, Graph), PartitionError, "a subgraph node, or its inner graph")
    if not isinstance(weights, str) or weights not in ("inside", "inputs"):  # pyright: ignore[reportUnnecessaryIsInstance]
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
