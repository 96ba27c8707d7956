"""Operators that compute element by element refuse operands that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.requirements import DEVICES, Use, floats, ints, refused, run

X = floats(4, 6)
BYTES = np.ones(3, np.uint8)
TRUE = np.ones((4, 6), bool)
WRONG: list[tuple[Use, str]] = [
    (Use("Add", (X, floats(5, 6)), {}), r"\[4, 6\] and \[5, 6\] do not broadcast"),
    (Use("Mul", (X, floats(4)), {}), "do not broadcast"),
    (Use("Less", (X, floats(0)), {}), "do not broadcast"),
    (Use("Max", (X, floats(6), floats(2, 1)), {}), "do not broadcast"),
    (Use("PRelu", (X, floats(2, 4, 6)), {}), "slope has shape"),
    (Use("PRelu", (X, floats(4)), {}), "slope has shape"),
    (Use("Where", (TRUE, X, floats(5, 1)), {}), "do not broadcast"),
    (Use("Where", (X, X, X), {}), "condition is float32"),
    (Use("Clip", (X, floats(2), floats(3)), {}), r"min has shape \[2\]"),
    (Use("Clip", (X, floats(1)[0], floats(0)), {}), r"max has shape \[0\]"),
    (Use("BitShift", (BYTES, BYTES), {"direction": "UP"}), "direction is 'UP'"),
    (Use("Add", (X, floats(6)), {}, 6), "broadcast is 0"),
    (Use("Add", (X, floats(5)), {"broadcast": 1}, 6), "B has shape"),
    (Use("Add", (X, floats(4)), {"broadcast": 1, "axis": 1}, 6), "B has shape"),
    (Use("Add", (X, floats(4)), {"broadcast": 1, "axis": 2}, 6), "axis is 2"),
    (Use("Add", (X, floats(4, 6)), {"broadcast": 1, "axis": 1}, 6), "B has rank 2"),
    (Use("PRelu", (floats(2, 3, 4), floats(4)), {}, 6), "slope has shape"),
    (Use("Max", (X, floats(6)), {}, 6), "input 1 has shape"),
]

test_wrong_operands_are_refused = refused(WRONG)


@pytest.mark.parametrize("device", DEVICES)
def test_negative_powers_of_whole_numbers(device: str) -> None:
    base, exponent = ints(1, -1, -1, 2, -3), ints(-5, -2, -3, -1, -(2**63))
    np.testing.assert_array_equal(run(Use("Pow", (base, exponent)), device)[0], [1, 1, -1, 0, 0])
