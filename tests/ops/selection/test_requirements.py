"""The gate of operators that select and of ai.onnx.ml: what does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph import ops
from subgraph.operators.schema import INTERNAL_DOMAIN
from tests.support.requirements import DEVICES, Use, assert_agree, assert_refused, floats, ints, run

X = floats(4, 6)
ONE = np.array(1)
BOXES, SCORES = floats(1, 5, 4), floats(1, 2, 5)
Devices = pytest.mark.parametrize("device", DEVICES)
ML = "ai.onnx.ml"


def ml(op: str, *inputs: Any, **attrs: Any) -> Use:
    return Use(op, inputs, attrs, 3, domain=ML)


def trees(**changed: Any) -> Use:
    """Return a regressor of one tree: feature 2 leads to votes for target 0 or 1."""
    attrs: dict[str, Any] = {
        "n_targets": 2,
        "nodes_treeids": (0, 0, 0),
        "nodes_nodeids": (0, 1, 2),
        "nodes_featureids": (2, 0, 0),
        "nodes_values": (0.5, 0.0, 0.0),
        "nodes_modes": ("BRANCH_LEQ", "LEAF", "LEAF"),
        "nodes_truenodeids": (1, 0, 0),
        "nodes_falsenodeids": (2, 0, 0),
        "target_treeids": (0, 0),
        "target_nodeids": (1, 2),
        "target_ids": (0, 1),
        "target_weights": (3.0, 4.0),
    }
    return ml("TreeEnsembleRegressor", X, **{**attrs, **changed})


CIRCLE: dict[str, Any] = {"nodes_modes": ("BRANCH_LEQ",) * 3, "nodes_truenodeids": (1, 2, 1)}
MACHINE: dict[str, Any] = {
    "coefficients": (1.0, -1.0),
    "rho": (0.5,),
    "kernel_type": "RBF",
    "kernel_params": (0.1, 0.0, 0.0),
    "n_supports": 2,
}
WRONG: list[tuple[Use, str]] = [
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
    (ml("Scaler", X, offset=(1.0, 2.0), scale=(1.0,)), "offset has 2"),
    (ml("Imputer", X, imputed_value_floats=(1.0, 2.0), replaced_value_float=0.0), "has 2"),
    (ml("Normalizer", floats(2, 3, 4)), "rank 1 or 2"),
    (ml("FeatureVectorizer", X, floats(9, 3)), "input 1 has 9 rows"),
    (ml("FeatureVectorizer", X, floats(2, 3)), "input 1 has 2 rows"),
    (ml("FeatureVectorizer", X, X, inputdimensions=(6,)), "1 widths for 2"),
    (ml("ArrayFeatureExtractor", floats(4, 0), ints(0)), "no columns"),
    (ml("ArrayFeatureExtractor", X, ints()), "names no column"),
    (ml("OneHotEncoder", ints(1), cats_int64s=(1, 2), cats_strings=("a",)), "2 of"),
    (ml("LinearRegressor", X, coefficients=(1.0,) * 5), "5 coefficients"),
    (ml("LinearRegressor", X, coefficients=(1.0,) * 12, targets=2, intercepts=(1.0,)), "1 inter"),
    (ml("SVMRegressor", X, support_vectors=(1.0,) * 10, **MACHINE), "6 features"),
    (
        ml("SVMRegressor", X, support_vectors=(1.0,) * 18, **{**MACHINE, "n_supports": 3}),
        "2 coefficients for 3",
    ),
    (
        ml("SVMRegressor", X, coefficients=(1.0,) * 5, rho=(0.5,), kernel_type="LINEAR"),
        "6 features for 5",
    ),
    (trees(nodes_featureids=(6, 0, 0)), "feature 6 of 6"),
    (trees(nodes_featureids=(-1, 0, 0)), "feature -1"),
    (trees(nodes_featureids=(2,)), "1 nodes_featureids"),
    (trees(target_ids=(0, 2)), "target 2 of 2"),
    (trees(target_ids=(-1, 0)), "target -1"),
    (trees(nodes_truenodeids=(9, 0, 0)), "points outside"),
    (trees(target_nodeids=(1, 9)), "points outside"),
    (trees(**CIRCLE), "cycle"),
    (trees(n_targets=0), "0 targets"),
]


@Devices
@pytest.mark.parametrize(
    ("use", "why"), [pytest.param(u, w, id=f"{u.op}-{k}") for k, (u, w) in enumerate(WRONG)]
)
def test_wrong_operands_are_refused(device: str, use: Use, why: str) -> None:
    assert_refused(use, device, why)


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize(
    "use",
    [
        Use("NonMaxSuppression", (BOXES, SCORES, ints(3), floats(1), floats(1))),
        Use("NonMaxSuppression", (BOXES, SCORES, np.array(2**62))),
        Use("NonMaxSuppression", (BOXES, SCORES, np.array(-1))),
        trees(),
    ],
    ids=lambda use: use.name[:40],
)
def test_operands_that_fit(device: str, use: Use) -> None:
    assert_agree(use, device)


@Devices
def test_boxes_that_are_weights_compile(device: str) -> None:
    use = Use("NonMaxSuppression", (BOXES, SCORES, ints(2)))
    np.testing.assert_array_equal(run(use, device, range(3)), run(use, "REFERENCE"))


@Devices
def test_how_many_boxes_follows_from_weights(device: str) -> None:
    """The number, 2, was not known when memory was planned, and then was."""
    boxes, scores = sg.parameter("boxes", BOXES), sg.parameter("scores", SCORES)
    size = ops.Reshape(ops.Size(sg.parameter("w", floats(3, 4))), np.array([-1]))
    most = ops.Sub(size, np.array([10]))
    y = ops.NonMaxSuppression(boxes, scores, most, np.float32(1))
    model = sg.compile_model(sg.Graph(outputs=[y]), device)
    assert model([])[0].shape == (4, 3)


@Devices
def test_how_many_boxes_is_a_weight_that_changes(device: str) -> None:
    boxes, scores = sg.parameter("boxes", BOXES), sg.parameter("scores", SCORES)
    most = sg.parameter("most", ints(2))
    y = ops.NonMaxSuppression(boxes, scores, most, np.float32(1), name="culprit")
    model = sg.compile_model(sg.Graph(outputs=[y]), device)
    for count in (2, 5, 1):
        model.parameters["most"].assign(ints(count))
        assert model([])[0].shape == (2 * count, 3)


@Devices
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


def test_a_long_tree_is_checked_quickly() -> None:
    """A chain of nodes, and a circle of as many: both once took steps for each pair of them."""
    count = 20_000
    chain = {
        "nodes_treeids": (0,) * (count + 1),
        "nodes_nodeids": tuple(range(count + 1)),
        "nodes_featureids": (0,) * (count + 1),
        "nodes_values": (0.0,) * (count + 1),
        "nodes_modes": ("BRANCH_LEQ",) * count + ("LEAF",),
        "nodes_truenodeids": (*range(1, count + 1), 0),
        "nodes_falsenodeids": (count,) * count + (0,),
        "target_treeids": (0,),
        "target_nodeids": (count,),
        "target_ids": (0,),
        "target_weights": (1.0,),
    }
    assert run(trees(**chain), "CPU")[0].shape == (4, 2)
    chain["nodes_truenodeids"] = (*range(1, count), 1, 0)
    with pytest.raises(sg.ShapeError, match="cycle"):
        run(trees(**chain), "CPU")


@Devices
def test_columns_that_are_computed_are_checked(device: str) -> None:
    for columns in (ints(0, 6), ints(-1)):
        with pytest.raises(sg.ShapeError, match=r"Y names column|Y holds"):
            run(ml("ArrayFeatureExtractor", X, columns), device)


@Devices
def test_how_many_are_selected_is_a_scalar_or_a_list_of_one(device: str) -> None:
    for number in (np.array(2), ints(2)):
        top = run(Use("TopK", [floats(2, 5), number], outputs=2), device)
        np.testing.assert_array_equal(top[1], [[4, 3], [4, 3]])
