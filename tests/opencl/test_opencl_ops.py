"""Every operator on OPENCL against the reference, and the heavy ones against CPU, in both variants.

The kernels made for a GPU run on PoCL too: slowly, but with the same results.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

import subgraph as sg
from subgraph.devices.fallback import DeviceFallback
from subgraph.engine.planner.lowering import LOWERINGS
from subgraph.graph.types import Array, numpy_dtype
from subgraph.opencl.lowering import CL_LOWERINGS
from subgraph.operators.subgraph_op import Session
from tests.operators.test_ops_devices import check
from tests.ops.recurrent.test_kernels import CASES as CELLS
from tests.ops.recurrent.test_kernels import case_of as cells_of
from tests.support.contrib import node_model
from tests.support.opencl import core, graph_of, needs_device, random
from tests.support.operator_cases import Case, Inputs, all_cases
from tests.support.peer import session_of

pytestmark = [
    needs_device,
    pytest.mark.usefixtures("quick_opencl_builds"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
_EACH = 2  # cases of an operator
BY_CPU = ("ConvTranspose", "MaxPool", "AveragePool", "MaxRoiPool", "RoiAlign")
ROWS = ("ReduceSum", "ReduceMax", "Softmax", "LogSoftmax", "LayerNormalization")


def no_recovery(self: DeviceFallback, error: Exception, session: Session) -> None:
    """Let no other device hide what failed."""


@pytest.fixture(autouse=True)
def no_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceFallback, "recover", no_recovery)


def chosen() -> list[Case]:
    """Return a few cases of each operator, spread over its dtypes and shapes."""
    groups: dict[str, list[Case]] = defaultdict(list)
    for case in all_cases():
        groups[case.op].append(case)
    found: list[Case] = []
    for cases in groups.values():
        step = max(1, len(cases) // _EACH)
        found += cases[::step][: _EACH + 1]
    return found


def test_what_the_cpu_has_opencl_has() -> None:
    """But ai.onnx.ml, states that grow, and what fusions make of quantised models and weights."""
    missing = set(LOWERINGS.names()) - set(CL_LOWERINGS.names())
    made = ["::FusedQ", "::FusedMatMulNBits", "::FusedGroupedMatMul", "::FusedDistances"]
    made += ["ai.onnx.ml::", "::Growing"]
    assert {name for name in missing if not any(each in name for each in made)} == set()


@pytest.mark.parametrize("case", chosen(), ids=lambda case: case.name)
def test_operator(case: Case) -> None:
    graph, _ = graph_of(
        case.op, case.inputs, case.constants, case.version, case.outputs, **case.attrs
    )
    answer = core().query_model(graph, "OPENCL")
    assert not graph.nodes or "tried" in answer, answer.reasons
    check(case, "OPENCL")


@pytest.mark.slow
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_every_case(case: Case) -> None:
    check(case, "OPENCL")


def heavy() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield operators with their inputs and attributes."""
    products = [
        ((3, 4), (4, 5)),
        ((7,), (7, 3)),
        ((2, 3, 5), (5,)),
        ((2, 1, 7, 33), (3, 33, 40)),
        ((13, 19), (19, 1)),
        ((2, 3, 4, 5, 6), (2, 1, 4, 6, 7)),
        ((0, 4), (4, 5)),
        ((3, 0), (0, 5)),
        ((70, 600), (600, 65)),
    ]
    for a, b in products:
        for constants in ((), (1,)):
            yield "MatMul", {"arrays": [random(*a), random(*b)], "constants": constants}
    yield "MatMul", {"arrays": [random(9, 33, dtype="float64"), random(33, 21, dtype="float64")]}
    for k, bias in enumerate([None, random(1), random(40), random(7, 1), random(7, 40)]):
        turned = {"transA": k & 1, "transB": k >> 1 & 1, "alpha": 0.5, "beta": 2.0}
        a = random(11, 7) if k & 1 else random(7, 11)
        b = random(40, 11) if k >> 1 & 1 else random(11, 40)
        yield "Gemm", {"arrays": [a, b, bias], "constants": (1,) if k % 2 else (), **turned}
    convolutions: list[tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
        ((1, 3, 16, 16), (8, 3, 3, 3), {"pads": (1, 1, 1, 1)}),
        ((1, 3, 15, 37), (8, 3, 7, 7), {"pads": (3, 3, 3, 3), "strides": (2, 2)}),
        ((2, 8, 9, 7), (10, 8, 3, 3), {"pads": (1, 0, 0, 1), "dilations": (1, 2)}),
        ((2, 8, 9, 7), (12, 4, 3, 3), {"group": 2, "pads": (1, 1, 1, 1)}),
        ((2, 8, 9, 37), (8, 1, 3, 3), {"group": 8, "pads": (1, 1, 1, 1)}),
        ((2, 8, 9, 37), (16, 1, 5, 3), {"group": 8, "pads": (2, 1, 2, 1), "strides": (2, 2)}),
        ((2, 8, 30), (5, 8, 3), {"pads": (1, 1)}),
        ((1, 4, 5, 6, 7), (5, 4, 3, 2, 3), {"pads": (1, 0, 1, 1, 1, 1)}),
        ((1, 16, 14, 14), (32, 16, 1, 1), {}),
        ((1, 16, 14, 14), (32, 16, 1, 1), {"auto_pad": "SAME_UPPER", "strides": (2, 2)}),
    ]
    for x, w, attrs in convolutions:
        arrays = [random(*x), random(*w), random(w[0])]
        yield "Conv", {"arrays": arrays, "constants": (1, 2), **attrs}
    arrays = [random(1, 4, 6, 6), random(4, 5, 3, 3), random(5)]
    turned = {"strides": (2, 2), "pads": (1, 1, 1, 1), "output_padding": (1, 1)}
    yield "ConvTranspose", {"arrays": arrays, "constants": (1, 2), **turned}
    arrays = [random(2, 4, 6), random(4, 3, 3)]
    turned = {"strides": (2,), "group": 2, "dilations": (2,)}
    yield "ConvTranspose", {"arrays": arrays, "constants": (1,), **turned}
    for op in ("MaxPool", "AveragePool"):
        x = [random(2, 3, 9, 11)]
        pads = {"kernel_shape": (3, 2), "strides": (2, 2), "pads": (1, 0, 1, 1)}
        yield op, {"arrays": x, **pads}
        yield op, {"arrays": x, "kernel_shape": (3, 3), "strides": (2, 2), "ceil_mode": 1}
    yield "AveragePool", {"arrays": x, **pads, "count_include_pad": 1, "ceil_mode": 1}
    yield "LpPool", {"arrays": x, "kernel_shape": (3, 2)}
    for op in ("GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"):
        yield op, {"arrays": x}
    arrays = [random(2, 4, 17, 32), random(2, 2, 33, 32), random(2, 2, 33, 24), random(17, 33)]
    yield "Attention", {"arrays": arrays, "version": 23}
    yield "DFT", {"arrays": [random(2, 15, 3, 2)], "version": 17, "axis": 1, "onesided": 0}
    numbers = [np.array(n, np.int64) for n in (5, 12)]
    framed = [random(2, 40, 1), numbers[0], random(12), numbers[1]]
    yield "STFT", {"arrays": framed, "constants": (1, 2, 3), "version": 17}
    x, corners = random(2, 3, 9, 8), np.abs(random(5, 2)) * 3
    regions = np.concatenate([corners, corners + 4], 1).astype(np.float32)
    numbers = [np.array([0, 1, 1, 0, 1])]
    yield "RoiAlign", {"arrays": [x, regions, *numbers], "output_height": 3, "output_width": 2}
    numbered = np.concatenate([numbers[0][:, None], regions], 1).astype(np.float32)
    yield "MaxRoiPool", {"arrays": [x, numbered], "pooled_shape": (3, 2)}
    for mode, padding in (("linear", "zeros"), ("nearest", "border"), ("cubic", "reflection")):
        sampled = {"mode": mode, "padding_mode": padding, "version": 22}
        yield "GridSample", {"arrays": [x, random(2, 5, 4, 2)], **sampled}
    counts = {"q_num_heads": 4, "kv_num_heads": 4, "is_causal": 1}
    yield "Attention", {"arrays": [random(2, 17, 64)] * 3, "version": 23, **counts}
    yield from selections()
    yield from unfolded()


