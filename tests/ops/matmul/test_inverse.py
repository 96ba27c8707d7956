"""ONNX Runtime's Inverse, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from tests.support.contrib import DEVICES, node_model, oracle
from tests.support.requirements import Use, floats, refused

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 4, 4), (0, 3, 3), (0, 0), (5, 1, 1), (1, 20, 20)])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_inverses(shape: tuple[int, ...], dtype: str) -> None:
    x = (np.random.default_rng(0).standard_normal(shape) + 3 * np.eye(shape[-1])).astype(dtype)
    model = node_model("Inverse", [x])
    (want,) = oracle(model, {"x0": x})
    tolerance = 1e-2 if dtype == "float16" else 1e-4
    for device in DEVICES:
        (found,) = sg.compile_model(sg.load(model), device)([x]).values()
        assert found.dtype == want.dtype
        np.testing.assert_allclose(found, want, tolerance, tolerance)


def test_a_matrix_without_inverse_does_not_change_others() -> None:
    x = np.stack([np.ones((2, 2)), 2 * np.eye(2), np.full((2, 2), np.nan)]).astype(np.float32)
    model = sg.load(node_model("Inverse", [x], symbolic=True))
    for device in DEVICES:
        (found,) = sg.compile_model(model, device)([x]).values()
        np.testing.assert_array_equal(found[1], 0.5 * np.eye(2, dtype=np.float32))
        assert not np.isfinite(found[[0, 2]]).any()


test_other_matrices_are_refused = refused(
    [
        Use("Inverse", [floats(*shape)], {}, 1, 1, "com.microsoft")
        for shape in ((2, 3), (3,), (), (2, 3, 2))
    ]
)
