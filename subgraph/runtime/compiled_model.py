"""Compiled models: a graph with subgraph nodes that is ready to run, and its requests.

``model(inputs)`` takes an idle runner, so calls from several threads run at the same time. A run
reads one `Snapshot` of all parameters. A new one is taken when a parameter of the process changed.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from os import PathLike
from typing import IO, Any, Protocol

import numpy as np

from subgraph.errors import ConfigError, DeviceError, ShapeError, described
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter, ParameterTable, Snapshot, State, call_pinned, epoch
from subgraph.graph.result_arrays import is_array
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.op_checks import expected_result
from subgraph.operators.subgraph_op import (
    AFFINITY,
    SubgraphOp,
    fallback_of,
    runs_by_default,
)
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.executor_plan import Plan
from subgraph.runtime.infer_request import InferRequest
from subgraph.runtime.metric_types import checked_metric
from subgraph.runtime.request_state import StatefulModel
from subgraph.runtime.runner import (
    DirectRunner,
    GraphRunner,
    Runner,
    Stage,
    TimedRunner,
    checked_run,
    checked_stages,
    is_direct,
    with_memory_budget,
)
from subgraph.runtime.settings import DeviceOptions, current_name, property_access
from subgraph.runtime.signature import Port, Results, Signature, port_position
from subgraph.runtime.task_executor import TaskExecutor
from subgraph.system.forking import free_in_child
from subgraph.system.hooks import Hook
from subgraph.system.registry import nearest
from subgraph.weights.cache import StoredWeights

_log = logging.getLogger("subgraph")

_Idle = tuple[Runner, Callable[[Sequence[Any]], Any]]  # a runner, and a callable for its whole run
_export_model: Hook[[CompiledModel, str | PathLike[str] | IO[bytes]], None] = Hook("export a model")
_reduce: Hook[[CompiledModel], tuple[Any, ...]] = Hook("pickle a model")


class FindsDevices(Protocol):
    """The `Core` of a compiled model: it finds the devices of the model's regions by name."""

    def device(self, name: str) -> Any:
        """Return the device of that name."""
        ...


