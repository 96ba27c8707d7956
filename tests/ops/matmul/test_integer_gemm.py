"""Products of integers, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.agreement import result_of


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
            np.testing.assert_array_equal(result_of(ops.MatMul, a, b, threads=threads), a @ b)
    a, b = numbers(6, 7), numbers(7, 10)
    for added in (numbers(10), numbers(6, 1), numbers(6, 10)):
        np.testing.assert_array_equal(result_of(ops.Gemm, a, b, added), a @ b + added)
    np.testing.assert_array_equal(result_of(ops.Gemm, a, b), a @ b)


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_products_of_integers_have_every_digit(dtype: str, device: str) -> None:
    """onnx.reference multiplies them by a float alpha, so that digits above 2**53 are lost."""
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    arrays = [
        rng.integers(limits.min, limits.max, shape, dtype) for shape in ((3, 4), (4, 5), (5,))
    ]
    inputs = [sg.input(f"x{k}", array.shape, dtype) for k, array in enumerate(arrays)]
    graph = sg.Graph(inputs, [ops.Gemm(*inputs), ops.Gemm(*inputs[:2])])
    found = sg.compile_model(graph, device)(*arrays)
    a, b, c = arrays
    np.testing.assert_array_equal(found[0], a @ b + c)
    np.testing.assert_array_equal(found[1], a @ b)
