"""Convolutions against a float64 scatter in NumPy: every algorithm, layout, rank and rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.operands import Layout
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.conv import cpu as conv_cpu
from subgraph.ops.conv.choice import DIRECT, IMAGE
from tests.support.conv import close, reference, transposed
from tests.support.kernels import run_node

CUTS = st.lists(st.floats(0, 1), max_size=3)
QUICK = settings(max_examples=60, deadline=None)
LAYOUTS: st.SearchStrategy[Layout] = st.sampled_from(["plain", "blocked"])


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the sizes of a convolution that has an output."""
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 4]))
    kernel = [draw(st.integers(1, 4 if rank < 3 else 3)) for _ in range(rank)]
    dilations = [draw(st.integers(1, 2)) for _ in range(rank)]
    pads = [draw(st.integers(0, 2)) for _ in range(2 * rank)]
    source = [
        max(1, (k - 1) * d + 1 - pads[i] - pads[rank + i])
        + draw(st.integers(0, 17 if rank < 3 else 5))
        for i, (k, d) in enumerate(zip(kernel, dilations, strict=True))
    ]
    if draw(st.booleans()):
        inputs, outputs = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    else:
        inputs, outputs = draw(st.sampled_from([8, 16, 32])), draw(st.sampled_from([16, 32, 48]))
    if draw(st.integers(0, 5)) == 0:
        inputs, outputs = 1, draw(st.sampled_from([1, 1, 2, 3, 8, 9]))
        groups = draw(st.integers(2, 40))
    elif groups > 1 and draw(st.booleans()):
        # Parts of a block: several go together, of which some may be left.
        inputs, outputs = draw(st.sampled_from([(4, 4), (8, 8), (8, 16), (16, 8), (24, 8)]))
        groups = draw(st.integers(2, 9))
    return {
        "rank": rank,
        "groups": groups,
        "kernel": kernel,
        "dilations": dilations,
        "pads": pads,
        "source": source,
        "strides": [draw(st.integers(1, 3)) for _ in range(rank)],
        "images": draw(st.integers(1, 2)),
        "inputs": inputs,
        "outputs": outputs,
    }


@QUICK
@given(
    case=convolutions(),
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    dtype=st.sampled_from(["float32", "float32", "float64"]),
    with_bias=st.booleans(),
    residual=st.sampled_from(["none", "plain", "blocked"]),
    weight=st.integers(0, 4),
    act=st.sampled_from(["Relu", "Relu", "Sigmoid"]),
    threads=st.integers(1, 4),
    cuts=CUTS,
)
# The second tap reads padding only: what is left is no product of all pixels.
@example(
    case={
        **{"rank": 1, "groups": 1, "kernel": [2], "dilations": [2], "pads": [0, 1]},
        **{"source": [2], "strides": [1], "images": 2, "inputs": 24, "outputs": 16},
    },
    layouts=("plain", "plain"),
    dtype="float32",
    with_bias=False,
    residual="none",
    weight=1,
    act="Relu",
    threads=1,
    cuts=[],
)
def test_conv(
    case: dict[str, Any],
    layouts: tuple[Layout, Layout],
    dtype: str,
    with_bias: bool,
    residual: str,
    weight: int,
    act: str,
    threads: int,
    cuts: list[float],
) -> None:
    rng = np.random.default_rng(0)
    groups, outputs = case["groups"], case["groups"] * case["outputs"]
    x = rng.standard_normal((case["images"], groups * case["inputs"], *case["source"]))
    w = rng.standard_normal((outputs, case["inputs"], *case["kernel"]))
    x, w = x.astype(dtype), w.astype(dtype)
    bias = rng.standard_normal(outputs).astype(dtype) if with_bias else None
    wanted = reference(x, w, case["strides"], case["dilations"], case["pads"], groups)
    if bias is not None:
        wanted += bias.reshape(-1, *[1] * case["rank"])
    added = None
    if residual != "none":
        added = rng.standard_normal(wanted.shape).astype(dtype)
        wanted += added
    attrs = {k: tuple(case[k]) for k in ("strides", "dilations", "pads")}
    blocked = [0] if layouts[0] == "blocked" else []
    (got,) = run_node(
        "FusedConv",
        [x, w, bias, added],
        [wanted.shape],
        {**attrs, "group": groups, "activation": act},
        domain=INTERNAL_DOMAIN,
        constant=[1, 2] if weight else [],
        blocked=[*blocked, 3] if residual == "blocked" else blocked,
        out_layout=layouts[1],
        threads=threads,
        cuts=cuts,
    )
    if act == "Relu":
        close(got, np.maximum(wanted, 0))
    else:  # no larger than 1, but made from sums that are
        close(got, 1 / (1 + np.exp(-wanted)), 2e-5)


