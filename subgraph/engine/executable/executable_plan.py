"""Executable plans: a plan bound to the memory of one request, ready to run.

The argument words are a copy of those in the plan's argument layout
(`subgraph.engine.executable.argument_layout`), with addresses in place of the zeros. A run patches
only the addresses that changed since the previous run. Usually none did, because small inputs and
outputs are copied to and from staging buffers at fixed addresses
(`subgraph.engine.executable.bound_port`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.engine.executable.argument_layout import ArgumentLayout, Patch, SymbolicConstant
from subgraph.engine.executable.bound_port import BoundPort, GrowingPort
from subgraph.engine.executable.reference_steps import run_reference_step
from subgraph.engine.executable.stored_program import StoredProgram
from subgraph.engine.executable.symbolic_plan import PlanInstance
from subgraph.engine.planner.plan_types import Plan, ReferenceStep
from subgraph.engine.planner.step_profile import Span, shown_kernel
from subgraph.engine.program import abi
from subgraph.engine.program.pool import Pool
from subgraph.engine.program.program import Program, Step, runtime_kernels
from subgraph.engine.program.reports import SLOT_WORDS, ReportSlot
from subgraph.engine.toolchain import loader, toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.limits import check_memory
from subgraph.graph.parameters import Snapshot
from subgraph.graph.result_arrays import fill_outputs
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.system import guard_pages, guard_report
from subgraph.system.large_pages import aligned_empty, mapped_empty
from subgraph.weights.cache import ChangedEntries, WeightEntry
from subgraph.weights.mapped_files import release
from subgraph.weights.parallel import parallel_map

# Bytes of parameters from which weights are computed by several threads (estimate).
_MIN_THREADED_WEIGHT_BYTES = 1 << 22
# Bytes of parameters from which the linker's memory, tens of megabytes, is given back before the
# weights are computed (estimate).
_LARGE_WEIGHT_BYTES = 1 << 25


class Arena:
    """A request's memory, shared by the plans that it runs one after another.

    Attributes:
        memory: The bytes.
        address: Address of the first one.
    """

    def __init__(self) -> None:
        """Begin with an empty arena."""
        self.memory = aligned_empty((0,), np.dtype(np.uint8))
        self.address = 0
        self._nbytes = 0  # bytes that the plans bound to it may use

    def reserve(self, nbytes: int) -> None:
        """Enlarge the arena to at least ``nbytes``; its address may change, its content is lost.

        If that fails, the arena is empty, and the next call allocates what earlier ones reserved.
        """
        if guard_pages.MODE:
            return  # each executable plan has an arena of its own
        nbytes = max(nbytes, self._nbytes)
        if nbytes > self.memory.nbytes:
            # The old memory is dropped first, so that both are not allocated at the same time.
            self.memory, self.address = aligned_empty((0,), np.dtype(np.uint8)), 0
            memory = mapped_empty(nbytes)
            self.memory, self.address = memory, memory.ctypes.data
            self._nbytes = nbytes


class _GuardedArena(Arena):
    """The arena of one executable plan, with each storage between guard pages."""

    def __init__(self, areas: Sequence[tuple[int, int]], nbytes: int) -> None:
        self.memory = guard_pages.mapped(areas, nbytes)
        self.address = self.memory.ctypes.data


class ExecutablePlan:
    """A plan bound to an arena; runs for one request at a time.

    It consists of segments: programs of compiled kernels, and between them reference steps.

    Attributes:
        plan: The plan that was bound, or the program from an exported model, which has no plan.
        rebinds: How often another plan was bound since.
        single_program: The only program; None if reference steps run between several programs.
        inputs: The inputs that are not weights.
        outputs: The outputs, in the graph's order.
        epoch: Epoch of the snapshot from which the weights were taken; None before `refresh`.
    """

    def __init__(
        self,
        plan: Plan | PlanInstance | StoredProgram,
        layout: ArgumentLayout,
        arena: Arena,
        pool: Pool | None,
    ) -> None:
        """Copy the argument words; compile or load kernels that this process has not loaded.

        Args:
            plan: The plan.
            layout: Its argument layout.
            arena: Memory for all storages of the plan; it is enlarged to ``layout.arena_bytes``,
                and may be enlarged or moved later.
            pool: The threads that run steps; None: only the calling thread.
        """
        _check_memory(layout.arena_bytes + sum(port.nbytes for port in layout.outputs))
        arena.reserve(layout.arena_bytes)
        self.plan = plan
        self.rebinds = 0
        self._entries = layout.entries
        self.epoch: int | None = None
        guarded = guard_pages.MODE
        self._arena = _GuardedArena(layout.areas, layout.arena_bytes) if guarded else arena
        self._arena_at = -1  # address of the arena in the words
        self._arena_patch = layout.arena
        kernels = [*(step[0] for step in layout.steps), *(k for k, _ in layout.kernels)]
        try:
            addresses = toolchain.addresses([*kernels, *runtime_kernels(pool)])
        except loader.KernelError as error:
            raise _at_node(error, self.entries) from error.__cause__
        self._words = _copied_words(layout)
        self._slot: ReportSlot | None = None
        if layout.reports:
            slot: Array = np.zeros(SLOT_WORDS, np.int64)
            # The slot belongs to this plan and not to the layout, because requests that run at the
            # same time must not read each other's reports.
            self._words[layout.slot] = slot.ctypes.data
            self._slot = ReportSlot(slot, layout.reports)
        for kernel, patch in layout.kernels:
            patch.put(self._words, addresses[kernel])
        self._entry_patches: list[tuple[WeightEntry, Patch]] = []
        self._arrays: list[Array] = []
        self._bind_weights(layout)
        self._changes = ChangedEntries([entry for entry, _ in self._entry_patches])
        self._entry_arrays: list[Array | None] = [None] * len(self._entry_patches)
        self.inputs = [BoundPort(port, self._words) for port in layout.inputs]
        of_input = {port.position: port for port in self.inputs}
        self.outputs = [
            BoundPort(port, self._words)
            if port.buffer is None
            else GrowingPort(port, self._words, of_input[port.buffer])
            for port in layout.outputs
        ]
        self._threads = 1 if pool is None else pool.size
        self._segments = self._make_segments(layout, pool, addresses)
        first = self._segments[0]
        self.single_program = (
            first if len(self._segments) == 1 and isinstance(first, Program) else None
        )
        self._run_staged = self._make_staged()
        if guard_pages.MODE:
            guard_report.watch(self)

    # ------------------------------------------------------------------ preparation

    @property
    def entries(self) -> tuple[ProfileEntry, ...]:
        """The profile entry of every step, with 0 seconds."""
        return self._entries()

    def rebind(self, instance: PlanInstance) -> None:
        """Change to another instance of the same symbolic plan; the weights stay."""
        inputs, outputs = instance.port_sizes()
        result_bytes = instance.symbolic_plan.outputs.fixed_bytes + sum(o.nbytes for o in outputs)
        _check_memory(instance.arena_bytes + result_bytes)  # before anything is changed
        self._arena.reserve(instance.arena_bytes)
        self.plan, self._entries = instance, instance.entries
        self.rebinds += 1
        # The array of words stays at its address, to which the programs' rows and this plan's
        # patches refer. Fixed words keep their values.
        instance.fill_words(self._words)
        for k, weight, patch in instance.varying_weights():
            self._move_weight(k, weight, patch)
        self._arena_patch, self._arena_at = instance.arena, -1
        if guard_pages.MODE:
            self._arena = _GuardedArena(instance.areas, instance.arena_bytes)
        for ports, sizes in ((self.inputs, inputs), (self.outputs, outputs)):
            for k, shape, nbytes, offsets in sizes:
                ports[k].resize(shape, nbytes, offsets)
        # A symbolic plan has no reference steps, so that its only segment is a program.
        self._segments[0].set_sizes(instance.sizes)
        self._run_staged = self._make_staged()

    def _move_weight(self, k: int, weight: WeightEntry | Array, patch: Patch) -> None:
        """Change the words that point into a weight.

        Args:
            k: Index of the weight in the argument layout.
            weight: Its entry, or the array of a constant, which differs between instances.
            patch: The words that point into it, with offsets that differ between instances.
        """
        if not isinstance(weight, WeightEntry):
            self._arrays[k - len(self._entry_patches)] = self._bind_array(weight, patch)
            return
        self._entry_patches[k] = weight, patch
        array = self._entry_arrays[k]
        if array is not None:
            patch.put(self._words, array.ctypes.data)

    def _bind_weights(self, layout: ArgumentLayout) -> None:
        """Bind constant arrays to the words; the other weights are bound by `refresh`."""
        for weight, patch in layout.weights:
            if isinstance(weight, WeightEntry):
                self._entry_patches.append((weight, patch))
            else:
                assert not isinstance(weight, SymbolicConstant), "an instance holds arrays"
                self._arrays.append(self._bind_array(weight, patch))

    def _bind_array(self, array: Array, patch: Patch) -> Array:
        array = guard_pages.guarded_copy(array) if guard_pages.MODE else array
        patch.put(self._words, array.ctypes.data)
        return array

    def _make_segments(
        self, layout: ArgumentLayout, pool: Pool | None, addresses: Mapping[Kernel, int]
    ) -> list[Any]:
        """Return the programs and reference steps in the order in which a run executes them."""
        base = self._words.ctypes.data
        steps = [
            Step(addresses[kernel], base + 8 * begin, units, grain)
            for kernel, begin, units, grain in layout.steps
        ]
        segments: list[Any] = []
        items = self.plan.items if isinstance(self.plan, Plan) else ()
        references = [item for item in items if isinstance(item, ReferenceStep)]
        begin = 0
        # Two reference steps may follow each other without a program between them.
        for end, reference in zip(layout.breaks, references, strict=True):
            if end > begin:
                segments.append(Program(steps[begin:end], self._threads, pool, tiny=layout.tiny))
            segments.append(reference)
            begin = end
        # A plan without steps still needs one segment: `__init__` and `rebind` use the first.
        if begin < len(steps) or not segments:
            segments.append(Program(steps[begin:], self._threads, pool, tiny=layout.tiny))
        return segments

    def _make_staged(self) -> Callable[[Sequence[Any]], list[Array]] | None:
        """Return a function that runs a plan with little overhead; None if the plan needs more.

        It serves plans of one program whose inputs and outputs all have staging buffers, so that no
        run patches words.
        """
        ports = (*self.inputs, *self.outputs)
        if self.single_program is None or any(port.staging is None for port in ports):
            return None
        execute = self.single_program.function
        if self._slot is not None:
            execute = partial(_run_and_check, execute, self._slot)
        buffers = [(port.staging, port.position) for port in self.inputs]
        copies = [port.staging.copy for port in self.outputs]
        if len(buffers) == len(copies) == 1:
            return _run_one_to_one(*buffers[0], execute, copies[0])

        def run(inputs: Sequence[Any]) -> list[Array]:
            for staging, position in buffers:
                staging[...] = inputs[position]
            execute()
            return [copy() for copy in copies]

        return run

    # ------------------------------------------------------------------ runs

    def refresh(self, snapshot: Snapshot) -> None:
        """Take the weights as they are in ``snapshot``, which is pinned."""
        work = self._changes.indices(snapshot)
        first = self.epoch is None
        sizes = (p.nbytes for entry, _ in self._entry_patches for p in entry.parameters)
        size = sum(sizes) if first else 0
        if size >= _LARGE_WEIGHT_BYTES:
            loader.release_llvm()  # the kernels are linked, and the memory is needed
        if self._threads > 1 and size >= _MIN_THREADED_WEIGHT_BYTES:
            # Each call writes the words of its own weight only, so that the threads need no lock.
            parallel_map(self._update_weight, work, self._threads)
        else:
            for k in work:
                self._update_weight(k)
        # If computing a weight fails, nothing is marked, and the next run computes all changed
        # weights again.
        self._changes.mark_fetched(snapshot)
        self.epoch = snapshot.epoch

    def _update_weight(self, k: int) -> None:
        """Compute a weight again if its parameters changed, and patch its address."""
        entry, patch = self._entry_patches[k]
        array = entry.get()
        if array is not self._entry_arrays[k]:
            # Only then, so that another refresh patches the words if this fails.
            patch.put(self._words, array.ctypes.data)
            self._entry_arrays[k] = array
            # Kernels read the packed copy from now on, so that the pages of the model's file need
            # not stay in memory.
            release(entry.parameters, array)

    def run(self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None) -> list[Array]:
        """Run the plan; `refresh` was called for the present snapshot.

        Args:
            inputs: Arrays for the graph's inputs, by position.
            outputs: Arrays to write into, by position; None, or None for one of them: new arrays.

        Returns:
            One array for each output, which the caller owns.

        Raises:
            ShapeError: A value that a kernel took as an index or a count was out of range.
        """
        if self._arena_at != self._arena.address:
            self.rebind_arena()
        if outputs is None and self._run_staged is not None:
            return self._run_staged(inputs)
        return self._run(
            inputs, outputs, self._walk if self.single_program is None else self.single_program.run
        )

    def _run(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Array | None] | None,
        execute: Callable[[], object],
    ) -> list[Array]:
        for port in self.inputs:
            port.bind_input(inputs[port.position])
        wanted = outputs or [None] * len(self.outputs)
        results = [
            port.bind_output(array) for port, array in zip(self.outputs, wanted, strict=True)
        ]
        if self._slot is not None:
            # A run that ended by an error of a reference step has not checked its report, which
            # would be raised for this run.
            self._slot.clear()
        execute()
        for port in self.outputs:
            port.copy_result(results)
        for port in (*self.inputs, *self.outputs):
            port.release_array()
        self.check_reports()
        return results if outputs is None else fill_outputs(results, outputs)

    def check_reports(self) -> None:
        """Raise the error that a kernel of the last run reported, if any.

        Raises:
            ShapeError: A value that a kernel took as an index or a count was out of range.
        """
        if self._slot is not None:
            self._slot.check()

    def _walk(self) -> None:
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.run()
            else:
                self._run_reference_step(segment)

    def _run_reference_step(self, step: ReferenceStep) -> None:
        assert isinstance(self.plan, Plan), (
            "programs of symbolic plans and of files have no reference steps"
        )
        run_reference_step(step, self.plan, self._arena.memory, self.inputs, self.outputs)

    def run_timed(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> tuple[list[Array], list[Span]]:
        """Run as `run` does, and measure each step.

        Args:
            inputs: See `run`.
            outputs: See `run`.

        Returns:
            The results, and begin and end of each item of the plan in seconds of
            ``time.perf_counter``, NaN for steps that a branch skipped.
        """
        spans: list[Span] = []

        def execute() -> None:
            for segment in self._segments:
                if isinstance(segment, Program):
                    _, times = segment.run_timed()
                    ran = np.where(times[:, :1], times * 1e-9, np.nan).tolist()
                    spans.extend((start, end) for start, end in ran)
                else:
                    start = time.perf_counter()
                    self._run_reference_step(segment)
                    spans.append((start, time.perf_counter()))

        self.rebind_arena()
        return self._run(inputs, outputs, execute), spans

    def running_steps(self) -> list[guard_report.RunningStep]:
        """Return the steps that run at this moment, for the report of a segmentation fault."""
        names = [
            f"node {e.node!r} ({e.op_type}), kernel {e.kernel}"
            for e in self.entries
            if e.kernel != "reference"
        ]
        found: list[guard_report.RunningStep] = []
        base, first = self._words.ctypes.data, 0
        for program in (each for each in self._segments if isinstance(each, Program)):
            for step in program.running():
                begin = (int(program.rows[step, 1]) - base) // abi.WORD
                words = guard_pages.readable(self._words, begin).tolist()
                text = names[first + step] if first + step < len(names) else program.rows[step]
                found.append(guard_report.RunningStep(f"step {first + step}: {text}", words))
            first += len(program.rows)
        return found

    def cancel(self) -> None:
        """End the present run, or the next one, before its next step; `clear` revokes this."""
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.cancel()

    def clear(self) -> None:
        """Revoke `cancel`."""
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.clear()

    def rebind_arena(self) -> None:
        """Patch the words that point into the arena, if its address changed.

        Raises:
            MemoryError: The arena is lost, and there is not enough memory for another one.
        """
        if self._arena_at != self._arena.address:
            self._arena.reserve(0)
            self._arena_patch.put(self._words, self._arena.address)
            self._arena_at = self._arena.address


def _run_and_check(execute: Callable[[], object], slot: ReportSlot) -> None:
    execute()
    slot.check()


def _run_one_to_one(
    staging: Array, position: int, execute: Callable[[], object], copy: Callable[[], Array]
) -> Callable[[Sequence[Any]], list[Array]]:
    """Return the function of `ExecutablePlan._make_staged` for one input and one output.

    It has no loops, whose overhead would be the largest part of such a run.

    Args:
        staging: The input's staging buffer.
        position: The input's position.
        execute: Runs the program.
        copy: Copies the output's staging buffer to a new array.
    """

    def run(inputs: Sequence[Any]) -> list[Array]:
        staging[...] = inputs[position]
        execute()
        return [copy()]

    return run


def _at_node(error: loader.KernelError, entries: Sequence[ProfileEntry]) -> loader.KernelError:
    """Return the error of a kernel with the first node that uses it; itself if none does."""
    kernel = shown_kernel(error.kernel)
    for entry in entries:
        if entry.kernel == kernel:
            named = loader.KernelError(f"node {entry.node!r} ({entry.op_type}): {error}")
            named.kernel = error.kernel
            return named
    return error


def _check_memory(wanted: int) -> None:
    """Raise LimitError if the arena and results of a plan do not fit beside this thread's values.

    Args:
        wanted: Bytes of the arena and the results.
    """
    check_memory(wanted, "a region, for the values that live at the same time,")


def _copied_words(layout: ArgumentLayout) -> Array:
    """Return a copy of the argument words that begins on a cache line."""
    words = layout.words
    if guard_pages.MODE:
        return guard_pages.argument_blocks(words, [begin for _, begin, *_ in layout.steps])
    array = aligned_empty((max(len(words), 1),), np.dtype(np.int64))
    array[: len(words)] = words
    return array