class CompiledModel:
    """A model ready to run; immutable except for its parameters, safe to use from many threads.

    Attributes:
        graph: The graph that runs: subgraph nodes, and plain nodes for the reference device.
        device: The device string that it was compiled for.
        options: The device's options that it was compiled with.
        parameters: All parameters by name. After an assignment to one, calls use the new array.
        inputs: Ports of the inputs; those with a default may be omitted.
        outputs: Ports of the outputs.
        stored: Weights from an exported file, for the ops that use them.
        metrics: Read-only properties besides the standard ones.
        pipeline: (device, first step, end) of each stage of an asynchronous run.
        configs: Configuration by device.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        device: str = "",
        options: DeviceOptions | None = None,
        requests: int = 1,
        metrics: Mapping[str, Any] | None = None,
        pipeline: Sequence[tuple[str, int, int]] = (),
        source: Graph | None = None,
        stored: StoredWeights | None = None,
        configs: Mapping[str, Mapping[str, Any]] | None = None,
        core: FindsDevices | None = None,
    ) -> None:
        """Make a graph ready to run.

        Args:
            graph: The graph; subgraph nodes run by their ops, all others by the reference.
            device: Name of the device that compiled it.
            options: The options it was compiled with.
            requests: Number of concurrent requests with which the device is used best.
            metrics: More read-only properties.
            pipeline: (device, first step, end) of asynchronous runs, covering all nodes in order;
                each device runs the steps of one request at a time. Empty: requests do not wait.
            source: The graph before the partition, for export and to compile again.
            stored: Weights from an exported file.
            configs: Configuration by device, where several are involved.
            core: The Core of the devices.

        Raises:
            ConfigError: A metric has a value of another type than its name requires.
        """
        self.graph = graph
        self.device = device
        self.options = DeviceOptions() if options is None else options
        self.stored = stored
        self.source = graph if source is None else source
        self._requests = requests
        self.metrics: dict[str, Any] = dict(metrics or {})
        for key, value in self.metrics.items():
            checked_metric(f"compiled model {graph.name!r} of device {device!r}", key, value)
        self.pipeline = tuple(pipeline)
        self.configs = {name: dict(values) for name, values in (configs or {}).items()}
        self._core = core
        self._signature = _signature(graph.inputs, graph)
        self._run_positions: list[int] | None = None
        self._direct = is_direct(graph)
        self._plan = Plan(graph, parallel=self.options.PARALLEL_REGIONS)
        self.parameters: dict[str, Parameter] = ParameterTable(
            (p.name, p) for p in self._plan.parameters
        )
        self._snapshot = Snapshot(self._plan.parameters)
        self._threads: tuple[TaskExecutor, TaskExecutor] | None = None
        # Stages of one device share its lock, although the pipeline may list the device several
        # times.
        locks = {name: free_in_child(threading.Lock()) for name, _, _ in pipeline}
        self._pipeline = [(locks[name], begin, end) for name, begin, end in pipeline]
        self._used = tuple(self._plan.ops())
        for op in self._used:
            # Several models may share an op; its packed weights are freed with the last one
            # (`leave_ops`).
            type(op).add_user(op)
        self._idle: list[_Idle] = []
        self._request_ids = itertools.count(1)

    def __del__(self, _ending: Callable[[], bool] = sys.is_finalizing) -> None:
        """Free the packed weights of this model at once, without waiting for the cycle collector.

        At the end of the process nothing is done, because modules are already being emptied.
        """
        if "_used" in self.__dict__ and not _ending():  # without it, the constructor has failed
            for op in self.leave_ops():
                try:
                    type(op).release(op)
                except Exception as error:  # a user's; Python would only print "Exception ignored"
                    _log.warning(
                        "%s.release of model %r raised %s: %s",
                        *(type(op).__name__, self.name, type(error).__name__, error),
                    )

    def leave_ops(self) -> list[SubgraphOp]:
        """Stop being a user of the ops; return those that no other model runs."""
        used, self._used = self._used, ()
        return [op for op in used if type(op).remove_user(op)]

    @property
    def name(self) -> str:
        """The model's name."""
        return self.graph.name

    @property
    def inputs(self) -> tuple[Port, ...]:
        """Ports of the inputs."""
        return self._signature.inputs

    @property
    def outputs(self) -> tuple[Port, ...]:
        """Ports of the outputs."""
        return self._signature.outputs

    def __call__(self, *args: Any, **named: Any) -> Results:
        """Run the model.

        Args:
            args: One array for each input, or one dict by name, or one list by position.
            named: Inputs by name.

        Returns:
            The outputs by name and by position.

        Raises:
            MissingInputError: An input is missing, or a name is not that of an input.
            ShapeError: The dtype or shape of an input is wrong.
            DeviceError: The run failed.
        """
        signature = self._signature
        bound = signature.bind(args, named)
        try:
            # `pop` and `append` of a list are atomic, so that threads that call the model never get
            # the same runner, without a lock.
            idle = self._idle.pop()
        except IndexError:
            idle = self._new_idle()
        runner, run = idle
        repeat = runner.repeat  # read for each call: a runner whose device has failed has none
        try:
            try:
                results = None if repeat is None else repeat(bound)
            except Exception as error:  # the whole run raises it, or runs on a fallback device
                _log.info("model %r: a repeated run failed and is made anew: %s", self.name, error)
                results = None
            if results is None:
                bound, snapshot = self.with_snapshot(bound)
                results = call_pinned(snapshot, run, bound)
        finally:
            self._idle.append(idle)
        return Results(signature.output_positions, results)

    def _new_idle(self) -> _Idle:
        """Create a runner for calls of the model."""
        runner = self.create_runner(Cancel())
        run = self._whole_run(runner)
        # A repeated run pins no snapshot, which a replaced default needs, and skips the stages of
        # the device's own model.
        if run != runner.run or self._signature.has_defaults:
            runner.repeat = None
        return runner, run

    def _whole_run(self, runner: Runner) -> Callable[[Sequence[Any]], Any]:
        """Return a callable for all stages of a run, which a device may define by itself."""
        if type(self).create_stages is CompiledModel.create_stages:
            return self._checked_run(runner.run)
        stages = self.checked_stages(runner)

        def run(inputs: Any) -> Any:
            for stage in stages:
                inputs = stage.function(inputs)
            return inputs

        return run

    def bind(self, args: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], Snapshot]:
        """Check the arguments of a call.

        Args:
            args: As for a call.
            named: As for a call.

        Returns:
            One item for each input of a run, and the snapshot that the run has to use.

        Raises:
            MissingInputError: An input is missing, or a name is not that of an input.
            ShapeError: The dtype or shape of an input is wrong.
        """
        return self.with_snapshot(self._signature.bind(args, named))

    def with_snapshot(self, bound: list[Any]) -> tuple[list[Any], Snapshot]:
        """Return the items of a run for checked arguments, and the run's snapshot."""
        snapshot = self._snapshot
        if snapshot.epoch != epoch():
            # Some parameter, of any model, was assigned since: the epoch is that of the process.
            snapshot = self._snapshot = Snapshot(self._plan.parameters)
        if self._signature.has_defaults:
            bound, snapshot = self._with_defaults(bound, snapshot)
            if self._run_positions is not None:
                bound = [bound[k] for k in self._run_positions]
        return bound, snapshot

    def offer_defaults(self, inputs: Sequence[Value]) -> None:
        """Let calls replace weights: ``inputs`` are the model's, including those with a default.

        The graph was compiled with the defaults as weights, so that their packed forms are cached.
        In a run with another array for such an input, the parameter has that array as its value.
        """
        self._signature = _signature(inputs, self.graph)
        self._run_positions = [k for k, v in enumerate(inputs) if v.parameter is None]

    def _with_defaults(self, bound: list[Any], snapshot: Snapshot) -> tuple[list[Any], Snapshot]:
        """Replace the parameters of optional inputs that a call passed, for this run only.

        Packed weights that were computed from such a parameter are computed from the input, too.
        """
        states: dict[Parameter, State] = {}
        for position, (port, item) in enumerate(zip(self.inputs, bound, strict=True)):
            default = port.default
            if item is None or default is None:
                continue
            if item.shape == default.type.shape:
                # A unique version; negative, so that caches do not treat it as newer.
                stamp = -Parameter.adopt(port.name, item).version
                states[default] = State(stamp, item)
                bound[position] = None
            elif self._run_positions is not None:
                raise ShapeError(
                    f"input {port.name!r} has the default {default.type}, which the model was "
                    f"compiled for; got shape {item.shape}. Give the input no default to vary it"
                )
        if states:
            own = Snapshot(())
            own.states = {**snapshot.states, **states}
            # The epoch is negative and unique as well, so that no plan takes its weights for
            # current ones.
            own.epoch = min(state.version for state in states.values())
            snapshot = own
        return bound, snapshot

    def input_of_run(self, bound: Sequence[Any], position: int) -> Any:
        """Return the item of an input among those that `bind` returned; None if it was omitted."""
        if self._run_positions is None:
            return bound[position]
        if position not in self._run_positions:
            return None
        return bound[self._run_positions.index(position)]

    def next_request_id(self) -> int:
        """Return the number of a new request."""
        return next(self._request_ids)

    def wrap(self, results: Sequence[Any]) -> Results:
        """Return the results of a run by name and position."""
        return Results(self._signature.output_positions, results)

    def preset(
        self, outputs: Sequence[Array | None] | None, key: str | int, array: Any
    ) -> Sequence[Array | None] | None:
        """Return the arrays that receive the outputs, with one of them replaced.

        Args:
            outputs: One array, or None, for each output; None for no arrays at all.
            key: Name or position of an output.
            array: The array that receives it; None for a new array in each run.

        Raises:
            MissingInputError: The model has no such output.
            ShapeError: The array is not writable, its dtype or shape can never fit, or an element
                of it shares memory with another one or with the array of another output.
        """
        position = port_position(self.outputs, key, "output")
        changed = list(outputs or [None] * len(self.outputs))
        changed[position] = None
        if array is not None:
            port = self.outputs[position]
            _check_preset(port, array)
            for other, held in zip(self.outputs, changed, strict=True):
                if held is not None and np.shares_memory(array, held):
                    raise ShapeError(
                        f"output {port.name!r}: the array shares memory with that of output "
                        f"{other.name!r}; give each output memory of its own"
                    )
        changed[position] = array
        return changed if any(a is not None for a in changed) else None

    def create_runner(self, cancel: Cancel) -> Runner:
        """Return a new runner: sessions and memory for one request. Devices may override it."""
        profiling = self.options.ENABLE_PROFILING
        if self._direct is not None and not profiling:
            return with_memory_budget(DirectRunner(self._direct, cancel), self.options)
        runner = GraphRunner(self._plan, cancel, profiling=profiling, pipeline=self._pipeline)
        return with_memory_budget(runner, self.options)

    def create_profiler(self) -> Runner:
        """Return a runner that measures every node; if a device has its own runner, whole runs."""
        if self._has_own_runner:
            return TimedRunner(self.create_runner(Cancel()), self.name, self.device)
        return GraphRunner(self._plan, Cancel(), profiling=True)

    @property
    def _has_own_runner(self) -> bool:
        return type(self).create_runner is not CompiledModel.create_runner

    def create_stages(self, runner: Runner) -> list[Stage]:
        """Return the stages of an asynchronous run. Devices with several executors override it."""
        if self.options.EXCLUSIVE_ASYNC_REQUESTS:
            return [Stage(_exclusive_executor(self.device), runner.run)]
        if self._threads is None:
            following = TaskExecutor("results", self.optimal_requests)
            self._threads = TaskExecutor("requests", self.optimal_requests), following
        return runner.stages(*self._threads)

    def checked_stages(self, runner: Runner) -> list[Stage]:
        """Return the stages of `create_stages`, checked if a device defines them or the runner.

        Raises:
            DeviceError: they are not a list of stages.
        """
        stages = self.create_stages(runner)
        own = type(self).create_stages is not CompiledModel.create_stages
        if not (own or self._has_own_runner):
            return stages
        return checked_stages(stages, type(self).__name__, len(self.outputs))

    def _checked_run(self, run: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return (
            checked_run(run, type(self).__name__, len(self.outputs))
            if self._has_own_runner
            else run
        )

    def create_infer_request(self, states: Mapping[str, str] | bool = False) -> InferRequest:
        """Return a new request with memory of its own.

        Args:
            states: Inputs that the request provides itself, with the output of the previous run
                that each of them gets, as in ``{"past.0.key": "present.0.key"}``; True: all whose
                names differ in "past" and "present". Callers neither pass these inputs nor get
                these outputs. The first run begins with zeros, and dimensions that neither the
                model nor other inputs determine are 0. Regions on CPU append to such arrays in
                place.

        Raises:
            ConfigError: An input or output does not exist, or they do not fit.
        """
        return InferRequest(StatefulModel(self, states) if states else self)

    @property
    def run_positions(self) -> Sequence[int]:
        """Positions of the inputs that a run gets, among all inputs."""
        found = self._run_positions
        return range(len(self.inputs)) if found is None else found

    @property
    def optimal_requests(self) -> int:
        """Number of concurrent requests with which the device is used best."""
        return self.options.PERFORMANCE_HINT_NUM_REQUESTS or self._requests

    @property
    def execution_devices(self) -> list[str]:
        """Names of the devices that run parts of it, in order of their first node.

        A node of control flow that runs in Python is followed by the nodes of its bodies.
        """
        found = self.metrics.get("EXECUTION_DEVICES")
        if found is not None:
            return list(found)
        if self._has_own_runner and self.device:
            return [self.device]  # the device left the graph unchanged
        steps = self._plan.all_steps()
        return list(dict.fromkeys(name for step in steps for name in devices_of(step.node)))

    @property
    def fallbacks(self) -> dict[str, dict[str, Any]]:
        """Failures of regions, by region: their number, the last cause, and its devices now."""
        found: dict[str, dict[str, Any]] = {}
        for step in self._plan.all_steps():
            fallback = step.fallback
            if fallback is not None and fallback.failures:
                found[step.node.name] = {
                    "failures": fallback.failures,
                    "cause": fallback.cause,
                    "open": fallback.replacement is not None,
                    "runs_on": devices_of(step.node),
                }
        return found

    @property
    def region_strategies(self) -> dict[str, dict[str, Any]]:
        """How the calls of each region were served: ``chosen`` and ``declined`` strategies."""
        reports = {
            step.node.name: _report_of(step.op)
            for step in self._plan.all_steps()
            if step.op is not None
        }
        return {name: report for name, report in reports.items() if report}

    def get_property(self, name: str) -> Any:
        """Return a property of the compiled model or an option that it was compiled with.

        Raises:
            ConfigError: There is none of that name.
        """
        own: dict[str, Any] = {
            **self.metrics,
            "NETWORK_NAME": self.name,
            "OPTIMAL_NUMBER_OF_INFER_REQUESTS": self.optimal_requests,
            "EXECUTION_DEVICES": self.execution_devices,
            "FALLBACKS": self.fallbacks,
            "REGION_STRATEGIES": self.region_strategies,
        }
        options = property_access(self.options)
        metrics = [*own, "SUPPORTED_PROPERTIES"]
        own["SUPPORTED_PROPERTIES"] = dict.fromkeys([*metrics, *options], "RO")
        own["SUPPORTED_METRICS"] = [key for key in metrics if key not in options]
        own["SUPPORTED_CONFIG_KEYS"] = list(options)
        known = [*own, *options]
        if not isinstance(name, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(
                f"a property is named by a string, such as {known[0]!r}; got {name!r}"
            )
        name = current_name(name, {**own, **options})
        if name in own:
            return own[name]
        if name in options:
            return getattr(self.options, name)
        raise ConfigError(f"a compiled model has no property {name!r}; {nearest(name, known)}")

    def known_device(self, name: str) -> Any:
        """Return the device of a region, if the model knows its Core."""
        return None if self._core is None else self._core.device(name)

    def export_model(self, target: str | PathLike[str] | IO[bytes]) -> None:
        """Write the model, ready to import, to a path (atomically) or a binary stream.

        Raises:
            BlobError: A subgraph op of the model cannot be exported.
            OSError: The target cannot be written.
        """
        _export_model(self, target)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the model as its export, which the default Core of the other process imports.

        Raises:
            BlobError: A subgraph op of the model cannot be exported.
        """
        return _reduce(self)

    def __repr__(self) -> str:
        inputs = ", ".join(map(str, self.inputs))
        outputs = ", ".join(map(str, self.outputs))
        return f"<CompiledModel {self.name!r} on {self.device}: ({inputs}) -> ({outputs})>"


def _signature(inputs: Sequence[Value], graph: Graph) -> Signature:
    return Signature(
        [Port(v.name, v.type, v.parameter) for v in inputs],
        [Port(v.name, v.type) for v in graph.outputs],
        graph.name,
    )


@cache
def _exclusive_executor(device: str) -> TaskExecutor:
    """Return the task executor that runs the requests of all models of a device one at a time."""
    return TaskExecutor(f"exclusive-{device}")


def _report_of(op: SubgraphOp) -> dict[str, Any]:
    try:
        return type(op).run_report(op)
    except Exception as error:
        name = type(op).__name__
        raise DeviceError(f"{name}.run_report raised {described(error)}") from error


def devices_of(node: Node) -> list[str]:
    """Return the devices that run a node now.

    REFERENCE for a node without an op; the class of a user's op that names no device.
    """
    op, fallback = node.op, fallback_of(node)
    own = True
    # A replacement may have failed as well and have a replacement of its own.
    while fallback is not None and fallback.replacement is not None:
        op, own = fallback.replacement, False
        fallback = op.fallback
    if op is None or op.device == SubgraphOp.device:
        return ["REFERENCE" if runs_by_default(op) else type(op).__name__]
    names: list[str] = op.runs_on()
    if not own or names != [op.device]:
        return names
    return [(node.metadata or {}).get(AFFINITY, op.device)]


def _check_preset(port: Port, array: Any) -> None:
    if not is_array(array) or not array.flags.writeable:
        raise ShapeError(f"output {port.name!r}: give a writable NumPy array to write into")
    extent = array.itemsize  # bytes from the first to the last element of the dimensions before
    for stride, size in sorted(zip(map(abs, array.strides), array.shape, strict=True)):
        if size > 1 and stride < extent and array.size:
            raise ShapeError(
                f"output {port.name!r}: elements of the array share memory, its strides are "
                f"{array.strides}; give an array whose elements have memory of their own"
            )
        extent += stride * (size - 1)
    check = expected_result(port.type)
    if check is None or not isinstance(port.type, TensorType):
        return
    found = TensorType(dtype_of(array), array.shape)  # in either byte order
    if found.dtype != port.type.dtype or not check[2](array.shape):
        raise ShapeError(f"output {port.name!r} is {port.type}, cannot be written into {found}")
