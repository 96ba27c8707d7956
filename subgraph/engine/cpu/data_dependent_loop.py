"""Strategy for a loop: plans whose sizes the data of the loop's body decide.

Each plan (`subgraph.engine.planner.data_dependent_plan`) is made for the sizes at hand. An
iteration that does not fit one runs in the executor, and a new plan for its sizes follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.engine.cpu.iterations import Iterations, wired
from subgraph.engine.cpu.loop_session import LoopSession
from subgraph.engine.planner.data_dependent_plan import (
    DataDependentPlan,
    DataDependentProgram,
    ValueOf,
    make_data_dependent_plan,
    usual,
)
from subgraph.engine.region.region_op import RegionOp
from subgraph.engine.region.strategy import Declined
from subgraph.errors import LimitError, RequestCancelledError
from subgraph.graph.graph import Graph, Value
from subgraph.graph.parameters import pinned_snapshot
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.subgraph_op import Turned, Wiring

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


class DataDependentLoop:
    """Runs the iterations of one loop by plans whose sizes data decide."""

    name = "loop of data-dependent plans"

    def __init__(self, session: LoopSession, wiring: Wiring) -> None:
        """Begin with no plan."""
        self._session = session
        self._wiring = wiring
        self._pairs = [(made, read) for made, read in wiring.states if read is not None]
        self._sized: list[_Sized] = []  # the one that served last first
        self._plans = self._misfits = self._made = 0
        self._refused = False
        self._unfit: set[tuple[tuple[int, ...], ...]] = set()  # shapes that no plan here takes

    def run(
        self, given: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> Turned:
        """Run iterations by the first plan that fits; one more is made if none does.

        Raises:
            Declined: No plan fits, and none can be made.
        """
        if self._refused:
            raise Declined("no plan can be made in which the body's data decide sizes")
        if self._misfits > _SOME and self._made < _WORTH * self._misfits:
            raise Declined("too few iterations have fitted a plan")
        shapes = tuple([item.shape for item in given])
        if shapes in self._unfit:
            return Turned([], [], first, going=True)
        turned = self._tried(given, inputs, limit, first)
        if turned is None:
            raise Declined("no plan fits the sizes of this iteration")
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
            if turned.done > first:
                return turned
        made = self._new(given)
        if made is None:
            return turned
        self._unfit.clear()
        return self._run(made, inputs, limit, first)

    def _run(self, sized: _Sized, inputs: Sequence[Any], limit: int | None, first: int) -> Turned:
        session, snapshot = self._session, pinned_snapshot()
        assert snapshot is not None, "a request pins one"
        if sized.program.epoch != snapshot.epoch:
            sized.program.refresh(snapshot)
        session.begin(sized.program)
        turned = sized.turns.run(inputs, limit, first)
        if turned.done > first and self._sized[0] is not sized:
            self._sized.remove(sized)
            self._sized.insert(0, sized)
        return turned

    def _new(self, given: Sequence[Any]) -> _Sized | None:
        """Return the plan for the sizes that these inputs lead to, None if there is none.

        Raises:
            Declined: Planning failed with symbolic sizes.
        """
        if self._plans >= _PLANS + self._made // _PAID or any(e.is_for(given) for e in self._sized):
            return None
        self._refused = True  # unless one can be made
        region = self._session.region
        types = [TensorType(dtype_of(item), item.shape) for item in given]
        values = _values(region, given)
        self._plans += 1
        try:
            plan = make_data_dependent_plan(
                region.fused, types, region.options.plan, region.weights, values, self._pairs
            )
        except (LimitError, RequestCancelledError):
            raise
        except Exception as error:  # whatever code does that is not made for symbolic sizes
            raise Declined(f"{type(error).__name__}: {error}") from error
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


def _values(region: RegionOp, inputs: Sequence[Any]) -> ValueOf:
    """Return what computes a value of the region's graph for certain inputs."""
    graph = region.fused

    def value_of(value: Value) -> Array:
        if value in graph.inputs:
            return np.asarray(inputs[graph.inputs.index(value)])
        before = region.part(Graph(graph.inputs, [value], f"{graph.name}_sizes"))
        found: Array = before.forward(list(inputs))[0]
        return found

    return value_of