def unfolded() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what takes windows apart or puts rows somewhere, and attention without a softmax."""
    columns = {"arrays": [random(2, 18, 15), np.array([5, 6]), np.array([2, 3])]}
    yield "Col2Im", {**columns, "constants": (1, 2), "strides": (2, 1), "pads": (1, 0, 0, 1)}
    moved = np.random.default_rng(5).uniform(-2.5, 2.5, (2, 24, 5, 8)).astype(np.float32)
    taps = {"group": 2, "offset_group": 2, "pads": (0, 0, 0, 0), "strides": (1, 1)}
    arrays = [random(2, 4, 7, 9), random(8, 2, 3, 2), moved, random(8)]
    yield "DeformConv", {"arrays": arrays, **taps}
    for mode, first in (("linear", [4, 0, 2]), ("circular", [5, 17, 2])):
        arrays = [random(3, 2, 6, 4), random(3, 2, 2, 4), np.array(first)]
        yield "TensorScatter", {"arrays": arrays, "mode": mode}
    heads = {"q_num_heads": 4, "kv_num_heads": 2, "outputs": 2}
    arrays = [random(2, 5, 16), random(2, 5, 8), random(2, 5, 12), random(2, 2, 4, 6)]
    gates = [-abs(random(2, 5, 8)), abs(random(2, 5, 2)) % 1]
    yield "LinearAttention", {"arrays": arrays, **heads, "update_rule": "linear"}
    yield "LinearAttention", {"arrays": [*arrays, *gates], **heads, "update_rule": "gated_delta"}


def selections() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield masks of booleans, and what puts elements in order or picks some of them."""
    rng = np.random.default_rng(4)
    seen = rng.uniform(size=(17, 33)) < 0.6
    seen[3] = False
    heads = [random(2, 4, 17, 8), random(2, 2, 33, 8), random(2, 2, 33, 8)]
    yield "Attention", {"arrays": [*heads, seen], "version": 23}
    yield "Attention", {"arrays": [*heads, seen], "version": 23, "is_causal": 1, "softcap": 2.0}
    numbers = rng.integers(-2, 3, (3, 150))
    yield "NonZero", {"arrays": [numbers]}
    yield "NonZero", {"arrays": [rng.integers(-2, 3, 2500).astype(np.float16)]}
    axes: tuple[dict[str, Any], ...] = ({}, {"axis": 1})
    for axis in axes:
        for order in (0, 1):
            yield "Unique", {"arrays": [numbers], "outputs": 4, "sorted": order, **axis}
        yield "Compress", {"arrays": [numbers, rng.uniform(size=150) < 0.5], **axis}
    yield "Unique", {"arrays": [rng.integers(0, 900, 2500)], "outputs": 4, "sorted": 0}
    for shape, k, largest in (((3, 300), 7, 1), ((2, 40), 40, 0), ((2600,), 50, 1)):
        arrays = [random(*shape), np.array([k])]
        yield (
            "TopK",
            {"arrays": arrays, "outputs": 2, "constants": (1,), "axis": -1, "largest": largest},
        )
    boxes, scores = rng.uniform(size=(2, 150, 4)), rng.uniform(size=(2, 3, 150))
    limits = [np.array([9]), np.full(1, 0.2, np.float32), np.full(1, 0.4, np.float32)]
    arrays = [boxes.astype(np.float32), scores.astype(np.float32), *limits]
    for centred in (0, 1):
        options = {"constants": (2, 3, 4), "center_point_box": centred}
        yield "NonMaxSuppression", {"arrays": arrays, **options}


