"""The operators that ``benchmarks/operators.py`` times, by family, at sizes of real models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.graph.types import Array

_rng = np.random.default_rng(0)
_SCALE = np.array(0.02, np.float32)
_LONGEST = 40  # letters of an attribute in a label


@attrs.frozen
class Fixed:
    """An input that is a weight.

    Attributes:
        array: The weight.
    """

    array: Array


@attrs.frozen
class Case:
    """One operator to time.

    Attributes:
        operator: Name of the operator.
        inputs: Its inputs: arrays, weights, None for an omitted one.
        attributes: Its attributes.
        outputs: Number of outputs.
        opset: Operator set of the model.
        domain: Domain of the operator; "" is ONNX's own.
    """

    operator: str
    inputs: tuple[Array | Fixed | None, ...]
    attributes: dict[str, Any]
    outputs: int = 1
    opset: int = 21
    domain: str = ""

    @property
    def label(self) -> str:
        """Shapes, dtypes other than float32, and attributes; distinct for each case."""
        parts: list[str] = []
        for value in self.inputs:
            array = value.array if isinstance(value, Fixed) else value
            if array is None:
                parts.append("-")
            elif isinstance(value, Fixed) and array.size <= 8 and array.dtype == np.int64:
                parts.append(str(array.reshape(-1).tolist()))
            else:
                shape = "x".join(map(str, array.shape)) or "scalar"
                kind = "" if array.dtype == np.float32 else f" {array.dtype.name}"
                parts.append(f"{'=' if isinstance(value, Fixed) else ''}{shape}{kind}")
        options = [f"{name}={str(value)[:_LONGEST]}" for name, value in self.attributes.items()]
        return f"{self.operator} {', '.join(parts)} {' '.join(options)}".strip()


def f(*shape: int) -> Array:
    """Return a float32 array of normally distributed numbers."""
    return _rng.standard_normal(shape).astype(np.float32)


def i(most: int, *shape: int, dtype: str = "int64") -> Array:
    """Return an array of random integers in [0, ``most``)."""
    return _rng.integers(0, most, shape).astype(dtype)


def fixed(*numbers: int) -> Fixed:
    """Return an int64 weight of these numbers."""
    return Fixed(np.array(numbers, np.int64))


def weight(*shape: int) -> Fixed:
    """Return a random float32 weight."""
    return Fixed(f(*shape) * np.float32(0.1))


def number(value: float, dtype: str = "float32") -> Fixed:
    """Return a scalar weight."""
    return Fixed(np.array(value, dtype))


def case(operator: str, *inputs: Array | Fixed | None, outputs: int = 1, **options: Any) -> Case:
    """Return a case; ``opset`` among the options is the model's."""
    return Case(operator, inputs, options, outputs, options.pop("opset", 21))


def unary() -> Iterator[Case]:
    """Operators of one input, small and large."""
    for x in (f(1, 128), f(1, 64, 56, 56)):
        for op in (
            *("Abs", "Neg", "Exp", "Erf", "Sin", "Cos", "Tanh", "Sigmoid", "Softplus", "Floor"),
            *("Round", "Relu", "LeakyRelu", "HardSwish", "HardSigmoid", "Elu", "Selu", "Celu"),
            *("Mish", "Gelu", "Softsign", "Sign", "Atan", "Ceil", "IsNaN", "ThresholdedRelu"),
        ):
            yield case(op, x, opset=22)
        for op in ("Sqrt", "Log", "Reciprocal"):
            yield case(op, abs(x) + np.float32(0.1))
        yield case("Not", x > 0)
        yield case("Clip", x, number(0), number(6))
        for exponent in (-0.5, 0.5, 2, 3, 2.2):
            yield case("Pow", abs(x) + np.float32(0.1), number(exponent))
        yield case("PRelu", x, Fixed(f(64, 1, 1) if x.ndim == 4 else f(1)))
        for to in (10, 7, 6, 2, 11, 9):  # float16, int64, int32, uint8, float64, bool
            yield case("Cast", abs(x) * 10, to=to)
    for dtype in ("int64", "int32", "uint8", "bool", "float16"):
        yield case("Cast", i(2, 1, 64, 56, 56, dtype=dtype), to=1)
    yield case("Cast", i(255, 1, 224, 224, 3, dtype="uint8"), to=1)
    yield case("Cast", i(9, 128, 1024), to=6)


