"""Comparisons and casts of values in blocks of channels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.system import host


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


@settings(max_examples=60, deadline=None)
@given(
    images=st.integers(1, 3),
    channels=st.sampled_from([8, 16, 20, 33, 48]),
    spatial=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    once=st.booleans(),
    made_by=st.sampled_from(["input", "convolution", "bool"]),
    threads=st.integers(1, 2),
)
def test_one_number_for_each_pixel(
    images: int, channels: int, spatial: list[int], once: bool, made_by: str, threads: int
) -> None:
    """Masks and gates of one channel apply to all channels of a block: no image is converted."""
    rng = np.random.default_rng(channels)
    ones = [1] * len(spatial)
    x = sg.input("x", (images, channels, *spatial))
    weight = rng.standard_normal((channels, channels, *ones)).astype(np.float32)
    image = ops.Conv(x, weight)
    shape = (1 if once else images, 1, *spatial)
    mask = sg.input("mask", shape, "bool" if made_by == "bool" else "float32")
    inputs, gate = [x, mask], mask
    if made_by == "convolution":
        inputs, gate = [x], ops.Sigmoid(ops.Conv(image, weight[:1]))
    scale = sg.parameter("scale", rng.standard_normal((channels, *ones)).astype(np.float32))
    if made_by == "bool":
        masked: Any = ops.Where(gate, image, np.float32(-1.0))
    else:
        masked = ops.Mul(ops.Add(image, scale), gate)
    graph = sg.Graph(inputs, [ops.Conv(ops.Relu(masked), weight)])
    given: list[Array] = [rng.standard_normal((images, channels, *spatial)).astype(np.float32)]
    if len(inputs) > 1:
        numbers = rng.standard_normal(shape).astype(np.float32)
        given.append(numbers > 0 if made_by == "bool" else numbers)
    options = {"ENABLE_PROFILING": True, "INFERENCE_NUM_THREADS": threads}
    model = sg.compile_model(graph, "CPU", options)
    request = model.create_infer_request()
    got = request.infer(given)[0]
    want = sg.compile_model(graph, "REFERENCE")(given)[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    if host.lanes("float32") > 1:
        # Only what the graph reads and what it returns is converted.
        assert sum("reorder" in entry.kernel for entry in request.profile()) <= 2
