"""Sessions of regions: a session gets plans from the op and runs them in memory of its request.

Plans belong to the op (`region_op`), and all sessions share them. A session owns its memory and the
executable plans bound to it, which it caches for the most recently used shapes. An executor of the
session runs a region that is split.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import is_not, itemgetter
from typing import Any, Protocol

from subgraph.engine.planner.step_profile import Span, with_times
from subgraph.engine.region.region_op import RegionOp
from subgraph.engine.region.specialized_inputs import Key
from subgraph.engine.region.split_plan import SplitRegion
from subgraph.errors import RequestCancelledError
from subgraph.graph.limits import limited
from subgraph.graph.parameters import Snapshot, epoch, pinned, pinned_snapshot
from subgraph.graph.result_arrays import fill_outputs
from subgraph.graph.types import Array
from subgraph.operators.subgraph_op import ProfileEntry, Repeat, RunInputs, Session
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.executor import Executor
from subgraph.system.gc_control import paused_gc


class AnyExecutablePlan(Protocol):
    """An executable plan: it has memory of its request, and runs for one request at a time.

    Attributes:
        epoch: Epoch of the snapshot from which the weights were taken; None before `refresh`.
    """

    epoch: int | None

    @property
    def plan(self) -> object:
        """The plan that was bound."""
        ...

    @property
    def entries(self) -> tuple[ProfileEntry, ...]:
        """The profile entry of every step, with 0 seconds."""
        ...

    def refresh(self, snapshot: Snapshot) -> None:
        """Take the weights as they are in a snapshot, which is pinned."""
        ...

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> list[Any]:
        """Run the plan; `refresh` was called for the present snapshot.

        Args:
            inputs: Arrays for the inputs that are not weights.
            outputs: Arrays to write into; None, or None for one of them: new arrays.
        """
        ...

    def run_timed(
        self, inputs: Sequence[Any], outputs: Sequence[Any] | None
    ) -> tuple[list[Any], list[Span]]:
        """Run; return the results, and begin and end of each step in seconds."""
        ...

    def cancel(self) -> None:
        """End a run before its next step, if the device can."""
        ...

    def clear(self) -> None:
        """Revoke `cancel`."""
        ...


def _picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function that returns the items of a list at these positions."""
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
        self._active: AnyExecutablePlan | None = None  # the plan that runs now or ran last
        self._cancelled = False
        self.profiling = op.options.profiling
        self._bound: OrderedDict[Key, AnyExecutablePlan] = OrderedDict()
        self._profile: list[ProfileEntry] = []
        self._split: tuple[SplitRegion, Executor] | None = None
        self._cancel_split = Cancel()
        self._last: AnyExecutablePlan | None = None
        # Key of the plan that ran last; `_last` is that plan if the key consists of shapes only.
        self._shapes: Key = ()
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
            # A call outside of a request pins its own snapshot, so that all weights of the run are
            # of one epoch.
            with pinned(Snapshot(self.region.parameters)):
                return self(inputs, outputs)
        if self._expected:
            if any(map(is_not, self._weights_of(inputs), self._expected)):
                # The caller passes another array for a weight, in this run alone.
                results = self.region.by_reference(inputs)
                return results if outputs is None else fill_outputs(results, outputs)
            inputs = self._data_of(inputs)
        return self._run(inputs, outputs)

    def measure(self) -> None:
        """Measure every step from now on."""
        self.profiling = True

    def cancel(self) -> None:
        """End the run before its next step."""
        self._cancelled = True  # first, so that plans selected from now on do not run
        self._cancel_split.request()
        bound = self._active
        if bound is not None:
            bound.cancel()

    def resume(self) -> None:
        """Revoke `cancel`, for later runs."""
        if self._cancelled:
            self._cancelled = False
            self._cancel_split.reset()
            if self._active is not None:
                self._active.clear()
            # A request to cancel may have reached a plan that did not run; without this, its next
            # run would end early. The active plan may no longer be cached, so it is cleared by
            # itself.
            for bound in self._bound.values():
                bound.clear()

    def prepare(self, inputs: Sequence[Any]) -> None:
        """Plan, compile and allocate for inputs of these shapes, without running."""
        snapshot = Snapshot(self.region.parameters)
        with pinned(snapshot), paused_gc(), limited(seconds=self.region.options.compile_seconds):
            self._resolve(inputs, snapshot, as_a_whole=True)

    def run_inputs(self) -> RunInputs:
        """Return a function that runs on the inputs that are not weights, in a pinned snapshot."""
        return self._run

    def repeat(self) -> Repeat:
        """Return a function that runs again on the same shapes and weights."""
        return self._repeat

    def _repeat(self, inputs: Sequence[Any]) -> Sequence[Any] | None:
        last = self._last
        if last is None or last.epoch != epoch() or not self._fits_last_plan(inputs):
            return None
        # The whole run raises the cancellation, or measures its steps.
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

    def ready(self, inputs: Sequence[Any]) -> AnyExecutablePlan | None:
        """Return an executable plan for these inputs, with present weights; None: it is split."""
        last, snapshot = self._last, pinned_snapshot()
        assert snapshot is not None, "a request pins one"
        shapes = tuple([item.shape for item in inputs])
        if last is not None and last.epoch == snapshot.epoch and shapes == self._shapes:
            return last
        # Shapes that alternate, such as those of the items of a sequence, find their plans in the
        # cache. A plan whose key consists of shapes only depends on no values or dtypes.
        key: Key = shapes
        known = self._bound.get(key)
        if known is None:
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
        """Run the parts of a region that is split."""
        split = self.region.split_region()
        assert split is not None, "`ready` found it split"
        executor = self._executor(split)
        results = executor.run(inputs)
        if self.profiling:
            self._profile = executor.profile()
        return results if outputs is None else fill_outputs(results, outputs)

    def _fits_last_plan(self, inputs: Sequence[Any]) -> bool:
        """Return whether the plan that ran last fits these inputs, by their shapes alone."""
        if len(inputs) == 1:
            return bool(inputs[0].shape == self._shapes[0])
        return tuple([item.shape for item in inputs]) == self._shapes

    def _resolve(
        self, inputs: Sequence[Any], snapshot: Snapshot, *, as_a_whole: bool = False
    ) -> AnyExecutablePlan | None:
        """Return the plan that the op's strategies find, bound; None if the region is split."""
        region = self.region
        plan = region.resolve(inputs, snapshot, as_a_whole=as_a_whole)
        if isinstance(plan, SplitRegion):
            return None
        key = region.key(inputs)
        bound = self._bound.get(key)
        # The op may have replaced the plan of this key since it was bound, because a parameter has
        # changed on whose content it depended.
        if bound is None or bound.plan is not plan:
            bound = self._bind(plan)
            self._bound[key] = bound
            while len(self._bound) > region.options.plans:
                self._bound.popitem(last=False)
        self._bound.move_to_end(key)
        if bound.epoch != snapshot.epoch:
            bound.refresh(snapshot)
        return self._select(bound, key)

    def _select(self, bound: AnyExecutablePlan, key: Key) -> AnyExecutablePlan:
        """Make a plan the one that runs now."""
        self._shapes = key
        # A longer key has dtypes or values of inputs, which `_fits_last_plan` does not compare.
        self._last = bound if len(key) == self._data_count else None
        self._active = bound
        # `cancel` sets its flag before it reads `_active`, and this method sets `_active` before it
        # reads the flag: one of the two sees the other's write.
        if self._cancelled:  # `cancel` was called before it could find this plan
            raise RequestCancelledError("the request was cancelled while it ran")
        return bound

    def _executor(self, split: SplitRegion) -> Executor:
        """Return the executor that runs the parts of the region in this session."""
        if self._split is None or self._split[0] is not split:
            # The sessions of the previous executor would otherwise stay alive with their memory.
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

    def _bind(self, plan: object) -> AnyExecutablePlan:
        """Return a plan that the op's strategies found, bound to this session's memory."""
        raise NotImplementedError

    def _run_timed(
        self,
        bound: AnyExecutablePlan,
        inputs: Sequence[Any],
        outputs: Sequence[Array | None] | None,
    ) -> Sequence[Any]:
        results, spans = bound.run_timed(inputs, outputs)
        self._profile = with_times(bound.entries, spans, threading.get_ident())
        return results

    def profile(self) -> list[ProfileEntry]:
        """Return the profile entries of the last run that was measured."""
        return list(self._profile)
