"""Windows of which some lie in the padding alone, on every device against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.opencl import core, graph_of, needs_device, random

pytestmark = pytest.mark.usefixtures("quick_opencl_builds")
DEVICES = ["CPU", pytest.param("OPENCL", marks=needs_device)]
# Spatial sizes, and windows with pads larger than they are or with taps around a small image.
WINDOWS: list[tuple[tuple[int, ...], dict[str, Any]]] = [
    ((5,), {"kernel_shape": (2,), "pads": (3, 4)}),
    ((5,), {"kernel_shape": (2,), "pads": (3, 3), "strides": (3,), "ceil_mode": 1}),
    ((4,), {"kernel_shape": (2,), "pads": (3, 3), "dilations": (5,)}),
    ((4, 7), {"kernel_shape": (2, 3), "pads": (2, 0, 0, 4), "strides": (1, 2)}),
    ((1, 6), {"kernel_shape": (2, 2), "pads": (1, 1, 1, 1), "dilations": (2, 1)}),
    ((3, 2, 5), {"kernel_shape": (2, 1, 3), "pads": (2, 1, 0, 0, 1, 3)}),
]


def _compare(device: str, op: str, arrays: list[Array], options: dict[str, Any]) -> list[Array]:
    """Return the results, which are those of the reference."""
    graph, given = graph_of(op, arrays=arrays, **options)
    answer = core().query_model(graph, device)
    assert answer.get("tried") == device, answer.reasons
    with np.errstate(invalid="ignore"):
        wanted = core().compile_model(graph, "REFERENCE")(given)
    found = core().compile_model(graph, device)(given)
    for k in range(len(graph.outputs)):
        # Averages of numbers of about 1 that nearly cancel keep their absolute accuracy only.
        np.testing.assert_allclose(found[k], wanted[k], rtol=1e-5, atol=1e-6)
    return [wanted[k] for k in range(len(graph.outputs))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize("channels", [3, 16])
@pytest.mark.parametrize(("sizes", "window"), WINDOWS)
def test_averages(
    sizes: tuple[int, ...], window: dict[str, Any], channels: int, include: int, device: str
) -> None:
    """An average of no pixels is NaN, one of padding 0; CPU has a kernel for blocks of channels."""
    version = 19 if "dilations" in window else 11
    options = {**window, "count_include_pad": include, "version": version}
    (average,) = _compare(device, "AveragePool", [random(2, channels, *sizes)], options)
    assert np.isnan(average).any() == (not include)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize(("sizes", "window"), WINDOWS)
def test_norms(sizes: tuple[int, ...], window: dict[str, Any], p: int, device: str) -> None:
    options = {**window, "p": p, "version": 18}
    (norm,) = _compare(device, "LpPool", [random(2, 3, *sizes) + 9], options)
    assert (norm == 0).any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "int8", "uint8"])
@pytest.mark.parametrize("storage_order", [0, 1])
@pytest.mark.parametrize(("sizes", "window"), WINDOWS)
def test_maxima_and_their_indices(
    sizes: tuple[int, ...], window: dict[str, Any], storage_order: int, dtype: str, device: str
) -> None:
    """The maximum of no pixels is the dtype's lowest value, and has the index -1."""
    x = np.random.default_rng(0).integers(1, 9, (2, 3, *sizes)).astype(dtype)
    lowest = -np.inf if dtype == "float32" else np.iinfo(dtype).min
    options = {**window, "storage_order": storage_order, "version": 12}
    maxima, indices = _compare(device, "MaxPool", [x], {**options, "outputs": 2})
    np.testing.assert_array_equal(maxima == lowest, indices == -1)
    assert (indices == -1).any()
    (alone,) = _compare(device, "MaxPool", [x], options)
    np.testing.assert_array_equal(alone, maxima)


def test_the_index_of_a_maximum_at_the_lowest_value_is_a_pixel() -> None:
    x = np.full((1, 1, 4), -np.inf, np.float32)
    options = {"kernel_shape": (2,), "pads": (1, 1), "outputs": 2}
    _, indices = _compare("CPU", "MaxPool", [x], options)
    np.testing.assert_array_equal(indices, [[[0, 0, 1, 2, 3]]])


@pytest.mark.parametrize("device", DEVICES)
def test_no_images_have_no_maxima(device: str) -> None:
    x = np.zeros((0, 2, 5), np.float32)
    maxima, indices = _compare(device, "MaxPool", [x], {"kernel_shape": (2,), "outputs": 2})
    assert maxima.shape == indices.shape == (0, 2, 4)


@needs_device
def test_pads_that_may_exceed_32_bits_are_refused() -> None:
    """CPU counts in 64 bits; OPENCL counted a negative number of pixels."""
    x = np.arange(12, dtype=np.float32).reshape(1, 1, 12)
    options: dict[str, Any] = {"kernel_shape": (5,), "pads": (0, 2**31 - 10)}
    options |= {"strides": (2**31 - 1,), "count_include_pad": 1}
    graph, _ = graph_of("AveragePool", arrays=[x], **options)
    assert "pads of" in core().query_model(graph, "OPENCL").reasons["tried"]
    (average,) = _compare("CPU", "AveragePool", [x], options)
    np.testing.assert_array_equal(average, [[[2]]])


@pytest.mark.parametrize("ceil", [0, 1])
@pytest.mark.parametrize("after", range(5))
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_the_number_of_windows_is_that_of_onnx(stride: int, after: int, ceil: int) -> None:
    window: dict[str, Any] = {"kernel_shape": [2], "strides": [stride], "pads": [2, after]}
    node = helper.make_node("MaxPool", ["x"], ["y"], **window, ceil_mode=ceil)
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 1, 5])
    graph = helper.make_graph([node], "g", [given], [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)])
    inferred = onnx.shape_inference.infer_shapes(model).graph.output[0].type.tensor_type.shape
    pooled = sg.ops.MaxPool(sg.input("x", (1, 1, 5)), **window, ceil_mode=ceil)
    assert pooled.type == sg.TensorType("float32", (1, 1, inferred.dim[2].dim_value))


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


def test_a_pool_that_steps_over_elements_begins_at_the_first() -> None:
    """SAME pads nothing where windows leave gaps; ONNX Runtime 1.31 pads by -1 and begins later."""
    x = sg.input("x", (1, 1, 3))
    graph = sg.Graph(
        [x], [ops.AveragePool(x, kernel_shape=[1], strides=[3], auto_pad="SAME_UPPER")]
    )
    array = np.arange(3, dtype=np.float32).reshape(1, 1, 3)
    for device in ("CPU", "REFERENCE"):
        assert sg.compile_model(graph, device)(x=array)[0].tolist() == [[[0.0]]]