def random_bytes(*shape: int, dtype: str = "uint8") -> Array:
    low, high = (0, 256) if dtype == "uint8" else (-128, 128)
    return np.random.default_rng([3, *shape]).integers(low, high, shape).astype(dtype)


def scale(first: float, *more: float) -> Array:
    return np.array([first, *more] if more else first, np.float32)


def integer() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield products of bytes: both signs, weights and inputs, zero points in every form."""
    for dtype in ("uint8", "int8"):
        one = np.array(3, dtype)
        for constants in ((), (1, 3)):
            a, b = random_bytes(7, 33), random_bytes(33, 21, dtype=dtype)
            for zeros in (
                [None, None],
                [np.array(9, np.uint8), one],
                [random_bytes(7), random_bytes(21, dtype=dtype)],
            ):
                known = tuple(k for k in constants if k == 1 or zeros[1] is not None)
                yield "MatMulInteger", {"arrays": [a, b, *zeros], "constants": known}
        a, b = random_bytes(2, 3, 5, 300), random_bytes(2, 1, 300, 9, dtype=dtype)
        yield "MatMulInteger", {"arrays": [a, b, np.array(200, np.uint8), one]}
        x, w = random_bytes(2, 4, 9, 8), random_bytes(6, 4, 3, 3, dtype=dtype)
        grouped = random_bytes(8, 1, 3, 3, dtype=dtype)
        padded = {"pads": (1, 0, 1, 1), "strides": (2, 1)}
        zero = np.array(7, np.uint8)
        yield "ConvInteger", {"arrays": [x, w, zero], "constants": (1,), **padded}
        yield "ConvInteger", {"arrays": [x, w]}
        yield "ConvInteger", {"arrays": [x, grouped, zero, one], "constants": (1, 3), "group": 4}
        for scales in (scale(0.02), scale(*np.linspace(0.01, 0.03, 21))):
            points = np.full(scales.shape, 5, dtype)
            arrays = [random_bytes(7, 33), scale(0.03), zero, b[0, 0, :33].repeat(3, 1)[:, :21]]
            arrays += [scales, points, scale(4.0), np.array(100, np.uint8)]
            yield "QLinearMatMul", {"arrays": arrays, "constants": (3, 4, 5)}
        for scales in (scale(0.02), scale(*np.linspace(0.01, 0.03, 6))):
            points = np.full(scales.shape, 0, dtype)
            bias = np.arange(-300, 300, 100, dtype=np.int32)
            arrays = [x, scale(0.03), zero, w, scales, points, scale(2.0), zero, bias]
            yield "QLinearConv", {"arrays": arrays, "constants": (3, 4, 5, 8), **padded}
            yield "QLinearConv", {"arrays": arrays[:8]}


@pytest.mark.parametrize("kernels", ["CPU", "GPU"])
@pytest.mark.parametrize(("op", "case"), list(integer()))
def test_product_of_bytes(op: str, case: dict[str, Any], kernels: str) -> None:
    graph, arrays = graph_of(op, **case)
    answer = core().query_model(graph, "OPENCL")
    assert answer.get("tried") == "OPENCL", answer.reasons
    wanted = core().compile_model(graph, "REFERENCE")(arrays)[0]
    model = core().compile_model(graph, "OPENCL", {"KERNELS": kernels})
    np.testing.assert_array_equal(model(arrays)[0], wanted)


@pytest.mark.parametrize("kernels", ["CPU", "GPU"])
@pytest.mark.parametrize(("op", "case"), list(heavy()))
def test_heavy_operator(op: str, case: dict[str, Any], kernels: str) -> None:
    graph, arrays = graph_of(op, **case)
    answer = core().query_model(graph, "OPENCL")
    assert answer.get("tried") == "OPENCL", answer.reasons
    # The reference package fails on some forms of these.
    sure = "CPU" if op in BY_CPU else "REFERENCE"
    wanted = core().compile_model(graph, sure)(arrays)[0]
    model = core().compile_model(graph, "OPENCL", {"KERNELS": kernels})
    np.testing.assert_allclose(model(arrays)[0], wanted, rtol=1e-4, atol=1e-4)


def meeting() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield scatters whose updates meet, and pooling that says where the maxima are."""
    for reduction in ("add", "mul", "max", "min"):
        for axis in (0, 1, -1):
            places = np.random.default_rng(axis + 5).integers(-3, 3, (3, 5, 4))
            arrays = [random(3, 6, 5), places, random(3, 5, 4)]
            options = {"axis": axis, "reduction": reduction, "version": 18}
            yield "ScatterElements", {"arrays": arrays, **options}
        for depth, inner in ((1, (6, 5)), (2, (5,)), (3, ())):
            places = np.random.default_rng(depth).integers(-3, 3, (4, 9, depth))
            arrays = [random(3, 6, 5), places, random(4, 9, *inner)]
            yield "ScatterND", {"arrays": arrays, "reduction": reduction, "version": 18}
    for size, options in (
        ((2, 3, 9, 11), {"kernel_shape": (3, 2), "strides": (2, 2), "pads": (1, 0, 1, 1)}),
        ((2, 3, 17), {"kernel_shape": (4,), "dilations": (2,)}),
        ((1, 2, 5, 6, 7), {"kernel_shape": (2, 3, 2), "strides": (1, 2, 2)}),
    ):
        yield "MaxPool", {"arrays": [random(*size)], "outputs": 2, **options}
        for dtype in ("int8", "uint8"):
            numbers = np.random.default_rng(3).integers(0, 256, size).astype(dtype)
            yield "MaxPool", {"arrays": [numbers], "version": 12, **options}


