"""Placement by cost: the device of each node for the least time of a run.

The cost model: nodes run one after the other, each in its measured time on its device. A value that
another device reads costs latency plus bytes over bandwidth, once for each such device. For two
devices the best placement is a minimum cut (Stone 1977, "Multiprocessor scheduling with the aid of
network flow algorithms"). For more devices, minimum cuts that move nodes from all other devices to
one are repeated while they help (alpha expansion, Boykov, Veksler and Zabih 2001).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType, numpy_dtype

# Seconds of a node on a device that cannot run it: more than any run, and small enough that sums of
# float64 still resolve nanoseconds.
_FORBIDDEN_SECONDS = 1e5
_UNKNOWN_BYTES = 1024  # of a value of unknown size; an estimate
# Rounds of minimum cuts for three or more devices (an estimate); one round is optimal for two.
_MAX_ROUNDS = 4
# Seconds; residual capacities below are rounding errors. A clock resolves 1e-9.
_MIN_CAPACITY = 1e-15
_MIN_IMPROVEMENT = 1e-12  # relative; a smaller one is a rounding error of sums of float64


@attrs.frozen
class Link:
    """Cost of moving a value between two devices; the defaults are estimates for one process.

    Attributes:
        latency: Seconds of each transfer.
        bandwidth: Bytes per second.
    """

    latency: float = 1e-6
    bandwidth: float = 5e9

    def seconds(self, nbytes: float) -> float:
        """Return the seconds of one transfer."""
        return self.latency + nbytes / self.bandwidth


def value_bytes(value: Value) -> int:
    """Return the bytes of a value; unknown dimensions count as one.

    A value of unknown rank, or that is no tensor, counts as `_UNKNOWN_BYTES`.
    """
    if not isinstance(value.type, TensorType) or value.type.shape is None:
        return _UNKNOWN_BYTES
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
    """Return the seconds of a run: the times of all nodes and all transfers.

    Args:
        graph: The graph.
        placement: Device of each node, by the node's name.
        times: Seconds by device and node name.
        link: Cost of transfers.
    """
    computing = sum(times[placement[node.name]][node.name] for node in graph.nodes)
    moved = transfers(graph, {node: placement[node.name] for node in graph.nodes})
    return computing + sum(link.seconds(value_bytes(value)) for value, _, _ in moved)


def place_by_cost(
    graph: Graph,
    devices: Sequence[str],
    times: Mapping[str, Mapping[str, float]],
    link: Link,
    fixed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the placement with the least total time that was found: devices by node name.

    Args:
        graph: The graph.
        devices: Device names in order of priority, which breaks ties.
        times: Seconds by device and node name; a device cannot run a node that is missing.
        link: Cost of transfers.
        fixed: Devices of nodes that must not move, by node name.
    """
    costs = _costs(graph, devices, times, fixed or {})
    fastest = {node.name: min(devices, key=lambda d: costs[d][node.name]) for node in graph.nodes}
    starts = [fastest, *(dict.fromkeys(fastest, d) for d in devices)]
    found = [_improved(graph, start, costs, link) for start in starts]
    return min(found, key=lambda placement: placement_cost(graph, placement, costs, link))


def _costs(
    graph: Graph,
    devices: Sequence[str],
    times: Mapping[str, Mapping[str, float]],
    fixed: Mapping[str, str],
) -> dict[str, dict[str, float]]:
    """Return the seconds of every node on every device, also where it cannot or must not run."""
    costs: dict[str, dict[str, float]] = {device: {} for device in devices}
    for device, row in costs.items():
        known = times.get(device, {})
        for node in graph.nodes:
            home = fixed.get(node.name)
            if home == device:
                row[node.name] = known.get(node.name, 0.0)
            elif home is None:
                row[node.name] = known.get(node.name, _FORBIDDEN_SECONDS)
            else:
                row[node.name] = _FORBIDDEN_SECONDS
    return costs


