"""Placement by cost: which device runs which node so that a run takes the least time.

The model: every node takes its measured time on its device, one after the other; a value that
crosses to another device costs latency plus bytes over bandwidth, once for each device that reads
it. For two devices the best placement is a minimum cut (Stone 1977, "Multiprocessor scheduling with
the aid of network flow algorithms"); for more, cuts that let one device take over nodes from all
others are repeated until none helps (alpha expansion, Boykov, Veksler and Zabih 2001).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType, numpy_dtype

_NEVER = 1e5  # seconds; small enough that sums keep nanoseconds


@attrs.frozen
class Link:
    """Cost of moving a value between two devices: ``latency`` seconds, ``bandwidth`` bytes/s."""

    latency: float = 1e-6
    bandwidth: float = 5e9

    def seconds(self, nbytes: float) -> float:
        """Return the time of one transfer."""
        return self.latency + nbytes / self.bandwidth


def value_bytes(value: Value, default: int = 1024) -> int:
    """Return the size of a value of static shape; unknown dimensions count as one."""
    if not isinstance(value.type, TensorType) or value.type.shape is None:
        return default
    size = numpy_dtype(value.type.dtype).itemsize
    for dim in value.type.shape:
        size *= dim if isinstance(dim, int) else 1
    return size


def placement_cost(
    graph: Graph,
    placement: Mapping[str, str],
    times: Mapping[str, Mapping[str, float]],
    link: Link,
) -> float:
    """Return the seconds of a run: node times on their devices and all transfers."""
    total = sum(times[placement[node.name]][node.name] for node in graph.nodes)
    for node in graph.nodes:
        home = placement[node.name]
        for value in node.outputs:
            away = {placement[user.name] for user in value.consumers} - {home}
            total += len(away) * link.seconds(value_bytes(value))
    return total


def place_by_cost(
    graph: Graph,
    devices: Sequence[str],
    times: Mapping[str, Mapping[str, float]],
    link: Link | None = None,
    fixed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the device of each node, by name, of the least total time that is found.

    Args:
        graph: The graph.
        devices: Device names, in order of priority (which breaks ties).
        times: Seconds by device and node name; a node that is missing cannot run there.
        link: Cost of transfers.
        fixed: Nodes that must stay where they are.
    """
    link = link or Link()
    costs = _costs(graph, devices, times, fixed or {})
    best = {node.name: min(devices, key=lambda d: costs[node.name][d]) for node in graph.nodes}
    for start in [best, *(dict.fromkeys(best, d) for d in devices)]:
        found = _improved(graph, devices, dict(start), costs, link)
        if _total(graph, found, costs, link) < _total(graph, best, costs, link):
            best = found
    return best


def _costs(
    graph: Graph,
    devices: Sequence[str],
    times: Mapping[str, Mapping[str, float]],
    fixed: Mapping[str, str],
) -> dict[str, dict[str, float]]:
    costs: dict[str, dict[str, float]] = {}
    for node in graph.nodes:
        forced = fixed.get(node.name)
        costs[node.name] = {
            device: times.get(device, {}).get(node.name, _NEVER)
            if forced in (None, device)
            else _NEVER
            for device in devices
        }
        if forced is not None and forced in devices:
            known = costs[node.name][forced]
            costs[node.name][forced] = 0.0 if known == _NEVER else known
    return costs


def _total(
    graph: Graph,
    placement: Mapping[str, str],
    costs: Mapping[str, Mapping[str, float]],
    link: Link,
) -> float:
    by_device: dict[str, dict[str, float]] = {}
    for name, row in costs.items():
        for device, seconds in row.items():
            by_device.setdefault(device, {})[name] = seconds
    return placement_cost(graph, placement, by_device, link)


def _improved(
    graph: Graph,
    devices: Sequence[str],
    placement: dict[str, str],
    costs: Mapping[str, Mapping[str, float]],
    link: Link,
) -> dict[str, str]:
    """Let each device in turn take nodes from all others by a minimum cut, until none helps."""
    now = _total(graph, placement, costs, link)
    rounds = 1 if len(devices) <= 2 else 4
    for _ in range(rounds):
        changed = False
        for device in devices:
            taken = _expand(graph, device, placement, costs, link)
            seconds = _total(graph, taken, costs, link)
            if seconds < now * (1 - 1e-12):
                placement, now, changed = taken, seconds, True
        if not changed:
            break
    return placement