@pytest.mark.parametrize("kernels", ["CPU", "GPU"])
@pytest.mark.parametrize(("op", "case"), list(meeting()))
def test_what_meets(op: str, case: dict[str, Any], kernels: str) -> None:
    graph, arrays = graph_of(op, **case)
    answer = core().query_model(graph, "OPENCL")
    assert answer.get("tried") == "OPENCL", answer.reasons
    session = session_of(graph)
    wanted: list[Any] = session.run(None, {f"x{k}": array for k, array in enumerate(arrays)})
    found = core().compile_model(graph, "OPENCL", {"KERNELS": kernels})(arrays)
    for k, want in enumerate(wanted):
        np.testing.assert_allclose(found[k], want, rtol=1e-5, atol=1e-5)


def test_the_index_of_a_maximum_that_is_nan() -> None:
    """ONNX Runtime takes no NaN for a maximum; the reference does, as NumPy."""
    image = random(2, 3, 9, 11)
    image[0, 1, 4:6, 4] = image[1, 2, 0, 0] = np.nan
    options: dict[str, Any] = {"kernel_shape": (3, 3), "strides": (2, 2), "outputs": 2}
    graph, arrays = graph_of("MaxPool", arrays=[image], **options)
    wanted = core().compile_model(graph, "REFERENCE")(arrays)
    found = core().compile_model(graph, "OPENCL")(arrays)
    assert np.isnan(wanted[0]).any()
    for k in range(2):
        np.testing.assert_array_equal(found[k], wanted[k])


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_nan_and_half_floats_in_a_scatter(dtype: str, reduction: str) -> None:
    """Half floats are combined in float32; NaN of the data and of the updates stays."""
    values = np.array([1, np.nan, 2, -3], np.float32).astype(numpy_dtype(dtype))
    updates = np.array([5, 7, np.nan], np.float32).astype(numpy_dtype(dtype))
    arrays = [values, np.array([[0], [1], [2]]), updates]
    graph, given = graph_of("ScatterND", arrays=arrays, reduction=reduction, version=18)
    answer = core().query_model(graph, "OPENCL")
    assert answer.get("tried") == "OPENCL", answer.reasons
    wanted = core().compile_model(graph, "REFERENCE")(given)[0]
    found = core().compile_model(graph, "OPENCL")(given)[0]
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def test_indices_of_many_dimensions() -> None:
    arrays = [
        random(2, 3, 2, 1, 3, 2, 2),
        np.array([1, 0, 2]).repeat(16).reshape(2, 1, 2, 1, 3, 2, 2),
    ]
    graph, arrays = graph_of("GatherElements", arrays, axis=1)
    assert core().query_model(graph, "OPENCL").get("tried") == "OPENCL"
    found = core().compile_model(graph, "OPENCL")(arrays)[0]
    np.testing.assert_array_equal(found, np.take_along_axis(arrays[0], arrays[1], 1))


