"""Kernels of ai.onnx.ml on the CPU device: against the reference, on random numbers and shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import subgraph as sg
from subgraph.devices.export import region_nodes
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.protobuf import type_to_proto

_NAN, _INF = float("nan"), float("inf")


def _model(op_type: str, inputs: list[Array], outputs: int, version: int, attrs: Any) -> Any:
    graph = onnx.GraphProto(name="g")
    names = [f"x{k}" for k in range(len(inputs))]
    results = [f"y{k}" for k in range(outputs)]
    graph.node.append(helper.make_node(op_type, names, results, domain="ai.onnx.ml", **attrs))
    for name, x in zip(names, inputs, strict=True):
        if x.dtype == np.int64 and name == "x1":
            graph.initializer.append(numpy_helper.from_array(x, name))
        else:
            graph.input.add(name=name).type.CopyFrom(
                type_to_proto(TensorType(dtype_of(x), x.shape))
            )
    for name in results:
        graph.output.add(name=name)
    opsets = [helper.make_opsetid("ai.onnx.ml", version), helper.make_opsetid("", 18)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def _compare(
    op_type: str,
    *inputs: Array,
    outputs: int = 1,
    version: int = 3,
    exact: bool = True,
    **attrs: Any,
) -> None:
    graph = sg.load(_model(op_type, list(inputs), outputs, version, attrs))
    assert set(sg.Core().query_model(graph, "CPU").values()) == {"CPU"}
    feed = list(inputs)[: len(graph.inputs)]
    expected = sg.compile_model(graph, "REFERENCE")(feed)
    for threads in (1, 2):
        got = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})(feed)
        for k in range(outputs):
            assert (got[k].dtype, got[k].shape) == (expected[k].dtype, expected[k].shape)
            if exact or expected[k].dtype.kind != "f":
                np.testing.assert_array_equal(got[k], expected[k])
            else:
                np.testing.assert_allclose(got[k], expected[k], rtol=1e-5, atol=1e-6)


def _numbers(*shape: int, seed: int = 0) -> Array:
    """Return normal float32 among which are zeros, infinities, NaN and subnormal numbers."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(np.float32)
    odd = np.array([0, -0.0, _NAN, _INF, -_INF, 1e-42, 0.5], np.float32)
    return np.where(rng.random(shape) < 0.2, rng.choice(odd, shape), x)


@pytest.mark.parametrize("shape", [(7, 5), (1, 1), (0, 3), (4,)])
def test_features(shape: tuple[int, ...]) -> None:
    x, width = _numbers(*shape), shape[-1]
    numbers = np.random.default_rng(1).normal(size=width).astype(np.float32).tolist()
    _compare("Scaler", x, offset=numbers, scale=numbers[::-1])
    _compare("Scaler", x.astype(np.float64), offset=[0.3], scale=[2.5])
    _compare("Binarizer", x, threshold=0.5)
    if len(shape) == 2:
        for sought in (_NAN, 0.5, 0.0):
            for other in ([7.5], numbers):
                _compare("Imputer", x, imputed_value_floats=other, replaced_value_float=sought)
        whole = np.arange(x.size).reshape(shape) % 3
        _compare("Imputer", whole, imputed_value_int64s=[9], replaced_value_int64=1)
        _compare("FeatureVectorizer", x, x[:, :1], inputdimensions=[width, 1])
    if x.size:
        _compare("ArrayFeatureExtractor", x, np.array([width - 1, 0, 0]))
        for norm in ("MAX", "L1", "L2"):
            _compare("Normalizer", np.nan_to_num(x, posinf=3, neginf=-3), norm=norm, exact=False)
            _compare("Normalizer", np.zeros_like(x), norm=norm)


@pytest.mark.parametrize("norm", ["MAX", "L1", "L2"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 2), (0, 0)])
def test_normalizer_without_elements_gives_none(norm: str, shape: tuple[int, ...]) -> None:
    empty = np.zeros(shape, np.float32)
    model = sg.load(_model("Normalizer", [empty], 1, 1, {"norm": norm}))
    for device in ("CPU", "REFERENCE"):
        [y] = sg.compile_model(model, device)([empty]).values()
        assert (y.dtype, y.shape) == (np.float32, shape)


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_encoders_of_numbers(count: int) -> None:
    rng = np.random.default_rng(count)
    keys = rng.integers(-20, 20, count).tolist()
    x = rng.integers(-25, 25, (3, 11))
    values = rng.integers(-9, 9, count).tolist()
    reals = rng.normal(size=count).astype(np.float32).tolist()
    _compare("LabelEncoder", x, keys_int64s=keys, values_int64s=values, default_int64=-7)
    _compare("LabelEncoder", x[:0], keys_int64s=keys, values_floats=reals)
    odd = _numbers(5, 9, seed=count)
    names = [*odd.reshape(-1)[:count].tolist(), -0.0, _INF]
    for more in ([], [_NAN, _NAN]):
        found = [float(k) for k in range(len(names) + len(more))]
        _compare(
            "LabelEncoder", odd, keys_floats=names + more, values_floats=found, default_float=-5.5
        )
        whole = [int(k) for k in found]
        _compare("LabelEncoder", odd, keys_floats=names + more, values_int64s=whole)
    kinds = list(dict.fromkeys(keys))
    for values in (x, x[0], x.astype(np.float32) / 2):
        _compare("OneHotEncoder", values, cats_int64s=kinds)


