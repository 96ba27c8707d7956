"""Strategy: a plan for exactly the shapes of the request, and the values of specialized inputs."""

from __future__ import annotations

from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import PlanOptions, ReferenceStep
from subgraph.engine.region.strategy import Request, Strategy


class ConcretePlan(Strategy):
    """Plans the graph for the present shapes; the last strategy, which serves all or raises.

    It has nothing to forget: `KnownPlans` caches the plans.
    """

    name = "one plan"
    cacheable = True

    def __init__(self, options: PlanOptions) -> None:
        """Prepare to plan with these options."""
        self._options = options

    def resolve(self, request: Request) -> object:
        """Return a new plan; the operators of its reference steps are counted.

        Raises:
            UnknownShapeError: A shape follows from values that are not known.
            ShapeError: The inputs do not fit the graph.
        """
        plan = make_plan(request.graph, request.types, request.specialized_values, self._options)
        for item in plan.items:
            if isinstance(item, ReferenceStep):
                request.note("kernel", f"{item.node.op_type}: {item.reason}")
        return plan
