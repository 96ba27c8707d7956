"""Regions that are measured as wholes, so that placement by cost counts fusion inside a device.

A library fuses the operators of a region and chooses layouts for all of them together, so that the
times of single nodes do not add up to the time of a region. A graph is therefore divided into
regions before it is measured. A region begins with a node that computes, and has the light nodes
that follow, which libraries fuse with it, or begins where a result has several users.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from subgraph.devices.placement.cost import value_bytes
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType
from subgraph.operators.operator import is_view
from subgraph.operators.subgraph_op import subgraph_node
from subgraph.partition.replace import Cut, Cutter, replace_regions

# Regions of a graph if their ends can be chosen freely. An estimate that balances the time of a
# measurement, which compiles each for every device, against the number of possible placements.
_MAX_REGIONS = 24
# A region may end where one value leaves it. Regions this many times larger end anywhere. At most
# this many times _MAX_REGIONS are measured; otherwise devices are left out. An estimate.
_LARGEST = 3
# Operators that libraries fuse with the operators that use their results.
_FUSED_WITH_NEXT = frozenset({"DequantizeLinear", "DynamicQuantizeLinear"})
# Smaller values are shapes and indices, whose transfers do not count here. An estimate.
_SMALL_BYTES = 1024


def divide(graph: Graph, supported: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    """Divide a graph into regions of consecutive nodes.

    All nodes of a region are supported by the same devices. If that makes too many regions, the
    devices with the fewest nodes are ignored, and can then run only some of the regions.

    Args:
        graph: The graph, with inferred types.
        supported: For each device the names of the nodes that it supports.

    Returns:
        The names of the nodes of each region, by the region's name. Nodes that no device supports
        are in none. A node that depends on weights alone is in the region of its first user.
    """
    heard = dict(sorted(supported.items(), key=lambda item: -len(item[1])))
    found = _divided(graph, heard)
    while len(heard) > 1 and len(found) > _LARGEST * _MAX_REGIONS:
        heard.popitem()
        found = _divided(graph, heard)
    return found


def _divided(graph: Graph, supported: Mapping[str, Collection[str]]) -> dict[str, list[str]]:
    following = _nodes_of_weights(graph)
    nodes = [node for node in graph.nodes if node not in following]
    free = _free_positions(graph, nodes)
    least = -(-sum(map(_computes, nodes)) // _MAX_REGIONS)
    regions: list[list[Node]] = []
    size, before = 0, None
    for position, node in enumerate(nodes):
        takers = _takers(node, supported)
        full = size >= least and (_computes(node) or _is_fork(node))
        if takers != before or (full and (position in free or size >= _LARGEST * least)):
            regions.append([])
            size, before = 0, takers
        if takers:
            regions[-1].append(node)
            size += _computes(node)
    names = {_name_of(region): region for region in regions if region}
    home = {node: name for name, region in names.items() for node in region}
    for node in reversed(following):
        users = [home[user] for user in node.successors() if user in home]
        name = min(users, key=list(names).index, default="")
        if name and _takers(node, supported) == _takers(names[name][-1], supported):
            home[node] = name
            names[name].append(node)
    return {name: [node.name for node in region] for name, region in names.items()}


def _takers(node: Node, supported: Mapping[str, Collection[str]]) -> tuple[str, ...]:
    return tuple(name for name, names in supported.items() if node.name in names)


def _nodes_of_weights(graph: Graph) -> dict[Node, None]:
    """Return the nodes whose results depend on weights and constants alone."""
    inputs = set(graph.inputs)
    found: dict[Node, None] = {}
    for node in graph.nodes:
        sources = (v for v in node.sources if v.producer not in found)
        if all(v.parameter is not None and v not in inputs for v in sources):
            found[node] = None
    return found


def with_regions(graph: Graph, regions: Mapping[str, Sequence[str]]) -> Graph:
    """Return the graph with one subgraph node for each region.

    Args:
        graph: The graph; it is not changed.
        regions: Names of nodes by the name of the region. A region with a node that the graph does
            not have, or without results that are used, is left out.
    """
    by_name = {node.name: node for node in graph.nodes}
    order = {node: position for position, node in enumerate(graph.nodes)}
    cutter = Cutter(graph)
    cuts: list[Cut] = []
    for name, names in regions.items():
        members = sorted((by_name[n] for n in names if n in by_name), key=order.__getitem__)
        piece = cutter.cut_out(members, name) if len(members) == len(names) else None
        if piece is not None:
            made = subgraph_node(piece.inner, name=name, inputs=piece.inputs)
            cuts.append(Cut(members, piece, made))
    return replace_regions(graph, cuts)[0]


def _name_of(region: Sequence[Node]) -> str:
    first, last = region[0].name, region[-1].name
    return first if len(region) == 1 else f"{first} to {last}"


def _free_positions(graph: Graph, nodes: Sequence[Node]) -> set[int]:
    """Return the positions of ``nodes`` before which at most one large value is live."""
    last: dict[Value, int] = dict.fromkeys(graph.outputs, len(nodes))
    for position, node in enumerate(nodes):
        for value in node.sources:
            last[value] = max(position, last.get(value, 0))
    ending = [0] * (len(nodes) + 1)
    live = 0
    free: set[int] = set()
    inputs = [value for value in graph.inputs if value.parameter is None]
    for position, made in enumerate([inputs, *(node.outputs for node in nodes)]):
        live -= ending[position - 1] if position else 0
        for value in made:
            if last.get(value, -1) >= position and value_bytes(value) > _SMALL_BYTES:
                live += 1
                ending[last[value]] += 1
        if live <= 1:
            free.add(position)
    return free


def _is_fork(node: Node) -> bool:
    """Return whether a light node cannot be fused with the one before, which others use too."""
    taken = [v for v in node.inputs if v is not None and v.parameter is None]
    return bool(taken) and len(taken[0].consumers) > 1 and not is_view(node)


def _computes(node: Node) -> bool:
    """Return whether libraries seldom fuse a node with the one before.

    It has a weight of two or more dimensions, or a result of another type than its first operand.
    """
    if is_view(node) or node.op_type == "QuantizeLinear":
        return False
    if any(before.op_type in _FUSED_WITH_NEXT for before in node.predecessors()):
        return False
    weights = (v.type for v in node.inputs if v is not None and v.parameter is not None)
    if any(isinstance(t, TensorType) and (t.rank or 0) >= 2 for t in weights):
        return True
    taken = [v.type for v in node.inputs if v is not None and v.parameter is None]
    return not taken or taken[0] != node.outputs[0].type
