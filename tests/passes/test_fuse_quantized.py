"""QDQ models: what they become; bit for bit as ONNX Runtime's integer kernels compute them.

`tests.support.quantized_models` says what differs.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from onnx import ModelProto
from onnx.reference import ReferenceEvaluator

import subgraph as sg
from subgraph import ops
from subgraph.graph.graph import Value
from subgraph.graph.types import Array
from subgraph.system import host
from subgraph.transform.pass_manager import apply_pass
from tests.support.quantized_models import (
    INTEGERS,
    Builder,
    by_devices,
    check,
    drawn,
    operators,
    steps,
)

FEW = settings(max_examples=12, deadline=None)


def conv_model(
    b: Builder,
    channels: tuple[int, int],
    kernel: int,
    groups: int,
    per_channel: bool,
    after: str,
    size: tuple[int, int] = (7, 9),
) -> tuple[ModelProto, dict[str, Array]]:
    inputs, outputs = channels
    b.scale("x", 0.02)
    w, scale = b.weight(
        "w", (outputs, inputs // groups, kernel, kernel), 0 if per_channel else None
    )
    c = b.bias("c", outputs, np.float32(0.02) * scale)
    pads = [kernel // 2] * 4
    real = b.node("Conv", [b.dequantize("x"), w, c], "conv", pads=pads, group=groups)
    if after == "Relu":
        real = b.node("Relu", [real], "act")
    elif after == "Clip":
        real = b.node("Clip", [real, b.constant("l", np.float32(0)), b.constant("h", np.float32(1))], "act")  # fmt: skip # noqa: E501
    b.node("QuantizeLinear", [real, *b.scale("y", 0.05)], "y")
    shape = (1, inputs, *size)
    return b.model({"x": (b.dtype, shape)}, "y"), {"x": drawn(b, shape)}


@FEW
@given(
    channels=st.tuples(st.integers(8, 40), st.integers(1, 40)),
    kernel=st.sampled_from([1, 3]),
    per_channel=st.booleans(),
    dtype=st.sampled_from(["uint8", "int8"]),
    after=st.sampled_from(["", "Relu", "Clip"]),
    seed=st.integers(0, 1 << 30),
)
@example((30, 29), 1, False, "uint8", "Relu", 102130024).via("126.500006: 126.5 in float32")
def test_convolutions(
    channels: tuple[int, int], kernel: int, per_channel: bool, dtype: str, after: str, seed: int
) -> None:
    b = Builder(seed, dtype)
    model, inputs = conv_model(b, channels, kernel, 1, per_channel, after)
    assert operators(model) == ["FusedQLinearConv"]
    check(model, inputs)


@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize(
    ("channels", "groups"),
    [
        ((24, 24), 24),
        ((17, 17), 17),
        ((32, 64), 2),
        ((48, 48), 12),  # four go together
        ((40, 40), 5),  # two, and one is left
        ((12, 18), 3),  # all
    ],
)
def test_grouped_convolutions(channels: tuple[int, int], groups: int, kernel: int) -> None:
    model, inputs = conv_model(Builder(0), channels, kernel, groups, True, "")
    assert operators(model) == ["FusedQLinearConv"]
    check(model, inputs)


@pytest.mark.parametrize("high", [90, -0.2])
@pytest.mark.parametrize("zero", [-128, 126, 127])
def test_bounds_of_an_activation_beyond_the_bytes(zero: int, high: float) -> None:
    b = Builder(0, "int8")
    b.scale("x", 0.02)
    w, _ = b.weight("w", (8, 16, 1, 1), None)
    real = b.node("Conv", [b.dequantize("x"), w], "conv")
    bounds = [b.constant("l", np.float32(0.3)), b.constant("h", np.float32(high))]
    real = b.node("Clip", [real, *bounds], "act")
    y = b.constant("ys", np.float32(0.05)), b.constant("yz", np.int8(zero))
    b.scales["y"] = y
    b.node("QuantizeLinear", [real, *y], "y")
    model = b.model({"x": ("int8", (1, 16, 5, 5))}, "y")
    assert operators(model) == ["FusedQLinearConv"]
    check(model, {"x": drawn(b, (1, 16, 5, 5))}, exact=False)


@pytest.mark.parametrize(("kernel", "by_winograd"), [(3, True), (1, False)])
@pytest.mark.parametrize("after", ["", "Relu"])
def test_convolutions_that_take_less_time_in_floats(
    kernel: int, by_winograd: bool, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "has_vnni", lambda: False)
    monkeypatch.setattr(host, "has_int8_tiles", lambda: False)
    model, inputs = conv_model(Builder(7), (64, 48), kernel, 1, True, after, (20, 20))
    request = sg.compile_model(sg.load(model), "CPU").create_infer_request()
    got = next(iter(request.infer(inputs).values()))
    kernels = " ".join(entry.kernel for entry in request.profile())
    assert ("winograd" in kernels) == by_winograd
    # Winograd's sums have errors of at most 1e-5 of the largest, which is within the bytes.
    np.testing.assert_allclose(got, steps(model, inputs), rtol=0, atol=0.5 + 1e-2)


def test_groups_that_are_far_from_blocks_run_as_floats() -> None:
    model, inputs = conv_model(Builder(0), (20, 30), 3, 5, True, "Relu")
    check(model, inputs, exact=False)


@FEW
@given(
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 50), st.integers(1, 70)),
    op_type=st.sampled_from(["Gemm", "MatMul"]),
    per_channel=st.booleans(),
    dtype=st.sampled_from(["uint8", "int8"]),
    seed=st.integers(0, 1 << 30),
)
def test_products(
    sizes: tuple[int, int, int], op_type: str, per_channel: bool, dtype: str, seed: int
) -> None:
    m, n, k = sizes
    b = Builder(seed, dtype)
    b.scale("x", 0.02)
    turned = op_type == "Gemm"
    axis = (0 if turned else 1) if per_channel else None
    w, scale = b.weight("w", (n, k) if turned else (k, n), axis)
    given_ = [b.dequantize("x"), w]
    if turned:
        given_.append(b.bias("c", n, np.float32(0.02) * scale))
    attributes = {"transB": 1} if turned else {}
    real = b.node(op_type, given_, "product", **attributes)
    b.node("QuantizeLinear", [real, *b.scale("y", 0.05)], "y")
    model = b.model({"x": (dtype, (m, k))}, "y")
    assert operators(model) == ["FusedQLinearMatMul"]
    check(model, {"x": drawn(b, (m, k))})


@pytest.mark.parametrize("op_type", ["Conv", "Gemm"])
def test_weights_that_are_quantised_in_the_graph(op_type: str) -> None:
    """PyTorch keeps float weights and writes their rounding, without zero points or bias scales."""
    b = Builder(5, "int8")
    x = b.quantize("x", "q", 0.02)
    shape = (24, 16, 3, 3) if op_type == "Conv" else (24, 16)
    real_w = b.constant("w", b.rng.standard_normal(shape).astype(np.float32))
    pair = real_w, b.constant("ws", b.rng.uniform(0.02, 0.04, 24).astype(np.float32))
    zero = b.constant("wz", np.zeros(24, np.int8))
    held = b.node("QuantizeLinear", [*pair, zero], "w8", axis=0)
    wide = b.node("DequantizeLinear", [held, pair[1], zero], "w_real", axis=0)
    c = b.constant("c", b.rng.standard_normal(24).astype(np.float32))
    attributes = {} if op_type == "Conv" else {"transB": 1}
    real = b.node(op_type, [x, wide, c], "product", **attributes)
    b.node("QuantizeLinear", [real, *b.scale("y", 0.05)], "y")
    given_ = (1, 16, 6, 6) if op_type == "Conv" else (3, 16)
    model = b.model({"x": ("float32", given_)}, "y")
    name = "FusedQLinearConv" if op_type == "Conv" else "FusedQLinearMatMul"
    assert name in operators(model)
    inputs = {"x": b.rng.standard_normal(given_).astype(np.float32)}
    check(model, inputs, exact=False)
    compiled = sg.compile_model(sg.load(model), "CPU", {"ENABLE_PROFILING": True, **INTEGERS})
    request = compiled.create_infer_request()
    request.infer(inputs)
    assert any("qlinear_kernels.product" in entry.kernel for entry in request.profile())


def test_float_bias_is_added_to_the_scaled_sum() -> None:
    b = Builder(3)
    b.scale("x", 0.02)
    w, _ = b.weight("w", (20, 16, 3, 3), 0)
    c = b.constant("c", b.rng.standard_normal(20).astype(np.float32))
    real = b.node("Conv", [b.dequantize("x"), w, c], "conv")
    b.node("QuantizeLinear", [real, *b.scale("y", 0.05)], "y")
    model = b.model({"x": ("uint8", (2, 16, 6, 6))}, "y")
    assert operators(model) == ["FusedQLinearConv"]
    check(model, {"x": drawn(b, (2, 16, 6, 6))}, exact=False)


def residual_model(seed: int) -> tuple[ModelProto, dict[str, Array]]:
    """Return a block with a shared input, a pool, a sum, a concatenation and a reshape."""
    b = Builder(seed)
    x = b.quantize("x", "q", 0.02)
    w, scale = b.weight("w", (32, 32, 3, 3), 0)
    c = b.bias("c", 32, np.float32(0.02) * scale)
    conv = b.node("Conv", [x, w, c], "conv", pads=[1, 1, 1, 1])
    conv = b.quantize(b.node("Relu", [conv], "relu"), "p", 0.03)
    added = b.quantize(b.node("Add", [conv, x], "add"), "s", 0.04)
    pool = b.node(
        "MaxPool", [added], "pool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]
    )
    pool = b.quantize(pool, "t", 0, like="s")
    both = b.quantize(b.node("Concat", [pool, pool], "both", axis=1), "u", 0, like="s")
    shape = b.constant("shape", np.array([1, -1], np.int64))
    b.node("QuantizeLinear", [b.node("Reshape", [both, shape], "flat"), *b.scales["s"]], "y")
    b.scales["y"] = b.scales["s"]
    array = b.rng.standard_normal((1, 32, 10, 10)).astype(np.float32)
    return b.model({"x": ("float32", (1, 32, 10, 10))}, "y"), {"x": array}


@pytest.mark.parametrize("seed", range(3))
def test_a_residual_block_stays_in_bytes(seed: int) -> None:
    model, inputs = residual_model(seed)
    found = operators(model)
    for name in ("FusedQLinearConv", "FusedQMaxPool", "Reshape"):
        assert found.count(name) == 1
    got, real = by_devices(model, inputs)
    apart = np.abs(got.astype(np.int32) - real.astype(np.int32))
    assert apart.max() <= 1
    assert np.count_nonzero(apart) <= apart.size // 100


@FEW
@given(
    channels=st.lists(st.sampled_from([1, 5, 16, 32]), min_size=1, max_size=4),
    kinds=st.lists(st.sampled_from(["own", "same", "real", "twice"]), min_size=4, max_size=4),
    dtype=st.sampled_from(["uint8", "int8"]),
    axis=st.sampled_from([1, -1]),
    shown=st.booleans(),
    seed=st.integers(0, 1 << 30),
)
def test_concatenations_of_other_scales(
    channels: list[int], kinds: list[str], dtype: str, axis: int, shown: bool, seed: int
) -> None:
    """The bytes are those of the standard's arithmetic: quantized before or behind the Concat."""
    b = Builder(seed, dtype)
    parts: list[str] = []
    inputs: dict[str, tuple[str, tuple[int, ...]]] = {}
    b.scale("y", 0.05)
    for k, (count, kind) in enumerate(zip(channels, kinds, strict=False)):
        shape = (2, count, 4, 6) if axis == 1 else (2, 16, 4, count)
        inputs[f"x{k}"] = ("float32", shape)
        if kind == "real":
            parts.append(f"x{k}")
            continue
        if kind == "twice" and parts:
            parts.append(parts[0])
        parts.append(b.quantize(f"x{k}", f"q{k}", 0.03, like="y" if kind == "same" else ""))
    joined = b.node("Concat", parts, "joined", axis=axis)
    if shown:  # another user of the real values; they must exist as they are
        b.node("QuantizeLinear", [b.node("Neg", [joined], "less"), *b.scales["y"]], "y")
    else:
        b.node("QuantizeLinear", [joined, *b.scales["y"]], "y")
    model = b.model(inputs, "y")
    model.opset_import[0].version = 19  # the first with DequantizeLinear in onnx.reference
    arrays = {
        name: (b.rng.standard_normal(shape) * 3).astype(np.float32)
        for name, (_, shape) in inputs.items()
    }
    (wanted,) = ReferenceEvaluator(model).run(None, arrays)
    for got in by_devices(model, arrays):
        np.testing.assert_array_equal(got, wanted)


