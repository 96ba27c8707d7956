"""Executable plans of OPENCL: the launches of a plan, bound to the buffers of a request.

The arguments of kernels are set once. A run enqueues the uploads of inputs, all launches and the
downloads of outputs, in order and without waiting; the host waits once, at the end. Weights are
uploaded once for each version and shared by all requests of the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from subgraph.engine.planner.constants import cached
from subgraph.engine.planner.operands import (
    EmittedStep,
    Operand,
    Scratch,
    Storage,
    Weight,
    location_of,
)
from subgraph.engine.planner.plan_types import Plan, ReferenceStep
from subgraph.engine.planner.step_profile import Span, profile_entries
from subgraph.engine.program.reports import SLOT_WORDS, Report, ReportSlot
from subgraph.errors import DeviceError, SubgraphError
from subgraph.graph.parameters import Parameter, Snapshot
from subgraph.graph.result_arrays import fill_outputs, usable_output
from subgraph.graph.types import Array, numpy_dtype
from subgraph.opencl.lowering import ClLaunch
from subgraph.opencl.runtime import Runtime, opencl
from subgraph.system.exiting import uninterrupted, uninterruptedly
from subgraph.system.forking import free_in_child
from subgraph.weights.cache import WeightCache, WeightEntry

if TYPE_CHECKING:
    import pyopencl as cl

_MAX_INDEX = 2**31 - 1  # kernels compute the indices of elements in a buffer as int32
# An enqueued run: the arrays that its downloads fill, and those that the caller passed for results.
Pending = tuple[list[Array], "Sequence[Array | None] | None"]


class DeviceWeights:
    """Weights in a device's memory: one buffer for each entry of the weight cache.

    Attributes:
        uploads: Number of uploads so far.
    """

    def __init__(self, runtime: Runtime) -> None:
        """Begin without buffers."""
        self.uploads = 0
        self._runtime = runtime
        self._lock = free_in_child(threading.Lock())
        self._buffers: WeakKeyDictionary[WeightEntry, tuple[Array, Any]] = WeakKeyDictionary()

    def buffer(self, entry: WeightEntry, queue: cl.CommandQueue) -> cl.Buffer:
        """Return the buffer of an entry; it is uploaded if its array is new."""
        array = entry.get()
        with self._lock:
            held = self._buffers.get(entry)
            # A new version of a parameter gives a new array. The old buffer lives on in the plans
            # that still use it (`_entry_buffers`).
            if held is None or held[0] is not array:
                # The copy has ended before the lock is released, so that queues of other requests
                # may use the buffer at once.
                held = (array, upload(self._runtime, queue, array))
                self._buffers[entry] = held
                self.uploads += 1
            return held[1]


_device_weights: WeakKeyDictionary[Runtime, DeviceWeights] = WeakKeyDictionary()


def device_weights(runtime: Runtime) -> DeviceWeights:
    """Return the weights in the memory of a device."""
    return _device_weights.setdefault(runtime, DeviceWeights(runtime))


def upload(runtime: Runtime, queue: cl.CommandQueue, array: Array) -> cl.Buffer:
    """Return a new buffer with the content of an array.

    Args:
        runtime: The device.
        queue: The queue for the copy, which has ended on return.
        array: The array.
    """
    buffer = runtime.buffer(array.nbytes)
    if array.nbytes:
        opencl().enqueue_copy(queue, buffer, np.ascontiguousarray(array), is_blocking=True)
    return buffer


@contextmanager
def driver_errors(runtime: Runtime, what: str) -> Generator[None]:
    """Convert an error of the OpenCL driver to a DeviceError.

    Args:
        runtime: The device, named in the message.
        what: The activity that failed, for the message.
    """
    try:
        yield
    except SubgraphError:
        raise
    except (opencl().Error, MemoryError) as error:
        raise DeviceError(f"OpenCL device {runtime.name!r} failed at {what}: {error}") from error


class _BoundLaunch:
    """A step with its kernel object, whose arguments are set."""

    def __init__(self, step: EmittedStep, kernel: cl.Kernel) -> None:
        self.step = step
        self.launch = cast("ClLaunch", step.kernel)
        self.kernel = kernel

    @property
    def description(self) -> str:
        node = self.step.node
        return f"kernel {self.launch.description} of node {node.name!r} ({node.op_type})"


# The event of a launch (None for a reference step), and begin and end of enqueueing or computing it
# on the host, in seconds of ``time.perf_counter``.
_LaunchTimes = tuple["cl.Event | None", float, float]


def _span(times: _LaunchTimes, offset: float) -> Span:
    event, start, end = times
    if event is None:
        return start, end
    return event.profile.start * 1e-9 + offset, event.profile.end * 1e-9 + offset


# PoCL compiles and runs what was enqueued on threads of its own. Without waiting for them, a
# process that ended between `enqueue` and `finish` crashed.
_plans: WeakSet[ClExecutablePlan] = WeakSet()
uninterrupted.wait_for(lambda: any(plan.is_running() for plan in list(_plans)))
_parents: list[Any] = []  # of a forked child: what it must not release


def _in_child() -> None:
    """Forget the plans of the parent, whose threads are the driver's, without releasing them.

    A driver that does not work in the child may end it when one of its objects is released.
    """
    plans = list(_plans)
    if not all(plan.survives_fork for plan in plans):
        # The list keeps the objects alive, so that Python never releases them in the child.
        _parents.append((plans, dict(_device_weights)))
    _plans.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


class ClExecutablePlan:
    """A plan bound to buffers and a queue; runs for one request at a time.

    Attributes:
        plan: The plan.
        entries: The profile entry of every step, with 0 seconds.
        epoch: Epoch of the snapshot from which the weights were taken; None before `refresh`.
    """

    @uninterruptedly
    def __init__(self, plan: Plan, runtime: Runtime, cache: WeightCache, profiling: bool) -> None:
        """Allocate buffers and set arguments; build programs that are used for the first time.

        Args:
            plan: The plan.
            runtime: The device.
            cache: The op's view of the weight cache.
            profiling: Whether the queue records times, as `run_timed` needs.

        Raises:
            DeviceError: A program does not build, or memory does not suffice.
        """
        runtime.check_process()
        self.plan = plan
        self.entries = profile_entries(plan)
        self.epoch: int | None = None
        self._runtime = runtime
        # Every request has its own queue: runs of different requests do not wait for each other.
        self._queue = runtime.queue(profiling=profiling)
        self._profiling = profiling
        self._cache = cache
        self._copies: list[Any] = []
        self._enqueued = False  # whether a run was begun for whose end nobody has waited yet
        self._marker: cl.Event | None = None  # of the end of that run, once the process ends
        # Buffers by the `id` of their array, and the arrays, so that these ids stay theirs.
        self._constants: dict[int, tuple[Array, cl.Buffer]] = {}
        # Arguments that are set when a weight has changed: kernel, argument, entry.
        self._entry_arguments: list[tuple[Any, int, WeightEntry]] = []
        # Buffers of weights: kernels do not keep the buffers of their arguments alive.
        self._entry_buffers: dict[WeightEntry, Any] = {}
        with driver_errors(runtime, "the memory of a plan"):
            self._arena = runtime.buffer(plan.arena_bytes)
            self._inputs = {
                k: (runtime.buffer(o.nbytes), numpy_dtype(o.dtype))
                for k, o in enumerate(plan.inputs)
                if o is not None
            }
            self._outputs: dict[int, Any] = {}
            for position, operand in enumerate(plan.outputs):
                root, _ = location_of(operand)
                # Other outputs share memory with an input, a weight or another output and are
                # downloaded from there (`ClLowering.copies_outputs`).
                if root.kind == "output" and root.index == position:
                    self._outputs[position] = runtime.buffer(operand.nbytes)
        self._reports: dict[Report, int] = {}
        self._slot_words: Array = np.zeros(SLOT_WORDS, np.int64)
        self._no_report: Array = np.zeros(SLOT_WORDS, np.int64)
        self._slot_buffer: Any = None
        self._items: list[_BoundLaunch | ReferenceStep] = [
            self._bind(item) if isinstance(item, EmittedStep) else item for item in plan.items
        ]
        self._slot = ReportSlot(self._slot_words, tuple(self._reports))
        _plans.add(self)

    # ------------------------------------------------------------------ preparation

    def _bind(self, step: EmittedStep) -> _BoundLaunch:
        launch = cast("ClLaunch", step.kernel)
        try:
            kernel = self._runtime.kernel(launch.source, launch.name)
        except DeviceError as error:
            node = step.node
            raise DeviceError(f"node {node.name!r} ({node.op_type}): {error}") from error
        bound = _BoundLaunch(step, kernel)
        with driver_errors(self._runtime, bound.description):
            position = 0
            for argument in step.arguments:
                position = self._argument(bound.kernel, position, argument)
            taken = bound.kernel.num_args
        if position != taken:
            raise DeviceError(
                f"{bound.description}: {position} arguments are given, {taken} are taken"
            )
        return bound

    def _argument(self, kernel: cl.Kernel, position: int, argument: object) -> int:
        if isinstance(argument, np.generic):
            kernel.set_arg(position, cast("np.generic[Any]", argument))
            return position + 1
        if isinstance(argument, (int, float)):
            number = np.int32(argument) if isinstance(argument, int) else np.float32(argument)
            kernel.set_arg(position, number)
            return position + 1
        if isinstance(argument, Weight):
            self._set_buffer(kernel, position, self._constant(argument))
            # The kernels expect an index after every buffer; a weight begins at element 0 of its
            # own buffer.
            kernel.set_arg(position + 1, np.int32(0))
            return position + 2
        if isinstance(argument, Report):
            # Only plans with reports copy the slot to and from the device in every run.
            if self._slot_buffer is None:
                self._slot_buffer = upload(self._runtime, self._queue, self._slot_words)
            kernel.set_arg(position, self._slot_buffer)
            code = self._reports.setdefault(argument, len(self._reports) + 1)
            kernel.set_arg(position + 1, np.int32(code))
            return position + 2
        assert isinstance(argument, (Operand, Scratch))
        root, offset = location_of(argument)
        item, count = 1, argument.nbytes
        if isinstance(argument, Operand):
            item, count = argument.itemsize, argument.size
        buffer, begin = self._location(root)
        self._set_buffer(kernel, position, buffer)
        first = (begin + offset) // item
        if first + count > _MAX_INDEX:
            raise DeviceError(
                f"the values that live at the same time are too large: one ends at element "
                f"{first + count} of their memory, and kernels count to 2^31; use smaller inputs"
            )
        kernel.set_arg(position + 1, np.int32(first))
        return position + 2

    def _location(self, root: Storage) -> tuple[cl.Buffer | WeightEntry, int]:
        """Return the memory of a root storage (see `_set_buffer`), and its offset in bytes."""
        if root.kind == "arena":
            return self._arena, self.plan.offsets[root]
        if root.kind == "input":
            return self._inputs[root.index][0], 0
        if root.kind == "output":
            return self._outputs[root.index], 0
        assert root.content is not None, "it is a constant"
        return self._constant(root.content), 0

    def _set_buffer(
        self, kernel: cl.Kernel, position: int, buffer: cl.Buffer | WeightEntry
    ) -> None:
        """Set an argument to a buffer, or have `refresh` set it to that of an entry.

        Args:
            kernel: The kernel.
            position: Position of the argument.
            buffer: The buffer, or the entry of the weight cache whose buffer it is.
        """
        if isinstance(buffer, WeightEntry):
            self._entry_arguments.append((kernel, position, buffer))
        else:
            kernel.set_arg(position, buffer)

    def _constant(self, content: Array | Weight | Parameter) -> cl.Buffer | WeightEntry:
        """Return the entry of a constant in the weight cache, or the buffer of an array."""
        found = cached(content, self._cache)
        if isinstance(found, WeightEntry):
            return found
        held = self._constants.get(id(found))
        if held is None:
            buffer = upload(self._runtime, self._queue, found)
            held = self._constants[id(found)] = (found, buffer)
        return held[1]

    # ------------------------------------------------------------------ runs

    @uninterruptedly
    def refresh(self, snapshot: Snapshot) -> None:
        """Take the weights as they are in ``snapshot``, which is pinned."""
        self._runtime.check_process()
        store = device_weights(self._runtime)
        with driver_errors(self._runtime, "the upload of weights"):
            # All uploads come before the first argument is set: if one fails, no kernel has a
            # mixture of old and new weights.
            entries = dict.fromkeys(entry for *_, entry in self._entry_arguments)
            buffers = {entry: store.buffer(entry, self._queue) for entry in entries}
            for kernel, position, entry in self._entry_arguments:
                kernel.set_arg(position, buffers[entry])
        # The old buffers are freed only now, when no kernel refers to them.
        self._entry_buffers = buffers
        self.epoch = snapshot.epoch

    @uninterruptedly
    def run(self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None) -> list[Array]:
        """Run the plan; see the CPU's `ExecutablePlan.run`."""
        return self.finish(self.enqueue(inputs, outputs))

    @uninterruptedly
    def run_timed(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> tuple[list[Array], list[Span]]:
        """Run as `run` does, and measure each step.

        Args:
            inputs: See `run`.
            outputs: See `run`.

        Returns:
            The results, and begin and end of each item of the plan in seconds of
            ``time.perf_counter``. Times of the device's own clock are shifted so that the first
            launch was enqueued at the same time by both clocks.
        """
        if not self._profiling:  # the present queue records no times
            self._wait()
            self._queue = self._runtime.queue(profiling=True)
            self._profiling = True
        events: list[_LaunchTimes] = []
        results = self.finish(self.enqueue(inputs, outputs, events))
        offsets = (start - e.profile.queued * 1e-9 for e, start, _ in events if e is not None)
        offset = next(offsets, 0.0)
        return results, [_span(times, offset) for times in events]

    def cancel(self) -> None:
        """Do nothing: OpenCL cannot revoke launches that are enqueued."""

    def clear(self) -> None:
        """Do nothing, like `cancel`."""

    @uninterruptedly
    def enqueue(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Array | None] | None,
        events: list[_LaunchTimes] | None = None,
    ) -> Pending:
        """Enqueue a run: uploads, launches and downloads. `finish` waits for it.

        Args:
            inputs: Arrays for the graph's inputs, by position.
            outputs: Arrays to write into, by position; None, or None for one of them: new arrays.
            events: If not None, the times of each launch are appended.

        Returns:
            The argument of `finish`.
        """
        self._runtime.check_process()
        with driver_errors(self._runtime, "the upload of inputs"):
            if self._enqueued:  # an earlier run was enqueued and not finished
                self._wait()
            # The flag is set before the first command, so that an error in between leaves it set
            # and the next run waits for the commands.
            self._enqueued = True
            for position, (buffer, dtype) in self._inputs.items():
                # A file may state a wrong dtype for the result of an operator that states none.
                array = np.ascontiguousarray(inputs[position], dtype)
                if array.nbytes:
                    self._copy(buffer, array)
            if self._slot_buffer is not None:  # an unfinished run may have left a report
                self._copy(self._slot_buffer, self._no_report)
        for item in self._items:
            start = 0.0 if events is None else time.perf_counter()
            event = self._enqueue_step(item)
            if events is not None:
                events.append((event, start, time.perf_counter()))
        results: list[Array] = []
        with driver_errors(self._runtime, "the download of results"):
            for position, operand in enumerate(self.plan.outputs):
                target = None if outputs is None else outputs[position]
                results.append(self._download(operand, target))
            if self._slot_buffer is not None:
                self._copy(self._slot_words, self._slot_buffer)
            self._queue.flush()
        return results, outputs

    @uninterruptedly
    def finish(self, pending: Pending) -> list[Array]:
        """Wait for a run that `enqueue` began; return its results.

        Raises:
            DeviceError: The device failed.
            ShapeError: A value that a kernel took as an index or a count was out of range.
        """
        results, outputs = pending
        with driver_errors(self._runtime, "the download of results"):
            self._wait()
        self._enqueued = False
        self._slot.check()
        return results if outputs is None else fill_outputs(results, outputs)

    def _enqueue_step(self, item: _BoundLaunch | ReferenceStep) -> cl.Event | None:
        if isinstance(item, ReferenceStep):
            self._compute(item)
            return None
        launch = item.launch
        try:
            event: cl.Event = opencl().enqueue_nd_range_kernel(
                self._queue, item.kernel, launch.global_size, launch.local_size
            )
        except (opencl().Error, MemoryError) as error:
            self._drain()
            raise DeviceError(
                f"OpenCL device {self._runtime.name!r} failed at {item.description}: {error}"
            ) from error
        return event

    def _copy(self, target: Any, source: Any, **places: int) -> None:
        """Enqueue a copy between the host and a buffer.

        The event is kept until `_wait`. If it were deleted before the copy ended, pyopencl would
        wait for the copy while it holds Python's lock.
        """
        event = opencl().enqueue_copy(self._queue, target, source, is_blocking=False, **places)
        self._copies.append(event)

    def _wait(self) -> None:
        """Wait until the queue is empty."""
        self._queue.finish()
        self._copies.clear()

    def _drain(self) -> None:
        """Wait for all enqueued commands after an error, so that the request can be used again."""
        try:
            self._wait()
        except opencl().Error:
            # A queue whose commands failed may refuse all further ones; a new one is empty.
            self._queue = self._runtime.queue(profiling=self._profiling)
        self._enqueued = False

    @property
    def survives_fork(self) -> bool:
        """Whether the device works in a forked child of this process."""
        return self._runtime.survives_fork

    def is_running(self) -> bool:
        """Return whether commands of a run that `enqueue` began are not at their end; at exit."""
        if not self._enqueued:
            return False
        api = opencl()
        try:
            marker = self._marker
            if marker is None:
                marker = self._marker = api.enqueue_marker(self._queue)
                self._queue.flush()
            end: int = api.command_execution_status.COMPLETE
            return int(marker.command_execution_status) > end
        except api.Error:
            return False

    # ------------------------------------------------------------------ host access

    def _download(self, operand: Operand, target: Array | None = None) -> Array:
        if operand.known is not None:
            return np.array(operand.known)
        if isinstance(operand.source, Parameter):
            return np.array(operand.source.array)
        dtype = numpy_dtype(operand.dtype)
        array = usable_output(target, dtype, operand.shape)
        if array is None:
            array = np.empty(operand.shape, dtype)
        if array.nbytes:
            buffer, offset = self._buffer_of(operand)
            self._copy(array, buffer, src_offset=offset)
        return array

    def _buffer_of(self, operand: Operand) -> tuple[cl.Buffer, int]:
        root, offset = location_of(operand)
        buffer, begin = self._location(root)
        if isinstance(buffer, WeightEntry):
            buffer = device_weights(self._runtime).buffer(buffer, self._queue)
        return buffer, begin + offset

    def _compute(self, step: ReferenceStep) -> None:
        """Compute a reference step between launches; the host waits for its inputs."""
        with driver_errors(self._runtime, f"node {step.node.name!r} on the host"):
            arrays = [None if o is None else self._download(o) for o in step.inputs]
            self._wait()
        # The arrays were filled by copies that do not block, so they are complete only after the
        # wait above.
        results = step.compute(arrays)
        with driver_errors(self._runtime, f"node {step.node.name!r} on the host"):
            for operand, array in results:
                buffer, offset = self._buffer_of(operand)
                self._copy(buffer, array, dst_offset=offset)
