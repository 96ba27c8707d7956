"""Steps that the default executor does itself, against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.quick_steps import quick_step
from subgraph.reference import evaluate
from subgraph.types import ONNX_DTYPE

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64")


@pytest.mark.parametrize("is_result", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_casts_are_those_of_the_reference(dtype: str, is_result: bool) -> None:
    array = np.random.default_rng(0).integers(0, 2, (3, 4)).astype(dtype)
    if dtype not in ("bool", "uint8"):
        array[0] = -1, 30, 100, 101
    for to in DTYPES:
        x = sg.input("x", (3, 4), dtype)
        y = ops.Cast(x, to=ONNX_DTYPE[to])
        sg.Graph([x], [y if is_result else ops.Cast(y, to=ONNX_DTYPE["float64"])])
        assert y.producer is not None
        run = quick_step(y.producer)
        assert run is not None
        for given in (array, array[0, 0], array[:0]):
            (got,), (wanted,) = run([given]), evaluate(y.producer, [given])
            assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
            np.testing.assert_array_equal(got, wanted)
            assert not is_result or not np.shares_memory(got, given)


@pytest.mark.parametrize("value", [np.arange(3.0), np.array(2.0), [np.arange(2.0)]])
def test_identity_as_a_result_is_a_copy(value: Any) -> None:
    x = sg.input("x", (3,), "float64")
    y = ops.Identity(x)
    sg.Graph([x], [y])
    assert y.producer is not None
    run = quick_step(y.producer)
    assert run is not None
    (got,), (wanted,) = run([value]), evaluate(y.producer, [value])
    assert type(got) is type(wanted)
    assert got is not value
    np.testing.assert_array_equal(got, wanted)
