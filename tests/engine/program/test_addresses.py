"""Addresses of arrays of every kind are those that NumPy gives."""

from __future__ import annotations

import numpy as np
import pytest

from subgraph.engine.program.addresses import address_of
from subgraph.graph.types import Array, numpy_dtype


def read_only() -> Array:
    array = np.arange(6.0)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 4), np.float32)[1:],
        np.array(3.5),
        np.zeros((0, 4), np.int64),
        read_only(),
        np.zeros(5, numpy_dtype("bfloat16")),
        np.zeros(5, np.float16),
        np.zeros(5, np.bool_),
        np.zeros(5, np.complex64),
        np.frombuffer(b"abcdef", np.uint8),
    ],
    ids=str,
)
def test_address_of(array: Array) -> None:
    assert address_of(array) == array.ctypes.data
