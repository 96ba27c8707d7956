"""Transposed convolutions to few channels: their phases run as channels of one convolution."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from subgraph.engine.lowering import Layout
from subgraph.ops import conv_transpose_cpu
from subgraph.ops.tile_planning import tiles

from .conv_support import close, transposed
from .kernel_support import run_node

Array = np.ndarray[Any, Any]
LAYOUTS: st.SearchStrategy[Layout] = st.sampled_from(["plain", "blocked"])


@settings(max_examples=60, deadline=None)
@given(
    axes=st.lists(
        st.tuples(
            *[st.integers(1, 6), st.integers(1, 5), st.integers(1, 4)], *[st.integers(0, 3)] * 3
        ),
        min_size=1,
        max_size=3,
    ),
    images=st.integers(1, 2),
    inputs=st.integers(1, 20),
    outputs=st.integers(1, 12),
    with_bias=st.booleans(),
    layouts=st.tuples(LAYOUTS, LAYOUTS),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
@example(  # no output reads anything
    axes=[(1, 1, 2, 1, 0, 1)],
    images=1,
    inputs=1,
    outputs=1,
    with_bias=True,
    layouts=("plain", "plain"),
    threads=1,
    cuts=[],
)
def test_phases_as_channels(
    axes: list[tuple[int, ...]],
    images: int,
    inputs: int,
    outputs: int,
    with_bias: bool,
    layouts: tuple[Layout, Layout],
    threads: int,
    cuts: list[float],
) -> None:
    source, kernel, strides, before, after, extra = (list(each) for each in zip(*axes, strict=True))
    out = [
        (n - 1) * s + k - b - a + min(e, s - 1)
        for n, k, s, b, a, e in zip(source, kernel, strides, before, after, extra, strict=True)
    ]
    assume(min(out) > 0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, inputs, *source)).astype(np.float32)
    w = rng.standard_normal((inputs, outputs, *kernel)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    rank = len(axes)
    wanted = transposed(x, w, strides, [1] * rank, before, out, 1)
    wanted += 0 if bias is None else bias.reshape(-1, *[1] * rank)

    def run(threads: int, cuts: list[float]) -> Array:
        return run_node(
            "ConvTranspose",
            [x, w, bias],
            [wanted.shape],
            {"strides": tuple(strides), "pads": (*before, *after)},
            constant=[1, 2],
            blocked=[0] if layouts[0] == "blocked" else [],
            out_layout=layouts[1],
            threads=threads,
            cuts=cuts,
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_transpose_cpu, "_packs", lambda *_: True)
        got = run(threads, cuts)
        assert np.array_equal(got, run(1, []))
    close(got, wanted)


def test_phases_run_together_where_that_multiplies_less() -> None:
    of = tiles("float32")
    if of.lanes < 8:
        pytest.skip("a vector has no room for the phases")

    def packs(outputs: int, kernel: int, stride: int) -> bool:
        sizes = conv_transpose_cpu.Geometry(
            1, 1, 8, outputs, (1, 9, 9), (1, 9 * stride, 9 * stride), (1, kernel, kernel),
            (1, stride, stride), (1, 1, 1), (0, 0, 0),
        )  # fmt: skip
        per_axis = [
            conv_transpose_cpu.phases(sizes.target[i], sizes.kernel[i], sizes.strides[i], 1, 0)
            for i in range(3)
        ]
        return conv_transpose_cpu._packs(of, sizes, per_axis)

    assert packs(1, 9, 2)
    assert packs(3, 4, 2)
    assert not packs(32, 4, 2)
    assert not packs(1, 3, 1)
