"""Integer products against NumPy's own integers: exact sums, ONNX's rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subgraph.graph.types import Array
from tests.support.kernels import run_node

BYTES = st.sampled_from(["uint8", "int8"])
CUTS = st.lists(st.floats(0, 1), max_size=3)
QUICK = settings(max_examples=50, deadline=None)


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def windows(x: Array, w: Array, stride: int, pad: int, groups: int) -> Array:
    """Convolve in int64, one tap at a time."""
    padded = np.pad(x.astype(np.int64), [(0, 0), (0, 0), (pad, pad), (pad, pad)])
    kernel = w.shape[2]
    out = [(n - kernel) // stride + 1 for n in padded.shape[2:]]
    images, outputs = x.shape[0], w.shape[0] // groups
    result = np.zeros((images, groups, outputs, *out), np.int64)
    split = w.astype(np.int64).reshape(groups, outputs, -1, kernel, kernel)
    for i in range(kernel):
        for j in range(kernel):
            ends = [i + (out[0] - 1) * stride + 1, j + (out[1] - 1) * stride + 1]
            part = padded[:, :, i : ends[0] : stride, j : ends[1] : stride]
            part = part.reshape(images, groups, -1, *out)
            result += np.einsum("ngihw,goi->ngohw", part, split[..., i, j])
    return result.reshape(images, w.shape[0], *out)


def rounded(sums: Array, scale: Array, zero: int, dtype: str) -> Array:
    info = np.iinfo(dtype)
    real = np.rint(sums.astype(np.float32) * scale.astype(np.float32)) + zero
    return np.clip(real, info.min, info.max).astype(dtype)


@QUICK
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 70), st.integers(1, 90)),
    dtypes=st.tuples(BYTES, BYTES),
    zeros=st.tuples(st.booleans(), st.sampled_from(["none", "one", "columns"])),
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_matmul_integer(
    sizes: tuple[int, int, int],
    dtypes: tuple[str, str],
    zeros: tuple[bool, str],
    threads: int,
    cuts: list[float],
) -> None:
    rng = np.random.default_rng(0)
    m, n, k = sizes
    a, b = draw(rng, dtypes[0], 2, m, k), draw(rng, dtypes[1], k, n)
    za = draw(rng, dtypes[0], 1)[0] if zeros[0] else None
    zb = {"none": None, "one": draw(rng, dtypes[1], 1)[0], "columns": draw(rng, dtypes[1], n)}
    right_zero = zb[zeros[1]]
    left = a.astype(np.int64) - (0 if za is None else int(za))
    right = b.astype(np.int64) - (0 if right_zero is None else right_zero.astype(np.int64))
    given_zeros = [None if z is None else np.asarray(z) for z in (za, right_zero)]
    (got,) = run_node(
        "MatMulInteger",
        [a, b, *given_zeros],
        [(2, m, n)],
        constant=[1, 2, 3],
        threads=threads,
        cuts=cuts,
        out_dtype="int32",
    )
    np.testing.assert_array_equal(got, left @ right)


@QUICK
@given(
    sizes=st.tuples(st.integers(1, 20), st.integers(1, 70), st.integers(1, 60)),
    dtypes=st.tuples(BYTES, BYTES),
    per_column=st.booleans(),
)
def test_qlinear_matmul(
    sizes: tuple[int, int, int], dtypes: tuple[str, str], per_column: bool
) -> None:
    rng = np.random.default_rng(0)
    m, n, k = sizes
    a, b = draw(rng, dtypes[0], m, k), draw(rng, dtypes[1], k, n)
    count = n if per_column else 1
    a_zero, b_zero = draw(rng, dtypes[0], 1)[0], draw(rng, dtypes[1], count)
    y_zero = draw(rng, dtypes[0], 1)[0]
    a_scale = np.array(0.01, np.float32)
    b_scale = rng.uniform(0.005, 0.01, count).astype(np.float32)
    y_scale = np.array(0.05, np.float32)
    sums = (a.astype(np.int64) - int(a_zero)) @ (b.astype(np.int64) - b_zero.astype(np.int64))
    wanted = rounded(sums, a_scale * b_scale / y_scale, int(y_zero), dtypes[0])
    zero_points = [np.asarray(a_zero), b_zero, np.asarray(y_zero)]
    (got,) = run_node(
        "QLinearMatMul",
        [a, a_scale, zero_points[0], b, b_scale, zero_points[1], y_scale, zero_points[2]],
        [(m, n)],
        constant=range(1, 8),
        cuts=[0.3],
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize(("kernel", "stride", "pad"), [(1, 1, 0), (3, 1, 1), (3, 2, 1), (5, 3, 2)])
@pytest.mark.parametrize("dtypes", [("uint8", "int8"), ("uint8", "uint8"), ("int8", "int8")])
def test_convolutions(
    groups: int, kernel: int, stride: int, pad: int, dtypes: tuple[str, str]
) -> None:
    rng = np.random.default_rng(0)
    x = draw(rng, dtypes[0], 2, 6, 11, 9)
    w = draw(rng, dtypes[1], 18, 6 // groups, kernel, kernel)
    x_zero, w_zero = draw(rng, dtypes[0], 1)[0], draw(rng, dtypes[1], 1)[0]
    attrs = {"group": groups, "strides": (stride,) * 2, "pads": (pad,) * 4}
    shifted = x.astype(np.int64) - int(x_zero)
    sums = windows(shifted, w.astype(np.int64) - int(w_zero), stride, pad, groups)
    zeros = [np.asarray(x_zero), np.asarray(w_zero)]
    (got,) = run_node(
        "ConvInteger",
        [x, w, *zeros],
        [sums.shape],
        attrs,
        constant=[1, 2, 3],
        out_dtype="int32",
        cuts=[0.5],
    )
    np.testing.assert_array_equal(got, sums)
    x_scale, y_scale = np.array(0.02, np.float32), np.array(0.5, np.float32)
    w_scale = rng.uniform(0.01, 0.02, 18).astype(np.float32)
    bias = rng.integers(-5000, 5000, 18).astype(np.int32)
    scale = (x_scale * w_scale / y_scale).reshape(-1, 1, 1)
    y_zero = np.asarray(draw(rng, dtypes[0], 1)[0])
    wanted = rounded(sums + bias.reshape(-1, 1, 1), scale, int(y_zero), dtypes[0])
    (got,) = run_node(
        "QLinearConv",
        [x, x_scale, zeros[0], w, w_scale, zeros[1], y_scale, y_zero, bias],
        [sums.shape],
        attrs,
        constant=range(1, 9),
        cuts=[0.5],
    )
    np.testing.assert_array_equal(got, wanted)
