"""Operators that sample images refuse operands that do not fit."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from tests.support.requirements import DEVICES, Use, empty, floats, ints, refused, run, taken

X = floats(2, 6, 7, 8)
HUGE = 2**62
ROIS = np.array([[0, 0, 4, 4], [1, 1, 5, 6]], np.float32)
WRONG = [
    Use("MaxRoiPool", [X, floats(3, 4)], {"pooled_shape": (2, 2)}),
    Use("MaxRoiPool", [X, floats(5)], {"pooled_shape": (2, 2)}),
    Use("MaxRoiPool", [X, floats(3, 5)], {"pooled_shape": (2,)}),
    Use("MaxRoiPool", [X, floats(3, 5)], {"pooled_shape": (0, 2)}),
    Use("RoiAlign", [X, ROIS, ints(0)]),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"spatial_scale": float("-inf")}),
    Use("Resize", [X, None, np.ones(4, np.float32) * 2], {"antialias": 1}),
    Use("RoiAlign", [X[..., :0], ROIS, ints(0, 0)]),
    Use("RoiAlign", [X, ROIS, ints(0, 1, 1)]),
    Use("RoiAlign", [X, floats(2, 5), ints(0, 1)]),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"output_height": 0}),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"sampling_ratio": HUGE}),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"mode": "median"}),
    Use("GridSample", [X, floats(1, 3, 3, 2)]),
    Use("GridSample", [X, floats(2, 3, 3, 3)]),
    Use("GridSample", [X, floats(2, 3, 3, 1)]),
    Use("GridSample", [X, floats(2, 3, 2)]),
    Use("GridSample", [X, floats(2, 3, 3, 2)], {"mode": "fractal"}),
    Use("AffineGrid", [floats(1, 2, 3), ints(2, 1, 4, 5)]),
    Use("AffineGrid", [floats(2, 2, 2), ints(2, 1, 4, 5)]),
    Use("AffineGrid", [floats(2, 3, 4), ints(2, 1, 4, 5)]),
    Use("AffineGrid", [floats(2, 2, 3), ints(2, 1, 4)]),
    Use("AffineGrid", [floats(2, 2, 3), ints(2, 1, -4, 5)]),
    Use("Upsample", [X, floats(3) + 2], version=9),
    Use("Upsample", [X], {"scales": (1.0, 1.0, 0.0, 1.0)}, version=7),
    Use("Upsample", [X], {"scales": (1.0, 1.0)}, version=7),
    Use("Resize", [X, floats(3) + 2], version=10),
    Use("Resize", [X, None, floats(3) + 2]),
    Use("Resize", [X, None, floats(4) - 1]),
    Use("Resize", [X, None, floats(4) + 2, ints(2, 6, 9, 9)]),
    Use("Resize", [X]),
    Use("Resize", [X, None, None, ints(2, 6, 9)]),
    Use("Resize", [X, None, None, ints(9, 9)], {"axes": (2, 2)}),
    Use("Resize", [X, None, None, ints(9, 9)], {"axes": (2, 4)}),
    Use(
        "Resize",
        [X, floats(4), None, ints(2, 6, 9, 9)],
        {"coordinate_transformation_mode": "tf_crop_and_resize"},
    ),
    Use(
        "Resize",
        [X, floats(8), None, ints(2, 6, 9, 9)],
        {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": np.inf},
    ),
    Use("Resize", [X, None, None, ints(2, 6, 9, 9)], {"mode": "quintic"}),
]
RIGHT = [
    Use("RoiAlign", [X, ROIS, ints(1, 0)], {"output_height": 3}),
    Use("Resize", [X, floats(2), None, ints(9, 9)], {"axes": (2, -1), "mode": "linear"}),
    Use("Resize", [X, floats(0), floats(4) + 2], version=11),
    Use("AffineGrid", [floats(2, 2, 3), ints(2, 1, 4, 5)]),
]
NONE = [
    *(
        Use("Resize", [floats(*shape), None, floats(4) + 2], {"mode": mode})
        for shape in ((0, 2, 4, 4), (1, 0, 4, 4), (1, 2, 0, 4))
        for mode in ("nearest", "linear", "cubic")
    ),
    Use("Resize", [floats(0, 2, 4, 4), None, None, ints(7, 8)], {"axes": (2, 3)}),
    Use("Resize", [floats(0, 2, 4, 4), floats(4) + 2], {"mode": "linear"}, version=10),
    Use("Upsample", [floats(0, 2, 4, 4), floats(4) + 2], {"mode": "linear"}, version=9),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)
test_what_fits_is_taken = taken(RIGHT, DEVICES[1:], 1e-4)
test_no_images_give_no_results = empty(NONE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_region_that_is_not_finite_is_an_error(value: float, device: str) -> None:
    """REFERENCE gave NaN, or 0 in mode "nearest", where CPU gave elements of the image."""
    roi = np.array([0, 0, 0, value, 1, 1, 1, 1], np.float32)
    mode = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 0.0}
    for kind in ("nearest", "linear", "cubic"):
        use = Use("Resize", [X, roi, None, ints(2, 6, 9, 9)], {**mode, "mode": kind})
        with pytest.raises(sg.ShapeError, match=r"culprit.*roi holds"):
            run(use, device)


@pytest.mark.parametrize("device", DEVICES)
def test_no_elements_cannot_be_resized_to_some(device: str) -> None:
    use = Use("Resize", [floats(0, 2, 4, 4), None, None, ints(1, 2, 7, 8)], {"mode": "linear"})
    with pytest.raises(sg.ShapeError, match="culprit"):
        run(use, device)
