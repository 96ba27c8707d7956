"""INFERENCE_PRECISION=bfloat16: products and convolutions equal those of rounded operands.

Where the processor has no matrix tiles, they are emulated.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.operands import Layout
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from tests.support.conv import transposed
from tests.support.kernels import run_node

pytestmark = pytest.mark.usefixtures("tiles")
# Where products are dot products, Winograd's algorithm in float32 is often faster.
OPTION = {"INFERENCE_PRECISION": "bfloat16", "WINOGRAD": False}
ALWAYS = settings(max_examples=60, deadline=None)
Sizes = tuple[int, ...]


def rounded(array: Array) -> Array:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def reference(op_type: str, inputs: list[Array], attrs: dict[str, Any]) -> Array:
    """Return what onnx.reference computes in float64."""
    names = [f"i{number}" for number in range(len(inputs))]
    wide = [array.astype(np.float64) for array in inputs]
    node = onnx.helper.make_node(op_type, names, ["y"], **attrs)
    feeds = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.DOUBLE, array.shape)
        for name, array in zip(names, wide, strict=True)
    ]
    result = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.DOUBLE, None)
    graph = onnx.helper.make_graph([node], "g", feeds, [result])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)])
    results: Any = ReferenceEvaluator(model).run(None, dict(zip(names, wide, strict=True)))
    return np.asarray(results[0])


@ALWAYS
@given(
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 90), st.integers(1, 1100)),
    transposed=st.tuples(st.booleans(), st.booleans()),
    alpha=st.sampled_from([1.0, 0.5]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_products(
    sizes: tuple[int, int, int],
    transposed: tuple[bool, bool],
    alpha: float,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = sizes
    a = rng.standard_normal((k, m) if transposed[0] else (m, k)).astype(np.float32)
    b = rng.standard_normal((n, k) if transposed[1] else (k, n)).astype(np.float32)
    c = rng.standard_normal(n).astype(np.float32)
    attrs = {"transA": int(transposed[0]), "transB": int(transposed[1]), "alpha": alpha}
    (got,) = run_node(
        "Gemm", [a, b, c], [(m, n)], attrs, constant=[1, 2], threads=threads, cuts=[0.3],
        options=OPTION,
    )  # fmt: skip
    want = reference("Gemm", [rounded(a), rounded(b), c], attrs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * k**0.5)


@ALWAYS
@given(
    stack=st.lists(st.integers(1, 3), min_size=1, max_size=2),
    shared=st.booleans(),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 70)),
    seed=st.integers(0, 1 << 30),
)
def test_stacks_of_matrices(
    stack: list[int], shared: bool, sizes: tuple[int, int, int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = sizes
    a = rng.standard_normal((*stack, m, k)).astype(np.float32)
    b = rng.standard_normal((k, n) if shared else (*stack, k, n)).astype(np.float32)
    (got,) = run_node("MatMul", [a, b], [(*stack, m, n)], constant=[1], options=OPTION)
    want = rounded(a).astype(np.float64) @ rounded(b).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)


@ALWAYS
@given(
    stack=st.lists(st.integers(1, 3), max_size=2),
    shared=st.booleans(),
    sizes=st.tuples(st.integers(20, 90), st.integers(20, 90), st.integers(1, 100)),
    transposed=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_computed_operands(
    stack: list[int],
    shared: bool,
    sizes: tuple[int, int, int],
    transposed: bool,
    threads: int,
    seed: int,
) -> None:
    """The operands of large products are rounded in every run; small ones stay float32."""
    rng = np.random.default_rng(seed)
    m, n, k = sizes
    transposed = transposed and not stack
    a = rng.standard_normal((*stack, m, k)).astype(np.float32)
    b = rng.standard_normal((k, n) if shared else (*stack, k, n)).astype(np.float32)
    given_b = np.ascontiguousarray(b.T) if transposed else b
    (got,) = run_node(
        "Gemm" if transposed else "MatMul", [a, given_b], [(*stack, m, n)],
        {"transB": 1} if transposed else {}, threads=threads, cuts=[0.3], options=OPTION,
    )  # fmt: skip
    change = rounded if min(m, n) >= 32 and k >= 16 else np.asarray
    want = change(a).astype(np.float64) @ change(b).astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Sizes, Sizes, dict[str, Any]]:
    """Draw the shape of the images, that of the weights, and the attributes."""
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return [draw(st.integers(low, high)) for _ in range(rank)]

    groups = draw(st.sampled_from([1, 1, 1, 2]))
    inputs = (
        32 * draw(st.integers(1, 2))
        if groups > 1
        else draw(st.sampled_from([1, 3, 7, 8, 20, 32, 50, 70]))
    )
    outputs = 16 * draw(st.integers(1, 4)) if groups > 1 else draw(st.integers(1, 70))
    kernel, strides, dilations = each(1, 3), each(1, 3), each(1, 2)
    pads = [draw(st.integers(0, 3)) for _ in range(2 * rank)]
    sizes = [
        max(1, (k - 1) * d + 1 - pads[i] - pads[rank + i])
        + draw(st.integers(0, 20 if rank < 3 else 4))
        for i, (k, d) in enumerate(zip(kernel, dilations, strict=True))
    ]
    attrs = {"kernel_shape": kernel, "strides": strides, "dilations": dilations, "pads": pads}
    images = (draw(st.integers(1, 2)), groups * inputs, *sizes)
    return images, (groups * outputs, inputs, *kernel), attrs | {"group": groups}


@settings(max_examples=150, deadline=None)
@example(  # the only plane of the result reads the padding
    sizes=(
        (1, 3, 1, 4, 5),
        (4, 3, 1, 1, 1),
        {"kernel_shape": [1, 1, 1], "strides": [2, 1, 1], "pads": [1, 0, 0, 0, 0, 0]},
    ),
    blocked=False,
    threads=1,
    seed=0,
)
@given(
    sizes=convolutions(),
    blocked=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_convolutions(
    sizes: tuple[Sizes, Sizes, dict[str, Any]], blocked: bool, threads: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    images, weights, attrs = sizes
    x = rng.standard_normal(images).astype(np.float32)
    w = rng.standard_normal(weights).astype(np.float32)
    c = rng.standard_normal(weights[0]).astype(np.float32)
    want = reference("Conv", [rounded(x), rounded(w), c], attrs)
    (got,) = run_node(
        "Conv", [x, w, c], [want.shape], attrs, constant=[1, 2], threads=threads, cuts=[0.4],
        blocked=[0] if blocked else [], out_layout="blocked" if blocked else "plain",
        options=OPTION,
    )  # fmt: skip
    depth = weights[1] * int(np.prod(weights[2:]))
    if weights[1] < 5 and not np.allclose(got, want, 1e-4, 2e-5 * depth**0.5):
        # Few channels of volumes, or with a dilation, stay in float32.
        want = reference("Conv", [x, w, c], attrs)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * depth**0.5)


@pytest.mark.parametrize("size", [(14, 14), (20, 70), (33, 5), (7, 16)])
@pytest.mark.parametrize("dilations", [(12, 12), (6, 1), (5, 3), (13, 2)])
@pytest.mark.parametrize("strides", [(1, 1), (2, 1), (3, 2)])
def test_rows_of_taps_outside_of_the_image(size: Sizes, dilations: Sizes, strides: Sizes) -> None:
    """Tiles leave out the rows of taps that read only padding; their rows differ in which."""
    rng = np.random.default_rng(dilations)
    x = rng.standard_normal((2, 40, *size)).astype(np.float32)
    w = (rng.standard_normal((48, 40, 3, 3)) / 8).astype(np.float32)
    pads = [*dilations, *dilations]
    attrs = {"kernel_shape": [3, 3], "pads": pads, "dilations": dilations, "strides": strides}
    want = reference("Conv", [rounded(x), rounded(w)], attrs)
    (got,) = run_node(
        "Conv", [x, w], [want.shape], attrs, constant=[1], threads=2, cuts=[0.4],
        blocked=[0], out_layout="blocked", options=OPTION,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs", "kernel"),
    [(8, 24, 24, 3), (6, 24, 8, 1), (2, 20, 20, 3), (5, 8, 8, 1), (3, 40, 24, 5)],
)
@pytest.mark.parametrize("act", ["", "Sigmoid"])
@pytest.mark.parametrize("threads", [1, 2])
def test_groups_that_share_blocks(
    groups: int, inputs: int, outputs: int, kernel: int, act: str, threads: int
) -> None:
    """Groups that are no whole blocks of channels are multiplied together, with zeros between."""
    rng = np.random.default_rng(groups)
    x = rng.standard_normal((2, groups * inputs, 11, 9)).astype(np.float32)
    shape = (groups * outputs, inputs, kernel, kernel)
    w = (rng.standard_normal(shape) / 8).astype(np.float32)
    c = rng.standard_normal(len(w)).astype(np.float32)
    attrs = {"kernel_shape": [kernel] * 2, "pads": [kernel // 2] * 4, "group": groups}
    want = reference("Conv", [rounded(x), rounded(w), c], attrs)
    residual = rng.standard_normal(want.shape).astype(np.float32)
    want = want + residual
    want = 1 / (1 + np.exp(-want)) if act else want
    (got,) = run_node(
        "FusedConv", [x, w, c, residual], [want.shape],
        attrs | ({"activation": act} if act else {}), domain=INTERNAL_DOMAIN, constant=[1, 2],
        threads=threads, cuts=[0.4], blocked=[0, 3], out_layout="blocked", options=OPTION,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("size", "kernel", "strides", "pads"),
    [
        ((20, 37), (7, 7), (2, 2), (3, 3, 3, 3)),
        ((30, 45), (11, 11), (4, 4), (2, 1, 2, 0)),
        ((9, 70), (3, 16), (1, 3), (0, 20, 1, 0)),
        ((6, 50), (1, 2), (1, 1), (0, 0, 0, 0)),
        ((5, 12), (5, 9), (1, 1), (4, 0, 2, 7)),
    ],
)
def test_images_of_few_channels(
    channels: int, size: Sizes, kernel: Sizes, strides: Sizes, pads: Sizes
) -> None:
    """Rows of taps are multiplied at once; a pixel that is NaN is part of its own windows only."""
    rng = np.random.default_rng(channels)
    x = rng.standard_normal((2, channels, *size)).astype(np.float32)
    w = rng.standard_normal((48, channels, *kernel)).astype(np.float32)
    x[0, 0, size[0] // 2, size[1] // 2] = np.nan
    attrs = {"kernel_shape": kernel, "strides": strides, "pads": pads}
    want = reference("Conv", [rounded(x), rounded(w)], attrs)
    (got,) = run_node(
        "Conv", [x, w], [want.shape], attrs, constant=[1], threads=2, cuts=[0.4],
        out_layout="blocked", options=OPTION,
    )  # fmt: skip
    depth = channels * int(np.prod(kernel))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * depth**0.5)
    assert np.isnan(want).any()


@pytest.mark.parametrize("width", [5, 7, 10, 14, 15, 16, 17, 28, 40, 56])
@pytest.mark.parametrize("kernel", [(1, 2), (3, 3), (5, 3)])
@pytest.mark.parametrize("act", ["", "Relu", "Sigmoid"])
def test_tiles_of_several_rows(width: int, kernel: Sizes, act: str) -> None:
    """Tiles begin and end anywhere in the rows of an image."""
    rng = np.random.default_rng(width)
    x = rng.standard_normal((2, 32, 9, width)).astype(np.float32)
    w = (rng.standard_normal((80, 32, *kernel)) / 8).astype(np.float32)
    c = rng.standard_normal(80).astype(np.float32)
    pads = [kernel[0] // 2, 1, kernel[0] // 2, kernel[1] - 2]
    attrs = {"kernel_shape": kernel, "pads": pads}
    want = reference("Conv", [rounded(x), rounded(w), c], attrs)
    residual = rng.standard_normal(want.shape).astype(np.float32)
    want = want + residual
    want = {"": want, "Relu": np.maximum(want, 0), "Sigmoid": 1 / (1 + np.exp(-want))}[act]
    (got,) = run_node(
        "FusedConv", [x, w, c, residual], [want.shape],
        attrs | ({"activation": act} if act else {}), domain=INTERNAL_DOMAIN, constant=[1, 2],
        threads=2, cuts=[0.4], blocked=[0, 3], out_layout="blocked", options=OPTION,
    )  # fmt: skip
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)


@settings(max_examples=100, deadline=None)
@given(
    groups=st.sampled_from([1, 1, 2]),
    channels=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    rest=st.tuples(st.integers(0, 31), st.integers(0, 15)),
    axes=st.lists(
        st.tuples(*(st.integers(1, most) for most in (21, 5, 3, 2)), st.integers(0, 2)),
        min_size=1,
        max_size=2,
    ),
    act=st.sampled_from(["", "Relu", "Sigmoid"]),
    layouts=st.sampled_from(["plain", "blocked"]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_transposed_convolutions(
    groups: int,
    channels: tuple[int, int],
    rest: tuple[int, int],
    axes: list[tuple[int, int, int, int, int]],
    act: str,
    layouts: Layout,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    sizes, kernel, strides, dilations, before = zip(*axes, strict=True)
    inputs, outputs = 32 * channels[0], 16 * channels[1]
    if groups == 1:
        inputs, outputs = inputs - rest[0], outputs + rest[1]
    full = [
        (n - 1) * s + (k - 1) * d + 1
        for n, k, s, d in zip(sizes, kernel, strides, dilations, strict=True)
    ]
    pads = [min(pad, n - 1) for pad, n in zip(before, full, strict=True)]
    out = [n - pad for pad, n in zip(pads, full, strict=True)]
    x = rng.standard_normal((2, groups * inputs, *sizes)).astype(np.float32)
    w = rng.standard_normal((groups * inputs, outputs, *kernel)).astype(np.float32)
    c = rng.standard_normal(groups * outputs).astype(np.float32)
    attrs = {"strides": strides, "dilations": dilations, "pads": [*pads, *[0] * len(pads)]}
    attrs |= {"group": groups, "kernel_shape": kernel}
    (got,) = run_node(
        "ConvTranspose", [x, w, c], [(2, groups * outputs, *out)],
        attrs | ({"activation": act} if act else {}), constant=[1, 2], threads=threads,
        cuts=[0.4], blocked=[0] if layouts == "blocked" else [], out_layout=layouts,
        options=OPTION,
    )  # fmt: skip
    want = transposed(rounded(x), rounded(w), strides, dilations, pads, out, groups)
    want += c.reshape(-1, *[1] * len(axes))
    want = {"": want, "Relu": np.maximum(want, 0), "Sigmoid": 1 / (1 + np.exp(-want))}[act]
    depth = inputs * int(np.prod(kernel))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-5 * depth**0.5)


def network() -> tuple[sg.Graph, Array]:
    """Return a graph with a residual, activations, two convolutions and a product, and an input."""
    rng = np.random.default_rng(7)

    def weight(name: str, *shape: int) -> sg.Value:
        return sg.parameter(name, rng.standard_normal(shape).astype(np.float32) / 8)

    x = sg.input("x", shape=(2, 24, 13, 11), dtype="float32")
    h = ops.Relu(ops.Conv(x, weight("a", 40, 24, 3, 3), weight("ab", 40), pads=[1] * 4))
    h = ops.Relu(ops.Add(ops.Conv(h, weight("b", 40, 40, 1, 1)), h))
    h = ops.Sigmoid(ops.Conv(h, weight("c", 36, 40, 3, 3), strides=[2, 2]))
    flat = ops.Flatten(ops.GlobalAveragePool(h))
    y = ops.Relu(ops.Gemm(flat, weight("d", 36, 21), weight("db", 21)))
    return sg.Graph([x], [y]), rng.standard_normal((2, 24, 13, 11)).astype(np.float32)


def test_a_network_runs_on_matrix_tiles_and_is_close() -> None:
    graph, x = network()
    model = sg.compile_model(graph, "CPU", {**OPTION, "ENABLE_PROFILING": True})
    request = model.create_infer_request()
    got = request.infer([x])[0]
    kernels = [entry.kernel for entry in request.profile()]
    assert sum("bfloat16.kernels.convolve" in kernel for kernel in kernels) == 3
    assert any("gemm" in kernel and "operands='bfloat16'" in kernel for kernel in kernels)
    exact = sg.compile_model(graph, "CPU")([x])[0]
    error = np.abs(np.asarray(got) - exact).max() / np.abs(exact).max()
    assert 0 < error < 0.02


def test_the_default_computes_in_float32() -> None:
    graph, x = network()
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    request.infer([x])
    assert not any("bfloat16" in entry.kernel for entry in request.profile())


def test_new_values_of_weights_are_rounded_again() -> None:
    graph, x = network()
    model = sg.compile_model(graph, "CPU", OPTION)
    before = np.asarray(model([x])[0])
    weight = model.parameters["d"]
    weight.assign(2 * weight.array)
    bias = model.parameters["db"]
    bias.assign(2 * bias.array)
    np.testing.assert_allclose(model([x])[0], 2 * before, rtol=1e-5, atol=1e-5)


def test_special_values() -> None:
    b = np.array([[1.00390625, 1.01171875, -np.inf, np.nan, 3.3e38, -0.0, 1e30]], np.float32)
    (got,) = run_node("MatMul", [np.ones((1, 1), np.float32), b], [(1, 7)], constant=[1],
                      options=OPTION)  # fmt: skip
    np.testing.assert_array_equal(got, rounded(b))
    ones = np.ones((7, 1), np.float32)
    (got,) = run_node("MatMul", [b.T.copy(), ones.T.copy()[:, :1]], [(7, 1)], constant=[1],
                      options=OPTION)  # fmt: skip
    np.testing.assert_array_equal(got, rounded(b).T)


def test_the_device_says_that_it_computes_in_bfloat16() -> None:
    assert "BF16" in sg.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def test_an_unknown_precision_is_an_error() -> None:
    with pytest.raises(sg.ConfigError, match="INFERENCE_PRECISION"):
        sg.compile_model(network()[0], "CPU", {"INFERENCE_PRECISION": "float8"})


def test_exported_models_keep_the_precision(tmp_path: object) -> None:
    graph, x = network()
    model = sg.compile_model(graph, "CPU", OPTION)
    path = f"{tmp_path}/model.sgc"
    model.export_model(path)
    again = sg.Core().import_model(path, "CPU")
    np.testing.assert_array_equal(again([x])[0], model([x])[0])


@pytest.mark.parametrize("device", ["CPU", "AUTO:CPU", "MULTI:CPU", "HETERO:CPU,REFERENCE"])
def test_devices_over_others_pass_the_option_on(device: str) -> None:
    graph, x = network()
    rounded_by = sg.compile_model(graph, device, OPTION)([x])[0]
    np.testing.assert_array_equal(rounded_by, sg.compile_model(graph, "CPU", OPTION)([x])[0])
    assert np.abs(rounded_by - sg.compile_model(graph, device)([x])[0]).max() > 0


def test_other_devices_take_the_option() -> None:
    graph, x = network()
    want = sg.compile_model(graph, "REFERENCE")([x])[0]
    option = {"INFERENCE_PRECISION": "bfloat16"}
    np.testing.assert_array_equal(sg.compile_model(graph, "REFERENCE", option)([x])[0], want)