def test_a_concatenation_of_convolutions_stays_in_bytes() -> None:
    b = Builder(0)
    x = b.quantize("x", "q", 0.02)
    parts: list[str] = []
    for k, outputs in enumerate((32, 16)):
        w, scale = b.weight(f"w{k}", (outputs, 32, 3, 3), 0)
        c = b.bias(f"c{k}", outputs, np.float32(0.02) * scale)
        conv = b.node("Conv", [x, w, c], f"conv{k}", pads=[1, 1, 1, 1])
        parts.append(b.quantize(conv, f"p{k}", 0.03 + 0.01 * k))
    b.node("QuantizeLinear", [b.node("Concat", parts, "both", axis=1), *b.scale("y", 0.05)], "y")
    model = b.model({"x": ("float32", (1, 32, 8, 8))}, "y")
    assert sorted(operators(model)) == sorted(
        ["QuantizeLinear", *["FusedQLinearConv", "FusedElementwise"] * 2, "Concat"]
    )
    compiled = sg.compile_model(sg.load(model), "CPU", {"ENABLE_PROFILING": True, **INTEGERS})
    request = compiled.create_infer_request()
    request.infer([b.rng.standard_normal((1, 32, 8, 8)).astype(np.float32)])
    kernels = [entry.kernel.partition("(")[0].rpartition(".")[2] for entry in request.profile()]
    # Blocks of bytes throughout: the operands of the Concat are computed in its result.
    assert kernels.count("to_plain") <= 1
    assert "copy" not in kernels


