"""The reference against ONNX Runtime: operators that onnx.reference lacks or gets wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx.reference
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.protobuf import type_to_proto
from subgraph.tools import backend

pytestmark = pytest.mark.filterwarnings("ignore")


def _f(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(np.float32)


def _model(
    op_type: str,
    inputs: Sequence[Array | None],
    version: int,
    outputs: int = 1,
    domain: str = "",
    **attrs: Any,
) -> tuple[onnx.ModelProto, list[Array]]:
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(inputs)]
    made = [f"o{k}" for k in range(outputs)]
    node = onnx.helper.make_node(op_type, names, made, domain=domain, **attrs)
    graph = onnx.GraphProto(name="g")
    graph.node.append(node)
    given = [v for v in inputs if v is not None]
    for name, value in zip([n for n in names if n], given, strict=True):
        proto = type_to_proto(TensorType(dtype_of(value), value.shape))
        graph.input.add(name=name).type.CopyFrom(proto)
    for name in made:
        graph.output.add(name=name)
    opsets = [onnx.helper.make_opsetid(domain, version)]
    if domain:
        opsets.append(onnx.helper.make_opsetid("", 18))
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), given


def _compare(
    op_type: str,
    inputs: Sequence[Array | None],
    version: int,
    outputs: int = 1,
    tolerance: float = 1e-5,
    **attrs: Any,
) -> None:
    model, given = _model(op_type, inputs, version, outputs, **attrs)
    ours = backend.run_model(model, given, "REFERENCE")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [item.name for item in session.get_inputs()]
    theirs = session.run(None, dict(zip(names, given, strict=True)))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, list):
            assert [{k: pytest.approx(v) for k, v in m.items()} for m in other] == list(mine)
            continue
        assert mine.shape == other.shape
        if other.dtype.kind == "O":
            assert mine.tolist() == other.tolist()
            continue
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


# --- pools -------------------------------------------------------------------------------------


@given(
    op_type=st.sampled_from(["MaxPool", "AveragePool", "LpPool"]),
    rank=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    pads=st.sampled_from([0, 1, "SAME_UPPER", "SAME_LOWER", "VALID"]),
    ceil=st.booleans(),
    include=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_pools(
    op_type: str, rank: int, kernel: int, stride: int, pads: Any, ceil: bool, include: bool
) -> None:
    if pads == 1 and kernel == 1:
        pads = 0
    if isinstance(pads, str) and stride > kernel:
        pads = 0  # ONNX Runtime refuses it
    attrs: dict[str, Any] = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank}
    if isinstance(pads, str):
        attrs["auto_pad"] = pads
    else:
        attrs["pads"] = [pads] * (2 * rank)
    if op_type != "LpPool" and not isinstance(pads, str):
        attrs["ceil_mode"] = int(ceil)
    if op_type == "AveragePool":
        attrs["count_include_pad"] = int(include)
    x = _f(2, 3, *[6, 5, 7][:rank])
    _compare(op_type, [x], 11, **attrs)


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("op_type", ["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"])
def test_global_pools(op_type: str, rank: int) -> None:
    _compare(op_type, [_f(2, 3, *[4, 5, 6][:rank])], 11)


def test_max_roi_pool() -> None:
    x = _f(2, 3, 9, 11)
    rois = np.array([[0, 0, 0, 8, 8], [1, 2, 3, 6, 5], [0, 4, 4, 4, 4], [1, 1.6, 0.4, 9.5, 7]], "f")
    _compare("MaxRoiPool", [x, rois], 9, pooled_shape=[3, 2])
    _compare(
        "MaxRoiPool",
        [x, rois * np.array([1, 2, 2, 2, 2], "f")],
        9,
        pooled_shape=[2, 4],
        spatial_scale=0.5,
    )


@pytest.mark.parametrize("version", [10, 16])
@pytest.mark.parametrize("ratio", [0, 2])
def test_roi_align_of_every_opset(version: int, ratio: int) -> None:
    regions = np.array([[0.0, 0.5, 5.0, 6.0], [1.0, 2.0, 7.5, 8.0]], np.float32)
    inputs = [_f(1, 2, 9, 11), regions, np.array([0, 0])]
    _compare("RoiAlign", inputs, version, sampling_ratio=ratio, output_height=3, output_width=2)


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_sampling_without_end_is_refused(device: str) -> None:
    inputs = [_f(1, 2, 9, 11), np.ones((1, 4), np.float32), np.array([0])]
    model, given = _model("RoiAlign", inputs, 16, sampling_ratio=1 << 30)
    with pytest.raises(sg.ShapeError, match="sampling_ratio"):
        backend.run_model(model, given, device)


# --- recurrent networks ------------------------------------------------------------------------

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_NAMED = {
    "RNN": ["Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "HardSigmoid"],
    # Gates without bound (Elu, Softplus) grow what runtimes round differently beyond any tolerance.
    "GRU": ["Sigmoid", "HardSigmoid", "Softsign"],
    "LSTM": ["Sigmoid", "HardSigmoid", "Softsign", "ScaledTanh"],
}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_recurrent_networks(data: st.DataObject) -> None:
    op_type = data.draw(st.sampled_from(["RNN", "GRU", "LSTM"]))
    direction = data.draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    layout = data.draw(st.sampled_from([0]))  # ONNX Runtime has layout 0 only
    steps, batch, features, hidden = 4, 3, 2, 5
    directions = 2 if direction == "bidirectional" else 1
    gates = _GATES[op_type]
    x = _f(steps, batch, features)
    w = _f(directions, gates * hidden, features, seed=1)
    r = _f(directions, gates * hidden, hidden, seed=2)
    b = _f(directions, 2 * gates * hidden, seed=3) if data.draw(st.booleans()) else None
    lengths = np.array([4, 2, 1], np.int32) if data.draw(st.booleans()) else None
    h = _f(directions, batch, hidden, seed=4) if data.draw(st.booleans()) else None
    inputs: list[Array | None] = [x, w, r, b, lengths, h]
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if op_type == "LSTM":
        inputs.append(_f(directions, batch, hidden, seed=5) if data.draw(st.booleans()) else None)
        inputs.append(_f(directions, 3 * hidden, seed=6) if data.draw(st.booleans()) else None)
        attrs["input_forget"] = int(data.draw(st.booleans()))
    if op_type == "GRU":
        attrs["linear_before_reset"] = int(data.draw(st.booleans()))
    if data.draw(st.booleans()):
        first = data.draw(st.sampled_from(_NAMED[op_type]))
        names = {"RNN": [first], "GRU": [first, "Tanh"], "LSTM": [first, "Tanh", "Tanh"]}[op_type]
        attrs["activations"] = names * directions
        if first in ("Affine", "HardSigmoid", "ScaledTanh"):
            attrs["activation_alpha"], attrs["activation_beta"] = (
                [0.5] * directions,
                [0.1] * directions,
            )
        if first in ("LeakyRelu", "ThresholdedRelu"):
            attrs["activation_alpha"] = [0.3] * directions
    while inputs[-1] is None:
        inputs.pop()
    del layout
    _compare(op_type, inputs, 14, outputs=3 if op_type == "LSTM" else 2, tolerance=1e-4, **attrs)


# --- softmax, normalization, resize, pad -------------------------------------------------------


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("version", [1, 11, 13])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_softmax_of_every_opset(op_type: str, version: int, axis: int | None) -> None:
    if version < 11 and axis is not None and axis < 0:
        return
    _compare(op_type, [_f(2, 3, 4)], max(version, 7), **({} if axis is None else {"axis": axis}))


@pytest.mark.parametrize("version", [7, 9, 14, 15])
def test_batch_normalization_infers(version: int) -> None:
    inputs = [_f(2, 3, 4), _f(3), _f(3, seed=1), _f(3, seed=2), np.abs(_f(3, seed=3))]
    _compare("BatchNormalization", inputs, version, epsilon=0.01)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
@pytest.mark.parametrize("version", [7, 9, 10])
@pytest.mark.parametrize("scales", [(1, 1, 2, 3), (1, 1, 1.7, 2.3)])
def test_upsample_and_the_first_resize(mode: str, version: int, scales: tuple[float, ...]) -> None:
    x, factors = _f(1, 2, 3, 4), np.array(scales, np.float32)
    if version == 7:
        _compare("Upsample", [x], 7, mode=mode, scales=[float(s) for s in scales])
    else:
        _compare("Upsample" if version == 9 else "Resize", [x, factors], version, mode=mode)


@pytest.mark.parametrize(("size", "scale"), [(10, 0.7), (20, 0.35), (30, 0.1), (7, 1.6), (15, 2.2)])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
@pytest.mark.parametrize("axes", [None, [3]])
def test_sizes_are_products_of_floats(
    mode: str, size: int, scale: float, axes: list[int] | None
) -> None:
    scales = np.array([scale] if axes else [1, 1, 1, scale], np.float32)
    attrs: dict[str, Any] = {"axes": axes} if axes else {}
    _compare("Resize", [_f(1, 1, 1, size), None, scales], 18, mode=mode, **attrs)


@pytest.mark.parametrize("size", [10, 20])
def test_sizes_of_the_first_resize(size: int) -> None:
    scales = np.array([1, 1, 1, 0.7 if size == 10 else 0.35], np.float32)
    _compare("Resize", [_f(1, 1, 2, size), scales], 10, mode="linear")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_scale_for_each_filter(rank: int, groups: int, bias: bool) -> None:
    rng = np.random.default_rng(rank)
    x = rng.integers(0, 256, (2, 3, *(5, 6, 4)[:rank])).astype(np.uint8)
    weight = rng.integers(-60, 61, (6, 3 // groups, *(2, 3, 1)[:rank])).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, 6).astype(np.float32)
    inputs: list[Any] = [x, np.float32(0.03), np.uint8(121), weight, scales]
    inputs += [np.zeros(6, np.int8), np.float32(0.2), np.uint8(90)]
    inputs += [rng.integers(-2000, 2000, 6).astype(np.int32)] if bias else []
    _compare(
        "QLinearConv",
        [np.asarray(v) for v in inputs],
        10,
        group=groups,
        strides=[2, *[1] * (rank - 1)],
    )


@given(
    mode=st.sampled_from(["constant", "edge", "reflect", "wrap"]),
    pads=st.lists(st.integers(-1, 2), min_size=4, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_pad(mode: str, pads: list[int]) -> None:
    if mode != "constant" and min(pads) < 0:
        pads = [max(p, 0) for p in pads]
    _compare("Pad", [_f(4, 5), np.array(pads), np.array(1.5, np.float32)], 19, mode=mode)


def test_pad_of_some_axes_and_of_old_opsets() -> None:
    _compare("Pad", [_f(2, 3, 4), np.array([1, 2]), None, np.array([-2])], 18)
    _compare("Pad", [_f(2, 3)], 7, pads=[0, 1, 2, 0], value=3.0)


@pytest.mark.parametrize("version", [2, 11, 13, 18])
def test_split(version: int) -> None:
    parts: dict[str, Any] = {2: {"split": [1, 3]}, 11: {"split": [3, 1]}}.get(version, {})
    inputs: list[Array | None] = [_f(2, 4)]
    if version >= 13:
        inputs.append(np.array([1, 3]))
    _compare("Split", inputs, version, outputs=2, axis=1, **parts)
    if version == 18:
        _compare("Split", [_f(2, 7)], 18, outputs=3, axis=1, num_outputs=3)


@pytest.mark.parametrize("start", [None, 0, 1, -1, -4, 5])
@pytest.mark.parametrize("end", [None, 0, 2, -1, -4, 7])
def test_a_part_of_a_shape(start: int | None, end: int | None) -> None:
    bounds = {"start": start, "end": end}
    given = {key: bound for key, bound in bounds.items() if bound is not None}
    _compare("Shape", [_f(2, 3, 4)], 15, **given)


def test_scatter_is_scatter_elements() -> None:
    indices = np.array([[1, 0, 2], [0, 2, 1]])
    _compare("Scatter", [np.zeros((3, 3), np.float32), indices, _f(2, 3)], 10, axis=0)


# --- ai.onnx.ml --------------------------------------------------------------------------------


def _ml(
    op_type: str, inputs: Sequence[Array], version: int = 3, outputs: int = 1, **attrs: Any
) -> None:
    _compare(op_type, inputs, version, outputs, domain="ai.onnx.ml", **attrs)


def test_ml_maps_and_labels() -> None:
    words = np.array([["cat", "dog"], ["cow", "cat"]], object)
    pairs: dict[str, Any] = {"cats_strings": ["cat", "dog"], "cats_int64s": [3, 5]}
    _ml("CategoryMapper", [words], 1, default_int64=-7, **pairs)
    _ml("CategoryMapper", [np.array([[3, 4], [5, 3]])], 1, default_string="none", **pairs)
    _ml("LabelEncoder", [words], 1, classes_strings=["cat", "dog"], default_int64=-2)
    _ml("LabelEncoder", [np.array([1, 0, 4])], 1, classes_strings=["a", "b"], default_string="?")
    _ml(
        "LabelEncoder",
        [words],
        2,
        keys_strings=["cat", "cow"],
        values_floats=[0.5, 1.5],
        default_float=9.0,
    )
    # The standard wants NaN to find NaN; ONNX Runtime gives the default.
    keys = np.array([1.0, np.nan, 2.0], np.float32)
    found = _ours(
        "LabelEncoder",
        [keys],
        2,
        domain="ai.onnx.ml",
        keys_floats=[1.0, np.nan],
        values_strings=["one", "nan"],
        default_string="?",
    )
    assert found.tolist() == ["one", "nan", "?"]
    _ml("LabelEncoder", [np.array([7, 8, 7])], 2, keys_int64s=[7], values_int64s=[70])
    _ml("ZipMap", [_f(2, 2)], 1, classlabels_strings=["a", "b"])
    _ml("ZipMap", [_f(3, 2)], 1, classlabels_int64s=[10, 20])


def test_ml_numbers() -> None:
    x = _f(3, 4)
    _ml("Scaler", [x], 1, offset=[1.0, 2.0, 3.0, 4.0], scale=[0.5] * 4)
    for norm in ("MAX", "L1", "L2"):
        _ml("Normalizer", [np.abs(x)], 1, norm=norm)
    for transform in ("NONE", "LOGISTIC", "SOFTMAX"):
        _ml(
            "LinearRegressor",
            [x],
            1,
            coefficients=_f(8).tolist(),
            intercepts=[0.5, -1.0],
            targets=2,
            post_transform=transform,
        )
    _ml("LinearRegressor", [x], 1, coefficients=_f(4).tolist())
    _ml("Binarizer", [x], 1, threshold=0.5)


# --- what the reference adds for old opsets, that ONNX Runtime does not have ---------------------


def _ours(op_type: str, inputs: Sequence[Array], version: int, **attrs: Any) -> Any:
    model, given = _model(op_type, inputs, version, **attrs)
    return backend.run_model(model, given, "REFERENCE")[0]


def test_the_first_opsets_broadcast_when_asked() -> None:
    a, b = _f(2, 3, 4), _f(3, seed=1)
    np.testing.assert_array_equal(_ours("Add", [a, b], 6, broadcast=1, axis=1), a + b[:, None])
    np.testing.assert_array_equal(_ours("Mul", [a, _f(4)], 1, broadcast=1), a * _f(4))
    np.testing.assert_array_equal(_ours("Greater", [a, b], 6, broadcast=1, axis=-2), a > b[:, None])
    with pytest.raises(sg.ShapeError, match="broadcast is 0"):
        _ours("Add", [a, b], 6)


def test_attributes_that_became_inputs() -> None:
    x = _f(2, 6)
    assert _ours("Reshape", [x], 1, shape=[3, -1]).shape == (3, 4)
    np.testing.assert_array_equal(_ours("Cast", [x], 1, to="INT32"), x.astype(np.int32))
    np.testing.assert_array_equal(_ours("Clip", [x], 6, min=-1.0, max=1.0), x.clip(-1, 1))
    np.testing.assert_array_equal(
        _ours("Pad", [x], 1, paddings=[0, 1, 0, 1]), np.pad(x, ((0, 0), (1, 1)))
    )
    np.testing.assert_array_equal(_ours("Slice", [x], 1, starts=[1], ends=[5], axes=[1]), x[:, 1:5])
    np.testing.assert_array_equal(_ours("Concat", [x, x], 1), np.concatenate([x, x], 1))
    np.testing.assert_array_equal(
        _ours("Tile", [x, np.array(2.0, "f"), np.array(1.0, "f")], 1), np.tile(x, (1, 2))
    )
    np.testing.assert_allclose(
        _ours("LpPool", [x[None]], 1, p=2.0, kernel_shape=[2]).shape, (1, 2, 5)
    )


def test_dropout_of_every_opset_keeps_the_input() -> None:
    x = _f(2, 3)
    for version, attrs in ((1, {"is_test": 1}), (6, {"is_test": 1}), (7, {}), (10, {}), (13, {})):
        np.testing.assert_array_equal(_ours("Dropout", [x], version, **attrs), x)


def test_erf_is_as_precise_as_its_dtype() -> None:
    from math import erf

    x = np.linspace(-3, 3, 41)
    np.testing.assert_allclose(_ours("Erf", [x], 13), [erf(v) for v in x], rtol=1e-14)


def _gram_pool(draw: st.DrawFn, vocabulary: Sequence[Any]) -> tuple[list[Any], list[int], int]:
    """Return a pool of distinct n-grams, where each length begins in it, and how many there are."""
    pool: list[Any] = []
    starts: list[int] = []
    number = 0
    for size in range(1, draw(st.integers(1, 3)) + 1):
        starts.append(len(pool))
        word = st.sampled_from(vocabulary)
        grams = st.lists(st.tuples(*[word] * size), min_size=1, max_size=4, unique=True)
        for gram in draw(grams):
            pool += gram
            number += 1
    return pool, starts, number


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_n_grams_are_counted_as_onnx_reference_counts_them(data: st.DataObject) -> None:
    strings = data.draw(st.booleans())
    vocabulary: list[Any] = ["a", "b", "", "da"] if strings else [0, 1, 2, -7]
    pool, starts, number = data.draw(st.composite(_gram_pool)(vocabulary))
    least = data.draw(st.integers(1, len(starts)))
    shape = data.draw(st.sampled_from([(7,), (3, 5), (1, 1), (0,), (2, 0)]))
    count = int(np.prod(shape))
    words = data.draw(st.lists(st.sampled_from(vocabulary), min_size=count, max_size=count))
    x = np.array(words, dtype=object if strings else np.int64).reshape(shape)
    attributes: dict[str, Any] = {
        "mode": data.draw(st.sampled_from(["TF", "IDF", "TFIDF"])),
        "min_gram_length": least,
        "max_gram_length": data.draw(st.integers(least, len(starts))),
        "max_skip_count": data.draw(st.integers(0, 3)),
        "ngram_counts": starts,
        "ngram_indexes": data.draw(st.permutations(range(number))),
        # onnx.reference asks how many there are, which may be none.
        "weights": data.draw(
            st.lists(st.floats(-2, 2, width=32), min_size=number, max_size=number)
        ),
        "pool_strings" if strings else "pool_int64s": pool,
    }
    model, given_inputs = _model("TfIdfVectorizer", [x], 9, **attributes)
    want: Any = onnx.reference.ReferenceEvaluator(model).run(None, {"i0": x})
    got = sg.compile_model(sg.load(model), "REFERENCE")(given_inputs)[0]
    assert (got.shape, got.dtype) == (want[0].shape, want[0].dtype)
    np.testing.assert_allclose(got, want[0], rtol=1e-6)


@pytest.mark.parametrize("auto_pad", ["NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_dilated_filter_sees_its_own_points_alone(rank: int, auto_pad: str) -> None:
    """NaN and Inf between its points do not count; compared with ONNX Runtime."""
    rng = np.random.default_rng(rank)
    array = rng.standard_normal((2, 4, 9, 8, 7)[: 2 + rank]).astype(np.float32)
    array.ravel()[:: 17 * rank**2], array.ravel()[5 :: 31 * rank**2] = np.nan, np.inf
    x = sg.input("x", array.shape)
    w = sg.parameter("w", rng.standard_normal((6, 2, 3, 2, 3)[: 2 + rank]).astype(np.float32))
    b = sg.parameter("b", rng.standard_normal(6).astype(np.float32))
    attributes: dict[str, Any] = {"dilations": [2, 3, 2][:rank], "strides": [2, 1, 2][:rank]}
    pads: dict[str, Any] = {}
    if auto_pad == "NOTSET":
        pads = {"pads": [1, 2, 0, 2, 0, 3][: 2 * rank]}
    padded: dict[str, Any] = pads or {"auto_pad": auto_pad}
    if auto_pad.startswith("SAME"):  # ONNX Runtime does not take it with dilations
        around = [
            (math.ceil(size / stride) - 1) * stride + (taps - 1) * dilation + 1 - size
            for size, stride, taps, dilation in zip(
                (9, 8, 7), (2, 1, 2), (3, 2, 3), (2, 3, 2), strict=True
            )
        ]
        less, more = [n // 2 for n in around[:rank]], [n - n // 2 for n in around[:rank]]
        pads = {"pads": less + more if auto_pad == "SAME_UPPER" else more + less}
    graph = sg.Graph([x], [sg.ops.Conv(x, w, b, group=2, **attributes, **padded)], "dilated")
    explicit = sg.Graph(
        [x], [sg.ops.Conv(x, w, b, group=2, **attributes, **(pads or padded))], "explicit"
    )
    session = ort.InferenceSession(sg.to_onnx(explicit).SerializeToString())
    (want,) = session.run(None, {"x": array})
    got = sg.compile_model(graph, "REFERENCE")(array)[0]
    assert np.isnan(want).any()
    assert np.isfinite(want).any()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_products_of_integers_have_every_digit(dtype: str, device: str) -> None:
    """onnx.reference multiplies them by a float alpha, so that digits above 2**53 are lost."""
    rng, limits = np.random.default_rng(0), np.iinfo(dtype)
    arrays = [
        rng.integers(limits.min, limits.max, shape, dtype) for shape in ((3, 4), (4, 5), (5,))
    ]
    inputs = [sg.input(f"x{k}", array.shape, dtype) for k, array in enumerate(arrays)]
    graph = sg.Graph(inputs, [sg.ops.Gemm(*inputs), sg.ops.Gemm(*inputs[:2])])
    found = sg.compile_model(graph, device)(*arrays)
    a, b, c = arrays
    np.testing.assert_array_equal(found[0], a @ b + c)
    np.testing.assert_array_equal(found[1], a @ b)


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_means_and_norms_of_integers_whose_sums_exceed_the_dtype(device: str) -> None:
    data = np.array([[2_000_000_000, 2_000_000_001, 1_999_999_999], [6, -3, 6]], np.int32)
    x = sg.input("x", data.shape, "int32")
    graph = sg.Graph([x], [sg.ops.ReduceMean(x, [1]), sg.ops.ReduceL2(x, [1])])
    found = sg.compile_model(graph, device)(data)
    assert found[0].tolist() == [[2_000_000_000], [3]]
    assert found[1][1].tolist() == [9]
    squares = np.array([[6, 3, 6], [60_000, 30_000, 60_000]], np.int32)
    assert sg.compile_model(graph, device)(squares)[1].tolist() == [[9], [90_000]]
