"""Bound ports: the memory of the copies of small inputs and outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.executable.argument_layout import Patch, Port
from subgraph.engine.executable.bound_port import MAX_STAGED_BYTES, BoundPort
from subgraph.engine.executable.executable_plan import ExecutablePlan


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


def refuse(patch: Patch, words: Any, address: int) -> None:
    """Take the place of `Patch.put`, which allocates an array, when there is no memory."""
    raise MemoryError


@pytest.mark.plain_memory
def test_a_buffer_whose_address_was_not_written_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = np.zeros(1, np.int64)
    port = BoundPort(port_of(MAX_STAGED_BYTES), words)
    with monkeypatch.context() as own:
        own.setattr(Patch, "put", refuse)
        with pytest.raises(MemoryError):
            port.allocate_staging()
    assert port.allocate_staging().ctypes.data == words[0]


def test_a_weight_whose_address_was_not_written_is_fetched_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next run read it at the address 0."""
    refresh = ExecutablePlan.refresh
    plans: list[ExecutablePlan] = []

    def refused(self: ExecutablePlan, snapshot: Any) -> None:
        plans.append(self)
        with monkeypatch.context() as own:
            own.setattr(Patch, "put", refuse)
            refresh(self, snapshot)

    x, w = sg.input("x", (2, 8)), np.full((8, 8), 2, np.float32)
    graph = sg.Graph([x], [ops.MatMul(x, sg.parameter("w", w))])
    model = sg.compile_model(graph, "CPU", {"RUNTIME_FALLBACK": False})
    given = np.ones((2, 8), np.float32)
    with monkeypatch.context() as own:
        own.setattr(ExecutablePlan, "refresh", refused)
        with pytest.raises(sg.DeviceError, match="MemoryError"):
            model(given)
    assert plans[0]._entry_arrays == [None]  # otherwise the next run would crash
    np.testing.assert_array_equal(model(given)[0], np.full((2, 8), 16, np.float32))
