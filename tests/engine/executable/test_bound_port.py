"""Bound ports: the memory of the copies of small inputs and outputs."""

from __future__ import annotations

import numpy as np
import pytest

from subgraph.engine.executable.argument_layout import Patch, Port
from subgraph.engine.executable.bound_port import BoundPort


def port_of(size: int) -> Port:
    """Return a port of float32 numbers whose address the first word holds."""
    patch = Patch(np.array([0], np.intp), np.array([0], np.int64))
    return Port(0, "float32", (size,), 4 * size, patch)


@pytest.mark.plain_memory
def test_a_port_keeps_its_memory_while_it_has_room() -> None:
    words = np.zeros(1, np.int64)
    port = BoundPort(port_of(8), words)
    places: list[int] = []
    for size in (9, 10, 16, 17, 3):
        port.resize((size,), 4 * size, None)
        staging = port.allocate_staging()
        assert staging.shape == (size,)
        assert words[0] == staging.ctypes.data
        assert words[0] % 64 == 0
        places.append(int(words[0]))
    # It grew from 8 to 18 numbers once; a smaller port uses the same memory.
    assert len({*places}) == 1
