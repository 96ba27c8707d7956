"""Pooling against sliding windows in NumPy: kinds, layouts, ranks, ceil mode, padding."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Layout
from subgraph.graph.types import Array
from tests.support.kernels import run_node

CUTS = st.lists(st.floats(0, 1), max_size=3)
# Each another kernel to compile; doubles differ in the number of lanes alone.
KINDS = [
    *(("MaxPool", "float32"), ("AveragePool", "float32"), ("LpPool", "float32")),
    ("AveragePool", "float64"),
]
LAYOUTS: st.SearchStrategy[Layout] = st.sampled_from(["plain", "blocked"])


def reference(
    x: Array,
    op_type: str,
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    ceil: bool,
    include: bool,
) -> Array:
    """Pool in float64, window by window."""
    rank = x.ndim - 2
    out: list[int] = []
    for i in range(rank):
        free = x.shape[2 + i] + pads[i] + pads[rank + i] - (kernel[i] - 1) * dilations[i] - 1
        size = (math.ceil if ceil else math.floor)(free / strides[i]) + 1
        if ceil and (size - 1) * strides[i] >= x.shape[2 + i] + pads[i]:
            size -= 1  # a window may not begin in the padding after the image
        out.append(size)
    result = np.zeros((*x.shape[:2], *out))
    for place in itertools.product(*map(range, out)):
        taps: list[list[int]] = []
        counted = 1
        for i in range(rank):
            at = [place[i] * strides[i] - pads[i] + k * dilations[i] for k in range(kernel[i])]
            taps.append([a for a in at if 0 <= a < x.shape[2 + i]])
            counted *= sum(1 for a in at if a < x.shape[2 + i] + pads[rank + i])
        values = x[np.ix_(range(x.shape[0]), range(x.shape[1]), *taps)].astype(np.float64)
        values = values.reshape(*x.shape[:2], -1)
        if op_type == "MaxPool":
            pooled = values.max(-1, initial=-np.inf)
        elif op_type == "AveragePool":
            pooled = values.sum(-1) / (counted if include else values.shape[-1])
        else:
            pooled = np.sqrt((values**2).sum(-1))
        result[(slice(None), slice(None), *place)] = pooled
    return result


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    layout=LAYOUTS,
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_window(
    data: st.DataObject, kind: tuple[str, str], layout: Layout, threads: int, cuts: list[float]
) -> None:
    op_type, dtype = kind
    rank = data.draw(st.integers(1, 3))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    strides = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    dilations = [data.draw(st.integers(1, 2)) for _ in range(rank)]
    pads = [data.draw(st.integers(0, kernel[i % rank] - 1)) for i in range(2 * rank)]
    source = [
        (k - 1) * d + 1 + data.draw(st.integers(0, 12 if rank < 3 else 4))
        for k, d in zip(kernel, dilations, strict=True)
    ]
    ceil, include = data.draw(st.booleans()), data.draw(st.booleans())
    if ceil and data.draw(st.booleans()):  # the beginning of one window is enough
        for i, size in enumerate(source):
            kernel[i] = size + data.draw(st.integers(0, 5))
            strides[i] = kernel[i] * dilations[i]
    channels = data.draw(st.one_of(st.integers(1, 20), st.sampled_from([8, 16, 32])))
    x = np.random.default_rng(0).standard_normal((2, channels, *source)).astype(dtype)
    wanted = reference(x, op_type, kernel, strides, dilations, pads, ceil, include)
    (got,) = run_node(
        op_type,
        [x],
        [wanted.shape],
        {
            "kernel_shape": tuple(kernel),
            "strides": tuple(strides),
            "dilations": tuple(dilations),
            "pads": tuple(pads),
            "ceil_mode": int(ceil),
            "count_include_pad": int(include),
        },
        blocked=[0] if layout == "blocked" else [],
        out_layout=layout,
        threads=threads,
        cuts=cuts,
    )
    keep = np.isfinite(wanted)  # an average of nothing is not defined
    np.testing.assert_allclose(got[keep], wanted[keep], rtol=1e-5, atol=1e-6)


@settings(max_examples=80, deadline=None)
@given(
    data=st.data(),
    kind=st.sampled_from(KINDS),
    images=st.integers(1, 20),
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_windows_along_whole_images(
    data: st.DataObject, kind: tuple[str, str], images: int, threads: int, cuts: list[float]
) -> None:
    """Those and the ones that halve it run along whole images, however long their rows are."""
    op_type, dtype = kind
    rank = data.draw(st.integers(1, 2))
    kernel = [data.draw(st.integers(1, 5)) for _ in range(rank)]
    dilations = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
    before = [data.draw(st.integers(0, n)) for n in reach]
    after = [data.draw(st.integers(0, n)) for n in reach]
    after[-1] = reach[-1] - before[-1]
    source = [n + data.draw(st.integers(1, 40)) for n in reach]
    strides = [1] * rank
    if data.draw(st.booleans()):
        strides = [data.draw(st.integers(1, 3)), 2][-rank:]
        source[-1] += source[-1] % 2
    include = data.draw(st.booleans())
    x = np.random.default_rng(0).standard_normal((1, images, *source)).astype(dtype)
    pads = (*before, *after)
    wanted = reference(x, op_type, kernel, strides, dilations, pads, False, include)
    (got,) = run_node(
        op_type,
        [x],
        [wanted.shape],
        {
            "kernel_shape": tuple(kernel),
            "strides": tuple(strides),
            "dilations": tuple(dilations),
            "pads": pads,
            "count_include_pad": int(include),
        },
        threads=threads,
        cuts=cuts,
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool"])
@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 1), (5, 4), (8000, 50), (1, 2)])
def test_long_rows_are_cut(op_type: str, kernel: int, stride: int) -> None:
    pads, height = (1, kernel // 2, 0, kernel // 3), (2, kernel)
    x = np.random.default_rng(kernel).standard_normal((1, 2, 3, 9001)).astype(np.float32)
    wide = np.pad(x, ((0, 0), (0, 0), (1, 0), pads[1::2]), constant_values=np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(wide, height, (2, 3))[..., ::stride, :, :]
    join = np.nanmax if op_type == "MaxPool" else np.nanmean
    wanted = join(windows.astype(np.float64) if kernel < 9 else windows, axis=(4, 5))
    (got,) = run_node(
        op_type,
        [x],
        [wanted.shape],
        {"kernel_shape": height, "strides": (1, stride), "pads": pads},
        cuts=[0.4],
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(
    op_type=st.sampled_from(["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"]),
    shape=st.tuples(st.integers(1, 2), st.integers(1, 40), st.integers(1, 9), st.integers(1, 20)),
    layout=LAYOUTS,
    cuts=CUTS,
)
def test_whole(
    op_type: str, shape: tuple[int, int, int, int], layout: Layout, cuts: list[float]
) -> None:
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = {
        "GlobalMaxPool": lambda: wide.max((2, 3), keepdims=True),
        "GlobalAveragePool": lambda: wide.mean((2, 3), keepdims=True),
        "GlobalLpPool": lambda: np.sqrt((wide**2).sum((2, 3), keepdims=True)),
    }[op_type]()
    (got,) = run_node(
        op_type,
        [x],
        [wanted.shape],
        blocked=[0] if layout == "blocked" else [],
        out_layout=layout,
        cuts=cuts,
    )
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


def test_what_has_no_kernel_is_refused() -> None:
    x = np.zeros((1, 2, 4, 4), np.float32)
    with pytest.raises(Unsupported, match="p = 3"):
        run_node("LpPool", [x], [(1, 2, 3, 3)], {"kernel_shape": (2, 2), "p": 3})


@settings(max_examples=20, deadline=None, derandomize=True)
@given(data=st.data(), dtype=st.sampled_from(["float32", "float64", "int8", "uint8"]))
def test_where_the_largest_was(data: st.DataObject, dtype: str) -> None:
    rank = data.draw(st.integers(1, 3))
    kernel = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    strides = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    pads = [data.draw(st.integers(0, kernel[i % rank] - 1)) for i in range(2 * rank)]
    spread = [data.draw(st.integers(1, 2)) for _ in range(rank)]
    sizes = zip(kernel, spread, strict=True)
    source = [(k - 1) * step + 1 + data.draw(st.integers(0, 5)) for k, step in sizes]
    x = np.random.default_rng(0).integers(0, 9, (2, 3, *source)).astype(dtype)
    value = sg.input("x", x.shape, dtype)
    made = sg.ops.MaxPool(
        value,
        kernel_shape=kernel,
        strides=strides,
        dilations=spread,
        pads=pads,
        storage_order=data.draw(st.integers(0, 1)),
        outputs=2,
    )
    graph = sg.Graph([value], list(made))
    expected = sg.compile_model(graph, "REFERENCE")([x])
    assert len(sg.default_core().query_model(graph, "CPU")) == 1
    got = sg.compile_model(graph, "CPU")([x])
    for k in range(2):
        np.testing.assert_array_equal(got[k], expected[k])


@settings(max_examples=40, deadline=None)
@given(
    size=st.tuples(st.integers(1, 12), st.sampled_from([1, 5, 31, 33, 70])),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    strides=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    dilations=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    pads=st.tuples(*[st.integers(0, 3)] * 4),
    dtype=st.sampled_from(["uint8", "int8"]),
    layout=LAYOUTS,
    threads=st.integers(1, 3),
    cuts=CUTS,
)
def test_largest_bytes(
    size: tuple[int, int],
    window: tuple[int, int],
    strides: tuple[int, int],
    dilations: tuple[int, int],
    pads: tuple[int, int, int, int],
    dtype: str,
    layout: Layout,
    threads: int,
    cuts: list[float],
) -> None:
    reach = [(k - 1) * d + 1 for k, d in zip(window, dilations, strict=True)]
    before = [min(p, k - 1) for p, k in zip(pads[:2], window, strict=True)]
    after = [min(p, k - 1) for p, k in zip(pads[2:], window, strict=True)]
    image = [max(n, r - p - q) for n, r, p, q in zip(size, reach, before, after, strict=True)]
    info = np.iinfo(dtype)
    x = np.random.default_rng(0).integers(info.min, info.max + 1, (2, 19, *image)).astype(dtype)
    around = [(0, 0), (0, 0), *zip(before, after, strict=True)]
    padded = np.pad(x, around, constant_values=info.min)
    spans = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=(2, 3))
    taps = spans[:, :, :: strides[0], :: strides[1], :: dilations[0], :: dilations[1]]
    wanted = taps.max((-2, -1))
    (got,) = run_node(
        "MaxPool",
        [x],
        [wanted.shape],
        {
            "kernel_shape": window,
            "strides": strides,
            "dilations": dilations,
            "pads": (*before, *after),
        },
        blocked=[0] if layout == "blocked" else [],
        out_layout=layout,
        threads=threads,
        cuts=cuts,
    )
    np.testing.assert_array_equal(got, wanted)
