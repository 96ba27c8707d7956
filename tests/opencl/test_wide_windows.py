"""Positions of windows and work-items beyond 32 bits, which OPENCL refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.engine.planner.lowering import Unsupported
from subgraph.graph.types import Array
from subgraph.opencl.lowering import ClLowering
from subgraph.opencl.runtime import ClSource
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


def test_a_launch_has_at_most_2_31_work_items() -> None:
    low = ClLowering(sg.Node("Relu"), [], [], threads=1)
    source = ClSource("nothing", "")
    with pytest.raises(Unsupported, match="2147483712 work-items"):
        low.launch(source, "run", [], (1, 2**31 + 64), (1, 64))
    low.launch(source, "run", [], (1, 2**31), (1, 64))
    assert len(low.steps) == 1
