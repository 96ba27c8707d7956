"""Sessions of the CPU's regions: plans bound to one arena, and compiled loops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from subgraph.engine.cpu.compiled_loop import CompiledLoop
from subgraph.engine.cpu.growing_inputs import claimed_buffers, release_buffers
from subgraph.engine.cpu.row_parts import RowParts
from subgraph.engine.executable.argument_layout import ArgumentLayout, make_argument_layout
from subgraph.engine.executable.executable_plan import Arena, ExecutablePlan
from subgraph.engine.executable.stored_program import StoredProgram
from subgraph.engine.executable.symbolic_plan import PlanInstance
from subgraph.engine.planner.plan_types import Plan
from subgraph.engine.program.pool import Pool
from subgraph.engine.region.region_op import RegionOp
from subgraph.engine.region.region_session import RegionSession
from subgraph.graph.graph import Graph
from subgraph.graph.result_arrays import fill_outputs, usable_output
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import ProfileEntry, RunIterations, Session, Wiring
from subgraph.system.forking import free_in_child
from subgraph.weights.cache import WeightCache
from subgraph.weights.mapped_files import release

# Upper bound of the executable plans that a session has of one symbolic plan (estimate: shapes that
# alternate). For further shapes the session rebinds one, which is faster than making another.
_MOST_INSTANCES = 6


class ArgumentLayouts:
    """Argument layouts by plan, cached as long as the plan is referenced."""

    def __init__(self, weights: WeightCache) -> None:
        """Begin without layouts; ``weights`` is the op's view of the weight cache."""
        self._weights = weights
        self._lock = free_in_child(threading.Lock())
        self._layouts: WeakKeyDictionary[Plan, ArgumentLayout] = WeakKeyDictionary()

    def of(self, plan: Plan | PlanInstance) -> ArgumentLayout:
        """Return the argument layout of a plan."""
        if isinstance(plan, PlanInstance):
            return plan.argument_layout()
        with self._lock:
            layout = self._layouts.get(plan)
            if layout is None:
                layout = self._layouts[plan] = make_argument_layout(plan, self._weights)
            return layout

    def forget(self) -> None:
        """Drop all layouts."""
        self._layouts.clear()


