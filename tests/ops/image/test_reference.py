"""The reference of Resize, Upsample, RoiAlign and MaxRoiPool, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.tools import backend
from tests.support.peer import compare_with_onnxruntime, model_of_node, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


def test_max_roi_pool() -> None:
    x = uniform(2, 3, 9, 11)
    rois = np.array([[0, 0, 0, 8, 8], [1, 2, 3, 6, 5], [0, 4, 4, 4, 4], [1, 1.6, 0.4, 9.5, 7]], "f")
    compare_with_onnxruntime("MaxRoiPool", [x, rois], 9, pooled_shape=[3, 2])
    compare_with_onnxruntime(
        "MaxRoiPool",
        [x, rois * np.array([1, 2, 2, 2, 2], "f")],
        9,
        pooled_shape=[2, 4],
        spatial_scale=0.5,
    )


@pytest.mark.parametrize("version", [10, 16])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align_of_every_opset(version: int, ratio: int) -> None:
    regions = np.array([[0.0, 0.5, 5.0, 6.0], [1.0, 2.0, 7.5, 8.0]], np.float32)
    inputs = [uniform(1, 2, 9, 11), regions, np.array([0, 0])]
    compare_with_onnxruntime(
        "RoiAlign", inputs, version, sampling_ratio=ratio, output_height=3, output_width=2
    )


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_sampling_without_end_is_refused(device: str) -> None:
    inputs = [uniform(1, 2, 9, 11), np.ones((1, 4), np.float32), np.array([0])]
    model, given = model_of_node("RoiAlign", inputs, 16, sampling_ratio=1 << 30)
    with pytest.raises(sg.ShapeError, match="sampling_ratio"):
        backend.run_model(model, given, device)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("version", [7, 9, 10])
@pytest.mark.parametrize("scales", [(1, 1, 2, 3), (1, 1, 1.7, 2.3)])
def test_upsample_and_the_first_resize(mode: str, version: int, scales: tuple[float, ...]) -> None:
    x, factors = uniform(1, 2, 3, 4), np.array(scales, np.float32)
    if version == 7:
        compare_with_onnxruntime("Upsample", [x], 7, mode=mode, scales=[float(s) for s in scales])
    else:
        compare_with_onnxruntime(
            "Upsample" if version == 9 else "Resize", [x, factors], version, mode=mode
        )


@pytest.mark.parametrize(("size", "scale"), [(10, 0.7), (20, 0.35), (30, 0.1), (7, 1.6), (15, 2.2)])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("axes", [None, [3]])
def test_sizes_are_products_of_floats(
    mode: str, size: int, scale: float, axes: list[int] | None
) -> None:
    scales = np.array([scale] if axes else [1, 1, 1, scale], np.float32)
    attrs: dict[str, Any] = {"axes": axes} if axes else {}
    compare_with_onnxruntime(
        "Resize", [uniform(1, 1, 1, size), None, scales], 18, mode=mode, **attrs
    )


@pytest.mark.parametrize("size", [10, 20])
def test_sizes_of_the_first_resize(size: int) -> None:
    scales = np.array([1, 1, 1, 0.7 if size == 10 else 0.35], np.float32)
    compare_with_onnxruntime("Resize", [uniform(1, 1, 2, size), scales], 10, mode="linear")


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_bins_of_max_roi_pool_begin_at_whole_pixels(device: str) -> None:
    """49 times 2 / 98 is 1; rounded products of floats are below, and added the pixel before."""
    image = np.array([[5, 3]], np.float32).reshape(1, 1, 1, 2)
    x = sg.input("x", image.shape)
    graph = sg.Graph(
        [x], [ops.MaxRoiPool(x, np.array([[0, 0, 0, 1, 0]], np.float32), pooled_shape=(1, 98))]
    )
    found = sg.compile_model(graph, device)([image])[0]
    np.testing.assert_array_equal(found.reshape(-1), np.repeat(np.array([5, 3], np.float32), 49))


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("version", [11, 13, 19])
@pytest.mark.parametrize("scales", [(1, 1, 2, 2), (1, 1, 3, 0.4), (1, 1, 1, 1.6), (1, 1, 0.5, 0.7)])
@pytest.mark.parametrize("rounding", ["floor", "ceil", "round_prefer_floor", "round_prefer_ceil"])
def test_half_pixels_of_tensorflow(
    device: str, version: int, scales: tuple[float, ...], rounding: str
) -> None:
    """The mode of opset 11 that tf2onnx writes in every opset was computed as "half_pixel"."""
    attrs: dict[str, Any] = {
        "coordinate_transformation_mode": "tf_half_pixel_for_nn",
        "nearest_mode": rounding,
    }
    x, none = uniform(1, 2, 5, 6), uniform(0) if version == 11 else None
    sizes = np.array([1, 2, *(int(n * s) for n, s in zip((5, 6), scales[2:], strict=True))])
    for operands in ([x, none, np.array(scales, np.float32)], [x, none, none, sizes]):
        compare_with_onnxruntime("Resize", operands, version, device=device, **attrs)


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_the_nearest_element_leaves_out_none(dtype: str, rounding: str) -> None:
    """onnx.reference takes 0 where the rounded position is outside of the image."""
    x = sg.input("x", (5, 4), dtype)
    form: dict[str, Any] = {"mode": "nearest", "nearest_mode": rounding}
    scales = np.array([2, 1.5], np.float32)
    found = [
        sg.compile_model(
            sg.Graph([x], [ops.Resize(x, None, scales, exclude_outside=outside, **form)]), device
        )([np.arange(1, 21).reshape(5, 4).astype(dtype)])[0]
        for device, outside in (("CPU", 0), ("CPU", 1), ("REFERENCE", 1))
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
