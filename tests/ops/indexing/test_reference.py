"""The reference of Scatter, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.peer import compare_with_onnxruntime, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


def test_scatter_is_scatter_elements() -> None:
    indices = np.array([[1, 0, 2], [0, 2, 1]])
    compare_with_onnxruntime(
        "Scatter", [np.zeros((3, 3), np.float32), indices, uniform(2, 3)], 10, axis=0
    )