def binary() -> Iterator[Case]:
    """Operators of two inputs, with several kinds of broadcasting."""
    x, b = f(1, 64, 56, 56), f(8, 128, 256)
    pairs = [
        *[(x, x + 1), (x, f(1, 64, 1, 1)), (b, f(256)), (b, f(8, 128, 1)), (f(1, 128), f(1, 128))],
        *[(f(8, 128, 1), f(8, 1, 256)), (f(30, 1, 7), f(1, 40, 7)), (f(10000, 5), f(5))],
        *[(f(10000, 5), f(10000, 1)), (f(8, 1, 64, 1), f(1, 16, 1, 64)), (b, f(8, 1, 256))],
    ]
    for left, right in pairs:
        for op in ("Add", "Mul"):
            yield case(op, left, right)
    for op in ("Sub", "Div", "Max", "Min", "Less", "Equal", "Pow"):
        yield case(op, abs(b), b + 1)
        yield case(op, abs(b), number(2.5))
    for dtype in ("int64", "int32"):
        n = i(50, 8, 128, 256, dtype=dtype)
        for op in ("Add", "Mul", "Div", "Sub", "Max", "Less", "Equal", "Mod"):
            yield case(op, n, Fixed(np.array(3, dtype)))
        yield case("Div", n, n + 1)
    yield case("And", b > 0, b > 1)
    yield case("Or", b > 0, b > 1)
    yield case("Where", x > 0, x, x + 1)
    yield case("Where", i(2, 1, 1, 128, 128, dtype="bool"), f(1, 12, 128, 128), number(-1e9))
    yield case("Where", b > 0, i(9, 8, 128, 256), i(9, 8, 128, 256))
    for op in ("Sum", "Mean", "Max"):
        yield case(op, x, x, x)


def reductions() -> Iterator[Case]:
    """Reductions over leading, inner and trailing axes, ArgMax, CumSum, TopK."""
    x, b = f(1, 64, 56, 56), f(8, 128, 256)
    places = [(b, [-1]), (b, [1]), (b, [0]), (x, [2, 3]), (x, [1]), (x, [0, 1, 2, 3])]
    places += [(b, [0, 2]), (f(10000, 8), [-1]), (f(1, 56, 56, 64), [1, 2]), (f(3000, 17), [0])]
    places += [(f(8, 7, 7, 512), [1, 2]), (f(1, 128), [-1])]
    for value, axes in places:
        for op in ("ReduceMean", "ReduceSum", "ReduceMax", "ReduceL2"):
            yield case(op, value, fixed(*axes))
    for op in ("ReduceMin", "ReduceProd", "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp"):
        yield case(op, b, fixed(-1))
    for dtype in ("int64", "int32"):
        yield case("ReduceSum", i(50, 8, 128, 256, dtype=dtype), fixed(-1))
        yield case("ReduceMax", i(50, 8, 128, 256, dtype=dtype), fixed(1))
    for value, axis in ((b, -1), (b, 1), (b, 0), (f(1, 21, 128, 128), 1), (f(1, 32000), -1)):
        yield case("ArgMax", value, axis=axis)
    for value, axis in ((b, 2), (b, 1), (f(512, 512), 0), (i(9, 1, 128), 1)):
        yield case("CumSum", value, Fixed(np.array(axis)))
    tops = [(f(1, 10000), 100), (f(64, 1000), 5), (f(1, 1000), 1000), (f(128, 1000), 1)]
    for value, k in [*tops, (f(1, 100000), 1000), (i(99, 8, 500), 20)]:
        yield case("TopK", value, fixed(k), outputs=2)
    yield case("TopK", f(1, 8400, 20), fixed(100), outputs=2, axis=1)


