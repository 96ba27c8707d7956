"""MULTI: the whole model on each of several devices, and requests distributed over them.

"MULTI:A,B" compiles for A and B. Each request is assigned to the device with the fewest requests
relative to its optimal number. If a device fails, its requests move to the others, which is logged
once. After ``FALLBACK_RETRY`` seconds one run tries the device again; if it succeeds, requests are
distributed over all devices again.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from os import PathLike
from typing import IO, Any
from weakref import WeakSet

import attrs

from subgraph.devices.device import Config, Device, DeviceList
from subgraph.devices.export import ALLOW_RECOMPILE, export_several, import_model
from subgraph.devices.fallback import all_finite, is_final, nonfinite_error
from subgraph.devices.virtual import VirtualDevice, VirtualModel, attempt, device_names
from subgraph.errors import BlobError, DeviceError
from subgraph.graph.graph import Graph
from subgraph.graph.result_arrays import fill_outputs
from subgraph.operators.subgraph_op import DefaultSubgraphOp, ProfileEntry, Session
from subgraph.partition.regions import without_device_regions
from subgraph.runtime.breaker import Breaker
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.executor_plan import all_parameters
from subgraph.runtime.runner import Runner
from subgraph.runtime.settings import DeviceOptions, option
from subgraph.system.forking import free_in_child
from subgraph.weights.parallel import parallel_map

_log = logging.getLogger("subgraph")


@attrs.frozen
class MultiOptions(DeviceOptions):
    """Options of MULTI; those of its devices are given under their names."""

    DEVICE_PRIORITIES: str = option("", "devices in order of priority, separated by commas")
    FALLBACK_FAILURES: int = option(
        1, "failures of a device in a row after which it gets no more requests", minimum=1
    )


class MultiDevice(VirtualDevice):
    """Compiles a model for each of several devices."""

    full_name = "Several devices side by side"
    options_class = MultiOptions
    caches = False

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile the model for every device of the list, all at the same time.

        Raises:
            DeviceError: no device could compile it; the message has the reason of each.
        """
        listed = self.configured(config)
        core = self.known_core

        def compile_for(device: Device) -> CompiledModel:
            return core.compile_model(graph, device.name, listed.config_of(device))

        return MultiModel(graph, _for_each(listed.devices, compile_for, graph.name), listed)

    def import_parts(self, parts: Mapping[str, memoryview], config: Config) -> CompiledModel:
        """Import the model of each device; one that is missing is compiled from another's graph.

        The models share the parameters of the first one, whose weights alone are read.

        Args:
            parts: The exported models by the device's name.
            config: Options of MULTI and its devices, and ``ALLOW_RECOMPILE``.

        Raises:
            DeviceError: no device has a model; the message has the reason of each.
        """
        wanted = device_names(str(config.get("DEVICE_PRIORITIES", "")), self.name)
        unused = {ALLOW_RECOMPILE, *parts} - set(wanted)
        own = {key: value for key, value in config.items() if key not in unused}
        listed = self.configured(own)
        allowed = bool(config.get(ALLOW_RECOMPILE, True))
        known = [name for name in parts if any(name == device.name for device in listed.devices)]
        name = known[0] if known else next(iter(parts))
        first = import_model(
            self.peer(name), parts[name], {**listed.configs.get(name, {}), ALLOW_RECOMPILE: allowed}
        )
        # Assigning a parameter of the MULTI model must change it on every device.
        weights = {p.name: p for p in all_parameters(first.graph)}

        def import_for(device: Device) -> CompiledModel:
            if device.name == name:
                return first
            options = listed.configs[device.name]
            part = parts.get(device.name)
            try:
                if part is not None:
                    # A part that its device cannot restore is compiled below from the first graph,
                    # with the shared parameters.
                    strictly = {**options, ALLOW_RECOMPILE: False}
                    return import_model(device, part, strictly, weights)
            except BlobError:
                if not allowed:
                    raise
            graph = without_device_regions(first.graph)
            return self.known_core.compile_model(graph, device.name, options or None)

        models = _for_each(listed.devices, import_for, first.name)
        return MultiModel(first.graph, models, listed)

    def request_range(self) -> tuple[int, int, int]:
        """Return the range up to the sum of the devices' largest numbers."""
        return 1, sum(self._max_requests()), 1


def _for_each(
    devices: Sequence[Device], make: Callable[[Device], CompiledModel], name: str
) -> dict[str, CompiledModel]:
    """Make a model for each device, all at the same time; log a warning for failures.

    Raises:
        DeviceError: all failed; the message has the reason of each.
    """
    failures: list[str] = []
    compiled = parallel_map(lambda d: attempt(make, d, failures), devices, len(devices))
    made = dict(zip((d.name for d in devices), compiled, strict=True))
    models = {device: model for device, model in made.items() if model is not None}
    if not models:
        raise DeviceError(f"no device of MULTI can run {name!r}: {'; '.join(failures)}")
    for failure in failures:
        _log.warning("MULTI goes on without a device: %s", failure)
    return models


