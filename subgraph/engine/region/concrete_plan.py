"""Strategy: a plan made for exactly the shapes, and the contents that decide, of the request."""

from __future__ import annotations

from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import PlanOptions, ReferenceStep
from subgraph.engine.region.strategy import Request


class ConcretePlan:
    """Plans the graph for the request alone; the last strategy, which serves all or raises."""

    name = "one plan"
    cacheable = True

    def __init__(self, options: PlanOptions) -> None:
        """Plan with these options."""
        self._options = options

    def resolve(self, request: Request) -> object:
        """Return a new plan; what it leaves to the reference is counted.

        Raises:
            UnknownShapeError: A shape follows from values that are not known.
            ShapeError: The inputs do not fit the graph.
        """
        plan = make_plan(request.graph, request.types, request.specialized_values, self._options)
        for item in plan.items:
            if isinstance(item, ReferenceStep):
                request.note("kernel", f"{item.node.op_type}: {item.reason}")
        return plan

    def forget(self) -> None:
        """Do nothing: the plans are remembered elsewhere."""
