"""Integer products against NumPy's own integers: exact sums, ONNX's rounding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subgraph import ops
from subgraph.graph.types import Array
from tests.support.agreement import result_of
from tests.support.kernels import run_node

BYTES = st.sampled_from(["uint8", "int8"])
CUTS = st.lists(st.floats(0, 1), max_size=3)
QUICK = settings(max_examples=50, deadline=None)
FEW = settings(max_examples=25, deadline=None)


def draw(rng: np.random.Generator, dtype: str, *shape: int) -> Array:
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max + 1, shape).astype(dtype)


def windows(
    x: Array,
    w: Array,
    strides: Sequence[int],
    pads: Sequence[int],
    groups: int = 1,
    dilations: Sequence[int] = (1, 1, 1),
) -> Array:
    """Convolve in int64; ``pads`` are those before all axes, then those after them."""
    axes = range(2, x.ndim)
    count = len(axes)
    around = list(zip(pads[:count], pads[count:], strict=True))
    padded = np.pad(x.astype(np.int64), [(0, 0), (0, 0), *around])
    spans = [(k - 1) * d + 1 for k, d in zip(w.shape[2:], dilations, strict=False)]
    seen = np.lib.stride_tricks.sliding_window_view(padded, spans, tuple(axes))
    steps = [slice(None, None, s) for s in (*strides[:count], *dilations[:count])]
    seen = seen[:, :, *steps]
    seen = seen.reshape(x.shape[0], groups, w.shape[1], *seen.shape[2:])
    filters = w.astype(np.int64).reshape(groups, -1, *w.shape[1:])
    sums = np.einsum(
        seen, [0, 1, 2, *range(10, 10 + count), *range(20, 20 + count)],
        filters, [1, 3, 2, *range(20, 20 + count)],
        [0, 1, 3, *range(10, 10 + count)],
    )  # fmt: skip
    result: Array = sums.reshape(x.shape[0], w.shape[0], *sums.shape[3:])
    return result


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
    sums = windows(shifted, w.astype(np.int64) - int(w_zero), [stride] * 2, [pad] * 4, groups)
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


@FEW
@given(
    rank=st.integers(1, 3),
    images=st.integers(0, 2),
    groups=st.sampled_from([1, 1, 2, 3, 5, 8, 16]),
    channels=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    kernel=st.tuples(*[st.integers(1, 3)] * 3),
    strides=st.tuples(*[st.integers(1, 3)] * 3),
    dilations=st.tuples(*[st.integers(1, 3)] * 3),
    pads=st.tuples(*[st.integers(0, 3)] * 6),
    dtypes=st.tuples(BYTES, BYTES),
    zeros=st.tuples(
        st.sampled_from(["none", "constant", "computed"]),
        st.sampled_from(["none", "usual", "one", "channels"]),
    ),
    flavour=st.sampled_from([None, "pairs", "quads", "checked"]),
    loud=st.booleans(),
    threads=st.integers(1, 3),
    cuts=CUTS,
    seed=st.integers(0, 1 << 30),
)
def test_convolutions_of_any_rank(
    rank: int,
    images: int,
    groups: int,
    channels: tuple[int, int],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
    pads: tuple[int, ...],
    dtypes: tuple[str, str],
    zeros: tuple[str, str],
    flavour: str | None,
    loud: bool,
    threads: int,
    cuts: list[float],
    seed: int,
) -> None:
    """Sums, and what QLinearConv makes of them, in the plain layout."""
    rng = np.random.default_rng(seed)
    outputs, kernel, dilations = groups * channels[1], kernel[:rank], dilations[:rank]
    spatial = [
        (k - 1) * d + int(rng.integers(1, 7)) for k, d in zip(kernel, dilations, strict=True)
    ]
    x = draw(rng, dtypes[0], images, groups * channels[0], *spatial)
    if not loud:
        x = (np.iinfo(dtypes[0]).min + (x & 15)).astype(dtypes[0])
    w = draw(rng, dtypes[1], outputs, channels[0], *kernel)
    x_zero = np.asarray(draw(rng, dtypes[0], 1)[0])
    w_zeros = draw(rng, dtypes[1], outputs)
    usual = np.asarray(0 if dtypes[1] == "int8" else 128, dtypes[1])
    w_zero = {"none": None, "usual": usual, "one": w_zeros[:1], "channels": w_zeros}[zeros[1]]
    each = (-1, *[1] * rank)
    sums = windows(
        x.astype(np.int64) - (0 if zeros[0] == "none" else int(x_zero)),
        w.astype(np.int64)
        - (0 if w_zero is None else w_zero.astype(np.int64).reshape(-1, 1, *each[1:])),
        strides,
        pads[: 2 * rank],
        groups,
        dilations,
    )
    attrs = {
        "group": groups,
        "strides": strides[:rank],
        "dilations": dilations,
        "pads": pads[: 2 * rank],
    }
    options = {} if flavour is None else {"INTEGER_FLAVOUR": flavour}
    constant = [1, 3] if zeros[0] == "computed" else [1, 2, 3]
    point = None if zeros[0] == "none" else x_zero
    (got,) = run_node(
        "ConvInteger",
        [x, w, point, w_zero],
        [sums.shape],
        attrs,
        constant=constant,
        out_dtype="int32",
        threads=threads,
        cuts=cuts,
        options=options,
    )
    np.testing.assert_array_equal(got, sums)
    scales = np.array(0.02, np.float32), rng.uniform(0.001, 0.02, outputs).astype(np.float32)
    y_scale, y_zero = np.array(0.4, np.float32), np.asarray(draw(rng, dtypes[0], 1)[0])
    bias = rng.integers(-5000, 5000, outputs).astype(np.int32)
    scale = (scales[0] * scales[1] / y_scale).reshape(each)
    wanted = rounded(sums + bias.reshape(each), scale, int(y_zero), dtypes[0])
    own = usual * 0 if w_zero is None else w_zero
    (got,) = run_node(
        "QLinearConv",
        [x, scales[0], x_zero * (point is not None), w, scales[1], own, y_scale, y_zero, bias],
        [sums.shape],
        attrs,
        constant=range(1, 9),
        threads=threads,
        cuts=cuts,
        options=options,
    )
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("flavour", ["pairs", "quads", "checked", "matrix"])
def test_sums_of_a_convolution_beyond_int32_wrap_around(flavour: str) -> None:
    """33100 products of 255 and 255 are more than 2**31."""
    x, w = np.full((1, 33100, 2), 255, np.uint8), np.full((3, 33100, 1), 255, np.uint8)
    (got,) = run_node(
        "ConvInteger",
        [x, w],
        [(1, 3, 2)],
        constant=[1],
        out_dtype="int32",
        options={"INTEGER_FLAVOUR": flavour},
    )
    assert (got == np.int64(33100 * 255 * 255).astype(np.int32)).all()


@pytest.mark.parametrize("depth", [1, 64, 258, 259, 700])
@pytest.mark.parametrize("dtypes", ["uint8 uint8", "int8 uint8", "uint8 int8", "int8 int8"])
def test_products_of_computed_bytes(depth: int, dtypes: str) -> None:
    rng, (left, right) = np.random.default_rng(depth), dtypes.split()
    a = rng.integers(np.iinfo(left).min, np.iinfo(left).max, (3, depth), endpoint=True)
    b = rng.integers(np.iinfo(right).min, np.iinfo(right).max, (2, depth, 5), endpoint=True)
    a[0], b[0, :, 0] = np.iinfo(left).max, np.iinfo(right).max
    zeros = np.array(np.iinfo(left).min), np.array(np.iinfo(right).min)
    given = [a.astype(left), b.astype(right)]
    assert result_of(ops.MatMulInteger, *given).tolist() == (a @ b).tolist()
    given += [zeros[0].astype(left), zeros[1].astype(right)]
    want = (a - zeros[0]) @ (b - zeros[1])
    assert result_of(ops.MatMulInteger, *given).tolist() == want.tolist()
