"""The interface of executable plans that sessions of regions use, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from subgraph.engine.planner.step_profile import Span
from subgraph.graph.parameters import Snapshot
from subgraph.operators.subgraph_op import ProfileEntry


class AnyExecutablePlan(Protocol):
    """An executable plan: it has memory of its request, and runs for one request at a time.

    Attributes:
        epoch: Epoch of the snapshot from which the weights were taken; None before `refresh`.
    """

    epoch: int | None

    @property
    def plan(self) -> object:
        """The plan that was bound."""
        ...

    @property
    def entries(self) -> tuple[ProfileEntry, ...]:
        """The profile entry of every step, with 0 seconds."""
        ...

    def refresh(self, snapshot: Snapshot) -> None:
        """Take the weights as they are in a snapshot, which is pinned."""
        ...

    def run(self, inputs: Sequence[Any], outputs: Sequence[Any] | None) -> list[Any]:
        """Run the plan; `refresh` was called for the present snapshot.

        Args:
            inputs: Arrays for the inputs that are not weights.
            outputs: Arrays to write into; None, or None for one of them: new arrays.
        """
        ...

    def run_timed(
        self, inputs: Sequence[Any], outputs: Sequence[Any] | None
    ) -> tuple[list[Any], list[Span]]:
        """Run; return the results, and begin and end of each step in seconds."""
        ...

    def cancel(self) -> None:
        """End a run before its next step, if the device can."""
        ...

    def clear(self) -> None:
        """Revoke `cancel`."""
        ...
