"""The reference of old arithmetic and of Erf, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import numpy_dtype
from tests.support.peer import reference_result, uniform
from tests.support.requirements import DEVICES, Use, run

pytestmark = pytest.mark.filterwarnings("ignore")


def test_the_first_opsets_broadcast_when_asked() -> None:
    a, b = uniform(2, 3, 4), uniform(3, seed=1)
    np.testing.assert_array_equal(
        reference_result("Add", [a, b], 6, broadcast=1, axis=1), a + b[:, None]
    )
    np.testing.assert_array_equal(
        reference_result("Mul", [a, uniform(4)], 1, broadcast=1), a * uniform(4)
    )
    np.testing.assert_array_equal(
        reference_result("Greater", [a, b], 6, broadcast=1, axis=-2), a > b[:, None]
    )
    with pytest.raises(sg.ShapeError, match="broadcast is 0"):
        reference_result("Add", [a, b], 6)


def test_erf_is_as_precise_as_its_dtype() -> None:
    from math import erf

    x = np.linspace(-3, 3, 41)
    np.testing.assert_allclose(reference_result("Erf", [x], 13), [erf(v) for v in x], rtol=1e-14)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("op", ["Sum", "Mean"])
def test_many_operands_of_half_precision_are_rounded_once(op: str, dtype: str, device: str) -> None:
    halves = np.random.default_rng(1).random((200, 7)).astype(numpy_dtype(dtype))
    (found,) = run(Use(op, list(halves)), device)
    assert found.dtype == halves.dtype
    wide = halves.astype(np.float64)
    expected = wide.sum(axis=0) if op == "Sum" else wide.mean(axis=0)
    # Half a unit in the last place, and the rounding of a sum in float32.
    step = 2.0**-11 if dtype == "float16" else 2.0**-8
    np.testing.assert_allclose(found.astype(np.float64), expected, rtol=1.01 * step)
