"""cuDNN without a card: NumPy's reading of its graphs, and plans for a card that is described."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from subgraph.devices.backends.base import parsed_model
from subgraph.devices.backends.cudnn_graph import Part, steps_of, strides_of
from subgraph.devices.backends.cudnn_plans import graph_of
from subgraph.graph.types import Array

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


def computed(model: bytes, inputs: dict[str, Array]) -> list[Array]:
    """Return the outputs of a model as NumPy computes the graphs that cuDNN would run.

    Args:
        model: A serialized ONNX model of nodes that are translated.
        inputs: The inputs by name.
    """
    library = importlib.import_module("cudnn")
    body, version, weights = parsed_model(model)
    shapes = {name: array.shape for name, array in inputs.items()}
    values = {**weights, **inputs}
    for step in steps_of(body, version, weights, shapes):
        operands = [
            values[step.inputs[o.source]] if isinstance(o.source, int) else o.source
            for o in step.part.operands
        ]
        if step.part.compute is None:
            values[step.output] = values[step.inputs[0]].reshape(step.part.shape)
        else:
            values[step.output] = _result(library, step.part, operands)
    return [values[port.name] for port in body.output]


def _result(library: Any, part: Part, operands: Sequence[Array]) -> Array:
    graph, tensors, output = graph_of(library, part)
    values: dict[int, Array] = {}
    for tensor, array in zip(tensors, operands, strict=True):
        steps = [4 * stride for stride in tensor.stride]
        flat = np.ascontiguousarray(array, np.float32).reshape(-1)
        last = sum((d - 1) * s for d, s in zip(tensor.dim, tensor.stride, strict=True))
        assert last < flat.size, "the tensor is larger than its memory"
        values[tensor.uid] = np.lib.stride_tricks.as_strided(flat, tensor.dim, steps)
    for node in graph.nodes:
        inputs = [values[t.uid] for t in node.inputs.values() if t.pass_by_value is None]
        made = next(iter(node.outputs.values()))
        kind = node.node_type.name
        if kind == "POINTWISE":
            mode = str(node.params["mode"])
            found = _POINTWISE[mode](*inputs)
            if mode == "leaky_relu":
                found = np.where(
                    inputs[0] < 0, node.params["negative_slope"] * inputs[0], inputs[0]
                )
        elif kind in _NORMALIZED_AXES:
            x, scale, bias = inputs[:3]
            axes, epsilon = _NORMALIZED_AXES[kind], node.inputs["epsilon"].pass_by_value
            centred = x - x.mean(axes, keepdims=True)
            found = centred / np.sqrt(x.var(axes, keepdims=True) + epsilon) * scale + bias
        elif kind == "CONV_DGRAD":
            found = _gradient(inputs[0], inputs[1], node.params, list(output.dim))
        else:
            assert kind == "CONV_FPROP", kind
            found = _convolution(inputs[0], inputs[1], node.params, list(made.dim))
        values[made.uid] = found.astype(np.float32)
    result = values[output.uid]
    assert result.shape == tuple(output.dim)
    assert list(output.stride) == strides_of(output.dim)
    return result.reshape(part.shape)


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
    "leaky_relu": np.array,
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
