"""CropAndResize and ConvTransposeWithDynamicPads, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.contrib import check
from tests.support.requirements import Use, floats, refused

pytestmark = pytest.mark.filterwarnings("ignore")
CORNERS = [[0, 0, 1, 1], [0.13, 0.22, 0.77, 0.91], [-0.5, 0.5, 1.2, 0.8], [0.9, 0.9, 0.1, 0.1]]
ROIS = np.array([*CORNERS, [0.3, 0.3, 0.3, 0.3]], np.float32)
IMAGES = np.array([0, 1, 1, 0, 1], np.int32)


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("size", [[3, 4], [1, 1], [1, 5], [7, 2], [14, 14]])
def test_crops(size: list[int], mode: str, symbolic: bool) -> None:
    inputs = [floats(2, 3, 6, 7), ROIS, IMAGES, np.array(size, np.int32)]
    constants = [] if symbolic else [3]
    form: dict[str, Any] = {"mode": mode, "extrapolation_value": 0.5}
    check("CropAndResize", inputs, constants=constants, symbolic=symbolic, **form)


@given(
    st.lists(st.integers(1, 9), min_size=4, max_size=4),
    st.sampled_from(["bilinear", "nearest"]),
    st.integers(0, 999),
)
def test_crops_of_any_regions(sizes: list[int], mode: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    rois = random.uniform(-0.2, 1.2, (4, 4)).astype(np.float32)
    size = np.array(sizes[2:], np.int32)
    inputs = [floats(2, 3, *sizes[:2]), rois, np.array([0, 1, 1, 0], np.int32), size]
    check("CropAndResize", inputs, constants=[3], mode=mode)


def test_no_crops() -> None:
    inputs = [floats(2, 3, 6, 7), ROIS[:0], IMAGES[:0], np.array([3, 4], np.int32)]
    check("CropAndResize", inputs, constants=[3])
    inputs = [floats(2, 0, 6, 7), ROIS, IMAGES, np.array([3, 4], np.int32)]
    check("CropAndResize", inputs, constants=[3], devices=["REFERENCE"])


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize(
    ("pads", "form"),
    [
        ([1, 0, 2, 1], {}),
        ([0, 0, 0, 0], {"output_padding": [1, 0], "strides": [2, 2]}),
        ([1, 1, 1, 1], {"strides": [2, 3], "dilations": [2, 1], "group": 2}),
        ([3, 0, 0, 2], {"kernel_shape": [3, 3], "auto_pad": "NOTSET"}),
    ],
)
def test_pads_that_are_an_input(pads: list[int], form: dict[str, Any], symbolic: bool) -> None:
    group = form.get("group", 1)
    inputs = [floats(2, 4, 5, 6), floats(4, 3, 3, 3), np.array(pads), floats(3 * group)]
    constants = [1, 3] if symbolic else [1, 2, 3]
    check(
        "ConvTransposeWithDynamicPads", inputs, constants=constants, symbolic=symbolic, atol=1e-4,
        **form,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(2, 4, 5), (1, 4, 3, 4, 2)])
def test_pads_of_other_dimensions(shape: tuple[int, ...]) -> None:
    spatial = len(shape) - 2
    pads = np.arange(2 * spatial) % 2
    inputs = [floats(*shape), floats(4, 2, *[3] * spatial), pads]
    check("ConvTransposeWithDynamicPads", inputs, constants=[1, 2], atol=1e-4)


def _crop(k: int, other: np.ndarray, **form: Any) -> Use:
    given_: list[np.ndarray | None] = [floats(2, 3, 6, 7), ROIS, IMAGES, np.array([3, 4], np.int32)]
    given_[k] = other
    return Use("CropAndResize", given_, form, 1, 1, "com.microsoft")


def _padded(pads: np.ndarray | None, **form: Any) -> Use:
    operands = [floats(2, 4, 5, 6), floats(4, 3, 3, 3), pads]
    return Use("ConvTransposeWithDynamicPads", operands, form, 1, 1, "com.microsoft")


test_operands_that_do_not_fit_are_refused = refused(
    [
        _crop(0, floats(2, 3, 6)),
        _crop(1, floats(5, 3)),
        _crop(1, floats(20)),
        _crop(1, ROIS.astype(np.float64)),
        _crop(2, IMAGES[:4]),
        _crop(2, IMAGES[:, None]),
        _crop(2, IMAGES + 1),
        _crop(2, IMAGES - 1),
        _crop(3, np.array([3], np.int32)),
        _crop(3, np.array([3, 0], np.int32)),
        _crop(3, np.array([-1, 2], np.int32)),
        _crop(1, ROIS, mode="cubic"),
        _padded(None),
        _padded(np.array([1, 1, 1])),
        _padded(np.array([1, 1, 1, -1])),
        _padded(np.array([9, 9, 9, 9])),
        _padded(np.array([1, 1, 1, 1]), auto_pad="SAME_UPPER"),
    ]
)