def movement() -> Iterator[Case]:
    """Operators that move elements."""
    x, b = f(1, 64, 56, 56), f(8, 128, 256)
    turns = [
        *[((1, 128, 12, 64), (0, 2, 1, 3)), ((8, 128, 256), (0, 2, 1)), ((512, 512), (1, 0))],
        *[((1, 64, 56, 56), (0, 2, 3, 1)), ((1, 56, 56, 64), (0, 3, 1, 2))],
        *[((1, 224, 224, 3), (0, 3, 1, 2)), ((1, 3, 224, 224), (0, 2, 3, 1))],
        *[((1, 196, 3, 3, 64), (2, 0, 3, 1, 4)), ((1, 8, 7, 8, 7, 96), (0, 1, 3, 2, 4, 5))],
        *[((1, 2, 58, 28, 28), (0, 2, 1, 3, 4)), ((1, 84, 8400), (0, 2, 1)), ((4, 6), (1, 0))],
        *[((1, 3, 85, 20, 20), (0, 1, 3, 4, 2)), ((1, 128, 12, 64), (0, 2, 3, 1))],
    ]
    for shape, perm in turns:
        yield case("Transpose", f(*shape), perm=perm)
    for dtype in ("int64", "uint8", "bool"):
        yield case("Transpose", i(2, 8, 128, 256, dtype=dtype), perm=(0, 2, 1))
    for inputs, axis in (([x] * 3, 1), ([b] * 2, -1), ([f(1, 128)] * 2, 1), ([f(3000, 1)] * 4, -1)):
        yield case("Concat", *inputs, axis=axis)
    yield case("Split", b, fixed(128, 128), outputs=2, axis=-1)
    yield case("Split", x, fixed(32, 32), outputs=2, axis=1)
    yield case("Split", f(8400, 4), fixed(1, 1, 1, 1), outputs=4, axis=-1)
    slices = [
        *[(b, [0], [100], [2], [1]), (b, [0], [256], [2], [2]), (b, [-1], [-9999], [2], [-1])],
        *[(x, [3, 3], [50, 50], [2, 3], [1, 1]), (x, [0, 0], [56, 56], [2, 3], [2, 2])],
        *[(x, [16], [48], [1], [1]), (f(1, 8400, 85), [4], [5], [2], [1])],
        *[(f(1, 8400, 85), [5], [85], [2], [1]), (f(1, 197, 768), [0], [1], [1], [1])],
    ]
    for value, *bounds in slices:
        yield case("Slice", value, *(fixed(*bound) for bound in bounds))
    for mode in ("constant", "reflect", "edge"):
        yield case("Pad", x, fixed(0, 0, 3, 3, 0, 0, 3, 3), mode=mode)
    yield case("Pad", b, fixed(0, 0, 0, 0, 0, 1))
    yield case("Pad", x, fixed(0, 0, 0, 0, 0, 32, 0, 0))
    yield case("Tile", b, fixed(1, 2, 2))
    yield case("Tile", f(128, 1), fixed(1, 256))
    yield case("Expand", f(1, 4, 1, 128, 64), fixed(1, 4, 3, 128, 64))
    yield case("Expand", f(8, 128, 1), fixed(8, 128, 256))
    yield case("DepthToSpace", x, blocksize=2)
    yield case("DepthToSpace", f(1, 27, 64, 64), blocksize=3, mode="CRD")
    yield case("SpaceToDepth", f(1, 3, 320, 320), blocksize=2)
    yield case("Trilu", f(12, 128, 128))
    yield case("ReverseSequence", f(50, 8, 64), np.full(8, 40), time_axis=0, batch_axis=1)
    yield case("Reshape", b, fixed(8, -1))


def indexing() -> Iterator[Case]:
    """Gather, scatter and selection by indices or conditions."""
    b = f(8, 128, 256)
    yield case("Gather", Fixed(f(30000, 384)), i(30000, 1, 128))
    yield case("Gather", b, Fixed(i(128, 50)), axis=1)
    yield case("Gather", f(1, 8400, 84), fixed(0, 1, 2, 3), axis=2)
    yield case("Gather", i(50, 8, 128, 256), i(8, 16))
    yield case("GatherElements", b, i(256, 8, 128, 100), axis=2)
    yield case("GatherElements", f(1, 8400, 4), i(8400, 1, 300, 4), axis=1)
    yield case("GatherND", b, i(8, 500, 2))
    yield case("GatherND", f(8, 100, 64), i(100, 8, 30, 1), batch_dims=1)
    yield case("ScatterND", b, i(8, 100, 2), f(100, 256))
    yield case("ScatterElements", b, i(256, 8, 128, 20), f(8, 128, 20), axis=2)
    yield case("ScatterElements", f(1000, 64), i(1000, 500, 64), f(500, 64), reduction="add")
    yield case("OneHot", i(50, 500), Fixed(np.array(50)), Fixed(np.array([0, 1], np.float32)))
    yield case("NonZero", f(1, 64, 56, 56) > 0)
    yield case("NonZero", f(1000, 80) > 1.6)
    yield case("Compress", f(1000, 64), i(2, 1000, dtype="bool"), axis=0)
    yield case("Unique", i(100, 2000))