def test_places_of_maxima_in_columns() -> None:
    graph, arrays = graph_of(
        "MaxPool", [random(2, 3, 8, 6)], outputs=2, kernel_shape=(2, 2), strides=(2, 2),
        storage_order=1,
    )  # fmt: skip
    found = core().compile_model(graph, "OPENCL")(arrays)
    turned = arrays[0].swapaxes(2, 3).reshape(-1)  # a column after the other
    np.testing.assert_array_equal(turned[found[1]], found[0])


@pytest.mark.parametrize("kernels", ["CPU", "GPU"])
@pytest.mark.parametrize("case", range(len(CELLS)))
def test_recurrent_options(case: int, kernels: str) -> None:
    graph, data = cells_of(case)
    answer = core().query_model(graph, "OPENCL")
    assert set(answer) == {node.name for node in graph.nodes}, answer.reasons
    wanted = core().compile_model(graph, "REFERENCE")([data])
    found = core().compile_model(graph, "OPENCL", {"KERNELS": kernels})([data])
    for k in range(len(wanted)):
        np.testing.assert_allclose(found[k], wanted[k], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["CPU", "GPU"])
def test_recurrent_products_of_bytes(kernels: str) -> None:
    """A quantized LSTM of both directions, with sequences of different lengths."""
    lengths = np.array([6, 2, 5], np.int32)
    packed = [random_bytes(2, rows, 44) for rows in (5, 11)]
    scales, zeros = np.full(2, 0.003, np.float32), np.full(2, 131, np.uint8)
    values = [random(6, 3, 5), *packed, random(2, 88), lengths, None, None, None]
    values += [scales, zeros, scales, zeros]
    options: dict[str, Any] = {"hidden_size": 11, "direction": "bidirectional"}
    constants = (1, 2, 3, 8, 9, 10, 11)
    model = node_model("DynamicQuantizeLSTM", values, constants=constants, **options)
    answer = core().query_model(sg.load(model), "OPENCL")
    assert answer.get("node") == "OPENCL", answer.reasons
    inputs = {"x0": values[0], "x4": lengths}
    wanted = core().compile_model(model, "REFERENCE")(inputs)[0]
    found = core().compile_model(model, "OPENCL", {"KERNELS": kernels})(inputs)[0]
    # Beside a tie the last bit of a state decides which byte it becomes.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=0.03)


