"""What the tests of OPENCL share: whether there is a device, and graphs of one operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.errors import DeviceError
from subgraph.graph.types import Array, dtype_of
from subgraph.opencl.runtime import find_devices
from subgraph.operators.builder import operator


def missing() -> str:
    """Return why there is no OpenCL device, "" if there is one."""
    try:
        find_devices()
    except DeviceError as error:
        return str(error)
    return ""


needs_device = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a device")


@cache
def core() -> sg.Core:
    return sg.Core()


def random(*shape: int, dtype: str = "float32") -> Array:
    rng = np.random.default_rng([*shape, 7])
    return np.asarray(rng.standard_normal(shape)).astype(dtype)


def graph_of(
    op: str,
    arrays: Sequence[Array | None],
    constants: Sequence[int] = (),
    version: int = 0,
    outputs: int = 1,
    **attrs: Any,
) -> tuple[sg.Graph, list[Array]]:
    """Return one operator as a graph, and what its inputs get."""
    values: list[Any] = []
    inputs: list[Any] = []
    given: list[Array] = []
    for k, array in enumerate(arrays):
        if array is None:
            values.append(None)
        elif k in constants:
            values.append(sg.parameter(f"w{k}", array))
        else:
            values.append(sg.input(f"x{k}", array.shape, dtype_of(array)))
            inputs.append(values[-1])
            given.append(array)
    made = operator(op)(*values, outputs=outputs, version=version, name="tried", **attrs)
    results = list(made) if isinstance(made, tuple) else [made]
    return sg.Graph(inputs=inputs, outputs=results, name="case"), given
