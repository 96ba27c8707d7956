"""Operators that select refuse operands that do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph import ops
from subgraph.operators.schema import INTERNAL_DOMAIN
from tests.support.requirements import DEVICES, Use, floats, ints, refused, run, taken

X = floats(4, 6)
ONE = np.array(1)
BOXES, SCORES = floats(1, 5, 4), floats(1, 2, 5)
WRONG: list[tuple[Use, str]] = [
    (Use("TopK", (X, ints(7)), {}, outputs=2), "k is 7"),
    (Use("TopK", (X, ints(-1)), {}, outputs=2), "k is -1"),
    (Use("TopK", (X, ints(1, 2)), {}, outputs=2), "k has shape"),
    (Use("TopK", (X, ints(1)), {"axis": 2}, outputs=2), "axis is 2"),
    (Use("Compress", (X, np.ones(5, bool)), {"axis": 0}), "5 conditions for 4"),
    (Use("Compress", (np.array(1.0), np.ones(1, bool)), {"axis": 0}), "it has no axis"),
    (Use("Compress", (X, np.ones(25, bool))), "25 conditions for 24"),
    (Use("Compress", (X, np.ones((2, 2), bool))), "condition has shape"),
    (Use("Compress", (X, ints(1, 0))), "condition is int64"),
    (Use("Unique", (X,), {"axis": 2}), "axis is 2"),
    (Use("NonMaxSuppression", (BOXES, floats(1, 2, 6))), "boxes has shape"),
    (Use("NonMaxSuppression", (BOXES, floats(2, 2, 5))), "boxes has shape"),
    (Use("NonMaxSuppression", (floats(1, 5, 3), SCORES)), "boxes has shape"),
    (Use("NonMaxSuppression", (BOXES, floats(2, 5))), "scores has shape"),
    (Use("NonMaxSuppression", (BOXES, SCORES, ints())), "max_output_boxes_per_class has"),
    (Use("NonMaxSuppression", (BOXES, SCORES, ints(2), floats(0))), "iou_threshold has"),
]

test_wrong_operands_are_refused = refused(WRONG)
test_operands_that_fit = taken(
    [
        Use("NonMaxSuppression", (BOXES, SCORES, ints(3), floats(1), floats(1))),
        Use("NonMaxSuppression", (BOXES, SCORES, np.array(2**62))),
        Use("NonMaxSuppression", (BOXES, SCORES, np.array(-1))),
    ],
    DEVICES[1:],
)


@pytest.mark.parametrize("device", DEVICES)
def test_boxes_that_are_weights_compile(device: str) -> None:
    use = Use("NonMaxSuppression", (BOXES, SCORES, ints(2)))
    np.testing.assert_array_equal(run(use, device, range(3)), run(use, "REFERENCE"))


@pytest.mark.parametrize("device", DEVICES)
def test_how_many_boxes_follows_from_weights(device: str) -> None:
    """The number, 2, was not known when memory was planned, and then was."""
    boxes, scores = sg.parameter("boxes", BOXES), sg.parameter("scores", SCORES)
    size = ops.Reshape(ops.Size(sg.parameter("w", floats(3, 4))), np.array([-1]))
    most = ops.Sub(size, np.array([10]))
    y = ops.NonMaxSuppression(boxes, scores, most, np.float32(1))
    model = sg.compile_model(sg.Graph(outputs=[y]), device)
    assert model([])[0].shape == (4, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_how_many_boxes_is_a_weight_that_changes(device: str) -> None:
    boxes, scores = sg.parameter("boxes", BOXES), sg.parameter("scores", SCORES)
    most = sg.parameter("most", ints(2))
    y = ops.NonMaxSuppression(boxes, scores, most, np.float32(1), name="culprit")
    model = sg.compile_model(sg.Graph(outputs=[y]), device)
    for count in (2, 5, 1):
        model.parameters["most"].assign(ints(count))
        assert model([])[0].shape == (2 * count, 3)


@pytest.mark.parametrize("device", DEVICES)
def test_an_operator_of_our_own_in_a_file_is_checked(device: str) -> None:
    """What the passes write stands for nothing that is sure when a file says it."""
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 6]),
        helper.make_tensor_value_info("count", TensorProto.INT64, [1]),
    ]
    node = helper.make_node("Trim", ["x", "count"], ["y"], domain=INTERNAL_DOMAIN, axis=0)
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [None, 6])
    graph = helper.make_graph([node], "g", inputs, [output])
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid(INTERNAL_DOMAIN, 1)]
    proto = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    model = sg.compile_model(sg.load(proto.SerializeToString()), device)
    assert np.array_equal(model([X, ints(2)])[0], X[:2])
    for count in (9, -1):
        with pytest.raises(sg.ShapeError, match=f"{count} slices of 4"):
            model([X, ints(count)])


@pytest.mark.parametrize("device", DEVICES)
def test_how_many_are_selected_is_a_scalar_or_a_list_of_one(device: str) -> None:
    for number in (np.array(2), ints(2)):
        top = run(Use("TopK", [floats(2, 5), number], outputs=2), device)
        np.testing.assert_array_equal(top[1], [[4, 3], [4, 3]])
