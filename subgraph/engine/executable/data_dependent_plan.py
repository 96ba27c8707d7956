"""Data-dependent plans: values computed by one step decide the sizes of the steps after it.

The number of elements that NonZero finds, or the start of a Slice that a detected box determines,
is known only in the middle of a run. Such a plan is traced like a symbolic plan
(`subgraph.engine.executable.symbolic_plan`), with the numbers that its own steps compute among the
symbolic integers. After each of them a *reading step* reads the numbers and writes the sizes that
follow from them to the arguments and work units of later steps
(`subgraph.engine.program.size_kernels`). The whole plan is therefore one program, without Python
between its steps. Storages have a capacity above the sizes for which the plan was made. A run that
needs more capacity, or for which a guard does not hold, ends, and another strategy repeats it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from subgraph.engine.executable.argument_layout import (
    ArgumentLayout,
    Patch,
    Port,
    SymbolicConstant,
    make_argument_layout,
    object_array,
)
from subgraph.engine.executable.executable_plan import Arena, ExecutablePlan
from subgraph.engine.executable.size_code import SizeCode
from subgraph.engine.executable.symbolic_plan import InputAxis
from subgraph.engine.planner.lowering import EmittedStep, Operand, Unsupported
from subgraph.engine.planner.memory import Life, assign_offsets
from subgraph.engine.planner.plan import Planner
from subgraph.engine.planner.plan_types import Plan, PlanOptions, UnknownShapeError
from subgraph.engine.program import abi
from subgraph.engine.program.pool import Pool
from subgraph.engine.program.program import Program
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.symbolic import Trace, is_symbolic, plain
from subgraph.graph.types import Array, TensorType, numpy_dtype
from subgraph.system import guard_pages
from subgraph.weights.cache import WeightCache

ValueOf = Callable[[Value], Array]  # the content of a value in an earlier run
# Positions of an output, and of the input that reads it in the next iteration.
StatePairs = Sequence[tuple[int, int]]
# Positions of the inputs whose content decides a shape, by operator.
_DECIDING: dict[str, tuple[int, ...]] = {
    "ConstantOfShape": (0,),
    "Expand": (1,),
    "Range": (0, 1, 2),
    "Reshape": (1,),
    "Slice": (1, 2, 3, 4),
    "Tile": (1,),
    "TopK": (1,),
    "Trim": (1,),
}
_READ = Kernel("subgraph.engine.program.size_kernels", "compute_sizes")
_MAX_NUMBERS_PER_READ = 8  # that one reading step reads
_MAX_READ_STEPS = 32  # reading steps of a plan
# Plans are made for at least this size: guards that hold for 0, 1 or another small size often fail
# for larger ones (estimate).
_MIN_PLANNED_SIZE = 7
_MIN_CAPACITY_BYTES = 1 << 16  # of a storage of symbolic size (estimate)


@attrs.frozen(eq=False)
class DataDependentPlan:
    """A plan with the code that computes its sizes during a run.

    Attributes:
        plan: The plan; symbolic integers are among its sizes.
        layout: Its argument layout for the sizes for which it was made, with the capacities of
            storages in place of their sizes.
        code: The code that computes the symbolic integers, by level.
        patches: The numbers of the program that the reading steps overwrite.
        reads: Index of the first argument word, and bytes of a number, for each reading step in the
            order of levels.
        read_counts: How many numbers each level reads.
        growing_axes: Axes of inputs whose sizes differ between iterations; level 0 reads them.
        capacities: Capacity in bytes of each input with a growing axis, by position.
        growing_outputs: For each output with a growing axis, by position: the register of its
            bytes, and the registers of its sizes by axis.
    """

    plan: Plan
    layout: ArgumentLayout
    code: SizeCode
    patches: tuple[_PatchRow, ...]
    reads: tuple[tuple[int, int], ...]
    read_counts: tuple[int, ...]
    growing_axes: tuple[InputAxis, ...] = ()
    capacities: Mapping[int, int] = attrs.field(factory=dict[int, int])
    growing_outputs: Mapping[int, tuple[int, dict[int, int]]] = attrs.field(
        factory=dict[int, tuple[int, dict[int, int]]]
    )


@attrs.frozen
class _PatchRow:
    """A number of the program that a reading step overwrites with the value of a register.

    Attributes:
        kind: "word" for an argument word, "size" for the units or grain of a step, "array" for an
            element of a constant.
        index: For these kinds (word, 0), (step, column) or (weight, element).
        register: The register.
        base: Index of a word whose address is added, because the number is an offset; None: none.
    """

    kind: str
    index: tuple[int, int]
    register: int
    base: int | None = None


class _DataDependentPlanner(Planner):
    """A planner that emits steps which read unknown numbers during a run."""

    def __init__(
        self,
        graph: Graph,
        types: Sequence[TensorType],
        options: PlanOptions,
        value_of: ValueOf,
        growing_axes: Sequence[InputAxis],
    ) -> None:
        self.trace = Trace(inline=True)
        self.read_counts: list[int] = [len(growing_axes)] if growing_axes else []
        self._value_of = value_of
        shapes: list[list[Any]] = [list(type_.shape or ()) for type_ in types]
        for position, axis in growing_axes:
            shapes[position][axis] = self.trace.dimension(planned_size(shapes[position][axis]))
        sized = [TensorType(t.dtype, shape) for t, shape in zip(types, shapes, strict=True)]
        super().__init__(graph, sized, {}, options)
        if growing_axes:
            # `DataDependentProgram` sets both arguments: its block, and the numbers to read.
            self.items.append(EmittedStep(graph.nodes[0], _READ, (0, 0), 1, 0, 0, 0))

    def add(self, node: Node) -> None:
        """Plan one node, after a reading step for the unknown numbers that decide its shape."""
        try:
            super().add(node)
        except UnknownShapeError:
            missing = [v for v in self._deciding(node) if self.operand(v).known is None]
            # If a run skips the branch, the registers would hold numbers of an earlier run.
            if not missing or self.branch_depth:
                raise
            for value in missing:
                self._read_at_run(node, value)
            self.known_elements.pop(node.outputs[0], None)
            super().add(node)

    def _deciding(self, node: Node) -> Iterator[Value]:
        for k in _DECIDING.get(node.op_type, ()):
            value = node.inputs[k] if k < len(node.inputs) else None
            if value is not None:
                yield value

    def _read_at_run(self, node: Node, value: Value) -> None:
        """Emit the reading step of a value that decides the shape of a node.

        Raises:
            Unsupported: The value is no small tensor of integers, or there are too many such steps.
        """
        operand = self.layouts.plain(self.operand(value))
        if operand.dtype not in ("int32", "int64") or is_symbolic(operand.size):
            raise Unsupported(f"a size of dtype {operand.dtype}")
        if operand.size > _MAX_NUMBERS_PER_READ or len(self.read_counts) == _MAX_READ_STEPS:
            raise Unsupported("too many computed values decide sizes")
        seen = self._value_of(value)  # the sizes of this run become the first values
        numbers: Any = np.empty(operand.shape, object)
        for index, number in np.ndenumerate(seen):
            numbers[index] = self.trace.dimension(int(number))
        step = EmittedStep(node, _READ, (0, operand), 1, 0, 0, 0)
        self.items.append(step)
        self.read_counts.append(int(seen.size))
        operand.known = numbers
        self.known_elements.pop(value, None)

    def place_storages(
        self, sizes: Sequence[int], lives: Sequence[Life]
    ) -> tuple[Sequence[int], int]:
        """Place storages by their capacity; guards limit the plan to sizes up to it."""
        capacities = [capacity_for(size) for size in sizes]
        if guard_pages.MODE:
            return guard_pages.guarded_offsets(sizes, capacities)
        return assign_offsets(capacities, lives)


def planned_size(size: int) -> int:
    """Return the size for which a plan is made if a dimension of this size is symbolic."""
    return max(size, _MIN_PLANNED_SIZE)


def capacity_for(size: int) -> int:
    """Return the capacity in bytes of a storage; a guard limits a symbolic size to it."""
    if not is_symbolic(size):
        return size
    capacity = _capacity(size)
    if not size <= capacity:
        raise AssertionError("the capacity is at least the present size")
    return capacity


def _capacity(size: int) -> int:
    return max(2 * plain(size), _MIN_CAPACITY_BYTES)


def make_data_dependent_plan(
    graph: Graph,
    types: Sequence[TensorType],
    options: PlanOptions,
    cache: WeightCache,
    value_of: ValueOf,
    pairs: StatePairs = (),
) -> DataDependentPlan | None:
    """Return the data-dependent plan of a graph.

    An input whose output of the next iteration has another size gets a growing axis, and the graph
    is planned again until no more axes grow.

    Args:
        graph: The graph; its nodes may be fused ones.
        types: Concrete type of each input.
        options: Options of plans.
        cache: The op's view of the weight cache.
        value_of: Returns the content of a value for these inputs; it decides the first sizes.
        pairs: Positions of outputs and of the inputs to which the next iteration passes them.

    Returns:
        The plan; None if no size depends on data, if the plan has a reference step, if an output
        that no input reads grows, or if a step needs a number before it is read.

    Raises:
        SubgraphError: The graph cannot be planned with symbolic integers.
    """
    growing_axes: list[InputAxis] = []
    while True:
        planner = _DataDependentPlanner(graph, types, options, value_of, growing_axes)
        plan = planner.plan()
        more = [axis for axis in _growing_axes_of(plan, pairs) if axis not in growing_axes]
        if not more:
            break
        growing_axes += more
    if not planner.read_counts:
        return None
    layout = make_argument_layout(plan, cache, object_array)
    if layout.breaks:
        return None
    growing_inputs = {position for position, _ in growing_axes}
    growing_outputs = {output: reader for output, reader in pairs if reader in growing_inputs}
    if {*growing_outputs.values()} != growing_inputs:  # one output is passed to two inputs
        return None
    if any(is_symbolic(o.size) and k not in growing_outputs for k, o in enumerate(plan.outputs)):
        return None
    return _SizeExtractor(plan, layout, planner, growing_axes, growing_outputs).plan()


def _growing_axes_of(plan: Plan, pairs: StatePairs) -> Iterator[InputAxis]:
    """Yield the axes of inputs whose size differs from that of the output for the next iteration.

    Raises:
        Unsupported: An output has another dtype or rank than the input that reads it.
    """
    for output, reader in pairs:
        result, source = plan.outputs[output], plan.inputs[reader]
        if source is None or result.rank != source.rank or result.dtype != source.dtype:
            raise Unsupported("a state whose dtype or rank changes between iterations")
        for axis, (after, before) in enumerate(zip(result.shape, source.shape, strict=True)):
            if is_symbolic(after) or plain(after) != plain(before):
                yield reader, axis


class _SizeExtractor:
    """Separates the symbolic numbers of an argument layout from its fixed numbers."""

    def __init__(
        self,
        plan: Plan,
        layout: ArgumentLayout,
        planner: _DataDependentPlanner,
        growing_axes: Sequence[InputAxis],
        growing_outputs: Mapping[int, int],
    ) -> None:
        self._plan = plan
        self._layout = layout
        self._planner = planner
        self._growing_axes = tuple(growing_axes)
        self._growing_outputs = growing_outputs
        self._capacities = {
            reader: max(2 * plain(plan.outputs[output].nbytes), _MIN_CAPACITY_BYTES)
            for output, reader in growing_outputs.items()
        }
        # Kind, index, symbolic number and base, as in a `_PatchRow`.
        self._symbolic: list[tuple[str, tuple[int, int], Any, int | None]] = []
        # After the argument words follow the base addresses of the arena and of each output.
        self._bases = len(layout.words)

    def plan(self) -> DataDependentPlan | None:
        """Return the plan; None if a step needs a number before it is read."""
        layout = self._layout
        words = self._plain("word", layout.words)
        arena = self._patch(layout.arena, 0)
        outputs = [
            self._with_capacity(port, self._growing_outputs.get(k), self._patch(port.patch, 1 + k))
            for k, port in enumerate(layout.outputs)
        ]
        inputs = [
            self._with_capacity(port, port.position, _fixed(port.patch)) for port in layout.inputs
        ]
        weights = [
            self._weight(k, content, patch) for k, (content, patch) in enumerate(layout.weights)
        ]
        steps: list[tuple[Kernel, int, int, int]] = []
        for k, (kernel, begin, units, grain) in enumerate(layout.steps):
            for column, number in ((2, units), (3, grain)):
                if is_symbolic(number):
                    self._symbolic.append(("size", (k, column), number, None))
            steps.append((kernel, begin, plain(units), plain(grain)))
        program = attrs.evolve(
            layout,
            words=np.concatenate([words, np.zeros(1 + len(outputs), np.int64)]),
            arena=arena,
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            weights=tuple(weights),
            kernels=tuple(
                (k, Patch(p.positions, p.offsets.astype(np.int64))) for k, p in layout.kernels
            ),
            steps=tuple(steps),
            entries=tuple,
            areas=tuple(starmap(_area, layout.areas)),
        )
        return self._with_code(program)

    def _with_code(self, program: ArgumentLayout) -> DataDependentPlan | None:
        """Return the plan of a program; None if a step needs a number before it is read."""
        read_counts = self._planner.read_counts
        levels = [level for level, count in enumerate(read_counts) for _ in range(count)]
        numbers = [number for _, _, number, _ in self._symbolic]
        of_outputs = {k: self._of_output(k, reader) for k, reader in self._growing_outputs.items()}
        for whole, axes in of_outputs.values():
            numbers += [whole, *axes.values()]
        code = SizeCode(self._planner.trace, numbers, levels)
        reads = [k for k, step in enumerate(program.steps) if step[0] is _READ]
        patches: list[_PatchRow] = []
        for kind, index, number, base in self._symbolic:
            register = code.register(number)
            if self._first_reader(program, kind, index) <= reads[code.level(register)]:
                return None
            patches.append(_PatchRow(kind, index, register, base))
        read_at = tuple((program.steps[k][1], self._item_size(k)) for k in reads)
        return DataDependentPlan(
            self._plan,
            program,
            code,
            tuple(patches),
            read_at,
            tuple(read_counts),
            self._growing_axes,
            self._capacities,
            {
                k: (code.register(whole), {axis: code.register(n) for axis, n in axes.items()})
                for k, (whole, axes) in of_outputs.items()
            },
        )

    def _of_output(self, k: int, reader: int) -> tuple[Any, dict[int, Any]]:
        """Return the bytes of an output with growing axes, and its sizes along these axes."""
        operand = self._plan.outputs[k]
        axes = [axis for position, axis in self._growing_axes if position == reader]
        return operand.nbytes, {axis: operand.shape[axis] for axis in axes}

    def _with_capacity(self, port: Port, reader: int | None, patch: Patch) -> Port:
        """Return an input or output with its capacity instead of its size.

        Args:
            port: The port.
            reader: Position of the input that reads it in the next iteration, if its axes grow.
            patch: The patch of the new port.
        """
        capacity = None if reader is None else self._capacities.get(reader)
        if capacity is None:
            return attrs.evolve(port, patch=patch)
        if not port.nbytes <= capacity:
            raise Unsupported("a state whose size more than doubles in one iteration")
        items = capacity // numpy_dtype(port.dtype).itemsize
        return Port(port.position, port.dtype, (items,), capacity, patch)

    def _item_size(self, step: int) -> int:
        item = self._plan.items[step]
        assert isinstance(item, EmittedStep)
        operand = item.arguments[1]
        return operand.itemsize if isinstance(operand, Operand) else abi.WORD

    def _first_reader(self, program: ArgumentLayout, kind: str, index: tuple[int, int]) -> int:
        """Return the first step that reads a number of the program; see `_PatchRow` for it."""
        if kind == "size":
            return index[0]
        if kind == "word":
            begins = [begin for _, begin, _, _ in program.steps]
            return bisect_right(begins, index[0]) - 1
        positions: list[int] = program.weights[index[0]][1].positions.tolist()
        return min(self._first_reader(program, "word", (at, 0)) for at in positions)

    def _plain(self, kind: str, items: Array) -> NDArray[np.int64]:
        for at, number in enumerate(items):
            if is_symbolic(number):
                self._symbolic.append((kind, (at, 0), number, None))
        return np.array([plain(item) for item in items], np.int64)

    def _patch(self, patch: Patch, base: int) -> Patch:
        """Return a patch of fixed offsets, with one more word for the base address of the memory.

        A reading step computes an address as this base plus a symbolic offset.
        """
        at = self._bases + base
        for position, offset in zip(patch.positions.tolist(), patch.offsets, strict=True):
            if is_symbolic(offset):
                self._symbolic.append(("word", (position, 0), offset, at))
        offsets = [plain(offset) for offset in patch.offsets]
        return Patch(np.array([*patch.positions, at], np.intp), np.array([*offsets, 0], np.int64))

    def _weight(self, k: int, weight: Any, patch: Patch) -> tuple[Any, Patch]:
        if isinstance(weight, SymbolicConstant):
            if weight.dtype != "int64" or is_symbolic(weight.array.size):
                raise Unsupported(f"a constant of {weight.dtype} that depends on data")
            flat = weight.array.reshape(-1)
            for at, number in enumerate(flat):
                if is_symbolic(number):
                    self._symbolic.append(("array", (k, at), number, None))
            fixed = np.array([plain(number) for number in flat], np.int64)
            weight = fixed.reshape(weight.array.shape)
        return weight, _fixed(patch)


def _area(offset: int, size: int) -> tuple[int, int]:
    """Return an area of the arena with its capacity instead of its size."""
    capacity = _capacity(size) if is_symbolic(size) else size
    # Before a guard page, the storage ends where it would end with its present size.
    ahead = capacity - plain(size) if guard_pages.MODE == "end" else 0
    return plain(offset) - ahead, capacity


def _fixed(patch: Patch) -> Patch:
    """Return the patch of an input or weight, whose offsets must not depend on data."""
    if any(map(is_symbolic, patch.offsets)):
        raise Unsupported("a view of an input or weight whose offset depends on data")
    return Patch(patch.positions, patch.offsets.astype(np.int64))


class DataDependentProgram(ExecutablePlan):
    """A data-dependent plan bound to memory.

    Attributes:
        data_plan: The plan.
        sizes: Sizes of its growing axes in the present iteration.
    """

    def __init__(self, plan: DataDependentPlan, arena: Arena, pool: Pool | None) -> None:
        """Bind the plan, its code and its patches to addresses; see `ExecutablePlan`."""
        changing = [row.index[0] for row in plan.patches if row.kind == "array"]
        self._changing = {id(plan.layout.weights[k][0]) for k in changing}
        super().__init__(plan.plan, plan.layout, arena, pool)
        assert self.single_program is not None, "the plan has no reference steps"
        self._registers: Array = plan.code.registers.copy()
        self._blocks = [
            self._block(plan, level, item, self.single_program)
            for level, (_, item) in enumerate(plan.reads)
        ]
        for (begin, _), (block, *_) in zip(plan.reads, self._blocks, strict=True):
            self._words[begin] = block.ctypes.data
        self.data_plan = plan
        self.sizes: Array = np.zeros(len(plan.growing_axes), np.int64)
        if plan.growing_axes:
            self._words[plan.reads[0][0] + 1] = self.sizes.ctypes.data

    def register(self, index: int) -> int:
        """Return the address of a register."""
        return int(self._registers[index:].ctypes.data)

    def _bind_array(self, array: Array, patch: Patch) -> Array:
        if id(array) not in self._changing:
            return super()._bind_array(array, patch)
        copy = guard_pages.guarded_copy(array, writable=True) if guard_pages.MODE else array.copy()
        patch.put(self._words, copy.ctypes.data)
        return copy

    def _block(
        self, plan: DataDependentPlan, level: int, item: int, program: Program
    ) -> tuple[Array, Array, Array]:
        """Return the arguments of a reading step, and the code and patches that they point to.

        Args:
            plan: The plan.
            level: The step's level.
            item: Bytes of each number that the step reads.
            program: The program of the plan.
        """
        base = self._registers.ctypes.data
        code = plan.code.rows(level, base)
        patches: Array = np.array(
            [
                (
                    self._address(row.kind, row.index, program),
                    base + abi.WORD * row.register,
                    0 if row.base is None else self._words[row.base :].ctypes.data,
                )
                for row in plan.patches
                if plan.code.level(row.register) == level
            ],
            np.int64,
        ).reshape(-1, abi.SIZE_PATCH_WORDS)
        block: Array = np.zeros(abi.SIZE_WORDS, np.int64)
        words = {
            abi.SIZE_READ: base + abi.WORD * sum(plan.read_counts[:level]),
            abi.SIZE_COUNT: plan.read_counts[level],
            abi.SIZE_ITEM: item,
            abi.SIZE_STOP: program.cancel_address,
            abi.SIZE_CODE: code.ctypes.data,
            abi.SIZE_CODE + abi.WORD: len(code),
            abi.SIZE_PATCHES: patches.ctypes.data,
            abi.SIZE_PATCHES + abi.WORD: len(patches),
        }
        for offset, value in words.items():
            block[offset // abi.WORD] = value
        return block, code, patches

    def _address(self, kind: str, index: tuple[int, int], program: Program) -> int:
        """Return the address of a number of the program; see `_PatchRow` for the arguments."""
        if kind == "word":
            return int(self._words[index[0] :].ctypes.data)
        if kind == "size":
            return int(program.rows[index[0], index[1] :].ctypes.data)
        constant: Array = self._arrays[index[0] - len(self._entry_patches)]
        return int(constant.reshape(-1)[index[1] :].ctypes.data)
