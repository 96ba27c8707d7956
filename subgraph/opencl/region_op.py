"""The subgraph op of OPENCL: plans bound to an OpenCL device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import attrs

from subgraph.engine.planner.plan_types import Plan
from subgraph.engine.region.region_op import Fuse, RegionOp, RegionOptions, without_weights
from subgraph.engine.region.region_session import RegionSession
from subgraph.graph.graph import Graph
from subgraph.graph.limits import memory_limit
from subgraph.graph.types import Array
from subgraph.opencl.executable_plan import ClExecutablePlan, Pending
from subgraph.opencl.runtime import Runtime
from subgraph.operators.subgraph_op import EnqueueFinish, ProfileEntry, Session, SubgraphOp


class ClSubgraphOp(RegionOp):
    """Runs a graph by plans of kernel launches on one OpenCL device."""

    device = "OPENCL"

    def __init__(
        self, subgraph: Graph, options: RegionOptions, fuse: Fuse, runtime: Runtime
    ) -> None:
        """Prepare to run a graph on the device of ``runtime``; see `RegionOp`."""
        super().__init__(subgraph, options, fuse)
        self.runtime = runtime

    def part_op(self, subgraph: Graph) -> SubgraphOp:
        """Return the op for a part of the fused graph."""
        op = ClSubgraphOp(subgraph, self.options, without_weights, self.runtime)
        op.device = self.device
        return op

    def session(self) -> Session:
        """Return a session with buffers and a queue of its own."""
        return ClSession(self)


def _buffer_bytes(plan: Plan) -> int:
    """Return the bytes of the buffers of a plan."""
    operands = [*plan.inputs, *plan.outputs]
    return plan.arena_bytes + sum(operand.nbytes for operand in operands if operand is not None)


class ClSession(RegionSession):
    """Runs a region for one request."""

    def __init__(self, op: ClSubgraphOp) -> None:
        """Open a session; buffers come with the first run."""
        super().__init__(op)
        self._cl_op = op

    def _bind(self, plan: object) -> ClExecutablePlan:
        assert isinstance(plan, Plan), "the strategies of OPENCL return no others"
        # Each plan has buffers of its own; those of other shapes count against the budget, too.
        wanted, limit = _buffer_bytes(plan), memory_limit()
        while self._bound and wanted + self._held_bytes() > limit:
            self._bound.popitem(last=False)
            # These references would keep a dropped plan and its buffers alive.
            self._last = self._active = None
        op = self._cl_op
        return ClExecutablePlan(plan, op.runtime, op.weights, op.options.profiling)

    def _held_bytes(self) -> int:
        """Return the bytes of the buffers of all plans of this session."""
        return sum(_buffer_bytes(cast("Plan", bound.plan)) for bound in self._bound.values())

    def enqueue_finish(self) -> EnqueueFinish | None:
        """Return functions that enqueue a run, and that wait for it and return its results."""
        return None if self.profiling else (self._enqueue, self._finish)

    def _enqueue(self, inputs: Sequence[Any], outputs: Sequence[Array | None] | None) -> Any:
        ready = self.ready(inputs)
        if ready is None:
            return self.run_split(inputs, outputs)
        bound = cast("ClExecutablePlan", ready)
        return bound, bound.enqueue(inputs, outputs)

    def _finish(self, enqueued: Any) -> Sequence[Any]:
        if isinstance(enqueued, tuple):
            bound, pending = cast("tuple[ClExecutablePlan, Pending]", enqueued)
            return bound.finish(pending)
        return cast("Sequence[Any]", enqueued)

    def profile(self) -> list[ProfileEntry]:
        """Return the profile entries of the last measured run, with times of the device."""
        device = self._cl_op.device
        return [
            attrs.evolve(e, device=device, thread=e.thread if e.kernel == "reference" else 0)
            for e in super().profile()
        ]
