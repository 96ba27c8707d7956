"""Operators that move elements or make tensors refuse operands that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, floats, ints, refused, run

MANY = 2**62
X = floats(4, 6)
HALVES = np.array([np.nan, 5, 1, np.inf], np.float16)
WRONG: list[tuple[Use, str]] = [
    (Use("Dropout", (X, floats(2)), {}), "ratio has shape"),
    (Use("Reshape", (X, ints()), {}), "24 elements"),
    (Use("Reshape", (X, ints(5, 5)), {}), "do not fill"),
    (Use("Reshape", (X, ints(0, 5)), {}), "do not fill"),
    (Use("Reshape", (X, ints(0, 6, 0)), {}), "copies dimension"),
    (Use("Reshape", (X, ints(-1, -1)), {}), "more than one -1"),
    (Use("Reshape", (X, ints(-2, 12)), {}), "negative"),
    (Use("Reshape", (X, ints(MANY, 4)), {}), "do not fill"),
    (Use("Expand", (X, ints(5, 5)), {}), "do not broadcast"),
    (Use("Expand", (X, ints(4)), {}), "do not broadcast"),
    (Use("Expand", (X, ints(4, -1)), {}), "negative"),
    (Use("Transpose", (X,), {"perm": (0, 0)}), "no order"),
    (Use("Transpose", (X,), {"perm": (0, 1, 2)}), "no order"),
    (Use("Concat", (X, floats(5, 6)), {"axis": 1}), "input 1 has shape"),
    (Use("Concat", (X, floats(24)), {"axis": 0}), "input 1 has shape"),
    (Use("Concat", (X, X), {"axis": 2}), "axis is 2"),
    (Use("Flatten", (X,), {"axis": 3}), "axis is 3"),
    (Use("Squeeze", (X, ints(0)), {}), "axis 0 has 4 elements"),
    (Use("Squeeze", (X, ints(2)), {}), "axes are"),
    (Use("Unsqueeze", (X, ints(0, 0)), {}), "twice"),
    (Use("Unsqueeze", (X, ints(4)), {}), "axes are"),
    (Use("Slice", (X, ints(0), ints(2), ints(5), ints(1)), {}), "axes are"),
    (Use("Slice", (X, ints(0, 0), ints(2), ints(0)), {}), "ends has shape"),
    (Use("Slice", (X, ints(0), ints(2), ints(0), ints(0)), {}), "a step is 0"),
    (Use("Slice", (X, ints(2, -3), ints(4, MANY), ints(0, 0), ints(1, 1)), {}), "twice"),
    (Use("Slice", (X, ints(0, 0, 0), ints(1, 1, 1)), {}), "3 starts for 2 axes"),
    (Use("Tile", (X, ints(2)), {}), "repeats has shape"),
    (Use("Tile", (X, ints(-1, 1)), {}), "negative"),
    (Use("Pad", (X, ints(1, 1)), {}), "2 pads for 2 axes"),
    (Use("Pad", (X, ints(-5, 0, 0, 0)), {}), "cut off more"),
    (Use("Pad", (X, ints(1, 1, 1, 1), None, ints(0, 0)), {}), "twice"),
    (Use("Pad", (X, ints(1, 1), None, ints(2)), {}), "axes are"),
    (Use("Pad", (X, ints(1, 1, 1, 1), floats(2)), {}), "constant_value has shape"),
    (Use("CenterCropPad", (floats(3, 5), ints(2)), {}), "shape has shape"),
    (Use("Trilu", (floats(6),), {}), "matrices"),
    (Use("Trilu", (X, ints(0, 1)), {}), "k has shape"),
    (Use("ReverseSequence", (X, ints(1, 2)), {}), "sequence_lens has shape"),
    (
        Use("ReverseSequence", (X, ints(*[1] * 6)), {"batch_axis": 3, "time_axis": 0}),
        "batch_axis 3",
    ),
    (
        Use("ReverseSequence", (X, ints(*[1] * 4)), {"batch_axis": 0, "time_axis": 0}),
        "batch_axis 0",
    ),
    (Use("ConstantOfShape", (ints(-1),), {}), "negative"),
    (Use("Range", (ints(0)[0], ints(5)[0], ints(0)[0]), {}), "delta is 0"),
    (Use("Range", (HALVES[0], HALVES[1], HALVES[2]), {}), "start is nan; .* no length"),
    (Use("Range", (HALVES[1], HALVES[3], HALVES[2]), {}), "limit is inf; .* no length"),
    (Use("Range", (ints(0, 1), ints(5)[0], ints(1)[0]), {}), "start has shape"),
    (Use("EyeLike", (floats(3),), {}), "rank 2"),
    (Use("Tile", (floats(), np.ones(1, np.float32), np.ones((), np.float32)), {}, 1), "scalar"),
    (Use("Split", (X, ints(2, 3)), {}, outputs=2), "does not fill"),
    (Use("Split", (X, ints(-2, 6)), {}, outputs=2), "negative"),
    (Use("Split", (X, ints(4)), {}, outputs=2), "split has shape"),
    (Use("Split", (X,), {"num_outputs": 3}, outputs=2), "num_outputs is 3"),
    (Use("Split", (floats(2, 3),), {"axis": 1}, outputs=2), "does not split"),
    (Use("Slice", (X,), {"starts": (0, 0), "ends": (1,)}, 9), "2 starts, but 1 ends"),
    (Use("Pad", (X,), {"pads": (1, 1)}, 10), "2 pads for 2 axes"),
    (Use("Squeeze", (X,), {"axes": (1,)}, 11), "axis 1 has 6 elements"),
]

test_wrong_operands_are_refused = refused(WRONG)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("weights", [(), range(1, 5)])
def test_numbers_of_64_bits_are_taken(device: str, weights: Any) -> None:
    """They are no reason to leave a tensor: all are brought to what there is."""
    least, most = -(2**63), 2**63 - 1

    def result(op: str, *inputs: Array) -> Array:
        return run(Use(op, inputs), device, weights)[0]

    box = (ints(most), ints(least), ints(1), ints(least))
    np.testing.assert_array_equal(result("Slice", X, *box), X[:, 5:])
    np.testing.assert_array_equal(result("Trilu", X, np.array(least)), X)
    np.testing.assert_array_equal(result("Trilu", X, np.array(most)), np.zeros_like(X))
    assert result("Squeeze", floats(1, 3), ints()).shape == (1, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_a_shape_that_is_read_late_must_fit(device: str) -> None:
    """The result of Expand has the input's sizes; whether the shape agrees shows at run time."""
    x, shape = sg.input("x", (4, 6), "float32"), sg.input("shape", (2,), "int64")
    y = ops.Expand(x, ops.Abs(shape), name="culprit")
    model = sg.compile_model(sg.Graph(inputs=[x, shape], outputs=[y]), device)
    np.testing.assert_array_equal(model([X, ints(-1, 6)])[0], X)
    with pytest.raises(sg.ShapeError, match="do not broadcast"):
        model([X, ints(-5, 5)])
