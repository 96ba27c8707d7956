"""Compiled loops: the iterations of a loop are run without Python in between.

A loop is compiled if its body has one plan that fits every iteration. The executor runs the
iterations of all other loops one by one, each as a call of the body's region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.engine.cpu.iterations import Iterations, make_iterations
from subgraph.engine.executable.executable_plan import ExecutablePlan
from subgraph.engine.region.region_session import RegionSession
from subgraph.engine.region.strategy import Declined
from subgraph.operators.subgraph_op import IterationsResult, Wiring

_NAME = "compiled loop"  # in counters and logs


class CompiledLoop:
    """Runs the iterations of one loop by the plan of its body."""

    def __init__(self, session: RegionSession, wiring: Wiring) -> None:
        """Begin without a plan.

        Args:
            session: The session of the loop's body.
            wiring: How values are passed between iterations.
        """
        self._session = session
        self._wiring = wiring
        # The executable plan of the iterations, how often it had been rebound, and the iterations.
        self._known: tuple[ExecutablePlan, int, Iterations] | None = None

    def __call__(self, inputs: Sequence[Any], limit: int | None) -> IterationsResult | None:
        """Run all iterations; return None if the loop cannot be compiled.

        Args:
            inputs: Inputs of the first iteration, with whole arrays for scanned inputs.
            limit: Most iterations; None: until the condition is false.
        """
        resolver = self._session.region.resolver
        try:
            iterations = self._iterations(inputs)
        except Declined as reason:
            resolver.note(_NAME, str(reason))
            return None
        result = iterations.run(inputs, limit)
        resolver.chosen[_NAME] += 1
        return result

    def _iterations(self, inputs: Sequence[Any]) -> Iterations:
        """Return the iterations of the plan for these inputs.

        Raises:
            Declined: The loop cannot be compiled for these inputs.
        """
        session = self._session
        if session.profiling:
            raise Declined("runs are measured node by node")
        scanned = self._wiring.items
        items = [item[0] if k in scanned else item for k, item in enumerate(inputs)]
        bound = session.ready(items) if session.region.is_one_plan else None
        if bound is None or not session.region.is_one_plan:
            raise Declined("the body has no one plan for these shapes")
        assert isinstance(bound, ExecutablePlan), "regions of the CPU have no others"
        known = self._known
        # An executable plan may have been bound to other shapes since, which changes its staging
        # buffers, and back to these.
        if known is None or known[:2] != (bound, bound.rebinds):
            known = self._known = bound, bound.rebinds, make_iterations(bound, self._wiring)
        return known[2]
