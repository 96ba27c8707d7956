"""TensorScatter and additions of half floats by index, against NumPy and onnx.reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.graph.types import TensorType
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


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("read", ["nowhere", "as an output", "as updates", "later"])
def test_data_that_no_step_reads_later_is_overwritten(read: str, device: str) -> None:
    """The output of a scatter may take the memory of its data, but only then."""
    rng = np.random.default_rng(0)
    x, new = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 40, 8), (2, 3, 1, 8)))
    places = np.array([5, 39])
    data, update = sg.input("x", x.shape), sg.input("new", new.shape)
    cache = ops.Concat(data, data, axis=2)
    rows = ops.Slice(cache, np.array([7]), np.array([8]), np.array([2]))
    y = ops.TensorScatter(cache, rows if read == "as updates" else update, places, axis=2)
    outputs = [ops.Mul(y, np.float32(2))]
    if read == "as an output":
        outputs.append(cache)
    elif read == "later":
        outputs.append(ops.Add(y, cache))
    graph = sg.Graph([data, update], outputs)
    found = sg.compile_model(graph, device)([x, new])
    before = np.concatenate([x, x], axis=2)
    after = before.copy()
    for k, place in enumerate(places):
        after[k, :, place] = before[k, :, 7] if read == "as updates" else new[k, :, 0]
    np.testing.assert_array_equal(found[0], after * 2)
    if len(outputs) == 2:
        np.testing.assert_array_equal(found[1], before if "output" in read else after + before)


def test_a_cache_is_copied_once_for_a_token() -> None:
    shapes = (1, 8, 512, 64), (1, 8, 1, 64)
    data, update = (sg.input(f"x{k}", shape) for k, shape in enumerate(shapes))
    grown = ops.Concat(data, sg.parameter("zeros", np.zeros((1, 8, 64, 64), np.float32)), axis=2)
    y = ops.TensorScatter(grown, update, np.array([512]), axis=2)
    graph = sg.Graph([data, update], [y])
    types = [TensorType("float32", shape) for shape in shapes]
    assert make_plan(graph, types, {}, PlanOptions()).in_place == 1
