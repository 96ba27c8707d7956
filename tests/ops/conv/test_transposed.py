"""Transposed convolutions to few channels: their phases or taps are channels of one convolution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from onnx import helper

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.operands import Layout
from subgraph.graph.types import Array
from subgraph.ops.conv import transpose_cpu as conv_transpose_cpu
from subgraph.ops.shared.tile_planning import tiles
from tests.support.conv import close, transposed
from tests.support.kernels import run_node
from tests.support.requirements import DEVICES, Use, floats, run


@pytest.mark.parametrize("mode", ["SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("kernel", [(3, 1), (1, 1), (2, 3)])
@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_auto_pad_gives_the_sizes_of_onnx_runtime(
    mode: str, kernel: tuple[int, int], extra: int, device: str
) -> None:
    x = np.arange(9, dtype=np.float32).reshape(1, 1, 3, 3)
    w = np.arange(1, 2 * math.prod(kernel) + 1, dtype=np.float32).reshape(1, 2, *kernel)
    node = helper.make_node(
        "ConvTranspose",
        ["x", "w"],
        ["y"],
        auto_pad=mode,
        strides=[2, 2],
        output_padding=[extra] * 2,
    )
    ports = [helper.make_tensor_value_info(n, 1, a.shape) for n, a in (("x", x), ("w", w))]
    graph = helper.make_graph([node], "g", ports, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    [wanted] = session.run(None, {"x": x, "w": w})
    np.testing.assert_array_equal(sg.compile_model(sg.load(model), device)([x, w])[0], wanted)


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "OPENCL"])
@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("wanted", [(5, 5), (2, 1), (9, 4), (20, 2), (3, 2, 5, 3)])
def test_output_shape_smaller_than_the_input(
    wanted: tuple[int, ...], batch: int, device: str
) -> None:
    x = np.random.default_rng(0).standard_normal((batch, 3, 9, 4), np.float32)
    w = np.random.default_rng(1).standard_normal((3, 2, 3, 2), np.float32)
    ports = [sg.input(name, a.shape, "float32") for name, a in (("x", x), ("w", w))]
    attrs = {"strides": [2, 1], "output_padding": [1, 0], "output_shape": wanted}
    whole = sg.Graph(ports, [sg.Node("ConvTranspose", ports, attrs=attrs, version=11).outputs[0]])
    graph = sg.passes.apply_pass(whole, "InferTypes")
    assert graph.outputs[0].type == sg.TensorType("float32", (batch, 2, *wanted[-2:]))
    model = sg.to_onnx(graph)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    [sizes] = [a for a in model.graph.node[0].attribute if a.name == "output_shape"]
    sizes.ints[:] = wanted[-2:]  # ONNX Runtime takes no sizes of batch and channels
    [expected] = onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"x": x, "w": w})
    compiled = sg.compile_model(graph, device, {"RUNTIME_FALLBACK": False})
    np.testing.assert_allclose(compiled([x, w])[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "OPENCL"])
@pytest.mark.parametrize("op", ["Conv", "ConvInteger", "ConvTranspose"])
def test_empty_lists_count_as_left_out(op: str, device: str) -> None:
    dtype = np.dtype(np.uint8 if op == "ConvInteger" else np.float32)
    arrays = [np.arange(n).astype(dtype).reshape(s) for n, s in ((28, (1, 4, 7)), (48, (4, 4, 3)))]
    ports = [
        sg.input(name, array.shape, dtype.name) for name, array in zip("xw", arrays, strict=True)
    ]
    results: list[Array] = []
    empty: dict[str, Any] = dict.fromkeys(("strides", "dilations", "pads", "kernel_shape"), ())
    for attrs in (None, empty):
        node = sg.Node(op, ports, attrs=attrs, version=10 if op == "ConvInteger" else 11)
        results.append(sg.compile_model(sg.Graph(ports, node.outputs), device)(arrays)[0])
    np.testing.assert_array_equal(results[0], results[1])


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
    dilation=st.integers(0, 3),
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
    dilation=0,
)
def test_phases_or_sums_of_taps(
    axes: list[tuple[int, ...]],
    images: int,
    inputs: int,
    outputs: int,
    with_bias: bool,
    layouts: tuple[Layout, Layout],
    threads: int,
    cuts: list[float],
    dilation: int,
) -> None:
    spread = dilation > 0
    dilation = 1 if len(axes) == 3 else max(1, dilation)  # dilated volumes are refused
    source, kernel, strides, before, after, extra = (list(each) for each in zip(*axes, strict=True))
    out = [
        (n - 1) * s + (k - 1) * dilation + 1 - b - a + min(e, s - 1)
        for n, k, s, b, a, e in zip(source, kernel, strides, before, after, extra, strict=True)
    ]
    assume(min(out) > 0)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((images, inputs, *source)).astype(np.float32)
    w = rng.standard_normal((inputs, outputs, *kernel)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32) if with_bias else None
    rank = len(axes)
    wanted = transposed(x, w, strides, [dilation] * rank, before, out, 1)
    wanted += 0 if bias is None else bias.reshape(-1, *[1] * rank)

    def run(threads: int, cuts: list[float]) -> Array:
        return run_node(
            "ConvTranspose",
            [x, w, bias],
            [wanted.shape],
            {
                "strides": tuple(strides),
                "pads": (*before, *after),
                "dilations": (dilation,) * rank,
            },
            constant=[1, 2],
            blocked=[0] if layouts[0] == "blocked" else [],
            out_layout=layouts[1],
            threads=threads,
            cuts=cuts,
        )[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv_transpose_cpu, "_sums_taps", lambda *_, **_options: spread)
        got = run(threads, cuts)
        assert np.array_equal(got, run(1, []))
    close(got, wanted)


def test_form_that_multiplies_least() -> None:
    of = tiles("float32")
    if of.lanes < 8:
        pytest.skip("a vector has no room for the phases")

    def form(outputs: int, kernel: int, stride: int) -> str:
        pad = (kernel - stride) // 2
        sizes = conv_transpose_cpu.Geometry(
            1, 1, 64, outputs, (1, 9, 9), (1, 9 * stride, 9 * stride), (1, kernel, kernel),
            (1, stride, stride), (1, 1, 1), (0, pad, pad),
        )  # fmt: skip
        per_axis = [
            conv_transpose_cpu.phases(
                sizes.target[i], sizes.kernel[i], sizes.strides[i], 1, sizes.pads[i]
            )
            for i in range(3)
        ]
        sums_taps = conv_transpose_cpu._sums_taps(of, sizes, per_axis, plain=False)
        return "taps" if sums_taps else "phases"

    assert form(3, 2, 2) == "taps"
    assert form(3, 4, 2) == "taps"
    assert form(1, 3, 1) == "taps"
    assert form(32, 4, 2) == "phases"


def test_many_taps_and_positions_on_the_reference() -> None:
    # One step for each pair of a tap and a position would take minutes.
    sizes = (3, 8, 8, 8)
    x = np.random.default_rng(0).standard_normal((1, 1, *sizes)).astype(np.float32)
    value = sg.input("x", x.shape)
    graph = sg.Graph([value], [ops.ConvTranspose(value, sg.parameter("w", x))])
    got = sg.compile_model(graph, "REFERENCE")(x)[0]
    padded = [2 * size - 1 for size in sizes]
    spectrum = np.fft.fftn(x[0, 0].astype(np.float64), padded, axes=range(4))
    expected = np.fft.ifftn(spectrum * spectrum).real
    np.testing.assert_allclose(got[0, 0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["strides", "dilations", "pads"])
@pytest.mark.parametrize("version", [1, 22])
def test_an_empty_list_of_a_transposed_convolution_counts_as_left_out(
    version: int, name: str, device: str
) -> None:
    operands = [floats(1, 1, 2), np.ones((1, 1, 2), np.float32)]
    [found] = run(Use("ConvTranspose", operands, {name: ()}, version), device)
    np.testing.assert_array_equal(found, np.array([[[-1, 0, 1]]], np.float32))
