"""MULTI: the whole model on each of several devices; requests are spread over them.

"MULTI:A,B" compiles for A and B. Each request is bound to the device that has the fewest for what
it can bear at a time. When a device fails, its requests move to the others; that is logged once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import attrs

from subgraph.compiled_model import CompiledModel
from subgraph.device import Config, Device, QueryResult
from subgraph.devices._virtual import VirtualDevice, listed, split_config
from subgraph.errors import ConfigError, DeviceError, RequestCancelledError, SubgraphError
from subgraph.executor import Cancel
from subgraph.graph import Graph
from subgraph.runner import Runner
from subgraph.settings import DeviceOptions, option
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
            found = device.query_model(graph, configs[device.name] or None)
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
        failures: list[str] = []

        def compile_for(device: Device) -> CompiledModel | None:
            try:
                return core.compile_model(graph, device.name, configs[device.name] or None)
            except ConfigError:
                raise
            except SubgraphError as error:
                failures.append(f"{device.name}: {error}")
                return None

        with ThreadPoolExecutor(len(devices), "subgraph-compile") as pool:
            models = [model for model in pool.map(compile_for, devices) if model is not None]
        if not models:
            raise DeviceError(f"no device of MULTI can run {graph.name!r}: {'; '.join(failures)}")
        for failure in failures:
            _log.warning("MULTI goes on without a device: %s", failure)
        return MultiModel(graph, models, options)

    def metrics(self) -> dict[str, Any]:
        """Return the metrics."""
        return {**super().metrics(), "FULL_DEVICE_NAME": "Several devices side by side"}


class MultiModel(CompiledModel):
    """The compiled models of several devices as one."""

    def __init__(
        self, graph: Graph, models: Sequence[CompiledModel], options: MultiOptions
    ) -> None:
        """Spread requests over ``models``."""
        names = [model.device for model in models]
        super().__init__(
            graph.clone(),
            device=f"MULTI:{','.join(names)}",
            options=options,
            requests=sum(model.optimal_requests for model in models),
            metrics={"EXECUTION_DEVICES": names},
            source=graph,
        )
        self.models = list(models)
        self._load = dict.fromkeys(models, 0)
        self._load_lock = threading.Lock()

    def create_runner(self, cancel: Cancel) -> Runner:
        """Return a runner on the least loaded device."""
        return _MultiRunner(self, cancel)

    def create_profiler(self) -> Runner:
        """Return a measuring runner of the first device."""
        return self.models[0].create_profiler()

    def take(self) -> CompiledModel:
        """Return the model of the device with the least load, and count a request for it.

        Raises:
            DeviceError: every device has failed.
        """
        with self._load_lock:
            if not self._load:
                raise DeviceError(f"every device of {self.device} has failed")
            order = {model: k for k, model in enumerate(self.models)}
            model = min(self._load, key=lambda m: (self._load[m] / m.optimal_requests, order[m]))
            self._load[model] += 1
            return model

    def give_back(self, model: CompiledModel) -> None:
        """Count a request less."""
        with self._load_lock:
            if model in self._load:
                self._load[model] -= 1

    def drop(self, model: CompiledModel, error: Exception) -> bool:
        """Use a failed device no more; False if it is the last one."""
        with self._load_lock:
            if model not in self._load:
                return bool(self._load)
            if len(self._load) == 1:
                return False
            del self._load[model]
        _log.warning("MULTI goes on without device %s, which failed: %s", model.device, error)
        return True


class _MultiRunner(Runner):
    """Runs on one device until it fails, then on the next."""

    def __init__(self, owner: MultiModel, cancel: Cancel) -> None:
        super().__init__(cancel)
        self._owner = owner
        self._move()

    def _move(self) -> None:
        self._model = self._owner.take()
        self._runner = self._model.create_runner(self.cancel)

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        while True:
            self._runner.outputs = self.outputs
            try:
                return self._runner.run(inputs)
            except RequestCancelledError:
                raise
            except DeviceError as error:
                if not self._owner.drop(self._model, error):
                    raise
            self._move()

    def profile(self) -> list[ProfileEntry]:
        return self._runner.profile()

    def __del__(self) -> None:
        model = getattr(self, "_model", None)
        if model is not None:
            self._owner.give_back(model)
