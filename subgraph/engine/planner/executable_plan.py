"""Executable plans: a plan bound to the memory of one request, ready to run.

The words are a copy of the plan's `subgraph.engine.planner.argument_layout`. A run patches only the
addresses that have moved since the last one: usually none, since small inputs and outputs are
copied to fixed places.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.engine.planner.argument_layout import ArgumentLayout, Patch, Port, SymbolicConstant
from subgraph.engine.planner.constants import evaluate_weight
from subgraph.engine.planner.lowering import Operand, Storage
from subgraph.engine.planner.plan_types import Item, Plan, ReferenceStep
from subgraph.engine.planner.step_profile import Span
from subgraph.engine.planner.stored_program import StoredProgram
from subgraph.engine.planner.symbolic_plan import PlanInstance, SymbolicPlan
from subgraph.engine.program import abi
from subgraph.engine.program.addresses import address_of
from subgraph.engine.program.pool import Pool
from subgraph.engine.program.program import Program, Step, runtime_kernels
from subgraph.engine.program.reports import SLOT_WORDS, ReportSlot
from subgraph.engine.toolchain import loader, toolchain
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.parameters import Snapshot
from subgraph.graph.types import Array, numpy_dtype
from subgraph.operators.reference import evaluate
from subgraph.operators.subgraph_op import DefaultSubgraphOp, ProfileEntry, fill_outputs
from subgraph.system import guard_pages, guard_report
from subgraph.system.large_pages import aligned_empty, mapped_empty
from subgraph.weights.cache import Changes, WeightEntry
from subgraph.weights.mapped_files import release
from subgraph.weights.parallel import parallel_map

# Copying that much costs less than asking an array for its address and patching words.
MAX_STAGED_BYTES = 16384
_MIN_THREADED_WEIGHT_BYTES = 1 << 22  # bytes of weights
_LARGE_WEIGHT_BYTES = 1 << 25  # bytes of weights beside which a linker's own memory counts


class Arena:
    """A request's memory, shared by the plans that it runs one after another."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.memory = aligned_empty((0,), np.dtype(np.uint8), 64)
        self.address = 0

    def reserve(self, nbytes: int) -> None:
        """Have at least that many bytes; the address may change."""
        if guard_pages.MODE:
            return  # each bound plan has an arena of its own
        if nbytes > self.memory.nbytes:
            self.memory = aligned_empty((0,), np.dtype(np.uint8), 64)
            self.memory = mapped_empty(nbytes)
            self.address = self.memory.ctypes.data


class _GuardedArena(Arena):
    """The memory of one bound plan, each storage between guard pages."""

    def __init__(self, areas: Sequence[tuple[int, int]], nbytes: int) -> None:
        self.memory = guard_pages.mapped(areas, nbytes)
        self.address = self.memory.ctypes.data


