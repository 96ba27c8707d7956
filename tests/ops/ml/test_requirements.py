"""Operators of ai.onnx.ml refuse operands and attributes that do not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from wrong_sizes.table import rows

import subgraph as sg
from tests.support.requirements import (
    DEVICES,
    Use,
    assert_agree,
    assert_refused,
    floats,
    ints,
    refused,
    run,
)

X = floats(4, 6)


def ml(op: str, *inputs: Any, **attrs: Any) -> Use:
    return Use(op, inputs, attrs, 3, domain="ai.onnx.ml")


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
    (ml("Scaler", X, offset=(1.0, 2.0), scale=(1.0,)), "offset has 2"),
    (ml("Imputer", X, imputed_value_floats=(1.0, 2.0), replaced_value_float=0.0), "has 2"),
    (ml("Normalizer", floats(2, 3, 4)), "rank 1 or 2"),
    (ml("FeatureVectorizer", X, floats(9, 3)), "input 1 has 9 rows"),
    (ml("FeatureVectorizer", X, floats(2, 3)), "input 1 has 2 rows"),
    (ml("FeatureVectorizer", X, X, inputdimensions=(6,)), "1 widths for 2"),
    (ml("ArrayFeatureExtractor", floats(4, 0), ints(0)), "no columns"),
    (ml("ArrayFeatureExtractor", X, ints()), "names no column"),
    (ml("OneHotEncoder", ints(1), cats_int64s=(1, 2), cats_strings=("a",)), "2 of"),
    (ml("OneHotEncoder", ints(1, 5), cats_int64s=(1, 2), zeros=0), "culprit"),
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

test_wrong_operands_are_refused = refused(WRONG)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_tree_that_fits_is_taken(device: str) -> None:
    assert_agree(trees(), device)


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


@pytest.mark.parametrize("device", DEVICES)
def test_columns_that_are_computed_are_checked(device: str) -> None:
    for columns in (ints(0, 6), ints(-1)):
        with pytest.raises(sg.ShapeError, match=r"Y names column|Y holds"):
            run(ml("ArrayFeatureExtractor", X, columns), device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["nodes_falsenodeids", "nodes_truenodeids"])
def test_a_tree_has_children_for_all_nodes(name: str, device: str) -> None:
    row = next(row for row in rows() if row.op == "TreeEnsembleRegressor")
    x = row.inputs[0]
    assert isinstance(x, np.ndarray)
    options = {**row.options, name: row.options[name][:-1]}
    assert_refused(Use(row.op, [x], options, row.version, 1, row.domain), device)


@pytest.mark.parametrize("device", DEVICES)
def test_categories_that_are_alike_have_a_place_each(device: str) -> None:
    x = sg.input("x", (3,), "int64")
    node = sg.Node(
        *("OneHotEncoder", [x]),
        domain="ai.onnx.ml",
        attrs={"cats_int64s": (1, 2, 3, 3), "zeros": 1},
    )
    model = sg.compile_model(sg.Graph([x], [node.outputs[0]]), device)
    np.testing.assert_array_equal(model([ints(3, 1, 9)])[0], np.eye(4)[[3, 0, 0]] * [[1], [1], [0]])
