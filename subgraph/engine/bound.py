"""Bound plans: a plan with a request's memory, its argument words at their addresses, ready to run.

All argument blocks stand in one array of words. Which words are addresses in the arena, in an
input, an output or a weight is known from the plan, so that a run patches only what moved: usually
nothing, since small inputs and outputs are copied to places of their own.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Sequence
from operator import index
from typing import Any

import attrs
import numpy as np

from subgraph.engine import toolchain
from subgraph.engine.constants import Weights, made
from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import EmittedStep, Operand, Scratch, Storage, Weight
from subgraph.engine.mapped import release
from subgraph.engine.plan import HostStep, Plan
from subgraph.engine.pool import Pool
from subgraph.engine.program import Program, Step
from subgraph.engine.sharing import shared_out
from subgraph.reference import evaluate
from subgraph.subgraph_op import DefaultSubgraphOp, fill_outputs
from subgraph.types import numpy_dtype
from subgraph.weights import WeightCache, aligned_empty

Array = np.ndarray[Any, Any]
# Copying that much costs less than asking an array for its address and patching words.
STAGED = 16384
_TINY_FLOPS = 2_000_000
_WORTH_THREADS = 1 << 22  # bytes of weights
_BLOCK = 8  # argument blocks begin on cache lines


@attrs.define
class Patch:
    """Words that hold addresses in one piece of memory."""

    positions: list[int] = attrs.field(factory=list[int])
    offsets: list[int] = attrs.field(factory=list[int])

    def frozen(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return positions and offsets as arrays."""
        return np.array(self.positions, np.intp), np.array(self.offsets, np.int64)


class Arena:
    """A request's memory, shared by the plans that it runs one after another."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self.memory = aligned_empty((0,), np.dtype(np.uint8), 64)
        self.address = 0

    def reserve(self, nbytes: int) -> None:
        """Have at least that many bytes; the address may change."""
        if nbytes > self.memory.nbytes:
            self.memory = aligned_empty((0,), np.dtype(np.uint8), 64)
            self.memory = aligned_empty((nbytes,), np.dtype(np.uint8), 64)
            self.address = self.memory.ctypes.data


class _Block:
    """Collects argument words and what has to be patched in them."""

    def __init__(self, plan: Plan, weights: Weights) -> None:
        self.plan = plan
        self.weights = weights
        self.words: list[int] = []
        self.arena = Patch()
        self.inputs: dict[int, Patch] = {}
        self.outputs: dict[int, Patch] = {}
        self.entries: dict[int, Patch] = {}
        self.held: list[Array] = []

    def add(self, step: EmittedStep) -> int:
        """Append a step's words; return where they begin."""
        self.words += [0] * (-len(self.words) % _BLOCK)
        begin = len(self.words)
        for word in step.words:
            if type(word) is int:  # most words are
                self.words.append(word)
            else:
                self._word(word)
        return begin

    def _word(self, word: Any) -> None:
        if isinstance(word, (Operand, Scratch)):
            self._address(word)
        elif isinstance(word, Weight):
            self._weight(self.weights.add(word), 0)
        elif isinstance(word, Kernel):
            self.words.append(word.address)
        elif isinstance(word, float):
            self.words.append(struct.unpack("<q", struct.pack("<d", word))[0])
        else:
            self.words.append(index(word))

    def _address(self, word: Operand | Scratch) -> None:
        storage = word.storage
        assert storage is not None, "a mentioned operand has storage"
        root, offset = storage.root()
        offset += word.offset if isinstance(word, Operand) else 0
        self._located(root, offset, word)

    def _located(self, root: Storage, offset: int, word: Operand | Scratch) -> None:
        if root.kind == "arena":
            self._note(self.arena, self.plan.offsets[root] + offset)
        elif root.kind == "input":
            self._note(self.inputs.setdefault(root.index, Patch()), offset)
        elif root.kind == "output":
            self._note(self.outputs.setdefault(root.index, Patch()), offset)
        elif root.kind == "constant":
            assert root.array is not None
            self.held.append(root.array)
            self.words.append(root.array.ctypes.data + offset)
        elif root.weight is not None:
            self._weight(self.weights.add(root.weight), offset)
        else:
            assert isinstance(word, Operand)
            assert word.parameter is not None, "a weight without a recipe is a parameter"
            self._weight(self.weights.add_parameter(word.parameter), offset)

    def _weight(self, found: int | Array, offset: int) -> None:
        if isinstance(found, int):
            self._note(self.entries.setdefault(found, Patch()), offset)
        else:
            self.held.append(found)
            self.words.append(found.ctypes.data + offset)

    def _note(self, patch: Patch, offset: int) -> None:
        patch.positions.append(len(self.words))
        patch.offsets.append(offset)
        self.words.append(0)