def _improved(
    graph: Graph,
    placement: dict[str, str],
    costs: Mapping[str, Mapping[str, float]],
    link: Link,
) -> dict[str, str]:
    """Move nodes to each device in turn by a minimum cut, while that shortens the run.

    One round is optimal for two devices; for more the number of rounds is bounded.
    """
    best = placement_cost(graph, placement, costs, link)
    for _ in range(1 if len(costs) <= 2 else _MAX_ROUNDS):
        changed = False
        for device in costs:
            moved = _expand(graph, device, placement, costs, link)
            seconds = placement_cost(graph, moved, costs, link)
            if seconds < best * (1 - _MIN_IMPROVEMENT):
                placement, best, changed = moved, seconds, True
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
    """Return the best placement in which each node stays or moves to ``device``.

    Nodes on the source's side of the minimum cut move. Transfers between nodes that stay on
    different devices are not counted, which is exact for two devices.
    """
    index = {node: k + 2 for k, node in enumerate(graph.nodes)}
    flow = _MaxFlow(len(index) + 2)
    for node, vertex in index.items():
        home, move = placement[node.name], costs[device][node.name]
        stay = _FORBIDDEN_SECONDS if home == device else costs[home][node.name]
        common = min(stay, move)
        flow.edge(0, vertex, stay - common)
        flow.edge(vertex, 1, move - common)
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
    """Add edges that cost one transfer if any user is on the other side than the producer."""
    if len(users) == 1:
        flow.edge(producer, users[0], seconds)
        flow.edge(users[0], producer, seconds)
        return
    there, back = flow.vertex(), flow.vertex()
    flow.edge(producer, there, seconds)
    flow.edge(back, producer, seconds)
    for user in users:
        flow.edge(there, user, _FORBIDDEN_SECONDS)
        flow.edge(user, back, _FORBIDDEN_SECONDS)


class _MaxFlow:
    """Maximum flow from vertex 0 to vertex 1 by Dinic's algorithm (1970), without recursion."""

    def __init__(self, vertices: int) -> None:
        self._edges: list[list[int]] = [[] for _ in range(vertices)]
        self._to: list[int] = []
        self._capacity: list[float] = []  # residual; edge k ^ 1 is the reverse of edge k

    def vertex(self) -> int:
        self._edges.append([])
        return len(self._edges) - 1

    def edge(self, a: int, b: int, capacity: float) -> None:
        if capacity <= 0:
            return
        for source, target, size in ((a, b, capacity), (b, a, 0.0)):
            self._edges[source].append(len(self._to))
            self._to.append(target)
            self._capacity.append(size)

    def source_side(self) -> set[int]:
        """Return the vertices on the source's side of a minimum cut."""
        while True:
            level = self._levels()
            if 1 not in level:
                return set(level)
            self._add_blocking_flow(level)

    def _levels(self) -> dict[int, int]:
        """Return the distance from vertex 0 of each vertex that residual edges reach."""
        level = {0: 0}
        work = deque([0])
        while work:
            vertex = work.popleft()
            for edge in self._edges[vertex]:
                target = self._to[edge]
                if self._capacity[edge] > _MIN_CAPACITY and target not in level:
                    level[target] = level[vertex] + 1
                    work.append(target)
        return level

    def _add_blocking_flow(self, level: Mapping[int, int]) -> None:
        """Add flow along shortest paths until each has a saturated edge."""
        next_edge = [0] * len(self._edges)  # per vertex: edges before it lead to no path
        path: list[int] = []
        vertex = 0
        while True:
            if vertex == 1:
                added = min(self._capacity[edge] for edge in path)
                for edge in path:
                    self._capacity[edge] -= added
                    self._capacity[edge ^ 1] += added
                path.clear()
                vertex = 0
                continue
            found = self._usable(vertex, level, next_edge)
            if found is not None:
                path.append(found)
                vertex = self._to[found]
            elif path:
                vertex = self._to[path.pop() ^ 1]
                next_edge[vertex] += 1
            else:
                return

    def _usable(self, vertex: int, level: Mapping[int, int], next_edge: list[int]) -> int | None:
        """Return an edge with capacity to the next level; None if the vertex has none left."""
        edges = self._edges[vertex]
        while next_edge[vertex] < len(edges):
            edge = edges[next_edge[vertex]]
            open_edge = self._capacity[edge] > _MIN_CAPACITY
            if open_edge and level.get(self._to[edge]) == level[vertex] + 1:
                return edge
            next_edge[vertex] += 1
        return None


def transfers(graph: Graph, device_of: Mapping[Node, str]) -> list[tuple[Value, str, str]]:
    """Return (value, from, to) for each transfer of a value to another device in a run."""
    found: list[tuple[Value, str, str]] = []
    for node in graph.nodes:
        home = device_of[node]
        for value in node.outputs:
            away = dict.fromkeys(device_of[user] for user in value.consumers)
            found += [(value, home, device) for device in away if device != home]
    return found
