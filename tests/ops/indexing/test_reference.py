"""The reference of Scatter, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import numpy_dtype
from tests.support.peer import compare_with_onnxruntime, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


def test_scatter_is_scatter_elements() -> None:
    indices = np.array([[1, 0, 2], [0, 2, 1]])
    compare_with_onnxruntime(
        "Scatter", [np.zeros((3, 3), np.float32), indices, uniform(2, 3)], 10, axis=0
    )


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op_type", ["ScatterElements", "ScatterND"])
def test_half_precision_is_added_in_float32(op_type: str, dtype: str, device: str) -> None:
    """In bfloat16 a sum of ones stops at 256, in float16 at 2048."""
    count = 3000
    x, updates = sg.input("x", (4,), dtype), sg.input("updates", (count,), dtype)
    index = np.zeros(count, np.int64)
    if op_type == "ScatterElements":
        y = ops.ScatterElements(x, index, updates, axis=0, reduction="add")
    else:
        y = ops.ScatterND(x, index[:, None], updates, reduction="add")
    ones = np.ones(count, numpy_dtype(dtype))
    found = sg.compile_model(sg.Graph([x, updates], [y]), device)([ones[:4], ones])[0]
    expected = np.array([count + 1, 1, 1, 1], np.float32).astype(ones.dtype)
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
