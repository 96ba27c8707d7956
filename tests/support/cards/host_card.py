"""A stand-in for an NVIDIA card: the machine's own memory behind the CUDA runtime's functions."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from subgraph.devices.backends.libraries.cuda import Card
from subgraph.graph.types import Array


class HostRuntime:
    """The functions of the CUDA runtime that are used.

    New and freed memory is filled with NaN, which shows up in results that are read from it.
    """

    cudaMemcpyKind = SimpleNamespace(cudaMemcpyHostToDevice=1, cudaMemcpyDeviceToHost=2)

    def __init__(self) -> None:
        self.held: dict[int, Array] = {}

    def cudaSetDevice(self, number: int) -> tuple[int]:
        return (number,)

    def cudaStreamCreateWithFlags(self, flags: int) -> tuple[int, int]:
        return 0, flags

    def cudaStreamDestroy(self, stream: int) -> tuple[int]:
        return (0,)

    def cudaStreamSynchronize(self, stream: int) -> tuple[int]:
        return (0,)

    def cudaMalloc(self, size: int) -> tuple[int, int]:
        array = np.full(size // 4 + 1, np.nan, np.float32)
        self.held[array.ctypes.data] = array
        return 0, array.ctypes.data

    def cudaFree(self, address: int) -> tuple[int]:
        self.held.pop(address).fill(np.nan)
        return (0,)

    def cudaMemcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> Any:
        card = to if kind == 1 else source
        assert size <= self.held[card].nbytes, "a copy leaves its memory"
        ctypes.memmove(to, source, size)
        return (0,)

    def elements(
        self, address: int, dims: Sequence[int], strides: Sequence[int], dtype: Any = np.float32
    ) -> Array:
        """Return the tensor at an address; strides are in elements."""
        flat = self.held[address].view(np.uint8)
        size = np.dtype(dtype).itemsize
        last = sum((d - 1) * s for d, s in zip(dims, strides, strict=True))
        assert size * (last + 1) <= flat.size, "a tensor leaves its memory"
        flat = flat[: flat.size // size * size].view(dtype)
        return np.lib.stride_tricks.as_strided(flat, dims, [size * stride for stride in strides])


class HostCard(Card):
    """A card whose memory is the machine's own."""

    def __init__(self) -> None:
        self.runtime = HostRuntime()
        self.number = 0
        self.name = "the machine's own memory"
