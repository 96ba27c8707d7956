"""Strategy: a plan that an earlier request with the same shapes and contents has used."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from subgraph.engine.region.specialized_inputs import Key
from subgraph.engine.region.strategy import Request


class KnownPlans:
    """The plans that were used last, for all sessions of a region.

    A plan whose parameters have changed since, as far as it depends on their content, is made anew.
    """

    name = "known plan"
    cacheable = False

    def __init__(self, most: int) -> None:
        """Remember up to ``most`` plans."""
        self._most = most
        self._plans: OrderedDict[Key, Any] = OrderedDict()

    def resolve(self, request: Request) -> object | None:
        """Return the plan of the request's key, None if there is none that holds."""
        plan = self._plans.get(request.key)
        if plan is None or not plan.versions.are_current():
            return None
        self._plans.move_to_end(request.key)
        found: object = plan
        return found

    def add(self, key: Key, plan: Any) -> None:
        """Remember a plan, instead of the one that was used longest ago if there are many."""
        self._plans[key] = plan
        while len(self._plans) > self._most:
            self._plans.popitem(last=False)

    def plans(self) -> list[Any]:
        """Return all plans, the one that was used longest ago first."""
        return list(self._plans.values())

    def forget(self) -> None:
        """Drop all plans."""
        self._plans.clear()