@pytest.mark.parametrize("channels", [3, 16, 23, 40])
@pytest.mark.parametrize("per_channel", [False, True])
def test_conversions_in_blocks(channels: int, per_channel: bool) -> None:
    """A value dequantized by other scales than the convolution's, between two convolutions."""
    rng = np.random.default_rng(channels)
    x = rng.standard_normal((2, 20, 6, 7)).astype(np.float32)
    first = rng.standard_normal((channels, 20, 1, 1)).astype(np.float32)
    last = rng.standard_normal((5, channels, 1, 1)).astype(np.float32)
    size = channels if per_channel else 1
    scales = rng.uniform(0.02, 0.2, (2, size)).astype(np.float32)
    zeros = rng.integers(0, 256, (2, size)).astype(np.uint8)

    def pair(k: int) -> list[Value]:
        shape = () if size == 1 else (size,)
        arrays = scales[k].reshape(shape), zeros[k].reshape(shape)
        return [sg.parameter(f"{name}{k}", a) for name, a in zip("sz", arrays, strict=True)]

    given_ = sg.input("x", shape=x.shape, dtype="float32")
    value = ops.Conv(given_, sg.parameter("first", first))
    value = ops.QuantizeLinear(value, *pair(0), axis=1)
    value = ops.DequantizeLinear(value, *pair(1), axis=1)
    graph = sg.Graph([given_], [ops.Conv(value, sg.parameter("last", last))])
    got = next(iter(sg.compile_model(graph, "CPU")([x]).values()))
    sums = np.einsum("oc,nchw->nohw", first[:, :, 0, 0].astype(np.float64), x)
    sides = (-1, 1, 1)
    held = np.rint(sums / scales[0].reshape(sides)) + zeros[0].reshape(sides)
    real = np.clip(held, 0, 255) - zeros[1].astype(np.float64).reshape(sides)
    wanted = np.einsum("oc,nchw->nohw", last[:, :, 0, 0], real * scales[1].reshape(sides))
    # A sum next to a tie may become either byte: one step of a few channels.
    apart = np.abs(got - wanted).max(axis=(0, 1))
    assert (apart < 1e-2).mean() > 0.9
    assert apart.max() <= 4 * np.abs(last).max() * scales[1].max()


