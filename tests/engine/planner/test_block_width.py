"""How many channels a block has: chosen for a graph, and the same results with either choice."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.block_width import ConvolutionSize, float_block
from subgraph.engine.planner.operands import EmittedStep
from subgraph.engine.planner.plan import make_plan
from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.graph.types import TensorType
from subgraph.ops.movement.geometry import Geometry, bands, merged
from subgraph.ops.shared.tile_planning import Tiles
from subgraph.system import host

rng = np.random.default_rng(5)


@pytest.fixture
def half_width_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Follow a machine whose vectors of 16 take twice the time of those of 8."""
    monkeypatch.setenv("SUBGRAPH_ISA", "like-avx512")
    try:
        assert host.splits_512_bit_vectors()
    except sg.ConfigError as error:
        pytest.skip(str(error))


def weight(name: str, *shape: int) -> sg.Value:
    return sg.parameter(name, (rng.standard_normal(shape) * 0.3).astype(np.float32))


def grouped(each: int, outputs: int = 40) -> sg.Graph:
    """Return a graph with grouped convolutions, and other convolutions around them."""
    x = sg.input("x", shape=("N", 3, 19, 17), dtype="float32")
    h = ops.Relu(ops.Conv(x, weight("stem", 40, 3, 3, 3), strides=[2, 2], pads=[1] * 4))
    h = ops.Conv(h, weight("in", 5 * each, 40, 1, 1), weight("b", 5 * each))
    h = ops.Sigmoid(ops.Conv(h, weight("groups", 5 * each, each, 3, 3), pads=[1] * 4, group=5))
    scale = ops.Sigmoid(ops.GlobalAveragePool(h))
    h = ops.Mul(h, scale)
    h = ops.Clip(
        ops.Conv(h, weight("depth", 5 * each, 1, 3, 3), pads=[1] * 4, group=5 * each), 0.0, 6.0
    )
    p = ops.Conv(h, weight("out", outputs, 5 * each, 1, 1))
    h = ops.Relu(ops.Add(p, ops.Conv(h, weight("out2", outputs, 5 * each, 1, 1))))
    h = ops.Concat(h, ops.MaxPool(h, kernel_shape=[3, 3], pads=[1] * 4), axis=1)
    h = ops.LRN(h, size=3)
    h = ops.ConvTranspose(h, weight("up", 2 * outputs, 12, 2, 2), strides=[2, 2])
    h = ops.Conv(h, weight("last", 24, 12, 3, 3), pads=[1] * 4)
    return sg.Graph([x], [h, ops.ReduceMean(h, axes=[2, 3], keepdims=0)])


def lanes_of_kernels(graph: sg.Graph, shape: tuple[int, ...]) -> set[object]:
    plan = make_plan(graph, [TensorType("float32", shape)], {}, PlanOptions())
    names = ("subgraph.ops.conv.kernels", "subgraph.ops.conv.depthwise_kernels")
    return {
        dict(item.kernel.variant)["lanes"]
        for item in plan.items
        if isinstance(item, EmittedStep) and item.kernel.module.endswith(names)
    }


@pytest.mark.parametrize(
    ("groups", "inputs", "outputs", "taps"),
    [(1, 40, 24, 9), (1, 3, 24, 9), (1, 40, 24, 1), (8, 8, 8, 9), (3, 10, 20, 1), (7, 9, 5, 9)],
)
@pytest.mark.parametrize("lanes", [8, 16])
def test_products_are_those_of_the_kernels(
    groups: int, inputs: int, outputs: int, taps: int, lanes: int
) -> None:
    of = Tiles("float32", lanes, 6, 2)
    k = int(taps**0.5)
    g = Geometry(
        1, groups, inputs, outputs, (1, 9, 9), (1, 9, 9), (1, k, k), (1, 1, 1), (1, 1, 1), (0, 0, 0)
    )

    def blocks(channels: int) -> int:
        return -(-channels // lanes)

    depth = inputs if taps == 1 or inputs <= 3 else blocks(inputs) * lanes
    want = depth * blocks(outputs)
    if groups > 1:
        together = merged(g, lanes)
        dense = blocks(together * inputs) * lanes * blocks(together * outputs)
        left, banded = blocks(groups * outputs), 0
        for _, count in bands(g, of):
            banded += count * lanes * min(of.nv, left)
            left -= of.nv
        want = min(groups // together * dense, banded)
    assert ConvolutionSize(81, groups, inputs, outputs, taps).vectors(lanes) == 81 * taps * want


def test_depthwise_products() -> None:
    assert ConvolutionSize(10, 24, 1, 1, 9).vectors(16) == 10 * 9 * 2
    assert ConvolutionSize(10, 24, 1, 1, 9).vectors(8) == 10 * 9 * 3
    assert ConvolutionSize(10, 24, 1, 3, 9).vectors(16) == 10 * 9 * 5  # each channel repeated


@pytest.mark.usefixtures("half_width_vectors")
@pytest.mark.parametrize(("each", "lanes"), [(8, 8), (24, 8), (32, 16), (64, 16)])
def test_graphs_choose_what_fits_their_channels(each: int, lanes: int) -> None:
    graph = grouped(each, 48)
    assert float_block(graph) == lanes
    assert lanes_of_kernels(graph, (1, 3, 19, 17)) == {lanes}


@pytest.mark.usefixtures("half_width_vectors")
@pytest.mark.parametrize("each", [8, 9, 24])
@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_those_of_the_reference(each: int, threads: int) -> None:
    graph = grouped(each)
    model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
    reference = sg.compile_model(graph, "REFERENCE")
    for images in (1, 2):  # the second plan comes from a symbolic plan
        x = rng.standard_normal((images, 3, 19, 17)).astype(np.float32)
        want = reference([x])
        for got, expected in zip(model([x]).values(), want.values(), strict=True):
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.usefixtures("half_width_vectors")
def test_unknown_sizes_keep_whole_vectors() -> None:
    for shape, lanes in (((1, 40, "H", "W"), 16), (("N", 40, 9, 9), 8)):
        x = sg.input("x", shape=shape, dtype="float32")
        h = ops.Conv(x, weight("w", 40, 8, 3, 3), group=5)
        assert float_block(sg.Graph([x], [h])) == lanes


def test_machines_with_one_width_have_one_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in host.available_isas()[1:]:
        monkeypatch.setenv("SUBGRAPH_ISA", name)
        assert float_block(grouped(8)) == host.lanes("float32")


@pytest.mark.parametrize(
    ("filters", "group", "message"),
    [((4, 4, 3, 3), 0, "group is 0"), ((4,), 1, "do not fit")],
)
def test_a_convolution_that_is_not_valid_raises_its_own_error(
    filters: tuple[int, ...], group: int, message: str
) -> None:
    x, w = sg.input("x", (1, 4, 8, 8)), sg.parameter("w", np.ones(filters, np.float32))
    node = sg.Node("Conv", [x, w], attrs={"group": group})
    node.outputs[0].type = TensorType("float32", (1, 4, 6, 6))  # as a file may state it
    model = sg.compile_model(sg.Graph([x], [node.outputs[0]]), "CPU")
    with pytest.raises(sg.ShapeError, match=message):
        model([np.ones((1, 4, 8, 8), np.float32)])
