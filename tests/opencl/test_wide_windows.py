"""Positions of windows beyond 32 bits: OPENCL refuses such nodes, which it computed wrongly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from subgraph.graph.types import Array
from tests.support.opencl import core, graph_of, needs_device

pytestmark = [needs_device, pytest.mark.usefixtures("quick_opencl_builds")]
DILATION = 2**31 - 2  # the second tap of a window lies so far behind the first
PAD = 2**31 - 12  # and the first window begins so far before the image
WIDE: dict[str, Any] = {"dilations": (1, DILATION), "pads": (0, PAD, 0, 0)}
_ONES = np.ones((1, 1, 1, 30), np.float32)
CASES: list[tuple[str, list[Array], list[int], dict[str, Any]]] = [
    ("ConvTranspose", [_ONES, np.ones((1, 1, 1, 2), np.float32)], [], WIDE),
    (
        "Col2Im",
        [np.ones((1, 2, 30), np.float32), np.array([1, 40]), np.array([1, 2])],
        [1, 2],
        WIDE,
    ),
    (
        "DeformConv",
        [
            np.ones((1, 1, 1, 40), np.float32),
            np.ones((1, 1, 1, 2), np.float32),
            np.zeros((1, 4, 1, 30), np.float32),
        ],
        [],
        {**WIDE, "kernel_shape": (1, 2)},
    ),
]


@pytest.mark.parametrize(("op", "arrays", "constants", "attrs"), CASES)
def test_wide_windows_are_refused(
    op: str, arrays: list[Array], constants: list[int], attrs: dict[str, Any]
) -> None:
    graph, given = graph_of(op, arrays, constants, **attrs)
    assert "pads of" in core().query_model(graph, "OPENCL").reasons["tried"]
    assert core().query_model(graph, "CPU").get("tried") == "CPU"
    found = core().compile_model(graph, "CPU")(given)[0]
    # The second tap is 10 elements behind the result's position, or before it in the image.
    zeros = 0 if op == "DeformConv" else 10
    np.testing.assert_array_equal(found.ravel(), [0] * zeros + [1] * 30)
