"""DeformConv, Col2Im, MaxUnpool and blocks of pixels refuse operands that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from tests.support.requirements import DEVICES, Use, floats, ints, refused, run, taken

X = floats(2, 6, 7, 8)
W = floats(9, 6, 3, 2)
HUGE = 2**62
WRONG = [
    Use("DeformConv", [X, W, floats(2, 12, 5, 7)], {"offset_group": 4}),
    Use("DeformConv", [X, W, floats(2, 12, 5, 6)]),
    Use("DeformConv", [X, W, floats(1, 12, 5, 7)]),
    Use("DeformConv", [X, W, floats(2, 11, 5, 7)]),
    Use("DeformConv", [X, W, floats(2, 12, 5, 7), floats(8)]),
    Use("DeformConv", [X, W, floats(2, 12, 5, 7), None, floats(2, 6, 5, 1)]),
    Use("DeformConv", [X, W, floats(2, 12, 5, 7)], {"offset_group": 0}),
    Use("MaxUnpool", [X, np.zeros((2, 6, 7, 7), np.int64)], {"kernel_shape": (2, 2)}),
    Use("MaxUnpool", [X, np.zeros((2, 6, 7, 9), np.int64)], {"kernel_shape": (2, 2)}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64)], {"kernel_shape": (2, 0)}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64)], {"kernel_shape": (2, 2), "pads": (9,) * 4}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64), ints(2, 6)], {"kernel_shape": (2, 2)}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64), ints(2, 5, 9, 9)], {"kernel_shape": (2, 2)}),
    Use("Col2Im", [floats(1, 5, 5), ints(5, 5), ints(1, 6)]),
    Use("Col2Im", [floats(1, 6, 5), ints(5, 5), ints(1, 4)]),
    Use("Col2Im", [floats(1, 4, 11), ints(5, 5), ints(1, 4)]),
    Use("Col2Im", [floats(1, 4, 10), ints(5, 5), ints(4)]),
    Use("Col2Im", [floats(1, 4, 10), ints(5, 5), ints(1, 4)], {"strides": (0, 1)}),
    Use("DepthToSpace", [floats(2, 6, 4, 4)], {"blocksize": 2}),
    Use("DepthToSpace", [floats(2, 8, 4, 4)], {"blocksize": 0}),
    Use("DepthToSpace", [floats(8, 4, 4)], {"blocksize": 2}),
    Use("SpaceToDepth", [floats(2, 6, 4, 5)], {"blocksize": 2}),
    Use("SpaceToDepth", [floats(2, 6, 4, 4)], {"blocksize": -2}),
]
RIGHT = [
    Use(
        "DeformConv",
        [X, W, floats(2, 36, 5, 7), floats(9), floats(2, 18, 5, 7)],
        {"offset_group": 3},
    ),
    Use("Col2Im", [floats(1, 4, 10), ints(5, 5), ints(1, 4)]),
    Use("DepthToSpace", [floats(2, 8, 4, 4)], {"blocksize": 2, "mode": "CRD"}),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)
test_what_fits_is_taken = taken(RIGHT, DEVICES[1:], 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [-1, 2 * 6 * 8 * 9, -HUGE, HUGE])
def test_an_index_of_no_element_is_an_error(index: int, device: str) -> None:
    """One of MaxUnpool never counts from the end; of a weight it is seen with the plan."""
    indices = np.arange(X.size).reshape(X.shape)
    indices[1, 5, 6, 7] = index
    use = Use("MaxUnpool", [X, indices], {"kernel_shape": (2, 2)})
    with pytest.raises(sg.ShapeError, match=f"culprit.*{index}"):
        run(use, device)
    with pytest.raises(sg.ShapeError, match=f"culprit.*{index}"):
        run(use, device, (1,))
