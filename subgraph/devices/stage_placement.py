"""Placement in stages: which device runs which part so that the most requests get through.

A run falls into one stage for each device, one after the other in topological order. While a
request is in one stage another one is in the next, so that the slowest stage decides how many
requests a second there are. `subgraph.devices.placement` minimises the time of a single request
instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from subgraph.devices.placement import Link, value_bytes
from subgraph.graph.graph import Graph, Node

Times = Mapping[str, Mapping[str, float]]
_STEPS = 40  # of the bisection: far below the accuracy of any measured time
_MOST_DEVICES = 4  # all their orders are tried


def place_in_stages(
    graph: Graph,
    devices: Sequence[str],
    times: Times,
    link: Link | None = None,
) -> dict[str, str]:
    """Return the device of each node, by name, for the least time of the slowest stage.

    Args:
        graph: The graph.
        devices: Device names in order of priority, which breaks ties; the first four count.
        times: Seconds by device and node name; a node that is missing cannot run there. Nodes
            that no device has a time for are left out.
        link: Cost of transfers, which the stage that receives them bears.
    """
    link = link or Link()
    nodes = [n for n in graph.nodes if any(n.name in times.get(d, {}) for d in devices)]
    best: dict[str, str] = {}
    least = float("inf")
    for count in range(1, min(len(devices), _MOST_DEVICES) + 1):
        for order in permutations(devices[:_MOST_DEVICES], count):
            # One more stage has to gain something.
            ends = _best_ends(nodes, order, times, link, least * (1 - 1e-6))
            if ends is not None:
                best = _placed(nodes, order, ends)
                least = max(stage_seconds(graph, best, times, link).values())
    return best


def stage_seconds(
    graph: Graph, placement: Mapping[str, str], times: Times, link: Link
) -> dict[str, float]:
    """Return the seconds that a request keeps each device busy."""
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
    """Return where the stages end for the least bottleneck under ``below``; None: there is none."""
    rows = [times.get(device, {}) for device in order]
    # Without a limit: a stage ends where its device cannot go on.
    high = min(below, sum(max(row.get(n.name, 0.0) for row in rows) for n in nodes) + 1.0)
    found = _ends_within(nodes, rows, link, high)
    low = 0.0
    for _ in range(_STEPS if found is not None else 0):
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
    """Let each stage go as far as ``limit`` seconds allow; None if they do not reach the end."""
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
            return None  # a device without a node: the order without it is tried as well
        ends.append(end)
        begin = end
    return ends if begin == len(nodes) else None
