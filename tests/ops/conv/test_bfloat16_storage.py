"""Values between convolutions that are stored as bfloat16: random networks, and what stores them.

Where the processor has no matrix tiles, they are emulated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.system import host

pytestmark = pytest.mark.usefixtures("tiles")
# Where products are dot products, Winograd's algorithm in float32 is often faster.
OPTION = {"INFERENCE_PRECISION": "bfloat16", "WINOGRAD": False}
CHANNELS = st.sampled_from([20, 32, 40, 48, 64, 96, 136])


class Network:
    """Builds a graph of convolutions and of what stands between them."""

    def __init__(self, seed: int, images: int, channels: int, size: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.x = sg.input("x", shape=(images, channels, size, size), dtype="float32")
        self.values = [(self.x, channels, size)]
        self.weights = 0

    def weight(self, *shape: int) -> sg.Value:
        self.weights += 1
        depth = max(1, int(np.prod(shape[1:])))
        array = self.rng.standard_normal(shape) / depth**0.5
        return sg.parameter(f"w{self.weights}", array.astype(np.float32))

    def convolve(self, outputs: int, kernel: int, stride: int, groups: int) -> None:
        value, channels, size = self.values[-1]
        if channels % groups or outputs % groups:
            groups = 1
        weights = self.weight(outputs, channels // groups, kernel, kernel)
        y = ops.Conv(
            value, weights, self.weight(outputs), pads=[kernel // 2] * 4, strides=[stride] * 2,
            group=groups,
        )  # fmt: skip
        self.values.append((y, outputs, (size - 1) // stride + 1))

    def enlarge(self) -> None:
        """Add a transposed convolution that doubles the size, to the same number of channels."""
        value, channels, size = self.values[-1]
        y = ops.ConvTranspose(value, self.weight(channels, channels, 2, 2), strides=[2, 2])
        self.values.append((y, channels, 2 * size))

    def gate(self) -> None:
        """Multiply the last value by numbers for each channel that follow from its mean."""
        value, channels, size = self.values[-1]
        mean = ops.GlobalAveragePool(value)
        few = ops.Relu(ops.Conv(mean, self.weight(8, channels, 1, 1)))
        made = ops.Mul(value, ops.Sigmoid(ops.Conv(few, self.weight(channels, 8, 1, 1))))
        self.values.append((made, channels, size))

    def add(self, step: str) -> None:
        """Add a node over the last value, and over the one before it if they fit."""
        value, channels, size = self.values[-1]
        other = self.values[-2] if len(self.values) > 1 else self.values[-1]
        made: Any = value
        if step == "ConvTranspose":
            self.enlarge()
            return
        if step == "Depthwise":
            self.convolve(channels, 3, 1, channels)
            return
        if step == "Gate":
            self.gate()
            return
        if step == "Scale":
            made = ops.Add(ops.Mul(value, self.weight(channels, 1, 1)), np.float32(0.5))
        elif step == "Relu6":
            made = ops.Clip(value, np.float32(-0.5), np.float32(6.0))
        elif step == "Add":
            if other[1:] == (channels, size):
                made = ops.Relu(ops.Add(value, other[0]))
        elif step == "Concat":
            if other[2] == size:
                made, channels = ops.Concat(other[0], value, axis=1), channels + other[1]
        elif step in ("MaxPool", "AveragePool"):
            made = getattr(ops, step)(value, kernel_shape=[3, 3], pads=[1] * 4, strides=[2, 2])
            size = (size - 1) // 2 + 1
        else:
            made = getattr(ops, step)(value)
        self.values.append((made, channels, size))


@st.composite
def networks(draw: st.DrawFn) -> tuple[sg.Graph, Array]:
    images, seed = draw(st.integers(1, 2)), draw(st.integers(0, 1 << 30))
    size = draw(st.integers(1, 19))
    net = Network(seed, images, draw(CHANNELS), size)
    between = ["Relu", "Relu6", "Sigmoid", "HardSwish", "Add", "Concat", "MaxPool"]
    between += ["AveragePool", "Neg", "ConvTranspose", "Depthwise", "Depthwise"]
    between += ["Gate", "Gate", "Scale"]
    for _ in range(draw(st.integers(1, 5))):
        kernel, stride = draw(st.sampled_from([1, 1, 3])), draw(st.sampled_from([1, 1, 2]))
        net.convolve(draw(CHANNELS), kernel, stride, draw(st.sampled_from([1, 2, 3, 4, 6])))
        for step in draw(st.lists(st.sampled_from(between), max_size=2)):
            net.add(step)
    values = [value for value, _, _ in net.values[1:]]
    outputs = {values[-1]: None, values[draw(st.integers(0, len(values) - 1))]: None}
    x = net.rng.standard_normal((images, net.values[0][1], size, size)).astype(np.float32)
    return sg.Graph([net.x], [v if v.producer else ops.Identity(v) for v in outputs]), x


@settings(max_examples=100, deadline=None)
@given(made=networks(), threads=st.integers(1, 2), winograd=st.booleans())
def test_random_networks(made: tuple[sg.Graph, Array], threads: int, winograd: bool) -> None:
    graph, x = made
    exact = sg.compile_model(graph, "CPU")([x])
    more = {"INFERENCE_NUM_THREADS": threads, "WINOGRAD": winograd}
    model = sg.compile_model(graph, "CPU", OPTION | more)
    results = model([x])
    for position in range(len(graph.outputs)):
        got, want = results[position], exact[position]
        # Each of at most five convolutions rounds its operands and its result to 8 bits.
        np.testing.assert_allclose(got, want, rtol=0, atol=0.03 * max(1.0, np.abs(want).max()))


@settings(max_examples=60, deadline=None)
@given(
    channels=st.integers(2, 70),
    size=st.tuples(st.integers(3, 40), st.integers(3, 40)),
    taps=st.sampled_from([(3, 3), (5, 5), (1, 3), (3, 7)]),
    stride=st.integers(1, 2),
    act=st.sampled_from(["", "Relu", "HardSwish"]),
    images=st.integers(1, 2),
    threads=st.integers(1, 3),
)
def test_windows_of_rounded_pixels(
    channels: int,
    size: tuple[int, int],
    taps: tuple[int, int],
    stride: int,
    act: str,
    images: int,
    threads: int,
) -> None:
    """A depthwise convolution reads what a convolution stored as bfloat16, and is exact itself."""
    rng = np.random.default_rng(channels)
    bits = rng.standard_normal((images, channels, *size)).astype(np.float32).view(np.uint32)
    x = (bits & np.uint32(0xFFFF0000)).view(np.float32)  # bfloat16 has these numbers
    same = sg.parameter("same", np.eye(channels, dtype=np.float32)[:, :, None, None])
    w = rng.standard_normal((channels, 1, *taps)).astype(np.float32)
    b = rng.standard_normal(channels).astype(np.float32)
    pads = [taps[0] // 2, taps[1] // 2] * 2
    value = sg.input("x", shape=x.shape, dtype="float32")
    made = ops.Conv(
        ops.Conv(value, same), sg.parameter("w", w), sg.parameter("b", b),
        pads=pads, strides=[stride] * 2, group=channels,
    )  # fmt: skip
    made = getattr(ops, act)(made) if act else made
    graph = sg.Graph([value], [made])
    kernels = kernels_of(graph, x)
    assert any("windows" in kernel for kernel in kernels)
    assert not any("from_bfloat16" in kernel for kernel in kernels)
    model = sg.compile_model(graph, "CPU", OPTION | {"INFERENCE_NUM_THREADS": threads})
    padded = np.pad(x, [(0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])])
    want = np.lib.stride_tricks.sliding_window_view(padded, taps, (2, 3))
    want = want[:, :, ::stride, ::stride] * w[:, 0, None, None]
    want = want.sum((-2, -1), dtype=np.float64) + b[:, None, None]
    if act == "Relu":
        want = np.maximum(want, 0)
    elif act:
        want = want * np.clip(want / 6 + 0.5, 0, 1)
    np.testing.assert_allclose(np.asarray(model([x])[0]), want, rtol=1e-5, atol=1e-5)


def kernels_of(graph: sg.Graph, x: Array, *, winograd: bool = False) -> list[str]:
    more = {"ENABLE_PROFILING": True, "WINOGRAD": winograd}
    model = sg.compile_model(graph, "CPU", OPTION | more)
    request = model.create_infer_request()
    request.infer([x])
    return [entry.kernel for entry in request.profile()]


def bottlenecks(*between: str, act: str = "Relu") -> tuple[sg.Graph, Array]:
    """Return a stem of float32, two residual blocks behind ``between``, and an average."""
    net = Network(1, 1, 64, 12)
    net.convolve(64, 1, 1, 1)
    net.add(act)
    net.convolve(64, 1, 1, 1)
    for step in between:
        net.add(step)
    for _ in range(2):
        block = net.values[-1]
        for kernel in (1, 3, 1):
            net.convolve(64, kernel, 1, 1)
            if kernel == 1 and net.values[-2] is not block:
                net.values[-2] = block
                net.add("Add")
            else:
                net.add(act)
    graph = sg.Graph([net.x], [ops.GlobalAveragePool(net.values[-1][0])])
    return graph, net.rng.standard_normal((1, 64, 12, 12)).astype(np.float32)


def test_values_that_winograd_reads_stay_float32() -> None:
    graph, x = bottlenecks()
    kernels = kernels_of(graph, x, winograd=True)
    # Matrix tiles are faster than Winograd's transforms; dot products are not.
    assert any("winograd" in kernel for kernel in kernels) == (not host.has_bfloat16_tiles())
    assert not any("from_bfloat16" in kernel for kernel in kernels)


@pytest.mark.parametrize("act", ["Relu", "HardSwish"])
@pytest.mark.parametrize("between", [(), ("MaxPool",), ("AveragePool",), ("Concat",)])
def test_only_the_first_convolution_rounds_its_input(between: tuple[str, ...], act: str) -> None:
    graph, x = bottlenecks(*between, act=act)
    kernels = kernels_of(graph, x)
    assert sum("convolve" in kernel for kernel in kernels) == 8
    # The convolutions of three by three copy their lines, which are rounded already.
    lines = [kernel for kernel in kernels if "kernels.lines" in kernel]
    assert [("rounded=True" in kernel) for kernel in lines] == [False, True, True]
    assert not any("from_bfloat16" in kernel for kernel in kernels)
    exact = sg.compile_model(graph, "CPU")([x])[0]
    got = sg.compile_model(graph, "CPU", OPTION)([x])[0]
    assert 0 < np.abs(np.asarray(got) - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("channels", [64, 48, 40])
def test_gates_read_and_store_bfloat16(channels: int) -> None:
    """Squeeze and excitation (Hu et al., arXiv:1709.01507) behind a depthwise convolution."""
    net = Network(8, 2, channels, 9)
    net.convolve(channels, 1, 1, 1)
    net.add("Depthwise")
    net.add("HardSwish")
    net.gate()
    net.convolve(32, 1, 1, 1)
    graph = sg.Graph([net.x], [net.values[-1][0]])
    x = net.rng.standard_normal((2, channels, 9, 9)).astype(np.float32)
    kernels = kernels_of(graph, x)
    assert sum("lines" in kernel for kernel in kernels) == 2  # of the input, and of the mean
    assert any("global_pool" in kernel and "bfloat16" in kernel for kernel in kernels)
    assert not any("reorder" in k and "to_blocked" not in k for k in kernels[:-1])
    exact = sg.compile_model(graph, "CPU")([x])[0]
    got = sg.compile_model(graph, "CPU", OPTION)([x])[0]
    assert 0 < np.abs(np.asarray(got) - exact).max() < 0.02 * np.abs(exact).max()


@pytest.mark.parametrize("stride", [1, 2])
def test_two_groups_of_16_channels_are_a_block(stride: int) -> None:
    """As in RegNetX: values before and behind a grouped convolution are stored as bfloat16."""
    net = Network(6, 2, 32, 9)
    for outputs, kernel, step, groups in ((64, 1, 1, 1), (64, 3, stride, 4), (32, 1, 1, 1)):
        net.convolve(outputs, kernel, step, groups)
        net.add("Relu")
    graph = sg.Graph([net.x], [net.values[-1][0]])
    x = net.rng.standard_normal((2, 32, 9, 9)).astype(np.float32)
    lines = [kernel for kernel in kernels_of(graph, x) if "kernels.lines" in kernel]
    assert [("rounded=True" in kernel) for kernel in lines] == [False, True]
    exact = sg.compile_model(graph, "CPU")([x])[0]
    got = sg.compile_model(graph, "CPU", OPTION)([x])[0]
    assert 0 < np.abs(np.asarray(got) - exact).max() < 0.02 * np.abs(exact).max()


def test_infinity_stays_in_its_group() -> None:
    net = Network(7, 1, 64, 5)
    net.convolve(64, 3, 1, 4)
    graph = sg.Graph([net.x], [net.values[-1][0]])
    x = net.rng.standard_normal((1, 64, 5, 5)).astype(np.float32)
    x[0, 17] = np.inf  # in the second group
    got = np.asarray(sg.compile_model(graph, "CPU", OPTION)([x])[0])
    finite = np.isfinite(got).all(axis=(0, 2, 3))
    np.testing.assert_array_equal(finite, [k not in range(16, 32) for k in range(64)])


def test_transposed_convolutions_read_and_store_bfloat16() -> None:
    net = Network(5, 1, 32, 6)
    net.convolve(32, 1, 1, 1)
    net.enlarge()
    net.convolve(32, 1, 1, 1)
    graph = sg.Graph([net.x], [net.values[-1][0]])
    x = net.rng.standard_normal((1, 32, 6, 6)).astype(np.float32)
    kernels = kernels_of(graph, x)
    # One convolution for each of four phases; only the input of the first one is rounded.
    assert sum("convolve" in kernel for kernel in kernels) == 6
    assert ["rounded=True" in kernel for kernel in kernels if "kernels.lines" in kernel] == [False]
    assert not any("from_bfloat16" in kernel for kernel in kernels)
    exact = sg.compile_model(graph, "CPU")([x])[0]
    got = sg.compile_model(graph, "CPU", OPTION)([x])[0]
    assert 0 < np.abs(np.asarray(got) - exact).max() < 0.02 * np.abs(exact).max()


def test_a_value_with_another_reader_stays_float32() -> None:
    net = Network(2, 1, 32, 9)
    net.convolve(32, 3, 1, 1)
    first = net.values[-1][0]
    net.convolve(32, 1, 1, 1)
    graph = sg.Graph([net.x], [net.values[-1][0], ops.Exp(first)])
    x = net.rng.standard_normal((1, 32, 9, 9)).astype(np.float32)
    assert not any("from_bfloat16" in kernel for kernel in kernels_of(graph, x))
    assert not any("rounded=True" in kernel for kernel in kernels_of(graph, x))


def test_images_of_another_size_use_the_same_plan() -> None:
    rng = np.random.default_rng(3)
    x = sg.input("x", shape=("n", 32, "h", "w"), dtype="float32")

    def convolve(value: sg.Value, name: str, kernel: int) -> sg.Value:
        array = rng.standard_normal((32, 32, kernel, kernel)) / (6 * kernel)
        return ops.Relu(
            ops.Conv(value, sg.parameter(name, array.astype(np.float32)), pads=[kernel // 2] * 4)
        )

    h = convolve(convolve(x, "a", 1), "b", 3)
    graph = sg.Graph([x], [convolve(ops.MaxPool(h, kernel_shape=[2, 2]), "c", 1)])
    exact, model = sg.compile_model(graph, "CPU"), sg.compile_model(graph, "CPU", OPTION)
    for shape in [(1, 32, 9, 9), (2, 32, 5, 17), (1, 32, 2, 2), (3, 32, 33, 8)]:
        image = rng.standard_normal(shape).astype(np.float32)
        want = exact([image])[0]
        np.testing.assert_allclose(model([image])[0], want, rtol=0, atol=0.02 * np.abs(want).max())


def test_every_second_pixel_of_an_image_with_as_many_pixels() -> None:
    """Padding behind the image makes up for the stride: only the sizes are those of stride 1."""
    net = Network(8, 1, 32, 2)
    net.convolve(32, 1, 1, 1)
    weight = net.weight(32, 32, 1, 1)
    y = ops.Conv(net.values[-1][0], weight, strides=[2, 2], pads=[0, 0, 1, 1])
    graph = sg.Graph([net.x], [y])
    x = net.rng.standard_normal((1, 32, 2, 2)).astype(np.float32)
    exact, got = (sg.compile_model(graph, "CPU", o)([x])[0] for o in ({}, OPTION))
    np.testing.assert_allclose(got, exact, rtol=0, atol=0.02 * np.abs(exact).max())
    assert not np.any(got[..., 1:, :])


def test_special_values_pass_through() -> None:
    net = Network(4, 1, 32, 4)
    net.convolve(32, 1, 1, 1)
    net.add("MaxPool")
    net.convolve(32, 1, 1, 1)
    graph = sg.Graph([net.x], [net.values[-1][0]])
    x = net.rng.standard_normal((1, 32, 4, 4)).astype(np.float32)
    x[0, 3, 0, 0] = np.inf
    exact, got = (sg.compile_model(graph, "CPU", o)([x])[0] for o in ({}, OPTION))
    np.testing.assert_array_equal(np.isnan(exact), np.isnan(got))
    np.testing.assert_array_equal(np.isinf(exact), np.isinf(got))


@pytest.mark.parametrize("of_group", [1, 4])
@pytest.mark.parametrize("channels", [64, 48, 40, 20])
@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (5, 2)])
@pytest.mark.parametrize("act", ["", "Relu", "Relu6", "Sigmoid", "HardSwish"])
def test_small_groups(of_group: int, channels: int, taps: int, stride: int, act: str) -> None:
    """Convolutions of small groups store what a convolution over matrix tiles reads."""
    rng = np.random.default_rng(taps)
    x = sg.input("x", (2, channels, 19, 13))
    filters = rng.standard_normal((channels, of_group, taps, taps)).astype(np.float32)
    h = ops.Conv(
        x, sg.parameter("a", filters), pads=[taps // 2] * 4, strides=[stride] * 2,
        group=channels // of_group,
    )  # fmt: skip
    if act:
        h = ops.Clip(h, 0.0, 6.0) if act == "Relu6" else getattr(ops, act)(h)
    weights = (rng.standard_normal((40, channels, 1, 1)) / 8).astype(np.float32)
    graph = sg.Graph([x], [ops.Conv(h, sg.parameter("b", weights))])
    array = rng.standard_normal((2, channels, 19, 13)).astype(np.float32)
    exact = sg.compile_model(graph, "CPU")([array])[0]
    got = sg.compile_model(graph, "CPU", {**OPTION, "INFERENCE_NUM_THREADS": 2})([array])[0]
    np.testing.assert_allclose(got, exact, rtol=0, atol=0.01 * np.abs(exact).max())
    assert not any(".lines(" in kernel for kernel in kernels_of(graph, array))
