"""Symbolic plans: one plan for all sizes of the dimensions that differ from call to call.

Planning visits every node in Python, which takes long compared to a run if sequences grow or
batches vary with every call. The plan for the second shape is therefore made with symbolic integers
(`subgraph.graph.symbolic`) in place of the dimensions that changed. Their trace records how every
number of the plan follows from the dimensions, and as guards all comparisons on which the plan
depends.

A `SymbolicPlan` is the argument layout of that plan, in which every symbolic number refers to one
entry of an array: the *numbers* of the plan. One generated Python function checks the guards and
computes the numbers for other dimensions; a `PlanInstance` consists of the symbolic plan and these
numbers. Only the memory plan is made again for other sizes, unless an earlier one has enough room.

In the example of `subgraph.engine.executable.argument_layout` with x of ``[n, 1024]``, words 0 and
1 become ``1024 n``, Softmax has ``n`` units, and input and output have ``4096 n`` bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import le
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import numpy as np

from subgraph.engine.executable.argument_layout import (
    ArgumentLayout,
    Patch,
    Port,
    SymbolicConstant,
    make_argument_layout,
)
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.memory import Life, assign_offsets
from subgraph.engine.planner.plan import Planner
from subgraph.engine.planner.plan_types import Plan, PlanOptions
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Versions
from subgraph.graph.size_expressions import Evaluate, Expression
from subgraph.graph.symbolic import Trace, is_symbolic, object_array, plain
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.system import guard_pages
from subgraph.weights.cache import WeightCache

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MAX_MEMORY_PLANS = 16  # cached memory plans of a symbolic plan (estimate)
# Largest ratio of the bytes in a reused memory plan to the bytes of the storages (estimate).
_MAX_SLACK = 1.125
# Bytes that a memory plan may have beyond the storages in any case: of small plans, sizes that grow
# with each run, as those of a decoder, would otherwise need a new one every few runs (estimate).
_SPARE_BYTES = 1 << 18
Types = Sequence[TensorType]
Shape = tuple[int, ...]
InputAxis = tuple[int, int]  # a dimension: the position of an input, and the axis


@attrs.frozen(eq=False)
class PlanInstance:
    """A symbolic plan for certain shapes.

    Attributes:
        symbolic_plan: The symbolic plan.
        numbers: Its numbers for these shapes, int64.
        integers: The elements of its arrays for these shapes, the words apart.
    """

    symbolic_plan: SymbolicPlan
    numbers: NDArray[np.int64]
    integers: NDArray[np.int64]

    @property
    def versions(self) -> Versions:
        """Versions of the parameters on whose content the plan depends."""
        return self.symbolic_plan.versions

    @property
    def arena(self) -> Patch:
        """The words that point into the arena."""
        plan = self.symbolic_plan
        return Patch(plan.layout.arena.positions, plan.arena.of(self.integers))

    @property
    def arena_bytes(self) -> int:
        """Size of the arena."""
        return int(self.symbolic_plan.arena_bytes.of(self.integers)[0, 0])

    @property
    def areas(self) -> tuple[tuple[int, int], ...]:
        """Offset and bytes of each area of the arena; see `ArgumentLayout.areas`."""
        rows = self.symbolic_plan.areas.of(self.integers).tolist()
        return tuple((offset, size) for offset, size in rows)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Work units and grain of each step."""
        return self.symbolic_plan.rows.of(self.integers)

    def fill_words(self, words: NDArray[np.int64]) -> None:
        """Set the argument words that differ between instances."""
        self.symbolic_plan.words.fill(words, self.numbers)

    def port_sizes(self) -> tuple[list[PortSize], list[PortSize]]:
        """Return the sizes of the inputs and outputs that differ between instances."""
        plan, integers = self.symbolic_plan, self.integers
        return plan.inputs.sizes(integers), plan.outputs.sizes(integers)

    def varying_weights(self) -> list[tuple[int, Any, Patch]]:
        """Return the weights that differ between instances: index, content and patch of each."""
        return [(k, *form.of(self.integers)) for k, form in self.symbolic_plan.varying_weights]

    def entries(self) -> tuple[ProfileEntry, ...]:
        """Return the profile entry of every step, with 0 seconds."""
        counts = self.symbolic_plan.counts.of(self.integers).tolist()
        return tuple(
            attrs.evolve(entry, bytes=moved, flops=flops)
            for entry, (moved, flops) in zip(self.symbolic_plan.entries, counts, strict=True)
        )

    def argument_layout(self) -> ArgumentLayout:
        """Return the argument layout for these shapes."""
        plan = self.symbolic_plan
        steps = zip(plan.layout.steps, self.sizes.tolist(), strict=True)
        return attrs.evolve(
            plan.layout,
            words=plan.words.filled(self.numbers),
            arena=self.arena,
            arena_bytes=self.arena_bytes,
            inputs=plan.inputs.of(self.integers),
            outputs=plan.outputs.of(self.integers),
            weights=tuple(form.of(self.integers) for form in plan.weights),
            kernels=plan.kernels,
            steps=tuple((kernel, begin, *row) for (kernel, begin, *_), row in steps),
            entries=self.entries,
            areas=self.areas,
        )


