"""Measured times of nodes on devices: taken by running, kept as JSON, for placement by cost."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from subgraph.device import Device
from subgraph.errors import BlobError, SubgraphError
from subgraph.executor import Executor, Plan
from subgraph.graph import Graph, Node, Value

Times = dict[str, dict[str, float]]
_FORMAT = "subgraph profile 1"


def measure(
    graph: Graph, devices: Sequence[Device], inputs: Mapping[str, Any], *, repeats: int = 3
) -> Times:
    """Return the seconds of every node on every device that supports it.

    Each node is compiled and run alone, on the values that a run of the graph on the reference
    gives it; the least of ``repeats`` runs after a first one counts.

    Args:
        graph: The model.
        devices: The devices to measure.
        inputs: The model's inputs by name.
        repeats: Runs of each node.
    """
    values = _all_values(graph, inputs)
    supported = {d.name: d.query_model(graph) for d in devices}
    times: Times = {device.name: {} for device in devices}
    for node in graph.nodes:
        alone, feeds = _alone(node, values)
        for device in devices:
            if node.name not in supported[device.name]:
                continue
            try:
                model = device.compile_model(alone)
                model(feeds)
                seconds = min(_seconds(model, feeds) for _ in range(repeats))
            except SubgraphError:
                continue  # a node that cannot run alone has no time there
            times[device.name][node.name] = seconds
    return times


def _seconds(model: Any, feeds: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    model(feeds)
    return time.perf_counter() - start


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


def write_profile(path: str | os.PathLike[str], times: Mapping[str, Mapping[str, float]]) -> None:
    """Keep times in a file, atomically."""
    target = Path(path)
    text = json.dumps({"format": _FORMAT, "seconds": times}, indent=1, sort_keys=True)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=target.name)
    with os.fdopen(handle, "w") as stream:
        stream.write(text)
    os.replace(temporary, target)


def read_profile(path: str | os.PathLike[str]) -> Times:
    """Return the times of a file.

    Raises:
        BlobError: it is no file of that kind.
    """
    try:
        found = json.loads(Path(path).read_text())
        if found["format"] != _FORMAT:
            raise ValueError(f"format {found['format']!r}")
        return {
            str(device): {str(name): float(s) for name, s in row.items() if np.isfinite(s)}
            for device, row in found["seconds"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BlobError(f"{os.fspath(path)!r} is not a profile: {error}") from error
