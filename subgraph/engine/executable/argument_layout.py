"""Argument layouts: the kernel arguments of a plan in one array, as in a relocatable object file.

The arguments of all steps stand one after the other in an array of 64-bit words, with 0 where an
address belongs. A `Patch` lists the words that hold addresses in one piece of memory (the arena, an
input, an output, a weight, a kernel) with their offsets in it, as relocations do in an object file.
All sessions of a region share the layout of a plan, and exported models contain it.
`subgraph.engine.executable.executable_plan` copies the words for a session and applies the patches.

For example, the layout of ``Softmax(Exp(x))`` with x of float32 ``[2, 1024]``, which is computed in
the memory of the output::

    words    2048 2048 1 1 1 1 0 0 0 0 (to the next cache line: 0 0 0 0 0 0) 0 0 1024 1
    steps    Exp: first word 0, 1 unit, grain 4; Softmax: first word 16, 2 units, grain 4
    inputs   x, 8192 bytes: patch of word 6, offset 0
    outputs  8192 bytes: patch of words 8, 16 and 17, offsets 0
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from operator import index
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from subgraph.engine.planner.constants import cached
from subgraph.engine.planner.operands import (
    EmittedStep,
    Operand,
    Scratch,
    Weight,
    location_of,
)
from subgraph.engine.planner.plan_types import Plan
from subgraph.engine.planner.step_profile import profile_entries
from subgraph.engine.program.reports import Report
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.parameters import Parameter
from subgraph.graph.symbolic import float_bits, is_symbolic, larger
from subgraph.graph.types import Array
from subgraph.operators.shape_values import has_symbolic
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.system import guard_pages
from subgraph.weights.cache import WeightCache, WeightEntry

# Below these amounts of work a run takes a few microseconds (estimates).
_MAX_TINY_FLOPS = 2_000_000
_MAX_TINY_BYTES = 200_000
_MAX_TINY_STEPS = 64
_BLOCK_WORDS = 8  # the arguments of a step begin on a cache line of 64 bytes
StepRow = tuple[Kernel, int, int, int]  # kernel, index of its first argument word, units, grain
AsArray = Callable[[Sequence[int]], Array]


@attrs.frozen(eq=False)
class Patch:
    """The words that hold addresses in one piece of memory.

    Attributes:
        positions: Indices of the words.
        offsets: Offset in the memory of each address, in bytes.
    """

    positions: NDArray[np.intp]
    offsets: NDArray[np.int64]

    def put(self, words: Array, address: int) -> None:
        """Write the addresses, for memory that begins at ``address``."""
        words[self.positions] = address + self.offsets


@attrs.frozen(eq=False)
class Port:
    """An input or output of a program.

    Attributes:
        position: Index among the graph's inputs or outputs.
        dtype: Its dtype.
        shape: Its concrete shape.
        nbytes: Its size.
        patch: The words that point into it.
        grows: Whether it is an input to which steps write, or an output in such an input.
        buffer: Of an output that grows, the position of the input; None for all others.
    """

    position: int
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    patch: Patch
    grows: bool = False
    buffer: int | None = None


@attrs.frozen(eq=False)
class SymbolicConstant:
    """A constant of a symbolic plan, whose elements follow from sizes.

    Attributes:
        dtype: The dtype of the constant in an instance of the plan.
        array: Integers and symbolic integers, as objects.
    """

    dtype: str
    array: Array


WeightContent = WeightEntry | Array | SymbolicConstant


@attrs.frozen(eq=False)
class ArgumentLayout:
    """The program of a plan, without addresses; immutable.

    Attributes:
        words: Arguments of all steps, 0 where an address belongs.
        arena: The words that point into the arena.
        arena_bytes: Size of the arena.
        inputs: The graph's inputs that are not weights.
        outputs: The graph's outputs.
        weights: Entries of the weight cache, then constant arrays, with the words that point to
            them.
        kernels: Kernels that other kernels call, with the words that hold their addresses.
        steps: Kernel, index of the first word, work units and grain of every step.
        breaks: For each reference step the number of steps before it.
        entries: Returns the profile entry of every step, with 0 seconds.
        tiny: Whether a run takes only a few microseconds, so that waking threads would cost more.
        reports: The errors that steps can report; their numbers begin with 1.
        slot: Indices of the words that point to the slot in which steps write such a number.
        areas: Offset and bytes of each area of the arena that stands between guard pages; empty
            without guard pages.
    """

    words: NDArray[np.int64]
    arena: Patch
    arena_bytes: int
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    weights: tuple[tuple[WeightContent, Patch], ...]
    kernels: tuple[tuple[Kernel, Patch], ...]
    steps: tuple[StepRow, ...]
    breaks: tuple[int, ...]
    entries: Callable[[], tuple[ProfileEntry, ...]]
    tiny: bool
    reports: tuple[Report, ...]
    slot: NDArray[np.intp]
    areas: tuple[tuple[int, int], ...] = ()


def _integers(items: Sequence[int]) -> NDArray[np.int64]:
    return np.array(items, np.int64)


def make_argument_layout(
    plan: Plan, cache: WeightCache, as_array: AsArray = _integers
) -> ArgumentLayout:
    """Return the argument layout of a plan.

    Args:
        plan: The plan.
        cache: The op's view of the weight cache, from which the entries of weights are taken.
        as_array: Converts the lists of words and offsets; those of a symbolic plan contain
            symbolic integers, which an array of int64 cannot hold.
    """
    builder = _LayoutBuilder(plan, cache)
    steps: list[StepRow] = []
    breaks: list[int] = []
    for item in plan.items:
        if isinstance(item, EmittedStep):
            steps.append((item.kernel, builder.add(item), item.units, item.grain))
        else:
            breaks.append(len(steps))
    if guard_pages.MODE and steps:
        builder.words += [0] * (guard_pages.block_begin(len(builder.words), 0) - len(builder.words))
    inputs = [(k, operand) for k, operand in enumerate(plan.inputs) if operand is not None]
    return ArgumentLayout(
        as_array(builder.words),
        builder.arena.build(as_array),
        plan.arena_bytes,
        tuple(_port(k, operand, builder.inputs, as_array) for k, operand in inputs),
        tuple(_port(k, o, builder.outputs, as_array) for k, o in enumerate(plan.outputs)),
        builder.weight_patches(as_array),
        tuple((kernel, patch.build(as_array)) for kernel, patch in builder.kernels.items()),
        tuple(steps),
        tuple(breaks),
        partial(profile_entries, plan),
        _is_tiny(plan),
        tuple(builder.reports),
        np.array(builder.slot, np.intp),
        _areas(plan) if guard_pages.MODE else (),
    )


def _areas(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Return offset and bytes of each area of the arena."""
    areas: list[tuple[int, int]] = []
    for storage, offset in plan.offsets.items():
        stride = storage.worker_stride
        nbytes = storage.nbytes - (storage.workers - 1) * stride
        areas += [(offset + worker * stride, nbytes) for worker in range(storage.workers)]
    return tuple(areas)