def windows() -> Iterator[Case]:
    """Pooling and resizing."""
    x = f(1, 64, 56, 56)
    sizes = [(x, 3, 2, 1), (x, 2, 2, 0), (x, 3, 1, 1), (x, 5, 1, 2), (f(1, 3, 224, 224), 3, 2, 1)]
    sizes += [(f(1, 256, 14, 14), 3, 1, 1), (f(8, 64, 28, 28), 2, 2, 0), (f(1, 9, 30, 30), 7, 1, 3)]
    for value, kernel, stride, pad in sizes:
        for op in ("MaxPool", "AveragePool"):
            options: dict[str, Any] = {"strides": [stride] * 2, "pads": [pad] * 4}
            yield case(op, value, kernel_shape=[kernel] * 2, **options)
    yield case("MaxPool", f(4, 64, 1000), kernel_shape=[3], strides=[2], pads=[1, 1])
    yield case("MaxPool", f(1, 16, 16, 32, 32), kernel_shape=[2] * 3, strides=[2] * 3)
    yield case("MaxPool", x, outputs=2, kernel_shape=[2, 2], strides=[2, 2])
    yield case("AveragePool", f(1, 1280, 7, 7), kernel_shape=[7, 7])
    yield case("GlobalAveragePool", f(8, 512, 7, 7))
    yield case("GlobalMaxPool", x)
    twice = Fixed(np.array([1, 1, 2, 2], np.float32))
    for mode in ("nearest", "linear", "cubic"):
        for where in ("asymmetric", "half_pixel", "align_corners"):
            options = {"mode": mode, "coordinate_transformation_mode": where}
            if mode == "nearest":
                options["nearest_mode"] = "floor"
            yield case("Resize", x, None, twice, **options)
    yield case("Resize", f(1, 3, 480, 640), None, None, fixed(1, 3, 224, 224), mode="linear")
    half = Fixed(np.array([1, 1, 0.5, 0.5], np.float32))
    yield case("Resize", x, None, half, mode="linear", antialias=1)
    grid = np.tanh(f(1, 56, 56, 2))
    for mode in ("linear", "nearest", "cubic"):
        yield case("GridSample", x, grid, mode=mode)
    corner = abs(f(100, 2)) * 10
    regions = np.concatenate([corner, corner + 5 + abs(f(100, 2)) * 10], 1).astype(np.float32)
    options = {"output_height": 7, "output_width": 7, "sampling_ratio": 2}
    yield case("RoiAlign", f(1, 256, 50, 50), regions, np.zeros(100, np.int64), **options)


def normalisations() -> Iterator[Case]:
    """Normalisations and softmax."""
    x, b = f(1, 64, 56, 56), f(8, 128, 256)
    sizes = [(12, 128, 128), (256, 49, 49), (12, 7, 7), (1, 1000), (1, 32000), (10000, 4)]
    for shape in [*sizes, (12, 197, 197)]:
        yield case("Softmax", f(*shape), axis=-1)
    yield case("Softmax", x, axis=1)
    yield case("Softmax", f(8, 100, 64), axis=1)
    yield case("LogSoftmax", f(256, 1000), axis=-1)
    for rows, size in ((128, 768), (3136, 96), (1, 768), (16, 4096)):
        yield case("LayerNormalization", f(1, rows, size), weight(size), weight(size))
        yield case("RMSNormalization", f(1, rows, size), weight(size), opset=23)
    yield case("InstanceNormalization", x, weight(64), weight(64))
    yield case("GroupNormalization", x, weight(64), weight(64), num_groups=8)
    moments = (weight(64), Fixed(abs(f(64)) + np.float32(0.5)))
    yield case("BatchNormalization", x, weight(64), weight(64), *moments)
    yield case("LRN", f(1, 96, 27, 27), size=5)
    yield case("LpNormalization", b, axis=-1, opset=18)


