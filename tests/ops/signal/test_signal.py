"""DFT and STFT on the CPU, against NumPy in double precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

SIZES = [1, 2, 3, 4, 6, 8, 15, 16, 31, 60, 97, 128, 400]


def _on_cpu(graph: sg.Graph, *arrays: Array) -> Any:
    query = sg.default_core().query_model(graph, "CPU")
    assert set(query) == {node.name for node in graph.nodes}
    return sg.compile_model(graph, "CPU")(list(arrays))[0]


def _close(got: Array, expected: Array) -> None:
    assert got.shape == expected.shape
    limit = 1e-6 * max(1.0, float(np.abs(expected).max(initial=0.0)))
    assert float(np.abs(got - expected).max(initial=0.0)) < limit


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("numbers", [1, 2])
def test_dft(size: int, numbers: int) -> None:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((2, 9, 3, numbers)).astype(np.float32)  # cut or filled up with zeros
    value = sg.input("x", x.shape)
    graph = sg.Graph([value], [ops.DFT(value, np.int64(size), np.int64(1))])
    signal = x[..., 0] + 1j * (x[..., 1] if numbers == 2 else 0)
    expected = np.fft.fft(signal.astype(np.complex128), size, 1)
    _close(_on_cpu(graph, x), np.stack([expected.real, expected.imag], -1))


@pytest.mark.parametrize("size", SIZES)
def test_dft_of_real_lines_and_back(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((2, 3, size, 1))
    value = sg.input("x", x.shape, "float64")
    half = ops.DFT(value, None, np.int64(-2), onesided=1)
    back = ops.DFT(half, np.int64(size), np.int64(-2), inverse=1, onesided=1)
    for made, expected in (
        (half, np.fft.rfft(x[..., 0])),
        (back, x[..., 0]),
    ):
        parts = [expected.real, expected.imag] if made is half else [expected]
        got = _on_cpu(sg.Graph([value], [made]), x)
        np.testing.assert_allclose(got, np.stack(parts, -1), atol=1e-11)


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("onesided", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_stft(windowed: bool, onesided: int, dtype: str) -> None:
    x = np.random.default_rng(0).standard_normal((2, 250, 1)).astype(dtype)
    window = np.hanning(24).astype(dtype)
    value = sg.input("x", ("batch", "length", 1), dtype)
    given = (window, None) if windowed else (None, np.int64(24))
    graph = sg.Graph([value], [ops.STFT(value, np.int64(10), *given, onesided=onesided)])
    frames = np.lib.stride_tricks.sliding_window_view(x[..., 0], 24, 1)[:, ::10].astype(np.float64)
    expected = np.fft.fft(frames * (window if windowed else 1), axis=-1)
    expected = expected[..., : 13 if onesided else 24]
    result = np.stack([expected.real, expected.imag], -1)
    got = _on_cpu(graph, x)
    if dtype == "float16":
        np.testing.assert_allclose(got, result, rtol=2e-3, atol=2e-2)
    else:
        _close(got, result)


@pytest.mark.parametrize("size", SIZES)
def test_dft_of_complex_lines_and_back(size: int) -> None:
    x = np.random.default_rng(size).standard_normal((3, size, 2))
    value = sg.input("x", x.shape, "float64")
    back = ops.DFT(value, None, np.int64(-2), inverse=1)
    expected = np.fft.ifft(x[..., 0] + 1j * x[..., 1])
    got = _on_cpu(sg.Graph([value], [back]), x)
    np.testing.assert_allclose(got, np.stack([expected.real, expected.imag], -1), atol=1e-12)
