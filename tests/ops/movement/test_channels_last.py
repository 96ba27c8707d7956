"""Transposes between convolutions and rows: vectors of channels are copied, without a conversion.

Convolutions compute on blocks of channels. What a Transpose moves is compared bit for bit with what
NumPy makes of the convolution's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.system import host
from tests.support.peer import check_results, session_of

TO_LAST, FROM_LAST = "to_channels_last", "from_channels_last"
CONVERSIONS = {"to_plain", "to_blocked", "transpose", "copy"}
# Channels: whole blocks of every width, parts of a block, fewer than half a block of 16 lanes.
CHANNELS = [8, 16, 48, 33, 20, 12]

pytestmark = pytest.mark.skipif(
    host.lanes("float32") == 1, reason="without vectors nothing is blocked"
)


def _values(*shape: int, dtype: str = "float32") -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(dtype)


def _conv(x: sg.Value, channels: int, name: str, dtype: str = "float32") -> sg.Value:
    """Return a convolution with windows of 3 along each axis."""
    rank = len(x.type.shape or ()) - 2 if isinstance(x.type, sg.TensorType) else 2
    weight = _values(channels, channels, *[3] * rank, dtype=dtype)
    return ops.Conv(x, sg.parameter(name, weight), pads=[1] * (2 * rank))


def _orders(rank: int) -> tuple[list[int], list[int]]:
    """Return the orders of axes to channels last, and back."""
    return [0, *range(2, rank), 1], [0, rank - 1, *range(1, rank - 1)]


def _run(
    graph: sg.Graph, inputs: Sequence[Array], **config: object
) -> tuple[list[Array], list[str]]:
    """Return the results and the kernels that ran."""
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True, **config})
    request = model.create_infer_request()
    results = request.infer(list(inputs))
    arrays = [np.array(results[k]) for k in range(len(graph.outputs))]
    return arrays, [each.kernel.split("(")[0].split(".")[-1] for each in request.profile()]


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("spatial", [(37,), (6, 5), (3, 4, 5), (1, 1), (80, 70)])
@pytest.mark.parametrize("threads", [1, 2])
def test_from_a_convolution(channels: int, spatial: tuple[int, ...], threads: int) -> None:
    x = sg.input("x", (2, channels, *spatial))
    last, _ = _orders(2 + len(spatial))
    y = _conv(x, channels, "w")
    graph = sg.Graph([x], [ops.Transpose(y, perm=last), y])
    config = {"INFERENCE_NUM_THREADS": threads}
    (rows, image), kernels = _run(graph, [_values(2, channels, *spatial)], **config)
    np.testing.assert_array_equal(rows, image.transpose(last))
    assert TO_LAST in kernels
    assert "transpose" not in kernels


@pytest.mark.parametrize("channels", CHANNELS)
@pytest.mark.parametrize("spatial", [(37,), (6, 5), (3, 4, 5), (80, 70)])
@pytest.mark.parametrize("threads", [1, 2])
def test_to_a_convolution(channels: int, spatial: tuple[int, ...], threads: int) -> None:
    """The sums of a convolution would contain what its lanes beyond the last channel hold."""
    rank = 2 + len(spatial)
    last, first = _orders(rank)
    image = sg.input("x", (2, channels, *spatial))
    rows = sg.input("x", (2, *spatial, channels))
    config = {"INFERENCE_NUM_THREADS": threads}
    given = _values(2, channels, *spatial)
    given[(1, slice(None), *[0] * len(spatial))] = np.nan  # beside the last pixel of image 0
    (wanted,), _ = _run(sg.Graph([image], [_conv(image, channels, "w")]), [given], **config)
    graph = sg.Graph([rows], [_conv(ops.Transpose(rows, perm=first), channels, "w")])
    (found,), kernels = _run(graph, [np.ascontiguousarray(given.transpose(last))], **config)
    np.testing.assert_array_equal(found, wanted)
    if channels * 2 >= host.lanes("float32"):  # images of fewer channels are read in plain layout
        assert FROM_LAST in kernels
        assert "transpose" not in kernels


def test_tokens_and_images() -> None:
    """A Reshape of the pixels of an image leaves its blocks of channels as they are."""
    x = sg.input("x", (2, 32, 6, 5))
    tokens = ops.Transpose(ops.Reshape(_conv(x, 32, "a"), np.array([2, 32, 30])), perm=[0, 2, 1])
    rows = ops.Softmax(tokens, axis=2)
    image = ops.Reshape(ops.Transpose(rows, perm=[0, 2, 1]), np.array([2, 32, 6, 5]))
    graph = sg.Graph([x], [_conv(ops.Add(image, x), 32, "b")])
    given = _values(2, 32, 6, 5)
    check_results(sg.compile_model(graph, "CPU"), session_of(graph), [given], tolerance=1e-4)
    _, kernels = _run(graph, [given])
    # The input of the graph and its output are plain.
    assert [each for each in kernels if each in CONVERSIONS] == ["to_blocked", "to_plain"]
    assert {TO_LAST, FROM_LAST} <= set(kernels)


@pytest.mark.parametrize(
    "shape", [(2, 32, 30, 1), (2, 32, 5, 6), (1, 2, 32, 30), (2, 32, 30), (2, 16, 60), (64, 30)]
)
def test_every_reshape_of_blocks(shape: tuple[int, ...]) -> None:
    """Only one of batch and channels is no view of the blocks."""
    x = sg.input("x", (2, 32, 6, 5))
    y = _conv(x, 32, "w")
    graph = sg.Graph([x], [ops.Tanh(ops.Reshape(y, np.array(shape))), ops.Tanh(y)])
    (found, wanted), _ = _run(graph, [_values(2, 32, 6, 5)])
    np.testing.assert_array_equal(found, wanted.reshape(shape))


@pytest.mark.parametrize(
    "perm", [(0, 1, 3, 2), (0, 3, 2, 1), (2, 3, 0, 1), (1, 0, 2, 3), (2, 0, 3, 1), (3, 2, 1, 0)]
)
def test_other_orders(perm: tuple[int, ...]) -> None:
    x = sg.input("x", (2, 32, 32, 32))
    y = _conv(x, 32, "w")
    before = ops.Transpose(y, perm=perm)
    graph = sg.Graph([x], [before, _conv(ops.Transpose(x, perm=perm), perm_channels(perm), "v"), y])
    given = _values(2, 32, 32, 32)
    check_results(sg.compile_model(graph, "CPU"), session_of(graph), [given], tolerance=2e-4)
    (found, _, image), _ = _run(graph, [given])
    np.testing.assert_array_equal(found, image.transpose(perm))


def perm_channels(perm: Sequence[int]) -> int:
    """Return the number of channels of ``(2, 32, 32, 32)`` in another order."""
    return (2, 32, 32, 32)[perm[1]]


def test_doubles_and_symbolic_sizes() -> None:
    x = sg.input("x", ("n", 24, "h", 5), "float64")
    y = _conv(x, 24, "w", "float64")
    rows = ops.Transpose(y, perm=[0, 2, 3, 1])
    z = _conv(ops.Transpose(ops.Tanh(rows), perm=[0, 3, 1, 2]), 24, "v", "float64")
    graph = sg.Graph([x], [rows, y, z])
    reference = sg.compile_model(graph, "REFERENCE")  # ONNX Runtime has no such convolution
    model = sg.compile_model(graph, "CPU")
    for n, h in ((1, 6), (3, 1), (2, 40), (1, 6)):
        given = _values(n, 24, h, 5, dtype="float64")
        results, wanted = model([given]), reference([given])
        found, image = results[0], results[1]
        np.testing.assert_allclose(results[2], wanted[2], rtol=1e-9, atol=1e-9)
        np.testing.assert_array_equal(found, np.transpose(image, (0, 2, 3, 1)))
    assert model([np.zeros((0, 24, 6, 5))])[0].shape == (0, 6, 5, 24)


def test_bfloat16() -> None:
    """Values that a network in bfloat16 stores as bfloat16 become float32 before they are moved."""
    x = sg.input("x", (1, 64, 14, 14))
    y = ops.Relu(_conv(ops.Relu(_conv(x, 64, "a")), 64, "b"))
    graph = sg.Graph([x], [ops.Transpose(y, perm=[0, 2, 3, 1]), ops.Relu(y)])
    (rows, image), _ = _run(graph, [_values(1, 64, 14, 14)], INFERENCE_PRECISION="bfloat16")
    np.testing.assert_array_equal(rows, image.transpose(0, 2, 3, 1))


@pytest.mark.parametrize(
    ("axis", "parts"), [(1, [32, 16]), (1, [16, 20, 12]), (1, [24, 24]), (2, [4, 2]), (0, [1, 2])]
)
@pytest.mark.parametrize("batch", [1, 3])
def test_parts_of_blocks(axis: int, parts: list[int], batch: int) -> None:
    """Whole blocks of channels are views, or copies; other channels are split in plain layout."""
    if axis == 0 and batch != sum(parts):
        parts = [batch]
    x = sg.input("x", (batch, 48, 6, 5))
    y = _conv(x, 48, "w")
    split = ops.Split(y, np.array(parts), axis=axis, outputs=len(parts))
    pieces = [split] if len(parts) == 1 else list(split)
    graph = sg.Graph([x], [*(ops.Tanh(piece) for piece in pieces), ops.Tanh(y)])
    for threads in (1, 2):
        config = {"INFERENCE_NUM_THREADS": threads}
        (*found, whole), kernels = _run(graph, [_values(batch, 48, 6, 5)], **config)
        wanted = np.split(whole, np.cumsum(parts)[:-1], axis)
        for mine, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(mine, other)
        if parts == [32, 16]:  # results alone are converted
            assert kernels.count("to_plain") == 3


def _mixed(shape: tuple[Any, ...], hidden: int, *, flat: bool = False) -> sg.Graph:
    """Return two feed-forward layers of SegFormer: a depthwise convolution between two products.

    Args:
        shape: The image, ``[N, C, *spatial]``; may be symbolic.
        hidden: Columns of the first product.
        flat: Whether tokens have one axis, so that images are reshaped.
    """
    x = sg.input("x", shape)
    channels, rank = shape[1], len(shape)
    last, first = _orders(rank)
    if flat:
        last, first = _orders(3)
    tokens = (0, 0, -1) if flat else (0,) * rank

    def weight(name: str, *sizes: int) -> sg.Value:
        return sg.parameter(name, _values(*sizes) / np.float32(sizes[0] ** 0.5))

    def to_rows(image: sg.Value) -> sg.Value:
        image = ops.Reshape(image, np.array(tokens)) if flat else image
        return ops.Transpose(image, perm=last)

    rows = to_rows(_conv(x, channels, "stem"))
    for k in range(2):
        inner = ops.Add(
            ops.MatMul(rows, weight(f"a{k}", channels, hidden)), weight(f"b{k}", hidden)
        )
        image = ops.Transpose(inner, perm=first)
        if flat:
            image = ops.Reshape(image, np.array([0, 0, *shape[2:]]))
        filters = weight(f"d{k}", hidden, 1, *[3] * (rank - 2))
        image = ops.Gelu(ops.Conv(image, filters, pads=[1] * (2 * (rank - 2)), group=hidden))
        rows = ops.Add(ops.MatMul(to_rows(image), weight(f"c{k}", hidden, channels)), rows)
    image = ops.Transpose(rows, perm=first)
    if flat:
        image = ops.Reshape(image, np.array([0, 0, *shape[2:]]))
    return sg.Graph([x], [_conv(image, channels, "head")])


def _check_image(got: Array, graph: sg.Graph, given: Array) -> None:
    (want,) = session_of(graph).run(None, {"x": given})
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("hidden", [96, 64, 40])
@pytest.mark.parametrize("shape", [(1, 32, 9, 7), (1, 64, 30), (2, 32, 6, 5), (1, 24, 6, 5)])
def test_products_read_and_write_blocks(shape: tuple[int, ...], hidden: int) -> None:
    """Products take rows of one image where they are in blocks, if these have no padding."""
    for flat in (False, True) if len(shape) == 4 else (False,):
        graph = _mixed(shape, hidden, flat=flat)
        given = _values(*shape)
        for threads in (1, 2):
            results, kernels = _run(graph, [given], INFERENCE_NUM_THREADS=threads)
            _check_image(results[0], graph, given)
        whole = shape[0] == 1 and all(n % host.lanes("float32") == 0 for n in (shape[1], hidden))
        if whole:
            assert not {TO_LAST, FROM_LAST, "from_strides"} & set(kernels)
        if shape[0] > 1:
            assert {TO_LAST, FROM_LAST} <= set(kernels)


@pytest.mark.parametrize("hidden", [96, 48])
def test_rounded_products_read_and_write_blocks(hidden: int) -> None:
    graph, given = _mixed((1, 32, 9, 7), hidden), _values(1, 32, 9, 7)
    (want,), _ = _run(graph, [given])
    (got,), _ = _run(graph, [given], INFERENCE_PRECISION="bfloat16")
    np.testing.assert_allclose(got, want, rtol=0, atol=0.03 * np.abs(want).max())


def test_products_read_and_write_blocks_of_any_number_of_pixels() -> None:
    graph = _mixed((1, 32, "h", "w"), 96)
    model = sg.compile_model(graph, "CPU")
    for h, w in ((9, 7), (1, 1), (20, 3), (9, 7)):
        given = _values(1, 32, h, w)
        _check_image(model([given])[0], graph, given)


def test_other_readers_of_blocks_get_rows() -> None:
    """A Softmax reads the rows that products take in blocks, and the graph returns them."""
    x = sg.input("x", (1, 32, 6, 5))
    rows = ops.Transpose(_conv(x, 32, "a"), perm=[0, 2, 3, 1])
    product = ops.MatMul(rows, sg.parameter("w", _values(32, 64) / np.float32(32)))
    image = _conv(ops.Transpose(product, perm=[0, 3, 1, 2]), 64, "b")
    graph = sg.Graph([x], [image, ops.Softmax(rows), ops.Softmax(product), product])
    given = _values(1, 32, 6, 5)
    results, _ = _run(graph, [given])
    for got, want in zip(results, session_of(graph).run(None, {"x": given}), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


@pytest.mark.parametrize("reads", ["rows", "residual"])
def test_products_of_several_matrices_get_rows(reads: str) -> None:
    """Each row of an image is multiplied by a matrix of its own."""
    x = sg.input("x", (1, 32, 6, 5))
    rows = ops.Transpose(_conv(x, 32, "a"), perm=[0, 2, 3, 1])
    matrices = sg.parameter("w", _values(1, 6, 32, 32) / np.float32(32))
    if reads == "rows":
        product = ops.MatMul(rows, matrices)
    else:
        product = ops.Add(ops.MatMul(sg.parameter("v", _values(1, 6, 5, 32)), matrices), rows)
    image = _conv(ops.Transpose(product, perm=[0, 3, 1, 2]), 32, "b")
    graph, given = sg.Graph([x], [image]), _values(1, 32, 6, 5)
    _check_image(_run(graph, [given])[0][0], graph, given)


def test_a_computed_product_is_added_to_rows_in_blocks() -> None:
    x, y = sg.input("x", (1, 32, 6, 5)), sg.input("y", (1, 6, 5, 32))
    rows = ops.Transpose(_conv(x, 32, "a"), perm=[0, 2, 3, 1])
    squares = ops.MatMul(y, ops.Transpose(y, perm=[0, 1, 3, 2]))
    graph = sg.Graph([x, y], [ops.Add(ops.MatMul(squares, y), rows)])
    arrays = [_values(1, 32, 6, 5), _values(1, 6, 5, 32)]
    (want,) = session_of(graph).run(None, dict(zip("xy", arrays, strict=True)))
    (got,), _ = _run(graph, arrays)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
