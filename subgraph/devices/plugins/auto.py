"""AUTO: chooses a device; models run on CPU until the chosen device is ready.

Candidates are the devices of "AUTO:A,B", or all that are available: graphics processors and
accelerators, then CPU, then others, REFERENCE last; "AUTO:-A" excludes a device. With ``MEASURE``
each candidate runs the model and the fastest is chosen. With ``PLACEMENT=COST`` each candidate also
runs regions of the model, and HETERO runs the model if several devices together are faster than
each alone. If a run fails on the chosen device, the other candidates repeat it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np

from subgraph.devices.calls import query_on
from subgraph.devices.device import Config, Device, DeviceList
from subgraph.devices.device_sources import unknown_device
from subgraph.devices.export import region_nodes
from subgraph.devices.fallback import add_fallback
from subgraph.devices.model_input import static_form
from subgraph.devices.placement.chooser import (
    PROFILE_ABOUT,
    HeteroPlacement,
    MeasuredPlacement,
    with_affinities,
)
from subgraph.devices.placement.profiles import sample_inputs, seconds_of_runs
from subgraph.devices.virtual import VirtualDevice, VirtualModel, attempt, device_names
from subgraph.errors import ConfigError, DeviceError, SubgraphError, message_of
from subgraph.graph.graph import Graph
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

    DEVICE_PRIORITIES: str = option(
        "", "candidates in order; empty: all devices, best first; -NAME excludes a device"
    )
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

    full_name = "The best device there is"
    options_class = AutoOptions
    caches = False

    def candidates(self, options: Any) -> list[Device]:
        """Return the devices to choose from, the best first.

        Raises:
            DeviceError: none can start; the message has the reason of each.
        """
        found: list[Device] = []
        failures: list[str] = []
        for name in self.names_of(options.DEVICE_PRIORITIES):
            try:
                found.append(self.peer(name))
            except DeviceError as error:
                failures.append(str(error))
        if not found:
            raise DeviceError(f"AUTO finds no device: {'; '.join(failures)}")
        return found

    def names_of(self, priorities: str) -> list[str]:
        """Return the names of the devices of a list "A,B", without those of items "-C".

        Without an item that names a device these are all that can start, the best first.

        Raises:
            ConfigError: the list has an empty item, has a device twice, or leaves none.
            DeviceError: a device that is excluded is unknown.
        """
        core = self.known_core
        items = device_names(priorities, self.name) if priorities else []
        excluded = {item[1:].strip() for item in items if item.startswith("-")}
        for name in excluded.difference(core.registered_devices):
            raise unknown_device(name, core.registered_devices)
        names = [item for item in items if not item.startswith("-")]
        if not names:
            names = sorted(core.available_devices, key=lambda name: _rank(core.device(name)))
        # "OPENCL" excludes "OPENCL.0" and "OPENCL.1", too.
        names = [name for name in names if excluded.isdisjoint((name, name.partition(".")[0]))]
        if not names:
            raise ConfigError(f"{self.name}: the list {priorities!r} excludes all devices")
        return names

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that the first candidate supports; by cost the device of each node."""
        listed = self.configured(config)
        if listed.options.PLACEMENT == "COST":
            return self._by_cost(listed).place(graph)
        first = listed.devices[0]
        return query_on(first, graph, listed.config_of(first))

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile for the chosen device.

        Raises:
            DeviceError: no candidate can run the model; the message has the reason of each.
        """
        listed = self.configured(config)
        options: AutoOptions = listed.options
        if options.PLACEMENT == "COST":
            return self._placed(graph, listed)
        failures: list[str] = []
        devices: Sequence[Device] = listed.devices
        first = devices[0]

        def compiled(device: Device) -> CompiledModel:
            return self._compile_one(graph, device, listed)

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
            listed = listed.without(starter)
            devices = listed.devices
        for device in devices:
            model = attempt(compiled, device, failures)
            if model is not None:
                return model
        raise DeviceError(f"no device can run {graph.name!r}: {'; '.join(failures)}")

    def _compile_one(self, graph: Graph, device: Device, listed: DeviceList) -> CompiledModel:
        """Compile for one candidate; the others become the fallback of regions that have none."""
        model = self.known_core.compile_model(graph, device.name, listed.config_of(device))
        others = listed.without(device)
        for node in region_nodes(model.graph):
            add_fallback(node, others)
        return model

    def _by_cost(self, listed: DeviceList) -> HeteroPlacement:
        measured = MeasuredPlacement("COST", listed.options.PROFILE)
        return HeteroPlacement(listed, self.peer, measured)

    def _placed(self, graph: Graph, listed: DeviceList) -> CompiledModel:
        """Compile for the placement by measured times, by HETERO if it has several devices."""
        placement = self._by_cost(listed)
        homes = placement.place(graph)
        alone = next((d for d in listed.devices if d.name == placement.table["alone"]), None)
        if alone is not None:
            model = self._compile_one(graph, alone, listed)
        else:
            names = ",".join(device.name for device in listed.devices)
            marked = with_affinities(graph, homes)
            model = self.known_core.compile_model(marked, f"HETERO:{names}", listed.configs)
        model.metrics["PLACEMENT_TABLE"] = placement.table
        return model

    def request_range(self) -> tuple[int, int, int]:
        """Return the range up to the largest number of any candidate."""
        return 1, max(self._max_requests()), 1


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


class AutoModel(VirtualModel):
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
        types = [static_form(value.type) for value in graph.inputs]
        self.seen = None if None in types else [each for each in types if each is not None]
        thread = threading.Thread(target=self._improve, args=(make_better,), daemon=True)
        if not start_threads([thread]):
            _log.warning("AUTO stays on %s: no thread can be started", self.current.device)
            self.ready.set()

    def _improve(self, make_better: Callable[[], CompiledModel]) -> None:
        try:
            # A process that ends waits for the compilation: the thread would otherwise run code of
            # modules that are being emptied.
            with uninterrupted:
                better = make_better()
                self._warm_up(better)
                # Requests see the model only when it is warm. Each switches by itself before its
                # next run.
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
    def running(self) -> Sequence[CompiledModel]:
        """The model of the device that runs now."""
        return [self.current]

    def create_runner(self, cancel: Cancel) -> Runner:
        """Return a runner that switches to the better model when it is ready."""
        return _AutoRunner(self, cancel)


class _AutoRunner(Runner):
    """Runs the current model of an `AutoModel`."""

    def __init__(self, owner: AutoModel, cancel: Cancel) -> None:
        super().__init__(cancel)
        self._owner = owner
        self._model = owner.current
        self._runner = self._model.create_runner(cancel)

    def _switch(self) -> None:
        """Continue with the better model, from the states of the first one, if it can be opened."""
        model, states = self._owner.current, self._runner.states()
        try:
            with self.cancel.replaced_sessions():
                runner = model.create_runner(self.cancel)
                if states:
                    runner.set_states(states)
            self._runner = runner
        except Exception as error:  # of any type: a third party's op opens a session
            _log.warning("a request stays on its first device: %s", message_of(error))
        self._model = model

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        # The request switches between runs, never during one.
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
