"""What differential fuzzing found, kept: graphs once computed wrong, here or by the peer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array


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


def test_zeros_around_an_image_count_in_its_maxima() -> None:
    """ONNX Runtime 1.31 folds this Pad into MaxPool, whose own pads count as minus infinity."""
    x = sg.input("x", (2, 3, 4))
    padded = ops.Pad(ops.Tanh(x), sg.parameter("pads", np.array([0, 0, 0, 0, 0, 1])))
    graph = sg.Graph([x], [ops.MaxPool(padded, kernel_shape=[2], strides=[1])])
    array = np.random.default_rng(0).uniform(-2, -1, (2, 3, 4)).astype(np.float32)
    row = np.pad(np.tanh(array), ((0, 0), (0, 0), (0, 1)))
    for device in ("CPU", "REFERENCE"):
        got = sg.compile_model(graph, device)(x=array)[0]
        np.testing.assert_allclose(got, np.maximum(row[..., :-1], row[..., 1:]), rtol=1e-5)


@pytest.mark.parametrize("start", [-4, -3, -2, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("end", [-9, -3, -2, -1, 0, 1, 2, 5])
@pytest.mark.parametrize("step", [-2, -1, 1, 2])
def test_a_slice_that_begins_outside_is_moved_to_the_end_it_begins_at(
    start: int, end: int, step: int
) -> None:
    """Going backwards, a start before the first element means the first; NumPy takes nothing."""
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    low, high = (0, 1) if step < 0 else (0, 2)
    first = min(max(start + 2 * (start < 0), low), high)
    last = min(max(end + 2 * (end < 0), low - (step < 0)), high)
    expected = array[list(range(first, last, step))]
    x = sg.input("x", (2, 3))
    parts = [sg.parameter(f"p{k}", np.array([n])) for k, n in enumerate((start, end, 0, step))]
    graph = sg.Graph([x], [ops.Slice(x, *parts)])
    assert graph.outputs[0].type == sg.TensorType("float32", expected.shape)
    for device in ("CPU", "REFERENCE"):
        np.testing.assert_array_equal(sg.compile_model(graph, device)(x=array)[0], expected)


def test_a_product_over_nothing_has_the_shape_of_any_other() -> None:
    """ONNX Runtime 1.31 leaves the batch of the second factor out."""
    x = sg.input("x", (2, 0, 4))
    graph = sg.Graph([x], [ops.MatMul(sg.parameter("w", np.zeros((1, 1, 0), np.float32)), x)])
    array = np.zeros((2, 0, 4), np.float32)
    for device in ("CPU", "REFERENCE"):
        got = sg.compile_model(graph, device)(x=array)[0]
        np.testing.assert_array_equal(got, np.zeros((2, 1, 4), np.float32))


def test_a_pool_that_steps_over_elements_begins_at_the_first() -> None:
    """SAME pads nothing where windows leave gaps; ONNX Runtime 1.31 pads by -1 and begins later."""
    x = sg.input("x", (1, 1, 3))
    graph = sg.Graph(
        [x], [ops.AveragePool(x, kernel_shape=[1], strides=[3], auto_pad="SAME_UPPER")]
    )
    array = np.arange(3, dtype=np.float32).reshape(1, 1, 3)
    for device in ("CPU", "REFERENCE"):
        assert sg.compile_model(graph, device)(x=array)[0].tolist() == [[[0.0]]]


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("offsets", [(1, 8, 4, 2), (1, 8, 2, 4), (1, 6, 4, 4), (2, 8, 4, 4)])
def test_offsets_that_do_not_cover_a_deformed_image(offsets: Any, device: str) -> None:
    """The kernel read them as if they did, beyond their end."""
    x, o = sg.input("x", ("N", 1, 3, 3)), sg.input("o", ("B", "C", "H", "W"))
    weight = np.ones((1, 1, 2, 2), np.float32)
    graph = sg.Graph([x, o], [ops.DeformConv(x, weight, o, pads=[1, 1, 1, 1])])
    model = sg.compile_model(graph, device)
    image = np.ones((1, 1, 3, 3), np.float32)
    assert model([image, np.zeros((1, 8, 4, 4), np.float32)])[0].shape == (1, 1, 4, 4)
    with pytest.raises(sg.ShapeError):
        model([image, np.zeros(offsets, np.float32)])


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("shape", [(0, 2), (2, 3)])
def test_a_scalar_is_made_of_one_element_alone(shape: tuple[int, int], device: str) -> None:
    """Of none, one was read that was not there."""
    x, to = sg.input("x", ("A", "B")), sg.input("to", ("R",), "int64")
    model = sg.compile_model(sg.Graph([x, to], [ops.Reshape(x, to)]), device)
    assert model([np.ones((1, 1), np.float32), np.zeros(0, np.int64)])[0].shape == ()
    with pytest.raises(sg.ShapeError):
        model([np.ones(shape, np.float32), np.zeros(0, np.int64)])


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_a_range_away_from_its_limit_is_empty(device: str) -> None:
    """However far the limit is: it counted against the memory budget."""
    x, far = [sg.input(name, (), "int64") for name in "xl"], 1 << 62
    model = sg.compile_model(sg.Graph(x, [ops.Range(*x, np.array(-1))]), device)
    assert model(np.int64(0), np.int64(far))[0].tolist() == []
    assert model(np.int64(3), np.int64(0))[0].tolist() == [3, 2, 1]
    with pytest.raises(sg.LimitError):
        model(np.int64(0), np.int64(-far))
