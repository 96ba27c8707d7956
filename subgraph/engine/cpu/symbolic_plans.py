"""Strategy: a plan for all sizes of the dimensions that differ from call to call."""

from __future__ import annotations

from typing import Any

from subgraph.engine.executable.symbolic_plan import (
    InputAxis,
    PlanInstance,
    SymbolicPlan,
    Types,
    make_symbolic_plan,
)
from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.engine.region.strategy import Declined, Request, Strategy
from subgraph.errors import described
from subgraph.graph.graph import Graph
from subgraph.weights.cache import WeightCache

# Latest requests whose shapes are compared to find the dimensions that differ (estimate).
_MAX_SEEN = 4
_MAX_PLANS = 16  # cached symbolic plans of a region, of which the oldest is dropped (estimate)
# After more symbolic plans in a row that served no second shape, no further ones are made
# (estimate).
_MAX_UNUSED_IN_A_ROW = 8


class SymbolicPlans(Strategy):
    """The symbolic plans of one graph, made when shapes differ and used for the shapes after these.

    Attributes:
        seen: Types of the inputs of the latest requests that no symbolic plan served.
        made: Number of symbolic plans that were made.
        used: Number of requests that an existing symbolic plan served.
    """

    name = "symbolic plan"
    cacheable = True

    def __init__(self, options: PlanOptions, weights: WeightCache) -> None:
        """Begin without plans.

        Args:
            options: Options of plans.
            weights: The op's view of the weight cache.
        """
        self.made = 0
        self.used = 0
        self.seen: list[Types] = []
        self._options = options
        self._weights = weights
        self._graph: Graph | None = None
        self._plans: list[SymbolicPlan] = []
        self._unused_in_a_row = 0

    def begin(self, graph: Graph, types: Types) -> None:
        """Take the types of a request that was not served here, so that the next one may differ.

        Args:
            graph: The graph.
            types: Types of its inputs.
        """
        self.forget()
        self._graph = graph
        self.seen.append(types)

    def resolve(self, request: Request) -> PlanInstance | None:
        """Return an instance for the types of a request; None if no dimension has differed yet.

        Raises:
            Declined: There is no symbolic plan for these types, and none can be made.
        """
        graph = request.graph
        if request.specialized_values:
            raise Declined("shapes depend on the content of inputs")
        if graph is not self._graph:
            self.forget()
            self._graph = graph
        for plan in self._plans:
            if not plan.versions.are_current():
                continue
            instance = plan.instance(request.dtypes, request.shapes)
            if instance is not None:
                self._plans.remove(plan)
                self._plans.insert(0, plan)
                self.used += 1
                self._unused_in_a_row = 0
                return instance
        types = request.types
        self._remember(types)
        groups = self.groups()
        if not groups:
            return None
        if self._unused_in_a_row > _MAX_UNUSED_IN_A_ROW:
            raise Declined(
                f"none of the last {_MAX_UNUSED_IN_A_ROW} symbolic plans served another shape"
            )
        self._unused_in_a_row += 1
        try:
            made = make_symbolic_plan(graph, types, groups, self._options, self._weights)
        except Exception as error:  # lowerings that do not support symbolic sizes fail in any way
            raise Declined(described(error)) from error
        if made is None:
            raise Declined("the reference computes a part of the plan")
        self.made += 1
        self._plans = [made, *self._plans[: _MAX_PLANS - 1]]
        return made.instance(request.dtypes, request.shapes)

    def forget(self) -> None:
        """Drop all symbolic plans."""
        self._graph, self._plans, self.seen, self._unused_in_a_row = None, [], [], 0

    def _remember(self, types: Types) -> None:
        forms = [(type_.dtype, type_.rank) for type_ in types]
        if self.seen and [(t.dtype, t.rank) for t in self.seen[-1]] != forms:
            self.seen.clear()
        self.seen = [*self.seen[-_MAX_SEEN + 1 :], types]

    def groups(self) -> list[list[InputAxis]]:
        """Return the dimensions that differ among the latest shapes, grouped by equal sizes."""
        groups: dict[tuple[Any, ...], list[InputAxis]] = {}
        for position, type_ in enumerate(self.seen[-1]):
            for axis in range(type_.rank or 0):
                sizes = tuple((types[position].shape or ())[axis] for types in self.seen)
                if len(set(sizes)) > 1:
                    groups.setdefault(sizes, []).append((position, axis))
        return list(groups.values())