@pytest.mark.parametrize("kernels", ["CPU", "GPU"])
@pytest.mark.parametrize("size", [1, 2, 15, 60, 97, 128])
def test_transformed_lines(size: int, kernels: str) -> None:
    """Complex lines cut or filled up, real lines forth and back, frames under a window."""

    def on_device(x: Array, y: sg.Value) -> Array:
        graph = sg.Graph([value], [y])
        answer = core().query_model(graph, "OPENCL")
        assert set(answer) == {node.name for node in graph.nodes}, answer.reasons
        found: Array = core().compile_model(graph, "OPENCL", {"KERNELS": kernels})([x])[0]
        return found

    def pairs(numbers: Array) -> Array:
        return np.stack([numbers.real, numbers.imag], -1)

    x = random(2, 30, 3, 2)
    value = sg.input("x", x.shape)
    wanted = pairs(np.fft.fft(x[..., 0] + 1j * x[..., 1], size, 1))
    made = on_device(x, sg.ops.DFT(value, np.int64(size), np.int64(1)))
    np.testing.assert_allclose(made, wanted, rtol=1e-6, atol=2e-6)
    x = random(2, 3, size, 1, dtype="float64")
    value = sg.input("x", x.shape, "float64")
    half = sg.ops.DFT(value, None, np.int64(-2), onesided=1)
    np.testing.assert_allclose(on_device(x, half), pairs(np.fft.rfft(x[..., 0])), atol=1e-11)
    back = sg.ops.DFT(half, np.int64(size), np.int64(-2), inverse=1, onesided=1)
    np.testing.assert_allclose(on_device(x, back), x, atol=1e-11)
    x, window = random(2, 3 * size, 1), random(size)
    value = sg.input("x", x.shape)
    frames = np.lib.stride_tricks.sliding_window_view(x[..., 0], size, 1)[:, ::7]
    wanted = pairs(np.fft.rfft(frames * window))
    made = on_device(x, sg.ops.STFT(value, np.int64(7), window, onesided=1))
    np.testing.assert_allclose(made, wanted, rtol=1e-6, atol=2e-6)