def products() -> Iterator[Case]:
    """Matrix products by weights and by computed matrices, Einsum, recurrent networks."""
    weights = [(128, 768, 768), (1, 768, 3072), (4, 768, 768), (1, 2048, 1000), (512, 512, 512)]
    weights += [(127, 131, 67), (5000, 3, 64), (3000, 64, 3), (1000, 8, 8), (5000, 32, 1)]
    weights += [(10000, 4, 4), (3000, 16, 16), (64, 784, 128)]
    for m, k, n in weights:
        yield case("MatMul", f(m, k), weight(k, n))
    computed = [
        *[((12, 128, 64), (12, 64, 128)), ((12, 128, 128), (12, 128, 64)), ((512, 1), (1, 512))],
        *[((12, 1, 64), (12, 64, 128)), ((256, 49, 32), (256, 32, 49)), ((500, 3, 3), (500, 3, 3))],
        *[((12, 17, 64), (12, 64, 17)), ((512, 512), (512,)), ((100, 32), (32, 6400))],
    ]
    for left, right in computed:
        yield case("MatMul", f(*left), f(*right))
    for m, k, n in ((1000, 2, 1000), (500, 8, 500), (500, 16, 500), (128, 64, 128), (4, 64, 1000)):
        yield case("Gemm", f(m, k), f(n, k), transB=1)
        yield case("Gemm", f(m, k), weight(n, k), weight(n), transB=1)
    yield case("Einsum", f(2, 60, 4, 32), f(2, 60, 4, 32), equation="bqhd,bkhd->bhqk")
    yield case("Einsum", f(4, 14, 14, 64), f(14, 14, 64), equation="bhwc,hkc->bhwk")
    yield case("Einsum", f(64), f(128), equation="i,j->ij")
    for op, gates in (("LSTM", 4), ("GRU", 3), ("RNN", 1)):
        for steps, batch, size in ((50, 1, 64), (50, 8, 128), (30, 1, 256)):
            sides = [weight(1, gates * size, size), weight(1, gates * size, size)]
            sides.append(weight(1, 2 * gates * size))
            yield case(op, f(steps, batch, size), *sides, outputs=2, hidden_size=size)


def convolutions() -> Iterator[Case]:
    """Convolutions of every kind."""
    kinds: list[tuple[Sequence[int], Sequence[int], dict[str, Any]]] = [
        ((1, 64, 56, 56), (64, 64, 3, 3), {"pads": [1] * 4}),
        ((1, 64, 56, 56), (256, 64, 1, 1), {}),
        ((1, 61, 28, 28), (67, 61, 3, 3), {"pads": [1] * 4}),
        ((1, 96, 56, 56), (96, 1, 3, 3), {"pads": [1] * 4, "group": 96}),
        ((1, 96, 56, 56), (96, 1, 7, 7), {"pads": [3] * 4, "group": 96}),
        ((1, 128, 28, 28), (128, 4, 3, 3), {"pads": [1] * 4, "group": 32}),
        ((1, 128, 28, 28), (128, 64, 3, 3), {"pads": [1] * 4, "group": 2}),
        ((1, 32, 56, 56), (64, 1, 3, 3), {"pads": [1] * 4, "group": 32}),
        ((1, 3, 224, 224), (32, 3, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}),
        ((1, 3, 224, 224), (192, 3, 16, 16), {"strides": [16, 16]}),
        ((1, 64, 56, 56), (128, 64, 3, 3), {"pads": [1] * 4, "strides": [2, 2]}),
        ((1, 64, 28, 28), (64, 64, 3, 3), {"pads": [2] * 4, "dilations": [2, 2]}),
        ((1, 128, 17, 17), (128, 128, 1, 7), {"pads": [0, 3, 0, 3]}),
        ((1, 64, 64, 64), (1, 64, 3, 3), {"pads": [1] * 4}),
        ((1, 512, 7, 7), (2048, 512, 1, 1), {}),
        ((1, 1, 28, 28), (6, 1, 5, 5), {}),
        ((1, 64, 1000), (64, 64, 3), {"pads": [1, 1]}),
        ((1, 144, 200), (144, 1, 31), {"pads": [15, 15], "group": 144}),
        ((1, 1, 16000), (512, 1, 10), {"strides": [5]}),
        ((1, 16, 8, 28, 28), (32, 16, 3, 3, 3), {"pads": [1] * 6}),
    ]
    for shape, kernel, options in kinds:
        yield case("Conv", f(*shape), weight(*kernel), weight(kernel[0]), **options)
    turned: list[tuple[Sequence[int], Sequence[int], dict[str, Any]]] = [
        ((1, 64, 28, 28), (64, 32, 4, 4), {"pads": [1] * 4, "strides": [2, 2]}),
        ((1, 64, 28, 28), (64, 32, 2, 2), {"strides": [2, 2]}),
        ((1, 32, 28, 28), (32, 1, 4, 4), {"pads": [1] * 4, "strides": [2, 2], "group": 32}),
        ((1, 128, 64), (128, 64, 16), {"pads": [4, 4], "strides": [8]}),
    ]
    for shape, kernel, options in turned:
        yield case("ConvTranspose", f(*shape), weight(*kernel), **options)


