"""The turns of one loop in a session: which program makes them, as long as there is one.

A body of known sizes has its plan like every region. Where its own data decide sizes, a sized plan
(`subgraph.engine.sized_plan`) serves, made for the sizes of the turn at hand; when it does not fit
a turn, that one is made in the other way, and a new plan for its sizes follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from subgraph.engine.sized_plan import SizedPlan, SizedProgram, ValueOf, make_sized_plan
from subgraph.engine.turns import Turns, wired
from subgraph.graph import Graph, Value
from subgraph.parameters import pinned_snapshot
from subgraph.subgraph_op import Turned, Wiring
from subgraph.types import TensorType, dtype_of

if TYPE_CHECKING:
    from subgraph.engine.region_op import CpuSession, CpuSubgraphOp

Array = np.ndarray[Any, Any]
# How many sized plans are made at first, how many turns pay for one more, and how many are kept.
_PLANS, _PAID, _KEPT = 4, 64, 16
# How many turns each misfit has to be worth, once there are some.
_SOME, _WORTH = 16, 2


@attrs.frozen(eq=False)
class _Sized:
    """A sized plan, its program, and how that makes turns."""

    plan: SizedPlan
    program: SizedProgram
    turns: Turns


class LoopTurns:
    """Makes the turns of one loop."""

    def __init__(self, session: CpuSession, wiring: Wiring) -> None:
        """Begin with no program."""
        self._session = session
        self._wiring = wiring
        self._known: tuple[object, Turns | None] | None = None
        self._sized: list[_Sized] = []  # the one that served last first
        self._plans = self._misfits = self._made = 0
        self._refused = False

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
                return None if turns is None else turns.run(inputs, limit, first)
        return self._of_sizes(given, inputs, limit, first)

    def _of_sizes(
        self, given: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> Turned | None:
        """Make turns by the first sized plan that fits; one more is made if none does."""
        if self._refused or (self._misfits > _SOME and self._made < _WORTH * self._misfits):
            return None
        turned: Turned | None = None
        for each in [each for each in self._sized if self._holds(each.plan, given)]:
            turned = self._run(each, inputs, limit, first)
            if turned is None or turned.done > first:
                return turned
        made = self._new(given)
        return turned if made is None else self._run(made, inputs, limit, first)

    def _run(
        self, sized: _Sized, inputs: Sequence[Any], limit: int | None, first: int
    ) -> Turned | None:
        session, snapshot = self._session, pinned_snapshot()
        assert snapshot is not None, "a request pins one"
        if sized.program.epoch != snapshot.epoch:
            sized.program.refresh(snapshot)
        session.begin(sized.program)
        turned = sized.turns.run(inputs, limit, first)
        if turned is None:
            return None
        self._made += turned.done - first
        self._misfits += turned.going and turned.done != limit
        if turned.done > first and self._sized[0] is not sized:
            self._sized.remove(sized)
            self._sized.insert(0, sized)
        return turned

    def _new(self, given: Sequence[Any]) -> _Sized | None:
        """Return the plan for the sizes that these inputs lead to, None if there is none."""
        if self._plans >= _PLANS + self._made // _PAID:
            return None
        self._refused = True  # unless one can be made
        region = self._session.region
        types = [TensorType(dtype_of(item), item.shape) for item in given]
        values = _values(region, given)
        self._plans += 1
        plan = make_sized_plan(region.fused, types, region.options.plan, region.weights, values)
        program = None if plan is None else self._session.bind_sized(plan)
        turns = None if program is None else wired(program, self._wiring)
        if plan is None or program is None or turns is None:
            return None
        self._refused = False
        made = _Sized(plan, program, turns)
        self._sized = [made, *self._sized[: _KEPT - 1]]
        return made

    def _holds(self, sized: SizedPlan, given: Sequence[Any]) -> bool:
        """Return whether a plan is for inputs of these shapes, and for the weights of now."""
        shapes = [end.shape for end in sized.laid.inputs]
        same = shapes == [item.shape for item in given]
        graph = self._session.region.fused
        return same and sized.plan.graph is graph and sized.plan.versions.hold()


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