class MultiModel(VirtualModel):
    """The compiled models of several devices as one model.

    Attributes:
        by_device: The models by the device's name.
        models: The models in order of priority.
    """

    def __init__(
        self, graph: Graph, by_device: Mapping[str, CompiledModel], listed: DeviceList
    ) -> None:
        """Distribute requests over the models of several devices.

        Args:
            graph: The graph.
            by_device: The models by the device's name, in order of priority.
            listed: Options of MULTI and of the devices.
        """
        models = list(by_device.values())
        names = [model.device for model in models]
        super().__init__(
            graph.clone(),
            device=f"MULTI:{','.join(names)}",
            options=listed.options,
            configs=listed.configs,
            requests=sum(model.optimal_requests for model in models),
            source=graph,
        )
        self.by_device = dict(by_device)
        self.models = models
        self._load = _Load(self.device, models, self.source, listed.options)

    @property
    def running(self) -> Sequence[CompiledModel]:
        """The models of the devices that run requests now: those with a closed breaker."""
        return self._load.usable()

    @property
    def fallbacks(self) -> dict[str, dict[str, Any]]:
        """Failures of devices by name, and of regions by "device/region"."""
        found = self._load.failures()
        for device, model in self.by_device.items():
            found.update((f"{device}/{name}", entry) for name, entry in model.fallbacks.items())
        return found

    @property
    def region_strategies(self) -> dict[str, dict[str, Any]]:
        """How the calls of each region were served, by "device/region"."""
        every = [(name, model.region_strategies) for name, model in self.by_device.items()]
        return {
            f"{name}/{region}": report for name, found in every for region, report in found.items()
        }

    def export_model(self, target: str | PathLike[str] | IO[bytes]) -> None:
        """Write one file with the models of all devices."""
        export_several(self, self.by_device, target)

    def create_runner(self, cancel: Cancel) -> Runner:
        """Return a runner on the least loaded device."""
        return _MultiRunner(self._load, cancel)


class _Load:
    """The number of requests of each device, and its breaker.

    Runners refer to this object and not to the `MultiModel`, so that the model can be freed.

    Attributes:
        options: Options of MULTI.
        changes: Number of times that a breaker has opened or closed.
        any_open: Whether a breaker is open.
    """

    def __init__(
        self, owner: str, models: Sequence[CompiledModel], source: Graph, options: MultiOptions
    ) -> None:
        self.options = options
        self.changes = 0
        self.any_open = False
        self._owner = owner
        self._models = list(models)
        # Counted from the runners that live, so that no error or interrupt leaves a wrong number.
        self._runners: WeakSet[_MultiRunner] = WeakSet()
        self._breakers = {model: Breaker(options) for model in models}
        self._lock = free_in_child(threading.RLock())
        self._reference = DefaultSubgraphOp(source)

    def assign(self, runner: _MultiRunner) -> None:
        """Assign a new request to the device with the least load."""
        with self._lock:
            runner.model = self.least_loaded(runner)
            self._runners.add(runner)

    def least_loaded(self, runner: _MultiRunner) -> CompiledModel:
        """Return the model with the fewest requests besides that of ``runner``."""
        with self._lock:
            count = Counter(other.model for other in self._runners if other is not runner)
        return min(self.usable(), key=lambda m: count[m] / m.optimal_requests)

    def usable(self) -> list[CompiledModel]:
        """Return the models with a closed breaker, in order of priority; all if there is none."""
        return [m for m in self._models if not self._breakers[m].is_open] or self._models

    def to_retry(self) -> CompiledModel | None:
        """Return a model with an open breaker that this run has to try again; None if none."""
        opened = (m for m in self._models if self._breakers[m].is_open)
        return next((m for m in opened if self._breakers[m].may_try()), None)

    def candidates(self, first: CompiledModel) -> list[CompiledModel]:
        """Return all models in the order in which a run tries them, ``first`` first."""
        return list(dict.fromkeys((first, *self.usable(), *self._models)))

    def failures(self) -> dict[str, dict[str, Any]]:
        """Return number and cause of failures, breaker state and devices now, by device."""
        usable = [model.device for model in self.usable()]
        return {
            model.device: {
                "failures": breaker.failures,
                "cause": breaker.cause,
                "open": breaker.is_open,
                "runs_on": usable if breaker.is_open else [model.device],
            }
            for model, breaker in self._breakers.items()
            if breaker.failures
        }

    def failed(self, model: CompiledModel, error: Exception, helper: str) -> None:
        """Count a failure of a device.

        Args:
            model: The device's model.
            error: Its error.
            helper: Name of the device that made the run instead.
        """
        breaker = self._breakers[model]
        new, opened = breaker.failed(error, may_open=len(self._models) > 1)
        if opened:
            self._changed()
            # The record has the error's text only: the error would keep the run's arrays alive.
            _log.warning(
                "%s goes on without device %s, which failed: %s (%s)",
                *(self._owner.partition(":")[0], model.device, breaker.cause, breaker.again),
            )
        elif new and not breaker.is_open:
            _log.warning(
                "device %s failed; the run continues on %s: %s", model.device, helper, breaker.cause
            )

    def succeeded(self, model: CompiledModel) -> None:
        """Record that a run on a device succeeded."""
        if self._breakers[model].succeeded():
            self._changed()
            _log.warning("%s uses device %s again", self._owner.partition(":")[0], model.device)

    def _changed(self) -> None:
        with self._lock:
            self.changes += 1
            self.any_open = any(breaker.is_open for breaker in self._breakers.values())

    def compare(
        self, inputs: Sequence[Any], results: Sequence[Any]
    ) -> tuple[DeviceError | None, Sequence[Any]]:
        """Compare results that are not finite with the reference; see `nonfinite_error`.

        Returns:
            The error or None, and the results of the reference.
        """
        expected = self._reference.session()(inputs)
        return nonfinite_error(self._reference.subgraph, results, expected), expected


