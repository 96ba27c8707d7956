"""ONNX Runtime's DynamicTimeWarping, against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.contrib import DEVICES, node_model, oracle
from tests.support.requirements import Use, floats, refused

pytestmark = pytest.mark.filterwarnings("ignore")


def agree(costs: Array) -> None:
    """Compare with ONNX Runtime on each device."""
    model = node_model("DynamicTimeWarping", [costs], symbolic=True)
    (want,) = oracle(model, {"x0": costs})
    graph = sg.load(model)
    assert graph.outputs[0].type == sg.TensorType("int32", (2, None))
    for device in DEVICES:
        (found,) = sg.compile_model(graph, device)([costs]).values()
        assert found.dtype == want.dtype
        np.testing.assert_array_equal(found, want)


@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.integers(0, 999))
def test_paths(rows: int, columns: int, ties: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = random.integers(0, 3, (rows, columns)) if ties else random.normal(size=(rows, columns))
    agree(costs.astype(np.float32))


@pytest.mark.parametrize("shape", [(1, 7, 4), (1, 1), (0, 4), (4, 0), (1, 9), (9, 1), (30, 50)])
def test_shapes(shape: tuple[int, ...]) -> None:
    agree(floats(*shape))


def test_infinities_and_nan() -> None:
    costs = floats(5, 6)
    costs[2, 3], costs[1, 1], costs[4, 0] = np.inf, -np.inf, np.nan
    agree(costs)


test_other_shapes_are_refused = refused(
    [
        Use("DynamicTimeWarping", [floats(*shape)], {}, 1, 1, "com.microsoft")
        for shape in ((2, 3, 4), (3,), (0, 3, 4), (1, 1, 2, 3))
    ]
)