class BoundPlan:
    """A plan bound to an arena; runs for one request at a time.

    Attributes:
        plan: The plan.
        epoch: Snapshot that the weights' addresses are of, None before the first.
    """

    def __init__(self, plan: Plan, arena: Arena, cache: WeightCache, pool: Pool | None) -> None:
        """Lay out the argument words; compile or load the kernels that are not yet there."""
        self.plan = plan
        self.epoch: int | None = None
        self._arena = arena
        self._arena_at = -1
        self._weights = Weights(cache)
        block = _Block(plan, self._weights)
        steps = [item for item in plan.items if isinstance(item, EmittedStep)]
        kernels = dict.fromkeys(step.kernel for step in steps)
        called = (word for step in steps for word in step.words if isinstance(word, Kernel))
        toolchain.prepare(kernels | dict.fromkeys(called))
        begins = [block.add(step) for step in steps]
        self._words = _aligned_words(block.words)
        self._arena_patch = block.arena.frozen()
        self._held = block.held
        self._entry_patches = [
            (self._weights.entries[k], *patch.frozen()) for k, patch in block.entries.items()
        ]
        # The largest weight is made while the fewest others are there: the least peak of memory.
        self._entry_patches.sort(key=lambda item: -sum(p.array.nbytes for p in item[0].parameters))
        self._entry_arrays: list[Array | None] = [None] * len(self._entry_patches)
        self._place_ends(block)
        self._threads = 1 if pool is None else pool.size
        self._segments = self._make_segments(begins, pool)
        self._only = self._segments[0].run if self._is_one_program() else None

    # ------------------------------------------------------------------ preparation

    def _place_ends(self, block: _Block) -> None:
        """Give small inputs and outputs places of their own; prepare patches for the others."""
        plan = self.plan
        self._inputs: list[_End] = []
        for position, operand in enumerate(plan.inputs):
            if operand is not None:
                patch = block.inputs.get(position, Patch())
                self._inputs.append(_End(position, operand, patch, self._words))
        self._outputs: list[_End] = []
        self._copied: list[tuple[int, Operand]] = []
        for position, operand in enumerate(plan.outputs):
            root, _ = plan.place_of(operand)
            if root.kind == "output" and root.index == position:
                patch = block.outputs.get(position, Patch())
                self._outputs.append(_End(position, operand, patch, self._words))
            else:
                self._copied.append((position, operand))
        self._simple = (
            not self._copied
            and all(end.stage is not None for end in (*self._inputs, *self._outputs))
            and len(self._outputs) == len(plan.outputs)
        )

    def _make_segments(self, begins: Sequence[int], pool: Pool | None) -> list[Any]:
        segments: list[Any] = []
        steps: list[Step] = []
        at = iter(begins)
        tiny = _is_tiny(self.plan)
        base = self._words.ctypes.data

        def close() -> None:
            nonlocal steps
            if steps or not self.plan.items:
                segments.append(Program(steps, self._threads, pool, tiny=tiny))
                steps = []

        for item in self.plan.items:
            if isinstance(item, HostStep):
                close()
                segments.append(item)
                continue
            address = item.kernel.address
            steps.append(Step(address, base + 8 * next(at), item.units, item.grain))
        close()
        return segments

    def _is_one_program(self) -> bool:
        return len(self._segments) == 1 and isinstance(self._segments[0], Program)

    # ------------------------------------------------------------------ runs

    def refresh(self, epoch: int) -> None:
        """Take the weights as the pinned snapshot of that epoch has them."""
        work = range(len(self._entry_patches))
        if self.epoch is None and self._threads > 1 and self._weight_bytes() >= _WORTH_THREADS:
            shared_out(self._take, work, self._threads)
        else:
            for k in work:
                self._take(k)
        self.epoch = epoch

    def _take(self, k: int) -> None:
        """Make a weight anew if it has changed, and note where it lies."""
        entry, positions, offsets = self._entry_patches[k]
        array = entry.get()
        if array is not self._entry_arrays[k]:
            self._entry_arrays[k] = array
            self._words[positions] = array.ctypes.data + offsets
            release(entry.parameters, array)

    def _weight_bytes(self) -> int:
        return sum(p.array.nbytes for entry, _, _ in self._entry_patches for p in entry.parameters)

    def run(self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None) -> list[Array]:
        """Run the plan; the weights are fresh.

        Args:
            inputs: One item for each input of the graph.
            outputs: Arrays to write into, None for new ones.

        Returns:
            One array for each output, which the caller owns.
        """
        if self._arena_at != self._arena.address:
            self._move()
        if self._simple and outputs is None and self._only is not None:
            for end in self._inputs:
                end.stage[...] = inputs[end.position]
            self._only()
            return [end.stage.copy() for end in self._outputs]
        return self._run(inputs, outputs, self._only or self._walk)

    def _run(
        self,
        inputs: Sequence[Any],
        outputs: Sequence[Array | None] | None,
        execute: Callable[[], object],
    ) -> list[Array]:
        results: list[Any] = [None] * len(self.plan.outputs)
        for end in self._inputs:
            end.enter(inputs[end.position])
        for end in self._outputs:
            given = None if outputs is None else outputs[end.position]
            results[end.position] = end.target(given)
        execute()
        for end in self._outputs:
            end.leave(results)
        for position, operand in self._copied:
            results[position] = np.array(self._values().array(operand))
        for end in (*self._inputs, *self._outputs):
            end.forget()
        return results if outputs is None else fill_outputs(results, outputs)

    def _walk(self) -> None:
        for segment in self._segments:
            if isinstance(segment, Program):
                segment.run()
            else:
                self._values().compute(segment)

    def _values(self) -> _Reader:
        return _Reader(self.plan, self._arena.memory, self._inputs, self._outputs)

    def run_timed(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> tuple[list[Array], list[float]]:
        """Run as `run` does; return the seconds that each item of the plan took, too."""
        seconds: list[float] = []

        def execute() -> None:
            for segment in self._segments:
                if isinstance(segment, Program):
                    _, times = segment.run_timed()
                    seconds.extend(float(t) * 1e-9 for t in times[:, 1] - times[:, 0])
                else:
                    start = time.perf_counter()
                    self._values().compute(segment)
                    seconds.append(time.perf_counter() - start)

        if self._arena_at != self._arena.address:
            self._move()
        return self._run(inputs, outputs, execute), seconds

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

    def _move(self) -> None:
        positions, offsets = self._arena_patch
        self._words[positions] = self._arena.address + offsets
        self._arena_at = self._arena.address


class _End:
    """An input or output of a bound plan: a place of its own, or words to patch."""

    def __init__(self, position: int, operand: Operand, patch: Patch, words: Array) -> None:
        self.position = position
        self.operand = operand
        self.stage: Any = None
        self._words = words
        self._dtype = numpy_dtype(operand.dtype)
        self._positions, self._offsets = patch.frozen()
        self._address = -1
        self.current: Any = None
        if operand.nbytes <= STAGED:
            self.stage = aligned_empty(operand.shape, self._dtype, 64)
            self._patch(self.stage.ctypes.data)

    def _patch(self, address: int) -> None:
        if address != self._address:
            self._words[self._positions] = address + self._offsets
            self._address = address

    def enter(self, array: Array) -> None:
        """Let the program read ``array``."""
        if self.stage is not None:
            self.stage[...] = array
            self.current = self.stage
            return
        self.current = np.ascontiguousarray(array)
        self._patch(self.current.ctypes.data)

    def target(self, given: Array | None) -> Array:
        """Return the array into which the program writes; ``given`` if it can be that."""
        if self.stage is not None:
            self.current = self.stage
            staged: Array = self.stage
            return staged
        fits = (
            given is not None
            and given.flags.c_contiguous
            and given.dtype == self._dtype
            and given.shape == self.operand.shape
        )
        array = given if fits and given is not None else np.empty(self.operand.shape, self._dtype)
        self._patch(array.ctypes.data)
        self.current = array
        return array

    def forget(self) -> None:
        """Let go of the caller's arrays."""
        self.current = None

    def leave(self, results: list[Any]) -> None:
        """Take the result out of the output's own place."""
        if self.stage is not None:
            results[self.position] = self.stage.copy()


class _Reader:
    """Arrays over the memory of a bound plan, for steps that Python computes."""

    def __init__(
        self, plan: Plan, arena: Array, inputs: Sequence[_End], outputs: Sequence[_End]
    ) -> None:
        self._plan = plan
        self._arena = arena
        self._inputs = {end.position: end for end in inputs}
        self._outputs = {end.position: end for end in outputs}

    def array(self, operand: Operand) -> Array:
        """Return an operand's content; in the plain layout."""
        if operand.known is not None:
            return operand.known
        if operand.parameter is not None:
            return operand.parameter.array
        root, offset = self._plan.place_of(operand)
        if root.weight is not None:
            return made(root.weight).reshape(operand.shape)
        memory = self._memory(root)
        dtype = numpy_dtype(operand.dtype)
        return memory[offset : offset + operand.nbytes].view(dtype).reshape(operand.shape)

    def _memory(self, root: Storage) -> Array:
        if root.kind == "arena":
            return self._arena[self._plan.offsets[root] :]
        if root.kind == "constant":
            assert root.array is not None
            return _bytes(root.array)
        ends = self._inputs if root.kind == "input" else self._outputs
        return _bytes(ends[root.index].current)

    def compute(self, step: HostStep) -> None:
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


def _aligned_words(words: Sequence[int]) -> Array:
    array = aligned_empty((max(len(words), 1),), np.dtype(np.int64), 64)
    array[: len(words)] = words
    return array


def _is_tiny(plan: Plan) -> bool:
    """Return whether a run takes some microseconds only."""
    steps = [item for item in plan.items if isinstance(item, EmittedStep)]
    work = sum(step.flops for step in steps)
    moved = sum(max(step.bytes, 64 * step.units) for step in steps)
    return len(steps) <= 64 and work < _TINY_FLOPS and moved < 200_000
