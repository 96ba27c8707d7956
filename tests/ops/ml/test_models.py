"""Trees, support vectors, linear models of ai.onnx.ml: against ONNX Runtime and a slow oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.protobuf import type_to_proto
from subgraph.tools import backend

pytestmark = pytest.mark.filterwarnings("ignore")
_MODES = ["BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT", "BRANCH_EQ", "BRANCH_NEQ"]
_TRANSFORMS = ["NONE", "LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO"]
_X = np.random.default_rng(0).integers(0, 4, (9, 4)).astype(np.float32)


def _model(op_type: str, x: Array, version: int, outputs: int, **attrs: Any) -> onnx.ModelProto:
    graph = onnx.GraphProto(name="g")
    names = [f"o{k}" for k in range(outputs)]
    graph.node.append(helper.make_node(op_type, ["x"], names, domain="ai.onnx.ml", **attrs))
    graph.input.add(name="x").type.CopyFrom(type_to_proto(TensorType(dtype_of(x), x.shape)))
    for name in names:
        graph.output.add(name=name)
    opsets = [helper.make_opsetid("ai.onnx.ml", version), helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _ours(op_type: str, x: Array, version: int = 1, outputs: int = 1, **attrs: Any) -> Any:
    """Return what the reference gives; CPU, where it has kernels for it, gives that too."""
    model = _model(op_type, x, version, outputs, **attrs)
    found = backend.run_model(model, [x], "REFERENCE")
    for mine, other in zip(backend.run_model(model, [x], "CPU"), found, strict=True):
        assert mine.dtype == other.dtype
        if other.dtype.kind == "f":
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
        else:
            assert mine.tolist() == other.tolist()
    return found


def _compare(op_type: str, x: Array, version: int = 1, outputs: int = 1, **attrs: Any) -> None:
    session = ort.InferenceSession(
        _model(op_type, x, version, outputs, **attrs).SerializeToString()
    )
    expected = session.run(None, {"x": x})
    for mine, other in zip(_ours(op_type, x, version, outputs, **attrs), expected, strict=True):
        assert mine.dtype == other.dtype
        if other.dtype.kind == "f":
            np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
        else:
            assert mine.tolist() == other.tolist()


def _trees(
    votes: str,
    targets: int,
    modes: Sequence[str],
    *,
    positive: bool = False,
    seed: int = 0,
    count: int = 3,
) -> dict[str, Any]:
    """Return the attributes of ``count`` random trees of at most fifteen nodes."""
    rng = np.random.default_rng(seed)
    names = "treeids nodeids featureids modes values truenodeids falsenodeids"
    nodes: dict[str, list[Any]] = {name: [] for name in names.split()}
    nodes["missing_value_tracks_true"] = []
    said: dict[str, list[Any]] = {name: [] for name in ("treeids", "nodeids", "ids", "weights")}

    def grow(tree: int, depth: int, taken: list[int]) -> int:
        number = len(taken)
        taken.append(number)
        index = len(nodes["nodeids"])
        leaf = depth == 0 or (depth < 3 and rng.random() < 0.2)
        row = [tree, number, int(rng.integers(4)), "LEAF" if leaf else str(rng.choice(modes))]
        row += [float(rng.integers(0, 4)), 0, 0, int(rng.integers(2))]
        for name, value in zip(nodes, row, strict=True):
            nodes[name].append(value)
        if leaf:
            for target in rng.permutation(targets)[: 1 + int(rng.integers(2))]:
                weight = float(np.float32(rng.normal()))
                row = [tree, number, int(target), abs(weight) if positive else weight]
                for name, value in zip(said, row, strict=True):
                    said[name].append(value)
        else:
            nodes["truenodeids"][index] = grow(tree, depth - 1, taken)
            nodes["falsenodeids"][index] = grow(tree, depth - 1, taken)
        return number

    for tree in range(count):
        grow(tree, 3, [])
    return {f"nodes_{k}": v for k, v in nodes.items()} | {
        f"{votes}_{k}": v for k, v in said.items()
    }


# --- trees -------------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregate", ["SUM", "AVERAGE", "MIN", "MAX"])
@pytest.mark.parametrize("modes", [_MODES, *([mode] for mode in _MODES)], ids=len)
def test_regressor_with_every_aggregate_and_mode(aggregate: str, modes: list[str]) -> None:
    x = _X.copy()
    x[2, 1] = np.nan
    for targets in (1, 3):
        trees = _trees("target", targets, modes, seed=targets)
        attrs: dict[str, Any] = {**trees, "n_targets": targets, "aggregate_function": aggregate}
        _compare("TreeEnsembleRegressor", x, **attrs)
        if targets > 1:
            for transform in _TRANSFORMS:
                _compare("TreeEnsembleRegressor", x, **attrs, post_transform=transform)


@pytest.mark.parametrize("samples", [1, 32, 101])
@pytest.mark.parametrize("op_type", ["TreeEnsembleRegressor", "TreeEnsembleClassifier"])
def test_trees_on_kernels(op_type: str, samples: int) -> None:
    """Blocks of samples, whole and in part, over threads: the reference's sums bit for bit."""
    x = np.random.default_rng(samples).integers(0, 4, (samples, 4)).astype(np.float32)
    x[0, 2] = np.nan
    is_label = op_type == "TreeEnsembleClassifier"
    attrs = _trees("class" if is_label else "target", 3, _MODES[:4], seed=samples)
    attrs |= {"classlabels_int64s": [7, -1, 5]} if is_label else {"n_targets": 3}
    graph = sg.load(_model(op_type, x, 3, 1 + is_label, **attrs))
    assert set(sg.Core().query_model(graph, "CPU").values()) == {"CPU"}
    expected = sg.compile_model(graph, "REFERENCE")([x])
    for threads in (1, 2):
        got = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})([x])
        for k in range(1 + is_label):
            np.testing.assert_array_equal(got[k], expected[k])