def test_updates_of_weights_and_scales_are_followed() -> None:
    model, inputs = conv_model(Builder(1), (16, 16), 3, 1, True, "Relu")
    compiled = sg.compile_model(sg.load(model), "CPU")
    reference = sg.compile_model(sg.load(model), "REFERENCE")
    for name, change in (("w", lambda a: -a), ("y_scale", lambda a: 2 * a), ("y_zero", lambda a: a ^ 1)):  # fmt: skip # noqa: E501
        for one in (compiled, reference):
            one.parameters[name].assign(change(one.parameters[name].array))
        got, real = (next(iter(one(inputs).values())) for one in (compiled, reference))
        assert np.abs(got.astype(np.int32) - real.astype(np.int32)).max() <= 1


@pytest.mark.parametrize("scale", [0.0, 1e-40, float("nan")])
def test_a_scale_without_a_finite_bound_leaves_the_activation_in_floats(scale: float) -> None:
    x = sg.input("x", (1, 2, 5, 5), "uint8")
    weight = ops.DequantizeLinear(np.ones((3, 2, 3, 3), np.int8), np.float32(0.1), np.int8(0))
    zero = sg.parameter("zero", np.uint8(3))
    image = ops.DequantizeLinear(x, np.float32(0.1), zero)
    clipped = ops.Clip(ops.Conv(image, weight), np.float32(0), np.float32(6))
    graph = sg.Graph([x], [ops.QuantizeLinear(clipped, np.float32(scale), zero)])
    model = sg.compile_model(graph, "CPU")
    assert "FusedQLinearConv" not in {node.op_type for node in apply_pass(graph, "CpuFusion").nodes}
    assert model(np.full((1, 2, 5, 5), 9, np.uint8))[0].shape == (1, 3, 3, 3)


