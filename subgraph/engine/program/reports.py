"""Reports: how a kernel says that an index or a count among its inputs is out of range.

Kernels cannot raise. A kernel goes on with the nearest value in range, so that nothing outside the
tensors is touched, and writes the bad value to the report slot of the request. After the run the
first report of the slot is raised as an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import attrs

from subgraph.errors import ShapeError
from subgraph.graph.types import Array

# Words of a slot: number of the report, 0 for none; the bad value; the least and greatest allowed.
SLOT_WORDS: Final = 4


@attrs.frozen
class Report:
    """A report that a step may make. Its two argument words are the slot's address and its number.

    Attributes:
        where: Description of the node, with which the message begins.
        operand: Name of the input that holds the value.
    """

    where: str
    operand: str

    def error(self, value: int, least: int, most: int) -> ShapeError:
        """Return the error for a value that is out of range.

        Args:
            value: The value that the kernel read.
            least: Least value allowed.
            most: Greatest value allowed.
        """
        return ShapeError(
            f"{self.where}: {self.operand} holds {value}, which is outside [{least}, {most}]"
        )


class ReportSlot:
    """The memory into which the kernels of one request's program write their first report."""

    def __init__(self, words: Array, reports: Sequence[Report]) -> None:
        """Use some words as a slot.

        Args:
            words: The slot: int64, `SLOT_WORDS` elements, all zero.
            reports: The program's reports, in the order of their numbers, which begin at 1.
        """
        self._words = words.data
        self._reports = tuple(reports)

    def clear(self) -> None:
        """Discard the report of a run that was cancelled."""
        self._words[0] = 0

    def check(self) -> None:
        """Raise the report that was made since the last check, if any, and discard it.

        Raises:
            ShapeError: A value was out of range.
        """
        number = self._words[0]
        if number:
            self._words[0] = 0
            raise self._reports[number - 1].error(*self._words[1:SLOT_WORDS])
