"""The argument layouts of a region's plans, made once for all sessions."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from subgraph.engine.executable.argument_layout import ArgumentLayout, make_argument_layout
from subgraph.engine.executable.symbolic_plan import PlanInstance
from subgraph.engine.planner.plan_types import Plan
from subgraph.system.forking import free_in_child
from subgraph.weights.cache import WeightCache


class ArgumentLayouts:
    """Argument layouts by plan, cached as long as the plan is referenced."""

    def __init__(self, weights: WeightCache) -> None:
        """Begin without layouts; ``weights`` is the op's view of the weight cache."""
        self._weights = weights
        self._lock = free_in_child(threading.Lock())
        self._layouts: WeakKeyDictionary[Plan, ArgumentLayout] = WeakKeyDictionary()

    def of(self, plan: Plan | PlanInstance) -> ArgumentLayout:
        """Return the argument layout of a plan."""
        if isinstance(plan, PlanInstance):
            return plan.argument_layout()
        with self._lock:
            layout = self._layouts.get(plan)
            if layout is None:
                layout = self._layouts[plan] = make_argument_layout(plan, self._weights)
            return layout

    def forget(self) -> None:
        """Drop all layouts."""
        self._layouts.clear()