def _port(
    position: int, operand: Operand, patches: dict[int, _PatchBuilder], as_array: AsArray
) -> Port:
    root = location_of(operand)[0]
    if operand.capacity:
        patch = _PatchBuilder().build(as_array)
        return Port(position, operand.dtype, operand.shape, 0, patch, True, root.index)
    patch, grows = patches[position].build(as_array), root.longest is not None
    return Port(position, operand.dtype, operand.shape, operand.nbytes, patch, grows)


@attrs.define
class _PatchBuilder:
    """Collects the words of a `Patch`."""

    positions: list[int] = attrs.field(factory=list[int])
    offsets: list[int] = attrs.field(factory=list[int])

    def build(self, as_array: AsArray) -> Patch:
        return Patch(np.array(self.positions, np.intp), as_array(self.offsets))


class _LayoutBuilder:
    """Collects argument words, and the patches for those that are addresses."""

    def __init__(self, plan: Plan, cache: WeightCache) -> None:
        self.plan = plan
        self.cache = cache
        self.words: list[int] = []
        self.arena = _PatchBuilder()
        self.inputs = defaultdict[int, _PatchBuilder](_PatchBuilder)
        self.outputs = defaultdict[int, _PatchBuilder](_PatchBuilder)
        self.kernels = defaultdict[Kernel, _PatchBuilder](_PatchBuilder)
        self.reports: dict[Report, int] = {}
        self.slot: list[int] = []
        # By `id`, since arrays have no hash. The values keep them alive, so that no `id` is reused.
        self._contents: dict[int, tuple[WeightContent, _PatchBuilder]] = {}

    def add(self, step: EmittedStep) -> int:
        """Append the arguments of a step; return the index of the first word."""
        if guard_pages.MODE:
            begin = guard_pages.block_begin(len(self.words), len(step.arguments))
        else:
            begin = -(-len(self.words) // _BLOCK_WORDS) * _BLOCK_WORDS
        self.words += [0] * (begin - len(self.words))
        for argument in step.arguments:
            if type(argument) is int:  # the most frequent case
                self.words.append(argument)
            else:
                self._append(argument)
        return begin

    def weight_patches(self, as_array: AsArray) -> tuple[tuple[WeightContent, Patch], ...]:
        """Return the weights, each with the words that point to it; constant arrays come last."""
        contents = sorted(self._contents.values(), key=_order)
        return tuple((content, patch.build(as_array)) for content, patch in contents)

    def _append(self, argument: Any) -> None:
        if isinstance(argument, (Operand, Scratch)):
            self._append_location(argument)
        elif isinstance(argument, Weight):
            self._append_constant(argument, 0)
        elif isinstance(argument, Kernel):
            self._point_into(self.kernels[argument], 0)
        elif isinstance(argument, float):
            self.words.append(float_bits(argument))
        elif isinstance(argument, Report):
            self.slot.append(len(self.words))
            self.words += [0, self.reports.setdefault(argument, len(self.reports) + 1)]
        else:
            self.words.append(argument if is_symbolic(argument) else index(argument))

    def _append_location(self, argument: Operand | Scratch) -> None:
        root, offset = location_of(argument)
        if root.kind == "arena":
            self._point_into(self.arena, self.plan.offsets[root] + offset)
        elif root.kind == "input":
            self._point_into(self.inputs[root.index], offset)
        elif root.kind == "output":
            self._point_into(self.outputs[root.index], offset)
        else:
            assert isinstance(argument, Operand), "scratch memory lies in the arena"
            assert root.content is not None, "it is a constant"
            self._append_constant(root.content, offset, argument.dtype)

    def _append_constant(
        self, constant: Array | Weight | Parameter, offset: int, dtype: str = ""
    ) -> None:
        found = cached(constant, self.cache)
        content: WeightContent = found
        if isinstance(found, np.ndarray) and has_symbolic(found):
            # The array of objects has no bytes that a kernel can read; each instance converts it to
            # the operand's dtype.
            content = SymbolicConstant(dtype, found)
        _, patch = self._contents.setdefault(id(found), (content, _PatchBuilder()))
        self._point_into(patch, offset)

    def _point_into(self, patch: _PatchBuilder, offset: int) -> None:
        patch.positions.append(len(self.words))
        patch.offsets.append(offset)
        self.words.append(0)


def _order(item: tuple[WeightContent, _PatchBuilder]) -> int:
    """Return the position of a weight among all: by size, then the arrays that never change.

    The largest weights are computed first, while few others exist: this lowers the peak of memory.
    """
    content, _ = item
    if isinstance(content, WeightEntry):
        return -sum(parameter.nbytes for parameter in content.parameters)
    return 1


def _is_tiny(plan: Plan) -> bool:
    """Return whether a run takes only a few microseconds, by the steps' counts of work."""
    steps = [item for item in plan.items if isinstance(item, EmittedStep)]
    work = sum(step.flops for step in steps)
    # A step without a count of bytes counts as one cache line (64 bytes) for each work unit.
    moved = sum(larger(step.bytes, 64 * step.units) for step in steps)
    return len(steps) <= _MAX_TINY_STEPS and work < _MAX_TINY_FLOPS and moved < _MAX_TINY_BYTES