class _SymbolicNumbers:
    """Collects the symbolic numbers of a plan, each once, and the arrays that contain them.

    Attributes:
        wanted: The numbers, in the order in which instances store their values.
    """

    def __init__(self) -> None:
        self.wanted: list[Any] = []
        self._index: dict[Expression, int] = {}
        self._arrays: list[NDArray[Any]] = []
        self._count = 0

    def _index_of(self, number: Any) -> int:
        """Return the index of a symbolic number among all numbers; it is added if it is new."""
        found = self._index.get(number.expression)
        if found is None:
            found = self._index[number.expression] = len(self.wanted)
            self.wanted.append(number)
        return found

    def template(self, items: NDArray[Any]) -> _Template:
        """Return integers and symbolic integers as an array whose symbolic elements can be set.

        Raises:
            Unsupported: An item is a float.
        """
        flat = items.reshape(-1)
        if any(isinstance(item, float) for item in flat):
            raise Unsupported("an array of floats that depend on sizes")
        at = [k for k, item in enumerate(flat) if is_symbolic(item)]
        base = np.array([0 if is_symbolic(item) else item for item in flat], np.int64)
        source = [self._index_of(flat[k]) for k in at]
        return _Template(base, np.array(at, np.intp), np.array(source, np.intp))

    def array(self, items: NDArray[Any]) -> _SymbolicArray:
        """Return integers and symbolic integers as a part of the array that instances fill.

        Raises:
            Unsupported: An item is a float.
        """
        template = self.template(items)
        base = template.base.reshape(items.shape)
        if not len(template.positions):
            return _SymbolicArray(base, template.positions, None)
        self._arrays.append(items.reshape(-1))
        begin, self._count = self._count, self._count + items.size
        return _SymbolicArray(base, template.positions, slice(begin, self._count))

    def all_arrays(self) -> _Template:
        """Return the elements of all arrays with symbolic ones."""
        return self.template(np.concatenate([np.empty(0, object), *self._arrays]))


