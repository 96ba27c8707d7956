"""Winograd convolutions against a float64 scatter in NumPy: every form, and their stated error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.operands import EmittedStep, Weight
from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.graph.types import Array, TensorType
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.conv import cpu as conv_cpu
from subgraph.ops.conv.choice import DIRECT, POLYPHASE, Algorithm, Method
from subgraph.ops.conv.job import Job
from subgraph.ops.conv.polyphase import OUTPUTS, phases_of
from subgraph.ops.shared.tile_planning import direct_tiles
from subgraph.system import host
from tests.support.conv import close, reference
from tests.support.kernels import run_node

TILES_AND_TAPS = [(2, 3), (4, 3), (3, 4), (2, 5)]
STRIDED = Algorithm(Method.STRIDED_WINOGRAD, 2)
WINOGRAD = {tile: Algorithm(Method.WINOGRAD, tile) for tile in (2, 3, 4)}
# Algorithms, and the taps along an axis that each is tried with.
FORMS = [(STRIDED, 3), *[(WINOGRAD[tile], taps) for tile, taps in TILES_AND_TAPS]]
FEW_ROWS = direct_tiles("float32", host.lanes("float32")).few_rows


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    channels=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    dilations=st.one_of(st.just((1, 1)), st.tuples(st.integers(1, 7), st.integers(1, 7))),
    pads=st.tuples(*[st.integers(0, 2)] * 4),
    images=st.integers(1, 2),
    act=st.sampled_from(["", "Relu", "Clip", "Silu"]),
    with_residual=st.booleans(),
    form=st.sampled_from(FORMS),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_winograd(
    size: tuple[int, int],
    channels: tuple[int, int],
    dilations: tuple[int, int],
    pads: tuple[int, int, int, int],
    images: int,
    act: str,
    with_residual: bool,
    form: tuple[Algorithm, int],
    threads: int,
    cuts: list[float],
) -> None:
    algorithm, taps = form
    assume(algorithm != STRIDED or FEW_ROWS)
    stride = 2 if algorithm == STRIDED else 1
    if stride == 2:
        dilations = (1, 1)
    source = [
        max(n, (taps - 1) * d + 1 - pads[i] - pads[2 + i])
        for i, (n, d) in enumerate(zip(size, dilations, strict=True))
    ]
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, channels[0], *source)).astype(np.float32)
    w = rng.standard_normal((channels[1], channels[0], taps, taps)).astype(np.float32)
    w /= np.sqrt(np.float32(taps**2 * channels[0]))
    bias = rng.standard_normal(channels[1]).astype(np.float32)
    wanted = reference(x, w, [stride] * 2, dilations, pads, 1) + bias.reshape(-1, 1, 1)
    added = rng.standard_normal(wanted.shape).astype(np.float32) if with_residual else None
    if added is not None:
        wanted += added
    if act == "Relu":
        wanted = np.maximum(wanted, 0)
    elif act == "Clip":
        wanted = np.clip(wanted, -0.3, 0.7)
    elif act == "Silu":
        wanted = wanted / (1 + np.exp(-wanted))
    numbers = {"activation_alpha": -0.3, "activation_beta": 0.7}

    def run(threads: int, cuts: list[float]) -> Array:
        return run_node(
            "FusedConv",
            [x, w, bias, added],
            [wanted.shape],
            {
                **{"pads": pads, "strides": (stride,) * 2, "dilations": dilations},
                **{"activation": act, **numbers},
            },
            domain=INTERNAL_DOMAIN,
            constant=[1, 2],
            blocked=[0],
            out_layout="blocked",
            threads=threads,
            cuts=cuts,
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", lambda job: _square_or_direct(job, algorithm, taps))
        got = run(threads, cuts)
        assert np.array_equal(got, run(1, []))
    close(got, wanted, 1e-5)


def _square_or_direct(job: Job, form: Algorithm, taps: int) -> Algorithm:
    """Small images may leave fewer taps that read something."""
    return form if job.g.kernel == (1, taps, taps) else DIRECT


@st.composite
def phased_sizes(draw: st.DrawFn) -> tuple[int, list[int], list[int], list[int]]:
    """Draw a stride, kernel sizes, image sizes and pads of a convolution over phases."""
    step, taps = draw(st.integers(2, 4)), draw(st.sampled_from(sorted(OUTPUTS)))
    pads = [draw(st.integers(0, 5)) for _ in range(4)]
    # `polyphase.phases_of` puts -pad mod step zero taps in front of the kernel.
    kernel = [taps * step - -pad % step - draw(st.integers(0, step - 1)) for pad in pads[:2]]
    # A tap that read only padding would be left out: the window moves, inside the image.
    return step, kernel, [draw(st.integers(size + step, 45)) for size in kernel], pads


@settings(max_examples=60, deadline=None)
@given(
    sizes=phased_sizes(),
    channels=st.tuples(st.integers(1, 5), st.integers(1, 40)),
    images=st.integers(1, 2),
    relu=st.booleans(),
    with_residual=st.booleans(),
    layout=st.sampled_from(["plain", "blocked"]),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_phases(
    sizes: tuple[int, list[int], list[int], list[int]],
    channels: tuple[int, int],
    images: int,
    relu: bool,
    with_residual: bool,
    layout: Any,
    threads: int,
    cuts: list[float],
) -> None:
    """Strided convolutions of few channels, over the phases of the image."""
    step, taps, source, pads = sizes
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, channels[0], *source)).astype(np.float32)
    w = rng.standard_normal((channels[1], channels[0], *taps)).astype(np.float32)
    w /= np.sqrt(np.float32(taps[0] * taps[1] * channels[0]))
    bias = rng.standard_normal(channels[1]).astype(np.float32)
    wanted = reference(x, w, [step] * 2, [1, 1], pads, 1) + bias.reshape(-1, 1, 1)
    added = rng.standard_normal(wanted.shape).astype(np.float32) if with_residual else None
    if added is not None:
        wanted += added
    if relu:
        wanted = np.maximum(wanted, 0)
    how = {"pads": pads, "strides": (step,) * 2, "activation": "Relu" if relu else ""}

    def choose(job: Job) -> Algorithm:
        assert phases_of(job.g) is not None
        return POLYPHASE

    def run(threads: int, cuts: list[float]) -> Array:
        return run_node(
            "FusedConv",
            [x, w, bias, added],
            [wanted.shape],
            how,
            domain=INTERNAL_DOMAIN,
            constant=[1, 2],
            out_layout=layout,
            threads=threads,
            cuts=cuts,
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", choose)
        got = run(threads, cuts)
        assert np.array_equal(got, run(1, []))
    close(got, wanted, 1e-5)


@pytest.mark.parametrize(("kernel", "step", "pad"), [(7, 2, 3), (11, 4, 2), (11, 4, 0), (6, 2, 2)])
def test_phases_are_chosen_for_images(kernel: int, step: int, pad: int) -> None:
    """The convolutions that many networks begin with, and their error."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 3, 224, 224)).astype(np.float32)
    w = (rng.standard_normal((64, 3, kernel, kernel)) / kernel).astype(np.float32)
    wanted = reference(x, w, [step] * 2, [1, 1], [pad] * 4, 1)
    how = {"pads": (pad,) * 4, "strides": (step,) * 2}
    results = [
        run_node(
            "Conv", [x, w], [wanted.shape], how, constant=[1], out_layout="blocked",
            options={"WINOGRAD": on},
        )[0]
        for on in (True, False)
    ]  # fmt: skip
    for got in results:
        assert np.abs(got - wanted).max() < 2e-6 * np.abs(wanted).max()
    if host.lanes("float32") > 1:
        same = np.array_equal(results[0], results[1])
        assert not same, "subgraph.ops.conv.choice takes IMAGE instead of POLYPHASE"


