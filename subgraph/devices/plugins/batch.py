"""BATCH: requests that arrive while the device works become one batch, as OpenVINO's BATCH does.

"BATCH:CPU(16)" compiles the model for batches of any size. A request that comes while the device
is free runs at once. Those that come meanwhile wait, and then run together, up to 16 rows. A
request of more rows is divided. The time of a row falls with the batch where a run reads many
weights for few results, as in decoders and fully connected layers. Without a number the size is the
one with the least time for a row, measured when the model is compiled.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import IO, Any

import attrs
import numpy as np

from subgraph.devices.calls import query_on
from subgraph.devices.device import Config, Device
from subgraph.devices.export import ALLOW_RECOMPILE, export_several, import_model
from subgraph.devices.placement.profiles import sample_inputs
from subgraph.devices.virtual import VirtualDevice, VirtualModel
from subgraph.dtypes import DTYPES
from subgraph.errors import ConfigError, DeviceError, ShapeError, SubgraphError, message_of
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import pinned_snapshot
from subgraph.graph.result_arrays import is_array
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.passes.shapes.independent_rows import row_dependence
from subgraph.passes.shapes.reshape_inputs import reshape
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.compiled_model import CompiledModel
from subgraph.runtime.runner import Runner
from subgraph.runtime.settings import DeviceOptions, option
from subgraph.system.forking import free_in_child

_log = logging.getLogger("subgraph")
_BATCH = "batch"  # the name of the first dimension
_SIZES = (1, 2, 4, 8, 16, 32, 64)  # that are measured
# Seconds of a run after which no larger size is measured, and the part of the time of a row that a
# larger size must save (estimates).
_MEASURED_SECONDS = 0.3
_LEAST_GAIN = 0.1
_HANDOVER = 25e-6  # seconds by which a run of many threads waits and wakes (measured)
# Largest difference of results in a batch from those of a row alone, relative to the largest
# element: products in bfloat16 differ by 0.01 (measured); mixed rows by about 1.
_SAME = 0.05


@attrs.frozen
class BatchOptions(DeviceOptions):
    """Options of BATCH; those of its device are given beside them."""

    DEVICE_PRIORITIES: str = option("", "the device, with the largest batch: CPU(16)")
    AUTO_BATCH_TIMEOUT: int = option(
        0,
        "milliseconds that a request waits for others though the device is free",
        minimum=0,
        maximum=3_600_000,
    )


class BatchDevice(VirtualDevice):
    """Compiles a model for a device such that concurrent requests run as one batch."""

    full_name = "Concurrent requests as one batch"
    options_class = BatchOptions
    caches = False

    def candidates(self, options: Any) -> list[Device]:
        """Return the device in a list of its own.

        Raises:
            ConfigError: the option ``DEVICE_PRIORITIES`` names none, or several.
        """
        name, _ = _device_and_size(options.DEVICE_PRIORITIES)
        return [self.peer(name)]

    def listed_devices(self) -> list[Device]:
        """Return the device of the option ``DEVICE_PRIORITIES``; CPU if that is not set."""
        name, _ = _device_and_size(str(self.get_property("DEVICE_PRIORITIES")) or "CPU")
        return [self.peer(name)]

    def query_model(self, graph: Graph, config: Config | None = None) -> dict[str, str]:
        """Return the nodes that the device supports."""
        listed = self.configured(config)
        (device,) = listed.devices
        found = query_on(device, graph, listed.config_of(device))
        return type(found)(dict.fromkeys(found, self.name), found.reasons)

    def compile_model(self, graph: Graph, config: Config | None = None) -> CompiledModel:
        """Compile the model for batches of any size.

        Requests of a model without a batch run one by one, which is logged: an input or output has
        no first dimension that is a batch, a constant that holds its size cannot be replaced, or
        batches of sample inputs do not run.
        """
        listed = self.configured(config)
        (device,) = listed.devices
        flexible, obstacle = _with_batch(graph)
        model = self.known_core.compile_model(flexible, device.name, listed.config_of(device))
        return BatchModel(flexible, model, listed.options, obstacle)

    def import_parts(self, parts: Mapping[str, memoryview], config: Config) -> CompiledModel:
        """Import the device's model.

        Args:
            parts: The exported model by the device's name.
            config: Options of BATCH and its device, and ``ALLOW_RECOMPILE``.
        """
        own = {key: value for key, value in config.items() if key not in (ALLOW_RECOMPILE, *parts)}
        listed = self.configured(own)
        (device,) = listed.devices
        options = {**(listed.config_of(device) or {}), ALLOW_RECOMPILE: config[ALLOW_RECOMPILE]}
        model = import_model(device, next(iter(parts.values())), options)
        return BatchModel(model.graph, model, listed.options, _no_batch(model.graph))

    def request_range(self) -> tuple[int, int, int]:
        """Return the range up to two of the largest measured batches."""
        return 1, 2 * _SIZES[-1], 1


def _device_and_size(text: str) -> tuple[str, int]:
    """Return the device and the number of rows of a text such as ``CPU(16)``; 0: no number.

    Raises:
        ConfigError: the text has another form.
    """
    found = re.fullmatch(r"\s*([^(),\s]+)\s*(?:\(\s*(\d+)\s*\))?\s*", text)
    if found is None or found[2] == "0":
        raise ConfigError(
            f"BATCH takes one device, with or without the largest batch: 'BATCH:CPU(16)'; "
            f"got {text!r}"
        )
    return found[1], int(found[2] or 0)


def _with_batch(graph: Graph) -> tuple[Graph, str]:
    """Return a graph with a first dimension of any size of all inputs and outputs.

    Returns:
        The graph, and ""; or the graph as it is, and why it has no such form.
    """
    try:
        flexible = reshape(graph, batch=_BATCH)
    except ShapeError as error:  # it holds its batch size as a constant that cannot be replaced
        return graph, message_of(error)
    reason = _no_batch(flexible)
    return (graph if reason else flexible), reason


def _no_batch(graph: Graph) -> str:
    """Return why requests of a graph of `_with_batch` cannot be joined; "" if they can."""
    inputs = [(value, "input") for value in graph.inputs if value.parameter is None]
    for value, kind in (*inputs, *((value, "output") for value in graph.outputs)):
        shape = value.type.shape if isinstance(value.type, TensorType) else None
        if not shape or shape[0] != _BATCH:
            shown = value.type or "unknown"
            return f"{kind} {value.name!r} is {shown}, whose first dimension is no batch"
    return ""


def _best_sizes(graph: Graph, model: CompiledModel) -> tuple[int, int]:
    """Return the smallest measured batches with nearly the least time for a row.

    Returns:
        The rows of the best batch of several requests, whose threads wait for each other, and those
        of the best part of one request.
    """
    row = sample_inputs(graph)
    batches: dict[int, dict[str, Array]] = {}
    seconds: dict[int, float] = {}
    for size in _SIZES:
        batches[size] = {name: np.repeat(array, size, axis=0) for name, array in row.items()}
        model(batches[size])  # makes the plan
        seconds[size] = _seconds(model, batches[size])
        if seconds[size] > _MEASURED_SECONDS:
            break
    for size in (*seconds, *seconds):  # in alternation, since the machine's speed varies
        seconds[size] = min(seconds[size], _seconds(model, batches[size]))
    divided = {size: each / size for size, each in seconds.items()}
    joined = {k: each + (_HANDOVER if k > 1 else 0) for k, each in divided.items()}
    return _best(joined), _best(divided)


def _best(seconds: Mapping[int, float]) -> int:
    """Return the smallest size with nearly the least time; ``seconds`` has the times by size."""
    least = min(seconds.values())
    return next(size for size, each in seconds.items() if each * (1 - _LEAST_GAIN) <= least)


def _seconds(model: CompiledModel, arrays: Mapping[str, Array]) -> float:
    start = time.perf_counter()
    model(arrays)
    return time.perf_counter() - start


class BatchModel(VirtualModel):
    """A model whose concurrent requests run as one batch.

    Attributes:
        model: The device's model.
    """

    def __init__(
        self, graph: Graph, model: CompiledModel, options: BatchOptions, obstacle: str
    ) -> None:
        """Join the requests of a model, in batches of the stated size or of the best one.

        Args:
            graph: The graph, whose inputs and outputs have a batch dimension of any size.
            model: The device's model of it.
            options: Options of BATCH.
            obstacle: Why its requests run one by one; "": they are joined.
        """
        _, stated = _device_and_size(options.DEVICE_PRIORITIES)
        size = part = 1 if obstacle else stated
        if not size:
            try:
                size, part = _best_sizes(graph, model)
            except SubgraphError as error:  # as of a model that takes its fourth row
                size = part = 1
                obstacle = f"batches of sample inputs do not run: {message_of(error)}"
        super().__init__(
            graph.clone(),
            device=f"BATCH:{model.device}({size})",
            options=options,
            requests=2 * size * model.optimal_requests,
            metrics={"OPTIMAL_BATCH_SIZE": size},
            source=graph,
        )
        self.model = model
        if obstacle:
            _log.warning("BATCH runs requests of %r one by one: %s", graph.name, obstacle)
        dependence = obstacle or row_dependence(graph)
        if dependence and not obstacle:
            _log.info("BATCH compares rows of %r once, since %s", graph.name, dependence)
        self._batches = _Batches(
            model, size, part, options.AUTO_BATCH_TIMEOUT / 1e3, not dependence, bool(obstacle)
        )
        self._has_states = bool(model.create_runner(Cancel()).states())

    def export_model(self, target: str | PathLike[str] | IO[bytes]) -> None:
        """Write a file with the device's model."""
        export_several(self, {self.model.device: self.model}, target)

    @property
    def running(self) -> Sequence[CompiledModel]:
        """The device's model."""
        return [self.model]

    def create_runner(self, cancel: Cancel) -> Runner:
        """Return a runner that joins its runs with others; of a model with states, one alone."""
        if self._has_states:
            return self.model.create_runner(cancel)
        return _BatchRunner(self._batches, cancel)