@pytest.mark.parametrize("samples", [1, 6, 33])
@pytest.mark.parametrize("count", [1, 3])
def test_linear_models(samples: int, count: int) -> None:
    rng = np.random.default_rng(samples)
    x = rng.normal(size=(samples, 5)).astype(np.float32)
    attrs: dict[str, Any] = {"coefficients": rng.normal(size=5 * count).tolist()}
    for more in ({}, {"intercepts": rng.normal(size=count).tolist()}):
        for transform in ("NONE", "LOGISTIC", "SOFTMAX"):
            attrs |= {"post_transform": transform, **more}
            _compare("LinearRegressor", x, exact=False, targets=count, **attrs)
            if count > 1:
                labels: dict[str, Any] = {"classlabels_ints": [5, -2, 9]}
                _compare("LinearClassifier", x, outputs=2, exact=False, **attrs, **labels)


@pytest.mark.parametrize("kernel", ["LINEAR", "POLY", "RBF", "SIGMOID"])
@pytest.mark.parametrize(("samples", "features"), [(1, 3), (5, 1), (0, 4), (26, 7)])
def test_machines(kernel: str, samples: int, features: int) -> None:
    rng = np.random.default_rng(samples)
    x = rng.normal(size=(samples, features)).astype(np.float32)
    if samples > 8:
        x[3, 0], x[7, 0] = _NAN, 40
    counts = [4, 1, 17, 3]
    for classes, degree in ((2, 3.0), (4, 2.5)):
        total, pairs = sum(counts[:classes]), classes * (classes - 1) // 2
        vectors = rng.normal(size=total * features).tolist()
        attrs: dict[str, Any] = {"kernel_type": kernel, "kernel_params": [0.3, 0.2, degree]}
        attrs |= {"support_vectors": vectors, "rho": rng.normal(size=pairs).tolist()}
        rows: dict[str, Any] = {
            "coefficients": rng.normal(size=total).tolist(),
            "n_supports": total,
        }
        for one_class in (0, 1):
            _compare("SVMRegressor", x, exact=False, one_class=one_class, **attrs, **rows)
        attrs |= {"coefficients": rng.normal(size=total * (classes - 1)).tolist()}
        attrs |= {"classlabels_ints": [7, 2, 5, 1][:classes], "vectors_per_class": counts[:classes]}
        _compare("SVMClassifier", x, outputs=2, exact=False, **attrs)
        chances = {"prob_a": [-1.5, -0.5, -2.0, -1, -1, -3][:pairs], "prob_b": [0.1] * pairs}
        for transform in ("NONE", "SOFTMAX", "LOGISTIC"):
            more: dict[str, Any] = {"post_transform": transform, **chances}
            _compare("SVMClassifier", x, outputs=2, exact=False, **attrs, **more)


@pytest.mark.parametrize(
    "classes", [np.array([7, -2, 30], np.int32), np.array([[1.5, 2.5, 3.5]] * 2)]
)
def test_labels_by_computed_indices(classes: Array) -> None:
    """The last step of classifiers; plans do not depend on the indices."""
    nodes = [
        helper.make_node("ArgMax", ["x"], ["best"], axis=1),
        helper.make_node("ArrayFeatureExtractor", ["classes", "best"], ["y"], domain="ai.onnx.ml"),
    ]
    graph = helper.make_graph(
        nodes,
        "labels",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", classes.shape[-1]])],
        [helper.make_tensor_value_info("y", helper.np_dtype_to_tensor_dtype(classes.dtype), None)],
        [numpy_helper.from_array(classes, "classes")],
    )
    opsets = [helper.make_opsetid("ai.onnx.ml", 3), helper.make_opsetid("", 18)]
    model = sg.compile_model(helper.make_model(graph, opset_imports=opsets, ir_version=8), "CPU")
    (region,) = region_nodes(model.graph)
    assert isinstance(region.op, CpuSubgraphOp)
    for seed in range(5):
        x = np.random.default_rng(seed).random((4, classes.shape[-1]), np.float32)
        (label,) = model([x]).values()
        wanted = np.atleast_2d(classes)[:, x.argmax(1)]
        np.testing.assert_array_equal(label, wanted)
    assert region.op.split_region() is None, "it is one program"


def test_votes_of_samples_between_two_classes() -> None:
    """Their scores are exactly 0, although the products with weights are rounded."""
    ends = np.random.default_rng(2).random(200).astype(np.float32)
    samples = np.repeat(ends[:, None], 2, axis=1)
    _compare(
        "SVMClassifier",
        samples,
        outputs=2,
        classlabels_ints=[0, 1],
        vectors_per_class=[1, 1],
        coefficients=[0.1, -0.1],
        support_vectors=[1.0, 0.0, 0.0, 1.0],
        kernel_type="LINEAR",
        kernel_params=[1.0, 0.0, 1.0],
        rho=[0.0],
    )
