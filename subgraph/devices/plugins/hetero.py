"""HETERO: one model on several devices, cut by the partition mechanism.

"HETERO:A,B,C" runs every node on the first device that supports it, or on the device that its
``metadata["affinity"]`` names. For each device, a property whose selector is "the node's affinity
is this device" cuts regions by the ``hetero`` strategy; the device's compiled model replaces each
region. Nodes of REFERENCE are not cut: the default executor runs them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

import attrs

from subgraph.devices.affinity_cut import (
    REFERENCE,
    CutOp,
    affinities_in,
    cut_by_affinity,
)
from subgraph.devices.calls import known_properties, require_support
from subgraph.devices.device import Config, Device, DeviceList
from subgraph.devices.export import region_nodes
from subgraph.devices.fallback import DeviceFallback, add_fallback, compile_region
from subgraph.devices.placement.chooser import (
    PROFILE_ABOUT,
    HeteroPlacement,
    MeasuredPlacement,
)
from subgraph.devices.placement.cost import transfers, value_bytes
from subgraph.devices.placement.table import PlacementTable
from subgraph.devices.query import QueryResult
from subgraph.devices.region_dump import dump_regions
from subgraph.devices.virtual import VirtualDevice
from subgraph.errors import DeviceError, SubgraphError, UnsupportedOpError
from subgraph.graph.graph import Graph, Node
from subgraph.operators.subgraph_op import (
    AFFINITY,
    ASKED_AFFINITY,
    REGION,
    SubgraphOp,
)
from subgraph.partition.constants import constants_to_weights
from subgraph.partition.regions import without_default_regions
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.control_flow import is_nested
from subgraph.runtime.settings import DeviceOptions, option, option_names
from subgraph.transform.pass_manager import apply_pass
from subgraph.weights.parallel import parallel_map

if TYPE_CHECKING:
    from subgraph.weights.cache import StoredWeights

_MAX_COMPILE_THREADS = 8  # regions that are compiled at the same time


@attrs.frozen
class HeteroOptions(DeviceOptions):
    """Options of HETERO; those of its devices are given under their names."""

    DEVICE_PRIORITIES: str = option("", "devices in order of priority, separated by commas")
    PLACEMENT: str = option(
        "PRIORITY",
        "by priority; by measured times for the least time of a request (COST) or for the most "
        "requests a second, in one stage for each device (STAGES)",
        values=("PRIORITY", "COST", "STAGES"),
    )
    PROFILE: str = option("", PROFILE_ABOUT, saved=False)
    TRANSFER_LATENCY: float = option(
        0.0, "seconds that one transfer takes; 0: as measured in PROFILE", minimum=0
    )
    TRANSFER_BANDWIDTH: float = option(
        0.0, "bytes/s between devices; 0: as measured in PROFILE", minimum=0
    )
    PIPELINE: bool = option(True, "overlap the devices' stages of different requests")
    DUMP_DIR: str = option(
        "",
        "folder in which each region that is compiled is written as an ONNX file; empty: none",
        saved=False,
    )


class HeteroDevice(VirtualDevice):
    """Runs the parts of a model on several devices."""

    full_name = "Several devices as one"
    options_class = HeteroOptions

    def _placement(self, listed: DeviceList) -> HeteroPlacement:
        options: HeteroOptions = listed.options
        measured = None
        if options.PLACEMENT != "PRIORITY":
            measured = MeasuredPlacement(
                options.PLACEMENT,
                options.PROFILE,
                options.TRANSFER_LATENCY,
                options.TRANSFER_BANDWIDTH,
            )
        return HeteroPlacement(listed, self.peer, measured)

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the device that would run each node."""
        listed = self.configured(config)
        whole = without_default_regions(graph)
        found = self._placement(listed).place(whole)
        return found if whole is graph else _of_regions(graph, whole, found)

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Cut the graph and compile the regions on their devices, several at the same time.

        Raises:
            UnsupportedOpError: no device in the list supports a node.
            ConfigError: an option is unknown to HETERO and its devices.
        """
        listed = self.configured(config)
        whole = without_default_regions(graph)
        work = _typed(graph.clone() if whole is graph else whole)
        return self._cut_and_compile(graph, work, listed, self._assign(work, listed))

    def compile_with_fallback(
        self,
        graph: Graph,
        devices: Sequence[Device],
        config: Config,
        supported: QueryResult,
    ) -> CompiledModel:
        """Compile for a device that does not support every node, and its fallback devices.

        Args:
            graph: The model; the affinities in its metadata are ignored.
            devices: The device, then its fallback devices.
            config: Options of the device.
            supported: Its query result.
        """
        first = devices[0]
        options = self.options_for({"DEVICE_PRIORITIES": ",".join(d.name for d in devices)})
        if "ENABLE_PROFILING" in known_properties(first):
            first_options = first.options_for(config)
            # The common options apply to the whole model, except for these of a single device.
            common = set(option_names(DeviceOptions)) - {"DEVICE_ID", "CACHE_DIR"}
            options = attrs.evolve(
                options, **{name: getattr(first_options, name) for name in common}
            )
        configs = {device.name: dict(config) if device is first else {} for device in devices}
        whole = without_default_regions(graph)
        known = supported if whole is graph and not is_nested(graph) else None
        # Shapes in bodies often depend on constants around them, which have to be folded first.
        work = apply_pass(whole, "ConstantFolding") if is_nested(whole) else whole.clone()
        work = _typed(work)
        for each in work.levels():
            for node in each.nodes:
                node.metadata = {k: v for k, v in (node.metadata or {}).items() if k != AFFINITY}
        listed = DeviceList(devices, configs, options)
        self._assign(work, listed, known)
        return self._cut_and_compile(graph, work, listed, {"REFUSED_AFFINITIES": {}})

    def _cut_and_compile(
        self, graph: Graph, work: Graph, listed: DeviceList, placed: Mapping[str, Any]
    ) -> CompiledModel:
        """Return the model of a graph.

        Args:
            graph: The graph.
            work: A copy of it with an affinity for every node.
            listed: The devices and options.
            placed: Metrics of the placement.
        """
        listed = self._with_affinities(listed, work)
        cut = cut_by_affinity(work, [d.name for d in listed.devices if not d.without_regions])
        self._compile_regions(cut, listed)
        return self._finished(cut, listed, placed, source=graph)

    def _with_affinities(self, listed: DeviceList, graph: Graph) -> DeviceList:
        """Return the devices, with those at the end that only affinities of nodes name."""
        names = dict.fromkeys((*(d.name for d in listed.devices), *affinities_in(graph)))
        return attrs.evolve(listed, devices=[self.peer(name) for name in names])

    def _assign(
        self, graph: Graph, listed: DeviceList, known: QueryResult | None = None
    ) -> dict[str, Any]:
        """Write the device of every node, including those in bodies, into its metadata.

        Constants that a device supports only as weights of other nodes become weights.

        Returns:
            Metrics: the reasons by name of the nodes whose original affinity was not possible, and
            the table of a placement by measured times.

        Raises:
            UnsupportedOpError: no device supports some node.
        """
        placement = self._placement(listed)
        work, names = [graph], set(graph.parameters)
        refused: dict[str, str] = {}
        while work:
            current = work.pop()
            placed = placement.place(current, known, body=current is not graph)
            # The query was for the graph itself; its bodies are queried one by one.
            known = None
            refused.update(placed.refused)
            if placed.weights:
                constants_to_weights(current, placed.weights, names)
                names.update(current.parameters)
            names_listed = ",".join(device.name for device in listed.devices)
            require_support(placed, current, f"HETERO:{names_listed}")
            for node in current.nodes:
                if node.subgraph is not None:
                    continue
                metadata = node.metadata or {}
                # The user's affinity is kept beside the chosen one, since the device may have
                # refused the node.
                if AFFINITY in metadata:
                    metadata = {**metadata, ASKED_AFFINITY: metadata[AFFINITY]}
                node.metadata = {**metadata, AFFINITY: placed[node.name]}
                if node.attrs and self.peer(placed[node.name]).without_regions:
                    # Bodies of a node that Python runs are placed node by node, like the graph.
                    work.extend(node.bodies)
        if len(names) > len(graph.parameters):
            for level in reversed(graph.levels()):
                # Constants have become weights; inner levels come first, because outer ones list
                # their parameters, too.
                level.refresh_parameters()
        table = {"PLACEMENT_TABLE": placement.table} if placement.table else {}
        return {"REFUSED_AFFINITIES": refused, **table}

    def _compile_regions(self, graph: Graph, listed: DeviceList) -> None:
        """Compile the regions that were cut; regions with an own op get fallback devices."""
        by_name = {device.name: device for device in listed.devices}

        def compile_one(node: Node) -> None:
            assert node.subgraph is not None, "it is a region"
            device = by_name[(node.metadata or {})[AFFINITY]]
            others = _fallback_of(device, listed)
            node.op, home = compile_region(node.subgraph, device, others)
            node.metadata = {**(node.metadata or {}), AFFINITY: home.name}

        regions: list[Node] = []
        every = list(dict.fromkeys((*listed.devices, self.peer(REFERENCE))))
        rest = attrs.evolve(listed, devices=every)
        for node in region_nodes(graph):
            if isinstance(node.op, CutOp):
                regions.append(node)
            else:
                add_fallback(node, rest)
        # Each call changes its own node only.
        parallel_map(compile_one, regions, min(len(regions), _MAX_COMPILE_THREADS))

    def _finished(
        self,
        cut: Graph,
        listed: DeviceList,
        placed: Mapping[str, Any],
        source: Graph | None = None,
        stored: StoredWeights | None = None,
    ) -> CompiledModel:
        options: HeteroOptions = listed.options
        if options.DUMP_DIR:
            dump_regions(cut, options.DUMP_DIR)
        homes = {node: (node.metadata or {}).get(AFFINITY, REFERENCE) for node in cut.nodes}
        moved = transfers(cut, homes)
        return CompiledModel(
            cut,
            device=f"{self.name}:{','.join(device.name for device in listed.devices)}",
            options=options,
            requests=len(set(homes.values())),
            metrics={
                "TRANSFERS": len(moved),
                "TRANSFER_BYTES": sum(value_bytes(value) for value, _, _ in moved),
                "NUMBER_OF_SUBGRAPHS": sum(1 for _ in region_nodes(cut)),
                **placed,
            },
            pipeline=_stages(cut, homes) if options.PIPELINE else (),
            source=source,
            stored=stored,
            configs=listed.configs,
            core=self.core,
        )

    def import_graph(
        self, graph: Graph, config: Config, header: Mapping[str, Any], stored: StoredWeights
    ) -> CompiledModel:
        """Return the model of a graph that was partitioned before the export.

        Args:
            graph: The graph, with a subgraph node for each region.
            config: Options of HETERO and its devices.
            header: Header of the file.
            stored: The packed weights of the file.
        """
        listed = self._with_affinities(self.configured(config), graph)
        for node in region_nodes(graph):
            device = self.peer((node.metadata or {}).get(AFFINITY, REFERENCE))
            if node.subgraph is not None and not device.without_regions:
                node.op = _imported_op(node.subgraph, device, listed)
        self._compile_regions(graph, listed)
        found: Mapping[str, Any] = header["metrics"]
        placed: dict[str, Any] = {"REFUSED_AFFINITIES": found.get("REFUSED_AFFINITIES", {})}
        if "PLACEMENT_TABLE" in found:
            placed["PLACEMENT_TABLE"] = PlacementTable(found["PLACEMENT_TABLE"])
        return self._finished(graph, listed, placed, stored=stored)

    def request_range(self) -> tuple[int, int, int]:
        """Return up to one request on each device."""
        return 1, max(1, len(self.listed_devices())), 1


def _of_regions(graph: Graph, whole: Graph, found: QueryResult) -> QueryResult:
    """Return the query result of a graph with default regions from that of the graph without them.

    A region that several devices run has their names, separated by commas.

    Args:
        graph: The graph; its nodes of `DefaultSubgraphOp` are regions of the user.
        whole: The graph with these regions inlined.
        found: Query result of ``whole``.
    """
    members: dict[str, list[str]] = {node.name: [] for node in graph.nodes}
    for node in whole.nodes:
        members[(node.metadata or {}).get(REGION, node.name)].append(node.name)
    homes: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for name, inside in members.items():
        refusals = (found.reasons.get(each, "") for each in inside if each not in found)
        reason = next(refusals, None)
        if reason is None:
            homes[name] = ",".join(dict.fromkeys(found[each] for each in inside)) or REFERENCE
        else:
            reasons[name] = reason
    return QueryResult(homes, reasons, weights=found.weights & {*homes}, refused=found.refused)


def _fallback_of(device: Device, listed: DeviceList) -> DeviceList:
    """Return the devices to which a region of ``device`` falls back; none if that is off."""
    others = listed.without(device)
    return others if listed.options.RUNTIME_FALLBACK else attrs.evolve(others, devices=[])


def _imported_op(subgraph: Graph, device: Device, listed: DeviceList) -> SubgraphOp:
    """Return the op of a region of a file, without a compilation if its device can restore it.

    Returns:
        The op; a `CutOp` if the device overrides ``compile_model`` or refuses the region, which
        `compile_region` then compiles.
    """
    if type(device).compile_model is not Device.compile_model:
        return CutOp(subgraph)
    try:
        op = device.region_op(subgraph, device.options_for(listed.config_of(device)))
    except (DeviceError, UnsupportedOpError):
        return CutOp(subgraph)
    op.fallback = DeviceFallback(subgraph, op, _fallback_of(device, listed))
    return op


def _typed(graph: Graph) -> Graph:
    """Return a graph with the types of its values, for which a library compiles a region.

    A graph with a node that is wrong stays as it is; the device that gets the node says so.
    """
    if any(value.type is None for value in graph.values()):
        with suppress(SubgraphError):
            return apply_pass(graph, "InferTypes")
    return graph


def _stages(graph: Graph, homes: Mapping[Node, str]) -> list[tuple[str, int, int]]:
    """Return (device, first node, end) of consecutive nodes of one device; none if all have one."""
    stages: list[tuple[str, int, int]] = []
    end = 0
    # `groupby` merges neighbours only: a device that runs nodes before and after another one has
    # two stages.
    for home, nodes in groupby(graph.nodes, homes.__getitem__):
        begin, end = end, end + len(list(nodes))
        stages.append((home, begin, end))
    return stages if len(stages) > 1 else []
