"""Products of integers and additions of halves by index on the CPU device: against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array


def _run(op: Any, *arrays: Array, threads: int = 1, **attributes: Any) -> Array:
    inputs = [sg.input(f"x{k}", a.shape, str(a.dtype)) for k, a in enumerate(arrays)]
    graph = sg.Graph(inputs=inputs, outputs=[op(*inputs, **attributes)])
    assert set(sg.Core().query_model(graph, "CPU").values()) == {"CPU"}
    compiled = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
    found: Array = compiled(list(arrays))[0]
    return found


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_products_of_integers(dtype: str) -> None:
    """Every remainder of rows and columns, stacks that broadcast, sums that wrap around."""
    rng, info = np.random.default_rng(0), np.iinfo(dtype)

    def numbers(*shape: int) -> Array:
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)

    sizes = [(1, 1, 1), (4, 5, 16), (7, 3, 9), (2, 1, 37), (5, 100, 33), (3, 0, 4), (0, 2, 2)]
    pairs = [((m, k), (k, n)) for m, k, n in sizes]
    pairs += [((5,), (5, 3)), ((2, 5), (5,)), ((3, 1, 4, 2), (5, 2, 6)), ((2, 3, 3), (2, 3, 3))]
    for left, right in pairs:
        a, b = numbers(*left), numbers(*right)
        for threads in (1, 2):
            np.testing.assert_array_equal(_run(ops.MatMul, a, b, threads=threads), a @ b)
    a, b = numbers(6, 7), numbers(7, 10)
    for added in (numbers(10), numbers(6, 1), numbers(6, 10)):
        np.testing.assert_array_equal(_run(ops.Gemm, a, b, added), a @ b + added)
    np.testing.assert_array_equal(_run(ops.Gemm, a, b), a @ b)


@pytest.mark.parametrize("depth", [1, 64, 258, 259, 700])
@pytest.mark.parametrize("dtypes", ["uint8 uint8", "int8 uint8", "uint8 int8", "int8 int8"])
def test_products_of_computed_bytes(depth: int, dtypes: str) -> None:
    rng, (left, right) = np.random.default_rng(depth), dtypes.split()
    a = rng.integers(np.iinfo(left).min, np.iinfo(left).max, (3, depth), endpoint=True)
    b = rng.integers(np.iinfo(right).min, np.iinfo(right).max, (2, depth, 5), endpoint=True)
    a[0], b[0, :, 0] = np.iinfo(left).max, np.iinfo(right).max
    zeros = np.array(np.iinfo(left).min), np.array(np.iinfo(right).min)
    given = [a.astype(left), b.astype(right)]
    assert _run(ops.MatMulInteger, *given).tolist() == (a @ b).tolist()
    given += [zeros[0].astype(left), zeros[1].astype(right)]
    want = (a - zeros[0]) @ (b - zeros[1])
    assert _run(ops.MatMulInteger, *given).tolist() == want.tolist()


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_halves_are_combined_by_index(reduction: str) -> None:
    """Each step is rounded to float16, one after the other."""
    rng = np.random.default_rng(0)
    combine = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}[reduction]
    x, updates = (rng.normal(size=s).astype(np.float16) for s in ((6, 5), (40, 5)))
    places = rng.integers(-6, 6, (40, 5))
    want = x.copy()
    for i, j in np.ndindex(40, 5):
        want[places[i, j], j] = combine(want[places[i, j], j], updates[i, j])
    got = _run(ops.ScatterElements, x, places, updates, axis=0, reduction=reduction)
    np.testing.assert_array_equal(got, want)
    want = x.copy()
    for i in range(40):
        want[places[i, 0]] = combine(want[places[i, 0]], updates[i])
    got = _run(ops.ScatterND, x, places[:, :1], updates, reduction=reduction)
    np.testing.assert_array_equal(got, want)
