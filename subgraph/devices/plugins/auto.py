"""AUTO: chooses a device; models run on CPU while the chosen device compiles.

Candidates are the devices of "AUTO:A,B", or all that are available: graphics processors and
accelerators, then CPU, then others, REFERENCE last. With ``MEASURE`` each candidate runs the model
and the fastest is chosen.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from os import PathLike
from typing import IO, Any

import attrs
import numpy as np

from subgraph.devices.calls import query_on
from subgraph.devices.device import Config, Device
from subgraph.devices.virtual import VirtualDevice, device_names, split_config
from subgraph.errors import ConfigError, DeviceError, SubgraphError
from subgraph.graph.graph import Graph
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.operators.subgraph_op import ProfileEntry, Session
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.runner import Runner
from subgraph.runtime.settings import DeviceOptions, option, options_among
from subgraph.runtime.signature import Port
from subgraph.system.exiting import uninterrupted
from subgraph.weights.parallel import start_threads

_log = logging.getLogger("subgraph")
_START_DEVICE = "CPU"  # compiles fast and, with its fallback, runs every model


@attrs.frozen
class AutoOptions(DeviceOptions):
    """Options of AUTO; those of its devices are given under their names."""

    DEVICE_PRIORITIES: str = option("", "candidates in order; empty: all devices, best first")
    MEASURE: bool = option(False, "run the model on each candidate and keep the fastest")
    START_ON_CPU: bool = option(True, "run on CPU while another device compiles")


class AutoDevice(VirtualDevice):
    """Chooses one of several devices for each model."""

    options_class = AutoOptions
    caches = False

    def candidates(self, options: AutoOptions) -> list[Device]:
        """Return the devices to choose from, the best first.

        Raises:
            DeviceError: none can start; the message has the reason of each.
        """
        core = self.known_core
        if options.DEVICE_PRIORITIES:
            names = device_names(options.DEVICE_PRIORITIES, self.name)
        else:
            names = sorted(core.available_devices, key=lambda name: _rank(core.device(name)))
        found: list[Device] = []
        failures: list[str] = []
        for name in names:
            try:
                found.append(self.peer(name))
            except DeviceError as error:
                failures.append(str(error))
        if not found:
            raise DeviceError(f"AUTO finds no device: {'; '.join(failures)}")
        return found

    def _split(
        self, config: Config | None
    ) -> tuple[AutoOptions, list[Device], dict[str, dict[str, Any]]]:
        config = config or {}
        own = options_among(AutoOptions, config)
        options: AutoOptions = self.options_for(own)
        devices = self.candidates(options)
        return options, devices, split_config(config, own, devices, self.name)

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that the first candidate supports."""
        _, devices, configs = self._split(config)
        return query_on(devices[0], graph, configs[devices[0].name] or None)

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile for the chosen device.

        Raises:
            DeviceError: no candidate can run the model; the message has the reason of each.
        """
        options, devices, configs = self._split(config)
        if options.MEASURE and len(devices) > 1:
            return self._fastest(graph, devices, configs)
        first, starter = devices[0], next((d for d in devices if d.name == _START_DEVICE), None)
        failures: list[str] = []
        if options.START_ON_CPU and starter is not None and first is not starter:
            try:
                start = self._compile_one(graph, starter, configs)
            except ConfigError:
                raise
            except SubgraphError as error:
                failures.append(f"{starter.name}: {error}")
                devices = [device for device in devices if device is not starter]
            else:
                return AutoModel(
                    graph, start, lambda: self._compile_one(graph, first, configs), options
                )
        for device in devices:
            try:
                return self._compile_one(graph, device, configs)
            except ConfigError:
                raise
            except SubgraphError as error:
                failures.append(f"{device.name}: {error}")
        raise DeviceError(f"no device can run {graph.name!r}: {'; '.join(failures)}")

    def _compile_one(
        self, graph: Graph, device: Device, configs: dict[str, dict[str, Any]]
    ) -> CompiledModel:
        return self.known_core.compile_model(graph, device.name, configs[device.name] or None)

    def _fastest(
        self, graph: Graph, devices: Sequence[Device], configs: dict[str, dict[str, Any]]
    ) -> CompiledModel:
        best: tuple[float, CompiledModel] | None = None
        failures: list[str] = []
        for device in devices:
            try:
                model = self._compile_one(graph, device, configs)
                seconds = seconds_per_run(model)
            except ConfigError:
                raise
            except SubgraphError as error:
                failures.append(f"{device.name}: {error}")
                continue
            if best is None or seconds < best[0]:
                best = (seconds, model)
        if best is None:
            raise DeviceError(f"no device can run {graph.name!r}: {'; '.join(failures)}")
        return best[1]

    def request_range(self) -> tuple[int, int, int]:
        """Return the range up to the largest number of any candidate."""
        return 1, max(self._max_requests()), 1

    def metrics(self) -> dict[str, Any]:
        """Return the metrics."""
        return {**super().metrics(), "FULL_DEVICE_NAME": "The best device there is"}


def _rank(device: Device) -> tuple[int, str]:
    """Return the sorting key of a device among AUTO's candidates."""
    if device.name == "REFERENCE":
        return 4, device.name
    if device.name == _START_DEVICE:
        return 1, device.name
    with suppress(Exception):  # a device whose metrics fail is one of the others
        if device.metrics().get("DEVICE_TYPE") in ("gpu", "accelerator"):
            return 0, device.name
    return (2 if device.name.startswith("OPENCL") else 3), device.name


