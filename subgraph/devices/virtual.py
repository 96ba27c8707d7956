"""The base classes of HETERO, MULTI, AUTO, BATCH and their models: devices and configurations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from typing import IO, Any

from subgraph.devices.calls import known_properties, property_of, query_on
from subgraph.devices.device import Config, Device, DeviceList, DeviceTable
from subgraph.devices.query import QueryResult
from subgraph.errors import ConfigError, DeviceError, SubgraphError
from subgraph.graph.graph import Graph
from subgraph.partition.regions import without_device_regions
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.runner import Runner
from subgraph.runtime.settings import current_name, option_names, options_among
from subgraph.system.registry import nearest
from subgraph.weights.cache import StoredWeights


class VirtualDevice(Device):
    """A device that runs models on other devices of its Core."""

    is_virtual = True

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that every device of the list supports."""
        listed = self.configured(config)
        reasons: dict[str, str] = {}
        for device in listed.devices:
            found = query_on(device, graph, listed.config_of(device))
            if device.fallback:
                continue  # its fallback devices run the other nodes
            for node in graph.nodes:
                if node.name not in found:
                    text = found.reasons.get(node.name, f"{device.name} does not support it")
                    reasons.setdefault(node.name, text)
        supported = {n.name: self.name for n in graph.nodes if n.name not in reasons}
        return QueryResult(supported, reasons)

    def import_graph(
        self, graph: Graph, config: Config, header: Mapping[str, Any], stored: StoredWeights
    ) -> CompiledModel:
        """Compile the graph of a file again, since it has no regions of this device.

        Args:
            graph: The graph.
            config: The device's options.
            header: Not used.
            stored: Not used.
        """
        return self.compile_model(without_device_regions(graph), config)

    def candidates(self, options: Any) -> list[Device]:
        """Return the devices of the option ``DEVICE_PRIORITIES`` in order.

        Raises:
            ConfigError: it lists none.
            DeviceError: one of them is unknown or cannot start.
        """
        return [self.peer(name) for name in self.names_of(options.DEVICE_PRIORITIES)]

    def names_of(self, priorities: str) -> list[str]:
        """Return the names of the devices of a list ``DEVICE_PRIORITIES``.

        Raises:
            ConfigError: the list is empty, has an empty item, or has a device twice.
        """
        return device_names(priorities, self.name)

    def configured(self, config: Config | None) -> DeviceList:
        """Return the devices in order, the options of each, and the options of this device.

        All devices profile if this one does. If Core caches its models, theirs are not cached.

        Raises:
            ConfigError: an option is unknown to this device and the others.
        """
        own = option_names(self.options_class)
        options: Any = self.options_for(options_among(self.options_class, config or {}))
        devices = self.candidates(options)
        left_out = {"CACHE_DIR"} if self.caches else set[str]()
        rest = {key: value for key, value in (config or {}).items() if key not in left_out}
        configs = split_config(rest, own, devices, self.name)
        for device in devices if options.ENABLE_PROFILING else ():
            if "ENABLE_PROFILING" in known_properties(device):
                configs[device.name].setdefault("ENABLE_PROFILING", True)
        return DeviceList(devices, configs, options)

    def listed_devices(self) -> list[Device]:
        """Return the devices of the option ``DEVICE_PRIORITIES``; if unset, all that can start."""
        names = str(self.get_property("DEVICE_PRIORITIES"))
        core = self.known_core
        chosen = self.names_of(names) if names.strip() else core.available_devices
        return [self.peer(name) for name in chosen]

    def _max_requests(self) -> list[int]:
        """Return the largest useful number of concurrent requests of each listed device."""
        found = (property_of(d, "RANGE_FOR_ASYNC_INFER_REQUESTS") for d in self.listed_devices())
        return [int(each[1]) for each in found] or [1]

    @property
    def known_core(self) -> DeviceTable:
        """The Core.

        Raises:
            DeviceError: the device is not registered with one.
        """
        if self.core is None:
            raise DeviceError(f"{self.name} must be registered with a Core to find other devices")
        return self.core

    def peer(self, name: str) -> Device:
        """Return another device, which must not be a virtual one.

        Raises:
            ConfigError: it is virtual.
            DeviceError: there is no such device, or it cannot start.
        """
        # HETERO of HETERO would have two lists of priorities and no rule which one decides.
        device = self.known_core.device(name.partition(":")[0])
        if device.is_virtual:
            raise ConfigError(f"{self.name} cannot run {name!r}, which is a list of devices itself")
        return self.known_core.device(name)


