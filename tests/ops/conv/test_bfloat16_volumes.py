"""Convolutions of volumes over matrix tiles of bfloat16, against NumPy in float64.

Where the processor has no matrix tiles, they are emulated.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.conv import reference

pytestmark = pytest.mark.usefixtures("tiles")
# Where products are dot products, Winograd's algorithm in float32 is often faster.
OPTION = {"INFERENCE_PRECISION": "bfloat16", "WINOGRAD": False}
TRIPLES = st.tuples(*[st.integers(1, 3)] * 3)


def _rounded(array: Array) -> Array:
    return array.astype(ml_dtypes.bfloat16).astype(np.float64)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    kernel=TRIPLES,
    strides=st.tuples(*[st.integers(1, 2)] * 3),
    dilations=st.tuples(*[st.integers(1, 2)] * 3),
    pads=st.tuples(*[st.integers(0, 2)] * 3),
    groups=st.sampled_from([1, 1, 2]),
    act=st.sampled_from(["", "Relu", "Gelu", "residual"]),
)
def test_random_volumes(
    data: st.DataObject,
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
    groups: int,
    act: str,
) -> None:
    inputs = data.draw(st.sampled_from([5, 16, 20, 48, 64] if groups == 1 else [16, 32]))
    outputs = data.draw(st.sampled_from([8, 16, 40, 64] if groups == 1 else [16, 32]))
    sizes = [data.draw(st.integers(1, most)) for most in (6, 9, 37)]
    for size, taps, dilation, pad in zip(sizes, kernel, dilations, pads, strict=True):
        assume((taps - 1) * dilation < size + 2 * pad)
    rng = np.random.default_rng(sum(sizes))
    shape = (2, inputs * groups, *sizes)
    array = rng.standard_normal(shape).astype(np.float32)
    weight = rng.standard_normal((outputs * groups, inputs, *kernel)).astype(np.float32)
    bias = rng.standard_normal(outputs * groups).astype(np.float32)
    x = sg.input("x", shape)
    y = ops.Conv(
        x, sg.parameter("w", weight), sg.parameter("b", bias), strides=strides,
        dilations=dilations, pads=[*pads, *pads], group=groups,
    )  # fmt: skip
    wanted = reference(_rounded(array), _rounded(weight), strides, dilations, pads * 2, groups)
    wanted += bias.reshape(-1, 1, 1, 1)
    if act == "residual":
        other = rng.standard_normal(wanted.shape).astype(np.float32)
        y, wanted = ops.Add(y, sg.parameter("r", other)), wanted + other
    elif act:
        y = getattr(ops, act)(y)
        wanted = sg.compile_model(_of(act, wanted.shape), "REFERENCE")([wanted])[0]
    graph = sg.Graph([x], [y])
    one, two = (
        sg.compile_model(graph, "CPU", {**OPTION, "INFERENCE_NUM_THREADS": threads})([array])[0]
        for threads in (1, 2)
    )
    scale = np.abs(wanted).max() + 1
    np.testing.assert_allclose(one, wanted, rtol=0, atol=1e-5 * scale * inputs)
    np.testing.assert_array_equal(one, two)


def _of(op_type: str, shape: tuple[int, ...]) -> sg.Graph:
    x = sg.input("x", shape, "float64")
    return sg.Graph([x], [getattr(ops, op_type)(x)])


def test_rows_of_volumes_are_copied_once() -> None:
    """Not for each of 27 taps."""
    x = sg.input("x", (1, 32, 24, 24, 24))
    weight = sg.parameter("w", np.ones((32, 32, 3, 3, 3), np.float32))
    graph = sg.Graph([x], [ops.Conv(x, weight, pads=[1] * 6)])
    model = sg.compile_model(graph, "CPU", {**OPTION, "ENABLE_PROFILING": True})
    request = model.create_infer_request()
    result = np.array(request.infer([np.ones((1, 32, 24, 24, 24), np.float32)])[0])
    np.testing.assert_array_equal(result[:, :, 1:-1, 1:-1, 1:-1], 32 * 27)
    lines = next(each for each in request.profile() if ".lines(" in each.kernel)
    # With their padding, of 4 bytes that are read and 2 that are written, in blocks of 32 channels.
    assert lines.bytes == 6 * 32 * 26**3
