"""Random inputs and attributes for every version of operators, for test_operator_versions.py.

A maker draws a sample for one version of its operator: what the versions before took as an
attribute, those after as an input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.graph.types import Array


@attrs.frozen
class Sample:
    """Inputs (None: left out), attributes and the number of outputs."""

    inputs: Sequence[Array | None]
    options: dict[str, Any] = attrs.field(factory=dict[str, Any])
    outputs: int = 1


class Draw:
    """Random numbers of one sample.

    Attributes:
        op: The operator.
        version: Its version.
        dtype: The dtype of its first input.
    """

    def __init__(self, rng: np.random.Generator, op: str, version: int, dtype: str) -> None:
        self.rng = rng
        self.op = op
        self.version = version
        self.dtype = dtype

    def array(self, *shape: int, dtype: str = "") -> Array:
        """Return moderate numbers."""
        dtype = dtype or self.dtype
        if dtype == "bool":
            return np.asarray(self.rng.integers(0, 2, shape)).astype(bool)
        if "float" in dtype:
            return np.asarray(self.rng.uniform(-3, 3, shape)).astype(dtype)
        low = 0 if dtype.startswith("u") else -9
        return np.asarray(self.rng.integers(low, 10, shape)).astype(dtype)

    def integer(self, low: int, high: int) -> int:
        """Return a number from ``low`` to ``high``."""
        return int(self.rng.integers(low, high + 1))

    def flag(self) -> bool:
        """Return yes or no."""
        return bool(self.rng.integers(2))

    def shape(self, least: int = 0, most: int = 4) -> tuple[int, ...]:
        """Return a shape of so many dimensions, now and then an empty one."""
        rank = self.integer(least, most)
        low = 0 if self.integer(0, 9) == 0 else 1
        return tuple(self.integer(low, 5) for _ in range(rank))

    def one(self, *choices: Any) -> Any:
        """Return one of the choices."""
        return choices[self.integer(0, len(choices) - 1)]

    def axis(self, rank: int, since: int = 0) -> int:
        """Return an axis, negative ones from a version on."""
        return self.integer(-rank if self.version >= since else 0, rank - 1)

    def some(self, rank: int) -> list[int]:
        """Return some axes in order."""
        return sorted(int(k) for k in self.rng.permutation(rank)[: self.integer(1, rank)])


Maker = Callable[[Draw], Sample]
MAKERS: dict[str, Maker] = {}


def _maker(*names: str) -> Callable[[Maker], Maker]:
    def register(function: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(names, function))
        return function

    return register


def _ints(*values: int) -> Array:
    return np.array(values, np.int64)


# --- elementwise -------------------------------------------------------------------------------


@_maker(
    *("Abs", "Ceil", "Erf", "Exp", "Floor", "Identity", "IsNaN", "Neg", "Not", "Reciprocal"),
    *("Relu", "Selu", "Sigmoid", "Sign", "Softplus", "Softsign", "Tanh", "Sin", "Cos", "Atan"),
    *("Round", "HardSwish", "Sinh", "Cosh", "Asinh", "Tan", "Size", "Mish"),
)
def _unary(draw: Draw) -> Sample:
    return Sample([draw.array(*draw.shape())])


@_maker("NonZero")
def _non_zero(draw: Draw) -> Sample:
    return Sample([draw.array(*draw.shape(1))])  # ONNX Runtime gives a scalar a row


@_maker("Sqrt", "Log", "Acosh")
def _positive(draw: Draw) -> Sample:
    return Sample([np.abs(draw.array(*draw.shape())) + np.asarray(1).astype(draw.dtype)])


@_maker("Elu", "LeakyRelu", "ThresholdedRelu", "Celu")
def _with_alpha(draw: Draw) -> Sample:
    return Sample([draw.array(*draw.shape())], {"alpha": 0.25} if draw.flag() else {})


@_maker("HardSigmoid")
def _hard_sigmoid(draw: Draw) -> Sample:
    return Sample([draw.array(*draw.shape())], {"alpha": 0.3, "beta": 0.4} if draw.flag() else {})


@_maker("Shape")
def _shape(draw: Draw) -> Sample:
    cut = {"start": draw.integer(-3, 3), "end": draw.integer(-3, 3)}
    cut = cut if draw.version >= 15 and draw.flag() else {}
    return Sample([draw.array(*draw.shape())], cut)


@_maker("Add", "Sub", "Mul", "Max", "Min", "And", "Or", "Xor", "Equal", "Greater", "Less")
def _binary(draw: Draw) -> Sample:
    shape = draw.shape()
    other = tuple(1 if draw.flag() else n for n in shape[draw.integer(0, len(shape)) :])
    other = other if draw.version >= 7 else shape  # before, alike or asked for
    return Sample([draw.array(*shape), draw.array(*other)])


@_maker("GreaterOrEqual", "LessOrEqual", "Sum", "Mean", "BitwiseAnd")
def _broadcast(draw: Draw) -> Sample:
    shape = draw.shape()
    return Sample([draw.array(*shape), draw.array(*shape)])


@_maker("Div", "Pow", "Mod")
def _with_divisor(draw: Draw) -> Sample:
    shape = draw.shape()
    divisor = np.abs(draw.array(*shape)) + np.asarray(1).astype(draw.dtype)
    if draw.op == "Pow":
        divisor %= np.asarray(4).astype(draw.dtype)  # what overflows is nobody's
    return Sample([np.abs(draw.array(*shape)), divisor])


@_maker("PRelu")
def _prelu(draw: Draw) -> Sample:
    shape = draw.shape(2, 4)
    return Sample([draw.array(*shape), draw.array(*(shape if draw.flag() else shape[-1:]))])


@_maker("Where")
def _where(draw: Draw) -> Sample:
    shape = draw.shape()
    return Sample([draw.array(*shape, dtype="bool"), draw.array(*shape), draw.array(*shape)])


@_maker("Clip")
def _clip(draw: Draw) -> Sample:
    x = draw.array(*draw.shape())
    if draw.version < 11:
        return Sample([x], {"min": -1.0, "max": 1.5} if draw.flag() else {"min": 0.5})
    low, high = (np.array(v).astype(draw.dtype) for v in (1, 2))
    return Sample([x, low if draw.flag() else None, high])


@_maker("Dropout")
def _dropout(draw: Draw) -> Sample:
    x = draw.array(*draw.shape())
    return Sample([x], {"is_test": 1, "ratio": 0.4} if draw.version < 7 else {})


@_maker("Cast")
def _cast(draw: Draw) -> Sample:
    return Sample([draw.array(*draw.shape())], {"to": draw.one(1, 6, 7, 9, 10, 11)})


# --- reductions --------------------------------------------------------------------------------


@_maker(
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
def _reduce(draw: Draw) -> Sample:
    shape = tuple(max(1, n) for n in draw.shape(1, 4))
    axes = [a - len(shape) * (draw.version >= 11 and draw.flag()) for a in draw.some(len(shape))]
    options: dict[str, Any] = {"keepdims": draw.integer(0, 1)}
    x = np.abs(draw.array(*shape)) + np.asarray(1).astype(draw.dtype)
    if draw.op == "ReduceProd" and x.dtype.kind in "iu":
        x = np.sign(x)  # what overflows is nobody's
    if draw.flag():
        return Sample([x], options)
    if draw.version >= (13 if draw.op == "ReduceSum" else 18):
        return Sample([x, _ints(*axes)], options)
    return Sample([x], {**options, "axes": axes})


@_maker("ArgMax", "ArgMin")
def _arg(draw: Draw) -> Sample:
    shape = tuple(max(1, n) for n in draw.shape(1, 4))
    options = {"keepdims": draw.integer(0, 1), "axis": draw.axis(len(shape), 11)}
    if draw.version >= 12:
        options["select_last_index"] = draw.integer(0, 1)
    return Sample([draw.array(*shape)], options)


@_maker("Softmax", "LogSoftmax", "Hardmax")
def _softmax(draw: Draw) -> Sample:
    shape = tuple(max(1, n) for n in draw.shape(2, 4))
    return Sample([draw.array(*shape)], {"axis": draw.axis(len(shape), 11)} if draw.flag() else {})


@_maker("CumSum")
def _cumsum(draw: Draw) -> Sample:
    shape = draw.shape(1, 4)
    options = {"exclusive": draw.integer(0, 1), "reverse": draw.integer(0, 1)}
    return Sample([draw.array(*shape), np.array(draw.axis(len(shape)))], options)


@_maker("TopK")
def _top_k(draw: Draw) -> Sample:
    shape = tuple(n + 1 for n in draw.shape(1, 3))
    x = draw.rng.permutation(int(np.prod(shape))).reshape(shape).astype(draw.dtype)
    axis = draw.axis(len(shape), 11)
    k = draw.integer(1, shape[axis])
    if draw.version < 10:
        return Sample([x], {"axis": axis, "k": k}, 2)
    order = {"largest": draw.integer(0, 1)} if draw.version >= 11 else {}
    return Sample([x, _ints(k)], {"axis": axis, **order}, 2)


# --- normalization, products, windows ----------------------------------------------------------


@_maker("BatchNormalization")
def _batch_normalization(draw: Draw) -> Sample:
    shape = (draw.integer(1, 3), 3, *draw.shape(1, 2))
    stats = [draw.array(3), draw.array(3), draw.array(3), np.abs(draw.array(3)) + 1]
    inputs = [draw.array(*shape), *(s.astype(draw.dtype) for s in stats)]
    return Sample(inputs, {"epsilon": 0.01, **({"is_test": 1} if draw.version < 7 else {})})


@_maker("InstanceNormalization")
def _instance_normalization(draw: Draw) -> Sample:
    return Sample([draw.array(2, 3, 4, 5), draw.array(3), draw.array(3)], {"epsilon": 0.01})


@_maker("LRN")
def _lrn(draw: Draw) -> Sample:
    return Sample([draw.array(2, 5, 3, 2)], {"size": draw.one(1, 3, 5), "alpha": 0.1, "bias": 1.5})


@_maker("MeanVarianceNormalization")
def _mean_variance(draw: Draw) -> Sample:
    return Sample([draw.array(2, 3, 4, 5)], {"axes": [0, 2, 3]} if draw.flag() else {})


@_maker("Gemm")
def _gemm(draw: Draw) -> Sample:
    m, k, n = (draw.integer(1, 5) for _ in range(3))
    turned = draw.integer(0, 1), draw.integer(0, 1)
    a = draw.array(*((k, m) if turned[0] else (m, k)))
    b = draw.array(*((n, k) if turned[1] else (k, n)))
    options = {"transA": turned[0], "transB": turned[1], "alpha": 0.5, "beta": 2.0}
    c = draw.array(m, n) if draw.version < 7 else draw.array(*draw.one((m, n), (n,), (m, 1), ()))
    return Sample([a, b, *([] if draw.version >= 11 and draw.flag() else [c])], options)


@_maker("MatMul")
def _matmul(draw: Draw) -> Sample:
    m, k, n = (draw.integer(1, 5) for _ in range(3))
    stack = draw.shape(0, 2)
    return Sample([draw.array(*stack, m, k), draw.array(*draw.one((k, n), (k,), (*stack, k, n)))])


@_maker("Conv", "ConvTranspose")
def _conv(draw: Draw) -> Sample:
    rank = draw.integer(1, 2)
    options = {"strides": [draw.integer(1, 2)] * rank, "dilations": [draw.integer(1, 2)] * rank}
    options["pads"] = [draw.integer(0, 1)] * (2 * rank)
    weight = draw.array(4, 4, *[draw.integer(1, 3)] * rank)
    return Sample([draw.array(2, 4, *[7] * rank), weight, draw.array(4)], options)


@_maker("MaxPool", "AveragePool", "LpPool")
def _pool(draw: Draw) -> Sample:
    rank = draw.integer(1, 3)
    options: dict[str, Any] = {"kernel_shape": [draw.integer(2, 3)] * rank}
    options["strides"] = [draw.integer(1, 2)] * rank
    if draw.flag():
        options["pads"] = [1] * (2 * rank)
    elif draw.flag():
        options["auto_pad"] = draw.one("SAME_UPPER", "SAME_LOWER", "VALID")
    return Sample([draw.array(2, 3, *[7] * rank)], options)


@_maker("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def _global_pool(draw: Draw) -> Sample:
    return Sample([draw.array(2, 3, *(n + 1 for n in draw.shape(1, 3)))])


@_maker("RNN", "GRU", "LSTM")
def _recurrent(draw: Draw) -> Sample:
    gates = {"RNN": 1, "GRU": 3, "LSTM": 4}[draw.op]
    w, r = draw.array(1, 4 * gates, 3) / 4, draw.array(1, 4 * gates, 4) / 4
    inputs = [draw.array(5, 2, 3), w.astype(draw.dtype), r.astype(draw.dtype)]
    return Sample([*inputs, draw.array(1, 8 * gates)], {"hidden_size": 4}, 2)


# --- movement ----------------------------------------------------------------------------------


@_maker("Concat")
def _concat(draw: Draw) -> Sample:
    shape = draw.shape(1, 4)
    axis = draw.axis(len(shape), 11)
    return Sample([draw.array(*shape) for _ in range(draw.integer(1, 3))], {"axis": axis})


@_maker("Flatten")
def _flatten(draw: Draw) -> Sample:
    shape = draw.shape(1, 4)
    low = -len(shape) if draw.version >= 11 else 0
    return Sample([draw.array(*shape)], {"axis": draw.integer(low, len(shape))})


@_maker("Transpose")
def _transpose(draw: Draw) -> Sample:
    shape = draw.shape()
    order = [int(k) for k in draw.rng.permutation(len(shape))]
    return Sample([draw.array(*shape)], {"perm": order} if shape and draw.flag() else {})


@_maker("Reshape")
def _reshape(draw: Draw) -> Sample:
    wanted = draw.one([4, -1], [0, 12], [2, 3, 4], [-1], [24, 1])
    x = draw.array(2, 3, 4)
    return Sample([x, _ints(*wanted)]) if draw.version >= 5 else Sample([x], {"shape": wanted})


@_maker("Expand")
def _expand(draw: Draw) -> Sample:
    return Sample([draw.array(3, 1), _ints(*draw.one((2, 1, 6), (3, 4), (1,)))])


@_maker("Tile")
def _tile(draw: Draw) -> Sample:
    shape = draw.shape(1, 3)
    return Sample([draw.array(*shape), _ints(*(draw.integer(0, 3) for _ in shape))])


@_maker("Squeeze", "Unsqueeze")
def _squeeze(draw: Draw) -> Sample:
    axes = [0, 2] if draw.version < 11 or draw.flag() else [0, -2]
    x = draw.array(1, 3, 1, 2)
    return Sample([x, _ints(*axes)]) if draw.version >= 13 else Sample([x], {"axes": axes})


@_maker("Split")
def _split(draw: Draw) -> Sample:
    x, parts = draw.array(2, 6), draw.one([1, 5], [6, 0], [3, 3])
    axis = draw.one(1, -1) if draw.version >= 11 else 1
    if draw.version >= 13:
        return Sample([x, _ints(*parts)], {"axis": axis}, 2)
    return Sample([x], {"axis": axis, "split": parts}, 2)


@_maker("Slice")
def _slice(draw: Draw) -> Sample:
    x = draw.array(4, 5, 6)
    axes = draw.some(3)
    starts, ends = ([draw.integer(-7, 7) for _ in axes] for _ in range(2))
    if draw.version < 10:
        return Sample([x], {"starts": starts, "ends": ends, "axes": axes})
    steps = [draw.one(1, 2, -1, -2, 9) for _ in axes]
    return Sample([x, *(_ints(*v) for v in (starts, ends, axes, steps))])


@_maker("Pad")
def _pad(draw: Draw) -> Sample:
    x, pads = draw.array(3, 4, 5), [draw.integer(0, 2) for _ in range(6)]
    mode = draw.one("constant", "edge", "reflect", *(["wrap"] if draw.version >= 19 else []))
    if draw.version < 2:
        return Sample([x], {"paddings": pads, "mode": mode, "value": 1.5})
    if draw.version < 11:
        return Sample([x], {"pads": pads, "mode": mode, "value": 1.5})
    return Sample([x, _ints(*pads), np.array(2).astype(draw.dtype)], {"mode": mode})


@_maker("DepthToSpace")
def _depth_to_space(draw: Draw) -> Sample:
    mode = {"mode": draw.one("DCR", "CRD")} if draw.version >= 11 else {}
    return Sample([draw.array(2, 8, 3, 2)], {"blocksize": 2, **mode})


@_maker("SpaceToDepth")
def _space_to_depth(draw: Draw) -> Sample:
    return Sample([draw.array(2, 3, 4, 6)], {"blocksize": 2})


@_maker("Gather")
def _gather(draw: Draw) -> Sample:
    low = -4 if draw.version >= 11 else 0
    indices = draw.rng.integers(low, 4, draw.shape(0, 2))
    return Sample([draw.array(4, 4, 4), np.asarray(indices)], {"axis": draw.axis(3, 11)})


@_maker("GatherElements", "Scatter", "ScatterElements")
def _elements(draw: Draw) -> Sample:
    axis = draw.axis(2, 11)
    indices = np.stack([draw.rng.permutation(4) for _ in range(4)], axis)
    updates = [] if draw.op == "GatherElements" else [draw.array(4, 4)]
    return Sample([draw.array(4, 4), indices, *updates], {"axis": axis})


@_maker("GatherND")
def _gather_nd(draw: Draw) -> Sample:
    return Sample([draw.array(3, 4, 5), draw.rng.integers(-3, 3, (2, draw.integer(1, 3)))])


@_maker("ScatterND")
def _scatter_nd(draw: Draw) -> Sample:
    indices = draw.rng.permutation(4)[:2].reshape(2, 1)
    return Sample([draw.array(4, 3), indices, draw.array(2, 3)])


@_maker("Compress")
def _compress(draw: Draw) -> Sample:
    chosen = draw.array(3, dtype="bool")
    return Sample([draw.array(3, 4), chosen], {"axis": draw.one(0, 1, -1)} if draw.flag() else {})


@_maker("OneHot")
def _one_hot(draw: Draw) -> Sample:
    indices = np.asarray(draw.rng.integers(0, 5, draw.shape(1, 2)))
    ends = np.array([-1, 2], np.float32)
    return Sample([indices, np.array([5]), ends], {"axis": draw.one(-1, 0)})


@_maker("Trilu")
def _trilu(draw: Draw) -> Sample:
    diagonal = np.array(draw.integer(-5, 5))
    return Sample([draw.array(2, 4, 5), diagonal], {"upper": draw.integer(0, 1)})


# --- images, quantization ----------------------------------------------------------------------


@_maker("Upsample")
def _upsample(draw: Draw) -> Sample:
    mode, scales = draw.one("nearest", "linear"), draw.one([1, 1, 2, 3], [1, 1, 1.5, 2])
    x = draw.array(1, 2, 4, 5)
    if draw.version < 9:
        return Sample([x], {"mode": mode, "scales": [float(s) for s in scales]})
    return Sample([x, np.array(scales, np.float32)], {"mode": mode})


@_maker("Resize")
def _resize(draw: Draw) -> Sample:
    scales = np.array(draw.one([1, 1, 2, 3], [1, 1, 1.5, 2], [1, 1, 0.5, 0.6]), np.float32)
    x = draw.array(1, 2, 6, 5)
    if draw.version < 11:
        return Sample([x, scales], {"mode": draw.one("nearest", "linear")})
    options = {"mode": draw.one("nearest", "linear", "cubic")}
    places = draw.one("asymmetric", "align_corners", "half_pixel")
    options["coordinate_transformation_mode"] = places
    roi = np.zeros(0, np.float32) if draw.version < 13 else None
    return Sample([x, roi, scales], options)


@_maker("QuantizeLinear", "DequantizeLinear")
def _quantize(draw: Draw) -> Sample:
    return Sample([draw.array(3, 4), np.array(0.25, np.float32)])
