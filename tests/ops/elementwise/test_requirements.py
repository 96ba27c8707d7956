"""The gate of operators that compute element by element, reduce and move: what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, assert_refused, floats, ints, run

MANY = 2**62
X = floats(4, 6)
BYTES = np.ones(3, np.uint8)
HALVES = np.array([np.nan, 5, 1, np.inf], np.float16)
TRUE = np.ones((4, 6), bool)
Devices = pytest.mark.parametrize("device", DEVICES)

ELEMENTWISE: list[tuple[Use, str]] = [
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
    (Use("Dropout", (X, floats(2)), {}), "ratio has shape"),
    (Use("BitShift", (BYTES, BYTES), {"direction": "UP"}), "direction is 'UP'"),
    (Use("ReduceSum", (X, ints(0, 0)), {}), "twice"),
    (Use("ReduceMax", (X, ints(2)), {}), "axes are"),
    (Use("ReduceMean", (X, ints(-3)), {}), "axes are"),
    (Use("ArgMax", (X,), {"axis": 2}), "axis is 2"),
    (Use("ArgMin", (floats(4, 0),), {"axis": 1}), "no elements"),
    (Use("CumSum", (X, np.array(2)), {}), "axes are"),
    (Use("CumSum", (X, ints(0, 1)), {}), "axis has shape"),
    (Use("CumSum", (X, ints()), {}), "axis has shape"),
]
MOVEMENT: list[tuple[Use, str]] = [
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
    (Use("OneHot", (ints(0, 1), ints(-1)[0], floats(2)), {}), "negative"),
    (Use("OneHot", (ints(0, 1), ints(3, 3), floats(2)), {}), "depth has shape"),
    (Use("OneHot", (ints(0, 1), ints(3)[0], floats(1)), {}), "values has shape"),
    (Use("OneHot", (ints(0, 1), ints(3)[0], floats(2)), {"axis": 2}), "axis is 2"),
]
# Indices that lie outside, of slices that have no elements.
WITHOUT_ELEMENTS: list[tuple[Use, str]] = [
    (Use("Gather", (floats(5, 0, 6), ints(-7)), {"axis": 0}), "-7"),
    (Use("GatherND", (floats(5, 0), ints(1, 5).reshape(2, 1))), "outside|out of"),
    (Use("ScatterND", (floats(5, 0), ints(5).reshape(1, 1), floats(1, 0))), "outside|out of"),
    (Use("Tile", (floats(), np.ones(1, np.float32), np.ones((), np.float32)), {}, 1), "scalar"),
    (
        Use(
            "LabelEncoder",
            (np.empty(0, np.int64),),
            {"keys_int64s": (7, 7), "values_int64s": (70,)},
            2,
            domain="ai.onnx.ml",
        ),
        "2 keys and 1 values",
    ),
]
OF_TWO: list[tuple[Use, str]] = [
    (Use("Split", (X, ints(2, 3)), {}, outputs=2), "does not fill"),
    (Use("Split", (X, ints(-2, 6)), {}, outputs=2), "negative"),
    (Use("Split", (X, ints(4)), {}, outputs=2), "split has shape"),
    (Use("Split", (X,), {"num_outputs": 3}, outputs=2), "num_outputs is 3"),
    (Use("Split", (floats(2, 3),), {"axis": 1}, outputs=2), "does not split"),
    (Use("TopK", (X, ints(7)), {}, outputs=2), "k is 7"),
    (Use("TopK", (X, ints(-1)), {}, outputs=2), "k is -1"),
    (Use("TopK", (X, ints(1, 2)), {}, outputs=2), "k has shape"),
    (Use("TopK", (X, ints(1)), {"axis": 2}, outputs=2), "axis is 2"),
]
OLD: list[tuple[Use, str]] = [
    (Use("Add", (X, floats(6)), {}, 6), "broadcast is 0"),
    (Use("Add", (X, floats(5)), {"broadcast": 1}, 6), "B has shape"),
    (Use("Add", (X, floats(4)), {"broadcast": 1, "axis": 1}, 6), "B has shape"),
    (Use("Add", (X, floats(4)), {"broadcast": 1, "axis": 2}, 6), "axis is 2"),
    (Use("Add", (X, floats(4, 6)), {"broadcast": 1, "axis": 1}, 6), "B has rank 2"),
    (Use("PRelu", (floats(2, 3, 4), floats(4)), {}, 6), "slope has shape"),
    (Use("Max", (X, floats(6)), {}, 6), "input 1 has shape"),
    (Use("ReduceSum", (X,), {"axes": (0, 0)}, 11), "twice"),
    (Use("Slice", (X,), {"starts": (0, 0), "ends": (1,)}, 9), "2 starts, but 1 ends"),
    (Use("Pad", (X,), {"pads": (1, 1)}, 10), "2 pads for 2 axes"),
    (Use("Squeeze", (X,), {"axes": (1,)}, 11), "axis 1 has 6 elements"),
]


def named(cases: list[tuple[Use, str]]) -> list[Any]:
    return [pytest.param(use, why, id=f"{use.name}-{k}") for k, (use, why) in enumerate(cases)]


@Devices
@pytest.mark.parametrize(
    ("use", "why"), named([*ELEMENTWISE, *MOVEMENT, *WITHOUT_ELEMENTS, *OF_TWO, *OLD])
)
def test_wrong_operands_are_refused(device: str, use: Use, why: str) -> None:
    assert_refused(use, device, why)


@Devices
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
    marks = result("OneHot", ints(least, most, 1), np.array(2), np.array([0, 1], np.float32))
    np.testing.assert_array_equal(marks, [[0, 0], [0, 0], [0, 1]])
    assert result("Squeeze", floats(1, 3), ints()).shape == (1, 3)


@Devices
def test_a_shape_that_is_read_late_must_fit(device: str) -> None:
    """The result of Expand has the input's sizes; whether the shape agrees shows at run time."""
    x, shape = sg.input("x", (4, 6), "float32"), sg.input("shape", (2,), "int64")
    y = ops.Expand(x, ops.Abs(shape), name="culprit")
    model = sg.compile_model(sg.Graph(inputs=[x, shape], outputs=[y]), device)
    np.testing.assert_array_equal(model([X, ints(-1, 6)])[0], X)
    with pytest.raises(sg.ShapeError, match="do not broadcast"):
        model([X, ints(-5, 5)])


@Devices
def test_negative_powers_of_whole_numbers(device: str) -> None:
    base, exponent = ints(1, -1, -1, 2, -3), ints(-5, -2, -3, -1, -(2**63))
    np.testing.assert_array_equal(run(Use("Pow", (base, exponent)), device)[0], [1, 1, -1, 0, 0])
