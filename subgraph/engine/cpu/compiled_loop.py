"""Compiled loops: the strategies that run the iterations of a loop without Python in between.

If none serves, the executor runs the iterations one by one, each as a call of the body's region.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from subgraph.engine.cpu.data_dependent_loop import DataDependentLoop
from subgraph.engine.cpu.iterations import Iterations, make_iterations
from subgraph.engine.cpu.loop_session import LoopSession, LoopStrategy
from subgraph.engine.executable.executable_plan import ExecutablePlan
from subgraph.engine.region.strategy import Declined
from subgraph.operators.subgraph_op import IterationsResult, Wiring


class _ImpossibleError(Declined):
    """The strategies after this one cannot serve either."""


class OnePlanLoop(LoopStrategy):
    """Runs the iterations of a loop whose body has one plan that fits every iteration."""

    name = "loop of one plan"

    def __init__(self, session: LoopSession, wiring: Wiring) -> None:
        """Begin without a plan; see `LoopStrategy`."""
        super().__init__(session, wiring)
        self._known: tuple[object, Iterations | None] | None = None

    def run(
        self, items: Sequence[Any], inputs: Sequence[Any], limit: int | None, first: int
    ) -> IterationsResult:
        """Run iterations by the plan of the body, if one plan fits every iteration."""
        region = self._session.region
        bound = self._session.ready(items) if region.is_one_plan else None
        if bound is None or not region.is_one_plan:
            raise Declined("the body has no one plan for these shapes")
        assert isinstance(bound, ExecutablePlan), "regions of the CPU have no others"
        if self._known is None or self._known[0] is not bound.inputs:
            self._known = bound.inputs, make_iterations(bound, self._wiring)
        iterations = self._known[1]
        if iterations is not None:
            return iterations.run(inputs, limit, first)
        if self._grows(bound):
            raise Declined("a value has another size in the next iteration")
        raise _ImpossibleError("the plan has reference steps, or values too large to be copied")

    def _grows(self, bound: ExecutablePlan) -> bool:
        """Return whether the size of a carried value differs after an iteration."""
        ports = {port.position: port for port in bound.inputs}
        return any(
            bound.outputs[output].type != ports[reader].type for output, reader in self._pairs
        )


class CompiledLoop:
    """Runs the iterations of one loop by the first strategy that does not decline."""

    def __init__(self, session: LoopSession, wiring: Wiring) -> None:
        """Prepare the strategies.

        Args:
            session: The session of the loop's body.
            wiring: How values are passed between iterations.
        """
        self._session = session
        self._items = wiring.items
        self._strategies = OnePlanLoop(session, wiring), DataDependentLoop(session, wiring)

    def __call__(
        self, inputs: Sequence[Any], limit: int | None, first: int
    ) -> IterationsResult | None:
        """Run iterations; return None if no strategy serves.

        Args:
            inputs: Inputs of the first iteration, with whole arrays for scanned inputs.
            limit: Number of the iteration before which to stop; None: until the condition is false.
            first: Number of the first iteration.
        """
        resolver = self._session.region.resolver
        if self._session.profiling:
            resolver.note("compiled loop", "runs are measured node by node")
            return None
        items = [item[0] if k in self._items else item for k, item in enumerate(inputs)]
        for strategy in self._strategies:
            try:
                result = strategy.run(items, inputs, limit, first)
            except Declined as reason:
                resolver.note(strategy.name, str(reason))
                if isinstance(reason, _ImpossibleError):
                    return None
                continue
            resolver.chosen[strategy.name] += 1
            return result
        return None
