"""Operators that read and write by index refuse operands that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, floats, ints, refused, run, taken

X = floats(4, 6)


def zeros(*shape: int) -> Array:
    """Return indices of the first element."""
    return np.zeros(shape, np.int64)


WRONG: list[tuple[Use, str]] = [
    (Use("OneHot", (ints(0, 1), ints(-1)[0], floats(2)), {}), "negative"),
    (Use("OneHot", (ints(0, 1), ints(3, 3), floats(2)), {}), "depth has shape"),
    (Use("OneHot", (ints(0, 1), ints(3)[0], floats(1)), {}), "values has shape"),
    (Use("OneHot", (ints(0, 1), ints(3)[0], floats(2)), {"axis": 2}), "axis is 2"),
    (Use("Gather", (floats(5, 0, 6), ints(-7)), {"axis": 0}), "-7"),
    (Use("GatherND", (floats(5, 0), ints(1, 5).reshape(2, 1))), "outside|out of"),
    (Use("ScatterND", (floats(5, 0), ints(5).reshape(1, 1), floats(1, 0))), "outside|out of"),
    (Use("GatherElements", (floats(), zeros())), "scalar"),
    (Use("ScatterElements", (floats(), zeros(), floats())), "scalar"),
]
DATA = floats(3, 4)
WRONG_SIZES = [
    Use("ScatterElements", [DATA, zeros(3, 9), floats(3, 9)]),
    Use("ScatterElements", [DATA, zeros(2, 2), floats(1, 2)]),
    Use("ScatterND", [DATA, zeros(5, 1), floats(2, 4)]),
    Use("ScatterND", [DATA, zeros(5, 3), floats(5)]),
    Use("GatherElements", [DATA, zeros(40, 4)], {"axis": 1}),
    Use("GatherND", [DATA, zeros(2, 3)]),
    Use("GatherND", [floats(3, 0, 5), zeros(2, 3)]),
    Use("ScatterND", [floats(3, 0), zeros(2, 2), floats(2)]),
    Use("Gather", [floats(0, 4), zeros(3)]),
]
CACHE, UPDATE = floats(2, 4, 6, 3), floats(2, 4, 2, 3)
WRONG_UPDATES = [
    Use("TensorScatter", list(given), attributes)
    for given, attributes in (
        ((CACHE, floats(2, 4, 7, 3)), {}),
        ((CACHE, floats(2, 4, 2, 2)), {}),
        ((CACHE, floats(2, 4, 2, 4)), {}),
        ((CACHE, floats(1, 4, 2, 3)), {}),
        ((CACHE, floats(2, 4, 2)), {}),
        ((CACHE, UPDATE, ints(1)), {}),
        ((CACHE, UPDATE, ints(1, 1, 1)), {}),
        ((CACHE, UPDATE, ints(1, 1).astype(np.int32)), {}),
        ((CACHE, UPDATE), {"axis": 0}),
        ((CACHE, UPDATE), {"axis": 4}),
        ((CACHE, UPDATE), {"axis": -4}),
        ((CACHE, UPDATE), {"axis": 2**62}),
        ((CACHE, UPDATE), {"mode": "other"}),
        ((floats(6), floats(2)), {"axis": -1}),
    )
]
RIGHT_UPDATES = [
    Use("TensorScatter", [CACHE, UPDATE, ints(4, 0)]),
    Use("TensorScatter", [CACHE, UPDATE, ints(-5, 2**62)], {"mode": "circular"}),
]

test_wrong_operands_are_refused = refused(WRONG)
test_wrong_sizes_are_refused = refused(WRONG_SIZES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", [(), range(1, 3)])
def test_numbers_of_64_bits_mark_nothing(device: str, weights: Any) -> None:
    least, most = -(2**63), 2**63 - 1
    given = [ints(least, most, 1), np.array(2), np.array([0, 1], np.float32)]
    marks = run(Use("OneHot", given), device, weights)[0]
    np.testing.assert_array_equal(marks, [[0, 0], [0, 0], [0, 1]])


test_updates_that_do_not_fit_a_cache_are_refused = refused(WRONG_UPDATES)
test_updates_that_fit_a_cache_are_taken = taken(RIGHT_UPDATES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("number", [-1, 7, 2**31, 2**62, -(2**63), 2**63 - 1])
def test_positions_outside_of_a_cache_are_refused(number: int, device: str) -> None:
    for weights in ((), [2]):
        with pytest.raises(sg.ShapeError, match="culprit"):
            run(Use("TensorScatter", [CACHE, UPDATE, ints(0, number)]), device, weights)
