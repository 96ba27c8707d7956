"""Placement in stages: the device of each node for the most requests per second.

The nodes, in topological order, are divided into consecutive stages, one for each device. Different
requests are in different stages at the same time, so the slowest stage limits the number of
requests per second. `subgraph.devices.placement.cost` minimises the time of a request instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from subgraph.devices.placement.cost import Link, value_bytes
from subgraph.graph.graph import Graph, Node

Times = Mapping[str, Mapping[str, float]]
_BISECTION_STEPS = 40  # 2**-40 of a run is far below the accuracy of measured times
_MAX_DEVICES = 4  # an estimate; all orders of 1 to 4 devices are tried: 4 + 12 + 24 + 24 = 64
# Relative; a placement with more stages has to be better by this, not only equal.
_MIN_IMPROVEMENT = 1e-6


def place_in_stages(
    graph: Graph,
    devices: Sequence[str],
    times: Times,
    link: Link,
) -> dict[str, str]:
    """Return the placement whose slowest stage takes the least time: devices by node name.

    Args:
        graph: The graph.
        devices: Device names in order of priority, which breaks ties; only the first four are used.
        times: Seconds by device and node name; a device cannot run a node that is missing. Nodes
            without any time are not placed.
        link: Cost of transfers, which count for the receiving stage.
    """
    nodes = [n for n in graph.nodes if any(n.name in times.get(d, {}) for d in devices)]
    best: dict[str, str] = {}
    least = float("inf")
    for count in range(1, min(len(devices), _MAX_DEVICES) + 1):
        for order in permutations(devices[:_MAX_DEVICES], count):
            ends = _best_ends(nodes, order, times, link, least * (1 - _MIN_IMPROVEMENT))
            if ends is not None:
                best = _placed(nodes, order, ends)
                least = max(stage_seconds(graph, best, times, link).values())
    return best


def stage_seconds(
    graph: Graph, placement: Mapping[str, str], times: Times, link: Link
) -> dict[str, float]:
    """Return the seconds for which one request occupies each device.

    Args:
        graph: The graph.
        placement: Device of each node, by the node's name; nodes that are missing do not count.
        times: Seconds by device and node name.
        link: Cost of transfers, which count for the receiving device.
    """
    found = dict.fromkeys(placement.values(), 0.0)
    for node in graph.nodes:
        home = placement.get(node.name)
        if home is None:
            continue
        found[home] += times[home][node.name]
        for value in node.outputs:
            for away in {placement.get(user.name, home) for user in value.consumers} - {home}:
                found[away] += link.seconds(value_bytes(value))
    return found


def _placed(nodes: Sequence[Node], order: Sequence[str], ends: Sequence[int]) -> dict[str, str]:
    found: dict[str, str] = {}
    begin = 0
    for device, end in zip(order, ends, strict=True):
        found.update((node.name, device) for node in nodes[begin:end])
        begin = end
    return found


def _best_ends(
    nodes: Sequence[Node], order: Sequence[str], times: Times, link: Link, below: float
) -> list[int] | None:
    """Return the ends of the stages whose slowest takes the least time, by bisection.

    Args:
        nodes: The nodes in topological order.
        order: The device of each stage.
        times: Seconds by device and node name.
        link: Cost of transfers.
        below: Seconds that the slowest stage must not exceed.

    Returns:
        For each stage the position after its last node; None if no division is fast enough.
    """
    rows = [times.get(device, {}) for device in order]
    # With a limit above the sum of all times, a stage ends where its device lacks an operator.
    high = min(below, sum(max(row.get(n.name, 0.0) for row in rows) for n in nodes) + 1.0)
    found = _ends_within(nodes, rows, link, high)
    low = 0.0
    for _ in range(_BISECTION_STEPS if found is not None else 0):
        middle = (low + high) / 2
        ends = _ends_within(nodes, rows, link, middle)
        if ends is None:
            low = middle
        else:
            found, high = ends, middle
    return found


def _ends_within(
    nodes: Sequence[Node], rows: Sequence[Mapping[str, float]], link: Link, limit: float
) -> list[int] | None:
    """Return the ends of stages as long as ``limit`` seconds allow; None if nodes are left."""
    ends: list[int] = []
    begin = 0
    for row in rows:
        stage: set[Node] = set()
        received: set[object] = set()
        spent, end = 0.0, begin
        while end < len(nodes):
            node = nodes[end]
            new = {
                v
                for v in node.sources
                if v.producer is not None and v.producer not in stage and v not in received
            }
            spent += row.get(node.name, float("inf"))
            spent += sum(link.seconds(value_bytes(value)) for value in new)
            if spent > limit:
                break
            stage.add(node)
            received |= new
            end += 1
        if end == begin:
            return None  # an empty stage: the order without this device is tried separately
        ends.append(end)
        begin = end
    return ends if begin == len(nodes) else None
