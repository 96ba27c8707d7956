"""ArgMax and ArgMin on the CPU device, against NumPy: ties, NaN, short and outer axes."""

from __future__ import annotations

import numpy as np
import pytest

from subgraph import ops
from tests.support.agreement import result_of


@pytest.mark.parametrize("size", [1, 3, 8, 33])
def test_places_of_extremes_along_short_axes(size: int) -> None:
    x = np.random.default_rng(size).integers(0, 5, (40, size)).astype(np.float32)
    x[np.random.default_rng(1).random(x.shape) < 0.1] = np.nan
    for op, expected in ((ops.ArgMax, np.argmax), (ops.ArgMin, np.argmin)):
        np.testing.assert_array_equal(result_of(op, x, axis=1, keepdims=0), expected(x, 1))
        last = size - 1 - expected(x[:, ::-1], 1)
        got = result_of(op, x, axis=1, keepdims=0, select_last_index=1)
        np.testing.assert_array_equal(got, last)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int64"])
@pytest.mark.parametrize("inner", [2, 15, 16, 64, 67, 200])
def test_places_of_extremes_along_outer_axes(inner: int, dtype: str) -> None:
    x = np.random.default_rng(inner).integers(0, 5, (3, 9, inner)).astype(dtype)
    if dtype.startswith("float"):
        x[np.random.default_rng(1).random(x.shape) < 0.1] = np.nan
    for op, expected in ((ops.ArgMax, np.argmax), (ops.ArgMin, np.argmin)):
        np.testing.assert_array_equal(result_of(op, x, axis=1, keepdims=0), expected(x, 1))
        last = 8 - expected(x[:, ::-1], 1)
        got = result_of(op, x, axis=1, keepdims=0, select_last_index=1)
        np.testing.assert_array_equal(got, last)