class CpuSession(RegionSession):
    """Runs a region for one request; its plans run one after another in the same arena."""

    def __init__(
        self,
        op: RegionOp,
        parts: RowParts,
        layouts: ArgumentLayouts,
        pool: Pool | None,
        growing: Callable[[tuple[int, ...], bool], CpuSession],
    ) -> None:
        """Open a session; memory comes with the first run.

        Args:
            op: The op of the region.
            parts: Decides how many rows of a batch run at a time.
            layouts: The argument layouts of its plans, shared by all sessions.
            pool: The threads that run steps; None: only the calling thread.
            growing: Opens a session of the region with buffers for inputs that grow: their
                positions, and whether they may be overwritten.
        """
        super().__init__(op)
        self._parts = parts
        self._layouts = layouts
        self._pool = pool
        self._arena = Arena()
        # One executable plan serves shapes that never come back, such as those of a growing cache.
        # When a shape comes back whose executable plan was bound to another one, one more is made.
        self._most_instances = 1
        self._left: list[PlanInstance] = []  # the latest such shapes, as their plans
        # The inputs that grow, the fused graph, and a session that runs it with their buffers.
        self._growing: tuple[tuple[int, ...], Graph, CpuSession] | None = None
        self._open_growing = growing

    def share(self, other: Session) -> None:
        """Use the arena of another session, which does not run at the same time."""
        assert isinstance(other, CpuSession), "of this class"
        self._arena = other._arena

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Plan, compile and allocate for inputs of these shapes, without running."""
        rows = self._rows_at_a_time(inputs)
        super().prepare([item[:rows] for item in inputs] if rows else inputs)

    def _run(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        """Run on all rows, or on parts of them one after another; append to inputs that grow."""
        buffers = claimed_buffers(inputs)
        if buffers:
            session = self._growing_session(tuple(buffers))
            if session is not None:
                session.profiling = self.profiling
                made: Sequence[Any] = ()
                try:
                    made = session._run_as_one([*inputs, *buffers.values()], outputs)
                    self._profile = session.profile()
                finally:
                    release_buffers(inputs, buffers, made)
                return made
            release_buffers(inputs, buffers, ())
        rows = self._rows_at_a_time(inputs)
        if not rows:
            return self._run_as_one(inputs, outputs)
        count = len(inputs[0])
        entries: list[ProfileEntry] = []
        results: list[Array] = []
        for start in range(0, count, rows):
            end = min(start + rows, count)
            part = [item[start:end] for item in inputs]
            found = super()._run(part, [array[start:end] for array in results] or None)
            if self.profiling:
                entries += self._profile
            if not start:
                for first, array in zip(found, outputs or [None] * len(found), strict=True):
                    shape = (count, *first.shape[1:])
                    whole = usable_output(array, first.dtype, shape)
                    results.append(np.empty(shape, first.dtype) if whole is None else whole)
                    results[-1][:end] = first
        self._profile = entries
        return results if outputs is None else fill_outputs(results, outputs)

    def _run_as_one(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        return super()._run(inputs, outputs)

    def _growing_session(self, positions: tuple[int, ...]) -> CpuSession | None:
        """Return the session of the region with buffers; None if the region is split in parts.

        Args:
            positions: The inputs that grow.
        """
        if self.region.split_region() is not None:
            return None
        fused = self.region.fused
        if self._growing is None or self._growing[:2] != (positions, fused):
            session = self._open_growing(positions, self.owns_states)
            session.share(self)
            session._pool = self._pool
            self._growing = positions, fused, session
            if self._cancelled:  # `cancel` was called before it could find this session
                session.cancel()
        session = self._growing[2]
        return session if session.region.split_region() is None else None

    def cancel(self) -> None:
        """End the run before its next step."""
        super().cancel()
        if self._growing is not None:
            self._growing[2].cancel()

    def resume(self) -> None:
        """Revoke `cancel`, for later runs."""
        super().resume()
        if self._growing is not None:
            self._growing[2].resume()

    def _rows_at_a_time(self, inputs: Sequence[Any]) -> int:
        """Return the rows of each part of a request; 0 if it runs as a whole."""
        if not inputs or not inputs[0].ndim or len(inputs[0]) < 2:
            return 0
        rows = self._parts.of(inputs)
        return rows if rows < len(inputs[0]) else 0

    def iterations(self, wiring: Wiring) -> RunIterations | None:
        """Return the compiled loop for a loop whose body is this region."""
        return CompiledLoop(self, wiring)

    def _bind(self, plan: object) -> ExecutablePlan:
        """Return a plan bound to the session's arena, by rebinding a spare one if possible."""
        if isinstance(plan, PlanInstance):
            spare = self._spare(plan)
            if spare is not None:
                spare.rebind(plan)
                return spare
        if isinstance(plan, StoredProgram):
            plan.check()
            layout = plan.layout
            release(plan.sources, layout.words)
        else:
            assert isinstance(plan, (Plan, PlanInstance)), (
                "the strategies of the CPU return no others"
            )
            layout = self._layouts.of(plan)
        return ExecutablePlan(plan, layout, self._arena, self._pool)

    def _spare(self, plan: PlanInstance) -> ExecutablePlan | None:
        """Remove and return an executable plan that can be bound to ``plan``.

        It is the least recently used one of the symbolic plan; None while there is room for more.
        """
        if plan in self._left:
            self._left.remove(plan)
            self._most_instances = min(self._most_instances + 1, _MOST_INSTANCES)
        same = [
            (key, bound.plan)
            for key, bound in self._bound.items()
            if isinstance(bound.plan, PlanInstance)
            and bound.plan.symbolic_plan is plan.symbolic_plan
        ]
        has_room = len(self._bound) < self.region.options.plans
        if not same or (has_room and len(same) < self._most_instances):
            return None
        key, left = same[0]
        self._left = [*self._left[-_MOST_INSTANCES:], left]
        bound = self._bound.pop(key)
        assert isinstance(bound, ExecutablePlan), "regions of the CPU have no others"
        self._last = None  # it may be this one, which no longer fits its shapes
        return bound
