"""Convolutions refuse operands that do not fit."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.requirements import (
    DEVICES,
    Use,
    assert_refused,
    empty,
    floats,
    refused,
    run,
    taken,
)

X = floats(2, 6, 7, 8)
W = floats(9, 6, 3, 2)
WT = floats(6, 3, 3, 2)
HUGE = 2**62
LONG = 2**31 - 1


def conv(*operands: Array | None, **attrs: Any) -> Use:
    return Use("Conv", operands, attrs)


def transposed(*operands: Array | None, **attrs: Any) -> Use:
    return Use("ConvTranspose", operands, attrs)


WRONG = [
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
]
RIGHT = [
    conv(X, floats(9, 2, 3, 2), floats(9), group=3),
    transposed(X, WT, floats(6), group=2),
]
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
]
NONE = [
    transposed(floats(0, 6, 7, 8), WT, floats(6), group=2),
    transposed(floats(0, 6, 7, 8), WT, group=2, output_shape=(9, 9)),
]

test_operands_that_do_not_fit_are_refused = refused(WRONG)


@pytest.mark.parametrize("device", DEVICES)
def test_causal_convolutions_refuse_an_input_without_steps(device: str) -> None:
    use = Use("CausalConvWithState", [floats(2, 4, 0), floats(4, 1, 4)])
    assert_refused(use, device, "no elements")


test_what_fits_is_taken = taken(RIGHT, DEVICES[1:], 1e-4)
test_attributes_may_be_extreme = taken(EXTREME, DEVICES[1:], 1e-4)
test_no_images_give_no_results = empty(NONE)


def test_windows_that_read_padding_alone_give_zeros() -> None:
    use = conv(X, W, pads=(LONG // 2, 0, LONG // 2, 0), strides=(LONG, 1))
    (found,) = run(use, "CPU", (1,))
    assert found.size
    assert not found.any()


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