class VirtualModel(CompiledModel):
    """A model of a virtual device, whose requests other models run."""

    @property
    def running(self) -> Sequence[CompiledModel]:
        """The models that run requests now."""
        raise NotImplementedError

    @property
    def execution_devices(self) -> list[str]:
        """Names of the devices that run requests now."""
        names = (name for model in self.running for name in model.execution_devices)
        return list(dict.fromkeys(names))

    @property
    def fallbacks(self) -> dict[str, dict[str, Any]]:
        """Failures of regions of the first model that runs now."""
        return self.running[0].fallbacks

    @property
    def region_strategies(self) -> dict[str, dict[str, Any]]:
        """How the calls of each region of the first model that runs now were served."""
        return self.running[0].region_strategies

    def export_model(self, target: str | PathLike[str] | IO[bytes]) -> None:
        """Export the first model that runs now."""
        self.running[0].export_model(target)

    def create_profiler(self) -> Runner:
        """Return a measuring runner of the first model that runs now."""
        return self.running[0].create_profiler()


def device_names(priorities: str, device: str) -> list[str]:
    """Return the device names of a list "A,B".

    Args:
        priorities: The list.
        device: Name of the virtual device, for the message.

    Raises:
        ConfigError: the list is empty, has an empty item, or has a device twice.
    """
    if not priorities.strip():
        raise ConfigError(f"{device} needs devices: '{device}:A,B' or DEVICE_PRIORITIES='A,B'")
    names = [name.strip() for name in priorities.split(",")]
    listed = list(dict.fromkeys(filter(None, names)))
    if names != listed:
        twice = next((name for name in listed if names.count(name) > 1), None)
        wrong = "an item is empty" if twice is None else f"{twice!r} is there twice"
        advice = f"; write '{device}:{','.join(listed)}'" if listed else ""
        raise ConfigError(f"{device} cannot use the list {priorities!r}: {wrong}{advice}")
    return names


def split_config(
    config: Config, own: Collection[str], devices: Sequence[Device], name: str
) -> dict[str, dict[str, Any]]:
    """Return the configuration of each device, by its name.

    Args:
        config: Options of a device in a dict under its name; other options are for every device
            that has them. Those under a device's name take precedence.
        own: Names of the options of the virtual device itself.
        devices: The devices.
        name: Name of the virtual device, for the message.

    Raises:
        ConfigError: neither the virtual device nor one of the devices has an option.
    """
    out: dict[str, dict[str, Any]] = {device.name: {} for device in devices}
    flat: dict[str, dict[str, Any]] = {device.name: {} for device in devices}
    known = {device.name: known_properties(device) for device in devices}
    for key, value in config.items():
        if key in out and isinstance(value, dict):
            out[key].update(value)  # pyright: ignore[reportUnknownArgumentType]
            continue
        own_key = current_name(key, own)
        if own_key == "DEVICE_PRIORITIES":
            continue
        keys = {device: current_name(key, names) for device, names in known.items()}
        takers = [device for device, name in keys.items() if name in known[device]]
        if own_key not in own and not takers:
            names = {*own, *out, *(k for each in known.values() for k in each)}
            raise ConfigError(
                f"{name} and its devices have no option {key!r}; {nearest(key, sorted(names))}"
            )
        # An id is that of one kind of device; the name "OPENCL.1" states it for a device of a list.
        if key != "DEVICE_ID":
            for device in takers:
                flat[device][keys[device]] = value
    return {device: {**flat[device], **nested} for device, nested in out.items()}


def attempt(
    make: Callable[[Device], CompiledModel], device: Device, failures: list[str]
) -> CompiledModel | None:
    """Return the model that ``make`` compiles for a device, or None.

    Args:
        make: Compiles the model.
        device: The device.
        failures: Gets the reason if it fails.

    Raises:
        ConfigError: the configuration is wrong.
    """
    try:
        return make(device)
    except ConfigError:
        # Another device would not correct the user's mistake.
        raise
    except SubgraphError as error:
        failures.append(f"{device.name}: {error}")
        return None
