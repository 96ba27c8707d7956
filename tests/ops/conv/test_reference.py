"""The reference of Conv, against ONNX Runtime."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from tests.support.peer import session_of

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("auto_pad", ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_dilated_filter_sees_its_own_points_alone(rank: int, auto_pad: str) -> None:
    """NaN and Inf between its points do not count; compared with ONNX Runtime."""
    rng = np.random.default_rng(rank)
    array = rng.standard_normal((2, 4, 9, 8, 7)[: 2 + rank]).astype(np.float32)
    array.ravel()[:: 17 * rank**2], array.ravel()[5 :: 31 * rank**2] = np.nan, np.inf
    x = sg.input("x", array.shape)
    w = sg.parameter("w", rng.standard_normal((6, 2, 3, 2, 3)[: 2 + rank]).astype(np.float32))
    b = sg.parameter("b", rng.standard_normal(6).astype(np.float32))
    attributes: dict[str, Any] = {"dilations": [2, 3, 2][:rank], "strides": [2, 1, 2][:rank]}
    pads: dict[str, Any] = {}
    if auto_pad == "NOTSET":
        pads = {"pads": [1, 2, 0, 2, 0, 3][: 2 * rank]}
    padded: dict[str, Any] = pads or {"auto_pad": auto_pad}
    if auto_pad.startswith("SAME"):  # ONNX Runtime does not take it with dilations
        around = [
            (math.ceil(size / stride) - 1) * stride + (taps - 1) * dilation + 1 - size
            for size, stride, taps, dilation in zip(
                (9, 8, 7), (2, 1, 2), (3, 2, 3), (2, 3, 2), strict=True
            )
        ]
        less, more = [n // 2 for n in around[:rank]], [n - n // 2 for n in around[:rank]]
        pads = {"pads": less + more if auto_pad == "SAME_UPPER" else more + less}
    graph = sg.Graph([x], [sg.ops.Conv(x, w, b, group=2, **attributes, **padded)], "dilated")
    explicit = sg.Graph(
        [x], [sg.ops.Conv(x, w, b, group=2, **attributes, **(pads or padded))], "explicit"
    )
    session = session_of(explicit)
    (want,) = session.run(None, {"x": array})
    got = sg.compile_model(graph, "REFERENCE")(array)[0]
    assert np.isnan(want).any()
    assert np.isfinite(want).any()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
