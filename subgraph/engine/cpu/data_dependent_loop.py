"""Strategy for a loop: data-dependent plans of the loop's body.

Each plan (`subgraph.engine.executable.data_dependent_plan`) is made for the sizes of one iteration
and serves others as long as its guards hold. The executor runs an iteration that no plan serves,
and a new plan is made for the sizes of the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.engine.cpu.iterations import Iterations, make_iterations
from subgraph.engine.cpu.loop_session import LoopSession, LoopStrategy
from subgraph.engine.executable.data_dependent_plan import (
    DataDependentPlan,
    DataDependentProgram,
    ValueOf,
    make_data_dependent_plan,
    planned_size,
)
from subgraph.engine.region.region_op import RegionOp
from subgraph.engine.region.strategy import Declined
from subgraph.errors import LimitError, RequestCancelledError
from subgraph.graph.graph import Graph, Value
from subgraph.graph.parameters import pinned_snapshot
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.subgraph_op import IterationsResult, Wiring

# Number of plans that are made without condition, iterations by plans after which one more may be
# made, and number of cached plans (estimates).
_INITIAL_PLANS, _ITERATIONS_PER_PLAN, _MAX_CACHED_PLANS = 4, 64, 16
_MAX_UNFIT_SHAPES = 256  # sets of shapes that are remembered because no plan serves them
# A misfit is an iteration that a plan began and could not finish. After this number of misfits,
# plans are used only while they have run this many iterations per misfit (estimates).
_MISFITS, _ITERATIONS_PER_MISFIT = 16, 2


@attrs.frozen(eq=False)
class _LoopPlan:
    """A data-dependent plan bound to the session's memory.

    Attributes:
        plan: The plan.
        program: The plan as a program of the session.
        iterations: Runs the program repeatedly.
        shapes: Shapes of the inputs for which it was made.
    """

    plan: DataDependentPlan
    program: DataDependentProgram
    iterations: Iterations
    shapes: Sequence[tuple[int, ...]]

    def is_for(self, items: Sequence[Array]) -> bool:
        """Return whether another plan for these inputs would be made for the same sizes."""
        return bool(self.plan.growing_axes) and all(
            planned_size(items[at].shape[axis]) == planned_size(self.shapes[at][axis])
            for at, axis in self.plan.growing_axes
        )

    def accepts(self, items: Sequence[Array]) -> bool:
        """Return whether the plan serves inputs of these shapes."""
        shapes = [list(item.shape) for item in items]
        for position, axis in self.plan.growing_axes:
            if len(shapes[position]) == len(self.shapes[position]):
                shapes[position][axis] = self.shapes[position][axis]
        fits = all(items[at].nbytes <= room for at, room in self.plan.capacities.items())
        return fits and shapes == [list(shape) for shape in self.shapes]


class DataDependentLoop(LoopStrategy):
    """Runs the iterations of one loop by data-dependent plans of its body."""

    name = "loop of data-dependent plans"

    def __init__(self, session: LoopSession, wiring: Wiring) -> None:
        """Begin without plans; see `LoopStrategy`."""
        super().__init__(session, wiring)
        self._loop_plans: list[_LoopPlan] = []  # the most recently used first
        self._plans_made = self._misfits = self._iterations_run = 0
        self._refused = False
        self._unfit: set[tuple[tuple[int, ...], ...]] = set()  # shapes that no plan serves

    def run(
        self, items: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> IterationsResult:
        """Run iterations by the first plan that fits; one more is made if none does."""
        if self._refused:
            raise Declined("no plan can be made in which the body's data decide sizes")
        if (
            self._misfits > _MISFITS
            and self._iterations_run < _ITERATIONS_PER_MISFIT * self._misfits
        ):
            raise Declined("too few iterations have fitted a plan")
        shapes = tuple([item.shape for item in items])
        if shapes in self._unfit:
            return IterationsResult([], [], first, continues=True)
        result = self._run_first_fit(items, inputs, limit, first)
        if result is None:
            raise Declined("no plan fits the sizes of this iteration")
        self._iterations_run += result.done - first
        self._misfits += result.continues and result.done != limit
        # If all sizes follow from these shapes, later attempts would fail as well.
        decided = all(
            each.plan.growing_axes and len(each.plan.read_counts) == 1 for each in self._loop_plans
        )
        if result.done == first and decided and len(self._unfit) < _MAX_UNFIT_SHAPES:
            self._unfit.add(shapes)
        return result

    def _run_first_fit(
        self, items: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> IterationsResult | None:
        result: IterationsResult | None = None
        for each in [each for each in self._loop_plans if self._holds(each, items)]:
            result = self._run(each, inputs, limit, first)
            if result.done > first:
                return result
        made = self._make_plan(items)
        if made is None:
            return result
        self._unfit.clear()
        return self._run(made, inputs, limit, first)

    def _run(
        self, loop_plan: _LoopPlan, inputs: Sequence[Any], limit: int | None, first: int
    ) -> IterationsResult:
        session, snapshot = self._session, pinned_snapshot()
        assert snapshot is not None, "a request pins one"
        if loop_plan.program.epoch != snapshot.epoch:
            loop_plan.program.refresh(snapshot)
        session.begin(loop_plan.program)
        result = loop_plan.iterations.run(inputs, limit, first)
        if result.done > first and self._loop_plans[0] is not loop_plan:
            self._loop_plans.remove(loop_plan)
            self._loop_plans.insert(0, loop_plan)
        return result

    def _make_plan(self, items: Sequence[Any]) -> _LoopPlan | None:
        """Return a new plan for these inputs; None if none can be made.

        Raises:
            Declined: Planning failed with symbolic sizes.
        """
        if self._plans_made >= _INITIAL_PLANS + self._iterations_run // _ITERATIONS_PER_PLAN or any(
            e.is_for(items) for e in self._loop_plans
        ):
            return None
        self._refused = True  # revoked below if a plan is made
        region = self._session.region
        types = [TensorType(dtype_of(item), item.shape) for item in items]
        values = _values(region, items)
        self._plans_made += 1
        try:
            plan = make_data_dependent_plan(
                region.fused, types, region.options.plan, region.weights, values, self._pairs
            )
        except (LimitError, RequestCancelledError):
            raise
        except Exception as error:  # lowerings that do not support symbolic sizes fail in any way
            raise Declined(f"{type(error).__name__}: {error}") from error
        program = None if plan is None else self._session.bind_data_dependent(plan)
        iterations = None if program is None else make_iterations(program, self._wiring)
        if plan is None or program is None or iterations is None:
            return None
        self._refused = False
        made = _LoopPlan(plan, program, iterations, [item.shape for item in items])
        self._loop_plans = [made, *self._loop_plans[: _MAX_CACHED_PLANS - 1]]
        return made

    def _holds(self, loop_plan: _LoopPlan, items: Sequence[Any]) -> bool:
        """Return whether a plan serves inputs of these shapes with the present parameters."""
        plan = loop_plan.plan.plan
        same = plan.graph is self._session.region.fused and plan.versions.are_current()
        return same and loop_plan.accepts(items)


def _values(region: RegionOp, inputs: Sequence[Any]) -> ValueOf:
    """Return a function that computes a value of the region's graph for these inputs."""
    graph = region.fused

    def value_of(value: Value) -> Array:
        if value in graph.inputs:
            return np.asarray(inputs[graph.inputs.index(value)])
        before = region.part_op(Graph(graph.inputs, [value], f"{graph.name}_sizes"))
        found: Array = before.forward(list(inputs))[0]
        return found

    return value_of
