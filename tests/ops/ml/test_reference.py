"""The reference of ai.onnx.ml, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from subgraph.graph.types import Array
from tests.support.peer import compare_with_onnxruntime, reference_result, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


def _ml(
    op_type: str, inputs: Sequence[Array], version: int = 3, outputs: int = 1, **attrs: Any
) -> None:
    compare_with_onnxruntime(op_type, inputs, version, outputs, domain="ai.onnx.ml", **attrs)


def test_ml_maps_and_labels() -> None:
    words = np.array([["cat", "dog"], ["cow", "cat"]], object)
    pairs: dict[str, Any] = {"cats_strings": ["cat", "dog"], "cats_int64s": [3, 5]}
    _ml("CategoryMapper", [words], 1, default_int64=-7, **pairs)
    _ml("CategoryMapper", [np.array([[3, 4], [5, 3]])], 1, default_string="none", **pairs)
    _ml("LabelEncoder", [words], 1, classes_strings=["cat", "dog"], default_int64=-2)
    _ml("LabelEncoder", [np.array([1, 0, 4])], 1, classes_strings=["a", "b"], default_string="?")
    _ml(
        "LabelEncoder",
        [words],
        2,
        keys_strings=["cat", "cow"],
        values_floats=[0.5, 1.5],
        default_float=9.0,
    )
    # The standard wants NaN to find NaN; ONNX Runtime gives the default.
    keys = np.array([1.0, np.nan, 2.0], np.float32)
    found = reference_result(
        "LabelEncoder",
        [keys],
        2,
        domain="ai.onnx.ml",
        keys_floats=[1.0, np.nan],
        values_strings=["one", "nan"],
        default_string="?",
    )
    assert found.tolist() == ["one", "nan", "?"]
    _ml("LabelEncoder", [np.array([7, 8, 7])], 2, keys_int64s=[7], values_int64s=[70])
    _ml("ZipMap", [uniform(2, 2)], 1, classlabels_strings=["a", "b"])
    _ml("ZipMap", [uniform(3, 2)], 1, classlabels_int64s=[10, 20])
    maps: Any = reference_result(
        "ZipMap", [uniform(1, 2)], 1, domain="ai.onnx.ml", classlabels_strings=["a", "b"]
    )
    assert [type(value) for value in maps[0].values()] == [float, float], "as ONNX Runtime's are"


def test_ml_numbers() -> None:
    x = uniform(3, 4)
    _ml("Scaler", [x], 1, offset=[1.0, 2.0, 3.0, 4.0], scale=[0.5] * 4)
    for norm in ("MAX", "L1", "L2"):
        _ml("Normalizer", [np.abs(x)], 1, norm=norm)
    for transform in ("NONE", "LOGISTIC", "SOFTMAX"):
        _ml(
            "LinearRegressor",
            [x],
            1,
            coefficients=uniform(8).tolist(),
            intercepts=[0.5, -1.0],
            targets=2,
            post_transform=transform,
        )
    _ml("LinearRegressor", [x], 1, coefficients=uniform(4).tolist())
    _ml("Binarizer", [x], 1, threshold=0.5)
