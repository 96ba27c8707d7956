"""The reference and kernels of reductions: integers of any size, sums of half precision."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import numpy_dtype
from tests.support.requirements import Use, run

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_means_and_norms_of_integers_whose_sums_exceed_the_dtype(device: str) -> None:
    data = np.array([[2_000_000_000, 2_000_000_001, 1_999_999_999], [6, -3, 6]], np.int32)
    x = sg.input("x", data.shape, "int32")
    graph = sg.Graph([x], [sg.ops.ReduceMean(x, [1]), sg.ops.ReduceL2(x, [1])])
    found = sg.compile_model(graph, device)(data)
    assert found[0].tolist() == [[2_000_000_000], [3]]
    assert found[1][1].tolist() == [9]
    squares = np.array([[6, 3, 6], [60_000, 30_000, 60_000]], np.int32)
    assert sg.compile_model(graph, device)(squares)[1].tolist() == [[9], [90_000]]


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("dtype", ["bool", "int32", "uint64", "float32"])
def test_extremes_of_nothing_are_the_ends_of_the_dtype(dtype: str, device: str) -> None:
    least, most = (False, True) if dtype == "bool" else (-np.inf, np.inf)
    if "int" in dtype:
        least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    for op, end in (("ReduceMax", least), ("ReduceMin", most)):
        use = Use(op, (np.zeros((0, 3), dtype), np.array([0])), {"keepdims": 0}, 20)
        assert run(use, device)[0].tolist() == [end] * 3


LONG = np.abs(np.random.default_rng(3).standard_normal((3, 4000))) + 0.1
IMAGES = LONG[:2].reshape(1, 2, 50, 80)
HEADS = LONG.reshape(1, 2, 3000, 2)
CHANNELS = np.array([0.5, 2.0])
DEEP = np.full((1, 150, 2, 2), 0.6)
SUMS = [
    *[
        Use(f"Reduce{op}", (LONG, np.array([1])), {}, 18)
        for op in ("L1", "L2", "LogSum", "LogSumExp", "Mean", "Sum", "SumSquare")
    ],
    Use("CumSum", (LONG, np.array(1)), {}, 14),
    Use("GlobalAveragePool", (IMAGES,), {}, 22),
    Use("LayerNormalization", (LONG * 300, LONG[0]), {}, 17),
    Use("RMSNormalization", (LONG * 300, LONG[0]), {}, 23),
    Use("InstanceNormalization", (IMAGES, CHANNELS, CHANNELS), {}, 22),
    Use("DeformConv", (DEEP, DEEP, np.zeros((1, 8, 1, 1))), {}, 22),
    Use("Attention", (HEADS[:, :, :4], HEADS, HEADS), {}, 23),
]


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("use", SUMS, ids=[use.op for use in SUMS])
def test_sums_of_half_precision_are_those_of_float32(use: Use, dtype: str, device: str) -> None:
    halves = [
        array.astype(numpy_dtype(dtype)) if array is not None and array.dtype.kind == "f" else array
        for array in use.inputs
    ]
    (found,) = run(attrs.evolve(use, inputs=halves), device)
    assert found.dtype == numpy_dtype(dtype)
    wide = [
        array if array is None or array.dtype.kind == "i" else array.astype(np.float32)
        for array in halves
    ]
    (expected,) = run(attrs.evolve(use, inputs=wide), "REFERENCE")
    step = 2e-3 if dtype == "float16" else 2e-2
    largest = float(np.abs(expected).max())
    np.testing.assert_allclose(found.astype(np.float32), expected, rtol=step, atol=step * largest)
