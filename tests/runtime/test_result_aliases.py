"""Results are the caller's own: none is in the memory of an input, whatever hands it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg

_HANDED_ON: dict[str, Callable[[sg.Value], sg.Value]] = {
    "input": lambda x: x,
    "identity": lambda x: sg.ops.Identity(x),
    "reshape": lambda x: sg.ops.Reshape(x, np.array([3, 2])),
    "slice": lambda x: sg.ops.Slice(x, np.array([1]), np.array([2])),
    "transpose": lambda x: sg.ops.Transpose(x),
    "sequence": lambda x: sg.ops.SequenceAt(sg.ops.SequenceConstruct(x), np.array(0)),
    "list": lambda x: sg.ops.SequenceConstruct(x),
}


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE", "AUTO"])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("name", _HANDED_ON)
def test_a_result_is_not_in_the_memory_of_an_input(name: str, beside: bool, device: str) -> None:
    x = sg.input("x", (2, 3))
    outputs = [_HANDED_ON[name](x), *([sg.ops.Relu(x)] if beside else [])]
    model = sg.compile_model(sg.Graph([x], outputs), device)
    given = np.arange(6, dtype=np.float32).reshape(2, 3)
    for _ in range(2):
        for result in (model(given)[0], model.create_infer_request().infer([given])[0]):
            array: Any = result[0] if isinstance(result, list) else result
            assert not np.shares_memory(array, given)
            array[...] = -1
    assert given.tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("dtype", [">f4", "<f4"])
def test_an_output_may_be_written_in_either_byte_order(dtype: str, device: str) -> None:
    x = sg.input("x", (3,))
    request = sg.compile_model(sg.Graph([x], [sg.ops.Relu(x)]), device).create_infer_request()
    target = np.zeros(3, dtype)
    request.set_output(0, target)
    request.infer(np.array([-1, 2, 3], np.float32))
    assert target.dtype == np.dtype(dtype)
    assert target.tolist() == [0, 2, 3]
