"""MULTI: the whole model on each of several devices; requests are spread over them.

"MULTI:A,B" compiles for A and B. Each request is bound to the device that has the fewest for what
it can bear at a time. When a device fails, its requests move to the others; that is logged once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import IO, Any

import attrs

from subgraph.compiled_model import CompiledModel
from subgraph.device import Config, Device, QueryResult
from subgraph.device_calls import query_on
from subgraph.devices._virtual import VirtualDevice, listed, split_config
from subgraph.errors import (
    BlobError,
    ConfigError,
    DeviceError,
    RequestCancelledError,
    SubgraphError,
)
from subgraph.executor import Cancel, all_parameters
from subgraph.export import ALLOW_RECOMPILE, export_several, import_model
from subgraph.forking import free_in_child
from subgraph.graph import Graph
from subgraph.regions import without_device_regions
from subgraph.runner import Runner
from subgraph.settings import DeviceOptions, option
from subgraph.sharing import shared_out
from subgraph.subgraph_op import ProfileEntry

_log = logging.getLogger("subgraph")


@attrs.frozen
class MultiOptions(DeviceOptions):
    """Options of MULTI; those of its devices are given under their names."""

    DEVICE_PRIORITIES: str = option("", "devices in order of priority, separated by commas")


class MultiDevice(VirtualDevice):
    """Several devices, each with the whole model."""

    options_class = MultiOptions
    caches = False

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that every device of the list supports."""
        devices, configs, _ = self._devices(config)
        reasons: dict[str, str] = {}
        for device in devices:
            found = query_on(device, graph, configs[device.name] or None)
            if device.fallback:
                continue  # it has devices behind it for what it lacks
            given = getattr(found, "reasons", {})
            for node in graph.nodes:
                if node.name not in found:
                    text = given.get(node.name, f"{device.name} does not support it")
                    reasons.setdefault(node.name, text)
        supported = {n.name: self.name for n in graph.nodes if n.name not in reasons}
        return QueryResult(supported, reasons)

    def _devices(
        self, config: Config | None
    ) -> tuple[list[Device], dict[str, dict[str, Any]], MultiOptions]:
        config = config or {}
        own = {k: v for k, v in config.items() if k in attrs.fields_dict(MultiOptions)}
        options: MultiOptions = self.options_for(own)
        devices = [self.peer(name) for name in listed(options.DEVICE_PRIORITIES, self.name)]
        configs = split_config(config, own, devices, self.name)
        return devices, configs, options

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile the model for every device of the list, all at once.

        Raises:
            DeviceError: no device could compile it; each one's reason.
        """
        devices, configs, options = self._devices(config)
        core = self.known_core

        def compile_for(device: Device) -> CompiledModel:
            return core.compile_model(graph, device.name, configs[device.name] or None)

        return MultiModel(graph, _for_each(devices, compile_for, graph.name), options, configs)

    def import_parts(self, parts: Mapping[str, memoryview], config: Config) -> CompiledModel:
        """Import each device's model; one that is missing is compiled of another's graph.

        The models share their parameters. What the others need not look into stays unread.
        """
        wanted = listed(str(config.get("DEVICE_PRIORITIES", "")), self.name)
        unused = {ALLOW_RECOMPILE, *parts} - set(wanted)
        own = {key: value for key, value in config.items() if key not in unused}
        devices, configs, options = self._devices(own)
        allowed = bool(config.get(ALLOW_RECOMPILE, True))
        known = [name for name in parts if any(name == device.name for device in devices)]
        name = known[0] if known else next(iter(parts))
        first = import_model(
            self.peer(name), parts[name], {**configs.get(name, {}), ALLOW_RECOMPILE: allowed}
        )
        weights = {p.name: p for p in all_parameters(first.graph)}

        def import_for(device: Device) -> CompiledModel:
            if device.name == name:
                return first
            options = configs[device.name]
            part = parts.get(device.name)
            try:
                if part is not None:
                    strictly = {**options, ALLOW_RECOMPILE: False}
                    return import_model(device, part, strictly, weights)
            except BlobError:
                if not allowed:
                    raise
            graph = without_device_regions(first.graph)
            return self.known_core.compile_model(graph, device.name, options or None)

        models = _for_each(devices, import_for, first.name)
        return MultiModel(first.graph, models, options, configs)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics."""
        return {**super().metrics(), "FULL_DEVICE_NAME": "Several devices side by side"}