@pytest.mark.parametrize("form", [WINOGRAD[2], WINOGRAD[4], STRIDED], ids=str)
@pytest.mark.parametrize("cuts", [[], [0.1, 0.35, 0.8]])
def test_winograd_of_few_tiles(form: Algorithm, cuts: list[float]) -> None:
    """Threads share the transforms of a single block of tiles: bit for bit what one computes."""
    if form == STRIDED and not FEW_ROWS:
        pytest.skip("many-row tiles run it directly")
    side, stride = {WINOGRAD[2]: (7, 1), WINOGRAD[4]: (13, 1), STRIDED: (9, 2)}[form]
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 100, side, side)).astype(np.float32)
    w = (rng.standard_normal((84, 100, 3, 3)) / 30).astype(np.float32)
    bias = rng.standard_normal(84).astype(np.float32)
    wanted = reference(x, w, [stride] * 2, [1, 1], [1] * 4, 1) + bias.reshape(-1, 1, 1)
    added = rng.standard_normal(wanted.shape).astype(np.float32)
    wanted += added
    wanted /= 1 + np.exp(-wanted)
    how = {"pads": (1,) * 4, "strides": (stride,) * 2, "activation": "Silu"}

    def run(threads: int) -> Array:
        return run_node(
            "FusedConv",
            [x, w, bias, added],
            [wanted.shape],
            how,
            domain=INTERNAL_DOMAIN,
            constant=[1, 2],
            threads=threads,
            cuts=cuts if threads > 1 else [],
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", lambda job: form)
        alone = run(1)
        for threads in (2, 3, 8):
            assert np.array_equal(alone, run(threads))
    close(alone, wanted, 1e-5)


@pytest.mark.parametrize(
    ("form", "taps", "bound"),
    [
        (WINOGRAD[2], 3, 1e-6),
        (WINOGRAD[4], 3, 6e-6),
        (STRIDED, 3, 2e-6),
        (WINOGRAD[3], 4, 6e-6),
        (WINOGRAD[2], 5, 6e-6),
    ],
)
def test_winograd_error_is_as_stated(form: Algorithm, taps: int, bound: float) -> None:
    stride = 2 if form == STRIDED else 1
    if stride == 2 and not FEW_ROWS:
        pytest.skip("many-row tiles run it directly")
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 256, 16, 16)).astype(np.float32)
    w = (rng.standard_normal((32, 256, taps, taps)) / (16 * taps)).astype(np.float32)
    wanted = reference(x, w, [stride] * 2, [1, 1], [1] * 4, 1)
    how = {"pads": (1,) * 4, "strides": (stride,) * 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_cpu, "choose", lambda job: form)
        (got,) = run_node("Conv", [x, w], [wanted.shape], how, constant=[1])
    assert np.abs(got - wanted).max() < bound * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("image", "dilations"),
    [((28, 28), (1, 1)), ((33, 33), (4, 4)), ((30, 41), (2, 3)), ((12, 20, 20), (2, 2, 2))],
)
def test_winograd_is_chosen_unless_it_is_forbidden(
    image: tuple[int, ...], dilations: tuple[int, ...]
) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((1, 64, *image)).astype(np.float32)
    w = rng.standard_normal((64, 64, *[3] * len(image))).astype(np.float32)
    how = {"pads": dilations * 2, "dilations": dilations}
    results = [
        run_node("Conv", [x, w], [x.shape], how, constant=[1], options={"WINOGRAD": on})[0]
        for on in (True, False)
    ]
    wanted = reference(x, w, [1] * len(image), dilations, dilations * 2, 1)
    close(results[1], wanted, 2e-6)
    if host.lanes("float32") > 1 and (FEW_ROWS or len(image) == 2):
        same = np.array_equal(results[0], results[1])
        assert not same, "subgraph.ops.conv.choice does not choose WINOGRAD"


def test_one_form_of_weights_that_maps_of_several_sizes_share() -> None:
    """As the head of a detector does: no weight is held in a form for each size."""
    rng = np.random.default_rng(0)
    array = rng.standard_normal((64, 64, 3, 3)).astype(np.float32) / np.float32(24)
    w = sg.parameter("w", array)
    maps = [sg.input(f"x{side}", (1, 64, side, side)) for side in (40, 12, 5)]
    graph = sg.Graph(maps, [ops.Conv(x, w, pads=[1] * 4) for x in maps])
    types = [TensorType("float32", (1, 64, side, side)) for side in (40, 12, 5)]
    shared = make_plan(graph, [*types], {}, PlanOptions())
    steps = [item for item in shared.items if isinstance(item, EmittedStep)]
    words = [word for step in steps for word in step.arguments if isinstance(word, Weight)]
    recipes = {word.recipe for word in words if w.parameter in word.sources}
    assert len(recipes) == 1
    given = [rng.standard_normal((1, 64, side, side)).astype(np.float32) for side in (40, 12, 5)]
    results = sg.compile_model(graph, "CPU")(given)
    for k, x in enumerate(given):
        close(results[k], reference(x, array, [1, 1], [1, 1], (1, 1, 1, 1), 1))
