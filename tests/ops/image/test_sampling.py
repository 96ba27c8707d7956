"""RoiAlign, MaxRoiPool, GridSample and AffineGrid on CPU and OPENCL, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.agreement import assert_kernels_agree
from tests.support.opencl import missing
from tests.support.peer import session_of

DEVICES = ("CPU",) if missing() else ("CPU", "OPENCL")


def _agree(build: Any, *arrays: Array, by_reference: bool = False) -> None:
    inputs = [sg.input(f"x{k}", a.shape, a.dtype.name) for k, a in enumerate(arrays)]
    graph = sg.Graph(inputs, [build(*inputs)])
    if by_reference:
        expected = sg.compile_model(graph, "REFERENCE")(list(arrays))[0]
    else:
        session = session_of(graph)
        (expected,) = session.run(None, {f"x{k}": a for k, a in enumerate(arrays)})
    for device in DEVICES:
        query = sg.default_core().query_model(graph, device)
        assert set(query) == {node.name for node in graph.nodes}
        got = sg.compile_model(graph, device)(list(arrays))[0]
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-4, err_msg=device)


@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("where", ["half_pixel", "output_half_pixel"])
def test_roi_align(ratio: int, mode: str, where: str) -> None:
    rng = np.random.default_rng(ratio)
    x = rng.standard_normal((3, 5, 13, 11)).astype(np.float32)
    regions = rng.uniform(-3, 30, (9, 4)).astype(np.float32)
    regions = np.concatenate([np.minimum(regions[:, :2], regions[:, 2:]), regions[:, 2:] + 1], 1)
    images = rng.integers(0, 3, 9)
    options: dict[str, Any] = {"mode": mode, "sampling_ratio": ratio, "spatial_scale": 0.45}
    options |= {"output_height": 3, "output_width": 4, "coordinate_transformation_mode": where}
    _agree(lambda *v: ops.RoiAlign(*v, **options), x, regions.astype(np.float32), images)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("ratio", [0, 1, 3])
def test_regions_of_every_size(dtype: str, ratio: int) -> None:
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 37, 40, 150)).astype(dtype)  # more channels than share weights
    corner = rng.uniform(-10, 100, (12, 2))
    regions = np.concatenate([corner, corner + rng.uniform(0, 1, (12, 2)) ** 4 * 160], 1)
    regions[-1] = [30, 20, 10, 5]  # from right to left
    options: dict[str, Any] = {"sampling_ratio": ratio, "output_height": 2, "output_width": 5}
    numbers = rng.integers(0, 2, 12)
    _agree(lambda *v: ops.RoiAlign(*v, **options), x, regions.astype(dtype), numbers)


def test_endless_pixels_reach_the_bins_that_take_them_alone() -> None:
    x = np.ones((1, 1, 8, 40), np.float32)
    x[0, 0, 5, 3], x[0, 0, 1, 33] = np.inf, np.nan
    regions = np.array([[0, 0, 40, 8]], np.float32)
    inputs = [sg.input("x", x.shape), sg.input("r", regions.shape), sg.input("i", (1,), "int64")]
    made = ops.RoiAlign(*inputs, output_height=2, output_width=4, sampling_ratio=20)
    model = sg.compile_model(sg.Graph(inputs, [made]), "CPU")
    found = model([x, regions, np.zeros(1, np.int64)])[0]
    expected = np.ones((1, 1, 2, 4), np.float32)
    expected[0, 0, 1, 0], expected[0, 0, 0, 3] = np.inf, np.nan
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("device", ["REFERENCE", *DEVICES])
@pytest.mark.parametrize("ratio", [0, 2])
@pytest.mark.parametrize("mode", ["half_pixel", "output_half_pixel"])
def test_regions_that_are_not_finite_are_an_error(mode: str, ratio: int, device: str) -> None:
    """CPU gave 0 for most of them."""
    x = np.ones((1, 2, 4, 4), np.float32)
    inputs = [sg.input("x", x.shape), sg.input("r", (2, 4)), sg.input("i", (2,), "int64")]
    options: dict[str, Any] = {"sampling_ratio": ratio, "coordinate_transformation_mode": mode}
    model = sg.compile_model(sg.Graph(inputs, [ops.RoiAlign(*inputs, **options)]), device)
    usual = [3.0, 3.0, 1.0, 1.0]
    nowhere = [[np.nan] * 4, [-1e30, -1e30, 1e30, 1e30], [np.inf] * 4]
    for at, value in ((0, np.inf), (1, np.nan), (1, -np.inf), (2, -np.inf), (3, np.inf)):
        nowhere.append([*usual[:at], value, *usual[at + 1 :]])
    for region in nowhere:
        regions = np.array([usual, region], np.float32)
        with pytest.raises(sg.ShapeError, match=r"RoiAlign_0.*rois"):
            model([x, regions, np.zeros(2, np.int64)])


@pytest.mark.parametrize("device", ["REFERENCE", *DEVICES])
@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("end", [(5000, 1), (1, 5000), (np.inf, 1), (1, np.nan)])
def test_too_many_samples_are_an_error(end: tuple[float, float], mode: str, device: str) -> None:
    """The kernels took 4096 along an axis of a bin whatever the region; REFERENCE refused."""
    x, numbers = np.ones((1, 1, 4, 4), np.float32), np.zeros(2, np.int64)
    regions = np.array([[0, 0, 3, 3], [0, 0, *end]], np.float32)
    inputs = [sg.input("x", x.shape), sg.input("r", regions.shape), sg.input("i", (2,), "int64")]
    model = sg.compile_model(sg.Graph(inputs, [ops.RoiAlign(*inputs, mode=mode)]), device)
    with pytest.raises(sg.ShapeError, match="samples"):
        model([x, regions, numbers])
    regions[1] = [0, 0, 9, 9]
    assert np.all(np.isfinite(model([x, regions, numbers])[0]))


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_max_roi_pool(scale: float) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, 3, 9, 12)).astype(np.float32)
    start = rng.uniform(0, 6, (7, 2))
    regions = np.concatenate([rng.integers(0, 2, (7, 1)), start, start + 5], 1).astype(np.float32)
    options: dict[str, Any] = {"pooled_shape": (3, 2), "spatial_scale": scale}
    _agree(lambda *v: ops.MaxRoiPool(*v, **options), x, regions)


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
def test_regions_of_max_roi_pool_far_outside(device: str) -> None:
    """Corners beyond int64 were refused by REFERENCE and clamped by the kernels."""
    x = np.random.default_rng(5).standard_normal((1, 2, 6, 7)).astype(np.float32)
    corners = [[-1e38, 2, 1e38, 4], [-0.5, -1.5, 2.5, 3.5], [np.nan, 1, 5, np.inf], [3, 3, 1e30, 4]]
    # A cast cuts off the fraction of an image's number.
    regions = np.concatenate([np.array([[0, -0.9, 0.9, 0]]).T, corners], 1).astype(np.float32)
    inputs = [sg.input("x", x.shape), sg.input("r", regions.shape)]
    for scale in (1.0, -1.0, 0.5):
        y = ops.MaxRoiPool(*inputs, pooled_shape=[2, 2], spatial_scale=scale)
        graph = sg.Graph(inputs, [y])
        want = sg.compile_model(graph, "REFERENCE")([x, regions])[0]
        got = sg.compile_model(graph, device)([x, regions])[0]
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("channels", [3, 13])
def test_grid_sample(mode: str, padding: str, corners: int, channels: int) -> None:
    rng = np.random.default_rng(2)
    options: dict[str, Any] = {"mode": mode, "padding_mode": padding, "align_corners": corners}
    x = rng.standard_normal((2, channels, 7, 5)).astype(np.float32)
    grid = rng.uniform(-1.6, 1.6, (2, 6, 5, 2)).astype(np.float32)
    # onnx.reference moves a place to the border before it takes neighbours; ONNX Runtime does not.
    odd = mode == "cubic" and padding == "border"
    _agree(lambda *v: ops.GridSample(*v, **options), x, grid, by_reference=odd)
    if mode != "cubic":
        x = rng.standard_normal((1, channels - 1, 4, 7, 5)).astype(np.float32)
        grid = rng.uniform(-1.6, 1.6, (1, 3, 6, 4, 3)).astype(np.float32)
        _agree(lambda *v: ops.GridSample(*v, **options), x, grid)


@pytest.mark.parametrize("corners", [0, 1])
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("size", [(1, 1), (6, 9)])
def test_places_of_nowhere_alone_and_in_vectors(
    size: tuple[int, int], padding: str, corners: int
) -> None:
    x = np.random.default_rng(1).standard_normal((1, 2, *size)).astype(np.float32)
    numbers = [np.nan, np.inf, -np.inf, 1e30, -1e30, 3.0, -1.0, 1.0, -0.99, 0.99, 0.2]
    grid = np.array([[a, b] for a in numbers for b in numbers], np.float32)
    inputs = [sg.input("x", x.shape), sg.input("grid", (1, 1, "N", 2))]
    options: dict[str, Any] = {"padding_mode": padding, "align_corners": corners}
    model = sg.compile_model(sg.Graph(inputs, [ops.GridSample(*inputs, **options)]), "CPU")
    together = model([x, grid[None, None]])[0]
    alone = [model([x, place[None, None, None]])[0] for place in grid]
    np.testing.assert_allclose(together, np.concatenate(alone, 3), rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("no_fallback")
@pytest.mark.parametrize("size", [(2, 3, 5, 4), (2, 1, 1, 6), (2, 2, 3, 4, 5)])
@pytest.mark.parametrize("corners", [0, 1])
def test_affine_grids(size: tuple[int, ...], corners: int) -> None:
    rank = len(size) - 2
    theta = np.random.default_rng(rank).standard_normal((2, rank, rank + 1)).astype(np.float32)
    assert_kernels_agree(
        lambda *v: ops.AffineGrid(*v, align_corners=corners), theta, np.array(size), held=1
    )
