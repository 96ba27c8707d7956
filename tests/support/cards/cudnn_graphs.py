"""CUDNN without a card: with NumPy in its place, and plans for a card that is described."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from subgraph.devices.backends.cudnn import CudnnDevice
from subgraph.devices.backends.libraries.cuda import Card
from subgraph.devices.backends.libraries.cudnn_graph import Step, strides_of
from subgraph.devices.backends.libraries.cudnn_plans import Kernel, Planner, graph_of
from subgraph.graph.types import Array
from tests.support.cards.host_card import HostCard, HostRuntime

# The description of an H100 in cuDNN's form, from NVIDIA's published figures of that card.
H100 = {
    "cudaDeviceId": 0,
    "deviceName": "NVIDIA H100 80GB HBM3",
    "deviceVer": 900,
    "driverVer": 13000,
    "isTccDriver": 0,
    "l2CacheSize": 50 << 20,
    "maxBlockSize": [1024, 1024, 64],
    "maxCtasPerSM": 32,
    "maxGridSize": [2**31 - 1, 65535, 65535],
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 48 << 10,
    "maxSharedMemoryPerBlockOptin": 227 << 10,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "memClockRateKHz": 2619000,
    "memoryBusWidth": 5120,
    "multiProcessorCount": 132,
    "oversizedSharedMemoryPerBlock": 0,
    "pciDeviceId": 0,
    "regsPerBlock": 65536,
    "reservedSharedMemoryPerBlock": 1024,
    "smClockRateKHz": 1980000,
    "smCountOrigin": 0,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 80 << 30,
    "warpSize": 32,
}


def described_card() -> dict[str, Any]:
    """Return an H100 for which cuDNN plans graphs, or skip the test where it cannot."""
    library: Any = pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    try:
        return {"device_property": library.create_device_properties(json.dumps(H100))}
    except RuntimeError as error:
        pytest.skip(f"cuDNN plans nothing here; it needs libcudnn and a driver's libcuda: {error}")


class _HostGraph:
    """A graph of cuDNN that NumPy computes."""

    def __init__(self, graph: Any, tensors: Sequence[Any], output: Any, card: Card) -> None:
        self._graph = graph
        self._tensors = tensors
        self._output = output
        self._runtime: HostRuntime = card.runtime

    def execute(self, pack: dict[Any, int], workspace: int, handle: Any) -> None:
        """Compute the output as cuDNN's graph does."""
        assert workspace in self._runtime.held
        values = {
            t.uid: self._runtime.elements(pack[t], t.dim, t.stride).copy() for t in self._tensors
        }
        output = self._output
        for node in self._graph.nodes:
            made = next(iter(node.outputs.values()))
            sizes = list(output.dim if node.node_type.name == "CONV_DGRAD" else made.dim)
            values[made.uid] = _node(node, values, sizes).astype(np.float32)
        result = values[output.uid]
        assert result.shape == tuple(output.dim)
        assert list(output.stride) == strides_of(output.dim)
        self._runtime.elements(pack[output], output.dim, output.stride)[...] = result


class _HostPlanner(Planner):
    """Makes cuDNN's graphs, and has NumPy compute them."""

    def __init__(self, library: Any, card: Card) -> None:
        super().__init__(library)
        self._card = card

    def require(self, step: Step, precision: str) -> None:
        if step.part.compute is not None:
            graph_of(self.library, step.part)

    def kernel(self, step: Step, precision: str) -> Kernel | None:
        key = (step.key(), precision)
        if step.part.compute is not None and key not in self._kernels:
            graph, tensors, output = graph_of(self.library, step.part)
            made = _HostGraph(graph, tensors, output, self._card)
            self._kernels[key] = Kernel(made, tensors, output, 64)
        return self._kernels.get(key)


class _HostLibrary:
    """cuDNN's frontend, which makes graphs, without handles of a card."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def __getattr__(self, name: str) -> Any:
        return getattr(self._library, name)

    def create_handle(self) -> object:
        return object()

    def set_stream(self, handle: object, stream: int) -> None:
        assert stream, "a request has a stream"

    def destroy_handle(self, handle: object) -> None:
        """Do nothing."""


class NumpyCudnn(CudnnDevice):
    """CUDNN with NumPy in the place of the card: its own code runs, cuDNN's kernels do not."""

    def load(self) -> Any:
        return _HostLibrary(importlib.import_module("cudnn"))

    def find_card(self) -> None:
        self.card = HostCard()
        self.planner = _HostPlanner(self.library, self.card)


