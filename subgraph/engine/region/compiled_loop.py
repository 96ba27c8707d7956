"""The iterations of one loop in a session: which program runs them, as long as there is one.

A body of known sizes has its plan like every region. Where the body's own data decide sizes, a
data-dependent plan (`subgraph.engine.planner.data_dependent_plan`) is made for the sizes at hand.
An iteration that does not fit it runs in the executor, and a new plan for its sizes follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from subgraph.engine.planner.data_dependent_plan import (
    DataDependentPlan,
    DataDependentProgram,
    ValueOf,
    make_data_dependent_plan,
    usual,
)
from subgraph.engine.planner.executable_plan import ExecutablePlan
from subgraph.engine.region.iterations import Iterations, wired
from subgraph.graph.graph import Graph, Value
from subgraph.graph.parameters import pinned_snapshot
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.subgraph_op import Turned, Wiring

if TYPE_CHECKING:
    from subgraph.engine.region.region_op import CpuSubgraphOp
    from subgraph.engine.region.region_session import CpuSession

# How many sized plans are made at first, how many turns pay for one more, and how many are kept.
_PLANS, _PAID, _KEPT = 4, 64, 16
_UNFIT = 256  # shapes that are kept as such
# How many turns each misfit has to be worth, once there are some.
_SOME, _WORTH = 16, 2


@attrs.frozen(eq=False)
class _Sized:
    """A sized plan, its program, how that makes turns, and the shapes that it was made for."""

    plan: DataDependentPlan
    program: DataDependentProgram
    turns: Iterations
    shapes: Sequence[tuple[int, ...]]

    def is_for(self, given: Sequence[Array]) -> bool:
        """Return whether it was made for the sizes that these inputs would have one made for."""
        return bool(self.plan.growing) and all(
            usual(given[at].shape[axis]) == usual(self.shapes[at][axis])
            for at, axis in self.plan.growing
        )

    def takes(self, given: Sequence[Array]) -> bool:
        """Return whether it is for inputs of these shapes."""
        shapes = [list(item.shape) for item in given]
        for position, axis in self.plan.growing:
            if len(shapes[position]) == len(self.shapes[position]):
                shapes[position][axis] = self.shapes[position][axis]
        fits = all(given[at].nbytes <= room for at, room in self.plan.rooms.items())
        return fits and shapes == [list(shape) for shape in self.shapes]


class CompiledLoop:
    """Makes the turns of one loop."""

    def __init__(self, session: CpuSession, wiring: Wiring) -> None:
        """Begin with no program."""
        self._session = session
        self._wiring = wiring
        self._pairs = [(made, read) for made, read in wiring.states if read is not None]
        self._known: tuple[object, Iterations | None] | None = None
        self._sized: list[_Sized] = []  # the one that served last first
        self._plans = self._misfits = self._made = 0
        self._refused = False
        self._unfit: set[tuple[tuple[int, ...], ...]] = set()  # shapes that no plan here takes

    def __call__(self, inputs: Sequence[Any], limit: int | None, first: int) -> Turned | None:
        """Make turns; see `Session.turns`."""
        session, items = self._session, self._wiring.items
        if session.profiling:
            return None
        given = [item[0] if k in items else item for k, item in enumerate(inputs)]
        if session.region.is_one_plan:
            bound = session.ready(given)
            if bound is not None and session.region.is_one_plan:
                if self._known is None or self._known[0] is not bound.inputs:
                    self._known = bound.inputs, wired(bound, self._wiring)
                turns = self._known[1]
                if turns is not None:
                    return turns.run(inputs, limit, first)
                if not self._grows(bound):
                    return None
        return self._of_sizes(given, inputs, limit, first)

    def _grows(self, bound: ExecutablePlan) -> bool:
        """Return whether what follows an input has another size."""
        ends = {end.position: end for end in bound.inputs}
        return any(bound.outputs[made].type != ends[read].type for made, read in self._pairs)

    def _of_sizes(
        self, given: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> Turned | None:
        """Make turns by the first sized plan that fits; one more is made if none does."""
        if self._refused or (self._misfits > _SOME and self._made < _WORTH * self._misfits):
            return None
        shapes = tuple([item.shape for item in given])
        if shapes in self._unfit:
            return Turned([], [], first, going=True)
        turned = self._tried(given, inputs, limit, first)
        if turned is None:
            return None
        self._made += turned.done - first
        self._misfits += turned.going and turned.done != limit
        # Where nothing but these shapes decides, no other try is needed.
        decided = all(each.plan.growing and len(each.plan.dims) == 1 for each in self._sized)
        if turned.done == first and decided and len(self._unfit) < _UNFIT:
            self._unfit.add(shapes)
        return turned

    def _tried(
        self, given: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> Turned | None:
        turned: Turned | None = None
        for each in [each for each in self._sized if self._holds(each, given)]:
            turned = self._run(each, inputs, limit, first)
            if turned is None or turned.done > first:
                return turned
        made = self._new(given)
        if made is None:
            return turned
        self._unfit.clear()
        return self._run(made, inputs, limit, first)

    def _run(
        self, sized: _Sized, inputs: Sequence[Any], limit: int | None, first: int
    ) -> Turned | None:
        session, snapshot = self._session, pinned_snapshot()
        assert snapshot is not None, "a request pins one"
        if sized.program.epoch != snapshot.epoch:
            sized.program.refresh(snapshot)
        session.begin(sized.program)
        turned = sized.turns.run(inputs, limit, first)
        if turned is not None and turned.done > first and self._sized[0] is not sized:
            self._sized.remove(sized)
            self._sized.insert(0, sized)
        return turned

    def _new(self, given: Sequence[Any]) -> _Sized | None:
        """Return the plan for the sizes that these inputs lead to, None if there is none."""
        if self._plans >= _PLANS + self._made // _PAID or any(e.is_for(given) for e in self._sized):
            return None
        self._refused = True  # unless one can be made
        region = self._session.region
        types = [TensorType(dtype_of(item), item.shape) for item in given]
        values = _values(region, given)
        self._plans += 1
        plan = make_data_dependent_plan(
            region.fused, types, region.options.plan, region.weights, values, self._pairs
        )
        program = None if plan is None else self._session.bind_sized(plan)
        turns = None if program is None else wired(program, self._wiring)
        if plan is None or program is None or turns is None:
            return None
        self._refused = False
        made = _Sized(plan, program, turns, [item.shape for item in given])
        self._sized = [made, *self._sized[: _KEPT - 1]]
        return made

    def _holds(self, sized: _Sized, given: Sequence[Any]) -> bool:
        """Return whether a plan is for inputs of these shapes, and for the weights of now."""
        plan = sized.plan.plan
        same = plan.graph is self._session.region.fused and plan.versions.hold()
        return same and sized.takes(given)


def _values(region: CpuSubgraphOp, inputs: Sequence[Any]) -> ValueOf:
    """Return what computes a value of the region's graph for certain inputs."""
    graph = region.fused

    def value_of(value: Value) -> Array:
        if value in graph.inputs:
            return np.asarray(inputs[graph.inputs.index(value)])
        before = region.part(Graph(graph.inputs, [value], f"{graph.name}_sizes"))
        found: Array = before.forward(list(inputs))[0]
        return found

    return value_of
