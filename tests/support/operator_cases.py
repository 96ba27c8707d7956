"""Operators with inputs to try them on, for the test that compares devices with the reference."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.graph.types import ONNX_DTYPE, Array, numpy_dtype

FLOATS = ("float32", "float64", "float16", "bfloat16")
SINGLES = ("float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")


@attrs.frozen
class Case:
    """One operator on given inputs.

    Attributes:
        op: The operator.
        inputs: Its inputs, None where one is left out.
        constants: Positions of the inputs that are weights.
        outputs: Number of outputs.
        version: Opset version, 0 for the newest.
        attrs: Attributes.
        tolerance: Absolute tolerance; the relative one follows from the dtype.
    """

    op: str
    inputs: Sequence[Array | None]
    constants: Sequence[int] = ()
    outputs: int = 1
    version: int = 0
    attrs: dict[str, Any] = attrs.field(factory=dict[str, Any])
    tolerance: float = 1e-6

    @property
    def name(self) -> str:
        """The case as text: the operator, dtypes and shapes, attributes."""
        shown = ",".join(
            "-" if a is None else f"{a.dtype}{list(a.shape)}".replace(" ", "") for a in self.inputs
        )
        options = ",".join(f"{key}={value}" for key, value in self.attrs.items())
        version = f"-{self.version}" if self.version else ""
        return f"{self.op}{version}({shown};{options})"


class Inputs:
    """Random inputs that depend on the operator's name only."""

    def __init__(self, name: str) -> None:
        self.rng = np.random.default_rng(zlib.crc32(name.encode()))

    def __call__(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        """Return moderate numbers."""
        if dtype == "bool":
            return self.rng.integers(0, 2, shape).astype(bool)
        if dtype in FLOATS:
            return np.asarray(self.rng.standard_normal(shape) * 3).astype(numpy_dtype(dtype))
        low = 0 if dtype.startswith("u") else -9
        return np.asarray(self.rng.integers(low, 10, shape)).astype(dtype)

    def special(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        """Return numbers with infinities, NaN, zeros of both signs, extremes among them."""
        x = self(shape, dtype)
        flat = x.reshape(-1)
        if dtype in FLOATS:
            odd = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0]
        elif dtype == "bool":
            return x
        else:
            info = np.iinfo(dtype)
            odd = [info.min, info.max, 0, 1]
        if flat.size > 4 * len(odd):
            with np.errstate(invalid="ignore"):
                flat[:: flat.size // len(odd) - 1][: len(odd)] = np.array(odd).astype(x.dtype)
        return x

    def positive(self, shape: Sequence[int], dtype: str = "float32") -> Array:
        """Return numbers from 1/2 on."""
        x = self(shape, dtype)
        return (np.abs(x) + np.asarray(0.5).astype(x.dtype)).astype(x.dtype)


SHAPES: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    ((), ()),
    ((3,), ()),
    ((0, 4), (4,)),
    ((5, 7), (7,)),
    ((2, 3, 4), (3, 1)),
    ((2, 1, 4, 1), (3, 1, 7)),
    ((4, 300), (4, 300)),
    ((1, 3, 1, 5, 1), (2, 3, 4, 5, 6)),
]
UNARY = (
    "Acos Acosh Asin Asinh Atan Atanh Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
    "HardSwish LeakyRelu Log Mish Reciprocal Round Selu Shrink Sigmoid Sin Sinh Softplus Softsign "
    "Sqrt Swish Tan Tanh ThresholdedRelu IsNaN IsInf Abs Neg Sign Relu"
)
BINARY = {
    "Add": (*FLOATS, *INTEGERS),
    "Sub": (*FLOATS, *INTEGERS),
    "Mul": (*FLOATS, *INTEGERS),
    "Div": (*FLOATS, *INTEGERS),
    "Mod": INTEGERS,
    "Max": (*FLOATS, *INTEGERS),
    "Min": ("float32", "int32"),
    "Equal": (*SINGLES, "int64", "bool"),
    "Less": ("float32", "int32", "uint64"),
    "GreaterOrEqual": ("float32", "int8"),
    "And": ("bool",),
    "Or": ("bool",),
    "Xor": ("bool",),
    "BitwiseAnd": ("int32", "uint8"),
    "BitwiseXor": ("int64",),
    "Sum": SINGLES,
    "Mean": SINGLES,
    "Pow": SINGLES,
}


def _ints(*values: Any) -> Array:
    return np.array(values, np.int64)


def elementwise() -> Iterator[Case]:
    """Yield unary, binary and other elementwise operators."""
    for op in UNARY.split(" "):
        make = Inputs(op)
        yield Case(op, [make.special((3, 50))])
        yield Case(op, [make.special((40,), "float64")])
        yield Case(op, [make(())])
    for op in ("Exp", "Gelu", "Relu", "Tanh", "Sqrt"):
        yield from (Case(op, [Inputs(op)((40,), dtype)]) for dtype in ("float16", "bfloat16"))
    for op, dtypes in BINARY.items():
        make = Inputs(op)
        for dtype in dtypes:
            shapes = SHAPES if dtype == dtypes[0] else SHAPES[6:7]
            for a, b in shapes:
                x, y = make.special(a, dtype), make.special(b, dtype)
                if op in ("Div", "Mod") and dtype in INTEGERS:
                    y = np.asarray(np.where(y == 0, 3, y)).astype(dtype)
                yield Case(op, [x, y])
    yield from _more_elementwise()


def _more_elementwise() -> Iterator[Case]:
    make = Inputs("more")
    yield Case("Max", [make((3, 50)), make((50,)), make((3, 1))])
    yield Case("Sum", [make((3, 50))])
    yield Case("Mod", [make((70,)), make.positive((70,))], attrs={"fmod": 1})
    # NumPy takes the root of -0 and -inf where the exponent is one number.
    for exponent, corners in ((2.0, [-0.0, -np.inf]), (3.0, [-0.0, -np.inf]), (0.5, [0.0])):
        base = make.positive((70,)) if exponent == 0.5 else make((70,))
        base = np.concatenate([base, np.array([*corners, np.inf, np.nan], np.float32)])
        yield Case("Pow", [base, np.array(exponent, np.float32)], constants=[1])
    for exponent in (-0.5, -1.0):
        base = np.concatenate([make.positive((70,)), np.array([0, 1e-38, np.inf], np.float32)])
        yield Case("Pow", [base, np.array(exponent, np.float32)], constants=[1])
    for dtype in ("int8", "uint8", "int32", "uint32"):
        ends = np.iinfo(dtype)
        near = [ends.min, ends.min + 1, 0, 1, 2, 3, ends.max - 1, ends.max]
        wide = np.array([*near, 7, ends.max // 2, ends.max // 2 + 1, ends.max // 3], dtype)
        divisors = wide[wide != 0]
        for op in ("Div", "Mod"):
            yield Case(op, [wide[:, None], divisors])
    yield Case("Pow", [make((70,)), _ints(3)])
    yield Case("Pow", [make((70,), "int32"), np.abs(make((70,), "int32")) % 5])
    for direction in ("LEFT", "RIGHT"):
        shifts = [make((70,), "uint8"), make((70,), "uint8")]
        yield Case("BitShift", shifts, attrs={"direction": direction})
    yield Case("Not", [make((3, 50), "bool")])
    yield Case("BitwiseNot", [make((3, 50), "int16")])
    yield Case("PRelu", [make((2, 3, 5)), make((3, 1))], constants=[1])
    yield Case("Gelu", [make((60,))], attrs={"approximate": "tanh"})
    yield Case("Celu", [make((60,))], attrs={"alpha": 0.5})
    yield Case("Shrink", [make((60,))], attrs={"bias": 0.5, "lambd": 0.25})
    yield Case("IsInf", [make.special((60,))], attrs={"detect_negative": 0})
    bounds = [np.array(bound, np.float32) for bound in (-1, 2)]
    yield Case("Clip", [make.special((60,)), *bounds])
    yield Case("Clip", [make((60,))], version=6, attrs={"min": -1.0, "max": 2.0})
    for dtype in ("float32", "int64", "bool", "float16"):
        three = [make((3, 1), "bool"), make((3, 50), dtype), make((1, 50), dtype)]
        yield Case("Where", three)
    yield Case("CastLike", [make((60,)), make((1,), "int32")])
    for source in ("float32", "float64", "int64", "uint8", "bool", "float16", "bfloat16"):
        for target in ("float32", "float16", "bfloat16", "int32", "uint8", "int64", "bool"):
            x = make((3, 40), source)
            if source in FLOATS and target == "uint8":
                x = np.abs(x)
            yield Case("Cast", [x], attrs={"to": ONNX_DTYPE[target]})
    legacy = [make((2, 3, 4, 5)), make((3,))]
    yield Case("Add", legacy, version=6, attrs={"broadcast": 1, "axis": 1})


def movement() -> Iterator[Case]:
    """Yield operators that move elements."""
    for dtype in ("float32", "int64", "bool", "float16"):
        make = Inputs(f"movement{dtype}")
        x = make((3, 4, 5, 6), dtype)
        orders = [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (0, 3, 1, 2), (0, 2, 3, 1)]
        yield from (Case("Transpose", [x], attrs={"perm": order}) for order in orders)
        yield Case("Transpose", [make((70, 90), dtype)])
        yield Case("Transpose", [make((2, 100, 3), dtype)], attrs={"perm": (0, 2, 1)})
        yield Case("Transpose", [make((), dtype)])
        yield Case("Transpose", [make((0, 3), dtype)])
        boxes = [
            ((0, 1), (2, -1), (0, 2), (1, 1)),
            ((-1, 10), (-100, -100), (3, 2), (-1, -2)),
            ((0,), (2**63 - 1,), (3,), (2,)),
            ((1,), (3,), (0,), (1,)),
            ((3,), (1,), (0,), (1,)),
        ]
        for box in boxes:
            yield Case("Slice", [x, *(_ints(*part) for part in box)], constants=[1, 2, 3, 4])
        for axis in (0, 1, 3):
            yield Case("Concat", [x, make(x.shape, dtype), x], attrs={"axis": axis})
            parts = {"axis": axis, "num_outputs": 2}
            yield Case("Split", [x], outputs=2, attrs=parts)
        yield Case("Split", [x, _ints(1, 3)], [1], outputs=2, attrs={"axis": 1})
        yield Case("Reshape", [x, _ints(6, -1)], [1])
        yield Case("Squeeze", [make((1, 3, 1), dtype)])
        yield Case("Unsqueeze", [x, _ints(0, 5)], [1])
        yield Case("Flatten", [x], attrs={"axis": 2})
        yield Case("Expand", [make((3, 1), dtype), _ints(2, 3, 6)], [1])
        yield Case("Tile", [make((3, 2), dtype), _ints(2, 3)], [1])
        for mode in ("constant", "edge", "reflect", "wrap"):
            pads = _ints(0, 1, 1, 2, 0, 0, 2, 1)
            yield Case("Pad", [x, pads], [1], attrs={"mode": mode})
        yield Case("Pad", [x, _ints(0, -1, 1, 2, 0, 0, -2, 1)], [1])
        yield Case("Trilu", [make((3, 5, 7), dtype), np.array(-2)], [1], attrs={"upper": 0})
        yield Case("DepthToSpace", [make((2, 8, 3, 5), dtype)], attrs={"blocksize": 2})
        yield Case("SpaceToDepth", [make((2, 3, 4, 6), dtype)], attrs={"blocksize": 2})
    make = Inputs("movement")
    crd = {"blocksize": 2, "mode": "CRD"}
    yield Case("DepthToSpace", [make((2, 8, 3, 5))], attrs=crd)
    yield Case("ReverseSequence", [make((4, 3, 5)), _ints(4, 1, 2)], attrs={"time_axis": 0})
    yield Case("Dropout", [make((3, 4))], version=13)


def reductions() -> Iterator[Case]:
    """Yield reductions and what is made of them."""
    shapes = [
        ((3, 70), (1,)),
        ((3, 70), (0,)),
        ((2, 3, 4, 5), (1, 3)),
        ((2, 3, 300), (0, 1)),
        ((2, 3, 130, 2), (1,)),
        ((3, 0), (0,)),
        ((), ()),
    ]
    for op in ["Sum", "Mean", "Prod", "Max", "Min", "L1", "L2", "SumSquare", "LogSum", "LogSumExp"]:
        make = Inputs(op)
        for shape, axes in shapes:
            x = make.positive(shape) if op in ("Prod", "LogSum") else make(shape)
            keep = {"keepdims": len(axes) % 2}
            given = [x, _ints(*axes)]
            yield Case(f"Reduce{op}", given, [1], version=18, attrs=keep, tolerance=1e-4)
        idle = {"noop_with_empty_axes": 1}
        yield Case(f"Reduce{op}", [make.positive((3, 7))], version=18, attrs=idle)
        for dtype in ("float64", "float16"):
            x = (make.positive((3, 7), dtype) / 2).astype(dtype)
            yield Case(f"Reduce{op}", [x, _ints(1)], [1], version=18)
    make = Inputs("reductions")
    yield Case("ReduceSum", [make((3, 70), "int32"), _ints(1)], [1], version=13)
    yield Case("ReduceMax", [make((3, 70), "bool"), _ints(0)], [1], version=20)
    yield Case("ReduceMin", [make.special((3, 70)), _ints(1)], [1], version=18)
    for op in ("ArgMax", "ArgMin"):
        for shape, axis in [((3, 70), 1), ((3, 70), 0), ((2, 5, 33), 1)]:
            for last in (0, 1):
                options = {"axis": axis, "select_last_index": last, "keepdims": last}
                yield Case(op, [make.special(shape)], attrs=options)
        yield Case(op, [make((3, 70), "int8")], attrs={"axis": 1})
    for axis, reverse, exclusive in [(0, 0, 0), (1, 1, 0), (1, 0, 1)]:
        options = {"reverse": reverse, "exclusive": exclusive}
        given = [make((3, 70)), np.array(axis)]
        yield Case("CumSum", given, [1], attrs=options, tolerance=1e-4)
    for order in (1, 2):
        yield Case("LpNormalization", [make((3, 7, 5))], attrs={"axis": 1, "p": order})


def normalizations() -> Iterator[Case]:
    """Yield softmax and the normalizations."""
    make = Inputs("normalization")
    for op in ("Softmax", "LogSoftmax"):
        for shape, axis in [
            ((3, 70), 1),
            ((3, 70), 0),
            ((2, 5, 33), 1),
            ((2, 16), -1),
            ((2, 0), 1),
        ]:
            yield Case(op, [make(shape)], version=13, attrs={"axis": axis})
        yield Case(op, [make((2, 5, 33))], version=11, attrs={"axis": 1})
        yield Case(op, [make((3, 20), "float64")], version=13)
    for shape, axis in [((3, 70), -1), ((2, 3, 4, 5), 2), ((5, 16), 1)]:
        rest = shape[axis:]
        x, scale, bias = make(shape), make(rest), make(rest)
        at = {"axis": axis}
        yield Case("LayerNormalization", [x, scale, bias], [1, 2], 3, 17, at, 1e-5)
        yield Case("LayerNormalization", [x, scale], [1], 1, 17, at, 1e-5)
        yield Case("RMSNormalization", [x, scale], [1], 1, 23, at, 1e-5)
    half = [make((3, 70), "float16"), make((70,), "float16")]
    yield Case("LayerNormalization", half, [1], version=17)
    for dtype in SINGLES:
        x, scale, bias = make((2, 6, 5, 7), dtype), make((6,), dtype), make((6,), dtype)
        mean, variance = make((6,), dtype), make.positive((6,), dtype)
        yield Case("InstanceNormalization", [x, scale, bias], [1, 2], tolerance=1e-5)
        groups = {"num_groups": 3}
        given = [x, scale, bias]
        if dtype == "float32":  # the standard computes float64 in float32 too
            yield Case("GroupNormalization", given, [1, 2], 1, 21, groups, 1e-5)
        stored = [x, scale, bias, mean, variance]
        yield Case("BatchNormalization", stored, [1, 2, 3, 4], version=15, tolerance=1e-5)
        yield Case("BatchNormalization", stored, version=15, tolerance=1e-5)
        for size, beta in [(3, 0.6), (5, 0.75), (4, 0.75)]:
            options = {"size": size, "beta": beta, "alpha": 0.1}
            yield Case("LRN", [x], attrs=options, tolerance=1e-5)


def indexing() -> Iterator[Case]:
    """Yield operators that take and put elements by index."""
    for dtype in ("float32", "int64", "bool", "float16"):
        make = Inputs(f"indexing{dtype}")
        x, rng = make((5, 4, 6), dtype), make.rng
        for axis in (0, 1, -1):
            at = {"axis": axis}
            yield Case("Gather", [x, rng.integers(-4, 4, (3, 2))], attrs=at)
            yield Case("Gather", [x, np.array(-2)], [1], attrs=at)
            picks = rng.integers(-4, 4, (5, 4, 6)).astype(np.int32)
            yield Case("GatherElements", [x, picks], attrs=at)
            order = np.argsort(rng.random((5, 4, 6)), axis=axis)
            yield Case("ScatterElements", [x, order, make((5, 4, 6), dtype)], version=13, attrs=at)
        yield Case("GatherND", [x, _ints([0, 1], [4, -1], [2, 3])])
        yield Case("GatherND", [x, rng.integers(0, 4, (5, 3, 1))], attrs={"batch_dims": 1})
        updates = make((3, 6), dtype)
        yield Case("ScatterND", [x, _ints([0, 1], [4, -1], [2, 3]), updates], version=13)
        depth = [rng.integers(-5, 6, (3, 4)), np.array(5), make((2,), dtype)]
        yield Case("OneHot", depth, [1])
    make = Inputs("indexing")
    for reduction in ("add", "mul", "max", "min"):
        options = {"reduction": reduction}
        tuples = _ints([0, 1], [0, 1], [2, 3])
        yield Case("ScatterND", [make((5, 4, 6)), tuples, make((3, 6))], version=18, attrs=options)
        rows = _ints([0, 1, 0], [2, 2, 2])
        given = [make((3, 3)), rows, make((2, 3))]
        yield Case("ScatterElements", given, version=18, attrs=options)
    for axis, largest in [(0, 1), (1, 0), (2, 1)]:
        x = make.rng.permutation(60).reshape(3, 4, 5).astype(np.float32)
        options = {"axis": axis, "largest": largest}
        yield Case("TopK", [x, _ints(3)], [1], 2, 11, options)
    yield Case("TopK", [make((3, 200)), _ints(100)], [1], 2, 11)


def resizing() -> Iterator[Case]:
    """Yield Resize in its modes."""
    make = Inputs("resize")
    x = make((2, 3, 7, 9))
    transforms = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    for transform in transforms:
        for scales in ((1, 1, 2, 2), (1, 1, 0.6, 0.7)):
            sizes = np.array(scales, np.float32)
            common = {"coordinate_transformation_mode": transform}
            for rounding in ("floor", "round_prefer_floor", "round_prefer_ceil"):
                options = {**common, "mode": "nearest", "nearest_mode": rounding}
                yield Case("Resize", [x, None, sizes], [2], version=19, attrs=options)
            for mode, extra in [
                ("linear", {}),
                ("cubic", {}),
                ("cubic", {"exclude_outside": 1}),
                ("linear", {"antialias": 1}),
            ]:
                options = {**common, "mode": mode, **extra}
                given = [x, None, sizes]
                yield Case("Resize", given, [2], version=19, attrs=options, tolerance=2e-5)
    target = [x, None, None, _ints(2, 3, 14, 5)]
    yield Case("Resize", target, [3], version=19, attrs={"mode": "linear"}, tolerance=2e-5)
    factors = np.array([1, 1, 2, 3], np.float32)
    yield Case("Upsample", [x, factors], [1], version=9, attrs={"mode": "nearest"})


def quantization() -> Iterator[Case]:
    """Yield quantization to and from 8 and 16 bits, for the whole and along an axis."""
    make = Inputs("quantization")
    one = np.array(0.05, np.float32)
    for dtype in ("uint8", "int8", "uint16", "int16"):
        x, whole = make((2, 3, 4)), np.abs(make((2, 3, 4), dtype))
        scales, zeros = make.positive((3,)) / 9, np.abs(make((3,), dtype))
        yield Case("QuantizeLinear", [x, one, zeros[0].reshape(())], [1, 2], version=21)
        yield Case("QuantizeLinear", [x, scales.astype(np.float32), zeros], version=21)
        yield Case("DequantizeLinear", [whole, one, zeros[0].reshape(())], [1, 2], version=21)
        yield Case("DequantizeLinear", [whole, scales.astype(np.float32), zeros], version=21)
    yield Case("DequantizeLinear", [make((2, 3, 4), "int32"), one], [1], version=13)
    yield Case("DynamicQuantizeLinear", [make((30, 4))], outputs=3, version=11)


EINSUMS = {
    "ij,jk->ik": [(3, 4), (4, 5)],
    "bhid,bhjd->bhij": [(2, 3, 4, 5), (2, 3, 6, 5)],
    "bthd,bshd->bhts": [(2, 3, 4, 5), (2, 6, 4, 5)],
    "...ij,...jk->...ik": [(2, 3, 4), (2, 4, 5)],
    "ij,jk,kl->il": [(3, 4), (4, 5), (5, 6)],
    "ijk,jil->kl": [(3, 4, 5), (4, 3, 6)],
    "ij->ji": [(3, 4)],
    "ii->i": [(4, 4)],
    "i,j->ij": [(4,), (3,)],
    "i,i->": [(4,), (4,)],
    "ij,kj": [(3, 4), (5, 4)],
    "...i->...": [(2, 3)],
}


def composites() -> Iterator[Case]:
    """Yield operators that are made of others."""
    make = Inputs("composites")
    yield Case("Hardmax", [make((3, 5, 7))], version=13, attrs={"axis": 1})
    yield Case("Hardmax", [make((3, 5, 7))], version=11, attrs={"axis": 1})
    yield Case("MeanVarianceNormalization", [make((3, 5, 7, 2))], version=13, tolerance=1e-5)
    for equation, shapes in EINSUMS.items():
        given = [make(shape) for shape in shapes]
        options = {"equation": equation}
        yield Case("Einsum", given, version=12, attrs=options, tolerance=1e-4)
        if len(shapes) == 2:
            yield Case("Einsum", given, [1], 1, 12, options, 1e-4)


def recurrent() -> Iterator[Case]:
    """Yield LSTM, GRU and RNN in every direction, with and without biases and initial states."""
    make = Inputs("recurrent")
    steps, batch, width = 5, 3, 7
    for op, gates, states in (("LSTM", 4, 2), ("GRU", 3, 1), ("RNN", 1, 1)):
        for direction, hidden in (("forward", 4), ("reverse", 20), ("bidirectional", 64)):
            count = 2 if direction == "bidirectional" else 1
            weights = [
                make((count, gates * hidden, width)) / 4,
                make((count, gates * hidden, hidden)) / 8,
                make((count, 2 * gates * hidden)) / 4,
            ]
            held = [weight.astype(np.float32) for weight in weights]
            start = [make((count, batch, hidden)) / 4 for _ in range(states)]
            given = [make((steps, batch, width)), *held, None]
            given += [state.astype(np.float32) for state in start]
            options: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
            yield Case(op, given, [1, 2, 3], states + 1, 14, options, 2e-5)
            yield Case(op, given[:3], [1, 2], states + 1, 14, options, 2e-5)
            if op == "GRU":
                linear = {**options, "linear_before_reset": 1}
                yield Case(op, given, [1, 2, 3], states + 1, 14, linear, 2e-5)


def rotary() -> Iterator[Case]:
    """Yield RotaryEmbedding of both pairings and ranks."""
    make = Inputs("rotary")
    places = _ints([0, 3, 2, 5, 9], [1, 1, 0, 4, 8])
    for interleaved in (0, 1):
        options = {"interleaved": interleaved}
        angles = [make((10, 4)), make((10, 4))]
        yield Case("RotaryEmbedding", [make((2, 3, 5, 8)), *angles, places], (), 1, 23, options)
        own = [make((2, 5, 4)), make((2, 5, 4))]
        yield Case("RotaryEmbedding", [make((2, 3, 5, 8)), *own], (), 1, 23, options)
        flat = {**options, "num_heads": 3}
        yield Case("RotaryEmbedding", [make((2, 5, 24)), *angles, places], (), 1, 23, flat)
        less = {**options, "rotary_embedding_dim": 4}
        few = [make((10, 2)), make((10, 2)), places]
        yield Case("RotaryEmbedding", [make((2, 3, 5, 8)), *few], (), 1, 23, less)


FAMILIES = (
    elementwise,
    movement,
    reductions,
    normalizations,
    indexing,
    resizing,
    quantization,
    composites,
    recurrent,
    rotary,
)


def all_cases() -> list[Case]:
    """Return all cases, each name once."""
    found: dict[str, Case] = {}
    for family in FAMILIES:
        for number, case in enumerate(family()):
            name = case.name if case.name not in found else f"{case.name}#{number}"
            found[name] = case
    return list(found.values())
