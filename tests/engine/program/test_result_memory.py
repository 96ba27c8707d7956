"""Results of several kilobytes take memory again that the caller has let go of, and no other."""

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.program.result_memory import ResultMemory
from subgraph.graph.types import Array

SIDE = 128


def request() -> sg.InferRequest:
    x = sg.input("x", shape=("N", SIDE), dtype="float32")
    graph = sg.Graph(inputs=[x], outputs=[ops.Add(x, x)], name="twice")
    return sg.Core().compile_model(graph, "CPU").create_infer_request()


def given(value: int, rows: int = SIDE) -> Array:
    return np.full((rows, SIDE), value, np.float32)


def only(results: Any) -> Array:
    (array,) = results.values()
    assert isinstance(array, np.ndarray)
    return array


def test_results_that_are_held_stay_as_they_were() -> None:
    running = request()
    held = [only(running.infer([given(k)])) for k in range(8)]
    for k, array in enumerate(held):
        np.testing.assert_array_equal(array, given(2 * k))


@pytest.mark.parametrize(
    "look",
    [
        lambda array: array[3:, ::2],
        lambda array: array.T.reshape(-1)[5:],
        lambda array: np.asarray(memoryview(array)),
        lambda array: np.from_dlpack(array),
    ],
    ids=["slice", "copy or view", "buffer", "dlpack"],
)
def test_what_looks_at_a_result_keeps_its_memory(look: Any) -> None:
    running = request()
    seen = []
    for k in range(6):
        seen.append(look(only(running.infer([given(k)]))))
        running.infer([given(100)])
    for k, array in enumerate(seen):
        assert (array == 2 * k).all()


def test_memory_is_used_again_once_nobody_looks() -> None:
    running = request()
    addresses: list[int] = []
    for k in range(12):
        result = only(running.infer([given(k)]))
        addresses.append(result.ctypes.data)
        result += 1  # the caller's own
        np.testing.assert_array_equal(result, given(2 * k + 1))
    assert len(set(addresses[2:])) <= 2


def test_another_shape_gets_memory_of_its_own() -> None:
    running = request()
    held = [only(running.infer([given(k, rows)])) for rows in (128, 64, 200) for k in range(4)]
    for array, value in zip(held, list(range(4)) * 3, strict=True):
        np.testing.assert_array_equal(array, given(2 * value, array.shape[0]))


@pytest.mark.plain_memory
def test_only_what_is_worth_it_is_kept() -> None:
    small = ResultMemory((4,), np.dtype(np.float32), 16)
    large = ResultMemory((64, 64), np.dtype(np.float32), 1 << 14)
    assert all(small.take().base is None for _ in range(4))
    assert large.take().base is None, "what is asked for once is not kept"
    assert large.take().base is not None
