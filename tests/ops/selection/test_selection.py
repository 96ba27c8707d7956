"""Operators that find how much they give, and TopK, against NumPy and ONNX Runtime.

On the CPU device and on OPENCL, there with the kernels made for a CPU and with those for a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.fallback import DeviceFallback
from subgraph.graph.types import Array
from tests.support.peer import session_of

SHAPES = [(), (7,), (3, 0, 2), (4, 5), (2, 3, 4)]


pytestmark = pytest.mark.usefixtures("quick_opencl_builds")
DEVICES: dict[str, tuple[str, dict[str, Any]]] = {
    "REFERENCE": ("REFERENCE", {}),
    "CPU": ("CPU", {}),
    "OPENCL": ("OPENCL", {"KERNELS": "CPU"}),
    "OPENCL-GPU": ("OPENCL", {"KERNELS": "GPU"}),
}


@pytest.fixture(params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs on each; what fails there is not hidden by another device."""
    if DEVICES[request.param][0] not in sg.default_core().available_devices:
        pytest.skip("there is no OpenCL device")
    monkeypatch.setattr(DeviceFallback, "recover", lambda self, error, session: None)
    return request.param


def _compile(graph: sg.Graph, device: str) -> sg.CompiledModel:
    """Compile for a device; nothing is left to another one, nor to the reference."""
    name, config = DEVICES[device]
    query = sg.default_core().query_model(graph, name, config)
    assert set(query) == {node.name for node in graph.nodes}, query.reasons
    return sg.compile_model(graph, name, {**config, "ENABLE_PROFILING": True})


def _run(device: str, graph: sg.Graph, *arrays: Array) -> list[Any]:
    request = _compile(graph, device).create_infer_request()
    results = request.infer(list(arrays))
    kernels = {entry.kernel for entry in request.profile()}
    assert device == "REFERENCE" or "reference" not in kernels
    return [results[k] for k in range(len(graph.outputs))]


def _input(name: str, array: Array, *, symbolic: bool = False) -> sg.Value:
    shape = [f"{name}{k}" for k in range(array.ndim)] if symbolic else array.shape
    return sg.input(name, shape, array.dtype.name)


