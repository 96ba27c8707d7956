"""Why ONNX Runtime and Subgraph may differ on operands that do not fit."""

from __future__ import annotations

import re
from typing import Final

import attrs

from wrong_sizes.damage import Case


@attrs.frozen
class Reason:
    """A difference that is right.

    Attributes:
        kind: Kind of the finding.
        said: Regular expression that its text holds.
        why: Why it is right.
        operators: Operators that it is about, separated by spaces; "" for all.
        damage: Regular expression that the damage holds.
    """

    kind: str
    said: str
    why: str
    operators: str = ""
    damage: str = ""

    def holds(self, kind: str, case: Case, position: int, said: str) -> bool:
        """Return whether this is the reason of a finding."""
        if kind != self.kind or not re.search(self.said, said):
            return False
        if not re.search(self.damage, case.sets[position].what):
            return False
        return not self.operators or case.node.op_type in self.operators.split()


_EXTREME = r"\] = (nan|-?inf|1e\+38)|= (nan|-?inf|1e\+38) for"
_LEFT_OPEN = "what NaN, infinities and sums beyond the dtype give is left open; sizes are judged"

REASONS: Final = (
    Reason("values", "", _LEFT_OPEN, damage=_EXTREME),
    Reason("other", "", _LEFT_OPEN, damage=_EXTREME),
    Reason("strict", "it must be 0 or 1", "the standard says nothing of other numbers"),
    Reason("lax", "division by zero", "integers divided by zero give 0, as docs/devices.md says"),
    Reason("lax", "NOT_IMPLEMENTED|NotImplemented", "it has no kernel for these dtypes or sizes"),
)


def reason(kind: str, case: Case, position: int, said: str) -> str:
    """Return why a difference is right, "" if nothing says so.

    Args:
        kind: Kind of the finding.
        case: The case.
        position: Its set of operands.
        said: Text of the finding.
    """
    return next((each.why for each in REASONS if each.holds(kind, case, position, said)), "")
