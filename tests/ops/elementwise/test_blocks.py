"""Comparisons and casts of values in blocks of channels."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array


def _agree(graph: sg.Graph, *arrays: Array) -> None:
    ours = sg.compile_model(graph, "CPU")(list(arrays))
    expected = sg.compile_model(graph, "REFERENCE")(list(arrays))
    for number in range(len(graph.outputs)):
        np.testing.assert_allclose(ours[number], expected[number], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 8, 16, 20])
def test_a_comparison_of_values_in_blocks(channels: int) -> None:
    """The result, bool, has no blocked layout; the inputs were read as if they had none either."""
    rng = np.random.default_rng(channels)
    x = sg.input("x", (1, 2, 4, 4))
    weight = rng.standard_normal((channels, 2, 1, 1)).astype(np.float32)
    y = ops.Conv(x, weight)
    s = ops.Sigmoid(y)
    graph = sg.Graph([x], [ops.Relu(s), ops.Less(y, s), ops.Cast(s, to=7)])
    _agree(graph, rng.uniform(-2, 2, (1, 2, 4, 4)).astype(np.float32))


@pytest.mark.parametrize("channels", [1, 8, 16, 20])
def test_a_cast_to_a_wider_dtype_of_values_in_blocks(channels: int) -> None:
    """A block of float64 has half as many channels as one of float32."""
    rng = np.random.default_rng(channels)
    x = sg.input("x", (1, 2, 5))
    weight = rng.standard_normal((channels, 2, 1)).astype(np.float32)
    y = ops.Cast(ops.Relu(ops.Conv(x, weight)), to=11)
    _agree(sg.Graph([x], [y]), rng.uniform(-2, 2, (1, 2, 5)).astype(np.float32))


def test_channels_of_a_lower_rank_are_no_channels() -> None:
    """Blocks of channels of rank 3 align with the rows of rank 4, not with its channels."""
    rng = np.random.default_rng(1)
    images, line = sg.input("images", (2, 3, 18, 8)), sg.input("line", (1, 3, 3))
    weights = [
        rng.standard_normal((16, 3, *kernel)).astype(np.float32) for kernel in ((3, 3), (3,))
    ]
    total = ops.Add(ops.Relu(ops.Conv(images, weights[0])), ops.Conv(line, weights[1]))
    mixed = ops.Conv(total, rng.standard_normal((4, 16, 1, 1)).astype(np.float32))
    arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in ((2, 3, 18, 8), (1, 3, 3))]
    ours = sg.compile_model(sg.Graph([images, line], [mixed]), "CPU")(arrays)
    expected = sg.compile_model(sg.Graph([images, line], [mixed]), "REFERENCE")(arrays)
    np.testing.assert_allclose(ours[0], expected[0], rtol=1e-4, atol=1e-4)