class ExecutablePlan:
    """A plan bound to an arena; runs for one request at a time.

    Attributes:
        plan: What was bound: a plan, or a program that came without one.
        single_program: The only program; None if reference steps run between several programs.
        inputs: What goes in.
        outputs: What comes out, in order.
        epoch: Snapshot that the weights' addresses are of, None before the first.
    """

    def __init__(
        self,
        plan: Plan | PlanInstance | StoredProgram,
        layout: ArgumentLayout,
        arena: Arena,
        pool: Pool | None,
    ) -> None:
        """Copy the argument words; compile or load the kernels that are not yet there."""
        self.plan = plan
        self._entries = layout.entries
        self.epoch: int | None = None
        guarded = guard_pages.MODE
        self._arena = _GuardedArena(layout.areas, layout.arena_bytes) if guarded else arena
        self._arena_at = -1
        self._arena_patch = layout.arena
        kernels = [*(step[0] for step in layout.steps), *(k for k, _ in layout.kernels)]
        addresses = toolchain.addresses([*kernels, *runtime_kernels(pool)])
        if guard_pages.MODE:
            begins = [begin for _, begin, *_ in layout.steps]
            self._words = guard_pages.argument_blocks(layout.words, begins)
        else:
            self._words = _aligned_words(layout.words)
        self._slot: ReportSlot | None = None
        if layout.reports:
            slot: Array = np.zeros(SLOT_WORDS, np.int64)
            self._words[layout.slot] = slot.ctypes.data
            self._slot = ReportSlot(slot, layout.reports)
        for kernel, patch in layout.kernels:
            patch.put(self._words, addresses[kernel])
        self._entry_patches: list[tuple[WeightEntry, Patch]] = []
        self._arrays: list[Array] = []
        for weight, patch in layout.weights:
            if isinstance(weight, WeightEntry):
                self._entry_patches.append((weight, patch))
            else:
                assert not isinstance(weight, SymbolicConstant), "an instance holds arrays"
                self._arrays.append(self._bind_array(weight, patch))
        self._changes = Changes([entry for entry, _ in self._entry_patches])
        self._entry_arrays: list[Array | None] = [None] * len(self._entry_patches)
        self.inputs: list[BoundPort] = []
        self.outputs: list[BoundPort] = []
        self._bind_ports(layout.inputs, layout.outputs)
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
        """What is known of every step for a profile."""
        return self._entries()

    @property
    def symbolic_plan(self) -> SymbolicPlan | None:
        """The symbolic plan of which this is an instance; None if it is not one."""
        return self.plan.symbolic_plan if isinstance(self.plan, PlanInstance) else None

    def rebind(self, instance: PlanInstance) -> None:
        """Take the numbers of another instance of the same symbolic plan; the weights stay."""
        symbolic_plan, numbers = instance.symbolic_plan, instance.numbers
        self.plan, self._entries = instance, instance.entries
        symbolic_plan.words.fill(self._words, numbers)
        for k, weight, patch in symbolic_plan.varying_weights(numbers):
            self._move_weight(k, weight, patch)
        self._arena_patch, self._arena_at = symbolic_plan.arena(numbers), -1
        if guard_pages.MODE:
            self._arena = _GuardedArena(symbolic_plan.areas(numbers), instance.arena_bytes)
        self._bind_ports(*symbolic_plan.ports(numbers))
        self._segments[0].resize(symbolic_plan.rows.filled(numbers))
        self._run_staged = self._make_staged()

    def _move_weight(self, k: int, weight: WeightEntry | Array, patch: Patch) -> None:
        """Let the words of weight ``k`` of the program point elsewhere."""
        if not isinstance(weight, WeightEntry):
            self._arrays[k - len(self._entry_patches)] = self._bind_array(weight, patch)
            return
        self._entry_patches[k] = weight, patch
        array = self._entry_arrays[k]
        if array is not None:
            patch.put(self._words, array.ctypes.data)

    def _bind_array(self, array: Array, patch: Patch) -> Array:
        array = guard_pages.guarded_copy(array) if guard_pages.MODE else array
        patch.put(self._words, array.ctypes.data)
        return array

    def _bind_ports(self, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
        """Give small inputs and outputs places of their own; prepare patches for the others."""
        there = {bound.port: bound for bound in (*self.inputs, *self.outputs)}
        self.inputs, self.outputs = (
            [there.get(port) or BoundPort(port, self._words) for port in ports]
            for ports in (inputs, outputs)
        )

    def _make_segments(
        self, layout: ArgumentLayout, pool: Pool | None, addresses: Mapping[Kernel, int]
    ) -> list[Any]:
        """Return programs, and between them the nodes that the reference computes."""
        base = self._words.ctypes.data
        steps = [
            Step(addresses[kernel], base + 8 * begin, units, grain)
            for kernel, begin, units, grain in layout.steps
        ]
        segments: list[Any] = []
        references = [item for item in self._plan_items() if isinstance(item, ReferenceStep)]
        begin = 0
        for end, reference in zip(layout.breaks, references, strict=True):
            if end > begin:
                segments.append(Program(steps[begin:end], self._threads, pool, tiny=layout.tiny))
            segments.append(reference)
            begin = end
        if begin < len(steps) or not segments:
            segments.append(Program(steps[begin:], self._threads, pool, tiny=layout.tiny))
        return segments

    def _make_staged(self) -> Callable[[Sequence[Any]], list[Array]] | None:
        """Return what runs a small plan, None for others.

        One program, and places of their own for all that goes in and comes out: nothing to patch.
        """
        ports = (*self.inputs, *self.outputs)
        if self.single_program is None or any(port.stage is None for port in ports):
            return None
        execute = self.single_program.function
        if self._slot is not None:
            execute = partial(_run_and_check, execute, self._slot)
        stages = [(port.stage, port.position) for port in self.inputs]
        copies = [port.stage.copy for port in self.outputs]
        if len(stages) == len(copies) == 1:
            return _run_one_to_one(*stages[0], execute, copies[0])

        def run(inputs: Sequence[Any]) -> list[Array]:
            for stage, position in stages:
                stage[...] = inputs[position]
            execute()
            return [copy() for copy in copies]

        return run

    def _plan_items(self) -> Sequence[Item]:
        return self.plan.items if isinstance(self.plan, Plan) else ()

    # ------------------------------------------------------------------ runs

    def refresh(self, snapshot: Snapshot) -> None:
        """Take the weights as ``snapshot``, which is pinned, has them."""
        work = self._changes.since(snapshot)
        first = self.epoch is None
        size = self._weight_bytes() if first else 0
        if size >= _LARGE_WEIGHT_BYTES:
            loader.rest()  # the kernels are linked, and the memory is needed
        if self._threads > 1 and size >= _MIN_THREADED_WEIGHT_BYTES:
            parallel_map(self._update_weight, work, self._threads)
        else:
            for k in work:
                self._update_weight(k)
        self._changes.taken(snapshot)
        self.epoch = snapshot.epoch

    def _update_weight(self, k: int) -> None:
        """Make a weight anew if it has changed, and note where it lies."""
        entry, patch = self._entry_patches[k]
        array = entry.get()
        if array is not self._entry_arrays[k]:
            self._entry_arrays[k] = array
            patch.put(self._words, array.ctypes.data)
            release(entry.parameters, array)

    def _weight_bytes(self) -> int:
        return sum(p.nbytes for entry, _ in self._entry_patches for p in entry.parameters)

    def run(self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None) -> list[Array]:
        """Run the plan; the weights are fresh.

        Args:
            inputs: One item for each input of the graph.
            outputs: Arrays to write into, None for new ones.

        Returns:
            One array for each output, which the caller owns.
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
            self._slot.clear()
        execute()
        for port in self.outputs:
            port.copy_result(results)
        for port in (*self.inputs, *self.outputs):
            port.release_array()
        self.check_reports()
        return results if outputs is None else fill_outputs(results, outputs)

    def check_reports(self) -> None:
        """Raise the error that a kernel of the last run has reported, if there is one.

        Raises:
            ShapeError: a value that a kernel took as an index or a count was out of range.
        """
        if self._slot is not None:
            self._slot.check()

    def _walk(self) -> None:
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.run()
            else:
                self._reference_runner().compute(segment)

    def _reference_runner(self) -> _ReferenceRunner:
        assert isinstance(self.plan, Plan), "only a plan has values outside of its program"
        return _ReferenceRunner(self.plan, self._arena.memory, self.inputs, self.outputs)

    def run_timed(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> tuple[list[Array], list[Span]]:
        """Run as `run` does; return when each item of the plan began and ended, too.

        In seconds of ``time.perf_counter``; those that were skipped have NaN.
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
                    self._reference_runner().compute(segment)
                    spans.append((start, time.perf_counter()))

        self.rebind_arena()
        return self._run(inputs, outputs, execute), spans

    def running_steps(self) -> list[guard_report.RunningStep]:
        """Return the steps that run at this moment, for the report of a fault."""
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
        """End a run before its next step, also one that is yet to start."""
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.cancel()

    def clear(self) -> None:
        """Forget `cancel`."""
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.clear()

    def rebind_arena(self) -> None:
        """Point to where the arena lies now."""
        if self._arena_at != self._arena.address:
            self._arena_patch.put(self._words, self._arena.address)
            self._arena_at = self._arena.address


def _run_and_check(execute: Callable[[], object], slot: ReportSlot) -> None:
    execute()
    slot.check()


def _run_one_to_one(
    stage: Array, position: int, execute: Callable[[], object], copy: Callable[[], Array]
) -> Callable[[Sequence[Any]], list[Array]]:
    """Return what runs a small plan of one input and one output, where loops would cost most."""

    def run(inputs: Sequence[Any]) -> list[Array]:
        stage[...] = inputs[position]
        execute()
        return [copy()]

    return run


class BoundPort:
    """An input or output of a bound plan: a place of its own, or words to patch.

    Attributes:
        port: What it is.
        position: Which one.
        type: Its dtype and shape.
        nbytes: Its size.
        stage: Its place; None: where the caller's array lies.
        current: What a run works on.
    """

    def __init__(self, port: Port, words: Array) -> None:
        """Give a small one a place."""
        self.port = port
        self.position = port.position
        self.type = port.dtype, port.shape
        self.nbytes = port.nbytes
        self.stage: Any = None
        self._shape = port.shape
        self._patch = port.patch
        self._words = words
        self._dtype = numpy_dtype(port.dtype)
        self._address = -1
        self.current: Any = None
        if port.nbytes <= MAX_STAGED_BYTES:
            self.allocate_stage()

    def allocate_stage(self) -> Array:
        """Return its place, which it has from now on."""
        if self.stage is None:
            self.stage = aligned_empty(self._shape, self._dtype, 64)
            self._point_to(self.stage.ctypes.data)
        stage: Array = self.stage
        return stage

    def _point_to(self, address: int) -> None:
        if address != self._address:
            self._patch.put(self._words, address)
            self._address = address

    def bind_input(self, array: Array) -> None:
        """Let the program read ``array``."""
        if self.stage is not None:
            self.stage[...] = array
            self.current = self.stage
            return
        copies = guard_pages.MODE
        self.current = guard_pages.guarded_copy(array) if copies else np.ascontiguousarray(array)
        self._point_to(address_of(self.current))

    def bind_output(self, wanted: Array | None) -> Array:
        """Return the array into which the program writes; ``wanted`` if it can be that."""
        if self.stage is not None:
            self.current = self.stage
            staged: Array = self.stage
            return staged
        fits = (
            wanted is not None
            and wanted.flags.c_contiguous
            and wanted.dtype == self._dtype
            and wanted.shape == self._shape
        )
        if guard_pages.MODE:
            fits = False
        array = wanted if fits and wanted is not None else self._new_result()
        self._point_to(address_of(array))
        self.current = array
        return array

    def _new_result(self) -> Array:
        make = guard_pages.empty if guard_pages.MODE else np.empty
        return make(self._shape, self._dtype)

    def release_array(self) -> None:
        """Let go of the caller's arrays."""
        self.current = None

    def copy_result(self, results: list[Array]) -> None:
        """Take the result out of the output's own place."""
        if self.stage is not None:
            results[self.position] = self.stage.copy()


class _ReferenceRunner:
    """Arrays over the memory of a bound plan, for steps that Python computes."""

    def __init__(
        self, plan: Plan, arena: Array, inputs: Sequence[BoundPort], outputs: Sequence[BoundPort]
    ) -> None:
        self._plan = plan
        self._arena = arena
        self._inputs = {port.position: port for port in inputs}
        self._outputs = {port.position: port for port in outputs}

    def array(self, operand: Operand) -> Array:
        """Return an operand's content; in the plain layout."""
        if operand.known is not None:
            return operand.known
        if operand.parameter is not None:
            return operand.parameter.array
        root, offset = self._plan.location_of(operand)
        if root.weight is not None:
            return evaluate_weight(root.weight).reshape(operand.shape)
        memory = self._memory(root)
        dtype = numpy_dtype(operand.dtype)
        return memory[offset : offset + operand.nbytes].view(dtype).reshape(operand.shape)

    def _memory(self, root: Storage) -> Array:
        if root.kind == "arena":
            return self._arena[self._plan.offsets[root] :]
        if root.kind == "constant":
            assert root.array is not None
            return _bytes(root.array)
        ports = self._inputs if root.kind == "input" else self._outputs
        return _bytes(ports[root.index].current)

    def compute(self, step: ReferenceStep) -> None:
        """Compute a node by the reference."""
        node = step.node
        arrays = [None if o is None else self.array(o) for o in step.inputs]
        results: Sequence[Any]
        if node.subgraph is not None:
            results = DefaultSubgraphOp(node.subgraph).forward(arrays)
        else:
            results = evaluate(node, arrays)
        for operand, result in zip(step.outputs, results, strict=True):
            if operand is not None and operand.size:
                np.copyto(self.array(operand), result, casting="no")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _aligned_words(words: Array) -> Array:
    array = aligned_empty((max(len(words), 1),), np.dtype(np.int64), 64)
    array[: len(words)] = words
    return array
