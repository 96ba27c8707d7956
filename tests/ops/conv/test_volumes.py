"""Three-dimensional convolutions, and those of which some taps read nothing but padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from subgraph.engine.planner.operands import Layout
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.conv import cpu as conv_cpu
from subgraph.ops.conv.choice import DIRECT, GENERIC, IMAGE, Algorithm, Method
from subgraph.ops.conv.job import Job
from subgraph.ops.movement import geometry
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import direct_tiles
from subgraph.system import host
from tests.support.conv import close, reference
from tests.support.kernels import run_node

FEW_ROWS = direct_tiles("float32", host.lanes("float32")).few_rows
CUTS = st.lists(st.floats(0, 1), max_size=3)
QUICK = settings(max_examples=50, deadline=None)
LAYOUTS: st.SearchStrategy[Layout] = st.sampled_from(["plain", "blocked"])
STRIDED = Algorithm(Method.STRIDED_WINOGRAD, 2)
ALGORITHMS = [
    DIRECT,
    *[Algorithm(Method.WINOGRAD, tile) for tile in (2, 4)],
    *([STRIDED] if FEW_ROWS else []),
]


def convolve(
    x: Array,
    w: Array,
    how: Mapping[str, Sequence[int]],
    act: str,
    added: bool,
    algorithm: Algorithm | None,
    threads: int,
    cuts: list[float],
    layout: Layout,
    groups: int = 1,
) -> tuple[Array, Array]:
    """Return what the kernels and what NumPy make of a convolution."""
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(w.shape[0]).astype(np.float32)
    wanted = reference(x, w, how["strides"], how["dilations"], how["pads"], groups)
    wanted += bias.reshape(-1, *[1] * (x.ndim - 2))
    residual = rng.standard_normal(wanted.shape).astype(np.float32) if added else None
    wanted += 0 if residual is None else residual
    if act:
        wanted = np.maximum(wanted, 0) if act == "Relu" else wanted / (1 + np.exp(-wanted))

    def run(threads: int, cuts: list[float]) -> Array:
        return run_node(
            "FusedConv",
            [x, w, bias, residual],
            [wanted.shape],
            {**{k: tuple(v) for k, v in how.items()}, "activation": act, "group": groups},
            domain=INTERNAL_DOMAIN,
            constant=[1, 2],
            blocked=[0, 3] if layout == "blocked" else [3],
            out_layout="blocked",
            threads=threads,
            cuts=cuts,
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        if algorithm is not None:
            patch.setattr(conv_cpu, "choose", lambda job: _possible(job, algorithm))
        got = run(threads, cuts)
        assert np.array_equal(got, run(1, []))
    return got, wanted


def _possible(job: Job, algorithm: Algorithm) -> Algorithm:
    """Return an algorithm, another one where so few taps read something that they are no square."""
    g = job.g
    if algorithm == IMAGE or g.kernel[1:] == (3, 3):
        return algorithm
    return GENERIC if g.kernel[0] > 1 and g.dilations[2] > 1 else DIRECT


@QUICK
@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 15), st.integers(1, 15)),
    depth=st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(1, 2)),
    phases=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    channels=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    pads=st.tuples(*[st.integers(0, 2)] * 6),
    images=st.integers(1, 2),
    act=st.sampled_from(["", "Relu", "Silu"]),
    added=st.booleans(),
    algorithm=st.sampled_from(ALGORITHMS),
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_squares_in_volumes(
    size: tuple[int, int, int],
    depth: tuple[int, int, int],
    phases: tuple[int, int],
    channels: tuple[int, int],
    pads: tuple[int, ...],
    images: int,
    act: str,
    added: bool,
    algorithm: Algorithm,
    threads: int,
    cuts: list[float],
) -> None:
    kernel, step, apart = depth
    down, across = phases if algorithm.method is Method.WINOGRAD else (1, 1)
    kernels = [(kernel - 1) * apart + 1, 2 * down + 1, 2 * across + 1]
    source = [max(n, kernels[i] - pads[i] - pads[3 + i]) for i, n in enumerate(size)]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, channels[0], *source)).astype(np.float32)
    w = rng.standard_normal((channels[1], channels[0], kernel, 3, 3)).astype(np.float32)
    w /= np.sqrt(np.float32(9 * kernel * channels[0]))
    stride = 2 if algorithm == STRIDED else 1
    how = {"strides": (step, stride, stride), "dilations": (apart, down, across), "pads": pads}
    got, wanted = convolve(x, w, how, act, added, algorithm, threads, cuts, "blocked")
    close(got, wanted, 1e-5)


@QUICK
@given(
    size=st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 20)),
    kernel=st.tuples(st.integers(1, 3), st.sampled_from([1, 3]), st.sampled_from([1, 3])),
    strides=st.tuples(*[st.integers(1, 2)] * 3),
    padded=st.booleans(),
    inputs=st.sampled_from([1, 3, 8, 13, 24]),
    outputs=st.integers(1, 30),
    layout=LAYOUTS,
    act=st.sampled_from(["", "Relu", "Silu"]),
    added=st.booleans(),
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_rows_in_volumes(
    size: tuple[int, int, int],
    kernel: tuple[int, int, int],
    strides: tuple[int, int, int],
    padded: bool,
    inputs: int,
    outputs: int,
    layout: Layout,
    act: str,
    added: bool,
    threads: int,
    cuts: list[float],
) -> None:
    """Kernels of which some axes have one tap, as video networks factorise them."""
    rng = np.random.default_rng(0)
    pads = [k // 2 if padded else 0 for k in kernel] * 2
    source = [max(n, k - 2 * p) for n, k, p in zip(size, kernel, pads, strict=False)]
    x = rng.standard_normal((2, inputs, *source)).astype(np.float32)
    w = rng.standard_normal((outputs, inputs, *kernel)).astype(np.float32)
    w /= np.float32(np.sqrt(w[0].size))
    how = {"strides": strides, "dilations": (1, 1, 1), "pads": pads}
    algorithm = IMAGE if layout == "plain" else DIRECT
    close(*convolve(x, w, how, act, added, algorithm, threads, cuts, layout), 1e-5)


@pytest.mark.parametrize("groups", [1, 4, 24])
@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize(("source", "stride", "pad"), [(1, 1, 2), (2, 2, 2), (2, 1, 4), (3, 4, 2)])
def test_taps_that_read_only_padding(
    groups: int, rank: int, source: int, stride: int, pad: int
) -> None:
    rng = np.random.default_rng(0)
    kernel = 5 if source > 1 else 3
    x = rng.standard_normal((1, 24, *[source] * rank)).astype(np.float32)
    w = rng.standard_normal((24, 24 // groups, *[kernel] * rank)).astype(np.float32)
    how = {"strides": [stride] * rank, "dilations": [1] * rank, "pads": [pad] * 2 * rank}
    close(*convolve(x, w, how, "Relu", True, None, 2, [0.4], "blocked", groups))


def test_geometry_keeps_the_taps_that_read_something() -> None:
    g = Geometry(1, 1, 8, 8, (1, 2, 9), (1, 1, 9), (3, 3, 3), (1, 2, 1), (1, 1, 2), (1, 1, 2))
    left, taps = g.trimmed()
    assert taps == (slice(1, 2), slice(1, 3), slice(0, 3))
    assert (left.kernel, left.pads, left.dilations) == ((1, 2, 3), (0, 0, 2), (1, 1, 2))
    nothing = Geometry(1, 1, 8, 8, (1, 1, 2), (1, 1, 1), (1, 1, 2), (1, 1, 9), (1, 1, 9), (0, 0, 4))
    assert nothing.trimmed()[1][2] == slice(0, 2)


def test_geometry_merges_axes() -> None:
    def folded(kernel: tuple[int, int, int]) -> Geometry:
        pads = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
        sizes = (4, 5, 6)
        return Geometry(1, 1, 8, 8, sizes, sizes, kernel, (1, 1, 1), (1, 1, 1), pads).folded()

    assert folded((1, 1, 1)).source == (1, 1, 120)
    along = folded((3, 1, 1))
    assert (along.source, along.kernel, along.pads) == ((1, 4, 30), (1, 3, 1), (0, 1, 0))
    assert folded((1, 3, 3)).source == (4, 5, 6)


@given(*(st.integers(*bounds) for bounds in ((1, 4), (0, 9), (1, 4), (1, 9), (4, 9), (0, 9))))
def test_taps_inside_are_the_same_by_trial_and_by_formula(
    stride: int, pad: int, dilation: int, taps: int, size: int, behind: int
) -> None:
    room = size + pad + behind - (taps - 1) * dilation - 1
    assume(room >= 0)
    g = Geometry(
        *(1, 1, 1, 1),
        **{
            name: (1, 1, value)
            for name, value in (("source", size), ("target", room // stride + 1), ("kernel", taps))
        },
        strides=(1, 1, stride),
        dilations=(1, 1, dilation),
        pads=(0, 0, pad),
    )
    tried = g.trimmed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(geometry, "_MAX_TRIED_TAPS", 0)
        assert g.trimmed() == tried