def test_regressor_adds_its_base_values_and_transforms_one_target_too() -> None:
    # ONNX Runtime leaves out the base value of a target that no leaf spoke of, and transforms
    # several targets only; the standard knows neither exception.
    trees = _trees("target", 1, ["BRANCH_LEQ"])
    [plain] = _ours("TreeEnsembleRegressor", _X, n_targets=1, **trees)
    [more] = _ours("TreeEnsembleRegressor", _X, n_targets=1, base_values=[0.5], **trees)
    np.testing.assert_allclose(more, plain + 0.5, rtol=1e-6)
    [curved] = _ours("TreeEnsembleRegressor", _X, n_targets=1, post_transform="LOGISTIC", **trees)
    np.testing.assert_allclose(curved, 1 / (1 + np.exp(-plain)), rtol=1e-5)
    [empty] = _ours("TreeEnsembleRegressor", _X, n_targets=2, base_values=[0.5, 0.25], **trees)
    np.testing.assert_allclose(empty, np.c_[plain + 0.5, np.full_like(plain, 0.25)], rtol=1e-6)


@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("classes", [2, 3])
def test_classifier_of_several_classes(classes: int, transform: str) -> None:
    for seed in range(4):
        trees = _trees("class", classes, _MODES, positive=True, seed=seed)
        names: dict[str, Any] = {"classlabels_int64s": [5, 3, 8][:classes]}
        if seed % 2:
            names = {"classlabels_strings": ["a", "b", "c"][:classes]}
        attrs: dict[str, Any] = {**trees, **names, "post_transform": transform}
        if classes == 3:
            _compare("TreeEnsembleClassifier", _X, outputs=2, **attrs)
            continue
        # ONNX Runtime takes the second of two whenever it has any votes, not the one with more.
        labels, scores = _ours("TreeEnsembleClassifier", _X, outputs=2, **attrs)
        known = next(iter(names.values()))
        assert labels.tolist() == [known[k] for k in scores.argmax(axis=1)]


@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("positive", [True, False])
def test_classifier_of_two_classes_with_one_score(positive: bool, transform: str) -> None:
    for seed in range(4):
        trees = _trees("class", 1, ["BRANCH_LT"], positive=positive, seed=seed)
        attrs: dict[str, Any] = {"classlabels_int64s": [0, 1], "post_transform": transform}
        _compare("TreeEnsembleClassifier", _X, outputs=2, **attrs, **trees)
        _compare("TreeEnsembleClassifier", _X, outputs=2, base_values=[0.25], **attrs, **trees)


