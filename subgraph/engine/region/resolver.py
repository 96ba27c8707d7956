"""The resolver: finds the plan for a call of a region by asking strategies in order.

See docs/running_a_region.md for the whole order and an example of each strategy.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from subgraph.engine.planner.plan_types import UnknownShapeError
from subgraph.engine.region.known_plans import KnownPlans
from subgraph.engine.region.specialized_inputs import SpecializedInputs
from subgraph.engine.region.strategy import Declined, Request, Strategy
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Snapshot

_LOG = logging.getLogger("subgraph.engine")
# Distinct causes that are counted one by one (estimate); later ones are counted together.
_MAX_CAUSES = 64


class Resolver:
    """Finds the plan for each call of a region, and counts which strategies served or declined.

    Attributes:
        strategies: The strategies, in the order in which they are asked.
        specialized_inputs: The inputs whose values decide shapes.
        chosen: How many requests each strategy served, by its name.
    """

    def __init__(
        self,
        name: str,
        graph_of: Callable[[], Graph],
        strategies: Sequence[Strategy],
        known: KnownPlans,
        dtypes: Sequence[str | None],
    ) -> None:
        """Take the strategies of a region.

        Args:
            name: The region's name, for logs.
            graph_of: Returns the fused graph for the present parameters.
            strategies: The strategies, in the order in which they are asked.
            known: The one among them that caches the plans of the others.
            dtypes: The dtype that the graph states for each input, None if it states none.
        """
        self._name = name
        self._graph_of = graph_of
        self.strategies = strategies
        self._known = known
        self._dtypes = dtypes
        self.specialized_inputs = SpecializedInputs([k for k, d in enumerate(dtypes) if d is None])
        self.chosen: Counter[str] = Counter()
        self._declined: Counter[tuple[str, str]] = Counter()

    def resolve(
        self, inputs: Sequence[Any], snapshot: Snapshot, *, as_a_whole: bool = False
    ) -> object:
        """Return the plan, or split region, for a call; the caller holds the region's lock.

        Args:
            inputs: Arrays for the inputs that are not weights.
            snapshot: The parameters as the call has to see them; it is pinned.
            as_a_whole: Whether the region must not be split.

        Raises:
            UnknownShapeError: The region cannot be planned as a whole, and must not be split.
            ShapeError: The inputs do not fit the graph.
        """
        obstacle: UnknownShapeError | None = None
        while True:
            request = Request(
                self._graph_of,
                self.specialized_inputs,
                self._dtypes,
                inputs,
                snapshot,
                obstacle,
                self.note,
            )
            try:
                return self._ask(request)
            except UnknownShapeError as error:
                # All strategies are asked again with the values. This ends, because every error
                # that is accepted adds an input.
                if self.specialized_inputs.learn(error):
                    continue
                # A second obstacle would come from a region that was split already; splitting it
                # again would not help.
                if as_a_whole or obstacle is not None:
                    raise
                self.note("one plan", str(error))
                obstacle = error

    def _ask(self, request: Request) -> object:
        """Return the plan of the first strategy that serves a request."""
        for strategy in self.strategies:
            try:
                found = strategy.resolve(request)
            except Declined as reason:
                self.note(strategy.name, str(reason))
                continue
            if found is None:
                continue
            if strategy.cacheable:
                # Counting may raise; the plan of one value too many is then not cached.
                self.specialized_inputs.count(request.key, len(request.inputs))
                self._known.add(request.key, found)
            self.chosen[strategy.name] += 1
            return found
        raise AssertionError("the last strategy plans, or raises")

    def note(self, strategy: str, cause: str) -> None:
        """Count that a strategy declined, and log a cause that is new.

        Args:
            strategy: Its name.
            cause: The reason. The strategy that serves instead is counted in `chosen`.
        """
        key = strategy, cause
        if key not in self._declined and len(self._declined) >= _MAX_CAUSES:
            key = strategy, "other causes"
        if key not in self._declined:
            _LOG.info("region %r: %s declined: %s", self._name, strategy, cause)
        self._declined[key] += 1

    def report(self) -> dict[str, Any]:
        """Return the counts: ``chosen`` by strategy, ``declined`` by strategy and cause."""
        declined: dict[str, dict[str, int]] = {}
        for (strategy, cause), count in self._declined.items():
            declined.setdefault(strategy, {})[cause] = count
        return {"chosen": dict(self.chosen), "declined": declined}

    def forget(self) -> None:
        """Drop all plans of the fused graph."""
        self.specialized_inputs.forget()
        for strategy in self.strategies:
            strategy.forget()
