"""Measured times of nodes and transfers: taken by running, kept as JSON, for placement by cost."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from subgraph.devices.calls import known_properties, query_on
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
_LINK_SIZES = (256, 1 << 20)  # elements of float32
_LEAST_TRANSFER = 1e-12  # seconds a byte: what is faster is no transfer


@attrs.frozen
class Profile:
    """What was measured.

    Attributes:
        times: Seconds by device and node name; a node that is missing cannot run there.
        link: What moving a value to another device takes.
    """

    times: Times
    link: Link = attrs.field(factory=Link)


def measure(
    graph: Graph, devices: Sequence[Device], inputs: Mapping[str, Any], *, repeats: int = 3
) -> Profile:
    """Return the seconds of every node on every device that supports it, and of transfers.

    Each node is compiled and run alone, on the values that a run of the graph on the reference
    gives it; the least of ``repeats`` runs after a first one counts. A device that profiles says
    itself what the node took; the rest of the call is what it takes to move values there and back.

    Args:
        graph: The model.
        devices: The devices to measure.
        inputs: The model's inputs by name.
        repeats: Runs of each node.
    """
    links = [link for device in devices if (link := measure_link(device, repeats)) is not None]
    if not links:
        return Profile(_node_times(graph, devices, inputs, repeats))
    slowest = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
    return Profile(_node_times(graph, devices, inputs, repeats), slowest)


def measure_link(device: Device, repeats: int = 3) -> Link | None:
    """Return what it takes to move a value to the device or back; None if it does not profile.

    Measured by an operator that does little, on few and on many elements: what a run takes beside
    the operator itself is one way there and one back.
    """
    if _PROFILING not in known_properties(device):
        return None
    ways: list[float] = []
    for size in _LINK_SIZES:
        x = input("x", (size,))
        probe = Graph([x], [operator("Relu")(x)], "link")
        try:
            run = _Alone(device, probe, {"x": np.ones(size, np.float32)})
        except SubgraphError:
            return None
        ways.append(min(run.way() for _ in range(repeats)))
    more_bytes = 4 * (_LINK_SIZES[1] - _LINK_SIZES[0])
    each_byte = max((ways[1] - ways[0]) / more_bytes, _LEAST_TRANSFER)
    return Link(max(ways[0] - 4 * _LINK_SIZES[0] * each_byte, 0.0), 1 / each_byte)


class _Alone:
    """A graph of one node, compiled for a device and run once."""

    def __init__(self, device: Device, graph: Graph, feeds: Mapping[str, Any]) -> None:
        profiles = _PROFILING in known_properties(device)
        self._request = device.compile_model(
            graph, {_PROFILING: True} if profiles else None
        ).create_infer_request()
        self._feeds = feeds
        self._run()

    def _run(self) -> tuple[float, float]:
        """Return the seconds of a run by the clock, and those that the device says."""
        start = time.perf_counter()
        self._request.infer(self._feeds)
        seconds = time.perf_counter() - start
        entries = self._request.profile()
        return seconds, sum(entry.seconds for entry in entries) if entries else seconds

    def seconds(self) -> float:
        """Return what the node took in a run."""
        return self._run()[1]

    def way(self) -> float:
        """Return half of what a run took beside the node."""
        whole, node = self._run()
        return max(whole - node, 0.0) / 2


def _node_times(
    graph: Graph, devices: Sequence[Device], inputs: Mapping[str, Any], repeats: int
) -> Times:
    values = _all_values(graph, inputs)
    supported = {d.name: query_on(d, graph, None) for d in devices}
    times: Times = {device.name: {} for device in devices}
    for node in graph.nodes:
        alone, feeds = _alone(node, values)
        for device in devices:
            if node.name not in supported[device.name]:
                continue
            try:
                run = _Alone(device, alone, feeds)
                seconds = min(run.seconds() for _ in range(repeats))
            except SubgraphError:
                continue  # a node that cannot run alone has no time there
            times[device.name][node.name] = seconds
    return times


def _all_values(graph: Graph, inputs: Mapping[str, Any]) -> dict[str, Any]:
    shown = graph.clone()
    names = [value.name for node in shown.nodes for value in node.outputs]
    by_name = {value.name: value for node in shown.nodes for value in node.outputs}
    shown.outputs = tuple(by_name[name] for name in names)
    given = [inputs.get(value.name) for value in shown.inputs]
    results = Executor(Plan(shown)).run(given)
    return {**inputs, **dict(zip(names, results, strict=True))}


def _alone(node: Node, values: Mapping[str, Any]) -> tuple[Graph, dict[str, Any]]:
    """Return a graph of the one node, and what to feed it."""
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
    """Keep what was measured in a file, atomically."""
    target = Path(path)
    content = {"format": _FORMAT, "seconds": profile.times, "link": attrs.asdict(profile.link)}
    text = json.dumps(content, indent=1, sort_keys=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    os.replace(temporary, target)


def read_profile(path: str | os.PathLike[str]) -> Profile:
    """Return what a file says.

    Raises:
        BlobError: it is no file of that kind.
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
