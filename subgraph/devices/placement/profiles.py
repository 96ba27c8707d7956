"""Measurement of regions and transfers on devices, and its files (JSON), for placement by cost."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np

from subgraph.devices.blob import write_atomically
from subgraph.devices.calls import compile_on, known_properties, query_on
from subgraph.devices.device import Config, Device
from subgraph.devices.placement.cost import Link
from subgraph.devices.placement.regions import divide, with_regions
from subgraph.errors import BlobError, DeviceError, SubgraphError
from subgraph.graph.graph import Graph
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.operators.builder import input, operator
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.executor import Executor
from subgraph.runtime.executor_plan import Plan
from subgraph.runtime.infer_request import InferRequest
from subgraph.system.trusted_files import open_regular
from subgraph.transform.pass_manager import apply_pass

Times = dict[str, dict[str, float]]
MIXED = "MIXED"  # in `Profile.runs`: the placement of regions on several devices
_FORMAT = "subgraph profile 3"
_PROFILING = "ENABLE_PROFILING"
# float32 elements of the two tensors that are moved, 1 KiB and 4 MiB (estimates): the time of the
# first is that of any transfer, the difference is the time of the bytes.
_LINK_SIZES = (256, 1 << 20)
_ACCURACY = 0.02  # of the least time of a run, relative; an estimate
_SECONDS_FOR_RUNS = 0.5  # for each whole model; an estimate
_LEAST_RUNS, _MOST_RUNS = 5, 200  # of each whole model; estimates
# Lower bound, so that a bandwidth is finite: 1 TB/s, more than links between devices have
# (estimate).
_MIN_SECONDS_PER_BYTE = 1e-12


@attrs.frozen
class Profile:
    """Measured times.

    Attributes:
        times: Seconds by device and region; a device cannot run a region that is missing.
        link: Cost of moving a value to another device.
        regions: Names of nodes by the name of their region; a node that is in none is a region of
            its own, under its name.
        runs: Seconds of a run of the whole model by placement: a device's name, or `MIXED`.
    """

    times: Times
    link: Link = attrs.field(factory=Link)
    regions: dict[str, list[str]] = attrs.field(factory=dict[str, list[str]])
    runs: dict[str, float] = attrs.field(factory=dict[str, float])

    def fastest_alone(self) -> str:
        """Return the device on which whole runs are faster than mixed ones; "" if there is none.

        A mixed placement has to be faster by more than the accuracy of the times.
        """
        alone = {name: seconds for name, seconds in self.runs.items() if name != MIXED}
        best = min(alone, key=alone.__getitem__, default="")
        mixed = self.runs.get(MIXED, float("inf"))
        return best if best and alone[best] * (1 - _ACCURACY) <= mixed else ""


def measure(
    graph: Graph,
    devices: Sequence[Device],
    inputs: Mapping[str, Any],
    *,
    repeats: int = 10,
    configs: Mapping[str, Config] | None = None,
) -> Profile:
    """Measure the regions of a graph on every device that supports them, and transfers.

    Each region is compiled and run alone, on its input values in a run of the graph. If a device
    profiles, its own time of the region counts, and the rest of the call is the time of the
    transfers there and back; otherwise the whole call counts. The link is that of the slowest
    device.

    Args:
        graph: The model.
        devices: The devices to measure.
        inputs: The model's inputs by name.
        repeats: Runs of each region after a first one, with those of the other devices in
            between; the shortest counts.
        configs: Options by the device's name; None for the defaults.
    """
    configs = configs or {}
    typed = apply_pass(graph, "InferTypes")
    supported = {d.name: query_on(d, typed, configs.get(d.name) or None) for d in devices}
    regions = divide(typed, supported)
    cut = with_regions(typed, regions)
    names = [value.name for node in cut.nodes for value in node.outputs]
    values = _values_between(typed, names, devices, supported, inputs, configs)
    times: Times = {device.name: {} for device in devices}
    for node in cut.nodes:
        if node.subgraph is None or node.name not in regions:
            continue
        ends = zip(node.subgraph.inputs, node.inputs, strict=True)
        feeds = {a.name: values[b.name] for a, b in ends if b is not None and a.parameter is None}
        takers = [d for d in devices if all(n in supported[d.name] for n in regions[node.name])]
        for name, least in _least_seconds(node.subgraph, feeds, takers, configs, repeats).items():
            times[name][node.name] = least
    found = (measure_link(device, repeats, configs.get(device.name)) for device in devices)
    links = [link for link in found if link is not None]
    if not links:
        return Profile(times, regions=regions)
    slowest = Link(max(link.latency for link in links), min(link.bandwidth for link in links))
    return Profile(times, slowest, regions)


def _least_seconds(
    region: Graph,
    feeds: Mapping[str, Any],
    devices: Sequence[Device],
    configs: Mapping[str, Config],
    repeats: int,
) -> dict[str, float]:
    """Return the least seconds of a region by device; without devices on which it fails alone."""
    least: dict[str, float] = {}
    runs: dict[str, _AloneRun] = {}
    for device in devices:
        with suppress(SubgraphError):
            runs[device.name] = _AloneRun(device, region, feeds, configs.get(device.name))
            least[device.name] = runs[device.name].seconds()
    for _ in range(repeats - 1):
        for name in least:
            least[name] = min(least[name], runs[name].seconds())
    return least


def sample_inputs(graph: Graph) -> dict[str, Any]:
    """Return arrays for the inputs of a graph without default, by name.

    Floating-point numbers are random, others are 0; unknown dimensions are 1.

    Raises:
        DeviceError: an input is not a tensor of known rank.
    """
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for value in graph.inputs:
        if value.parameter is not None:
            continue
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.shape is None:
            raise DeviceError(
                f"input {value.name!r} is {type_ or 'unknown'}: no array for a measurement can be "
                "made; measure with `subgraph profile --devices` and name its file as PROFILE"
            )
        shape = [dim if isinstance(dim, int) else 1 for dim in type_.shape]
        dtype = numpy_dtype(type_.dtype)
        floats = dtype.kind in "fc"
        array = generator.standard_normal(shape) if floats else np.zeros(shape)
        arrays[value.name] = array.astype(dtype)
    return arrays


def seconds_of_runs(
    models: Mapping[str, CompiledModel], inputs: Mapping[str, Any]
) -> dict[str, float]:
    """Return the least time of several runs of each model, in alternation.

    A single quiet moment must not make a mixed placement the fastest: its time is no less than the
    median of its times relative to those of the fastest device in the same rounds.

    Args:
        models: Compiled models by name; a model whose first run fails is left out.
        inputs: Inputs of all of them, by name.

    Raises:
        SubgraphError: every model fails; this is the error of the last one.
    """
    requests: dict[str, InferRequest] = {}
    failure: SubgraphError | None = None
    for name, model in models.items():
        try:
            request = model.create_infer_request()
            request.infer(inputs)
        except SubgraphError as error:
            failure = error
        else:
            requests[name] = request
    if not requests and failure is not None:
        raise failure
    times: dict[str, list[float]] = {name: [] for name in requests}
    end = time.perf_counter() + _SECONDS_FOR_RUNS * len(requests)
    rounds = 0
    while rounds < _LEAST_RUNS or (rounds < _MOST_RUNS and time.perf_counter() < end):
        rounds += 1
        for name, request in requests.items():
            start = time.perf_counter()
            request.infer(inputs)
            times[name].append(time.perf_counter() - start)
    least = {name: min(each) for name, each in times.items()}
    best = min((name for name in least if name != MIXED), key=least.__getitem__, default="")
    if best and MIXED in least:
        ratio = float(np.median(np.divide(times[MIXED], times[best])))
        least[MIXED] = max(least[MIXED], ratio * least[best])
    return least


def measure_link(device: Device, repeats: int = 3, config: Config | None = None) -> Link | None:
    """Return the cost of moving a value to or from a device; None if it does not profile.

    A cheap operator is run on few and on many elements. One transfer takes half of a run's time
    outside of the operator; latency and bandwidth follow from the two sizes.

    Args:
        device: The device.
        repeats: Runs of each size, of which the fastest counts.
        config: The device's options.
    """
    if _PROFILING not in known_properties(device):
        return None
    seconds: list[float] = []
    for size in _LINK_SIZES:
        x = input("x", (size,))
        relu = Graph([x], [operator("Relu")(x)], "link")
        try:
            run = _AloneRun(device, relu, {"x": np.ones(size, np.float32)}, config)
        except SubgraphError:
            return None
        seconds.append(min(run.transfer_seconds() for _ in range(repeats)))
    more_bytes = 4 * (_LINK_SIZES[1] - _LINK_SIZES[0])
    per_byte = max((seconds[1] - seconds[0]) / more_bytes, _MIN_SECONDS_PER_BYTE)
    return Link(max(seconds[0] - 4 * _LINK_SIZES[0] * per_byte, 0.0), 1 / per_byte)


class _AloneRun:
    """A region, compiled for a device and run once."""

    def __init__(
        self,
        device: Device,
        graph: Graph,
        feeds: Mapping[str, Any],
        config: Config | None = None,
    ) -> None:
        profiles = {_PROFILING: True} if _PROFILING in known_properties(device) else {}
        model = compile_on(device, graph, {**(config or {}), **profiles} or None)
        self._request = model.create_infer_request()
        self._feeds = feeds
        self._run()

    def _run(self) -> tuple[float, float]:
        """Run once; return the seconds of the call, and those in the profile."""
        start = time.perf_counter()
        self._request.infer(self._feeds)
        seconds = time.perf_counter() - start
        entries = self._request.profile()
        return seconds, sum(entry.seconds for entry in entries) if entries else seconds

    def seconds(self) -> float:
        """Run once; return the seconds of the region."""
        return self._run()[1]

    def transfer_seconds(self) -> float:
        """Run once; return half of the seconds outside of the region."""
        whole, inside = self._run()
        return max(whole - inside, 0.0) / 2


def _values_between(
    graph: Graph,
    names: Sequence[str],
    devices: Sequence[Device],
    supported: Mapping[str, Container[str]],
    inputs: Mapping[str, Any],
    configs: Mapping[str, Config],
) -> dict[str, Any]:
    """Return the inputs and other values of a graph by name.

    The first device that supports all nodes computes them, or else REFERENCE.
    """
    copy = graph.clone()
    by_name = {value.name: value for node in copy.nodes for value in node.outputs}
    copy.outputs = tuple(by_name[name] for name in names)
    for device in devices:
        if all(node.name in supported[device.name] for node in copy.nodes):
            with suppress(SubgraphError):
                results = compile_on(device, copy, configs.get(device.name) or None)(inputs)
                return {**inputs, **{name: results[name] for name in names}}
    found = Executor(Plan(copy)).run([inputs.get(value.name) for value in copy.inputs])
    return {**inputs, **dict(zip(names, found, strict=True))}


def write_profile(path: str | os.PathLike[str], profile: Profile) -> None:
    """Write measured times to a file, atomically."""
    content = {
        "format": _FORMAT,
        "seconds": profile.times,
        "link": attrs.asdict(profile.link),
        "regions": profile.regions,
        "runs": profile.runs,
    }
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
        regions = {str(name): [str(n) for n in names] for name, names in found["regions"].items()}
        runs = {str(name): float(seconds) for name, seconds in found["runs"].items()}
        return Profile(times, link, regions, runs)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BlobError(f"{os.fspath(path)!r} is not a profile: {error}") from error