@attrs.frozen(eq=False)
class _Template:
    """A flat array of integers, some of which differ from instance to instance.

    Attributes:
        base: The integers, with 0 for those that differ.
        positions: Indices of those that differ.
        sources: For each position the index among the numbers of an instance.
    """

    base: NDArray[np.int64]
    positions: NDArray[np.intp]
    sources: NDArray[np.intp]

    def fill(self, target: NDArray[np.int64], numbers: NDArray[np.int64]) -> None:
        """Set the elements of an array that differ to those of an instance."""
        target[self.positions] = numbers[self.sources]

    def filled(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the array of an instance."""
        result = self.base.copy()
        self.fill(result, numbers)
        return result


@attrs.frozen(eq=False)
class _SymbolicArray:
    """A part of the integers of an instance; or the same integers in all instances.

    Attributes:
        base: The integers, with 0 for those that differ.
        positions: Flat indices of those that differ.
        part: Where they stand among the integers of an instance; None if they are the same in all.
    """

    base: NDArray[np.int64]
    positions: NDArray[np.intp]
    part: slice | None

    @property
    def fixed(self) -> bool:
        """Whether all integers are the same in every instance."""
        return self.part is None

    def of(self, integers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the array of an instance, which must not be changed."""
        return self.base if self.part is None else integers[self.part].reshape(self.base.shape)


class _SymbolicPlanner(Planner):
    """A planner that records the whole memory plan as one operation of the trace.

    Attributes:
        trace: The trace.
        lives: Lives of the storages, which are the same for all sizes.
    """

    trace: Trace
    lives: Sequence[Life] = ()

    def place_storages(
        self, sizes: Sequence[int], lives: Sequence[Life]
    ) -> tuple[Sequence[int], int]:
        """Place the storages, and record in the trace that other sizes need another placement."""
        self.lives = lives
        offsets, total = super().place_storages([plain(size) for size in sizes], lives)
        # The placement depends on comparisons of sizes. As guards these would make the plan fit few
        # sizes, so the trace treats the placement as one function, which `_place_for_sizes`
        # computes again.
        *traced, whole = self.trace.memory_plan(sizes, [*offsets, total])
        return traced, whole  # type: ignore[return-value]


class SymbolicPlan:
    """A plan for all sizes of some dimensions, as long as its guards hold.

    Attributes:
        versions: Versions of the parameters on whose content the plan depends.
        layout: Its argument layout, whose arrays are of objects.
        words: The argument words.
        rows: Work units and grain of each step.
        arena: Offsets in the arena, of the words that point into it.
        arena_bytes: Size of the arena, one element.
        areas: Offset and bytes of each area of the arena.
        inputs: The inputs.
        outputs: The outputs.
        weights: The weights and constants.
        varying_weights: Those that differ between instances, with their index.
        kernels: Kernels that other kernels call, with the words that hold their addresses.
        entries: Profile entries of the steps.
        counts: Bytes and floating-point operations of each step.
    """

    def __init__(
        self,
        plan: Plan,
        layout: ArgumentLayout,
        lives: Sequence[Life],
        trace: Trace,
        types: Types,
        groups: Sequence[Sequence[InputAxis]],
    ) -> None:
        """Separate the symbolic numbers of a plan from its fixed numbers.

        Args:
            plan: The plan.
            layout: Its argument layout, whose arrays are of objects.
            lives: Lives of its storages.
            trace: The trace of its symbolic integers.
            types: Types of the inputs for which the plan was made.
            groups: The dimensions that are symbolic; those of a group are equal.
        """
        self.versions = plan.versions
        self._groups = groups
        varying = {axis for group in groups for axis in group}
        shapes = [type_.shape or () for type_ in types]
        self._dtypes = [type_.dtype for type_ in types]
        self._ranks = [len(shape) for shape in shapes]
        self._fixed = [
            (k, axis, size)
            for k, shape in enumerate(shapes)
            for axis, size in enumerate(shape)
            if (k, axis) not in varying
        ]
        self._lives = lives
        self._memory_plans: tuple[tuple[int, list[int], list[int]], ...] = ()
        numbers = _SymbolicNumbers()
        self.layout = layout
        self.words = numbers.template(layout.words)
        self.rows = numbers.array(_objects([row[2:] for row in layout.steps], 2))
        self.arena = numbers.array(layout.arena.offsets)
        self.arena_bytes = numbers.array(_objects([[layout.arena_bytes]], 1))
        self.areas = numbers.array(_objects(layout.areas, 2))
        self.inputs = _SymbolicPorts(layout.inputs, numbers)
        self.outputs = _SymbolicPorts(layout.outputs, numbers)
        self.weights = [
            _SymbolicWeight(content, patch, numbers) for content, patch in layout.weights
        ]
        self.varying_weights = [(k, form) for k, form in enumerate(self.weights) if not form.fixed]
        self.kernels = tuple(
            (kernel, Patch(patch.positions, patch.offsets.astype(np.int64)))
            for kernel, patch in layout.kernels
        )
        self.entries = layout.entries()
        self.counts = numbers.array(_objects([[e.bytes, e.flops] for e in self.entries], 2))
        self._integers = numbers.all_arrays()
        self._evaluate: Evaluate = trace.function(numbers.wanted)

    def instance(self, dtypes: Sequence[str], shapes: Sequence[Shape]) -> PlanInstance | None:
        """Return the plan for inputs of these types; None if the symbolic plan does not fit them.

        It does not fit if a fixed dimension or dtype differs, or a guard does not hold.
        """
        dims = self._dims(dtypes, shapes)
        if dims is None:
            return None
        try:
            values = self._evaluate(dims, self._place_for_sizes)
            # `np.array` raises OverflowError, an ArithmeticError, for sizes of more than 64 bits.
            numbers = None if values is None else np.array(values, np.int64)
        except (ArithmeticError, ValueError):
            return None
        if numbers is None:
            return None
        return PlanInstance(self, numbers, self._integers.filled(numbers))

    def _dims(self, dtypes: Sequence[str], shapes: Sequence[Shape]) -> list[int] | None:
        """Return the size of each group of dimensions; None if the types differ otherwise."""
        if dtypes != self._dtypes or list(map(len, shapes)) != self._ranks:
            return None
        for position, axis, size in self._fixed:
            if shapes[position][axis] != size:
                return None
        dims: list[int] = []
        for first, *others in self._groups:
            size = shapes[first[0]][first[1]]
            # The plan uses one symbolic integer for all dimensions of a group; unequal sizes do not
            # fit it.
            for position, axis in others:
                if shapes[position][axis] != size:
                    return None
            dims.append(size)
        return dims

    def _place_for_sizes(self, sizes: Sequence[int]) -> Sequence[int]:
        """Return the offsets of storages of these sizes, and the size of the arena, in bytes.

        A memory plan with enough room for each storage, and not much more in total, is reused.
        """
        if guard_pages.MODE:
            offsets, total = guard_pages.guarded_offsets(sizes)
            return [*offsets, total]
        # A memory plan that is much too large would waste memory whenever long inputs are followed
        # by short ones.
        bytes_of_all = sum(sizes)
        most = max(_MAX_SLACK * bytes_of_all, bytes_of_all + _SPARE_BYTES)
        for whole, capacities, offsets in self._memory_plans:
            if whole <= most and all(map(le, sizes, capacities)):
                return offsets
        # Half of the slack is room for larger sizes, the other half lets smaller sizes reuse the
        # plan.
        ratio = max((1 + _MAX_SLACK) / 2, min(2, 1 + _SPARE_BYTES / 2 / max(bytes_of_all, 1)))
        capacities = [round(size * ratio) for size in sizes]
        found, total = assign_offsets(capacities, self._lives)
        offsets = [*found, total]
        self._memory_plans = (
            (sum(capacities), capacities, offsets),
            *self._memory_plans[: _MAX_MEMORY_PLANS - 1],
        )
        return offsets


class PortSize(NamedTuple):
    """The size of an input or output in an instance of a symbolic plan.

    Attributes:
        port: Its index among the inputs that are not weights, or among the outputs.
        shape: Its shape.
        nbytes: Its size.
        offsets: Those of its patch; None if they are the same in all instances.
    """

    port: int
    shape: tuple[int, ...]
    nbytes: int
    offsets: NDArray[np.int64] | None


class _SymbolicPorts:
    """The inputs or outputs of a symbolic plan.

    Attributes:
        fixed_bytes: Size of those that are the same in all instances.
    """

    def __init__(self, ports: Sequence[Port], numbers: _SymbolicNumbers) -> None:
        # Sizes and shapes of all ports are rows of one array, padded to the longest shape, so that
        # an instance fills them by one assignment.
        width = max((1 + len(port.shape) for port in ports), default=1)
        rows = [[port.nbytes, *port.shape, *[0] * width][:width] for port in ports]
        self._sizes = numbers.array(_objects(rows, width))
        all_offsets = [numbers.array(port.patch.offsets) for port in ports]
        # Symbolic numbers are 0 in these ports.
        self._ports = [
            attrs.evolve(
                port,
                shape=tuple(row[1 : 1 + len(port.shape)]),
                nbytes=row[0],
                patch=Patch(port.patch.positions, offsets.base),
            )
            for port, row, offsets in zip(
                ports, self._sizes.base.tolist(), all_offsets, strict=True
            )
        ]
        of_sizes = {int(at) // width for at in self._sizes.positions}
        self._varying = [
            (k, 1 + len(port.shape), None if offsets.fixed else offsets)
            for k, (port, offsets) in enumerate(zip(ports, all_offsets, strict=True))
            if k in of_sizes or not offsets.fixed
        ]
        varying = {k for k, *_ in self._varying}
        self.fixed_bytes = sum(p.nbytes for k, p in enumerate(self._ports) if k not in varying)

    def sizes(self, integers: NDArray[np.int64]) -> list[PortSize]:
        """Return the sizes of the ports that differ between instances."""
        rows = self._sizes.of(integers).tolist()
        return [
            PortSize(
                k,
                tuple(rows[k][1:end]),
                rows[k][0],
                None if offsets is None else offsets.of(integers),
            )
            for k, end, offsets in self._varying
        ]

    def of(self, integers: NDArray[np.int64]) -> tuple[Port, ...]:
        """Return the ports of an instance."""
        ports = list(self._ports)
        for k, shape, nbytes, offsets in self.sizes(integers):
            patch = ports[k].patch
            if offsets is not None:
                patch = Patch(patch.positions, offsets)
            ports[k] = attrs.evolve(ports[k], shape=shape, nbytes=nbytes, patch=patch)
        return tuple(ports)


class _SymbolicWeight:
    """A weight of a symbolic plan, or a constant that follows from the dimensions."""

    def __init__(self, content: Any, patch: Patch, numbers: _SymbolicNumbers) -> None:
        self._content = content
        self._positions = patch.positions
        self._offsets = numbers.array(patch.offsets)
        symbolic = isinstance(content, SymbolicConstant)
        self._symbolic_content = numbers.array(content.array) if symbolic else None
        self.fixed = self._offsets.fixed and self._symbolic_content is None

    def of(self, integers: NDArray[np.int64]) -> tuple[Any, Patch]:
        """Return the content and the patch of an instance."""
        content = self._content
        if self._symbolic_content is not None:
            elements = self._symbolic_content.of(integers)
            # Kernels read the constant in the operand's dtype, in C order.
            content = np.ascontiguousarray(elements.astype(numpy_dtype(content.dtype)))
        return content, Patch(self._positions, self._offsets.of(integers))


def make_symbolic_plan(
    graph: Graph,
    types: Types,
    groups: Sequence[Sequence[InputAxis]],
    options: PlanOptions,
    cache: WeightCache,
) -> SymbolicPlan | None:
    """Return a symbolic plan of a graph; None if its plan has reference steps.

    Args:
        graph: The graph; its nodes may be fused ones.
        types: Concrete type of each input, for which the plan is made.
        groups: The dimensions that become symbolic; those of a group are equal in every call.
        options: Options of plans.
        cache: The op's view of the weight cache.

    Raises:
        SubgraphError: The graph cannot be planned for these types, or not with symbolic integers.
    """
    trace = Trace()
    shapes = [list(type_.shape or ()) for type_ in types]
    for group in groups:
        position, axis = group[0]
        number: Any = trace.dimension(plain(shapes[position][axis]))  # type: ignore[arg-type]
        for position, axis in group:
            shapes[position][axis] = number
    traced = [TensorType(t.dtype, shape) for t, shape in zip(types, shapes, strict=True)]
    planner = _SymbolicPlanner(graph, traced, {}, options)
    planner.trace = trace
    plan = planner.plan()
    layout = make_argument_layout(plan, cache, object_array)
    # Reference steps work on the operands' fixed shapes, which an instance does not have.
    if layout.breaks:
        return None
    return SymbolicPlan(plan, layout, planner.lives, trace, types, groups)


def _objects(rows: Sequence[Sequence[Any]], width: int) -> NDArray[Any]:
    """Return rows of integers and symbolic integers as an array ``[rows, width]`` of objects."""
    return object_array([number for row in rows for number in row]).reshape(len(rows), width)
