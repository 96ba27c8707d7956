"""ONNX Runtime's operators on quantized tensors, against ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.contrib import DEVICES, check, node_model, oracle

EVERY = (*DEVICES, "OPENCL")
BYTES = pytest.mark.parametrize("dtype", [np.uint8, np.int8])
pytestmark = pytest.mark.filterwarnings("ignore")


def rng(*seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def quantized(shape: tuple[int, ...], dtype: Any, seed: int) -> list[Any]:
    """Return random bytes, a scale and a zero point."""
    r, info = rng(seed), np.iinfo(dtype)
    packed = r.integers(info.min, info.max + 1, shape).astype(dtype)
    scale = np.float32(r.uniform(0.01, 0.05))
    return [packed, np.array(scale), np.array(r.integers(info.min, info.max + 1), dtype)]


def scale_of(dtype: Any, seed: int, size: float = 0.04) -> list[Any]:
    return [np.array(np.float32(size)), quantized((), dtype, seed)[2]]


def check_zero_points(op_type: str, inputs: list[Any], zero: bool, **form: Any) -> None:
    """Check with zero points or, if not ``zero``, without, where ONNX Runtime gets zeros."""
    if zero:
        check(op_type, inputs, **form)
        return
    points = range(2, len(inputs), 3) if op_type in ("QLinearAdd", "QLinearMul") else (2, 4)
    points = [k if k < 6 else 7 for k in points]
    zeros = [np.zeros_like(a) if k in points else a for k, a in enumerate(inputs)]
    model = node_model(op_type, zeros, **form)
    fed = {i.name: zeros[int(i.name[1:])] for i in model.graph.input}
    without = [None if k in points else a for k, a in enumerate(inputs)]
    check(op_type, without, expected=oracle(model, fed), **form)


@BYTES
@pytest.mark.parametrize("op_type", ["QLinearAdd", "QLinearMul"])
@pytest.mark.parametrize(
    ("left", "right"), [((2, 3, 5, 7), (2, 3, 5, 7)), ((4, 33), (33,)), ((3, 1, 5), ()), ((0,), ())]
)
@pytest.mark.parametrize("zero", [True, False])
def test_two_operands(
    op_type: str, left: tuple[int, ...], right: tuple[int, ...], dtype: Any, zero: bool
) -> None:
    inputs = [*quantized(left, dtype, 1), *quantized(right, dtype, 2), *scale_of(dtype, 3)]
    check_zero_points(op_type, inputs, zero, constants=[1, 2, 4, 5, 6, 7])


@BYTES
@pytest.mark.parametrize("zero", [True, False])
@pytest.mark.parametrize("alpha", [None, 0.3])
def test_activations(dtype: Any, zero: bool, alpha: float | None) -> None:
    inputs = [*quantized((3, 65), dtype, 4), *scale_of(dtype, 5, 0.01)]
    attributes: dict[str, Any] = {} if alpha is None else {"alpha": alpha}
    check_zero_points("QLinearLeakyRelu", inputs, zero, constants=[1, 2, 3, 4], **attributes)
    if alpha is None:
        check_zero_points("QLinearSigmoid", inputs, zero, constants=[1, 2, 3, 4])
        check_zero_points("QLinearSigmoid", inputs, zero)


@BYTES
@pytest.mark.parametrize(("axis", "opset"), [(-1, 13), (1, 13), (1, 11), (2, 12), (0, 12)])
def test_softmax(dtype: Any, axis: int, opset: int) -> None:
    inputs = [*quantized((3, 4, 5), dtype, 6), *scale_of(dtype, 7, 1 / 256)]
    # ONNX Runtime looks exponentials up that it has rounded.
    check("QLinearSoftmax", inputs, constants=[1, 2, 3, 4], axis=axis, opset=opset)


@BYTES
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    "form",
    [
        {"kernel_shape": [3, 3]},
        {"kernel_shape": [2, 3], "strides": [2, 2], "pads": [1, 1, 0, 1]},
        {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "count_include_pad": 1, "ceil_mode": 1},
        {"kernel_shape": [2, 2], "strides": [2, 2], "auto_pad": "SAME_UPPER"},
    ],
)
def test_average_pool(dtype: Any, last: int, form: dict[str, Any]) -> None:
    inputs = [*quantized((2, 9, 8, 7) if last else (2, 7, 9, 8), dtype, 8), *scale_of(dtype, 9)]
    check("QLinearAveragePool", inputs, constants=[1, 2, 3, 4], channels_last=last, **form)


@BYTES
@pytest.mark.parametrize("last", [0, 1])
def test_global_average_pool(dtype: Any, last: int) -> None:
    inputs = [*quantized((2, 5, 6, 7), dtype, 10), *scale_of(dtype, 11, 0.01)]
    check("QLinearGlobalAveragePool", inputs, constants=[1, 2, 3, 4], channels_last=last)


@BYTES
@pytest.mark.parametrize("keep", [0, 1])
def test_reduce_mean(dtype: Any, keep: int) -> None:
    # ONNX Runtime lists QLinearReduceMean, and has no kernel for it.
    inputs = [*quantized((2, 5, 6), dtype, 12), *scale_of(dtype, 13, 0.01)]
    x, scale, zero, out_scale, out_zero = inputs
    mean = ((x.astype(np.float32) - zero.astype(np.float32)) * scale).mean((0, 2), keepdims=keep)
    info = np.iinfo(dtype)
    steps = np.rint(mean / out_scale) + out_zero.astype(np.float32)
    want = np.clip(steps, info.min, info.max).astype(dtype)
    check("QLinearReduceMean", inputs, expected=[want], axes=[0, -1], keepdims=keep)


@BYTES
@pytest.mark.parametrize("axis", [1, -2])
def test_concat(dtype: Any, axis: int) -> None:
    parts = [quantized((2, size, 5), dtype, 20 + size) for size in (3, 1, 4)]
    inputs = [*scale_of(dtype, 14), *(item for part in parts for item in part)]
    constants = [0, 1, 3, 4, 6, 7, 9, 10]
    check("QLinearConcat", inputs, constants=constants, axis=axis)
    same = [*parts[0][1:], *(item for p in parts for item in (p[0], *parts[0][1:]))]
    check("QLinearConcat", same, constants=constants, axis=axis)


@BYTES
def test_where(dtype: Any) -> None:
    inputs = [rng(1).random((4, 1, 5)) < 0.5, *quantized((3, 1), dtype, 1)]
    inputs += [*quantized((4, 3, 5), dtype, 2), *scale_of(dtype, 3)]
    check("QLinearWhere", inputs, constants=[2, 3, 5, 6, 7, 8])


@BYTES
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bias", [None, (9,), (4, 9), (1, 9), (1,)])
@pytest.mark.parametrize("floats", [False, True])
@pytest.mark.parametrize(("transposes", "alpha"), [((0, 0), 1.0), ((0, 1), 1.0), ((1, 1), 0.5)])
def test_gemm(
    dtype: Any,
    columns: bool,
    bias: tuple[int, ...] | None,
    floats: bool,
    transposes: tuple[int, int],
    alpha: float,
) -> None:
    a, a_scale, a_zero = quantized((17, 4) if transposes[0] else (4, 17), dtype, 30)
    _, b_scale, b_zero = quantized((), np.int8, 31)
    # Seven bits: ONNX Runtime adds two products of eight in 16 bits where the machine does.
    b = rng(31).integers(-64, 64, (9, 17) if transposes[1] else (17, 9)).astype(np.int8)
    if columns:
        b_scale = rng(32).uniform(0.01, 0.05, 9).astype(np.float32)
        b_zero = np.zeros(9, np.int8)
    c = None if bias is None else rng(33).integers(-5000, 5000, bias).astype(np.int32)
    out = [None, None] if floats else scale_of(dtype, 34, 0.2)
    inputs = [a, a_scale, a_zero, b, b_scale, b_zero, c, *out]
    form: dict[str, Any] = {"transA": transposes[0], "transB": transposes[1], "alpha": alpha}
    check("QGemm", inputs, constants=range(1, 9), rtol=1e-4, atol=1e-3, **form)


@pytest.mark.parametrize("count", [1, 9])
def test_gemm_adds_a_bias_of_unknown_size(count: int) -> None:
    a, a_scale, a_zero = quantized((4, 17), np.uint8, 30)
    b = rng(31).integers(-64, 64, (17, 9)).astype(np.int8)
    b_scale, b_zero = rng(32).uniform(0.01, 0.05, 9).astype(np.float32), np.zeros(9, np.int8)
    c = rng(33).integers(-5000, 5000, count).astype(np.int32)
    inputs = [a, a_scale, a_zero, b, b_scale, b_zero, c, *scale_of(np.uint8, 34, 0.2)]
    check("QGemm", inputs, constants=[1, 2, 3, 4, 5, 7, 8], symbolic=True)


def test_gemm_without_zero_points_runs_by_integers() -> None:
    a, a_scale, a_zero = quantized((5, 64), np.uint8, 35)
    b = rng(36).integers(-64, 64, (64, 32)).astype(np.int8)
    c = rng(37).integers(-5000, 5000, 32).astype(np.int32)
    inputs = [a, a_scale, a_zero, b, np.array(np.float32(0.02)), np.array(np.int8(0)), c]
    inputs += scale_of(np.uint8, 38, 0.3)
    model = node_model("QGemm", inputs, constants=range(1, 9))
    session = sg.compile_model(sg.load(model), "CPU", {"ENABLE_PROFILING": True})
    request = session.create_infer_request()
    request.infer({"x0": a})
    assert any("quantized.qlinear_kernels" in entry.kernel for entry in request.profile())
    check("QGemm", inputs, constants=range(1, 9))


@BYTES
@pytest.mark.parametrize("last", [0, 1])
def test_conv(dtype: Any, last: int) -> None:
    x = quantized((2, 9, 8, 6) if last else (2, 6, 9, 8), dtype, 40)
    w = [rng(41).integers(-64, 64, (8, 3, 3, 3)).astype(np.int8), np.array(np.float32(0.01))]
    bias = rng(42).integers(-500, 500, 8).astype(np.int32)
    inputs = [*x, *w, np.array(np.int8(0)), *scale_of(dtype, 43, 0.1), bias]
    form: dict[str, Any] = {
        "group": 2,
        "pads": [1, 0, 1, 0],
        "strides": [1, 2],
        "kernel_shape": [3, 3],
    }
    check("QLinearConv", inputs, constants=range(1, 9), channels_last=last, **form)


def test_quantize_and_dequantize_linear() -> None:
    x = rng(50).standard_normal((3, 4, 5)).astype(np.float32)
    scale, zero = np.array(np.float32(0.02)), np.array(np.uint8(120))
    (packed,) = check("QuantizeLinear", [x, scale, zero])
    check("DequantizeLinear", [packed, scale, zero])
    scales = rng(51).uniform(0.01, 0.03, 4).astype(np.float32)
    zeros = rng(52).integers(-9, 9, 4).astype(np.int8)
    (packed,) = check("QuantizeLinear", [x, scales, zeros], axis=1)
    check("DequantizeLinear", [packed, scales, zeros], axis=1)
    check("DequantizeLinear", [packed.astype(np.int32), scale, None])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("zero", [False, True])
def test_dynamic_products(columns: bool, bias: bool, zero: bool) -> None:
    x = rng(60).standard_normal((2, 5, 16)).astype(np.float32)
    w = rng(61).integers(0, 256, (16, 12)).astype(np.uint8)
    scales = rng(62).uniform(0.01, 0.03, 12 if columns else ()).astype(np.float32)
    zeros = rng(63).integers(100, 150, 12 if columns else ()).astype(np.uint8) if zero else None
    added = rng(64).standard_normal(12).astype(np.float32) if bias else None
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-4}
    dynamic = [x, w, scales, zeros, added]
    check("DynamicQuantizeMatMul", dynamic, **close, constants=[1, 2, 3, 4])
    a, a_scale, a_zero = quantized((2, 5, 16), np.uint8, 65)
    given = [a, w, a_scale, scales, a_zero if zero else None, zeros, added]
    check("MatMulIntegerToFloat", given, **close, constants=[1, 3, 5, 6])


@settings(max_examples=40, deadline=None)
@example(np.int8, "forward", (5, 1, 1, 31), False, 0, (True, False, True), 1162, True)
@given(
    dtype=st.sampled_from([np.int8, np.uint8]),
    direction=st.sampled_from(["forward", "reverse", "bidirectional"]),
    sizes=st.tuples(*[st.integers(1, most) for most in (6, 8, 30, 40)]),
    columns=st.booleans(),
    shift=st.sampled_from([0, 0, 5]),
    given=st.tuples(*[st.booleans()] * 3),
    seed=st.integers(0, 2**32 - 1),
    whole_range=st.booleans(),
)
def test_lstm(
    dtype: Any,
    direction: str,
    sizes: tuple[int, int, int, int],
    columns: bool,
    shift: int,
    given: tuple[bool, bool, bool],
    seed: int,
    whole_range: bool,
) -> None:
    """Inputs and states are rounded to bytes exactly as ONNX Runtime rounds them.

    On processors without VNNI, ONNX Runtime adds pairs of products by signed weights in 16 bits,
    which saturate unless the weights have 7 bits. Those of 8 bits are compared with REFERENCE.
    """
    (steps, batch, inputs, hidden), ways = sizes, 2 if direction == "bidirectional" else 1
    saturating = dtype is np.int8 and whole_range
    r, info = rng(seed), np.iinfo(dtype)
    least, most = (-64, 64) if dtype is np.int8 and not whole_range else (info.min, info.max + 1)

    def weights(rows: int) -> list[Array]:
        shape = (ways, 4 * hidden) if columns else (ways,)
        # ONNX Runtime refuses columns with zero points of their own that are not in the middle.
        zeros = np.zeros(shape, dtype) + dtype(0 if dtype is np.int8 else 128)
        zeros += dtype(0 if columns else shift)
        packed = r.integers(least, most, (ways, rows, 4 * hidden)).astype(dtype)
        return [packed, r.uniform(0.002, 0.004, shape).astype(np.float32), zeros]

    def floats(wanted: bool, *shape: int) -> Array | None:
        return r.standard_normal(shape).astype(np.float32) if wanted else None

    (w, w_scale, w_zero), (again, r_scale, r_zero) = weights(inputs), weights(hidden)
    with_bias, with_states, with_peepholes = given
    values = [
        floats(True, steps, batch, inputs),
        w,
        again,
        floats(with_bias, ways, 8 * hidden),
        None,
        floats(with_states, ways, batch, hidden),
        floats(with_states, ways, batch, hidden),
        floats(with_peepholes, ways, 3 * hidden),
        *(w_scale, w_zero, r_scale, r_zero),
    ]
    constants = [k for k in (1, 2, 3, 7, 8, 9, 10, 11) if values[k] is not None]
    form: dict[str, Any] = {"hidden_size": hidden, "direction": direction, "outputs": [True] * 3}
    form |= {"constants": constants}
    model = node_model("DynamicQuantizeLSTM", values, **form)
    inputs = {name: values[int(name[1:])] for name in (i.name for i in model.graph.input)}
    fed = {name: array for name, array in inputs.items() if array is not None}
    reference = sg.compile_model(model, "REFERENCE")
    wanted = list(reference(fed).values()) if saturating else oracle(model, fed)
    # Beside a tie the last bit of a state decides which byte it becomes.
    atol = 0.03 if near_a_tie(wanted[0]) else 2e-5
    form |= {"devices": EVERY, "expected": wanted}
    check("DynamicQuantizeLSTM", values, rtol=0, atol=atol, **form)


def near_a_tie(states: Array) -> bool:
    """Return whether the rounding of some state or zero point hangs on float32's precision.

    ``states``: ``[steps, directions, batch, hidden]``; those of a step and direction share a scale.
    """
    axes = (2, 3)
    least = np.minimum(states.min(axes, keepdims=True), 0)
    scale = (np.maximum(states.max(axes, keepdims=True), 0) - least) / 255
    whole = np.where(scale == 0, 1, scale)
    scaled = np.concatenate([(x / whole).reshape(-1) for x in (states, least)])
    return bool(np.any(np.abs(scaled - np.floor(scaled) - 0.5) < 3e-4))


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
def test_lstm_of_sequences_of_different_lengths(direction: str) -> None:
    """Steps after the end of a sequence change nothing here; in ONNX Runtime states go on."""
    ways, r = 2 if direction == "bidirectional" else 1, rng(71)
    weights = [r.integers(0, 256, (ways, rows, 80)).astype(np.uint8) for rows in (7, 20)]
    numbers = [np.full(ways, 0.003, np.float32), np.full(ways, 131, np.uint8)]
    x = r.standard_normal((9, 4, 7)).astype(np.float32)
    lengths = np.array([9, 2, 5, 1], np.int32)
    values = [x, *weights, None, lengths, None, None, None, *numbers, *numbers]
    form: dict[str, Any] = {"hidden_size": 20, "direction": direction, "outputs": [True] * 3}
    form |= {"constants": [1, 2, 8, 9, 10, 11]}
    check("DynamicQuantizeLSTM", values, devices=EVERY, rtol=0, atol=0.03, **form)
    model = node_model("DynamicQuantizeLSTM", values, **form)
    for device in EVERY:
        compiled = sg.compile_model(model, device)
        other = np.where(np.arange(9)[:, None, None] < lengths[:, None], x, np.float32(100))
        for left, right in zip(
            compiled({"x0": x, "x4": lengths}).values(),
            compiled({"x0": other, "x4": lengths}).values(),
            strict=True,
        ):
            np.testing.assert_array_equal(left, right)


@BYTES
@pytest.mark.parametrize("stack", [(), (2, 3)])
def test_products_of_two_computed_operands_run_on_kernels(
    dtype: Any, stack: tuple[int, ...]
) -> None:
    a, b = quantized((*stack, 17, 40), dtype, 80), quantized((*stack, 40, 9), dtype, 81)
    inputs = [*a, *b, *scale_of(dtype, 82, 0.9)]
    form: dict[str, Any] = {"constants": [1, 2, 4, 5, 6, 7], "domain": "", "standard": 21}
    model = node_model("QLinearMatMul", inputs, **form)
    fed = {"x0": inputs[0], "x3": inputs[3]}
    expected = sg.compile_model(sg.load(model), "REFERENCE")(fed)[0].astype(int)
    compiled = sg.compile_model(sg.load(model), "CPU", {"ENABLE_PROFILING": True})
    request = compiled.create_infer_request()
    found = request.infer(fed)[0]
    assert np.abs(found.astype(int) - expected).max() <= 1
    assert np.mean(found != expected) < 0.02
    assert {entry.device for entry in request.profile()} == {"CPU"}


@BYTES
def test_pool_of_bytes_stays_in_blocks(dtype: Any) -> None:
    x = sg.input("x", (1, 16, 9, 9), dtype)
    w = rng(83).integers(-60, 60, (32, 16, 3, 3)).astype(np.int8)
    scale, zero = np.array(np.float32(0.02)), np.array(dtype(3))
    made = ops.QLinearConv(
        x, scale, zero, w, scale, np.array(np.int8(0)), np.array(np.float32(0.5)), zero
    )
    form: dict[str, Any] = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [0, 1, 0, 1]}
    graph = sg.Graph([x], [ops.MaxPool(made, **form)])
    info = np.iinfo(dtype)
    fed = {"x": rng(84).integers(info.min, info.max + 1, (1, 16, 9, 9)).astype(dtype)}
    compiled = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    request = compiled.create_infer_request()
    found = request.infer(fed)[0].astype(int)
    expected = sg.compile_model(graph, "REFERENCE")(fed)[0].astype(int)
    assert np.abs(found - expected).max() <= 1
    assert any("pool.byte_kernels" in entry.kernel for entry in request.profile())


def test_the_operators_are_functions_for_building_too() -> None:
    x, scale = sg.input("x", (2, 8), "uint8"), np.array(np.float32(0.1))
    y = ops.QLinearSigmoid(x, scale, None, scale)
    assert (y.type, y.producer.domain) == (x.type, "com.microsoft")
    assert ops.Gelu(sg.input("x", (2, 8))).producer.domain == ""  # the standard comes first


def test_a_model_that_onnx_runtime_quantised(tmp_path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static

    x = sg.input("x", (1, 3, 12, 12))
    y = ops.Relu(ops.Conv(x, sg.parameter("w", normal(8, 3, 3, 3)), pads=[1] * 4))
    y = ops.Add(y, ops.Sigmoid(ops.Conv(y, sg.parameter("v", normal(8, 8, 1, 1)))))
    y = ops.Concat(
        ops.AveragePool(y, kernel_shape=[2, 2]), ops.MaxPool(y, kernel_shape=[2, 2]), axis=1
    )
    y = ops.Flatten(ops.GlobalAveragePool(y))
    y = ops.Gemm(y, sg.parameter("g", normal(16, 5)), sg.parameter("c", normal(5)))
    sg.save(sg.Graph([x], [ops.Identity(y, name="out")]), tmp_path / "m.onnx")
    drawn = [{"x": rng(90, k).standard_normal((1, 3, 12, 12)).astype(np.float32)} for k in range(4)]

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = list(drawn)

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    quantize_static(
        str(tmp_path / "m.onnx"), str(tmp_path / "q.onnx"), Reader(), QuantFormat.QOperator
    )
    graph = sg.load(tmp_path / "q.onnx")
    assert {"QLinearAdd", "QLinearSigmoid", "QGemm"} <= {node.op_type for node in graph.nodes}
    assert set(sg.default_core().query_model(graph, "CPU")) == {n.name for n in graph.nodes}
    want = oracle(onnx.load(tmp_path / "q.onnx"), drawn[0])[0]
    for device in ("CPU", "REFERENCE"):
        found = sg.compile_model(graph, device)(drawn[0])[0]
        np.testing.assert_allclose(found, want, rtol=0, atol=0.03 * np.abs(want).max())


def normal(*shape: int) -> Array:
    return rng(*shape).standard_normal(shape).astype(np.float32) / 3


@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((0, 4), (4, 5))])
def test_products_of_16_bits(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    random = np.random.default_rng(0)
    a, b = (random.integers(-(1 << 15), 1 << 15, shape).astype(np.int16) for shape in shapes)
    check("MatMulInteger16", [a, b], steps=0)
    check("MatMulInteger16", [a, b], steps=0, symbolic=True)
