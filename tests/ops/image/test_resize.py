"""Resize on the CPU device: nearest and linear neighbours, every width, whole scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.kernels import random_bits
from tests.support.peer import session_of

rng = np.random.default_rng(3)


def nearest(array: Array, sizes: tuple[int, ...], threads: int = 1) -> Array:
    """Return what the CPU device takes from floor(j * before / after) along each axis."""
    x = sg.input("x", array.shape, str(array.dtype))
    y = ops.Resize(
        *(x, None, None, np.array(sizes)),
        mode="nearest",
        nearest_mode="floor",
        coordinate_transformation_mode="asymmetric",
    )
    model = sg.compile_model(sg.Graph([x], [y]), "CPU", {"INFERENCE_NUM_THREADS": threads})
    return np.asarray(model([array])[0])


def taken(array: Array, sizes: tuple[int, ...]) -> Array:
    for axis, (before, after) in enumerate(zip(array.shape, sizes, strict=True)):
        array = array.take(np.arange(after) * before // after, axis)
    return array


# Whole factors, of rows that fill a vector or not; one axis; other factors; an axis around.
RESIZED = [
    ((2, 3, 5, 37), (2, 3, 10, 74)),
    ((2, 3, 5, 7), (2, 3, 15, 21)),
    ((1, 2, 6, 40), (1, 2, 24, 160)),
    ((1, 2, 6, 40), (1, 2, 6, 80)),
    ((1, 2, 6, 300), (1, 2, 18, 300)),
    ((1, 2, 9, 40), (1, 2, 4, 31)),
    ((1, 2, 9, 8), (1, 2, 20, 4)),
    ((1, 2, 3, 8, 16), (1, 2, 6, 4, 32)),
    ((1, 2, 3, 8), (2, 3, 3, 8)),
    ((1, 6, 5, 3), (1, 12, 10, 3)),
    ((9,), (27,)),
    ((40,), (13,)),
]


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize(("shape", "sizes"), RESIZED)
def test_nearest(shape: tuple[int, ...], sizes: tuple[int, ...], dtype: str) -> None:
    x = random_bits(shape, dtype)
    np.testing.assert_array_equal(nearest(x, sizes), taken(x, sizes))


@pytest.mark.usefixtures("other_isa")
def test_every_width() -> None:
    for shape, sizes in RESIZED[1:3]:
        x = random_bits(shape, "float32")
        np.testing.assert_array_equal(nearest(x, sizes), taken(x, sizes))


def test_rows_are_taken_by_threads() -> None:
    """A row that is repeated may begin in another unit."""
    x = random_bits((1, 2, 90, 130), "float32")
    for threads in (1, 2):
        np.testing.assert_array_equal(
            nearest(x, (1, 2, 270, 260), threads), taken(x, (1, 2, 270, 260))
        )


# Rows shorter than a vector, and longer; neighbours that one vector holds, and that it does not.
@pytest.mark.parametrize("size", [1, 2, 5, 15, 16, 17, 31, 64, 100])
@pytest.mark.parametrize("taken", [1, 4, 16, 33, 75, 128, 400])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_between_neighbours(size: int, taken: int, dtype: str) -> None:
    array = rng.standard_normal((3, size)).astype(dtype)
    array[1, size // 2] = np.inf
    x = sg.input("x", array.shape, dtype)
    y = ops.Resize(x, None, None, np.array([3, taken]), mode="linear")
    model = sg.compile_model(sg.Graph([x], [y]), "CPU", {"INFERENCE_NUM_THREADS": 1})
    at = np.clip((np.arange(taken) + 0.5) * size / taken - 0.5, 0, size - 1)
    left = np.clip(np.ceil(at) - 1, 0, None).astype(int)
    right, part = np.minimum(left + 1, size - 1), at - left
    with np.errstate(invalid="ignore"):
        want = array[:, left] * (1 - part) + array[:, right] * part
    got = np.asarray(model([array])[0])
    for row in (0, 2):  # an infinite neighbour reaches no other row
        np.testing.assert_allclose(got[row], want[row], rtol=1e-4, atol=1e-5)
    far = np.isfinite(array[1, left]) & np.isfinite(array[1, right])
    np.testing.assert_allclose(got[1, far], want[1, far], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
@pytest.mark.parametrize(
    "transform",
    [
        *("asymmetric", "half_pixel", "pytorch_half_pixel", "half_pixel_symmetric"),
        *("align_corners", "tf_half_pixel_for_nn"),
    ],
)
def test_whole_scales_of_all_kinds(transform: str, rounding: str) -> None:
    """Many of them only repeat elements; which do, the standard's formula tells."""
    x = sg.input("x", (2, 3, "h", "w"), "float32")
    form: dict[str, Any] = {
        "coordinate_transformation_mode": transform,
        "nearest_mode": rounding,
    }
    for times in ([2, 3], [4, 1], [7, 2], [5, 6]):
        scales = np.array([1, 1, *times], np.float32)
        graph = sg.Graph([x], [ops.Resize(x, None, scales, mode="nearest", **form)])
        model, reference = (sg.compile_model(graph, device) for device in ("CPU", "REFERENCE"))
        for shape in ((2, 3, 5, 9), (2, 3, 6, 9), (2, 3, 1, 20), (2, 3, 7, 1)):
            array = np.random.default_rng(0).random(shape, np.float32)
            np.testing.assert_array_equal(model([array])[0], reference([array])[0])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("shape", [(1, 1, 4, 40), (1, 1, 40, 4)])
def test_a_region_outside_of_the_image_is_filled_on_cpu(mode: str, shape: tuple[int, ...]) -> None:
    """No neighbour had a weight then, and the node was left to the reference."""
    x = sg.input("x", shape)
    longest = int(np.argmax(shape))
    roi = np.repeat(np.array([0, 1], np.float32), 4)
    roi[[longest, 4 + longest]] = 2, 3
    filled = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 7.0}
    graph = sg.Graph([x], [ops.Resize(x, roi, None, np.array([1, 1, 8, 8]), mode=mode, **filled)])
    assert set(sg.Core().query_model(graph, "CPU").values()) == {"CPU"}
    found = sg.compile_model(graph, "CPU")([rng.random(shape, np.float32)])[0]
    np.testing.assert_array_equal(found, np.full((1, 1, 8, 8), 7, np.float32))


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize(
    ("mode", "antialias"),
    [("nearest", 0), ("linear", 0), ("linear", 1), ("cubic", 0), ("cubic", 1)],
)
def test_an_axis_that_pytorch_half_pixel_makes_one_element_begins_at_the_first(
    mode: str, antialias: int, device: str
) -> None:
    """The standard's text, as ONNX Runtime; onnx.reference begins half an element before it."""
    x = sg.input("x", (1, 1, 4, 7))
    form: dict[str, Any] = {
        "coordinate_transformation_mode": "pytorch_half_pixel",
        "antialias": antialias,
    }
    scales = np.array([1, 1, 1.5, 0.25], np.float32)
    sizes = np.array([1, 1, 6, 1])
    array = rng.random((1, 1, 4, 7), np.float32)
    for given in ((None, scales), (None, None, sizes)):
        graph = sg.Graph([x], [ops.Resize(x, *given, mode=mode, **form)])
        found = sg.compile_model(graph, device)([array])[0]
        (wanted,) = session_of(graph).run(None, {"x": array})
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