@pytest.mark.parametrize("op", ROWS)
@pytest.mark.parametrize("shape", [(5, 700), (3, 64, 9), (130,)])
def test_rows_shared_by_a_group(op: str, shape: tuple[int, ...]) -> None:
    """Long rows are worked by a group together on a GPU."""
    more = [random(shape[-1])] if op == "LayerNormalization" else []
    graph, arrays = graph_of(op, [random(*shape), *more])
    wanted = core().compile_model(graph, "CPU")(arrays)[0]
    found = core().compile_model(graph, "OPENCL", {"KERNELS": "GPU"})(arrays)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=4).map(tuple), st.data())
def test_broadcasting(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Any two shapes that broadcast, in one order and the other."""
    cut = data.draw(st.integers(0, len(shape)))
    other = tuple(data.draw(st.sampled_from((n, 1))) for n in shape[cut:])
    make = Inputs(str(shape))
    check(Case("Sub", [make(shape), make(other)]), "OPENCL")
    check(Case("Less", [make(other), make(shape)]), "OPENCL")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=3, max_size=3), st.booleans(), st.booleans())
def test_products(sizes: list[int], weight: bool, gpu: bool) -> None:
    m, n, k = sizes
    a, b = random(m, k), random(k, n)
    graph, arrays = graph_of("MatMul", [a, b], (1,) if weight else ())
    model = core().compile_model(graph, "OPENCL", {"KERNELS": "GPU" if gpu else "CPU"})
    np.testing.assert_allclose(model(arrays)[0], a @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("device", ["OPENCL", "HETERO:OPENCL,CPU"])
def test_a_chain_is_one_kernel(device: str, before: bool) -> None:
    """Also when times are asked for only after a run that took none."""
    x = sg.input("x", ("N", 8), "float32")
    y = sg.ops.Tanh(sg.ops.Mul(sg.ops.Add(x, sg.parameter("b", random(8))), x))
    model = core().compile_model(sg.Graph([x], [y]), device, {"ENABLE_PROFILING": before})
    request = model.create_infer_request()
    array: Array = random(4, 8)
    request.infer([array])
    assert [entry.kernel for entry in request.profile()] == ["elementwise.run"]
    assert request.profile()[0].seconds > 0
