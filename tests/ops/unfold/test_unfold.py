"""DeformConv, Col2Im and MaxUnpool on kernels of CPU and OPENCL."""

from __future__ import annotations

import time
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.layouts import block_lanes
from tests.support.agreement import assert_kernels_agree, kernel_devices
from tests.support.kernels import run_node
from tests.support.requirements import Use, run

pytestmark = pytest.mark.usefixtures("no_fallback")


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

    assert_kernels_agree(build, *arrays, held=int(held))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 4), (5, 1), (3,), (3, 4, 2)])
def test_the_reference_samples_images_of_any_rank(sizes: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(len(sizes))
    rank = len(sizes)
    x = rng.standard_normal((2, 4, *sizes)).astype(dtype)
    weight = rng.standard_normal((3, 4, *[2] * rank)).astype(dtype)
    whole = rng.integers(-1, 2, (2, 2, 2**rank, rank, *(n + 1 for n in sizes)))
    offset = whole.reshape(2, -1, *whole.shape[4:]).astype(dtype)
    attrs = {"pads": [1] * 2 * rank, "offset_group": 2}
    (found,) = run(Use("DeformConv", [x, weight, offset], attrs), "REFERENCE")
    expected = np.zeros((2, 3, *whole.shape[4:]))
    # Whole offsets choose pixels.
    for image, window in product(range(2), np.ndindex(*whole.shape[4:])):
        for channel, tap in product(range(4), np.ndindex(*[2] * rank)):
            number = int(np.ravel_multi_index(tap, [2] * rank))
            at = np.array(window) + tap + whole[image, channel // 2, number][:, *window] - 1
            if np.all((at >= 0) & (at < sizes)):
                factors = weight[:, channel].reshape(3, -1)[:, number]
                expected[image][:, *window] += x[image, channel].item(*at) * factors
    assert found.dtype == x.dtype
    np.testing.assert_allclose(
        found, expected, rtol=1e-5, atol=1e-5 if dtype == "float32" else 1e-13
    )


def test_the_reference_of_many_taps_is_vectorised() -> None:
    x = np.ones((1, 1, 316, 316), np.float32)
    offset = np.zeros((1, 2 * x.size, 1, 1), np.float32)
    start = time.monotonic()
    (found,) = run(Use("DeformConv", [x, x, offset]), "REFERENCE")
    assert time.monotonic() - start < 5, "onnx.reference took 30 s"
    assert found.item() == x.size


def test_places_of_nowhere_are_zero() -> None:
    x, offset = np.ones((1, 1, 3, 3), np.float32), np.zeros((1, 2, 3, 3), np.float32)
    offset[0, 0, 0], offset[0, 1, 1], offset[0, 0, 2] = np.nan, np.inf, -1e30
    inputs = [sg.input("x", x.shape), sg.input("o", offset.shape)]
    weight = sg.parameter("w", np.ones((1, 1, 1, 1), np.float32))
    graph = sg.Graph(inputs, [ops.DeformConv(inputs[0], weight, inputs[1])])
    for device in kernel_devices():
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
    assert_kernels_agree(lambda *v: ops.Col2Im(*v, **attrs), x, *shapes, held=2)


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
    assert_kernels_agree(build, x[(..., *even)].copy())


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("offsets", [(1, 8, 4, 2), (1, 8, 2, 4), (1, 6, 4, 4), (2, 8, 4, 4)])
def test_offsets_that_do_not_cover_a_deformed_image(offsets: Any, device: str) -> None:
    """The kernel read them as if they did, beyond their end."""
    x, o = sg.input("x", ("N", 1, 3, 3)), sg.input("o", ("B", "C", "H", "W"))
    weight = np.ones((1, 1, 2, 2), np.float32)
    graph = sg.Graph([x, o], [ops.DeformConv(x, weight, o, pads=[1, 1, 1, 1])])
    model = sg.compile_model(graph, device)
    image = np.ones((1, 1, 3, 3), np.float32)
    assert model([image, np.zeros((1, 8, 4, 4), np.float32)])[0].shape == (1, 1, 4, 4)
    with pytest.raises(sg.ShapeError):
        model([image, np.zeros(offsets, np.float32)])


@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64"])
@pytest.mark.parametrize(("block", "size"), [(2, (3, 5)), (3, (4, 1)), (2, (1, 40))])
@pytest.mark.parametrize("blocks", [1, 3])
def test_blocks_of_channels_become_pixels(
    dtype: str, block: int, size: tuple[int, int], blocks: int
) -> None:
    """DepthToSpace between images in blocks of channels moves whole blocks."""
    channels = blocks * block_lanes(dtype)
    x = np.random.default_rng(0).integers(0, 200, (2, channels * block * block, *size))
    x = x.astype(dtype)
    shape = (2, channels, size[0] * block, size[1] * block)
    wanted = x.reshape(2, block, block, channels, *size).transpose(0, 3, 4, 1, 5, 2).reshape(shape)
    (got,) = run_node(
        "DepthToSpace",
        [x],
        [shape],
        {"blocksize": block},
        blocked=(0,),
        out_layout="blocked",
        cuts=[0.3, 0.7],
    )
    np.testing.assert_array_equal(got, wanted)