class _BatchRunner(Runner):
    """Runs one request, alone or in a batch."""

    def __init__(self, batches: _Batches, cancel: Cancel) -> None:
        super().__init__(cancel)
        self._batches = batches

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        return self.filled(self._batches.run(inputs))


@attrs.define(eq=False)
class _Waiting:
    """A run of one request.

    Attributes:
        inputs: Its arrays.
        rows: Their number of rows.
        key: Runs of equal keys may be joined; None: it runs alone.
        wake: Set when the run has ended, or when its thread has to run a batch.
        leads: Whether its thread has to run a batch.
        results: Its results, once it has ended.
        error: Its error.
    """

    inputs: Sequence[Any]
    rows: int
    key: tuple[Any, ...] | None
    wake: threading.Event = attrs.field(factory=threading.Event)
    leads: bool = False
    results: Sequence[Any] | None = None
    error: Exception | None = None


class _Batches:
    """The runs of all requests of a model, of which as many as possible run together.

    The thread of the oldest waiting run makes the next batch, so that there is no thread that only
    distributes.
    """

    def __init__(
        self,
        model: CompiledModel,
        size: int,
        part: int,
        timeout: float,
        independent: bool,
        whole: bool,
    ) -> None:
        """Prepare to run batches.

        Args:
            model: The device's model.
            size: Rows of the largest batch of several requests.
            part: Rows of the parts into which a request of more rows is divided.
            timeout: Seconds that a run waits for others though the device is free.
            independent: Whether rows are proved to be independent; if not, the first batch is
                compared with runs of its requests.
            whole: Whether requests are neither joined nor divided.
        """
        self._model = model
        self._size = size
        self._part = part
        self._timeout = timeout
        self._is_checked = independent  # whether rows are known to be independent
        self._is_whole = whole  # whether they are known not to be
        self._lock = free_in_child(threading.Lock())
        self._begin()

    def _begin(self) -> None:
        """Begin without a run."""
        self._process = os.getpid()
        self._waiting: deque[_Waiting] = deque()
        self._free = self._model.optimal_requests
        self._runners: list[Runner] = []

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the model on one request's inputs, with those of others or in several parts."""
        if self._is_whole:
            return self._call(inputs)
        mine = _waiting(inputs)
        if mine.key is None or mine.rows <= self._part:
            return self._run(mine)
        found: list[Array] = []
        try:
            found = self._in_parts(inputs, mine.rows)
        except Exception as error:
            if self._is_checked and not self._is_whole:
                raise
            _log.info("a request in parts of %d rows failed: %s", self._part, error)
        if not self._is_checked:
            whole = self._call(inputs)
            self._check(found, whole)
            self._is_checked = True
            return whole
        # Another request may have shown meanwhile that rows depend on each other.
        return self._call(inputs) if self._is_whole or not found else found

    def _in_parts(self, inputs: Sequence[Any], rows: int) -> list[Array]:
        """Return the results of a request of ``rows`` rows that runs in parts."""
        parts = [
            self._run(_waiting([array[k : k + self._part] for array in inputs]))
            for k in range(0, rows, self._part)
        ]
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    def _run(self, mine: _Waiting) -> Sequence[Any]:
        """Run a request of at most the rows of a part, alone or with others."""
        if self._size == 1:
            return self._call(mine.inputs)
        with self._lock:
            if self._process != os.getpid():  # the runs of a forked child's parent go on there
                self._begin()
            mine.leads = self._free > 0
            if mine.leads:
                self._free -= 1
            else:
                self._waiting.append(mine)
        if not mine.leads:
            self._wait(mine)
        if mine.leads:
            self._lead(mine)
        if mine.error is not None:
            raise mine.error
        assert mine.results is not None
        return mine.results

    def _wait(self, mine: _Waiting) -> None:
        """Wait until a run has ended or its thread has to lead."""
        try:
            mine.wake.wait()
        except BaseException:  # an interrupt: the others must not wait for this thread
            with self._lock:
                if mine in self._waiting:
                    self._waiting.remove(mine)
                elif mine.leads:
                    self._pass_on()
            raise

    def _lead(self, first: _Waiting) -> None:
        """Run the oldest run with others that fit, and let the thread of the next one lead."""
        batch = [first]
        try:
            if self._timeout:
                time.sleep(self._timeout)
            with self._lock:
                self._take(batch)
            self._finish(batch)
        finally:
            with self._lock:
                # After an interrupt of this thread the others have no results yet.
                ended = [run for run in batch[1:] if run.results is not None or run.error]
                self._waiting.extendleft(run for run in batch[:0:-1] if run not in ended)
                self._pass_on()
            for run in ended:
                run.wake.set()

    def _take(self, batch: list[_Waiting]) -> None:
        """Move waiting runs that fit into the batch of its first run."""
        (first,) = batch
        rows = first.rows
        may_join = first.key is not None and not self._is_whole
        for other in list(self._waiting) if may_join else ():
            if other.key == first.key and rows + other.rows <= self._size:
                self._waiting.remove(other)
                batch.append(other)
                rows += other.rows

    def _pass_on(self) -> None:
        """Let the thread of the oldest waiting run lead."""
        if self._waiting:
            following = self._waiting.popleft()
            following.leads = True
            following.wake.set()
        else:
            self._free += 1

    def _finish(self, batch: Sequence[_Waiting]) -> None:
        """Set the results, or the error, of each run of a batch."""
        joined: list[list[Array]] | None = None
        if len(batch) > 1:
            try:
                joined = self._together(batch)
            except Exception as error:
                # One of them may be wrong, whose error the others must not get.
                _log.info("a batch of %d runs failed; they run alone: %s", len(batch), error)
        # `_is_whole` is set before `_is_checked`: another batch may find it out at any time.
        if joined is not None and self._is_checked and not self._is_whole:
            for run, results in zip(batch, joined, strict=True):
                run.results = results
            return
        for k, run in enumerate(batch):
            try:
                run.results = self._call(run.inputs)
            except Exception as error:
                run.error = error
            else:
                if joined is not None:
                    self._check(joined[k], run.results)
        self._is_checked |= joined is not None

    def _together(self, batch: Sequence[_Waiting]) -> list[list[Array]]:
        """Return the results of each run of a batch that runs as one."""
        columns = zip(*(run.inputs for run in batch), strict=True)
        found = self._call([np.concatenate(column) for column in columns])
        ends = np.cumsum([run.rows for run in batch])
        if any(len(array) != ends[-1] for array in found):
            raise DeviceError("the results of a batch have another number of rows")
        # Copies, so that no result keeps those of the other requests.
        parts = [[part.copy() for part in np.split(array, ends[:-1])] for array in found]
        return [list(results) for results in zip(*parts, strict=True)]

    def _check(self, joined: Sequence[Array], alone: Sequence[Array]) -> None:
        """Compare results of several runs with those of one; if they differ, end joining them.

        Args:
            joined: Results of a run of other rows; empty if it failed.
            alone: Those of a run of the request's rows.
        """
        if len(joined) == len(alone) and all(map(_same, joined, alone)):
            return
        self._is_whole = True
        _log.warning(
            "model %r computes rows of a batch not independently: BATCH runs its requests one by "
            "one",
            self._model.name,
        )

    def _call(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the device's model with an idle runner."""
        try:
            runner = self._runners.pop()
        except IndexError:
            runner = self._model.create_runner(Cancel())
        results = runner.run(inputs)
        self._runners.append(runner)
        return results


def _waiting(inputs: Sequence[Any]) -> _Waiting:
    """Return a run of these inputs, which may join others of the same rows and weights."""
    arrays = [item for item in inputs if is_array(item)]
    rows = {array.shape[0] for array in arrays}
    if len(arrays) < len(inputs) or len(rows) != 1:
        return _Waiting(inputs, 1, None)
    snapshot = pinned_snapshot()
    epoch = None if snapshot is None else snapshot.epoch
    return _Waiting(inputs, rows.pop(), (epoch, *((a.shape[1:], a.dtype) for a in arrays)))


def _same(joined: Array, alone: Array) -> bool:
    """Return whether results of a run are the same in a batch, up to rounding."""
    if joined.shape != alone.shape:
        return False
    kind = DTYPES[dtype_of(joined)].kind
    if kind not in ("float", "complex"):
        # Rounding may change the index of a largest element.
        return bool(np.count_nonzero(joined != alone) <= _SAME * joined.size)
    if kind == "float":  # NumPy compares no bfloat16
        joined, alone = joined.astype(np.float64), alone.astype(np.float64)
    scale = float(np.max(np.abs(alone), initial=0, where=np.isfinite(alone)))
    return bool(np.allclose(joined, alone, rtol=0, atol=_SAME * scale, equal_nan=True))
