"""Reports: how a kernel says that a value, which it took as an index or a count, is out of range.

A kernel never trusts such a value: it uses the nearest one that is in range, so that nothing
outside the tensors is touched, and writes the value to the report slot of the run. The first report
of a run stays; once the run is over it becomes the error that the reference would have raised.
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
    """What a kernel may report: two of its argument words, a slot's address and a number.

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
            reports: What the numbers in it stand for, from 1 on.
        """
        self._words = words.data
        self._reports = tuple(reports)

    def clear(self) -> None:
        """Forget what was reported by a run that did not come to its end."""
        self._words[0] = 0

    def check(self) -> None:
        """Raise the error that was reported since the last check, if there is one.

        Raises:
            ShapeError: a value was out of range.
        """
        number = self._words[0]
        if number:
            self._words[0] = 0
            raise self._reports[number - 1].error(*self._words[1:SLOT_WORDS])
