"""Blocks of mobile networks on the CPU device: what is fused, where layouts change, the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine import host
from subgraph.engine.plan import PlanOptions, make_plan
from subgraph.types import TensorType

Array = np.ndarray[Any, Any]
QUICK = settings(max_examples=15, deadline=None)


def values(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def weight(name: str, *shape: int) -> sg.Value:
    return sg.parameter(name, 0.3 * values(*shape))


def numbers(name: str, *content: int) -> sg.Value:
    return sg.parameter(name, np.array(content, np.int64))


def compare(graph: sg.Graph, x: Array) -> None:
    want = sg.compile_model(graph, "REFERENCE")([x])
    got = sg.compile_model(graph, "CPU")([x])
    for k in range(len(want)):
        assert got[k].shape == want[k].shape
        scale = max(float(np.abs(want[k]).max(initial=0.0)), 1e-6)
        np.testing.assert_allclose(got[k], want[k], rtol=0, atol=2e-5 * scale)


def reorders(graph: sg.Graph, x: Array) -> int:
    plan = make_plan(graph, [TensorType("float32", x.shape)], {}, PlanOptions())
    return plan.reorders


def squeezed(channels: int, *, keepdims: bool) -> sg.Graph:
    """A convolution scaled by what the means of its channels say."""
    x = sg.input("x", ("N", 3, 9, 7), "float32")
    y = ops.Relu(ops.Conv(x, weight("stem", channels, 3, 3, 3)))
    mean: Any = ops.ReduceMean(y, numbers("axes", 2, 3), keepdims=int(keepdims))
    if not keepdims:
        mean = ops.Reshape(mean, numbers("shape", 0, 0, 1, 1))
    small = ops.Relu(ops.Conv(mean, weight("down", 8, channels, 1, 1), weight("b", 8)))
    gate = ops.Sigmoid(ops.Conv(small, weight("up", channels, 8, 1, 1)))
    return sg.Graph([x], [ops.Conv(ops.Mul(y, gate), weight("end", 16, channels, 1, 1))])


@QUICK
@given(channels=st.integers(1, 40), batch=st.integers(0, 2), keepdims=st.booleans())
def test_squeeze_and_excite(channels: int, batch: int, keepdims: bool) -> None:
    compare(squeezed(channels, keepdims=keepdims), values(batch, 3, 9, 7))


@pytest.mark.parametrize("axes", [(2,), (1, 2, 3), (-1, -2), (3, 2), (0, 2, 3)])
@pytest.mark.parametrize("keepdims", [0, 1])
def test_means_over_other_axes(axes: tuple[int, ...], keepdims: int) -> None:
    x = sg.input("x", (2, 3, 9, 7), "float32")
    y = ops.Conv(x, weight("stem", 21, 3, 3, 3))
    graph = sg.Graph([x], [ops.ReduceMean(y, numbers("axes", *axes), keepdims=keepdims)])
    compare(graph, values(2, 3, 9, 7))


@pytest.mark.skipif(host.lanes("float32") == 1, reason="there are no blocks of one channel")
def test_means_of_channels_stay_in_blocks() -> None:
    # Only the result leaves the blocked layout.
    assert reorders(squeezed(32, keepdims=True), values(1, 3, 9, 7)) == 1
