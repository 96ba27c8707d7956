"""Placement of constants and views, after all nodes that compute have their devices.

OpenVINO's plugins do the same in a query ("housekeeping nodes"). A region of only constants and
views would cost two transfers and compute nothing. A constant that a device refuses is placed, as a
weight, with the nodes on the device that use it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

from subgraph.graph.graph import Graph, Node
from subgraph.operators.operator import is_view
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.partition.constants import constant_nodes

_EXECUTOR = "REFERENCE"  # runs single nodes, without regions


def move_light_regions(
    graph: Graph, placed: dict[str, str], supported: Callable[[str], Container[str]]
) -> None:
    """Move regions of only constants and views to a neighbouring device.

    This is the first device of a consumer, or else of a producer, that supports all their nodes. If
    there is none, regions of only Constant nodes move to the executor and others stay. Nodes whose
    metadata names a device stay.

    Args:
        graph: The graph.
        placed: Device of each node, by name; it is changed.
        supported: Returns the names of the nodes that a device supports; called once for each.
    """
    constants = set(constant_nodes(graph))
    light = {
        node
        for node in graph.nodes
        if (node in constants or is_view(node)) and AFFINITY not in (node.metadata or {})
    }
    # A query may make a device try every node of the graph, so each device is asked once.
    supported = cache(supported)
    done: set[Node] = set()
    for node in graph.nodes:
        if node not in light or node in done or placed.get(node.name) in (None, _EXECUTOR):
            continue
        members, alone = _connected(node, light, placed)
        done.update(members)
        # Light nodes beside computing nodes of their device are part of a region that is worth its
        # transfers.
        if not alone:
            continue
        homes = _homes_beside(members, placed)
        home = _first_that_takes(members, homes, supported)
        # The executor holds the arrays of Constant nodes and computes nothing for them. Views stay:
        # the executor would need two transfers of data as well.
        if home is None and homes and all(member.op_type == "Constant" for member in members):
            home = _EXECUTOR
        if home is not None:
            placed.update((member.name, home) for member in members)


def place_following(
    graph: Graph, placed: dict[str, str], weights: Mapping[str, AbstractSet[str]]
) -> set[str]:
    """Place constants with the nodes that use them as weights, on devices that refuse constants.

    Constants whose metadata names another device stay, and so do outputs of the graph.

    Args:
        graph: The graph.
        placed: Device of each node, by name; it is changed.
        weights: For each device the names of the constants that it supports only as weights.

    Returns:
        The names of the constants that must become weights.
    """
    names = {name for each in weights.values() for name in each}
    following: set[str] = set()
    if not names:
        return following
    # Users come first: a constant that another constant is computed from follows the place that
    # this one has just got.
    for node in reversed(constant_nodes(graph)):
        if node.name not in names or any(map(graph.is_output, node.outputs)):
            continue
        homes = (placed.get(user.name, "") for user in node.successors())
        takers = [home for home in homes if node.name in weights.get(home, ())]
        wanted = (node.metadata or {}).get(AFFINITY)
        if takers and wanted in (None, takers[0]):
            placed[node.name] = takers[0]
            following.add(node.name)
    return following


def _connected(
    start: Node, light: set[Node], placed: Mapping[str, str]
) -> tuple[dict[Node, None], bool]:
    """Return the light nodes connected to ``start`` on its device, and whether all are light."""
    home = placed[start.name]
    members: dict[Node, None] = {start: None}
    alone = True
    work = [start]
    while work:
        node = work.pop()
        for other in (*node.successors(), *node.predecessors()):
            if placed.get(other.name) == home and other not in members:
                if other in light:
                    members[other] = None
                    work.append(other)
                else:
                    alone = False
    return members, alone


def _homes_beside(members: Mapping[Node, None], placed: Mapping[str, str]) -> list[str]:
    """Return the devices next to ``members``, those of consumers first."""
    beside = [other for member in members for other in member.successors()]
    beside += [other for member in members for other in member.predecessors()]
    homes = (placed.get(other.name) for other in beside if other not in members)
    return list(dict.fromkeys(home for home in homes if home is not None))


def _first_that_takes(
    members: Mapping[Node, None],
    homes: Sequence[str],
    supported: Callable[[str], Container[str]],
) -> str | None:
    for home in homes:
        takes = supported(home)
        if all(member.name in takes for member in members):
            return home
    return None
