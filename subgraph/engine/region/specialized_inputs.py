"""The inputs whose content decides shapes: plans are then made for each content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.plan_types import UnknownShapeError
from subgraph.runtime.fast_ops import gives_size

Key = tuple[Any, ...]
# Contents of an input that seems to select a branch, or one of few sizes, before it is data.
_MAX_SELECTING_VALUES = 8


class SpecializedInputs:
    """Which inputs of a region decide shapes by their content."""

    def __init__(self) -> None:
        """Begin with none: shapes alone decide."""
        self._positions: tuple[int, ...] = ()
        self._selected: tuple[UnknownShapeError, set[Key]] | None = None

    def __bool__(self) -> bool:
        return bool(self._positions)

    def forget(self) -> None:
        """Begin anew, for another graph."""
        self._positions, self._selected = (), None

    def of(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """Return copies of the contents that decide, by the input's position."""
        return {k: np.array(inputs[k]) for k in self._positions}

    def key(self, inputs: Sequence[Any]) -> Key:
        """Return what distinguishes plans: all shapes, then the contents that decide."""
        key: list[Any] = [item.shape for item in inputs]
        for position in self._positions:
            item = inputs[position]
            if isinstance(item, np.ndarray):
                key.append(item.tobytes())
        return tuple(key)

    def learn(self, error: UnknownShapeError) -> bool:
        """Let the inputs that an error names decide from now on; False if all of them do."""
        more = set(error.inputs) - set(self._positions)
        if not more:
            return False
        if not error.of_all_contents or gives_size(error.node):
            # Its traceback would keep the plan that was begun, and its arrays.
            self._selected = error.with_traceback(None), set()
        self._positions = tuple(sorted({*self._positions, *more}))
        return True

    def count(self, key: Key, inputs: int) -> None:
        """Count the contents of inputs that seemed to select one of few.

        Args:
            key: The key of a new plan.
            inputs: How many of its first items are shapes.

        Raises:
            UnknownShapeError: There are too many for a plan of each.
        """
        if self._selected is not None:
            error, known = self._selected
            known.add(key[inputs:])
            if len(known) > _MAX_SELECTING_VALUES:
                self._selected = None
                raise error
