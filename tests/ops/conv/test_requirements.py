"""Convolutions, pools and what samples images refuse operands that do not fit, on every device."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import DEVICES, Use, assert_agree, assert_refused, floats, run

X = floats(2, 6, 7, 8)
W = floats(9, 6, 3, 2)
HUGE = 2**62


def ints(*numbers: int, dtype: str = "int64") -> Array:
    """Return an operand of whole numbers."""
    return np.array(numbers, dtype)


def bytes_of(*shape: int) -> Array:
    """Return an operand of uint8."""
    return (floats(*shape) * 99 + 100).astype(np.uint8)


def conv(*operands: Array | None, **attrs: Any) -> Use:
    return Use("Conv", operands, attrs)


def transposed(*operands: Array | None, **attrs: Any) -> Use:
    return Use("ConvTranspose", operands, attrs)


WT = floats(6, 3, 3, 2)
WRONG_CONVOLUTIONS = [
    conv(X, floats(9, 6, 3, 2), floats(1)),
    conv(X, W, floats(8)),
    conv(X, W, floats(10)),
    conv(X, W, floats(9, 1)),
    conv(X, W, floats(0)),
    conv(X, floats(9, 5, 3, 2)),
    conv(X, floats(9, 7, 3, 2)),
    conv(X, floats(9, 6, 3)),
    conv(X, floats(9, 6, 3, 2, 1)),
    conv(floats(2, 6), floats(9, 6)),
    conv(X, floats(64, 2, 3, 2), group=3),
    conv(X, W, group=0),
    conv(X, W, group=-1),
    conv(X, W, group=HUGE),
    conv(X, W, kernel_shape=(3, 3)),
    conv(X, W, kernel_shape=(3,)),
    conv(X, W, strides=(0, 1)),
    conv(X, W, strides=(1, -1)),
    conv(X, W, strides=(1, 1, 1)),
    conv(X, W, dilations=(0, 1)),
    conv(X, W, dilations=(HUGE, HUGE)),
    conv(X, W, dilations=(1, 100)),
    conv(X, W, pads=(-1, 0, 0, 0)),
    conv(X, W, pads=(1, 1)),
    conv(X, W, pads=(HUGE, 0, HUGE, 0)),
    conv(X, W, auto_pad="SOMETIMES"),
    conv(X, floats(9, 6, 9, 2)),
    conv(X, floats(9, 6, 0, 2)),
    transposed(X, WT, floats(2)),
    transposed(X, WT, floats(1)),
    transposed(X, WT, floats(0)),
    transposed(X, WT, floats(4)),
    transposed(X, floats(5, 3, 3, 2)),
    transposed(X, floats(6, 3, 3)),
    transposed(X, WT, group=4),
    transposed(X, WT, group=0),
    transposed(X, WT, group=HUGE),
    transposed(X, WT, kernel_shape=(2, 3)),
    transposed(X, WT, strides=(0, 1)),
    transposed(X, WT, output_padding=(-1, 0)),
    transposed(X, WT, pads=(9, 9, 9, 9)),
    transposed(X, WT, output_shape=(9,)),
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 6, 3, 2), bytes_of(6)]),
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 6, 3, 2), bytes_of(1), bytes_of(8)]),
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 5, 3, 2)]),
    Use("DeformConv", [X, W, floats(2, 12, 5, 7)], {"offset_group": 4}),
    Use("DeformConv", [X, W, floats(2, 12, 5, 6)]),
    Use("DeformConv", [X, W, floats(1, 12, 5, 7)]),
    Use("DeformConv", [X, W, floats(2, 11, 5, 7)]),
    Use("DeformConv", [X, W, floats(2, 12, 5, 7), floats(8)]),
    Use("DeformConv", [X, W, floats(2, 12, 5, 7), None, floats(2, 6, 5, 1)]),
    Use("DeformConv", [X, W, floats(2, 12, 5, 7)], {"offset_group": 0}),
]
SCALE, ZERO = floats(1) + 2, bytes_of(1)
QUANTIZED = [bytes_of(2, 6, 7, 8), SCALE, ZERO, bytes_of(9, 6, 3, 2), SCALE, ZERO, SCALE, ZERO]
WRONG_QUANTIZED = [
    Use("QLinearConv", [*QUANTIZED[:k], wrong, *QUANTIZED[k + 1 :]])
    for k, wrong in (
        (1, SCALE.repeat(2)),
        (2, ZERO.repeat(6)),
        (3, bytes_of(9, 5, 3, 2)),
        (4, SCALE.repeat(8)),
        (4, SCALE.repeat(0)),
        (5, ZERO.repeat(10)),
        (6, SCALE.repeat(9)),
        (7, ZERO.repeat(9)),
    )
]
WRONG_QUANTIZED.append(Use("QLinearConv", [*QUANTIZED, ints(*range(8), dtype="int32")]))
WRONG_POOLS = [
    Use("MaxPool", [X], {"kernel_shape": (8, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2,)}),
    Use("MaxPool", [X], {"kernel_shape": (0, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "strides": (0, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "pads": (0, 0, 0, -1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "dilations": (HUGE, 1)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "storage_order": -1}, outputs=2),
    Use("MaxPool", [floats(6, 7)], {"kernel_shape": ()}),
    Use("AveragePool", [X], {"kernel_shape": (2, 2, 2)}),
    Use("AveragePool", [X], {"kernel_shape": (2, 2), "auto_pad": "same"}),
    Use("LpPool", [X], {"kernel_shape": (2, 2), "p": 0}),
    Use("GlobalMaxPool", [floats(2, 6, 0, 3)]),
    Use("GlobalAveragePool", [floats(6)]),
    Use("GlobalLpPool", [X], {"p": -1}),
    Use("MaxUnpool", [X, np.zeros((2, 6, 7, 7), np.int64)], {"kernel_shape": (2, 2)}),
    Use("MaxUnpool", [X, np.zeros((2, 6, 7, 9), np.int64)], {"kernel_shape": (2, 2)}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64)], {"kernel_shape": (2, 0)}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64)], {"kernel_shape": (2, 2), "pads": (9,) * 4}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64), ints(2, 6)], {"kernel_shape": (2, 2)}),
    Use("MaxUnpool", [X, np.zeros(X.shape, np.int64), ints(2, 5, 9, 9)], {"kernel_shape": (2, 2)}),
]
ROIS = np.array([[0, 0, 4, 4], [1, 1, 5, 6]], np.float32)
WRONG_SAMPLES = [
    Use("MaxRoiPool", [X, floats(3, 4)], {"pooled_shape": (2, 2)}),
    Use("MaxRoiPool", [X, floats(5)], {"pooled_shape": (2, 2)}),
    Use("MaxRoiPool", [X, floats(3, 5)], {"pooled_shape": (2,)}),
    Use("MaxRoiPool", [X, floats(3, 5)], {"pooled_shape": (0, 2)}),
    Use("RoiAlign", [X, ROIS, ints(0)]),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"spatial_scale": float("-inf")}),
    Use("Resize", [X, None, np.ones(4, np.float32) * 2], {"antialias": 1}),
    Use("RoiAlign", [X[..., :0], ROIS, ints(0, 0)]),
    Use("RoiAlign", [X, ROIS, ints(0, 1, 1)]),
    Use("RoiAlign", [X, floats(2, 5), ints(0, 1)]),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"output_height": 0}),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"sampling_ratio": HUGE}),
    Use("RoiAlign", [X, ROIS, ints(0, 1)], {"mode": "median"}),
    Use("GridSample", [X, floats(1, 3, 3, 2)]),
    Use("GridSample", [X, floats(2, 3, 3, 3)]),
    Use("GridSample", [X, floats(2, 3, 3, 1)]),
    Use("GridSample", [X, floats(2, 3, 2)]),
    Use("GridSample", [X, floats(2, 3, 3, 2)], {"mode": "fractal"}),
    Use("AffineGrid", [floats(1, 2, 3), ints(2, 1, 4, 5)]),
    Use("AffineGrid", [floats(2, 2, 2), ints(2, 1, 4, 5)]),
    Use("AffineGrid", [floats(2, 3, 4), ints(2, 1, 4, 5)]),
    Use("AffineGrid", [floats(2, 2, 3), ints(2, 1, 4)]),
    Use("AffineGrid", [floats(2, 2, 3), ints(2, 1, -4, 5)]),
    Use("Upsample", [X, floats(3) + 2], version=9),
    Use("Upsample", [X], {"scales": (1.0, 1.0, 0.0, 1.0)}, version=7),
    Use("Upsample", [X], {"scales": (1.0, 1.0)}, version=7),
    Use("Resize", [X, floats(3) + 2], version=10),
    Use("Resize", [X, None, floats(3) + 2]),
    Use("Resize", [X, None, floats(4) - 1]),
    Use("Resize", [X, None, floats(4) + 2, ints(2, 6, 9, 9)]),
    Use("Resize", [X]),
    Use("Resize", [X, None, None, ints(2, 6, 9)]),
    Use("Resize", [X, None, None, ints(9, 9)], {"axes": (2, 2)}),
    Use("Resize", [X, None, None, ints(9, 9)], {"axes": (2, 4)}),
    Use("Resize", [X, floats(4), None, ints(2, 6, 9, 9)],
        {"coordinate_transformation_mode": "tf_crop_and_resize"}),
    Use("Resize", [X, None, None, ints(2, 6, 9, 9)], {"mode": "quintic"}),
    Use("Col2Im", [floats(1, 5, 5), ints(5, 5), ints(1, 6)]),
    Use("Col2Im", [floats(1, 6, 5), ints(5, 5), ints(1, 4)]),
    Use("Col2Im", [floats(1, 4, 11), ints(5, 5), ints(1, 4)]),
    Use("Col2Im", [floats(1, 4, 10), ints(5, 5), ints(4)]),
    Use("Col2Im", [floats(1, 4, 10), ints(5, 5), ints(1, 4)], {"strides": (0, 1)}),
    Use("DepthToSpace", [floats(2, 6, 4, 4)], {"blocksize": 2}),
    Use("DepthToSpace", [floats(2, 8, 4, 4)], {"blocksize": 0}),
    Use("DepthToSpace", [floats(8, 4, 4)], {"blocksize": 2}),
    Use("SpaceToDepth", [floats(2, 6, 4, 5)], {"blocksize": 2}),
    Use("SpaceToDepth", [floats(2, 6, 4, 4)], {"blocksize": -2}),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use", [*WRONG_CONVOLUTIONS, *WRONG_QUANTIZED], ids=lambda use: use.name)
def test_convolutions_refuse_what_does_not_fit(use: Use, device: str) -> None:
    assert_refused(use, device)


@pytest.mark.parametrize("device", DEVICES)
def test_causal_convolutions_refuse_an_input_without_steps(device: str) -> None:
    use = Use("CausalConvWithState", [floats(2, 4, 0), floats(4, 1, 4)])
    assert_refused(use, device, "no elements")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use", WRONG_POOLS, ids=lambda use: use.name)
def test_pools_refuse_what_does_not_fit(use: Use, device: str) -> None:
    assert_refused(use, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use", WRONG_SAMPLES, ids=lambda use: use.name)
def test_sampling_refuses_what_does_not_fit(use: Use, device: str) -> None:
    assert_refused(use, device)


LONG = 2**31 - 1
EXTREME = [
    conv(X, W, strides=(LONG, LONG)),
    conv(X, floats(9, 6, 1, 1), dilations=(LONG, LONG), strides=(2, LONG)),
    conv(X, W, pads=(2**15, 0, 2**15, 0), strides=(LONG, 1)),
    conv(X, W, dilations=(2**15, 1), pads=(2**15, 0, 2**15, 0), strides=(1, 2)),
    conv(X, W, dilations=(50, 40), auto_pad="SAME_UPPER"),
    conv(floats(2, 6, 0, 8), W, pads=(2, 0, 2, 0)),
    conv(floats(2, 0, 7, 8), floats(9, 0, 3, 2), floats(9)),
    conv(X, floats(0, 6, 3, 2)),
    transposed(floats(2, 6, 1, 1), WT, strides=(LONG, LONG)),
    transposed(floats(2, 6, 2, 1), floats(6, 2, 1, 1), strides=(300, 1), dilations=(LONG, LONG)),
    transposed(floats(1, 6, 1, 1), WT, output_padding=(100, 100), strides=(101, 101)),
    transposed(floats(1, 6, 4, 4), floats(6, 1, 2, 2), strides=(100, 100), group=3),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "strides": (LONG, LONG)}),
    Use("MaxPool", [X], {"kernel_shape": (1, 1), "dilations": (LONG, LONG)}),
    Use("MaxPool", [X], {"kernel_shape": (2, 2), "strides": (LONG, 3), "ceil_mode": 1}, outputs=2),
    Use("MaxPool", [bytes_of(2, 6, 7, 8)], {"kernel_shape": (2, 2), "strides": (LONG, LONG)}),
    Use("AveragePool", [X], {"kernel_shape": (3, 3), "strides": (1, LONG), "pads": (1, 1, 1, 1)}),
    Use("AveragePool", [floats(1, 3, 9)], {"kernel_shape": (3,), "strides": (LONG,)}),
    Use("LpPool", [X], {"kernel_shape": (7, 8), "strides": (LONG, LONG)}),
]


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("use", EXTREME, ids=lambda use: use.name)
def test_attributes_may_be_extreme(use: Use, device: str) -> None:
    assert_agree(use, device, 1e-4)


def test_windows_that_read_padding_alone_give_zeros() -> None:
    use = conv(X, W, pads=(LONG // 2, 0, LONG // 2, 0), strides=(LONG, 1))
    (found,) = run(use, "CPU", (1,))
    assert found.size
    assert not found.any()


RIGHT = [
    conv(X, floats(9, 2, 3, 2), floats(9), group=3),
    transposed(X, WT, floats(6), group=2),
    Use("ConvInteger", [bytes_of(2, 6, 7, 8), bytes_of(9, 6, 3, 2), bytes_of(1), bytes_of(9)]),
    Use("DeformConv", [X, W, floats(2, 36, 5, 7), floats(9), floats(2, 18, 5, 7)],
        {"offset_group": 3}),
    Use("RoiAlign", [X, ROIS, ints(1, 0)], {"output_height": 3}),
    Use("Resize", [X, floats(2), None, ints(9, 9)], {"axes": (2, -1), "mode": "linear"}),
    Use("Resize", [X, floats(0), floats(4) + 2], version=11),
    Use("AffineGrid", [floats(2, 2, 3), ints(2, 1, 4, 5)]),
    Use("Col2Im", [floats(1, 4, 10), ints(5, 5), ints(1, 4)]),
    Use("DepthToSpace", [floats(2, 8, 4, 4)], {"blocksize": 2, "mode": "CRD"}),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("use", RIGHT, ids=lambda use: use.name)
def test_what_fits_is_taken(use: Use, device: str) -> None:
    assert_agree(use, device, 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("index", [-1, 2 * 6 * 8 * 9, -HUGE, HUGE])
def test_an_index_of_no_element_is_an_error(index: int, device: str) -> None:
    """One of MaxUnpool never counts from the end; of a weight it is seen with the plan."""
    indices = np.arange(X.size).reshape(X.shape)
    indices[1, 5, 6, 7] = index
    use = Use("MaxUnpool", [X, indices], {"kernel_shape": (2, 2)})
    with pytest.raises(sg.ShapeError, match=f"culprit.*{index}"):
        run(use, device)
    with pytest.raises(sg.ShapeError, match=f"culprit.*{index}"):
        run(use, device, (1,))


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_region_that_is_no_number_stays_inside(device: str) -> None:
    roi = np.array([0, 0, np.nan, np.inf, 1, 1, 1, 1], np.float32)
    mode = {"coordinate_transformation_mode": "tf_crop_and_resize", "extrapolation_value": 0.0}
    for kind in ("nearest", "linear", "cubic"):
        found = run(Use("Resize", [X, roi, None, ints(2, 6, 9, 9)], {**mode, "mode": kind}), device)
        assert not np.any(np.abs(found[0]) > 10)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_residual_of_another_batch_is_broadcast(device: str) -> None:
    """What the graph states in symbols lets them fuse; the sizes at hand do not."""
    dims = ("N", 4, 6, 6)
    x, r = sg.input("x", dims, "float32"), sg.input("r", ("M", 4, 6, 6), "float32")
    w = sg.parameter("w", floats(4, 4, 3, 3))
    node = sg.Node("Conv", [x, w], version=11, attrs={"pads": (1, 1, 1, 1)})
    lie = sg.Node("Identity", [r], version=14)
    lie.outputs[0].type = sg.TensorType("float32", dims)
    total = sg.Node("Add", [node.outputs[0], lie.outputs[0]], version=14)
    y = sg.Node("Relu", list(total.outputs), version=14)
    graph = sg.Graph(inputs=[x, r], outputs=list(y.outputs))
    arrays = [floats(3, 4, 6, 6), floats(1, 4, 6, 6) - 3]
    wanted = sg.compile_model(graph, "REFERENCE")(arrays)[0]
    found = sg.compile_model(graph, device)(arrays)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def of_none(*shape: int) -> Array:
    """Return an image without elements."""
    return np.zeros(shape, np.float32)


NONE = [
    *(Use("Resize", [of_none(*shape), None, floats(4) + 2], {"mode": mode})
      for shape in ((0, 2, 4, 4), (1, 0, 4, 4), (1, 2, 0, 4))
      for mode in ("nearest", "linear", "cubic")),
    Use("Resize", [of_none(0, 2, 4, 4), None, None, ints(7, 8)], {"axes": (2, 3)}),
    Use("Resize", [of_none(0, 2, 4, 4), floats(4) + 2], {"mode": "linear"}, version=10),
    Use("Upsample", [of_none(0, 2, 4, 4), floats(4) + 2], {"mode": "linear"}, version=9),
    transposed(of_none(0, 6, 7, 8), WT, floats(6), group=2),
    transposed(of_none(0, 6, 7, 8), WT, group=2, output_shape=(9, 9)),
    *(Use(op, [of_none(*shape)])
      for op in ("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
      for shape in ((0, 2, 4, 4), (1, 0, 4, 4))),
    *(Use("MaxPool", [of_none(*shape)], {"kernel_shape": (2, 2)}, outputs=2)
      for shape in ((0, 2, 4, 4), (1, 0, 4, 4))),
]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("use", NONE, ids=lambda use: use.name)
def test_no_images_give_no_results(use: Use, device: str) -> None:
    """As ONNX Runtime has it; a batch of 0 is no error."""
    for weights in ((), range(1, len(use.inputs))):
        assert not any(found.size for found in run(use, device, weights))
    assert_agree(use, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "op", [f"Reduce{name}" for name in ("LogSumExp", "LogSum", "Sum", "Max", "L2", "Mean")]
)
def test_axes_that_are_a_scalar_are_one_axis(op: str, device: str) -> None:
    x = floats(2, 3) + 2
    (found,) = run(Use(op, [x, np.array(1, np.int64)]), device)
    np.testing.assert_allclose(found, run(Use(op, [x, ints(1)]), "CPU")[0], rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_no_elements_cannot_be_resized_to_some(device: str) -> None:
    use = Use("Resize", [of_none(0, 2, 4, 4), None, None, ints(1, 2, 7, 8)], {"mode": "linear"})
    with pytest.raises(sg.ShapeError, match="culprit"):
        run(use, device)


def test_filters_of_many_taps_take_no_memory_to_plan() -> None:
    taps = 1 << 22
    x, w = sg.input("x", (1, 1, taps), "float32"), sg.input("w", (1, 1, taps), "float32")
    graph = sg.Graph([x, w], [sg.ops.Conv(x, w)])
    tracemalloc.start()
    model = sg.compile_model(graph, "CPU")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * taps  # bytes; a list of the taps would take more
    [y] = model([np.ones((1, 1, taps), np.float32)] * 2).values()
    assert y.tolist() == [[[taps]]]


def test_maxima_of_padding_alone_have_no_index() -> None:
    x = sg.input("x", ("n", 1, "h", "w"), "float32")
    attrs = {"kernel_shape": (2, 5), "pads": (2, 2, 2, 2)}
    node = sg.Node("MaxPool", [x], outputs=2, version=12, attrs=attrs)
    graph = sg.Graph([x], node.outputs)
    array = np.arange(1, 26, dtype=np.float32).reshape(1, 1, 5, 5)
    wanted, found = (sg.compile_model(graph, device)(x=array) for device in ("REFERENCE", "CPU"))
    for k in range(2):
        np.testing.assert_array_equal(found[k], wanted[k])
