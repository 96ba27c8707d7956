"""Templates of random graphs with attributes, dtypes, shapes and bodies of every kind.

Broadcasting of both operands, integers and half precision, empty and 0-d tensors, paddings, strides
and groups of every kind, reductions over several axes, negative indices and steps, loops and scans.
Names in `RARE_TEMPLATES` end in "*": these operators, or such forms of those that have a simple
template in `subgraph.testing.graph_templates` too, are drawn only where rare graphs are wanted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.graph import Graph
from subgraph.graph.types import ONNX_DTYPE
from subgraph.testing.graph_templates import (
    TEMPLATES,
    Apply,
    Draw,
    Pool,
    dims,
    draw_int,
    dtype,
    grow,
    make,
    template,
)

RARE_TEMPLATES: dict[str, Apply] = {}
RARE_SHAPES = ((), (1,), (0, 3), (5, 1), (2, 0, 4), (1, 6, 5, 5), (2, 4, 7), (1, 2, 3, 4, 3))
_INTEGERS = ("int32", "int64", "int8", "uint8")
# Half of the draws are float32, because most templates need such a value.
RARE_DTYPES = (*("float32",) * 8, *_INTEGERS, "float64", "bool", "float16")
_MAX_ENLARGED_ELEMENTS = 600  # elements of a value that an operator may enlarge


def _rare(*names: str) -> Callable[[Apply], Apply]:
    return template(*(f"{name}*" for name in names), table=RARE_TEMPLATES)


def _size(shape: Iterable[int]) -> int:
    return math.prod(shape)


@template("Div")
@_rare("Add", "Sub", "Mul", "Max", "Min", "Equal", "Greater", "GreaterOrEqual", "Pow")
def _broadcast(draw: Draw, pool: Pool, name: str) -> Any:
    """Broadcast either operand, in any dtype of numbers; divisors and exponents are in [1, 3]."""
    x = pool.pick(draw, ("float32", "float64", "float16", *_INTEGERS), empty=True)
    shape = [1 if draw(st.booleans()) else d for d in dims(x)]
    shape = shape[draw_int(draw, 0, len(shape)) :]
    if not shape or draw(st.booleans()):
        front = draw(st.lists(st.sampled_from([1, 2]), max_size=2))
        shape = [*front, *([1] * (len(dims(x)) - len(shape))), *shape]
    if _size(np.broadcast_shapes(shape, dims(x))) > _MAX_ENLARGED_ELEMENTS or len(shape) > 5:
        return None
    low, high = (1, 4) if name in ("Div", "Pow") else (0, 5) if dtype(x) == "uint8" else (-4, 5)
    y = pool.constant(pool.rng.integers(low, high, shape), dtype(x))
    if name == "Pow":
        return make(name, x, y) if dtype(x) in ("float32", "float64", "int32", "int64") else None
    if name == "Div" or draw(st.booleans()):
        return make(name, x, y)
    return make(name, y, x)


@_rare("BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot", "BitShift", "Mod", "Neg", "Abs")
def _bits(draw: Draw, pool: Pool, name: str) -> Any:
    dtypes = ("uint8",) if name == "BitShift" else ("int32", "int64", "uint8", "int8")
    x = pool.pick(draw, dtypes, empty=True)
    if name in ("BitwiseNot", "Abs", "Neg"):
        return make(name, x) if dtype(x) != "uint8" or name == "BitwiseNot" else None
    y = pool.constant(pool.rng.integers(1, 5, dims(x)[-1:]), dtype(x))
    if name == "BitShift":
        return make(name, x, y, direction=draw(st.sampled_from(["LEFT", "RIGHT"])))
    return make(name, x, y, fmod=draw_int(draw, 0, 1)) if name == "Mod" else make(name, x, y)


@template("Cast")
def _cast(draw: Draw, pool: Pool, name: str) -> Any:
    """Cast to any dtype of numbers; floats are brought into [-20, 20] before a cast to integers."""
    x = pool.pick(draw, ("float32", "float64", "float16", "bool", *_INTEGERS), empty=True)
    to = draw(st.sampled_from(["float32", "float64", "float16", "bool", *_INTEGERS]))
    if dtype(x).startswith("float") and to in _INTEGERS:
        x = make("Mul", make("Cast", make("Tanh", make("Cast", x, to=1)), to=1), np.float32(20))
        x = make("Abs", x) if to == "uint8" else x
    return make("Cast", x, to=ONNX_DTYPE[to])


@_rare("Sqrt", "Log", "Exp", "Reciprocal", "Atan", "Asinh", "Sinh", "Acosh", "IsNaN", "IsInf")
def _partial(draw: Draw, pool: Pool, name: str) -> Any:
    """Functions that need bounded arguments or have a limited domain, in float32 and float64."""
    x = pool.pick(draw, ("float32", "float64"), empty=True)
    x = make("Clip", x, *(pool.constant(k, dtype(x)) for k in (-5, 5)))
    if name in ("Sqrt", "Log", "Reciprocal", "Acosh"):
        x = make("Add", make("Abs", x), pool.constant(1, dtype(x)))
    return make(name, x)


@template("Clip")
@_rare("Celu", "Elu", "LeakyRelu", "HardSigmoid", "Selu", "Gelu", "PRelu", "Shrink")
def _activation(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, empty=True)
    alpha = draw(st.sampled_from([0.125, 0.5, 1.5]))
    if name == "PRelu":
        return make(name, x, pool.weight(dims(x)[draw_int(draw, 0, len(dims(x))) :]))
    if name == "Clip":
        ends = [None if draw(st.booleans()) else np.float32(k) for k in (-0.5, 0.75)]
        return make(name, x, *ends)
    if name == "Gelu":
        return make(name, x, approximate=draw(st.sampled_from(["none", "tanh"])))
    if name == "Shrink":
        return make(name, x, lambd=alpha, bias=alpha)  # equal, so that the function is continuous
    more = {"beta": 0.4} if name == "HardSigmoid" else {}
    more = {"gamma": 0.9} if name == "Selu" else more
    return make(name, x, alpha=alpha, **more)


def _window(draw: Draw, x: Any, least: int = 1) -> dict[str, Any]:
    """Return attributes of a window (kernel, strides, dilations, pads) that fit the input.

    Args:
        draw: Given by hypothesis.
        x: The input, (batch, channels, sizes...).
        least: Smallest kernel size.
    """
    space = dims(x)[2:]
    kernel = [draw_int(draw, min(least, size), min(3, size)) for size in space]
    strides = [draw_int(draw, 1, 3) for _ in space]
    wanted = [draw_int(draw, 1, 2) for _ in space]
    dilations = [d if (k - 1) * d < n else 1 for d, k, n in zip(wanted, kernel, space, strict=True)]
    pads = [draw_int(draw, 0, k - 1) for k in (*kernel, *kernel)]
    found: dict[str, Any] = {"kernel_shape": kernel, "strides": strides, "dilations": dilations}
    auto = draw(st.sampled_from(["", "", "SAME_UPPER", "SAME_LOWER", "VALID"]))
    if not auto:
        return {**found, "pads": pads}
    if auto.startswith("SAME"):
        found["dilations"] = [1] * len(space)
    return {**found, "auto_pad": auto}


@template("Conv")
@_rare("ConvTranspose")
def _conv(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=3, most=5)
    channels = dims(x)[1]
    group = draw(st.sampled_from([g for g in (1, 2, 3, channels) if channels % g == 0]))
    each = draw_int(draw, 1, 3)
    window = _window(draw, x)
    if name == "Conv":
        weight = pool.weight((group * each, channels // group, *window["kernel_shape"]))
    else:
        window.pop("auto_pad", None)
        window["dilations"] = [1] * len(dims(x)[2:])
        weight = pool.weight((channels, each, *window["kernel_shape"]))
        if _size(dims(x)) * 9 > 4 * _MAX_ENLARGED_ELEMENTS:
            return None
    bias = [pool.weight((group * each,))] if draw(st.booleans()) else []
    return make(name, x, weight, *bias, group=group, **window)


@template("MaxPool", "AveragePool")
@_rare("LpPool")
def _pool(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=3, most=5)
    window = _window(draw, x)
    if window.get("auto_pad", "").startswith("SAME"):
        # With larger strides ONNX Runtime, with which tests compare, computes negative pads.
        pairs = zip(window["strides"], window["kernel_shape"], strict=True)
        window["strides"] = [min(stride, size) for stride, size in pairs]
    ceil = {"ceil_mode": draw_int(draw, 0, 1)} if "auto_pad" not in window else {}
    if name == "LpPool":
        return make("LpPool", x, p=draw_int(draw, 1, 3), **window)
    if name == "AveragePool":
        return make("AveragePool", x, count_include_pad=draw_int(draw, 0, 1), **ceil, **window)
    window["dilations"] = [1] * len(dims(x)[2:]) if ceil.get("ceil_mode") else window["dilations"]
    return make("MaxPool", x, **ceil, **window, outputs=draw_int(draw, 1, 2))


@template("LayerNormalization")
@_rare("GroupNormalization", "LRN", "RMSNormalization", "LpNormalization")
def _normal(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank={"GroupNormalization": 3, "LRN": 4}.get(name, 1))
    axis = draw_int(draw, -len(dims(x)), len(dims(x)) - 1)
    if name == "LRN":
        return make(name, x, size=2 * draw_int(draw, 0, 2) + 1, alpha=0.1, beta=0.6, bias=1.5)
    if name == "LpNormalization":
        return make(name, x, axis=axis, p=draw_int(draw, 1, 2))
    if name == "GroupNormalization":
        channels = dims(x)[1]
        groups = draw(st.sampled_from([g for g in (1, 2, 3, channels) if channels % g == 0]))
        return make(name, x, pool.weight((channels,)), pool.weight((channels,)), num_groups=groups)
    shape = dims(x)[axis:]
    if name == "RMSNormalization":
        return make(name, x, pool.weight(shape), axis=axis)
    return make(name, x, pool.weight(shape), pool.weight(shape), axis=axis, outputs=1)


@template("Gemm")
def _gemm(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, ("float32", "float64"), rank=2, most=2)
    transposed, other, wide = draw_int(draw, 0, 1), draw_int(draw, 0, 1), draw_int(draw, 1, 5)
    rows, inner = dims(x)[::-1] if transposed else dims(x)
    shape = draw(st.sampled_from([None, (), (1,), (wide,), (rows, 1), (1, wide), (rows, wide)]))

    def operand(size: tuple[int, ...]) -> Any:
        if dtype(x) == "float32":
            return pool.weight(size)
        return pool.constant(pool.rng.uniform(-1, 1, size), dtype(x))

    second = operand((wide, inner) if other else (inner, wide))
    third = [] if shape is None else [operand(shape)]
    scales = {"alpha": draw(st.sampled_from([1.0, 0.5])), "beta": draw(st.sampled_from([1.0, 2.0]))}
    return make("Gemm", x, second, *third, transA=transposed, transB=other, **scales)


@template("MatMul")
def _matmul(draw: Draw, pool: Pool, name: str) -> Any:
    """Products of batches that broadcast, and of vectors; either operand is the weight."""
    x = pool.pick(draw, rank=1, empty=True)
    if _size(dims(x)) > _MAX_ENLARGED_ELEMENTS or 0 in dims(x)[-2:-1]:
        return None  # ONNX Runtime drops the other operand's batch if the inner size is 0
    batch = list(dims(x)[:-2])
    batch = [1 if draw(st.booleans()) else d for d in batch][draw_int(draw, 0, len(batch)) :]
    if draw(st.booleans()) and len(batch) < 2:
        batch = [2, *([1] * (max(len(dims(x)) - 2, 0) - len(batch))), *batch]
    wide = draw_int(draw, 1, 5)
    if draw(st.booleans()) or len(dims(x)) < 2:
        end = [] if draw(st.booleans()) and not batch else [wide]
        return make("MatMul", x, pool.weight((*(batch if end else []), dims(x)[-1], *end)))
    return make("MatMul", pool.weight((*batch, wide, dims(x)[-2])), x)


@template("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2")
@_rare("ReduceProd", "ReduceL1", "ReduceSumSquare", "ReduceLogSumExp")
def _reduce(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, ("float32", "float64", "int32", "int64"))
    if name == "ReduceProd":
        # The product of many elements would overflow.
        x = make("Clip", x, *(pool.constant(k, dtype(x)) for k in (-1, 1)))
    if name == "ReduceLogSumExp" and not dtype(x).startswith("float"):
        return None
    rank = len(dims(x))
    axes: list[int] = []
    if rank:
        axes = draw(st.lists(st.integers(0, rank - 1), unique=True, max_size=3))
    axes = [a - rank if draw(st.booleans()) else a for a in axes]
    keep = {"keepdims": draw_int(draw, 0, 1), "noop_with_empty_axes": draw_int(draw, 0, 1)}
    return make(name, x, *([pool.constant(axes)] if axes or draw(st.booleans()) else []), **keep)


@template("ArgMax")
@_rare("ArgMin")
def _extreme(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, ("float32", "int32"), rank=1)
    axis = draw_int(draw, -len(dims(x)), len(dims(x)) - 1)
    more = {"keepdims": draw_int(draw, 0, 1), "select_last_index": draw_int(draw, 0, 1)}
    return make(name, x, axis=axis, **more)


@template("Slice")
def _slice(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, ("float32", "int64", "bool", "uint8", "float16"), rank=1, empty=True)
    rank = len(dims(x))
    axes = draw(st.lists(st.integers(0, rank - 1), unique=True, min_size=1, max_size=2))
    ends = [[draw_int(draw, -4, 6) for _ in axes] for _ in range(2)]
    steps = [draw(st.sampled_from([1, 2, -1, -2])) for _ in axes]
    axes = [a - rank if draw(st.booleans()) else a for a in axes]
    return make("Slice", x, *(pool.constant(k) for k in (*ends, axes, steps)))


@template("Gather")
@_rare("GatherElements", "GatherND", "ScatterElements", "ScatterND")
def _indexed(draw: Draw, pool: Pool, name: str) -> Any:
    """Indices of any shape, also negative; scatters reduce, as duplicates have no order."""
    x = pool.pick(draw, ("float32", "int64", "float64"), rank=1)
    if _size(dims(x)) > _MAX_ENLARGED_ELEMENTS:
        return None
    shape, rank = dims(x), len(dims(x))
    axis = draw_int(draw, -rank, rank - 1)
    size = shape[axis]
    if name == "Gather":
        some = draw(st.sampled_from([(), (1,), (3,), (2, 2), (0,)]))
        return make(name, x, pool.constant(pool.rng.integers(-size, size, some)), axis=axis)
    if name == "GatherElements":
        return make(name, x, pool.constant(pool.rng.integers(-size, size, shape)), axis=axis)
    depth = draw_int(draw, 1, rank)
    count = draw_int(draw, 1, 3)
    positions = np.stack([pool.rng.integers(-d, d, count) for d in shape[:depth]], -1)
    if name == "GatherND":
        return make(name, x, pool.constant(positions))
    how = draw(st.sampled_from(["add", "max", "min"]))
    if name == "ScatterND":
        updates = pool.constant(pool.rng.integers(-3, 4, (count, *shape[depth:])), dtype(x))
        return make(name, x, pool.constant(positions), updates, reduction=how)
    updates = pool.constant(pool.rng.integers(-3, 4, shape), dtype(x))
    indices = pool.constant(pool.rng.integers(-size, size, shape))
    return make(name, x, indices, updates, axis=axis, reduction=how)


@template("Reshape", "Unsqueeze")
@_rare("Squeeze", "Expand", "Tile", "Identity", "Size")
def _shaped(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, RARE_DTYPES, empty=name not in ("Reshape", "Squeeze"))
    shape = list(dims(x))
    if name in ("Identity", "Size"):
        return make(name, x)
    if name == "Reshape":
        cut = draw_int(draw, 0, len(shape))
        return make(name, x, pool.constant([*([0] * cut), -1] if cut < len(shape) else [-1]))
    if name == "Squeeze":
        ones = [k - len(shape) * draw(st.booleans()) for k, d in enumerate(shape) if d == 1]
        return make(name, x, pool.constant(ones)) if ones else make(name, x)
    if name == "Unsqueeze":
        return make(name, x, pool.constant([-1, 0])) if len(shape) < 4 else None
    if _size(shape) * 4 > _MAX_ENLARGED_ELEMENTS or len(shape) > 4:
        return None
    if name == "Tile":
        return (
            make(name, x, pool.constant([draw_int(draw, 1, 2) for _ in shape])) if shape else None
        )
    wanted = [2, *(1 if draw(st.booleans()) else d for d in shape)]
    return make(name, x, pool.constant(wanted))


@template("Pad")
def _pad(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, ("float32", "int64", "float64"), rank=1)
    if _size(dims(x)) > _MAX_ENLARGED_ELEMENTS // 4:
        return None
    mode = draw(st.sampled_from(["constant", "reflect", "edge", "wrap"]))
    low = -1 if mode == "constant" and min(dims(x)) > 2 else 0
    most = min(2, min(dims(x)) - 1) if mode in ("reflect", "wrap") else 2
    around = [draw_int(draw, low, max(most, 0)) for _ in range(2 * len(dims(x)))]
    value = [pool.constant(3, dtype(x))] if mode == "constant" and draw(st.booleans()) else []
    return make("Pad", x, pool.constant(around), *value, mode=mode)


@template("CumSum")
@_rare("Split", "Concat", "DepthToSpace", "SpaceToDepth", "Trilu", "ReverseSequence")
def _moved(draw: Draw, pool: Pool, name: str) -> Any:
    least = {"DepthToSpace": 4, "SpaceToDepth": 4, "Trilu": 2, "ReverseSequence": 2}.get(name, 1)
    x = pool.pick(draw, ("float32", "float64"), rank=least, most=4 if least == 4 else 9)
    shape = dims(x)
    axis = draw_int(draw, -len(shape), len(shape) - 1)
    if name == "Split":
        return make(name, x, axis=axis, num_outputs=2, outputs=2) if shape[axis] > 2 else None
    if name == "Concat":
        other = list(shape)
        other[axis] = draw_int(draw, 0, 2)
        return make(name, x, pool.constant(np.ones(other), dtype(x)), axis=axis)
    if name == "DepthToSpace":
        mode = draw(st.sampled_from(["DCR", "CRD"]))
        return make(name, x, blocksize=2, mode=mode) if shape[1] % 4 == 0 else None
    if name == "SpaceToDepth":
        return make(name, x, blocksize=2) if shape[2] % 2 == 0 and shape[3] % 2 == 0 else None
    if name == "Trilu":
        return make(name, x, pool.constant(draw_int(draw, -2, 2)), upper=draw_int(draw, 0, 1))
    if name == "ReverseSequence":
        lengths = pool.constant([draw_int(draw, 1, shape[0]) for _ in range(shape[1])])
        return make(name, x, lengths)
    how = {"exclusive": draw_int(draw, 0, 1), "reverse": draw_int(draw, 0, 1)}
    return make(name, x, pool.constant(axis), **how)


@template("TopK", "Softmax", "LogSoftmax")
@_rare("OneHot", "Resize")
def _various(draw: Draw, pool: Pool, name: str) -> Any:
    if name == "OneHot":
        x = pool.pick(draw, ("int64", "int32"), rank=1, most=3, empty=True)
        values = pool.constant([0.25, 2], "float32")
        return make(name, x, pool.constant(4), values, axis=draw_int(draw, -1, len(dims(x))))
    x = pool.pick(draw, rank=4 if name == "Resize" else 1, most=4 if name == "Resize" else 9)
    axis = draw_int(draw, -len(dims(x)), len(dims(x)) - 1)
    if name == "TopK":
        k = pool.constant([draw_int(draw, 1, dims(x)[axis])])
        return make(name, x, k, axis=axis, largest=draw_int(draw, 0, 1))
    if name == "Resize":
        factors = [1, 1, *(draw(st.sampled_from([0.5, 1, 2, 1.5])) for _ in "hw")]
        scales = sg.ops.Constant(value=np.array(factors, np.float32))
        return make(name, x, None, scales, mode=draw(st.sampled_from(["nearest", "linear"])))
    return make(name, x, axis=axis)


@_rare("QuantizeLinear", "DequantizeLinear", "MatMulInteger")
def _quantized(draw: Draw, pool: Pool, name: str) -> Any:
    kind = draw(st.sampled_from(["int8", "uint8"]))
    zero = pool.constant(3, kind)
    if name == "MatMulInteger":
        x = pool.pick(draw, ("int8", "uint8"), rank=2)
        numbers = pool.rng.integers(0, 100, (dims(x)[-1], 3))
        return make(name, x, pool.constant(numbers, kind), pool.constant(2, dtype(x)), zero)
    if name == "QuantizeLinear":
        x = pool.pick(draw, empty=True)
        return make(name, x, pool.constant(0.061, "float32"), zero)
    x = pool.pick(draw, ("int8", "uint8"), empty=True)
    return make(name, x, pool.constant(0.05, "float32"), pool.constant(3, dtype(x)))


@_rare("NonZero", "Compress", "Unique")
def _found(draw: Draw, pool: Pool, name: str) -> Any:
    """Operators whose output size depends on values; a sum makes the shape static again."""
    x = pool.pick(draw, ("float32", "bool", "int64"), rank=1, empty=True)
    if name == "NonZero":
        found = make(name, x)
    elif name == "Unique":
        if dtype(x) == "bool":
            return None
        found = make(name, x, outputs=1)
    else:
        flags = pool.constant(pool.rng.integers(0, 2, dims(x)[0]), "bool")
        found = make(name, x, flags, axis=0)
    return make("ReduceSum", make("Cast", found, to=1), keepdims=0)


def _body(draw: Draw, pool: Pool, own: Sequence[Any], x: Any) -> Pool:
    """Return the pool of a new body: its inputs ``own``, captures of ``x`` and another, results."""
    other = pool.pick(draw, RARE_DTYPES, empty=True)
    captured = [x] if other is x else [x, other]
    inner = Pool([*(sg.capture(value) for value in captured), *own], pool.weights, pool.rng)
    grow(draw, inner, {**RARE_TEMPLATES, **TEMPLATES}, draw_int(draw, 0, 4))
    pool.weights = inner.weights
    return inner


def _next(draw: Draw, inner: Pool, state: Any) -> Any:
    """Return the next state of a loop: a bounded function of a result of its shape."""
    found = inner.like(draw, dims(state), "float32")
    return make("Tanh", make("Add", state, found))


@_rare("Loop", "Scan")
def _repeated(draw: Draw, pool: Pool, name: str) -> Any:
    """A loop of a few iterations with a carried value and captures."""
    x = pool.pick(draw, rank=1)
    if _size(dims(x)) > _MAX_ENLARGED_ELEMENTS:
        return None
    pool.weights += 1
    number = pool.weights
    state = sg.input(f"state{number}", dims(x), "float32")
    if name == "Scan":
        row = sg.input(f"row{number}", dims(x)[1:], "float32")
        inner = _body(draw, pool, [row, state], x)
        body = Graph([state, row], [_next(draw, inner, state), make("Neg", row)], f"scan{number}")
        return make("Scan", x, x, num_scan_inputs=1, body=body, outputs=2)
    iteration = sg.input(f"iteration{number}", (), "int64")
    go = sg.input(f"go{number}", (), "bool")
    inner = _body(draw, pool, [iteration, state], x)
    following = _next(draw, inner, state)
    on: Any = make("Identity", go)
    if draw(st.booleans()):  # a condition that depends on values
        on = make("Less", make("ReduceMean", following, keepdims=0), np.float32(0.1))
    rows = inner.pick(draw, RARE_DTYPES)
    body = Graph([iteration, go, state], [on, following, make("Cast", rows, to=1)], f"loop{number}")
    last, stacked = make("Loop", pool.constant(draw_int(draw, 0, 4)), None, x, body=body, outputs=2)
    return last, make("ReduceSum", stacked, pool.constant([0]), keepdims=0)


@_rare("If")
def _branches(draw: Draw, pool: Pool, name: str) -> Any:
    """Two branches, chosen by a computed value or a constant."""
    x = pool.pick(draw)
    bodies: list[Graph] = []
    for which in ("then", "else"):
        inner = _body(draw, pool, [], x)
        result = make("Neg", inner.like(draw, dims(x), "float32"))
        bodies.append(Graph([], [result], f"{which}{pool.weights}"))
        pool.weights += 1
    known = pool.constant(draw(st.booleans()), "bool")
    least = make("ReduceMin", x, keepdims=0) if _size(dims(x)) else np.float32(0)
    chosen = known if draw(st.booleans()) else make("Less", least, np.float32(-0.5))
    return make("If", chosen, then_branch=bodies[0], else_branch=bodies[1])


@_rare("LSTM", "GRU", "RNN")
def _recurrent(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=3, most=3)
    direction = draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    sides, hidden = 1 + (direction == "bidirectional"), draw_int(draw, 1, 4)
    rows = {"LSTM": 4, "GRU": 3, "RNN": 1}[name] * hidden
    given = [pool.weight((sides, rows, dims(x)[2])), pool.weight((sides, rows, hidden))]
    if draw(st.booleans()):
        given.append(pool.weight((sides, 2 * rows)))
    more = {"linear_before_reset": draw_int(draw, 0, 1)} if name == "GRU" else {}
    bounded = make("Tanh", x)
    return make(name, bounded, *given, direction=direction, hidden_size=hidden, outputs=2, **more)
