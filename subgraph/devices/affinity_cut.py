"""Partition of a graph by the affinities of its nodes: each region is for one device.

For each device, a property whose selector is "the node's affinity is this device" cuts regions by
the ``hetero`` strategy. The regions get their ops later, when the devices compile them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import AFFINITY, DefaultSubgraphOp, subgraph_node
from subgraph.partition.property import SubgraphProperty
from subgraph.partition.replace import Cut, Cutter, replace_regions
from subgraph.partition.selector import Reject, SubgraphSelector
from subgraph.transform.pass_manager import apply_pass

REFERENCE = "REFERENCE"  # its nodes are not cut: the default executor runs them


def affinities_in(graph: Graph) -> Iterable[str]:
    """Yield the affinity of each node of a graph that has one."""
    for node in graph.nodes:
        name = (node.metadata or {}).get(AFFINITY)
        if name is not None:
            yield name


class CutOp(DefaultSubgraphOp):
    """Placeholder op of a region until its device has compiled it."""


class NodeSelector(SubgraphSelector):
    """Selects nodes by a function of the node alone, wherever they are connected."""

    def __init__(self, select: Callable[[Node], bool | Reject]) -> None:
        """Select the nodes for which ``select`` answers True."""
        self._select = select

    def select(self, node: Node) -> bool | Reject:
        """Return the function's answer."""
        return self._select(node)

    def select_input(self, node: Node, input_node: Node) -> bool | Reject:
        """Return the function's answer for the producer."""
        return self._select(input_node)

    def select_output(self, node: Node, output_node: Node) -> bool | Reject:
        """Return the function's answer for the consumer."""
        return self._select(output_node)


class AffinityProperty(SubgraphProperty):
    """Replaces the regions of one device by subgraph nodes that the device will compile.

    Attributes:
        name: Name of the device.
    """

    constant_weights = False  # devices fold constants; `place_following` lifts the others

    def __init__(self, device: str) -> None:
        """Cut for ``device``."""
        self.name = self._device = device

    def create_subgraph_selector(self) -> SubgraphSelector:
        """Return a selector of the device's nodes that are no subgraph nodes yet."""
        return NodeSelector(
            lambda node: (
                node.subgraph is None and (node.metadata or {}).get(AFFINITY) == self._device
            )
        )

    def create_subgraph_node(self, subgraph: Graph, subgraph_id: int) -> Node:
        """Return a subgraph node with a `CutOp`."""
        return self.make_node(subgraph, f"{self._device}_{subgraph_id}")

    def make_node(self, subgraph: Graph, name: str) -> Node:
        """Return a subgraph node with a `CutOp` and the given name."""
        return subgraph_node(subgraph, CutOp(subgraph), name, metadata={AFFINITY: self._device})


def cut_by_affinity(graph: Graph, devices: Sequence[str]) -> Graph:
    """Return the graph with a subgraph node for each region of these devices.

    Args:
        graph: The graph; its bodies and attributes are changed.
        devices: Names of the devices in order of priority.
    """
    properties = [AffinityProperty(name) for name in devices]
    if not properties:
        return graph
    _cut_whole_bodies(graph, properties)
    # OpenVINO's order takes the largest regions first, and every region costs transfers.
    return apply_pass(graph, "PartitionGraph", properties=properties, strategy="hetero")


def _cut_whole_bodies(graph: Graph, properties: Sequence[AffinityProperty]) -> None:
    """Make one region of each body whose nodes are all for one device, connected or not.

    A loop's counter and condition are seldom connected to its computation; as separate regions,
    each would add a step to every iteration.
    """
    by_home = {property.name: property for property in properties}
    count = 0
    for level in graph.levels():
        for node in level.nodes:
            if not node.attrs or node.subgraph is not None:
                continue
            for key, body in node.attrs.items():
                if isinstance(body, Graph) and not any(n.subgraph is not None for n in body.nodes):
                    homes = set(affinities_in(body))
                    owner = by_home.get(homes.pop()) if len(homes) == 1 else None
                    if owner is not None:
                        node.attrs[key] = _as_region(body, owner, f"{owner.name}_body_{count}")
                        count += 1
                    else:
                        _leave_identities_to_executor(body)


def _leave_identities_to_executor(body: Graph) -> None:
    """Let the executor pass on inputs that are outputs of a body: that is faster than a region."""
    for node in body.nodes:
        if node.op_type == "Identity" and not node.domain:
            ends = node.inputs[0] is not None and node.inputs[0].producer is None
            if ends and not any(value.consumers for value in node.outputs):
                node.metadata = {**(node.metadata or {}), AFFINITY: REFERENCE}


def _as_region(body: Graph, owner: AffinityProperty, name: str) -> Graph:
    piece = Cutter(body).cut_out(body.nodes, name)
    if piece is None:
        return body
    made = owner.make_node(piece.inner, name)
    made.inputs = tuple(piece.inputs)
    return replace_regions(body, [Cut(body.nodes, piece, made)])[0]
