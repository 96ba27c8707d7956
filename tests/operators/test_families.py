"""Small models of every family: no operator falls back to REFERENCE; results as ONNX Runtime's."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.graph import Value
from subgraph.graph.types import Array

_rng = np.random.default_rng(0)


def _weight(*shape: int) -> Array:
    return (_rng.standard_normal(shape) * 0.3).astype(np.float32)


def _linear(x: Value, inner: int, outer: int) -> Value:
    return ops.Add(ops.MatMul(x, _weight(inner, outer)), _weight(outer))


def _norm(x: Value, size: int) -> Value:
    made = ops.LayerNormalization(x, np.ones(size, np.float32), _weight(size))
    return made[0] if isinstance(made, tuple) else made


def _heads(x: Value, heads: int, size: int) -> Value:
    split = ops.Reshape(x, np.array([0, 0, heads, size]))
    return ops.Transpose(split, perm=[0, 2, 1, 3])


def _block(x: Value, past: tuple[Value, Value] | None = None) -> tuple[Value, Value, Value]:
    """A transformer block of 2 heads of 8, with a cache of keys and values or without."""
    y = _norm(x, 16)
    q, k, v = (_heads(_linear(y, 16, 16), 2, 8) for _ in range(3))
    if past is not None:
        k, v = ops.Concat(past[0], k, axis=2), ops.Concat(past[1], v, axis=2)
    scores = ops.Div(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), np.float32(8**0.5))
    mixed = ops.Transpose(ops.MatMul(ops.Softmax(scores, axis=-1), v), perm=[0, 2, 1, 3])
    x = ops.Add(x, _linear(ops.Reshape(mixed, np.array([0, 0, 16])), 16, 16))
    wide = ops.Gelu(_linear(_norm(x, 16), 16, 32), approximate="tanh")
    return ops.Add(x, _linear(wide, 32, 16)), k, v


def _gpt() -> sg.Graph:
    ids, place = sg.input("ids", (1, 1), "int64"), sg.input("place", (1, 1), "int64")
    past = [sg.input(f"past{k}", (1, 2, "T", 8)) for k in range(2)]
    x = ops.Add(ops.Gather(_weight(50, 16), ids), ops.Gather(_weight(64, 16), place))
    x, k, v = _block(x, (past[0], past[1]))
    return sg.Graph([ids, place, *past], [_linear(x, 16, 50), k, v])


def _vision() -> sg.Graph:
    x = sg.input("x", (2, 3, 16, 16))
    patches = ops.Conv(x, _weight(16, 3, 4, 4), _weight(16), strides=[4, 4])
    rows = ops.Transpose(ops.Reshape(patches, np.array([0, 16, -1])), perm=[0, 2, 1])
    whole = ops.Expand(_weight(1, 1, 16), np.array([2, 1, 16]))
    y = _block(ops.Add(ops.Concat(whole, rows, axis=1), _weight(1, 17, 16)))[0]
    return sg.Graph([x], [_linear(ops.Gather(_norm(y, 16), np.int64(0), axis=1), 16, 10)])


def _residual(x: Value, time: Value, channels: int) -> Value:
    """A block of a diffusion model."""
    ones = np.ones(channels, np.float32)
    y = ops.GroupNormalization(x, ones, _weight(channels), num_groups=4)
    y = ops.Conv(ops.Mul(y, ops.Sigmoid(y)), _weight(channels, channels, 3, 3), pads=[1] * 4)
    shift = ops.Unsqueeze(_linear(ops.Mul(time, ops.Sigmoid(time)), 8, channels), np.array([2, 3]))
    return ops.Add(x, ops.Add(y, shift))


def _unet() -> sg.Graph:
    x, step = sg.input("x", (1, 4, 16, 16)), sg.input("step", (1, 1))
    angle = ops.Mul(step, _weight(1, 4))
    time = _linear(ops.Concat(ops.Sin(angle), ops.Cos(angle), axis=1), 8, 8)
    a = _residual(ops.Conv(x, _weight(8, 4, 3, 3), pads=[1] * 4), time, 8)
    b = _residual(ops.MaxPool(a, kernel_shape=[2, 2], strides=[2, 2], outputs=1), time, 8)
    up = ops.Resize(b, None, np.array([1, 1, 2, 2], np.float32), mode="nearest")
    turned = ops.ConvTranspose(b, _weight(8, 8, 2, 2), strides=[2, 2])
    both = ops.Concat(up, turned, a, axis=1)
    return sg.Graph([x, step], [ops.Conv(both, _weight(4, 24, 3, 3), pads=[1] * 4)])


def _recurrent() -> sg.Graph:
    ids = sg.input("ids", (5, 2), "int64")
    x = ops.Gather(_weight(20, 6), ids)
    lstm = ops.LSTM(
        x,
        *(_weight(2, 16, 6), _weight(2, 16, 4), _weight(2, 32)),
        hidden_size=4,
        direction="bidirectional",
        outputs=1,
    )
    y = ops.Reshape(ops.Transpose(lstm, perm=[0, 2, 1, 3]), np.array([0, 0, 8]))
    gates = _weight(1, 12, 8), _weight(1, 12, 4), _weight(1, 24)
    gru = ops.GRU(y, *gates, hidden_size=4, linear_before_reset=1, outputs=1)
    return sg.Graph([ids], [_linear(ops.Squeeze(gru, np.array([1])), 4, 3)])


def _detector() -> sg.Graph:
    """Boxes and scores, the best of each class kept, their features pooled and scattered."""
    image = sg.input("image", (1, 3, 32, 32))
    features = ops.Relu(ops.Conv(image, _weight(8, 3, 3, 3), strides=[4, 4], pads=[1] * 4))
    flat = ops.Transpose(ops.Reshape(features, np.array([1, 8, 64])), perm=[0, 2, 1])
    scores = ops.Transpose(ops.Sigmoid(_linear(flat, 8, 3)), perm=[0, 2, 1])
    corners = ops.Mul(ops.Sigmoid(_linear(flat, 8, 4)), np.float32(32))
    kept = ops.NonMaxSuppression(
        corners, scores, np.array([5]), np.array([0.6], np.float32), np.array([0.1], np.float32)
    )
    picks = ops.Gather(kept, np.array([0, 2]), axis=1)
    boxes = ops.GatherND(corners, picks)
    images = ops.Reshape(ops.Slice(kept, [0], [1], [1]), np.array([-1]))
    pooled = ops.RoiAlign(
        features,
        boxes,
        images,
        output_height=2,
        output_width=2,
        spatial_scale=0.25,
        sampling_ratio=2,
    )
    best, places = ops.TopK(ops.Reshape(scores, np.array([1, -1])), np.array([6]))
    marks = ops.ScatterND(
        ops.ConstantOfShape(np.array([192])),
        ops.Unsqueeze(ops.Reshape(places, np.array([-1])), np.array([1])),
        ops.Reshape(best, np.array([-1])),
    )
    taken = ops.NonZero(ops.Greater(marks, np.float32(0)))
    return sg.Graph([image], [kept, pooled, marks, taken])


def _speech() -> sg.Graph:
    x = sg.input("x", (1, 800))
    window = np.hanning(65)[:64].astype(np.float32)
    wave = ops.Unsqueeze(x, np.array([2]))
    spectrum = ops.STFT(wave, np.int64(32), window, None, onesided=1)
    power = ops.ReduceSumSquare(spectrum, np.array([3]), keepdims=0)
    mel = ops.MatMul(power, np.abs(_weight(33, 20)))
    log = ops.Transpose(ops.Log(ops.Clip(mel, np.float32(1e-6))), perm=[0, 2, 1])
    y = ops.Gelu(ops.Conv(log, _weight(16, 20, 3), pads=[1, 1], strides=[2]))
    return sg.Graph([x], [_block(ops.Transpose(y, perm=[0, 2, 1]))[0]])


FAMILIES: dict[str, Callable[[], sg.Graph]] = {
    "gpt": _gpt,
    "vision": _vision,
    "unet": _unet,
    "recurrent": _recurrent,
    "detector": _detector,
    "speech": _speech,
}


def _feeds(graph: sg.Graph) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    found: dict[str, Array] = {}
    for value in graph.inputs:
        assert isinstance(value.type, sg.TensorType)
        shape = [dim if isinstance(dim, int) else 5 for dim in value.type.shape or ()]
        whole = value.type.dtype == "int64"
        array = rng.integers(0, 20, shape) if whole else rng.standard_normal(shape)
        found[value.name] = array.astype(value.type.dtype)
    return found


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_family_needs_no_reference(name: str, device: str) -> None:
    if "OPENCL" in device and "OPENCL" not in sg.default_core().available_devices:
        pytest.skip("OPENCL cannot start here")
    graph = FAMILIES[name]()
    query = sg.default_core().query_model(graph, device)
    assert {node.name for node in graph.nodes} == set(query), query
    feeds = _feeds(graph)
    content = sg.to_onnx(graph).SerializeToString()
    expected = ort.InferenceSession(content).run(None, feeds)
    request = sg.compile_model(graph, device, {"ENABLE_PROFILING": True}).create_infer_request()
    results = request.infer(feeds)
    assert {entry.device for entry in request.profile()} == {device}
    assert "reference" not in {entry.kernel for entry in request.profile()}
    for k, wanted in enumerate(expected):
        np.testing.assert_allclose(results[k], wanted, rtol=2e-3, atol=2e-4)
