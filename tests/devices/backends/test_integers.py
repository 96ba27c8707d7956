"""Integers over other libraries: every digit counts, and sums that overflow wrap around."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.backends import PACKAGES, installed

# ONNX Runtime is left out: it computes some of these in float64, and whoever names it wants that.
DEVICES = installed(*(name for name in PACKAGES if name != "ONNXRUNTIME"))
DTYPES = ("int8", "uint8", "int32", "int64")
AXES, ROWS = np.array([1]), np.array([[0], [2]])
FIRST = np.zeros((1, 4, 4), np.int64)
# The operator of one to two operands of shape (3, 4, 4), by the name of the case.
CASES: dict[str, Callable[[Any, Any], Any]] = {
    **{
        name: lambda x, y, op=name: getattr(ops, op)(x, y)
        for name in ("Add", "Div", "Equal", "Greater", "Less", "MatMul", "Max", "Min", "Mod")
    },
    **{
        name: lambda x, y, op=name: getattr(ops, op)(x, AXES)
        for name in ("ReduceL1", "ReduceMax", "ReduceMean", "ReduceMin", "ReduceProd", "ReduceSum")
    },
    **{
        name: lambda x, y, op=name: getattr(ops, op)(x)
        for name in ("Abs", "BitwiseNot", "Identity", "Neg", "Relu", "Sign", "Transpose")
    },
    "Mul": lambda x, y: ops.Mul(x, y),
    "Sub": lambda x, y: ops.Sub(x, y),
    "ReduceSumSquare": lambda x, y: ops.ReduceSumSquare(x, AXES),
    "BitShift": lambda x, y: ops.BitShift(x, y, direction="LEFT"),
    "BitwiseAnd": lambda x, y: ops.BitwiseAnd(x, y),
    "Cast to int32": lambda x, y: ops.Cast(x, to=6),
    "Cast to int8": lambda x, y: ops.Cast(x, to=3),
    "Concat": lambda x, y: ops.Concat(x, y, axis=1),
    "CumSum": lambda x, y: ops.CumSum(x, np.array(1)),
    "Einsum": lambda x, y: ops.Einsum(x, y, equation="bij,bjk->bik"),
    "Gather": lambda x, y: ops.Gather(x, np.array([1, 0, -1])),
    "Gemm": lambda x, y: ops.Gemm(ops.Flatten(x, axis=2), ops.Flatten(y, axis=2), transB=1),
    "Resize": lambda x, y: ops.Resize(
        ops.Unsqueeze(x, [0]), None, np.array([1, 1, 2, 2], np.float32)
    ),
    "ScatterElements": lambda x, y: ops.ScatterElements(x, FIRST, ops.Slice(y, [0], [1])),
    "ScatterND": lambda x, y: ops.ScatterND(x, ROWS, ops.Slice(y, [0], [2]), reduction="add"),
    "TopK": lambda x, y: ops.TopK(x, np.array([2])),
    "Where": lambda x, y: ops.Where(np.array([True, False, True, False]), x, y),
}


def _operands(dtype: str, seed: int) -> list[Array]:
    """Return numbers of all sizes, none of them 0."""
    rng, limits, shape = np.random.default_rng(seed), np.iinfo(dtype), (3, 4, 4)
    x, y = (rng.integers(limits.min, limits.max, shape, dtype, endpoint=True) | 1 for _ in range(2))
    return [x, y >> rng.integers(0, limits.bits - 1, shape).astype(dtype) | 1]


def _graph(name: str, dtype: str) -> sg.Graph | None:
    """Return a graph of a case; None if the standard has no such operator of this dtype."""
    x, y = (sg.input(each, type=sg.TensorType(dtype, (3, 4, 4))) for each in "xy")
    try:
        outputs = CASES[name](x, y)
        graph = sg.Graph([x, y], [*outputs] if isinstance(outputs, tuple) else [outputs])
        sg.compile_model(graph, "REFERENCE")
    except sg.SubgraphError as error:
        if dtype not in str(error):
            raise
        return None
    return graph


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_every_digit_counts(name: str, dtype: str, device: str) -> None:
    graph = _graph(name, dtype)
    if graph is None:
        return
    reference = sg.compile_model(graph, "REFERENCE")
    model = sg.compile_model(graph, f"HETERO:{device},REFERENCE", {"RUNTIME_FALLBACK": False})
    for seed in range(3):
        arrays = _operands(dtype, seed)
        for found, expected in zip(
            model(*arrays).values(), reference(*arrays).values(), strict=True
        ):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
