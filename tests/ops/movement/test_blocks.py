"""Operators between convolutions that move elements of images in blocks of channels.

What they move is compared bit for bit with what NumPy and ONNX Runtime make of the images: a
convolution with the unit matrix reads the result in blocks and does not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.system import host
from tests.support.peer import session_of

pytestmark = pytest.mark.skipif(
    host.lanes("float32") == 1, reason="without vectors nothing is blocked"
)
# Channels of the parts: whole blocks of every width, parts of a block, any number.
PARTS = [(32, 16, 16), (24, 8, 16), (8, 8), (17, 33, 9), (40, 20), (16, 12), (70, 58)]
SIZES = [(6, 5), (37,), (3, 4, 5), (70, 50)]


def _values(shape: Sequence[int], dtype: str) -> Array:
    rng = np.random.default_rng(sum(shape))
    if dtype == "uint8":
        return rng.integers(0, 256, shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _same(value: sg.Value, channels: int, rank: int, dtype: str) -> sg.Value:
    """Return a convolution that computes its input, of ``channels`` channels."""
    weight = np.eye(channels, dtype=dtype).reshape(channels, channels, *[1] * (rank - 2))
    if dtype != "uint8":
        return ops.Conv(value, weight)
    one, zero = np.float32(1), np.uint8(0)
    return ops.QLinearConv(value, one, zero, weight, one, zero, one, zero)


def _run(
    make: Callable[[sg.Value], Sequence[sg.Value]],
    x: Array,
    channels: Sequence[int],
    expected: Sequence[Array] | None = None,
    **config: Any,
) -> list[str]:
    """Compare a model between convolutions with its peer; return the kernels that ran.

    Args:
        make: Returns values that follow from the image of the first convolution.
        x: The image.
        channels: Channels of each of these values.
        expected: These values; None: as ONNX Runtime computes them.
        **config: Further configuration of the device.
    """
    given = sg.input("x", x.shape, dtype=str(x.dtype))
    made = make(_same(given, x.shape[1], x.ndim, str(x.dtype)))
    ends = [_same(v, c, x.ndim, str(x.dtype)) for v, c in zip(made, channels, strict=True)]
    graph = sg.Graph([given], ends)
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True, **config})
    request = model.create_infer_request()
    # The second run finds what the first one left in memory.
    results = [request.infer([x]) for _ in range(2)][1]
    for position, array in enumerate(expected or session_of(graph).run(None, {"x": x})):
        np.testing.assert_array_equal(results[position], array)
    assert not model.fallbacks
    return _kernels(request)


def _kernels(request: sg.InferRequest) -> list[str]:
    return [entry.kernel.split("(")[0].split(".")[-1] for entry in request.profile()]


def _stays_in_blocks(kernels: list[str], outputs: int = 1) -> bool:
    """Return whether nothing but the ends of a model is converted, whose images are plain.

    A batch may run in several parts.
    """
    parts = kernels.count("to_blocked")
    return parts in (1, 2) and kernels.count("to_plain") == outputs * parts


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("spatial", SIZES)
@pytest.mark.parametrize(("dtype", "images"), [("float32", 1), ("float32", 2), ("float64", 2)])
def test_channels_at_any_lane(
    parts: tuple[int, ...], spatial: tuple[int, ...], dtype: str, images: int
) -> None:
    channels = sum(parts)
    ends = np.cumsum(parts)[:-1]

    def make(value: sg.Value) -> list[sg.Value]:
        pieces = list(ops.Split(value, np.array(parts), axis=1, outputs=len(parts)))
        convolved = [
            _same(p, c, 2 + len(spatial), dtype) for p, c in zip(pieces, parts, strict=True)
        ]
        middle = ops.Slice(value, ends[:1], np.array([channels]), np.array([1]))
        return [ops.Concat(*reversed(convolved), axis=1), middle]

    x = _values((images, channels, *spatial), dtype)
    expected = [np.concatenate(np.split(x, ends, 1)[::-1], 1), x[:, parts[0] :]]
    for threads in (1, 2):
        config = {"INFERENCE_NUM_THREADS": threads}
        kernels = _run(make, x, [channels, channels - parts[0]], expected, **config)
        assert _stays_in_blocks(kernels, 2)


@pytest.mark.parametrize("parts", PARTS)
def test_bytes_at_any_lane(parts: tuple[int, ...]) -> None:
    def make(value: sg.Value) -> list[sg.Value]:
        pieces = list(ops.Split(value, np.array(parts), axis=1, outputs=len(parts)))
        return [ops.Concat(*reversed(pieces), axis=1)]

    x = _values((2, sum(parts), 9, 7), "uint8")
    pieces = np.split(x, np.cumsum(parts)[:-1], 1)
    _run(make, x, [sum(parts)], [np.concatenate(pieces[::-1], 1)])


def test_channels_for_readers_of_plain_images_are_converted_first() -> None:
    """A channel shuffle reads the Concat: its inputs are moved once, not its result once more."""
    x = sg.input("x", (1, 58, 14, 14))
    branches = [_same(x, 58, 4, "float32"), ops.Relu(x)]
    split = ops.Reshape(ops.Concat(*branches, axis=1), np.array([1, 2, 58, 14, 14]))
    shuffled = ops.Transpose(split, perm=[0, 2, 1, 3, 4])
    graph = sg.Graph([x], [ops.Reshape(shuffled, np.array([1, 116, 14, 14]))])
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    array = _values((1, 58, 14, 14), "float32")
    want = np.stack([array, np.maximum(array, 0)], 2).reshape(1, 116, 14, 14)
    np.testing.assert_array_equal(request.infer([array])[0], want)
    assert not any("kernels.channels" in entry.kernel for entry in request.profile())


def test_a_slice_of_few_channels_is_not_padded_to_a_block() -> None:
    def make(value: sg.Value) -> list[sg.Value]:
        return [ops.Slice(value, np.array([30]), np.array([31]), np.array([1]))]

    assert "channels" not in _run(make, _values((1, 40, 6, 5), "float32"), [1])


@pytest.mark.parametrize(
    ("axes", "starts", "ends", "steps"),
    [
        ([2], [1], [-1], [1]),
        ([3, 2], [4, -1], [0, -6], [-2, -1]),
        ([1, 2], [16, 1], [48, 5], [1, 2]),
        ([1, 2], [3, 1], [40, 5], [1, 1]),
        ([1], [-1], [-49], [-1]),
        ([0, 3], [1, 2], [2, 3], [1, 1]),
        ([2], [0], [6], [-1]),
    ],
)
def test_slices_of_any_axes(
    axes: list[int], starts: list[int], ends: list[int], steps: list[int]
) -> None:
    x = _values((2, 48, 6, 5), "float32")
    bounds = [np.array(each) for each in (starts, ends, axes, steps)]
    index = [slice(None)] * 4
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        stop = None if end + x.shape[axis] < 0 else end
        index[axis] = slice(start, stop, step)
    channels = x[tuple(index)].shape[1]
    if x[tuple(index)].size:
        _run(lambda value: [ops.Slice(value, *bounds)], x, [channels])


@pytest.mark.parametrize(
    ("mode", "value"),
    [
        ("constant", 0.0),
        ("constant", -1.5),
        ("constant", -np.inf),
        ("reflect", 0.0),
        ("edge", 0.0),
        ("wrap", 0.0),
    ],
)
@pytest.mark.parametrize("channels", [32, 24, 40])
@pytest.mark.parametrize(
    "pads", [[0, 0, 1, 2, 0, 0, 3, 1], [0, 0, 0, 2, 0, 0, 0, 2], [0, 0, -1, 2, 0, 0, 1, -2]]
)
def test_padded_images(mode: str, value: float, channels: int, pads: list[int]) -> None:
    if value == -np.inf:
        pads = [max(0, n) for n in pads]

    def make(image: sg.Value) -> list[sg.Value]:
        padded = ops.Pad(image, np.array(pads), np.float32(value), mode=mode)
        # A window that begins in the padding of -inf has a finite maximum.
        return [ops.MaxPool(padded, kernel_shape=[4, 4])] if np.isinf(value) else [padded]

    kernels = _run(make, _values((2, channels, 6, 5), "float32"), [channels])
    assert _stays_in_blocks(kernels)


def test_a_channel_can_be_padded() -> None:
    def make(image: sg.Value) -> list[sg.Value]:
        return [ops.Pad(image, np.array([0, 3, 1, 0, 0, 5, 0, 0]))]

    _run(make, _values((2, 32, 6, 5), "float32"), [40])


@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("scales", [(2.0, 2.0), (3.0, 1.0), (1.0, 2.0), (0.5, 1.5), (1.25, 0.5)])
@pytest.mark.parametrize("channels", [32, 24])
def test_resized_images(mode: str, scales: tuple[float, float], channels: int) -> None:
    transforms = ["half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel"]
    x = _values((2, channels, 8, 6), "float32")
    for transform in transforms:
        given = sg.input("x", x.shape)
        factors = np.array([1, 1, *scales], np.float32)
        image = _same(given, channels, 4, "float32")
        resized = ops.Resize(
            image, None, factors, mode=mode, coordinate_transformation_mode=transform
        )
        graph = sg.Graph([given], [_same(resized, channels, 4, "float32")])
        model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
        request = model.create_infer_request()
        got = request.infer([x])[0]
        (want,) = session_of(graph).run(None, {"x": x})
        if mode == "nearest":
            np.testing.assert_array_equal(got, want)
        else:
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
        assert _stays_in_blocks(_kernels(request))


def test_a_resized_image_that_is_read_in_plain_is_converted_before() -> None:
    x = sg.input("x", (1, 32, 8, 8))
    image = _same(x, 32, 4, "float32")
    resized = ops.Resize(image, None, np.array([1, 1, 4, 4], np.float32))
    model = sg.compile_model(sg.Graph([x], [resized]), "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    request.infer([_values((1, 32, 8, 8), "float32")])
    moved = [e.bytes for e in request.profile() if "to_plain" in e.kernel]
    assert moved == [2 * 4 * 32 * 64]


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("growth", [16, 24])
def test_a_dense_block(images: int, growth: int) -> None:
    """With whole blocks and one image every layer is written once, to the longest Concat."""
    rng = np.random.default_rng(1)
    x = sg.input("x", (images, 32, 7, 6))
    values = [_same(x, 32, 4, "float32")]
    widths = [32]
    for layer in range(4):
        joined = ops.Concat(*values, axis=1) if layer else values[0]
        weight = rng.standard_normal((growth, sum(widths), 3, 3)) / 30
        parameter = sg.parameter(f"w{layer}", weight.astype(np.float32))
        values.append(ops.Conv(ops.Relu(joined), parameter, pads=[1] * 4))
        widths.append(growth)
    graph = sg.Graph([x], [_same(ops.Concat(*values, axis=1), sum(widths), 4, "float32")])
    array = _values((images, 32, 7, 6), "float32")
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    got = request.infer([array])[0]
    (want,) = session_of(graph).run(None, {"x": array})
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    copies = [entry for entry in request.profile() if "movement.kernels" in entry.kernel]
    if growth % host.lanes("float32") == 0 and images == 1:
        assert not copies


def test_concats_that_begin_alike_share_what_they_begin_with() -> None:
    values = [sg.input(f"x{k}", (2, k + 1, 3)) for k in range(4)]
    joined = [ops.Concat(*values[:n], axis=1) for n in (4, 2, 3)]
    graph = sg.Graph(values, [*joined, ops.Concat(*values[1:], axis=1)])
    shared = sg.passes.apply_pass(graph, "ShareConcats")
    # The first one comes before the shorter ones, and reads the inputs.
    assert sorted(len(node.inputs) for node in shared.nodes) == [2, 2, 3, 4]
    arrays = [_values((2, k + 1, 3), "float32") for k in range(4)]
    results = sg.compile_model(graph, "CPU")(arrays)
    for position, chosen in enumerate((slice(4), slice(2), slice(3), slice(1, 4))):
        np.testing.assert_array_equal(results[position], np.concatenate(arrays[chosen], 1))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_images_of_any_number_and_size(precision: str) -> None:
    rng = np.random.default_rng(3)

    def convolve(value: sg.Value, inputs: int, outputs: int) -> sg.Value:
        weight = rng.standard_normal((outputs, inputs, 3, 3)) / (9 * inputs) ** 0.5
        return ops.Conv(value, weight.astype(np.float32), pads=[1] * 4)

    x = sg.input("x", ("n", 24, "h", "w"))
    joined = ops.Concat(convolve(x, 24, 24), convolve(x, 24, 40), axis=1)
    first, second = ops.Split(joined, np.array([20, 44]), axis=1, outputs=2)
    again = ops.Concat(convolve(second, 44, 44), convolve(first, 20, 20), joined, axis=1)
    padded = ops.Pad(convolve(again, 128, 40), np.array([0, 0, 1, 2, 0, 0, 0, 1]))
    resized = ops.Resize(padded, None, np.array([1, 1, 2, 2], np.float32))
    part = ops.Slice(
        convolve(resized, 40, 40), np.array([1, 8]), np.array([1000, 33]), np.array([2, 1])
    )
    graph = sg.Graph([x], [convolve(part, 25, 16)])
    model = sg.compile_model(graph, "CPU", {"INFERENCE_PRECISION": precision})
    session, loss = session_of(graph), 1e-5 if precision == "float32" else 0.03
    for images, height, width in ((1, 9, 7), (2, 5, 5), (3, 1, 1), (1, 64, 33), (1, 9, 7)):
        given = _values((images, 24, height, width), "float32")
        (want,) = session.run(None, {"x": given})
        got = model([given])[0]
        np.testing.assert_allclose(got, want, rtol=0, atol=loss * np.abs(want).max())
    assert not model.fallbacks