@pytest.mark.parametrize("samples", [1, 8, 45])
@pytest.mark.parametrize("count", [1, 11])
def test_walks_side_by_side_on_the_cpu(samples: int, count: int) -> None:
    x = np.random.default_rng(samples).integers(0, 4, (samples, 4)).astype(np.float32)
    x[-1, 2] = np.nan
    trees = _trees("class", 1, ["BRANCH_LEQ"], count=count, seed=count)
    astray = {**trees, "nodes_missing_value_tracks_true": [0] * len(trees["nodes_modes"])}
    for attrs in (trees, astray):
        labels = {"classlabels_int64s": [4, 7], **attrs}
        graph = sg.load(_model("TreeEnsembleClassifier", x, 3, 2, **labels))
        assert set(sg.Core().query_model(graph, "CPU").values()) == {"CPU"}
        _compare("TreeEnsembleClassifier", x, 3, 2, **labels)


@pytest.mark.parametrize("dtype", ["float64", "int32", "int64"])
def test_trees_take_every_number_dtype(dtype: str) -> None:
    x = _X.astype(dtype)
    trees = _trees("target", 2, _MODES)
    [found] = _ours("TreeEnsembleRegressor", x, n_targets=2, **trees)
    [expected] = _ours("TreeEnsembleRegressor", _X, n_targets=2, **trees)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    _compare(
        "TreeEnsembleClassifier",
        x,
        outputs=2,
        classlabels_int64s=[0, 1, 2],
        **_trees("class", 3, _MODES),
    )


def test_trees_of_version_3_have_double_attributes() -> None:
    trees = _trees("target", 2, ["BRANCH_LEQ"])
    for name in ("nodes_values", "target_weights"):
        values = trees.pop(name)
        trees[f"{name}_as_tensor"] = helper.make_tensor(
            "t", TensorProto.DOUBLE, [len(values)], values
        )
    base = helper.make_tensor("t", TensorProto.DOUBLE, [2], [0.5, 0.25])
    x = _X.astype(np.float64)
    _compare("TreeEnsembleRegressor", x, 3, n_targets=2, base_values_as_tensor=base, **trees)


def _walk(attrs: dict[str, Any], x: Array, sets: dict[int, set[float]]) -> Array:
    """Return the leaf of the one tree that each sample reaches; independent of `Forest`."""
    reached: list[int] = []
    for row in x:
        node, leaf = attrs["tree_roots"][0], 0
        while not leaf:
            value, split = row[attrs["nodes_featureids"][node]], attrs["splits"][node]
            mode = attrs["modes"][node]
            answers = [value <= split, value < split, value >= split, value > split]
            answers += [value == split, value != split, value in sets.get(node, ())]
            way = "true" if answers[mode] else "false"
            node, leaf = attrs[f"nodes_{way}nodeids"][node], attrs[f"nodes_{way}leafs"][node]
        reached.append(node)
    return np.array(reached)


