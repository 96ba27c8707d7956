"""Where constants and views go, after the nodes that compute have found their devices.

OpenVINO's plugins do the same in a query ("housekeeping nodes"). A region of nothing but constants
and views of what others compute would cost two transfers and compute nothing; a constant that a
device refuses by itself goes along, as a weight, with the nodes there that take it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache

from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.partition.constants import constant_nodes

_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})


def move_light_regions(
    graph: Graph,
    placed: dict[str, str],
    supported: Callable[[str], Container[str]],
    executor: str = "REFERENCE",
) -> None:
    """Give connected constants and views without any other node to a device beside them.

    They go to the first device of a consumer, else of a producer, that supports all of them. Where
    none does, Constant nodes go to the executor; views stay where they are. So do nodes whose
    metadata names a device.

    Args:
        graph: The graph.
        placed: Device of each node, by name; it is changed.
        supported: Gives for a device the names of the nodes that it supports; asked once for each.
        executor: Name of the device that needs no regions.
    """
    constants = set(constant_nodes(graph))
    light = {
        node
        for node in graph.nodes
        if (node in constants or is_view(node)) and AFFINITY not in (node.metadata or {})
    }
    supported = cache(supported)
    done: set[Node] = set()
    for node in graph.nodes:
        if node not in light or node in done or placed.get(node.name) in (None, executor):
            continue
        members, alone = _connected(node, light, placed)
        done.update(members)
        if not alone:
            continue
        homes = _homes_beside(members, placed)
        home = _first_that_takes(members, homes, supported)
        if home is None and homes and all(member.op_type == "Constant" for member in members):
            home = executor
        if home is not None:
            placed.update((member.name, home) for member in members)


def place_following(
    graph: Graph, placed: dict[str, str], weights: Mapping[str, AbstractSet[str]]
) -> set[str]:
    """Place constants with the nodes that take them as weights, where their devices refuse them.

    Those whose metadata names another device stay there, and so do outputs of the graph.

    Args:
        graph: The graph.
        placed: Device of each node, by name; it is changed.
        weights: By device the constants that it takes only as weights.

    Returns:
        The names of the constants that are to become weights.
    """
    names = {name for each in weights.values() for name in each}
    following: set[str] = set()
    if not names:
        return following
    for node in reversed(constant_nodes(graph)):
        if node.name not in names or graph.is_output(node.outputs[0]):
            continue
        homes = (placed.get(user.name, "") for user in node.successors())
        takers = [home for home in homes if node.name in weights.get(home, ())]
        wanted = (node.metadata or {}).get(AFFINITY)
        if takers and wanted in (None, takers[0]):
            placed[node.name] = takers[0]
            following.add(node.name)
    return following


def is_view(node: Node) -> bool:
    """Return whether a node gives the elements of its first input as they are, in another shape."""
    if node.domain:
        return False
    if node.op_type == "Transpose":
        perm = list(node.attrs.get("perm", ()))
        return bool(perm) and perm == sorted(perm)
    return node.op_type in _VIEWS


def _connected(
    start: Node, light: set[Node], placed: Mapping[str, str]
) -> tuple[dict[Node, None], bool]:
    """Return the light nodes connected to ``start`` on its device, and whether no others are."""
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