@pytest.mark.parametrize("dtype", ["float32", "bool", "float16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_non_zero(device: str, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = np.asarray(rng.integers(-1, 2, shape)).astype(dtype)
    x = np.where(x == 0, np.asarray(-0.0).astype(dtype), x)
    value = _input("x", x, symbolic=True)
    (got,) = _run(device, sg.Graph([value], [ops.NonZero(value)]), x)
    expected = np.array(np.nonzero(np.atleast_1d(x)))
    # Of a scalar the standard wants (0, N), not NumPy's (1, N).
    expected = expected if shape else expected[:0]
    np.testing.assert_array_equal(got, expected)


def test_what_was_found_goes_on(device: str) -> None:
    """Gather by the places found; other numbers in every run."""
    x = sg.input("x", ("N", 3))
    places = ops.Transpose(ops.NonZero(ops.Greater(x, np.float32(0.5))), perm=[1, 0])
    graph = sg.Graph([x], [ops.Mul(ops.GatherND(x, places), np.float32(2)), ops.Relu(x)])
    model = _compile(graph, device)
    rng = np.random.default_rng(1)
    for rows in (4, 9, 4, 1, 300):
        given = rng.uniform(0, 1, (rows, 3)).astype(np.float32)
        results = model([given])
        np.testing.assert_allclose(results[0], 2 * given[given > 0.5])
        np.testing.assert_array_equal(results[1], given)


@pytest.mark.parametrize("axis", [None, 0, -1])
@pytest.mark.parametrize("length", [0, 2, 3])
def test_compress(device: str, axis: int | None, length: int) -> None:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((3, 4, 5)).astype(np.float32)
    condition = rng.uniform(size=length) < 0.6
    values = _input("x", x), _input("c", condition)
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    (got,) = _run(device, sg.Graph(values, [ops.Compress(*values, **attributes)]), x, condition)
    np.testing.assert_array_equal(got, np.compress(condition, x, axis))


@pytest.mark.parametrize("dtype", ["float32", "uint8", "float16"])
@pytest.mark.parametrize("axis", [None, 0, -2])
@pytest.mark.parametrize("in_order", [0, 1])
def test_unique(device: str, axis: int | None, in_order: int, dtype: str) -> None:
    x = np.random.default_rng(3).integers(0, 2, (5, 6, 2)).astype(dtype)
    value = _input("x", x)
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    outputs = ops.Unique(value, sorted=in_order, outputs=4, **attributes)
    y, first, inverse, counts = _run(device, sg.Graph([value], outputs), x)
    expected = np.unique(x, True, True, True, axis=axis)
    order = np.argsort(expected[1]) if not in_order else np.arange(len(expected[1]))
    np.testing.assert_array_equal(y, np.take(expected[0], order, axis or 0))
    np.testing.assert_array_equal(first, expected[1][order])
    np.testing.assert_array_equal(counts, expected[3][order])
    np.testing.assert_array_equal(np.take(y, inverse, axis or 0).reshape(x.shape), x)


def test_unique_of_many_and_of_nothing(device: str) -> None:
    x = np.random.default_rng(4).standard_normal(3001).astype(np.float32)
    x[::7], x[1::7], x[2::7] = np.nan, 0.0, -0.0
    for given in (x, x[:0], x[:1]):
        value = _input("x", given)
        y, inverse = _run(
            device, sg.Graph([value], [ops.Unique(value, outputs=4)[k] for k in (0, 2)]), given
        )
        np.testing.assert_array_equal(y, np.unique(given))
        np.testing.assert_array_equal(y[inverse], given)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
@pytest.mark.parametrize("largest", [0, 1])
def test_the_first_of_top_k(device: str, dtype: str, largest: int) -> None:
    """Of equal ones the first; NaN is larger than all."""
    x = np.random.default_rng(5).integers(0, 4, (5, 6, 7)).astype(dtype)
    if dtype.startswith("float"):
        x[1:3, 2:4, ::2] = np.nan
    value = _input("x", x)
    for axis in range(3):
        outputs = ops.TopK(value, np.array([1]), axis=axis, largest=largest)
        values, places = _run(device, sg.Graph([value], outputs), x)
        keys = np.where(np.isnan(x), 9.0, x.astype(np.float64)) * (-1 if largest else 1)
        expected = np.argmin(keys, axis=axis, keepdims=True)
        np.testing.assert_array_equal(places, expected)
        np.testing.assert_array_equal(values, np.take_along_axis(x, expected, axis))


@pytest.mark.parametrize("seed", range(6))
def test_non_max_suppression(device: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(0, 1, (2, 40, 4)).astype(np.float32)
    scores = rng.uniform(0, 1, (2, 3, 40)).astype(np.float32)
    limits = [np.array([seed + 1], np.int64), np.array([0.3], np.float32), np.float32(0.4)]
    inputs = [_input("boxes", boxes), _input("scores", scores)]
    given: list[Any] = limits[: 1 + seed % 3]
    made = ops.NonMaxSuppression(*inputs, *given, center_point_box=seed % 2)
    graph = sg.Graph(inputs, [made])
    (got,) = _run(device, graph, boxes, scores)
    session = session_of(graph)
    (expected,) = session.run(None, {"boxes": boxes, "scores": scores})
    np.testing.assert_array_equal(got, expected)
    assert len(got)


@pytest.mark.parametrize("limit", [0.0, 0.4, 0.99])
def test_many_boxes_that_stay(device: str, limit: float) -> None:
    rng = np.random.default_rng(11)
    corner = rng.uniform(0, 1, (2, 300, 2))
    boxes = np.concatenate([corner, corner + rng.uniform(0, 0.1, corner.shape)], -1)
    boxes[:, ::50, 2:] = boxes[:, ::50, :2]  # of no area
    boxes = boxes.astype(np.float32)
    scores = rng.integers(0, 40, (2, 2, 300)).astype(np.float32)
    inputs = [_input("boxes", boxes), _input("scores", scores)]
    made = ops.NonMaxSuppression(*inputs, np.array([10**6]), np.array([limit], np.float32))
    graph = sg.Graph(inputs, [made])
    session = session_of(graph)
    (expected,) = session.run(None, {"boxes": boxes, "scores": scores})
    (got,) = _run(device, graph, boxes, scores)
    np.testing.assert_array_equal(got, expected)


def test_the_number_of_boxes_may_be_an_input(device: str) -> None:
    rng = np.random.default_rng(9)
    boxes = rng.uniform(0, 1, (1, 400, 4)).astype(np.float32)
    scores = rng.uniform(0, 1, (1, 1, 400)).astype(np.float32)
    inputs = [_input("boxes", boxes), _input("scores", scores), sg.input("most", (1,), "int64")]
    model = _compile(sg.Graph(inputs, [ops.NonMaxSuppression(*inputs)]), device)
    for most in (3, 0, 5, 10**9):
        got = model([boxes, scores, np.array([most])])[0]
        assert len(got) <= most
        assert (len(got) > 0) == (most > 0)


def _top(x: Array, k: int, axis: int, largest: bool) -> tuple[Array, Array]:
    """NaN is larger than all; of equal ones the first counts."""
    moved = np.moveaxis(x, axis, -1)
    if largest:
        # The order of the reversed row from its end: stable, though from large to small.
        turned = np.argsort(moved[..., ::-1], axis=-1, kind="stable")
        order = x.shape[axis] - 1 - turned[..., ::-1]
    else:
        order = np.argsort(moved, axis=-1, kind="stable")
    places = order[..., :k]
    values = np.take_along_axis(moved, places, -1)
    return np.moveaxis(values, -1, axis), np.moveaxis(places, -1, axis)


@pytest.mark.parametrize("largest", [0, 1])
@pytest.mark.parametrize(
    ("shape", "axis", "k", "dtype"),
    [
        ((1,), 0, 1, "float32"),
        ((7,), 0, 0, "float32"),
        ((5000,), 0, 5000, "float32"),
        ((3, 1000), 1, 5, "float32"),
        ((2, 300, 3), 1, 37, "int32"),
        ((130, 2, 2), 0, 130, "uint8"),
        ((40, 33), -1, 8, "int64"),
        ((3, 1000), 1, 1000, "int64"),
        ((2, 700, 3), 1, 90, "uint64"),
        ((3, 1000), 1, 17, "float64"),
        ((500, 3), 0, 500, "float64"),
        ((1, 9000), -1, 100, "float32"),
        ((5, 67), 1, 1, "float32"),
        ((4, 300), 1, 20, "uint32"),
        ((4, 90), 1, 90, "int8"),
        ((2, 0, 4), 0, 1, "float32"),
    ],
)
def test_top_k(
    device: str, shape: tuple[int, ...], axis: int, k: int, dtype: str, largest: int
) -> None:
    rng = np.random.default_rng(len(shape) + k)
    x = rng.integers(-50, 50, shape).astype(dtype)
    if dtype.startswith("float") and x.size:
        x.flat[:: max(3, x.size // 4)] = np.nan
        x.flat[1::5] = -0.0
        x.flat[2::91], x.flat[4::97] = np.inf, -np.inf
    if dtype.endswith("int64"):
        x.flat[::7], x.flat[1::7] = np.iinfo(dtype).max, np.iinfo(dtype).min
    value = _input("x", x)
    made = ops.TopK(value, np.array([k]), axis=axis, largest=largest)
    values, places = _run(device, sg.Graph([value], made), x)
    wanted, where = _top(x, k, axis, bool(largest))
    np.testing.assert_array_equal(values, wanted)
    np.testing.assert_array_equal(places, where)


def test_many_are_found(device: str) -> None:
    """So many that several teams count them."""
    rng = np.random.default_rng(5)
    x = np.where(rng.uniform(size=(3, 7001)) < 0.3, 0, 1).astype(np.float32)
    x *= rng.integers(0, 900, x.shape)
    value = _input("x", x)
    graph = sg.Graph([value], [ops.NonZero(value), *ops.Unique(value, sorted=0, outputs=4)])
    places, y, first, inverse, counts = _run(device, graph, x)
    np.testing.assert_array_equal(places, np.nonzero(x))
    wanted = np.unique(x, True, True, True)
    order = np.argsort(wanted[1])
    np.testing.assert_array_equal(y, wanted[0][order])
    np.testing.assert_array_equal(first, wanted[1][order])
    np.testing.assert_array_equal(counts, wanted[3][order])
    np.testing.assert_array_equal(y[inverse], x.ravel())


def test_a_detector_whose_numbers_vary(device: str) -> None:
    """What was picked goes through all that detectors do with it; also when that is nothing."""
    boxes, scores = sg.input("boxes", (1, "N", 4)), sg.input("scores", (1, 3, "N"))
    features, least = sg.input("features", (1, 4, 16, 16)), sg.input("least", (1,))
    limits = np.array([20]), np.array([0.4], np.float32), least
    kept = ops.NonMaxSuppression(boxes, scores, *limits)
    best, where = ops.TopK(score := ops.GatherND(scores, kept), ops.Min(ops.Shape(score), [7]))
    kept = ops.Gather(kept, where)
    picked = ops.Squeeze(ops.Gather(boxes, ops.Gather(kept, np.int64(2), axis=1), axis=1), [0])
    images, kinds = (ops.Gather(kept, np.int64(k), axis=1) for k in range(2))
    pooled = ops.RoiAlign(features, picked, images, output_height=2, output_width=2)
    sure = ops.Greater(best, np.float32(0.95))
    distinct, counts = (ops.Unique(kinds, outputs=4)[k] for k in (0, 3))
    results = [picked, pooled, ops.Compress(kinds, sure, axis=0), ops.NonZero(sure)]
    graph = sg.Graph([boxes, scores, features, least], [*results, distinct, counts])
    session = session_of(graph)
    model, rng = _compile(graph, device), np.random.default_rng(1)
    for number, threshold in ((50, 0.9), (30, 2.0), (60, 0.97), (50, 0.5)):
        corners = rng.uniform(0, 12, (1, number, 2))
        sizes = rng.uniform(1, 4, (1, number, 2))
        arrays = [np.concatenate([corners, corners + sizes], -1), rng.uniform(size=(1, 3, number))]
        arrays += [rng.standard_normal((1, 4, 16, 16)), np.array([threshold])]
        given = {v.name: a.astype(np.float32) for v, a in zip(graph.inputs, arrays, strict=True)}
        got = model(given)
        for k, wanted in enumerate(session.run(None, given)):
            assert got[k].shape == wanted.shape
            np.testing.assert_allclose(got[k], wanted, rtol=1e-4, atol=1e-5)


def test_the_pass_pads_the_operators_that_have_a_padded_form() -> None:
    from subgraph.ops.selection.padded import TRIMMED
    from subgraph.passes.shapes import pad_dynamic_outputs

    assert set(vars(pad_dynamic_outputs)["_OPERATORS"]) == set(TRIMMED)


@pytest.mark.parametrize("rows", [0, 3, 300, 3000])
@pytest.mark.parametrize("width", [None, 1, 3, 16, 40])
def test_compress_keeps_slices_of_every_width(device: str, rows: int, width: int | None) -> None:
    """From none to all of them; results of earlier runs stay as they were."""
    rng = np.random.default_rng(rows)
    shape = (rows,) if width is None else (rows, width)
    x = rng.standard_normal(shape).astype(np.float32)
    values = _input("x", x), _input("c", np.zeros(len(x), bool))
    model = _compile(sg.Graph(values, [ops.Compress(*values, axis=0)]), device)
    masks = [rng.uniform(size=len(x)) < share for share in (0, 0.02, 0.5, 0.9, 1)]
    results = [model([x + k, mask])[0] for k, mask in enumerate(masks)]
    for k, (mask, result) in enumerate(zip(masks, results, strict=True)):
        np.testing.assert_array_equal(result, np.compress(mask, x + k, 0))
        assert result.flags.c_contiguous
        assert result.flags.writeable