def quantised() -> Iterator[Case]:
    """Operators of quantised models."""
    x, zero = f(1, 64, 56, 56), Fixed(np.array(128, np.uint8))
    scale = Fixed(_SCALE)
    yield case("QuantizeLinear", x, scale, zero)
    yield case("DequantizeLinear", i(255, 1, 64, 56, 56, dtype="uint8"), scale, zero)
    yield case("DynamicQuantizeLinear", f(128, 768), outputs=3)
    q = Fixed(np.clip(f(768, 768) * 30, -127, 127).astype(np.int8))
    yield case("MatMulInteger", i(255, 128, 768, dtype="uint8"), q, zero)
    w = Fixed(i(255, 32, 32, 3, 3, dtype="uint8"))
    yield case("ConvInteger", i(255, 1, 32, 28, 28, dtype="uint8"), w, pads=[1] * 4)
    one = Fixed(np.clip(f(64, 64, 3, 3) * 30, -127, 127).astype(np.int8))
    none = Fixed(np.array(0, np.int8))
    given = (i(255, 1, 64, 28, 28, dtype="uint8"), scale, zero, one, scale, none, number(0.5), zero)
    yield case("QLinearConv", *given, pads=[1] * 4)


def rare() -> Iterator[Case]:
    """Operators that few networks have, which therefore no other benchmark times."""
    image = f(1, 64, 32, 32)
    offsets, masks = f(1, 18, 32, 32) / 2, abs(f(1, 9, 32, 32))
    pads: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    yield case("DeformConv", image, weight(64, 64, 3, 3), offsets, None, masks, **pads)
    yield case("Col2Im", f(1, 576, 3136), fixed(56, 56), fixed(3, 3), pads=[1, 1, 1, 1])
    yield case("Hardmax", f(64, 4096))
    yield case("BitShift", i(200, 64, 4096, dtype="uint32"), number(3, "uint32"), direction="RIGHT")
    yield case("Det", f(256, 4, 4), opset=13)
    yield case("DFT", f(16, 400, 1), axis=1, onesided=1, opset=17)
    yield case("STFT", f(1, 16000, 1), number(160, "int64"), Fixed(f(400)), opset=17)
    boxes = np.abs(f(1, 2000, 4)) * 100
    boxes[..., 2:] += boxes[..., :2]
    limits = fixed(100), Fixed(np.array([0.5], np.float32)), Fixed(np.array([0.7], np.float32))
    yield case("NonMaxSuppression", boxes, abs(f(1, 80, 2000)) / 3, *limits)
    words = [*range(500)]
    form: dict[str, Any] = {"pool_int64s": words, "ngram_indexes": words, "ngram_counts": [0]}
    form |= {"min_gram_length": 1, "max_gram_length": 1, "max_skip_count": 0, "mode": "TF"}
    yield case("TfIdfVectorizer", i(500, 64, 200, dtype="int32"), **form)
    # The text of a pipeline of scikit-learn: 100 documents of 120 words.
    names = [f"word{number}" for number in words]
    texts = i(500, 100, 120).astype("U")
    lines = np.array([" ".join(f"word{number}" for number in row) for row in texts], object)
    split: dict[str, Any] = {"tokenexp": "[a-zA-Z0-9_]+", "mark": 0, "mincharnum": 1}
    yield Case("Tokenizer", (lines,), {**split, "pad_value": "#"}, domain="com.microsoft")
    del form["pool_int64s"]
    tokens = np.char.add("word", texts).astype(object)
    yield case("TfIdfVectorizer", tokens, pool_strings=names, **form)