@QUICK
@given(
    size=st.tuples(st.integers(1, 40), st.sampled_from([1, 2, 5, 14, 41, 43, 57, 150])),
    kernel=st.tuples(st.integers(1, 12), st.sampled_from([3, 5, 7, 9, 14])),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    pads=st.tuples(*[st.integers(0, 7)] * 4),
    dilation=st.integers(1, 2),
    channels=st.sampled_from([2, 8, 21]),
    group=st.sampled_from([(1, 1), (1, 2), (1, 3), (2, 2), (4, 4), (8, 8)]),
    single=st.booleans(),
    act=st.sampled_from(["Relu", "Silu"]),
    with_residual=st.booleans(),
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_depthwise_and_small_groups(
    size: tuple[int, int],
    kernel: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, int, int, int],
    dilation: int,
    channels: int,
    group: tuple[int, int],
    single: bool,
    act: str,
    with_residual: bool,
    threads: int,
    cuts: list[float],
) -> None:
    rng = np.random.default_rng(0)
    dtype = "float32" if single or kernel[1] != 3 else "float64"
    reach = ((kernel[0] - 1) * dilation + 1, kernel[1])
    source = [max(n, reach[i] - pads[i] - pads[2 + i]) for i, n in enumerate(size)]
    inputs, outputs = group
    x = rng.standard_normal((2, channels * inputs, *source)).astype(dtype)
    w = rng.standard_normal((channels * outputs, inputs, *kernel)).astype(dtype)
    bias = rng.standard_normal(channels * outputs).astype(dtype)
    wanted = reference(x, w, strides, (dilation, 1), pads, channels) + bias.reshape(-1, 1, 1)
    added = rng.standard_normal(wanted.shape).astype(dtype) if with_residual else None
    if added is not None:
        wanted += added
    (got,) = run_node(
        "FusedConv",
        [x, w, bias, added],
        [wanted.shape],
        {
            "strides": strides,
            "pads": pads,
            "dilations": (dilation, 1),
            "group": channels,
            "activation": act,
        },
        domain=INTERNAL_DOMAIN,
        constant=[1, 2],
        blocked=[0, 3] if with_residual else [0],
        out_layout="blocked",
        threads=threads,
        cuts=cuts,
    )
    close(got, np.maximum(wanted, 0) if act == "Relu" else wanted / (1 + np.exp(-wanted)))


