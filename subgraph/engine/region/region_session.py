"""What runs a region for one request: it asks the op for a plan, and binds that to memory.

Plans are the op's (`region_op`) and shared; memory and what is bound to it are the session's, kept
for the shapes used last. A region that is split runs by an executor of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_not, itemgetter
from typing import Any

from subgraph.engine.planner.step_profile import with_times
from subgraph.engine.region.bound_plan import BoundPlan
from subgraph.engine.region.region_op import RegionOp
from subgraph.engine.region.specialized_inputs import Key
from subgraph.engine.region.split_plan import SplitRegion
from subgraph.errors import RequestCancelledError
from subgraph.graph.limits import limited
from subgraph.graph.parameters import Snapshot, epoch, pinned, pinned_snapshot
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import ProfileEntry, Repeat, RunInputs, Session, fill_outputs
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.executor import Executor
from subgraph.system.gc_control import paused_gc


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that picks these items of a list."""
    if len(positions) > 1:
        pick = itemgetter(*positions)
        return lambda items: list(pick(items))
    return lambda items: [items[k] for k in positions]


class RegionSession(Session):
    """Runs a region for one request.

    Attributes:
        region: The op.
        profiling: Whether every step is measured.
    """

    def __init__(self, op: RegionOp) -> None:
        """Open a session; memory comes with the first run."""
        super().__init__(op)
        self.region = op
        self._active: BoundPlan | None = None  # what runs now or ran last
        self._cancelled = False
        self.profiling = op.options.profiling
        self._bound: OrderedDict[Key, BoundPlan] = OrderedDict()
        self._profile: list[ProfileEntry] = []
        self._split: tuple[SplitRegion, Executor] | None = None
        self._cancel_split = Cancel()
        self._last: BoundPlan | None = None
        self._shapes: Key = ()  # all of the key where no content decides
        weights = [
            (k, v.parameter) for k, v in enumerate(op.subgraph.inputs) if k not in op.data_inputs
        ]
        self._expected = [parameter for _, parameter in weights]
        self._weights_of = _picker([k for k, _ in weights])
        self._data_of = _picker(op.data_inputs)
        self._data_count = len(op.data_inputs)

    def __call__(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        """Run the region."""
        snapshot = pinned_snapshot()
        if snapshot is None:
            with pinned(Snapshot(self.region.parameters)):
                return self(inputs, outputs)
        if self._expected:
            if any(map(is_not, self._weights_of(inputs), self._expected)):
                # A weight given as an array of another shape, in this run alone.
                results = self.region.by_reference(inputs)
                return results if outputs is None else fill_outputs(results, outputs)
            inputs = self._data_of(inputs)
        return self._run(inputs, outputs)

    def measure(self) -> None:
        """Measure every step from now on."""
        self.profiling = True

    def cancel(self) -> None:
        """End the run before its next step."""
        self._cancelled = True  # first: what is chosen from now on is not run
        self._cancel_split.request()
        bound = self._active
        if bound is not None:
            bound.cancel()

    def resume(self) -> None:
        """Let runs go to their end again."""
        if self._cancelled:
            self._cancelled = False
            self._cancel_split.reset()
            if self._active is not None:
                self._active.clear()
            for bound in self._bound.values():
                bound.clear()

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Do all that comes before a run on inputs of these shapes."""
        snapshot = Snapshot(self.region.parameters)
        with pinned(snapshot), paused_gc(), limited(seconds=self.region.options.compile_seconds):
            self._resolve(inputs, snapshot, as_a_whole=True)

    def run_inputs(self) -> RunInputs:
        """Return how to run on the inputs that are no weights, under a pinned snapshot."""
        return self._run

    def repeat(self) -> Repeat:
        """Return how to run once more on the same shapes and weights."""
        return self._repeat

    def _repeat(self, inputs: Sequence[Any]) -> Sequence[Any] | None:
        last = self._last
        if last is None or last.epoch != epoch() or not self._fits_last_plan(inputs):
            return None
        if self._cancelled or self.profiling:
            return None
        return last.run(inputs, None)

    def _run(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None = None
    ) -> Sequence[Any]:
        last = self.ready(inputs)
        if last is None:
            return self.run_split(inputs, outputs)
        if self.profiling:
            return self._run_timed(last, inputs, outputs)
        return last.run(inputs, outputs)

    def ready(self, inputs: Sequence[Any]) -> BoundPlan | None:
        """Return what runs these inputs as a whole, its weights fresh; None: they run in parts."""
        last, snapshot = self._last, pinned_snapshot()
        assert snapshot is not None, "a request pins one"
        shapes = tuple([item.shape for item in inputs])
        if last is not None and last.epoch == snapshot.epoch and shapes == self._shapes:
            return last
        # Shapes that take turns, as those of a sequence's items do, come back to their programs.
        # One that is kept by shapes alone has needed no contents.
        key: Key = shapes
        known = self._bound.get(key)
        if known is None and self.region.depends_on_values:
            key = self.region.key(inputs)
            known = self._bound.get(key)
        if known is not None and known.epoch == snapshot.epoch:
            self._bound.move_to_end(key)
            return self._select(known, key)
        if self.region.split_region() is not None:
            return None
        with paused_gc(), limited(seconds=self.region.options.compile_seconds):
            return self._resolve(inputs, snapshot)

    def run_split(
        self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        """Run a region that is split."""
        split = self.region.split_region()
        assert split is not None, "`ready` found it split"
        results = self._executor(split).run(inputs)
        return results if outputs is None else fill_outputs(results, outputs)

    def _fits_last_plan(self, inputs: Sequence[Any]) -> bool:
        """Return whether the plan that ran last fits these inputs without a look at values."""
        if len(inputs) == 1:
            return bool(inputs[0].shape == self._shapes[0])
        return tuple([item.shape for item in inputs]) == self._shapes

    def _resolve(
        self, inputs: Sequence[Any], snapshot: Snapshot, *, as_a_whole: bool = False
    ) -> BoundPlan | None:
        """Return what the op's strategies find, bound; None if the region is split."""
        region = self.region
        plan = region.resolve(inputs, snapshot, as_a_whole=as_a_whole)
        if isinstance(plan, SplitRegion):
            return None
        key = region.key(inputs)
        bound = self._bound.get(key)
        if bound is None or bound.plan is not plan:
            bound = self._bind(plan)
            self._bound[key] = bound
            while len(self._bound) > region.options.plans:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        if bound.epoch != snapshot.epoch:
            bound.refresh(snapshot)
        return self._select(bound, key)

    def _select(self, bound: BoundPlan, key: Key) -> BoundPlan:
        """Note what runs inputs of this key."""
        self._shapes = key
        self._last = bound if len(key) == self._data_count else None
        self._active = bound
        if self._cancelled:  # before `cancel` could know what is to be ended
            raise RequestCancelledError("the request was cancelled while it ran")
        return bound

    def _executor(self, split: SplitRegion) -> Executor:
        """Return what runs the parts one after the other in this session."""
        if self._split is None or self._split[0] is not split:
            self._cancel_split.sessions.clear()
            self._split = (
                split,
                Executor(
                    split,
                    profiling=self.profiling,
                    cancel=self._cancel_split,
                    home=self.region.device,
                ),
            )
        return self._split[1]

    def _bind(self, plan: object) -> BoundPlan:
        """Return what the op's strategies have found, bound to this session's memory."""
        raise NotImplementedError

    def _run_timed(
        self, bound: BoundPlan, inputs: Sequence[Any], outputs: Sequence[Array | None] | None
    ) -> Sequence[Any]:
        results, spans = bound.run_timed(inputs, outputs)
        self._profile = with_times(bound.entries, spans, threading.get_ident())
        return results

    def profile(self) -> list[ProfileEntry]:
        """Return what each step of the last run took."""
        if self._split is not None:
            return self._split[1].profile()
        return list(self._profile)
