"""Convolutions to a few channels, which multiply lane by lane: against sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.conv import cpu as conv_cpu
from subgraph.ops.conv.choice import DIRECT, LANE_SUMS, Algorithm, choose
from subgraph.ops.conv.depthwise import adds_lanes
from subgraph.ops.conv.job import Job
from subgraph.system import host
from tests.support.conv import close, reference
from tests.support.kernels import run_node

# With narrower vectors a block has fewer channels, of which fewer are padding.
_HAS_WIDE_VECTORS = host.lanes("float32") == 16 and not host.is_emulated()
_ACTIVATIONS: dict[str, Any] = {
    "": lambda x: x,
    "Relu": lambda x: np.maximum(x, 0),
    "Clip": lambda x: np.clip(x, -0.3, 0.7),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "LeakyRelu": lambda x: np.where(x < 0, -0.3 * x, x),
}


@st.composite
def _axes(draw: st.DrawFn) -> list[tuple[int, int, int, int, int, int]]:
    """Draw taps, stride, dilation, size and pads of each spatial axis."""
    count = draw(st.integers(1, 3))
    axes = []
    for axis in range(count):
        last = axis == count - 1
        taps = draw(st.sampled_from([1, 3, 5, 7] if last else [1, 2, 3]))
        stride = draw(st.integers(1, 2))
        dilation = 1 if last else draw(st.integers(1, 2))
        pads = [draw(st.integers(0, taps // 2 if last else 3)) for _ in range(2)]
        reach = (taps - 1) * dilation + 1
        size = draw(st.integers(max(1, reach - sum(pads)), 12 if count > 1 else 700))
        axes.append((taps, stride, dilation, size, *pads))
    return axes


@settings(max_examples=150, deadline=None)
@given(
    axes=_axes(),
    images=st.integers(1, 2),
    channels=st.tuples(st.integers(1, 40), st.integers(1, 5)),
    act=st.sampled_from(sorted(_ACTIVATIONS)),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    dtype=st.sampled_from(["float32", "float64"]),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_lane_sums(
    axes: list[tuple[int, int, int, int, int, int]],
    images: int,
    channels: tuple[int, int],
    act: str,
    with_bias: bool,
    with_residual: bool,
    dtype: str,
    threads: int,
    cuts: list[float],
) -> None:
    taps, strides, dilations, sizes, before, after = (
        list(each) for each in zip(*axes, strict=True)
    )
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, channels[0], *sizes)).astype(dtype)
    w = rng.standard_normal((channels[1], channels[0], *taps)).astype(dtype)
    w /= np.sqrt(np.prod(w.shape[1:])).astype(dtype)
    bias = rng.standard_normal(channels[1]).astype(dtype) if with_bias else None
    wanted = reference(x, w, strides, dilations, [*before, *after], 1)
    if bias is not None:
        wanted = wanted + bias.reshape(-1, *[1] * len(taps))
    added = rng.standard_normal(wanted.shape).astype(dtype) if with_residual else None
    if added is not None:
        wanted = wanted + added
    wanted = _ACTIVATIONS[act](wanted)
    how = {"pads": [*before, *after], "strides": strides, "dilations": dilations}
    how |= {"activation": act, "activation_alpha": -0.3, "activation_beta": 0.7}

    def chosen(job: Job) -> Algorithm:
        # Taps that read only padding are left out, which may leave no windows.
        return LANE_SUMS if adds_lanes(job.of, job.g) else DIRECT

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", chosen)
        got, alone = (
            run_node(
                "FusedConv", [x, w, bias, added], [wanted.shape], how, domain=INTERNAL_DOMAIN,
                constant=[1, 2], blocked=[0] if host.lanes(dtype) > 1 else [],
                threads=count, cuts=where,
            )[0]
            for count, where in ((threads, cuts), (1, []))
        )  # fmt: skip
    assert np.array_equal(got, alone)
    close(got, wanted, 1e-5)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("channels", "kernel", "spatial"),
    [((64, 3), (3, 3), (40, 40)), ((32, 1), (7,), (900,)), ((16, 2), (3, 3, 3), (9, 8, 12))],
)
def test_heads_of_networks(
    precision: str, channels: tuple[int, int], kernel: tuple[int, ...], spatial: tuple[int, ...]
) -> None:
    """The last convolution of a decoder writes plain images; one between others is converted."""
    if host.lanes("float32") == 1:
        pytest.skip("there are no vectors")
    rng = np.random.default_rng(1)
    x = sg.input("x", (2, channels[0], *spatial))

    def convolve(value: sg.Value, inputs: int, outputs: int) -> Any:
        w = rng.standard_normal((outputs, inputs, *kernel)).astype(np.float32)
        w /= np.sqrt(np.prod(w.shape[1:])).astype(np.float32)
        pads = [size // 2 for size in kernel] * 2
        return ops.Conv(value, w, rng.standard_normal(outputs).astype(np.float32), pads=pads)

    inner, outer = channels
    head = ops.Tanh(convolve(ops.Relu(convolve(x, inner, inner)), inner, outer))
    graph = sg.Graph([x], [head, convolve(head, outer, inner)])
    model = sg.compile_model(
        graph, "CPU", {"INFERENCE_PRECISION": precision, "ENABLE_PROFILING": True}
    )
    given = [rng.standard_normal((2, inner, *spatial)).astype(np.float32)]
    request = model.create_infer_request()
    got = [np.array(value) for value in request.infer(given).to_tuple()]
    if _HAS_WIDE_VECTORS:
        assert any("lane_sums" in entry.kernel for entry in request.profile())
    want = sg.compile_model(graph, "REFERENCE")(given)
    for k, value in enumerate(got):
        close(value, np.asarray(want[k]), 1e-5 if precision == "float32" else 0.03)


def test_lane_sums_are_chosen_by_cost() -> None:
    """More outputs fill a block."""
    seen: list[Algorithm] = []

    def note(job: Job) -> Algorithm:
        seen.append(choose(job))
        return seen[-1]

    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 64, 20, 20)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", note)
        for outputs in (1, 16):
            w = rng.standard_normal((outputs, 64, 3, 3)).astype(np.float32)
            added = rng.standard_normal((1, outputs, 20, 20)).astype(np.float32)
            for residual in (None, added):
                run_node(
                    "FusedConv", [x, w, None, residual], [added.shape], {"pads": [1] * 4},
                    domain=INTERNAL_DOMAIN, constant=[1],
                )  # fmt: skip
    found = [algorithm == LANE_SUMS for algorithm in seen]
    assert found[2:] == [False, False]
    # One pixel: what counts is the time in which the weights arrive.
    x = rng.standard_normal((1, 512, 7, 7)).astype(np.float32)
    w = rng.standard_normal((256, 512, 7, 7)).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", note)
        run_node("Conv", [x, w], [(1, 256, 1, 1)], {}, constant=[1])
    assert seen[-1] != LANE_SUMS
    assert found[:2] == [True, True] or not _HAS_WIDE_VECTORS
