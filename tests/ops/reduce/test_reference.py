"""The reference and kernels of reductions of integers, against numbers of any size."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
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
