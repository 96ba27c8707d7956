"""Strategy: a cached plan of an earlier request with the same shapes and specialized values."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, cast

from subgraph.engine.region.specialized_inputs import Key
from subgraph.engine.region.strategy import Request, Strategy


class KnownPlans(Strategy):
    """The cache of plans of a region, for all its sessions; the least recently used are dropped.

    A plan that depends on the content of a parameter is not used after the parameter has changed.
    """

    name = "known plan"

    def __init__(self, most: int) -> None:
        """Cache up to ``most`` plans."""
        self._most = most
        self._plans: OrderedDict[Key, Any] = OrderedDict()

    def resolve(self, request: Request) -> object | None:
        """Return the plan of the request's key; None if none fits the present parameters."""
        plan = self._plans.get(request.key)
        if plan is None or not plan.versions.are_current():
            return None
        self._plans.move_to_end(request.key)
        return cast("object", plan)

    def add(self, key: Key, plan: Any) -> None:
        """Add a plan; the least recently used one is dropped if there are too many."""
        self._plans[key] = plan
        while len(self._plans) > self._most:
            self._plans.popitem(last=False)

    def plans(self) -> list[Any]:
        """Return all plans, the least recently used one first."""
        return list(self._plans.values())

    def forget(self) -> None:
        """Drop all plans."""
        self._plans.clear()
