"""DeformConv, Col2Im, AffineGrid, TensorScatter, LinearAttention on kernels of CPU and OPENCL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.kernels import run_node


@pytest.fixture(autouse=True)
def _no_fallback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let no test pass whose kernels failed, so that another device gave the results."""
    yield
    assert not [r for r in caplog.records if "failed on device" in r.getMessage()]


def _devices() -> list[str]:
    found = sg.default_core().available_devices
    return [name for name in ("CPU", "OPENCL") if name in found]


def _agree(build: Any, *arrays: Array, held: int = 0) -> None:
    """Compare each device with onnx.reference; the last ``held`` arrays are weights."""
    count = len(arrays) - held
    inputs = [sg.input(f"x{k}", a.shape, a.dtype.name) for k, a in enumerate(arrays[:count])]
    weights = [sg.parameter(f"w{k}", a) for k, a in enumerate(arrays[count:])]
    made = build(*inputs, *weights)
    graph = sg.Graph(inputs, list(made) if isinstance(made, tuple) else [made])
    given = list(arrays[:count])
    expected = sg.compile_model(graph, "REFERENCE")(given)
    tolerance = 1e-2 if arrays[0].dtype == np.float16 else 1e-5
    for device in _devices():
        placed = sg.default_core().query_model(graph, device)
        assert set(placed) == {node.name for node in graph.nodes}, placed.reasons
        model = sg.compile_model(graph, device)
        for _ in range(2):
            got = model(given)
            for k in range(len(graph.outputs)):
                assert got[k].dtype == expected[k].dtype
                np.testing.assert_allclose(got[k], expected[k], rtol=tolerance, atol=tolerance)


