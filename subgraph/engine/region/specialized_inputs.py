"""Specialized inputs: their values decide shapes, so that each value has plans of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.engine.planner.plan_types import UnknownShapeError
from subgraph.graph.types import dtype_of
from subgraph.operators.operator import operator_of

# Of a plan: the shape of each input, the dtypes of those without a declared type, then values as
# bytes.
Key = tuple[Any, ...]
# Different values of an input that seems to select a branch, or one of few sizes (estimate); with
# more of them it is treated as data, for which no plans are made.
_MAX_SELECTING_VALUES = 8


class SpecializedInputs:
    """The inputs of a region on whose values plans are specialized.

    An input is added when planning raises an `UnknownShapeError` that names it.
    """

    def __init__(self, untyped: Sequence[int] = ()) -> None:
        """Begin without specialized inputs: plans depend on shapes alone.

        Args:
            untyped: Positions of the inputs of which the graph states no type: a plan of another
                dtype must not read them.
        """
        self._untyped = tuple(untyped)
        self._positions: tuple[int, ...] = ()
        self._selected: tuple[UnknownShapeError, set[Key]] | None = None

    def __bool__(self) -> bool:
        return bool(self._positions)

    def forget(self) -> None:
        """Remove all inputs, for another graph."""
        self._positions, self._selected = (), None

    def of(self, inputs: Sequence[Any]) -> dict[int, Any]:
        """Return copies of the values of the specialized inputs, by position."""
        # The plan keeps the values, and the caller may change its arrays after the run.
        return {k: np.array(inputs[k]) for k in self._positions}

    def key(self, inputs: Sequence[Any]) -> Key:
        """Return the key of a plan: shapes, dtypes that differ, values of specialized inputs."""
        key: list[Any] = [item.shape for item in inputs]
        key += [dtype_of(inputs[position]) for position in self._untyped]
        for position in self._positions:
            item = inputs[position]
            if isinstance(item, np.ndarray):
                key.append(item.tobytes())
        return tuple(key)

    def learn(self, error: UnknownShapeError) -> bool:
        """Add the inputs that an error names; return False if there is nothing to add."""
        more = set(error.inputs) - set(self._positions)
        if not more:
            return False
        if not error.of_all_contents or operator_of(error.node).light:
            # The traceback would keep the unfinished plan, and its arrays, alive.
            self._selected = error.with_traceback(None), set()
        # A new tuple is assigned: sessions read the positions without the region's lock.
        self._positions = tuple(sorted({*self._positions, *more}))
        return True

    def count(self, key: Key, inputs: int) -> None:
        """Count the values of inputs that seem to select one of few sizes or branches.

        Args:
            key: The key of a new plan.
            inputs: Number of shapes at the beginning of the key.

        Raises:
            UnknownShapeError: There are too many values for a plan of each.
        """
        if self._selected is not None:
            error, known = self._selected
            known.add(key[inputs:])
            if len(known) > _MAX_SELECTING_VALUES:
                self._selected = None
                raise error
