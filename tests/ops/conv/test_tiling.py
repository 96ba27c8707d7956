"""Units of direct convolutions: every division of the loops gives the same results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subgraph.engine.planner.operands import Layout
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.conv import cpu as conv_cpu
from subgraph.ops.conv import direct as conv_direct
from subgraph.ops.conv.choice import DIRECT
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import Tiles, even_part
from subgraph.system import host
from tests.support.conv import close, reference
from tests.support.kernels import run_node


@pytest.mark.parametrize(
    ("kernel", "stride", "size"), [(1, 1, 7), (1, 2, 13), (3, 1, 5), (3, 2, 9)]
)
def test_weights_that_come_from_far(kernel: int, stride: int, size: int) -> None:
    """Few pixels and more weights than a cache holds: strips that prefetch."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 700, size, size)).astype(np.float32)
    w = rng.standard_normal((600, 700, kernel, kernel)).astype(np.float32)
    pads = [kernel // 2] * 4
    wanted = reference(x, w, [stride] * 2, [1, 1], pads, 1)

    def run(threads: int, cuts: list[float]) -> Array:
        return run_node(
            "Conv",
            [x, w],
            [wanted.shape],
            {"pads": pads, "strides": (stride,) * 2},
            constant=[1],
            blocked=[0],
            out_layout="blocked",
            threads=threads,
            cuts=cuts,
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", lambda job: DIRECT)
        got = run(1, [])
        assert np.array_equal(got, run(2, [0.5]))
    close(got, wanted)


@pytest.mark.parametrize(
    ("kernel", "dilations", "pads"),
    [((7, 1), (17, 1), (51, 0)), ((3, 3), (40, 1), (40, 1)), ((3, 3), (12, 12), (12, 12))],
)
@pytest.mark.parametrize("inputs", [12, 70])
def test_rows_of_taps_that_lie_apart(
    kernel: tuple[int, int], dilations: tuple[int, int], pads: tuple[int, int], inputs: int
) -> None:
    rng = np.random.default_rng(inputs)
    x = rng.standard_normal((1, inputs, 128, 62)).astype(np.float32)
    w = (rng.standard_normal((40, inputs, *kernel)) / (5 * inputs)).astype(np.float32)
    wanted = reference(x, w, (1, 1), dilations, (*pads, *pads), 1)
    attrs = {"strides": (1, 1), "dilations": dilations, "pads": (*pads, *pads)}
    form: dict[str, Any] = {"constant": [1], "blocked": [0], "out_layout": "blocked"}
    results = [
        run_node("Conv", [x, w], [wanted.shape], attrs, threads=threads, **form)[0]
        for threads in (1, 3)
    ]
    close(results[0], wanted)
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("inputs", [20, 300])
def test_pixels_gathered_or_in_boxes_give_the_same_bits(
    inputs: int, stride: int, dilation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that either may be kept for other sizes than those that it was chosen for."""
    rng = np.random.default_rng(inputs)
    x = rng.standard_normal((2, inputs, 19, 13)).astype(np.float32)
    w = (rng.standard_normal((40, inputs, 3, 3)) / inputs).astype(np.float32)
    attrs = {"strides": (stride,) * 2, "dilations": (dilation,) * 2, "pads": (1, 1, 1, 1)}
    wanted = reference(x, w, attrs["strides"], attrs["dilations"], attrs["pads"], 1)
    form: dict[str, Any] = {"constant": [1], "blocked": [0], "out_layout": "blocked"}
    results: list[Array] = []
    for gathered in (False, True):
        monkeypatch.setattr(conv_direct, "_gathers", lambda g, of, gathered=gathered: gathered)
        results += run_node(
            "Conv", [x, w], [wanted.shape], attrs, options={"WINOGRAD": False}, **form
        )
    close(results[0], wanted)
    np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("cache", [1 << 18, 1 << 19, 1 << 20, 1 << 21])
@pytest.mark.parametrize("most", [6, 8, 14])
def test_units_of_dilated_rows_copy_few_pixels_twice(
    cache: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conv_direct, "caches", lambda: host.Caches(1 << 15, cache, 1 << 25))
    ones, image = (1, 1, 1), (1, 128, 62)
    g = Geometry(1, 1, 16, 16, image, image, (1, 7, 1), ones, (1, 17, 1), (0, 51, 0))
    tiling = conv_direct.direct_tiling(Tiles("float32", 16, most, 2), g, False, False, 1)
    assert tiling.boxes() * tiling.reads() < 4 * math.prod(image) * 16 * 4


@pytest.mark.parametrize(
    ("kernel", "stride", "pads", "dilation"),
    [
        *[(1, 1, 0, 1), (1, 2, 0, 1), (1, 1, 1, 1), (3, 2, 1, 1)],
        *[(3, 1, 2, 2), (3, 1, 5, 5), (3, 2, 12, 12)],
    ],
)
@pytest.mark.parametrize("act", ["Relu", "Sigmoid"])
def test_long_sums(kernel: int, stride: int, pads: int, dilation: int, act: str) -> None:
    """Sums that go over several segments, of images whose rows are no whole tiles."""
    rng = np.random.default_rng(kernel)
    x = rng.standard_normal((2, 530, 7, 13)).astype(np.float32)
    w = (rng.standard_normal((150, 530, kernel, kernel)) / (23 * kernel)).astype(np.float32)
    bias = rng.standard_normal(150).astype(np.float32)
    attrs = {"strides": (stride,) * 2, "pads": (pads,) * 4, "dilations": (dilation,) * 2}
    wanted = reference(x, w, attrs["strides"], attrs["dilations"], attrs["pads"], 1)
    added = rng.standard_normal(wanted.shape).astype(np.float32)
    wanted += bias.reshape(-1, 1, 1) + added
    results = [
        run_node(
            "FusedConv",
            [x, w, bias, added],
            [wanted.shape],
            {**attrs, "activation": act},
            domain=INTERNAL_DOMAIN,
            constant=[1, 2],
            blocked=[0, 3],
            out_layout="blocked",
            threads=threads,
            cuts=[0.3],
            options={"WINOGRAD": False},
        )[0]
        for threads in (1, 3)
    ]
    close(results[0], np.maximum(wanted, 0) if act == "Relu" else 1 / (1 + np.exp(-wanted)))
    np.testing.assert_array_equal(results[0], results[1])


def test_same_bits_for_every_split() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 64, 28, 28)).astype(np.float32)
    for channels, kernel, attrs in [
        (96, 1, {}),
        (96, 3, {"pads": (1,) * 4}),
        (96, 3, {"pads": (1,) * 4, "strides": (2, 2)}),
    ]:
        w = rng.standard_normal((channels, 64, kernel, kernel)).astype(np.float32)
        size = 14 if "strides" in attrs else 28
        results = [
            run_node(
                "Conv",
                [x, w],
                [(2, channels, size, size)],
                attrs,
                constant=[1],
                threads=threads,
                cuts=cuts,
            )[0]
            for threads, cuts in [(1, []), (2, [0.5]), (6, [0.1, 0.37, 0.8])]
        ]
        assert all(np.array_equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize(
    ("inputs", "kernel", "size", "stride", "dilation", "border"),
    [
        (20, (96, 3), (100, 30), 1, 1, (0, 1)),  # taps by the hundred
        (6, (5, 5), (14, 14), 1, 1, (0, 0)),  # no other block
        (5, (3, 3), (17, 19), 2, 1, (1, 1)),
        (116, (3, 3), (12, 12), 1, 1, (1, 1)),  # behind several segments
        (21, (3, 3), (20, 20), 1, 2, (4, 2)),  # rows of taps that read nothing but padding
        (20, (3, 2), (2, 3), 1, 1, (2, 1)),
        (37, (3, 3), (7, 7), 1, 1, (1, 1)),  # pixels that are copied for each tap
        (20, (1, 9), (1, 60), 1, 3, (0, 12)),
    ],
)
def test_a_last_block_of_few_channels(
    layout: Layout,
    inputs: int,
    kernel: tuple[int, int],
    size: tuple[int, int],
    stride: int,
    dilation: int,
    border: tuple[int, int],
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, inputs, *size)).astype(np.float32)
    w = rng.standard_normal((70, inputs, *kernel)).astype(np.float32)
    pads = (*border, *border)
    wanted = reference(x, w, [stride] * 2, [dilation] * 2, pads, 1)
    attrs = {"pads": pads, "strides": (stride,) * 2, "dilations": (dilation,) * 2}
    blocked = [0] if layout == "blocked" else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", lambda job: DIRECT)
        results = [
            run_node(
                *("Conv", [x, w], [wanted.shape], attrs),
                constant=[1],
                blocked=blocked,
                out_layout="blocked",
                threads=threads,
                cuts=cuts,
            )[0]
            for threads, cuts in [(1, []), (2, [0.5]), (3, [0.2, 0.6]), (6, [0.1, 0.37, 0.8])]
        ]
    close(results[0], wanted)
    assert all(np.array_equal(results[0], other) for other in results[1:])


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(1, 300),
    part=st.integers(1, 300),
    others=st.integers(1, 9),
    threads=st.integers(1, 5),
)
def test_parts_are_even(total: int, part: int, others: int, threads: int) -> None:
    least = -(-total // part)
    size = even_part(total, part, others, threads)
    pieces = -(-total // size)
    assert 1 <= size <= part
    assert pieces == least or (pieces * others % threads == 0 and pieces <= 2 * least)