def _rows(size: int, window: int, stride: int, dilation: int, pads: tuple[int, int]) -> int:
    return (size + sum(pads) - dilation * (window - 1) - 1) // stride + 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize(
    ("group", "offsets", "stride", "dilation", "pads", "extras"),
    [
        (1, 1, 1, 1, (0, 0), 0),
        (2, 1, 2, 1, (1, 1), 1),
        (1, 2, 1, 2, (2, 1), 2),
        (4, 4, 2, 2, (2, 2), 2),
    ],
)
def test_deformable_convolutions(
    dtype: str,
    held: bool,
    group: int,
    offsets: int,
    stride: int,
    dilation: int,
    pads: tuple[int, int],
    extras: int,
) -> None:
    rng = np.random.default_rng(group + offsets)
    x = rng.standard_normal((2, 4, 7, 9))
    weight = rng.standard_normal((8, 4 // group, 3, 2))
    high = _rows(7, 3, stride, dilation, pads)
    wide = _rows(9, 2, stride, dilation, pads)
    offset = rng.uniform(-2.5, 2.5, (2, offsets * 12, high, wide))
    more = [rng.standard_normal(8), rng.random((2, offsets * 6, high, wide))][:extras]
    arrays = [array.astype(dtype) for array in (x, offset, *more, weight)]
    attrs: dict[str, Any] = {"group": group, "offset_group": offsets, "strides": [stride] * 2}
    attrs |= {"dilations": [dilation] * 2, "pads": [pads[0], pads[0], pads[1], pads[1]]}

    def build(*values: Any) -> Any:
        image, moved, *rest, taps = values
        return ops.DeformConv(image, taps, moved, *rest, **attrs)

    _agree(build, *arrays, held=int(held))


def test_places_of_nowhere_are_zero() -> None:
    x, offset = np.ones((1, 1, 3, 3), np.float32), np.zeros((1, 2, 3, 3), np.float32)
    offset[0, 0, 0], offset[0, 1, 1], offset[0, 0, 2] = np.nan, np.inf, -1e30
    inputs = [sg.input("x", x.shape), sg.input("o", offset.shape)]
    weight = sg.parameter("w", np.ones((1, 1, 1, 1), np.float32))
    graph = sg.Graph(inputs, [ops.DeformConv(inputs[0], weight, inputs[1])])
    for device in _devices():
        assert not sg.compile_model(graph, device)([x, offset])[0].any()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("image", "block", "strides", "dilations", "pads"),
    [
        ((5, 6), (2, 3), (1, 1), (1, 1), (0, 0, 0, 0)),
        ((7, 6), (3, 2), (2, 1), (1, 2), (1, 0, 2, 1)),
        ((9,), (3,), (2,), (2,), (1, 1)),
        ((4, 5, 6), (2, 2, 3), (1, 2, 1), (1, 1, 2), (0, 1, 1, 0, 0, 1)),
    ],
)
def test_columns_to_images(
    dtype: str,
    image: tuple[int, ...],
    block: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
) -> None:
    rank = len(image)
    counts = [
        _rows(image[d], block[d], strides[d], dilations[d], (pads[d], pads[rank + d]))
        for d in range(rank)
    ]
    shape = (2, 3 * int(np.prod(block)), int(np.prod(counts)))
    x = np.random.default_rng(rank).standard_normal(shape).astype(dtype)
    shapes = np.array(image), np.array(block)
    attrs: dict[str, Any] = {"strides": strides, "dilations": dilations, "pads": pads}
    _agree(lambda *v: ops.Col2Im(*v, **attrs), x, *shapes, held=2)


_AXIS = st.tuples(*[st.integers(1, 4)] * 3, *[st.integers(0, 3)] * 2)


@settings(max_examples=60, deadline=None)
@given(
    outer=st.lists(st.tuples(st.integers(1, 5), _AXIS), max_size=2),
    last=st.tuples(st.integers(1, 75), _AXIS),
    dtype=st.sampled_from(["float32", "float64"]),
    cuts=st.lists(st.floats(0, 1), max_size=2),
)
@example(outer=[(3, (2, 2, 1, 0, 0))], last=(40, (2, 2, 1, 0, 0)), dtype="float32", cuts=[])
@example(outer=[], last=(64, (4, 4, 3, 3, 3)), dtype="float64", cuts=[])
def test_columns_of_long_rows(
    outer: list[tuple[int, tuple[int, ...]]],
    last: tuple[int, tuple[int, ...]],
    dtype: str,
    cuts: list[float],
) -> None:
    """Axes are a number of windows with taps, stride, dilation and pads of the image."""
    axes = [*outer, last]
    counts = [count for count, _ in axes]
    block, strides, dilations, before, after = zip(*(axis for _, axis in axes), strict=True)
    whole = [
        (n - 1) * s + (k - 1) * d + 1
        for n, k, s, d in zip(counts, block, strides, dilations, strict=True)
    ]
    image = [n - b - a for n, b, a in zip(whole, before, after, strict=True)]
    assume(min(image) > 0)
    x = np.random.default_rng(0).standard_normal((2, 3, *block, *counts)).astype(dtype)
    wide = np.zeros((2, 3, *whole), dtype)
    for tap in np.ndindex(*block):
        steps = zip(tap, counts, strides, dilations, strict=True)
        places = tuple(slice(t * d, t * d + (n - 1) * s + 1, s) for t, n, s, d in steps)
        wide[(..., *places)] += x[(slice(None), slice(None), *tap)]
    kept = tuple(slice(b, b + n) for b, n in zip(before, image, strict=True))
    columns = x.reshape(2, 3 * int(np.prod(block)), -1)
    (got,) = run_node(
        "Col2Im",
        [columns, np.array(image), np.array(block)],
        [(2, 3, *image)],
        {"strides": strides, "dilations": dilations, "pads": (*before, *after)},
        constant=[1, 2],
        cuts=cuts,
    )
    np.testing.assert_allclose(got, wide[(..., *kept)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(2, 3, 5, 4), (2, 1, 1, 6), (2, 2, 3, 4, 5)])
@pytest.mark.parametrize("corners", [0, 1])
def test_affine_grids(size: tuple[int, ...], corners: int) -> None:
    rank = len(size) - 2
    theta = np.random.default_rng(rank).standard_normal((2, rank, rank + 1)).astype(np.float32)
    _agree(lambda *v: ops.AffineGrid(*v, align_corners=corners), theta, np.array(size), held=1)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    ("shape", "axis", "count"), [((3, 2, 6, 4), -2, 2), ((2, 5, 3), 1, 1), ((2, 3, 2, 4), 3, 3)]
)
@pytest.mark.parametrize("mode", ["linear", "circular", ""])
def test_rows_into_a_cache(
    dtype: str, shape: tuple[int, ...], axis: int, count: int, mode: str
) -> None:
    rng = np.random.default_rng(count)
    length = shape[axis]
    sizes = list(shape)
    sizes[axis] = count
    arrays = [rng.integers(-9, 9, s).astype(dtype) for s in (shape, sizes)]
    if mode:
        last = length - count if mode == "linear" else 3 * length
        arrays.append(rng.integers(0, last + 1, shape[0]))
    attrs: dict[str, Any] = {"mode": mode or "linear"}
    _agree(lambda *v: ops.TensorScatter(*v, axis=axis, **attrs), *arrays)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(("heads", "own", "per_key"), [(2, 2, True), (4, 2, False), (3, 1, True)])
