"""Reports: how a kernel says that an index or a count that it read is out of range.

A kernel uses the nearest value in range instead, so that nothing outside the tensors is touched,
and writes the value to the report slot of the run. The first report of a run is raised after the
run, as the error that the reference would have raised.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.types import Array

# Words of a slot: number of the report, 0 for none; the value; the least and the greatest allowed.
SLOT_WORDS: Final = 4


@attrs.frozen
class Report:
    """A report that a kernel may make; its arguments are the slot's address and a number.

    Attributes:
        where: The node, for the message.
        operand: Name of the input that holds the value.
    """

    where: str
    operand: str

    def error(self, value: int, least: int, most: int) -> ShapeError:
        """Return the error for a value that is out of range."""
        return ShapeError(
            f"{self.where}: {self.operand} holds {value}, which is outside [{least}, {most}]"
        )


class ReportSlot:
    """The memory to which the kernels of one request's program report."""

    def __init__(self, words: Array, reports: Sequence[Report]) -> None:
        """Take a slot.

        Args:
            words: The slot, int64 of `SLOT_WORDS` elements, zero.
            reports: The reports, by their numbers from 1 on.
        """
        self._words = words.data
        self._reports = tuple(reports)

    def clear(self) -> None:
        """Clear a report of a run that was ended early."""
        self._words[0] = 0

    def check(self) -> None:
        """Raise an error if a value was reported since the last check.

        Raises:
            ShapeError: A value was out of range.
        """
        number = self._words[0]
        if number:
            self._words[0] = 0
            raise self._reports[number - 1].error(*self._words[1:SLOT_WORDS])
