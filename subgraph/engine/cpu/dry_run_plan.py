"""Strategy: the plan that the query of the model has begun, once."""

from __future__ import annotations

from subgraph.engine.planner.dry_run import Trial
from subgraph.engine.planner.plan_types import Plan
from subgraph.engine.region.strategy import Declined, Request
from subgraph.graph.parameters import Versions


class DryRunPlan:
    """The plan of the dry run that found which nodes have kernels; it serves one request."""

    name = "plan of the dry run"
    remembered = True

    def __init__(self) -> None:
        """Begin without one."""
        self._trial: Trial | None = None

    def adopt(self, trial: Trial) -> None:
        """Take the dry run of the region's fused graph."""
        self._trial = trial

    def resolve(self, request: Request) -> Plan | None:
        """Return the plan of the dry run, None after the first request or if there was none.

        Raises:
            Declined: It was made for other shapes, or for other content of weights.
        """
        trial, self._trial = self._trial, None
        planner = None if trial is None else trial.planner
        if trial is None or planner is None:
            return None
        if request.contents:
            raise Declined("shapes depend on the content of inputs")
        if planner.graph is not request.graph or list(trial.types) != request.types:
            raise Declined("the dry run was made for other shapes")
        if not Versions(planner.guards.items()).are_current():
            raise Declined("a weight that decides a shape has changed")
        return planner.finish()

    def forget(self) -> None:
        """Drop it."""
        self._trial = None
