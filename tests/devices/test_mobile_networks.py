"""Blocks of mobile networks on the CPU device: what is fused, where layouts change, the results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.graph.types import Array, TensorType
from subgraph.system import host

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


def padded(before: list[int], *, own: int, value: float, mode: str = "constant") -> sg.Graph:
    """Pad and Conv, as TensorFlow's exporters write a strided convolution."""
    x = sg.input("x", ("N", 3, 9, 7), "float32")
    more = [sg.parameter("value", np.array(value, np.float32))] if mode == "constant" else []
    y = ops.Pad(x, numbers("pads", *before), *more, mode=mode)
    y = ops.Conv(y, weight("w", 20, 3, 3, 3), weight("b", 20), strides=[2, 2], pads=[own] * 4)
    return sg.Graph([x], [ops.Relu(y)])


@QUICK
@given(pads=st.tuples(*[st.integers(0, 3)] * 4), own=st.integers(0, 1), batch=st.integers(0, 2))
def test_zero_pads_before_a_convolution(
    pads: tuple[int, int, int, int], own: int, batch: int
) -> None:
    graph = padded([0, 0, *pads[:2], 0, 0, *pads[2:]], own=own, value=0.0)
    compare(graph, values(batch, 3, 9, 7))


@pytest.mark.parametrize(
    ("pads", "value", "mode"),
    [
        ([0, 0, 1, 1, 0, 0, 1, 1], 1.0, "constant"),
        ([0, 0, 1, 1, 0, 0, 1, 1], 0.0, "reflect"),
        ([0, 0, -1, 1, 0, 0, 1, 1], 0.0, "constant"),
        ([1, 0, 1, 1, 0, 0, 1, 1], 0.0, "constant"),
    ],
)
def test_other_pads(pads: list[int], value: float, mode: str) -> None:
    graph = padded(pads, own=0, value=value, mode=mode)
    compare(graph, values(2, 3, 9, 7))


def test_pads_of_some_axes_before_several_convolutions() -> None:
    x = sg.input("x", ("N", 3, 9, 7), "float32")
    wide = ops.Pad(x, numbers("pads", 1, 2), None, numbers("axes", -1))
    a = ops.Conv(wide, weight("a", 8, 3, 3, 3), auto_pad="VALID")
    b = ops.Conv(wide, weight("c", 8, 3, 3, 3), pads=[0, 1, 0, 0])
    graph = sg.Graph([x], [a, b])
    compare(graph, values(1, 3, 9, 7))


def scripted(torch_pads: list[int]) -> tuple[sg.Graph, sg.Value]:
    """Pads as TorchScript's exporter writes them: filled up, turned over pair by pair."""
    x, given = sg.input("x", ("N", 3, 9, 7), "float32"), numbers("pads", *torch_pads)
    zeros = ops.ConstantOfShape(numbers("missing", 4), value=np.zeros(1, np.int64))
    pairs = ops.Reshape(ops.Concat(given, zeros, axis=0), numbers("pairs", -1, 2))
    turned = ops.Slice(
        pairs, numbers("s", -1), numbers("e", -(2**63) + 1), numbers("a", 0), numbers("d", -1)
    )
    flat = ops.Reshape(ops.Transpose(turned, perm=[1, 0]), numbers("flat", -1))
    wide = ops.Pad(x, ops.Cast(flat, to=7), sg.parameter("value", np.float32(0)))
    y = ops.Conv(wide, weight("w", 20, 3, 3, 3), strides=[2, 2])
    return sg.Graph([x], [ops.Relu(y)]), wide


@pytest.mark.parametrize("pads", [[0, 1, 2, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
def test_pads_that_are_computed_from_constants(pads: list[int]) -> None:
    graph, wide = scripted(pads)
    compare(graph, values(2, 3, 9, 7))
    typed = passes.apply_pass(graph, "InferTypes")
    found = next(value for value in typed.values() if value.name == wide.name)
    sizes = 9 + pads[2] + pads[3], 7 + pads[0] + pads[1]
    assert found.type == TensorType("float32", ["N", 3, *sizes])


def test_computed_pads_that_change() -> None:
    graph, _ = scripted([0, 1, 2, 0])
    model, x = sg.compile_model(graph, "CPU"), values(2, 3, 9, 7)
    before = model([x])[0]
    model.parameters["pads"].assign(np.array([2, 1, 2, 2]))
    got, want = model([x])[0], sg.compile_model(graph, "REFERENCE")([x])[0]
    assert got.shape == want.shape != before.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


def test_a_pad_with_other_users() -> None:
    x = sg.input("x", ("N", 3, 9, 7), "float32")
    wide = ops.Pad(x, numbers("pads", 1, 2), None, numbers("axes", -1))
    graph = sg.Graph([x], [ops.Conv(wide, weight("a", 8, 3, 3, 3)), ops.Relu(wide)])
    compare(graph, values(1, 3, 9, 7))


def test_a_value_of_pads_that_changes() -> None:
    graph = padded([0, 0, 1, 1, 0, 0, 1, 1], own=0, value=0.0)
    model, x = sg.compile_model(graph, "CPU"), values(1, 3, 9, 7)
    model(x)
    model.parameters["value"].assign(np.array(2.0, np.float32))
    want = sg.compile_model(graph, "REFERENCE")(x)[0]
    np.testing.assert_allclose(model(x)[0], want, rtol=0, atol=1e-4)


@pytest.mark.skipif(host.lanes("float32") == 1, reason="there are no blocks of one channel")
def test_means_of_channels_stay_in_blocks() -> None:
    # Only the result leaves the blocked layout.
    assert reorders(squeezed(32, keepdims=True), values(1, 3, 9, 7)) == 1