@pytest.mark.parametrize(("dtype", "number"), [("f4", 1), ("f8", 11), ("f2", 10)])
@pytest.mark.parametrize("modes", [[0, 1, 2], [3, 4, 5], [6, 0, 6]])
def test_ensemble_of_version_5(dtype: str, number: int, modes: list[int]) -> None:
    attrs: dict[str, Any] = {
        "tree_roots": [0],
        "nodes_featureids": [0, 1, 2],
        "nodes_truenodeids": [1, 0, 2],
        "nodes_trueleafs": [0, 1, 1],
        "nodes_falsenodeids": [2, 1, 3],
        "nodes_falseleafs": [0, 1, 1],
    }
    sets = {k: {1.0, 3.0} if k else {2.0} for k, mode in enumerate(modes) if mode == 6}
    members = [v for k in sorted(sets) for v in (*sorted(sets[k]), np.nan)]
    splits, weights = [1.0, 2.0, 1.0], np.array([1.0, 2.0, 3.0, -4.0])
    given: dict[str, Any] = {
        **attrs,
        "nodes_modes": helper.make_tensor("t", TensorProto.UINT8, [3], modes),
        "nodes_splits": helper.make_tensor("t", number, [3], splits),
        "leaf_targetids": [0, 1, 0, 1],
        "leaf_weights": helper.make_tensor("t", number, [4], weights),
        "n_targets": 2,
    }
    if members:
        given["membership_values"] = helper.make_tensor("t", number, [len(members)], members)
    x = _X.astype(dtype)
    leaves = _walk({**attrs, "splits": splits, "modes": modes}, x, sets)
    expected = np.zeros((len(x), 2))
    expected[np.arange(len(x)), np.array([0, 1, 0, 1])[leaves]] = weights[leaves]
    [found] = _ours("TreeEnsemble", x, 5, **given)
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(found, expected)
    table = helper.make_tensor("t", number, [2, 2], weights)
    for device in ("CPU", "REFERENCE"):
        model = _model("TreeEnsemble", x, 5, 1, **{**given, "leaf_weights": table})
        with pytest.raises(sg.ShapeError, match="leaf_weights"):
            backend.run_model(model, [x], device)
    # The standard numbers softmax 1 and logistic 2.
    [found] = _ours("TreeEnsemble", x, 5, **given, post_transform=2)
    tolerance = 1e-2 if dtype == "f2" else 1e-5
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-expected)), rtol=tolerance)
    [found] = _ours("TreeEnsemble", x, 5, **given, post_transform=1, aggregate_function=0)
    powers = np.exp(expected)
    np.testing.assert_allclose(found, powers / powers.sum(1, keepdims=True), rtol=tolerance)


def test_nodes_that_no_node_leads_to_have_no_votes() -> None:
    trees: dict[str, Any] = {
        "nodes_treeids": [0] * 5,
        "nodes_nodeids": [0, 1, 2, 3, 4],
        "nodes_featureids": [1, 3, 0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "BRANCH_LT", "LEAF", "LEAF", "LEAF"],
        "nodes_values": [0.0, 0.25, 0.0, 0.0, 0.0],
        "nodes_truenodeids": [1, 2, 0, 0, 0],  # none leads to 3
        "nodes_falsenodeids": [2, 4, 0, 0, 0],
        "target_treeids": [0] * 3,
        "target_nodeids": [2, 3, 4],
        "target_ids": [0, 1, 1],
        "target_weights": [0.5, -1.0, 2.0],
    }
    _compare("TreeEnsembleRegressor", _X, 1, n_targets=2, **trees)


def test_damaged_trees_are_refused() -> None:
    trees = _trees("target", 2, ["BRANCH_LEQ"])
    wrongs: list[dict[str, Any]] = [
        {"n_targets": 10**12},
        {"n_targets": 1},
        {"nodes_featureids": [9] * len(trees["nodes_nodeids"])},
        {"nodes_truenodeids": [99] * len(trees["nodes_nodeids"])},
        {"target_weights": [1.0]},
        {"nodes_modes": ["BRANCH_LEQ"]},
        {"post_transform": "TWIST"},
        {"aggregate_function": "MEDIAN"},
    ]
    for wrong in wrongs:
        with pytest.raises(sg.SubgraphError):
            _ours("TreeEnsembleRegressor", _X, **{"n_targets": 2, **trees, **wrong})
    circle: dict[str, Any] = {
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LT"] * 3,
        "nodes_values": [9.0] * 3,
        "nodes_truenodeids": [1, 2, 1],
        "nodes_falsenodeids": [1, 2, 1],
    }
    with pytest.raises(sg.SubgraphError, match="cycle"):
        _ours("TreeEnsembleRegressor", _X, n_targets=1, **circle)


# --- support vectors and linear models ---------------------------------------------------------