def _node(node: Any, values: dict[int, Array], sizes: list[int]) -> Array:
    """Return the output of a node of cuDNN's graph.

    Args:
        node: The node.
        values: Tensors by their numbers.
        sizes: Sizes of the output of a convolution.
    """
    inputs = [values[t.uid] for t in node.inputs.values() if t.pass_by_value is None]
    kind = node.node_type.name
    if kind == "POINTWISE":
        mode = str(node.params["mode"])
        if mode == "leaky_relu":
            return np.where(inputs[0] < 0, node.params["negative_slope"] * inputs[0], inputs[0])
        return _POINTWISE[mode](*inputs)
    if kind in _NORMALIZED_AXES:
        x, scale, bias = inputs[:3]
        axes, epsilon = _NORMALIZED_AXES[kind], node.inputs["epsilon"].pass_by_value
        centred = x - x.mean(axes, keepdims=True)
        found: Array = centred / np.sqrt(x.var(axes, keepdims=True) + epsilon) * scale + bias
        return found
    if kind == "CONV_DGRAD":
        return _gradient(inputs[0], inputs[1], node.params, sizes)
    assert kind == "CONV_FPROP", kind
    return _convolution(inputs[0], inputs[1], node.params, sizes)


_NORMALIZED_AXES = {"LAYERNORM": (1, 2, 3), "INSTANCENORM": (2, 3)}
_ERF = np.vectorize(math.erf)
_POINTWISE: dict[str, Callable[..., Array]] = {
    "abs": np.abs,
    "add": np.add,
    "ceil": np.ceil,
    "cos": np.cos,
    "div": np.divide,
    "elu": lambda x: np.where(x < 0, np.expm1(x), x),
    "erf": _ERF,
    "exp": np.exp,
    "floor": np.floor,
    "gelu": lambda x: x * (1 + _ERF(x / math.sqrt(2))) / 2,
    "gelu_approx_tanh": lambda x: x * (1 + np.tanh(0.79788456 * (x + 0.044715 * x**3))) / 2,
    "identity": np.array,
    "log": np.log,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "neg": np.negative,
    "pow": np.power,
    "reciprocal": np.reciprocal,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "sin": np.sin,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "sqrt": np.sqrt,
    "sub": np.subtract,
    "tan": np.tan,
    "tanh": np.tanh,
}


def _windows(
    image: Sequence[int], window: Sequence[int], sizes: Sequence[int], params: dict[str, Any]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield each position in a window, and the elements of the padded image that it reads."""
    for place in np.ndindex(*window):
        starts = [k * d for k, d in zip(place, params["dilation"], strict=True)]
        axes = zip(starts, sizes, params["stride"], strict=True)
        yield place, tuple(slice(a, a + s * (n - 1) + 1, s) for a, n, s in axes)


def _convolution(x: Array, w: Array, params: dict[str, Any], sizes: list[int]) -> Array:
    pads = list(zip(params["pre_padding"], params["post_padding"], strict=True))
    padded = np.pad(x, [(0, 0), (0, 0), *pads]).astype(np.float64)
    groups = x.shape[1] // w.shape[1]
    y = np.zeros(sizes)
    inner, outer = w.shape[1], w.shape[0] // groups
    for place, read in _windows(x.shape[2:], w.shape[2:], sizes[2:], params):
        for g in range(groups):
            part = padded[(slice(None), slice(g * inner, (g + 1) * inner), *read)]
            taps = w[(slice(g * outer, (g + 1) * outer), slice(None), *place)]
            y[:, g * outer : (g + 1) * outer] += np.einsum("nc...,kc->nk...", part, taps)
    return y


def _gradient(loss: Array, w: Array, params: dict[str, Any], sizes: list[int]) -> Array:
    """Return the gradient of `_convolution` by its image."""
    pads = list(zip(params["pre_padding"], params["post_padding"], strict=True))
    padded = np.zeros([*sizes[:2], *[n + a + b for n, (a, b) in zip(sizes[2:], pads, strict=True)]])
    groups = sizes[1] // w.shape[1]
    inner, outer = w.shape[1], w.shape[0] // groups
    for place, read in _windows(sizes[2:], w.shape[2:], loss.shape[2:], params):
        for g in range(groups):
            part = loss[:, g * outer : (g + 1) * outer].astype(np.float64)
            taps = w[(slice(g * outer, (g + 1) * outer), slice(None), *place)]
            into = (slice(None), slice(g * inner, (g + 1) * inner), *read)
            padded[into] += np.einsum("nk...,kc->nc...", part, taps)
    ends = [slice(a, a + n) for n, (a, _) in zip(sizes[2:], pads, strict=True)]
    return padded[(slice(None), slice(None), *ends)]
