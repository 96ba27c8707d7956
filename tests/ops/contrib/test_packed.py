"""VarlenCausalConvWithState, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.contrib import check, node_model
from tests.support.peer import random
from tests.support.requirements import DEVICES, Use, refused

pytestmark = pytest.mark.filterwarnings("ignore")
TOLERANCES: dict[str, dict[str, Any]] = {
    "float32": {"rtol": 1e-5},
    "float16": {"rtol": 2e-3, "atol": 2e-3},
}


def operands(
    ends: list[int], taps: int, dilation: int, *, bias: bool, count: bool, dtype: str = "float32"
) -> list[Array | None]:
    """Return random operands for sequences of these ends."""
    sequences, steps = len(ends) - 1, (taps - 1) * dilation
    parts = [random(ends[-1], 5), random(5, 1, taps, seed=1), random(5, seed=2)]
    x, weight, added = (part.astype(dtype) for part in parts)
    state = random(sequences, 5, steps, seed=3).astype(dtype)
    shown = np.array([9, -1, 2], np.int32)[:sequences]
    found: list[Array | None] = [
        x,
        weight,
        np.array(ends, np.int32),
        added if bias else None,
        state,
    ]
    return [*found, shown] if count else found


@pytest.mark.parametrize("symbolic", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("ends", [[0, 1, 7, 10], [0, 10], [0, 3, 3, 10]])
@pytest.mark.parametrize(
    ("taps", "dilation", "activation", "capacity"),
    [(4, 1, "silu", 0), (2, 3, "none", 3), (1, 1, "swish", 2), (3, 1, "none", 8)],
)
def test_packed_convolution(
    taps: int,
    dilation: int,
    activation: str,
    capacity: int,
    ends: list[int],
    dtype: str,
    symbolic: bool,
) -> None:
    given = operands(ends, taps, dilation, bias=taps != 2, count=capacity > 0, dtype=dtype)
    check(
        "VarlenCausalConvWithState",
        given,
        outputs=(True, True, True) if capacity else (True, True),
        constants=[1],
        symbolic=symbolic and taps > 1,
        activation=activation,
        dilation=dilation,
        state_update_capacity=capacity,
        **TOLERANCES[dtype],
    )


WRONG_ENDS = [[1, 3, 7, 10], [0, 7, 3, 10], [0, 3, 7, 9], [0, 3, 7, 11], [-1, 3, 7, 10]]


@pytest.mark.parametrize("ends", WRONG_ENDS)
@pytest.mark.parametrize("device", DEVICES)
def test_ends_of_other_tokens_are_refused_in_a_run(ends: list[int], device: str) -> None:
    given = operands([0, 3, 7, 10], 3, 1, bias=False, count=False)
    model = node_model("VarlenCausalConvWithState", given, outputs=(True, True), constants=[1])
    compiled = sg.compile_model(sg.load(model), device)
    fed = {f"x{k}": array for k, array in enumerate(given) if array is not None and k != 1}
    before = compiled(fed)[0].copy()
    with pytest.raises(sg.ShapeError):
        compiled({**fed, "x2": np.array(ends, np.int32)})
    np.testing.assert_array_equal(compiled(fed)[0], before)


def _use(k: int, other: Array | None, **form: Any) -> Use:
    given = operands([0, 3, 7, 10], 3, 2, bias=True, count=True)
    given[k] = other
    attributes = {"dilation": 2, "state_update_capacity": 3, **form}
    return Use("VarlenCausalConvWithState", given, attributes, 1, 2, "com.microsoft")


test_operands_that_do_not_fit_are_refused = refused(
    [
        *(_use(2, np.array(ends, np.int32)) for ends in WRONG_ENDS),
        _use(0, random(10, 4)),
        _use(0, random(1, 10, 5)),
        _use(1, random(5, 3)),
        _use(1, random(5, 2, 3)),
        _use(1, random(5, 1, 0)),
        _use(2, np.array([0], np.int32)),
        _use(3, random(4)),
        _use(4, random(3, 5, 2)),
        _use(4, random(2, 5, 4)),
        _use(5, None),
        _use(5, np.array([1, 2], np.int32)),
        _use(5, np.array([1, 2, 3], np.int32), state_update_capacity=0),
        _use(5, np.array([1, 2, 3], np.int32), state_update_capacity=9),
        _use(5, np.array([1, 2, 3], np.int32), activation="relu"),
    ]
)