def contributed() -> Iterator[Case]:
    """Operators of ONNX Runtime in decoders."""

    def of(operator: str, *inputs: Array | Fixed | None, outputs: int = 1, **form: Any) -> Case:
        return Case(operator, inputs, form, outputs, 21, "com.microsoft")

    def bytes_(*shape: int) -> Fixed:
        return Fixed(i(256, *shape, dtype="uint8"))

    # Heads of queries and of keys, cached positions, new ones: steps, prompts, a part of a prompt.
    for heads, shared, cached, new in (
        *((14, 2, 512, 1), (32, 8, 2048, 1), (64, 8, 4096, 1)),
        *((14, 2, 0, 1024), (32, 8, 0, 512), (32, 8, 1024, 128)),
    ):
        size = 64 if heads != 32 else 128
        cache = [f(1, shared, cached, size) for _ in range(2)]
        added = [f(1, new, count * size) for count in (heads, shared, shared)]
        ends = np.array([cached + new - 1], np.int32), np.array(cached + new, np.int32)
        options: dict[str, Any] = {"num_heads": heads, "kv_num_heads": shared}
        for window in (-1, 128):
            options["local_window_size"] = window
            yield of("GroupQueryAttention", *added, *cache, *ends, outputs=3, **options)
        bounded = {**options, "local_window_size": -1, "softcap": 50.0}  # as Gemma 2
        yield of("GroupQueryAttention", *added, *cache, *ends, outputs=3, **bounded)
    table = bytes_(32000, 1024), i(32000, 1, 128), weight(32000, 64)
    yield of("GatherBlockQuantized", *table, block_size=32, quantize_axis=1)
    for rows in (1, 128):
        split: dict[str, Any] = {"q_num_heads": 16, "kv_num_heads": 16}
        tokens = [f(1, rows, 2048) / 11 for _ in range(3)]
        gates = -abs(f(1, rows, 16)), np.tanh(abs(f(1, rows, 16)))
        state = f(1, 16, 128, 128)
        yield of("LinearAttention", *tokens, state, *gates, outputs=2, **split)
        steps = f(1, 4096, rows), weight(4096, 1, 4), None, f(1, 4096, 3)
        yield of("CausalConvWithState", *steps, outputs=2, activation="silu")
        yield of("GatedRMSNorm", f(1, rows, 2048), weight(128), f(1, rows, 2048))
        form: dict[str, Any] = {"K": 2048, "N": 2048, "bits": 4, "block_size": 32}
        for level in (0, 4):
            parts = f(rows, 2048), bytes_(2048, 64, 16), weight(2048, 64)
            yield of("MatMulNBits", *parts, accuracy_level=level, **form)
            experts = bytes_(16, 1024, 256), Fixed(abs(f(16, 1024, 16)) / 100), None
            back = bytes_(16, 512, 512), Fixed(abs(f(16, 512, 32)) / 100), None
            more: dict[str, Any] = {"k": 4, "block_size": 32, "accuracy_level": level}
            router = f(rows, 16)
            yield of("QMoE", f(rows, 512), router, *experts, *back, weights_prepacked=0, **more)


FAMILIES: dict[str, Callable[[], Iterator[Case]]] = {
    function.__name__: function
    for function in (
        *(unary, binary, reductions, movement, indexing, windows, normalisations),
        *(products, convolutions, quantised, rare, contributed),
    )
}