@pytest.mark.parametrize("past", [True, False])
def test_linear_attention(rule: str, heads: int, own: int, per_key: bool, past: bool) -> None:
    dtype = "float32" if past or per_key else "float16"
    rng = np.random.default_rng(heads)
    batch, tokens, keys, values = 2, 5, 4, 6
    arrays: list[Array | None] = [
        rng.standard_normal((batch, tokens, heads * keys)),
        rng.standard_normal((batch, tokens, own * keys)) / 2,
        rng.standard_normal((batch, tokens, own * values)),
        rng.standard_normal((batch, own, keys, values)) if past else None,
        -rng.random((batch, tokens, own * (keys if per_key else 1))) if "gated" in rule else None,
        rng.random((batch, tokens, own if per_key else 1)) if "delta" in rule else None,
    ]
    given = [array.astype(dtype) for array in arrays if array is not None]

    def build(*inputs: Any) -> Any:
        left = iter(inputs)
        slots = [None if array is None else next(left) for array in arrays]
        while slots[-1] is None:
            slots.pop()
        attrs: dict[str, Any] = {"q_num_heads": heads, "kv_num_heads": own, "update_rule": rule}
        return ops.LinearAttention(*slots, **attrs)

    _agree(build, *given)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("image", "window", "group", "options"),
    [
        ((5,), (3,), 1, {}),
        ((4, 5), (3, 2), 2, {"strides": [2, 1], "pads": [1, 0, 0, 1]}),
        ((3, 4), (2, 3), 1, {"strides": [3, 2], "dilations": [2, 1], "output_padding": [1, 0]}),
        ((2, 3), (3, 3), 4, {"strides": [2, 2], "auto_pad": "SAME_UPPER"}),
        ((2, 3, 2), (2, 2, 3), 2, {"strides": [1, 2, 1], "output_shape": [3, 5, 4]}),
        ((1, 1), (1, 1), 1, {}),
    ],
)
def test_transposed_convolutions_with_computed_weights(
    dtype: str,
    bias: bool,
    image: tuple[int, ...],
    window: tuple[int, ...],
    group: int,
    options: dict[str, Any],
) -> None:
    rng = np.random.default_rng([len(image), group, int(bias)])
    x = rng.standard_normal((2, 4, *image)).astype(dtype)
    w = rng.standard_normal((4, 3, *window)).astype(dtype)
    b = rng.standard_normal(3 * group).astype(dtype)

    def build(x: Any, w: Any, *b: Any) -> Any:
        return ops.ConvTranspose(x, ops.Neg(w), *b, group=group, **options)

    _agree(build, x, w, *[b] * bias)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("larger", [0, 2])
@pytest.mark.parametrize("image", [(9,), (6, 7), (4, 5, 6)])
def test_maxima_go_back_to_their_places(dtype: str, larger: int, image: tuple[int, ...]) -> None:
    rank = len(image)
    x = np.random.default_rng(rank).standard_normal((2, 3, *image)).astype(dtype)
    window: dict[str, Any] = {"kernel_shape": [2] * rank, "strides": [2] * rank}

    def build(x: Any) -> Any:
        y, places = ops.MaxPool(x, **window, outputs=2)
        size = [2, 3, *(n // 2 * 2 + larger for n in image)]
        return ops.MaxUnpool(y, ops.Cast(places, to="int64"), size if larger else None, **window)

    even = tuple(slice(0, n // 2 * 2) for n in image)
    _agree(build, x[(..., *even)].copy())


@pytest.mark.parametrize("channels", [1, 4, 16])
@pytest.mark.parametrize("image", [(7,), (6, 7), (3, 4, 5)])
def test_convolutions_with_computed_weights(channels: int, image: tuple[int, ...]) -> None:
    """Found by test_operator_versions.py: their weights were read as if in blocks of channels."""
    rng = np.random.default_rng([channels, len(image)])
    x = rng.standard_normal((2, channels, *image)).astype(np.float32)
    w = rng.standard_normal((6, channels, *[2] * len(image))).astype(np.float32)

    def build(x: Any, w: Any) -> Any:
        twice = ops.Conv(ops.Relu(ops.Conv(x, w)), np.ones((2, 6, *[1] * len(image)), np.float32))
        return twice, ops.Conv(x, ops.Neg(w), strides=[2] * len(image))

    _agree(build, x, w)
