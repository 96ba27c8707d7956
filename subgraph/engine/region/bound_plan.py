"""A plan bound to the memory of one request, as sessions use it on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from subgraph.engine.planner.step_profile import Span
from subgraph.graph.parameters import Snapshot
from subgraph.operators.subgraph_op import ProfileEntry


class BoundPlan(Protocol):
    """A plan with its memory; runs for one request at a time.

    Attributes:
        epoch: Snapshot that its weights are of, None before the first.
    """

    epoch: int | None

    @property
    def plan(self) -> object:
        """What was bound."""
        ...

    @property
    def entries(self) -> tuple[ProfileEntry, ...]:
        """What is known of every step for a profile."""
        ...

    def refresh(self, snapshot: Snapshot) -> None:
        """Take the weights as a snapshot, which is pinned, has them."""
        ...

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> list[Any]:
        """Run; the weights are fresh."""
        ...

    def run_timed(
        self, inputs: Sequence[Any], outputs: Sequence[Any] | None
    ) -> tuple[list[Any], list[Span]]:
        """Run, and return when each step began and ended, too."""
        ...

    def cancel(self) -> None:
        """End a run before its next step, if that can be done."""
        ...

    def clear(self) -> None:
        """Forget `cancel`."""
        ...
