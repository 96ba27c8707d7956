"""Small graphs that need the kernels of common model families, for `subgraph warmup` without model.

A kernel depends on dtypes, attributes and the machine, hardly ever on sizes, so that a few small
graphs represent many models. Each function builds the graph of one family.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import TensorType

Activation = Callable[[Any], Any]


class _Weights:
    """Makes parameters with distinct names, all elements equal."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *shape: int, value: float = 0.01, dtype: str = "float32") -> Value:
        self.count += 1
        return sg.parameter(f"w{self.count}", np.full(shape, value, dtype))


def _shape(value: Value) -> tuple[int, ...]:
    """Return the shape of a value, which is static."""
    assert isinstance(value.type, TensorType)
    return value.type.sizes


def _silu(x: Any) -> Any:
    return ops.Mul(x, ops.Sigmoid(x))


def _gelu(x: Any) -> Any:
    halves = ops.Mul(x, np.float32(0.5))
    return ops.Mul(halves, ops.Add(ops.Erf(ops.Div(x, np.float32(2**0.5))), np.float32(1)))


# Activations for which mobile networks need kernels that no other family needs.
ACTIVATIONS: dict[str, Activation] = {
    "HardSwish": ops.HardSwish,
    "LeakyRelu": ops.LeakyRelu,
    "Sigmoid": ops.Sigmoid,
}


