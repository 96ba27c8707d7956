"""TensorScatter and additions of half floats by index, against NumPy and onnx.reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from subgraph import ops
from tests.support.agreement import assert_kernels_agree, result_of

pytestmark = pytest.mark.usefixtures("no_fallback")


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_half_floats_are_combined_by_index(reduction: str) -> None:
    """The steps are computed in float32, one after the other, and their result is rounded once."""
    rng = np.random.default_rng(0)
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
    x, updates = (rng.normal(size=s).astype(np.float16) for s in ((6, 5), (40, 5)))
    places = rng.integers(-6, 6, (40, 5))
    want = x.astype(np.float32)
    for i, j in np.ndindex(40, 5):
        want[places[i, j], j] = combine(want[places[i, j], j], updates[i, j])
    got = result_of(ops.ScatterElements, x, places, updates, axis=0, reduction=reduction)
    np.testing.assert_array_equal(got, want.astype(np.float16))
    want = x.astype(np.float32)
    for i in range(40):
        want[places[i, 0]] = combine(want[places[i, 0]], updates[i])
    got = result_of(ops.ScatterND, x, places[:, :1], updates, reduction=reduction)
    np.testing.assert_array_equal(got, want.astype(np.float16))


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.parametrize("columns", [1, 7, 8, 16, 33, 70])
def test_rows_are_combined_in_order(reduction: str, dtype: str, columns: int) -> None:
    """Rows that are whole vectors, and those that are not; NaN and the order of steps count."""
    rng = np.random.default_rng(columns)
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
    x, updates = (rng.normal(size=(n, columns), scale=3).astype(dtype) for n in (6, 40))
    if dtype != "int32":
        updates[3, -1] = np.nan
    places = rng.integers(-6, 6, (40, 1))
    want = x.copy()
    for i in range(40):
        want[places[i, 0]] = combine(want[places[i, 0]], updates[i])
    got = result_of(ops.ScatterND, x, places, updates, reduction=reduction)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
@pytest.mark.parametrize(
    ("shape", "axis", "count"), [((3, 2, 6, 4), -2, 2), ((2, 5, 3), 1, 1), ((2, 3, 2, 4), 3, 3)]
)
@pytest.mark.parametrize("mode", ["linear", "circular", ""])
def test_rows_into_a_cache(
    dtype: str, shape: tuple[int, ...], axis: int, count: int, mode: str
) -> None:
    rng = np.random.default_rng(count)
    length = shape[axis]
    sizes = list(shape)
    sizes[axis] = count
    arrays = [rng.integers(-9, 9, s).astype(dtype) for s in (shape, sizes)]
    if mode:
        last = length - count if mode == "linear" else 3 * length
        arrays.append(rng.integers(0, last + 1, shape[0]))
    attrs: dict[str, Any] = {"mode": mode or "linear"}
    assert_kernels_agree(lambda *v: ops.TensorScatter(*v, axis=axis, **attrs), *arrays)
