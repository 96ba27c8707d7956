"""Operators of a test on the devices that have kernels."""

from __future__ import annotations

from typing import Any

import numpy as np

import subgraph as sg
from subgraph.graph.types import Array


def kernel_devices() -> list[str]:
    """Return the devices with kernels that this machine has."""
    found = sg.default_core().available_devices
    return [name for name in ("CPU", "OPENCL") if name in found]


def assert_kernels_agree(build: Any, *arrays: Array, held: int = 0) -> None:
    """Compare each device, whose kernels must take every node, with onnx.reference.

    Args:
        build: Makes the results from values.
        *arrays: The operands.
        held: How many of them, the last ones, are weights.
    """
    count = len(arrays) - held
    inputs = [sg.input(f"x{k}", a.shape, a.dtype.name) for k, a in enumerate(arrays[:count])]
    weights = [sg.parameter(f"w{k}", a) for k, a in enumerate(arrays[count:])]
    made = build(*inputs, *weights)
    graph = sg.Graph(inputs, list(made) if isinstance(made, tuple) else [made])
    given = list(arrays[:count])
    expected = sg.compile_model(graph, "REFERENCE")(given)
    tolerance = 1e-2 if arrays[0].dtype == np.float16 else 1e-5
    for device in kernel_devices():
        placed = sg.default_core().query_model(graph, device)
        assert set(placed) == {node.name for node in graph.nodes}, placed.reasons
        model = sg.compile_model(graph, device)
        for _ in range(2):
            got = model(given)
            for k in range(len(graph.outputs)):
                assert got[k].dtype == expected[k].dtype
                np.testing.assert_allclose(got[k], expected[k], rtol=tolerance, atol=tolerance)


def result_of(
    op: Any, *arrays: Array, device: str = "CPU", threads: int = 1, **attributes: Any
) -> Array:
    """Return the first result of an operator, which the device must take.

    Args:
        op: The operator's function in ``subgraph.ops``.
        *arrays: Its operands.
        device: Where it runs.
        threads: Threads of the CPU device.
        **attributes: The operator's attributes.
    """
    inputs = [sg.input(f"x{k}", a.shape, str(a.dtype)) for k, a in enumerate(arrays)]
    graph = sg.Graph(inputs=inputs, outputs=[op(*inputs, **attributes)])
    assert set(sg.Core().query_model(graph, device).values()) == {device}
    config = {"INFERENCE_NUM_THREADS": threads} if device == "CPU" else {}
    return np.asarray(sg.compile_model(graph, device, config)(list(arrays))[0])
