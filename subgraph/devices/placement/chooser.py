"""The device of each node, for HETERO and AUTO: by priority, affinity or measured times."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Any

import attrs

from subgraph.devices.affinity_cut import REFERENCE
from subgraph.devices.calls import query_on
from subgraph.devices.device import Device, DeviceList
from subgraph.devices.placement.cost import Link, place_by_cost
from subgraph.devices.placement.profiles import (
    MIXED,
    Profile,
    measure,
    read_profile,
    sample_inputs,
    seconds_of_runs,
    write_profile,
)
from subgraph.devices.placement.regions import with_regions
from subgraph.devices.placement.stages import place_in_stages
from subgraph.devices.placement.table import PlacementTable
from subgraph.devices.query import QueryResult
from subgraph.errors import ConfigError, DeviceError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.partition.light_regions import move_light_regions, place_following
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.system.registry import nearest
from subgraph.transform.pass_manager import apply_pass

_log = logging.getLogger("subgraph")
PROFILE_ABOUT = (  # of the option of HETERO and AUTO
    "file with measured times, for PLACEMENT=COST and STAGES; it is written if it does not exist"
)


@attrs.frozen
class MeasuredPlacement:
    """Options of a placement by measured times.

    Attributes:
        kind: "COST" for the least time of a request, "STAGES" for the most requests per second.
        profile: Path of a file with measured times. If there is none, the times are measured and
            written; "": they are measured for each placement.
        latency: Seconds of a transfer; 0: as measured.
        bandwidth: Bytes per second of transfers; 0: as measured.
    """

    kind: str
    profile: str
    latency: float = 0.0
    bandwidth: float = 0.0

    def link(self, measured: Link) -> Link:
        """Return the cost of transfers: as measured, unless an option says otherwise."""
        return Link(self.latency or measured.latency, self.bandwidth or measured.bandwidth)


class HeteroPlacement:
    """Chooses the device of each node of a graph.

    Attributes:
        table: Where each measured region of the last graph runs, and why.
    """

    def __init__(
        self,
        listed: DeviceList,
        find: Callable[[str], Device],
        measured: MeasuredPlacement | None = None,
    ) -> None:
        """Prepare to place nodes.

        Args:
            listed: The devices and their options.
            find: Returns a device by its name; raises DeviceError if there is none.
            measured: Options of a placement by measured times; None places by priority.
        """
        self._listed = listed
        self._devices = list(listed.devices)
        self._find = find
        self._measured = measured
        self.table = PlacementTable()

    def place(
        self, graph: Graph, known: QueryResult | None = None, *, body: bool = False
    ) -> QueryResult:
        """Return the device of each node of a graph; the bodies of its nodes are not placed.

        Args:
            graph: The graph.
            known: Query result of the first device; None: it is queried.
            body: Whether the graph is a body itself; its nodes are placed by priority.

        Raises:
            ConfigError: an affinity names an unknown device.
            DeviceError: times have to be measured, and no inputs can be made.
        """
        placed, reasons, weights = self._by_priority(graph, known)
        measured = None if body else self._measured
        if measured is not None:
            profile = self._profile(graph, measured.profile)
            placed.update(self._by_times(graph, measured, profile, placed))
        refused = self._apply_affinities(graph, placed)
        if measured is None:
            move_light_regions(graph, placed, lambda name: self._query(self._find(name), graph))
        # The default executor calls the own ops of regions, even if REFERENCE is not in the list.
        placed.update((node.name, REFERENCE) for node in graph.nodes if node.subgraph is not None)
        following = place_following(graph, placed, weights)
        refusals = {name: text for name, text in reasons.items() if name not in placed}
        return QueryResult(placed, refusals, weights=following, refused=refused)

    def _query(self, device: Device, graph: Graph) -> QueryResult:
        return query_on(device, graph, self._listed.config_of(device))

    def _by_priority(
        self, graph: Graph, known: QueryResult | None
    ) -> tuple[dict[str, str], dict[str, str], dict[str, AbstractSet[str]]]:
        """Place each node on the first device that supports it.

        Returns:
            The devices of the nodes, the reasons of devices that refused a node, and for each
            device the names of constants that it supports only as weights, which are not placed.
        """
        placed: dict[str, str] = {}
        reasons: dict[str, str] = {}
        weights: dict[str, AbstractSet[str]] = {}
        for device in self._devices:
            if all(node.name in placed for node in graph.nodes):
                break
            if known is not None and device is self._devices[0]:
                found = known
            else:
                found = self._query(device, graph)
            weights[device.name] = found.weights
            skipped = self._divided_nodes(graph, device) | found.weights
            for name in found:
                if name not in skipped:
                    placed.setdefault(name, device.name)
            for name, reason in found.reasons.items():
                text = f"{device.name}: {reason}"
                reasons[name] = f"{reasons[name]}; {text}" if name in reasons else text
        return placed, reasons, weights

    def _divided_nodes(self, graph: Graph, device: Device) -> set[str]:
        """Return the names of nodes with bodies of which other devices run parts.

        ``device`` must not run such a node as a whole: the default executor runs it, and the nodes
        in its bodies are placed one by one, on devices of higher priority or by their affinities.
        """
        if device.without_regions or not any(each.without_regions for each in self._devices):
            return set()
        before = self._devices[: self._devices.index(device)]

        def is_divided(body: Graph) -> bool:
            inside = [node for level in body.levels() for node in level.nodes]
            wanted = ((node.metadata or {}).get(AFFINITY, device.name) for node in inside)
            return any(name != device.name for name in wanted) or any(
                self._query(each, body) for each in before
            )

        nested = (node for node in graph.nodes if node.attrs and node.bodies)
        return {node.name for node in nested if any(map(is_divided, node.bodies))}

    def _by_times(
        self,
        graph: Graph,
        options: MeasuredPlacement,
        profile: Profile,
        placed: Mapping[str, str],
    ) -> dict[str, str]:
        """Return the devices of the nodes in ``placed`` that have measured times."""
        names = [device.name for device in self._devices]
        cut = with_regions(apply_pass(graph, "InferTypes"), profile.regions)
        members = {node.name: profile.regions.get(node.name, [node.name]) for node in cut.nodes}
        usable: dict[str, dict[str, float]] = {name: {} for name in names}
        for device in self._devices:
            times = profile.times.get(device.name, {})
            supported = self._query(device, graph)
            for region, inside in members.items():
                if region in times and all(name in supported for name in inside):
                    usable[device.name][region] = times[region]
        link = options.link(profile.link)
        alone = ""
        if options.kind == "STAGES":
            found = place_in_stages(cut, names, usable, link)
        else:
            timed = {region for row in usable.values() for region in row}
            homes = {name: placed.get(inside[0], "") for name, inside in members.items()}
            fixed = {name: home for name, home in homes.items() if name not in timed}
            found = place_by_cost(cut, names, usable, link, fixed)
            if link == profile.link:
                alone = profile.fastest_alone()
                found.update(dict.fromkeys(usable.get(alone, ()), alone))
        self.table = PlacementTable.of(cut, found, usable, link, profile.runs, alone)
        devices = {name: home for region, home in found.items() for name in members[region]}
        return {name: home for name, home in devices.items() if name in placed}

    def _profile(self, graph: Graph, path: str) -> Profile:
        """Return the measured times of a file, or measure and write them if there is none.

        Raises:
            ConfigError: the file has times of another model.
        """
        if path and os.path.exists(path):
            found = read_profile(path)
            names = {node.name for node in graph.nodes}
            regions = {region for row in found.times.values() for region in row}
            if not any(names.issuperset(found.regions.get(each, [each])) for each in regions):
                raise ConfigError(
                    f"PROFILE is {path!r}, whose times are of another model: it has none of a "
                    f"region of {graph.name!r}; name another file, or remove this one to measure"
                )
            return found
        _log.info("measuring %r on %s", graph.name, ", ".join(d.name for d in self._devices))
        found = self.measured(graph, sample_inputs(graph))
        if path:
            write_profile(path, found)
        return found

    def measured(self, graph: Graph, inputs: Mapping[str, Any], *, repeats: int = 10) -> Profile:
        """Measure the regions of a graph, then whole runs on each device and on all together.

        Args:
            graph: The graph.
            inputs: Its inputs by name.
            repeats: Runs of each region.
        """
        configs = self._listed.configs
        profile = measure(graph, self._devices, inputs, repeats=repeats, configs=configs)
        placed, _, _ = self._by_priority(graph, None)
        placed.update(self._by_times(graph, MeasuredPlacement("COST", ""), profile, placed))
        core = next((device.core for device in self._devices if device.core is not None), None)
        if core is None or len(self._devices) < 2:
            return profile
        models: dict[str, CompiledModel] = {}
        for device in self._devices:
            with suppress(DeviceError, UnsupportedOpError):
                config = self._listed.config_of(device)
                models[device.name] = core.compile_model(graph, device.name, config)
        if len(set(placed.values())) > 1:
            names = ",".join(device.name for device in self._devices)
            config = {name: dict(each) for name, each in configs.items() if each}
            marked = with_affinities(graph, placed)
            models[MIXED] = core.compile_model(marked, f"HETERO:{names}", config)
        profile = attrs.evolve(profile, runs=seconds_of_runs(models, inputs))
        self._by_times(graph, MeasuredPlacement("COST", ""), profile, placed)  # the final table
        return profile

    def _apply_affinities(self, graph: Graph, placed: dict[str, str]) -> dict[str, str]:
        """Place nodes on the devices that their metadata names, if these support them.

        Returns:
            The reasons of the devices that do not support a node, by the node's name.
        """
        results: dict[str, QueryResult] = {}
        refused: dict[str, str] = {}
        for node in graph.nodes:
            wanted = (node.metadata or {}).get(AFFINITY)
            if wanted is None or placed.get(node.name) == wanted:
                continue
            if wanted not in results:
                results[wanted] = self._query(self._device_of_affinity(node, wanted), graph)
            result = results[wanted]
            if node.name in result.weights:
                continue  # a constant becomes a weight on the device of its users
            if node.name in result:
                placed[node.name] = wanted
            else:
                why = result.reasons.get(node.name, "does not list it as supported")
                refused[node.name] = f"{wanted}: {why}"
        return refused

    def _device_of_affinity(self, node: Node, wanted: str) -> Device:
        try:
            return self._find(wanted)
        except DeviceError as error:
            names = [device.name for device in self._devices]
            raise ConfigError(
                f"node {node.name!r} has affinity {wanted!r}; {nearest(wanted, names)}: {error}"
            ) from error


def with_affinities(graph: Graph, homes: Mapping[str, str]) -> Graph:
    """Return a copy of a graph whose nodes have these affinities, by name, besides their own."""
    copy = graph.clone()
    for node in copy.nodes:
        if node.name in homes:
            node.metadata = {AFFINITY: homes[node.name], **(node.metadata or {})}
    return copy