@QUICK
@given(
    size=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    kernel=st.sampled_from([1, 1, 3]),
    stride=st.sampled_from([1, 2]),
    inputs=st.sampled_from([1, 3, 5, 8, 15, 24, 40, 300]),
    outputs=st.integers(1, 40),
    layout=LAYOUTS,
    act=st.sampled_from(["", "Relu", "Clip", "HardSwish"]),
    with_bias=st.booleans(),
    with_residual=st.booleans(),
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_rows_of_outputs(
    size: tuple[int, int],
    kernel: int,
    stride: int,
    inputs: int,
    outputs: int,
    layout: Layout,
    act: str,
    with_bias: bool,
    with_residual: bool,
    threads: int,
    cuts: list[float],
) -> None:
    """Rows of any length, panels of any width, rests of channels: what strips run."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, inputs, *size)).astype(np.float32)
    w = rng.standard_normal((outputs, inputs, kernel, kernel)).astype(np.float32)
    w /= np.float32(kernel * np.sqrt(inputs))
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    pads = [kernel // 2] * 4
    wanted = reference(x, w, [stride] * 2, [1, 1], pads, 1)
    wanted += 0 if bias is None else bias.reshape(-1, 1, 1)
    added = rng.standard_normal(wanted.shape).astype(np.float32) if with_residual else None
    wanted += 0 if added is None else added
    acts = {"Relu": (0, np.inf), "Clip": (-0.3, 0.7)}
    if act in acts:
        wanted = np.clip(wanted, *acts[act])
    elif act:
        wanted = wanted * np.clip(wanted / 6 + 0.5, 0, 1)
    numbers = {"activation_alpha": -0.3, "activation_beta": 0.7} if act == "Clip" else {}

    def run(threads: int, cuts: list[float]) -> Array:
        return run_node(
            "FusedConv",
            [x, w, bias, added],
            [wanted.shape],
            {"pads": pads, "strides": (stride,) * 2, "activation": act, **numbers},
            domain=INTERNAL_DOMAIN,
            constant=[1, 2],
            blocked=[0, 3] if layout == "blocked" else [3],
            out_layout="blocked",
            threads=threads,
            cuts=cuts,
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", lambda job: IMAGE if layout == "plain" else DIRECT)
        got = run(threads, cuts)
        assert np.array_equal(got, run(1, []))
    close(got, wanted, 2e-5)  # thousands of products, without fused ones on old machines


@QUICK
@given(
    case=convolutions(),
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    extra=st.integers(0, 2),
    with_bias=st.booleans(),
    cuts=CUTS,
)
# The first tap reads padding only, in each of several rows.
@example(
    case={
        **{"rank": 2, "groups": 1, "kernel": [1, 3], "dilations": [1, 2], "pads": [0, 1, 0, 2]},
        **{"source": [7, 2], "strides": [1, 1], "images": 2, "inputs": 1, "outputs": 1},
    },
    layouts=("plain", "plain"),
    extra=0,
    with_bias=False,
    cuts=[],
)
# Dilated along the last of three dimensions, where each phase has one tap: its dilation is none.
@example(
    case={
        **{"rank": 3, "groups": 1, "kernel": [3, 3, 3], "dilations": [2, 2, 2], "pads": [0] * 6},
        **{"source": [3, 4, 4], "strides": [2, 3, 3], "images": 1, "inputs": 1, "outputs": 1},
    },
    layouts=("plain", "plain"),
    extra=0,
    with_bias=False,
    cuts=[],
)
def test_conv_transpose(
    case: dict[str, Any],
    layouts: tuple[Layout, Layout],
    extra: int,
    with_bias: bool,
    cuts: list[float],
) -> None:
    rank, groups = case["rank"], case["groups"]
    kernel, dilations, strides = case["kernel"], case["dilations"], case["strides"]
    if rank == 3 and kernel[2] > strides[2] // math.gcd(strides[2], dilations[2]):
        dilations = [*dilations[:2], 1]  # several taps of a phase, dilated: refused
    source = [min(n, 7) for n in case["source"]]
    before = case["pads"][:rank]
    out = [
        (n - 1) * s + (k - 1) * d + 1 + min(extra, s - 1) - before[i] - case["pads"][rank + i]
        for i, (n, s, k, d) in enumerate(zip(source, strides, kernel, dilations, strict=True))
    ]
    if min(out) < 1:
        return
    rng = np.random.default_rng(0)
    x = rng.standard_normal((case["images"], groups * case["inputs"], *source))
    w = rng.standard_normal((groups * case["inputs"], case["outputs"], *kernel))
    x, w = x.astype(np.float32), w.astype(np.float32)
    bias = rng.standard_normal(groups * case["outputs"]).astype(np.float32) if with_bias else None
    wanted = transposed(x, w, strides, dilations, before, out, groups)
    if bias is not None:
        wanted += bias.reshape(-1, *[1] * rank)
    (got,) = run_node(
        "ConvTranspose",
        [x, w, bias],
        [wanted.shape],
        {
            "strides": tuple(strides),
            "dilations": tuple(dilations),
            "pads": tuple(case["pads"]),
            "group": groups,
        },
        constant=[1, 2],
        blocked=[0] if layouts[0] == "blocked" else [],
        out_layout=layouts[1],
        cuts=cuts,
    )
    close(got, wanted)


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER", "VALID"])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
def test_auto_pad(mode: str, layout: Layout) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 32, 10, 11)).astype(np.float32)
    w = rng.standard_normal((16, 32, 4, 3)).astype(np.float32)
    out = [5, 6] if mode != "VALID" else [4, 5]
    total = [
        max((o - 1) * 2 + k - n, 0) if mode != "VALID" else 0
        for o, k, n in zip(out, (4, 3), (10, 11), strict=True)
    ]
    first = [t // 2 if mode == "SAME_UPPER" else t - t // 2 for t in total]
    pads = [*first, *(t - f for t, f in zip(total, first, strict=True))]
    wanted = reference(x, w, [2, 2], [1, 1], pads, 1)
    (got,) = run_node(
        "Conv",
        [x, w],
        [wanted.shape],
        {"auto_pad": mode, "strides": (2, 2)},
        constant=[1],
        out_layout=layout,
    )
    close(got, wanted)


@pytest.mark.parametrize("groups", [1, 2])
def test_first_taps_that_read_only_padding(groups: int) -> None:
    x = np.arange(1, 2 * groups + 1, dtype=np.float32).reshape(1, groups, 2)
    w = np.array([[[7, 3]], [[5, 11]]], np.float32)[:groups]
    attrs = {"pads": (1, 0), "dilations": (2,), "group": groups}
    wanted = reference(x, w, [1], [2], [1, 0], groups)
    (got,) = run_node("Conv", [x, w], [wanted.shape], attrs, constant=[1])
    close(got, wanted)


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs", "kernel"),
    [(1, 24, 40, 3), (1, 17, 16, 1), (3, 16, 32, 3), (1, 16, 33, 5)],
)
def test_filters_made_in_every_run(groups: int, inputs: int, outputs: int, kernel: int) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((2, groups * inputs, 9, 11)).astype(np.float32)
    w = rng.standard_normal((groups * outputs, inputs, kernel, kernel)).astype(np.float32)
    filters, image = sg.input("w", w.shape), sg.input("x", x.shape)
    pads = [kernel // 2] * 4
    y = ops.Conv(ops.Relu(image), ops.Mul(filters, filters), pads=pads, group=groups)
    graph = sg.Graph([image, filters], [ops.Relu(y)])
    request = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True}).create_infer_request()
    for scale in (np.float32(1), np.float32(2)):
        wanted = reference(np.maximum(x, 0), (scale * w) ** 2, [1, 1], [1, 1], pads, groups)
        close(request.infer([x, scale * w])[0], np.maximum(wanted, 0))
    assert any("packing_kernels.pack" in entry.kernel for entry in request.profile())
