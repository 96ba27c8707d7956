"""Operators with attributes that backends translate themselves, against REFERENCE."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.backends import installed
from tests.support.requirements import Use, floats, ints, run

INSTALLED = installed("CUDNN", "ONEDNN", "ONNXRUNTIME", "OPENVINO", "TENSORRT", "TORCH", "TVM")
X, IMAGE, LINE = floats(3, 4, 5), floats(2, 3, 9, 8), floats(2, 4, 11)
FILTERS = floats(6, 3, 3, 2)
SCALES = np.array([1, 1, 0.6, 0.7], np.float32)
BYTES = np.arange(18, dtype=np.uint8).reshape(2, 1, 3, 3)
INDICES = np.array([5, 7, 13, 15]).reshape(1, 1, 2, 2)
INFINITE = np.array([-np.inf, -2, 0, 2, np.inf], np.float32)
ATTENDED = [floats(1, 2, 3, 4), floats(1, 2, 5, 4), floats(1, 2, 5, 6)]
PAST = [floats(1, 2, 2, 4), floats(1, 2, 2, 6)]


def use(op: str, *inputs: Any, version: int = 0, **attrs: Any) -> Use:
    return Use(op, inputs, attrs, version)


USES = [
    use("Conv", IMAGE, FILTERS, floats(6), pads=(1, 0, 1, 0), strides=(2, 1)),
    use("Conv", IMAGE, FILTERS, pads=(2, 0, 1, 1), dilations=(2, 3)),
    use("Conv", IMAGE, floats(6, 1, 3, 3), group=3),
    use("Conv", LINE, floats(2, 4, 3)),
    use("Conv", floats(1, 2, 5, 6, 7), floats(4, 2, 2, 3, 1), strides=(1, 2, 2)),
    use("ConvTranspose", IMAGE, floats(3, 4, 3, 2), floats(4), strides=(2, 3), pads=(1, 0, 1, 0)),
    use("ConvTranspose", IMAGE, floats(3, 4, 3, 4), pads=(1, 0, 0, 2), strides=(2, 2)),
    use("ConvTranspose", IMAGE, floats(3, 2, 2, 2), group=3, output_padding=(1, 0), strides=(2, 1)),
    use("MaxPool", IMAGE, kernel_shape=(3, 2), pads=(1, 1, 1, 1), strides=(2, 2)),
    use("MaxPool", IMAGE, kernel_shape=(3, 2), pads=(0, 1, 2, 0), dilations=(2, 1)),
    use("MaxPool", LINE, kernel_shape=(2,), pads=(1, 1)),
    use("MaxPool", LINE, kernel_shape=(3,), pads=(2, 2)),
    use("AveragePool", IMAGE, kernel_shape=(3, 2), pads=(1, 1, 1, 1), strides=(2, 2)),
    use("AveragePool", IMAGE, kernel_shape=(3, 2), pads=(1, 1, 1, 1), count_include_pad=1),
    use("GlobalAveragePool", IMAGE),
    use("GlobalMaxPool", IMAGE),
    use("GlobalAveragePool", floats(3, 4)),
    use("GlobalMaxPool", floats(3, 4)),
    use("Gemm", floats(4, 3), floats(5, 4), floats(5), transA=1, transB=1, alpha=0.5, beta=2.0),
    use("Gemm", floats(3, 4), floats(4, 5)),
    use("Gemm", np.array([[7, 2]]), np.array([[1], [-3]]), alpha=0.5),
    use("MatMul", floats(2, 1, 3, 4), floats(5, 4, 2)),
    use("MatMul", floats(4), floats(4, 5)),
    use("Softmax", X, version=13, axis=1),
    use("Softmax", X, version=11, axis=1),
    use("Softmax", X, version=11, axis=2),
    use("LogSoftmax", X, version=11, axis=-1),
    *[use(f"{name}max", X, version=v) for name in ("Soft", "LogSoft", "Hard") for v in (1, 11)],
    use("BatchNormalization", IMAGE, *[floats(3) + 2] * 4, version=15, epsilon=0.1),
    use("LayerNormalization", X, floats(4, 5), floats(5), axis=1),
    use("LayerNormalization", X, floats(3, 1, 5), axis=2),
    use("LayerNormalization", X, floats(5), floats(4, 5)),
    use("LayerNormalization", X, floats(1), floats(5)),
    use("LayerNormalization", X, floats(5) + 1, floats(1)),
    use("BatchNormalization", IMAGE, *[floats(3) + 2] * 4),
    use("InstanceNormalization", IMAGE, floats(3), floats(3)),
    use("LRN", IMAGE, size=3, alpha=0.2, beta=0.6),
    use("LRN", IMAGE, size=3, alpha=0.2, beta=0.6, bias=1.5),
    use("LpNormalization", 1e-3 * X, p=1),
    use("LpNormalization", 1e-3 * X, p=2, axis=0),
    use("ReduceMean", X, version=13, axes=(1, -1), keepdims=0),
    use("ReduceMean", X, ints(1)),
    use("ReduceSum", X),
    use("ReduceSum", X, noop_with_empty_axes=1),
    use("ReduceMax", X, ints(0, 2), keepdims=0),
    use("ReduceMin", X, ints(-1)),
    use("ReduceMax", np.full((2, 3), -np.inf, np.float32), ints(-1)),
    use("ReduceMin", np.full((2, 3), np.inf, np.float32)),
    use("ReduceL1", X, ints(1)),
    use("ReduceL1", X, noop_with_empty_axes=1),
    use("ReduceL2", X, ints(1, 2)),
    use("ReduceL2", ints(3, 4, 5)),
    use("ReduceMean", ints(3, 4, 6)),
    use("ReduceSum", np.array([3, -4], np.int32)),
    use("ReduceSumSquare", X, ints(0)),
    use("Reshape", X, ints(0, -1)),
    use("Flatten", X, axis=0),
    use("Flatten", X, axis=-1),
    use("Flatten", X, axis=3),
    use("Squeeze", floats(1, 3, 1), ints(0)),
    use("Squeeze", floats(1, 3, 1)),
    use("Unsqueeze", X, ints(-1, 0)),
    use("Unsqueeze", X, version=11, axes=(4, 1)),
    use("Transpose", X),
    use("Transpose", X, perm=(1, 2, 0)),
    use("Concat", X, X, axis=-1),
    use("Concat", X, X[:0], axis=0),
    use("Concat", X, X, version=1),
    use("Gather", X, np.array([[-1, 0], [2, -3]]), axis=0),
    use("Gather", X, np.array(-2), axis=1),
    use("Gather", floats(4), np.array(-2)),
    use("Clip", X, np.float32(-0.5), np.float32(0.25)),
    use("Clip", X, None, np.float32(0.25)),
    use("Clip", X, version=6, min=-0.25, max=0.5),
    use("Elu", X, alpha=0.7),
    use("LeakyRelu", X, alpha=0.2),
    use("Gelu", X),
    use("Gelu", X, approximate="tanh"),
    use("HardSwish", X),
    use("Mish", X),
    use("Softplus", X),
    use("Selu", X),
    use("Selu", X, alpha=0.125, gamma=0.9),
    use("Round", 4 * X),
    use("Sign", np.array([np.nan, -0.0, 2.0, -np.inf], np.float32)),
    use("Div", X, X + 3),
    use("Div", ints(7, -7, 5), ints(2, 2, -3)),
    use("Pow", X + 2, np.float32(1.5)),
    use("Mod", 1e5 * X, X + 3, fmod=1),
    use("LRN", IMAGE, size=4, alpha=0.1),
    use("Resize", IMAGE, None, np.array([1, 1, 0.6, 0.7], np.float32), nearest_mode="floor"),
    use("Resize", IMAGE, None, np.array([1, 1, 2, 0.5], np.float32)),
    use("Max", X, floats(5), -X),
    use("Expand", floats(3, 1), ints(2, 1, 4)),
    use("Tile", X, ints(2, 1, 3)),
    use("Cast", X, to=1),
    use("Cast", ints(1, 0, -2), to=9),
    use("Where", X > 0, X, -X),
    use(
        "BitShift",
        np.array([-128, -4, 4], np.int8),
        np.array([1, 9, -1], np.int8),
        direction="RIGHT",
    ),
    use("Resize", IMAGE, None, SCALES, mode="linear"),
    use("Resize", IMAGE, None, SCALES, mode="linear", antialias=1),
    use("Resize", IMAGE, None, SCALES, mode="cubic", exclude_outside=1),
    *[
        use(
            "Resize", IMAGE, None, *sizes, mode=mode, coordinate_transformation_mode="align_corners"
        )
        for mode in ("linear", "cubic")
        for sizes in ((SCALES,), (None, ints(2, 3, 6, 4)))
    ],
    *[use("MaxPool", LINE, kernel_shape=(k,), strides=(k,), ceil_mode=1) for k in (2, 3, 4)],
    use("MaxPool", floats(1, 1, 2, 2), kernel_shape=(1, 1), strides=(2, 2), ceil_mode=1),
    *[
        use("GRU", floats(3, 2, 4), floats(1, 9, 4), floats(1, 9, 3), hidden_size=3, layout=k)
        for k in (0, 1)
    ],
    use("LSTM", floats(3, 2, 4), floats(1, 12, 4), floats(1, 12, 3), hidden_size=3),
    use(
        "LSTM",
        floats(3, 2, 4),
        floats(1, 12, 4),
        floats(1, 12, 3),
        *[None] * 4,
        floats(1, 9),
        hidden_size=3,
    ),
    use("DFT", floats(1, 10, 2), version=17),
    use("Range", np.array([0]), np.array([3]), np.array([1])),
    use("ReduceMax", np.zeros((2, 0), bool), ints(1)),
    use("ConvInteger", BYTES, BYTES[:, :, :2, :2], np.uint8(1), np.array([1, 2], np.uint8)),
    use("ConvInteger", BYTES, BYTES[:, :, :2, :2], np.uint8(1), np.uint8(2)),
    use(
        "MaxUnpool",
        floats(1, 1, 2, 2),
        INDICES,
        ints(1, 1, 5, 5),
        kernel_shape=(2, 2),
        strides=(2, 2),
    ),
    use("MaxUnpool", floats(1, 1, 2, 2), INDICES, kernel_shape=(2, 2), strides=(2, 2)),
    use("Shrink", INFINITE),
    use("ThresholdedRelu", INFINITE),
    *[use(name, X) for name in ("Dropout", "Identity", "Max", "Mean", "Min", "Sum")],
    *[use(name, floats(1)[0]) for name in ("Exp", "Identity", "ReduceSum", "Transpose")],
    use("Reshape", floats(1), ints()),
    use("Squeeze", floats(1, 1)),
    use("Unsqueeze", floats(1)[0], ints(0)),
    *[use("Attention", *ATTENDED, is_causal=k, version=24) for k in (0, 1)],
    *[use("Attention", *ATTENDED, None, *PAST, is_causal=k) for k in (0, 1)],
    use("Attention", *ATTENDED, floats(3, 4), version=24),
    use("Attention", *ATTENDED, is_causal=1, left_window_size=1),
    use("Attention", *ATTENDED, left_window_size=0, right_window_size=1),
]


@pytest.mark.parametrize("device", INSTALLED)
@pytest.mark.parametrize("case", USES, ids=lambda case: case.name)
def test_operators_agree(device: str, case: Use) -> None:
    """A form that the library does not take is refused with a reason, not computed otherwise."""
    weights = range(1, len(case.inputs))
    [wanted] = run(case, "REFERENCE", weights)
    [found] = run(case, f"HETERO:{device},REFERENCE", weights, RUNTIME_FALLBACK=False)
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def graph_of(case: Use) -> sg.Graph:
    """Return a graph of a case with the first operand as its input, and the others as weights."""
    first = case.inputs[0]
    assert first is not None
    x = sg.input("x", first.shape, first.dtype.name)
    rest = [None if a is None else sg.parameter(f"w{k}", a) for k, a in enumerate(case.inputs[1:])]
    made = sg.Node(case.op, [x, *rest], version=case.version, attrs=case.attrs)
    return sg.Graph([x], made.outputs, "use")


@pytest.mark.parametrize("device", INSTALLED)
def test_most_forms_are_taken(device: str) -> None:
    taken = 0
    for case in USES:
        taken += len(sg.query_model(graph_of(case), device)) > 0
    least = {
        "CUDNN": 30,
        "ONEDNN": 35,
        "ONNXRUNTIME": 90,
        "OPENVINO": 60,
        "TENSORRT": 65,
        "TORCH": 65,
        "TVM": 25,
    }
    assert taken >= least[device]


@pytest.mark.parametrize("device", INSTALLED)
@pytest.mark.parametrize("op", ["Exp", "Sigmoid", "Softplus"])
def test_small_results_are_exact(device: str, op: str) -> None:
    case = use(op, np.linspace(-40, -4, 100, dtype=np.float32))
    [wanted] = run(case, "REFERENCE")
    [found] = run(case, f"HETERO:{device},REFERENCE", RUNTIME_FALLBACK=False)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("device", INSTALLED)
def test_regions_pass_inputs_through(device: str) -> None:
    """The outputs of a region may be its inputs, in another order, and more than once."""
    x, y = (sg.input(name, (2, 3), "float32") for name in "xy")
    outputs = [ops.Dropout(y), ops.Sum(x), ops.Abs(y), ops.Identity(y), ops.Max(y)]
    compiled = sg.compile_model(sg.Graph([x, y], outputs), f"HETERO:{device},REFERENCE")
    for a in (floats(2, 3), floats(2, 3) + 3):
        found = compiled([a, -a])
        for k, wanted in enumerate((-a, a, abs(a), -a, -a)):
            np.testing.assert_array_equal(found[k], wanted)


@pytest.mark.parametrize("device", INSTALLED)
def test_sizes_that_the_library_does_not_know(device: str) -> None:
    """The size of the result is declared, and follows from elements of an input."""
    array, counts = floats(2, 3, 4, 5), ints(7, 6, 4, 2)
    x, repeats = sg.input("x", array.shape, "float32"), sg.input("repeats", (4,), "int64")
    y = ops.Tile(x, repeats)
    y.type = sg.TensorType("float32", (14, 18, 16, 10))
    compiled = sg.compile_model(sg.Graph([x, repeats], [y]), f"HETERO:{device},REFERENCE")
    np.testing.assert_array_equal(compiled([array, counts])[0], np.tile(array, counts))
