"""Operators of the standard's experimental phase, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from subgraph.graph.types import Array
from tests.support.contrib import check
from tests.support.requirements import Use, floats, refused

pytestmark = pytest.mark.filterwarnings("ignore")
OLD: dict[str, Any] = {"domain": "", "standard": 9}
X, IMAGES = floats(2, 5), floats(2, 3, 4, 5)


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize(
    ("op", "form"),
    [
        *(("Affine", form) for form in ({}, {"alpha": 2.0}, {"alpha": -1.5, "beta": 0.5})),
        *(("Scale", form) for form in ({}, {"scale": 0.25})),
        *((op, {"alpha": 0.5, "beta": 2.0}) for op in ("ScaledTanh", "ParametricSoftplus")),
    ],
)
@pytest.mark.parametrize("shape", [(2, 5), (3,), (), (0, 4)])
def test_elementwise(op: str, form: dict[str, Any], shape: tuple[int, ...], symbolic: bool) -> None:
    check(op, [floats(*shape)], symbolic=symbolic, **OLD, **form)


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize(
    ("op", "form"),
    [
        ("ImageScaler", {"scale": 0.5, "bias": [1.0, -2.0, 3.0]}),
        ("ImageScaler", {"bias": [0.0, 0.5, -0.5]}),
        ("Crop", {"border": [1, 0, 2, 1]}),
        ("Crop", {"border": [1, 2, 0, 0], "scale": [2, 3]}),
        ("Crop", {"border": [1, 2, 9, 9], "scale": [2, 4]}),
        ("Crop", {"border": [0, 0, 5, 0]}),
    ],
)
def test_images(op: str, form: dict[str, Any], symbolic: bool) -> None:
    check(op, [IMAGES], symbolic=symbolic, **OLD, **form)


@pytest.mark.parametrize(
    "bounds", [([1, -2], [2, 100]), ([1], [3], [-1]), ([3], [1], [2]), ([0, 1], [1, 3], [3, 1])]
)
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_dynamic_slice(bounds: tuple[list[int], ...], dtype: str) -> None:
    inputs = [IMAGES, *(np.array(bound, dtype) for bound in bounds)]
    check("DynamicSlice", inputs, constants=range(1, len(inputs)), **OLD)
    check("DynamicSlice", inputs, symbolic=True, **OLD)


def _use(op: str, *inputs: Array, **form: Any) -> Use:
    return Use(op, inputs, form, 9)


test_operands_that_do_not_fit_are_refused = refused(
    [
        *(_use(op, X, alpha=1.0) for op in ("ScaledTanh", "ParametricSoftplus")),
        *(_use("ImageScaler", IMAGES, bias=bias) for bias in ([1.0, 2.0], [1.0] * 4)),
        _use("ImageScaler", IMAGES),
        _use("ImageScaler", IMAGES[0], bias=[1.0] * 3),
        *(_use("Crop", IMAGES, border=border) for border in ([1, 2], [0, 0, 0, 9], [0, -1, 0, 0])),
        _use("Crop", IMAGES[0], border=[0, 0, 0, 0]),
        _use("Crop", IMAGES, border=[1, 1, 0, 0], scale=[9, 2]),
        _use("Crop", IMAGES, border=[1, 1, 0, 0], scale=[2]),
        _use("Crop", IMAGES, border=[1, 1, 0, 0], scale=[2, -2]),
        _use("DynamicSlice", IMAGES, np.array([1]), np.array([2]), np.array([4])),
        _use("DynamicSlice", IMAGES, np.array([1]), np.array([2, 3])),
    ]
)