_RNG = np.random.default_rng(3)
_VECTORS = _RNG.normal(size=20).tolist()


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
def test_support_vector_machines(kernel: str) -> None:
    shared: dict[str, Any] = {"kernel_type": kernel, "kernel_params": [0.3, 0.2, 2.0]}
    shared |= {"support_vectors": _VECTORS}
    x = _X / 4
    for one_class in (0, 1):
        _compare(
            "SVMRegressor",
            x,
            n_supports=5,
            coefficients=_RNG.normal(size=5).tolist(),
            rho=[0.3],
            one_class=one_class,
            **shared,
        )
    for counts in ([2, 3], [2, 1, 2]):
        classes = len(counts)
        pairs = classes * (classes - 1) // 2
        shared["coefficients"] = _RNG.normal(size=5 * (classes - 1)).tolist()
        shared |= {"vectors_per_class": counts, "rho": _RNG.normal(size=pairs).tolist()}
        for transform in _TRANSFORMS:
            for more in ({}, {"prob_a": [-1.5] * pairs, "prob_b": [0.1] * pairs}):
                names: dict[str, Any] = {"classlabels_ints": [7, 2, 5][:classes]}
                if more:
                    names = {"classlabels_strings": ["x", "y", "z"][:classes]}
                _compare(
                    "SVMClassifier",
                    x,
                    outputs=2,
                    post_transform=transform,
                    **shared,
                    **more,
                    **names,
                )


@pytest.mark.parametrize("classes", [2, 3])
def test_machines_without_support_vectors_are_linear(classes: int) -> None:
    weights = _RNG.normal(size=4 * classes).tolist()
    attrs: dict[str, Any] = {
        "coefficients": weights,
        "rho": [0.3],
        "kernel_params": [0.3, 0.2, 2.0],
    }
    _compare("SVMClassifier", _X, outputs=2, classlabels_ints=[4, 1, 2][:classes], **attrs)
    _compare("SVMRegressor", _X, **{**attrs, "coefficients": weights[:4]})


@pytest.mark.parametrize("transform", _TRANSFORMS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_linear_models(transform: str, dtype: str) -> None:
    x = _X.astype(dtype)
    for classes in (1, 2, 3):
        attrs: dict[str, Any] = {
            "coefficients": _RNG.normal(size=4 * classes).tolist(),
            "intercepts": _RNG.normal(size=classes).tolist(),
            "post_transform": transform,
        }
        labels: dict[str, Any] = {"classlabels_strings": ["a", "b", "c"][: max(classes, 2)]}
        _compare("LinearClassifier", x, outputs=2, **attrs, **labels)
    single: dict[str, Any] = {"coefficients": [1.0, -2.0, 0.5, 1.0], "intercepts": [0.5]}
    [plain] = _ours("LinearRegressor", _X, **single)
    [curved] = _ours("LinearRegressor", _X, **single, post_transform="LOGISTIC")
    np.testing.assert_allclose(curved, 1 / (1 + np.exp(-plain)), rtol=1e-5)


def test_feature_vectors_have_the_widths_that_are_asked_for() -> None:
    x = _X.astype(np.int64)
    for widths in ([4], [2], [6]):
        [found] = _ours("FeatureVectorizer", x, inputdimensions=widths)
        expected = np.zeros((len(x), widths[0]), np.float32)
        expected[:, : min(4, widths[0])] = x[:, : widths[0]]
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(sg.SubgraphError):
        _ours("FeatureVectorizer", x, inputdimensions=[10**15])


def test_maps_keep_the_dtype_that_the_model_declares() -> None:
    made = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 3])
    graph = onnx.GraphProto(name="g")
    graph.node.append(
        helper.make_node(
            "DictVectorizer", ["x"], ["y"], domain="ai.onnx.ml", string_vocabulary=["a", "b", "z"]
        )
    )
    kind = graph.input.add(name="x").type.map_type
    kind.key_type, kind.value_type.tensor_type.elem_type = TensorProto.STRING, TensorProto.FLOAT
    graph.output.append(made)
    opsets = [helper.make_opsetid("ai.onnx.ml", 1), helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    [found] = backend.run_model(model, [{"a": 1.5, "z": 2.0}], "REFERENCE")
    assert found.dtype == np.float32
    assert found.tolist() == [[1.5, 0.0, 2.0]]
