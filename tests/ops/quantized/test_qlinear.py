"""Quantized convolutions and products in blocks against NumPy's own integers, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from tests.support.kernels import run_node

from .test_integer import BYTES, draw, windows

FEW = settings(max_examples=15, deadline=None)


def requantised(sums: Array, scale: Array, zero: int, dtype: str, shift: Any = 0) -> Array:
    """Scale in float32, round to nearest even, add the zero point, saturate."""
    info = np.iinfo(dtype)
    real = sums.astype(np.float32) * scale.astype(np.float32) + np.asarray(shift, np.float32)
    return np.clip(np.rint(real) + zero, info.min, info.max).astype(dtype)


@pytest.mark.parametrize("flavour", ["pairs", "quads", "checked", "matrix"])
@FEW
@given(
    channels=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    dilation=st.integers(1, 2),
    pad=st.integers(0, 2),
    dtypes=st.tuples(BYTES, BYTES),
    weight_zero=st.booleans(),
    loud=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    residual=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_convolutions(
    flavour: str,
    channels: tuple[int, int],
    kernel: int,
    stride: int,
    dilation: int,
    pad: int,
    dtypes: tuple[str, str],
    weight_zero: bool,
    loud: float,
    residual: bool,
    threads: int,
    seed: int,
) -> None:
    """Channels are quiet but for some: few steps are corrected, or all, or none."""
    rng = np.random.default_rng(seed)
    inputs, outputs = channels
    if flavour == "matrix":
        inputs *= 4  # pixels of their patches have 64 channels
    image = inputs <= 4
    if image:
        dtypes = "uint8", dtypes[1]  # signed images would be further kernels to compile
    x = draw(rng, dtypes[0], 2, inputs, 9, 11)
    quiet = np.iinfo(dtypes[0]).min + rng.integers(0, 30, x.shape)
    loudness = rng.random(inputs).reshape(-1, 1, 1) < loud
    x = np.where(loudness, x, quiet).astype(dtypes[0])
    w = draw(rng, dtypes[1], outputs, inputs, kernel, kernel)
    x_zero = draw(rng, dtypes[0], 1)[0]
    usual = 0 if dtypes[1] == "int8" else 128
    w_zero = draw(rng, dtypes[1], outputs) if weight_zero else np.array([usual], dtypes[1])
    signed = w.astype(np.int64) - w_zero.astype(np.int64).reshape(-1, 1, 1, 1)
    shifted = x.astype(np.int64) - int(x_zero)
    sums = windows(shifted, signed, [stride] * 2, [pad] * 4, dilations=[dilation] * 2)
    bias = rng.integers(-5000, 5000, outputs).astype(np.int32)
    scales = np.array(0.02, np.float32), rng.uniform(0.001, 0.02, outputs).astype(np.float32)
    y_scale, y_zero = np.array(0.4, np.float32), draw(rng, dtypes[0], 1)[0]
    scale = (scales[0] * scales[1] / y_scale).reshape(-1, 1, 1)
    wanted = requantised(sums + bias.reshape(-1, 1, 1), scale, int(y_zero), dtypes[0])
    operands: list[Any] = [x, scales[0], np.asarray(x_zero), w, scales[1], w_zero, y_scale]
    operands += [np.asarray(y_zero), bias]
    attrs: dict[str, Any] = {
        "strides": (stride,) * 2,
        "pads": (pad,) * 4,
        "dilations": (dilation,) * 2,
    }
    blocked = () if image else (0,)
    if residual:
        r, (r_zero, sum_zero) = draw(rng, dtypes[0], *sums.shape), draw(rng, dtypes[0], 2)
        factors = [np.array(f, np.float32) for f in rng.uniform(0.05, 2, 3)]
        own, added, total = factors
        real = (wanted.astype(np.float32) - np.float32(y_zero)) * own
        real = real + (r.astype(np.float32) - np.float32(r_zero)) * added
        low, high = sorted(int(b) for b in draw(rng, dtypes[0], 2))
        attrs |= {"sum_low": low, "sum_high": high}
        wanted = np.clip(np.rint(real / total) + np.float32(sum_zero), low, high).astype(dtypes[0])
        operands += [None, r, added, np.asarray(r_zero), own, total, np.asarray(sum_zero)]
        blocked = (*blocked, 10)
    (got,) = run_node(
        "FusedQLinearConv" if residual else "QLinearConv",
        operands,
        [sums.shape],
        attrs,
        domain=INTERNAL_DOMAIN if residual else "",
        constant=[k for k in range(1, len(operands)) if k != 10],
        blocked=blocked,
        out_layout="blocked",
        threads=threads,
        cuts=[0.4],
        options={"INTEGER_FLAVOUR": flavour, "WINOGRAD": False},
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("flavour", ["pairs", "quads"])
@FEW
@given(
    channels=st.integers(17, 50),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 9)),
    size=st.tuples(st.integers(5, 12), st.integers(9, 30)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.sampled_from([1, 1, 2])),
    pads=st.tuples(*[st.integers(0, 4)] * 4),
    dtypes=st.tuples(BYTES, BYTES),
    weight_zero=st.sampled_from(["usual", "usual", "any"]),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_depthwise_convolutions(
    flavour: str,
    channels: int,
    kernel: tuple[int, int],
    size: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
    dtypes: tuple[str, str],
    weight_zero: str,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    dilations = tuple(
        1 if 2 * (k - 1) >= n else d for d, k, n in zip(dilations, kernel, size, strict=True)
    )
    x, w = draw(rng, dtypes[0], 2, channels, *size), draw(rng, dtypes[1], channels, 1, *kernel)
    x_zero, y_zero = draw(rng, dtypes[0], 2)
    usual = 0 if dtypes[1] == "int8" else 128
    w_zero = np.full(channels, usual, dtypes[1])
    if weight_zero == "any":
        w_zero = draw(rng, dtypes[1], channels)
    signed = w.astype(np.int64) - w_zero.astype(np.int64).reshape(-1, 1, 1, 1)
    shifted = x.astype(np.int64) - int(x_zero)
    sums = np.concatenate(
        [
            windows(shifted[:, c : c + 1], signed[c : c + 1], strides, pads, dilations=dilations)
            for c in range(channels)
        ],
        axis=1,
    )
    bias = rng.integers(-5000, 5000, channels).astype(np.int32)
    scales = np.array(0.02, np.float32), rng.uniform(0.001, 0.02, channels).astype(np.float32)
    y_scale = np.array(0.4, np.float32)
    scale = (scales[0] * scales[1] / y_scale).reshape(-1, 1, 1)
    wanted = requantised(sums + bias.reshape(-1, 1, 1), scale, int(y_zero), dtypes[0])
    (got,) = run_node(
        "QLinearConv",
        [x, scales[0], np.asarray(x_zero), w, scales[1], w_zero, y_scale, np.asarray(y_zero), bias],
        [sums.shape],
        {"strides": strides, "pads": pads, "dilations": dilations, "group": channels},
        constant=range(1, 9),
        blocked=(0,),
        out_layout="blocked",
        threads=threads,
        cuts=[0.4],
        options={"INTEGER_FLAVOUR": flavour},
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("flavour", ["pairs", "quads", "matrix"])
@FEW
@given(
    channels=st.tuples(st.integers(1, 4), st.integers(1, 40)),
    kernel=st.tuples(st.integers(1, 3), st.integers(1, 20)),
    size=st.tuples(st.integers(3, 12), st.integers(20, 70)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 4)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    dtype=BYTES,
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_images_of_few_channels(
    flavour: str,
    channels: tuple[int, int],
    kernel: tuple[int, int],
    size: tuple[int, int],
    strides: tuple[int, int],
    pads: tuple[int, ...],
    dtype: str,
    threads: int,
    seed: int,
) -> None:
    """Rows of a kernel take one step of a matrix tile, or two if they have more than 64 bytes."""
    rng = np.random.default_rng(seed)
    inputs, outputs = channels
    x = draw(rng, dtype, 2, inputs, *size)
    w = draw(rng, "int8", outputs, inputs, *kernel)
    x_zero, y_zero = draw(rng, dtype, 2)
    sums = windows(x.astype(np.int64) - int(x_zero), w, strides, pads)
    scales = np.array(0.02, np.float32), rng.uniform(0.001, 0.02, outputs).astype(np.float32)
    y_scale, w_zero = np.array(0.4, np.float32), np.zeros(1, np.int8)
    scale = (scales[0] * scales[1] / y_scale).reshape(-1, 1, 1)
    (got,) = run_node(
        "QLinearConv",
        [x, scales[0], np.asarray(x_zero), w, scales[1], w_zero, y_scale, np.asarray(y_zero)],
        [sums.shape],
        {"strides": strides, "pads": pads},
        constant=range(1, 8),
        out_layout="blocked",
        threads=threads,
        cuts=[0.4],
        options={"INTEGER_FLAVOUR": flavour},
    )
    np.testing.assert_array_equal(got, requantised(sums, scale, int(y_zero), dtype))


@pytest.mark.parametrize("flavour", ["pairs", "quads", "checked", "matrix"])
@FEW
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 40), st.integers(1, 60)),
    dtypes=st.tuples(BYTES, BYTES),
    zeros=st.sampled_from(["none", "usual", "one", "columns"]),
    computed=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_zero_points_of_both_sides(
    flavour: str,
    sizes: tuple[int, int, int],
    dtypes: tuple[str, str],
    zeros: str,
    computed: bool,
    threads: int,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    m, n, k = sizes
    a, b = draw(rng, dtypes[0], m, k), draw(rng, dtypes[1], k, n)
    za, columns = draw(rng, dtypes[0], 1)[0], draw(rng, dtypes[1], n)
    usual = np.asarray(0 if dtypes[1] == "int8" else 128, dtypes[1])
    zb = {"none": None, "usual": usual, "one": np.asarray(columns[0]), "columns": columns}[zeros]
    (got,) = run_node(
        "MatMulInteger",
        [a, b, np.asarray(za), zb],
        [(m, n)],
        constant=[1, 3] if computed else [1, 2, 3],
        out_dtype="int32",
        threads=threads,
        cuts=[0.4],
        options={"INTEGER_FLAVOUR": flavour},
    )
    right = b.astype(np.int64) - (0 if zb is None else zb.astype(np.int64))
    np.testing.assert_array_equal(got, (a.astype(np.int64) - int(za)) @ right)


@pytest.mark.parametrize("flavour", ["pairs", "quads"])
@FEW
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 50), st.integers(1, 60)),
    stacks=st.sampled_from(
        [((), ()), ((3,), (3,)), ((2, 2), (2, 2)), ((3,), ()), ((), (3,)), ((3, 1), (1, 2))]
    ),
    dtypes=st.tuples(BYTES, BYTES),
    columns=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_two_sides_that_are_computed(
    flavour: str,
    sizes: tuple[int, int, int],
    stacks: tuple[tuple[int, ...], tuple[int, ...]],
    dtypes: tuple[str, str],
    columns: bool,
    threads: int,
    seed: int,
) -> None:
    """Tiles take most of them, floats those whose stacks broadcast and the flavour ``pairs``."""
    rng = np.random.default_rng(seed)
    m, n, k = sizes
    a, b = draw(rng, dtypes[0], *stacks[0], m, k), draw(rng, dtypes[1], *stacks[1], k, n)
    za = draw(rng, dtypes[0], 1)[0]
    tiles = flavour == "quads" and stacks != ((3, 1), (1, 2))
    zb = draw(rng, dtypes[1], n) if columns and tiles else draw(rng, dtypes[1], 1)[0]
    wanted = (a.astype(np.int64) - int(za)) @ (b.astype(np.int64) - zb.astype(np.int64))
    (got,) = run_node(
        "MatMulInteger",
        [a, b, np.asarray(za), np.asarray(zb)],
        [wanted.shape],
        out_dtype="int32",
        threads=threads,
        cuts=[0.4],
        options={"INTEGER_FLAVOUR": flavour},
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("shapes", [((7, 300), (300, 9)), ((2, 40, 40), (2, 40, 40)), ((9,), (9,))])
def test_computed_sides_of_many_terms(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """What is chosen by itself: deep products, large ones, vectors; without zero points."""
    a, b = (np.full(shape, 255, np.uint8) for shape in shapes)
    wanted = a.astype(np.int64) @ b.astype(np.int64)
    (got,) = run_node("MatMulInteger", [a, b], [wanted.shape], out_dtype="int32")
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("flavour", ["pairs", "quads", "checked", "matrix"])
@pytest.mark.parametrize("loud", [0, 1, 9, 200])
@pytest.mark.parametrize("rows", [1, 6, 13])
def test_products_that_saturate_in_16_bits(flavour: str, loud: int, rows: int) -> None:
    rng = np.random.default_rng(rows + loud)
    a = rng.integers(0, 20, (rows, 200)).astype(np.uint8)
    a[:, rng.permutation(200)[:loud]] = 255
    b = np.where(rng.random((200, 33)) < 0.5, 127, -128).astype(np.int8)
    b[:, 5], b[:, 20] = 127, -128
    (got,) = run_node(
        "MatMulInteger",
        [a, b, np.asarray(7, np.uint8)],
        [(rows, 33)],
        constant=[1, 2],
        out_dtype="int32",
        options={"INTEGER_FLAVOUR": flavour},
    )
    np.testing.assert_array_equal(got, (a.astype(np.int64) - 7) @ b.astype(np.int64))


@pytest.mark.parametrize("output", ["uint8", "int8"])
def test_results_far_outside_saturate(output: str) -> None:
    info = np.iinfo(output)
    a = np.full((2, 300), 255, np.uint8)
    b = np.stack([np.full(300, 127, np.int8), np.full(300, -128, np.int8)], 1)
    one, huge = np.array(1, np.float32), np.array(1e6, np.float32)
    zero = np.array(3, output)
    inputs = [a, one, np.array(0, np.uint8), b, huge, np.zeros(1, np.int8), one, zero]
    (got,) = run_node("QLinearMatMul", inputs, [(2, 2)], constant=range(1, 8), out_dtype=output)
    np.testing.assert_array_equal(got, np.array([[info.max, info.min]] * 2, output))
