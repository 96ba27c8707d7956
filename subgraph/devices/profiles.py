"""Measurement of nodes and transfers on devices, and its files (JSON), for placement by cost."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.devices.blob import write_atomically
from subgraph.devices.calls import compile_on, known_properties, query_on
from subgraph.devices.device import Device
from subgraph.devices.placement import Link
from subgraph.errors import BlobError, SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.builder import input, operator
from subgraph.runtime.executor import Executor
from subgraph.runtime.executor_plan import Plan
from subgraph.system.trusted_files import open_regular

Times = dict[str, dict[str, float]]
_FORMAT = "subgraph profile 2"
_PROFILING = "ENABLE_PROFILING"
_LINK_SIZES = (256, 1 << 20)  # float32 elements of the two tensors that are moved
_MIN_SECONDS_PER_BYTE = 1e-12  # lower bound, so that a bandwidth is finite


@attrs.frozen
class Profile:
    """Measured times.

    Attributes:
        times: Seconds by device and node name; a device cannot run a node that is missing.
        link: Cost of moving a value to another device.
    """

    times: Times
    link: Link = attrs.field(factory=Link)


def measure(
    graph: Graph, devices: Sequence[Device], inputs: Mapping[str, Any], *, repeats: int = 3
) -> Profile:
    """Measure every node on every device that supports it, and transfers.

    Each node is compiled and run alone, on its input values in a run of the graph on REFERENCE. If
    a device profiles, its own time of the node counts, and the rest of the call is the time of the
    transfers there and back; otherwise the whole call counts. The link is that of the slowest
    device.

    Args:
        graph: The model.
        devices: The devices to measure.
        inputs: The model's inputs by name.
        repeats: Runs of each node after a first one; the shortest counts.
    """
    links = [link for device in devices if (link := measure_link(device, repeats)) is not None]
    if not links:
        return Profile(_node_times(graph, devices, inputs, repeats))
    slowest = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
    return Profile(_node_times(graph, devices, inputs, repeats), slowest)


def measure_link(device: Device, repeats: int = 3) -> Link | None:
    """Return the cost of moving a value to or from a device; None if it does not profile.

    A cheap operator is run on few and on many elements. One transfer takes half of a run's time
    outside of the operator; latency and bandwidth follow from the two sizes.
    """
    if _PROFILING not in known_properties(device):
        return None
    seconds: list[float] = []
    for size in _LINK_SIZES:
        x = input("x", (size,))
        relu = Graph([x], [operator("Relu")(x)], "link")
        try:
            run = _SingleNodeRun(device, relu, {"x": np.ones(size, np.float32)})
        except SubgraphError:
            return None
        seconds.append(min(run.transfer_seconds() for _ in range(repeats)))
    more_bytes = 4 * (_LINK_SIZES[1] - _LINK_SIZES[0])
    per_byte = max((seconds[1] - seconds[0]) / more_bytes, _MIN_SECONDS_PER_BYTE)
    return Link(max(seconds[0] - 4 * _LINK_SIZES[0] * per_byte, 0.0), 1 / per_byte)


class _SingleNodeRun:
    """A graph of one node, compiled for a device and run once."""

    def __init__(self, device: Device, graph: Graph, feeds: Mapping[str, Any]) -> None:
        profiles = _PROFILING in known_properties(device)
        model = compile_on(device, graph, {_PROFILING: True} if profiles else None)
        self._request = model.create_infer_request()
        self._feeds = feeds
        self._run()

    def _run(self) -> tuple[float, float]:
        """Run once; return the seconds of the call, and those of the node in the profile."""
        start = time.perf_counter()
        self._request.infer(self._feeds)
        seconds = time.perf_counter() - start
        entries = self._request.profile()
        return seconds, sum(entry.seconds for entry in entries) if entries else seconds

    def seconds(self) -> float:
        """Run once; return the seconds of the node."""
        return self._run()[1]

    def transfer_seconds(self) -> float:
        """Run once; return half of the seconds outside of the node."""
        whole, node = self._run()
        return max(whole - node, 0.0) / 2


def _node_times(
    graph: Graph, devices: Sequence[Device], inputs: Mapping[str, Any], repeats: int
) -> Times:
    values = _all_values(graph, inputs)
    supported = {d.name: query_on(d, graph, None) for d in devices}
    times: Times = {device.name: {} for device in devices}
    for node in graph.nodes:
        alone, feeds = _single_node_graph(node, values)
        for device in devices:
            if node.name not in supported[device.name]:
                continue
            try:
                run = _SingleNodeRun(device, alone, feeds)
                seconds = min(run.seconds() for _ in range(repeats))
            except SubgraphError:
                continue  # the node cannot run alone on this device
            times[device.name][node.name] = seconds
    return times


def _all_values(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs and the result of every node in a run on REFERENCE, by name."""
    copy = graph.clone()
    names = [value.name for node in copy.nodes for value in node.outputs]
    by_name = {value.name: value for node in copy.nodes for value in node.outputs}
    copy.outputs = tuple(by_name[name] for name in names)
    results = Executor(Plan(copy)).run([inputs.get(value.name) for value in copy.inputs])
    return {**inputs, **dict(zip(names, results, strict=True))}


def _single_node_graph(node: Node, values: Mapping[str, Any]) -> tuple[Graph, dict[str, Any]]:
    """Return a graph of one node, and its inputs by name, taken from the values of a run."""
    inner: dict[Value, Value] = {}
    feeds: dict[str, Any] = {}
    for value in node.sources:
        if value not in inner:
            inner[value] = Value(value.name, value.type, parameter=value.parameter)
            if value.parameter is None:
                feeds[value.name] = values[value.name]
    copy = Node(
        node.op_type,
        [None if v is None else inner[v] for v in node.inputs],
        outputs=[Value(v.name, v.type) for v in node.outputs],
        name=node.name,
        domain=node.domain,
        version=node.version,
        attrs={k: v.clone() if isinstance(v, Graph) else v for k, v in node.attrs.items()},
        captures=[inner[v] for v in node.captures],
    )
    plain = [value for value in inner.values() if value.parameter is None]
    return Graph(plain, copy.outputs, node.name), feeds


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write measured times to a file, atomically."""
    content = {"format": _FORMAT, "seconds": profile.times, "link": attrs.asdict(profile.link)}
    write_atomically(path, [json.dumps(content, indent=1, sort_keys=True).encode()])


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Return the measured times that `write_profile` wrote.

    Raises:
        BlobError: the file cannot be read or is not a profile.
    """
    try:
        with open_regular(path) as file:
            found = json.load(file)
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}")
        times = {
            str(device): {str(name): float(s) for name, s in row.items() if np.isfinite(s)}
            for device, row in found["seconds"].items()
        }
        link = Link(float(found["link"]["latency"]), float(found["link"]["bandwidth"]))
        if not (link.latency >= 0 and link.bandwidth > 0):
            raise ValueError(f"{link}")
        return Profile(times, link)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlobError(f"{os.fspath(path)!r} is not a profile: {error}") from error
