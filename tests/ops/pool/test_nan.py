"""NaN in an image is the maximum of each window that holds it, as in NumPy; all forms of pooling.

ONNX Runtime 1.31 and onnx.reference keep a NaN in some windows only, by its place in the window.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.operands import Layout
from subgraph.engine.program.pool import call
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.pool.arguments import PoolWindowArguments
from tests.support.kernels import run_node
from tests.support.opencl import core, graph_of, needs_device

pytestmark = pytest.mark.usefixtures("quick_opencl_builds")
DEVICES = ["CPU", pytest.param("OPENCL", marks=needs_device)]
DTYPES = ["float32", "float64", "float16", "bfloat16"]
# Image, taps, strides: by vectors of rows, one element at a time, in blocks, and of whole images.
WINDOWS = [
    ((40,), (5,), (1,)),
    ((7, 40), (3, 3), (1, 1)),
    ((7, 41), (2, 2), (2, 2)),
    ((7, 41), (4, 3), (2, 2)),
    ((9, 40), (1, 4), (2, 3)),
    ((9, 40), (2, 2), (5, 5)),
    ((6, 7), (3, 3), (2, 1)),
    ((7, 40), (7, 40), (1, 1)),
    ((4, 5, 6), (2, 2, 2), (1, 1, 1)),
]


def _image(*shape: int) -> Array:
    """Return random numbers; one of 60 is NaN, of either sign, and another minus infinity."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal(shape).astype(np.float32)
    x[rng.random(shape) < 1 / 60] = -np.inf
    return np.where(rng.random(shape) < 1 / 60, np.copysign(np.float32(np.nan), x), x)


def _maxima(x: Array, taps: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return NumPy's maximum of each window."""
    axes = tuple(range(2, x.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(x, taps, axes)
    steps = tuple(slice(None, None, stride) for stride in strides)
    found: Array = windows[(slice(None), slice(None), *steps)].max(tuple(range(2 - x.ndim, 0)))
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("sizes", "taps", "strides"), WINDOWS)
def test_windows(
    sizes: tuple[int, ...], taps: tuple[int, ...], strides: tuple[int, ...], dtype: str, device: str
) -> None:
    numbers = np.dtype(getattr(ml_dtypes, dtype, dtype))
    x = _image(2, 16, *sizes).astype(numbers)
    wanted = _maxima(x.astype(np.float64), taps, strides)
    options: dict[str, Any] = {"kernel_shape": taps, "strides": strides, "version": 22}
    for outputs in [1] if dtype == "bfloat16" else [1, 2]:
        graph, given = graph_of("MaxPool", arrays=[x], **options, outputs=outputs)
        answer = core().query_model(graph, device)
        assert answer.get("tried") == device, answer.reasons
        found = core().compile_model(graph, device)(given)[0]
        np.testing.assert_array_equal(found.astype(np.float64), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["plain", "blocked"])
@pytest.mark.parametrize(("sizes", "taps", "strides"), WINDOWS[:-1])
def test_layouts(
    sizes: tuple[int, ...], taps: tuple[int, ...], strides: tuple[int, ...], layout: Layout,
    dtype: str,
) -> None:  # fmt: skip
    x = _image(2, 19, *sizes).astype(dtype)
    wanted = _maxima(x, taps, strides)
    held = [0] if layout == "blocked" else []
    (got,) = run_node(
        "MaxPool",
        [x],
        [wanted.shape],
        {"kernel_shape": taps, "strides": strides},
        blocked=held,
        out_layout=layout,
    )
    np.testing.assert_array_equal(got, wanted)
    whole = x.max(tuple(range(2, x.ndim)), keepdims=True)
    (got,) = run_node("GlobalMaxPool", [x], [whole.shape], blocked=held, out_layout=layout)
    np.testing.assert_array_equal(got, whole)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES[:3])
@pytest.mark.parametrize("sizes", [(3,), (7, 7), (5, 40)])
def test_whole_images(sizes: tuple[int, ...], dtype: str, device: str) -> None:
    x = _image(2, 16, *sizes).astype(dtype)
    graph, given = graph_of("GlobalMaxPool", arrays=[x])
    found = core().compile_model(graph, device)(given)[0]
    np.testing.assert_array_equal(found, x.max(tuple(range(2, x.ndim)), keepdims=True))
    assert 0 < np.isnan(found).sum() < found.size or math.prod(sizes) == 200


@pytest.mark.usefixtures("tiles")
def test_values_stored_as_bfloat16() -> None:
    """A pool between convolutions that read and write bfloat16."""
    x = sg.input("x", (1, 32, 9, 20))
    weights = [sg.parameter(f"w{k}", np.eye(32, dtype=np.float32)[..., None, None]) for k in "ab"]
    pooled = ops.MaxPool(ops.Conv(x, weights[0]), kernel_shape=[3, 3], strides=[2, 2])
    graph = sg.Graph([x], [ops.Conv(pooled, weights[1])])
    array = np.random.default_rng(0).standard_normal((1, 32, 9, 20)).astype(np.float32)
    array[0, :, 1, 3] = array[0, :, 6, 19] = np.nan
    request = sg.compile_model(
        graph, "CPU", {"INFERENCE_PRECISION": "bfloat16", "PERF_COUNT": True}
    ).create_infer_request()
    found = request.infer([array])[0]
    np.testing.assert_array_equal(np.isnan(found), np.isnan(_maxima(array, (3, 3), (2, 2))))
    assert "storage='bfloat16'" in str(request.profile())


@pytest.mark.parametrize("taps", [(1, 1), (3, 2)])
def test_all_bit_patterns_of_bfloat16(taps: tuple[int, int]) -> None:
    """Maxima of stored values are exact, with NaN of both signs, infinities and zeros."""
    every = np.arange(1 << 16, dtype=np.uint16)
    x = np.random.default_rng(0).permutation(every).reshape(32, 64, 32)  # rows, columns, channels
    height, width = 33 - taps[0], 65 - taps[1]
    y = np.zeros((height, width, 32), np.uint16)
    g = Geometry(
        1, 1, 32, 32, (1, 32, 64), (1, height, width), (1, *taps), (1, 1, 1), (1, 1, 1), (0, 0, 0)
    )
    arguments = PoolWindowArguments(
        **g.arguments(), x=x.ctypes.data, y=y.ctypes.data, count_include_pad=0, after_depth=0,
        after_height=0, after_width=0, blocks=1, rows=height, x_image=x.nbytes, y_image=y.nbytes,
    )  # fmt: skip
    kernel = Kernel(
        "subgraph.ops.pool.kernels", "window",
        dtype="float32", lanes=32, kind="max", storage="bfloat16",
    )  # fmt: skip
    words = np.array(arguments.words(), np.int64)
    call(kernel.address, words.ctypes.data, 0, 1, 0)
    image, found = ((bits.astype(np.uint32) << 16).view(np.float32) for bits in (x, y))
    wanted = _maxima(image.transpose(2, 0, 1)[None], taps, (1, 1))
    np.testing.assert_array_equal(found.transpose(2, 0, 1)[None], wanted)
