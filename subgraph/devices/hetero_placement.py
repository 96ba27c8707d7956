"""Placement for HETERO: the device of each node, by priority, affinity or measured times."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import attrs

from subgraph.devices.affinity_cut import REFERENCE
from subgraph.devices.calls import query_on
from subgraph.devices.device import Config, Device
from subgraph.devices.placement import Link, place_by_cost
from subgraph.devices.profiles import read_profile
from subgraph.devices.query import QueryResult
from subgraph.devices.stage_placement import place_in_stages
from subgraph.errors import ConfigError, DeviceError
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import AFFINITY
from subgraph.partition.light_regions import move_light_regions, place_following
from subgraph.system.registry import nearest


@attrs.frozen
class MeasuredPlacement:
    """Options of a placement by measured times.

    Attributes:
        kind: "COST" for the least time of a request, "STAGES" for the most requests per second.
        profile: Path of a file with measured times.
        latency: Seconds of a transfer; 0: as measured.
        bandwidth: Bytes per second of transfers; 0: as measured.
    """

    kind: str
    profile: str
    latency: float = 0.0
    bandwidth: float = 0.0


class HeteroPlacement:
    """Chooses the device of each node of a graph."""

    def __init__(
        self,
        devices: Sequence[Device],
        configs: Mapping[str, Config],
        find: Callable[[str], Device],
        measured: MeasuredPlacement | None = None,
    ) -> None:
        """Prepare to place nodes.

        Args:
            devices: The devices in order of priority.
            configs: Options by the device's name.
            find: Returns a device by its name; raises DeviceError if there is none.
            measured: Options of a placement by measured times; None places by priority.
        """
        self._devices = list(devices)
        self._configs = configs
        self._find = find
        self._measured = measured

    def place(self, graph: Graph, known: Mapping[str, str] | None = None) -> QueryResult:
        """Return the device of each node of a graph; bodies are not placed.

        Args:
            graph: The graph.
            known: Query result of the first device; None: it is queried.

        Raises:
            ConfigError: an affinity names an unknown device, or there are no measured times.
        """
        placed, reasons, weights = self._by_priority(graph, known)
        if self._measured is not None:
            placed.update(self._by_times(graph, self._measured, placed))
        refused = self._apply_affinities(graph, placed)
        if self._measured is None:
            move_light_regions(graph, placed, lambda name: self._query(self._find(name), graph))
        # The default executor calls the own ops of regions, even if REFERENCE is not in the list.
        placed.update((node.name, REFERENCE) for node in graph.nodes if node.subgraph is not None)
        following = place_following(graph, placed, weights)
        refusals = {name: text for name, text in reasons.items() if name not in placed}
        return QueryResult(placed, refusals, weights=following, refused=refused)

    def _query(self, device: Device, graph: Graph) -> dict[str, str]:
        return query_on(device, graph, self._configs.get(device.name) or None)

    def _by_priority(
        self, graph: Graph, known: Mapping[str, str] | None
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
            weights[device.name] = getattr(found, "weights", frozenset())
            skipped = self._divided_nodes(graph, device) | weights[device.name]
            for name in found:
                if name not in skipped:
                    placed.setdefault(name, device.name)
            for name, reason in getattr(found, "reasons", {}).items():
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
        self, graph: Graph, options: MeasuredPlacement, placed: Mapping[str, str]
    ) -> dict[str, str]:
        """Return the devices of the nodes in ``placed`` that have measured times."""
        if not options.profile:
            raise ConfigError(
                f"PLACEMENT={options.kind} needs PROFILE: a file of measured times, as "
                "`subgraph profile --devices A,B -o FILE` writes it"
            )
        profile = read_profile(options.profile)
        names = [device.name for device in self._devices]
        usable: dict[str, dict[str, float]] = {name: {} for name in names}
        for device in self._devices:
            times = profile.times.get(device.name, {})
            supported = self._query(device, graph)
            usable[device.name] = {n: times[n] for n in supported if n in times}
        fixed = {n: d for n, d in placed.items() if not any(n in row for row in usable.values())}
        link = Link(
            options.latency or profile.link.latency,
            options.bandwidth or profile.link.bandwidth,
        )
        if options.kind == "STAGES":
            found = place_in_stages(graph, names, usable, link)
        else:
            found = place_by_cost(graph, names, usable, link, fixed)
        return {name: device for name, device in found.items() if name in placed}

    def _apply_affinities(self, graph: Graph, placed: dict[str, str]) -> dict[str, str]:
        """Place nodes on the devices that their metadata names, if these support them.

        Returns:
            The reasons of the devices that do not support a node, by the node's name.
        """
        results: dict[str, Mapping[str, str]] = {}
        refused: dict[str, str] = {}
        for node in graph.nodes:
            wanted = (node.metadata or {}).get(AFFINITY)
            if wanted is None or placed.get(node.name) == wanted:
                continue
            if wanted not in results:
                results[wanted] = self._query(self._device_of_affinity(node, wanted), graph)
            result = results[wanted]
            if node.name in getattr(result, "weights", ()):
                continue  # a constant becomes a weight on the device of its users
            if node.name in result:
                placed[node.name] = wanted
            else:
                reasons: Mapping[str, str] = getattr(result, "reasons", {})
                why = reasons.get(node.name, "does not list it as supported")
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
