"""Reductions and running sums refuse operands that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.requirements import DEVICES, Use, floats, ints, refused, run

X = floats(4, 6)
WRONG: list[tuple[Use, str]] = [
    (Use("ReduceSum", (X, ints(0, 0)), {}), "twice"),
    (Use("ReduceMax", (X, ints(2)), {}), "axes are"),
    (Use("ReduceMean", (X, ints(-3)), {}), "axes are"),
    (Use("ArgMax", (X,), {"axis": 2}), "axis is 2"),
    (Use("ArgMin", (floats(4, 0),), {"axis": 1}), "no elements"),
    (Use("CumSum", (X, np.array(2)), {}), "axes are"),
    (Use("CumSum", (X, ints(0, 1)), {}), "axis has shape"),
    (Use("CumSum", (X, ints()), {}), "axis has shape"),
    (Use("ReduceSum", (X,), {"axes": (0, 0)}, 11), "twice"),
]

test_wrong_operands_are_refused = refused(WRONG)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "op", [f"Reduce{name}" for name in ("LogSumExp", "LogSum", "Sum", "Max", "L2", "Mean")]
)
def test_axes_that_are_a_scalar_are_one_axis(op: str, device: str) -> None:
    x = floats(2, 3) + 2
    (found,) = run(Use(op, [x, np.array(1, np.int64)]), device)
    np.testing.assert_allclose(found, run(Use(op, [x, ints(1)]), "CPU")[0], rtol=1e-6)
