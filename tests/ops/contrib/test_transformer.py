"""ONNX Runtime's fused operators, against ONNX Runtime, and NumPy where it has no CPU kernel."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.contrib import check, node_model

pytestmark = pytest.mark.filterwarnings("ignore")


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def whole(high: int, *shape: int, seed: int = 0, dtype: Any = np.int64) -> Array:
    return np.random.default_rng([seed, *shape]).integers(0, high, shape).astype(dtype)


# Activations


@pytest.mark.parametrize("shape", [(2, 5, 16), (3,), (0, 4)])
def test_activations(shape: tuple[int, ...]) -> None:
    x, bias = 2 * normal(*shape), normal(shape[-1], seed=1)
    check("Gelu", [x])
    check("BiasGelu", [x, bias], constants=[1])
    check("FastGelu", [x], atol=1e-4)
    check("FastGelu", [x, bias], constants=[1], atol=1e-4)
    check("QuickGelu", [x])
    check("QuickGelu", [x], alpha=1.0)


def test_activations_of_products() -> None:
    x, w, bias = normal(2, 5, 16), normal(16, 12, seed=1), normal(12, seed=2)
    total = x @ w + bias
    inner = np.sqrt(2 / np.pi) * (total + 0.044715 * total**3)
    want = (0.5 * total * (1 + np.tanh(inner))).astype(np.float32)
    check("GemmFastGelu", [x, w, bias], constants=[1, 2], expected=[want], atol=1e-4)


def test_split_gelu_and_bias_add() -> None:
    from math import erf

    x, bias = normal(2, 5, 16), normal(16, seed=1)
    left, right = np.split(x + bias, 2, axis=-1)
    gelu = right * 0.5 * (1 + np.vectorize(erf)(right / np.sqrt(2)))
    check("BiasSplitGelu", [x, bias], expected=[(left * gelu).astype(np.float32)])
    skip = normal(2, 5, 16, seed=2)
    check("BiasAdd", [x, bias, skip], expected=[x + bias + skip])


@pytest.mark.parametrize("axis", [-1, 2, 3])
def test_bias_softmax(axis: int) -> None:
    x, bias = normal(2, 3, 4, 5), normal(2, 1, 4, 5, seed=1)
    total = (x + bias).reshape(2, 3, *((4, 5) if axis != 2 else (20,)))
    power = np.exp(total - total.max(-1, keepdims=True))
    want = (power / power.sum(-1, keepdims=True)).reshape(x.shape)
    check("BiasSoftmax", [x, bias], expected=[want], axis=axis, is_inner_broadcast=1)


def test_bias_dropout() -> None:
    x, bias, residual = normal(2, 5), normal(5, seed=1), normal(2, 5, seed=2)
    form: dict[str, Any] = {"expected": [x + bias + residual, np.ones((2, 5), bool)]}
    check("BiasDropout", [x, bias, residual], outputs=[True, True], **form)


# Normalization


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("beta", [False, True])
@pytest.mark.parametrize("skip", [(2, 5, 16), (1, 5, 16), (5, 16)])
def test_skip_layer_normalization(bias: bool, beta: bool, skip: tuple[int, ...]) -> None:
    x, other, gamma = normal(2, 5, 16), normal(*skip, seed=1), normal(16, seed=2)
    rest = [normal(16, seed=3) if beta else None, normal(16, seed=4) if bias else None]
    form: dict[str, Any] = {"constants": [2, 3, 4], "atol": 1e-4}
    check("SkipLayerNormalization", [x, other, gamma, *rest], epsilon=1e-5, **form)
    four = [True, False, False, True]
    check("SkipLayerNormalization", [x, other, gamma, *rest], outputs=four, **form)
    simple = [x, other, gamma, rest[1]]
    check("SkipSimplifiedLayerNormalization", simple, epsilon=1e-5, **form)
    check("SkipSimplifiedLayerNormalization", simple, outputs=four, **form)


def test_statistics_of_skip_layer_normalization() -> None:
    x, skip, gamma, beta = normal(4, 8), normal(4, 8, seed=1), normal(8, seed=2), normal(8, seed=3)
    total = x + skip
    mean = total.mean(-1, keepdims=True)
    factor = 1 / np.sqrt(total.var(-1, keepdims=True) + 1e-12)
    want = [(total - mean) * factor * gamma + beta, mean, factor, total]
    form: dict[str, Any] = {"outputs": [True] * 4, "expected": want, "rtol": 1e-4}
    check("SkipLayerNormalization", [x, skip, gamma, beta], **form)


@pytest.mark.parametrize("axis", [-1, 1])
def test_simplified_layer_normalization(axis: int) -> None:
    x, scale = normal(2, 5, 16), normal(*((16,) if axis < 0 else (5, 16)), seed=1)
    form: dict[str, Any] = {"domain": "", "constants": [1], "axis": axis}
    check("SimplifiedLayerNormalization", [x, scale], **form)
    check("SimplifiedLayerNormalization", [x, scale], outputs=[True, True], **form)


def test_layer_normalization_before_the_standard_had_it() -> None:
    x, scale, bias = normal(2, 5, 16), normal(16, seed=1), normal(16, seed=2)
    form: dict[str, Any] = {"domain": "", "constants": [1, 2], "standard": 12}
    check("LayerNormalization", [x, scale, bias], **form)
    check("LayerNormalization", [x, scale], axis=-2 + 1, epsilon=1e-3, **form)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("silu", [0, 1])
def test_group_norm(last: int, silu: int) -> None:
    x, gamma, beta = normal(2, 8, 5, 6), normal(8, seed=1), normal(8, seed=2)
    skip, bias = normal(2, 8, seed=3), normal(8, seed=4)

    def norm(values: Array) -> Array:
        rows = values.reshape(2, 4, -1)
        rows = (rows - rows.mean(-1, keepdims=True)) / np.sqrt(rows.var(-1, keepdims=True) + 1e-5)
        out = rows.reshape(x.shape) * gamma[:, None, None] + beta[:, None, None]
        return out / (1 + np.exp(-out)) if silu else out

    def transposed(values: Array) -> Array:
        return np.ascontiguousarray(values.transpose(0, 2, 3, 1)) if last else values

    form: dict[str, Any] = {"groups": 4, "activation": silu, "channels_last": last, "atol": 1e-4}
    check("GroupNorm", [transposed(x), gamma, beta], expected=[transposed(norm(x))], **form)
    if last:
        total = x + skip[:, :, None, None] + bias[:, None, None]
        want = [transposed(norm(total)), transposed(total)]
        given = [transposed(x), gamma, beta, skip, bias]
        check("SkipGroupNorm", given, expected=want, outputs=[True, True], **form)


# Embeddings


@pytest.mark.parametrize("parts", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("position_ids", [False, True])
def test_embeddings(parts: bool, mask: bool, position_ids: bool) -> None:
    ids = whole(20, 2, 6, dtype=np.int32)
    tables = [normal(20, 16), normal(9, 16, seed=1), normal(3, 16, seed=2) if parts else None]
    inputs = [ids, whole(3, 2, 6, dtype=np.int32) if parts else None, *tables]
    inputs += [normal(16, seed=3), normal(16, seed=4)]
    inputs += [np.array([[1] * 6, [1] * 4 + [0] * 2], np.int32) if mask else None]
    inputs += [whole(9, 2, 6, seed=5, dtype=np.int32) if position_ids else None]
    form: dict[str, Any] = {"constants": [2, 3, 4, 5, 6], "atol": 1e-4}
    check("EmbedLayerNormalization", inputs, outputs=[True, True, True], **form)
    check("EmbedLayerNormalization", inputs, outputs=[True, True], **form)


def test_embeddings_in_bytes() -> None:
    ids, parts = whole(20, 2, 6, dtype=np.int32), whole(3, 2, 6, seed=1, dtype=np.int32)
    tables = [whole(255, *shape, seed=9, dtype=np.uint8) for shape in ((20, 16), (9, 16), (3, 16))]
    tables += [whole(255, 16, seed=seed, dtype=np.uint8) for seed in (3, 4)]
    scales = [np.array(np.float32(0.01 * k)) for k in range(1, 6)]
    zeros = [np.array(np.uint8(100 + k)) for k in range(5)]
    mask = np.array([[1] * 6, [1] * 4 + [0] * 2], np.int32)
    inputs = [ids, parts, *tables, mask, *scales, *zeros]
    form: dict[str, Any] = {"constants": [*range(2, 7), *range(8, 18)], "atol": 1e-4}
    check("QEmbedLayerNormalization", inputs, outputs=[True, True], **form)


@pytest.mark.parametrize("both", [0, 1])
def test_relative_positions(both: int) -> None:
    # ONNX Runtime has it for other devices only: the buckets of T5, one distance at a time.
    table, queries, keys, furthest = normal(16, 4), 9, 40, 20

    def bucket(distance: int) -> int:
        count, first = 16, 0
        if both:
            count //= 2
            first = count if distance < 0 else 0
            distance = abs(distance)
        distance = max(distance, 0)
        exact = count // 2
        if distance < exact:
            return first + distance
        steps = np.log(distance / exact) / np.log(furthest / exact) * (count - exact)
        return first + min(exact + int(steps), count - 1)

    rows = [[table[bucket(q - k)] for k in range(keys)] for q in range(queries)]
    want = np.array(rows, np.float32).transpose(2, 0, 1)[None]
    lengths = [np.array([n], np.int64) for n in (queries, keys)]
    form: dict[str, Any] = {"max_distance": furthest, "is_bidirectional": both}
    check("RelativePositionBias", [table, *lengths], constants=[0, 1, 2], expected=[want], **form)


# Products and convolutions


@pytest.mark.parametrize("transposes", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("alpha", [1.0, 0.125])
def test_transposed_products(transposes: tuple[int, int], alpha: float) -> None:
    a = normal(2, 3, *((6, 4) if transposes[0] else (4, 6)))
    b = normal(2, 3, *((5, 6) if transposes[1] else (6, 5)), seed=1)
    form: dict[str, Any] = {"transA": transposes[0], "transB": transposes[1], "alpha": alpha}
    check("FusedMatMul", [a, b], **form)
    check("TransposeMatMul", [a, b], **form)
    check("FusedMatMul", [a[0, 0], b[0, 0]], constants=[1], **form)


@pytest.mark.parametrize("batches", [(1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("transposes", [(0, 0), (1, 1)])
def test_products_with_turned_batches(
    batches: tuple[int, int], transposes: tuple[int, int]
) -> None:
    def laid_out(matrix: Array, batch: int, transpose: int) -> Array:
        array = matrix.swapaxes(-1, -2) if transpose else matrix
        return np.ascontiguousarray(np.moveaxis(array, -2, 0) if batch else array)

    a, b = normal(2, 3, 4, 6), normal(2, 3, 6, 5, seed=1)
    given = [laid_out(x, *how) for x, *how in zip((a, b), batches, transposes, strict=True)]
    form: dict[str, Any] = {"transA": transposes[0], "transB": transposes[1]}
    form |= {"transBatchA": batches[0], "transBatchB": batches[1]}
    check("FusedMatMul", given, **form)


_SIMPLE = [("Relu", {}), ("Tanh", {}), ("Sigmoid", {}), ("LeakyRelu", {"activation_alpha": 0.3})]


@pytest.mark.parametrize(("name", "given"), [*_SIMPLE, ("Softplus", {})])
def test_products_with_activations(name: str, given: dict[str, float]) -> None:
    a, b, c = normal(4, 6), normal(5, 6, seed=1), normal(5, seed=2)
    form: dict[str, Any] = {"transB": 1, "alpha": 0.5, "activation": name, **given}
    check("FusedGemm", [a, b, c], constants=[1, 2], beta=2.0, **form)
    total = a @ b.T * 0.5
    if name in ("Relu", "LeakyRelu"):
        slope = given.get("activation_alpha", 0.0)
        want = np.where(total < 0, total * np.float32(slope), total).astype(np.float32)
        check("FusedMatMulActivation", [a, b], expected=[want], **form)


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("activation", [None, "Relu", "LeakyRelu", "Clip", "HardSigmoid", "Tanh"])
def test_convolution_with_activations(other: bool, activation: str | None) -> None:
    inputs = [normal(2, 6, 9, 8), normal(8, 3, 3, 3, seed=1), normal(8, seed=2)]
    inputs += [normal(2, 8, 9, 4, seed=3) if other else None]
    form: dict[str, Any] = {"group": 2, "pads": [1, 1, 1, 1], "strides": [1, 2]}
    parameters = {"LeakyRelu": [0.1], "Clip": [-0.5, 1.0], "HardSigmoid": [0.3, 0.4]}
    if activation:
        form["activation"] = activation
    if activation in parameters:
        form["activation_params"] = parameters[activation]
    check("FusedConv", inputs, constants=[1, 2], kernel_shape=[3, 3], atol=1e-4, **form)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8])
def test_pool_with_channels_last(dtype: Any) -> None:
    x = whole(120, 2, 9, 8, 6, dtype=dtype)
    form: dict[str, Any] = {"kernel_shape": [3, 2], "strides": [2, 1], "pads": [1, 0, 1, 1]}
    check("NhwcMaxPool", [x], steps=0, **form)


# Older and plain operators


def test_plain_operators() -> None:
    x = normal(2, 5, 5)
    check("Trilu", [x])
    check("Trilu", [x, np.array(-1)], constants=[1], upper=0)
    data, position_ids = normal(4, 3, 5), np.array([[1, 2], [3, 0]])
    check("GatherND", [data, position_ids])
    check("GatherND", [data, position_ids.astype(np.int32)])
    check("Range", [np.array(k, np.float32) for k in (1, 4, 0.5)], constants=[0, 1, 2])
    check("Range", [np.array([k], np.int32) for k in (2, 9)], constants=[0, 1])
    check("Pad", [normal(2, 3), np.array([1, 0, 2, 1])], constants=[1], mode="edge")
    value = np.array([7.0], np.float32)
    check("Pad", [normal(2, 3), np.array([[1, 0, 2, 1]]), value], constants=[1, 2])
    check("ExpandDims", [normal(2, 3), np.array(1, np.int32)], constants=[1])
    check("CDist", [normal(4, 6), normal(5, 6, seed=1)], metric="euclidean", atol=1e-4)
    check("CDist", [normal(4, 6), normal(5, 6, seed=1)], metric="sqeuclidean", atol=1e-4)


def test_unique_keeps_the_order() -> None:
    x = np.array([3.0, 1, 3, 2, 1, 3], np.float32)
    check("Unique", [x], outputs=[True] * 3, devices=["REFERENCE"])


@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
def test_grid_sample(mode: str) -> None:
    grid = np.random.default_rng(3).uniform(-1.2, 1.2, (2, 4, 5, 2)).astype(np.float32)
    form: dict[str, Any] = {"mode": mode, "align_corners": 1}
    check("GridSample", [normal(2, 3, 6, 7), grid], atol=1e-4, **form)


# Devices, precision, options


def test_half_precision_runs_on_kernels() -> None:
    x, skip, gamma = (normal(*s, seed=k) for k, s in enumerate([(2, 5, 16), (2, 5, 16), (16,)]))
    given = [a.astype(np.float16) for a in (x, skip, gamma)]
    for op_type, inputs in (
        ("SkipLayerNormalization", given),
        ("BiasGelu", [given[0], given[2]]),
        ("FusedMatMul", [given[0], given[1].swapaxes(1, 2).copy()]),
    ):
        model = sg.load(node_model(op_type, inputs))
        assert set(sg.default_core().query_model(model, "CPU")) == {"node"}
        fed = {f"x{k}": a for k, a in enumerate(inputs)}
        expected = sg.compile_model(model, "REFERENCE")(fed)[0]
        found = sg.compile_model(model, "CPU")(fed)[0]
        np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("device", ["OPENCL", "AUTO", "HETERO:OPENCL,CPU"])
def test_every_device_takes_them(device: str) -> None:
    x, skip, gamma = normal(2, 5, 16), normal(2, 5, 16, seed=1), normal(16, seed=2)
    form: dict[str, Any] = {"devices": [device], "atol": 1e-4}
    check("SkipLayerNormalization", [x, skip, gamma], **form)
    check("FusedMatMul", [x, skip], transB=1, alpha=0.5, **form)
    weights = [normal(16, 48, seed=3) / 4, normal(48, seed=4)]
    check("Attention", [x, *weights], num_heads=2, constants=[1, 2], **form)


def test_no_fusion_needs_no_bodies_less() -> None:
    x, bias = normal(2, 5, 16), normal(16, seed=1)
    model = node_model("BiasGelu", [x, bias], constants=[1])
    compiled = sg.compile_model(sg.load(model), "CPU", {"FUSION": False})
    expected = sg.compile_model(sg.load(model), "REFERENCE")(x0=x)[0]
    np.testing.assert_allclose(compiled(x0=x)[0], expected, rtol=1e-5, atol=1e-6)
    assert set(sg.default_core().query_model(sg.load(model), "CPU", {"FUSION": False})) == {"node"}


def test_a_users_own_definition_comes_first() -> None:
    def compute(node: sg.Node, inputs: Any) -> list[Array]:
        return [inputs[0] + 1]

    core = sg.Core()
    schema = sg.Schema("GemmFloat8", "com.microsoft", inputs=("A",), outputs=("Y",))
    core.add_extension(sg.Operator(schema=schema, compute=compute))
    model = sg.load(node_model("GemmFloat8", [normal(2, 3)]))
    assert core.compile_model(model)(x0=normal(2, 3))[0][0, 0] == normal(2, 3)[0, 0] + 1


def test_what_nobody_defines_is_named() -> None:
    graph = sg.load(node_model("LongformerAttention", [normal(2, 3)]))
    with pytest.raises(sg.UnsupportedOpError, match=r"'node'.*com\.microsoft\.LongformerAttention"):
        sg.compile_model(graph)(x0=normal(2, 3))


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gated_add_and_scaled_silu(dtype: str) -> None:
    rng = np.random.default_rng(0)
    x, y, gate = (rng.standard_normal((2, 5, n)).astype(dtype) for n in (4, 4, 1))
    rounded = 1e-5 if dtype == "float32" else 2e-3
    check("GatedAdd", [x, y, gate], rtol=rounded, atol=rounded)
    check("ScaledSiLU", [x], rtol=rounded, atol=rounded, alpha=0.3)
    check("ScaledSiLU", [x, np.array(2.5, np.float32)], rtol=rounded, atol=rounded, alpha=0.3)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("scale", [(4,), (3, 4), (12,), None])
@pytest.mark.parametrize("flat", [True, False])
def test_branchwise_norm(flat: bool, scale: tuple[int, ...] | None, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 5, 12) if flat else (2, 5, 3, 4)).astype(dtype)
    factors = None if scale is None else rng.standard_normal(scale).astype(dtype)
    rounded = 1e-5 if dtype == "float32" else 2e-3
    form: dict[str, Any] = {"num_branches": 3} if flat else {}
    check("BranchwiseRMSNorm", [x, factors], rtol=rounded, atol=rounded, epsilon=1e-3, **form)


@pytest.mark.parametrize(
    "form", [{"dim": 1, "size": 4, "step": 2}, {"size": 2}, {"dim": -3, "size": 2}]
)
def test_unfold_tensor(form: dict[str, Any]) -> None:
    check("UnfoldTensor", [np.arange(2 * 9 * 3, dtype=np.float32).reshape(2, 9, 3)], **form)
