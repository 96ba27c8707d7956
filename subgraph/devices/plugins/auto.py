"""AUTO: chooses a device; models run on CPU until the chosen device is ready.

Candidates are the devices of "AUTO:A,B", or all that are available: graphics processors and
accelerators, then CPU, then others, REFERENCE last. With ``MEASURE`` each candidate runs the model
and the fastest is chosen. With ``PLACEMENT=COST`` each candidate also runs regions of the model,
and HETERO runs the model if several devices together are faster than each alone. If a run fails on
the chosen device, the other candidates repeat it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from typing import IO, Any

import attrs
import numpy as np

from subgraph.devices.calls import query_on
from subgraph.devices.device import Config, Device
from subgraph.devices.export import region_nodes
from subgraph.devices.fallback import add_fallback
from subgraph.devices.placement.chooser import (
    PROFILE_ABOUT,
    HeteroPlacement,
    MeasuredPlacement,
    with_affinities,
)
from subgraph.devices.placement.profiles import sample_inputs, seconds_of_runs
from subgraph.devices.virtual import VirtualDevice, attempt, device_names
from subgraph.errors import DeviceError, SubgraphError
from subgraph.graph.graph import Graph
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.operators.subgraph_op import ProfileEntry, Session
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.runner import Runner
from subgraph.runtime.settings import DeviceOptions, option
from subgraph.system.exiting import uninterrupted
from subgraph.weights.parallel import start_threads

_log = logging.getLogger("subgraph")
_START_DEVICE = "CPU"  # compiles fast and, with its fallback, runs every model


@attrs.frozen
class AutoOptions(DeviceOptions):
    """Options of AUTO; those of its devices are given under their names."""

    DEVICE_PRIORITIES: str = option("", "candidates in order; empty: all devices, best first")
    MEASURE: bool = option(False, "run the model on each candidate and keep the fastest")
    PLACEMENT: str = option(
        "PRIORITY",
        "the whole model on one device; or each region where a request takes least time, by "
        "measured times (COST)",
        values=("PRIORITY", "COST"),
    )
    PROFILE: str = option("", PROFILE_ABOUT, saved=False)
    START_ON_CPU: bool = option(True, "run on CPU while another device compiles")


class AutoDevice(VirtualDevice):
    """Chooses one of several devices for each model."""

    options_class = AutoOptions
    caches = False

    def candidates(self, options: Any) -> list[Device]:
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

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that the first candidate supports; by cost the device of each node."""
        options, devices, configs = self.configured(config)
        if options.PLACEMENT == "COST":
            return self._by_cost(devices, configs, options).place(graph)
        return query_on(devices[0], graph, configs[devices[0].name] or None)

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile for the chosen device.

        Raises:
            DeviceError: no candidate can run the model; the message has the reason of each.
        """
        options, devices, configs = self.configured(config)
        if options.PLACEMENT == "COST":
            return self._placed(graph, devices, configs, options)
        first, failures = devices[0], list[str]()

        def compiled(device: Device) -> CompiledModel:
            return self._compile_one(graph, device, devices, configs, options)

        if options.MEASURE and len(devices) > 1:
            found = {device.name: attempt(compiled, device, failures) for device in devices}
            models = {name: model for name, model in found.items() if model is not None}
            if models:
                seconds = seconds_of_runs(models, sample_inputs(graph))
                return models[min(seconds, key=seconds.__getitem__)]
            devices = []  # none compiles it
        starter = next((d for d in devices if d.name == _START_DEVICE), None)
        if options.START_ON_CPU and starter is not None and first is not starter:
            start = attempt(compiled, starter, failures)
            if start is not None:
                return AutoModel(graph, start, lambda: compiled(first), options)
            devices = [device for device in devices if device is not starter]
        for device in devices:
            model = attempt(compiled, device, failures)
            if model is not None:
                return model
        raise DeviceError(f"no device can run {graph.name!r}: {'; '.join(failures)}")

    def _compile_one(
        self,
        graph: Graph,
        device: Device,
        candidates: Sequence[Device],
        configs: Mapping[str, dict[str, Any]],
        options: AutoOptions,
    ) -> CompiledModel:
        """Compile for one candidate; the others become the fallback of regions that have none."""
        model = self.known_core.compile_model(graph, device.name, configs[device.name] or None)
        others = [other for other in candidates if other is not device]
        for node in region_nodes(model.graph):
            add_fallback(node, others, configs, options)
        return model

    def _by_cost(
        self,
        devices: Sequence[Device],
        configs: Mapping[str, dict[str, Any]],
        options: AutoOptions,
    ) -> HeteroPlacement:
        measured = MeasuredPlacement("COST", options.PROFILE)
        return HeteroPlacement(devices, configs, self.peer, measured)

    def _placed(
        self,
        graph: Graph,
        devices: Sequence[Device],
        configs: dict[str, dict[str, Any]],
        options: AutoOptions,
    ) -> CompiledModel:
        """Compile for the placement by measured times, by HETERO if it has several devices."""
        placement = self._by_cost(devices, configs, options)
        homes = placement.place(graph)
        alone = next((d for d in devices if d.name == placement.table["alone"]), None)
        if alone is not None:
            model = self._compile_one(graph, alone, devices, configs, options)
        else:
            names = ",".join(device.name for device in devices)
            marked = with_affinities(graph, homes)
            model = self.known_core.compile_model(marked, f"HETERO:{names}", configs)
        model.metrics["PLACEMENT_TABLE"] = placement.table
        return model

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


class AutoModel(CompiledModel):
    """Runs on the start device until the chosen one has compiled the model.

    Attributes:
        current: The model of the device that runs now.
        ready: Set when no other model is being compiled any more.
        seen: Shapes and dtypes of the arrays of the last run before that; before the first run
            those of the graph's inputs, None if they are not all known.
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
        self.seen = _static_types(graph)
        thread = threading.Thread(target=self._improve, args=(make_better,), daemon=True)
        if not start_threads([thread]):
            _log.warning("AUTO stays on %s: no thread can be started", self.current.device)
            self.ready.set()

    def _improve(self, make_better: Callable[[], CompiledModel]) -> None:
        try:
            with uninterrupted:
                better = make_better()
                self._warm_up(better)
                self.current = better
        except Exception as error:
            _log.warning("AUTO stays on %s: %s", self.current.device, str(error))
        finally:
            self.ready.set()

    def _warm_up(self, better: CompiledModel) -> None:
        """Run a model once on zeros, so that no request waits for what a first run prepares.

        A model with regions of a user's property is not run: their ops may count or keep things.
        """
        if self.seen is None or any(region_nodes(self.graph)):
            return
        with suppress(SubgraphError, MemoryError):  # a request that fails alike has its fallback
            better.create_infer_request().infer([np.zeros(*known) for known in self.seen])

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


def _static_types(graph: Graph) -> list[tuple[tuple[int, ...], Any]] | None:
    """Return shapes and dtypes of the inputs; None if one of them is unknown or no tensor."""
    found: list[tuple[tuple[int, ...], Any]] = []
    for value in graph.inputs:
        type_ = value.type
        if not isinstance(type_, TensorType) or type_.shape is None:
            return None
        sizes = tuple(size for size in type_.shape if isinstance(size, int))
        if len(sizes) < len(type_.shape):
            return None
        found.append((sizes, numpy_dtype(type_.dtype)))
    return found


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
        elif not self._owner.ready.is_set() and all(isinstance(x, np.ndarray) for x in inputs):
            self._owner.seen = [(x.shape, x.dtype) for x in inputs]
        self._runner.outputs = self.outputs
        return self._runner.run(inputs)

    def sessions(self) -> dict[str, Session]:
        return self._runner.sessions()

    def profile(self) -> list[ProfileEntry]:
        return self._runner.profile()