def seconds_per_run(model: CompiledModel, repeats: int = 3) -> float:
    """Return the least time of a few runs on random inputs; unknown dimensions are 1.

    Args:
        model: The model.
        repeats: Number of runs after a first one.

    Raises:
        DeviceError: an input is not a tensor.
    """
    generator = np.random.default_rng(0)
    inputs = {p.name: _sample(p, generator) for p in model.inputs if p.default is None}
    model(inputs)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        model(inputs)
        best = min(best, time.perf_counter() - start)
    return best


def _sample(port: Port, generator: np.random.Generator) -> Any:
    if not isinstance(port.type, TensorType):
        raise DeviceError(f"input {port.name!r} is {port.type or 'unknown'}: AUTO cannot measure")
    shape = [d if isinstance(d, int) else 1 for d in port.type.shape or ()]
    dtype = numpy_dtype(port.type.dtype)
    if dtype.kind in "fc":
        return generator.standard_normal(shape).astype(dtype)
    return np.zeros(shape, dtype)


class AutoModel(CompiledModel):
    """Runs on the start device until the chosen one has compiled the model.

    Attributes:
        current: The model of the device that runs now.
        ready: Set when no other model is being compiled any more.
    """

    def __init__(
        self,
        graph: Graph,
        start: CompiledModel,
        make_better: Callable[[], CompiledModel],
        options: AutoOptions,
    ) -> None:
        """Run ``start`` and compile the better model in the background.

        Args:
            graph: The graph.
            start: Its model on the start device.
            make_better: Compiles the graph for the chosen device.
            options: Options of AUTO.
        """
        super().__init__(
            graph.clone(),
            device="AUTO",
            options=options,
            requests=start.optimal_requests,
            source=graph,
        )
        self.current = start
        self.ready = threading.Event()
        thread = threading.Thread(target=self._improve, args=(make_better,), daemon=True)
        if not start_threads([thread]):
            _log.warning("AUTO stays on %s: no thread can be started", self.current.device)
            self.ready.set()

    def _improve(self, make_better: Callable[[], CompiledModel]) -> None:
        try:
            with uninterrupted:
                self.current = make_better()
        except Exception as error:
            _log.warning("AUTO stays on %s: %s", self.current.device, str(error))
        finally:
            self.ready.set()

    @property
    def execution_devices(self) -> list[str]:
        """Names of the devices that run the model now."""
        return self.current.execution_devices

    def export_model(self, target: str | PathLike[str] | IO[bytes]) -> None:
        """Export the model of the device that runs now."""
        self.current.export_model(target)

    def create_profiler(self) -> Runner:
        """Return a measuring runner of the device that runs now."""
        return self.current.create_profiler()

    def create_runner(self, cancel: Cancel) -> Runner:
        """Return a runner that switches to the better model when it is ready."""
        return _AutoRunner(self, cancel)


class _AutoRunner(Runner):
    """Runs the current model of an `AutoModel`."""

    def __init__(self, owner: AutoModel, cancel: Cancel) -> None:
        super().__init__(cancel)
        self._owner = owner
        self._open()

    def _open(self) -> None:
        self._model = self._owner.current
        self._runner = self._model.create_runner(self.cancel)

    def _switch(self) -> None:
        """Continue with the better model, from the states of the first one, if it can be opened."""
        before, states = self._runner, self._runner.states()
        sessions, self.cancel.sessions = self.cancel.sessions, []  # so that they are freed
        try:
            self._open()
            if states:
                self._runner.set_states(states)
        except (SubgraphError, MemoryError) as error:
            _log.warning("a request stays on its first device: %s", str(error))
            self._runner, self.cancel.sessions = before, sessions

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self._owner.current is not self._model:
            self._switch()
        self._runner.outputs = self.outputs
        return self._runner.run(inputs)

    def sessions(self) -> dict[str, Session]:
        return self._runner.sessions()

    def profile(self) -> list[ProfileEntry]:
        return self._runner.profile()
