"""Strategy: the plan that the query of the model made by its dry run, used once."""

from __future__ import annotations

from subgraph.engine.planner.dry_run import DryRun
from subgraph.engine.planner.plan_types import Plan
from subgraph.engine.region.strategy import Declined, Request, Strategy
from subgraph.graph.parameters import Versions


class DryRunPlan(Strategy):
    """The plan of the dry run that found which nodes have kernels; it serves one request."""

    name = "plan of the dry run"
    cacheable = True

    def __init__(self) -> None:
        """Begin without a dry run."""
        self._dry_run: DryRun | None = None

    def adopt(self, dry_run: DryRun) -> None:
        """Take the dry run of the region's fused graph."""
        self._dry_run = dry_run

    def resolve(self, request: Request) -> Plan | None:
        """Return the plan of the dry run; None after the first request, or without a complete run.

        Raises:
            Declined: The dry run was made for other shapes, or for other content of weights.
        """
        dry_run, self._dry_run = self._dry_run, None
        planner = None if dry_run is None else dry_run.planner
        if dry_run is None or planner is None:
            return None
        if request.specialized_values:
            raise Declined("shapes depend on the content of inputs")
        if planner.graph is not request.graph or list(dry_run.types) != request.types:
            raise Declined("the dry run was made for other shapes")
        if not Versions(planner.read_versions.items()).are_current():
            raise Declined("a weight that decides a shape has changed")
        return planner.finish()

    def forget(self) -> None:
        """Drop the dry run."""
        self._dry_run = None