class _MultiRunner(Runner):
    """Runs one request on its assigned device, and on the next one after a failure.

    Attributes:
        model: The model of the device.
    """

    model: CompiledModel

    def __init__(self, load: _Load, cancel: Cancel) -> None:
        super().__init__(cancel)
        self._load = load
        self._changes = load.changes
        load.assign(self)
        # Devices that could not open a runner, recorded as failures by the first run.
        self._failed: list[tuple[CompiledModel, Exception]] = []
        # A device that is out of memory for one more request must not keep the request from the
        # others.
        for model in load.candidates(self.model):
            try:
                self._runner = model.create_runner(cancel)
            except Exception as error:
                if not self._may_move(error):
                    raise
                self._failed.append((model, error.with_traceback(None)))
                continue
            self.model = model
            return
        raise self._failed[-1][1]

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        load, first = self._load, self.model
        if load.changes != self._changes:  # the usable devices have changed
            self._changes = load.changes
            first = load.least_loaded(self)  # it counts for the new device after a run there
        if load.any_open:
            first = load.to_retry() or first
        failed, self._failed = self._failed, []
        if first is self.model:
            try:
                results = self._checked(self.model, self._runner, inputs)
            except Exception as error:
                if not self._may_move(error):
                    raise
                failed.append((first, error))
            else:
                self._note(failed)
                return results
        return self._run_elsewhere(inputs, first, failed)

    def _run_elsewhere(
        self,
        inputs: Sequence[Any],
        first: CompiledModel,
        failed: list[tuple[CompiledModel, Exception]],
    ) -> Sequence[Any]:
        """Make a run on ``first``, or on the next device that can; not on those that failed."""
        for model in self._load.candidates(first):
            if any(model is each for each, _ in failed):
                continue
            try:
                runner = self._runner
                if model is self.model:
                    results = self._checked(model, runner, inputs)
                else:
                    with self.cancel.replaced_sessions():
                        runner = model.create_runner(self.cancel)
                        runner.set_states(self._runner.states())
                        results = self._checked(model, runner, inputs)
            except Exception as error:
                if not self._may_move(error):
                    raise
                failed.append((model, error))
                continue
            # Another runner frees the request's memory on the other device.
            self.model, self._runner = model, runner
            self._note(failed)
            return results
        *others, (_, last) = failed
        for model, earlier in others:
            last.add_note(f"{model.device} failed before: {earlier}")
        raise last

    def _may_move(self, error: Exception) -> bool:
        return self._load.options.RUNTIME_FALLBACK and not is_final(error)

    def _checked(
        self, model: CompiledModel, runner: Runner, inputs: Sequence[Any]
    ) -> Sequence[Any]:
        """Run a model; return its results, or the reference's if only those are finite."""
        load = self._load
        runner.outputs = self.outputs
        results = runner.run(inputs)
        # The reference has no states, so its results would differ in a stateful model.
        if load.options.FALLBACK_CHECK and not all_finite(results) and not runner.states():
            error, expected = load.compare(inputs, results)
            if error is not None:
                load.failed(model, error, "REFERENCE")
                return expected if self.outputs is None else fill_outputs(expected, self.outputs)
        load.succeeded(model)
        return results

    def _note(self, failed: Sequence[tuple[CompiledModel, Exception]]) -> None:
        for model, error in failed:
            self._load.failed(model, error, self.model.device)

    def sessions(self) -> dict[str, Session]:
        return self._runner.sessions()

    def profile(self) -> list[ProfileEntry]:
        return self._runner.profile()