def _expand(
    graph: Graph,
    device: str,
    placement: Mapping[str, str],
    costs: Mapping[str, Mapping[str, float]],
    link: Link,
) -> dict[str, str]:
    """Return the placement after the best choice, node by node, of staying or going to ``device``.

    Source side of the cut: the node goes. The transfers among the others count as for two sides,
    which is exact for two devices.
    """
    index = {node: k + 2 for k, node in enumerate(graph.nodes)}
    flow = _MaxFlow(len(index) + 2)
    for node, vertex in index.items():
        row = costs[node.name]
        home = placement[node.name]
        stay = _NEVER if home == device else row[home]
        common = min(stay, row[device])
        flow.edge(0, vertex, stay - common)
        flow.edge(vertex, 1, row[device] - common)
    for node, vertex in index.items():
        for value in node.outputs:
            users = [index[user] for user in value.consumers if user in index]
            if users:
                _add_transfer(flow, vertex, users, link.seconds(value_bytes(value)))
    goes = flow.source_side()
    return {
        node.name: device if vertex in goes else placement[node.name]
        for node, vertex in index.items()
    }


def _add_transfer(flow: _MaxFlow, producer: int, users: Sequence[int], seconds: float) -> None:
    """Charge one transfer when any user stands on the other side than the producer."""
    if len(users) == 1:
        flow.edge(producer, users[0], seconds)
        flow.edge(users[0], producer, seconds)
        return
    there, back = flow.vertex(), flow.vertex()
    flow.edge(producer, there, seconds)
    flow.edge(back, producer, seconds)
    for user in users:
        flow.edge(there, user, _NEVER)
        flow.edge(user, back, _NEVER)


class _MaxFlow:
    """Maximum flow from vertex 0 to vertex 1 by Dinic's algorithm, without recursion."""

    def __init__(self, vertices: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(vertices)]
        self._to: list[int] = []
        self._room: list[float] = []

    def vertex(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, a: int, b: int, room: float) -> None:
        if room <= 0:
            return
        for source, target, size in ((a, b, room), (b, a, 0.0)):
            self._edges[source].append(len(self._to))
            self._to.append(target)
            self._room.append(size)

    def source_side(self) -> set[int]:
        """Return the vertices on the source's side of a minimum cut."""
        while True:
            level = self._levels()
            if 1 not in level:
                return set(level)
            self._block(level)

    def _levels(self) -> dict[int, int]:
        level = {0: 0}
        work = deque([0])
        while work:
            vertex = work.popleft()
            for edge in self._edges[vertex]:
                target = self._to[edge]
                if self._room[edge] > 1e-15 and target not in level:
                    level[target] = level[vertex] + 1
                    work.append(target)
        return level

    def _block(self, level: Mapping[int, int]) -> None:
        """Saturate every shortest path."""
        following = [0] * len(self._edges)
        path: list[int] = []
        vertex = 0
        while True:
            if vertex == 1:
                room = min(self._room[edge] for edge in path)
                for edge in path:
                    self._room[edge] -= room
                    self._room[edge ^ 1] += room
                path.clear()
                vertex = 0
                continue
            found = self._usable(vertex, level, following)
            if found is not None:
                path.append(found)
                vertex = self._to[found]
            elif path:
                vertex = self._to[path.pop() ^ 1]
                following[vertex] += 1
            else:
                return

    def _usable(self, vertex: int, level: Mapping[int, int], following: list[int]) -> int | None:
        edges = self._edges[vertex]
        while following[vertex] < len(edges):
            edge = edges[following[vertex]]
            if self._room[edge] > 1e-15 and level.get(self._to[edge]) == level[vertex] + 1:
                return edge
            following[vertex] += 1
        return None


def transfers(graph: Graph, device_of: Mapping[Node, str]) -> list[tuple[Value, str, str]]:
    """Return (value, from, to) for each time that a run moves a value to another device."""
    found: list[tuple[Value, str, str]] = []
    for node in graph.nodes:
        home = device_of[node]
        for value in node.outputs:
            away = dict.fromkeys(device_of[user] for user in value.consumers)
            found += [(value, home, device) for device in away if device != home]
    return found
