"""What HETERO, MULTI and AUTO share: lists of other devices and their configurations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from subgraph.devices.calls import known_properties, property_of
from subgraph.devices.device import Config, Device, DeviceTable
from subgraph.errors import ConfigError, DeviceError
from subgraph.graph.graph import Graph
from subgraph.partition.regions import without_device_regions
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.settings import current_name
from subgraph.system.registry import nearest
from subgraph.weights.cache import StoredWeights


class VirtualDevice(Device):
    """A device that runs models on other devices of its Core."""

    is_virtual = True

    def import_graph(
        self, graph: Graph, config: Config, header: Mapping[str, Any], stored: StoredWeights
    ) -> CompiledModel:
        """Compile the graph of a file anew: it holds no regions of this device."""
        return self.compile_model(without_device_regions(graph), config)

    def listed_devices(self) -> list[Device]:
        """Return the devices that ``DEVICE_PRIORITIES`` is set to; all that can start if it is not.

        Devices that stand over others are none of them.
        """
        names = str(self.get_property("DEVICE_PRIORITIES"))
        core = self.known_core
        chosen = listed(names, self.name) if names.strip(" ,") else core.available_devices
        return [self.peer(name) for name in chosen]

    def _most_requests(self) -> list[int]:
        """Return how many requests at a time are of use for each listed device."""
        found = (property_of(d, "RANGE_FOR_ASYNC_INFER_REQUESTS") for d in self.listed_devices())
        return [int(each[1]) for each in found] or [1]

    @property
    def known_core(self) -> DeviceTable:
        """The Core, which knows the other devices."""
        if self.core is None:
            raise DeviceError(f"{self.name} must be registered with a Core to find other devices")
        return self.core

    def peer(self, name: str) -> Device:
        """Return another device, one that runs models itself.

        Raises:
            ConfigError: it is a list of devices, too.
            DeviceError: there is none of that name, or it cannot start.
        """
        device = self.known_core.device(name)
        if device.is_virtual:
            raise ConfigError(f"{self.name} cannot run {name!r}, which is a list of devices itself")
        return device


def listed(priorities: str, device: str) -> list[str]:
    """Return the device names of a list "A,B", each once.

    Raises:
        ConfigError: there are none.
    """
    names = [name.strip() for name in priorities.split(",") if name.strip()]
    if not names:
        raise ConfigError(f"{device} needs devices: '{device}:A,B' or DEVICE_PRIORITIES='A,B'")
    return list(dict.fromkeys(names))


def split_config(
    config: Config, own: Config, devices: Sequence[Device], name: str
) -> dict[str, dict[str, Any]]:
    """Return each device's own configuration: nested by its name, or flat keys that it knows.

    Raises:
        ConfigError: a key is an option of nobody.
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
        if key != "DEVICE_ID":
            for device in takers:
                flat[device][keys[device]] = value
    return {device: {**flat[device], **nested} for device, nested in out.items()}