@pytest.mark.parametrize("op", ["MaxPool", "Relu", "Clip"])
def test_a_negative_scale_reverses_the_order(op: str) -> None:
    scale, zero = np.float32(-0.1), sg.parameter("zero", np.uint8(100))
    x = sg.input("x", (1, 2, 5, 5), "uint8")
    real = ops.DequantizeLinear(x, scale, zero)
    if op == "MaxPool":
        made = ops.MaxPool(real, kernel_shape=[2, 2])
    else:
        weight = ops.DequantizeLinear(np.ones((3, 2, 3, 3), np.int8), np.float32(0.02), np.int8(0))
        bounds = [np.float32(-1), np.float32(2)] if op == "Clip" else []
        made = getattr(ops, op)(ops.Conv(real, weight), *bounds)
    graph = sg.Graph([x], [ops.QuantizeLinear(made, scale, zero)])
    given = np.random.default_rng(0).integers(0, 256, (1, 2, 5, 5)).astype(np.uint8)
    want, got = (sg.compile_model(graph, device)(given)[0] for device in ("REFERENCE", "CPU"))
    assert np.abs(got.astype(np.int32) - want.astype(np.int32)).max() <= 1


def test_the_product_of_two_vectors_is_a_scalar() -> None:
    a, b = (sg.input(name, (3,), "uint8") for name in "ab")
    scale, zero = np.full(1, 0.1, np.float32), np.full(1, 3, np.uint8)
    graph = sg.Graph([a, b], [ops.QLinearMatMul(a, scale, zero, b, scale, zero, scale, zero)])
    given = [np.arange(3, dtype=np.uint8)] * 2
    want, got = (sg.compile_model(graph, device)(given)[0] for device in ("REFERENCE", "CPU"))
    np.testing.assert_array_equal(got, want, strict=True)