def _for_each(
    devices: Sequence[Device], make: Callable[[Device], CompiledModel], name: str
) -> dict[str, CompiledModel]:
    """Make a model for each device, all at once; warn of those that cannot.

    Raises:
        DeviceError: none can; each one's reason.
    """
    failures: list[str] = []

    def attempt(device: Device) -> CompiledModel | None:
        try:
            return make(device)
        except ConfigError:
            raise
        except SubgraphError as error:
            failures.append(f"{device.name}: {error}")
            return None

    compiled = shared_out(attempt, devices, len(devices))
    made = dict(zip((d.name for d in devices), compiled, strict=True))
    models = {device: model for device, model in made.items() if model is not None}
    if not models:
        raise DeviceError(f"no device of MULTI can run {name!r}: {'; '.join(failures)}")
    for failure in failures:
        _log.warning("MULTI goes on without a device: %s", failure)
    return models


class MultiModel(CompiledModel):
    """The compiled models of several devices as one."""

    def __init__(
        self,
        graph: Graph,
        by_device: Mapping[str, CompiledModel],
        options: MultiOptions,
        configs: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """Spread requests over the models, which are given by the device's name."""
        models = list(by_device.values())
        names = [model.device for model in models]
        super().__init__(
            graph.clone(),
            device=f"MULTI:{','.join(names)}",
            options=options,
            configs=configs,
            requests=sum(model.optimal_requests for model in models),
            source=graph,
        )
        self.by_device = dict(by_device)
        self.models = models
        self._load = _Load(self.device, models)

    @property
    def execution_devices(self) -> list[str]:
        """Names of the devices that take requests: those that have not failed."""
        return [model.device for model in self._load.usable()]

    def export_model(self, target: str | PathLike[str] | IO[bytes]) -> None:
        """Write one file with the models of all devices."""
        export_several(self, self.by_device, target)

    def create_runner(self, cancel: Cancel) -> Runner:
        """Return a runner on the least loaded device."""
        return _MultiRunner(self._load, cancel)

    def create_profiler(self) -> Runner:
        """Return a measuring runner of the first device."""
        return self.models[0].create_profiler()


class _Load:
    """Who runs how many requests; runners refer to it and not to the model that keeps them."""

    def __init__(self, owner: str, models: Sequence[CompiledModel]) -> None:
        self._owner = owner
        self._models = models
        self._load = dict.fromkeys(models, 0)
        self._lock = free_in_child(threading.Lock())

    def take(self) -> CompiledModel:
        """Return the model of the device with the least load, and count a request for it.

        Raises:
            DeviceError: every device has failed.
        """
        with self._lock:
            if not self._load:
                raise DeviceError(f"every device of {self._owner} has failed")
            order = {model: k for k, model in enumerate(self._models)}
            model = min(self._load, key=lambda m: (self._load[m] / m.optimal_requests, order[m]))
            self._load[model] += 1
            return model

    def usable(self) -> list[CompiledModel]:
        """Return the models of the devices that have not failed, in order of priority."""
        return [model for model in self._models if model in self._load]

    def give_back(self, model: CompiledModel) -> None:
        """Count a request less."""
        with self._lock:
            if model in self._load:
                self._load[model] -= 1

    def drop(self, model: CompiledModel, error: Exception) -> bool:
        """Use a failed device no more; False if it is the last one."""
        with self._lock:
            if model not in self._load:
                return bool(self._load)
            if len(self._load) == 1:
                return False
            del self._load[model]
        _log.warning("MULTI goes on without device %s, which failed: %s", model.device, str(error))
        return True


class _MultiRunner(Runner):
    """Runs on one device until it fails, then on the next."""

    def __init__(self, load: _Load, cancel: Cancel) -> None:
        super().__init__(cancel)
        self._load = load
        self._move()

    def _move(self) -> None:
        self._model = self._load.take()
        self.cancel.sessions.clear()  # else those of the device that failed would live on
        self._runner = self._model.create_runner(self.cancel)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        while True:
            self._runner.outputs = self.outputs
            try:
                return self._runner.run(inputs)
            except RequestCancelledError:
                raise
            except DeviceError as error:
                if not error.lost or not self._load.drop(self._model, error):
                    raise
            self._move()

    def profile(self) -> list[ProfileEntry]:
        return self._runner.profile()

    def __del__(self) -> None:
        model = getattr(self, "_model", None)
        if model is not None:
            self._load.give_back(model)