def _padded(x: Any, w: Value, stride: int = 1, group: int = 1, dilation: int = 1) -> Any:
    """Return a convolution with same padding: it preserves the image's size if its stride is 1."""
    taps = _shape(w)[2:]
    pads = [(tap - 1) * dilation // 2 for tap in taps] * 2
    strides, dilations = [stride] * len(taps), [dilation] * len(taps)
    return ops.Conv(x, w, group=group, strides=strides, pads=pads, dilations=dilations)


def _dense() -> Graph:
    w, x = _Weights(), sg.input("image", (1, 3, 112, 112))
    h = ops.Relu(ops.Conv(x, w(64, 3, 7, 7), w(64), strides=[2, 2], pads=[3] * 4))
    outputs = [ops.Relu(_padded(x, w(32, 3, 3, 3), stride)) for stride in (1, 2)]
    outputs += [ops.Conv(x, w(32, 3, 7, 7), strides=[4, 4], pads=[3] * 4)]  # patches
    h = ops.MaxPool(h, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for width, stride in ((64, 1), (128, 2), (256, 2)):
        before = _shape(h)[1]
        short = ops.Conv(h, w(width, before, 1, 1), strides=[stride] * 2)
        narrow = ops.Relu(ops.Conv(h, w(64, before, 1, 1), w(64)))
        wide = ops.Relu(_padded(narrow, w(64, 64, 3, 3), stride))
        h = ops.Relu(ops.Add(ops.Conv(wide, w(width, 64, 1, 1)), short))
        h = ops.Relu(_padded(h, w(width, width, 3, 3)))
    h = ops.Concat(h, _padded(h, w(96, 8, 3, 3), group=32), axis=1)
    h = ops.AveragePool(h, kernel_shape=[2, 2], strides=[2, 2])
    h = ops.Flatten(ops.GlobalAveragePool(ops.LRN(h, size=5)))
    outputs.append(ops.Softmax(ops.Gemm(h, w(352, 10), w(10))))
    return Graph([x], outputs)


def _strided() -> Graph:
    w, x = _Weights(), sg.input("image", (1, 64, 28, 28))
    outputs = [_padded(x, w(48, 64, 1, 1), 2), _padded(x, w(48, 64, 5, 5))]
    outputs += [_padded(x, w(64, 64, 3, 3), dilation=2), _padded(x, w(64, 4, 3, 3), group=16)]
    outputs += [_padded(x, w(64, 4, 3, 3), 2, group=16), _padded(x, w(64, 64, 1, 7))]
    outputs += [ops.Conv(x, w(48, 64, 11, 11), strides=[4, 4], pads=[2] * 4)]
    outputs += [ops.Mul(w(64, 1, 1), x), ops.Add(x, w(64, 1, 1))]
    outputs += [ops.Add(ops.Mul(w(64, 1, 1), x), x)]
    for kind in (ops.MaxPool, ops.AveragePool):
        outputs += [
            kind(x, kernel_shape=[3, 3], strides=[stride] * 2, pads=[1] * 4) for stride in (1, 2)
        ]
        outputs += [kind(x, kernel_shape=[2, 2], strides=[stride] * 2) for stride in (1, 2)]
    return Graph([x], outputs)


def _stems() -> Graph:
    """Return first convolutions of networks: one and three channels, usual filter sizes."""
    w, grey, image = _Weights(), sg.input("grey", (1, 1, 28, 28)), sg.input("image", (1, 3, 64, 64))
    outputs = [
        ops.Relu(_padded(x, w(32, channels, taps, taps), stride))
        for x, channels in ((grey, 1), (image, 3))
        for taps in (3, 5, 7)
        for stride in (1, 2)
    ]
    outputs += [
        ops.Relu(ops.Conv(image, w(64, 3, taps, taps), strides=[4] * 2)) for taps in (4, 8, 11)
    ]
    return Graph([grey, image], outputs)


def _narrow() -> Graph:
    """Return convolutions whose channels are multiples of 8, not 16, as in ShuffleNet."""
    w, x = _Weights(), sg.input("image", (1, 3, 64, 64))
    h = ops.Relu(_padded(x, w(24, 3, 3, 3), 2))
    h = ops.MaxPool(h, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    short = ops.AveragePool(h, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stride in (2, 1):
        inner = ops.Relu(ops.Conv(h, w(24, _shape(h)[1] // 4, 1, 1), group=4))
        grouped = ops.Reshape(inner, np.array([1, 4, 6, *_shape(inner)[2:]]))
        mixed = ops.Reshape(ops.Transpose(grouped, perm=[0, 2, 1, 3, 4]), np.array(_shape(inner)))
        h = ops.Conv(_padded(mixed, w(24, 1, 3, 3), stride, group=24), w(24, 6, 1, 1), group=4)
        h = ops.Relu(ops.Concat(short, h, axis=1)) if stride == 2 else ops.Relu(h)
    return Graph([x], [ops.Flatten(ops.GlobalAveragePool(h))])


def _mobile(activation: Activation) -> Graph:
    w, x = _Weights(), sg.input("image", (1, 3, 64, 64))
    h = activation(_padded(x, w(32, 3, 3, 3), 2))
    h = activation(_padded(h, w(64, 32, 3, 3)))
    for taps in (3, 5, 7):
        for stride in (1, 2):
            width = _shape(h)[1]
            wide = activation(ops.Conv(h, w(96, width, 1, 1), w(96)))
            deep = activation(_padded(wide, w(96, 1, taps, taps), stride, group=96))
            scale = activation(ops.Conv(ops.GlobalAveragePool(deep), w(24, 96, 1, 1), w(24)))
            gate = ops.HardSigmoid if activation is ops.HardSwish else ops.Sigmoid
            deep = ops.Mul(deep, gate(ops.Conv(scale, w(96, 24, 1, 1), w(96))))
            after = ops.Conv(deep, w(64, 96, 1, 1), w(64))
            h = ops.Add(h, after) if stride == 1 else after
    h = ops.Flatten(ops.GlobalAveragePool(activation(h)))
    return Graph([x], [ops.Gemm(activation(ops.Gemm(h, w(64, 48), w(48))), w(48, 10), w(10))])


def _one_and_three_dimensions() -> Graph:
    w, x = _Weights(), sg.input("sound", (1, 1, 512))
    h = _gelu(ops.Conv(x, w(32, 1, 10), strides=[5]))
    h = ops.Relu(_padded(h, w(32, 32, 3), 2))
    h = ops.MaxPool(_padded(h, w(32, 2, 9), group=16), kernel_shape=[2], strides=[2])
    h = _padded(h, w(32, 1, 9), group=32)
    speech = sg.input("speech", (1, 512, 64))
    deep = [_padded(speech, w(512, 512, 3), stride) for stride in (1, 2)]
    video = sg.input("video", (1, 3, 8, 16, 16))
    v = ops.Relu(_padded(video, w(16, 3, 3, 3, 3)))
    v = ops.GlobalAveragePool(ops.Relu(_padded(v, w(32, 16, 3, 3, 3), 2)))
    h = ops.ConvTranspose(h, w(32, 16, 4), strides=[2])
    return Graph([x, speech, video], [h, *deep, v])


def _upsampling() -> Graph:
    w, x = _Weights(), sg.input("image", (1, 64, 16, 16))
    grown = ops.ConvTranspose(x, w(64, 32, 2, 2), strides=[2, 2])
    scales = np.array([1, 1, 2, 2], np.float32)
    # Plain images, and images in blocks of which one begins in the middle of a block.
    joined = ops.Concat(*(_padded(x, w(24, 64, 1, 1)) for _ in range(2)), axis=1)
    near = (
        ops.Resize(v, None, scales, coordinate_transformation_mode="asymmetric")
        for v in (x, joined)
    )
    smooth = (ops.Resize(v, None, scales, mode="linear") for v in (x, joined))
    h = ops.Relu(_padded(ops.Concat(grown, *near, *smooth, axis=1), w(16, 256, 3, 3)))
    heads = [_padded(h, w(1, 16, taps, taps)) for taps in (1, 3, 7)]
    padded = ops.Pad(x, [0, 0, 1, 1, 0, 0, 1, 1])
    return Graph([x], [h, *heads, ops.DepthToSpace(x, blocksize=2), padded])


def _norms() -> Graph:
    w, x = _Weights(), sg.input("image", (1, 32, 16, 16))
    outputs = [ops.BatchNormalization(x, *(w(32, value=1) for _ in range(4)))]
    outputs += [ops.Relu(ops.BatchNormalization(x, *(w(32, value=1) for _ in range(4))))]
    outputs += [ops.InstanceNormalization(x, w(32), w(32))]
    outputs += [ops.GroupNormalization(x, w(32), w(32), num_groups=8)]
    # Torch's group norms: scale and shift follow as operators of their own.
    outputs += [_silu(ops.Add(ops.Mul(x, w(32, 1, 1)), w(32, 1, 1)))]
    rows = ops.Transpose(x, perm=[0, 2, 3, 1])
    outputs += [ops.LayerNormalization(rows, w(32), w(32)), ops.RMSNormalization(rows, w(32))]
    outputs += [ops.Softmax(rows), ops.LogSoftmax(rows)]
    return Graph([x], outputs)


def _split_heads(x: Any, w: _Weights, heads: int) -> Any:
    width = _shape(x)[2]
    flat = ops.Add(ops.MatMul(x, w(width, width)), w(width))
    split = ops.Reshape(flat, np.array([1, -1, heads, width // heads], np.int64))
    return ops.Transpose(split, perm=[0, 2, 1, 3])


def _attention(q: Any, k: Any, v: Any, w: _Weights, mask: Any = None) -> Any:
    scores = ops.Mul(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), np.float32(0.25))
    scores = scores if mask is None else ops.Add(scores, mask)
    width = _shape(q)[1] * _shape(q)[3]
    joined = ops.Transpose(ops.MatMul(ops.Softmax(scores), v), perm=[0, 2, 1, 3])
    return ops.MatMul(ops.Reshape(joined, np.array([1, -1, width], np.int64)), w(width, width))


def _encoder(width: int = 64) -> Graph:
    w, x = _Weights(), sg.input("x", (1, 16, width))
    mask = sg.input("mask", (1, 1, 1, 16))
    h: Any = x
    kinds: list[tuple[Activation, Any]] = [(_gelu, mask), (ops.Gelu, None), (ops.Relu, None)]
    kinds.append((partial(ops.Gelu, approximate="tanh"), None))
    for activation, hidden in kinds:
        q, k, v = (_split_heads(h, w, 4) for _ in range(3))
        mixed = _attention(q, k, v, w, hidden)
        h = ops.LayerNormalization(ops.Add(h, mixed), w(width), w(width))
        inner = activation(ops.Add(ops.MatMul(h, w(width, 256)), w(256)))
        h = ops.Add(h, ops.Add(ops.MatMul(inner, w(256, width)), w(width)))
        h = ops.LayerNormalization(h, w(width), w(width))
    pooled = ops.Tanh(ops.Gemm(ops.ReduceMean(h, [1], keepdims=0), w(64, 8)))
    chances = ops.Softmax(ops.MatMul(x, ops.Transpose(h, perm=[0, 2, 1])))
    safe = ops.Where(ops.IsNaN(chances), np.float32(0), chances)
    rows = sg.input("rows", (1, 4, 196, 64))
    wide = ops.MatMul(rows, ops.Reshape(rows, np.array([1, 4, 64, 196])))
    return Graph([x, mask, rows], [pooled, ops.MatMul(safe, h), wide])


def _decoder(width: int = 64, heads: int = 4) -> Graph:
    w, x = _Weights(), sg.input("x", (1, 1, width))
    past = [sg.input(name, (1, heads, 8, width // heads)) for name in ("keys", "values")]
    h = ops.RMSNormalization(x, w(width))
    q, k, v = (_split_heads(h, w, heads) for _ in range(3))
    angles = ops.Range(np.float32(0), np.float32(width // heads), np.float32(1))
    low, high = ops.Split(k, num_outputs=2, axis=-1)
    rotated = ops.Concat(ops.Neg(high), low, axis=-1)
    k = ops.Add(ops.Mul(k, ops.Cos(angles)), ops.Mul(rotated, ops.Sin(angles)))
    keys, values = ops.Concat(past[0], k, axis=2), ops.Concat(past[1], v, axis=2)
    h = ops.Add(x, _attention(q, keys, values, w))
    h = ops.RMSNormalization(h, w(width))
    inner = ops.Mul(_silu(ops.MatMul(h, w(width, 128))), ops.MatMul(h, w(width, 128)))
    h = ops.Add(h, ops.MatMul(inner, w(128, width)))
    return Graph([x, *past], [ops.MatMul(h, w(width, 1000)), keys, values])


def _indices() -> Graph:
    w, ids = _Weights(), sg.input("ids", (1, 16), "int64")
    allowed = sg.input("allowed", (1, 16), "int64")
    x = ops.Add(ops.Gather(w(100, 32), ids), ops.Gather(w(100, 32), allowed))
    seen = ops.Cast(ops.Unsqueeze(allowed, [1, 2]), to="bool")
    causal = np.tril(np.ones((16, 16), bool))
    visible = ops.And(seen, causal)
    zero, least = np.float32(0), np.float32(-3e38)
    hidden = ops.Mul(ops.Sub(np.float32(1), ops.Cast(allowed, to="float32")), least)
    padding, true = np.int64(1), np.array(True)
    is_token = ops.Cast(ops.Not(ops.Equal(ids, padding)), to="int32")
    positions = ops.Mul(ops.CumSum(is_token, np.int64(1)), is_token)
    outputs = [ops.Where(ops.And(true, seen), zero, least), ops.Gather(seen, ids, axis=3)]
    outputs += [ops.GatherND(seen, np.zeros((1, 16, 4), np.int64)), ops.And(true, visible)]
    outputs += [ops.Where(ops.Equal(ids, padding), np.int64(0), ids)]
    outputs += [
        x,
        ops.Where(visible, zero, least),
        hidden,
        ops.Add(ops.Cast(positions, to="int64"), 1),
    ]
    outputs += [ops.Cast(ids, to=to) for to in ("int32", "float32", "bool")]
    outputs += [ops.Greater(ids, padding), ops.Less(ids, padding), ops.Mul(ids, allowed)]
    outputs += [ops.CumSum(ids, np.int64(1)), ops.GatherElements(ids, allowed, axis=1)]
    outputs += [ops.Gather(ids, allowed, axis=1)]
    experts = ops.Gather(w(4, 48, 32), ops.Reshape(ids, [-1]))
    outputs += [ops.MatMul(experts, ops.Reshape(x, [-1, 32, 1]))]
    outputs += [ops.ArgMax(x, axis=-1), *ops.TopK(x, np.array([4], np.int64))]
    return Graph([ids, allowed], outputs)


def _recurrent() -> Graph:
    w, x = _Weights(), sg.input("x", (8, 2, 32))
    forward = ops.LSTM(x, w(1, 128, 32), w(1, 128, 32), w(1, 256), hidden_size=32)[0]
    options: dict[str, Any] = {"hidden_size": 32, "direction": "bidirectional"}
    both = ops.LSTM(x, w(2, 128, 32), w(2, 128, 32), w(2, 256), **options)[0]
    gates = ops.GRU(x, w(2, 96, 32), w(2, 96, 32), w(2, 192), linear_before_reset=1, **options)[0]
    return Graph([x], [forward, both, gates])


def _loops() -> Graph:
    """Return a Loop whose number of iterations is an input, so that it cannot be unrolled."""
    count, x = sg.input("count", (), "int64"), sg.input("x", (1, 32))
    number, condition = sg.input("number", (), "int64"), sg.input("condition", (), "bool")
    state = sg.input("state", (1, 32))
    stepped = ops.Add(ops.Tanh(state), ops.Cast(number, to="float32"))
    body = Graph([number, condition, state], [ops.Identity(condition), stepped, ops.Relu(state)])
    return Graph([count, x], list(ops.Loop(ops.Add(count, 1), None, x, body=body)))


def _perceptron() -> Graph:
    w, x = _Weights(), sg.input("x", (1, 16))
    h = ops.Tanh(ops.Gemm(ops.Relu(ops.Gemm(x, w(16, 32), w(32))), w(32, 32), w(32)))
    return Graph([x], [ops.Sigmoid(ops.Gemm(h, w(32, 4), w(4)))])


_BINARY = ("Add", "Sub", "Mul", "Div", "Max", "Min", "Pow")
_UNARY = (
    "Sin",
    "Cos",
    "Sqrt",
    "Exp",
    "Log",
    "Neg",
    "Abs",
    "Reciprocal",
    "Erf",
    "Tanh",
    "Sigmoid",
    "Relu",
)


def _elementwise() -> Graph:
    a, b, c, d = (sg.input(name, (1, 4, 32)) for name in "abcd")
    row, column = sg.input("row", (32,)), sg.input("column", (1, 4, 1))
    outputs: list[Value] = [getattr(ops, name)(a) for name in _UNARY]
    for name in _BINARY:
        function = getattr(ops, name)
        outputs += [function(a, b), function(a, np.float32(2)), function(a, column)]
        outputs += [function(a, row), function(row, a)]
    outputs += [_silu(a), _gelu(a), ops.Gelu(a, approximate="tanh"), ops.Where(ops.IsNaN(a), b, a)]
    outputs += [ops.Div(np.float32(1), a), ops.Sub(np.float32(1), a)]
    outputs += [ops.Add(ops.Mul(a, row), row), ops.Add(ops.Mul(a, column), b)]
    outputs += [ops.Mul(ops.Sigmoid(a), b), ops.Add(ops.Add(a, b), row)]
    outputs += [ops.Add(ops.Mul(a, np.float32(2)), b)]
    outputs += [ops.Mul(column, a), ops.Add(ops.Mul(column, a), b), ops.Add(ops.Mul(row, a), b)]
    outputs += [ops.Add(ops.Relu(a), b), ops.Mul(ops.Relu(a), b)]
    outputs += [ops.Relu(ops.Add(ops.Add(a, b), c)), ops.Add(ops.Add(a, b), c)]
    outputs += [
        ops.Add(ops.Mul(a, b), ops.Mul(c, d)),
        ops.Add(ops.Mul(a, b), c),
    ]  # as in rotary embeddings
    scaled = ops.Mul(a, np.float32(2))
    outputs += [ops.Add(b, scaled), ops.Relu(ops.Add(scaled, b))]
    outputs += [ops.Where(ops.Greater(a, b), a, b), ops.Expand(column, np.array([1, 4, 32]))]
    two, one = np.float32(2), np.float32(1)
    outputs += [ops.Div(ops.Sub(a, one), two), ops.Greater(a, two), ops.Mul(ops.Gelu(a), b)]
    outputs += [ops.Gelu(ops.Add(ops.Mul(a, two), one)), ops.Expand(a, np.array([2, 4, 32]))]
    outputs += [ops.Slice(a, np.array([0]), np.array([32]), np.array([2]), np.array([2]))]
    return Graph([a, b, c, d, row, column], outputs)


def _reductions() -> Graph:
    x = sg.input("x", (4, 8, 32))
    names = ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL2")
    return Graph([x], [getattr(ops, name)(x, [axis]) for name in names for axis in (1, 2)])


def _quantized(dtype: str) -> Graph:
    """Return convolutions and a product between QuantizeLinear and DequantizeLinear."""
    w, x = _Weights(), sg.input("image", (1, 3, 32, 32))
    scale, zero = np.float32(0.05), np.array(0, dtype)

    def steps(value: Any) -> Any:
        return ops.DequantizeLinear(ops.QuantizeLinear(value, scale, zero), scale, zero)

    def weight(*shape: int) -> Any:
        content = w(*shape, value=1, dtype="int8")
        each = np.full(shape[0], 0.02, np.float32)
        return ops.DequantizeLinear(content, each, np.zeros(shape[0], np.int8), axis=0)

    h = steps(ops.Relu(ops.Conv(steps(x), weight(32, 3, 3, 3), strides=[2, 2], pads=[1] * 4)))
    h = steps(ops.MaxPool(h, kernel_shape=[2, 2], strides=[2, 2]))
    wide = steps(ops.Relu(ops.Conv(h, weight(64, 32, 1, 1))))
    deep = steps(ops.Relu(_padded(wide, weight(64, 1, 3, 3), group=64)))
    h = steps(ops.Add(h, steps(ops.Conv(deep, weight(32, 64, 1, 1)))))
    # The sum with a depthwise convolution is a step of its own.
    h = steps(ops.Relu(ops.Add(h, steps(_padded(h, weight(32, 1, 3, 3), group=32)))))
    h = steps(ops.Flatten(ops.GlobalAveragePool(steps(h))))
    h = steps(ops.Relu(ops.Gemm(h, weight(16, 32), transB=1)))
    return Graph([x], [steps(ops.Gemm(h, weight(10, 16), transB=1))])


def _few_bits() -> Graph:
    """Return products with weights of 4 and 8 bits, of a token and of a prompt."""
    w = _Weights()
    results: list[Value] = []
    inputs = [sg.input("token", (1, 64)), sg.input("prompt", (40, 64))]
    for x, level, bits in product(inputs, (1, 4), (4, 8)):
        numbers = w(48, 2, 4 * bits, value={4: 17, 8: 121}[bits], dtype="uint8")
        operands = [x, numbers, w(48, 2)]
        form = {"K": 64, "N": 48, "bits": bits, "block_size": 32, "accuracy_level": level}
        node = Node("MatMulNBits", operands, domain="com.microsoft", version=1, attrs=form)
        results += node.outputs
    logits = sg.input("logits", (1, 4))
    for level in (0, 4):
        layer: list[Value | None] = [w(4, 64, 32, value=17, dtype="uint8"), w(4, 64, 2), None]
        form = {"k": 2, "block_size": 32, "accuracy_level": level, "weights_prepacked": 0}
        experts = [inputs[0], logits, *layer, *layer]
        node = Node("QMoE", experts, domain="com.microsoft", version=1, attrs=form)
        results += node.outputs
    return Graph([*inputs, logits], results)


def _linear_attention() -> Graph:
    """Return the recurrence of decoders with a state instead of a cache."""
    tokens = [sg.input(name, (1, 3, 2 * 64)) for name in ("query", "key", "value")]
    state = sg.input("state", (1, 2, 64, 64))
    gates = [sg.input(name, (1, 3, 2)) for name in ("decay", "beta")]
    inputs = [*tokens, state, *gates]
    return Graph(inputs, list(ops.LinearAttention(*inputs, q_num_heads=2, kv_num_heads=2)))


FAMILIES: dict[str, Callable[[], Graph]] = {
    "dense convolutions": _dense,
    "strided and dilated convolutions": _strided,
    **{f"mobile networks, {name}": partial(_mobile, f) for name, f in ACTIVATIONS.items()},
    "first convolutions": _stems,
    "narrow convolutions": _narrow,
    "convolutions of one and three dimensions": _one_and_three_dimensions,
    "decoders of images": _upsampling,
    "normalisations": _norms,
    "transformer encoders": _encoder,
    "transformer decoders": _decoder,
    "embeddings, positions and masks": _indices,
    "recurrent networks": _recurrent,
    "loops": _loops,
    "small networks": _perceptron,
    "elementwise operators": _elementwise,
    "reductions": _reductions,
    "weights of few bits": _few_bits,
    "linear attention": _linear_attention,
    **{f"networks in {dtype}": partial(_quantized, dtype) for dtype in ("uint8", "int8")},
}
